"""DCP changes as columns: received bytes in, Arrow record batches out, and no Python work per message.

Two stages, and `decode` for both at once:

    frames = scan(buffer)                       numpy arrays, a row a change; the control frames between them
    batch = to_batch(frames, rows, ...)         the columns of `SCHEMA`

What the rows mean for the streams that they belong to (their order, their snapshots, the frames between them)
is for `protocol.dcp.delivery`; this package knows no state.

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
