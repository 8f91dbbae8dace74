"""Collections manifests: the next one from the last."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ManifestError, UsageError

__all__ = ["collection_ids", "with_changes"]

_FIRST_ID = 8
"""Lower ids are reserved; 0 is the default."""


def collection_ids(manifest: dict[str, Any]) -> dict[str, int]:
    """The id of each collection, by ``scope.name``."""
    return {
        f"{scope['name']}.{collection['name']}": int(collection["uid"], 16)
        for scope in manifest["scopes"]
        for collection in scope["collections"]
    }


def with_changes(
    manifest: dict[str, Any],
    create: Iterable[str] = (),
    drop: Iterable[str] = (),
    modify: Iterable[str] = (),
    properties: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest with collections (``scope.name``) created, dropped and modified. Its uid rises by one, or
    by the number of new ids, so that no id is used again (see `_free_id`).

    Collections that are created or modified get the properties (``maxTTL``, ``history``); None removes one.
    `ManifestError` if a collection already exists, or does not exist to be dropped or modified; `UsageError`
    if a path is not one of a collection.
    """
    properties = properties or {}
    made = copy.deepcopy(manifest)
    scopes: list[dict[str, Any]] = made["scopes"]
    new_ids = 0
    for path in drop:
        scope, dot, name = path.partition(".")
        holder = _by_name(scopes, scope or "_default")
        collection = _by_name(holder["collections"], name) if holder is not None and dot else None
        if holder is None or (dot and collection is None):
            raise ManifestError(f"there is no {'collection' if dot else 'scope'} {path!r} to drop")
        if collection is not None:
            holder["collections"].remove(collection)
        else:
            scopes.remove(holder)
    for path in create:
        scope, dot, name = path.partition(".")
        if not dot or not name or "." in name:
            raise UsageError(f"{path!r} is not a collection, write it like shop.orders")
        holder = _by_name(scopes, scope or "_default")
        if holder is None:
            holder = {"name": scope, "uid": _free_id(manifest, made), "collections": []}
            scopes.append(holder)
            new_ids += 1
        if _by_name(holder["collections"], name) is not None:
            raise ManifestError(f"the collection {path!r} already exists")
        collection = {"name": name, "uid": _free_id(manifest, made)}
        _set_properties(collection, properties)
        holder["collections"].append(collection)
        new_ids += 1
    for path in modify:
        scope, dot, name = path.partition(".")
        holder = _by_name(scopes, scope or "_default")
        collection = _by_name(holder["collections"], name) if holder is not None and dot else None
        if collection is None:
            raise ManifestError(f"there is no collection {path!r} to modify")
        _set_properties(collection, properties)
    made["uid"] = f"{int(manifest['uid'], 16) + max(new_ids, 1):x}"
    return made


def _set_properties(collection: dict[str, Any], properties: Mapping[str, Any]) -> None:
    for name, value in properties.items():
        collection.pop(name, None)
        if value is not None:
            collection[name] = value


def _by_name(members: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((member for member in members if member["name"] == name), None)


def _free_id(*manifests: dict[str, Any]) -> str:
    """An id above every one that is or was in use: the manifest's uid grows with every new id."""
    used = [_FIRST_ID - 1, _FIRST_ID + int(manifests[0]["uid"], 16)]
    for manifest in manifests:
        for scope in manifest["scopes"]:
            used.append(int(scope["uid"], 16))
            used.extend(int(collection["uid"], 16) for collection in scope["collections"])
    return f"{max(used) + 1:x}"
