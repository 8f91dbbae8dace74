"""A number that stands for the columns of a row, however nested they are; for comparisons.

Objects and arrays that are empty or contain only nulls count as null: a field that has only such values has
no column, and when it gets one, they are null in it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .hashing import Hashes, KeyHash

__all__ = ["digest_rows"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xD6E8FEB86659FD93)


def digest_rows(rows: pa.Table, key_hash: KeyHash) -> Hashes:
    """64 bits for each row; equal for equal columns, in the same order."""
    digest: Hashes = np.zeros(rows.num_rows, dtype=np.uint64)
    for column in rows.columns:
        whole = column.combine_chunks()
        flat = pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
        digest = _mixed(digest * _STEP + _hashes(flat, key_hash))
    return digest


def _mixed(numbers: Hashes) -> Hashes:
    """Spread every bit over all of them (SplitMix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _hashes(column: pa.Array, key_hash: KeyHash) -> Hashes:
    kind = column.type
    if pa.types.is_struct(kind):
        hashes: Hashes = np.zeros(len(column), dtype=np.uint64)
        is_empty = np.ones(len(column), dtype=np.bool_)
        for number in range(kind.num_fields):
            part = _hashes(column.field(number), key_hash)
            is_empty &= part == _NULL
            # by name: a part that was added later comes after others
            hashes += _mixed(part * _STEP + _name_hash(kind.field(number).name)) * (part != _NULL)
        hashes = np.where(is_empty, _NULL, _mixed(hashes))
    elif pa.types.is_map(kind):
        entries = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        return _hashes(column.cast(entries), key_hash)
    elif pa.types.is_list(kind):
        hashes = _list_hashes(column, key_hash)
    elif pa.types.is_string(kind) or pa.types.is_decimal(kind):
        texts = pc.fill_null(column.cast(pa.string()), "").cast(pa.binary())
        _, hashes = key_hash.hash(texts, np.zeros(len(column), np.int32))
    else:
        hashes = _mixed(_bits(column) + _STEP)
    if column.null_count:
        hashes = np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL, hashes)
    return hashes


def _list_hashes(column: pa.Array, key_hash: KeyHash) -> Hashes:
    """A sum over the elements, each with its place."""
    sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    places = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
    inner = _hashes(column.flatten(), key_hash)
    filled = np.concatenate([[0], np.cumsum(inner != _NULL)])
    elements = _mixed(inner + places.astype(np.uint64) * _STEP)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(elements, dtype=np.uint64)])
    hashes = _mixed(sums[ends] - sums[starts] + sizes.astype(np.uint64))
    return np.where(filled[ends] == filled[starts], _NULL, hashes)


def _name_hash(name: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def _bits(column: pa.Array) -> Hashes:
    kind = column.type
    if pa.types.is_floating(kind):
        numbers = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
    else:
        width = pa.int32() if pa.types.is_date(kind) else pa.int64()
        whole = column.cast(pa.int8()) if pa.types.is_boolean(kind) else column.cast(width)
        numbers = pc.fill_null(whole, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    bits: Hashes = np.ascontiguousarray(numbers).view(np.uint64)
    return bits
