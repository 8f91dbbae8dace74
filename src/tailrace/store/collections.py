"""Scopes and collections: the bucket's manifest, and the system events that report it to a vbucket's
readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import DocumentRefused
from ..wire.codes import Status, SystemEventId
from ..wire.event_forms import integers_of
from ..wire.flatbuffer import EventContent, event_flatbuffer
from .collection_events import UNKNOWN_TTL, KnownEvent

__all__ = ["Collection", "Manifest", "Scope", "is_legal_name"]

DEFAULT = "_default"
_SYSTEM = "_system"
MAX_COLLECTIONS = 10_000
_NAME = re.compile(r"[A-Za-z0-9_\-%]{1,251}", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{1,16}", re.ASCII)
_FIRST_USER_ID = 8  # 0 is the default scope and collection, 1 to 7 are reserved

SystemEventFields = tuple[int, int, bytes, bytes]
"""Event, version, key and value of a system event."""


class Collection(NamedTuple):
    """A collection as the manifest names it."""

    name: str
    uid: int
    max_ttl: int | None = None
    history: bool | None = None
    """Whether every version is kept; None: the bucket's setting."""


@dataclass(slots=True)
class Scope:
    """A scope as the manifest names it."""

    name: str
    uid: int
    collections: list[Collection] = field(default_factory=list)


@dataclass(slots=True)
class Manifest:
    """Which scopes and collections a bucket has. Once the default collection is dropped it can't come
    back.
    """

    uid: int = 0
    scopes: list[Scope] = field(default_factory=lambda: [Scope(DEFAULT, 0, [Collection(DEFAULT, 0)])])

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Read the manifest's JSON; DocumentRefused(EINVAL) for anything that a server would refuse."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise _invalid("the manifest is not JSON") from None
        manifest = cls(_uid(raw, "the manifest"), [])
        for raw_scope in _list(raw, "scopes", "the manifest"):
            scope = Scope(_name(raw_scope), _uid(raw_scope, "a scope"))
            for raw_collection in _list(raw_scope, "collections", f"scope {scope.name}", optional=True):
                scope.collections.append(
                    Collection(
                        _name(raw_collection),
                        _uid(raw_collection, "a collection"),
                        _ttl(raw_collection),
                        _history(raw_collection),
                    )
                )
            manifest.scopes.append(scope)
        manifest._check()
        return manifest

    def _check(self) -> None:
        if not any(scope.uid == 0 and scope.name == DEFAULT for scope in self.scopes):
            raise _invalid("the default scope can't be dropped")
        _check_unique("scope", [(scope.name, scope.uid) for scope in self.scopes])
        for scope in self.scopes:
            names = [collection.name for collection in scope.collections]
            if len(set(names)) != len(names):
                raise _invalid(f"scope {scope.name} has a collection twice")
            if any(c.uid == 0 for c in scope.collections) and scope.uid != 0:
                raise _invalid("the default collection is in the default scope")
        _check_unique(
            "collection",
            [(f"{scope.name}.{c.name}", c.uid) for scope in self.scopes for c in scope.collections],
        )
        if sum(len(scope.collections) for scope in self.scopes) > MAX_COLLECTIONS:
            raise _invalid(f"more than {MAX_COLLECTIONS} collections")

    def check_follows(self, old: Manifest) -> None:
        """Refuse if a bucket with the old manifest can't take this one over."""
        if self.uid < old.uid:
            raise DocumentRefused(Status.ERANGE, f"the manifest has uid {old.uid:x} already")
        if self.uid == old.uid and self != old:
            raise DocumentRefused(Status.CANNOT_APPLY_MANIFEST, f"another manifest has uid {old.uid:x}")
        before = {c.uid: (c.name, scope.uid) for scope in old.scopes for c in scope.collections}
        if 0 not in before and self.collection(0) is not None:
            raise DocumentRefused(Status.CANNOT_APPLY_MANIFEST, "the default collection can't come back")
        scopes = {scope.uid: scope.name for scope in old.scopes}
        for scope in self.scopes:
            if scopes.get(scope.uid, scope.name) != scope.name:
                raise DocumentRefused(Status.CANNOT_APPLY_MANIFEST, f"scope {scope.uid:x} has another name")
            for c in scope.collections:
                if before.get(c.uid, (c.name, scope.uid)) != (c.name, scope.uid):
                    raise DocumentRefused(
                        Status.CANNOT_APPLY_MANIFEST, f"collection {c.uid:x} has another name or scope"
                    )

    @property
    def histories(self) -> dict[int, bool]:
        """Whether every version is kept, for the collections that have their own setting."""
        return {c.uid: c.history for scope in self.scopes for c in scope.collections if c.history is not None}

    def collection(self, uid: int) -> tuple[Scope, Collection] | None:
        """A collection by its id."""
        return next(((s, c) for s in self.scopes for c in s.collections if c.uid == uid), None)

    def scope(self, name: str) -> Scope | None:
        """A scope by its name; the empty name is the default scope."""
        return next((scope for scope in self.scopes if scope.name == (name or DEFAULT)), None)

    def to_json(self) -> dict[str, Any]:
        """The manifest as GET_COLLECTIONS_MANIFEST answers it."""
        return {
            "uid": f"{self.uid:x}",
            "scopes": [
                {
                    "name": scope.name,
                    "uid": f"{scope.uid:x}",
                    "collections": [
                        {"name": c.name, "uid": f"{c.uid:x}"}
                        | ({} if c.max_ttl is None else {"maxTTL": c.max_ttl})
                        | ({} if c.history is None else {"history": c.history})
                        for c in scope.collections
                    ],
                }
                for scope in self.scopes
            ],
        }

    def events_from(
        self, known: Iterable[KnownEvent], previous: Manifest | None, *, keeps_history: bool
    ) -> Iterator[SystemEventFields]:
        """The events that lead here from those that a vbucket has seen (see `CollectionEvents`).

        Only the last one has this manifest's uid, the others have the previous one: a reader that stops in
        the middle must not conclude that it has seen all.
        """
        collections: dict[int, KnownEvent] = {0: KnownEvent(0, SystemEventId.COLLECTION_BEGIN, 0, 0)}
        scopes: set[int] = {0}
        for seen in known:
            match seen.event:
                case SystemEventId.COLLECTION_BEGIN | SystemEventId.COLLECTION_MODIFIED:
                    collections[seen.subject] = seen
                case SystemEventId.COLLECTION_END:
                    collections.pop(seen.subject, None)
                case SystemEventId.SCOPE_CREATED:
                    scopes.add(seen.subject)
                case SystemEventId.SCOPE_DROPPED:
                    scopes.discard(seen.subject)
        wanted = {c.uid for scope in self.scopes for c in scope.collections}
        steps: list[tuple[int, bytes, EventContent]] = []
        for uid, begun in collections.items():
            if uid not in wanted:
                steps.append((SystemEventId.COLLECTION_END, b"", EventContent(0, begun.scope, uid)))
        for uid in sorted(scopes - {scope.uid for scope in self.scopes}):
            steps.append((SystemEventId.SCOPE_DROPPED, b"", EventContent(0, uid)))
        for scope in self.scopes:
            if scope.uid not in scopes:
                steps.append((SystemEventId.SCOPE_CREATED, scope.name.encode(), EventContent(0, scope.uid)))
        for scope in self.scopes:
            for c in scope.collections:
                history = c.history if c.history is not None else keeps_history or None
                content = EventContent(0, scope.uid, c.uid, c.max_ttl, history)
                if c.uid not in collections:
                    steps.append((SystemEventId.COLLECTION_BEGIN, c.name.encode(), content))
                elif _is_modified(c, collections[c.uid], previous, keeps_history=keeps_history):
                    steps.append((SystemEventId.COLLECTION_MODIFIED, c.name.encode(), content))
        for place, (event, name, content) in enumerate(steps, 1):
            is_last = place == len(steps)
            uid = self.uid if is_last else 0 if previous is None else previous.uid
            yield _event(event, name, content._replace(manifest_uid=uid))


def _is_modified(
    collection: Collection, seen: KnownEvent, previous: Manifest | None, *, keeps_history: bool
) -> bool:
    """Whether a collection differs from what a vbucket's readers know. What events don't say, the previous
    manifest does.
    """
    place = None if previous is None else previous.collection(collection.uid)
    before = collection if place is None else place[1]
    if collection.max_ttl != (before.max_ttl if seen.max_ttl == UNKNOWN_TTL else seen.max_ttl):
        return True
    if collection.history is None and before.history is None:
        return False  # the bucket's setting, before and now
    histories = (collection.history, before.history if seen.history is None else seen.history)
    now, then = (keeps_history if history is None else history for history in histories)
    return now != then


def _event(event: int, name: bytes, content: EventContent) -> SystemEventFields:
    """An event as it is stored: as integers, unless they can't express all of it."""
    if event == SystemEventId.COLLECTION_MODIFIED or content.history is not None:
        return event, 2, name, event_flatbuffer(event, content, name)
    version, value = integers_of(content)
    return event, version, name, value


def is_legal_name(name: str, scope: str | None = None) -> bool:
    """Whether a scope can have this name, or a collection in a scope (docs/spec/header.md#manifest).

    Only the default ones, the scope ``_system`` and its collections have names that begin with ``_``.
    """
    if _NAME.fullmatch(name) is None or name[0] == "%":
        return False
    return name[0] != "_" or name == DEFAULT or (name if scope is None else scope) == _SYSTEM


def _invalid(what: str) -> DocumentRefused:
    return DocumentRefused(Status.EINVAL, what)


def _uid(raw: Any, what: str) -> int:
    value = raw.get("uid") if isinstance(raw, dict) else None
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise _invalid(f"{what} has no uid in hexadecimal digits")
    return int(value, 16)


def _name(raw: Any) -> str:
    value = raw.get("name") if isinstance(raw, dict) else None
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _invalid("a scope or collection has no legal name")
    return value


def _ttl(raw: dict[str, Any]) -> int | None:
    value = raw.get("maxTTL")
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
        raise _invalid("maxTTL must be a number of seconds below 2^31")
    return value


def _history(raw: dict[str, Any]) -> bool | None:
    value = raw.get("history")
    if value is not None and type(value) is not bool:
        raise _invalid("history must be true or false")
    return value


def _list(raw: Any, name: str, what: str, *, optional: bool = False) -> list[Any]:
    value = raw.get(name, [] if optional else None) if isinstance(raw, dict) else None
    if not isinstance(value, list):
        raise _invalid(f"{what} has no array {name}")
    return value


def _check_unique(what: str, named: list[tuple[str, int]]) -> None:
    if len({name for name, _ in named}) != len(named) or len({uid for _, uid in named}) != len(named):
        raise _invalid(f"a {what}'s name or uid occurs twice")
    for path, uid in named:
        scope, dot, name = path.rpartition(".")
        if uid == 0 and name != DEFAULT:
            raise _invalid(f"{what} 0 is {DEFAULT}")
        if uid and (uid < _FIRST_USER_ID or uid > 0xFFFFFFFF):
            raise _invalid(f"{what} uid {uid:x} is reserved or too large")
        if uid and (name == DEFAULT or not is_legal_name(name, scope if dot else None)):
            raise _invalid(f"{what} {name} has the wrong uid or an illegal name")
