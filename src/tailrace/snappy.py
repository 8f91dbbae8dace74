"""Snappy's block format, using pyarrow's codec, which is loaded when it is first needed."""

from __future__ import annotations

from functools import cache
from typing import Any

from .errors import MalformedMessage

__all__ = ["MAX_INFLATED", "deflate", "inflate", "inflated_size"]

MAX_INFLATED = 30 << 20
"""The largest value that is inflated by default."""


@cache
def _codec() -> Any:
    import pyarrow

    return pyarrow.Codec("snappy")


def inflated_size(data: bytes | memoryview) -> int:
    """The size that the data claims to inflate to: a LEB128 number of up to 32 bits at its start."""
    if len(data) > 1 and data[1] < 0x80 <= data[0]:  # most documents: 128 bytes to 16 KiB
        return data[1] << 7 | data[0] & 0x7F
    size = 0
    for at, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << (7 * at)
        if not byte & 0x80:
            if size > 0xFFFF_FFFF:
                break
            return size
    raise MalformedMessage("compressed data does not begin with its size")


def inflate(data: bytes | memoryview, limit: int = MAX_INFLATED) -> bytes:
    """The data before its compression; the size is checked before anything is allocated."""
    size = inflated_size(data)
    if size > limit:
        raise MalformedMessage(f"compressed data inflates to {size} bytes, the limit is {limit}")
    try:
        inflated: bytes = _codec().decompress(data, decompressed_size=size, asbytes=True)
    except (OSError, ValueError) as error:
        raise MalformedMessage("data is not compressed by snappy") from error
    if len(inflated) != size:
        raise MalformedMessage("compressed data does not inflate to the size that it says")
    return inflated


def deflate(data: bytes | memoryview) -> bytes:
    """The data, compressed."""
    compressed: bytes = _codec().compress(data, asbytes=True)
    return compressed
