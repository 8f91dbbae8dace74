"""What every node of a bucket is asked, and what the answers show together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import sleep

from ...clock import Clock
from ...connstr import Address
from ...errors import StatusError, TailraceError
from ...history import MAX_ENTRIES, FailoverLog
from ...protocol.script import Script
from ...wire.admin import GetAllVbSeqnos, GetClusterConfig, GetCollectionsManifest
from ...wire.codes import Status, VBucketState
from ..cluster_map import ClusterMap
from ..kv import stats
from ..kv_connection import KvConnection
from ..question_scripts import failover_logs
from .findings import Finding, error, numbers, ok, warning

__all__ = ["NodeState", "examine_clocks", "examine_disks", "examine_logs", "examine_replicas"]

CLOCK_S = 5.0
LOG_ENTRIES = 10
_REPLICA_TRIES, _REPLICA_WAIT_S = 5, 0.2
_FAILED_COMMITS = ("ep_commit_failed", "ep_item_commit_failed", "ep_data_write_failed")


@dataclass(slots=True)
class NodeState:
    """One node, at one moment."""

    connection: KvConnection
    config: bytes | None
    active_seqnos: dict[int, int]
    failover_logs: dict[int, FailoverLog]
    misplaced: list[int]
    """VBuckets that the map gives it but that are not active on it."""
    ahead_s: float | None = None
    """How far its clock is ahead of ours."""
    general: dict[str, str] = field(default_factory=dict)
    purge_seqnos: dict[int, int] = field(default_factory=dict)
    tombstone_age_s: float | None = None
    collections: frozenset[str] | None = None

    @property
    def address(self) -> Address:
        return self.connection.address

    @classmethod
    def ask(cls, connection: KvConnection, seen: ClusterMap, clock: Clock) -> NodeState:
        """The state that a node reports; statistics that it does not give are left out."""
        config, active, manifest = connection.run(_questions())
        own_vbuckets = [
            vbucket for vbucket in range(seen.vbucket_count) if seen.node_of(vbucket) == connection.address
        ]
        logs = connection.run(failover_logs(own_vbuckets)) if own_vbuckets else {}
        active_seqnos = {vbucket: active[vbucket] for vbucket in own_vbuckets if vbucket in active}
        misplaced = [vbucket for vbucket in own_vbuckets if vbucket not in active]
        state = cls(connection, config, active_seqnos, logs, misplaced)
        state.collections = _collections(manifest)
        before = clock.time_ns()
        state.general = _figures(connection, "")
        passed_s = (clock.time_ns() - before) / 1e9
        if (text := state.general.get("time", "")).isdigit():
            # it reports whole seconds: on average the clock is half a second further
            state.ahead_s = int(text) + 0.5 - before / 1e9 - passed_s / 2
        for name, text in _figures(connection, "vbucket-seqno").items():
            vbucket, _, figure = name.removeprefix("vb_").partition(":")
            if figure == "purge_seqno" and vbucket.isdigit() and text.isdigit():
                state.purge_seqnos[int(vbucket)] = int(text)
        age = _figures(connection, "settings").get("tombstone_age", "")
        try:
            state.tombstone_age_s = float(age) if age[:1].isdigit() else None
        except ValueError:
            state.tombstone_age_s = None
        return state


def examine_clocks(states: Sequence[NodeState]) -> Iterator[Finding]:
    """Whether all clocks show about the same time."""
    ahead_by_node = {state.address: state.ahead_s for state in states if state.ahead_s is not None}
    for address, ahead_s in ahead_by_node.items():
        if abs(ahead_s) >= CLOCK_S:
            yield warning(
                "clock",
                f"the clock of {address} is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} "
                "this machine's",
                "set both by NTP: expiry, event times and CAS follow the node's clock",
            )
    if ahead_by_node and all(abs(ahead_s) < CLOCK_S for ahead_s in ahead_by_node.values()):
        yield ok("clock", f"less than {CLOCK_S:.0f} s apart")


def examine_logs(states: Sequence[NodeState]) -> Iterator[Finding]:
    """Whether vbuckets are where the map says, and how often they failed over."""
    misplaced = [vbucket for state in states for vbucket in state.misplaced]
    if misplaced:
        yield error(
            "vbuckets",
            f"{numbers(misplaced)} are not active on the node that the map names",
            "a rebalance or failover is under way: check again; if it stays so, rebalance",
        )
    logs = {vbucket: log for state in states for vbucket, log in state.failover_logs.items()}
    long = {vbucket: len(log.entries) for vbucket, log in logs.items() if len(log.entries) >= LOG_ENTRIES}
    longest = max((len(log.entries) for log in logs.values()), default=0)
    if long:
        yield warning(
            "failover-logs",
            f"{numbers(long)} failed over {LOG_ENTRIES} times or more, the most {longest - 1} times",
            f"find out why nodes fail; servers remember {MAX_ENTRIES} branches, and a reader that was away "
            "for longer starts from the beginning",
        )
    elif logs:
        yield ok("failover-logs", f"no vbucket has more than {longest} branch{'es' if longest > 1 else ''}")


def examine_replicas(states: Sequence[NodeState], seen: ClusterMap) -> Iterator[Finding]:
    """Whether replicas have what the actives had a moment ago; they get a second to catch up."""
    by_address = {state.address: state for state in states}
    active = {vbucket: seqno for state in states for vbucket, seqno in state.active_seqnos.items()}
    wanted = {
        state.address: [
            vbucket
            for vbucket in range(seen.vbucket_count)
            if vbucket in active and state.address in seen.replicas_of(vbucket)
        ]
        for state in states
    }
    wanted = {address: vbuckets for address, vbuckets in wanted.items() if vbuckets}
    if not wanted:
        return
    behind: dict[Address, dict[int, int]] = {}
    missing: dict[Address, list[int]] = {}
    for attempt in range(_REPLICA_TRIES):
        if attempt:
            sleep(_REPLICA_WAIT_S)
        behind, missing = {}, {}
        for address, vbuckets in wanted.items():
            try:
                there = by_address[address].connection.run(_seqnos(VBucketState.REPLICA))
            except TailraceError:
                there = {}
            missing[address] = [vbucket for vbucket in vbuckets if vbucket not in there]
            behind[address] = {
                vbucket: active[vbucket] - there[vbucket]
                for vbucket in vbuckets
                if vbucket in there and there[vbucket] < active[vbucket]
            }
        if not any(behind.values()) and not any(missing.values()):
            yield ok("replicas", f"all {sum(map(len, wanted.values()))} have everything")
            return
    for address, vbuckets in missing.items():
        if vbuckets:
            yield error(
                "replicas",
                f"{address} has no replica of {numbers(vbuckets)}, though the map says so",
                "rebalance: a failover now would lose them",
            )
    for address, lags in behind.items():
        if lags:
            yield warning(
                "replicas",
                f"{address} is behind in {numbers(lags)}, by {sum(lags.values()):,} changes",
                "wait, or find out why it is slow or cut off: a failover now loses these changes, and "
                "readers with rollback mitigation wait for it",
            )


def examine_disks(states: Sequence[NodeState], *, is_ephemeral: bool) -> Iterator[Finding]:
    """Whether writes reach the disk."""
    all_well = True
    for state in states:
        failed = sum(int(state.general.get(name, "0")) for name in _FAILED_COMMITS if _is_count(state, name))
        if failed:
            all_well = False
            yield error(
                "disk",
                f"{state.address} could not write to its disk {failed:,} times",
                "look at its free space and its log: what is not on disk is lost with the process",
            )
        if state.general.get("ep_flusher_state") == "paused":
            all_well = False
            yield warning(
                "disk",
                f"{state.address} writes nothing to disk: its persistence was stopped",
                "start it again (START_PERSISTENCE), or all changes since then are lost with the process",
            )
    if is_ephemeral:
        yield ok("disk", "the bucket is ephemeral: nothing is kept on disk, restarted nodes begin empty")
    elif all_well and any(state.general for state in states):
        yield ok("disk", "writes reach the disk")


def _is_count(state: NodeState, name: str) -> bool:
    text = state.general.get(name, "")
    return text.isascii() and text.isdigit()


def _questions() -> Script[tuple[bytes | None, dict[int, int], bytes | None]]:
    config, active, manifest = yield [
        GetClusterConfig(),
        GetAllVbSeqnos(state=VBucketState.ACTIVE),
        GetCollectionsManifest(),
    ]
    return (
        config.value if config.status == Status.SUCCESS and config.value else None,
        active.seqnos if active.status == Status.SUCCESS else {},
        manifest.value if manifest.status == Status.SUCCESS else None,
    )


def _seqnos(state: VBucketState) -> Script[dict[int, int]]:
    (answer,) = yield [GetAllVbSeqnos(state=state)]
    return answer.seqnos if answer.status == Status.SUCCESS else {}


def _figures(connection: KvConnection, group: str) -> dict[str, str]:
    try:
        return connection.run(stats(group))
    except StatusError:
        return {}


def _collections(manifest: bytes | None) -> frozenset[str] | None:
    try:
        scopes = json.loads(manifest or b"null")["scopes"]
        return frozenset(
            f"{scope['name']}.{collection['name']}" for scope in scopes for collection in scope["collections"]
        )
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
