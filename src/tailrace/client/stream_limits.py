"""Where streams start and end if that is "now": asked of the nodes before and after the stream requests.

Rules: docs/spec/header.md#vbucket-commands (GET_ALL_VB_SEQNOS), docs/spec/dcp.md#end-seqno.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..connstr import Address
from ..errors import ConnectError
from ..history import FailoverLog
from ..model import Position
from ..protocol.dcp.reader import DcpReader
from ..protocol.states import ReadingInput, ReadingState
from .nodes import Nodes
from .progress import Progress, SavedPosition
from .question_scripts import high_seqnos, seqnos_and_logs

__all__ = ["StreamLimits"]


class StreamLimits:
    """Asks nodes for the high seqnos and branches of vbuckets, and records the answers in their progress."""

    def __init__(self, nodes: Nodes, now: Callable[[], float]) -> None:
        self.is_over = False
        """Whether the reading was closed."""
        self.started: set[int] = set()
        """VBuckets that start "now" and whose nodes have said where that is; `Reading` clears it."""
        self._nodes = nodes
        self._resolving: set[Address] = set()
        self._now = now

    def lost(self, address: Address) -> None:
        """The connection is gone, and with it the answer that was due."""
        self._resolving.discard(address)

    def resolve(self, address: Address, waiting: list[Progress]) -> None:
        """Ask a node for the high seqnos and branches of its vbuckets, unless it is being asked already."""
        node = self._nodes.node_of(waiting[0].vbucket)
        if address in self._resolving or node is None or node.link is None:
            return
        self._resolving.add(address)
        wants_logs = [progress.vbucket for progress in waiting if progress.wants_start]

        def answered(answer: tuple[dict[int, int], dict[int, FailoverLog]]) -> None:
            self._resolving.discard(address)
            seqnos, logs = answer
            for progress in waiting:
                if progress.state is ReadingState.UNRESOLVED:
                    self._resolved(progress, seqnos, logs)
            self._nodes.on_change()

        node.link.ask(seqnos_and_logs(wants_logs), answered, self._now())

    def _resolved(
        self, progress: Progress, seqnos: Mapping[int, int], logs: Mapping[int, FailoverLog]
    ) -> None:
        vbucket = progress.vbucket
        if vbucket not in seqnos or (progress.wants_start and vbucket not in logs):
            self._nodes.ask_for_map(self._now())
            progress.wait(f"its node does not have vbucket {vbucket}", self._now())
            return
        high = seqnos[vbucket]
        if progress.wants_start:
            log = logs[vbucket]
            progress.stream.log = log
            progress.stream.position = progress.delivered = Position.at(
                log.newest.vb_uuid if high else 0, high
            )
            progress.origin = high
            progress.saved = SavedPosition(progress.delivered, log, (), 0, high)
            self.started.add(vbucket)
        if progress.ends_at_most is not None:
            progress.end_seqno = min(progress.ends_at_most, high)
        progress.wants_start = False
        progress.feed(ReadingInput.STREAM_WANTED)

    def confirm_ends(self, link: DcpReader, requested: list[Progress]) -> None:
        """Ask for high seqnos again, after the stream requests.

        A server that took changes back after its first answer has accepted an end that it may never reach.
        If it takes changes back after the second answer, it ends the stream.
        """
        ends = {progress: progress.end_seqno for progress in requested if progress.ends_at_most is not None}
        if not ends or not link.HAS_SEQNOS:
            return

        def answered(seqnos: dict[int, int]) -> None:
            streams = set(map(id, link.streams.values()))
            gone = [
                progress
                for progress, end in ends.items()
                if seqnos.get(progress.vbucket, end) < end == progress.end_seqno
                and id(progress.stream) in streams
            ]
            if self.is_over or not gone:
                return
            for progress in gone:
                progress.abandon([link], self._now())
                progress.wait(f"the end of vbucket {progress.vbucket} was taken back", self._now())
            if link.is_spent:
                raise ConnectError(f"{gone[0].trouble}: connecting again")
            self._nodes.on_change()

        link.ask(high_seqnos(), answered, self._now())
