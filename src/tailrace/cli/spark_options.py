"""What commands that run on Spark share."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..connstr import ConnectionString
from ..errors import TailraceError, UsageError
from ..files import scratch_file
from ..paths import location
from .common import DURATION, SIZE, ProgramRun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "collection_paths",
    "explained_query_error",
    "java_may_be_gone",
    "need_spark",
    "open_spark",
    "parse_storage_options",
    "source_options_of",
    "spark_options",
    "storage_option",
    "undo_options",
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


def storage_option(function: F) -> F:
    """``--storage-option``, as ``storage_options``; see `parse_storage_options`."""
    return click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Option for a table on s3://, gs:// or az://, besides the environment's; may be repeated.",
    )(function)


def parse_storage_options(texts: tuple[str, ...]) -> dict[str, str]:
    """The options of `storage_option` as a dictionary; errors never show values, which may be secrets."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError("--storage-option must be NAME=VALUE, such as aws_region=eu-west-1")
        options[name] = value
    return options


def undo_options(function: F) -> F:
    """``--undo`` and ``--undo-size``."""
    for option in (
        click.option(
            "--undo-size",
            type=SIZE,
            help="Keep at most this many bytes of earlier versions.  [default: the size of the table]",
        ),
        click.option(
            "--undo",
            type=DURATION,
            help="How long earlier versions are kept, for rollbacks.  [default: 24h]",
        ),
    ):
        function = option(function)
    return function


def need_spark() -> None:
    """Raise if a package that Spark needs here is missing, before anything is started."""
    import obstore  # noqa: F401
    import pyroaring  # noqa: F401
    import pyspark  # noqa: F401


@contextlib.contextmanager
def open_spark(master: str | None, conf: tuple[str, ...], *, name: str) -> Iterator[SparkSession]:
    """A Spark session, silent unless ``--debug`` is given, and stopped at the end."""
    need_spark()
    from ..spark.spark_session import prepare_environment, session

    debug = click.get_current_context().ensure_object(ProgramRun).debug
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "WARN" if debug else "ERROR",
    }
    for text in conf:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise UsageError("--conf must be NAME=VALUE, such as spark.driver.memory=2g")
        settings[key] = value
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    prepare_environment()
    with contextlib.nullcontext() if debug else _quiet_python():
        if not debug and "SPARK_REMOTE" not in os.environ:
            with _signals_wait():
                _start_quiet_java(settings)
        with _own_interrupt_handler():
            spark = session(name, master=master, **settings)
        if not debug:
            _quiet_accumulators()
        try:
            yield spark
        finally:
            with java_may_be_gone():
                spark.stop()


@contextlib.contextmanager
def _quiet_python() -> Iterator[None]:
    """While the block runs, only we log: Spark logs the traceback of every call that is interrupted."""

    def is_ours(record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] == "tailrace"

    handlers = logging.root.handlers[:]
    others = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] != "tailrace" and not logger.disabled
    ]
    for handler in handlers:
        handler.addFilter(is_ours)
    for logger in others:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in others:
            logger.disabled = False
        for handler in handlers:
            handler.removeFilter(is_ours)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold back stop signals until the block is done: a Java left alone while it starts never ends."""
    received: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda which, _frame: received.append(which))
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
        for which in received[:1]:
            signal.raise_signal(which)


@contextlib.contextmanager
def _own_interrupt_handler() -> Iterator[None]:
    """Keep Ctrl-C to ourselves: Spark's handler would call Java in the middle of another call."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def java_may_be_gone() -> Iterator[None]:
    """Ignore a lost Java at the end of a run: a service manager stops all processes together."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    with contextlib.suppress(Py4JError, OSError, EOFError):
        yield


def _quiet_accumulators() -> None:
    """Silence Spark's accumulator server: it prints a traceback when Java is gone, as our error says."""
    import pyspark

    context = getattr(getattr(pyspark, "SparkContext", None), "_active_spark_context", None)
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda _request, _client: None


def _start_quiet_java(settings: Mapping[str, str]) -> None:
    """Start Spark's Java with its stderr in a file: no logging configuration is early enough to keep the
    warnings of Java, and of the Python workers below it, off the terminal.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    from ..spark.java_process import listen_to

    if SparkContext._gateway is not None:
        return
    printed = scratch_file()
    listen_to(printed)
    try:
        conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        # a signal to our process group (`timeout`, a shell's `kill %1`) must not reach Java: we stop it
        how = {"stderr": printed, "start_new_session": True}
        gateway = launch_gateway(conf, how)  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as error:
        printed.seek(0)
        lines = printed.read().decode(errors="replace").strip().splitlines()
        why = next((line.strip() for line in lines if "rror" in line), str(error).rstrip("."))
        raise TailraceError(f"Java did not start for Spark: {why}, see --debug for all of it") from error
    SparkContext._ensure_initialized(gateway=gateway)


def source_options_of(url: ConnectionString, tls: dict[str, Any], more: dict[str, str]) -> dict[str, str]:
    """Options of the Spark source from those of a command."""
    from ..spark.api import source_options

    if tls["tls_no_verify"] and url.tls:
        url = replace(url, verify=False)
    options = source_options(url)
    for option, name in (("tls_ca", "tlsCaFile"), ("tls_cert", "tlsClientCert"), ("tls_key", "tlsClientKey")):
        if tls.get(option):
            options[name] = str(tls[option])
    return {**options, **more}


def collection_paths(table: str, collections: tuple[str, ...]) -> str | dict[str, str]:
    """TABLE alone, or TABLE as the folder of one table per collection."""
    if not collections:
        return table
    uris = {}
    for text in collections:
        path, equals, uri = text.partition("=")
        uris[path] = location(uri, f"the table of {path}").text if equals else f"{table}/{path}"
    return uris


def explained_query_error(error: BaseException) -> TailraceError:
    """Why a query stopped, as one line: the innermost of our own errors that Spark wrapped up."""
    from ..spark.java_process import lost_java
    from ..spark.rounds.jobs import own_error, what_failed

    own = own_error(error) or lost_java(error)
    if own is not None:
        return own
    return TailraceError(f"the query stopped: {what_failed(error)}, see --debug for all of it")
