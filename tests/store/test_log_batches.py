"""A batch is the same bytes in whatever pieces it is written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.large_bytes import LARGE_BYTES
from tailrace.store import log
from tailrace.store.log import LogBatch, LoggedColumns
from tailrace.wire.dcp import DcpMutation


def encoded(frames: list[bytes], piece_bytes: int) -> tuple[list[int], bytes, LogBatch]:
    batch = LogBatch(frames=list(frames), notes=list(range(len(frames))), meta={"a": 1}, cas_ceiling=7)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log, "PIECE_BYTES", piece_bytes)
        pieces = [b"".join(map(bytes, parts)) for parts in batch.encode(3, 99)]
    return list(map(len, pieces)), b"".join(pieces), batch


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=60),
    piece_bytes=st.integers(1, 5000),
)
def test_pieces_are_bounded_and_make_the_same_batch(sizes: list[int], piece_bytes: int) -> None:
    frames = [
        DcpMutation(vbucket=n % 5, by_seqno=n + 1, rev_seqno=1, key=b"\0k", value=bytes(size)).encode()
        for n, size in enumerate(sizes)
    ]
    _, whole, at_once = encoded(frames, 1 << 30)
    pieces, data, batch = encoded(frames, piece_bytes)
    assert data == whole
    largest = max(map(len, frames), default=0)
    assert all(size <= piece_bytes + largest for size in pieces[1:-1])
    if frames:
        assert batch.logged is not None
        assert at_once.logged is not None
        for name in LoggedColumns._fields:
            assert getattr(batch.logged, name).tolist() == getattr(at_once.logged, name).tolist()


def test_a_large_frame_is_written_as_it_is() -> None:
    """Joined with its neighbours it would be copied twice, with all other threads at a standstill."""
    small = DcpMutation(by_seqno=1, rev_seqno=1, key=b"\0k", value=b"v").encode()
    large = DcpMutation(by_seqno=2, rev_seqno=1, key=b"\0k", value=bytes(LARGE_BYTES)).encode()
    frames = [small, large, large, small, small]
    batch = LogBatch(frames=frames, notes=[0] * 5)
    pieces = [part for parts in batch.encode(3, 99) for part in parts]
    assert sum(piece is large for piece in pieces) == 2
    _, whole, _ = encoded(frames, 1 << 30)
    assert encoded(frames, 1)[1] == whole
