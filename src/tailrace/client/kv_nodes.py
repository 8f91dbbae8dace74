"""The nodes of a bucket as the key-value client knows them: the cluster map and a connection to each."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence

from ..connstr import Address, ConnectionString
from ..errors import ConnectError, StatusError, UsageError
from ..protocol.handshake import Introduction
from ..protocol.script import ask
from ..wire.admin import GetAllVbSeqnos, GetClusterConfig
from ..wire.codes import Status
from .cluster_map import ClusterMap, MapContext
from .kv_connection import KvConnection
from .srv_records import find_seeds

__all__ = ["KvNodes"]


class KvNodes:
    """The cluster map and the connections, each made when needed, and again after it was lost."""

    def __init__(
        self,
        where: ConnectionString,
        introduction: Introduction,
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        self._where = where
        self._introduction = introduction
        self._tls = tls
        self._timeout_s = timeout_s
        self._connections: dict[Address, KvConnection] = {}
        self._seeds = find_seeds(where)
        self._network = where.network
        try:
            self.map = self._bootstrap()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # connections

    def connection(self, address: Address) -> KvConnection:
        """The connection to a node."""
        made = self._connections.get(address)
        return self._connect(address) if made is None or made.is_closed else made

    def connection_for(self, vbucket: int) -> KvConnection:
        """The connection to the node that has a vbucket."""
        self.check(vbucket)
        address = self.map.node_of(vbucket)
        if address is None:
            raise StatusError(Status.NOT_MY_VBUCKET, f"no node has vbucket {vbucket}")
        return self.connection(address)

    def anywhere(self) -> KvConnection:
        """A connection to any node, for what every node can answer: the first one that can be reached."""
        for address in self.map.nodes[:-1]:
            with contextlib.suppress(ConnectError):
                return self.connection(address)
        return self.connection(self.map.nodes[-1])

    def everywhere(self) -> list[KvConnection]:
        """A connection to each node."""
        return [self.connection(address) for address in self.map.nodes]

    def shares(self, vbuckets: Sequence[int] | None) -> list[tuple[KvConnection, Sequence[int]]]:
        """Nodes and which of the vbuckets they have; None means all: every node, with an empty list."""
        if vbuckets is None:
            return [(connection, ()) for connection in self.everywhere()]
        by_node: dict[KvConnection, list[int]] = {}
        for vbucket in vbuckets:
            by_node.setdefault(self.connection_for(vbucket), []).append(vbucket)
        return list(by_node.items())

    def check(self, vbucket: int) -> None:
        """Raise `UsageError` if there is no such vbucket."""
        if not 0 <= vbucket < self.map.vbucket_count:
            raise UsageError(f"there is no vbucket {vbucket}, the last is {self.map.vbucket_count - 1}")

    @property
    def is_alone(self) -> bool:
        """Whether there is only one node, so that no other can have taken over."""
        return len(self.map.nodes) == 1

    # the map

    def refresh(self) -> None:
        """Ask the nodes for a newer map."""
        for address in dict.fromkeys((*self.map.nodes, *self._seeds)):
            try:
                newer = self._ask_for_map(address)
            except ConnectError:
                continue
            if newer is not None and newer.is_newer_than(self.map):
                self.map = newer
                return

    def _ask_for_map(self, address: Address) -> ClusterMap | None:
        connection = self._connections.get(address)
        if connection is None or connection.is_closed:
            return self._first_map(self._connect(address))
        try:
            answer = connection.run(ask(GetClusterConfig(), "get cluster config"))
        except StatusError:
            return None  # the node has no map, or none now
        return self._parsed(answer.value, address)

    def _bootstrap(self) -> ClusterMap:
        reasons = []
        for address in self._seeds:
            try:
                connection = self._connect(address)
            except ConnectError as error:
                reasons.append(str(error))
                if len(self._seeds) == 1:
                    raise
                continue
            first = self._first_map(connection)
            if first is not None:
                return first
            reasons.append(f"{address} has no cluster map yet")
        raise ConnectError("; ".join(reasons))

    def _first_map(self, connection: KvConnection) -> ClusterMap | None:
        config = connection.handshake.config
        if config is None:
            # an old server without maps stands alone; its seqnos tell how many vbuckets it has
            answer = connection.run(ask(GetAllVbSeqnos(), "get all vb seqnos"))
            count = max(answer.seqnos, default=-1) + 1
            return ClusterMap.single(connection.address, count) if count else None
        return self._parsed(config, connection.address)

    def _parsed(self, config: bytes, asked: Address) -> ClusterMap | None:
        offered = ClusterMap.parse(config, asked, MapContext(self._where.tls, self._network, self._seeds))
        if offered is not None:
            self._network = offered.network  # chosen with the first map, and kept
        return offered

    def _connect(self, address: Address) -> KvConnection:
        made = KvConnection(
            address,
            self._introduction,
            tls=self._tls,
            timeout_s=self._timeout_s,
            connect_timeout_s=self._where.connect_timeout_s,
        )
        self._connections[address] = made
        return made
