"""One node consumes and produces all four dialects together, on one port and with the same data."""

from __future__ import annotations

import contextlib
import random
import time

import tailrace.testing
from dialects.raw_peer import ACK, LIST, Peer, until, vbucket_list
from dialects.relay import Relay
from dialects.stored import all_documents
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState

VBUCKETS = 4
ASKED = ("dcp", "upr-a", "upr-b")
EVERY = vbucket_list(*range(VBUCKETS))


def write(node: RunningNode, rng: random.Random, count: int) -> None:
    for _ in range(count):
        key, vbucket = f"k{rng.randrange(40)}", rng.randrange(VBUCKETS)
        what = rng.random()
        if what < 0.2 and node.get(key, vbucket=vbucket) is not None:
            node.delete(key, vbucket=vbucket)
        elif what < 0.25:
            node.set(key, b"short-lived", expiry=int(time.time()) - 5, vbucket=vbucket)
            assert node.get(key, vbucket=vbucket) is None
        else:
            expiry = 2_000_000_000 if what < 0.4 else 0
            node.set(key, {"n": rng.random()} if what < 0.7 else b"\xff" * 50, expiry=expiry, vbucket=vbucket)


def test_one_node_consumes_and_produces_all_four() -> None:
    rng = random.Random(6)
    with contextlib.ExitStack() as stack:
        first, middle, *last = (stack.enter_context(tailrace.testing.node(VBUCKETS)) for _ in range(6))
        for node in (middle, *last):
            for number in range(VBUCKETS):
                node.set_vbucket_state(number, VBucketState.REPLICA)
        write(first, rng, 200)
        for number, dialect in enumerate(ASKED):
            middle.replicate([number], first, dialect=dialect)
        stack.enter_context(Relay(first, middle, b"to-middle", ACK | LIST, vbucket_list(3)))
        for node, dialect in zip(last, ASKED, strict=False):
            node.replicate(range(VBUCKETS), middle, dialect=dialect)
        stack.enter_context(Relay(middle, last[3], b"from-middle", ACK | LIST, EVERY))

        def are_equal() -> bool:
            expected = all_documents(first, deletions=True)
            return all(all_documents(node, deletions=True) == expected for node in (middle, *last))

        for _ in range(3):
            write(first, rng, 100)
            until(are_equal, "all six nodes are equal")
        with Peer(middle) as peer:
            figures = {**peer.stats("dcp"), **peer.stats("tap")}
        kinds = [(name.rpartition(":")[2], value) for name, value in figures.items()]
        produced = {value for name, value in kinds if name == "dialect"}
        assert {"upr-a", "upr-b"} <= produced
        assert kinds.count(("type", "producer")) == 4
        assert ("type", "consumer") in kinds  # the one by TAP; the others are connections that it made
        rows = middle.replication_status()
        assert [rows[str(number)]["dialect"] for number in range(3)] == list(ASKED)
