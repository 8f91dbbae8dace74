"""Management over HTTP: as much of it as others' SDKs and tools ask a node for.

That is cluster configs, buckets, scopes and collections, and who the user is. It is served on the node's own
port, beside the binary protocol: the first byte of a connection tells them apart. So the management port that
a config announces is one that answers, and each node of a host has its own.

Rules: docs/spec/servers.md#management-http.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from ..errors import DocumentRefused
from ..store.collections import DEFAULT, is_legal_name
from .bucket import ServedBucket
from .http import HttpContent, HttpRequest, HttpService, HttpStream, basic_login, http_error, is_address
from .node import DEFAULT_USER, Node

__all__ = ["is_host_of", "login_of", "management_service", "serve_management"]

_VERSION = "7.6.0-1000-enterprise"
_COMPATIBILITY = 7 << 16 | 6
_MAX_TTL = (1 << 31) - 1


def login_of(node: Node, authorization: str) -> str | None:
    """The user who asks over HTTP; None if a login is needed and missing."""
    if not node.needs_login:
        return DEFAULT_USER[0]
    return basic_login(node.users.check_password, authorization)


def management_service(node: Node) -> HttpService:
    """What a node answers on its own port."""
    return HttpService(
        lambda request: serve_management(node, request),
        lambda authorization: login_of(node, authorization),
        is_host=lambda host: is_host_of(node, host),
    )


def is_host_of(node: Node, host: str) -> bool:
    """Whether a node may be reached under a name; without users only by an address or a name it announces."""
    if node.needs_login or is_address(host):
        return True
    announced = (node.address.host, *(alternate.host for alternate in node.address.alternates))
    return host in (name.lower() for name in announced if name is not None)


# what there is


def serve_management(node: Node, request: HttpRequest) -> HttpContent | HttpStream | None:
    """The management paths; None if it is none of them."""
    match [unquote(part) for part in request.path.strip("/").split("/")]:
        case ["whoami"]:
            return _only_get(request, _whoami(node, request))
        case ["pools"]:
            return _only_get(request, _pools(node))
        case ["pools", "default"]:
            return _only_get(request, _cluster(node))
        case ["pools", "default", "nodeServices"]:
            return _only_get(request, HttpContent("application/json", node.map_without_bucket().text))
        case ["pools", "default", "b", name]:
            if (bucket := node.buckets.get(name)) is None:
                return HttpContent.of_json("Bucket not found", 404)
            return _only_get(request, HttpContent("application/json", node.map_of(bucket).text))
        case ["pools", "default", "bs", name] | ["pools", "default", "bucketsStreaming", name]:
            if (bucket := node.buckets.get(name)) is None:
                return HttpContent.of_json("Bucket not found", 404)
            return _streamed(request, _config_of(node, bucket))
        case ["pools", "default", "nodeServicesStreaming"]:
            return _streamed(request, lambda: node.map_without_bucket().text)
        case ["poolsStreaming", "default"]:
            return _streamed(request, lambda: _cluster(node).body)
        case ["pools", "default", "buckets"]:
            buckets = [_bucket(node, bucket) for bucket in node.buckets.values()]
            return _only_get(request, HttpContent.of_json(buckets))
        case ["pools", "default", "buckets", name, *rest]:
            if (bucket := node.buckets.get(name)) is None:
                return HttpContent("text/plain", b"Requested resource not found.\r\n", 404)
            if not rest:
                return _only_get(request, HttpContent.of_json(_bucket(node, bucket)))
            return _scopes(node, bucket, request, rest)
    return None


def _only_get(request: HttpRequest, content: HttpContent) -> HttpContent:
    return content if request.method == "GET" else http_error(405, "only GET")


def _streamed(request: HttpRequest, text: Callable[[], bytes | None]) -> HttpContent | HttpStream:
    if request.method != "GET":
        return http_error(405, "only GET")
    seconds = request.query.get("heartbeat", "0")
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 6):
        return http_error(400, "heartbeat must be a number of seconds")
    return HttpStream(text, float(seconds))


def _config_of(node: Node, bucket: ServedBucket) -> Callable[[], bytes | None]:
    """The config of a bucket while it exists; a new bucket of its name does not count."""
    return lambda: node.map_of(bucket).text if node.buckets.get(bucket.name) is bucket else None


def _whoami(node: Node, request: HttpRequest) -> HttpContent:
    return HttpContent.of_json({"id": request.user, "domain": "admin", "roles": [{"role": "admin"}]})


def _pools(node: Node) -> HttpContent:
    pools = [{"name": "default", "uri": "/pools/default", "streamingUri": "/poolsStreaming/default"}]
    return HttpContent.of_json({"implementationVersion": _VERSION, "isEnterprise": True, "pools": pools})


def _cluster(node: Node) -> HttpContent:
    nodes = []
    for described in json.loads(node.map_without_bucket().text)["nodesExt"]:
        services = described["services"]
        host = described.get("hostname", "$HOST")
        nodes.append(
            {
                "hostname": f"{host}:{services.get('mgmt', 0)}",
                "status": "healthy",
                "clusterMembership": "active",
                "version": _VERSION,
                "clusterCompatibility": _COMPATIBILITY,
                "services": ["kv"],
                "ports": {"direct": services.get("kv", 0)},
                "thisNode": bool(described.get("thisNode")),
            }
        )
    return HttpContent.of_json(
        {"name": "default", "clusterName": "", "nodes": nodes, "buckets": {"uri": "/pools/default/buckets"}}
    )


def _bucket(node: Node, bucket: ServedBucket) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(node.map_of(bucket).text)
    quota = bucket.store.settings.memory_quota
    shared = ("name", "uuid", "nodes", "bucketCapabilities", "vBucketServerMap")
    return {
        **{field: config[field] for field in shared if field in config},
        "bucketType": "membase",
        "storageBackend": "couchstore",
        "replicaNumber": config.get("vBucketServerMap", {}).get("numReplicas", 0),
        "quota": {"ram": quota, "rawRAM": quota},
    }


# scopes and collections; SDKs look for these very words in a refusal


class _Refusal(Exception):
    """A refusal: status and text."""


def _scopes(node: Node, bucket: ServedBucket, request: HttpRequest, rest: list[str]) -> HttpContent | None:
    method = request.method
    name = request.form.get("name", "")
    manifest = bucket.collections.manifest.to_json()
    keeps_history = bucket.store.settings.keeps_history
    try:
        match rest:
            case ["scopes"] if method == "GET":
                return HttpContent.of_json(_with_defaults(manifest, keeps_history))
            case ["scopes", "@ensureManifest", uid] if method == "POST":
                return _ensured(bucket, uid)
            case ["scopes"] if method == "POST":
                _create_scope(manifest, name)
            case ["scopes", scope] if method == "DELETE":
                manifest["scopes"].remove(_scope(manifest, scope, changes=True))
            case ["scopes", scope, "collections"] if method == "POST":
                collection = _new_collection(_scope(manifest, scope, changes=False), manifest, name)
                _set_properties(collection, request.form, keeps_history)
            case ["scopes", scope, "collections", name] if method == "PATCH":
                collection = _collection(_scope(manifest, scope, changes=False)["collections"], name)
                _set_properties(collection, request.form, keeps_history)
            case ["scopes", scope, "collections", name] if method == "DELETE":
                collections = _scope(manifest, scope, changes=False)["collections"]
                collections.remove(_collection(collections, name))
            case ["scopes", *_]:
                return http_error(405, f"{method} is not for this path")
            case _:
                return None
        return _apply(node, bucket, manifest)
    except _Refusal as refusal:
        status, text = refusal.args
        return HttpContent.of_json({"errors": {"_": text}}, status)


def _history(text: str, keeps_history: bool) -> bool:
    if text == "true" and not keeps_history:
        raise _Refusal(400, "history is not kept by this server")
    if text not in ("true", "false"):
        raise _Refusal(400, "history must be true or false")
    return text == "true"


def _with_defaults(manifest: dict[str, Any], keeps_history: bool) -> dict[str, Any]:
    """Over HTTP every collection has all its fields; a TTL of 0 in the manifest ("never") is -1 there."""
    for scope in manifest["scopes"]:
        for collection in scope["collections"]:
            seconds = collection.get("maxTTL")
            collection["maxTTL"] = 0 if seconds is None else seconds or -1
            collection["history"] = keeps_history and collection.get("history", True)
    return manifest


def _ensured(bucket: ServedBucket, uid: str) -> HttpContent:
    if not _is_hex(uid) or int(uid, 16) > bucket.collections.manifest.uid:
        raise _Refusal(503, f"the bucket has no manifest {uid} yet")
    return HttpContent.of_json("ok")


def _is_hex(text: str) -> bool:
    return 0 < len(text) <= 16 and all(letter in "0123456789abcdefABCDEF" for letter in text)


def _scope(manifest: dict[str, Any], name: str, *, changes: bool) -> dict[str, Any]:
    if changes and name == DEFAULT:
        raise _Refusal(400, "Deleting _default scope is not allowed")
    scope: dict[str, Any] | None = next((s for s in manifest["scopes"] if s["name"] == name), None)
    if scope is None:
        raise _Refusal(404, f"Scope with name {name!r} is not found")
    return scope


def _collection(collections: list[dict[str, Any]], name: str) -> dict[str, Any]:
    collection = next((c for c in collections if c["name"] == name), None)
    if collection is None:
        raise _Refusal(404, f"Collection with name {name!r} is not found")
    return collection


def _create_scope(manifest: dict[str, Any], name: str) -> None:
    _check_name(name)
    if any(scope["name"] == name for scope in manifest["scopes"]):
        raise _Refusal(400, f"Scope with name {name!r} already exists")
    manifest["scopes"].append({"name": name, "uid": _free_id(manifest), "collections": []})


def _new_collection(scope: dict[str, Any], manifest: dict[str, Any], name: str) -> dict[str, Any]:
    _check_name(name)
    if any(collection["name"] == name for collection in scope["collections"]):
        raise _Refusal(400, f"Collection with name {name!r} in scope {scope['name']!r} already exists")
    collection: dict[str, Any] = {"name": name, "uid": _free_id(manifest)}
    scope["collections"].append(collection)
    return collection


def _set_properties(collection: dict[str, Any], form: dict[str, str], keeps_history: bool) -> None:
    """Set what a form says about a collection; the rest stays."""
    if text := form.get("maxTTL", ""):
        digits = text.removeprefix("-")
        seconds = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 11 else -2
        if not -1 <= seconds <= _MAX_TTL:
            raise _Refusal(400, f"maxTTL must be an integer from -1 to {_MAX_TTL}")
        collection["maxTTL"] = max(seconds, 0)
        if not seconds:  # the bucket's setting, which is none
            del collection["maxTTL"]
    if "history" in form:
        collection["history"] = _history(form["history"], keeps_history)


def _check_name(name: str) -> None:
    if not name:
        raise _Refusal(400, "name must be given")
    if not is_legal_name(name) or name.startswith(("_", "%")):
        raise _Refusal(
            400,
            "Can only contain characters A-Z, a-z, 0-9 and the following symbols _ - %, "
            "and must not begin with _ or %",
        )


def _free_id(manifest: dict[str, Any]) -> str:
    """An id above all in use, and above those that an earlier manifest may have had."""
    members = [member for scope in manifest["scopes"] for member in (scope, *scope["collections"])]
    return f"{max(8 + int(manifest['uid'], 16), *(int(member['uid'], 16) for member in members)) + 1:x}"


def _apply(node: Node, bucket: ServedBucket, manifest: dict[str, Any]) -> HttpContent:
    """Apply a new manifest; the key-value front end knows it when the answer goes out."""
    if node.fenced:
        raise _Refusal(503, "the node waits for its cluster map")
    if bucket.map is not None and len(json.loads(bucket.map.text).get("nodesExt", [])) > 1:
        raise _Refusal(503, "this node is one of several, and changes only itself: use tailrace collections")
    manifest["uid"] = f"{int(manifest['uid'], 16) + 1:x}"
    try:
        bucket.store.set_manifest(json.dumps(manifest).encode())
    except DocumentRefused as error:
        raise _Refusal(400, str(error)) from None
    bucket.collections.reload()
    return HttpContent.of_json({"uid": manifest["uid"]})
