"""Every exception that Tailrace raises, in one tree.

    TailraceError
    ├── ProtocolError                   bytes or messages that break the protocol
    │   ├── LocalProtocolError          ... by us: the caller asked for something illegal
    │   └── RemoteProtocolError         ... by the peer
    │       ├── FramingError            no frame can be found in the bytes; the connection is lost
    │       │   └── FrameTooLarge       a header announces more than the limit
    │       └── MalformedMessage        a whole frame, but not what its opcode asks for
    ├── StatusError                     the peer answered with a status that is not success
    ├── ConnectError                    the peer can't be reached or is gone for good
    │   ├── LoginError                  ... or refuses the login
    │   │   └── NoSuchBucket            ... or has no such bucket, or none for this user
    │   ├── NotPersistedYet             ... or has changes that not every copy has on disk yet
    │   └── OutOfReach                  ... or did not answer in the time that we may wait
    ├── StoreError                      what a node, a reader or a group keeps can't be read or written
    │   ├── StoreLocked                 another process has it open
    │   ├── StoreCorrupt                a checksum or a size is wrong; names the file
    │   ├── StoreTooNew                 written by a newer Tailrace; left untouched
    │   ├── DocumentRefused             a document or vbucket can't do that; has the status to answer
    │   ├── RollbackImpossible          that seqno's history is gone; names the lowest possible one
    │   ├── MergeCancelled              a merge was stopped for something more urgent; nobody sees it
    │   ├── MergeProcessLost            the process of a merge died; the node does the merge itself
    │   └── NotDurable                  a file was replaced, but a power cut may bring the old one back
    ├── TableError                      a mirrored table can't do what was asked
    │   ├── StorageError                its store can't be reached, or refuses
    │   ├── TableDamaged                one of its files is gone or not what was written; names the file
    │   ├── UnknownFeature              it requires something that is not known here
    │   ├── Fenced                      another mirror has taken it over
    │   ├── TableChanged                somebody else's commit came in between; compute again
    │   ├── ForeignRows                 something other than a mirror changed its rows
    │   ├── BucketReplaced              its bucket was deleted and created again
    │   └── TokensNotHeld               it does not hold changes that somebody waits for
    ├── ClusterError                    several nodes can't do together what was asked
    ├── ManifestError                   the collections are not such that the change can be made
    ├── FulltextError                   a full-text index can't be read or written
    ├── SpoolError                      what a query has read and not used can't be kept
    ├── GroupFenced                     the other readers of a group have given up this one
    ├── ChangesTakenBack                the bucket took changes back, and the query is to fail then
    ├── DataLoss                        changes were purged before the query read them
    ├── SparkLost                       Spark's Java process is gone
    ├── InputError                      a file that a command reads is not what it should be; names the place
    └── UsageError                      an option, an offset or a setting is wrong

The base itself is raised only by commands, whose errors nobody catches.

Three more become answers on the wire and never leave a node: `StreamRefused`, a `RemoteProtocolError` of
``protocol/dcp/stream_request.py``; `SubdocError`, a `MalformedMessage` of ``server/subdoc.py``; and `Refused`
of ``server/call.py``.

Facts are attributes and ``args``, so that every error survives pickling: Spark carries them between
processes.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "BucketReplaced",
    "ChangesTakenBack",
    "ClusterError",
    "ConnectError",
    "DataLoss",
    "DocumentRefused",
    "Fenced",
    "ForeignRows",
    "FrameTooLarge",
    "FramingError",
    "FulltextError",
    "GroupFenced",
    "InputError",
    "LocalProtocolError",
    "LoginError",
    "MalformedMessage",
    "ManifestError",
    "MergeCancelled",
    "MergeProcessLost",
    "NoSuchBucket",
    "NotDurable",
    "NotPersistedYet",
    "OutOfReach",
    "ProtocolError",
    "RemoteProtocolError",
    "RollbackImpossible",
    "SparkLost",
    "SpoolError",
    "StatusError",
    "StorageError",
    "StoreCorrupt",
    "StoreError",
    "StoreLocked",
    "StoreTooNew",
    "TableChanged",
    "TableDamaged",
    "TableError",
    "TailraceError",
    "TokensNotHeld",
    "UnknownFeature",
    "UsageError",
]


def reason_of(error: BaseException) -> str:
    """What an exception of the system says, for a text of ours: never empty, and without its number."""
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


class TailraceError(Exception):
    """The base of all errors that Tailrace raises on purpose."""

    def bare(self) -> Self:
        """The error itself, without traceback and causes, to be raised again where people see it.

        The text says what is wrong and what to do. The path through callbacks, threads and processes is of no
        use to anybody, except for errors of the protocol, which keep it.
        """
        if isinstance(self, ProtocolError):
            return self
        self.__cause__ = None
        self.__suppress_context__ = True
        return self.with_traceback(None)


class ProtocolError(TailraceError):
    """Something breaks the rules of the wire protocol."""


class LocalProtocolError(ProtocolError):
    """We were asked to send or do something that the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids."""


class FramingError(RemoteProtocolError):
    """The bytes are not a frame; there is no way to find the next one, so the connection must close."""


class FrameTooLarge(FramingError):
    """A header announces a frame that is larger than the limit in force."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"a frame of {self.size} bytes is announced, the limit is {self.limit}"


class MalformedMessage(RemoteProtocolError):
    """A whole frame that is not what its opcode asks for; ``status`` is what to answer."""

    def __init__(self, what: str, status: int = 0x04) -> None:
        super().__init__(what, status)
        self.what = what
        self.status = status

    def __str__(self) -> str:
        return self.what


class StatusError(TailraceError):
    """The peer answered a request with a status that is not success."""

    def __init__(self, status: int, what: str = "", body: bytes = b"") -> None:
        super().__init__(status, what, body)
        self.status = status
        self.what = what
        self.body = body

    def __str__(self) -> str:
        from .wire.codes import status_name

        name = f"{status_name(self.status)} (0x{self.status:02x})"
        return f"{self.what}: {name}" if self.what else name


class ConnectError(TailraceError):
    """The peer can't be reached, or the connection was lost and could not be restored."""


class LoginError(ConnectError):
    """The peer refuses the login or has no such bucket."""


class NoSuchBucket(LoginError):
    """The server has no such bucket, or none for this user; one that has just started may get it later."""


class NotPersistedYet(ConnectError):
    """Not every copy got changes to disk in the time that the reader waits; says what is missing."""


class OutOfReach(ConnectError):
    """Nobody answered in the time that we may wait; no further attempt is made."""


class StoreError(TailraceError):
    """What a node, a reader or a group keeps can't be read or written, or can't do what was asked."""


class StoreLocked(StoreError):
    """Another process has the data directory open."""


class StoreCorrupt(StoreError):
    """Stored bytes are not what was written; the message names the file and what to do."""


class StoreTooNew(StoreError):
    """The data directory was written by a newer Tailrace; nothing in it was touched."""


class DocumentRefused(StoreError):
    """An operation on a document or a vbucket is not possible as asked; ``status`` is what to answer."""

    def __init__(self, status: int, what: str = "") -> None:
        super().__init__(status, what)
        self.status = status
        self.what = what

    def __str__(self) -> str:
        from .wire.codes import status_name

        return self.what or status_name(self.status)


class RollbackImpossible(StoreError):
    """A vbucket can't go back to that seqno: its history there is compacted away, or was never written."""

    def __init__(self, vbucket: int, seqno: int, lowest: int, highest: int) -> None:
        super().__init__(vbucket, seqno, lowest, highest)
        self.vbucket = vbucket
        self.seqno = seqno
        self.lowest = lowest
        self.highest = highest

    def __str__(self) -> str:
        lowest = f"the lowest possible is {self.lowest}"
        if self.seqno > self.highest:
            what = f"vbucket {self.vbucket} has no seqno {self.seqno}"
            return f"{what}: its high seqno is {self.highest}, {lowest}"
        return f"vbucket {self.vbucket} can't go back to seqno {self.seqno}: {lowest}"


class MergeCancelled(StoreError):
    """A merge was stopped because something more urgent came up."""


class MergeProcessLost(StoreError):
    """The process of a merge did not finish; what it has written is useless."""


class NotDurable(StoreError, OSError):
    """A file was replaced, but a power cut may leave either the old content or the new."""


class TableError(TailraceError):
    """A mirrored table can't do what was asked."""


class StorageError(TableError):
    """The store of a table can't be reached, or refuses a request; one line without secrets."""


class TableDamaged(TableError):
    """A file of the table is gone, or is not what was written; the message names it."""


class UnknownFeature(TableError):
    """The table requires of its readers or writers something that is not known here."""


class Fenced(TableError):
    """Another mirror has taken the table over."""


class TableChanged(TableError):
    """Somebody else committed in between; the commit must be computed again."""


class ForeignRows(TableError):
    """Something other than a mirror changed rows, so the table is no longer a state of the bucket."""


class BucketReplaced(TableError):
    """A table's bucket was deleted and created again; the rows are not those of the new one."""

    def __init__(self, table: str, bucket: str, known: str, now: str) -> None:
        super().__init__(table, bucket, known, now)
        self.table = table
        self.bucket = bucket
        self.known = known
        self.now = now

    def __str__(self) -> str:
        return (
            f"the table at {self.table} mirrors a bucket {self.bucket!r} that was deleted and created again "
            f"(its uuid was {self.known} and is {self.now}): mirror it into a new table, or replace all rows "
            "of this one with 'tailrace mirror --accept-new-bucket'"
        )


class ChangesTakenBack(TailraceError):
    """The bucket took changes back, and the query is to fail in that case."""


class DataLoss(TailraceError):
    """Changes were purged before the query read them."""


class SparkLost(TailraceError):
    """Spark's Java process is gone; the message says how it ended, if that is known."""


class TokensNotHeld(TableError):
    """A table does not hold changes: the bucket took them back, or the time to wait is up."""

    def __init__(self, tokens: list[str], lost: bool = False) -> None:
        super().__init__(tokens, lost)
        self.tokens = tokens
        self.lost = lost

    def __str__(self) -> str:
        shown = ", ".join(self.tokens[:3]) + (", …" if len(self.tokens) > 3 else "")
        if self.lost:
            return f"the table will never hold {shown}: the bucket has taken that back"
        return f"the table does not hold {shown} yet; is its mirror running?"


class ClusterError(TailraceError):
    """A cluster can't do what was asked: vbuckets would be lost, or nodes are down or busy."""


class ManifestError(TailraceError):
    """A collection is there already, or is not there to be changed or dropped."""


class FulltextError(TailraceError):
    """A full-text index can't be read or written."""


class SpoolError(TailraceError):
    """The spool of a query can't be made, written or read."""


class GroupFenced(TailraceError):
    """A reader was away from its group for too long: others have its vbuckets now, and it can't save."""

    def __init__(self, member: str) -> None:
        super().__init__(member)
        self.member = member

    def __str__(self) -> str:
        return (
            f"the group has given up this reader ({self.member}): it was silent for too long, or another one "
            "has its slot. What it has not saved is read by others; start it again to take part"
        )


class InputError(TailraceError):
    """A file or stdin is not what it should be; the message names the place."""


class UsageError(TailraceError):
    """An option, an offset, a setting or an argument is wrong."""
