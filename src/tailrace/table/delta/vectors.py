"""Deletion vectors, as Delta stores them: which rows of a data file are dead.

    data            u32 LE magic, u64 LE number of bitmaps, then for each u32 LE key and a portable bitmap
    file            byte 1, then for each vector u32 BE length, data, u32 BE CRC-32 of the data
    in the log      Z85 text of the data, filled up with zeros to whole groups of 4 bytes

A bitmap with key k holds rows from k << 32. No file of ours has that many rows, so there is one, key 0.
"""

from __future__ import annotations

import base64
import struct
import uuid
import zlib

from pyroaring import BitMap

from ..contract import TableDamaged, Vector

__all__ = [
    "VectorFile",
    "decode_inline",
    "decode_stored",
    "decode_vector",
    "encode_vector",
    "vector_path",
]

FOLDER = "_dv"
"""Where the files are: names with a leading underscore are hidden from any VACUUM."""

_MAGIC = 1681511377
_HEAD = struct.Struct("<IQI")
_U32 = struct.Struct(">I")
_FORMAT = b"\x01"
_UUID_LENGTH = 20

_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85, _TO_B85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)
_Z85_SET = frozenset(_Z85)


def encode_z85(data: bytes) -> str:
    """Bytes as text; their number must be a multiple of 4."""
    return base64.b85encode(data).translate(_TO_Z85).decode("ascii")


def decode_z85(text: str) -> bytes:
    """The bytes of a Z85 text; ValueError."""
    raw = text.encode("ascii")
    if len(raw) % 5 or not _Z85_SET.issuperset(raw):
        raise ValueError("it is not Z85")
    return base64.b85decode(raw.translate(_TO_B85))


def encode_vector(rows: BitMap) -> bytes:
    """The data of a vector."""
    smallest = rows.copy()
    smallest.run_optimize()
    return _HEAD.pack(_MAGIC, 1, 0) + bytes(smallest.serialize())


def decode_vector(data: bytes) -> BitMap:
    """The rows of a vector; ValueError if it is not one, or has rows that no file of a mirror has."""
    if len(data) < 12:
        raise ValueError("it is too short")
    magic, bitmaps = struct.unpack_from("<IQ", data)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic}")
    if bitmaps == 0:
        return BitMap()
    if bitmaps > 1 or data[12:16] != bytes(4):
        raise ValueError("it has rows beyond 2^32")
    try:
        return BitMap.deserialize(data[16:])
    except (ValueError, IndexError, RuntimeError, MemoryError) as error:
        raise ValueError(f"its bitmap can't be read: {error}") from None


def decode_inline(vector: Vector) -> BitMap:
    """The rows of a vector in the log itself, where an earlier Tailrace wrote small ones."""
    try:
        data = decode_z85(vector.path_or_inline)
        if not 0 <= len(data) - vector.size < 4:
            raise ValueError(f"it has {len(data)} bytes in place of {vector.size}")
        return _checked(decode_vector(data[: vector.size]), vector)
    except ValueError as error:
        raise TableDamaged(f"a deletion vector in the log is damaged: {error}") from None


def decode_stored(vector: Vector, stored: bytes) -> BitMap:
    """The rows of a vector, from the bytes of its file at its offset: length, data and checksum."""
    try:
        if len(stored) != vector.size + 8:
            raise ValueError("the file is too short")
        (length,), (checksum,) = _U32.unpack_from(stored), _U32.unpack_from(stored, len(stored) - 4)
        if length != vector.size:
            raise ValueError(f"it has {length} bytes in place of {vector.size}")
        data = stored[4:-4]
        if zlib.crc32(data) != checksum:
            raise ValueError("its checksum is wrong")
        return _checked(decode_vector(data), vector)
    except ValueError as error:
        raise TableDamaged(f"the deletion vector {vector_path(vector)} is damaged: {error}") from None


def _checked(rows: BitMap, vector: Vector) -> BitMap:
    if len(rows) != vector.cardinality:
        raise ValueError(f"it has {len(rows)} rows in place of {vector.cardinality}")
    return rows


def vector_path(vector: Vector | None) -> str | None:
    """The file of a vector, relative to the table; None if the vector is in the log."""
    if vector is None or vector.storage == "i":
        return None
    if vector.storage != "u":
        raise TableDamaged(
            f"a deletion vector lies outside the table (storage type {vector.storage!r}): "
            "the table is a clone of another one, which a mirror can't continue"
        )
    folder, text = vector.path_or_inline[:-_UUID_LENGTH], vector.path_or_inline[-_UUID_LENGTH:]
    try:
        name = uuid.UUID(bytes=decode_z85(text))
    except ValueError:
        raise TableDamaged(f"{vector.path_or_inline!r} in the log does not name a deletion vector") from None
    return f"{folder}/deletion_vector_{name}.bin" if folder else f"deletion_vector_{name}.bin"


class VectorFile:
    """The vectors of one commit, assembled in memory."""

    def __init__(self, name: str) -> None:
        """``name`` is 32 hex digits, unique to this file."""
        self._id = uuid.UUID(hex=name)
        self._parts: list[bytes] = [_FORMAT]
        self._size = 1

    @property
    def path(self) -> str:
        return f"{FOLDER}/deletion_vector_{self._id}.bin"

    @property
    def empty(self) -> bool:
        return self._size == 1

    def add(self, data: bytes, cardinality: int) -> Vector:
        """Append a vector; returns where it will be."""
        vector = Vector("u", FOLDER + encode_z85(self._id.bytes), self._size, len(data), cardinality)
        self._parts += [_U32.pack(len(data)), data, _U32.pack(zlib.crc32(data))]
        self._size += len(data) + 8
        return vector

    def to_bytes(self) -> bytes:
        return b"".join(self._parts)
