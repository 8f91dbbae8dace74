"""Cache invalidation: a key that changed in a bucket leaves Redis or memcached.

The cache has confirmed the removal of a batch of keys before the position after them is saved: after a crash
some keys are removed again, and none is forgotten. A rollback changes documents back, so the keys of what was
taken back leave too; a bounded number of them is remembered, and if that does not reach far enough,
everything that the cache holds under the prefix is removed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Unpack
from urllib.parse import unquote, urlsplit

from .. import rng as rng_
from ..clock import SystemClock
from ..connstr import ConnectionString
from ..errors import ConnectError, LoginError, RemoteProtocolError, StatusError, UsageError
from ..wire.admin import Flush as FlushRequest
from ..wire.codes import Status
from ..wire.framing import Framer
from ..wire.header import Frame
from ..wire.kv import Delete
from ..wire.message import MAX_KEY, Message
from .aio import connect
from .events import Deletion, Event, Expiration, Flush, Mutation, Rollback, SystemEvent
from .options import SourceKeywords
from .pipeline import AnswerKind, Pipeline, answers_in
from .retry import Backoff
from .write_batches import batched

__all__ = ["Cache", "Memcached", "Redis", "cache_at", "follow"]

BATCH_KEYS = 1_000
REMEMBERED = 1_000
"""How many changes of each vbucket have their keys remembered, in case they are taken back."""
_MAX_MEMCACHED_ANSWER_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 64 << 20
_MAX_ANSWER_DEPTH = 2
_PER_ANSWER_BYTES = 64
"""What each part of an answer counts at least, even an empty one."""
_TIMEOUT_S = 10.0
"""For one answer."""


class _Busy(Exception):
    """The cache can't do it now, but perhaps later."""


class Cache(ABC):
    """A connection to a cache, made when it is needed and again after it was lost.

    Whatever a cache sends becomes an answer or a typed error, and takes a bounded amount of memory and time.
    """

    DEFAULT_PORT: int
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    def __init__(self, where: str, prefix: bytes, retry_for_s: float) -> None:
        try:
            url = urlsplit(where)
            self._address = url.hostname or "127.0.0.1", url.port or self.DEFAULT_PORT
            self._address[0].encode("idna")
        except ValueError as error:
            raise UsageError(f"{where!r} is not the address of a cache: {error}") from None
        self._user, self._password = unquote(url.username or ""), unquote(url.password or "")
        self._path = url.path.strip("/")
        self._prefix = prefix
        self._retry_for_s = retry_for_s
        self._is_connected = False

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove these; they are gone when this returns."""
        wanted = [self._prefix + key for key in dict.fromkeys(keys)]
        for first in range(0, len(wanted), BATCH_KEYS):
            await self._insist(partial(self._remove, wanted[first : first + BATCH_KEYS]))

    async def clear(self) -> None:
        """Remove everything under the prefix, or more if the cache can't select by prefix."""
        await self._insist(self._clear)

    async def close(self) -> None:
        if self._is_connected:
            self._is_connected = False
            self._writer.close()
            with suppress(OSError):  # it may be lost already
                await self._writer.wait_closed()

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do it, reconnecting as often as it takes; doing it twice does no harm."""
        clock, backoff = SystemClock(), Backoff(rng_.source())
        failing_since: float | None = None
        while True:
            try:
                if not self._is_connected:
                    async with asyncio.timeout(_TIMEOUT_S):
                        self._reader, self._writer = await asyncio.open_connection(*self._address)
                    self._is_connected = True
                    await self._greet()
                await work()
                return
            except (OSError, EOFError, TimeoutError, _Busy) as error:
                await self.close()
                now = clock.monotonic()
                failing_since = now if failing_since is None else failing_since
                if now - failing_since >= self._retry_for_s:
                    host, port = self._address
                    raise ConnectError(
                        f"the cache at {host}:{port} can't be reached: {str(error) or 'no answer'}"
                    ) from None
                await asyncio.sleep(backoff.next_s())
            except BaseException:  # an answer still to come would be taken for that of the next request
                await self.close()
                raise

    async def _greet(self) -> None:  # noqa: B027 - not every cache wants a greeting
        """Log in, choose a database."""

    @abstractmethod
    async def _remove(self, keys: Sequence[bytes]) -> None: ...

    @abstractmethod
    async def _clear(self) -> None: ...


class Redis(Cache):
    """The part of RESP that is needed here."""

    DEFAULT_PORT = 6379
    _left_bytes = 0
    """How many bytes the rest of an answer may take."""

    async def _greet(self) -> None:
        if self._password:
            names = [self._user.encode()] if self._user else []
            await self._call(b"AUTH", *names, self._password.encode())
        if self._path:
            await self._call(b"SELECT", self._path.encode())

    async def _remove(self, keys: Sequence[bytes]) -> None:
        await self._call(b"DEL", *keys)

    async def _clear(self) -> None:
        if not self._prefix:
            await self._call(b"FLUSHDB")
            return
        pattern = b"".join(
            b"\\" + bytes([octet]) if octet in b"*?[]^\\" else bytes([octet]) for octet in self._prefix
        )
        cursor = b"0"
        while True:
            match await self._call(b"SCAN", cursor, b"MATCH", pattern + b"*", b"COUNT", b"1000"):
                case [bytes() as cursor, list() as keys] if all(isinstance(key, bytes) for key in keys):
                    if keys:
                        await self._call(b"DEL", *keys)
                case other:
                    raise RemoteProtocolError(f"redis answers a SCAN with {_short(other)}")
            if cursor == b"0":
                return

    async def _call(self, *words: bytes) -> Any:
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        async with asyncio.timeout(_TIMEOUT_S):
            self._writer.write(request)
            await self._writer.drain()
            self._left_bytes = _MAX_ANSWER_BYTES
            return await self._answer()

    async def _answer(self, depth: int = 0) -> Any:
        try:
            line = (await self._reader.readuntil(b"\r\n"))[:-2]
        except asyncio.LimitOverrunError:
            raise RemoteProtocolError("redis answers with a line that does not end") from None
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise _refusal(rest.decode("utf-8", "replace"))
        if kind in (b"+", b":"):
            return rest
        if line == b"$-1":
            return None
        if kind in (b"$", b"*") and rest.isdigit() and len(rest) < 10:
            size = int(rest)
            self._left_bytes -= size if kind == b"$" else size * _PER_ANSWER_BYTES
            if self._left_bytes < 0:
                raise RemoteProtocolError(f"redis answers with more than {_MAX_ANSWER_BYTES} bytes")
            if kind == b"$":
                return (await self._reader.readexactly(size + 2))[:-2]
            if depth < _MAX_ANSWER_DEPTH:
                return [await self._answer(depth + 1) for _ in range(size)]
        raise RemoteProtocolError(f"redis answers {_short(line)}")


def _refusal(reason: str) -> Exception:
    """What an error of Redis means; its first word names its kind."""
    kind = reason.partition(" ")[0]
    if kind in ("LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN", "READONLY"):
        return _Busy(reason)
    error_class = LoginError if kind in ("NOAUTH", "WRONGPASS", "NOPERM") else ConnectError
    return error_class(f"redis refuses: {reason[:200]}")


def _short(answer: Any) -> str:
    return repr(answer)[:60] if not isinstance(answer, bytes) else repr(answer[:40])


class Memcached(Cache):
    """The binary protocol; every delete is answered, and one refused for now is sent again."""

    DEFAULT_PORT = 11211

    async def _remove(self, keys: Sequence[bytes]) -> None:
        requests = (Delete(key=key) for key in keys if len(key) <= MAX_KEY)  # a longer one is in no memcached
        await self._send(requests)

    async def _clear(self) -> None:
        await self._send([FlushRequest()])

    async def _send(self, requests: Iterable[Message]) -> None:
        pipeline: Pipeline[Memcached] = Pipeline(
            rng=rng_.source(), patience_s=self._retry_for_s, judge=_judge_memcached
        )
        framer, clock = Framer(_MAX_MEMCACHED_ANSWER_BYTES), SystemClock()
        for batch in batched(requests):
            pipeline.add(batch)
            while not pipeline.is_empty:
                for _, data in pipeline.to_send(clock.monotonic(), lambda _: self):
                    self._writer.write(data)
                if pipeline.is_due(self):
                    async with asyncio.timeout(_TIMEOUT_S):
                        await self._writer.drain()
                        data = await self._reader.read(1 << 16)
                    if not data:
                        raise EOFError("the cache closed the connection")
                    framer.feed(data)
                    self._take(pipeline, framer, clock.monotonic())
                elif (retry_at := pipeline.next_timer()) is not None:
                    await asyncio.sleep(retry_at - clock.monotonic())
                pipeline.finished()

    def _take(self, pipeline: Pipeline[Memcached], framer: Framer, now: float) -> None:
        for answers in answers_in(framer):
            if isinstance(answers, Frame):
                raise RemoteProtocolError("memcached sends something that is not an answer to a request")
            try:
                pipeline.receive(self, answers, now)
            except StatusError as error:
                raise ConnectError(f"memcached refuses with status 0x{error.status:02x}") from None


def _judge_memcached(_opcode: int, status: int) -> AnswerKind:
    if status in (Status.SUCCESS, Status.KEY_ENOENT):
        return AnswerKind.TAKEN
    return AnswerKind.AGAIN if status in (Status.EBUSY, Status.ETMPFAIL) else AnswerKind.FAILED


def cache_at(where: str, *, prefix: str = "", retry_for_s: float = 60.0) -> Cache:
    """The cache at ``redis://[[user]:password@]host[:port][/db]`` or ``memcached://host[:port]``."""
    kinds: dict[str, type[Cache]] = {"redis": Redis, "memcached": Memcached}
    scheme = where.partition("://")[0]
    if scheme not in kinds or "://" not in where:
        raise UsageError(f"{where!r} is not a cache; write redis://host:6379/0 or memcached://host:11211")
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
    **options: Unpack[SourceKeywords],
) -> int:
    """Remove from a cache what changes in a bucket; return how many changes there were."""
    taken = 0
    recent: dict[int, _Recent] = {}
    options |= {"no_value": True, "autosave": False}
    try:
        async with (
            connect(url, **options) as source,
            aclosing(source.portions(start, end)) as portions,
        ):
            async for portion in portions:
                keys: list[bytes] = []
                clears = False
                for event in portion.events():
                    changed = _changed(event, recent)
                    clears |= changed is None
                    keys += changed or ()
                if clears:
                    await cache.clear()
                elif keys:
                    await cache.remove(keys)
                taken += portion.row_count
                await source.save()
    finally:
        await cache.close()
    return taken


def _changed(event: Event, recent: dict[int, _Recent]) -> list[bytes] | None:
    """The keys that an event changes; None if they are not all known."""
    match event:
        case Mutation() | Deletion() | Expiration():
            if event.vbucket not in recent:
                recent[event.vbucket] = _Recent(event.seqno - 1)
            recent[event.vbucket].add(event.seqno, event.key)
            return [event.key]
        case Rollback():
            keys_since = recent.get(event.vbucket)
            keys = None if keys_since is None else keys_since.taken_back(event.seqno)
            if keys is None:
                recent.pop(event.vbucket, None)
            return keys
        case Flush() | SystemEvent(event="collection_dropped"):
            recent.pop(event.vbucket, None)
            return None
    return []
