"""What the charts of the pages draw is kept for an hour, whether or not somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from typing import Any

import pytest

import tailrace
from server.serverkit import Bench, ask
from tailrace.clock import ManualClock
from tailrace.server.http import HttpRequest
from tailrace.spark.rounds.progress import RoundProgress, Standing, TableFigures
from tailrace.testing.running import RunningNode
from tailrace.web import ChartSamples, HttpFigures, HttpOptions, HttpThread, keep_samples
from tailrace.web.chart_samples import EVERY_S
from tailrace.web.mirror_figures import MirrorFigures
from tailrace.web.node_view import gather_node_sample
from tailrace.web.reader_figures import ReaderFigures
from tailrace.wire import kv


def get(port: int, target: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{target}", timeout=60) as answer:
        return json.load(answer)


def test_an_hour_is_kept_and_no_more() -> None:
    clock = ManualClock(1_000)
    past = ChartSamples(clock)
    assert past.since(0)["samples"] == {}
    past.add({})
    assert past.since(0)["samples"] == {}, "nothing is known yet"
    for number in range(2_000):
        past.add({"writes": number, "lag": None})
        clock.advance(EVERY_S)
    kept = past.since(0)
    assert (kept["began"], kept["now"], kept["every_s"]) == (1_000, 11_000, EVERY_S)
    columns = kept["samples"]
    assert columns["writes"] == list(range(1_280, 2_000))
    assert columns["time"][-1] - columns["time"][0] == 3_600 - EVERY_S
    assert set(columns["lag"]) == {None}
    newer = past.since(columns["time"][-3])["samples"]
    assert newer == {"time": columns["time"][-2:], "writes": [1_998, 1_999], "lag": [None, None]}
    assert past.since(columns["time"][-1])["samples"] == {"time": [], "writes": [], "lag": []}


@pytest.mark.parametrize(
    ("moment", "status"), [("0", 200), ("1.5", 200), ("nan", 200), ("-inf", 200), ("x", 400)]
)
def test_who_asks_since_when(moment: str, status: int) -> None:
    past = ChartSamples()
    past.add({"writes": 1})
    answer = past.serve(HttpRequest("GET", "/api/past", "", {}, {"since": moment}, b"", ""))
    assert answer.status == status
    assert json.loads(answer.body)


def test_a_node_is_sampled_in_steps() -> None:
    bench = Bench(vbuckets=4, buckets=("default", "other"))
    session = bench.session()
    for key in (b"a", b"b", b"c"):
        ask(bench, session, kv.Set(key=key, value=b"1", vbucket=2))
    ask(bench, session, kv.Get(key=b"a", vbucket=2))
    *steps, sample = gather_node_sample(bench.node)
    assert len(steps) == len(bench.node.buckets) and all(step is sample for step in steps)
    waiting = sum(v.high_seqno - v.persisted_seqno for b in bench.node.buckets.values() for v in b.store)
    assert (sample["writes"], sample["reads"], sample["queued"]) == (3, 1, waiting)
    assert sample["sent_bytes"] > 0

    async def one_turn() -> ChartSamples:
        past = ChartSamples(bench.node.clock)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await keep_samples(bench.node, past)
        return past

    assert asyncio.run(one_turn()).since(0)["samples"]["writes"] == [3]


def test_a_mirror_is_sampled_with_the_worst_of_its_rounds() -> None:
    clock = ManualClock(1_000)
    mirror = MirrorFigures("default", "people", clock=clock)
    mirror.standing = lambda: Standing(clock.monotonic() - 0.25, (0,))
    assert mirror.sample() == {}
    tables = (TableFigures("one", 4, 30, 7, 120.0), TableFigures("two", 4, 30, 7, 60.0))
    for lag_s, lag_changes, read_s in ((0.5, 3, 0.2), (2.0, 900, 1.0), (0.25, 0, 0.1)):
        seconds = {"plan": 0.01, "read": read_s, "compaction": 99.0}
        progress = RoundProgress(
            0, 1, (), (1,), lag_s=lag_s, lag_changes=lag_changes, seconds=seconds, tables=tables
        )
        mirror.add(progress)
        clock.advance(1)
    sample = mirror.sample()
    assert (sample["lag_s"], sample["lag_changes"], sample["undo_s"]) == (2.0, 900, 60.0)
    assert (sample["read"], sample["plan"], sample["write"], "compaction" in sample) == (1.0, 0.01, 0, False)
    clock.advance(EVERY_S)
    sample = mirror.sample()
    assert (sample["lag_s"], sample["lag_changes"], sample["read"]) == (0.25, 0, 0), "no round since"


def test_a_mirror_that_stands_still_gets_later_in_its_samples() -> None:
    clock = ManualClock(1_000)
    mirror = MirrorFigures("default", "people", clock=clock)
    standing = Standing(clock.monotonic() - 1, (5,))
    mirror.standing = lambda: standing
    mirror.add(RoundProgress(0, 1, (), (1,), lag_s=1.0, lag_changes=5))
    clock.advance(60)
    assert (mirror.sample()["lag_s"], mirror.sample()["lag_changes"]) == (61.0, 5)


def test_a_reader_is_sampled_while_nobody_looks() -> None:
    reader = ReaderFigures("tail", "default")
    shown = HttpFigures("reader", reader.stats, reader.metrics, reader.why_not_ready, reader.sample)
    assert reader.sample() == {}
    with RunningNode(vbuckets=4) as node, HttpThread(HttpOptions(0), shown) as beside:
        node.set_many({f"key{number}": number for number in range(20)})
        with tailrace.connect_sync(node.url, on_open=reader.watch) as source:
            assert sum(1 for _ in source.changes(end="now")) >= 20
            assert reader.sample() == {"changes": 20, "lag_changes": 0}
            # the first samples may be from before all was read
            while 20 not in get(beside.port, "/api/past")["samples"].get("changes", []):
                time.sleep(0.2)
