"""The resume policy: which streams to request, from where, and what to do about every answer.

Sans-IO, and the same under both pumps. A `Reading` is one run of `changes()` or `batches()`: it has a
`Progress` for each vbucket and moves it on when the pump gives it a `turn`, when a portion of the streams is
taken (`take`) and when the application is done with it (`finish`).

Rules: docs/spec/dcp.md#what-a-reader-keeps, docs/spec/dcp.md#rollback-at-the-receiver.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from ..connstr import Address
from ..errors import ConnectError, LoginError, StatusError, UsageError
from ..history import retreat
from ..model import MAX_U64, Position
from ..protocol.dcp.delivery import ChangeDelivery
from ..protocol.dcp.reader import DcpReader
from ..protocol.dcp.reader_stream import (
    MarkerReceived,
    ReaderStream,
    RequestRefused,
    StreamEnded,
    StreamOpened,
)
from ..protocol.states import ReadingInput, ReadingState
from ..wire.codes import AddStreamFlag, Status, StreamEndStatus, status_name
from ..wire.dcp import DcpStreamRequestResponse
from .catalog import Catalog
from .cluster_map import ClusterMap
from .held_portion import HeldPortion
from .nodes import KnownNode, Nodes
from .portion import Portion, end_reason, release
from .progress import Progress, Roster, SavedPosition
from .read_options import ReadOptions, SeenEnd, check_vbuckets
from .retry import Backoff, is_temporary
from .rollback_count import RollbackCount
from .stream_limits import StreamLimits

__all__ = ["Reading"]


_ACTIVE_VB_ONLY = int(AddStreamFlag.ACTIVE_VB_ONLY)
_OVER_FOR_GOOD = frozenset({StreamEndStatus.FILTER_EMPTY})
_REQUESTED_AT_ONCE = 128
"""How many streams are requested in a turn: nodes begin with them while we request more. There is no limit
for streams that end "now", since their ends are confirmed together, nor if one request names them all.
"""


class Reading:
    """Streams of the vbuckets of one bucket, over whatever connections there are."""

    def __init__(
        self,
        nodes: Nodes,
        catalog: Catalog,
        options: ReadOptions,
        saved: Mapping[int, SavedPosition],
        *,
        rng: random.Random,
    ) -> None:
        self.options = options
        self.progress: dict[int, Progress] = {}
        self._roster = Roster(nodes.patience)
        self._needed_by: tuple[ClusterMap, int] | None = None
        self._nodes = nodes
        self._catalog = catalog
        self._saved = saved
        self._rng = rng
        self._turns: deque[Address] = deque()
        self._closed: dict[Address, Exception] = {}
        self._now = 0.0
        self.taken_back = RollbackCount()
        self._is_begun = False
        self.is_over = False
        """Whether the reading was closed, at its end or before."""
        self._held = HeldPortion(
            nodes,
            self.progress,
            lambda: self._now,
            patience_s=options.replica_patience_s,
            timeout_s=options.persisted_timeout_s,
        )
        self._limits = StreamLimits(nodes, lambda: self._now)

    # the state of things

    @property
    def finished(self) -> bool:
        """Whether every vbucket has reached its end, and nothing of it is held back."""
        is_at_end = self._is_begun and self._held.is_empty and self._roster.done == len(self.progress)
        return is_at_end and not self.options.is_shared

    @property
    def holds_back(self) -> bool:
        """Whether changes that came wait for the disks of all copies, or for the names of collections."""
        return self._held.is_waiting or bool(self._catalog.trouble)

    def positions(self) -> dict[int, Position]:
        """What the application has, by vbucket."""
        return {vbucket: progress.delivered for vbucket, progress in sorted(self.progress.items())}

    def to_save(self) -> dict[int, SavedPosition]:
        """The last whole state of every vbucket of which the application has one."""
        delivered = {
            vbucket: progress.saved
            for vbucket, progress in self.progress.items()
            if progress.saved is not None
        }
        return {**{key: saved for key, saved in self._saved.items() if key not in self.progress}, **delivered}

    def new_starts(self) -> dict[int, SavedPosition]:
        """Where vbuckets that start "now" begin, as far as their nodes have said so since the last call."""
        starts = self.known_starts(self._limits.started)
        self._limits.started.clear()
        return starts

    def states(self) -> dict[str, int]:
        """How many vbuckets are in which state."""
        return dict(Counter(progress.state.name.lower() for progress in self.progress.values()))

    def waits_for(self, now: float) -> str:
        """What it waits for when nothing comes, in words."""
        if self._held.is_waiting:
            return self._held.waits_for()
        if not self._is_begun:
            return "the cluster map"
        if self._catalog.trouble:
            return self._catalog.trouble
        states: dict[str, int] = {}
        for progress in self.progress.values():
            if progress.state in (ReadingState.OPEN, ReadingState.DONE):
                continue
            node = self._nodes.node_of(progress.vbucket)
            text = progress.state.value
            if progress.state is ReadingState.WAITING:
                text = f"{progress.trouble}; next attempt in {max(0.0, progress.retry_at - now):.1f} s"
            elif node is None:
                text = "no node has it"
            elif not node.is_ready:
                text = f"{node.address}: {node.state(now)}"
            states[text] = states.get(text, 0) + 1
        if states:
            return "; ".join(f"{count} vbuckets: {text}" for text, count in list(states.items())[:5])
        return "nothing: every vbucket is done" if self.finished else "the next change"

    # moving on

    def turn(self, now: float) -> None:
        """Do what is due: whenever something happened, and when `next_timer` says so."""
        self._now = now
        self._roster.patience.passed(now)
        if self._nodes.map is None or self.is_over:
            return
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        self._need_nodes(self._nodes.map)
        self._held.turn()  # always: a timer that is due and not handled would come again immediately
        self._catalog.turn(self._nodes.ready(), now)
        unresolved: dict[Address, list[Progress]] = {}
        requested: dict[DcpReader, list[Progress]] = {}
        left = _REQUESTED_AT_ONCE
        aside = self._held.aside
        for progress in list(self._roster.unsettled.values()):
            if aside and progress.vbucket in aside:
                continue
            if progress.state is ReadingState.WAITING and progress.retry_at <= now:
                progress.make_ready()
            if progress.state not in (ReadingState.READY, ReadingState.UNRESOLVED):
                continue
            node = self._nodes.node_of(progress.vbucket)
            if node is None:
                self._nodes.ask_for_map(now)
                progress.wait(f"no node has vbucket {progress.vbucket}", self._now)
            elif node.is_ready and node.address not in self._closed:
                assert node.link is not None
                if not self._catalog.can_request(node.link):
                    continue
                if progress.state is ReadingState.READY:
                    is_one_of_many = progress.ends_at_most is None and not node.link.ONE_REQUEST
                    if is_one_of_many and node.link.wants_answer:
                        continue  # look at all: a timer that is due and not handled would come again
                    self._request(progress, node)
                    requested.setdefault(node.link, []).append(progress)
                    left -= is_one_of_many
                    if not left:
                        self._nodes.on_change()
                        break
                else:
                    unresolved.setdefault(node.address, []).append(progress)
        for address, waiting in unresolved.items():
            self._limits.resolve(address, waiting)
        for link, in_requests in requested.items():
            self._limits.confirm_ends(link, in_requests)

    def _need_nodes(self, map_: ClusterMap) -> None:
        """Say which nodes we need connections to, if that may have changed."""
        needed_by = map_, self._roster.resting_changes
        mitigates = self.options.persisted_only
        if needed_by == self._needed_by and not mitigates:
            return
        self._needed_by = needed_by
        wanted = [
            vb
            for vb, progress in self.progress.items()
            if progress.machine.state not in (ReadingState.DONE, ReadingState.PAUSED)
        ]
        copies = {*wanted, *self._held.vbuckets} if mitigates else ()
        self._nodes.need([*wanted, *self._held.vbuckets], copies_of=copies)

    def next_timer(self) -> float | None:
        """When the next `turn` is due even if nothing happens until then."""
        if self.is_over:
            return None
        roster = self._roster
        times = [
            progress.retry_at
            for progress in roster.unsettled.values()
            if progress.machine.state is ReadingState.WAITING
        ]
        if not roster.patience.is_with_application:
            watched = roster.watched(self._now, self.options.retry_for_s)
            # what is overdue waits for something else, which will bring the next turn
            times += [due for due in map(self._error_due, watched) if self._now < due < math.inf]
        if (observe_at := self._held.next_timer()) is not None:
            times.append(observe_at)
        return min(times, default=None)

    def check(self, now: float) -> None:
        """Raise `ConnectError` if a vbucket could not be read for too long."""
        if self.is_over:
            return
        self._held.check()
        self._roster.patience.passed(now)
        for progress in self._roster.watched(now, self.options.retry_for_s):
            if now < self._error_due(progress) or self._may_be_answered(progress):
                continue
            if progress.troubled_since is not None:
                raise ConnectError(
                    f"vbucket {progress.vbucket} can't be read for {self.options.retry_for_s:g} s: "
                    f"{progress.trouble}"
                )
            raise ConnectError(
                f"the stream request of vbucket {progress.vbucket} is not answered for "
                f"{progress.unanswered_s(now):.0f} s"
            )

    def _error_due(self, progress: Progress) -> float:
        return progress.error_due(self.options.retry_for_s)

    def _may_be_answered(self, progress: Progress) -> bool:
        """Whether its answer may be among what the application has not taken yet."""
        node = self._nodes.node_of(progress.vbucket)
        return (
            progress.state is ReadingState.REQUESTED
            and node is not None
            and node.link is not None
            and node.link.next_chunk() is not None
        )

    def close(self) -> None:
        """Stop reading: the streams end, the connections stay."""
        self.is_over = self._limits.is_over = True
        if (held := self._held.give_up()) is not None:
            release(held)
        for _, link in self._nodes.links():
            for stream in list(link.streams.values()):
                link.close_stream(stream.vbucket)

    def pause(self, vbuckets: Iterable[int]) -> None:
        """Stop the streams of some vbuckets; their positions are those of the application."""
        for progress in self._chosen(vbuckets):
            if progress.state is ReadingState.DONE:
                continue
            progress.abandon([link for _, link in self._nodes.links()], self._now)
            progress.feed(ReadingInput.PAUSED)
            progress.troubled_since = progress.unproven_since = None

    def resume(self, vbuckets: Iterable[int]) -> None:
        """Go on where `pause` stopped."""
        for progress in self._chosen(vbuckets):
            if progress.state is ReadingState.PAUSED:
                progress.make_ready()

    # of a group

    def admit(self, positions: Mapping[int, SavedPosition | None]) -> None:
        """Read these vbuckets too, each from its position, or from where the reading starts."""
        for vbucket, saved in positions.items():
            self._add(vbucket, saved)
        self._needed_by = None

    def known_starts(self, vbuckets: Iterable[int]) -> dict[int, SavedPosition]:
        """Where those that start "now" begin, if their nodes have said so and nothing has come yet."""
        progresses = [self.progress[vbucket] for vbucket in vbuckets]
        return {
            progress.vbucket: progress.saved
            for progress in progresses
            if progress.saved is not None and progress.delivered.seqno == progress.origin
        }

    def can_leave(self, vbucket: int, *, is_urgent: bool) -> bool:
        """Whether all that was handed out of it ends with a whole snapshot, and nothing of it is held.

        If it is urgent, it may be left inside a snapshot: what was handed out of that comes again elsewhere.
        """
        progress = self.progress[vbucket]
        is_inside = progress.delivered.is_partial or progress.stream.oso_high is not None
        return (is_urgent or not is_inside) and vbucket not in self._held.vbuckets

    def dismiss(self, vbuckets: Iterable[int]) -> None:
        """Stop reading these; another reader goes on from what was saved of them."""
        self.pause(vbuckets)

    # portions of the streams

    def take(self, now: float) -> Portion | None:
        """The next portion, from each connection in turn; None if there is nothing now."""
        self._now = now
        self._roster.patience.came_back(now)
        portion = self._next_portion()
        if portion is not None:
            self._roster.patience.handed_over(now)
        return portion

    def _next_portion(self) -> Portion | None:
        if not self._held.is_empty:
            gone = {where: link for where, link in self._nodes.links() if where in self._closed}
            if not self._held.is_of(list(gone.values())):
                # what they brought would have to wait too, and the held portion needs answers of their nodes
                for address, lost in gone.items():
                    lost.discard()
                    self._lose(address, lost, self._closed.pop(address))
                return self._held.take()
            release(self._held.drop())
        for address, _ in self._nodes.links():
            if address not in self._turns:
                self._turns.append(address)
        for _ in range(len(self._turns)):
            address = self._turns[0]
            self._turns.rotate(-1)
            link = next((link for where, link in self._nodes.links() if where == address), None)
            if link is None:
                self._turns.remove(address)
                continue
            portion = self._take_from(address, link)
            if portion is not None or not self._held.is_empty:
                return portion  # another node's portion would replace the held one
        return None

    def finish(self, portion: Portion) -> None:
        """The application has all of a portion."""
        for vbucket, position in portion.ends.items():
            if (progress := self.progress.get(vbucket)) is not None:
                progress.delivered_up_to(position)
        release(portion)

    def link_closed(self, address: Address, error: Exception) -> None:
        """A connection is gone; what came before that is delivered first."""
        self._closed[address] = error

    def _take_from(self, address: Address, link: DcpReader) -> Portion | None:
        if self._catalog.awaits_names_of(link):
            if address not in self._closed:
                return None
            link.discard()  # the names of their collections will not come; these changes come again
        while (delivery := link.next_delivery()) is not None:
            portion = self._portion(address, link, delivery)
            if portion.is_empty:
                self.finish(portion)
            elif self.options.persisted_only and (portion.row_count or portion.left_out):
                self._held.hold(portion)
                return self._held.take()
            else:
                return portion
        if address in self._closed:
            self._lose(address, link, self._closed.pop(address))
        return None

    def _portion(self, address: Address, link: DcpReader, delivery: ChangeDelivery) -> Portion:
        portion = Portion(link, delivery, self.progress, self._catalog)
        for control in delivery.controls:
            event = control.event
            progress = self.progress[event.stream.vbucket]
            match event:
                case StreamOpened():
                    had = progress.delivered.seqno
                    progress.opened(event.position, self._now)
                    progress.history = event.stream.log
                    if event.rolled_back_to is not None:
                        self.taken_back.note(event.stream.vbucket, had, event.rolled_back_to)
                case MarkerReceived():
                    progress.is_owed = True
                case RequestRefused():
                    self._refused(progress, event, address)
                case StreamEnded():
                    self._ended(progress, event.status, address)
            portion.tell(control, is_done=progress.state is ReadingState.DONE)
        portion.leave_out()
        return portion

    def _lose(self, address: Address, link: DcpReader, error: Exception) -> None:
        """A connection is gone and empty: its streams need another one."""
        # what waited for an answer is in trouble now: handshakes that keep succeeding are no progress
        asked = [
            progress
            for progress in self.progress.values()
            if progress.state in (ReadingState.UNRESOLVED, ReadingState.READY)
            and progress.vbucket not in self._held.aside
            and (node := self._nodes.node_of(progress.vbucket)) is not None
            and node.link is link
        ]
        why = str(error) or type(error).__name__
        streams = [self.progress[stream.vbucket] for stream in link.streams.values()]
        has_moved = any(progress.has_moved for progress in streams)
        for progress in streams:
            progress.stream.given_up()
            if progress.state is ReadingState.OPEN and not progress.leave(self._now, is_proven=has_moved):
                progress.wait(why, self._now)
            elif progress.state in (ReadingState.OPEN, ReadingState.REQUESTED):
                if progress.state is ReadingState.REQUESTED:
                    asked.append(progress)
                progress.make_ready()
        for progress in asked:
            progress.in_trouble(why, self._now)
        self._limits.lost(address)
        self._nodes.lost(address, error, self._now)

    # decisions

    def _begin(self) -> None:
        options, count = self.options, self._nodes.map.vbucket_count if self._nodes.map else 0
        chosen: Iterable[int] = range(count) if options.vbuckets is None else options.vbuckets
        check_vbuckets(count, chosen, options.start, options.end)
        if options.persisted_only:
            self._nodes.refuse_ephemeral()
        if not isinstance(options.end, str):
            chosen = [vbucket for vbucket in chosen if vbucket in options.end]
        for vbucket in () if options.is_shared else chosen:
            self._add(vbucket, self._saved.get(vbucket))

    def _add(self, vbucket: int, saved: SavedPosition | None) -> None:
        """Read a vbucket, from its saved position or from where the reading starts."""
        options = self.options
        progress = Progress(ReaderStream(vbucket), Backoff(self._rng), self._roster)
        if saved is not None:
            progress.restore(saved)
        elif not isinstance(options.start, str):
            progress.restore(SavedPosition(options.start.get(vbucket, Position.BEGINNING)))
        else:
            progress.wants_start = options.start == "now"
        if options.end == "now":
            progress.ends_at_most = MAX_U64
        elif isinstance(options.end, SeenEnd):
            progress.ends_at_most = options.end[vbucket]
        elif not isinstance(options.end, str):
            progress.end_seqno = options.end[vbucket]
        progress.make_ready()
        self.progress[vbucket] = progress

    def _request(self, progress: Progress, node: KnownNode) -> None:
        link = node.link
        assert link is not None
        progress.requested(self._now)
        link.open_stream(
            progress.stream,
            end_seqno=progress.end_seqno,
            flags=_ACTIVE_VB_ONLY,
            value=self._catalog.request_value(link, progress.stream.purge_seqno),
        )
        if link.next_chunk() is not None:
            self._nodes.on_change()  # in the older dialects some answers are known immediately

    def _refused(self, progress: Progress, refused: RequestRefused, address: Address) -> None:
        status, what = refused.status, f"the stream request of vbucket {progress.vbucket}"
        if status == Status.ROLLBACK:
            self._roll_back(progress, refused)
        elif status == Status.NOT_MY_VBUCKET:
            if not (refused.value and self._nodes.apply(refused.value, address)):
                self._nodes.ask_for_map(self._now)
            progress.wait(f"{address} no longer has vbucket {progress.vbucket}", self._now)
        elif status == Status.KEY_EEXISTS or is_temporary(StatusError(status)):
            progress.wait(f"{address} answers {status_name(status)} to {what}", self._now)
        elif status == Status.EACCESS:
            raise LoginError("this user may not read the bucket's changes; give it the privilege")
        else:
            raise StatusError(status, what, refused.value)

    def _roll_back(self, progress: Progress, refused: RequestRefused) -> None:
        """Go back to a position that is on the server's branch, and that the application had."""
        stream = progress.stream
        answer = DcpStreamRequestResponse(opcode=0x53, status=Status.ROLLBACK, value=refused.value)
        seqno = answer.rollback_seqno
        given = self.options.rollback_points
        points = [*(progress.points if given is None else progress.on_history(given(progress.vbucket)))]
        points.append(min(seqno, progress.origin))
        back = retreat(
            stream.position, seqno, log=stream.log, exact_points=points, only_points=given is not None
        )
        stream.position, stream.log = back.position, back.log
        if back.undo_to is not None:
            stream.undo_to = back.undo_to if stream.undo_to is None else min(back.undo_to, stream.undo_to)
            stream.purge_seqno = 0
        progress.make_ready()

    def _ended(self, progress: Progress, status: int, address: Address) -> None:
        if (status == StreamEndStatus.OK and progress.end_seqno != MAX_U64) or status in _OVER_FOR_GOOD:
            progress.feed(ReadingInput.ENDED)
            return
        if status == StreamEndStatus.LOST_PRIVILEGES:
            raise LoginError("this user may no longer read the bucket's changes")
        self._nodes.ask_for_map(self._now)
        progress.leave(self._now)
        progress.wait(
            f"{address} ended the stream of vbucket {progress.vbucket} ({end_reason(status)})", self._now
        )

    def _chosen(self, vbuckets: Iterable[int]) -> list[Progress]:
        unknown = [vbucket for vbucket in vbuckets if vbucket not in self.progress]
        if unknown:
            raise UsageError(f"vbucket {unknown[0]} is not being read")
        return [self.progress[vbucket] for vbucket in vbuckets]
