"""Our own errors as Spark shows them: without a traceback.

Spark passes an exception of a Python process to the user as text, after the traceback of that process. For a
client that works in threads and callbacks that is a hundred lines, with the error in the last one. Our own
errors say what to do and need no traceback, so it is removed. Spark leaves out its own part if an environment
variable of the process says so; after an error it ends the process.

Spark's Java side appends a code to the text, ``SQLSTATE: 38000``. Python ends the text of an exception with a
line break, which would leave the code alone on the last line, below the error.
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
    """Strip the traceback and causes off our own errors that leave the block; for a process of Spark's."""
    try:
        yield
    except ProtocolError:
        raise
    except TailraceError as error:
        os.environ[_HIDE] = "1"
        _without_a_line_break()
        raise error.bare() from None


def _without_a_line_break() -> None:
    """Make Spark format the exception that ends its process without a line break at the end."""
    if (module := sys.modules.get("pyspark.util")) is None or not hasattr(module, "traceback"):
        return

    def format_exception_only(*exception: Any) -> list[str]:
        return ["".join(traceback.format_exception_only(*exception)).rstrip("\n")]

    formatting = SimpleNamespace(**vars(traceback))
    formatting.format_exception_only = format_exception_only
    module.traceback = formatting  # type: ignore[attr-defined]
