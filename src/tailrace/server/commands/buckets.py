"""The cluster map, and what TAP readers leave behind.

Rules: docs/spec/servers.md#known-version, docs/spec/servers.md#order-of-configs,
docs/spec/header.md#other-commands, docs/spec/tap.md#change-of-the-filter.
"""

from __future__ import annotations

import json
import re

from ...errors import MalformedMessage
from ...wire import admin
from ...wire.codes import Feature, Status
from ..call import Call, Refused, Reply, command
from ..served_map import ServedMap

_UUID = re.compile(r"[0-9a-f]{1,64}", re.ASCII)


@command(admin.GetClusterConfig, needs_bucket=False)
def get_cluster_config(call: Call[admin.GetClusterConfig]) -> Reply:
    """The bucket's map, or the global one for a peer that could have selected a bucket and has not."""
    session, known = call.session, call.request.known_version()
    waits = Feature.SELECT_BUCKET in session.features and not session.bucket_selected
    if session.bucket is None or waits:
        current = call.node.map_without_bucket()
    else:
        current = call.node.map_of(session.bucket)
        session.known_map = max(current.version, known or current.version)
    if known is not None and known >= current.version:
        return call.success()
    value, datatype = current.shown_to(session.granted)
    return call.success(value=value, datatype=datatype)


@command(admin.SetClusterConfig, needs_bucket=False)
def set_cluster_config(call: Call[admin.SetClusterConfig]) -> Reply:
    """Takes the coordinator's map; one that is older than the current one is refused."""
    request, node = call.request, call.node
    try:
        content = json.loads(request.value)
    except (ValueError, RecursionError):
        raise MalformedMessage("the cluster map is not JSON") from None
    # it must never reach a client: docs/spec/bootstrap.md#config-that-kills
    if not isinstance(content, dict) or not isinstance(content.get("nodesExt"), list):
        raise MalformedMessage("a cluster map must have a list nodesExt")
    if (content.get("revEpoch"), content.get("rev")) != (request.epoch, request.revision):
        raise MalformedMessage("the cluster map has another revision than the request")
    name = request.key.decode("utf-8", "replace")
    new = ServedMap(request.epoch, request.revision, request.value)
    if name and name not in node.buckets:
        raise Refused(Status.KEY_ENOENT, "there is no such bucket")
    current = node.buckets[name].map if name else node.global_map
    if current is not None and new.version < current.version:
        raise Refused(Status.ERANGE, f"the node has revision {current.epoch}.{current.rev}")
    node.set_map(name, new)
    uuid = content.get("uuid")
    if name and isinstance(uuid, str) and _UUID.fullmatch(uuid):
        # kept, so that readers recognise the bucket when the node starts and nobody gives it a map
        node.buckets[name].store.set_uuid(uuid)
    return call.success()


@command(admin.DeregisterTapClient)
def deregister_tap_client(call: Call[admin.DeregisterTapClient]) -> Reply:
    """Always a success."""
    call.bucket.tap.deregister(call.request.key.decode("utf-8", "backslashreplace"))
    return call.success()


@command(admin.ChangeVbFilter)
def change_vb_filter(call: Call[admin.ChangeVbFilter]) -> Reply:
    """Changes the vbuckets of a TAP reader that is connected."""
    client = call.bucket.tap.get(call.request.key.decode("utf-8", "backslashreplace"))
    if client is None or client.producer is None:
        raise Refused(Status.EINVAL, "no TAP reader of that name is connected")
    client.producer.change_filter(call.request.filter)
    return call.success()
