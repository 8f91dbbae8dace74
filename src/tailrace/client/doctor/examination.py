"""One bucket, examined from outside in: names, sockets, login, map, then every node of the map.

Checks that can't run because an earlier one failed are left out: the report ends there.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from ... import __version__
from ...clock import SYSTEM, Clock
from ...connstr import Address, ConnectionString
from ...errors import ConnectError, LoginError, ProtocolError, StatusError, TailraceError
from ...history import FailoverLog
from ...protocol.handshake import READER_FEATURES, Credentials, Introduction
from ...protocol.script import Script
from ...wire.codes import Feature, OpenFlag, Status, status_name
from ...wire.dcp import DcpOpen
from ..cluster_map import AUTO, DEFAULT, ClusterMap, MapContext, networks_in
from ..kv import stats as ask_stats
from ..kv_connection import KvConnection
from ..tls import TlsOptions, tls_context
from .findings import Finding, error, numbers, ok, warning
from .node_state import NodeState, examine_clocks, examine_disks, examine_logs, examine_replicas
from .reaching import examine_hosts, examine_names, examine_sockets

__all__ = ["BucketFacts", "Examination"]

_WORTH = {
    Feature.COLLECTIONS: "collections can't be told apart, everything is read as the default collection",
    Feature.XATTR: "documents come without their extended attributes",
    Feature.SNAPPY: "values can't be compressed on the way",
    Feature.JSON: "only reading a document shows whether it is JSON",
    Feature.XERROR: "refusals come without the server's reasons",
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION: "a new map is found by asking, which takes longer",
}
"""What is lost without a feature."""


@dataclass(slots=True)
class BucketFacts:
    """What was learnt about the bucket, for comparisons."""

    map: ClusterMap
    high_seqnos: dict[int, int] = field(default_factory=dict)
    failover_logs: dict[int, FailoverLog] = field(default_factory=dict)
    purge_seqnos: dict[int, int] = field(default_factory=dict)
    tombstone_age_s: float | None = None
    """How long deletions are remembered, if the server says so."""
    collections: frozenset[str] | None = None
    """As ``scope.collection``; None: the server has none."""


class Examination:
    """Checks everything once. `findings` yields each finding as it is made; after that `facts` is set, unless
    no node could be asked.
    """

    def __init__(
        self,
        where: ConnectionString,
        *,
        tls: TlsOptions | None = None,
        timeout_s: float = 5.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self.facts: BucketFacts | None = None
        self._where = where
        self._tls_options = tls
        self._timeout_s = timeout_s
        self._clock = clock
        self._tls: ssl.SSLContext | None = None
        self._seeds: tuple[Address, ...] = ()
        self._networks: list[str] = []

    def findings(self) -> Iterator[Finding]:
        """Every finding, in the order of the checks; an error that stops the examination comes last."""
        try:
            yield from self._look()
        except (ConnectError, ProtocolError, StatusError) as problem:
            yield error(
                "reach",
                f"the examination ends here: {problem}",
                "check whether the node is overloaded, has too many connections, or is stopping",
            )

    def _look(self) -> Iterator[Finding]:
        names = examine_names(self._where, self._timeout_s)
        self._seeds = names.seeds
        yield from names.findings
        self._tls = tls_context(self._where, self._tls_options)
        reached, seeds = examine_sockets(names.known, self._tls, timeout_s=self._timeout_s, clock=self._clock)
        yield from reached
        with ExitStack() as connections:
            first = None
            for seed in seeds:
                try:
                    first = self._connect(seed, connections)
                except TailraceError as problem:
                    yield self._no_login(seed, problem)
                    if isinstance(problem, LoginError):
                        return  # the other nodes would say the same
                else:
                    break
            if first is None:
                return
            yield from self._examine_login(first)
            yield from _examine_features(first)
            yield from self._examine_privileges(first)
            yield from self._examine_map(first, connections)

    def _connect(self, address: Address, connections: ExitStack) -> KvConnection:
        where = self._where
        credentials = None
        if where.username is not None:
            credentials = Credentials(where.username, where.password or "")
        introduction = Introduction(
            f"tailrace-doctor/{__version__}", where.bucket, credentials, READER_FEATURES, where.tls
        )
        made = KvConnection(address, introduction, tls=self._tls, timeout_s=self._timeout_s)
        connections.callback(made.close)
        return made

    # login

    def _no_login(self, seed: Address, problem: TailraceError) -> Finding:
        text, _, way_out = str(problem).removeprefix(f"{seed} ").removeprefix(f"{seed}: ").partition("; ")
        if isinstance(problem, LoginError):
            return error("login", f"{seed}: {text}", way_out or "check user, password and bucket")
        wrong_port = "" if self._where.tls else "; is this a TLS port, which needs couchbases://?"
        return error("login", f"{seed}: {text}", f"is this the port of the data service{wrong_port}")

    def _examine_login(self, first: KvConnection) -> Iterator[Finding]:
        user = self._where.username
        who = "without a login" if user is None else f"as {user!r}"
        yield ok("login", f"{first.address} opens bucket {self._where.bucket!r} {who}")

    def _examine_privileges(self, first: KvConnection) -> Iterator[Finding]:
        refused = []
        with ExitStack() as connections:  # a connection opened for changes can't be used for anything else
            opened = self._connect(first.address, connections).run(_opened_for_changes())
        if opened not in (Status.SUCCESS, Status.UNKNOWN_COMMAND):
            refused.append("changes")
            yield error(
                "privileges",
                f"the user may not read changes ({status_name(opened)})",
                "give the user the role Data DCP Reader (data_dcp_reader) for this bucket",
            )
        if not _may_read_stats(first):
            refused.append("stats")
            yield warning(
                "privileges",
                "the user may not read statistics: purge seqnos, clocks and disks are not looked at",
                "give the user the role Data Monitor (data_monitoring) for this bucket",
            )
        if opened == Status.UNKNOWN_COMMAND:
            yield warning(
                "features",
                f"{first.address} has no DCP: it is an old server, or one without change streams",
                "read it with --dialect upr-b, upr-a or tap",
            )
        if not refused:
            yield ok("privileges", "changes and statistics may be read")

    # map

    def _examine_map(self, first: KvConnection, connections: ExitStack) -> Iterator[Finding]:
        if first.handshake.config is None:
            yield error(
                "map",
                f"{first.address} has no cluster map for bucket {self._where.bucket!r}",
                "wait until the bucket is ready; a server without maps can be read as a single node",
            )
            return
        try:
            seen = self._parsed(first.handshake.config, first.address)
        except TailraceError as problem:
            yield error(
                "networks" if isinstance(problem, ConnectError) else "map",
                str(problem),
                "choose one of the networks with ?network=NAME"
                if isinstance(problem, ConnectError)
                else "this is not a Couchbase server, or a broken proxy is in front of it",
            )
            return
        if seen is None:
            yield error("map", "the bucket has no vbuckets yet", "wait until it is ready, then check again")
            return
        self.facts = BucketFacts(seen)
        replicas = max(map(len, seen.replicas), default=0)
        yield ok(
            "map",
            f"revision {seen.epoch}.{seen.revision}: {seen.vbucket_count} vbuckets on {len(seen.nodes)} "
            f"node{'s' if len(seen.nodes) > 1 else ''}, {replicas} replica{'s' if replicas != 1 else ''}",
        )
        yield from self._examine_networks(seen, first.handshake.config)
        yield from _examine_chains(seen)
        states = []
        unreachable = []
        for address in seen.nodes:
            yield from self._unknown_names(address)
            try:
                connection = first if address == first.address else self._connect(address, connections)
                states.append(NodeState.ask(connection, seen, self._clock))
            except TailraceError as problem:
                unreachable.append(address)
                yield error("nodes", str(problem).partition("; ")[0], self._way_to(seen))
        if not unreachable:
            yield ok("nodes", f"all {len(states)} answer" if len(states) > 1 else "the node answers")
        yield from self._examine_agreement(states)
        self._learn(states)
        yield from examine_clocks(states)
        yield from examine_logs(states)
        yield from examine_replicas(states, seen)
        yield from examine_disks(states, is_ephemeral=seen.is_ephemeral)

    def _parsed(self, config: bytes, asked: Address) -> ClusterMap | None:
        context = MapContext(self._where.tls, self._where.network, self._seeds)
        return ClusterMap.parse(config, asked, context)

    def _unknown_names(self, address: Address) -> Iterator[Finding]:
        if address not in self._seeds:
            yield from (finding for finding in examine_hosts([address.host]) if finding.way_out)

    def _examine_networks(self, seen: ClusterMap, config: bytes) -> Iterator[Finding]:
        self._networks = [DEFAULT, *networks_in(config)]
        if len(self._networks) > 1 or seen.network != DEFAULT:
            how = "as the URL says" if self._where.network != AUTO else "by the hosts of the URL"
            others = ", ".join(name for name in self._networks if name != seen.network)
            yield ok("networks", f"{seen.network} is chosen {how}; there is also {others}")

    def _way_to(self, seen: ClusterMap) -> str:
        others = [name for name in self._networks if name != seen.network]
        if others:
            ways = " or ".join(f"?network={name}" for name in others)
            return f"start it, or fail it over; it also has addresses on another network: {ways}"
        return (
            "start it, or fail it over; if it can only be reached by another address, it must announce that "
            "(alternateAddresses), and ?network=external chooses it"
        )

    def _examine_agreement(self, states: list[NodeState]) -> Iterator[Finding]:
        maps = {state.address: self._parsed(state.config, state.address) for state in states if state.config}
        uuids = {seen.uuid for seen in maps.values() if seen is not None and seen.uuid}
        versions = {seen.version for seen in maps.values() if seen is not None}
        if len(uuids) > 1:
            yield error(
                "map",
                f"the nodes have different buckets of this name (uuids {', '.join(sorted(uuids))})",
                "the addresses lead to more than one cluster: name the hosts of one",
            )
        elif len(versions) > 1:
            texts = [
                f"{address} revision {seen.epoch}.{seen.revision}"
                for address, seen in maps.items()
                if seen is not None
            ]
            yield warning(
                "map",
                f"the nodes have different maps: {', '.join(texts)}",
                "check again in a moment; if it stays so, a node is cut off from the others",
            )

    def _learn(self, states: list[NodeState]) -> None:
        assert self.facts is not None
        for state in states:
            self.facts.high_seqnos |= state.active_seqnos
            self.facts.failover_logs |= state.failover_logs
            self.facts.purge_seqnos |= {
                vbucket: state.purge_seqnos[vbucket]
                for vbucket in state.active_seqnos
                if vbucket in state.purge_seqnos
            }
            if state.tombstone_age_s is not None:
                self.facts.tombstone_age_s = state.tombstone_age_s
            if state.collections is not None:
                self.facts.collections = state.collections


def _examine_features(first: KvConnection) -> Iterator[Finding]:
    granted = first.handshake.features
    missing = {feature: loss for feature, loss in _WORTH.items() if feature not in granted}
    for feature, loss in missing.items():
        yield warning(
            "features", f"the server has no {feature.name.lower()}: {loss}", "a newer server has it"
        )
    if not missing:
        names = sorted(feature.name.lower() for feature in READER_FEATURES if feature in granted)
        yield ok("features", f"the server grants {', '.join(names)}")


def _examine_chains(seen: ClusterMap) -> Iterator[Finding]:
    orphans = [vbucket for vbucket, node in enumerate(seen.active) if node < 0]
    if orphans:
        yield error(
            "vbuckets",
            f"{numbers(orphans)} have no active node: they can't be read or written",
            "bring the node back that had them, or fail it over so that a replica takes its place",
        )
    else:
        yield ok("vbuckets", f"each of {seen.vbucket_count} has an active node")
    short = [vbucket for vbucket, chain in enumerate(seen.replicas) if -1 in chain]
    if short:
        yield warning(
            "replicas",
            f"{numbers(short)} have fewer replicas than the bucket asks for",
            "rebalance, and add nodes if there are too few: a failover now may lose changes",
        )


def _opened_for_changes() -> Script[int]:
    request = DcpOpen(key=f"tailrace-doctor/{__version__}".encode(), flags=int(OpenFlag.PRODUCER))
    (answer,) = yield [request]
    return int(answer.status)


def _may_read_stats(connection: KvConnection) -> bool:
    try:
        connection.run(ask_stats("vbucket-seqno"))
    except StatusError as problem:
        return problem.status not in (Status.EACCESS, Status.AUTH_ERROR)  # it may not know the group
    return True
