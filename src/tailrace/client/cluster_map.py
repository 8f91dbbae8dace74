"""Which node has which vbucket: the cluster map, and the hash that finds a key's vbucket.

Rules: docs/spec/bootstrap.md#cluster-config, docs/spec/bootstrap.md#key-to-vbucket.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from ..connstr import Address
from ..errors import RemoteProtocolError
from ..units import MAX_VBUCKETS

__all__ = ["MAX_NODES", "ClusterMap", "vbucket_of"]

MAX_NODES = 1_024
_ANY_HOST = "$HOST"


def vbucket_of(key: bytes, count: int) -> int:
    """The vbucket of a key (without its collection prefix) in a bucket of ``count`` vbuckets."""
    return ((crc32(key) >> 16) & 0x7FFF) % count


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """One revision of the map. A vbucket without an active node has node -1."""

    epoch: int
    revision: int
    nodes: tuple[Address, ...]
    active: tuple[int, ...]
    """By vbucket, the index of its node in ``nodes``."""

    @property
    def version(self) -> tuple[int, int]:
        """Maps are ordered by this; only a greater one is news."""
        return self.epoch, self.revision

    @property
    def vbucket_count(self) -> int:
        return len(self.active)

    def node_of(self, vbucket: int) -> Address | None:
        """The node that has the vbucket, if one has it."""
        index = self.active[vbucket]
        return self.nodes[index] if index >= 0 else None

    def is_newer_than(self, other: ClusterMap | None) -> bool:
        """Whether this map should replace the other."""
        return other is None or self.version > other.version

    @classmethod
    def single(cls, node: Address, vbucket_count: int) -> ClusterMap:
        """The map of a lone server that has none of its own."""
        return cls(0, 0, (node,), (0,) * vbucket_count)

    @classmethod
    def parse(cls, text: bytes, asked: Address, *, tls: bool = False) -> ClusterMap | None:
        """A map as a server sends it; ``asked`` stands in for a host that it leaves out.

        None if the bucket has no vbuckets yet ("not ready"). Members that we don't know are ignored, what we
        need must make sense: `RemoteProtocolError` says what doesn't.
        """
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            raise RemoteProtocolError("the cluster map is not JSON") from None
        if not isinstance(config, dict):
            raise RemoteProtocolError("the cluster map is not a JSON object")
        server_map = config.get("vBucketServerMap")
        if server_map is None or not _object(server_map, "vBucketServerMap").get("vBucketMap"):
            return None
        nodes = _nodes(server_map, config, asked, tls=tls)
        active = _active(server_map["vBucketMap"], len(nodes))
        return cls(_integer(config.get("revEpoch", 0)), _integer(config.get("rev", 0)), nodes, active)


def _nodes(
    server_map: dict[str, Any], config: dict[str, Any], asked: Address, *, tls: bool
) -> tuple[Address, ...]:
    listed = _list(server_map.get("serverList"), "serverList")
    if not 1 <= len(listed) <= MAX_NODES:
        raise RemoteProtocolError(f"the cluster map has {len(listed)} nodes, not 1 to {MAX_NODES}")
    nodes = [_address(entry, asked) for entry in listed]
    if not tls:
        return tuple(nodes)
    extended = [_object(entry, "nodesExt") for entry in _list(config.get("nodesExt", []), "nodesExt")]
    return tuple(_tls_address(node, index, extended, asked) for index, node in enumerate(nodes))


def _tls_address(node: Address, index: int, extended: list[dict[str, Any]], asked: Address) -> Address:
    """The same node's TLS port, which stands in another list: found by host and port, or by place."""
    fitting = [
        entry
        for entry in extended
        if _services(entry).get("kv") == node.port
        and entry.get("hostname", node.host) in (node.host, _ANY_HOST)
    ]
    if not fitting and index < len(extended):
        fitting = [extended[index]]
    port = _services(fitting[0]).get("kvSSL") if fitting else None
    if port is None:
        # a lone node that doesn't tell: it is the one that we talk to
        return asked if len(extended) <= 1 else node
    return Address(node.host, _port(port))


def _services(extended: dict[str, Any]) -> dict[str, Any]:
    return _object(extended.get("services", {}), "services")


def _active(vbucket_map: object, node_count: int) -> tuple[int, ...]:
    rows = _list(vbucket_map, "vBucketMap")
    if len(rows) > MAX_VBUCKETS:
        raise RemoteProtocolError(f"the cluster map has {len(rows)} vbuckets, more than {MAX_VBUCKETS}")
    active = []
    for row in rows:
        chain = _list(row, "vBucketMap")
        index = _integer(chain[0]) if chain else -1
        if not -1 <= index < node_count:
            raise RemoteProtocolError(f"the cluster map names node {index} of {node_count}")
        active.append(index)
    return tuple(active)


def _address(text: object, asked: Address) -> Address:
    if not isinstance(text, str) or len(text) > 300:
        raise RemoteProtocolError("the cluster map has a node that is no host and port")
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise RemoteProtocolError(f"the cluster map has a node without a port: {text[:100]!r}")
    host = host.removeprefix("[").removesuffix("]")
    return Address(asked.host if host in ("", _ANY_HOST) else host, _port(int(port)))


def _port(port: object) -> int:
    number = _integer(port)
    if not 1 <= number <= 0xFFFF:
        raise RemoteProtocolError(f"the cluster map has port {number}")
    return number


def _integer(value: object) -> int:
    if type(value) is not int or abs(value) >= 1 << 63:
        raise RemoteProtocolError("the cluster map has something else where an integer belongs")
    return value


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"{name} of the cluster map is not an object")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RemoteProtocolError(f"{name} of the cluster map is not a list")
    return value
