"""A question to all copies of some vbuckets: up to which seqno is a branch on your disk?

Rules: docs/spec/servers.md#persistence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..connstr import Address
from ..model import MAX_U64
from ..protocol.dcp.reader import DcpReader
from .nodes import KnownNode, Nodes
from .question_scripts import persisted_seqnos
from .survey import AwayNodes, SurveyPatience

__all__ = ["CopiesOnDisk", "CopySurvey", "counted", "in_words"]

_SHOWN = 5


@dataclass(frozen=True)
class CopiesOnDisk:
    """How much of each vbucket is on disk on all nodes that have it."""

    seqnos: Mapping[int, int]
    """By vbucket: the seqno that every copy has. 0 if one can't say, or does not know the branch yet."""
    slowest: Mapping[int, str]
    """By vbucket: the node that has the least of it, and why if it can't be asked."""


class CopySurvey:
    """Asks the active and the replicas that the map names; ``branches`` are vb_uuids by vbucket."""

    def __init__(
        self,
        nodes: Nodes,
        branches: Mapping[int, int],
        *,
        patience_s: float | None,
        wake_in: Callable[[float], object],
        away: AwayNodes,
    ) -> None:
        """``wake_in`` calls `is_answered` again after so many seconds; ``away`` nodes are not asked."""
        self._nodes = nodes
        self._branches = branches
        self._patience_s = patience_s
        self._away = away
        self._patience = SurveyPatience(away, wake_in)
        self._answers: dict[Address, dict[int, int]] = {}
        self._asked: dict[Address, DcpReader] = {}

    def is_answered(self, now: float) -> bool:
        """Ask the nodes that were not asked yet; return whether all that can be reached have answered."""
        wanted: dict[Address, tuple[KnownNode, dict[int, int]]] = {}
        for vbucket, vb_uuid in self._branches.items():
            for node in self._nodes.copies_of(vbucket):
                wanted.setdefault(node.address, (node, {}))[1][vbucket] = vb_uuid
        silent = []
        for address, (node, branches) in wanted.items():
            if address in self._answers:
                continue
            silent.append(node)
            if node.is_ready and node not in self._away and self._asked.get(address) is not node.link:
                assert node.link is not None
                self._asked[address] = node.link
                node.link.ask(persisted_seqnos(branches), partial(self._answered, address), now)
        return self._patience.is_over(silent, now)

    def _answered(self, address: Address, seqnos: dict[int, int]) -> None:
        self._answers[address] = seqnos
        self._away.answered(address)

    def result(self, now: float) -> CopiesOnDisk:
        """What the copies have in common."""
        seqnos: dict[int, int] = {}
        slowest: dict[int, str] = {}
        for vbucket in self._branches:
            active = self._nodes.node_of(vbucket)
            seqnos[vbucket], slowest[vbucket] = MAX_U64, ""
            for node in self._nodes.copies_of(vbucket):
                answer = self._answers.get(node.address, {}).get(vbucket)
                if answer is None and node is not active and node.is_given_up(self._patience_s, now):
                    continue
                if (answer or 0) < seqnos[vbucket]:
                    seqnos[vbucket] = answer or 0
                    slowest[vbucket] = in_words(
                        node, now, is_active=node is active, is_late=self._away.is_late(node)
                    )
            if active is None:
                seqnos[vbucket], slowest[vbucket] = 0, "no node has it"
        return CopiesOnDisk(seqnos, slowest)


def in_words(node: KnownNode, now: float, *, is_active: bool, is_late: bool = False) -> str:
    """A node that holds changes back or can't be asked, in words."""
    role = "" if is_active else "the replica at "
    trouble = "does not answer" if is_late else "" if node.is_ready else node.state(now)
    return f"{role}{node.address}{trouble and f' ({trouble})'}"


def counted(reasons: Mapping[int, str]) -> str:
    """How many vbuckets have each reason, the most frequent first."""
    most = Counter(reasons.values()).most_common(_SHOWN)
    return "; ".join(f"{count} vbuckets: {reason}" for reason, count in most)
