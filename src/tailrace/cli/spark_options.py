"""What the commands share that run on Spark."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from ..connstr import ConnectionString
from ..errors import TailraceError, UsageError
from .common import Session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "collection_paths",
    "explained_query_error",
    "need_spark",
    "open_spark",
    "source_options_of",
    "spark_options",
]

F = TypeVar("F", bound=Callable[..., Any])


def spark_options(function: F) -> F:
    """``--master`` and ``--conf``; pass them on to `open_spark`."""
    for option in (
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A Spark setting; may be repeated."),
        click.option("--master", metavar="URL", help="The Spark master.  [default: this machine]"),
    ):
        function = option(function)
    return function


def need_spark() -> None:
    """What the pipeline needs is said to be missing before anything is begun."""
    import deltalake  # noqa: F401
    import pyspark  # noqa: F401


@contextlib.contextmanager
def open_spark(master: str | None, conf: tuple[str, ...], *, name: str) -> Iterator[SparkSession]:
    """A Spark session that says nothing unless ``--debug`` is given; stopped at the end."""
    need_spark()
    from ..spark.starting import prepare_environment, session

    debug = click.get_current_context().ensure_object(Session).debug
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "WARN" if debug else "ERROR",
    }
    for text in conf:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--conf is {text!r}, but must be NAME=VALUE")
        settings[key] = value
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    prepare_environment()
    with tempfile.TemporaryFile() as said:
        if not debug and "SPARK_REMOTE" not in os.environ:
            _start_quiet_java(settings, said)
        spark = session(name, master=master, **settings)
        try:
            yield spark
        finally:
            spark.stop()


def _start_quiet_java(settings: Mapping[str, str], said: IO[bytes]) -> None:
    """Start Spark's Java with its stderr in a file: no logging set-up is early enough to keep Java's own
    warnings, and those of the Python workers below it, out of what people look at.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    try:
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        gateway = launch_gateway(conf, {"stderr": said})  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as error:
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        why = next((line.strip() for line in lines if "rror" in line), str(error))
        raise TailraceError(f"Java did not start for Spark: {why}, see --debug for all of it") from error
    SparkContext._ensure_initialized(gateway=gateway)


def source_options_of(url: ConnectionString, tls: dict[str, Any], more: dict[str, str]) -> dict[str, str]:
    """Options of the Spark source from those of a command."""
    from ..spark.api import source_options

    found = source_options(url)
    for option, name in (("tls_ca", "tlsCaFile"), ("tls_cert", "tlsClientCert"), ("tls_key", "tlsClientKey")):
        if tls.get(option):
            found[name] = tls[option]
    return {**found, **more}


def collection_paths(table: str, collections: tuple[str, ...]) -> str | dict[str, str]:
    """TABLE alone, or TABLE as the folder of one table per collection."""
    if not collections:
        return table
    found = {}
    for text in collections:
        path, equals, uri = text.partition("=")
        found[path] = uri if equals else f"{table.rstrip('/')}/{path}"
    return found


def explained_query_error(error: BaseException) -> TailraceError:
    """Why a query stopped, as one line: the innermost of our own errors that Spark wrapped up."""
    text = str(error)
    for line in reversed(text.splitlines()):
        stripped = line.strip()
        name, colon, what = stripped.partition(": ")
        if colon and name.startswith("tailrace.") and what:
            return TailraceError(what)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return TailraceError(f"the query stopped: {first.strip()[:500]}, see --debug for all of it")
