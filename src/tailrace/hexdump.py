"""Bytes from text: plain hex, the dumps of xxd, hexdump -C and Wireshark, and drawn packets.

A drawing has rows such as ``  12| 0xde | 0xad | 0xbe | 0xef |``; in a document with drawings everything else
is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InputError

__all__ = ["HexBlock", "parse"]


MAX_UNFOLDED = 256 << 20
"""The largest dump, with the repeated rows that it leaves out put back."""


@dataclass(slots=True)
class HexBlock:
    """Bytes that are together in the text, starting at a line."""

    line: int
    data: bytes
    whole: bool
    """Whether the text says that these are the bytes of one buffer: a dump or a drawing from offset 0 on.
    A line of plain hex may be a packet of its own or continue on the next line."""


_ROW = re.compile(r"\s*(\d{1,9})\|(.*)\|\s*")
_CELL = re.compile(r"(?:0x)?([0-9a-fA-F]{2})(?:\s*\('.'\))?")
_DUMP = re.compile(r"\s*(?:0x)?([0-9a-fA-F]{4,16})(:\s?|\s{2,}|\t)(.*)")
_DUMP_END = re.compile(r"\s*([0-9a-fA-F]{4,16}):?\s*")
_DUMP_TEXT = re.compile(r"\s{3,}.*|\s*\|.*")
_SEPARATORS = re.compile(r"0[xX]|\\x|[\s:,;_-]+")


def parse(text: str) -> list[HexBlock]:
    """The bytes in a text, in order; `InputError` names a line that has none of the known forms."""
    lines = text.splitlines()
    if blocks := _drawings(lines):
        return blocks
    if blocks := _dumps(lines):
        return blocks
    return _plain(lines)


def _drawings(lines: Sequence[str]) -> list[HexBlock]:
    blocks: list[HexBlock] = []
    for number, line in enumerate(lines, 1):
        row = _ROW.fullmatch(line)
        if row is None:
            continue
        cells = [_CELL.fullmatch(cell.strip()) for cell in row[2].split("|")]
        if not all(cells):
            continue  # a drawing of a layout has words in its cells
        offset = int(row[1])
        if offset == 0:
            blocks.append(HexBlock(number, b"", whole=True))
        if not blocks or offset != len(blocks[-1].data):
            raise InputError(f"line {number}: the row at offset {offset} does not follow the one before it")
        blocks[-1].data += bytes(int(cell[1], 16) for cell in cells if cell)
    return blocks


def _dumps(lines: Sequence[str]) -> list[HexBlock]:
    """The blocks of a dump; none if any line does not begin with the offset of its bytes."""
    blocks: list[tuple[int, bytearray]] = []
    row: bytes | None = None
    is_folded = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.strip() == "*" and row and not is_folded:
            is_folded = True
            continue
        begun = _DUMP_END.fullmatch(line) or _DUMP.fullmatch(line)
        if begun is None:
            return []
        offset = int(begun[1], 16)
        if is_folded and row and not _unfold(blocks[-1][1], row, offset, number):
            return []
        is_folded = False
        if begun.re is _DUMP_END and blocks and offset == len(blocks[-1][1]):
            continue  # hexdump's last line is the size
        row = _dumped(begun[3], behind_colon=":" in begun[2]) if begun.re is _DUMP else None
        if offset == 0:
            blocks.append((number, bytearray()))
        if row is None or not blocks or offset != len(blocks[-1][1]):
            return []
        blocks[-1][1].extend(row)
    return [] if is_folded else [HexBlock(number, bytes(data), whole=True) for number, data in blocks]


def _unfold(data: bytearray, row: bytes, end: int, number: int) -> bool:
    """Put back the rows that a star stands for: copies of the row before it, up to the next offset."""
    rows, rest = divmod(end - len(data), len(row))
    if rows <= 0 or rest:
        return False
    if end > MAX_UNFOLDED:
        raise InputError(f"line {number}: the dump is larger than {MAX_UNFOLDED >> 20} MiB")
    data += row * rows
    return True


def _dumped(text: str, *, behind_colon: bool) -> bytes | None:
    """The bytes of a line of a dump, without the text column, which may look like bytes too.

    xxd, which writes a colon after the offset, has two blanks before the text; the others have three, or a
    bar, and hexdump -C has two blanks between bytes.
    """
    first = text.lstrip().split("  ", 1)[0]
    for cut in (first,) if behind_colon else (_DUMP_TEXT.sub("", text, count=1), first):
        digits = cut.replace(" ", "")
        if re.fullmatch(r"(?:[0-9a-fA-F]{2})+", digits):
            return bytes.fromhex(digits)
    return None


def _plain(lines: Sequence[str]) -> list[HexBlock]:
    blocks = []
    for number, line in enumerate(lines, 1):
        digits = _SEPARATORS.sub("", line.split("#", 1)[0].strip("\"' \t"))
        if not digits:
            continue
        if not re.fullmatch(r"[0-9a-fA-F]+", digits):
            raise InputError(
                f"line {number} is not hex: {line.strip()[:40]!r}, give hex, raw bytes or a capture"
            )
        if len(digits) % 2:
            raise InputError(f"line {number} has {len(digits)} hex digits, a byte needs two")
        blocks.append(HexBlock(number, bytes.fromhex(digits), whole=False))
    return blocks
