"""The nodes of a cluster and our connections to them: which to dial, when to retry, where a vbucket is.

Sans-IO. The pump asks `to_connect` and reports what came of it (`connected`, `lost`); the rest follows. One
connection per node, whatever the number of vbuckets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..connstr import Address, ConnectionString
from ..errors import ConnectError, NoSuchBucket, RemoteProtocolError, UsageError
from ..protocol.dcp.reader import DcpReader, ReaderSettings
from ..protocol.handshake import Credentials, Introduction
from ..protocol.questions import Patience
from ..protocol.script import Script
from ..wire.admin import GetAllVbSeqnos, GetClusterConfig
from ..wire.codes import Feature, Status
from .cluster_map import ClusterMap, MapContext
from .dialects import DCP_SPEECH, Speech
from .retry import Backoff, is_temporary

__all__ = ["KnownNode", "Nodes"]

_LOOKUP_S = 10.0
"""How often to ask DNS again while no node can be reached."""

_POLL_S = 2.5
"""How often to ask for a new map while a vbucket has no node, or a node can't be reached."""


@dataclass(slots=True, eq=False)
class KnownNode:
    """One node, and our connection to it if there is one."""

    address: Address
    backoff: Backoff
    patience: Patience
    link: DcpReader | None = None
    connecting: bool = False
    retry_at: float = 0.0
    troubled_since: float | None = None
    """By the clock of ``patience``."""
    trouble: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether stream requests can be sent."""
        return self.link is not None and self.link.granted is not None

    def is_given_up(self, patience_s: float | None, now: float) -> bool:
        """Whether it could not be reached for ``patience_s`` or longer; None never gives up."""
        return (
            patience_s is not None
            and self.troubled_since is not None
            and self.patience.waited(now) - self.troubled_since >= patience_s
        )

    def state(self, now: float) -> str:
        """The connection's state in words, for statistics."""
        if self.link is not None:
            return "open" if self.is_ready else f"waits for {self.link.waits_for}"
        if self.connecting:
            return "connecting"
        waits = f"; next attempt in {max(0.0, self.retry_at - now):.1f} s" if self.retry_at > now else ""
        return (self.trouble or "not connected") + waits


class Nodes:
    """All nodes that we know of."""

    def __init__(
        self,
        where: ConnectionString,
        settings: ReaderSettings,
        *,
        agent: str,
        allow_plain: bool,
        retry_for_s: float,
        rng: random.Random,
        speech: Speech = DCP_SPEECH,
    ) -> None:
        credentials = None
        if where.username is not None:
            credentials = Credentials(where.username, where.password or "")
        self.where = where
        self.seeds = where.addresses
        """The nodes to dial first, and when none of the map answers."""
        self.map: ClusterMap | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a connection became ready or went, or the map changed."""
        self.patience = Patience()
        self._introduction = Introduction(
            agent, where.bucket, credentials, speech.features, allow_plain=allow_plain or where.tls
        )
        self._settings = settings
        self._speech = speech
        self._retry_for_s = retry_for_s
        self._rng = rng
        self._nodes: dict[Address, KnownNode] = {}
        self._needed: tuple[Address, ...] = ()  # no set: a simulation must be able to repeat the order
        self._watched: tuple[Address, ...] = ()  # useful, but no reason to give up if they can't be reached
        self._seed = 0
        self._seeds_failed: list[str] = []
        self._asked_at = 0.0
        self._asking = False
        self._looked_up_at: float | None = None
        self._has_moved = False
        self._gone_received_bytes = self._gone_acked_bytes = 0

    # what the pump does

    def to_connect(self, now: float) -> list[Address]:
        """The nodes that should be dialled now; each is marked as being dialled."""
        addresses = []
        for address in self._wanted():
            node = self._node(address)
            if node.link is None and not node.connecting and node.retry_at <= now:
                node.connecting = True
                addresses.append(address)
        return addresses

    def wants_seeds(self, now: float) -> bool:
        """Whether to ask DNS where the cluster is: no node answers, and it may have moved."""
        due = self._lookup_due(now)
        return due is not None and due <= now

    def begin_lookup(self, now: float) -> None:
        """DNS is being asked."""
        self._looked_up_at = now

    def found_seeds(self, seeds: tuple[Address, ...]) -> None:
        """Take DNS's answer. If we know none of its nodes, it is another cluster with its own revisions."""
        known = {*self.seeds, *(self.map.nodes if self.map is not None else ())}
        self._has_moved = self.map is not None and known.isdisjoint(seeds)
        order = list(seeds)
        self._rng.shuffle(order)
        self.seeds, self._seed = tuple(order), 0
        self.on_change()

    def _lookup_due(self, now: float) -> float | None:
        if self.where.name is None or not self.where.dns_srv or not self._is_lost():
            return None
        return now if self._looked_up_at is None else self._looked_up_at + _LOOKUP_S

    def _is_lost(self) -> bool:
        """No node that we need can be reached."""
        return bool(self._needed) and all(
            self._node(address).troubled_since is not None for address in self._needed
        )

    def to_disconnect(self) -> list[Address]:
        """Connections that are no longer needed: to nodes that have left, or have nothing for us.

        One with a stream stays, whatever the map says by now: the node ends the stream.
        """
        wanted = self._wanted()
        return [
            node.address
            for node in self._nodes.values()
            if node.link is not None and node.address not in wanted and not node.link.streams
        ]

    def connected(self, address: Address, now: float) -> DcpReader:
        """A connection was made; the pump feeds the reader that this returns."""
        node = self._node(address)
        node.connecting = False
        node.link = link = self._speech.connect(
            self._introduction, self._settings, rng=self._rng, now=now, patience=self.patience
        )
        link.on_config = lambda text, now: self._pushed(address, text, now)
        return link

    def opened(self, address: Address, now: float) -> None:
        """The handshake is over."""
        node = self._node(address)
        assert node.link is not None and node.link.granted is not None
        node.backoff.reset()
        node.troubled_since, node.trouble = None, ""
        self._seeds_failed.clear()
        config = node.link.granted.handshake.config
        if config is not None:
            self.apply(config, address)
        elif self.map is None:
            # an old server without maps stands alone; its seqnos tell how many vbuckets it has
            node.link.ask(_vbucket_count(), lambda count: self._take_single(address, count), now)
        self.on_change()

    def lost(self, address: Address, error: Exception, now: float) -> None:
        """A connection could not be made, or is gone. Raises errors that no retry can cure."""
        node = self._node(address)
        self._let_go(node)
        node.connecting = False
        node.trouble = str(error) or type(error).__name__
        if node.troubled_since is None:
            node.troubled_since = self.patience.waited(now)
        node.retry_at = now + node.backoff.next_s()
        self.on_change()
        is_missing = isinstance(error, NoSuchBucket)  # another seed may have it, or this one later
        if not is_temporary(error) and not is_missing:
            raise error
        if self.map is None:
            self._next_seed(error)
        elif address in self._wanted():
            self.ask_others(now)

    def dropped(self, address: Address) -> None:
        """The pump closed a connection that `to_disconnect` named."""
        self._let_go(self._node(address))

    def _let_go(self, node: KnownNode) -> None:
        """Its connection is gone; what came on it still counts."""
        if node.link is not None:
            self._gone_received_bytes += node.link.received_bytes
            self._gone_acked_bytes += node.link.acked_bytes
            node.link = None

    def check(self, now: float) -> None:
        """Raise `ConnectError` if a node that we need could not be reached for too long."""
        for address in self._needed:
            node = self._node(address)
            if node.is_given_up(self._retry_for_s, now):
                raise ConnectError(
                    f"{address} could not be reached for {self._retry_for_s:g} s: {node.trouble}"
                )

    def next_timer(self, now: float) -> float | None:
        """When to act even if nothing happens until then."""
        times = []
        for address in self._wanted():
            node = self._node(address)
            if node.link is None and not node.connecting:
                times.append(max(node.retry_at, now))
            if (
                node.troubled_since is not None
                and address in self._needed
                and not self.patience.is_with_application
            ):
                times.append(node.troubled_since + self._retry_for_s + self.patience.held_up_s)
        if (due := self._lookup_due(now)) is not None:
            times.append(due)
        return min(times, default=None)

    # where things are

    def need(self, vbuckets: Iterable[int], *, copies_of: Iterable[int] = ()) -> None:
        """Keep connections to the nodes of these vbuckets from now on, and to the replicas of some."""
        assert self.map is not None
        homes = dict.fromkeys(self.map.node_of(vbucket) for vbucket in vbuckets)
        self._needed = tuple(address for address in homes if address is not None)
        copies = dict.fromkeys(address for vb in copies_of for address in self.map.replicas_of(vb))
        self._watched = tuple(address for address in copies if address is not None and address not in homes)

    def copies_of(self, vbucket: int) -> list[KnownNode]:
        """The active and the replicas of a vbucket, by the newest map."""
        assert self.map is not None
        copies = [self.map.node_of(vbucket), *self.map.replicas_of(vbucket)]
        return [self._node(address) for address in dict.fromkeys(copies) if address is not None]

    def refuse_ephemeral(self) -> None:
        """Raise `UsageError` if the bucket is ephemeral: there is no disk to wait for."""
        if self.map is not None and self.map.is_ephemeral:
            raise UsageError(
                "the bucket is ephemeral, nothing of it is ever on disk: read it without persisted_only"
            )

    def node_of(self, vbucket: int) -> KnownNode | None:
        """The node that has a vbucket, by the newest map."""
        address = self.map.node_of(vbucket) if self.map is not None else None
        return None if address is None else self._node(address)

    def address_of(self, vbucket: int) -> Address | None:
        """The address of the node that has a vbucket."""
        node = self.node_of(vbucket)
        return None if node is None else node.address

    def links(self) -> Iterator[tuple[Address, DcpReader]]:
        """All connections."""
        for node in list(self._nodes.values()):
            if node.link is not None:
                yield node.address, node.link

    def ready(self) -> list[KnownNode]:
        """The nodes that stream requests can be sent to."""
        return [node for node in self._nodes.values() if node.is_ready]

    def all(self) -> list[KnownNode]:
        """Every node that is in the map or has a connection."""
        known = set(self.map.nodes) if self.map is not None else set(self.seeds)
        return [node for node in self._nodes.values() if node.link is not None or node.address in known]

    def stats(self, now: float) -> dict[str, Any]:
        """Figures of the connections."""
        links = [link for _, link in self.links()]
        return {
            "received_bytes": self._gone_received_bytes + sum(link.received_bytes for link in links),
            "acked_bytes": self._gone_acked_bytes + sum(link.acked_bytes for link in links),
            "unacknowledged_bytes": sum(max(0, link.received_bytes - link.acked_bytes) for link in links),
            "queued_bytes": sum(link.queued_bytes for link in links),
            "nodes": {
                str(node.address): {
                    "state": node.state(now),
                    "streams": len(node.link.streams) if node.link is not None else 0,
                    "queued_bytes": node.link.queued_bytes if node.link is not None else 0,
                }
                for node in self.all()
            },
        }

    # the map

    def apply(self, text: bytes, asked: Address) -> bool:
        """Take over a cluster map if it is newer; return whether it was."""
        # the network is chosen with the first map, and kept
        network = self.where.network if self.map is None else self.map.network
        offered = ClusterMap.parse(text, asked, MapContext(self.where.tls, network, self.seeds))
        is_from_new_cluster = self._has_moved and asked in self.seeds
        if offered is None or not (is_from_new_cluster or offered.is_newer_than(self.map)):
            return False
        if self.map is not None and self.map.uuid and offered.uuid != self.map.uuid:
            raise RemoteProtocolError(
                f"the bucket {self.where.bucket!r} was deleted and created again: its uuid is {offered.uuid} "
                f"and was {self.map.uuid}, and positions in the old one mean nothing in it; connect again"
            )
        self._has_moved = False
        if self.map is not None and offered.vbucket_count != self.map.vbucket_count:
            raise RemoteProtocolError(
                f"the bucket has {offered.vbucket_count} vbuckets and had {self.map.vbucket_count} before: "
                "it was created again, and positions in the old one mean nothing in it; connect again"
            )
        self.map = offered
        # nodes that have left the map would pile up
        self._nodes = {
            address: node
            for address, node in self._nodes.items()
            if node.link is not None or node.connecting or address in offered.nodes or address in self.seeds
        }
        self.on_change()
        return True

    def ask_for_map(self, now: float) -> None:
        """Ask a node that answers for the newest map, unless that was done a moment ago."""
        ready = self.ready()
        if not ready or (self._asking and now - self._asked_at < _POLL_S):
            return
        node = self._rng.choice(ready)
        assert node.link is not None
        self._asking, self._asked_at = True, now

        def answered(text: bytes | None) -> None:
            self._asking = False
            if text:
                self.apply(text, node.address)
            self.on_change()

        node.link.ask(_config(self._known_version(node.link)), answered, now)

    def _known_version(self, link: DcpReader) -> tuple[int, int] | None:
        """The version of our map, if telling the node makes it answer only with a newer one; or None."""
        takes_it = link.granted is not None and (
            Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION in link.granted.handshake.features
        )
        # if the name leads to another cluster now, that has revisions of its own
        if self.map is None or self._has_moved or not takes_it or min(self.map.version) < 1:
            return None
        return self.map.version

    def ask_others(self, now: float) -> None:
        """Ask another node, now and then, where the vbuckets of one that is gone went."""
        if now - self._asked_at >= _POLL_S:
            self.ask_for_map(now)

    def _pushed(self, address: Address, text: bytes, now: float) -> None:
        if text:
            self.apply(text, address)
            return
        node = self._node(address)
        if node.link is not None:
            node.link.ask(
                _config(self._known_version(node.link)),
                lambda text: self._pushed(address, text, now) if text else None,
                now,
            )

    def _take_single(self, address: Address, count: int) -> None:
        if count and self.map is None:
            self.map = ClusterMap.single(address, count)
            self.on_change()

    def _next_seed(self, error: Exception) -> None:
        """Try the next address, since there is no map yet; raise once all of them have failed."""
        self._seeds_failed.append(str(error))
        self._seed += 1
        if self._seed >= len(self.seeds):
            self._seed = 0
            if len(self._seeds_failed) >= len(self.seeds):
                kind = NoSuchBucket if isinstance(error, NoSuchBucket) else ConnectError
                raise kind("; ".join(dict.fromkeys(self._seeds_failed)))

    def _wanted(self) -> tuple[Address, ...]:
        """The nodes to connect to: those that we need, or a seed that may know the map."""
        if self.map is None:
            return (self.seeds[self._seed],)
        if self._is_lost():
            # the cluster may have moved away from us
            return tuple(dict.fromkeys((*self._needed, *self.seeds)))
        if self._needed:
            return self._needed + self._watched
        return tuple(node.address for node in self.ready()[:1]) or self.map.nodes[:1]

    def _node(self, address: Address) -> KnownNode:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = KnownNode(address, Backoff(self._rng), self.patience)
        return node


def _config(known: tuple[int, int] | None) -> Script[bytes | None]:
    epoch, revision = known or (None, None)
    (answer,) = yield [GetClusterConfig(epoch=epoch, revision=revision)]
    return answer.value if answer.status == Status.SUCCESS else None


def _vbucket_count() -> Script[int]:
    (answer,) = yield [GetAllVbSeqnos()]
    return max(answer.seqnos, default=-1) + 1 if answer.status == Status.SUCCESS else 0
