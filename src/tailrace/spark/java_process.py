"""Spark's Java process, when it is gone: PySpark then says that a connection was refused, and not whose."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator

from ..errors import SparkLost

__all__ = ["lost_java"]

_NETWORK_ERRORS = ("Py4JNetworkError", "AnswerNotReceived")
"""Of py4j, by their names: where there is a remote session only, py4j is not installed."""


def lost_java(error: BaseException) -> SparkLost | None:
    """What to say of an error that means that Spark's Java process does not answer; None for any other."""
    if not any(_is_of_the_gateway(inner) for inner in _chain(error)):
        return None
    return SparkLost(
        f"Spark's Java process {_end_of_java()}; start again, nothing that was committed is lost. If the "
        "system ran out of memory, give Spark less (spark.driver.memory) or the machine more"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those behind it, each once: a chain may lead back to where it began."""
    seen: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and not any(inner is earlier for earlier in seen):
        seen.append(inner)
        yield inner
        inner = inner.__cause__ or inner.__context__


def _is_of_the_gateway(error: BaseException) -> bool:
    if type(error).__name__ in _NETWORK_ERRORS:
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, OSError | EOFError) and any(
        str(frame.f_globals.get("__name__", "")).startswith("py4j.") for frame, _ in frames
    )


def _end_of_java() -> str:
    """How it ended, if this process started it."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    code = None if process is None else process.poll()
    if code is None:
        return "does not answer any more"
    if code < 0:
        return f"was killed ({signal.Signals(-code).name})"
    return f"ended with {code}"
