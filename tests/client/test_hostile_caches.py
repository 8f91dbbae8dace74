"""Caches that answer with nonsense: every answer ends in a typed error, and takes bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.invalidate import cache_at
from tailrace.errors import ConnectError, LoginError, RemoteProtocolError, TailraceError, UsageError
from tailrace.wire.header import HEADER

OPAQUE = slice(12, 16)


async def redis_request(reader: asyncio.StreamReader) -> bytes:
    """The next command, as it came."""
    taken = await reader.readuntil(b"\r\n")
    for _ in range(int(taken[1:])):
        size = await reader.readuntil(b"\r\n")
        taken += size + await reader.readexactly(int(size[1:]) + 2)
    return taken


async def memcached_request(reader: asyncio.StreamReader) -> bytes:
    """The next frame."""
    header = await reader.readexactly(HEADER.size)
    return header + await reader.readexactly(int.from_bytes(header[8:12], "big"))


class FakeCache:
    """Takes whatever comes and sends the given answers, one per request; then it closes."""

    def __init__(self, kind: str, *answers: Callable[..., Any] | bytes) -> None:
        self.next_request = {"redis": redis_request, "memcached": memcached_request}[kind]
        self.answers = list(answers)
        self.requests = []
        self.writers = []

    async def __aenter__(self) -> FakeCache:
        self.server = await asyncio.start_server(self.talk, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @property
    def connections(self) -> int:
        return len(self.writers)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(OSError, EOFError):
            while self.answers:
                request = await self.next_request(reader)
                self.requests.append(request)
                answer = self.answers.pop(0)
                writer.write(answer(request) if callable(answer) else answer)
        writer.close()


def meet(
    kind: str,
    *answers: Callable[..., Any] | bytes,
    prefix: str = "",
    path: str = "",
    clear: bool = False,
    retry_for_s: float = 0.0,
    login: str = "",
) -> FakeCache:
    """Remove a key from a cache with these answers, or clear it."""

    async def talk() -> FakeCache:
        async with FakeCache(kind, *answers) as fake:
            url = f"{kind}://{login}127.0.0.1:{fake.port}{path}"
            cache = cache_at(url, prefix=prefix, retry_for_s=retry_for_s)
            try:
                await (cache.clear() if clear else cache.remove([b"key"]))
            finally:
                await cache.close()
        return fake

    return asyncio.run(asyncio.wait_for(talk(), 60))


@pytest.mark.parametrize(
    "answer",
    [
        b"$nonsense\r\n",
        b"$-2\r\n",
        b"$ 5\r\nhello\r\n",
        b"$+5\r\nhello\r\n",
        b"$\r\n",
        b"*\r\n",
        b"*x\r\n",
        b"$99999999999999999999\r\n",
        b"$999999999\r\n",
        b"*999999999\r\n",
        b"*1000000\r\n" * 3,
        b"*1\r\n" * 50,
        b"!\r\n",
        b"\r\n",
        "$٣\r\nabc\r\n".encode(),
        b"+" + b"x" * 200_000,
    ],
    ids=lambda answer: repr(answer[:20]),
)
def test_redis_says_what_is_no_resp(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="redis answers"):
        meet("redis", answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b"*0\r\n",
        b"*1\r\n+0\r\n",
        b"*2\r\n+0\r\n+x\r\n",
        b"*2\r\n$-1\r\n*0\r\n",
        b"*2\r\n+0\r\n*1\r\n$-1\r\n",
    ],
)
def test_redis_answers_a_scan_with_something_else(answer: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="SCAN"):
        meet("redis", answer, prefix="doc:", clear=True)


def test_redis_scans_in_several_steps() -> None:
    fake = meet(
        "redis",
        b"*2\r\n$2\r\n17\r\n*1\r\n$5\r\ndoc:a\r\n",
        b":1\r\n",
        b"*2\r\n$1\r\n0\r\n*0\r\n",
        prefix="doc:",
        clear=True,
    )
    assert b"SCAN\r\n$1\r\n0\r\n" in fake.requests[0]
    assert b"doc:a" in fake.requests[1] and b"DEL" in fake.requests[1]
    assert b"SCAN\r\n$2\r\n17\r\n" in fake.requests[2]


def test_redis_refuses() -> None:
    with pytest.raises(ConnectError, match="READONLY"):
        meet("redis", b"-READONLY You can't write against a read only replica.\r\n")
    with pytest.raises(LoginError, match="WRONGPASS"):
        meet("redis", b"-WRONGPASS invalid username-password pair\r\n", login="me:secret@")
    with pytest.raises(ConnectError, match="DB index"):
        meet("redis", b"-ERR DB index is out of range\r\n", path="/99")


def test_a_redis_that_is_still_loading_is_asked_again() -> None:
    fake = meet("redis", b"-LOADING Redis is loading the dataset in memory\r\n", b":1\r\n", retry_for_s=60)
    assert fake.connections == 2
    with pytest.raises(ConnectError, match="LOADING"):
        meet("redis", b"-LOADING Redis is loading the dataset in memory\r\n")


def answer(
    opcode: int = 0x04,
    *,
    magic: int = 0x81,
    status: int = 0,
    opaque: int | None = None,
    body: bytes = b"",
    length: int | None = None,
) -> Callable[..., Any]:
    """A frame in answer to a deletion."""

    def made(request: bytes) -> bytes:
        number = struct.unpack(">I", request[OPAQUE])[0] if opaque is None else opaque
        size = len(body) if length is None else length
        return HEADER.pack(magic, opcode, 0, 0, 0, status, size, number, 0) + body

    return made


@pytest.mark.parametrize(
    ("hostile", "error"),
    [
        (b"ERROR\r\n" * 10, RemoteProtocolError),
        (answer(length=0xFFFF_FFFF), RemoteProtocolError),
        (answer(length=1 << 20), RemoteProtocolError),
        (answer(magic=0x80), RemoteProtocolError),
        (answer(0x14, status=0x20), RemoteProtocolError),
        (answer(status=0x20), ConnectError),
        (answer(status=0x85), ConnectError),
        (answer(opaque=77), RemoteProtocolError),  # an answer to something else
        (answer(opaque=0x8000_0001), RemoteProtocolError),
        (b"", ConnectError),
    ],
)
def test_memcached_says_nonsense(
    hostile: Callable[..., Any] | bytes, error: type[RemoteProtocolError]
) -> None:
    with pytest.raises(error):
        meet("memcached", hostile)


def test_a_memcached_that_is_busy_is_asked_again() -> None:
    assert meet("memcached", answer(status=0x85), answer(), retry_for_s=60).connections == 1


@given(
    said=st.binary(max_size=60)
    | st.lists(
        st.sampled_from(
            [b"*2\r\n", b"$3\r\n", b"+0\r\n", b"*0\r\n", b"abc\r\n", b":1\r\n", b"$-1\r\n", b"-ERR\r\n"]
        )
    ).map(b"".join),
    kind=st.sampled_from(["redis", "memcached"]),
    clear=st.booleans(),
)
def test_whatever_a_cache_says_is_an_answer_or_a_typed_error(said: bytes, kind: str, clear: bool) -> None:
    try:
        meet(kind, said, prefix="p", clear=clear)
    except TailraceError as error:
        assert str(error)


@pytest.mark.parametrize(
    "where",
    ["redis://[::1", "redis://x:99999", "redis://" + "x" * 80, "memcached://a..b", "redis:6379", "http://x"],
)
def test_what_is_no_address(where: str) -> None:
    with pytest.raises(UsageError):
        cache_at(where)
