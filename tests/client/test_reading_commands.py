"""tail, dump, record and replay against a real node, as a person runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace.cli.main import main
from tailrace.client.events import Event
from tailrace.client.jsonlines import json_line
from tailrace.client.recording import Recorder, Recording, seqno_of
from tailrace.client.replay import ReplayServer
from tailrace.client.state_store import FileState
from tailrace.client.text_lines import TextLines
from tailrace.errors import UsageError
from tailrace.files import DiskFile
from tailrace.testing.faulty_files import no_space
from tailrace.testing.running import RunningNode
from tailrace.wire.admin import GetFailoverLog, Hello, Noop
from tailrace.wire.codes import DcpOpcode, Feature, Magic, Op, Status
from tailrace.wire.dcp import DcpControl, DcpStreamRequest
from tailrace.wire.fields import encode_failover_log
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.kv import Get
from tailrace.wire.message import Response

KEYS = [f"key-{number}".encode() for number in range(40)]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4) as running:
        yield running


def run(capfdbinary: pytest.CaptureFixture[bytes], *arguments: Path | str) -> tuple[int, bytes, bytes]:
    code = main([str(argument) for argument in arguments])
    out, err = capfdbinary.readouterr()
    return code, out, err


def lines(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_only_changes_for_scripts_that_want_a_key(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    node.set("a", {"n": 1})
    node.set("b", {"n": 2})
    node.delete("b")
    code, out, _ = run(capfdbinary, "tail", node.url, "--to", "now", "--json", "--changes-only")
    assert code == 0
    assert sorted((line["op"], line["key"]) for line in lines(out)) == [("deletion", "b"), ("mutation", "a")]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--from", "earliest", "--once"], 1),
        (["--from", "latest", "--to", "now"], 0),
        (["--from", "beginning", "--to", "now"], 1),
    ],
)
def test_words_that_people_know_from_elsewhere(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], words: list[str], count: int
) -> None:
    node.set("a", {"n": 1})
    code, out, _ = run(capfdbinary, "tail", node.url, "--changes-only", "--json", *words)
    assert (code, len(lines(out))) == (0, count)
    with tailrace.connect_sync(node.url) as source:
        assert len(list(source.batches("earliest", "now"))) == 1


def test_a_deletion_as_json(node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    node.set("a", {"n": 1})
    code, out, _ = run(capfdbinary, "delete", node.url, "a", "--json")
    (told,) = lines(out)
    vbucket = node.vbucket_of("a")
    assert code == 0 and told["key"] == "a" and told["vbucket"] == vbucket
    assert told["seqno"] == node.high_seqno(vbucket) == 2 and told["vb_uuid"].isdigit()


def test_json_lines_have_the_promised_shape() -> None:
    events: list[Event] = [
        tailrace.Mutation(7, 187349, 12, 1, 1731, b"user::1", b'{"a": 1.10}', 0, 0, 1, (1, 12)),
        tailrace.Mutation(7, 187349, 12, 1, 1731, b"\xff", b"\xff\x00", 5, 9, 0, (1, 12), 8, {"x": 1}),
        tailrace.Mutation(7, 187349, 12, 1, 1731, b"k", b'{"a":\n NaN}', 0, 0, 1, (1, 12)),
        tailrace.Mutation(7, 187349, 12, 1, 1731, b"k", b"[1,\r\n2]", 0, 0, 1, (1, 12)),
        tailrace.Deletion(7, 187349, 13, 2, 1732, b"user::1", 1700000000, (13, 13)),
        tailrace.Expiration(7, 187349, 14, 2, 1732, b"user::2", 1700000000, (13, 14)),
        tailrace.Snapshot(7, 187349, 1, 12, "disk"),
        tailrace.Rollback(7, 998, 100),
        tailrace.Flush(7),
        tailrace.SystemEvent(7, 1, 3, "collection_created", "orders", 0x1F, 8, 9, None, (1, 3)),
        tailrace.SeqnoAdvanced(7, 1, 4, (1, 4)),
        tailrace.StreamEnd(7, "ok"),
    ]
    written = [json_line(event) for event in events]
    assert written[0] == (
        b'{"op":"mutation","vbucket":7,"vb_uuid":"187349","seqno":12,"rev":1,"cas":"1731","key":"user::1",'
        b'"value":{"a": 1.10},"flags":0,"expiry":0,"datatype":"json","snapshot":[1,12]}\n'
    )
    assert all(line.count(b"\n") == 1 for line in written)
    objects = [json.loads(line) for line in written]
    assert objects[1]["key_base64"] == "/w==" and objects[1]["value_base64"] == "/wA="
    assert "key" not in objects[1] and objects[1]["xattrs"] == {"x": 1} and objects[1]["collection_id"] == 8
    assert objects[2]["value"] == '{"a":\n NaN}'  # declared as JSON, but not JSON: text
    assert objects[3]["value"] == [1, 2]
    assert "value" not in objects[4] and [line["op"] for line in objects[4:6]] == ["deletion", "expiration"]
    assert objects[6] == {
        "op": "snapshot",
        "vbucket": 7,
        "vb_uuid": "187349",
        "start": 1,
        "end": 12,
        "source": "disk",
    }
    assert objects[7] == {"op": "rollback", "vbucket": 7, "vb_uuid": "998", "seqno": 100}
    assert objects[8] == {"op": "flush", "vbucket": 7}
    assert objects[9]["op"] == "system" and objects[9]["event"] == "collection_created"
    assert objects[11] == {"op": "end", "vbucket": 7, "reason": "ok"}
    for text in (TextLines(verbose=True), TextLines(colour=True, width=80, verbose=True)):
        shown = [text.line(event) for event in events]
        assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in shown)
    assert b"\x1b" not in TextLines().line(
        tailrace.Mutation(0, 1, 1, 1, 1, b"\x1b[31m", b"\x9b1m", 0, 0, 0, (1, 1))
    )


def test_tail_and_its_state(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    for key in KEYS:
        node.set(key, {"n": 1})
    state = tmp_path / "positions.json"
    arguments = ("tail", node.url, "--to", "now", "--json", "--state", state)
    code, out, err = run(capfdbinary, *arguments)
    assert (code, err) == (0, b"")
    first = lines(out)
    assert {line["key"] for line in first if line["op"] == "mutation"} == {key.decode() for key in KEYS}
    assert [line["op"] for line in first].count("end") == 4
    assert [line["op"] for line in lines(run(capfdbinary, *arguments)[1])] == ["end"] * 4
    node.set(KEYS[0], {"n": 2})
    third = [line for line in lines(run(capfdbinary, *arguments)[1]) if line["op"] == "mutation"]
    assert [line["value"] for line in third] == [{"n": 2}]
    vbucket = third[0]["vbucket"]
    node.rewind(vbucket, third[0]["seqno"] - 1)
    fourth = [line["op"] for line in lines(run(capfdbinary, *arguments)[1])]
    assert "rollback" in fourth
    # positions from a file, and the state file that wins over them
    beginning = tmp_path / "beginning.json"
    position = {"vb_uuid": "0", "seqno": 0, "snapshot": [0, 0]}
    beginning.write_text(json.dumps({str(vb): position for vb in range(4)}))
    code, out, _ = run(capfdbinary, "tail", node.url, "--to", "now", "--json", "--from", beginning)
    assert len([line for line in lines(out) if line["op"] == "mutation"]) == len(KEYS)
    code, out, _ = run(capfdbinary, *arguments, "--from", beginning)
    assert [line["op"] for line in lines(out)] == ["end"] * 4
    code, out, _ = run(capfdbinary, "tail", node.url, "--to", "now", "--from", state, "--json")
    assert [line["op"] for line in lines(out)] == ["end"] * 4
    text = run(capfdbinary, "tail", node.url, "--to", "now", "--vbucket", "0-1")[1].decode()
    assert "set" in text and "key-" in text


def test_tail_errors(node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    other = tmp_path / "other.json"
    other.write_text('{"tailrace_state":1,"bucket":"beer","vbuckets":{}}')
    for code, *arguments in (
        (2, "--dialect", "tap", "--state", tmp_path / "state.json"),
        (2, "--dialect", "tap", "--from", other),
        (2, "--dialect", "upr-a", "--no-value"),
        (2, "--dialect", "upr-a", "--tap-name", "reader"),
        (2, "--from", "yesterday"),
        (2, "--from", broken),
        (2, "--state", broken),
        (2, "--state", other),
        (2, "--vbucket", "9"),
        (2, "--collection", "no.such"),
        (2, "--state", tmp_path / "no" / "directory.json"),
    ):
        node.set(b"k", 1)
        exit_code, _, err = run(capfdbinary, "tail", node.url, "--to", "now", "--json", *arguments)
        assert exit_code == code, (arguments, err)
        assert err.startswith(b"tailrace: error: ") and err.count(b"\n") == 1
    assert run(capfdbinary, "tail", "couchbase://127.0.0.1:1")[0] == 3
    assert run(capfdbinary, "tail", node.url + "x")[0] == 3


def saved_changes(state: Path) -> int:
    """How many changes a state file covers."""
    return sum(saved.position.seqno for saved in FileState(state).load().values())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)]
)
def test_a_stopped_tail_misses_nothing(node: RunningNode, tmp_path: Path, number: int, code: int) -> None:
    """However it ends, its output and that of the next run have everything, and whole snapshots come once."""
    state, output = tmp_path / "state.json", tmp_path / "out.jsonl"
    for key in KEYS[:20]:
        node.set(key, 1)
    command = [sys.executable, "-m", "tailrace", "tail", node.url, "--json", "--state", str(state)]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file)
        while output.read_bytes().count(b'"mutation"') < 20 or saved_changes(state) < 20:
            assert process.poll() is None
            time.sleep(0.005)
        for key in KEYS[20:]:
            node.set(key, 2)
        while output.read_bytes().count(b'"mutation"') < 30:
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid, number)
        assert process.wait(60) == code
    whole = output.read_bytes()
    first = lines(whole[: whole.rfind(b"\n") + 1])
    rest = lines(subprocess.run([*command, "--to", "now"], stdout=subprocess.PIPE, check=True).stdout)
    seen = [(line["vbucket"], line["seqno"]) for line in first + rest if line["op"] == "mutation"]
    assert set(seen) == {(vb, seqno) for vb in range(4) for seqno in range(1, node.high_seqno(vb) + 1)}
    saved = [line for line in first if line["op"] == "mutation" and line["value"] == 1]
    again = {(line["vbucket"], line["seqno"]) for line in rest if line["op"] == "mutation"}
    assert not again & {(line["vbucket"], line["seqno"]) for line in saved}


def test_dump(node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    for key in KEYS:
        node.set(key, {"n": 1})
    for key in KEYS[:5]:
        node.delete(key)
    node.set(KEYS[6], b"\xff")
    node.persist()
    node.set(KEYS[7], {"n": 2})
    expected = {key.decode() for key in KEYS[5:]}
    code, out, err = run(capfdbinary, "dump", node.url)
    documents = lines(out)
    assert code == 0 and len(documents) == len(expected) and {line["key"] for line in documents} == expected
    by_key = {line["key"]: line for line in documents}
    assert by_key["key-7"]["value"] == {"n": 2} and by_key["key-6"]["value_base64"] == "/w=="
    target = tmp_path / "documents.parquet"
    code, out, err = run(capfdbinary, "dump", node.url, "--out", target)
    assert (code, out) == (0, b"") and b"35 documents" in err
    table = pq.read_table(target)
    assert {key.decode() for key in table["key"].to_pylist()} == expected
    assert os.listdir(tmp_path) == ["documents.parquet"]
    again = tmp_path / "documents.jsonl"
    assert run(capfdbinary, "dump", node.url, "--out", again)[0] == 0
    with tailrace.testing.node(vbuckets=8) as other:
        assert run(capfdbinary, "load", other.url, "--from", again)[0] == 0
        assert all(other.get(key) == node.get(key) for key in KEYS)
    assert run(capfdbinary, "dump", node.url, "--out", tmp_path / "no" / "file.jsonl")[0] == 2


class Replaying:
    """A recording on a port, in a thread."""

    def __init__(self, path: Path, *, exchanges: int | None = None) -> None:
        """``exchanges``: how many for each vbucket there were when it was stopped."""
        self._loop = asyncio.new_event_loop()
        recording = Recording(path)
        recording.exchanges = {vb: told[:exchanges] for vb, told in recording.exchanges.items()}
        self._server = ReplayServer(recording)
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> str:
        self._loop.run_until_complete(self._server.start("127.0.0.1", 0))
        self._thread.start()
        return f"couchbase://127.0.0.1:{self._server.port}/default"

    def __exit__(self, *_: None) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def by_vbucket(events: Iterator[Any]) -> list[Any]:
    """All events; those of one vbucket in their order."""
    return sorted(events, key=lambda event: event.vbucket)


def test_record_and_replay(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, connect: Callable[..., Any]
) -> None:
    for key in KEYS:
        node.set(key, {"n": 1})
    node.delete(KEYS[3])
    first, second = tmp_path / "first.rec", tmp_path / "second.rec"
    assert run(capfdbinary, "record", node.url, first)[0] == 0
    original = by_vbucket(connect(node.url).changes(end="now"))
    with Replaying(first) as url:
        # a small window, so that flow control has work
        assert by_vbucket(connect(url, flow_control_buffer=2_000).changes(end="now")) == original
        assert run(capfdbinary, "record", url, second)[0] == 0
    recorded, two = Recording(first), Recording(second)
    assert recorded.exchanges.keys() == two.exchanges.keys() == set(range(4))
    for vbucket in range(4):
        for a, b in zip(recorded.exchanges[vbucket], two.exchanges[vbucket], strict=True):
            frames = [[replace(frame, opaque=1) for frame in exchange.frames] for exchange in (a, b)]
            assert frames[0] == frames[1]
    whole = first.read_bytes()
    header = whole[: whole.index(b"}\n") + 2]
    no_frames = struct.pack(">QHBI", 0, 0, 0, 24) + b"\xff" * 24
    for broken in (b"", b"x" * 100, whole[:30], header + no_frames, header + b"\xff" * 90):
        second.write_bytes(broken)
        with pytest.raises(UsageError, match="is not a recording"):
            Recording(second)
    second.write_bytes(whole[:-7])
    assert Recording(second).vbucket_count == 4


def test_a_recording_ends_with_a_full_disk(
    node: RunningNode,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is not a lost connection to be resumed: it ends immediately, and what could be recorded stays."""
    for key in KEYS:
        node.set(key.decode(), {"n": 1})
    append, left = DiskFile.append, 1000

    def fills(file: DiskFile, parts: list[bytes]) -> None:
        nonlocal left
        left -= sum(map(len, parts))
        if left < 0:
            raise no_space()
        append(file, parts)

    monkeypatch.setattr(DiskFile, "append", fills)
    file = tmp_path / "stream.rec"
    code, out, err = run(capfdbinary, "record", node.url, file)
    assert (code, out) == (1, b"")
    assert (
        err.decode()
        == f"tailrace: error: the recording {str(file)!r} can't be written: No space left on device\n"
    )
    assert os.listdir(tmp_path) == ["stream.rec"] and file.stat().st_size <= 1000


def test_a_recorded_rollback_is_replayed(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    """A bug report has the whole story: the same requests get the same answers."""
    for key in KEYS:
        node.set(key, 1)
    state = tailrace.MemoryState()
    source = connect(node.url, state=state)
    list(source.changes(end="now"))
    source.save()
    saved = state.load()
    node.rewind(range(4), 2)
    path = tmp_path / "rollback.rec"
    with path.open("wb") as sink:
        recorder = Recorder(sink)
        recorder.begin({"bucket": "default", "vbuckets": 4, "collections": True})
        told = list(connect(node.url, state=state, on_wire=recorder).changes(end="now"))
    assert sum(isinstance(event, tailrace.Rollback) for event in told) == 4
    again = tailrace.MemoryState()
    again.save(saved)
    with Replaying(path) as url:
        replayed = list(connect(url, state=again).changes(end=dict.fromkeys(range(4), 2)))
    assert sorted(map(repr, replayed)) == sorted(map(repr, told))


def record(
    connect: Callable[..., Any], url: str, path: Path, *, steps: list[Callable[[], None]]
) -> list[Any]:
    """Record without an end: when everything has come, the next step runs; it ends as by Ctrl-C."""
    with path.open("wb") as sink:
        recorder = Recorder(sink)
        recorder.begin({"bucket": "default", "vbuckets": 4, "collections": True})
        told, source = [], connect(url, on_wire=recorder)
        asking = connect(url)
        with contextlib.closing(source.changes()) as changes:
            wanted = asking.high_seqnos()

            def has_all() -> bool:  # no event shows that the stream of an empty vbucket is open
                places = source.positions()
                return all(vb in places and places[vb].seqno == high for vb, high in wanted.items() if high)

            for event in changes:
                told.append(event)
                while has_all() and steps:
                    steps.pop(0)()
                    wanted = asking.high_seqnos()
                if not steps and has_all():
                    break
        source.close()
    return told


def documents(events: list[Any]) -> dict[bytes, bytes]:
    """What an application that follows the events holds; a rollback to 0 clears the vbucket."""
    held: dict[int, dict[bytes, bytes]] = {}
    for event in events:
        if isinstance(event, tailrace.Rollback):
            assert event.seqno == 0
            held.pop(event.vbucket, None)
        elif isinstance(event, tailrace.Mutation):
            held.setdefault(event.vbucket, {})[event.key] = event.value
        elif isinstance(event, tailrace.Deletion):
            held[event.vbucket].pop(event.key)
    return {key: value for some in held.values() for key, value in some.items()}


def stirred(node: RunningNode, what: Callable[[], None], value: int) -> Callable[[], None]:
    """Something happens to the node, then each vbucket gets a change."""

    def step() -> None:
        what()
        for vbucket in range(4):
            node.set(f"later-{vbucket}", value, vbucket=vbucket)

    return step


def test_a_recording_without_an_end_is_replayed(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    """It was ended by Ctrl-C: a reader of what is there comes to an end, and one that comes back goes on."""
    for key in KEYS:
        node.set(key, 1)
    path, state = tmp_path / "stream.rec", tailrace.MemoryState()
    told = record(connect, node.url, path, steps=[stirred(node, lambda: None, 2)])
    assert not any(isinstance(event, tailrace.StreamEnd) for event in told)
    with Replaying(path) as url:
        replayed = list(connect(url, state=state).changes(end="now"))
        assert documents(replayed) == documents(told)
        again = list(connect(url, state=state).changes(end="now"))
        assert documents(again) == {} and not any(isinstance(event, tailrace.Rollback) for event in again)
        # from the middle, too
        middle = {vb: tailrace.Position.at(node.failover_log(vb)[0][0], 3) for vb in range(4)}
        rest = list(connect(url).changes(start=middle, end="now"))
        assert min(event.seqno for event in rest if isinstance(event, tailrace.Mutation)) == 4
        assert documents(rest).items() <= documents(told).items()


def test_a_recording_with_a_lost_connection_is_replayed(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    """The recorded reader asked again on another connection; that of the replay must not wait for ever."""
    for key in KEYS:
        node.set(key, 1)
    path = tmp_path / "stream.rec"
    steps = [stirred(node, node.drop_connections, 2), stirred(node, node.drop_connections, 3)]
    told = record(connect, node.url, path, steps=steps)
    with Replaying(path) as url:
        replayed = list(connect(url).changes(end="now"))
    assert documents(replayed) == documents(told)
    mutations = [(event.vbucket, event.seqno) for event in replayed if isinstance(event, tailrace.Mutation)]
    assert len(set(mutations)) == len(mutations) == len(KEYS) + 8


def test_a_replay_ends_where_the_recording_does(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    """A recording with a rollback, read up to its end: on its last branch, not on the one given up."""
    for key in KEYS:
        node.set(key, 1)
    path = tmp_path / "stream.rec"
    told = record(connect, node.url, path, steps=[stirred(node, lambda: node.rewind(range(4), 2), 2)])
    assert sum(isinstance(event, tailrace.Rollback) for event in told) == 4
    expected = documents(list(connect(node.url).changes(end="now")))
    with Replaying(path) as url:
        assert documents(list(connect(url).changes(end="now"))) == documents(told) == expected


@pytest.mark.parametrize("seqno", [0, 2])
def test_a_replay_whose_last_branch_brought_nothing_ends(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any], seqno: int
) -> None:
    """Rolled back, then silence, wherever the recording was stopped: nothing waits for what was given up."""
    for key in KEYS:
        node.set(key, 1)
    path = tmp_path / "stream.rec"
    before = held(list(connect(node.url).changes(end="now")))
    with path.open("wb") as sink:
        recorder = Recorder(sink)
        recorder.begin({"bucket": "default", "vbuckets": 4, "collections": True})
        source, gone = connect(node.url, on_wire=recorder), set[int]()
        with contextlib.closing(source.changes()) as changes:
            for event in changes:
                if not gone and sum(at.seqno for at in source.positions().values()) == len(KEYS):
                    node.rewind(range(4), seqno)
                if isinstance(event, tailrace.Rollback):
                    gone.add(event.vbucket)
                    if len(gone) == 4:
                        break
        source.close()
    after = held(list(connect(node.url).changes(end="now")))
    assert (len(before), len(after)) == (len(KEYS), 4 * seqno)
    for exchanges, expected in (
        (1, before),  # the stream that the rewind ended
        (2, before),  # the answer that sends the reader back, which alone says nothing of the new branch
        (3, after),  # the stream on the new branch
    ):
        with Replaying(path, exchanges=exchanges) as url:
            assert held(list(connect(url).changes(end="now"))) == expected
            out = tmp_path / "out.jsonl"
            assert main(["dump", url, "--out", str(out)]) == 0
            dumped = {json.loads(line)["key"].encode() for line in out.read_text().splitlines()}
            assert dumped == set(expected)


def test_a_replay_goes_on_with_no_branch_that_its_reader_gave_up(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    for number in range(9):
        node.set(f"k{number}", 1, vbucket=0)
    path = tmp_path / "stream.rec"
    record(connect, node.url, path, steps=[stirred(node, lambda: node.rewind(0, 2), 2)])
    recorded = Recording(path).exchanges[0]
    assert [exchange.is_accepted for exchange in recorded] == [True, False, True]
    first, rollback, last = (exchange.request for exchange in recorded)
    rest = DcpStreamRequest.decode(rollback)
    rest.start_seqno = rest.snapshot_start = rest.snapshot_end = 5

    with Replaying(path) as url:

        def seqnos(wire: Wire, request: Frame) -> list[int]:
            """Of the changes that a request brings before the stream ends or stands still."""
            wire.send(request.encode())
            frames = [wire.frame()]
            wire.send(Noop(opaque=0xFFFF))
            while frames[-1].opaque != 0xFFFF:
                frames.append(wire.frame())
            return [seqno for frame in frames if (seqno := seqno_of(frame)) is not None]

        port = int(url.split(":")[2].partition("/")[0])
        with Wire(port) as wire:
            assert seqnos(wire, rest.to_frame()) == [6, 7, 8, 9], "a reader that comes back"
        with Wire(port) as wire:
            assert seqnos(wire, first) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
            assert seqnos(wire, rollback) == []
            assert seqnos(wire, last) == [1, 2, 3]
            assert seqnos(wire, rest.to_frame()) == []


def held(events: list[Any]) -> dict[bytes, bytes]:
    """What an application that follows the events holds."""
    state: dict[int, dict[bytes, tuple[int, bytes]]] = {}
    for event in events:
        mine = state.setdefault(event.vbucket, {})
        if isinstance(event, tailrace.Rollback):
            state[event.vbucket] = {key: old for key, old in mine.items() if old[0] <= event.seqno}
        elif isinstance(event, tailrace.Mutation):
            mine[event.key] = event.seqno, event.value
    return {key: value for mine in state.values() for key, (_, value) in mine.items()}


def test_a_replay_sends_noops(node: RunningNode, tmp_path: Path, connect: Callable[..., Any]) -> None:
    """A reader that waits for more would think a silent connection dead, and get everything again."""
    node.set("k", 1)
    path = tmp_path / "stream.rec"
    record(connect, node.url, path, steps=[])
    with Replaying(path) as url:
        host, port = url.removeprefix("couchbase://").split("/")[0].split(":")
        with socket.create_connection((host, int(port)), timeout=60) as peer:
            for key, value in ((b"enable_noop", b"true"), (b"set_noop_interval", b"0.1")):
                peer.sendall(DcpControl(key=key, value=value).encode())
            framer, opcodes = Framer(), []
            while DcpOpcode.NOOP not in opcodes:
                framer.feed(peer.recv(4096))
                opcodes += [frame.opcode for frame in framer.frames()]


@pytest.mark.parametrize(
    "asked",
    [
        (Feature.CLUSTERMAP_CHANGE_NOTIFICATION,),
        (Feature.XERROR, Feature.XERROR, 0x7777, Feature.TCP_NODELAY),
        (Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION),
    ],
)
def test_a_replay_grants_features_as_a_node_does(
    asked: tuple[int, ...], node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    node.set("k", 1)
    path = tmp_path / "stream.rec"
    record(connect, node.url, path, steps=[])
    answers = []
    with Replaying(path) as url:
        for place in (url, node.url):
            host, port = place.removeprefix("couchbase://").split("/")[0].split(":")
            with socket.create_connection((host, int(port)), timeout=60) as peer:
                peer.sendall(Hello(value=b"".join(code.to_bytes(2, "big") for code in asked)).encode())
                head = peer.recv(24, socket.MSG_WAITALL)
                status, body_length = struct.unpack(">6xHI12x", head)
                body = peer.recv(body_length, socket.MSG_WAITALL) if body_length else b""
            answers.append((status, None if status else body))
    assert answers[0] == answers[1]


def test_a_replay_refuses_what_its_recording_does_not_have(
    node: RunningNode, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    node.set("k", 1, vbucket=0)
    path = tmp_path / "stream.rec"
    with path.open("wb") as sink:
        recorder = Recorder(sink)
        recorder.begin({"bucket": "default", "vbuckets": 4, "collections": False})
        list(connect(node.url, on_wire=recorder).changes(end="now", vbuckets=[0]))
    with Replaying(path) as url, Wire(int(url.split(":")[2].partition("/")[0])) as wire:
        assert wire.hello(Feature.COLLECTIONS, Feature.XERROR) == [Feature.XERROR]
        assert wire.refused(Get(key=b"k")) == Status.UNKNOWN_COMMAND
        for vbucket, wanted in ((1, Status.NOT_MY_VBUCKET), (0, Status.SUCCESS)):
            assert wire.call(GetFailoverLog(vbucket=vbucket)).status == wanted
            assert wire.call(DcpStreamRequest(vbucket=vbucket, end_seqno=1)).status == wanted
        while wire.frame().opcode != DcpOpcode.STREAM_END:
            pass
        wire.send(Response(opcode=Op.NOOP))  # answers nothing
        # nothing is left, and no more is asked for
        assert wire.ok(DcpStreamRequest(vbucket=0, end_seqno=0)).value == node_log(node, 0)
        assert wire.frame().opcode == DcpOpcode.STREAM_END
        wire.send(Frame(Magic.REQUEST, DcpOpcode.STREAM_REQUEST, extras_length=3, body=b"abc").encode())
        assert wire.frame().status == Status.EINVAL


def node_log(node: RunningNode, vbucket: int) -> bytes:
    """The failover log, as it goes over the wire."""
    return encode_failover_log(node.failover_log(vbucket))


def test_a_replay_tells_its_branches(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, connect: Callable[..., Any]
) -> None:
    for key in KEYS:
        node.set(key, 1)
    node.rewind(2, 3)
    path = tmp_path / "stream.rec"
    assert run(capfdbinary, "record", node.url, path)[0] == 0
    with Replaying(path) as url:
        source = connect(url)
        logs = {vbucket: log.to_json() for vbucket, log in source.failover_logs().items()}
        assert logs == {vbucket: log.to_json() for vbucket, log in connect(node.url).failover_logs().items()}
        assert len(logs[2]) == 2
        once = by_vbucket(source.changes(end="now"))
        assert sum(isinstance(event, tailrace.Mutation) for event in once) > 0
