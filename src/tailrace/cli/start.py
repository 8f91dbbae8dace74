"""Where the program begins: handles signals while the rest is still being imported.

Importing takes a moment. A signal that comes then ends the program as a later one would, without a traceback
and with the same exit code; there is nothing to clean up yet.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["interrupted_code", "main"]


def interrupted_code(arguments: Sequence[str]) -> int:
    """The exit code on Ctrl-C, which stops a node as intended and interrupts all other commands."""
    words = iter(arguments)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("-"):
            return 0 if word == "serve" else 130
    return 130


def main() -> int:
    """Import the program, then run it."""
    # signals that are ignored stay ignored
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(interrupted_code(sys.argv[1:])))
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(0))
    from .main import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
