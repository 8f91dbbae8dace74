"""A connection that carries one reading after the other keeps its whole flow-control window."""

from __future__ import annotations

import tailrace
import tailrace.testing

WINDOW = 4 << 10


def test_a_reading_that_is_left_early_gives_its_bytes_back() -> None:
    """If what the application was given last were not acknowledged, the window would get smaller with every
    reading, until the node had to wait for ever.
    """
    with tailrace.testing.node(vbuckets=1) as node:
        for number in range(40):
            node.set(f"k{number}", {"pad": "x" * 200})
        with tailrace.connect_sync(node.url, flow_control_buffer=WINDOW) as source:
            for _ in range(20):
                for _ in source.portions("beginning", "now"):
                    break
            rows = sum(batch.num_rows for batch in source.batches("beginning", "now"))
            assert source.stats()["lost_connections"] == 0
    assert rows == 40
