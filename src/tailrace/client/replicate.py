"""Replication: the changes of one bucket applied to another, with their metadata.

The target may be any server that takes SET_WITH_META: a document arrives with the CAS, revision, flags and
expiry that it has at the source. What the target has of its own is kept where it is newer; both sides decide
that by the same rule, so the order of writes does not matter and a change that comes twice does no harm.

A rollback is the one thing that this rule can't undo: the source took changes back, and the target holds
newer revisions than the source. Then the whole vbucket is compared with the source's present state and made
equal by force. A collection that the source drops while nobody replicates stays at the target: nothing there
says whose it is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from ..clock import SYSTEM, Clock
from ..connstr import ConnectionString
from ..errors import TailraceError, UsageError
from ..wire.codes import Datatype, WithMetaOption
from ..wire.fields import decode_leb128, encode_leb128, join_xattrs
from ..wire.kv import DelWithMetaQ, SetWithMeta, SetWithMetaQ
from .blocking import connect_sync
from .cluster_map import vbucket_of
from .events import Change, Deletion, Expiration, Flush, Mutation, Rollback, SystemEvent
from .kv import KvClient
from .load import BATCH_BYTES, BATCH_DOCUMENTS, JsonLinesBatch
from .manifest import with_changes
from .resume import End, Start

__all__ = ["Replicated", "Replicator"]

_SAVE_S = 1.0


class _Version(NamedTuple):
    is_live: bool
    rev: int
    cas: int


# A tombstone that loses against every version that a source can send.
_NEVER = _Version(is_live=False, rev=0, cas=1)


@dataclass(slots=True)
class Replicated:
    """What a replication has done so far."""

    changes: int = 0
    """Sent to the target, those included that it did not need."""
    rollbacks: int = 0
    """VBuckets that were compared and made equal because the source took changes back."""


class Replicator:
    """Applies the changes of one bucket to another. To be used with ``with``.

    ``options`` are those of `SourceOptions`, for reading. With ``state`` positions are saved there once the
    target has on disk what lies before them, so that the next replication goes on from there.
    """

    def __init__(
        self,
        source: str | ConnectionString,
        target: str | ConnectionString,
        *,
        clock: Clock = SYSTEM,
        **options: Any,
    ) -> None:
        self.done = Replicated()
        self._source_where, self._target_where = source, target
        self._options = {"purpose": "replicate", "include_xattrs": True, **options}
        self._clock = clock
        self._collections: dict[int, int] = {0: 0}
        """The target's id of each collection of the source."""
        self._saved_at = clock.monotonic()
        self._vbuckets: set[int] = set()
        """Of the target, written to since positions were saved."""

    def __enter__(self) -> Replicator:
        with contextlib.ExitStack() as stack:
            tls = self._options.get("tls")
            self._source = stack.enter_context(
                connect_sync(self._source_where, autosave=False, **self._options)
            )
            self._origin = stack.enter_context(KvClient(self._source_where, tls=tls))
            self._target = stack.enter_context(KvClient(self._target_where, tls=tls))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def total(self) -> int:
        """How many changes the source has made up to now, those included that nobody sees any more."""
        return sum(self._source.high_seqnos().values())

    def run(self, start: Start = "beginning", end: End = "forever") -> Iterator[int]:
        """Replicate; gives the number of changes after each step."""
        self._copy_manifest()
        for piece in self._source.pieces(start, end):
            before = self.done.changes
            pending: list[Change] = []
            for event in piece.events():
                match event:
                    case Mutation() | Deletion() | Expiration():
                        pending.append(event)
                    case Rollback(vbucket=vbucket) | Flush(vbucket=vbucket):
                        self._write(self._requests(pending))
                        pending.clear()
                        self._reconcile(vbucket)
                    case SystemEvent():
                        self._write(self._requests(pending))
                        pending.clear()
                        self._follow(event)
            self._write(self._requests(pending))
            if self._clock.monotonic() - self._saved_at >= _SAVE_S:
                self._save()
            yield self.done.changes - before
        self._save()

    # changes

    def _requests(self, changes: Iterable[Change], *, options: int = 0) -> Iterator[SetWithMeta]:
        for change in changes:
            key = self._key(change.collection_id, change.key)
            if isinstance(change, Mutation):
                datatype = change.datatype if self._target.json_type else 0
                value = change.value
                if change.xattrs:
                    datatype |= Datatype.XATTR
                    texts = {
                        name: json.dumps(one, separators=(",", ":")).encode()
                        for name, one in change.xattrs.items()
                    }
                    value = join_xattrs(texts, value)
                yield SetWithMetaQ(
                    key=key,
                    value=value,
                    datatype=datatype,
                    flags=change.flags,
                    expiry=change.expiry,
                    rev_seqno=change.rev,
                    meta_cas=change.cas,
                    options=options or None,
                )
            else:
                is_expiration = isinstance(change, Expiration)
                own = options | (WithMetaOption.IS_EXPIRATION if is_expiration else 0)
                yield DelWithMetaQ(
                    key=key,
                    expiry=change.delete_time,
                    rev_seqno=change.rev,
                    meta_cas=change.cas,
                    options=own or None,
                )

    def _write(self, requests: Iterable[SetWithMeta]) -> None:
        for count in self._target.write_many(self._batches(requests)):
            self.done.changes += count

    def _batches(self, requests: Iterable[SetWithMeta]) -> Iterator[JsonLinesBatch]:
        batch = JsonLinesBatch()
        for request in requests:
            request.vbucket = self._target.vbucket_of(self._document_key(request.key))
            request.opaque = len(batch.frames)
            self._vbuckets.add(request.vbucket)
            batch.add(request.encode(), request.vbucket)
            if len(batch.frames) >= BATCH_DOCUMENTS or batch.size_bytes >= BATCH_BYTES:
                yield batch
                batch = JsonLinesBatch()
        if batch.frames:
            yield batch

    def _save(self) -> None:
        """Positions may be saved once a crash of the target can't lose what lies before them."""
        high = self._target.high_seqnos()
        for vbucket in sorted(self._vbuckets):
            self._target.wait_persisted(vbucket, high.get(vbucket, 0))
        self._vbuckets.clear()
        self._source.save()
        self._saved_at = self._clock.monotonic()

    # the source took changes back

    def _reconcile(self, vbucket: int) -> None:
        """Make the target's part of a vbucket equal to the source's, whatever is newer.

        Tombstones too: one with a newer revision would win against what the source writes next.
        """
        self.done.rollbacks += 1
        wanted = {
            self._key(change.collection_id, change.key): change
            for change in self._state(self._source_where, [vbucket], include_xattrs=True)
        }
        held = self._held(vbucket)
        forced = WithMetaOption.SKIP_CONFLICT_RESOLUTION
        unknown = (
            DelWithMetaQ(key=key, rev_seqno=_NEVER.rev, meta_cas=_NEVER.cas, options=forced)
            for key, version in held.items()
            if key not in wanted and version != _NEVER
        )
        self._write(unknown)
        changed = [change for key, change in wanted.items() if held.get(key) != _version(change)]
        self._write(self._requests(changed, options=forced))

    def _held(self, vbucket: int) -> dict[bytes, _Version]:
        """What the target has of this vbucket of the source, by key."""
        count = self._source.vbucket_count
        chosen = [vbucket] if self._target.vbucket_count == count else None
        return {
            self._prefixed(change.collection_id, change.key): _version(change)
            for change in self._state(self._target_where, chosen, no_value=True)
            if vbucket_of(change.key, count) == vbucket
        }

    def _state(
        self, where: str | ConnectionString, vbuckets: list[int] | None, **options: Any
    ) -> Iterable[Change]:
        """The newest change of every key, as it is now; by a reading of its own."""
        common = {name: self._options[name] for name in ("tls", "retry_for_s") if name in self._options}
        newest: dict[tuple[int, bytes], Change] = {}
        with connect_sync(where, purpose="replicate", **common, **options) as reader:
            for event in reader.changes("beginning", "now", vbuckets=vbuckets):
                if isinstance(event, Mutation | Deletion | Expiration):
                    newest[event.collection_id, event.key] = event
                elif isinstance(event, Rollback | Flush):
                    for key in [key for key, one in newest.items() if one.vbucket == event.vbucket]:
                        del newest[key]
        return newest.values()

    # collections

    def _key(self, collection_id: int, key: bytes) -> bytes:
        if collection_id not in self._collections:
            self._copy_manifest()
        if collection_id not in self._collections:
            raise TailraceError(
                f"the source has a change of collection 0x{collection_id:x}, which has no name"
            )
        return self._prefixed(self._collections[collection_id], key)

    def _prefixed(self, target_id: int, key: bytes) -> bytes:
        return encode_leb128(target_id) + key if self._target.collections else key

    def _document_key(self, key: bytes) -> bytes:
        return key[decode_leb128(key)[1] :] if self._target.collections else key

    def _copy_manifest(self) -> None:
        """Make the collections of the source that the target does not have."""
        if not self._origin.collections:
            return
        names = _paths(self._origin.manifest())
        if not self._target.collections:
            if set(names) != {0}:
                raise UsageError("the source has collections, and the target's server knows none")
            return
        manifest = self._target.manifest()
        known = {path: number for number, path in _paths(manifest).items()}
        if missing := sorted(set(names.values()) - set(known)):
            self._target.set_manifest(with_changes(manifest, missing, ()))
            known = {path: number for number, path in _paths(self._target.manifest()).items()}
        self._collections.update((number, known[path]) for number, path in names.items())

    def _follow(self, event: SystemEvent) -> None:
        """A collection came or went."""
        if event.event == "collection_created":
            self._copy_manifest()
        elif event.event == "collection_dropped" and event.collection_id is not None:
            gone = self._collections.pop(event.collection_id, None)
            manifest = self._target.manifest()
            path = None if gone is None else _paths(manifest).get(gone)
            if path is not None:
                self._target.set_manifest(with_changes(manifest, (), [path]))


def _version(change: Change) -> _Version:
    return _Version(isinstance(change, Mutation), change.rev, change.cas)


def _paths(manifest: dict[str, Any]) -> dict[int, str]:
    """The collections of a manifest: ``scope.name`` by id."""
    return {
        int(one["uid"], 16): f"{scope['name']}.{one['name']}"
        for scope in manifest["scopes"]
        for one in scope["collections"]
    }
