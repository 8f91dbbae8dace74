"""The only source of randomness.

A component that needs random numbers takes a ``random.Random``. Without a seed it is the operating system's
generator, fit for nonces and vbucket UUIDs; with a seed every run repeats exactly.
"""

from __future__ import annotations

import base64
import random

__all__ = ["nonce", "source", "unique_name", "vb_uuid"]


def source(seed: int | None = None) -> random.Random:
    """A source of randomness: the operating system's, or one that repeats for a seed."""
    return random.SystemRandom() if seed is None else random.Random(seed)


def vb_uuid(rng: random.Random) -> int:
    """A new vbucket UUID: 48 random bits, never 0, which means "no history"."""
    return rng.randrange(1, 1 << 48)


def nonce(rng: random.Random, length_bytes: int = 24) -> bytes:
    """Printable random text for SCRAM: base64, so no comma."""
    return base64.b64encode(rng.randbytes(length_bytes))


def unique_name(rng: random.Random | None = None) -> str:
    """A unique part of a file name: 32 hex digits."""
    return (rng or source()).randbytes(16).hex()
