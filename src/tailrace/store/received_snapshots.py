"""The snapshots that a replica has received, and the one that it is receiving."""

from __future__ import annotations

from typing import Any

from .base import ReceivedRange

__all__ = ["ReceivedSnapshots"]

_MAX_FOLDED = 16
"""Received snapshots with gaps that are remembered one by one; older ones are remembered as one."""


class ReceivedSnapshots:
    """Where a replica's snapshots begin and end, as far as it still matters."""

    __slots__ = ("announced_purge", "folded", "has_gaps", "has_history", "lacks_up_to", "newest", "on_disk")

    def __init__(self, seqno: int = 0) -> None:
        self.newest = self.on_disk = ReceivedRange(seqno, seqno)  # ... as a restart would find it
        self.announced_purge = 0  # of the newest, if nothing of it is here yet
        self.has_gaps = True  # in what is here of the newest; unknown (True) after a restart
        self.has_history = False  # the newest lacks no version that a history should have
        self.folded: list[ReceivedRange] = []  # those with gaps, ascending
        self.lacks_up_to = 0  # versions that a history should have, in complete snapshots

    def around(self, seqno: int) -> ReceivedRange:
        """The snapshot in which a seqno lies and whose sender folded older versions away; if there is
        none, the seqno as a range by itself.

        Between the start and the end of such a snapshot there is no state that the vbucket really had.
        """
        for folded in self.folded:
            if folded.start < seqno < folded.end:
                return folded
        return ReceivedRange(seqno, seqno)

    def folded_up_to(self, high_seqno: int) -> int:
        """Up to here, versions are missing that a history should have, because the sender folded them away;
        0 if none are.
        """
        if self.has_gaps and not self.has_history and high_seqno < self.newest.end:
            return self.newest.end
        return self.lacks_up_to

    def begin(self, complete: int, high_seqno: int, end: int, purge_seqno: int, *, history: bool) -> None:
        """Note an announced snapshot; everything up to ``complete`` can be trusted. With ``history``, it
        lacks only versions in collections without history.
        """
        if complete == high_seqno:
            self.has_gaps, self.has_history = False, history
        else:
            self.has_history &= history
            # A resumed snapshot may be shorter than it was announced at first, but what is here of it was
            # folded up to the first end.
            end = max(end, self.newest.end)
        self.newest = ReceivedRange(complete, end)
        self.announced_purge = purge_seqno

    def end(self, complete: int, high_seqno: int, needed: int) -> None:
        """Nothing more comes of the newest snapshot."""
        self.newest = ReceivedRange(complete, high_seqno)
        if complete < high_seqno:
            self.note_folded(needed)

    def note_folded(self, needed: int) -> None:
        """Remember the newest snapshot, which is complete, if it has gaps. Nobody asks for a state before
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
