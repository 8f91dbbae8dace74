"""``tailrace decode``: shows bytes as readable frames."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import click

from .. import hexdump, pcap
from ..client.recording import MAGIC
from ..errors import FramingError, InputError, UsageError
from ..units import format_size
from ..wire.describe import Description
from ..wire.dialect import DIALECTS, Dialect
from ..wire.message import Direction
from ..wire.observer import Observer, Tape, is_whole, read
from .common import INPUT_FILE, Integer, JsonLines, json_option, note, standard_input, use_colour
from .common import command as make_command

MAX_INPUT = 256 << 20
"""Hex and raw bytes are read whole; a capture of any size is read packet by packet."""

MAX_BUFFERED = 512 << 20
"""Bytes of unfinished frames in all conversations of a capture."""

FORMATS = ("auto", "hex", "raw", "pcap")


@dataclass(frozen=True, slots=True)
class Shown:
    """A frame, and where it was found."""

    frame: Description
    place: dict[str, Any]
    """For JSON, in addition to the frame's own members."""
    prefix: str = ""
    """For text, before the frame's first line."""


@make_command(
    "decode",
    example="""
echo 805c00000000000000000000009896810000000000000000 | tailrace decode
tailrace decode --dialect upr-b packet.hex
tailrace decode --json --port 11210 capture.pcap
""",
)
@click.argument("file", type=INPUT_FILE, default="-", metavar="[FILE]")
@click.option(
    "--dialect",
    type=click.Choice(tuple(DIALECTS)),
    help="Dialect of the frames.  [default: worked out from the bytes]",
)
@click.option(
    "--direction",
    type=click.Choice(tuple(direction.value for direction in Direction)),
    help="Where the frames go: to the producer or server, or to a reader or replica.  [default: worked out "
    "from the bytes]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="auto",
    help="Format of the input.  [default: guessed]",
)
@click.option(
    "--port",
    type=Integer(1, 0xFFFF),
    help="Show only conversations of a capture with this server port.",
)
@json_option("Write one JSON object per frame, one per line.")
def command(
    file: Path, dialect: str | None, direction: str | None, form: str, port: int | None, as_json: bool
) -> None:
    """Show hex, raw bytes or a capture as readable frames.

    FILE holds hex (plain, or a dump of xxd, hexdump -C or Wireshark, or a document with drawn packets), raw
    bytes, or a libpcap or pcapng capture, whose TCP conversations are reassembled. Without FILE, or with -,
    stdin is read.

    Several lines of plain hex are read as one stream if that gives whole frames, otherwise as one packet per
    line. Packets that the protocol documents draw with wrong lengths are read as meant, with a note that
    names the erratum. At bytes that are not a frame the command stops, with exit code 1.
    """
    known = DIALECTS[dialect] if dialect else None
    way = Direction(direction) if direction else None
    show = _json_writer() if as_json else _text_writer()
    with _opened(file) as stream:
        head = stream.read(4)
        if form == "pcap" or (form == "auto" and pcap.is_capture(head)):
            _show_capture(pcap.packets(stream, head), pcap.TcpStreams(port), _Capture(known, way), show)
            return
        data = head + stream.read(MAX_INPUT + 1 - len(head))
    if port is not None:
        raise UsageError("--port chooses conversations of a capture, but the input is not a capture")
    if len(data) > MAX_INPUT:
        raise InputError(f"the input is larger than {format_size(MAX_INPUT)}, split it")
    observer = Observer(known, way)
    for place, packet in _packets(data, form):
        try:
            for description in read(packet, observer):
                show(Shown(description, {"offset": description.offset}))
        except FramingError as error:
            raise InputError(f"{place}{error}") from None


# output


def _json_writer() -> Callable[[Shown], None]:
    lines = JsonLines()

    def show(shown: Shown) -> None:
        lines.write(shown.frame.to_json() | shown.place)

    return show


def _text_writer() -> Callable[[Shown], None]:
    colour = use_colour(sys.stdout)
    styles: dict[str, dict[str, Any]] = {"head": {"bold": True}, "field": {}, "note": {"fg": "yellow"}}
    indents = {"head": "", "field": "    ", "note": "    ! "}

    def show(shown: Shown) -> None:
        for kind, text in shown.frame.to_text():
            line = indents[kind] + text
            if kind == "head":
                line = shown.prefix + line
            line = click.style(line, **styles[kind]) if colour else line
            sys.stdout.buffer.write(line.encode() + b"\n")

    return show


# hex and raw bytes


def _opened(file: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    if str(file) == "-":
        return contextlib.nullcontext(standard_input())
    return file.open("rb")


def _packets(data: bytes, form: str) -> list[tuple[str, bytes]]:
    """The buffers to decode, each with its place for messages."""
    if not data:
        raise InputError("the input is empty, give hex, raw bytes or a capture")
    if data[:2] == b"\x1f\x8b":
        raise InputError("the input is compressed with gzip, unpack it first")
    if data.startswith(MAGIC):
        raise InputError("the input is a recording, serve it with 'tailrace replay' and read it from there")
    if form == "raw" or (form == "auto" and not _is_text(data)):
        return [("", data)]
    try:
        chunks = hexdump.parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError("the input is not text, so it can't be hex") from None
    if not chunks:
        raise InputError("there is no hex in the input, give hex, raw bytes or a capture")
    joined = b"".join(chunk.data for chunk in chunks)
    separate = all(chunk.whole for chunk in chunks) or (
        not is_whole(joined) and all(is_whole(chunk.data) for chunk in chunks)
    )
    if len(chunks) == 1 or not separate:
        return [("", joined)]
    return [(f"line {chunk.line}: ", chunk.data) for chunk in chunks]


def _is_text(data: bytes) -> bool:
    """Whether bytes are text; no frame is, because its header has bytes that text never has."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\t\r\n\f" for c in text)


# captures


@dataclass(slots=True)
class _Talk:
    """One conversation: a tape for each direction, and the last piece of it."""

    observer: Observer
    tapes: dict[pcap.Endpoint, Tape] = field(default_factory=dict)
    last: dict[pcap.Endpoint, pcap.CapturedBytes] = field(default_factory=dict)


class _Capture:
    """The frames in the conversations of a capture."""

    def __init__(self, dialect: Dialect | None, direction: Direction | None) -> None:
        self._dialect = dialect
        self._direction = direction
        self._talks: dict[int, _Talk] = {}
        self._buffered = 0
        self._known = 0
        self._strangers = 0

    def add(self, piece: pcap.CapturedBytes | pcap.Gap | pcap.ConversationEnded) -> Iterator[Shown]:
        """The frames that a piece of a conversation completes."""
        number = piece.conversation
        if isinstance(piece, pcap.ConversationEnded):
            yield from self._finish(number)
            return
        if isinstance(piece, pcap.Gap):
            if number in self._talks and piece.source in self._talks[number].tapes:
                tape = self._talks[number].tapes[piece.source]
                self._buffered -= tape.buffered
                tape.gap(piece.size)
                self._buffered += tape.buffered
            return
        talk = self._talks.get(number)
        if talk is None:
            talk = self._talks[number] = _Talk(Observer(self._dialect, self._direction))
        if piece.source not in talk.tapes:
            talk.tapes[piece.source] = Tape(
                talk.observer, from_client=piece.from_client, from_start=piece.from_start
            )
        tape = talk.tapes[piece.source]
        talk.last[piece.source] = piece
        self._buffered -= tape.buffered
        for description in tape.feed(piece.data):
            yield _captured(description, piece)
        self._buffered += tape.buffered
        if self._buffered > MAX_BUFFERED:
            raise InputError("the capture has too many unfinished frames, choose a --port")

    def finish(self) -> Iterator[Shown]:
        """Frames that are recognised only at the end; then a note on conversations without any."""
        for number in list(self._talks):
            yield from self._finish(number)
        if self._strangers:
            note(f"conversations without a known frame: {self._strangers}")
        if not self._known:
            raise InputError("there are no frames in the capture, was it TLS, or another port?")

    def _finish(self, number: int) -> Iterator[Shown]:
        """The last frames of a conversation, and a note on each direction with bytes that are not frames."""
        talk = self._talks.pop(number, None)
        if talk is None:
            return  # nothing was sent in it
        for source, tape in talk.tapes.items():
            self._buffered -= tape.buffered
            for description in tape.finish():
                yield _captured(description, talk.last[source])
            if tape.problems and tape.frames:
                note(f"conversation {number}, from {source}: {'; '.join(tape.problems)}")
        if any(tape.frames for tape in talk.tapes.values()):
            self._known += 1
        else:
            self._strangers += 1


def _captured(description: Description, piece: pcap.CapturedBytes) -> Shown:
    seconds, fraction = divmod(piece.time_ns, 10**9)
    try:
        moment = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{fraction // 1000:06d}Z"
    except (OverflowError, ValueError, OSError):
        moment = f"{seconds}.{fraction // 1000:06d}"  # the capture's clock was wrong
    place = {
        "offset": description.offset,
        "conversation": piece.conversation,
        "time": moment,
        "source": str(piece.source),
        "destination": str(piece.destination),
    }
    return Shown(description, place, f"#{piece.conversation} {moment} {piece.source} > {piece.destination}  ")


def _show_capture(
    packets: Iterator[pcap.Packet],
    streams: pcap.TcpStreams,
    capture: _Capture,
    show: Callable[[Shown], None],
) -> None:
    damage: InputError | None = None
    try:
        for packet in packets:
            for piece in streams.feed(packet):
                for shown in capture.add(piece):
                    show(shown)
            sys.stdout.buffer.flush()  # somebody may be watching a capture that is still growing
    except InputError as error:
        damage = error  # raised once the frames before it are shown
    for piece in streams.finish():
        for shown in capture.add(piece):
            show(shown)
    if streams.unknown_links:
        links = ", ".join(map(str, sorted(streams.unknown_links)))
        note(f"packets of link types that Tailrace does not read were skipped: {links}")
    if damage is not None:
        raise damage
    for shown in capture.finish():
        show(shown)
