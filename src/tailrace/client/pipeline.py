"""Many requests under way at once, each known by its opaque until its own answer has come.

Sans-IO, and the one place for it: `load`, `replicate` and other bulk writers go through
`KvClient.write_many`, `invalidate` through its `Memcached`; both are pumps around a `Pipeline`.

An operation moves along `OPERATION_TRANSITIONS`, and is done only by an answer that carries its opaque: it
was taken, or there was nothing to do. One with a status of `RETRIED` comes back and is sent again, after a
pause that grows; so does one whose peer is lost: it may have been done, and doing it twice does no harm.

Every operation is answered, successes too: the success of a quiet command would have to be inferred from the
order of the other answers, and a server may change that. Two operations with the same key are never under way
together, so one that is sent again can't undo a later one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import RemoteProtocolError, StatusError
from ..protocol.states import OPERATION_TRANSITIONS, OperationInput, OperationState
from ..wire.codes import Magic, Op, Status
from ..wire.framing import Framer
from ..wire.header import HEADER_LAYOUT, HEADER_SIZE, Frame
from ..wire.layout import numpy_code
from .kv_connection import PIPELINED
from .retry import RETRIED, Backoff

__all__ = [
    "AnswerKind",
    "Answers",
    "BatchResult",
    "Pipeline",
    "WriteBatch",
    "answers_in",
    "judge",
    "one_answer",
]

# the document to delete does not exist; the server has this version or a newer one
_NOTHING_TO_DO = frozenset(
    {
        (Op.DELETE, Status.KEY_ENOENT),
        (Op.SET_WITH_META, Status.KEY_EEXISTS),
        (Op.DEL_WITH_META, Status.KEY_EEXISTS),
    }
)
_BATCHES = 2
_RETRY_FIRST_S, _RETRY_MOST_S = 0.01, 0.5
_OPAQUE = HEADER_LAYOUT.field("opaque")
# bytes 6 and 7 of an answer are its status
_unpack_answer = HEADER_LAYOUT.only("magic", "opcode", "vbucket", "body_length", "opaque").struct.unpack_from
_FEW = 8  # fewer answers than this are read one by one

Peer = TypeVar("Peer", bound=Hashable)
Indices: TypeAlias = NDArray[np.intp]


class WriteBatch(Protocol):
    """Requests made in advance; no two of them have the same key."""

    @property
    def vbuckets(self) -> Sequence[int]:
        """The vbucket of each."""
        ...

    @property
    def opcodes(self) -> Sequence[int]:
        """The opcode of each."""
        ...

    def stamp(self, first_opaque: int) -> None:
        """Give request ``i`` the opaque ``first_opaque + i``."""
        ...

    def select(self, indices: Indices | None) -> bytes | memoryview:
        """The bytes of some of the requests, in that order; None is all of them."""
        ...

    def shares_key_with(self, other: WriteBatch) -> bool:
        """Whether a key may be in both."""
        ...


class BatchResult(NamedTuple):
    """The outcome of a batch."""

    taken: int
    """Operations that the server did."""
    needless: int
    """Operations that left everything as it was: there was nothing to delete, or nothing newer to store."""

    @property
    def answered(self) -> int:
        """All of its operations."""
        return self.taken + self.needless


class AnswerKind(IntEnum):
    """What an answer means."""

    TAKEN = 0
    NEEDLESS = 1
    AGAIN = 2
    FAILED = 3


def judge(opcode: int, status: int) -> AnswerKind:
    """What a key-value server's answer to a write means."""
    if status == Status.SUCCESS:
        return AnswerKind.TAKEN
    if (opcode, status) in _NOTHING_TO_DO:
        return AnswerKind.NEEDLESS
    return AnswerKind.AGAIN if status in RETRIED else AnswerKind.FAILED


# answers


class Answers(NamedTuple):
    """Answers with the same opcode and status."""

    opcode: int
    status: int
    opaques: NDArray[np.uint32]


def one_answer(frame: Frame) -> Answers:
    """A single frame as `Answers`."""
    return Answers(frame.opcode, frame.status, np.array([frame.opaque], dtype=np.uint32))


def answers_in(framer: Framer) -> Iterator[Answers | Frame]:
    """What was received: frames, and consecutive pipelined answers that look alike as one `Answers`.

    Most answers differ only in opaque and CAS, so they follow each other like rows of a table.
    """
    while True:
        if many := _alike(framer):
            yield many
        elif (frame := framer.maybe_frame()) is None:
            return
        elif frame.magic == Magic.RESPONSE and frame.opaque >= PIPELINED:
            yield one_answer(frame)
        else:
            yield frame


def _alike(framer: Framer) -> Answers | None:
    with framer.peek() as data:
        if len(data) < HEADER_SIZE:
            return None
        magic, opcode, status, body_length, opaque = _unpack_answer(data)
        if magic != Magic.RESPONSE or opaque < PIPELINED:
            return None
        size = HEADER_SIZE + body_length
        if len(data) < _FEW * size:
            return None
        table = np.frombuffer(data, dtype=np.uint8, count=len(data) // size * size).reshape(-1, size)
        opaques = table[:, _OPAQUE.place].copy().view(numpy_code(_OPAQUE)).ravel().astype(np.uint32)
        before = slice(_OPAQUE.offset)
        fits = (table[:, before] == table[0, before]).all(axis=1) & (opaques >= PIPELINED)
        count = int(fits.argmin()) if not fits.all() else len(fits)
        del table
    framer.skip(count * size)
    return Answers(opcode, status, opaques[:count])


# operations


_NUMBERS = {state: number for number, state in enumerate(OperationState)}
"""States as they are in an array."""
_WAITING, _IN_FLIGHT = _NUMBERS[OperationState.WAITING], _NUMBERS[OperationState.IN_FLIGHT]
_NEXT = {happened: _NUMBERS[target] for (_, happened), target in OPERATION_TRANSITIONS.items()}


class _OpenBatch:
    """A batch that is under way."""

    def __init__(self, requests: WriteBatch, first_opaque: int) -> None:
        requests.stamp(first_opaque)
        count = len(requests.vbuckets)
        self.requests = requests
        self.first_opaque = first_opaque
        self.vbuckets = np.asarray(requests.vbuckets, dtype=np.intp)
        self.opcodes = np.asarray(requests.opcodes, dtype=np.uint8)
        self.states = np.full(count, _WAITING, dtype=np.uint8)
        self.peers = np.full(count, -1, dtype=np.int32)
        """The number, in the pipeline, of the peer that each operation was sent to last."""
        self.taken = self.needless = 0

    def __len__(self) -> int:
        return len(self.states)

    @property
    def is_done(self) -> bool:
        return self.taken + self.needless == len(self)

    def waiting(self) -> Indices:
        return np.flatnonzero(self.states == _WAITING)

    def feed(self, which: NDArray[Any], happened: OperationInput) -> None:
        """Move these operations on; the caller knows that each is in the state in which that can happen."""
        self.states[which] = _NEXT[happened]


class Pipeline(Generic[Peer]):
    """A window of operations under way at one or more peers.

    The pump adds batches while it `has_room_for` them, sends what `to_send` gives, hands in every answer
    (`receive`) and the end of a connection (`lost`), asks for a new cluster map when ``is_misled``, waits no
    longer than until `next_timer`, and learns from `finished` what is done.

    It gives up, with a `StatusError`, at a refusal that no retry can cure, and when operations are refused
    and none succeeds for ``patience_s``.
    """

    def __init__(
        self,
        *,
        rng: random.Random,
        patience_s: float,
        judge: Callable[[int, int], AnswerKind] = judge,
        first_opaque: int = PIPELINED,
    ) -> None:
        self._patience_s = patience_s
        self._judge = judge
        self._backoff = Backoff(rng, first_s=_RETRY_FIRST_S, most_s=_RETRY_MOST_S)
        self._next_opaque = first_opaque
        self._batches: list[_OpenBatch] = []
        self._peers: list[Peer] = []
        self._numbers: dict[Peer, int] = {}
        self._retry_at: float | None = None
        self._failing_since: float | None = None
        self._round_sent = self._round_refused = 0
        self.taken = 0
        """Operations done so far, including those of unfinished batches."""
        self.is_misled = False
        """Whether an operation went to a peer that does not have its vbucket, or no peer is known to."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._batches

    def has_room_for(self, requests: WriteBatch) -> bool:
        """Whether a batch may be added; not while a server asks for time."""
        return (
            len(self._batches) < _BATCHES
            and self._retry_at is None
            and not any(requests.shares_key_with(batch.requests) for batch in self._batches)
        )

    def add(self, requests: WriteBatch) -> None:
        """Add a batch."""
        count = len(requests.vbuckets)
        if self._next_opaque + count > 0xFFFF_FFFF:
            self._next_opaque = PIPELINED  # the first ones are long done
        self._batches.append(_OpenBatch(requests, self._next_opaque))
        self._next_opaque += count

    def to_send(
        self, now: float, route: Callable[[int], Peer | None]
    ) -> list[tuple[Peer, bytes | memoryview]]:
        """What to send now, and to which peer; ``route`` gives the peer that has a vbucket, None if none."""
        if self._retry_at is not None and now < self._retry_at:
            return []
        self._retry_at = None
        todo = [(batch, waiting) for batch in self._batches if len(waiting := batch.waiting())]
        if todo:
            if self._round_refused * 2 <= self._round_sent:
                self._backoff.reset()
            self._round_sent = self._round_refused = 0
        sending: list[tuple[Peer, bytes | memoryview]] = []
        for batch, waiting in todo:
            vbuckets = batch.vbuckets[waiting]
            places = np.full(int(vbuckets.max()) + 1, -1, dtype=np.int32)
            for vbucket in np.unique(vbuckets).tolist():
                peer = route(vbucket)
                places[vbucket] = -1 if peer is None else self._number_of(peer)
            where = places[vbuckets]
            for number in np.unique(where).tolist():
                share = waiting[where == number]
                if number < 0:
                    self.is_misled = True
                    self._refuse(len(share), Status.NOT_MY_VBUCKET, now)
                    continue
                batch.feed(share, OperationInput.SENT)
                batch.peers[share] = number
                self._round_sent += len(share)
                data = batch.requests.select(None if len(share) == len(batch) else share)
                sending.append((self._peers[number], data))
        return sending

    def receive(self, peer: Peer, answers: Answers, now: float) -> None:
        """Take answers of a peer."""
        opaques = answers.opaques.astype(np.int64)
        left = len(opaques)
        for batch in self._batches:
            indices = opaques - batch.first_opaque
            ours = indices[(indices >= 0) & (indices < len(batch))]
            if len(ours):
                left -= len(ours)
                self._take(batch, ours, answers, peer, now)
        if left:
            raise RemoteProtocolError(f"{left} answers to no request, opcode 0x{answers.opcode:02x}")

    def lost(self, peer: Peer, now: float) -> int:
        """A connection is gone, and with it the answers that were due on it; return how many."""
        count = 0
        if (number := self._numbers.get(peer)) is not None:
            for batch in self._batches:
                gone = (batch.states == _IN_FLIGHT) & (batch.peers == number)
                batch.feed(gone, OperationInput.CAME_BACK)
                count += int(np.count_nonzero(gone))
        if count:
            self._refuse(count, Status.ETMPFAIL, now)
        return count

    def is_due(self, peer: Peer) -> bool:
        """Whether this peer owes an answer."""
        number = self._numbers.get(peer)
        return number is not None and any(
            bool(((batch.states == _IN_FLIGHT) & (batch.peers == number)).any()) for batch in self._batches
        )

    def next_timer(self) -> float | None:
        """When refused operations are sent again; until then there may be answers to wait for."""
        return self._retry_at

    def finished(self) -> list[BatchResult]:
        """Batches that were finished since the last call, each with all of its operations answered."""
        done = [BatchResult(batch.taken, batch.needless) for batch in self._batches if batch.is_done]
        if done:
            self._batches = [batch for batch in self._batches if not batch.is_done]
        return done

    def _take(self, batch: _OpenBatch, indices: Indices, answers: Answers, peer: Peer, now: float) -> None:
        due = batch.states[indices] == _IN_FLIGHT
        due &= batch.peers[indices] == self._number_of(peer)
        due &= batch.opcodes[indices] == answers.opcode
        if not due.all() or (len(indices) > 1 and len(np.unique(indices)) != len(indices)):
            raise RemoteProtocolError("an answer fits no request that waits for one")
        kind = self._judge(answers.opcode, answers.status)
        if kind == AnswerKind.FAILED:
            vbucket = batch.vbuckets[indices[0]]
            raise StatusError(
                answers.status, f"a write to vbucket {vbucket} is refused, after {self.taken} were taken"
            )
        if kind == AnswerKind.AGAIN:
            batch.feed(indices, OperationInput.CAME_BACK)
            self.is_misled |= answers.status == Status.NOT_MY_VBUCKET
            self._refuse(len(indices), answers.status, now)
            return
        batch.feed(indices, OperationInput.ANSWERED)
        self._failing_since = None
        if kind == AnswerKind.TAKEN:
            batch.taken += len(indices)
            self.taken += len(indices)
        else:
            batch.needless += len(indices)

    def _refuse(self, count: int, status: int, now: float) -> None:
        """Operations have to be sent again, after a pause."""
        self._round_refused += count
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= self._patience_s:
            waiting = sum(len(batch.waiting()) for batch in self._batches)
            raise StatusError(
                status,
                f"{waiting} writes are refused for {self._patience_s:g} s, after {self.taken} were taken",
            )
        if self._retry_at is None:
            self._retry_at = now + self._backoff.next_s()

    def _number_of(self, peer: Peer) -> int:
        number = self._numbers.get(peer)
        if number is None:
            number = self._numbers[peer] = len(self._peers)
            self._peers.append(peer)
        return number
