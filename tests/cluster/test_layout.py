"""The layout of a cluster, for any cluster."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tailrace.cluster.layout import Chain, balanced, is_enough, without

NODES = ["n1", "n2", "n3", "n4", "n5"]


@st.composite
def chains(draw: st.DrawFn) -> list[Chain]:
    count = draw(st.sampled_from([1, 4, 16, 64]))
    chain = st.permutations(NODES).flatmap(
        lambda order: st.integers(0, 3).map(lambda length: tuple(order[:length]))
    )
    return draw(st.lists(chain, min_size=count, max_size=count))


def spread(load: Counter[str], nodes: list[str]) -> int:
    return max(load[node] for node in nodes) - min(load[node] for node in nodes)


@given(chains(), st.integers(1, 5), st.integers(0, 3))
def test_a_balanced_cluster_is_even_and_has_all_its_copies(
    current: list[Chain], count: int, replicas: int
) -> None:
    nodes = NODES[:count]
    after = balanced(current, nodes, replicas)
    assert len(after) == len(current)
    for chain in after:
        assert len(chain) == min(replicas, count - 1) + 1
        assert len(set(chain)) == len(chain)
        assert set(chain) <= set(nodes)
    assert spread(Counter(chain[0] for chain in after), nodes) <= 1
    assert balanced(after, nodes, replicas) == after, "a second rebalance has nothing to do"


@given(st.sampled_from([4, 16, 64]), st.integers(1, 4), st.integers(0, 2))
def test_a_node_that_comes_gets_its_share_and_no_more_moves_than_that(
    vbuckets: int, count: int, replicas: int
) -> None:
    before = balanced([()] * vbuckets, NODES[:count], replicas)
    after = balanced(before, NODES[: count + 1], replicas)
    moved = sum(chain[0] != other[0] for chain, other in zip(before, after, strict=True))
    assert moved <= -(-vbuckets // (count + 1))


def test_the_best_copy_goes_on_when_a_node_is_gone() -> None:
    current = [("a", "b", "c"), ("b", "a"), ("a",), ()]
    asked = []

    def best(number: int, left: Chain) -> str | None:
        asked.append((number, left))
        return left[-1]

    assert without(current, "a", best) == [("c", "b"), ("b",), (), ()]
    assert asked == [(0, ("b", "c"))]


@given(st.integers(0, 4), st.integers(1, 5), st.data())
def test_enough_copies_have_what_a_majority_had(replicas: int, length: int, data: st.DataObject) -> None:
    chain = tuple(NODES[: min(length, replicas + 1)])
    heard = data.draw(st.sets(st.sampled_from(NODES)))
    others = data.draw(st.permutations(chain[1:]))
    majority = (replicas + 1) // 2 + 1
    had = others[: majority - 1]  # and the active
    if is_enough(heard, chain, replicas) and len(had) == majority - 1 > 0:
        assert set(had) & heard
    assert is_enough(chain, chain, replicas)
