"""Layouts: the fixed fields of headers and extras, declared once, and everything that is derived from them.

    CAS_LAYOUT = layout('''
        I opaque  chosen by the requester
        Q cas     the version
    ''')
    CAS_LAYOUT.struct                        packs and unpacks all fields
    CAS_LAYOUT.at("cas")                     where a field begins
    CAS_LAYOUT.only("cas").struct            packs and unpacks some fields; the others are zero or skipped
    record(CAS_LAYOUT)                       the same bytes as a numpy record, for many at a time
    (HEADER_LAYOUT + MUTATION).only(...)     a header with the extras after it

Code that reads or writes bytes without making messages takes places and sizes from here and has no such
numbers of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = ["NO_EXTRAS", "Field", "Layout", "layout", "numpy_code", "record"]

_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
_NUMPY_CODES = {"B": "u1", "H": ">u2", "I": ">u4", "Q": ">u8"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a layout."""

    code: str
    name: str
    offset: int
    about: str

    @property
    def size(self) -> int:
        """Bytes."""
        return struct.calcsize(">" + self.code)

    @property
    def place(self) -> slice:
        """Where its bytes are."""
        return slice(self.offset, self.offset + self.size)


class Layout:
    """Named fields in order, big-endian. A field without a name is a gap, which nobody reads."""

    __slots__ = ("fields", "names", "size", "struct")

    def __init__(self, declared: Iterable[tuple[str, str, str]]) -> None:
        fields: list[Field] = []
        codes = ""
        offset = 0
        for code, name, about in declared:
            field = Field(code, name, offset, about)
            if name:
                fields.append(field)
            codes += code
            offset += field.size
        self.fields = tuple(fields)
        self.names = tuple(field.name for field in fields)
        self.struct = struct.Struct(">" + codes)
        self.size = self.struct.size
        assert self.size == offset

    def __add__(self, more: Layout) -> Layout:
        """This layout with more fields after it; neither has gaps."""
        fields = (*self.fields, *more.fields)
        joined = Layout((field.code, field.name, field.about) for field in fields)
        assert joined.size == self.size + more.size
        return joined

    def field(self, name: str) -> Field:
        """The field of this name."""
        return {field.name: field for field in self.fields}[name]

    def at(self, name: str) -> int:
        """Where a field begins."""
        return self.field(name).offset

    def until(self, name: str) -> Layout:
        """The fields before this one."""
        before = self.fields[: self.names.index(name)]
        return Layout((field.code, field.name, field.about) for field in before)

    def only(self, *wanted: str) -> Layout:
        """The same bytes with some of the fields, in their order; the rest are gaps.

        ``magic+opcode`` reads neighbours as one number of that name. ``opaque:4s`` reads a field with
        another code of the same size.
        """
        declared: list[tuple[str, str, str]] = []
        end = 0
        for wish in wanted:
            name, _, code = wish.partition(":")
            parts = [self.field(part) for part in name.split("+")]
            size = sum(part.size for part in parts)
            first, last = parts[0], parts[-1]
            assert first.offset >= end and last.offset + last.size == first.offset + size, wish
            if first.offset > end:
                declared.append((f"{first.offset - end}x", "", ""))
            code = code or (first.code if len(parts) == 1 else _UNSIGNED[size])
            declared.append((code, name, first.about))
            end = first.offset + size
        if self.size > end:
            declared.append((f"{self.size - end}x", "", ""))
        chosen = Layout(declared)
        assert chosen.size == self.size
        return chosen


def layout(text: str) -> Layout:
    """A layout from lines of ``code name  what it is``."""
    declared = []
    for line in text.strip().splitlines():
        code, name, about = [*line.split(None, 2), ""][:3]
        declared.append((code, name, about))
    return Layout(declared)


def numpy_code(field: Field) -> str:
    """The numpy code for a field's type; raw bytes if it is not a number."""
    return _NUMPY_CODES.get(field.code, f"V{field.size}")


def record(of: Layout) -> np.dtype[np.void]:
    """A layout as a numpy record with the same field names; gaps have none."""
    import numpy as np  # encoding and decoding messages does not need it

    return np.dtype(
        {
            "names": list(of.names),
            "formats": [numpy_code(field) for field in of.fields],
            "offsets": [field.offset for field in of.fields],
            "itemsize": of.size,
        }
    )


NO_EXTRAS = Layout(())
