"""Whether a table's bucket is still the one that the table was made from.

A bucket that is deleted and created again has the same name and another uuid. Its changes have nothing to do
with the table's rows, so a mirror stops unless it was told to replace them all. A table without a uuid, from
an earlier version, gets it from the first mirror that goes on with it.
"""

from __future__ import annotations

from ...errors import BucketReplaced
from ...table.contract import Commit, Table

__all__ = ["UUID", "check_same_bucket", "is_replaced", "note_bucket"]

UUID = "uuid"
"""The member of a table's source that holds the uuid."""


def is_replaced(table: Table, bucket_uuid: str) -> bool:
    """Whether a bucket is not the table's; False if the server or the table does not know the uuid."""
    known = table.source.get(UUID)
    return bool(known and bucket_uuid and known != bucket_uuid)


def check_same_bucket(table: Table, bucket_uuid: str) -> None:
    """Raise `BucketReplaced` if a bucket is not the table's."""
    if is_replaced(table, bucket_uuid):
        raise BucketReplaced(table.uri, str(table.source["bucket"]), str(table.source[UUID]), bucket_uuid)


def note_bucket(table: Table, bucket_uuid: str) -> None:
    """Make this bucket the table's from now on."""
    if bucket_uuid and table.source.get(UUID) != bucket_uuid:
        table.commit(Commit("TAILRACE BUCKET", bucket_uuid=bucket_uuid))
