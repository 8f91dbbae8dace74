"""Which node has which vbucket: the cluster map, and the hash that finds a key's vbucket.

Rules: docs/spec/bootstrap.md#cluster-config, docs/spec/bootstrap.md#key-to-vbucket,
docs/spec/servers.md#networks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from ..connstr import Address
from ..errors import ConnectError, RemoteProtocolError
from ..units import MAX_VBUCKETS

__all__ = ["AUTO", "DEFAULT", "MAX_NODES", "ClusterMap", "MapContext", "networks_in", "vbucket_of"]

MAX_NODES = 1_024
AUTO, DEFAULT, EXTERNAL = "auto", "default", "external"
_ANY_HOST = "$HOST"


@dataclass(frozen=True, slots=True)
class MapContext:
    """How we reached a cluster, which decides which of a map's addresses are meant for us."""

    tls: bool = False
    network: str = AUTO
    seeds: tuple[Address, ...] = ()


_PLAIN = MapContext()


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
    replicas: tuple[tuple[int, ...], ...] = ()
    """By vbucket, the indices of the nodes that should have a copy; -1 where none has it now."""
    uuid: str = ""
    """The bucket's UUID, a new one if it is deleted and created again. Old servers give none."""
    network: str = DEFAULT
    is_ephemeral: bool = False
    """Nothing of the bucket is ever on disk."""

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

    def replicas_of(self, vbucket: int) -> list[Address | None]:
        """The nodes that should have a copy of the vbucket; None for one that no node has now."""
        chain = self.replicas[vbucket] if self.replicas else ()
        return [self.nodes[index] if index >= 0 else None for index in chain]

    @classmethod
    def parse(cls, text: bytes, asked: Address, context: MapContext = _PLAIN) -> ClusterMap | None:
        """A map as a server sends it; ``asked`` stands in for a host that it leaves out.

        None if the bucket has no vbuckets yet ("not ready"). Unknown members are ignored; those that we need
        must make sense, or `RemoteProtocolError` says which doesn't.
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
        listed = _list(server_map.get("serverList"), "serverList")
        if not 1 <= len(listed) <= MAX_NODES:
            raise RemoteProtocolError(f"the cluster map has {len(listed)} nodes, not 1 to {MAX_NODES}")
        extended = [_object(entry, "nodesExt") for entry in _list(config.get("nodesExt", []), "nodesExt")]
        described = [
            _described(_address(entry, asked), index, extended) for index, entry in enumerate(listed)
        ]
        network = _choose_network(described, context)
        chains = _chains(server_map["vBucketMap"], len(listed))
        return cls(
            _integer(config.get("revEpoch", 0)),
            _integer(config.get("rev", 0)),
            tuple(node.reached_by(network, asked, tls=context.tls) for node in described),
            tuple(chain[0] if chain else -1 for chain in chains),
            tuple(chain[1:] for chain in chains),
            _text(config.get("uuid", ""), "uuid"),
            network,
            config.get("bucketType") == "ephemeral",
        )


def networks_in(config: bytes) -> tuple[str, ...]:
    """The networks other than the default one that a map names; `ClusterMap.parse` must have accepted it."""
    entries = json.loads(config).get("nodesExt", [])
    return tuple(dict.fromkeys(name for entry in entries for name in entry.get("alternateAddresses", {})))


@dataclass(frozen=True, slots=True)
class _DescribedNode:
    """A node of ``serverList``, and its entry in ``nodesExt`` if it has one."""

    address: Address
    extended: dict[str, Any] | None
    is_alone: bool

    def reached_by(self, network: str, asked: Address, *, tls: bool) -> Address:
        """The address of the node's documents on a network."""
        if network != DEFAULT:
            return self._on(network, tls=tls)
        if not tls:
            return self.address
        port = None if self.extended is None else _services(self.extended).get("kvSSL")
        if port is None:
            # a lone node that names no TLS port: it is the one that we talk to
            return asked if self.is_alone else self.address
        return Address(self.address.host, _port(port))

    def _on(self, network: str, *, tls: bool) -> Address:
        entry = self.networks().get(network)
        if entry is None:
            raise ConnectError(f"{self.address} has no address on the network {network!r}")
        host = _text(entry.get("hostname", ""), "hostname")
        assert self.extended is not None
        ports = _object(entry["ports"], "ports") if "ports" in entry else _services(self.extended)
        service = "kvSSL" if tls else "kv"
        if not host or service not in ports:
            raise ConnectError(f"{self.address} has no {service} on the network {network!r}")
        return Address(host, _port(ports[service]))

    def networks(self) -> dict[str, dict[str, Any]]:
        """Its addresses on other networks."""
        if self.extended is None:
            return {}
        alternates = _object(self.extended.get("alternateAddresses", {}), "alternateAddresses")
        return {name: _object(entry, "alternateAddresses") for name, entry in alternates.items()}

    def is_at(self, network: str, seeds: tuple[Address, ...]) -> bool:
        """Whether one of the seeds is this node's address on a network, for documents or management."""
        if self.extended is None:
            return self.address in seeds
        services = _services(self.extended)
        host: object = self.address.host
        ports = services
        if network != DEFAULT:
            entry = self.networks()[network]
            host = entry.get("hostname")
            ports = _object(entry["ports"], "ports") if "ports" in entry else services
        known = {ports.get(name) for name in ("kv", "kvSSL", "mgmt", "mgmtSSL")}
        if network == DEFAULT:
            known.add(self.address.port)
        return any(seed.host == host and seed.port in known for seed in seeds)


def _described(node: Address, index: int, extended: list[dict[str, Any]]) -> _DescribedNode:
    """A node with its entry in ``nodesExt``: found by host and port, by port if the entry leaves its host
    out, or by index.
    """
    same_port = [entry for entry in extended if _services(entry).get("kv") == node.port]
    fitting = [entry for entry in same_port if entry.get("hostname") == node.host]
    fitting += [entry for entry in same_port if entry.get("hostname", _ANY_HOST) == _ANY_HOST]
    if not fitting and index < len(extended):
        fitting = [extended[index]]
    return _DescribedNode(node, fitting[0] if fitting else None, len(extended) <= 1)


def _choose_network(described: list[_DescribedNode], context: MapContext) -> str:
    """The network asked for, or the one that the seeds are on, or, if no node is a seed, the external one."""
    names = dict.fromkeys(name for node in described for name in node.networks())
    if context.network != AUTO:
        if context.network != DEFAULT and context.network not in names:
            known = ", ".join([DEFAULT, *names])
            raise ConnectError(f"the cluster has no network {context.network!r}, it has {known}")
        return context.network
    for node in described:
        for network in (DEFAULT, *node.networks()):
            if node.is_at(network, context.seeds):
                return network
    return EXTERNAL if EXTERNAL in names else DEFAULT


def _services(extended: dict[str, Any]) -> dict[str, Any]:
    return _object(extended.get("services", {}), "services")


def _chains(vbucket_map: object, node_count: int) -> list[tuple[int, ...]]:
    """By vbucket: the active node, then the replicas."""
    rows = _list(vbucket_map, "vBucketMap")
    if len(rows) > MAX_VBUCKETS:
        raise RemoteProtocolError(f"the cluster map has {len(rows)} vbuckets, more than {MAX_VBUCKETS}")
    if {*map(type, rows)} <= {list}:
        flat = [index for row in rows for index in row]
        is_short = max(map(len, rows), default=0) <= MAX_NODES
        if is_short and {*map(type, flat)} <= {int} and {*flat} <= {*range(-1, node_count)}:
            return list(map(tuple, rows))
    # something is wrong with it: say what
    chains = []
    for row in rows:
        chain = tuple(_integer(index) for index in _list(row, "vBucketMap"))
        if len(chain) > MAX_NODES or not all(-1 <= index < node_count for index in chain):
            raise RemoteProtocolError(f"the cluster map names node {max(chain)} of {node_count}")
        chains.append(chain)
    return chains


def _address(text: object, asked: Address) -> Address:
    if not isinstance(text, str) or len(text) > 300:
        raise RemoteProtocolError("the cluster map has a node that is not a host and a port")
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


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > 300:
        raise RemoteProtocolError(f"{name} of the cluster map is not a name")
    return value


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"{name} of the cluster map is not an object")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RemoteProtocolError(f"{name} of the cluster map is not a list")
    return value
