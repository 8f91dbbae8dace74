"""What a cautious reader has handed out, and that the bucket still has it whenever the reader goes on."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from cluster.sim_truth import Truth, Wrong
from tailrace.model import MAX_U64


class HandedOut:
    """By vbucket, the newest change that was handed out."""

    def __init__(self, truth: Truth, who: str, rewound: AbstractSet[int]) -> None:
        """``rewound``: vbuckets that were made to forget changes, on disk or not."""
        self._truth = truth
        self._who = who
        self._rewound = rewound
        self._newest: dict[int, tuple[int, int]] = {}
        """Branch and seqno of a change."""

    def note(self, vbucket: int, vb_uuid: int, seqno: int) -> None:
        """Everything up to here was handed out; its history must have what was handed out before."""
        log = self._truth.lineage(vbucket, vb_uuid)
        if log is None:
            return
        before = self._newest.get(vbucket)
        if before is not None and vbucket not in self._rewound:
            branch = log.range_of(before[0], MAX_U64)
            if branch is None or before[1] > branch.upper:
                raise Wrong(
                    f"the {self._who} was given {before[1]} of {before[0]:#x} in vbucket {vbucket}, and goes "
                    f"on at {seqno} of {log.to_json()}: it was taken back"
                )
        newest = self._truth.newest_change(vbucket, log, seqno)
        if newest is not None and (before is None or vbucket in self._rewound or newest[1] >= before[1]):
            self._newest[vbucket] = newest
