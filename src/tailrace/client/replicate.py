"""Replication: the changes of one bucket applied to another, with their metadata.

The target may be any server that takes SET_WITH_META: a document arrives with the CAS, revision, flags and
expiry that it has at the source. The target's own documents are kept where they are newer; both sides decide
that by the same rule, so the order of writes does not matter and a change that comes twice does no harm.

A rollback is the one thing that this rule can't handle: the source took changes back, and the target has
newer revisions than the source. Then the whole vbucket is compared with the source's present state and made
equal by force. What only the target has in a collection of the source is deleted too: nothing shows whose it
is. For the same reason a collection that the source drops while no replication runs stays.

The older dialects carry less: only the default collection, no time of deletion, no xattrs in UPR draft A, and
in TAP an expiration is a deletion.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple, Unpack

from ..clock import SYSTEM, Clock
from ..connstr import ConnectionString
from ..errors import UsageError
from ..model import MAX_REV
from ..protocol.tap.reader import TapSettings
from ..wire.codes import Datatype, WithMetaOption
from ..wire.fields import encode_leb128, join_xattrs
from ..wire.kv import DelWithMeta, SetWithMeta
from .blocking import BlockingSource, connect_sync
from .cluster_map import vbucket_of
from .dialects import CANNOT
from .events import Change, Deletion, Expiration, Flush, Mutation, Rollback, SystemEvent
from .kv import KvClient
from .manifest import with_changes
from .options import SourceKeywords, SourceOptions
from .read_options import End, Start
from .write_batches import batched

__all__ = ["Replicated", "Replicator"]

_SAVE_S = 1.0
_NOTHING_LEFT_OUT = {"include_system": True, "include_transactions": True}


class _Place(NamedTuple):
    """A document, with the collection id that it has on one side."""

    collection_id: int
    key: bytes


class _Version(NamedTuple):
    is_live: bool
    rev: int
    cas: int


# A tombstone that loses to every version that a source can send.
_NEVER = _Version(is_live=False, rev=0, cas=1)


@dataclass(slots=True)
class Replicated:
    """What a replication has done so far."""

    changes: int = 0
    """Changes sent to the target, including those that it did not need."""
    rollbacks: int = 0
    """VBuckets that were compared and made equal because the source took changes back."""


class Replicator:
    """Applies the changes of one bucket to another. To be used with ``with``.

    ``options`` are those of `SourceOptions`, for reading. With ``state``, positions are saved there once the
    target has everything before them on disk, and the next replication goes on from there.
    """

    def __init__(
        self,
        source: str | ConnectionString,
        target: str | ConnectionString,
        *,
        clock: Clock = SYSTEM,
        **options: Unpack[SourceKeywords],
    ) -> None:
        self.done = Replicated()
        self._source_where, self._target_where = source, target
        self._dialect = str(options.get("dialect", "dcp"))
        self._options = {"purpose": "replicate", **_all_there_is(self._dialect), **options}
        tap: TapSettings = self._options.get("tap_settings", TapSettings())
        self._is_remembered = bool(tap.name)
        self._clock = clock
        self._collections: dict[int, int] = {0: 0}
        """The target's id of each collection of the source."""
        self._saved_at = clock.monotonic()
        self._vbuckets: set[int] = set()
        """VBuckets of the target that were written to since positions were saved."""

    def __enter__(self) -> Replicator:
        with contextlib.ExitStack() as stack:
            tls = self._options.get("tls")
            self._source = stack.enter_context(
                connect_sync(self._source_where, autosave=False, **self._options)
            )
            self._origin = stack.enter_context(KvClient(self._source_where, tls=tls))
            patience_s = self._options.get("retry_for_s", SourceOptions().retry_for_s)
            self._target = stack.enter_context(
                KvClient(self._target_where, tls=tls, patience_s=patience_s, wants_seqnos=False)
            )
            self._has_collections = self._target.collections
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def total(self) -> int:
        """How many changes the source has made so far, including those overwritten since."""
        return sum(self._source.high_seqnos().values())

    def run(self, start: Start = "beginning", end: End = "forever") -> Iterator[int]:
        """Replicate; yield the number of changes of each step."""
        if self._is_remembered and end == "now":
            raise UsageError("a TAP reader with a name gets what changed since: it has no end")
        self._copy_manifest()
        for portion in self._source.portions(start, end):
            before = self.done.changes
            pending: list[Change] = []
            for event in portion.events():
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
            # A TAP server takes a portion as received once the next is asked for: save before that.
            if self._is_remembered or self._clock.monotonic() - self._saved_at >= _SAVE_S:
                self._save()
            yield self.done.changes - before
        self._save()

    # changes

    def _requests(self, changes: Iterable[Change], *, options: int = 0) -> Iterator[SetWithMeta]:
        takes_json = self._target.json_type
        for change in changes:
            if (place := self._place(change)) is None:
                continue
            value, datatype = b"", 0
            if isinstance(change, Mutation):
                value, datatype = change.value, change.datatype if takes_json else 0
            if change.xattrs:
                texts = {name: _compact(xattr) for name, xattr in change.xattrs.items()}
                value, datatype = join_xattrs(texts, value), datatype | Datatype.XATTR
            is_live = isinstance(change, Mutation)
            how = options
            if isinstance(change, Expiration):
                how |= WithMetaOption.IS_EXPIRATION
            if not change.rev:  # from before there were revisions: the last one to come is the newest
                how |= WithMetaOption.SKIP_CONFLICT_RESOLUTION
                how |= 0 if change.cas else WithMetaOption.REGENERATE_CAS
            elif change.rev > MAX_REV:  # it was counted past the highest that a target takes
                how |= WithMetaOption.SKIP_CONFLICT_RESOLUTION
            if is_live:
                value, datatype = self._target.packed(value, datatype)
            yield self._request(
                SetWithMeta if is_live else DelWithMeta,
                place,
                value=value,
                datatype=datatype,
                flags=change.flags if isinstance(change, Mutation) else 0,
                expiry=change.expiry if isinstance(change, Mutation) else change.delete_time,
                rev_seqno=min(change.rev or 1, MAX_REV),
                meta_cas=change.cas or 1,  # 0 is refused, even where the CAS is not used
                options=how or None,
            )

    def _request(self, kind: type[SetWithMeta], place: _Place, **fields: Any) -> SetWithMeta:
        prefix = encode_leb128(place.collection_id) if self._has_collections else b""
        vbucket = self._target.vbucket_of(place.key)
        self._vbuckets.add(vbucket)
        return kind(key=prefix + place.key, vbucket=vbucket, **fields)

    def _write(self, requests: Iterable[SetWithMeta]) -> None:
        for written in self._target.write_many(batched(requests)):
            self.done.changes += written.answered

    def _save(self) -> None:
        """Save the positions, once a crash of the target can't lose what lies before them."""
        high = self._target.high_seqnos()
        for vbucket in sorted(self._vbuckets):
            self._target.wait_persisted(vbucket, high.get(vbucket, 0))
        self._vbuckets.clear()
        self._source.save()
        self._saved_at = self._clock.monotonic()

    # the source took changes back

    def _reconcile(self, vbucket: int) -> None:
        """Make the target's part of a vbucket equal to the source's, whichever is newer.

        Tombstones too: one with a newer revision would win over what the source writes next. Collections that
        only the target has are left alone.
        """
        self.done.rollbacks += 1
        wanted = self._wanted(vbucket)
        held = self._held(vbucket)
        forced = WithMetaOption.SKIP_CONFLICT_RESOLUTION
        self._write(
            self._request(DelWithMeta, place, rev_seqno=_NEVER.rev, meta_cas=_NEVER.cas, options=forced)
            for place, version in held.items()
            if place not in wanted and version != _NEVER
        )
        if wrong := {place for place, version in wanted.items() if held.get(place) != version}:
            self._write(self._requests(self._changes_of(vbucket, wrong), options=forced))

    def _wanted(self, vbucket: int) -> dict[_Place, _Version]:
        """What the source has of a vbucket now."""
        newest = self._newest(self._source_where, [vbucket], **_all_there_is(self._dialect))
        return {place: version for at, version in newest if (place := self._place(at)) is not None}

    def _held(self, vbucket: int) -> dict[_Place, _Version]:
        """What the target has of this vbucket of the source, in the source's collections."""
        count = self._source.vbucket_count
        chosen = [vbucket] if self._target.vbucket_count == count else None
        ours = set(self._collections.values())
        return {
            place: version
            for place, version in self._newest(self._target_where, chosen, dialect="dcp", no_value=True)
            if place.collection_id in ours and vbucket_of(place.key, count) == vbucket
        }

    def _changes_of(self, vbucket: int, places: Container[_Place]) -> Iterator[Change]:
        """Read these documents of the source once more, in order: their values are handed on as they come,
        since all of a vbucket may not fit into memory. If some are taken back meanwhile, the main reading
        gets that rollback too, and the vbucket is compared again.
        """
        with self._reader(self._source_where, **_all_there_is(self._dialect)) as reader:
            for event in reader.changes("beginning", "now", vbuckets=[vbucket]):
                if isinstance(event, Mutation | Deletion | Expiration) and self._place(event) in places:
                    yield event

    def _newest(
        self, where: str | ConnectionString, vbuckets: list[int] | None, **options: Any
    ) -> Iterator[tuple[_Place, _Version]]:
        """The newest version of every key, from a reading of its own; values are not kept."""
        newest: defaultdict[int, dict[_Place, _Version]] = defaultdict(dict)
        with self._reader(where, **options) as reader:
            for event in reader.changes("beginning", "now", vbuckets=vbuckets):
                if isinstance(event, Mutation | Deletion | Expiration):
                    newest[event.vbucket][_Place(event.collection_id, event.key)] = _version(event)
                elif isinstance(event, Rollback | Flush):
                    newest[event.vbucket].clear()
        return chain.from_iterable(of_vbucket.items() for of_vbucket in newest.values())

    def _reader(self, where: str | ConnectionString, **options: Any) -> BlockingSource:
        """A source for a reading from the beginning, to which every rollback returns."""
        common: dict[str, Any] = {
            name: self._options[name] for name in ("tls", "retry_for_s") if name in self._options
        }
        if "rollback_points" not in CANNOT[options["dialect"]]:
            common["rollback_points"] = _no_points
        return connect_sync(where, purpose="replicate", **common, **_NOTHING_LEFT_OUT | options)

    # collections

    def _place(self, change: Change | _Place) -> _Place | None:
        """Where a document of the source belongs at the target; None if its collection is gone by now."""
        number = change.collection_id
        if number not in self._collections:
            self._copy_manifest()
        return _Place(self._collections[number], change.key) if number in self._collections else None

    def _copy_manifest(self) -> None:
        """Create the collections of the source that the target does not have."""
        if self._dialect != "dcp" or not self._origin.collections:
            return  # older dialects have the default collection only
        names = _paths(self._origin.manifest())
        if not self._target.collections:
            if set(names) != {0}:
                raise UsageError("the source has collections, and the target's server supports none")
            return
        manifest = self._target.manifest()
        known = {path: number for number, path in _paths(manifest).items()}
        if missing := sorted(set(names.values()) - set(known)):
            self._target.set_manifest(with_changes(manifest, missing, ()))
            known = {path: number for number, path in _paths(self._target.manifest()).items()}
        self._collections.update((number, known[path]) for number, path in names.items())

    def _follow(self, event: SystemEvent) -> None:
        """A collection was created or dropped."""
        if event.event == "collection_created":
            self._copy_manifest()
        elif event.event == "collection_dropped" and event.collection_id is not None:
            gone = self._collections.pop(event.collection_id, None)
            manifest = self._target.manifest()
            path = None if gone is None else _paths(manifest).get(gone)
            if path is not None:
                self._target.set_manifest(with_changes(manifest, (), [path]))


def _all_there_is(dialect: str) -> dict[str, Any]:
    """Options of a reading that gets everything that the dialect can carry."""
    settings: dict[str, Any] = {**_NOTHING_LEFT_OUT, "dialect": dialect}
    if "include_xattrs" not in CANNOT.get(dialect, ()):
        settings["include_xattrs"] = True
    if dialect == "tap":
        settings["tap_settings"] = TapSettings(deletions=True)
    return settings


def _no_points(_vbucket: int) -> Iterable[int]:
    """No points: older versions of documents are not kept here, so a rollback goes to the beginning."""
    return ()


def _version(change: Change) -> _Version:
    return _Version(isinstance(change, Mutation), change.rev, change.cas)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _paths(manifest: dict[str, Any]) -> dict[int, str]:
    """The collections of a manifest: ``scope.name`` by id."""
    return {
        int(collection["uid"], 16): f"{scope['name']}.{collection['name']}"
        for scope in manifest["scopes"]
        for collection in scope["collections"]
    }
