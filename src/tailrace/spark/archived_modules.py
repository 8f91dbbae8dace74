"""Faster starts of tasks where Spark's Python modules are in a zip file.

Before every task a worker invalidates Python's import caches. Python then reads the whole directory of an
archive again, once for the archive and once for every package in it that something was imported from: with
pyspark in a zip file that takes 0.05 to 0.1 s, twice or more in every micro-batch.

Workers that `tailrace-python` starts don't have the zip file; those of sessions with another Python do.
"""

from __future__ import annotations

import sys
from zipimport import zipimporter

__all__ = ["forget_packages_in_archives"]


def forget_packages_in_archives() -> None:
    """Drop the importers of packages inside archives from Python's cache, which may be done at any time.

    The importers of the archives themselves stay, and still read their archive again before a task; the
    others are made from them when they are needed.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter) and finder.prefix:
            sys.path_importer_cache.pop(path, None)
