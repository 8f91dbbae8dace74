"""Which document a row is, as two numbers: h1 orders the rows of a file, h1 and h2 together find a document.

    h1   16 bits vbucket, 48 bits of a hash of the key
    h2   64 bits of another hash of the key

The hashes are SipHash-2-4, keyed by a secret of the table, so that nobody who can choose keys can make them
collide on purpose. Equal h1 alone does happen (once in 2^48 pairs of a vbucket); h2 tells the two apart.
"""

from __future__ import annotations

import base64
import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["Hashes", "KeyHash", "first_h1"]

Hashes = NDArray[np.uint64]

_KEY_BITS = 48
_VBUCKET_SHIFT = np.uint64(_KEY_BITS)


def first_h1(vbucket: int) -> int:
    """The smallest h1 that a row of a vbucket can have."""
    return vbucket << _KEY_BITS


class KeyHash:
    """The hash of one table; picklable."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret

    def hash(self, keys: pa.Array | pa.ChunkedArray, vbuckets: NDArray[np.int32]) -> tuple[Hashes, Hashes]:
        """h1 and h2 of documents; ``keys`` are bytes."""
        # pandas' hash of object arrays is keyed SipHash-2-4 in C, twice as fast as the same in numpy
        from pandas.util import hash_array

        if isinstance(keys, pa.ChunkedArray):
            keys = keys.combine_chunks()
        objects = keys.to_numpy(zero_copy_only=False)
        low = hash_array(objects, hash_key=self._key(b"h1"), categorize=False)
        h2: Hashes = hash_array(objects, hash_key=self._key(b"h2"), categorize=False)
        h1: Hashes = vbuckets.astype(np.uint64) << _VBUCKET_SHIFT
        h1 |= low >> np.uint64(64 - _KEY_BITS)
        return h1, h2

    def _key(self, purpose: bytes) -> str:
        """16 characters of a key (96 bits), as pandas wants it."""
        digest = hashlib.blake2b(self.secret, digest_size=12, person=purpose).digest()
        return base64.b64encode(digest).decode()
