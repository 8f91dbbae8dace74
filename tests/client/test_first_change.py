"""How a reading begins: the order of its questions and requests, and what the application gets first."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import tailrace
from client.fake_server import Connection, FakeServer, accepted, marker, mutation
from tailrace import Mutation
from tailrace.client import resume
from tailrace.client.resume import _REQUESTED_AT_ONCE, Reading
from tailrace.client.retry import Backoff
from tailrace.protocol.dcp.reader import FIRST_STREAMS, DcpReader, ReaderSettings
from tailrace.protocol.dcp.reader_stream import ReaderStream
from tailrace.protocol.handshake import Introduction
from tailrace.wire.admin import ValueResponse
from tailrace.wire.codes import DcpOpcode, Op
from tailrace.wire.dcp import DcpStreamRequest
from tailrace.wire.header import Frame

_MANIFEST = (
    b"""{"uid":"1","scopes":[{"uid":"8","name":"shop","collections":[{"uid":"9","name":"orders"}]}]}"""
)


def test_streams_are_asked_for_before_the_names_are_known(connect: Callable[..., Any]) -> None:
    """The answer with the names comes after the first change, which waits for it."""
    questions: list[Frame] = []

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1, key=b"\x09key"))
        (asked,) = questions
        answer = ValueResponse(opcode=asked.opcode, value=_MANIFEST, opaque=asked.opaque)
        connection.send(answer.encode())

    with FakeServer(stream) as server:
        server.answers[Op.GET_COLLECTIONS_MANIFEST] = lambda _, frame: questions.append(frame)
        batch = next(connect(server.url, retry_for_s=60).batches())
        assert batch["scope"].to_pylist() == ["shop"] and batch["collection"].to_pylist() == ["orders"]


def test_a_connection_that_is_lost_before_it_has_told_the_names(connect: Callable[..., Any]) -> None:
    """What it brought is read again over its successor, with the names."""

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1, key=b"\x09key"))
        if len(server.connections) == 1:
            connection.close()

    def manifest(server: FakeServer, frame: Frame) -> bytes | None:
        if len(server.connections) == 1:
            return None
        return ValueResponse(opcode=frame.opcode, value=_MANIFEST, opaque=frame.opaque).encode()

    with FakeServer(stream) as server:
        server.answers[Op.GET_COLLECTIONS_MANIFEST] = manifest
        batch = next(connect(server.url, retry_for_s=60).batches())
        assert batch["seqno"].to_pylist() == [1] and batch["collection"].to_pylist() == ["orders"]
        assert len(server.connections) == 2


def test_it_says_that_it_waits_for_the_names() -> None:
    """And not for the application, which can't be given what came."""
    questions: list[Frame] = []

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    async def read(server: FakeServer) -> None:
        async with tailrace.connect(server.url, retry_for_s=60) as source:
            portion = asyncio.ensure_future(source.next_portion(await source.begin()))
            async with asyncio.timeout(60):
                while not source.stats()["queued_bytes"]:  # noqa: ASYNC110 - the server is another thread
                    await asyncio.sleep(0.01)
            assert source.stats()["waits_for"] == "waits for the collections manifest"
            (asked,) = questions
            answer = ValueResponse(opcode=asked.opcode, value=_MANIFEST, opaque=asked.opaque)
            server.connections[0].send(answer.encode())
            assert await portion is not None
            assert source.stats()["waits_for"] == "the application"

    with FakeServer(stream) as server:
        server.answers[Op.GET_COLLECTIONS_MANIFEST] = lambda _, frame: questions.append(frame)
        asyncio.run(read(server))


def test_a_filter_waits_for_the_names(connect: Callable[..., Any]) -> None:
    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        assert request.value == b'{"collections":["9"]}'
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1, key=b"\x09key"))

    with FakeServer(stream) as server:
        server.answers[Op.GET_COLLECTIONS_MANIFEST] = lambda _, frame: ValueResponse(
            opcode=frame.opcode, value=_MANIFEST, opaque=frame.opaque
        ).encode()
        source = connect(server.url, collections=["shop.orders"], retry_for_s=60)
        assert next(source.batches())["collection"].to_pylist() == ["orders"]


def test_a_change_comes_before_all_streams_are_asked_for(connect: Callable[..., Any]) -> None:
    """Many streams are asked for in several turns, each once, and all of them are read."""
    vbuckets = 3 * _REQUESTED_AT_ONCE + 1

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    with FakeServer(stream, vbuckets=vbuckets) as server:
        seen = []
        for change in connect(server.url, retry_for_s=60).changes():
            if isinstance(change, Mutation):
                seen.append(change.vbucket)
            if len(seen) == vbuckets:
                break
        assert sorted(seen) == list(range(vbuckets))
        asked = [frame.vbucket for frame in server.requests if frame.opcode == DcpOpcode.STREAM_REQUEST]
        assert sorted(asked) == list(range(vbuckets))


def test_the_first_streams_are_answered_before_the_others_are_asked_for() -> None:
    """An answer is enough: there may be nothing in their vbuckets."""
    held: list[DcpStreamRequest] = []
    asked: list[DcpStreamRequest] = []
    vbuckets = 3 * FIRST_STREAMS

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        asked.append(request)
        if len(asked) < FIRST_STREAMS:
            held.append(request)
        elif len(asked) == FIRST_STREAMS:
            connection.send(accepted(request))
        else:
            connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    async def read(server: FakeServer) -> None:
        async with tailrace.connect(server.url, retry_for_s=60) as source:
            seen = 0
            async for change in source.changes():
                seen += isinstance(change, Mutation)
                if seen == vbuckets - FIRST_STREAMS:
                    connection = server.connections[0]
                    for request in held:
                        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))
                if seen == vbuckets - 1:
                    break

    with FakeServer(stream, vbuckets=vbuckets) as server:
        asyncio.run(read(server))
    assert sorted(request.vbucket for request in asked) == list(range(vbuckets))


def test_it_sleeps_while_the_first_streams_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of a vbucket whose pause is over must not fire again and again until there is an answer."""
    turn, asked, late = Reading.turn, list[DcpStreamRequest](), list[bool]()

    def watched(reading: Reading, now: float) -> None:
        turn(reading, now)
        due = reading.next_timer()
        late.append(due is not None and due <= now)

    monkeypatch.setattr(Reading, "turn", watched)
    monkeypatch.setattr(resume, "Backoff", partial(Backoff, first_s=0.6))  # over after we are connected again

    vbuckets = 3 * FIRST_STREAMS

    def stream(connection: Connection, request: DcpStreamRequest) -> None:
        asked.append(request)
        again = asked[vbuckets:]
        if len(asked) in (FIRST_STREAMS, vbuckets):
            connection.send(accepted(request))
        if len(asked) == vbuckets:
            connection.close()  # the two that were accepted have a pause now
        if len(again) >= FIRST_STREAMS:
            if len(again) == FIRST_STREAMS:
                time.sleep(1.0)  # longer than that
            for answered in again if len(again) == FIRST_STREAMS else [request]:
                connection.send(accepted(answered), marker(answered, 1, 1), mutation(answered, 1))

    async def read(server: FakeServer) -> set[int]:
        seen = set()
        async with tailrace.connect(server.url, retry_for_s=60) as source:
            async for change in source.changes():
                if isinstance(change, Mutation):
                    seen.add(change.vbucket)
                if len(seen) == vbuckets:
                    break
        return seen

    with FakeServer(stream, vbuckets=vbuckets) as server:
        assert len(asyncio.run(read(server))) == vbuckets
    assert not any(late)


def test_no_more_streams_are_asked_for_while_none_is_answered() -> None:
    reader = DcpReader(Introduction("a", "b"), ReaderSettings("r"), rng=random.Random(0), now=0.0)
    streams = [ReaderStream(vbucket) for vbucket in range(FIRST_STREAMS + 1)]
    for stream in streams[:-1]:
        assert not reader.wants_answer
        reader.open_stream(stream)
    assert reader.wants_answer
    for stream in streams[:-1]:
        reader.close_stream(stream.vbucket)
    assert not reader.wants_answer
