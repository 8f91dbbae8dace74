"""Events as lines for people: one line per event, short, and safe to show on a terminal.

07:16:01.123  set       7:12   user::1  {"name":"Ada"}
07:16:04.730  delete    7:13   user::1
              rollback  7:12   on branch 998: undo what lies above
"""

from __future__ import annotations

from datetime import datetime

from .events import (
    Aborted,
    Change,
    Committed,
    Deletion,
    DurableWrite,
    Event,
    Expiration,
    Flush,
    Mutation,
    Prepared,
    Rollback,
    SeqnoAdvanced,
    Snapshot,
    StreamEnd,
    SystemEvent,
)

__all__ = ["TextLines"]

_COLOURS = {
    "set": "32",
    "delete": "31",
    "expire": "33",
    "prepare": "33",
    "commit": "32",
    "abort": "31",
    "rollback": "1;35",
    "flush": "1;35",
    "system": "36",
    "end": "2",
    "snapshot": "2",
    "advanced": "2",
}
_VALUE_BYTES = 4_096


class TextLines:
    """Writes events as text; ``width`` cuts lines to a terminal's, 0 leaves them as they are."""

    def __init__(self, *, colour: bool = False, width: int = 0, verbose: bool = False) -> None:
        self._colour = colour
        self._width = width
        self._verbose = verbose

    def line(self, event: Event) -> bytes:
        """The line of an event, with its line feed; empty for events that only scripts need."""
        match event:
            case Mutation():
                text = self._made("set", event, f"{_shown(event.key)}  {_value(event.value)}", event.cas)
            case Deletion():
                text = self._made("delete", event, _shown(event.key), event.cas)
            case Expiration():
                text = self._made("expire", event, _shown(event.key), event.cas)
            case Prepared():
                what = "delete" if event.deleted else _value(event.value)
                text = self._made("prepare", event, f"{_shown(event.key)}  {what}", event.cas)
            case Committed() | Aborted():
                word = "commit" if isinstance(event, Committed) else "abort"
                text = self._made(word, event, f"{_shown(event.key)}  of {event.prepared_seqno}")
            case Rollback():
                text = self._made("rollback", event, f"on branch {event.vb_uuid}: undo what lies above")
            case Flush():
                text = self._of("flush", str(event.vbucket), "everything is gone")
            case SystemEvent():
                text = self._made("system", event, f"{event.event} {_shown(event.name.encode())}")
            case StreamEnd() if self._verbose or event.reason != "ok":
                text = self._of("end", str(event.vbucket), event.reason)
            case Snapshot() if self._verbose:
                place = f"{event.vbucket}:{event.start}-{event.end}"
                text = self._of("snapshot", place, f"from {event.source}, branch {event.vb_uuid}")
            case SeqnoAdvanced() if self._verbose:
                text = self._made("advanced", event, "")
            case _:
                return b""
        return text.encode() + b"\n"

    def _made(
        self,
        word: str,
        event: Change | DurableWrite | Rollback | SystemEvent | SeqnoAdvanced,
        rest: str,
        cas: int = 0,
    ) -> str:
        return self._of(word, f"{event.vbucket}:{event.seqno}", rest, cas)

    def _of(self, word: str, place: str, rest: str, cas: int = 0) -> str:
        head = f"{_time(cas):12}  {word:8}"
        text = f"{head}  {place:9}  {rest}".rstrip()
        if self._width:
            text = text[: self._width]
        if not self._colour:
            return text
        start, colour = len(head) - 8, _COLOURS[word]
        time, word, rest = text[:start], text[start : len(head)], text[len(head) :]
        return f"\033[2m{time}\033[0m\033[{colour}m{word}\033[0m{rest}"


def _time(cas: int) -> str:
    """The clock in a CAS: nanoseconds since the epoch, the lowest 16 bits replaced by a counter."""
    seconds = (cas >> 16 << 16) / 1e9
    if not 0 < seconds < 32_503_680_000:
        return ""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S.%f")[:12]


def _value(value: bytes) -> str:
    if len(value) > _VALUE_BYTES:
        return f"{_shown(value[:_VALUE_BYTES])}… ({len(value)} bytes)"
    return _shown(value)


def _shown(data: bytes) -> str:
    """Text with escapes for what a terminal can't show or would act on."""
    text = data.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
