"""What a group of readers knows: one document, which a member replaces only if it has not changed meanwhile.

    members   who takes part, each with a number that it raises to show that it lives
    owners    which member has which vbucket; one without an owner is free
    files     which file has the newest saved position of a vbucket

Every decision is a change of this document, so each is made once and all have one order: a member that was
away too long is no longer a member when it comes back, and can neither save nor hand over. Nothing in here
reads a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import GroupFenced, UsageError
from ...units import parse_vbuckets

__all__ = ["GroupRecord", "MemberEntry", "Slot", "format_vbuckets", "parse_slot"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Slot:
    """A fixed share of the vbuckets: number ``slot`` of ``total``, counted from 0."""

    slot: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.slot < self.total <= 1024:
            raise UsageError(
                f"there is no slot {self.slot} of {self.total}; slots are counted from 0, up to 1024 of them"
            )

    def vbuckets(self, count: int) -> range:
        """Its share: consecutive vbuckets."""
        return range(-(-self.slot * count // self.total), -(-(self.slot + 1) * count // self.total))


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """A member, as the others see it."""

    beat: int = 0
    """Grows while the member lives."""
    slot: Slot | None = None
    timeout_s: float = 30.0
    """How long it may be silent before the others give it up, and before it doubts its own membership."""


@dataclass(frozen=True)
class GroupRecord:
    """The document. Its methods return a new one and leave this one as it is."""

    bucket: str
    vbucket_count: int
    members: Mapping[str, MemberEntry] = field(default_factory=dict)
    owners: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)
    bucket_uuid: str = ""
    """The uuid of the bucket that the positions are in; empty if no server gave one."""

    # who has what

    def owned_by(self, member: str) -> set[int]:
        """The vbuckets of a member."""
        return {vbucket for vbucket, owner in self.owners.items() if owner == member}

    def share_of(self, member: str) -> int:
        """How many vbuckets a member without a slot should have now.

        Where they can't be divided evenly, the members that have the most get one more, so nothing moves
        without need.
        """
        counts = dict.fromkeys(self.members, 0)
        for owner in self.owners.values():
            counts[owner] += 1
        least, more = divmod(self.vbucket_count, len(self.members))
        richest = sorted(self.members, key=lambda name: (-counts[name], name))
        return least + (member in richest[:more])

    def surplus_of(self, member: str) -> set[int]:
        """What a member has beyond its share, and should hand over."""
        owned, slot = self.owned_by(member), self.members[member].slot
        if slot is not None:
            return owned - set(slot.vbuckets(self.vbucket_count))
        return set(sorted(owned)[self.share_of(member) :])

    # what a member does

    def joined(self, member: str, slot: Slot | None, timeout_s: float) -> GroupRecord:
        """A member joins. A slot has only one member: one that had it before is a member no longer."""
        if any((entry.slot is None) != (slot is None) for entry in self.members.values()):
            raise UsageError("all members of a group have slots, or none has one; wait until the others left")
        before = [name for name, entry in self.members.items() if slot is not None and entry.slot == slot]
        record = self.without(before)
        return replace(record, members={**record.members, member: MemberEntry(0, slot, timeout_s)})

    def alive(self, member: str) -> GroupRecord:
        """A member shows that it lives; `GroupFenced` if it is not a member."""
        entry = self.members.get(member)
        if entry is None:
            raise GroupFenced(member)
        return replace(self, members={**self.members, member: replace(entry, beat=entry.beat + 1)})

    def without(self, members: Iterable[str]) -> GroupRecord:
        """Members leave, or are given up: what they had is free, at their saved positions."""
        gone = set(members)
        return replace(
            self,
            members={name: entry for name, entry in self.members.items() if name not in gone},
            owners={vbucket: owner for vbucket, owner in self.owners.items() if owner not in gone},
        )

    def taking(self, member: str) -> GroupRecord:
        """A member takes free vbuckets, up to its share."""
        slot = self.members[member].slot
        if slot is not None:
            wanted = [v for v in slot.vbuckets(self.vbucket_count) if v not in self.owners]
        else:
            room = self.share_of(member) - len(self.owned_by(member))
            free = [v for v in range(self.vbucket_count) if v not in self.owners]
            wanted = free[: max(0, room)]
        return replace(self, owners={**self.owners, **dict.fromkeys(wanted, member)}) if wanted else self

    def saved(self, member: str, vbuckets: Iterable[int], file: str) -> GroupRecord:
        """The positions of these vbuckets are in a file; only the member's own count."""
        own = self.owned_by(member)
        return replace(self, files={**self.files, **{v: file for v in vbuckets if v in own}})

    def released(self, member: str, vbuckets: Iterable[int]) -> GroupRecord:
        """A member hands vbuckets over: they are free."""
        given = {vbucket for vbucket in vbuckets if self.owners.get(vbucket) == member}
        return replace(self, owners={v: owner for v, owner in self.owners.items() if v not in given})

    # as bytes

    def to_bytes(self) -> bytes:
        """The document as readable JSON."""
        by_file: dict[str, list[int]] = {}
        for vbucket, file in self.files.items():
            by_file.setdefault(file, []).append(vbucket)
        members: dict[str, dict[str, Any]] = {}
        for name, entry in sorted(self.members.items()):
            owned = format_vbuckets(self.owned_by(name))
            members[name] = {"beat": entry.beat, "timeout_s": entry.timeout_s, "vbuckets": owned}
            if entry.slot is not None:
                members[name]["slot"] = [entry.slot.slot, entry.slot.total]
        document = {
            "tailrace_group": _VERSION,
            "bucket": self.bucket,
            "bucket_uuid": self.bucket_uuid,
            "vbuckets": self.vbucket_count,
            "members": members,
            "positions": {file: format_vbuckets(vbuckets) for file, vbuckets in sorted(by_file.items())},
        }
        return json.dumps(document, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> GroupRecord:
        """Read what `to_bytes` wrote; `UsageError` if it is something else."""
        try:
            document = json.loads(data)
            if document["tailrace_group"] != _VERSION:
                raise UsageError(f"version {document['tailrace_group']!r} is of another Tailrace")
            members: dict[str, MemberEntry] = {}
            owners: dict[int, str] = {}
            for name, entry in document["members"].items():
                slot = entry.get("slot")
                members[name] = MemberEntry(
                    int(entry["beat"]),
                    None if slot is None else Slot(*slot),
                    float(entry["timeout_s"]),
                )
                owners |= dict.fromkeys(_vbuckets(entry["vbuckets"]), name)
            files = {v: file for file, vbuckets in document["positions"].items() for v in _vbuckets(vbuckets)}
            uuid = str(document.get("bucket_uuid", ""))
            return cls(str(document["bucket"]), int(document["vbuckets"]), members, owners, files, uuid)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"this is not the record of a group of readers: {error}") from None

    def of_bucket(self, bucket: str, vbucket_count: int, bucket_uuid: str) -> GroupRecord:
        """This record with the bucket's uuid filled in; `UsageError` if it is of another bucket."""
        if (self.bucket, self.vbucket_count) != (bucket, vbucket_count):
            raise UsageError(
                f"the group reads bucket {self.bucket!r} with {self.vbucket_count} vbuckets, not "
                f"{bucket!r} with {vbucket_count}; give it another name"
            )
        if self.bucket_uuid and bucket_uuid and self.bucket_uuid != bucket_uuid:
            raise UsageError(
                f"the group reads a bucket {bucket!r} that was deleted and created again (its uuid was "
                f"{self.bucket_uuid} and is {bucket_uuid}), and its positions mean nothing in the new one; "
                "give it another name to start over"
            )
        return replace(self, bucket_uuid=self.bucket_uuid or bucket_uuid)


def format_vbuckets(vbuckets: Iterable[int]) -> str:
    """``0-7,9``, as `parse_vbuckets` reads it."""
    runs: list[list[int]] = []
    for vbucket in sorted(vbuckets):
        if runs and runs[-1][1] == vbucket - 1:
            runs[-1][1] = vbucket
        else:
            runs.append([vbucket, vbucket])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _vbuckets(text: Any) -> list[int]:
    return (parse_vbuckets(text) or []) if text else []


def parse_slot(text: str, hostname: str) -> Slot:
    """``1/3``, or ``statefulset/3`` for the number at the end of this pod's host name."""
    number, slash, total = text.partition("/")
    if number == "statefulset":
        number = hostname.rpartition("-")[2]
        if not number.isdecimal():
            raise UsageError(
                f"the host name {hostname[:60]!r} does not end with a number, as a StatefulSet's pods do"
            )
    if not slash or not (number.isascii() and number.isdecimal() and total.isascii() and total.isdecimal()):
        raise UsageError(f"{text[:40]!r} is not a slot; write 0/3, counted from 0, or statefulset/3")
    return Slot(int(number), int(total))
