"""What a vbucket no longer knows about its past."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .merging import Losses

__all__ = ["Forgotten"]


@dataclass(slots=True)
class Forgotten:
    """How much compaction has forgotten."""

    purge_seqno: int = 0  # tombstones up to here may be missing
    rollback_floor: int = 0  # states before this one can't come back, except the empty one
    history_floor: int = 0
    """Before it, versions are missing that a history should have; never above ``rollback_floor``."""
    rev_floor: int = 0
    """Highest rev of a tombstone that was purged: a document that comes back goes on from there."""
    deleted_rev: int = 0  # highest rev of a tombstone that is or was here

    def take(self, losses: Losses) -> None:
        """Add what a merge has forgotten."""
        self.purge_seqno = max(self.purge_seqno, losses.purge_seqno)
        self.rollback_floor = max(self.rollback_floor, losses.floor)
        self.history_floor = max(self.history_floor, losses.history_floor)
        self.rev_floor = max(self.rev_floor, losses.rev)

    def take_json(self, meta: dict[str, Any]) -> None:
        """Take over what the manifest says."""
        self.rollback_floor = meta["rollback_floor"]
        self.history_floor = meta.get("history_floor", self.rollback_floor)
        self.rev_floor = meta["rev_floor"]
        self.deleted_rev = meta.get("deleted_rev", self.rev_floor)  # older stores: of those purged
