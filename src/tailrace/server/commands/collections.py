"""Scopes and collections.

Rules: docs/spec/header.md#collection-commands.
"""

from __future__ import annotations

import json

from ...errors import MalformedMessage
from ...store.base import VBucket
from ...store.collections import DEFAULT, is_legal_name
from ...store.format import StoredDocument, collection_of
from ...wire import admin
from ...wire.codes import Datatype, Feature, Status
from ...wire.fields import decode_leb128
from ..call import Call, Refused, Reply, command
from .documents import document_answer


@command(admin.SetCollectionsManifest)
def set_manifest(call: Call[admin.SetCollectionsManifest]) -> Reply:
    call.bucket.store.set_manifest(call.request.value)
    call.bucket.collections.reload()
    return call.success()


@command(admin.GetCollectionsManifest)
def get_manifest(call: Call[admin.GetCollectionsManifest]) -> Reply:
    text = json.dumps(call.bucket.collections.manifest.to_json()).encode()
    return call.success(value=text, datatype=Datatype.JSON & call.session.datatypes)


@command(admin.GetCollectionId)
def get_collection_id(call: Call[admin.GetCollectionId]) -> Reply:
    """By ``scope.collection``; an empty name is the default one."""
    names = call.request.path.decode("utf-8", "replace").split(".")
    if len(names) != 2:
        raise MalformedMessage("the path is not scope.collection")
    scope_name = _name(names[0])
    collection_name = _name(names[1], scope_name)
    manifest = call.bucket.collections.manifest
    scope = manifest.scope(scope_name)
    if scope is None:
        raise call.unknown(Status.UNKNOWN_SCOPE)
    for collection in scope.collections:
        if collection.name == collection_name:
            return call.success(extras=manifest.uid.to_bytes(8, "big") + collection.uid.to_bytes(4, "big"))
    raise call.unknown(Status.UNKNOWN_COLLECTION)


@command(admin.GetScopeId)
def get_scope_id(call: Call[admin.GetScopeId]) -> Reply:
    """By name; in ``scope.collection`` the collection is ignored."""
    names = call.request.path.decode("utf-8", "replace").split(".")
    if len(names) > 2:
        raise MalformedMessage("the path is neither scope nor scope.collection")
    name = _name(names[0])
    manifest = call.bucket.collections.manifest
    scope = manifest.scope(name)
    if scope is None:
        raise call.unknown(Status.UNKNOWN_SCOPE)
    return call.success(extras=manifest.uid.to_bytes(8, "big") + scope.uid.to_bytes(4, "big"))


def _name(text: str, scope: str | None = None) -> str:
    """The name of a scope, or of a collection in a scope."""
    if not text:
        return DEFAULT
    if not is_legal_name(text, scope):
        raise MalformedMessage("the name of a scope or collection is not legal")
    return text


@command(admin.GetRandomKey)
def get_random_key(call: Call[admin.GetRandomKey]) -> Reply:
    """Some document of a collection."""
    request = call.request
    collections = Feature.COLLECTIONS in call.session.features
    if (request.collection_id is not None) != collections:
        raise MalformedMessage("a collection id is needed with collections, and not possible without")
    collection = request.collection_id or 0
    call.check_collection(collection)
    vbuckets: list[VBucket] = list(call.bucket.store)
    call.node.rng.shuffle(vbuckets)
    for vbucket in vbuckets:
        frame = vbucket.random_key(collection) if vbucket.item_count else None
        if frame is not None:
            document = StoredDocument.of(frame)
            assert collection_of(document.key) == collection
            key = document.key if collections else document.key[decode_leb128(document.key)[1] :]
            return document_answer(
                call, document, document.cas, key, with_xattrs=bool(request.include_xattrs)
            )
    raise Refused(Status.KEY_ENOENT, "there is no document")
