"""The reason why a streaming query failed, repeated at the end of its error text.

After the reason Spark prints a page of offsets, states and the plan. A traceback ends with the text of its
error, so on a terminal or in a job's log that page is all that people see.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["end_with_the_reason", "with_the_reason_last"]

_REASON = re.compile(r"(tailrace\.errors\.\w+: .*?)(?: SQLSTATE: \w+)*$", re.MULTILINE)
_PAGE = "\n=== Streaming Query ===\n"
_MODULES = ("pyspark.errors.exceptions.captured", "pyspark.errors.exceptions.connect")


def end_with_the_reason() -> None:
    """Make the text of a query's failure end with our error, if it is ours, in this process."""
    for name in _MODULES:
        failure = getattr(sys.modules.get(name), "StreamingQueryException", None)
        if failure is not None and "__str__" not in vars(failure):
            failure.__str__ = _ends_with_the_reason(failure.__str__)


def _ends_with_the_reason(plain: Callable[[Any], str]) -> Callable[[Any], str]:
    def text_of(failure: Any) -> str:
        return with_the_reason_last(plain(failure))

    return text_of


def with_the_reason_last(text: str) -> str:
    """The text of a failed query, with our error below Spark's page."""
    message, page, _ = text.partition(_PAGE)
    reasons = _REASON.findall(message)
    return f"{text.rstrip()}\n\n{reasons[-1]}" if page and reasons else text
