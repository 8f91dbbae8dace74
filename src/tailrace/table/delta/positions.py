"""The positions of all vbuckets as two short texts in the table's domain metadata, and its resets.

    tailrace.seqnos      base64 of varints: the seqno of vbucket 0, 1, 2, …; 0 is the beginning
    tailrace.branches    the same for vb_uuids; written only when one of them changes
    tailrace.resets      JSON: [version, vbucket, seqno] for each vbucket that a version set back

Every version stands at snapshot ends, so a vb_uuid and a seqno are a complete position.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from ...model import MAX_SEQNO, Position
from ..contract import TableDamaged

__all__ = ["BRANCHES", "RESETS", "SEQNOS", "PositionArray", "Reset", "format_resets", "parse_resets"]

SEQNOS = "tailrace.seqnos"
BRANCHES = "tailrace.branches"
RESETS = "tailrace.resets"

_Array = npt.NDArray[np.uint64]
_EMPTY: _Array = np.zeros(0, np.uint64)
_MAX_VARINT = 10

Reset = tuple[int, int, int]
"""The version that set a vbucket back, the vbucket, and to which seqno."""


class PositionArray(Mapping[int, Position]):
    """Where every vbucket stands: arrays and not objects, since many versions are held."""

    __slots__ = ("branches", "seqnos")

    def __init__(self, seqnos: _Array = _EMPTY, branches: _Array = _EMPTY) -> None:
        self.seqnos = seqnos
        self.branches = branches

    @classmethod
    def of_texts(cls, seqnos: str, branches: str) -> PositionArray:
        """The positions from the two texts; TableDamaged."""
        decoded = _decode(seqnos, SEQNOS)
        if len(decoded) and int(decoded.max()) > MAX_SEQNO:
            raise TableDamaged(f"the domain {SEQNOS} in the table's log has a number beyond all seqnos")
        return cls(decoded, _decode(branches, BRANCHES))

    def to_texts(self) -> tuple[str, str]:
        """The text of the seqnos and that of the branches."""
        return _encode(self.seqnos), _encode(self.branches)

    def moved(self, positions: Mapping[int, Position]) -> PositionArray:
        """The positions after some vbuckets have moved."""
        if not positions:
            return self
        size = max(len(self.seqnos), len(self.branches), max(positions) + 1)
        seqnos, branches = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        seqnos[: len(self.seqnos)], branches[: len(self.branches)] = self.seqnos, self.branches
        for vbucket, position in positions.items():
            if not 0 <= vbucket <= 0xFFFF:
                raise UsageError(f"there is no vbucket {vbucket}")
            if position.is_partial:
                raise UsageError(f"vbucket {vbucket} is inside a snapshot, where a table may not stand")
            seqnos[vbucket], branches[vbucket] = position.seqno, position.vb_uuid
        if np.array_equal(branches, self.branches):
            branches = self.branches
        return PositionArray(seqnos, branches)

    def seqno(self, vbucket: int) -> int:
        return int(self.seqnos[vbucket]) if vbucket < len(self.seqnos) else 0

    def __getitem__(self, vbucket: int) -> Position:
        seqno = self.seqno(vbucket)
        branch = int(self.branches[vbucket]) if vbucket < len(self.branches) else 0
        if not seqno and not branch:
            raise KeyError(vbucket)
        return Position.at(branch, seqno)

    def __iter__(self) -> Iterator[int]:
        there = np.zeros(max(len(self.seqnos), len(self.branches)), np.bool_)
        for array in (self.seqnos, self.branches):
            there[: len(array)] |= array != 0
        return iter(np.flatnonzero(there).tolist())

    def __contains__(self, vbucket: object) -> bool:
        if not isinstance(vbucket, int) or vbucket < 0:
            return False
        return any(vbucket < len(array) and array[vbucket] for array in (self.seqnos, self.branches))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"PositionArray({dict(self)!r})"


def _encode(values: _Array) -> str:
    values = np.trim_zeros(values, "b")
    lengths = np.ones(len(values), np.intp)
    for place in range(1, _MAX_VARINT):
        lengths += values >> np.uint64(7 * place) != 0
    starts = np.cumsum(lengths) - lengths
    data = np.zeros(int(lengths.sum()), np.uint8)
    for place in range(int(lengths.max(initial=0))):
        there = lengths > place
        group = (values[there] >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        data[starts[there] + place] = group | np.where(lengths[there] > place + 1, 0x80, 0).astype(np.uint8)
    return base64.b64encode(data.tobytes()).decode("ascii")


def _decode(text: str, domain: str) -> _Array:
    try:
        data = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except ValueError:
        raise TableDamaged(f"the domain {domain} in the table's log is not base64") from None
    if not len(data):
        return _EMPTY
    ends = np.flatnonzero(data < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    lengths = ends - starts + 1
    if not len(ends) or ends[-1] != len(data) - 1 or lengths.max() > _MAX_VARINT:
        raise TableDamaged(f"the domain {domain} in the table's log is cut off or damaged")
    values = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        there = lengths > place
        values[there] |= (data[starts[there] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values


def parse_resets(text: str) -> list[Reset]:
    """The resets that are still known, oldest first."""
    try:
        return [
            (int(version), int(vbucket), int(seqno)) for version, vbucket, seqno in json.loads(text or "[]")
        ]
    except (ValueError, TypeError, LookupError):
        raise TableDamaged(f"the domain {RESETS} in the table's log can't be read") from None


def format_resets(resets: Sequence[Reset]) -> str:
    return json.dumps(resets, separators=(",", ":"))
