"""A small key-value client, for commands, for tests, and for programs that write a few documents.

Every operation is a script (see `protocol.script`) that knows nothing of sockets; `KvClient` runs it over a
blocking socket to the node that has the vbucket, and follows changes of the cluster map. Bulk writes
(`write_many`) are pipelined, see `pipeline`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import __version__
from .. import rng as rng_
from ..clock import SYSTEM, Clock
from ..connstr import ConnectionString, parse
from ..errors import ConnectError, RemoteProtocolError, StatusError, UsageError
from ..history import FailoverLog
from ..protocol.handshake import KV_FEATURES, Credentials, Introduction
from ..protocol.script import Script, ask, expect
from ..snappy import deflate, inflate
from ..wire.admin import (
    Flush,
    GetAllVbSeqnos,
    GetCollectionId,
    GetCollectionsManifest,
    GetFailoverLog,
    Rewind,
    SeqnoPersistence,
    SetCollectionsManifest,
    Stat,
)
from ..wire.codes import Datatype, Feature, Status, VBucketState
from ..wire.fields import encode_leb128
from ..wire.kv import Delete, Get, GetMeta, Set
from .cluster_map import vbucket_of
from .kv_connection import KvConnection
from .kv_nodes import KvNodes
from .question_scripts import seqnos_of
from .retry import RETRIED, Backoff
from .tls import TlsOptions, tls_context

if TYPE_CHECKING:
    from .pipeline import BatchResult, WriteBatch

__all__ = ["Document", "KvClient", "Meta", "Stored"]

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_PATIENCE_S = 60.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.01, 0.5


class Document(NamedTuple):
    """A document as GET gives it."""

    value: bytes
    flags: int
    cas: int
    datatype: int


class Meta(NamedTuple):
    """A document's metadata."""

    cas: int
    rev: int
    flags: int
    expiry: int
    deleted: bool
    datatype: int


class Stored(NamedTuple):
    """What a write returned; without mutation seqnos from the server, vb_uuid and seqno are 0."""

    vbucket: int
    cas: int
    vb_uuid: int
    seqno: int


# scripts


def stats(group: str = "") -> Script[dict[str, str]]:
    """All statistics of a group, in the server's order."""
    (answers,) = yield [Stat(key=group.encode())]
    if not isinstance(answers, list):
        expect(answers, f"stats {group}".rstrip())
        raise AssertionError("a success is a list")
    return {
        answer.key.decode("utf-8", "replace"): answer.value.decode("utf-8", "replace")
        for answer in answers[:-1]
    }


_MIN_PACKED_BYTES, _WORTH_IT = 32, 0.83
"""As in the SDKs: values below this size, or that would not shrink to this share, are sent as they are."""


class KvClient:
    """Reads and writes documents of one bucket, wherever in the cluster they are.

    Not thread-safe. Operations that the server can't do right now, or that went to the wrong node, are tried
    again for ``timeout_s``; bulk writes while some succeed within ``patience_s``. Without ``wants_seqnos``
    the server need not report the seqno of each write, and is a little faster.
    """

    def __init__(
        self,
        where: str | ConnectionString,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        patience_s: float = DEFAULT_PATIENCE_S,
        tls: TlsOptions | None = None,
        wants_seqnos: bool = True,
        agent: str = f"tailrace-kv/{__version__}",
        clock: Clock = SYSTEM,
        rng: random.Random | None = None,
    ) -> None:
        self._where = parse(where) if isinstance(where, str) else where
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._clock = clock
        self._rng = rng or rng_.source()
        context = tls_context(self._where, tls)
        credentials = None
        if self._where.username is not None:
            credentials = Credentials(self._where.username, self._where.password or "")
        features = tuple(
            feature for feature in KV_FEATURES if wants_seqnos or feature != Feature.MUTATION_SEQNO
        )
        introduction = Introduction(
            agent, self._where.bucket, credentials, features, allow_plain=self._where.tls
        )
        self._nodes = KvNodes(self._where, introduction, tls=context, timeout_s=timeout_s)
        self._collections: dict[str, int] = {"_default._default": 0}

    def __enter__(self) -> KvClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._nodes.close()

    @property
    def vbucket_count(self) -> int:
        """How many vbuckets the bucket has."""
        return self._nodes.map.vbucket_count

    @property
    def collections(self) -> bool:
        """Whether keys carry a collection id on the wire."""
        return self._nodes.anywhere().collections

    @property
    def json_type(self) -> bool:
        """Whether the server takes the JSON datatype."""
        return Feature.JSON in self._nodes.anywhere().handshake.features

    @property
    def xattrs(self) -> bool:
        """Whether the server accepts xattrs with a document."""
        return Feature.XATTR in self._nodes.anywhere().handshake.features

    def packed(self, value: bytes, datatype: int) -> tuple[bytes, int]:
        """A value as it is sent: compressed if the connection string and the server say so, and it helps."""
        if not self._where.compression or len(value) < _MIN_PACKED_BYTES or datatype & Datatype.SNAPPY:
            return value, datatype
        if Feature.SNAPPY not in self._nodes.anywhere().handshake.features:
            return value, datatype
        smaller = deflate(value)
        is_worth_it = len(smaller) < _WORTH_IT * len(value)
        return (smaller, datatype | int(Datatype.SNAPPY)) if is_worth_it else (value, datatype)

    def vbucket_of(self, key: bytes | str) -> int:
        """The vbucket of a key."""
        return vbucket_of(_bytes(key), self._nodes.map.vbucket_count)

    # documents

    def get(self, key: bytes | str, *, collection: str = "") -> Document | None:
        """The document, or None."""
        vbucket, wire_key = self._place(key, collection)
        answer = self._on(vbucket, lambda: _found(Get(vbucket=vbucket, key=wire_key)))
        if answer is None:
            return None
        value, datatype = answer.value, answer.datatype
        if datatype & Datatype.SNAPPY:  # it comes as its writer sent it
            value, datatype = inflate(value), datatype & ~Datatype.SNAPPY
        return Document(value, answer.flags, answer.cas, datatype)

    def get_meta(self, key: bytes | str, *, collection: str = "") -> Meta | None:
        """The metadata of the document or its tombstone; None if nothing is known of the key."""
        vbucket, wire_key = self._place(key, collection)
        answer = self._on(vbucket, lambda: _found(GetMeta(vbucket=vbucket, key=wire_key, version=2)))
        if answer is None:
            return None
        datatype = answer.stored_datatype or 0
        return Meta(answer.cas, answer.rev_seqno, answer.flags, answer.expiry, bool(answer.deleted), datatype)

    def set(
        self,
        key: bytes | str,
        value: Any,
        *,
        collection: str = "",
        flags: int = 0,
        expiry: int = 0,
        cas: int = 0,
        datatype: int | None = None,
    ) -> Stored:
        """Store a document: bytes as they are, anything else as JSON."""
        vbucket, wire_key = self._place(key, collection)
        body, kind = _value(value, datatype)
        if not self._from_node(vbucket, lambda node: Feature.JSON in node.handshake.features):
            kind &= ~Datatype.JSON
        body, kind = self.packed(body, kind)
        return self._write(
            vbucket,
            lambda: ask(
                Set(
                    vbucket=vbucket,
                    key=wire_key,
                    value=body,
                    flags=flags,
                    expiry=expiry,
                    cas=cas,
                    datatype=kind,
                ),
                "set",
            ),
        )

    def delete(self, key: bytes | str, *, collection: str = "", cas: int = 0) -> Stored | None:
        """Delete a document; None if there is none."""
        vbucket, wire_key = self._place(key, collection)
        try:
            return self._write(vbucket, lambda: ask(Delete(vbucket=vbucket, key=wire_key, cas=cas), "delete"))
        except StatusError as error:
            if error.status == Status.KEY_ENOENT:
                return None
            raise

    def wait_persisted(self, vbucket: int, seqno: int) -> None:
        """Return when everything up to a seqno is on disk."""
        self._on(vbucket, lambda: ask(SeqnoPersistence(vbucket=vbucket, seqno=seqno), "seqno persistence"))

    # the bucket

    def stats(self, group: str = "") -> dict[str, str]:
        """The statistics of the first node that answers."""
        return self._nodes.anywhere().run(stats(group))

    def high_seqnos(self) -> dict[int, int]:
        """The high seqno of each active vbucket, from all nodes."""
        seqnos: dict[int, int] = {}
        for connection in self._nodes.everywhere():
            answer = connection.run(ask(GetAllVbSeqnos(state=VBucketState.ACTIVE), "get all vb seqnos"))
            seqnos |= seqnos_of(answer)
        return seqnos

    def failover_log(self, vbucket: int) -> FailoverLog:
        """The branches of a vbucket, newest first."""
        answer = self._on(vbucket, lambda: ask(GetFailoverLog(vbucket=vbucket), "get failover log"))
        return FailoverLog.from_bytes(answer.value)

    def manifest(self) -> dict[str, Any]:
        """The bucket's scopes and collections."""
        answer = self._nodes.anywhere().run(ask(GetCollectionsManifest(), "get collections manifest"))
        return _json_object(answer.value, "the collections manifest")

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        """Give every node new scopes and collections."""
        text = json.dumps(manifest, separators=(",", ":")).encode()
        for connection in self._nodes.everywhere():
            request = SetCollectionsManifest(value=text, datatype=int(Datatype.JSON))
            connection.run(ask(request, "set collections manifest"))
        self._collections = {"_default._default": 0}

    def collection_id(self, path: str) -> int:
        """The id of ``scope.collection``, or of a collection in the default scope."""
        scope, dot, name = path.rpartition(".")
        full = f"{scope}.{name}" if dot else f"_default.{path}"
        if full not in self._collections:
            answer = self._nodes.anywhere().run(
                ask(GetCollectionId(value=full.encode()), f"collection {full}")
            )
            self._collections[full] = answer.collection_id
        return self._collections[full]

    def flush(self) -> None:
        """Delete everything, on every node."""
        for connection in self._nodes.everywhere():
            connection.run(ask(Flush(), "flush"))

    # rewind and other tools for tests

    def rewind(
        self, vbuckets: Sequence[int] | None, *, to_seqno: int | None = None, lose: int | None = None
    ) -> dict[int, int]:
        """Forget the newest changes of vbuckets, as a failover with data loss does; return where each ends.

        Either everything after ``to_seqno``, or the last ``lose`` changes. None means all vbuckets.
        """
        if (to_seqno is None) == (lose is None):
            raise UsageError("a rewind goes either to a seqno or back by a number of changes")
        mode, number = (0, to_seqno) if to_seqno is not None else (1, lose or 0)
        seqnos: dict[int, int] = {}
        for connection, share in self._nodes.shares(vbuckets):
            value = b"".join(vbucket.to_bytes(2, "big") for vbucket in share)
            answer = connection.run(ask(Rewind(mode=mode, number=number, value=value), "rewind"))
            ends = _json_object(answer.value, "the answer to a rewind")
            seqnos |= {int(vbucket): int(seqno) for vbucket, seqno in ends.items()}
        return seqnos

    # many writes at once

    def write_many(self, batches: Iterable[WriteBatch]) -> Iterator[BatchResult]:
        """Write batches of requests, two under way at a time; yield the outcome of each finished batch.

        Each request has its own answer. What a node can't take now, or what belongs to another node, is sent
        again; any other refusal is a `StatusError`, as is nothing being taken for ``patience_s``.
        """
        from .bulk_writer import BulkWriter

        writer = BulkWriter(
            self._nodes,
            patience_s=self._patience_s,
            timeout_s=self._timeout_s,
            clock=self._clock,
            rng=self._rng,
        )
        return writer.write(batches)

    # nodes

    def _place(self, key: bytes | str, collection: str) -> tuple[int, bytes]:
        """A key's vbucket, and the key as it goes over the wire."""
        logical = _bytes(key)
        if not 1 <= len(logical) <= 250:
            raise UsageError(f"a key has 1 to 250 bytes, not {len(logical)}")
        vbucket = vbucket_of(logical, self._nodes.map.vbucket_count)
        if self._from_node(vbucket, lambda node: node.collections):
            return vbucket, encode_leb128(self.collection_id(collection) if collection else 0) + logical
        if collection:
            raise UsageError("the server has no collections")
        return vbucket, logical

    def _write(self, vbucket: int, make: Any) -> Stored:
        answer = self._on(vbucket, make)
        return Stored(vbucket, answer.cas, answer.vb_uuid or 0, answer.by_seqno or 0)

    def _on(self, vbucket: int, make: Any) -> Any:
        """Run a script on the vbucket's node; each attempt gets a new one."""
        return self._from_node(vbucket, lambda node: node.run(make()))

    def _from_node(self, vbucket: int, act: Callable[[KvConnection], T]) -> T:
        """What ``act`` returns for the vbucket's node, which may be another one with each attempt."""
        self._nodes.check(vbucket)
        deadline = self._clock.monotonic() + self._timeout_s
        backoff = Backoff(self._rng, first_s=_RETRY_FIRST_S, most_s=_RETRY_MOST_S)
        while True:
            try:
                return act(self._nodes.connection_for(vbucket))
            except StatusError as error:
                if error.status not in RETRIED or self._clock.monotonic() > deadline:
                    raise
                if error.status == Status.NOT_MY_VBUCKET:
                    self._nodes.refresh()
            except ConnectError:
                # In a cluster another node may have the vbucket by now.
                if self._nodes.is_alone or self._clock.monotonic() > deadline:
                    raise
                self._nodes.refresh()
            sleep(backoff.next_s())


def _found(request: Any) -> Script[Any]:
    """The answer to a read, None on a miss."""
    (answer,) = yield [request]
    return None if answer.status == Status.KEY_ENOENT else expect(answer, request.name())


def _bytes(key: bytes | str) -> bytes:
    return key.encode() if isinstance(key, str) else key


def _value(value: Any, datatype: int | None) -> tuple[bytes, int]:
    """A value and its datatype: bytes are raw unless declared JSON, anything else becomes JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), datatype or 0
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode(), int(Datatype.JSON) if datatype is None else datatype


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RemoteProtocolError(f"{what} is not a JSON object")
    return parsed
