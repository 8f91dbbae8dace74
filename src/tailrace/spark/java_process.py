"""Errors for when Spark's Java process is gone: PySpark only says that some connection was refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import traceback
from collections.abc import Iterator
from typing import IO

from ..errors import SparkLost

__all__ = ["check_java", "listen_to", "lost_java"]

_ENDING_S = 1.0
"""How long to wait for the exit code: a process that ends closes its connections before it has one."""
_REASON = re.compile(
    rb"^(?:Caused by: |Exception in thread .*? )?(java[\w.$]*(?:Error|Exception): \S.*)", re.MULTILINE
)
_READ, _SHOWN = 1 << 16, 300

_NETWORK_ERRORS = ("Py4JNetworkError", "AnswerNotReceived")
"""Errors of py4j by name: with remote sessions only, py4j may not be installed."""


_stderr: list[IO[bytes]] = []


def listen_to(stderr: IO[bytes]) -> None:
    """Set the file that holds Java's stderr; it stays open, since Java runs as long as this program."""
    _stderr[:] = [stderr]


def lost_java(error: BaseException) -> SparkLost | None:
    """The error to report if ``error`` means that Spark's Java process does not answer; None otherwise."""
    if not any(_is_of_the_gateway(inner) for inner in _chain(error)):
        return None
    return _lost()


def check_java() -> None:
    """Raise if the Java that this process started has ended: without a job for it nobody would notice."""
    process = _process()
    if process is not None and process.poll() is not None:
        raise _lost()


def _lost() -> SparkLost:
    """The error, with how Java ended if this process started it, and why if its stderr says so."""
    process = _process()
    try:
        code = None if process is None else process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        code = None
    if code is None:
        end = "does not answer any more"
    elif name := _signal_of(code):
        end = f"was killed ({name})"
    elif reason := _last_words():
        return SparkLost(
            f"Spark's Java process ended with {code} ({reason}); start again when that is fixed, nothing "
            "that was committed is lost"
        )
    else:
        end = f"ended with {code}"
    return SparkLost(
        f"Spark's Java process {end}; start again, nothing that was committed is lost. If the system ran out "
        "of memory, give Spark less (spark.driver.memory) or the machine more"
    )


def _signal_of(code: int) -> str:
    """The signal that ended a process; Java catches some signals and exits with 128 + the number."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:  # no signal, or one of those that have no name
        return f"signal {number}" if code < 0 else ""


def _process() -> subprocess.Popen[bytes] | None:
    import pyspark

    context = getattr(pyspark, "SparkContext", None)  # the client of Spark Connect alone has none
    return getattr(getattr(context, "_gateway", None), "proc", None)


def _last_words() -> str:
    for stderr in _stderr:
        stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - _READ))
        if reasons := _REASON.findall(stderr.read()):
            return str(reasons[-1].decode(errors="replace")[:_SHOWN])
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, each once: a chain may be a cycle."""
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
