"""Python sources as syntax trees, for the tests that look at code.

`ast.parse` of Python before 3.11.8 fails with "AST constructor recursion depth mismatch" if the garbage
collector runs meanwhile and finds a generator that has something to finish. So it is switched off here.
"""

from __future__ import annotations

import ast
import gc

__all__ = ["parse"]


def parse(code: str) -> ast.Module:
    """`ast.parse`, whatever other tests have left to be collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(code)
    finally:
        if was_enabled:
            gc.enable()
