"""Cache invalidation: a key that changed in a bucket leaves Redis or memcached.

The cache has removed a batch of keys, and said so, before the position behind them is saved: after a crash
some keys are removed again, and none is forgotten. A rollback changes documents back, so the keys of what was
taken back leave too; a bounded number of them is remembered, and where that does not reach far enough, all
that the cache holds under the prefix is removed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from .. import rng as rng_
from ..clock import SystemClock
from ..connstr import ConnectionString
from ..errors import ConnectError, RemoteProtocolError, UsageError
from ..wire.codes import Magic, Op, Status
from ..wire.framing import Framer
from ..wire.header import HEADER
from .aio import connect
from .backoff import Backoff
from .events import Deletion, Event, Expiration, Flush, Mutation, Rollback, SystemEvent

__all__ = ["Cache", "Memcached", "Redis", "cache_at", "follow"]

BATCH_KEYS = 1_000
REMEMBERED = 1_000
"""Changes of each vbucket whose keys are known when they are taken back."""
_MAX_MEMCACHED_KEY = 250
_TIMEOUT_S = 10.0


class Cache(ABC):
    """A connection to a cache, made when it is needed and made again when it was lost."""

    DEFAULT_PORT: int

    def __init__(self, where: str, prefix: bytes, retry_for_s: float) -> None:
        found = urlsplit(where)
        try:
            self._address = found.hostname or "127.0.0.1", found.port or self.DEFAULT_PORT
        except ValueError as error:
            raise UsageError(f"{where!r} is no address of a cache: {error}") from None
        self._user, self._password = unquote(found.username or ""), unquote(found.password or "")
        self._path = found.path.strip("/")
        self._prefix = prefix
        self._retry_for_s = retry_for_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these; it has happened when this returns."""
        wanted = [self._prefix + key for key in dict.fromkeys(keys)]
        for first in range(0, len(wanted), BATCH_KEYS):
            await self._insist(wanted[first : first + BATCH_KEYS])

    async def clear(self) -> None:
        """Remove everything under the prefix, or more where the cache can't tell."""
        await self._insist(None)

    async def close(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            with suppress(OSError):  # it may be lost already
                await writer.wait_closed()

    async def _insist(self, keys: Sequence[bytes] | None) -> None:
        """Do it, over as many connections as it takes; doing it twice does no harm."""
        clock, backoff = SystemClock(), Backoff(rng_.source())
        since = clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    if self._streams is None:
                        self._streams = await asyncio.open_connection(*self._address)
                        await self._greet(*self._streams)
                    await (self._clear if keys is None else self._remove)(*self._streams, keys or ())
                    return
            except (OSError, EOFError, TimeoutError) as error:
                await self.close()
                if clock.monotonic() - since >= self._retry_for_s:
                    host, port = self._address
                    raise ConnectError(
                        f"the cache at {host}:{port} can't be reached: {error or 'no answer'}"
                    ) from None
                await asyncio.sleep(backoff.next_s())

    async def _greet(  # noqa: B027 - not every cache wants a greeting
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Log in, choose a database."""

    @abstractmethod
    async def _remove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Sequence[bytes]
    ) -> None: ...

    @abstractmethod
    async def _clear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Sequence[bytes]
    ) -> None: ...


class Redis(Cache):
    """RESP, as far as it is needed here."""

    DEFAULT_PORT = 6379

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._password:
            names = [self._user.encode()] if self._user else []
            await self._call(reader, writer, b"AUTH", *names, self._password.encode())
        if self._path:
            await self._call(reader, writer, b"SELECT", self._path.encode())

    async def _remove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Sequence[bytes]
    ) -> None:
        await self._call(reader, writer, b"DEL", *keys)

    async def _clear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Sequence[bytes]
    ) -> None:
        if not self._prefix:
            await self._call(reader, writer, b"FLUSHDB")
            return
        pattern = b"".join(
            b"\\" + bytes([one]) if one in b"*?[]^\\" else bytes([one]) for one in self._prefix
        )
        cursor = b"0"
        while True:
            cursor, found = await self._call(
                reader, writer, b"SCAN", cursor, b"MATCH", pattern + b"*", b"COUNT", b"1000"
            )
            if found:
                await self._call(reader, writer, b"DEL", *found)
            if cursor == b"0":
                return

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *words: bytes) -> Any:
        writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in words))
        await writer.drain()
        return await self._answer(reader)

    async def _answer(self, reader: asyncio.StreamReader) -> Any:
        line = (await reader.readuntil(b"\r\n"))[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise ConnectError(f"redis refuses: {rest.decode('utf-8', 'replace')}")
        if kind in (b"+", b":"):
            return rest
        if kind == b"$":
            return (await reader.readexactly(int(rest) + 2))[:-2] if rest != b"-1" else None
        if kind == b"*":
            return [await self._answer(reader) for _ in range(int(rest))]
        raise RemoteProtocolError(f"redis answers {line[:40]!r}")


class Memcached(Cache):
    """The binary protocol: deletes that are only answered when they fail, then a fence."""

    DEFAULT_PORT = 11211

    async def _remove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Sequence[bytes]
    ) -> None:
        await self._call(
            reader,
            writer,
            b"".join(
                HEADER.pack(Magic.REQUEST, Op.DELETEQ, len(key), 0, 0, 0, len(key), 0, 0) + key
                for key in keys
                if len(key) <= _MAX_MEMCACHED_KEY  # a longer one is in no memcached
            ),
        )

    async def _clear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Sequence[bytes]
    ) -> None:
        await self._call(reader, writer, HEADER.pack(Magic.REQUEST, Op.FLUSH, 0, 0, 0, 0, 0, 0, 0))

    @staticmethod
    async def _call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: bytes) -> None:
        writer.write(requests + HEADER.pack(Magic.REQUEST, Op.NOOP, 0, 0, 0, 0, 0, 0, 0))
        await writer.drain()
        framer = Framer()
        while True:
            data = await reader.read(1 << 16)
            if not data:
                raise EOFError("the cache closed the connection")
            framer.feed(data)
            for frame in framer.frames():
                if frame.status not in (Status.SUCCESS, Status.KEY_ENOENT):
                    raise ConnectError(f"memcached refuses with status 0x{frame.status:02x}")
                if frame.opcode == Op.NOOP:
                    return


def cache_at(where: str, *, prefix: str = "", retry_for_s: float = 60.0) -> Cache:
    """The cache at ``redis://[[user]:password@]host[:port][/db]`` or ``memcached://host[:port]``."""
    kinds: dict[str, type[Cache]] = {"redis": Redis, "memcached": Memcached}
    scheme = where.partition("://")[0]
    if scheme not in kinds or "://" not in where:
        raise UsageError(f"{where!r} is no cache; write redis://host:6379/0 or memcached://host:11211")
    return kinds[scheme](where, prefix.encode(), retry_for_s)


class _Recent:
    """The keys of the newest changes of a vbucket."""

    def __init__(self, known_above: int) -> None:
        self._known_above = known_above
        self._changes: deque[tuple[int, bytes]] = deque()

    def add(self, seqno: int, key: bytes) -> None:
        self._changes.append((seqno, key))
        if len(self._changes) > REMEMBERED:
            self._known_above = self._changes.popleft()[0]

    def taken_back(self, seqno: int) -> list[bytes] | None:
        """The keys of all changes above; None if they are not known."""
        if seqno < self._known_above:
            return None
        keys = []
        while self._changes and self._changes[-1][0] > seqno:
            keys.append(self._changes.pop()[1])
        return keys


async def follow(
    url: ConnectionString | str,
    cache: Cache,
    *,
    start: str = "beginning",
    end: str = "forever",
    **options: Any,
) -> int:
    """Remove from a cache what changes in a bucket; how many changes there were."""
    taken = 0
    recent: dict[int, _Recent] = {}
    try:
        async with (
            connect(url, no_value=True, autosave=False, **options) as source,
            aclosing(source.pieces(start, end)) as pieces,
        ):
            async for piece in pieces:
                keys: list[bytes] = []
                clears = False
                for event in piece.events():
                    found = _changed(event, recent)
                    clears |= found is None
                    keys += found or ()
                if clears:
                    await cache.clear()
                elif keys:
                    await cache.remove(keys)
                taken += piece.row_count
                await source.save()
    finally:
        await cache.close()
    return taken


def _changed(event: Event, recent: dict[int, _Recent]) -> list[bytes] | None:
    """The keys that an event changes; None if nobody knows them all."""
    match event:
        case Mutation() | Deletion() | Expiration():
            if event.vbucket not in recent:
                recent[event.vbucket] = _Recent(event.seqno - 1)
            recent[event.vbucket].add(event.seqno, event.key)
            return [event.key]
        case Rollback():
            known = recent.get(event.vbucket)
            keys = None if known is None else known.taken_back(event.seqno)
            if keys is None:
                recent.pop(event.vbucket, None)
            return keys
        case Flush() | SystemEvent(event="collection_dropped"):
            recent.pop(event.vbucket, None)
            return None
    return []
