"""The golden packets as Python values; README.md beside this file says what each member of a line means."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "Vector", "vectors"]

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Vector:
    """One golden packet: bytes, and what the documents say that they mean."""

    id: str
    dialect: str
    direction: str
    source: str
    form: str
    data: bytes
    name: str | None
    header: dict[str, int]
    fields: dict[str, Any]
    key: bytes
    value: bytes | None
    frame_infos: list[tuple[int, bytes]] | None
    announces: int
    errata: list[str] = field(default_factory=list)
    contradictions: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    repairs: list[dict[str, Any]] = field(default_factory=list)
    error: int | None = None

    def __str__(self) -> str:
        return self.id

    @property
    def framable(self) -> bool:
        """The header announces as many bytes as there are, so a socket can carry the packet."""
        return self.announces == len(self.data)

    @property
    def is_response(self) -> bool:
        """Bytes 6-7 are a status (draft A has none; its answers are known by the opcode)."""
        return "status" in self.header


def as_bytes(what: str | dict[str, str]) -> bytes:
    """Text, or ``{"hex": …}`` if it is not text."""
    return what.encode() if isinstance(what, str) else bytes.fromhex(what["hex"])


def _vector(line: dict[str, Any]) -> Vector:
    infos = line.pop("frame_info", None)
    data = bytes.fromhex(line.pop("hex"))
    value = line.pop("value", None)
    return Vector(
        data=data,
        name=line.pop("name", None),
        key=as_bytes(line.pop("key", "")),
        fields=line.pop("fields", {}),
        value=None if value is None else as_bytes(value),
        frame_infos=None if infos is None else [(info["id"], bytes.fromhex(info["hex"])) for info in infos],
        announces=line.pop("announces", len(data)),
        **line,
    )


@cache
def vectors(pattern: str = "*") -> tuple[Vector, ...]:
    """The packets of all files whose names match, in order."""
    return tuple(
        _vector(json.loads(line))
        for path in sorted(FOLDER.glob(f"{pattern}.jsonl"))
        for line in path.read_text().splitlines()
    )
