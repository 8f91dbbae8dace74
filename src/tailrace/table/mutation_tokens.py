"""Read your writes: wait until a table holds changes that somebody made.

A change is known by its mutation token, as SDKs return it: vbucket, vb_uuid and seqno. After a failover the
same seqno names another change, so a table that has reached the seqno need not hold the change: the bucket
may have taken it back, and then it never comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..clock import SYSTEM, Clock
from ..errors import TokensNotHeld, UsageError
from ..keywords import check_values
from ..model import Position, check_seqno, check_u64, parse_u64
from .contract import Table
from .file_reading import scan
from .hashing import KeyHash
from .opening import TableOptions, open_table

__all__ = ["MutationToken", "TokenState", "token_state", "wait_for"]

_LOOK_S = 0.2
_never = threading.Event()


@dataclass(frozen=True, slots=True)
class MutationToken:
    """A change, as an SDK names it."""

    vbucket: int
    vb_uuid: int
    seqno: int

    @classmethod
    def of(cls, token: object) -> MutationToken:
        """A token from an SDK's, from three numbers, or from a text such as ``7:187349:12``."""
        if isinstance(token, MutationToken):
            return token
        if isinstance(token, str):
            parts = token.split(":")
            if len(parts) != 3:
                raise UsageError(
                    f"{token[:80]!r} is not a token; write VBUCKET:VB_UUID:SEQNO, such as 7:187349:12"
                )
            vbucket, vb_uuid, seqno = (parse_u64(part, "a part of a token") for part in parts)
        elif isinstance(token, tuple | list) and len(token) == 3:
            vbucket, vb_uuid, seqno = token
        else:
            names = ("partition_id", "partition_uuid", "sequence_number")  # of the Python SDK
            try:
                vbucket, vb_uuid, seqno = (_asked(token, name) for name in names)
            except AttributeError:
                raise UsageError(f"a {type(token).__name__} is not a mutation token") from None
        return cls(
            check_u64(vbucket, "the vbucket of a token"),
            check_u64(vb_uuid, "the vb_uuid of a token"),
            check_seqno(seqno, "the seqno of a token"),
        )

    def __str__(self) -> str:
        return f"{self.vbucket}:{self.vb_uuid}:{self.seqno}"


def _asked(token: object, name: str) -> int:
    value = getattr(token, name)
    return int(value() if callable(value) else value)


def _each(tokens: object) -> Iterable[object]:
    """The tokens, where a single one may be given alone."""
    is_one = isinstance(tokens, tuple | list) and len(tokens) == 3 and all(isinstance(n, int) for n in tokens)
    return [tokens] if is_one or isinstance(tokens, str) or not isinstance(tokens, Iterable) else tokens


class TokenState(Enum):
    """What a table knows of a change."""

    HELD = "held"
    AHEAD = "ahead"
    """The table has not reached it yet."""
    LOST = "lost"
    """The bucket took it back: it will never come."""


def token_state(table: Table, token: MutationToken) -> TokenState:
    """What a table knows of a change by itself.

    It holds a change that lies on the way to its position. A change is lost if the table had it and went back
    behind it, or if a branch that followed the change's own has another change at or before its seqno.
    Otherwise the table has not reached it, or can't tell.
    """
    position = table.current.position(token.vbucket)
    if position.vb_uuid == token.vb_uuid:
        return TokenState.HELD if position.seqno >= token.seqno else TokenState.AHEAD

    def is_behind(known: Position) -> bool:
        return known.vb_uuid == token.vb_uuid and known.seqno >= token.seqno

    if any(is_behind(earlier) for _, earlier in table.lineage(token.vbucket)):
        return TokenState.HELD
    seen = [version.position(token.vbucket) for version in table.versions()]
    if any(is_behind(earlier) for earlier in seen):
        return TokenState.LOST
    if all(earlier.vb_uuid != token.vb_uuid for earlier in seen):
        return TokenState.AHEAD
    return _told_by_rows(table, token, position.vb_uuid)


def _told_by_rows(table: Table, token: MutationToken, newer_branch: int) -> TokenState:
    """The state of a change whose branch has ended since; rows of that branch and of the next may tell."""
    files = [file for file in table.files() if file.low >> 48 <= token.vbucket <= file.high >> 48]
    for batch in scan(
        table.store,
        files,
        {file.path: table.mask(file) for file in files},
        table.schema,
        key_hash=KeyHash(table.secret),
        columns=["vb_uuid", "seqno"],
        vbuckets=(token.vbucket, token.vbucket),
    ):
        branches = batch["vb_uuid"].to_numpy().view(np.uint64)
        seqnos = batch["seqno"].to_numpy()
        if (seqnos[branches == token.vb_uuid] >= token.seqno).any():
            return TokenState.HELD
        if (seqnos[branches == newer_branch] <= token.seqno).any():
            return TokenState.LOST
    return TokenState.AHEAD


def wait_for(
    path: str | os.PathLike[str],
    tokens: Iterable[object] | object,
    timeout_s: float = 60.0,
    *,
    storage_options: Mapping[str, str] | None = None,
    clock: Clock = SYSTEM,
    sleep: Callable[[float], object] = _never.wait,
) -> int:
    """Wait until a table holds changes; returns the version that does.

    ``tokens`` are one or more mutation tokens: as an SDK returns them, ``(vbucket, vb_uuid, seqno)``, or
    ``7:1:12``.
    `TokensNotHeld` if the bucket has taken one of them back, or if the time is up.
    """
    check_values(wait_for, {"timeout_s": timeout_s, "storage_options": storage_options})
    wanted = [MutationToken.of(token) for token in _each(tokens)]
    table = open_table(path, TableOptions(storage_options or {}))
    ends_at = clock.monotonic() + timeout_s
    while True:
        states = {token: token_state(table, token) for token in wanted}
        lost = [token for token, state in states.items() if state is TokenState.LOST]
        if lost:
            raise TokensNotHeld([str(token) for token in lost], lost=True)
        wanted = [token for token, state in states.items() if state is TokenState.AHEAD]
        if not wanted:
            return table.version
        if clock.monotonic() >= ends_at:
            raise TokensNotHeld([str(token) for token in wanted], lost=False)
        sleep(_LOOK_S)
        table.refresh()
