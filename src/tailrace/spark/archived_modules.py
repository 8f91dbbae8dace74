"""Tasks that begin at once, although Spark's Python lies in a zip file.

Before every task a worker has Python forget what it knows of folders and archives. Python then reads the
whole directory of an archive again, for the archive and once more for every package in it of which something
was imported: with pyspark in a zip file that is 0.05 to 0.1 s, twice or more in every micro-batch.

Where `tailrace-python` starts them the zip file is not there; in sessions that name another Python it is.
"""

from __future__ import annotations

import sys
from zipimport import zipimporter

__all__ = ["forget_packages_in_archives"]


def forget_packages_in_archives() -> None:
    """Drop what finds modules inside packages of archives, as Python's own cache of it allows at any time.

    What finds the packages themselves stays, and still reads its archive again before a task; the others are
    made of that when they are needed.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter) and finder.prefix:
            sys.path_importer_cache.pop(path, None)
