"""The lockstep walk finds what the plain walk finds, whatever the values hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from columns import message_by_message as plain
from tailrace.columns import walk


def octets(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def by_hand(data: bytes) -> list[int]:
    at, starts = 0, []
    while at + 24 <= len(data):
        starts.append(at)
        at += 24 + int.from_bytes(data[at + 8 : at + 12], "big")
    return starts


def forged(rng: random.Random, size: int) -> bytes:
    """A value of frames that look like the real ones around it; the last one reaches beyond the value."""
    value = bytearray()
    while len(value) < size:
        value += plain.mutation(7, b"forged", rng.randbytes(rng.randrange(200)))
    return bytes(value[:size])


def test_the_plain_walk() -> None:
    data = plain.mutation(1) + plain.mutation(2, value=b"x" * 9) + plain.mutation(3)[:30]
    assert walk.plain_walk(octets(data)).tolist() == by_hand(data) == [0, 58, 125]
    assert walk.plain_walk(octets(data), 58, 1).tolist() == [58]
    assert walk.plain_walk(octets(b"")).tolist() == []
    assert walk.plain_walk(octets(bytes(23))).tolist() == []
    assert walk.plain_walk(octets(bytes(48))).tolist() == [0, 24]


@pytest.mark.parametrize("value_size", [0, 64, 1000])
def test_large_buffers_are_walked_in_lockstep(value_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(value_size)
    data = b"".join(
        plain.mutation(1, rng.randbytes(rng.randint(5, 30)), rng.randbytes(value_size)) for _ in range(4000)
    )
    lanes = []
    guess = walk._guess_starts

    def count(*args: np.ndarray) -> np.ndarray:
        lanes.append(lane := guess(*args))
        return lane

    monkeypatch.setattr(walk, "_guess_starts", count)
    assert walk.frame_starts(octets(data)).tolist() == by_hand(data)
    assert len(lanes) == 1
    # Nearly every stretch has its own walk, and it starts at a frame.
    assert len(lanes[0]) > 4000 / walk._FRAMES_PER_LANE * 0.9
    assert len(set(lanes[0].tolist()) & set(by_hand(data))) > 0.95 * len(lanes[0])


@pytest.mark.parametrize("seed", range(8))
def test_forged_frames_do_not_mislead(seed: int) -> None:
    """Among 3,000 small frames are large values that consist of forged frames."""
    rng = random.Random(seed)
    frames = []
    for _ in range(3000):
        if rng.random() < (0.02, 0.5)[seed % 2]:
            frames.append(
                plain.mutation(
                    1, b"real", forged(rng, rng.choice((300, 3000, 30_000) if seed < 6 else (300,)))
                )
            )
        else:
            frames.append(plain.mutation(1, b"real", rng.randbytes(rng.randrange(200))))
    data = octets(b"".join(frames))
    sample = walk.plain_walk(data, 0, 33)
    guesses = walk._guess_starts(data, sample)
    real = by_hand(bytes(data))
    assert set(guesses.tolist()) - set(real), "nothing was forged where a walk begins"
    assert walk.lockstep_walk(data, sample).tolist() == real
    assert walk.frame_starts(data).tolist() == real


def test_a_forged_chain_that_fills_all_the_rest() -> None:
    """One value of 1 MiB of forged frames after many small ones: every guess is wrong."""
    rng = random.Random(1)
    small = b"".join(plain.mutation(1, b"k", b"") for _ in range(40))
    data = octets(small + plain.mutation(1, b"k", forged(rng, 1 << 20)) + small)
    assert walk.frame_starts(data).tolist() == by_hand(bytes(data))


def test_frames_of_nothing_between_large_ones() -> None:
    """Lanes with far more frames than the sample promised are left to the plain walk."""
    rng = random.Random(2)
    large = b"".join(plain.mutation(1, b"k", rng.randbytes(2000)) for _ in range(2600))
    noops = plain.frame(0x5C) * 20_000
    data = octets(large + noops + large)
    assert walk.frame_starts(data).tolist() == by_hand(bytes(data))


def test_a_long_lane_does_not_keep_the_others_walking() -> None:
    """Not even if there are few: finishing one of them is less work than a step of all."""
    data = octets(b"".join(plain.mutation(1, b"key", bytes(500)) for _ in range(1000)))
    starts = walk.plain_walk(data)
    lanes = np.concatenate(
        (starts[0:640:32], starts[700:701])
    )  # one of 92 frames, one of 300, the others of 32
    walked, bounds, ends = walk._walk_lanes(data, lanes)
    finished = ends[:-1] == lanes[1:]
    assert finished.tolist() == [True] * 19 + [False]
    assert ends[-1] < starts[750]
    joined = np.concatenate(walk._join(data, lanes, walked, bounds, ends))
    assert joined.tolist() == starts.tolist()


@pytest.mark.parametrize(
    "others", [[], [3999], [2000], [100, 101], [32], [33], [34], [0], list(range(0, 4000, 97))]
)
def test_frames_of_one_size(others: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found without guessing, up to the first one of another size, and nothing is missed."""
    rng = random.Random(4)
    frames = [plain.mutation(1, b"key", rng.randbytes(100)) for _ in range(4000)]
    for other in others:
        frames[other] = plain.mutation(1, b"other", rng.randbytes(rng.choice((0, 99, 140, 9999))))
    data = b"".join(frames) + frames[1][:30]
    guesses = []
    guess = walk._guess_starts

    def noted_guess(*args: Any) -> Any:
        guesses.append(args)
        return guess(*args)

    monkeypatch.setattr(walk, "_guess_starts", noted_guess)
    assert walk.frame_starts(octets(data)).tolist() == by_hand(data)
    assert others or not guesses


@pytest.mark.parametrize("off", [0, 1, 17])
@pytest.mark.parametrize("before", [33, 40, 1999])
def test_equal_frames_forged_in_a_value(before: int, off: int) -> None:
    """A value continues the frames around it, at exactly their spacing or slightly off."""
    frame = plain.mutation(1, b"key", bytes(76))
    overhead = len(plain.mutation(1, b"key"))
    value = (frame * 700)[overhead + off :]
    data = frame * before + plain.mutation(1, b"key", value) + frame * 1500
    assert by_hand(data) != list(range(0, len(data), len(frame)))
    assert walk.frame_starts(octets(data)).tolist() == by_hand(data)


@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 5, 24, 31, 60, 500, 0xFFFF_FFFF]), min_size=3, max_size=60),
    lane=st.integers(1, 4),
    steps=st.integers(1, 6),
    left_over=st.integers(0, 3),
    look=st.integers(1, 3),
    cut=st.integers(0, 100),
    data=st.data(),
)
def test_any_chain(
    *, lengths: list[int], lane: int, steps: int, left_over: int, look: int, cut: int, data: st.DataObject
) -> None:
    """Any lengths, values made of pieces of headers, lanes of any size."""
    piece = plain.mutation(1, b"k")
    parts = []
    for length in lengths:
        offset = data.draw(st.integers(0, len(piece) - 1))
        body = (piece[offset:] + piece * 12)[: min(length, 600)]
        parts.append(piece[:8] + length.to_bytes(4, "big") + piece[12:24] + body)
    buffer = octets(b"".join(parts)[: -cut or None])
    sample = walk.plain_walk(buffer, 0, 3)
    if len(sample) < 2:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "_FRAMES_PER_LANE", lane)
        patch.setattr(walk, "_MAX_STEPS", steps)
        patch.setattr(walk, "_LEFT_OVER", left_over)
        patch.setattr(walk, "_STEPS_PER_LOOK", look)
        assert walk.lockstep_walk(buffer, sample).tolist() == by_hand(bytes(buffer))
