"""Where the vbuckets should be. Pure functions over *chains*.

A chain names the nodes of one vbucket: the active first, then its replicas. The chain of a vbucket that no
node has is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["Chain", "balanced", "best_copy", "is_enough", "without"]

Chain: TypeAlias = tuple[str, ...]


def balanced(current: Sequence[Chain], nodes: Sequence[str], replicas: int) -> list[Chain]:
    """The chains after a rebalance: the same number of actives and of replicas on each node, give or take
    one, as many copies as there are nodes for, and few moves.
    """
    copies = min(replicas, len(nodes) - 1)
    actives = _spread_actives(current, nodes)
    chains: list[list[str]] = []
    load = Counter(dict.fromkeys(nodes, 0))
    for chain, active in zip(current, actives, strict=True):
        kept = [node for node in chain if node in load and node != active][:copies]
        load.update(kept)
        chains.append([active, *kept])
    for chain_ in chains:
        while len(chain_) <= copies:
            node = min(
                (candidate for candidate in nodes if candidate not in chain_),
                key=lambda candidate: load[candidate],
            )
            load[node] += 1
            chain_.append(node)
    _even_out_replicas(chains, load)
    return [tuple(chain_) for chain_ in chains]


def _spread_actives(current: Sequence[Chain], nodes: Sequence[str]) -> list[str]:
    load = Counter(dict.fromkeys(nodes, 0))
    most = -(-len(current) // len(nodes))
    actives: list[str | None] = []
    for chain in current:
        active = chain[0] if chain and chain[0] in load and load[chain[0]] < most else None
        if active is not None:
            load[active] += 1
        actives.append(active)
    owners: list[str] = []
    for chain, active in zip(current, actives, strict=True):
        if active is None:
            # Prefer a node that has a copy already, if it has room: nothing has to be sent.
            least = min(load.values())
            near = [node for node in chain[1:] if node in load and load[node] == least]
            active = near[0] if near else min(nodes, key=load.__getitem__)
            load[active] += 1
        owners.append(active)
    while max(load.values()) - min(load.values()) > 1:
        giver, taker = max(nodes, key=load.__getitem__), min(nodes, key=load.__getitem__)
        owned = [number for number, active in enumerate(owners) if active == giver]
        moved = next((number for number in owned if taker in current[number]), owned[0])
        owners[moved] = taker
        load[giver] -= 1
        load[taker] += 1
    return owners


def _even_out_replicas(chains: list[list[str]], load: Counter[str]) -> None:
    while len(load) > 1:
        giver, taker = max(load, key=load.__getitem__), min(load, key=load.__getitem__)
        if load[giver] - load[taker] <= 1:
            return
        chain = next((other for other in chains if giver in other[1:] and taker not in other), None)
        if chain is None:
            return
        chain[chain.index(giver, 1)] = taker
        load[giver] -= 1
        load[taker] += 1


def without(chains: Iterable[Chain], dead: str, best: Callable[[int, Chain], str | None]) -> list[Chain]:
    """The chains without a node. For a vbucket that was active on it, ``best`` chooses which of the remaining
    copies becomes the active; None if none can.
    """
    left_chains = []
    for number, chain in enumerate(chains):
        left = tuple(node for node in chain if node != dead)
        if chain and chain[0] == dead:
            chosen = best(number, left) if left else None
            left = () if chosen is None else (chosen, *(node for node in left if node != chosen))
        left_chains.append(left)
    return left_chains


def best_copy(rows: Mapping[str, Mapping[str, Any]], branch: str | None) -> str | None:
    """The node whose copy of a vbucket replaces the active, which was on ``branch`` when it was last asked:
    of the copies that followed the active farthest, the one with the most complete data. Others may have
    more, but of a history that was abandoned.
    """

    def merit(name: str) -> tuple[bool, int, int]:
        branches = rows[name]["branches"]
        followed = sum(row["vb_uuid"] in branches for row in rows.values())
        return branch in branches, followed, rows[name]["complete_seqno"]

    return max(rows, key=merit, default=None)


def is_enough(heard: Iterable[str], chain: Chain, replicas: int) -> bool:
    """Whether these copies are enough to go on without the active: together they must have every write that
    was answered as durable. Each such write is on a majority of the copies, the active among them, so fewer
    copies may be missing than that majority has apart from the active.
    """
    copies = chain[1 : replicas + 1]
    missing = len(set(copies) - set(heard))
    majority = (replicas + 1) // 2 + 1
    return not missing or missing < majority - 1
