"""What a merge does with the frames of segments: which stay, which are forgotten, and what is lost with them.

The pieces of a vbucket are small while the bucket is young: a thousand vbuckets share each generation. So
many vbuckets are read, sifted and written together; a large one is merged alone, in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..frames import OPCODE_AT, Mask, Seqnos
from ..wire.codes import DcpOpcode
from .base import Compaction
from .deduplication import Deduplicated
from .dropped_collections import DroppedCollections
from .format import SYSTEM, TOMBSTONE, delete_times_at, index_key, revs_at
from .piece_reading import Scattered, gather
from .segment import Frames, SegmentPiece, concatenate
from .segment_writer import Pieces, SegmentWriter, full_blocks
from .snapshot import in_sorted

__all__ = ["GROUP_BYTES", "Losses", "PiecePlan", "merge"]

GROUP_BYTES = 1 << 20
"""How much is worked on in one step: more would hold up other threads, less would take more steps."""

_SMALL_GROUPS = 4
"""A group of small vbuckets may be this many times larger, because its steps are many and short."""

_NO_SEQNOS: Seqnos = np.empty(0, np.uint64)
_Pairs = tuple[Seqnos, Seqnos]
_Frames = Frames | Scattered


@dataclass(slots=True)
class PiecePlan:
    """What a merge does with one vbucket."""

    vbucket: int
    pieces: tuple[SegmentPiece, ...]  # of the segments that are merged
    others: tuple[SegmentPiece, ...]  # of the segments that are not
    floor: int  # versions superseded up to here may go
    floor_without_history: int  # ... and those of collections without history, up to here
    deduplicated: Deduplicated
    sealed_seqno: int  # the newest change in any segment stays: a snapshot from disk ends with it
    complete_seqno: int  # tombstones from here on stay: a promotion goes back to this
    drops: list[tuple[int, int]]
    purge: Compaction | None  # the compaction that was asked for
    purge_time_s: int  # tombstones older than this go, up to `floor`

    @property
    def covers_oldest(self) -> bool:
        """Whether nothing is older than what is merged."""
        return not any(other.first < self.pieces[0].first for other in self.others)


@dataclass(slots=True)
class Losses:
    """What a merge took from a vbucket for good."""

    floor: int = 0
    history_floor: int = 0
    """The same, not counting versions that a history does without."""
    purge_seqno: int = 0
    rev: int = 0
    purged: list[tuple[bytes, int]] = field(default_factory=list)

    def raise_floors(self, seqno: int) -> None:
        """Note that the changes before a seqno are no longer complete."""
        self.floor = max(self.floor, seqno)
        self.history_floor = max(self.history_floor, seqno)


def merge(plans: Iterable[PiecePlan], writer: SegmentWriter, go_on: Callable[[], None]) -> dict[int, Losses]:
    """Write what is left of these vbuckets' pieces; return what is lost by vbucket. `go_on` may stop it."""
    lost_by_vbucket: dict[int, Losses] = {}
    for group in _groups(plans):
        go_on()
        for sieve in _merge_alone(group[0], writer) if len(group) == 1 else _merge_together(group, writer):
            losses = sieve.losses
            if losses.purge_seqno:
                # One above, so that the change that a rolled back vbucket ends with is there.
                losses.raise_floors(losses.purge_seqno + 1)
            if losses.floor:
                lost_by_vbucket[sieve.plan.vbucket] = losses
    return lost_by_vbucket


def _groups(plans: Iterable[PiecePlan]) -> Iterator[list[PiecePlan]]:
    """Groups of small vbuckets; a large one is alone."""
    group: list[PiecePlan] = []
    size = 0
    for plan in plans:
        frame_bytes = sum(piece.frame_bytes for piece in plan.pieces)
        if group and size + frame_bytes > _SMALL_GROUPS * GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(plan)
        size += frame_bytes
    if group:
        yield group


def _merge_together(plans: list[PiecePlan], writer: SegmentWriter) -> list[_Sieve]:
    whole, piece_stops, news, olds, piece_pair_stops = gather(
        [piece for plan in plans for piece in plan.pieces]
    )
    last_pieces = np.cumsum([len(plan.pieces) for plan in plans]) - 1
    stops, pair_stops = piece_stops[last_pieces], piece_pair_stops[last_pieces]
    edges, pair_edges = [0, *stops.tolist()], [0, *pair_stops.tolist()]
    sieves, masks, pairs = [], [], []
    for number, plan in enumerate(plans):
        frames = whole.part(slice(edges[number], edges[number + 1]))
        pair_part = slice(pair_edges[number], pair_edges[number + 1])
        sieve = _Sieve(plan, [frames], (news[pair_part], olds[pair_part]))
        sieves.append(sieve)
        masks.append(sieve.keep(frames))
        pairs.append(sieve.pairs_left())
    keep = np.concatenate(masks)
    kept = np.zeros(len(keep) + 1, np.int64)
    np.cumsum(keep, out=kept[1:])
    writer.add(
        Pieces(
            [plan.vbucket for plan in plans],
            whole.keep(keep),
            kept[stops].tolist(),
            *_joined(pairs),
            np.cumsum([len(news) for news, _ in pairs]).tolist(),
        )
    )
    return sieves


def _merge_alone(plan: PiecePlan, writer: SegmentWriter) -> list[_Sieve]:
    with_tombstones = (piece for piece in plan.pieces if piece.traits & (TOMBSTONE | SYSTEM))
    sieve = _Sieve(
        plan,
        (frames for piece in with_tombstones for frames in piece.blocks()),
        _joined([piece.pairs() for piece in plan.pieces]),
    )
    rest = concatenate([])
    for part in _parts(plan.pieces):
        held = len(rest.lengths)
        whole = concatenate([rest, *part] if held else part)
        keep = np.ones(len(whole.lengths), np.bool_)
        keep[held:] = sieve.keep(whole.cut(held, len(keep)))
        kept = whole.keep(keep)
        full, rest = kept.split(np.array([full_blocks(kept.lengths), len(kept.lengths)]))
        writer.add(Pieces([plan.vbucket], full, [len(full.lengths)], _NO_SEQNOS, _NO_SEQNOS, [0]))
    news, olds = sieve.pairs_left()
    writer.add(Pieces([plan.vbucket], rest, [len(rest.lengths)], news, olds, [len(news)]))
    return [sieve]


def _parts(pieces: tuple[SegmentPiece, ...]) -> Iterator[list[Frames]]:
    """The blocks of several pieces, about `GROUP_BYTES` at a time: small blocks don't cost a step each."""
    part: list[Frames] = []
    size = 0
    for piece in pieces:
        for frames in piece.blocks():
            part.append(frames)
            size += len(frames.data)
            if size >= GROUP_BYTES:
                yield part
                part, size = [], 0
    if part:
        yield part


class _Sieve:
    """Which frames and pairs of a vbucket stay, and what is lost with the others."""

    def __init__(self, plan: PiecePlan, blocks: Iterable[_Frames], pairs: _Pairs) -> None:
        self.plan = plan
        self.losses = Losses()
        self._purged = _tombstones_to_purge(plan, blocks, self.losses) if plan.covers_oldest else _NO_SEQNOS
        self._floor = floor = max(plan.floor, self.losses.purge_seqno)
        self._own = pairs
        others = [piece.pairs() for piece in plan.others if piece.pair_count]
        news, olds = _joined([self._own, *others]) if others else self._own
        self._dead = _superseded(news, olds, news <= floor)
        wanted = bool(plan.deduplicated) and floor < plan.floor_without_history
        self._few = (
            _superseded(news, olds, (news > floor) & (news <= plan.floor_without_history))
            if wanted
            else (_NO_SEQNOS, _NO_SEQNOS)
        )
        self._drops = DroppedCollections(plan.drops, floor)

    def keep(self, frames: _Frames) -> Mask:
        """Which of some frames stay."""
        losses, seqnos = self.losses, frames.seqnos
        keep = np.ones(len(seqnos), np.bool_)
        dead, killers = self._dead
        if len(dead) and len(seqnos):
            keep &= ~in_sorted(seqnos, dead)
            gone = seqnos[~keep]
            if len(gone):
                losses.raise_floors(int(killers[np.searchsorted(dead, gone)].max()))
        dead, killers = self._few
        if len(dead) and len(seqnos):
            going = in_sorted(seqnos, dead) & self.plan.deduplicated.mask(frames) & keep
            going &= seqnos != self.plan.sealed_seqno
            keep &= ~going
            gone = seqnos[going]
            if len(gone):
                losses.floor = max(losses.floor, int(killers[np.searchsorted(dead, gone)].max()))
        if len(self._purged) and len(seqnos):
            keep &= ~in_sorted(seqnos, self._purged)
        left = self._drops.keep_mask(frames)
        if left is not None:
            keep &= left
            losses.raise_floors(self._drops.latest)
        keep |= seqnos == self.plan.sealed_seqno
        return keep

    def pairs_left(self) -> _Pairs:
        """The pairs that may still be needed."""
        news, olds = self._own
        needed = news > self._floor
        if not self.plan.covers_oldest:
            needed |= olds < self.plan.pieces[0].first
        return news[needed], olds[needed]


def _superseded(news: Seqnos, olds: Seqnos, which: Mask) -> _Pairs:
    """The superseded versions of some pairs, ascending, and what superseded each."""
    olds = olds[which]
    by_old = np.argsort(olds)
    return olds[by_old], news[which][by_old]


def _joined(pairs: list[_Pairs]) -> _Pairs:
    return np.concatenate([new for new, _ in pairs]), np.concatenate([old for _, old in pairs])


def _tombstones_to_purge(plan: PiecePlan, blocks: Iterable[_Frames], losses: Losses) -> Seqnos:
    """The tombstones to purge, ascending. Also notes their keys, so that the index can forget them."""
    asked = plan.purge
    going = []
    for frames in blocks:
        places = np.flatnonzero(frames.traits & (TOMBSTONE | SYSTEM))
        # Aborts are forgotten as tombstones are; a copy with the prepare but not the abort must start over.
        opcodes = frames.data[frames.offsets[places] + OPCODE_AT]
        places = places[(frames.traits[places] & TOMBSTONE != 0) | (opcodes == DcpOpcode.ABORT)]
        if not len(places):
            continue
        offsets = frames.offsets[places]
        seqnos = frames.seqnos[places]
        times = delete_times_at(frames.data, offsets)
        goes = (times < plan.purge_time_s) & (seqnos <= plan.floor)
        if asked is not None:
            goes |= _asked_for(asked, times, seqnos)
        goes &= seqnos < min(plan.sealed_seqno, plan.complete_seqno)
        for place, offset in zip(places[goes].tolist(), offsets[goes].tolist(), strict=True):
            frame = frames.data[offset : offset + int(frames.lengths[place])].tobytes()
            losses.purged.append((index_key(frame), int(frames.seqnos[place])))
        if goes.any():
            going.append(seqnos[goes])
            losses.purge_seqno = max(losses.purge_seqno, int(seqnos[goes].max()))
            documents = offsets[goes & (frames.traits[places] & TOMBSTONE != 0)]
            losses.rev = max([losses.rev, *revs_at(frames.data, documents).tolist()])
    return np.concatenate(going) if going else _NO_SEQNOS


def _asked_for(asked: Compaction, times: npt.NDArray[np.uint32], seqnos: Seqnos) -> Mask:
    if asked.drop_tombstones:
        return np.ones(len(times), np.bool_)
    if not asked.purge_before_time_s and not asked.purge_before_seqno:
        return np.zeros(len(times), np.bool_)
    goes = np.ones(len(times), np.bool_)
    if asked.purge_before_time_s:
        goes &= times < asked.purge_before_time_s
    if asked.purge_before_seqno:
        goes &= seqnos < asked.purge_before_seqno
    return goes
