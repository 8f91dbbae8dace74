"""Errors that rise to the top: what is wrong, and nothing else.

Spark carries an exception of a Python process to the user as text, with the traceback of that process before
it: of a client that works in threads and callbacks that is a hundred lines, and what is wrong is the last of
them. Our own errors say what to do and need no traceback, so it is taken off. Spark itself leaves its part
off if told so by an environment variable of the process, and after an error it ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
        raise error.bare() from None
