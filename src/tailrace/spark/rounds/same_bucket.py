"""Whether a table's bucket is still the one that it was made of.

A bucket that is deleted and made again has the same name and another uuid. Its changes have nothing to do
with the table's rows, so a mirror replaces them all only if somebody says so. Tables that were made before
they kept the uuid take it over from the first mirror that goes on with them.
"""

from __future__ import annotations

from ...errors import BucketReplaced
from ...table.contract import Commit, Table

__all__ = ["UUID", "check_same_bucket", "is_replaced", "note_bucket"]

UUID = "uuid"
"""The member of a table's source."""


def is_replaced(table: Table, bucket_uuid: str) -> bool:
    """Whether a bucket is another one than the table's. Servers and tables that say nothing are believed."""
    known = table.source.get(UUID)
    return bool(known and bucket_uuid and known != bucket_uuid)


def check_same_bucket(table: Table, bucket_uuid: str) -> None:
    """`BucketReplaced` if it is another one."""
    if is_replaced(table, bucket_uuid):
        raise BucketReplaced(table.uri, str(table.source["bucket"]), str(table.source[UUID]), bucket_uuid)


def note_bucket(table: Table, bucket_uuid: str) -> None:
    """The table is of this bucket from now on."""
    if bucket_uuid and table.source.get(UUID) != bucket_uuid:
        table.commit(Commit("TAILRACE BUCKET", bucket_uuid=bucket_uuid))
