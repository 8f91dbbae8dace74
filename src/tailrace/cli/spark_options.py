"""What the commands share that run on Spark."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..connstr import ConnectionString
from ..errors import TailraceError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["collection_paths", "explained_query_error", "open_spark", "source_options_of", "spark_options"]

F = TypeVar("F", bound=Callable[..., Any])


def spark_options(function: F) -> F:
    """``--master`` and ``--conf``; pass them on to `open_spark`."""
    for option in (
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A Spark setting; may be repeated."),
        click.option("--master", metavar="URL", help="The Spark master.  [default: this machine]"),
    ):
        function = option(function)
    return function


@contextlib.contextmanager
def open_spark(master: str | None, conf: tuple[str, ...], *, name: str) -> Iterator[SparkSession]:
    """A Spark session that says little; stopped at the end."""
    try:
        import deltalake  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed; run: pip install 'tailrace[spark]'") from None
    from ..spark.session import session

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
    }
    for text in conf:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--conf is {text!r}, but must be NAME=VALUE")
        settings[key] = value
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    spark = session(name, master=master, **settings)
    try:
        yield spark
    finally:
        spark.stop()


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
