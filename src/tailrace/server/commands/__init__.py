"""The commands, by what they are about. Importing this package fills `call.COMMANDS`."""

from . import buckets, collections, connection, documents, meta, range_scans, rewind, subdocs, vbuckets

__all__ = [
    "buckets",
    "collections",
    "connection",
    "documents",
    "meta",
    "range_scans",
    "rewind",
    "subdocs",
    "vbuckets",
]
