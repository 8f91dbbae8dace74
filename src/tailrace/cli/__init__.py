"""The command line: one file per command. Only this layer reads argv and the environment.

To add a command ``foo``, write ``foo.py`` with a function ``command`` made by `common.command`, add one line
to `main.COMMANDS`, and run ``make docs``. Heavy imports (pyarrow, pyspark, numpy) belong inside the function.
"""
