"""The shared vocabulary: a snapshot range, and the position of a reader in a vbucket's history.

A reader is *exact* at a seqno when it holds what the vbucket held at that moment, with nothing missing.
Inside a snapshot it is not: each key comes only once, in its newest version of the range, so a version that
the rest of the snapshot replaces has been folded away and never comes. A failover can lose the replacement
and bring the folded version back to life. This is why a position is four numbers and not one:

    exact here                      received up to here           exact again here
    snapshot_start  ──── items ───▶  seqno  ──── still to come ──▶  snapshot_end

Values check themselves: a nonsensical position cannot be built.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import MalformedMessage, UsageError
from .wire.codes import Status

__all__ = [
    "MAX_CAS",
    "MAX_CLOCK_CAS",
    "MAX_REPLICA_REV",
    "MAX_REV",
    "MAX_SEQNO",
    "MAX_U64",
    "BehindSince",
    "Position",
    "SnapshotRange",
    "check_seqno",
    "check_u64",
    "parse_positions",
    "parse_u64",
]

MAX_U64 = (1 << 64) - 1

# Limits on what is accepted from a peer. A larger number is refused on arrival: once stored, the next change
# that is numbered from it could not be written. Expiry, delete time and flags may use all of their 32 bits.

MAX_SEQNO = (1 << 55) - 1
"""The highest seqno of a change, of a snapshot's end, and of a purge. A store numbers changes with 56 bits:
a vbucket that becomes active at this limit has as many seqnos left.
"""
MAX_REV = (1 << 63) - 1
"""The highest rev seqno that a client may give a document; the versions made here count on from it."""
MAX_REPLICA_REV = (1 << 64) - (1 << 57)
"""The highest rev seqno that a replica takes from its active, which has counted on."""
MAX_CAS = (1 << 63) - 1
"""The highest CAS; as nanoseconds it is the year 2262."""
MAX_CLOCK_CAS = 1 << 62
"""How far a node's clock follows the CAS of others (the year 2116), so that all peers accept its own CAS."""
_MAX_VBUCKET = 0xFFFF


def check_u64(value: object, what: str) -> int:
    """``value`` if it is an unsigned 64-bit integer; ``True`` and ``12.0`` are not."""
    if type(value) is not int or not 0 <= value <= MAX_U64:
        raise UsageError(f"{what} is {_shown(value)}, but must be an integer from 0 to 2^64-1")
    return value


def check_seqno(value: object, what: str) -> int:
    """``value`` if it is a seqno that a change can have; a higher position would never be reached."""
    seqno = check_u64(value, what)
    if seqno > MAX_SEQNO:
        raise UsageError(f"{what} is {seqno}, beyond all seqnos")
    return seqno


def parse_u64(text: object, what: str) -> int:
    """A 64-bit number in plain decimal digits, the only form that we write ourselves.

    ``int()`` alone also takes signs, blanks, ``1_000`` and the digits of every other script.
    """
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_U64)):
        raise UsageError(f"{what} is {_shown(text)}, but must be a string of decimal digits")
    if text[0] == "0" and text != "0":
        raise UsageError(f"{what} is {_shown(text)}, but must not start with 0")
    return check_u64(int(text), what)


@dataclass(frozen=True, slots=True)
class SnapshotRange:
    """The seqnos that a snapshot marker announces, both ends included."""

    start: int
    end: int

    def __post_init__(self) -> None:
        start, end = self.start, self.end
        if type(start) is type(end) is int and 0 <= start <= end <= MAX_U64:
            return
        # something is wrong: find out what
        check_u64(self.start, "snapshot start")
        check_u64(self.end, "snapshot end")
        if self.start > self.end:
            raise UsageError(f"snapshot start {self.start} is above snapshot end {self.end}")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader stands in a vbucket's history; the failover log that came with it is kept beside it.

    ``snapshot_start`` is where the reader was last exact before its snapshot began. That need not be the
    start that the marker gave; `received` says why.
    """

    vb_uuid: int
    seqno: int
    snapshot_start: int
    snapshot_end: int

    BEGINNING: ClassVar[Position]

    def __post_init__(self) -> None:
        vb_uuid, seqno, start, end = self.vb_uuid, self.seqno, self.snapshot_start, self.snapshot_end
        if type(vb_uuid) is type(seqno) is type(start) is type(end) is int:
            in_order = 0 <= start <= seqno <= end <= MAX_U64
            if in_order and 0 <= vb_uuid <= MAX_U64:
                return
        # something is wrong: find out what
        check_u64(self.vb_uuid, "vb_uuid")
        check_u64(self.seqno, "seqno")
        check_u64(self.snapshot_start, "snapshot start")
        check_u64(self.snapshot_end, "snapshot end")
        if not self.snapshot_start <= self.seqno <= self.snapshot_end:
            raise UsageError(
                f"seqno {self.seqno} is outside its snapshot [{self.snapshot_start}, {self.snapshot_end}]"
            )

    @classmethod
    def at(cls, vb_uuid: int, seqno: int) -> Position:
        """An exact position: between two snapshots, or the start of a reader that has seen none.

        A draft's Snapshot End and an OSO snapshot's end also give one: neither carries a range, and both
        snapshots must be taken whole or not at all.
        """
        return cls(vb_uuid, seqno, seqno, seqno)

    @property
    def is_partial(self) -> bool:
        """Whether it is inside a snapshot, with a part received and a part still to come.

        With ``seqno == snapshot_start`` nothing of the snapshot has been received, and the reader is exact.
        """
        return self.snapshot_start < self.seqno < self.snapshot_end

    @property
    def at_snapshot_end(self) -> bool:
        """Whether the whole snapshot has been received: what is held may be shown, saved or committed."""
        return self.seqno == self.snapshot_end

    @property
    def exact_at(self) -> int:
        """The last seqno at which the reader was exact, and to which it can go back on its own."""
        return self.snapshot_start if self.is_partial else self.seqno

    @property
    def reach(self) -> int:
        """The last seqno on which the reader depends: through what it has, or what folded versions away.

        A producer whose history departs at or above ``reach`` can continue from here; no other can.
        """
        return self.snapshot_end if self.is_partial else self.seqno

    def on_branch(self, vb_uuid: int) -> Position:
        """The same place under another name: once a stream is accepted, that of its log's newest entry."""
        return Position(vb_uuid, self.seqno, self.snapshot_start, self.snapshot_end)

    def received_marker(self, start: int, end: int) -> SnapshotRange:
        """The range of a marker that a producer sent, if it is valid at this position.

        A marker alone changes no position: until its first item comes there is nothing new to depend on, and
        an interrupted older snapshot is as incomplete as before.
        """
        if start > end:
            raise MalformedMessage(f"snapshot marker [{start}, {end}] ends before it starts", Status.EINVAL)
        if end > MAX_SEQNO:
            raise MalformedMessage(f"snapshot marker [{start}, {end}] is beyond all seqnos", Status.ERANGE)
        if start < self.seqno and end <= self.seqno:
            raise MalformedMessage(
                f"snapshot marker [{start}, {end}] lies behind seqno {self.seqno}", Status.ERANGE
            )
        return SnapshotRange(start, end)

    def snapshot_of(self, marker: SnapshotRange) -> SnapshotRange:
        """The snapshot that the items of a marker belong to, for a reader at this position.

        An interrupted snapshot that is resumed may be shorter than it was announced at first. What was
        received of it was folded up to the first end: the reader is exact only when it has passed *both*.
        """
        if self.is_partial and marker.end < self.snapshot_end:
            return SnapshotRange(marker.start, self.snapshot_end)
        return marker

    def received(self, marker: SnapshotRange, seqno: int) -> Position:
        """The position after the item (or Seqno Advanced) ``seqno`` of ``marker``; of a batch, the last one.

        It is not just the marker's range:

        * A marker may start at its first item, above what was folded away before that item. A producer reads
          ``seqno == snapshot_start`` as "nothing received" and would not ask for a rollback. So the start
          that is kept is where the reader was exact.
        * The marker of a snapshot that is resumed may end too early (`snapshot_of`).
        """
        if seqno == 0:
            raise MalformedMessage("an item has seqno 0", Status.EINVAL)
        if seqno <= self.seqno:
            raise MalformedMessage(f"item {seqno} follows item {self.seqno}", Status.ERANGE)
        if not marker.start <= seqno <= marker.end:
            raise MalformedMessage(
                f"item {seqno} is outside its snapshot [{marker.start}, {marker.end}]", Status.ERANGE
            )
        return Position(self.vb_uuid, seqno, self.exact_at, self.snapshot_of(marker).end)

    def request_range(self, marker: SnapshotRange | None = None) -> SnapshotRange:
        """The snapshot range of the request that resumes here; ``marker`` is the last one, if still known.

        The marker is repeated as it came if that means the same. Its start may then be one above ours: no
        change lies between them, so a reader that has only the item at that start is exact there.
        """
        if (
            marker is not None
            and marker.end == self.snapshot_end
            and marker.start == self.snapshot_start + 1
            and marker.start <= self.seqno
        ):
            return marker
        return SnapshotRange(self.snapshot_start, self.snapshot_end)

    def to_json(self) -> dict[str, Any]:
        """``{"vb_uuid": "187349", "seqno": 12, "snapshot": [1, 12]}``; 64-bit ids are strings."""
        return {
            "vb_uuid": str(self.vb_uuid),
            "seqno": self.seqno,
            "snapshot": [self.snapshot_start, self.snapshot_end],
        }

    @classmethod
    def from_json(cls, value: object) -> Position:
        """Read what `to_json` wrote; anything else is a `UsageError` that says what is wrong."""
        if not isinstance(value, dict):
            raise UsageError(f"a position is {_shown(value)}, but must be an object")
        members = ("vb_uuid", "seqno", "snapshot")
        if missing := [name for name in members if name not in value]:
            raise UsageError(f"a position has no member {missing[0]!r}")
        if unknown := [name for name in value if name not in members]:
            raise UsageError(
                f"a position has no member called {_shown(unknown[0])}; it has {', '.join(members)}"
            )
        snapshot = value["snapshot"]
        if not isinstance(snapshot, list) or len(snapshot) != 2:
            raise UsageError(f"snapshot is {_shown(snapshot)}, but must be a list of two seqnos")
        return cls(
            parse_u64(value["vb_uuid"], "vb_uuid"),
            check_seqno(value["seqno"], "seqno"),
            check_seqno(snapshot[0], "snapshot start"),
            check_seqno(snapshot[1], "snapshot end"),
        )


Position.BEGINNING = Position(0, 0, 0, 0)


def parse_positions(text: str, *, besides: Collection[str] = ()) -> dict[int, Position]:
    """Positions by vbucket, in the form of `Position.to_json`, perhaps typed by hand and in any order.

    Members named in ``besides`` are ignored.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object_without_repeats)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"positions are not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"positions are {_shown(value)}, but must be an object with a member per vbucket")
    positions: dict[int, Position] = {}
    for name, member in value.items():
        vbucket = parse_u64(name, "a vbucket")
        if vbucket > _MAX_VBUCKET:
            raise UsageError(f"vbucket {vbucket} is above {_MAX_VBUCKET}")
        try:
            if besides and isinstance(member, dict):
                member = {part: content for part, content in member.items() if part not in besides}
            positions[vbucket] = Position.from_json(member)
        except UsageError as error:
            raise UsageError(f"vbucket {vbucket}: {error}") from None
    return positions


class BehindSince:
    """Measures for how long a reader has been behind its bucket."""

    def __init__(self, now: float) -> None:
        self._as_of = now
        self._unreached: tuple[float, Mapping[int, int]] | None = None

    def seconds(self, now: float, reached: Mapping[int, int], high_seqnos: Mapping[int, int]) -> float:
        """How long it has been behind, from the seqnos that it has reached and the high seqnos; 0: it is not.

        It is the age of the latest of the moments looked at whose high seqnos it has reached.
        """

        def has(wanted: Mapping[int, int]) -> bool:
            return all(reached.get(vbucket, 0) >= seqno for vbucket, seqno in wanted.items())

        at, wanted = self._unreached or (now, high_seqnos)
        if has(wanted):
            self._as_of, at, wanted = at, now, high_seqnos
        if has(high_seqnos):
            self._as_of, self._unreached = now, None
            return 0.0
        self._unreached = at, wanted
        return now - self._as_of


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, member in pairs:
        if name in members:
            raise ValueError(f"member {_shown(name)} comes twice")
        members[name] = member
    return members


def _shown(value: object) -> str:
    """``value`` for an error message: short, escaped, on one line."""
    if isinstance(value, dict | list):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    if type(value) is int and not -MAX_U64 <= value <= MAX_U64:
        return "a number of more than 64 bits"
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
