"""Who has which vbucket, and the steps from one layout to the next.

The chains are the truth, on disk before anything follows from them. `settle` makes the nodes match the
chains, whatever state they are in: it can be called at any time, after any failure, and does only what is
left to do. So the next call continues a step that was interrupted.

Never two actives: a vbucket is made active only when every other node of the cluster has reported it in
another state, or has no process any more. The coordinator started the processes and can end them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..clock import SYSTEM, Clock
from ..errors import ClusterError, TailraceError, UsageError
from ..files import Files
from ..server.served_map import NodeAddress, bucket_map
from ..server.settings import Settings
from ..wire.codes import VBucketState
from .layout import Chain, balanced, best_copy, is_enough, without
from .member import Member
from .state import ClusterState
from .steering import Report, Row

__all__ = ["Coordinator"]

log = logging.getLogger("tailrace.cluster")

_EPOCH = 2  # the maps that nodes make by themselves have epoch 1
_BATCH = 64
_MAX_ATTEMPTS = 5
_TAKEOVER_S = 120.0


class Coordinator(ClusterState):
    """A cluster in a directory; everything happens in the caller's thread."""

    def __init__(
        self,
        directory: Path,
        *,
        files: Files | None = None,
        member: Callable[[str], Member] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """``files`` keeps the state, ``member`` makes a node from its name; both default to the directory."""
        super().__init__(directory, files)
        self.members: dict[str, Member] = {}
        self.auto_failover_s = 0.0
        self._moving: dict[int, tuple[str, str]] = {}
        self._seen: dict[str, float] = {}
        self._actives: dict[int, Row] = {}
        """What each active vbucket's node last reported about it."""
        self._failovers = self._failovers_before = 0
        """How many there were in all, and when the current rebalance started."""
        self._member = member or (lambda name: Member(name, directory / name, self.bucket))
        self._clock = clock

    # nodes

    @property
    def _in(self) -> list[str]:
        return [name for name in self.ports if name not in self.out]

    def start(self) -> None:
        """Run every node that takes part, and give each its vbuckets."""
        for name in self._in:
            self._start(name)
        self.settle()

    def _start(self, name: str) -> None:
        member = self.members.get(name) or self._member(name)
        self.members[name] = member
        if not member.is_running:
            member.start(self.vbuckets, self.ports[name], self.settings)
            self.ports[name] = member.port
            self.commit(self.chains)
        self._seen[name] = self._clock.monotonic()

    def stop(self) -> None:
        """Stop all nodes cleanly."""
        for member in self.members.values():
            member.stop()

    def add(self, name: str | None = None) -> str:
        """Add a new node, or bring back one that is down or was failed over. A rebalance fills it."""
        if name is None:
            used = {int(name[1:]) for name in self.ports}
            name = f"n{max(used, default=0) + 1}"
            self.ports[name] = 0
            self.out.add(name)
        elif name not in self.ports:
            raise UsageError(f"there is no node {name!r}, there are {', '.join(self.ports)}")
        elif name in self.members and self.members[name].is_running:
            raise UsageError(f"node {name} is already running; without a name, 'add' makes a new one")
        self._start(name)
        self.settle()
        return name

    def _running(self) -> dict[str, Member]:
        return {name: member for name, member in self.members.items() if member.is_running}

    # the chains, made true

    def settle(self) -> bool:
        """Make the nodes match the chains; False if something is still missing."""
        running = self._running()
        reports: dict[str, Report] = {}
        for name, member in running.items():
            try:
                reports[name] = member.report()
            except TailraceError as error:
                log.warning("node %s does not answer: %s", name, error)
        self._share_manifest(reports)
        # First take away, then give. The map lifts a node's fence, so a node that still has what is not its
        # own must not get the map.
        ready = {
            name: report for name, report in reports.items() if self._try(name, self._demote, name, report)
        }
        done = len(ready) == len(running)
        for name, report in ready.items():
            done &= self._try(name, self._promote, name, report, reports)
        for name in ready:
            done &= self._try(name, self._push_map, name)
        for name in ready:
            done &= self._try(name, self._order, name)
        return done

    def _try(self, name: str, act: Callable[..., Any], *arguments: Any) -> bool:
        try:
            act(*arguments)
        except TailraceError as error:
            log.warning("node %s: %s", name, error)
            return False
        return True

    def _demote(self, name: str, report: Report) -> None:
        """Take from a node what it must not have, or not as active."""
        member, replicas, gone = self.members[name], [], []
        for number, chain in enumerate(self.chains):
            row = report.get(number)
            if number in self._moving and name in self._moving[number]:
                continue
            if name not in chain:
                if row is not None and name not in self.out:
                    gone.append(number)
                elif row is not None and row["state"] != "replica":
                    replicas.append(number)  # the next rebalance may want it, and need not copy it then
            elif chain[0] != name and (row is None or row["state"] != "replica"):
                replicas.append(number)
        if replicas or gone:
            # A failed takeover must have stopped receiving before the state changes.
            member.report([source for source in self._sources(name) if not source.get("takeover")])
        member.set_states(dict.fromkeys(replicas, VBucketState.REPLICA))
        for number in replicas:
            report.setdefault(number, {})["state"] = "replica"
        if gone:
            member.delete(gone)
            for number in gone:
                report.pop(number)

    def _promote(self, name: str, report: Report, reports: Mapping[str, Report]) -> None:
        """Make active on a node what should be, if no other node can have it active."""
        states = {}
        for number, chain in enumerate(self.chains):
            if not chain or chain[0] != name or number in self._moving:
                continue
            if report.get(number, {}).get("state") == "active":
                continue
            if self._nobody_else_has(number, name, reports):
                states[number] = VBucketState.ACTIVE
        self.members[name].set_states(states)
        for number in states:
            report.setdefault(number, {})["state"] = "active"

    def _nobody_else_has(self, number: int, name: str, reports: Mapping[str, Report]) -> bool:
        for other in self._running():
            if other == name:
                continue
            if other not in reports or reports[other].get(number, {}).get("state") in ("active", "pending"):
                return False
        return True

    def _order(self, name: str) -> None:
        for number, row in self.members[name].report(self._sources(name)).items():
            if row["state"] == "active" and self.chains[number][:1] == (name,):
                self._actives[number] = row

    def _sources(self, name: str) -> list[dict[str, Any]]:
        """Which nodes it receives which vbuckets from."""
        rows: dict[str, dict[str, Any]] = {}
        for number, chain in enumerate(self.chains):
            takeover = number in self._moving and self._moving[number][1] == name
            if not chain or (name not in chain[1:] and not takeover):
                continue
            source = self._moving[number][0] if takeover else chain[0]
            if source not in self._running():
                continue
            row = rows.setdefault(
                source,
                {"host": "127.0.0.1", "port": self.ports[source], "vbuckets": [], "takeover": []},
            )
            row["takeover" if takeover else "vbuckets"].append(number)
        return list(rows.values())

    def _push_map(self, name: str) -> None:
        used = {member for chain in self.chains for member in chain} | set(self._running())
        names = [member for member in self.ports if member in used]
        nodes = [NodeAddress(port=self.ports[member], host="127.0.0.1") for member in names]
        place = {name: at for at, name in enumerate(names)}
        owners = []
        for chain in self.chains:
            row = [place.get(member, -1) for member in chain]
            owners.append((row + [-1] * (self.replicas + 1))[: self.replicas + 1])
        new_map = bucket_map(
            self.bucket,
            nodes,
            owners,
            epoch=_EPOCH,
            rev=self.rev,
            this_node=place[name],
            uuid=self.bucket_uuid,
            keeps_history=Settings.parse(self.settings).for_store().keeps_history,
        )
        self.members[name].set_map(new_map.text, _EPOCH, self.rev)

    def _share_manifest(self, reports: Mapping[str, Report]) -> None:
        """Give all nodes the newest manifest. Clients create collections on any node, and all nodes must know
        them before one is promoted.
        """
        manifests: dict[str, dict[str, Any]] = {}

        def read(name: str) -> None:
            manifests[name] = self.members[name].manifest()

        for name in reports:
            self._try(name, read, name)
        if not manifests:
            return
        newest = max(manifests.values(), key=lambda manifest: int(manifest["uid"], 16))
        for name, manifest in manifests.items():
            if int(manifest["uid"], 16) < int(newest["uid"], 16):
                self._try(name, self.members[name].set_manifest, newest)

    # failover

    def failover(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Take a node out immediately; replicas go on with what they have."""
        if name not in self._in:
            raise UsageError(f"node {name!r} is not part of the cluster, which has {', '.join(self._in)}")
        others = [other for other in self._in if other != name and self.members[other].is_running]
        reports = {other: self.members[other].report() for other in others}

        def best(number: int, left: Chain) -> str | None:
            """The copy that becomes the active: the target of a takeover if it is active already. If the
            active had something, nodes without anything complete don't count.
            """
            moved = self._moving.get(number)
            if moved is not None and reports.get(moved[1], {}).get(number, {}).get("state") == "active":
                return moved[1]
            rows = {other: reports[other][number] for other in left if number in reports.get(other, {})}
            active = self._actives.get(number, {})
            if active.get("high_seqno") and not force:
                rows = {holder: row for holder, row in rows.items() if row["complete_seqno"]}
            return best_copy(rows, active.get("vb_uuid"))

        chains = without(self.chains, name, best)
        lost = [number for number, chain in enumerate(chains) if not chain and self.chains[number]]
        if lost and not force:
            raise ClusterError(
                f"{len(lost)} vbuckets have no other copy and would be lost with {name}; "
                "bring it back with 'tailrace cluster add', or use --force"
            )
        unsure = sum(
            chain[:1] == (name,)
            and bool(new)
            and reports.get(new[0], {}).get(number, {}).get("state") != "active"
            and not is_enough([other for other in reports if number in reports[other]], chain, self.replicas)
            for number, (chain, new) in enumerate(zip(self.chains, chains, strict=True))
        )
        if unsure and not force:
            raise ClusterError(
                f"{unsure} vbuckets of {name} have copies on other nodes that are down, which alone may have "
                "writes that were answered as durable; bring them back with 'tailrace cluster add', or use "
                "--force"
            )
        promoted = sum(
            1 for old, new in zip(self.chains, chains, strict=True) if old and new and old[0] != new[0]
        )
        self._failovers += 1
        self.members[name].kill()
        self.out.add(name)
        self._moving = {number: pair for number, pair in self._moving.items() if name not in pair}
        self.commit(chains)
        self.settle()
        return {"node": name, "promoted": promoted, "lost": lost}

    def watch(self) -> str | None:
        """Look after the nodes; return the one that was failed over for being silent too long, if any."""
        now = self._clock.monotonic()
        names = self._in
        for name in names:
            if self.members[name].is_running and self.members[name].answers():
                self._seen[name] = now
        if not self.auto_failover_s:
            return None
        silent = [member for member in names if now - self._seen[member] >= self.auto_failover_s]
        alive = [member for member in names if self._seen[member] == now]
        if len(silent) != 1 or 2 * len(alive) <= len(names):
            return None  # without a majority, we may be the ones that are cut off
        try:
            self.failover(silent[0])
        except TailraceError as error:
            log.error("node %s is silent and can't be failed over: %s", silent[0], error)
            return None
        return silent[0]

    # rebalance

    def rebalance(self, *, leaving: str | None = None) -> Generator[str, None, None]:
        """Spread the vbuckets over all running nodes except ``leaving``, step by step; each step yields a
        line of progress. Between two steps anything may happen to the nodes.
        """
        if self._moving:
            raise UsageError("a rebalance is under way")
        down = [name for name in self._in if not self.members[name].is_running and name != leaving]
        if down:
            raise ClusterError(f"node {down[0]} is down: fail it over, or bring it back, before a rebalance")
        nodes = [name for name in self.members if self.members[name].is_running and name != leaving]
        if not nodes:
            raise ClusterError("no node would be left")
        if any(not chain for chain in self.chains):
            yield "vbuckets that were lost begin empty"
        self.out -= set(nodes)
        self._failovers_before = self._failovers
        targets = balanced(self.chains, nodes, self.replicas)
        changed = [number for number, chain in enumerate(targets) if chain != self.chains[number]]
        yield f"{len(changed)} of {self.vbuckets} vbuckets move"
        for at in range(0, len(changed), _BATCH):
            yield from self._move({number: targets[number] for number in changed[at : at + _BATCH]})
        if leaving is not None:
            self.out.add(leaving)
            self.save()
            self.members[leaving].stop()
            self.settle()
        yield "done"

    def _move(self, targets: Mapping[int, Chain]) -> Iterator[str]:
        """Move a batch: first the copies, then the actives, then drop what is left over.

        The map names the copies that form the majority of a durable write. So the old ones go in two steps:
        first the new ones replace them in the map, and once those have everything answered so far, the old
        ones are dropped.
        """
        self._check_alive(targets.values())
        chains = list(self.chains)
        for number, target in targets.items():
            current = chains[number]
            chains[number] = (
                (*current, *(member for member in target if member not in current)) if current else target
            )
        self.commit(chains)
        yield from self._until_copied(targets)
        takeovers = {
            number: (self.chains[number][0], target[0])
            for number, target in targets.items()
            if self.chains[number][0] != target[0]
        }
        if takeovers:
            yield from self._take_over(takeovers)
        self._check_alive(targets.values())
        chains = list(self.chains)
        for number, target in targets.items():
            chains[number] = (*target, *(member for member in chains[number] if member not in target))
        self.commit(chains)
        yield from self._until_copied(targets)
        chains = list(self.chains)
        for number, target in targets.items():
            chains[number] = target
        self.commit(chains)
        self.settle()
        yield f"moved {len(targets)} vbuckets"

    def _until_copied(self, targets: Mapping[int, Chain]) -> Iterator[str]:
        """Wait until every node knows the chains, and every copy has what the active had then."""
        while not self.settle():
            yield "waits for nodes that do not answer"
            self._check_alive((*targets.values(), *(self.chains[number] for number in targets)))
        wanted: dict[int, int] | None = None
        while True:
            self._check_alive((*targets.values(), *(self.chains[number] for number in targets)))
            reports = {name: self.members[name].report() for name in self._running()}
            if wanted is None:
                wanted = {
                    number: reports[self.chains[number][0]].get(number, {}).get("high_seqno", 0)
                    for number in targets
                }
            behind = sum(
                1
                for number, target in targets.items()
                for name in target
                if reports.get(name, {}).get(number, {}).get("complete_seqno", -1) < wanted[number]
            )
            if not behind:
                return
            yield f"{behind} copies are behind"

    def _take_over(self, takeovers: Mapping[int, tuple[str, str]]) -> Iterator[str]:
        """Move actives: the new node asks the old one, and becomes active once that has given it up."""
        attempts = 0
        left = dict(takeovers)
        while left:
            attempts += 1
            if attempts > _MAX_ATTEMPTS:
                raise ClusterError(f"{len(left)} takeovers failed {_MAX_ATTEMPTS} times")
            self._check_alive(left.values())
            self._moving = dict(left)
            try:
                for name in _takers(left):
                    self._try(name, self._order, name)
                yield from self._until_taken_over(left)
            finally:
                self._finish_takeovers(left)
            left = {number: pair for number, pair in left.items() if self.chains[number][0] != pair[1]}

    def _until_taken_over(self, takeovers: Mapping[int, tuple[str, str]]) -> Iterator[str]:
        """Wait until every takeover has ended, successfully or not, but not for too long."""
        deadline = self._clock.monotonic() + _TAKEOVER_S
        while self._clock.monotonic() < deadline:
            waiting = 0
            for name in _takers(takeovers):
                try:
                    report = self.members[name].report()
                except TailraceError:
                    continue
                waiting += sum(
                    report.get(number, {}).get("stream") != "over" and self.members[old].is_running
                    for number, (old, new) in takeovers.items()
                    if new == name
                )
            if not waiting:
                return
            yield f"{waiting} vbuckets are being taken over"

    def _finish_takeovers(self, takeovers: Mapping[int, tuple[str, str]]) -> None:
        """Record the outcome: a target that became active is the active; other vbuckets stay in place."""
        chains = list(self.chains)
        reports: dict[str, Report] = {}

        def read(name: str) -> None:
            reports[name] = self.members[name].report()

        for name in _takers(takeovers):
            self._try(name, read, name)
        for number, (_, new) in takeovers.items():
            if reports.get(new, {}).get(number, {}).get("state") == "active" and number in self._moving:
                rest = [member for member in chains[number] if member != new]
                chains[number] = (new, *rest)
        self._moving = {}
        if chains != self.chains:
            self.commit(chains)
        self.settle()

    def _check_alive(self, chains: Iterable[Chain]) -> None:
        """End the rebalance if a node is down or was failed over: the plan does not work without it."""
        if self._failovers != self._failovers_before:
            raise ClusterError("a node was failed over, the rebalance ends here")
        for name in dict.fromkeys(name for chain in chains for name in chain):
            if not self.members[name].is_running:
                raise ClusterError(f"node {name} is down, the rebalance ends here")

    # figures

    def status(self) -> dict[str, Any]:
        """All figures, for people and scripts."""
        nodes = []
        for name, port in self.ports.items():
            member = self.members.get(name)
            report: Report = {}
            state = "out" if name in self.out else "down"
            if member is not None and member.is_running:
                try:
                    report = member.report()
                    state = "joining" if name in self.out else "up"
                except TailraceError:
                    state = "silent"
            rows = list(report.values())
            nodes.append(
                {
                    "name": name,
                    "host": "127.0.0.1",
                    "port": port,
                    "pid": None if member is None else member.pid,
                    "state": state,
                    "active": sum(row["state"] == "active" for row in rows),
                    "replica": sum(row["state"] == "replica" for row in rows),
                    "items": sum(row["items"] for row in rows if row["state"] == "active"),
                    "receiving": sum(row.get("stream") == "open" for row in rows),
                }
            )
        hosts = ",".join(f"127.0.0.1:{node['port']}" for node in nodes if node["state"] == "up")
        return {
            "url": f"couchbase://{hosts}/{self.bucket}",
            "bucket": self.bucket,
            "vbuckets": self.vbuckets,
            "replicas": self.replicas,
            "rev": self.rev,
            "nodes": nodes,
            "unserved": [
                number
                for number, chain in enumerate(self.chains)
                if not chain or chain[0] not in self._running()
            ],
        }


def _takers(takeovers: Mapping[int, tuple[str, str]]) -> list[str]:
    """The nodes that take vbuckets over, each once, always in the same order."""
    return list(dict.fromkeys(new for _, new in takeovers.values()))
