"""Errors that rise to the top: what is wrong, and nothing else.

Spark carries an exception of a Python process to the user as text, with the traceback of that process before
it: of a client that works in threads and callbacks that is a hundred lines, and what is wrong is the last of
them. Our own errors say what to do and need no traceback, so it is taken off. Spark itself leaves its part
off if told so by an environment variable of the process, and after an error it ends the process.

Spark's Java side puts a code behind the text, ``SQLSTATE: 38000``. Python ends the text of an exception with
a line break, so that the code would be the last line that people see, and what is wrong the one before.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ...errors import ProtocolError, TailraceError

__all__ = ["plain_errors"]

_HIDE = "SPARK_HIDE_TRACEBACK"


@contextmanager
def plain_errors() -> Iterator[None]:
    """In a process of Spark's: our own errors leave the block without a history."""
    try:
        yield
    except ProtocolError:
        raise
    except TailraceError as error:
        os.environ[_HIDE] = "1"
        _without_a_line_break()
        raise error.bare() from None


def _without_a_line_break() -> None:
    """Where Spark formats the exception that ends its process, no line break ends the text."""
    if (module := sys.modules.get("pyspark.util")) is None or not hasattr(module, "traceback"):
        return

    def format_exception_only(*exception: Any) -> list[str]:
        return ["".join(traceback.format_exception_only(*exception)).rstrip("\n")]

    formatting = SimpleNamespace(**vars(traceback))
    formatting.format_exception_only = format_exception_only
    module.traceback = formatting  # type: ignore[attr-defined]
