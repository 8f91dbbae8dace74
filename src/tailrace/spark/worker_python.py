"""The Python that Spark starts, ready three times sooner.

Spark puts a zip file of its own Python part first on the path of every Python process, and nothing in it is
compiled: each start compiles the same modules again, 0.6 s of a core, and each task has the directory of the
archive read again. The very same files lie unpacked in the package that was installed, with their compiled
twins. So `tailrace-python`, which `tailrace.spark.session` names to Spark as ``PYSPARK_PYTHON``, takes the
zip file off the path if it belongs to the pyspark of this environment, and becomes this environment's Python.

Imports next to nothing: this is the price of each start.
"""

from __future__ import annotations

import os
import sys

__all__ = ["COMMAND", "main", "path_without_archive", "python_of_workers"]

COMMAND = "tailrace-python"
ARCHIVE = "/pyspark/python/lib/pyspark.zip"


def main() -> None:
    """Be Python, with Spark's modules from where they are compiled."""
    path = os.environ.get("PYTHONPATH")
    if path:
        os.environ["PYTHONPATH"] = path_without_archive(path, sys.path)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def python_of_workers() -> str:
    """This Python, behind the command that has it start quickly; or this Python, if that is not installed."""
    from pathlib import Path

    quick = Path(sys.executable).with_name(COMMAND)
    return str(quick) if os.access(quick, os.X_OK) else sys.executable


def path_without_archive(path: str, known: list[str]) -> str:
    """A ``PYTHONPATH`` without Spark's zip file, if the folder with the same modules is ``known``.

    An installed pyspark is its own ``SPARK_HOME``, and its archive lies inside the package. Any other Spark
    brings modules of its own, which may be of another version: they stay.
    """
    folders = {os.path.realpath(folder) for folder in known}
    kept = []
    for entry in path.split(os.pathsep):
        before, archive, after = entry.rpartition(ARCHIVE)
        same_modules = archive and not after and os.path.realpath(before) in folders
        if not same_modules:
            kept.append(entry)
    return os.pathsep.join(kept)
