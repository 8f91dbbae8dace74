"""A first load that comes in any order: whole, or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from client.fake_server import UUID, FakeServer, accepted, marker, mutation
from tailrace import Mutation, Rollback, Snapshot
from tailrace.client.events import SeqnoAdvanced
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import RemoteProtocolError, UsageError
from tailrace.wire.codes import ControlKey, DcpOpcode, OsoFlag
from tailrace.wire.dcp import MUTATION, DcpOsoSnapshot, DcpSeqnoAdvanced, DcpStreamEnd
from tailrace.wire.header import HEADER_SIZE

SHUFFLED = [7, 2, 9, 4]


def oso(request: Any, flag: OsoFlag) -> bytes:
    return DcpOsoSnapshot(flags=int(flag), opaque=request.opaque, vbucket=request.vbucket).encode()


def advanced(request: Any, seqno: int) -> bytes:
    return DcpSeqnoAdvanced(by_seqno=seqno, opaque=request.opaque, vbucket=request.vbucket).encode()


def ended(request: Any) -> bytes:
    return DcpStreamEnd(opaque=request.opaque, vbucket=request.vbucket).encode()


def changes(request: Any, seqnos: list[int]) -> list[bytes]:
    return [mutation(request, seqno, key=b"\0k%d" % seqno) for seqno in seqnos]


def zero(request: Any) -> bytes:
    """A change with seqno 0, which our own codec does not write."""
    (change,) = changes(request, [1])
    at = HEADER_SIZE + MUTATION.at("by_seqno")
    return change[:at] + bytes(8) + change[at + 8 :]


def seqnos(events: list[Any]) -> list[int]:
    return [event.seqno for event in events if isinstance(event, Mutation)]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("last", [9, 12])
def test_it_is_whole_at_its_end(connect: Any, last: int, *, one_by_one: bool) -> None:
    """``last``: with a Seqno Advanced the position is beyond the highest change."""

    def serve(connection: Any, request: Any) -> None:
        parts = [accepted(request), oso(request, OsoFlag.START), *changes(request, SHUFFLED)]
        parts += [advanced(request, last)] if last != 9 else []
        parts += [oso(request, OsoFlag.END), marker(request, last + 1, last + 2)]
        parts += [*changes(request, [last + 1, last + 2]), ended(request)]
        for part in parts if one_by_one else [b"".join(parts)]:
            connection.send(part)

    with FakeServer(serve) as server:
        server.high_seqnos = {0: last + 2}
        source = connect(server.url, out_of_order=True)
        events = list(source.changes(end="now"))
        asked = [frame.key for frame in server.requests if frame.opcode == DcpOpcode.CONTROL]
        assert ControlKey.ENABLE_OSO in asked
        assert seqnos(events) == [*SHUFFLED, last + 1, last + 2]
        whole = next(event for event in events if isinstance(event, SeqnoAdvanced))
        assert (whole.seqno, whole.snapshot) == (last, (last, last))
        assert events.index(whole) == 1 + len(SHUFFLED), "not before its end"
        (first, second) = (event for event in events if isinstance(event, Snapshot))
        assert (first.start, second.start) == (0, last + 1)
        assert source.positions()[0].seqno == last + 2
        batches = list(connect(server.url, out_of_order=True).batches(end="now"))
        assert [seqno for batch in batches for seqno in batch["seqno"].to_pylist()] == seqnos(events)


def test_there_is_no_place_to_go_on_inside_of_it(connect: Any) -> None:
    """The connection breaks: what came is taken back, and everything comes again from where it began."""
    requests: list[Any] = []
    broken = threading.Event()

    def serve(connection: Any, request: Any) -> None:
        requests.append(request)
        connection.send(accepted(request), oso(request, OsoFlag.START), *changes(request, SHUFFLED[:2]))
        if len(requests) == 1:
            broken.wait(20)
            connection.close()
        else:
            connection.send(*changes(request, SHUFFLED[2:]), oso(request, OsoFlag.END), ended(request))

    with FakeServer(serve) as server:
        server.high_seqnos = {0: 9}
        source = connect(server.url, out_of_order=True, retry_for_s=20)
        events = []
        for event in source.changes(end="now"):
            events.append(event)
            if seqnos(events) == SHUFFLED[:2] and not broken.is_set():
                assert source.positions()[0].seqno == 0
                while not hasattr(source, "_reading"):
                    source = source._source
                assert not source._reading.can_leave(0, is_urgent=False), "nor to hand over"
                broken.set()
        assert requests[1].start_seqno == 0
        (back,) = (event for event in events if isinstance(event, Rollback))
        assert (back.seqno, back.vb_uuid) == (0, UUID)
        assert seqnos(events[events.index(back) :]) == SHUFFLED
        assert source.positions()[0].seqno == 9 and source.positions()[0].at_snapshot_end


WRONG = {
    "its end alone": lambda r: [oso(r, OsoFlag.END)],
    "twice": lambda r: [oso(r, OsoFlag.START), oso(r, OsoFlag.START)],
    "seqno 0": lambda r: [oso(r, OsoFlag.START), *changes(r, [3]), zero(r), *changes(r, [2])],
    "seqno 0 alone": lambda r: [oso(r, OsoFlag.START), zero(r), oso(r, OsoFlag.END)],
    "beyond all seqnos": lambda r: [oso(r, OsoFlag.START), *changes(r, [1 << 63]), oso(r, OsoFlag.END)],
    "no end": lambda r: [oso(r, OsoFlag.START), *changes(r, SHUFFLED), ended(r)],
    "more behind the stream's end": lambda r: [oso(r, OsoFlag.START), ended(r), *changes(r, SHUFFLED)],
    "a marker inside": lambda r: [oso(r, OsoFlag.START), marker(r, 1, 9)],
    "any order behind it": lambda r: [
        oso(r, OsoFlag.START),
        oso(r, OsoFlag.END),
        marker(r, 1, 9),
        *changes(r, SHUFFLED),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_does_it_wrong(connect: Any, name: str) -> None:
    def serve(connection: Any, request: Any) -> None:
        connection.send(b"".join([accepted(request), *WRONG[name](request)]))

    with FakeServer(serve) as server, pytest.raises(RemoteProtocolError):
        server.high_seqnos = {0: 9}
        list(connect(server.url, out_of_order=True, retry_for_s=2).changes(end="now"))


def test_from_our_node(connect: Any) -> None:
    with tailrace.testing.node(vbuckets=1) as node, KvClient(parse(node.url)) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.orders"], []))
        for number in range(20):
            client.set(f"o{number}", {"n": number}, collection="shop.orders")
        node.set("other", {})
        node.persist()
        node.restart()
        source = connect(node.url, out_of_order=True, collections=["shop.orders"])
        events = list(source.changes(end="now"))
        assert len(seqnos(events)) == 20
        assert source.positions()[0].seqno == node.high_seqno(0)


def test_not_with_rollback_mitigation() -> None:
    with pytest.raises(UsageError, match="exclude"):
        tailrace.connect("couchbase://127.0.0.1", out_of_order=True, persisted_only=True)


def test_our_node_sends_one_too(connect: Any, tmp_path: Path) -> None:
    """From disk, in the order of keys; what is written meanwhile and later comes in the order of seqnos."""
    with tailrace.testing.node(vbuckets=1, data=tmp_path, settings={"memory_quota": "1m"}) as node:
        for number in range(200):
            node.set(f"k{number * 7 % 200:03}", {"n": number})
        node.persist()
        node.compact()
        node.restart()  # nothing is in memory
        node.set("last", b"v")
        source = connect(node.url, out_of_order=True, collections=["_default._default"])
        events = list(source.changes(end="now"))
        keys = [event.key for event in events if isinstance(event, Mutation)]
        seqnos = [event.seqno for event in events if isinstance(event, Mutation)]
        assert sorted(keys) == sorted([*(b"k%03d" % number for number in range(200)), b"last"])
        assert seqnos != sorted(seqnos)
        assert source.positions()[0].seqno == max(seqnos) == 201
