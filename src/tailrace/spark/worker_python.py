"""The Python that Spark starts for its workers, made to start three times faster.

Spark puts a zip file of its own Python modules first on the path of every Python process, and nothing in it
is compiled: each start compiles the same modules again, 0.6 s of a core, and each task reads the directory of
the archive again. The installed package has the same files unpacked and compiled. So `tailrace-python`, which
`tailrace.spark.session` gives to Spark as ``PYSPARK_PYTHON``, takes the zip file off the path if it belongs
to the pyspark of this environment, and becomes this environment's Python.

It imports as little as possible, because every start pays for it.
"""

from __future__ import annotations

import os
import sys

__all__ = ["COMMAND", "main", "path_without_archive", "python_of_workers"]

COMMAND = "tailrace-python"
ARCHIVE = "/pyspark/python/lib/pyspark.zip"


def main() -> None:
    """Become Python, with Spark's compiled modules on the path."""
    path = os.environ.get("PYTHONPATH")
    if path:
        os.environ["PYTHONPATH"] = path_without_archive(path, sys.path)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def python_of_workers() -> str:
    """The command that starts this Python quickly, or this Python itself if the command is not installed."""
    from pathlib import Path

    quick = Path(sys.executable).with_name(COMMAND)
    return str(quick) if os.access(quick, os.X_OK) else sys.executable


def path_without_archive(path: str, known: list[str]) -> str:
    """A ``PYTHONPATH`` without Spark's zip file, if the folder with the same modules is ``known``.

    An installed pyspark is its own ``SPARK_HOME`` and has the archive inside the package. The archive of any
    other Spark stays on the path: its modules may be of another version.
    """
    folders = {os.path.realpath(folder) for folder in known}
    kept = []
    for entry in path.split(os.pathsep):
        before, archive, after = entry.rpartition(ARCHIVE)
        same_modules = archive and not after and os.path.realpath(before) in folders
        if not same_modules:
            kept.append(entry)
    return os.pathsep.join(kept)
