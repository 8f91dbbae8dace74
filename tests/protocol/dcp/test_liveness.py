"""No-ops and dead peers."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.producer_fakes import COLLECTIONS, FakeBucket, FakeHost, FakeReader
from tailrace.protocol.dcp.liveness import (
    DEFAULT_INTERVAL_S,
    FIRST_NOOP_OPAQUE,
    ProducerLiveness,
    Silence,
    silence_limit_s,
)
from tailrace.wire.codes import DcpOpcode, Status


def test_nothing_before_it_is_enabled() -> None:
    liveness = ProducerLiveness(360, 0)
    assert liveness.next_timer() is None
    assert liveness.noop_due(1e9) is None
    assert not liveness.is_dead(1e9)


def test_a_noop_every_interval_one_at_a_time() -> None:
    liveness = ProducerLiveness(360, 0)
    liveness.enable(on=True, now=5)
    assert liveness.next_timer() == 5 + DEFAULT_INTERVAL_S
    assert liveness.noop_due(24.9) is None
    assert liveness.noop_due(25) == FIRST_NOOP_OPAQUE
    assert liveness.noop_due(100) is None, "the first is not answered"
    assert not liveness.answered(7)
    assert liveness.answered(FIRST_NOOP_OPAQUE)
    assert not liveness.answered(FIRST_NOOP_OPAQUE), "once"
    assert liveness.noop_due(45) == FIRST_NOOP_OPAQUE + 1


@pytest.mark.parametrize(("interval", "deadline"), [(0.1, 360), (20, 360), (200, 400)])
def test_dead_after_the_timeout_but_never_before_two_intervals(interval: float, deadline: float) -> None:
    liveness = ProducerLiveness(360, 0)
    liveness.enable(on=True, now=0)
    liveness.interval_s = interval
    liveness.noop_due(interval)
    assert liveness.next_timer() == deadline
    assert not liveness.is_dead(deadline - 0.01)
    assert liveness.is_dead(deadline)
    liveness.received(10)
    assert not liveness.is_dead(deadline + 9)


def test_never_dead_without_a_timeout() -> None:
    liveness = ProducerLiveness(0, 0)
    liveness.enable(on=True, now=0)
    liveness.noop_due(30)
    assert not liveness.is_dead(1e9)
    assert liveness.next_timer() is None


# On a connection.


def connected(**controls: Any) -> FakeReader:
    reader = FakeReader(FakeBucket(), host=FakeHost(FakeBucket(), COLLECTIONS))
    reader.open(**controls)
    return reader


def pass_time(reader: FakeReader, seconds: float) -> None:
    reader.now += seconds
    reader.producer.handle_timer(reader.now)
    reader.pull()


def test_noops_are_sent_without_any_stream_and_into_a_full_window() -> None:
    reader = connected(set_noop_interval="30", connection_buffer_size="1")
    reader.host.bucket.vbuckets[0].set(b"k")
    reader.request()
    reader.pull()
    assert reader.outstanding > reader.window
    pass_time(reader, 29)
    assert reader.noops == []
    pass_time(reader, 1)
    assert reader.noops == [FIRST_NOOP_OPAQUE]
    reader.respond(DcpOpcode.NOOP, FIRST_NOOP_OPAQUE)
    pass_time(reader, 30)
    assert reader.noops == [FIRST_NOOP_OPAQUE, FIRST_NOOP_OPAQUE + 1]
    assert reader.producer.close_requested is None


@pytest.mark.parametrize(("opaque", "status"), [(1, Status.SUCCESS), (FIRST_NOOP_OPAQUE, Status.EINVAL)])
def test_wrong_answer_to_a_noop(opaque: int, status: int) -> None:
    reader = connected()
    pass_time(reader, 20)
    reader.respond(DcpOpcode.NOOP, opaque, status)
    assert reader.producer.close_requested is not None


def test_silent_peer_is_given_up() -> None:
    reader = connected()
    pass_time(reader, 359.9)
    assert reader.producer.close_requested is None
    pass_time(reader, 0.1)
    assert reader.producer.close_requested is not None


def test_peer_that_answers_is_kept() -> None:
    reader = connected()
    for _ in range(100):
        pass_time(reader, 20)
        reader.respond(DcpOpcode.NOOP, reader.noops[-1])
    assert reader.producer.close_requested is None
    assert len(reader.noops) == 100


def test_turned_off_again() -> None:
    reader = connected()
    reader.control("enable_noop", "false")
    pass_time(reader, 10_000)
    assert reader.noops == []
    assert reader.producer.close_requested is None


# The receiver's half.


def test_the_longer_of_two_intervals_and_the_idle_timeout() -> None:
    assert silence_limit_s(20.0) == 40.0
    assert silence_limit_s(20.0, 360.0) == 360.0
    assert silence_limit_s(200.0, 360.0) == 400.0


def test_silence() -> None:
    silence = Silence(100.0)
    assert not silence.is_too_long(139.9, 40.0)
    assert silence.is_too_long(140.0, 40.0)
    assert not silence.is_too_long(1e9, None), "without a limit it may last for ever"
    assert (silence.next_timer(40.0), silence.next_timer(None)) == (140.0, None)
    silence.heard(139.0)
    assert not silence.is_too_long(140.0, 40.0)
    assert silence.seconds(140.0) == 1.0


def test_a_peer_that_sends_no_noops_is_asked_once() -> None:
    silence = Silence(0.0)
    assert silence.next_timer(40.0, 20.0) == 20.0
    assert not silence.must_ask(19.9, 20.0)
    assert silence.must_ask(20.0, 20.0)
    assert not silence.must_ask(30.0, 20.0), "it has been asked"
    assert silence.next_timer(40.0, 20.0) == 40.0, "now it is to be given up"
    silence.heard(35.0)
    assert not silence.must_ask(60.0, 20.0), "the answer itself is still to come"
    silence.answered()
    assert silence.must_ask(60.0, 20.0)
