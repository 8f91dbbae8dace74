"""One member of a group: what it does with the group's record, and when it must not go on.

Clocks of different machines are not compared. Each member watches by its own clock whether the others still
raise their number; one that has not for the `timeout_s` that it joined with is given up, and its vbuckets are
free. A member that could not raise its own number for that long can't know whether it was given up, and hands
nothing out until it does. Since the others start counting only when they see a change, it begins to doubt
before they give it up.

All calls block while the store is at work. Doing something twice, because an answer was lost or another
member came between, has the same result as doing it once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...clock import SYSTEM, Clock
from ...errors import GroupFenced, StoreError, UsageError
from ...rng import unique_name
from ..progress import SavedPosition
from .record import GroupRecord, Slot
from .stores import GroupStore

__all__ = ["GroupMember", "Holdings"]

_ATTEMPTS = 1_000
"""An attempt fails only if another member has changed the record meanwhile."""


@dataclass(frozen=True)
class Holdings:
    """What a member has after a turn."""

    owned: frozenset[int]
    surplus: frozenset[int]
    """What it should hand over, at the ends of snapshots."""
    members: int


class GroupMember:
    """A process that takes part in a group."""

    def __init__(
        self,
        store: GroupStore,
        *,
        bucket: str,
        bucket_uuid: str = "",
        vbucket_count: int,
        name: str,
        slot: Slot | None = None,
        timeout_s: float = 30.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._store = store
        self._bucket, self._bucket_uuid = bucket, bucket_uuid
        self._vbucket_count = vbucket_count
        self._slot = slot
        self._clock = clock
        self._is_in = False
        self._renewed_at = clock.monotonic()
        self._seen: dict[str, tuple[int, float]] = {}
        """By member: its number, and when that was seen to change."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether the others may have given it up: nothing may be handed out before the next `turn`."""
        return self._clock.monotonic() - self._renewed_at >= self.timeout_s

    def turn(self) -> Holdings:
        """Show that it lives, join if it has not, give up dead members, take what is free.

        `GroupFenced` if the others have given it up.
        """
        record = self._change(self._turned)
        owned, surplus = record.owned_by(self.name), record.surplus_of(self.name)
        return Holdings(frozenset(owned), frozenset(surplus), len(record.members))

    def load(self, vbuckets: Iterable[int]) -> dict[int, SavedPosition]:
        """What was saved for vbuckets that it has; those without a saved position are missing."""
        _, record = self._read()
        names: dict[str, list[int]] = {}
        for vbucket in vbuckets:
            if vbucket in record.files:
                names.setdefault(record.files[vbucket], []).append(vbucket)
        positions: dict[int, SavedPosition] = {}
        for name, file_vbuckets in names.items():
            data = self._store.get(name)
            if data is None:
                raise StoreError(
                    f"the group's file {name!r} is gone, with positions of {len(file_vbuckets)} vbuckets"
                )
            try:
                kept = json.loads(data)
                positions |= {
                    vbucket: SavedPosition.from_json(kept[str(vbucket)]) for vbucket in file_vbuckets
                }
            except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
                raise StoreError(f"the group's file {name!r} is damaged: {error}") from None
        return positions

    def save(self, positions: Mapping[int, SavedPosition], *, release: Iterable[int] = ()) -> None:
        """Save positions of vbuckets that it has, and hand some of them over, in one step.

        Positions of vbuckets that it does not have are passed over. `GroupFenced` if it is not a member: then
        nothing is saved, and the present owners go on from what was saved before.
        """
        _, record = self._read()
        own = record.owned_by(self.name) if self.name in record.members else set()
        kept = {vbucket: position for vbucket, position in positions.items() if vbucket in own}
        # everything that it has goes into one file, so no older file stays in use
        kept_before = self.load(own - set(kept)) if own and kept else {}
        name = f"{self.name}-{unique_name()}"
        if kept:
            whole = {
                str(vbucket): position.to_json() for vbucket, position in {**kept_before, **kept}.items()
            }
            self._store.put(name, json.dumps(whole, separators=(",", ":")).encode())
        given = list(release)

        def saved(record: GroupRecord) -> GroupRecord:
            record = record.alive(self.name)
            if kept:
                record = record.saved(self.name, {**kept_before, **kept}, name)
            return record.released(self.name, given)

        try:
            self._change(saved)
        except GroupFenced:
            # if an answer was lost, the record may name the file: the others go on from it
            if kept and name not in self._read()[1].files.values():
                self._store.delete([name])
            raise

    def leave(self) -> None:
        """Free what it has immediately, at the positions that it saved."""
        try:
            if self._is_in:
                self._is_in = False
                self._change(lambda record: record.without([self.name]))
        finally:
            self._store.close()

    # the record

    def _turned(self, record: GroupRecord) -> GroupRecord:
        record = record.of_bucket(self._bucket, self._vbucket_count, self._bucket_uuid)
        if self.name not in record.members and not self._is_in:
            self._tidy()
            record = record.joined(self.name, self._slot, self.timeout_s)
        return record.alive(self.name).without(self._dead(record)).taking(self.name)

    def _tidy(self) -> None:
        """Remove files that members wrote but died before naming in the record: they are never used.

        The files are listed first: the writer of each was a member before that, and one that the record read
        afterwards does not have can no longer name its file.
        """
        names = self._store.names()
        _, record = self._read()
        named = set(record.files.values())
        self._store.delete(
            name for name in names if name not in named and name.rpartition("-")[0] not in record.members
        )

    def _dead(self, record: GroupRecord) -> list[str]:
        """The members that have not raised their number for too long."""
        now = self._clock.monotonic()
        seen = {}
        for name, entry in record.members.items():
            beat_seen = self._seen.get(name)
            seen[name] = (
                beat_seen if beat_seen is not None and beat_seen[0] == entry.beat else (entry.beat, now)
            )
        self._seen = seen
        return [
            name
            for name, (_, since) in seen.items()
            if name != self.name and now - since >= record.members[name].timeout_s
        ]

    def _read(self) -> tuple[int, GroupRecord]:
        version, data = self._store.read()
        if data is None:
            return version, GroupRecord(self._bucket, self._vbucket_count)
        return version, GroupRecord.from_bytes(data)

    def _change(self, change: Callable[[GroupRecord], GroupRecord]) -> GroupRecord:
        """Replace the record; try again while others come between."""
        for _ in range(_ATTEMPTS):
            asked_at = self._clock.monotonic()
            version, before = self._read()
            after = change(before)
            if self._store.replace(version, after.to_bytes()):
                if self.name in after.members:
                    self._is_in = True
                    self._renewed_at = asked_at
                gone = set(before.files.values()) - set(after.files.values())
                if gone:
                    self._store.delete(sorted(gone))
                return after
        raise StoreError(f"the record of the group changes too fast: {_ATTEMPTS} attempts failed")


def check_name(name: str) -> str:
    """The name of a group, which is part of file names and keys."""
    is_plain = all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in name)
    if not name or len(name) > 100 or not is_plain or name.startswith("."):
        raise UsageError(f"{name[:40]!r} is not a name of a group; use letters, digits and - _ .")
    return name
