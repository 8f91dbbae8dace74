"""The snapshots that a replica has received, and the one that it is receiving."""

from __future__ import annotations

from typing import Any

from .base import ReceivedRange

__all__ = ["ReceivedSnapshots"]

_MAX_FOLDED = 16
"""Received snapshots with gaps that are remembered one by one; older ones are remembered as one."""


class ReceivedSnapshots:
    """Where a replica's snapshots begin and end, as far as somebody may still ask."""

    __slots__ = ("announced_purge", "folded", "has_gaps", "has_history", "lacks_up_to", "newest", "on_disk")

    def __init__(self, seqno: int = 0) -> None:
        self.newest = self.on_disk = ReceivedRange(seqno, seqno)  # ... as a restart would find it
        self.announced_purge = 0  # of the newest, if nothing of it is here yet
        self.has_gaps = True  # what is here of the newest; unknown (True) after a restart
        self.has_history = False  # the newest lacks no version that a history should have
        self.folded: list[ReceivedRange] = []  # those with gaps, rising
        self.lacks_up_to = 0  # a history's versions, of snapshots that are complete

    def around(self, seqno: int) -> ReceivedRange:
        """The snapshot inside which a seqno lies, where older versions were folded away by whoever sent it;
        inside of none it is a range by itself.

        In such a snapshot there is no state between its start and its end that the vbucket really had.
        """
        for folded in self.folded:
            if folded.start < seqno < folded.end:
                return folded
        return ReceivedRange(seqno, seqno)

    def folded_up_to(self, high_seqno: int) -> int:
        """Up to here versions are missing that whoever sent the snapshots had folded away, and that a history
        should have; 0 if none are.
        """
        if self.has_gaps and not self.has_history and high_seqno < self.newest.end:
            return self.newest.end
        return self.lacks_up_to

    def begin(self, complete: int, high_seqno: int, end: int, purge_seqno: int, *, history: bool) -> None:
        """A snapshot is announced when everything up to ``complete`` can be trusted. With ``history``, all
        that is missing in it are versions of collections that do without.
        """
        if complete == high_seqno:
            self.has_gaps, self.has_history = False, history
        else:
            self.has_history &= history
            # A snapshot that is taken up again may be cut shorter than it was announced at first. What is
            # here of it was folded up to the first end.
            end = max(end, self.newest.end)
        self.newest = ReceivedRange(complete, end)
        self.announced_purge = purge_seqno

    def end(self, complete: int, high_seqno: int, needed: int) -> None:
        """No more comes of the newest."""
        self.newest = ReceivedRange(complete, high_seqno)
        if complete < high_seqno:
            self.note_folded(needed)

    def note_folded(self, needed: int) -> None:
        """The newest is complete; if it has gaps, that is remembered. Nobody asks for a state before
        ``needed``.
        """
        if not self.has_gaps:
            return
        if not self.has_history:
            self.lacks_up_to = max(self.lacks_up_to, self.newest.end)
        folded = [folded for folded in self.folded if folded.end > needed] + [self.newest]
        if len(folded) > _MAX_FOLDED:
            folded[:2] = [ReceivedRange(folded[0].start, folded[1].end)]
        self.folded = folded

    def up_to(self, seqno: int) -> ReceivedSnapshots:
        """What is left after a rollback."""
        left = ReceivedSnapshots(seqno)
        left.folded = [folded for folded in self.folded if folded.end <= seqno]
        left.lacks_up_to = min(self.lacks_up_to, seqno)
        return left

    def to_json(self) -> dict[str, Any]:
        meta: dict[str, Any] = {"received": list(self.newest)}
        if self.folded:
            meta["folded"] = [list(folded) for folded in self.folded]
        if self.lacks_up_to:
            meta["lacks_up_to"] = self.lacks_up_to
        return meta

    def take_json(self, meta: dict[str, Any]) -> None:
        """The reverse of `to_json`."""
        self.newest = self.on_disk = ReceivedRange(*meta["received"])
        self.folded = [ReceivedRange(*ends) for ends in meta.get("folded", [])]
        ends = [folded.end for folded in self.folded] if "lacks_up_to" not in meta else [meta["lacks_up_to"]]
        self.lacks_up_to = max(ends, default=0)
