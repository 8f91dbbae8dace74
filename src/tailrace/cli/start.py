"""Where the program begins: what Ctrl-C does before anything is there that could handle it.

Importing the program takes a moment. An interrupt within it ends the program like any other, without a
traceback; there is nothing to clean up yet.
"""

from __future__ import annotations

import os
import signal

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> int:
    """Import the program, then run it."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where it is ignored
    if is_default:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(_INTERRUPTED))
    from .main import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
