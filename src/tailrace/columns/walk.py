"""Finding where frames start in a buffer full of them.

A frame gives its length and nothing marks its start, so only the walk from offset 0, header by header, is
certain; in Python that costs more per frame than everything else done to it. `frame_starts` therefore walks
many stretches of a large buffer in lockstep: it guesses a start in each stretch, lets one numpy operation
move all walks on by one frame, and then checks that each walk ended exactly where the next began.

Frames that all have the same size need no guesses: their starts are known and only have to be checked.

A guess may be wrong. Values are written by strangers and may hold anything, forged frames included, so a walk
counts only once the walk from offset 0 has arrived at one of its positions: from there on both are the same.
Where they don't meet, the plain walk goes on alone. The result is always that of the plain walk.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np

from ..frames import Bytes, Offsets, field_everywhere
from ..wire.header import HEADER_LAYOUT, HEADER_SIZE

__all__ = ["frame_end", "frame_starts", "lockstep_walk", "plain_walk"]

_BODY_LENGTH = HEADER_LAYOUT.field("body_length")
_unpack_body_length = HEADER_LAYOUT.only("body_length").struct.unpack_from

# Opcode and extras length: with the magic they are the same in all frames of a kind, and rare elsewhere.
_KIND_AT = (HEADER_LAYOUT.at("opcode"), HEADER_LAYOUT.at("extras_length"))

# Fewer frames than this are walked plainly: the lockstep walk costs about 0.1 ms before it saves anything.
_LOCKSTEP_FRAMES = 1200
_SAMPLE_FRAMES = 32
_FRAMES_PER_LANE = 32
_MAX_LANE_BYTES = 64 * 1024
_MAX_STEPS = 4 * _FRAMES_PER_LANE
# When this few lanes are unfinished, all stop: walking these on plainly is cheaper than more steps of all.
_LEFT_OVER = 12
# The steps between two checks for that: a check costs as much as half a step.
_STEPS_PER_LOOK = 4


def frame_starts(data: Bytes) -> Offsets:
    """The offset of every header that is whole, found by following the body lengths from offset 0.

    Only the lengths are followed; whether the headers make sense is for the caller to check. The frame of the
    last header may be incomplete.
    """
    sample = plain_walk(data, 0, _SAMPLE_FRAMES + 1)
    if len(sample) <= _SAMPLE_FRAMES:
        return sample
    sample_bytes = int(sample[-1])
    if len(data) * _SAMPLE_FRAMES < sample_bytes * _LOCKSTEP_FRAMES:
        return np.concatenate((sample[:-1], plain_walk(data, sample_bytes)))
    size = int(sample[1])
    if sample_bytes != size * _SAMPLE_FRAMES:
        return lockstep_walk(data, sample)
    known = _equal_frames(data, size)
    if len(known) <= _SAMPLE_FRAMES:
        return lockstep_walk(data, sample)
    if frame_end(data, int(known[-1])) > len(data) - HEADER_SIZE:
        return known
    return np.concatenate((known[:-2], lockstep_walk(data, known[-2:])))


def _equal_frames(data: Bytes, size: int) -> Offsets:
    """The frames from offset 0 up to the first one of another size.

    Empty if a few samples show that it is no use looking at every place.
    """
    total_body = _body_lengths(data)
    starts = np.arange(0, len(total_body), size)
    is_other = total_body[starts[:: len(starts) // _SAMPLE_FRAMES]] != size - HEADER_SIZE
    if is_other.any():
        return starts[:0]
    is_other = total_body[starts] != size - HEADER_SIZE
    at = int(is_other.argmax())
    return starts[: at + 1] if is_other[at] else starts


def _body_lengths(data: Bytes) -> Offsets:
    """The body length of a header at every offset, without a copy: fancy indexing reads what is asked for."""
    return field_everywhere(data, _BODY_LENGTH)[: len(data) - HEADER_SIZE + 1]


def frame_end(data: Bytes, start: int) -> int:
    """Where the frame at ``start`` ends; only its header need be in the buffer."""
    (body_length,) = _unpack_body_length(data.data, start)
    return start + HEADER_SIZE + int(body_length)


def plain_walk(data: Bytes, at: int = 0, count: int = sys.maxsize, until: int = sys.maxsize) -> Offsets:
    """Up to ``count`` frame starts from ``at`` on and before ``until``, found one by one."""
    view = data.data
    starts: list[int] = []
    append, unpack_from = starts.append, _unpack_body_length
    last = min(len(view) - HEADER_SIZE, until - 1)
    for _ in range(count):
        if at > last:
            break
        append(at)
        at += HEADER_SIZE + unpack_from(view, at)[0]
    return np.array(starts, dtype=np.int64)


def lockstep_walk(data: Bytes, sample: Offsets) -> Offsets:
    """All frame starts, found by many parallel walks that are checked against each other.

    ``sample`` holds the first starts, at least two: later frames are expected to be like these.
    """
    lanes = np.concatenate((sample[-1:], _guess_starts(data, sample)))
    walked, bounds, ends = _walk_lanes(data, lanes)
    return np.concatenate((sample[:-1], *_join(data, lanes, walked, bounds, ends)))


def _guess_starts(data: Bytes, sample: Offsets) -> Offsets:
    """Places, one in each stretch of the buffer, that look like a header of the kind that was just seen.

    A stretch is searched a little farther than the longest frame of the sample reaches. One where nothing is
    found gets no walk.
    """
    known = sample.tolist()
    sizes = [end - start for start, end in pairwise(known)]
    lane_bytes = min(sum(sizes) * _FRAMES_PER_LANE // len(sizes), _MAX_LANE_BYTES)
    window = min(max(sizes) * 17 // 16, lane_bytes)
    first, seen = known[-1] + lane_bytes, known[-2]
    # The last lanes stop short of the end of the buffer, so a right guess never walks out of it.
    count = (len(data) - first - window) // lane_bytes - 1
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    # Copied together first: one long comparison is faster than many short ones. A match across the seam of
    # two stretches is a wrong guess like any other.
    stretches = np.ndarray((count, window), np.uint8, data, first, (lane_bytes, 1)).flatten()
    reach = len(stretches) - _KIND_AT[-1]
    alike = stretches == data[seen]
    scratch = np.empty(reach, dtype=bool)
    for at in _KIND_AT:
        alike[:reach] &= np.equal(stretches[at : at + reach], data[seen + at], out=scratch)
    alike[reach:] = False
    alike = alike.reshape(count, window)
    best = alike.argmax(axis=1)
    (lane,) = alike[np.arange(count), best].nonzero()
    return np.asarray(first + lane * lane_bytes + best[lane], dtype=np.int64)


def _walk_lanes(data: Bytes, lanes: Offsets) -> tuple[Offsets, Offsets, Offsets]:
    """Walk on from each lane's start until the next lane's start is reached or passed.

    Returns all positions in ascending order, for each lane the index where its positions end, and where each
    walk stopped. The few walks that need more steps than the others are left unfinished, so one lane of tiny
    frames does not hold up the rest.
    """
    last = len(data) - HEADER_SIZE
    limits = np.empty_like(lanes)
    limits[:-1], limits[-1] = lanes[1:], last + 1
    total_body = _body_lengths(data)
    table = np.empty((_MAX_STEPS + 1, len(lanes)), dtype=np.int64)
    table[0] = at = lanes
    is_inside = True
    # The sizes of the headers passed are added at the end: in the loop the buffer moves, not the positions.
    for step in range(min(_MAX_STEPS, last // HEADER_SIZE + 1)):
        passed = step * HEADER_SIZE
        # Lanes that have passed their limit walk on with the others, which is cheaper than stopping them.
        try:
            body = total_body[passed:][at if is_inside else np.minimum(at, last - passed)]
        except IndexError:  # a guess was wrong, or frames are smaller than they were
            is_inside = False
            body = total_body[passed:][np.minimum(at, last - passed)]
        at = np.add(at, body, table[step + 1])
        if step >= _FRAMES_PER_LANE and step % _STEPS_PER_LOOK == 0:
            unfinished = np.count_nonzero(at < limits - (passed + HEADER_SIZE))
            if unfinished <= _LEFT_OVER:
                break
    table = table[: step + 2]
    table += np.arange(0, len(table) * HEADER_SIZE, HEADER_SIZE)[:, np.newaxis]
    real = table < limits
    # The last step only says where an unfinished walk stopped.
    real[-1] = False
    counts = np.add.reduce(real.view(np.uint8), axis=0, dtype=np.uint8)  # fewer than 256 steps
    return table.T[real.T], np.cumsum(counts, dtype=np.int64), table[counts, np.arange(len(lanes))]


def _join(data: Bytes, lanes: Offsets, walked: Offsets, bounds: Offsets, ends: Offsets) -> list[Offsets]:
    """The positions that a plain walk from the first lane's start would visit, in pieces."""
    pieces: list[Offsets] = []
    index = 0
    # Lanes whose walk does not end where the next one begins; the last lane has no next one.
    for lane in np.flatnonzero(ends[:-1] != lanes[1:]).tolist():
        if bounds[lane] <= index:
            continue  # the real walk has passed it
        pieces.append(walked[index : bounds[lane]])
        index, at, next_lane = int(bounds[lane]), int(ends[lane]), int(lanes[lane + 1])
        if at < next_lane:  # it seems to be merely unfinished
            more = plain_walk(data, at, until=next_lane)
            pieces.append(more)
            at = frame_end(data, int(more[-1]))
        if at != next_lane:
            index = _walk_until_met(data, at, walked, pieces)
            if index == len(walked):
                return pieces
    return [*pieces, walked[index:], plain_walk(data, int(ends[-1]))]


def _walk_until_met(data: Bytes, at: int, walked: Offsets, pieces: list[Offsets]) -> int:
    """Walk on plainly to a position in ``walked``: its index, or ``len(walked)`` at the end of the buffer.

    The positions before it are added to ``pieces``.
    """
    burst = _FRAMES_PER_LANE
    while True:
        more = plain_walk(data, at, burst + 1)
        met = np.searchsorted(walked, more)
        met[met == len(walked)] = 0
        hits = np.flatnonzero(walked[met] == more)
        if len(hits):
            pieces.append(more[: hits[0]])
            return int(met[hits[0]])
        if len(more) <= burst:  # the end of the buffer
            pieces.append(more)
            return len(walked)
        pieces.append(more[:-1])
        at, burst = int(more[-1]), burst * 2
