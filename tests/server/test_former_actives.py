"""A replica that was the active a moment ago gives no streams: its readers must find the new active."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.serverkit import Wire
from tailrace.clock import ManualClock
from tailrace.server.former_actives import FormerActives
from tailrace.store.engine import Engine
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import OpenFlag, Status, VBucketState
from tailrace.wire.dcp import DcpOpen, DcpStreamEnd, DcpStreamRequest

ACTIVE, REPLICA, DEAD = VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.DEAD


@pytest.mark.parametrize("silence_s", [0, 60])
def test_over_a_socket(silence_s: int) -> None:
    with RunningNode(2, settings={"former_active_silence": silence_s}) as node, Wire(node.port) as wire:

        def ask(vbucket: int) -> int:
            request = DcpStreamRequest(vbucket=vbucket, end_seqno=(1 << 64) - 1)
            status: int = wire.call(request).status
            return status

        wire.ok(DcpOpen(key=b"reader", flags=int(OpenFlag.PRODUCER)))
        assert ask(0) == Status.SUCCESS
        for vbucket in (0, 1):
            node.set_vbucket_state(vbucket, REPLICA)
        assert wire.receive().name() == DcpStreamEnd.name()
        assert ask(0) == (Status.NOT_MY_VBUCKET if silence_s else Status.SUCCESS)
        assert ask(1) == Status.SUCCESS, "nobody had read that one"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def engine(clock: ManualClock) -> Iterator[Engine]:
    with Engine(clock=clock) as opened:
        opened.create_bucket("b", 4)
        yield opened


def test_for_a_while_and_after_each_time(engine: Engine, clock: ManualClock) -> None:
    store = engine.buckets["b"]
    former = FormerActives(store, clock, 5.0)

    def become(*states: VBucketState) -> None:
        for state in states:
            store.set_state(1, state)
            former.vbucket_changed(1)

    former.stream_opened(1)
    become(DEAD)
    clock.advance(60)  # a takeover takes a while; the silence begins when it could answer
    assert not former.is_silent(1)
    become(REPLICA)
    assert former.is_silent(1)
    assert not former.is_silent(0)
    clock.advance(4.9)
    assert former.is_silent(1)
    clock.advance(0.2)
    assert not former.is_silent(1)
    become(DEAD, REPLICA)
    assert not former.is_silent(1), "it was no active in between"
    become(ACTIVE, REPLICA)
    assert not former.is_silent(1), "nobody has read it"
    former.stream_opened(1)
    become(ACTIVE)
    former.stream_opened(1)
    become(REPLICA)
    assert former.is_silent(1)
    become(ACTIVE)
    assert not former.is_silent(1)
    store.set_state(1, DEAD)
    store.delete_vbucket(1)
    former.vbucket_changed(1)
    assert not former.is_silent(1)
