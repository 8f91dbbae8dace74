"""Rollbacks of what an application had: counted and logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..logs import log_event

__all__ = ["RollbackCount"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RollbackCount:
    """The rollbacks of one reading."""

    rollbacks: int = 0
    changes: int = 0
    """Counted by seqnos: there were fewer if the bucket keeps only the newest change of a key."""

    def note(self, vbucket: int, from_seqno: int, to_seqno: int) -> None:
        """A vbucket went back that the application had up to ``from_seqno``."""
        self.rollbacks += 1
        self.changes += max(0, from_seqno - to_seqno)
        facts = {"vbucket": vbucket, "from_seqno": from_seqno, "to_seqno": to_seqno}
        log_event(_log, logging.INFO, "rollback", **facts)
