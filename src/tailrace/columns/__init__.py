"""DCP changes as columns: received bytes in, Arrow record batches out, and no Python work per message.

Two stages, or `decode` for both together:

    frames = scan(buffer)                       numpy arrays, a row per change; control frames between them
    batch = to_batch(frames, rows, ...)         the columns of `SCHEMA`

What the rows mean for the streams that they belong to (their order, their snapshots, the frames between them)
is for `protocol.dcp.delivery` to say; this package keeps no state.

`walk` finds the frames, `scanner` gathers their fields, `batch` makes the columns.
"""

from .batch import DATATYPES, OPS, SCHEMA, Decoded, Names, decode, to_batch
from .scanner import SCAN_LIMIT, ControlFrame, ScannedFrames, scan

__all__ = [
    "DATATYPES",
    "OPS",
    "SCAN_LIMIT",
    "SCHEMA",
    "ControlFrame",
    "Decoded",
    "Names",
    "ScannedFrames",
    "decode",
    "scan",
    "to_batch",
]
