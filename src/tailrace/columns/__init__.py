"""DCP changes as columns: received bytes in, Arrow record batches out, and no Python work per message.

Two stages, and `decode` for both at once:

    frames = scan(buffer)                       numpy arrays, a row a change; the control frames between them
    batch = to_batch(frames, rows, ...)         the columns of `SCHEMA`

A consumer goes through the control frames, which are few, and lets `Streams` deal with the rows between two
of them at once, so that everything happens in the order of the stream:

    context, done = RowContext.for_rows(len(frames)), 0
    for control in frames.controls:
        streams.place(frames, slice(done, control.row), context)
        done = control.row
        handle(frames.frame(control))           decodes it and tells `streams` about markers
    streams.place(frames, slice(done, len(frames)), context)
    batch = to_batch(frames, names=names, vb_uuid=context.vb_uuid, ...)
    carry over buffer[frames.used:], acknowledge frames.size.sum(), then raise frames.error if there is one

`walk` finds the frames, `scanner` gathers their fields, `streams` places the rows, `batch` makes the columns.
"""

from .batch import DATATYPES, OPS, SCHEMA, Decoded, Names, decode, to_batch
from .scanner import SCAN_LIMIT, ControlFrame, Frames, scan
from .streams import RowContext, Streams

__all__ = [
    "DATATYPES",
    "OPS",
    "SCAN_LIMIT",
    "SCHEMA",
    "ControlFrame",
    "Decoded",
    "Frames",
    "Names",
    "RowContext",
    "Streams",
    "decode",
    "scan",
    "to_batch",
]
