"""The log: standard logging, one line per event that matters, as text or as JSON.

An event has a name and facts, which never include a document's value or a password:

    log_event(_log, logging.WARNING, "login_refused", user="ada", peer="127.0.0.1:51000")

    2026-01-31T12:00:00.123Z WARNING tailrace.server: login_refused user=ada peer=127.0.0.1:51000
    {"time":"2026-01-31T12:00:00.123Z","level":"WARNING","logger":"tailrace.server","event":"login_refused",…}
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any

__all__ = ["LEVELS", "configure_logging", "event_text", "log_event"]

LEVELS = ("debug", "info", "warning", "error")
_EVENT, _FACTS = "tailrace_event", "tailrace_facts"
_MAX_TEXT = 500


def log_event(log: logging.Logger, level: int, event: str, **facts: object) -> None:
    """Log one line: what happened, and to whom."""
    if log.isEnabledFor(level):
        log.log(level, "%s", event_text(event, facts), extra={_EVENT: event, _FACTS: facts})


def event_text(event: str, facts: Mapping[str, object]) -> str:
    """An event as people read it."""
    return " ".join([event, *(f"{name}={_shown(value)}" for name, value in facts.items())])


def _shown(value: object) -> str:
    """A fact on one line, whatever a peer has put into it."""
    text = str(value)[:_MAX_TEXT]
    if text and text.isprintable() and not set(text) & set(" \"'="):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _time(record: logging.LogRecord) -> str:
    text = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


class _TextLines(logging.Formatter):
    """Lines of time, level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not message.isprintable():  # it may have text of a peer, which must not forge a line
            message = json.dumps(message)[1:-1]
        text = f"{_time(record)} {record.levelname} {record.name}: {message}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonObjects(logging.Formatter):
    """One JSON object per line; each fact of an event is a member."""

    def format(self, record: logging.LogRecord) -> str:
        event: str | None = getattr(record, _EVENT, None)
        content: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            **({} if event is None else {"event": event}),
            "message": record.getMessage(),
        }
        for name, value in getattr(record, _FACTS, {}).items():
            plain = isinstance(value, int | str | bool | type(None))
            plain = plain or (
                isinstance(value, float) and math.isfinite(value)
            )  # JSON has no NaN and no infinities
            content.setdefault(name, value if plain else str(value))
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        # ASCII: a stream that can't encode more would add escapes of its own
        return json.dumps(content, separators=(",", ":"))


def configure_logging(stream: IO[str], level: str, *, as_json: bool) -> None:
    """Log to a stream: our own records from this level on, those of others from warnings on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonObjects() if as_json else _TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tailrace").setLevel(level.upper())
