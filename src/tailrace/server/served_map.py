"""The cluster map: which node has which vbucket, as the JSON that clients read.

A node alone makes its own map from the states of its vbuckets; in a cluster the coordinator sets one on every
node (SET_CLUSTER_CONFIG), and that text is handed out as it came. Maps are ordered by (epoch, rev), and
clients only take a greater one: a node's own maps have epoch 1 and a rev that begins at the time of its
start, so that a restarted node is never behind itself.

Rules: docs/spec/bootstrap.md#cluster-config, docs/spec/servers.md#order-of-configs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from ..errors import UsageError
from ..snappy import deflate
from ..units import host_and_port
from ..wire.codes import Datatype, Feature
from .features import GrantedFeatures

__all__ = [
    "OWN_EPOCH",
    "AlternateAddress",
    "NodeAddress",
    "ServedMap",
    "announces_history",
    "bucket_map",
    "global_map",
]

OWN_EPOCH = 1

_HOST = "$HOST"
"""The address that the client connected to: right for a server that does not know its name."""

_ALTERNATE = re.compile(
    r"(?P<network>[A-Za-z0-9_-]{1,50})=(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})"
    r"(?::(?P<port>[0-9]{1,5})(?::(?P<tls_port>[0-9]{1,5}))?)?",
    re.ASCII,
)

_CAPABILITIES = (
    "collections",
    "dcp",
    "cccp",
    "xattr",
    "nodesExt",
    "couchapi",
    "durableWrite",
    "tombstonedUserXAttrs",
    "rangeScan",
    "subdoc.AccessDeleted",
    "subdoc.DocumentMacroSupport",
    "subdoc.ReplaceBodyWithXattr",
    "subdoc.ReplicaRead",
    "subdoc.ReviveDocument",
)

_HISTORY = "nonDedupedHistory"  # of buckets with a retention


@dataclass(frozen=True, slots=True)
class AlternateAddress:
    """Where a node is reached on another network; a port that is not given is the one that it listens on."""

    network: str
    host: str
    port: int | None = None
    tls_port: int | None = None

    @classmethod
    def parse(cls, text: str) -> AlternateAddress:
        """From ``NETWORK=HOST[:PORT[:TLS_PORT]]``; an IPv6 address is in brackets."""
        match = _ALTERNATE.fullmatch(text)
        if match is None or match["network"] in ("default", "auto"):
            raise UsageError(
                f"{text[:100]!r} is not an address on another network, write NETWORK=HOST[:PORT[:TLS_PORT]], "
                "as in external=node1.example.com:31210:31207"
            )
        ports = [None if digits is None else int(digits) for digits in (match["port"], match["tls_port"])]
        if not all(port is None or 0 < port < 1 << 16 for port in ports):
            raise UsageError(f"{text[:100]!r} has a port that is not one of 1 to 65535")
        return cls(match["network"], match["host"].removeprefix("[").removesuffix("]"), *ports)

    def to_json(self) -> dict[str, Any]:
        """Its entry in nodesExt. Management has the same port as documents, as on the node itself."""
        ports: dict[str, int] = {}
        if self.port is not None:
            ports |= {"kv": self.port, "mgmt": self.port}
        if self.tls_port is not None:
            ports |= {"kvSSL": self.tls_port, "mgmtSSL": self.tls_port}
        return {"hostname": self.host, "ports": ports} if ports else {"hostname": self.host}


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node listens; without a host it is the address that the client connected to."""

    port: int
    tls_port: int | None = None
    host: str | None = None
    web_port: int | None = None
    alternates: tuple[AlternateAddress, ...] = ()

    @property
    def mgmt_port(self) -> int:
        """Where management is served: on the web port, or beside the binary protocol. Clients reject a config
        without such a port, or with the same one for two nodes of a host.
        """
        return self.port if self.web_port is None else self.web_port

    def services(self) -> dict[str, int]:
        """Ports by service, as nodesExt has them."""
        ports = {"kv": self.port, "mgmt": self.mgmt_port}
        if self.tls_port is not None:
            ports |= {"kvSSL": self.tls_port, "mgmtSSL": self.tls_port}
        return ports


@dataclass(frozen=True, slots=True)
class ServedMap:
    """A map's version and its text."""

    epoch: int
    rev: int
    text: bytes = field(repr=False)

    @property
    def version(self) -> tuple[int, int]:
        """What maps are ordered by."""
        return self.epoch, self.rev

    def is_known(self, known: tuple[int, int] | None) -> bool:
        """Whether a client that has that version does not need this one."""
        return known is not None and known >= self.version

    def shown_to(self, granted: GrantedFeatures) -> tuple[bytes, int]:
        """Value and datatype of a message with the map: docs/spec/servers.md#known-version."""
        datatype = Datatype.JSON & granted.datatypes
        if Feature.SNAPPY_EVERYWHERE in granted.codes:
            return deflate(self.text), datatype | Datatype.SNAPPY
        return self.text, datatype

    def without_bucket(self) -> ServedMap:
        """The nodes of a bucket's map, for connections without a bucket."""
        content = {"rev": self.rev, "revEpoch": self.epoch, "nodesExt": json.loads(self.text)["nodesExt"]}
        return ServedMap(self.epoch, self.rev, _text(content))


def announces_history(text: bytes) -> bool:
    """Whether a bucket's map says that every version is kept for a while."""
    return _HISTORY in json.loads(text).get("bucketCapabilities", ())


def bucket_map(
    name: str,
    nodes: Sequence[NodeAddress],
    owners: Sequence[Sequence[int]],
    *,
    epoch: int = OWN_EPOCH,
    rev: int,
    this_node: int | None = None,
    uuid: str = "",
    keeps_history: bool = False,
) -> ServedMap:
    """The map of a bucket; ``owners`` has for each vbucket the node of its active and of its replicas (-1:
    nobody). Without a ``uuid`` the bucket is known by its name alone.
    """
    hosts = [node.host or _HOST for node in nodes]
    content = {
        "rev": rev,
        "revEpoch": epoch,
        "name": name,
        "uuid": uuid or uuid5(NAMESPACE_URL, f"tailrace:{name}").hex,  # the same on every node
        "nodeLocator": "vbucket",
        "bucketCapabilities": [*_CAPABILITIES, *([_HISTORY] if keeps_history else [])],
        "nodes": [
            {"hostname": host_and_port(host, node.mgmt_port), "ports": {"direct": node.port}}
            for host, node in zip(hosts, nodes, strict=True)
        ],
        "nodesExt": _nodes_ext(nodes, this_node),
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": max(0, max((len(chain) for chain in owners), default=1) - 1),
            "serverList": [host_and_port(host, node.port) for host, node in zip(hosts, nodes, strict=True)],
            "vBucketMap": [list(chain) for chain in owners],
        },
    }
    return ServedMap(epoch, rev, _text(content))


def global_map(
    nodes: Sequence[NodeAddress], *, epoch: int = OWN_EPOCH, rev: int, this_node: int | None = None
) -> ServedMap:
    """The map for a connection without a bucket."""
    content = {"rev": rev, "revEpoch": epoch, "nodesExt": _nodes_ext(nodes, this_node)}
    return ServedMap(epoch, rev, _text(content))


def _nodes_ext(nodes: Sequence[NodeAddress], this_node: int | None) -> list[dict[str, Any]]:
    rows = []
    for at, node in enumerate(nodes):
        row: dict[str, Any] = {"services": node.services()}
        if at == this_node:
            row["thisNode"] = True
        if node.host is not None:
            row["hostname"] = node.host
        if node.alternates:
            row["alternateAddresses"] = {other.network: other.to_json() for other in node.alternates}
        rows.append(row)
    return rows


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
