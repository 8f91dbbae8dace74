"""Move vbuckets from one node to another while clients write and read: `tailrace takeover`.

For nodes without a coordinator; in a cluster a rebalance does it. The takeover itself is the nodes' work: in
DCP the target asks the source for the vbuckets; in TAP somebody has to carry the source's stream to the
target, and that is done here. The steps:

1. A vbucket that both have active becomes dead at the target, where it must be empty: two nodes become one
   bucket. The same goes for a vbucket that is active on one of the two and on a third node in their maps.
2. The takeover. The source gives a vbucket up, durably, before the target learns that it is active.
3. All nodes get the new map, and pass it on to their clients.

If the takeover breaks off, what has not become active at the target becomes active at the source again. First
the target releases it: it takes nothing more from the stream, and its vbucket is dead. Then the source must
have seen the end of the stream, after which it gives nothing up any more. If either can't be asked, nothing
is made active; the same command continues from there when the node is back.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from time import sleep
from types import TracebackType
from typing import Any, TypeVar

from .. import paths
from ..client.cluster_map import ClusterMap, MapContext
from ..client.kv import stats
from ..client.kv_connection import KvConnection
from ..client.tls import TlsOptions, with_url
from ..clock import SYSTEM, Clock
from ..connstr import Address, ConnectionString
from ..errors import ClusterError, ConnectError, RemoteProtocolError, UsageError
from ..protocol.handshake import KV_FEATURES, REPLICA_FEATURES, Credentials, Introduction
from ..protocol.script import Script, ask
from ..server.served_map import OWN_EPOCH, NodeAddress, announces_history, bucket_map
from ..wire.admin import GetClusterConfig
from ..wire.codes import AddStreamFlag, Feature, TapConnectFlag, VBucketState
from ..wire.tap import TapConnect, TapConnectOptions
from .steering import Report, Steering

__all__ = ["DIALECTS", "Moved", "take_over"]

T = TypeVar("T")

DIALECTS = ("dcp", "tap")
PATIENCE_S = 120.0
"""How long a takeover may stand still."""

_TIMEOUT_S = 30.0
_LOOK_S = 0.05
_CARRY_BYTES = 1 << 18
_NAME = b"tailrace-takeover"
_CARRIED = tuple(feature for feature in REPLICA_FEATURES if feature != Feature.COLLECTIONS)
"""The features that let documents pass through unchanged."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a takeover has done."""

    vbuckets: list[int]
    """The vbuckets that are at the target now and were not before."""
    rev: int
    """The revision of the map that the nodes now have."""


@dataclass(frozen=True, slots=True)
class _Map:
    """Which node has which vbucket, and where the nodes are."""

    clients_map: ClusterMap
    nodes: list[NodeAddress]
    """The map's nodes, each with both ports."""
    keeps_history: bool


class _Node(Steering):
    """A node, over a connection of its own."""

    def __init__(self, where: ConnectionString, tls: TlsOptions | None) -> None:
        super().__init__(where.bucket)
        self.where = where
        self.address = where.addresses[0]
        self._trust = with_url(where, tls)
        self._tls = self._trust.context() if where.tls else None
        self.credentials = None
        if where.username is not None:
            self.credentials = Credentials(where.username, where.password or "")
        self._connection = self.connect(KV_FEATURES)

    def connect(self, features: tuple[int, ...]) -> KvConnection:
        """A connection past its handshake."""
        introduction = Introduction(
            "tailrace takeover", self.bucket, self.credentials, features, allow_plain=self.where.tls
        )
        return KvConnection(
            self.address,
            introduction,
            tls=self._tls,
            timeout_s=_TIMEOUT_S,
            connect_timeout_s=self.where.connect_timeout_s,
        )

    def _run(self, script: Script[T]) -> T:
        return self._connection.run(script)

    def __enter__(self) -> _Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def map(self) -> _Map:
        """The map that it gives to its clients."""
        text = self._run(ask(GetClusterConfig(), "get cluster config")).value
        plain, tls = (
            ClusterMap.parse(text, self.address, MapContext(tls=is_tls)) for is_tls in (False, True)
        )
        if plain is None or tls is None:
            raise RemoteProtocolError(f"{self.address} has no map of its vbuckets")
        pairs = zip(plain.nodes, tls.nodes, strict=True)
        nodes = [_place(plain_at, tls_at) for plain_at, tls_at in pairs]
        return _Map(plain, nodes, announces_history(text))

    def place(self, own_map: _Map) -> NodeAddress:
        """Its own entry in its map."""
        for node in own_map.nodes:
            port = node.tls_port if self.where.tls else node.port
            if (node.host, port) == (self.address.host, self.address.port):
                return node
        raise UsageError(f"{self.address} is not in its own map; is it another port of that node?")

    def order(self, vbuckets: list[int]) -> dict[str, Any]:
        """The order for another node to take these vbuckets over from this one."""
        made: dict[str, Any] = {
            "host": self.address.host,
            "port": self.address.port,
            "takeover": vbuckets,
        }
        if self.credentials is not None:
            made["username"] = self.credentials.username
            made["password"] = self.credentials.password
        if self.where.tls:
            made["tls"] = {"verify": self._trust.verify}
            if self._trust.ca_file is not None:
                # a CA file may have any text around its certificates
                made["tls"]["ca"] = (
                    paths.file(self._trust.ca_file, "the CA file", must_exist=True)
                    .read_bytes()
                    .decode("ascii", "ignore")
                )
        return made

    def takes_tap(self) -> bool:
        """Whether a TAP producer pushes changes to it."""
        figures = self._run(stats("tap")).items()
        return any(name.endswith(":type") and value == "consumer" for name, value in figures)

    def gives(self, vbuckets: Iterable[int]) -> bool:
        """Whether it may still give some of these up, to a node that takes them over by DCP."""
        figures = self._run(stats("dcp"))
        ends = tuple(f":stream_{number}_flags" for number in vbuckets)
        return any(int(figures[name]) & AddStreamFlag.TAKE_OVER for name in figures if name.endswith(ends))


def take_over(
    source: ConnectionString,
    target: ConnectionString,
    vbuckets: Iterable[int],
    *,
    dialect: str = "dcp",
    tls: TlsOptions | None = None,
    clock: Clock = SYSTEM,
) -> Moved:
    """Move vbuckets from the node ``source`` to the node ``target``, each the first of its connection string.

    Those that are at the target already stay there. `ClusterError` if some could not be moved. If the source
    is reached by TLS, the target uses TLS too, and trusts what ``tls`` or the source's connection string
    names, or its system's authorities.
    """
    if dialect not in DIALECTS:
        raise UsageError(f"{dialect!r} can't take over, write one of {', '.join(DIALECTS)}")
    if source.bucket != target.bucket:
        raise UsageError(f"a vbucket of {source.bucket!r} can't be one of {target.bucket!r}")
    with _Node(source, tls) as old, _Node(target, tls) as new:
        return _Takeover(old, new, dialect, tls, clock).run(sorted(set(vbuckets)))


class _Takeover:
    def __init__(self, old: _Node, new: _Node, dialect: str, tls: TlsOptions | None, clock: Clock) -> None:
        self._old, self._new = old, new
        self._dialect = dialect
        self._tls = tls
        self._clock = clock
        self._maps = old.map(), new.map()
        self._pair = [node.place(own_map) for node, own_map in zip((old, new), self._maps, strict=True)]
        if _at(self._pair[0]) == _at(self._pair[1]):
            raise UsageError("source and target are the same node")
        if any(own_map.clients_map.epoch > OWN_EPOCH for own_map in self._maps):
            raise UsageError("a node of a cluster gets its vbuckets by 'tailrace cluster rebalance'")
        counts = [own_map.clients_map.vbucket_count for own_map in self._maps]
        if counts[0] != counts[1]:
            raise UsageError(f"the source has {counts[0]} vbuckets and the target {counts[1]}")
        self._count = counts[0]

    def run(self, wanted: Sequence[int]) -> Moved:
        if not all(0 <= number < self._count for number in wanted):
            raise UsageError(f"the bucket has {self._count} vbuckets, 0 to {self._count - 1}")
        self._check_collections()
        moving = self._prepare(wanted)
        self._share_collections()
        left: list[int] = []
        if moving:
            left = self._move(moving)
        rev = self._tell_map()
        if left:
            raise ClusterError(f"{len(left)} of {len(moving)} vbuckets could not be moved and stay")
        return Moved(moving, rev)

    # before

    def _check_collections(self) -> None:
        if self._dialect == "tap":
            scopes = self._old.manifest()["scopes"]
            if {collection["uid"] for scope in scopes for collection in scope["collections"]} != {"0"}:
                raise UsageError("tap knows only the default collection; use --dialect dcp")

    def _share_collections(self) -> None:
        manifest = self._old.manifest()
        if int(manifest["uid"], 16) > int(self._new.manifest()["uid"], 16):
            self._new.set_manifest(manifest)

    def _prepare(self, wanted: Sequence[int]) -> list[int]:
        """Make sure that nothing is active twice; return the vbuckets to be moved."""
        here, there = self._old.report(), self._new.report()
        for name, report in (("source", here), ("target", there)):
            if any(self._is_foreign(row) for row in report.values()):
                raise UsageError(
                    f"the {name} receives vbuckets from other nodes, so something else directs it"
                )
        there = self._new.report([])  # ends what a killed command's takeover left
        spare = [(node, self._spare(report)) for node, report in ((self._old, here), (self._new, there))]
        twice = [number for number in here if _state(here, number) == _state(there, number) == "active"]
        for number in twice:
            if there[number]["high_seqno"]:
                raise UsageError(f"both nodes have vbucket {number} active, and the target has changes in it")
        broken = []
        moving = []
        for number in wanted:
            if _state(here, number) == "active":
                moving.append(number)
            elif _state(there, number) != "active":
                if _state(here, number) != "dead" or not here[number]["high_seqno"]:
                    raise UsageError(f"vbucket {number} is active at neither of the two")
                broken.append(number)
        for node, numbers in (*spare, (self._new, twice)):
            node.set_states(dict.fromkeys(numbers, VBucketState.DEAD))
        if broken:
            # left by a takeover that was not ours
            self._await_end(self._new.takes_tap, "something pushes changes to the target by tap")
            self._give_back(broken)
        return sorted([*moving, *broken])

    def _spare(self, report: Report) -> list[int]:
        """Vbuckets active on one of the two although a third node in its map has them active, too. They must
        be empty, and are marked as dead in the report.
        """
        owners = {number: next(iter(self._elsewhere(number)), None) for number in report}
        doubtful = {number: at for number, at in owners.items() if at and _state(report, number) == "active"}
        spare = []
        for at in dict.fromkeys(doubtful.values()):
            try:
                with _Node(self._way_to(self._nodes()[at]), self._tls) as other:
                    theirs = other.report()
            except ConnectError as error:
                raise UsageError(f"{at} may have some of the vbuckets active, too: {error}") from None
            spare += [
                vbucket
                for vbucket in doubtful
                if doubtful[vbucket] == at and _state(theirs, vbucket) == "active"
            ]
        for number in spare:
            if report[number]["high_seqno"]:
                raise UsageError(
                    f"{doubtful[number]} has vbucket {number} active, too, and both have changes"
                )
            report[number]["state"] = "dead"
        return spare

    def _is_foreign(self, row: dict[str, Any]) -> bool:
        """Whether a vbucket is received otherwise than by a takeover between the two."""
        ours = {str(address) for address in (self._old.address, self._new.address, *map(_at, self._pair))}
        return "source" in row and not (row["takeover"] and row["source"] in ours)

    def _await_end(self, goes_on: Callable[[], bool], what: str) -> None:
        """Wait until a takeover that broke off has ended, and nothing of it can still arrive."""
        deadline = self._clock.monotonic() + PATIENCE_S
        while goes_on():
            if self._clock.monotonic() > deadline:
                raise ClusterError(f"{what}, which has to end first; then run the same again")
            sleep(_LOOK_S)

    # the takeover

    def _move(self, moving: list[int]) -> list[int]:
        """Move them; return those that did not become active at the target, and are at the source again."""
        if self._dialect == "tap":
            self._by_tap(moving)
        else:
            self._by_dcp(moving)
        there = self._new.report()
        left = [number for number in moving if _state(there, number) != "active"]
        self._give_back(left)
        return left

    def _give_back(self, vbuckets: Sequence[int]) -> None:
        """Make vbuckets active at the source again, once the target has released them and it knows that."""
        self._new.set_states(dict.fromkeys(vbuckets, VBucketState.DEAD))
        if vbuckets:
            self._await_end(
                lambda: self._old.gives(vbuckets), "the source does not see that the target is gone"
            )
        here = self._old.report()
        dead = [number for number in vbuckets if _state(here, number) == "dead"]
        self._old.set_states(dict.fromkeys(dead, VBucketState.ACTIVE))

    def _by_dcp(self, moving: list[int]) -> None:
        there = self._new.report()
        others = [number for number in moving if _state(there, number) != "replica"]
        self._new.set_states(dict.fromkeys(others, VBucketState.REPLICA))
        try:
            rows = self._new.report([self._old.order(moving)])
            deadline, before = self._clock.monotonic() + PATIENCE_S, rows
            while any(rows[number].get("stream") != "over" for number in moving):
                if self._clock.monotonic() > deadline:
                    return
                sleep(_LOOK_S)
                rows = self._new.report()
                if rows != before:
                    deadline, before = self._clock.monotonic() + PATIENCE_S, rows
        finally:
            self._new.report([])  # ends whatever has not ended

    def _by_tap(self, moving: list[int]) -> None:
        flags = TapConnectFlag.LIST_VBUCKETS | TapConnectFlag.TAKEOVER_VBUCKETS | TapConnectFlag.SUPPORT_ACK
        options = TapConnectOptions(vbuckets=moving)
        request = TapConnect.with_options(_NAME, int(flags), options).encode()
        with ExitStack() as stack:
            sockets = []
            for node in (self._old, self._new):
                connection = node.connect(_CARRIED)
                stack.callback(connection.close)
                sockets.append(connection.detach()[0])
            try:
                sockets[0].sendall(request)
                _carry(*sockets)
            except OSError:
                pass  # the states show whether it was in time
            # Neither may go on: the target takes no more, the source gives up no more.
            _drain(sockets[1], "the target does not say whether it has taken over")
            _drain(sockets[0], "the source does not say whether it has given up")

    # after

    def _tell_map(self) -> int:
        """Give all nodes of both maps the new map; return its rev."""
        here, there = self._old.report(), self._new.report()
        nodes = self._nodes()
        place = {at: index for index, at in enumerate(nodes)}
        old, new = map(_at, self._pair)
        owners = []
        for number in range(self._count):
            owner = next((address for address in self._elsewhere(number)), None)
            if _state(here, number) == "active":
                owner = old
            if _state(there, number) == "active":
                owner = new
            owners.append([-1 if owner is None else place[owner]])
        rev = 1 + max(node.map().clients_map.revision for node in (self._old, self._new))
        uuid = self._maps[0].clients_map.uuid  # readers of the source go on, at whichever node
        for index, (at, node) in enumerate(nodes.items()):
            served = bucket_map(
                self._old.bucket,
                list(nodes.values()),
                owners,
                rev=rev,
                this_node=index,
                uuid=uuid,
                keeps_history=self._maps[0].keeps_history,
            )
            if at in (old, new):
                (self._old if at == old else self._new).set_map(served.text, OWN_EPOCH, rev)
                continue
            with suppress(ConnectError), _Node(self._way_to(node), self._tls) as other:
                other.set_map(served.text, OWN_EPOCH, rev)
        return rev

    def _nodes(self) -> dict[Address, NodeAddress]:
        """The two nodes, then all others that their maps name."""
        nodes = {_at(node): node for node in self._pair}
        for node in (*self._maps[0].nodes, *self._maps[1].nodes):
            first_seen = nodes.setdefault(_at(node), node)
            if first_seen.tls_port is None:
                nodes[_at(node)] = node
        return nodes

    def _way_to(self, node: NodeAddress) -> ConnectionString:
        """How to connect to another node: as to the source, and never without TLS if that uses it."""
        where = self._old.where
        if where.tls and node.tls_port is None:
            raise ConnectError(f"{_at(node)} has no port for TLS")
        port = node.tls_port if where.tls and node.tls_port is not None else node.port
        return replace(where, addresses=(Address(_at(node).host, port),))

    def _elsewhere(self, number: int) -> Iterable[Address]:
        """The other nodes that have a vbucket according to the maps."""
        ours = [_at(node) for node in self._pair]
        for own_map in self._maps:
            owner = own_map.clients_map.node_of(number)
            if owner is not None and owner not in ours:
                yield owner


def _place(plain: Address, tls: Address) -> NodeAddress:
    """A node from its addresses in a map, without TLS and with it."""
    return NodeAddress(plain.port, None if tls.port == plain.port else tls.port, plain.host)


def _at(node: NodeAddress) -> Address:
    """What identifies a node: its address without TLS."""
    assert node.host is not None
    return Address(node.host, node.port)


def _state(report: Report, number: int) -> str | None:
    return report.get(number, {}).get("state")


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Carry changes one way and answers the other, until one side closes."""
    to = {source: target, target: source}
    while True:
        ready, _, _ = select.select([source, target], [], [], PATIENCE_S)
        if not ready:
            raise TimeoutError
        for ready_socket in ready:
            data = ready_socket.recv(_CARRY_BYTES)
            while isinstance(ready_socket, ssl.SSLSocket) and ready_socket.pending():  # unseen by select
                data += ready_socket.recv(_CARRY_BYTES)
            if not data:
                return
            to[ready_socket].sendall(data)


def _drain(connection: socket.socket, otherwise: str) -> None:
    """Wait until a node has taken all that was sent to it and closes the connection."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(_CARRY_BYTES):
            pass
    except TimeoutError:
        raise ConnectError(f"{otherwise}; run the same again") from None
    except OSError:
        pass  # it is closed already
