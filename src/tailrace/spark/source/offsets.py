"""Offsets: the position of every vbucket, as the JSON object that Spark writes into its log.

    {"7": {"vb_uuid": "187349", "seqno": 12, "snapshot": [1, 12]}, …}

Spark compares offsets as text and lets them go backwards. A rollback is written into the entry of the
vbucket, so Spark's write-ahead log replays the same decision:

    {"7": {"vb_uuid": "998", "seqno": 104, "snapshot": [101, 104], "rollback": {"vb_uuid": "187349",
    "seqno": 100}}}

says that the batch goes back to seqno 100 first. Only the offset at the end of such a batch has the member
``rollback``.

The first entry also names the bucket, to detect the checkpoint of another one. Otherwise the bucket would
take its positions for a history that it has lost, and start over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...model import Position, parse_positions

__all__ = ["BUCKET", "ROLLBACK", "bucket_of", "from_offset", "parse_offsets", "rollbacks_of", "to_offset"]

ROLLBACK = "rollback"
BUCKET = "bucket"
_BESIDES = (ROLLBACK, BUCKET)


def to_offset(
    positions: Mapping[int, Position],
    rollbacks: Mapping[int, Position] | None = None,
    *,
    bucket: str | None = None,
) -> dict[str, Any]:
    """The offset for positions, in the one order that makes equal offsets equal texts."""
    offset: dict[str, Any] = {}
    for vbucket in sorted(positions):
        entry = positions[vbucket].to_json()
        if bucket is not None and not offset:
            entry[BUCKET] = bucket
        if rollbacks and vbucket in rollbacks:
            back = rollbacks[vbucket]
            entry[ROLLBACK] = {"vb_uuid": str(back.vb_uuid), "seqno": back.seqno}
        offset[str(vbucket)] = entry
    return offset


def from_offset(offset: Mapping[str, Any]) -> dict[int, Position]:
    """The positions in an offset; `UsageError` if it is not an offset."""
    return parse_positions(json.dumps(offset), besides=_BESIDES)


def parse_offsets(text: str) -> tuple[dict[int, Position], str | None]:
    """The positions of an offset as a stream reports it or a user writes it, and its bucket if it has one."""
    positions = parse_positions(text, besides=_BESIDES)
    return positions, bucket_of(json.loads(text))


def bucket_of(offset: Mapping[str, Any]) -> str | None:
    """The bucket of an offset; None if it does not name one."""
    for entry in offset.values():
        if isinstance(entry, Mapping) and BUCKET in entry:
            if not isinstance(entry[BUCKET], str):
                raise UsageError("the bucket of an offset must be a name")
            return str(entry[BUCKET])
    return None


def rollbacks_of(offset: Mapping[str, Any]) -> dict[int, Position]:
    """Where the batch that ends at an offset went back to, by vbucket; `UsageError` if it is damaged."""
    back = {vbucket: entry[ROLLBACK] for vbucket, entry in offset.items() if ROLLBACK in entry}
    try:
        return {
            int(vbucket): Position.at(int(entry["vb_uuid"]), int(entry["seqno"]))
            for vbucket, entry in back.items()
        }
    except (KeyError, TypeError, ValueError):
        raise UsageError("a rollback in it says neither branch nor seqno") from None
