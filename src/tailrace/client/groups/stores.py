"""Where a group's record and the positions of its members are kept: outside the bucket that they read.

A store keeps files by name and one record, which only a member that has read its newest version can replace.
Nothing is locked: a process that stops in the middle of anything holds up nobody.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from ... import paths
from ...errors import ConnectError, LoginError, NotDurable, StoreError, UsageError, reason_of
from ...files import DiskFiles, put_file
from ...rng import unique_name

__all__ = ["DirectoryGroupStore", "GroupStore", "RedisGroupStore", "open_group_store"]

_RECORD = re.compile(r"record-(\d{20})\.json")
_POSITIONS = "positions-"
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 20


class GroupStore(Protocol):
    """What a group needs. All calls block; a failure is a `StoreError` or a `ConnectError`."""

    def read(self) -> tuple[int, bytes | None]:
        """The record and its version; 0 and None if there is none yet."""
        ...

    def replace(self, version: int, data: bytes) -> bool:
        """Replace that version of the record; return whether this is done and durable.

        False also if that can't be known: the caller reads again, and sees what is there.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a file under a new name; durable when this returns."""
        ...

    def get(self, name: str) -> bytes | None:
        """A file; None if there is none."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, if they are there."""
        ...

    def names(self) -> list[str]:
        """The names of all files."""
        ...

    def close(self) -> None:
        """Close what is open; the store may be used again."""
        ...


def open_group_store(where: str | Path, group: str, bucket: str) -> GroupStore:
    """The store of a group in a directory, or in a Redis (``redis://[[user]:password@]host[:port][/db]``)."""
    if isinstance(where, str) and where.startswith("redis://"):
        return RedisGroupStore(where, f"tailrace:group:{group}:{bucket}")
    if isinstance(where, str) and "://" in where and not where.startswith("file:"):
        raise UsageError(f"{where[:40]!r} is not a place for a group; give a directory, or redis://host:port")
    folder = paths.directory(where, "the directory of the group", must_exist=False)
    return DirectoryGroupStore(folder / f"{group}-{bucket}")


class DirectoryGroupStore:
    """A directory that all members see. Each version of the record is a file that is created once and never
    overwritten, which network file systems can do, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = DiskFiles(path)
        with self._explained():
            self._files.make_directory("")

    def read(self) -> tuple[int, bytes | None]:
        while True:
            versions = self._versions()
            if not versions:
                return 0, None
            with contextlib.suppress(FileNotFoundError):  # a newer one came, and this one was cleaned away
                return versions[-1], self._bytes(_record_name(versions[-1]))

    def replace(self, version: int, data: bytes) -> bool:
        name = _record_name(version + 1)
        with self._explained():
            try:
                if not put_file(self._files, name, data, beside=f"new-{unique_name()}"):
                    return False
            except NotDurable:
                return False  # it is there: the caller reads again and sees it
            versions = self._versions()
            if versions[-1] != version + 1:
                # either somebody went on from ours, or we slept and that version came and was cleaned away
                # long ago; the caller finds out when it reads again
                return False
            for older in versions[:-1]:
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(_record_name(older))
        return True

    def put(self, name: str, data: bytes) -> None:
        with self._explained():
            put_file(self._files, _POSITIONS + name, data, beside=f"new-{unique_name()}")

    def get(self, name: str) -> bytes | None:
        try:
            return self._bytes(_POSITIONS + name)
        except FileNotFoundError:
            return None

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._explained(), contextlib.suppress(FileNotFoundError):
                self._files.unlink(_POSITIONS + name)

    def names(self) -> list[str]:
        with self._explained():
            return [
                name.removeprefix(_POSITIONS) for name in self._files.names("") if name.startswith(_POSITIONS)
            ]

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _versions(self) -> list[int]:
        with self._explained():
            matches = map(_RECORD.fullmatch, self._files.names(""))
            return sorted(int(match[1]) for match in matches if match)

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(f"the group's file {str(self.path / name)!r}: {reason_of(error)}") from None

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except OSError as error:
            raise StoreError(f"the directory of the group {str(self.path)!r}: {reason_of(error)}") from None


def _record_name(version: int) -> str:
    return f"record-{version:020d}.json"


class RedisGroupStore:
    """Keys of a Redis: ``PREFIX`` has version and record, ``PREFIX:positions`` the files. A Redis that
    forgets (no persistence, a failover that loses writes) forgets the group: see docs/groups.md.
    """

    def __init__(self, url: str, prefix: str) -> None:
        try:
            parts = urlsplit(url)
            self._address = parts.hostname or "127.0.0.1", parts.port or 6379
        except ValueError as error:
            raise UsageError(f"{url[:40]!r} is not the address of a Redis: {error}") from None
        self._login = [unquote(part) for part in (parts.username, parts.password) if part]
        self._database = parts.path.strip("/")
        self._record, self._positions = prefix.encode(), f"{prefix}:positions".encode()
        self._socket: socket.socket | None = None
        self._in: BinaryIO | None = None

    def read(self) -> tuple[int, bytes | None]:
        return self._split(self._call([b"GET", self._record])[0])

    def replace(self, version: int, data: bytes) -> bool:
        _, held = self._call([b"WATCH", self._record], [b"GET", self._record])
        if self._split(held)[0] != version:
            self._call([b"UNWATCH"])
            return False
        value = b"%d\n%b" % (version + 1, data)
        self._call([b"MULTI"], [b"SET", self._record, value], again=False)  # if that fails, nothing is done
        try:
            (answer,) = self._call([b"EXEC"], again=False)
        except ConnectError:
            return False  # it may be done: the caller reads again and sees it
        return answer is not None

    def put(self, name: str, data: bytes) -> None:
        self._call([b"HSET", self._positions, name.encode(), data])

    def get(self, name: str) -> bytes | None:
        data: bytes | None = self._call([b"HGET", self._positions, name.encode()])[0]
        return data

    def delete(self, names: Iterable[str]) -> None:
        wanted = [name.encode() for name in names]
        if wanted:
            self._call([b"HDEL", self._positions, *wanted])

    def names(self) -> list[str]:
        return [name.decode() for name in self._call([b"HKEYS", self._positions])[0]]

    @staticmethod
    def _split(value: bytes | None) -> tuple[int, bytes | None]:
        if value is None:
            return 0, None
        version, _, data = value.partition(b"\n")
        return int(version), data

    def _call(self, *requests: list[bytes], again: bool = True) -> list[Any]:
        """Send requests and return their answers; a connection lost meanwhile is made again, once."""
        for attempt in (1, 0):
            try:
                if self._socket is None:
                    self._connect()
                return self._exchange(requests)
            except (OSError, EOFError) as error:
                self.close()
                if attempt and again:
                    continue
                host, port = self._address
                raise ConnectError(f"the Redis of the group at {host}:{port}: {reason_of(error)}") from None
            except BaseException:
                self.close()  # an answer still to come would be taken for that of the next request
                raise
        raise AssertionError("not reached")

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._address, timeout=_TIMEOUT_S)
        self._in = self._socket.makefile("rb")
        greeting = [[b"AUTH", *[part.encode() for part in self._login]]] if self._login else []
        if self._database:
            greeting.append([b"SELECT", self._database.encode()])
        self._exchange(greeting)

    def close(self) -> None:
        for opened in (self._in, self._socket):
            if opened is not None:
                with contextlib.suppress(OSError):
                    opened.close()
        self._in = self._socket = None

    def _exchange(self, requests: Iterable[list[bytes]]) -> list[Any]:
        assert self._socket is not None
        sent = list(requests)
        for words in sent:
            head = b"*%d\r\n" % len(words)
            self._socket.sendall(head + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
        return [self._answer() for _ in sent]

    def _answer(self) -> Any:
        assert self._in is not None
        line = self._in.readline(1 << 16)
        if not line.endswith(b"\r\n"):
            raise EOFError("the connection was closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            reason = rest.decode("utf-8", "replace")[:200]
            error_class = LoginError if reason.startswith(("NOAUTH", "WRONGPASS", "NOPERM")) else ConnectError
            raise error_class(f"the Redis of the group refuses: {reason}")
        if kind in (b"+", b":"):
            return rest
        size = int(rest) if re.fullmatch(rb"-1|\d{1,9}", rest) and kind in (b"$", b"*") else None
        if size is None or size > _MAX_ANSWER_BYTES:
            raise ConnectError(f"the Redis of the group answers {line[:40]!r}")
        if size < 0:
            return None
        if kind == b"*":
            return [self._answer() for _ in range(size)]
        data = self._in.read(size + 2)
        if len(data) != size + 2:
            raise EOFError("the connection was closed")
        return data[:-2]
