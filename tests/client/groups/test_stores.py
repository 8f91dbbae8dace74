"""Where a group is kept: one contract for a directory and a real Redis."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ports import ReservedPort
from tailrace.client.groups.member import GroupMember
from tailrace.client.groups.stores import GroupStore, RedisGroupStore, open_group_store
from tailrace.client.progress import SavedPosition
from tailrace.errors import ConnectError, NotDurable, StoreError, UsageError
from tailrace.files import put_file
from tailrace.model import Position


@pytest.fixture(params=["directory", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "groups") if request.param == "directory" else request.getfixturevalue("redis")


def test_a_record_is_replaced_only_as_it_was_read(where: str) -> None:
    open_stores: list[GroupStore] = []

    def opened() -> GroupStore:
        open_stores.append(open_group_store(where, "contract", "b"))
        return open_stores[-1]

    first, second = opened(), opened()
    assert first.read() == (0, None)
    assert first.replace(0, b"one")
    assert not second.replace(0, b"other")
    assert second.read() == (1, b"one")
    assert second.replace(1, b"two\nlines")
    for version in range(2, 20):
        assert first.replace(version, b"%d" % version)
    # a writer that slept: the version after the one that it has read is long gone
    assert not second.replace(2, b"late")
    assert not second.replace(19, b"late")
    assert opened().read() == first.read() == (20, b"19")
    for store in open_stores:
        store.close()


def test_files_by_name(where: str) -> None:
    store = open_group_store(where, "files", "b")
    assert (store.names(), store.get("a")) == ([], None)
    store.put("a", b"\x00\r\n")
    store.put("b", b"")
    assert sorted(store.names()) == ["a", "b"]
    assert (store.get("a"), store.get("b")) == (b"\x00\r\n", b"")
    store.delete(["a", "never"])
    assert store.names() == ["b"]
    store.close()
    with contextlib.closing(open_group_store(where, "files", "other")) as other:
        assert other.names() == []


def test_a_connection_that_is_lost_is_made_anew(redis: str) -> None:
    store = RedisGroupStore(redis, "lost")
    assert store.replace(0, b"one")
    assert store._socket is not None
    store._socket.shutdown(socket.SHUT_RDWR)
    assert store.read() == (1, b"one")
    store.close()


def test_what_can_not_be_is_said_in_one_line(redis: str, tmp_path: Path) -> None:
    with ReservedPort() as nobody, pytest.raises(ConnectError, match="the Redis of the group at 127"):
        open_group_store(f"redis://127.0.0.1:{nobody}", "g", "b").read()
    with pytest.raises(ConnectError, match=r"WRONGPASS|invalid password") as refused:
        open_group_store(redis.replace("secret", "wrong"), "g", "b").read()
    assert "wrong@" not in str(refused.value)
    with pytest.raises(UsageError, match="give a directory, or redis://host:port"):
        open_group_store("s3://bucket/groups", "g", "b")
    (tmp_path / "file").write_text("")
    with pytest.raises((UsageError, StoreError), match="file"):
        open_group_store(tmp_path / "file", "g", "b")


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    store = open_group_store(tmp_path / "groups", "g", "b")
    shutil.rmtree(tmp_path / "groups")
    for write in (lambda: store.replace(0, b""), lambda: store.put("a", b"")):
        with pytest.raises(StoreError, match="the directory of the group"):
            write()


def test_positions_that_are_damaged(tmp_path: Path) -> None:
    member = GroupMember(open_group_store(tmp_path, "g", "b"), bucket="b", vbucket_count=4, name="m")
    member.turn()
    member.save({1: SavedPosition(Position.at(1, 7))})
    (file,) = tmp_path.rglob("positions-*")
    for damaged in (b"", b"[]", b"{}", b'{"1": 5}', b'{"1": {}}'):
        file.write_bytes(damaged)
        with pytest.raises(StoreError, match="is damaged"):
            member.load([1])


def test_positions_that_are_gone(tmp_path: Path) -> None:
    """Going on from nothing would read everything again, unasked."""
    member = GroupMember(open_group_store(tmp_path, "g", "b"), bucket="b", vbucket_count=4, name="m")
    member.turn()
    member.save({1: SavedPosition(Position.at(1, 7)), 2: SavedPosition(Position.at(1, 8))})
    (file,) = tmp_path.rglob("positions-*")
    file.unlink()
    with pytest.raises(StoreError, match=r"^the group's file 'm-.*' is gone, with positions of 2 vbuckets$"):
        member.load([1, 2, 3])


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    store = open_group_store(tmp_path, "g", "b")
    assert store.replace(0, b"one")
    (tmp_path / "g-b" / "positions-a").mkdir()
    with pytest.raises(StoreError, match=r"^the group's file '.*positions-a': Is a directory$"):
        store.get("a")


def test_a_record_whose_writing_may_have_failed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and the disk has not confirmed it: whoever wrote it sees it as anybody else's."""
    store = open_group_store(tmp_path, "g", "b")

    def unconfirmed(*arguments: Any, **options: Any) -> bool:
        put_file(*arguments, **options)
        raise NotDurable("record", "no answer")

    with monkeypatch.context() as patched:
        patched.setattr("tailrace.client.groups.stores.put_file", unconfirmed)
        assert not store.replace(0, b"one")
    assert store.read() == (1, b"one")


def test_who_always_comes_too_late_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_group_store(tmp_path, "g", "b")
    monkeypatch.setattr(store, "replace", lambda *_: False)
    member = GroupMember(store, bucket="b", vbucket_count=4, name="m")
    with pytest.raises(StoreError, match="changes too fast: 1000 attempts failed"):
        member.turn()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "no answer|the connection was closed"),
        (b"$5\r\nab", "the connection was closed"),
        (b"$5", "the connection was closed"),
        (b"?\r\n", "answers b'\\?"),
        (b"$x\r\n", "answers b'\\$x"),
        (b"$999999999\r\n", "answers b'\\$9999"),
    ],
)
def test_something_else_than_a_redis(answer: bytes, error: str) -> None:
    """It is asked twice, if the connection ends."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listening.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=serve)
        serving.start()
        store = open_group_store(f"redis://127.0.0.1:{listening.getsockname()[1]}", "g", "b")
        try:
            with pytest.raises(ConnectError, match=error):
                store.read()
        finally:
            store.close()
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()
    with pytest.raises(UsageError, match="is not the address of a Redis"):
        open_group_store("redis://127.0.0.1:port", "g", "b")


def test_a_redis_that_is_full_says_so(redis: str) -> None:
    """A refusal is not a lost answer: asking again does not help."""
    store = RedisGroupStore(redis, "full")
    assert store.replace(0, b"one")
    store._call([b"CONFIG", b"SET", b"maxmemory", b"1"])
    try:
        with pytest.raises(ConnectError, match="refuses: OOM"):
            store.replace(1, b"two")
    finally:
        store._call([b"CONFIG", b"SET", b"maxmemory", b"0"])
    assert store.replace(1, b"two")
    store.close()
