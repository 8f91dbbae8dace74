"""Reads the packet drawings of the seed documents: the bytes as drawn, and the list of fields printed below.

A drawing looks like this (the byte cells are written ``80``, ``0x80`` or ``0x76 ('v')``, and the last rule
may be missing)::

        |0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|
        +---------------+---------------+---------------+---------------+
       0| 0x80          | 0x51          | 0x00          | 0x00          |
        +---------------+---------------+---------------+---------------+

and is followed by a breakdown, one field a line: ``Total body   (8-11) : 0x00000040``. A drawing of an extras
layout has words in its cells; it is not a packet and is skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["DRAWN", "Drawing", "Stated", "drawings"]

DRAWN = {path.stem: path for path in sorted((Path(__file__).parent / "drawings").glob("*.txt"))}
"""The figures of a seed document by its number, each on the line where the document has it; no prose."""

_ROW = re.compile(r"^\s*(\d+)\|(.*)\|\s*$")
_CELL = re.compile(r"(?:0x)?([0-9a-fA-F]{2})(?: \('(.)'\))?")
_STATED = re.compile(
    r"^\s*(?P<name>[#A-Za-z][\w #.]*?)\s*\((?P<first>\d+)(?:[-,](?P<last>\d+))?\)\s*:\s*(?P<text>\S.*)$"
)
_NUMBER = re.compile(r"^(?:0x)?([0-9a-fA-F]+)\b")
_REMARK = re.compile(r"\((-?\d+|2\^64)\)$")


@dataclass(frozen=True)
class Stated:
    """One line of a breakdown: what the document says the bytes ``first`` to ``last`` are."""

    name: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        where = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.name} ({where}): {self.text}"

    @property
    def content(self) -> bytes:
        """The bytes that the line states, as wide as they are printed."""
        if self.text[0] in '["':
            return self.text.strip('[]"').encode()
        if (number := _NUMBER.match(self.text)) and (self.text.startswith("0x") or len(number[1]) == 2):
            digits = number[1]
            return bytes.fromhex(digits.rjust(len(digits) + len(digits) % 2, "0"))
        return self.text.encode()

    def agrees(self, data: bytes) -> bool:
        """Whether the line is right in all it says: place, bytes, the decimal number in parentheses."""
        content = self.content
        if self.last - self.first + 1 != len(content) or data[self.first : self.last + 1] != content:
            return False
        remark = _REMARK.search(self.text)
        return not remark or _remark(remark[1]) % 2 ** (8 * len(content)) == int.from_bytes(content)


@dataclass
class Drawing:
    """A packet as drawn, from ``line``, its first row of bytes."""

    line: int
    data: bytes = b""
    stated: list[Stated] = field(default_factory=list)

    def contradictions(self) -> list[str]:
        """The lines of the breakdown that contradict the drawing, and the bytes that no line covers."""
        wrong = [str(said) for said in self.stated if not said.agrees(self.data)]
        spoken_of = {offset for said in self.stated for offset in range(said.first, said.last + 1)}
        silent = [offset for offset in range(len(self.data)) if offset not in spoken_of]
        return wrong + ([f"nothing ({silent[0]}-{silent[-1]})"] if silent else [])


def _remark(text: str) -> int:
    """The number of a remark such as ``(45)``, ``(-1)`` or ``(2^64)``."""
    return 2**64 if text == "2^64" else int(text)


def drawings(text: str) -> list[Drawing]:
    """All packets drawn in a document, in order."""
    drawings: list[Drawing] = []
    open_drawing = False
    for number, line in enumerate(text.split("\n"), 1):
        if "0 1 2 3 4 5 6 7" in line:
            open_drawing = False
        elif row := _ROW.match(line):
            offset, cells = int(row[1]), [_CELL.fullmatch(cell.strip()) for cell in row[2].split("|")]
            if any(cell is None for cell in cells):
                continue
            if offset == 0:
                drawings.append(Drawing(number))
                open_drawing = True
            if not open_drawing or offset != len(drawings[-1].data):
                raise ValueError(f"line {number}: a row at offset {offset} that continues nothing")
            for cell in cells:
                assert cell is not None
                if cell[2] and ord(cell[2]) != int(cell[1], 16):
                    raise ValueError(f"line {number}: {cell[0]} contradicts itself")
                drawings[-1].data += bytes.fromhex(cell[1])
        elif drawings and (said := _STATED.match(line)):
            last = int(said["last"] or said["first"])
            drawings[-1].stated.append(
                Stated(said["name"], int(said["first"]), last, " ".join(said["text"].split()))
            )
    return drawings
