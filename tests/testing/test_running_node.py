"""The node that people use in their own tests, with everything that may go wrong with one."""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from tailrace.errors import DocumentRefused, RollbackImpossible, TailraceError
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Status, VBucketState
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame


def ask(node: RunningNode, *messages: Any, count: None = None) -> list[Frame]:
    """Send requests, take answers; fewer if the connection breaks."""
    frames = []
    framer = Framer()
    with socket.create_connection((node.host, node.port), timeout=30) as connection:
        connection.sendall(b"".join(message.encode() for message in messages))
        while len(frames) < (len(messages) if count is None else count):
            try:
                data = connection.recv(1 << 16)
            except ConnectionError:
                break
            if not data:
                break
            framer.feed(data)
            frames += framer.frames()
    return frames


def test_documents() -> None:
    with tailrace.testing.node(vbuckets=16) as node:
        written = node.set("user::1", {"name": "Ada"})
        assert written.seqno == 1
        assert node.get("user::1") == {"name": "Ada"}
        node.set(b"raw", b"\xff\x00")
        assert node.get("raw") == b"\xff\x00"
        assert node.get("nobody") is None
        node.delete("user::1")
        assert node.get("user::1") is None
        with pytest.raises(DocumentRefused):
            node.delete("user::1")
        assert node.url == f"couchbase://127.0.0.1:{node.port}/default"
        (answer,) = ask(node, kv.Get(key=b"raw", vbucket=node.vbucket_of("raw")))
        assert answer.value == b"\xff\x00"


def test_many_documents() -> None:
    with tailrace.testing.node(vbuckets=16) as node:
        documents: dict[str | bytes, Any] = {f"k{at}": at if at % 3 else b"\xff%d" % at for at in range(100)}
        node.set_many(documents)
        assert {key: node.get(key) for key in documents} == documents
        node.set_many({"first": 1, b"second": 2}, vbucket=3)
        assert node.get("second", vbucket=3) == 2
        node.set_many({})


@pytest.mark.parametrize("vbucket", [-1, 4])
def test_a_vbucket_that_does_not_exist(vbucket: int) -> None:
    with tailrace.testing.node(vbuckets=4) as node:
        for act in (
            lambda: node.set("key", 1, vbucket=vbucket),
            lambda: node.set_many({"key": 1}, vbucket=vbucket),
            lambda: node.get("key", vbucket=vbucket),
            lambda: node.delete("key", vbucket=vbucket),
            lambda: node.high_seqno(vbucket),
            lambda: node.failover_log(vbucket),
            lambda: node.rewind(vbucket, to_seqno=0),
        ):
            with pytest.raises(TailraceError, match=f"no vbucket {vbucket}"):
                act()
        assert [node.high_seqno(each) for each in range(4)] == [0, 0, 0, 0]


def test_a_scripted_failover_with_equal_seqnos() -> None:
    """The time machine: two branches with the same seqnos and other changes."""
    with tailrace.testing.node(vbuckets=4) as node:
        for at in range(5):
            node.set(f"k{at}", at, vbucket=3)
        before = node.failover_log(3)
        node.rewind(vbucket=3, to_seqno=3)
        assert node.high_seqno(3) == 3
        assert node.get("k4", vbucket=3) is None
        node.set("other", "branch", vbucket=3)
        assert node.high_seqno(3) == 4
        log = node.failover_log(3)
        assert log[1:] == before
        assert log[0][1] == 3
        with pytest.raises(RollbackImpossible):
            node.rewind(vbucket=3, to_seqno=99)
        node.rewind(range(4), 0)
        assert [node.high_seqno(at) for at in range(4)] == [0, 0, 0, 0]


def test_a_kill_loses_what_is_not_on_disk() -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        node.set("kept", 1)
        node.persist()
        port, log = node.port, node.failover_log(0)
        node.stop_persistence()
        node.set("lost", 2)
        node.kill()
        with pytest.raises(OSError):
            socket.create_connection((node.host, port), timeout=5).close()
        with pytest.raises(TailraceError):
            node.get("kept")
        node.start()
        assert node.port == port
        assert node.get("kept") == 1
        assert node.get("lost") is None
        assert len(node.failover_log(0)) == len(log) + 1  # an unclean stop begins a branch


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=1, data=tmp_path / "data") as node:
        node.set("a", 1)
        log = node.failover_log(0)
        node.restart()
        assert node.get("a") == 1
        assert node.failover_log(0) == log
    with tailrace.testing.node(vbuckets=1, data=tmp_path / "data") as node:
        assert node.get("a") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="how sockets share a port is the system's own")
def test_a_node_that_does_not_run_keeps_its_port() -> None:
    with tailrace.testing.node() as node, socket.socket() as other:
        port = node.port
        node.stop()
        with pytest.raises(OSError, match="in use"):
            other.bind((node.host, port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((node.host, port))
        node.start()
        node.kill()
        node.start()
        assert node.port == port
        assert len(ask(node, admin.Noop())) == 1
    with socket.create_server((node.host, port)):
        pass
    node.start()  # outside of its block too, if nobody else is there
    assert node.port == port
    node.stop()
    del node
    gc.collect()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_persistence_and_purge() -> None:
    with tailrace.testing.node(vbuckets=1, settings={"flush_interval": "1h"}) as node:
        node.stop_persistence()
        node.set("a", 1)

        def persisted() -> int:
            return node.call(lambda inner: inner.buckets["default"].store.vbuckets[0].persisted_seqno)

        assert persisted() == 0
        node.start_persistence()
        assert persisted() == 1
        node.delete("a")
        node.set("b", 1)
        node.compact(drop_tombstones=True)
        assert node.call(lambda inner: inner.buckets["default"].store.vbuckets[0].purge_seqno) == 2


def test_flush_and_states() -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("a", 1, vbucket=0)
        node.flush()
        assert node.high_seqno(0) == 0
        node.set_vbucket_state(1, VBucketState.DEAD)
        (answer,) = ask(node, kv.Get(key=b"a", vbucket=1))
        assert answer.status == Status.NOT_MY_VBUCKET


@pytest.mark.parametrize("cut", [0, 1, 23, 24, 25, 47, 48, 100])
def test_a_connection_that_breaks_at_a_byte(cut: int) -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        node.cut_after(cut)
        frames = ask(node, *[admin.Noop(opaque=at) for at in range(10)])
        assert len(frames) == cut // 24
        node.cut_after(None)
        assert len(ask(node, admin.Noop())) == 1


def test_dropped_connections() -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        with socket.create_connection((node.host, node.port), timeout=30) as connection:
            connection.sendall(admin.Noop().encode())
            assert len(connection.recv(24, socket.MSG_WAITALL)) == 24
            node.drop_connections()
            with pytest.raises((ConnectionError, EOFError)):
                if not connection.recv(1):
                    raise EOFError
        assert len(ask(node, admin.Noop())) == 1


def test_refused_logins() -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        good = admin.SaslAuth(key=b"PLAIN", value=b"\0Administrator\0password")
        assert ask(node, good)[0].status == 0
        node.refuse_logins()
        assert ask(node, good)[0].status == Status.AUTH_ERROR
        node.refuse_logins(refuse=False)
        assert ask(node, good)[0].status == 0


def test_a_slow_disk_holds_up_only_who_waits_for_it() -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        node.slow_disk(0.5)
        began = time.monotonic()
        node.set("a", 1)
        assert node.get("a") == 1
        framed = kv.Set(key=b"b", value=b"1", framing=b"\x11\x03")
        assert ask(node, framed)[0].status == 0
        assert time.monotonic() - began >= 0.5


def test_a_clean_stop_answers_what_is_unfinished() -> None:
    with tailrace.testing.node(vbuckets=1) as node:
        node.slow_disk(0.3)
        with socket.create_connection((node.host, node.port), timeout=30) as connection:
            framed = kv.Set(key=b"b", value=b"1", framing=b"\x11\x03")
            both = framed.encode() + admin.Noop().encode()
            connection.sendall(both)
            while not node.call(lambda inner: sum(session.unfinished for session in inner.sessions)):
                if select.select([connection], [], [], 0)[0]:  # the disk was faster than we are: try again
                    assert statuses(connection, 2) == [0, 0]
                    connection.sendall(both)
            node.stop()
            assert statuses(connection, 2) == [0, 0]
        node.start()
        assert node.get("b") == 1


def statuses(connection: socket.socket, count: int) -> list[int]:
    """The statuses of the next answers."""
    framer, frames = Framer(), []
    while len(frames) < count and (data := connection.recv(1 << 16)):
        framer.feed(data)
        frames += framer.frames()
    return [frame.status for frame in frames]


def test_faults_of_the_start_are_raised_here(tmp_path: Path) -> None:
    with (
        tailrace.testing.node(vbuckets=1, data=tmp_path / "data"),
        pytest.raises(TailraceError, match="in use"),
    ):
        tailrace.testing.node(vbuckets=1, data=tmp_path / "data").start()
    with pytest.raises(TailraceError, match="nothing"):
        tailrace.testing.node(settings={"nothing": 1})


PLUGIN_TEST = """
def test_it(tailrace_node):
    tailrace_node.set("a", {"b": 1})
    assert tailrace_node.get("a") == {"b": 1}
"""


def test_the_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_plugin.py").write_text(PLUGIN_TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *_plugin_arguments(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def _plugin_arguments() -> list[Any]:
    """The entry point of an installed package loads the plugin; in a bare tree it must be named."""
    from importlib.metadata import entry_points

    installed = any(entry_point.name == "tailrace" for entry_point in entry_points(group="pytest11"))
    return [] if installed else ["-p", "tailrace.testing.pytest_plugin"]


def test_the_plugin_loads_nothing_heavy() -> None:
    heavy = "{'numpy', 'pyarrow', 'asyncio'} & set(sys.modules)"
    code = f"import sys, tailrace.testing.pytest_plugin; print({heavy})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_who_connects_while_the_node_ends_leaves_no_socket_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio forgets a connection that was accepted just before its server closed; a ResourceWarning of the
    socket would hit whichever test comes next.
    """
    left = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: left.append(str(unraisable.exc_value)))
    for how in ("kill", "stop") * 3:
        with tailrace.testing.node(vbuckets=1) as node:
            enough = threading.Event()

            def connect(node: RunningNode = node, enough: threading.Event = enough) -> None:
                held = []
                while not enough.is_set():
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection((node.host, node.port), 1))
                    if len(held) > 50:
                        held.pop(0).close()
                for connection in held:
                    connection.close()

            thread = threading.Thread(target=connect)
            thread.start()
            try:
                getattr(node, how)()
            finally:
                enough.set()
                thread.join()
    gc.collect()
    assert not [message for message in left if "unclosed" in message]
