"""What is exported for Prometheus is what is declared and documented; health is asked over real sockets."""

from __future__ import annotations

import base64
import json
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tailrace
from certificates import make_certificate
from cli.test_serve import serving
from server.controller import Controller, marker, mutation
from server.serverkit import Bench, Wire, ask
from tailrace.files import MemoryFiles
from tailrace.model import Position
from tailrace.server.node import Node
from tailrace.spark.rounds.progress import RoundProgress, Standing, TableCounts, TableFigures
from tailrace.store.base import StoreSettings
from tailrace.store.engine import Engine
from tailrace.testing.running import RunningNode
from tailrace.web import HttpFigures, HttpOptions, HttpThread
from tailrace.web.figures import (
    MIRROR,
    MIRROR_VBUCKETS,
    NODE,
    READER,
    READER_VBUCKETS,
    VBUCKETS,
    FigureSheet,
    MetricDeclaration,
)
from tailrace.web.http import exposition_text
from tailrace.web.mirror_figures import MirrorFigures
from tailrace.web.node_figures import gather_node_figures
from tailrace.web.node_view import gather_node_view
from tailrace.web.reader_figures import ReaderFigures
from tailrace.wire import admin, dcp, kv
from tailrace.wire.codes import TapOpaque, VBucketState
from tailrace.wire.tap import TapCheckpointStart, TapOpaqueMessage

DOCS = Path(__file__).resolve().parents[2] / "docs"


def figures(text: bytes | str) -> dict[str, dict[tuple[str, ...], float]]:
    """By name, the value for each combination of label values."""
    by_name: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode()):
        for sample in family.samples:
            by_name.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return by_name


def without_suffix(names: set[str]) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def declared(*groups: Sequence[MetricDeclaration]) -> set[str]:
    return {metric.name for group in groups for metric in group}


def whole_sheet(node: Node) -> bytes:
    *_, sheet = gather_node_figures(node, (3, 4), vbuckets=True)
    return exposition_text(sheet)


def test_a_node_exports_all_that_is_declared_and_it_agrees_with_stats() -> None:
    with RunningNode(vbuckets=2) as node, tailrace.connect_sync(node.url) as source:
        node.set_many({f"key{number}": {"n": number} for number in range(40)})
        assert sum(1 for _ in source.changes(end="now")) >= 40
        node.persist()
        node.call(lambda inner: inner.events.record("failover", bucket="default"))
        readings = source.portions("beginning")
        next(iter(readings))
        exported = figures(node.call(whole_sheet))
        assert without_suffix(set(exported)) == declared(NODE, VBUCKETS)
        assert sum(exported["tailrace_bucket_documents"].values()) == 40
        assert sum(exported["tailrace_vbucket_high_seqno"].values()) == 40
        assert exported["tailrace_bucket_flush_queue_changes"] == {("default",): 0}
        assert exported["tailrace_node_events_total"] == {("failover",): 1}
        (streams,) = exported["tailrace_stream_vbuckets"].values()
        assert streams == 2
        assert exported["tailrace_stream_lag_changes"].keys() == exported["tailrace_stream_vbuckets"].keys()
        count = exported["tailrace_bucket_flush_duration_seconds_count"]["default",]
        assert count == node.call(lambda inner: inner.buckets["default"].work.flush_times.count) > 0
        by_bound = [
            value
            for labels, value in exported["tailrace_bucket_flush_duration_seconds_bucket"].items()
            if "default" in labels
        ]
        assert by_bound == sorted(by_bound) and by_bound[-1] == count


def test_a_node_shows_what_it_receives() -> None:
    """By DCP its streams and what it has not acknowledged, by TAP the vbuckets that are being filled."""
    with (
        RunningNode(vbuckets=4) as node,
        Controller(node.port) as dcp_peer,
        Wire(node.port) as tap_peer,
    ):
        for vbucket in range(4):
            node.set_vbucket_state(vbucket, VBucketState.REPLICA)
        opaques = [dcp_peer.begin(vbucket) for vbucket in (0, 3)]
        changes = [marker(opaques[0], 0, 2), mutation(opaques[0], 1)]
        for message in changes:
            assert dcp_peer.status_of(message) == 0
        for vbucket in (1, 2):
            filling = TapOpaqueMessage(code=TapOpaque.INITIAL_VBUCKET_STREAM, vbucket=vbucket, tap_flags=1)
            assert tap_peer.call(filling).status == 0
        assert tap_peer.call(TapCheckpointStart(checkpoint_id=1, vbucket=2, tap_flags=1)).status == 0
        exported = figures(node.call(whole_sheet))
        vbuckets = {labels[1:3]: count for labels, count in exported["tailrace_stream_vbuckets"].items()}
        assert vbuckets == {("dcp", "replica"): 2, ("tap", "replica"): 1}
        unacknowledged = exported["tailrace_stream_unacknowledged_bytes"]
        sizes = {labels[1]: size for labels, size in unacknowledged.items()}
        assert sizes == {"dcp": sum(len(message.encode()) for message in changes), "tap": 0}
        *_, view = node.call(lambda inner: list(gather_node_view(inner, has_faults=False)))
        shown = {stream["dialect"]: (stream["streams"], stream["why"]) for stream in view["streams"]}
        assert shown == {"dcp": (2, "receives"), "tap": (1, "receives")}


def test_a_scrape_reads_no_document_and_lets_others_go_on_in_between() -> None:
    """After a start no key is in memory; reading all of them to count the dead would stop the node."""
    files, settings = MemoryFiles(), StoreSettings(history_changes=0)
    manifest = {"name": "_default", "uid": "0", "collections": [{"name": "other", "uid": "8"}]}
    engine = Engine(files=files, settings=settings)
    bucket: Any = engine.create_bucket("default", 16)
    bucket.set_manifest(json.dumps({"uid": "1", "scopes": [manifest]}).encode())
    for number in range(64):
        bucket.vbuckets[number % 16].set(b"\x08key%d" % number, b"value")
    bucket.vbuckets[3].delete(b"\x08key3")
    bucket.seal()
    engine.close()
    node = Node(Engine(files=files, settings=settings))
    stored: Any = node.buckets["default"].store

    def exported() -> dict[str, dict[tuple[str, ...], float]]:
        *sheets, last = gather_node_figures(node, (0, 0), vbuckets=False)
        assert len(sheets) > 16
        return figures(exposition_text(last))

    counted = exported()
    assert sum(counted["tailrace_bucket_documents"].values()) == 63
    assert counted["tailrace_bucket_compaction_debt_changes"] == {("default",): 1}
    assert counted["tailrace_bucket_tombstones"] == {("default",): 0}
    assert stored.vbuckets[3].get(b"\x08key3") is None
    assert exported()["tailrace_bucket_tombstones"] == {("default",): 1}


def test_no_names_of_streams_make_a_scrape_unreadable() -> None:
    """Prometheus rejects a whole answer in which a series appears twice."""
    bench = Bench()
    for name in (b"\xff", b"\\xff", b"\\xff#2", b'"\n}'):
        ask(bench, bench.session(), dcp.DcpOpen(key=name, flags=1))
    series = [
        line.rpartition(" ")[0]
        for line in whole_sheet(bench.node).decode().splitlines()
        if line.startswith("tailrace_stream_vbuckets{")
    ]
    assert len(series) == len(set(series)) == 4
    assert len(figures(whole_sheet(bench.node))["tailrace_stream_vbuckets"]) == 4


def test_a_rewind_is_counted_with_what_it_lost() -> None:
    bench = Bench(vbuckets=2)
    session = bench.session()
    for key in (b"a", b"b", b"c"):
        ask(bench, session, kv.Set(key=key, value=b"1", vbucket=1))
    ask(bench, session, admin.Rewind(mode=0, number=1, value=b"\0\1"))
    exported = figures(whole_sheet(bench.node))
    assert exported["tailrace_bucket_failovers_total"] == {("default",): 1}
    assert exported["tailrace_bucket_lost_changes_total"] == {("default",): 2}
    assert exported["tailrace_node_events_total"] == {("failover",): 1}
    (event,) = bench.node.events.recent
    assert (event["event"], event["vbuckets"], event["from_seqno"], event["to_seqno"]) == (
        "failover",
        "1",
        3,
        1,
    )


def test_what_is_made_again_after_a_rewind_was_lost_all_the_same() -> None:
    """Collections are made again on the new branch: these changes must not reduce the count of lost ones."""
    bench = Bench(vbuckets=2)
    bucket = bench.node.buckets["default"]
    session = bench.session()
    for key in (b"a", b"b", b"c", b"d"):
        ask(bench, session, kv.Set(key=key, value=b"1", vbucket=1))
    with bench.node.watching_history(bucket, [1], "failover", why="rewind"):
        bucket.store.rollback({1: 2}, branch=True)
        ask(bench, session, kv.Set(key=b"again", value=b"1", vbucket=1))
    assert bucket.lost_changes == 2
    (event,) = bench.node.events.recent
    assert (event["from_seqno"], event["to_seqno"], event["lost_changes"]) == (4, 2, 2)


def test_a_mirror_exports_all_that_is_declared() -> None:
    mirror = MirrorFigures("default", "people")
    assert mirror.why_not_ready() == "no round is committed yet: starting"
    counts = TableCounts(40, 40, 6, 900, 9)
    tables = (TableFigures("people", 4, 30, 7, 120.0, 5, counts),)
    mirror.standing = lambda: Standing(0.0, (7,))
    mirror.add(
        RoundProgress(
            3,
            40,
            (1, 2),
            (5,),
            rows_written=40,
            rows_masked=6,
            rows_rolled_back=9,
            bytes_written=900,
            lag_changes=7,
            lag_s=0.5,
            seconds={"plan": 0.1, "read": 2.0},
            positions={0: Position(1, 12, 12, 12)},
            behind={1: 7},
            compacted="12 files",
            tables=tables,
        )
    )
    exported = figures(exposition_text(mirror.metrics(vbuckets=True)))
    assert without_suffix(set(exported)) == declared(MIRROR, MIRROR_VBUCKETS)
    place, of_table = ("default", "people"), ("default", "_default._default", "people")
    assert exported["tailrace_mirror_rolled_back_rows_total"] == {of_table: 9}
    assert exported["tailrace_mirror_undo_depth_seconds"] == {of_table: 120}
    assert exported["tailrace_mirror_vbucket_seqno"] == {(*place, "0"): 12}
    assert exported["tailrace_mirror_vbucket_lag_changes"] == {(*place, "0"): 0, (*place, "1"): 7}
    assert exported["tailrace_mirror_round_duration_seconds_sum"]["default", "read", "people"] == 2
    assert exported["tailrace_mirror_lag_seconds"][of_table] >= 0.5
    assert exported["tailrace_mirror_lag_changes"] == {of_table: 7}
    assert [event["event"] for event in mirror.stats()["events"]] == ["rollback", "compaction"]
    assert mirror.why_not_ready() == ""


def test_a_mirror_that_waits_for_something_to_get_better_is_in_trouble() -> None:
    mirror = MirrorFigures("default", "people")

    def says(message: str) -> bool:
        mirror.status = {"message": message}
        in_trouble: bool = mirror.stats()["mirror"]["trouble"]
        return in_trouble

    assert not says("waiting for changes")
    mirror.trouble("the bucket can't be reached: refused")
    assert says("the bucket can't be reached: refused")
    assert says("waiting for nodes; 64 vbuckets: 127.0.0.1:1 (refused)")
    assert not says("round 7: reading 3 changes of 1 vbucket")


def test_what_happens_often_pushes_no_rollback_out() -> None:
    """Otherwise the page would say that all is in step before the rollback was verified."""
    mirror = MirrorFigures("default", "people")
    mirror.add(RoundProgress(3, 40, (1,), (5,), rows_rolled_back=1))
    for number in range(1_000):
        mirror.trouble(f"the bucket can't be reached: attempt {number}")
    kept = mirror.stats()["events"]
    assert len(kept) == 500
    assert [event["event"] for event in kept[:2]] == ["rollback", "trouble"]
    assert kept[-1]["text"].endswith("attempt 999")


def test_one_rollback_is_told_in_the_singular() -> None:
    mirror = MirrorFigures("default", "people")
    mirror.add(RoundProgress(3, 40, (1,), (5,), rows_rolled_back=1))
    assert [event["text"] for event in mirror.stats()["events"]] == ["1 vbucket, 1 row"]


def test_the_page_has_every_metric() -> None:
    names = re.findall(r"^\| `(tailrace_\w+)` \|", (DOCS / "metrics.md").read_text(), re.M)
    assert len(names) == len(set(names))
    assert set(names) == declared(NODE, VBUCKETS, READER, READER_VBUCKETS, MIRROR, MIRROR_VBUCKETS)


def test_names_and_units_are_those_of_prometheus() -> None:
    for metric in (*NODE, *VBUCKETS, *READER, *READER_VBUCKETS, *MIRROR, *MIRROR_VBUCKETS):
        assert re.fullmatch(r"tailrace(_[a-z]+)+", metric.name), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.kind != "histogram" or metric.name.endswith("_seconds"), metric.name
        assert metric.about.endswith((".", "…"))


# over sockets


@contextmanager
def opened(url: str, login: str = "", context: ssl.SSLContext | None = None) -> Iterator[Any]:
    headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()} if login else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=60, context=context
        ) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            yield error


def test_a_reader_serves_its_figures_with_a_login() -> None:
    reader = ReaderFigures("tail", "default")
    shown = HttpFigures("reader", reader.stats, reader.metrics, reader.why_not_ready)
    with (
        RunningNode(vbuckets=4) as node,
        HttpThread(HttpOptions(0, users={"ada": "secret"}), shown) as beside,
    ):
        base = f"http://127.0.0.1:{beside.port}"
        node.set_many({f"key{number}": number for number in range(20)})
        with opened(f"{base}/readyz") as answer:
            assert (answer.status, answer.read()) == (503, b"it is not connected yet\n")
        with tailrace.connect_sync(node.url, on_open=reader.watch) as source:
            assert sum(1 for _ in source.changes(end="now")) >= 20
            for path, login, status in (
                ("/healthz", "", 200),
                ("/readyz", "", 200),
                ("/metrics", "", 401),
                ("/metrics", "ada:wrong", 401),
                ("/metrics", "ada:secret", 200),
                ("/metrics?vbuckets=1", "ada:secret", 200),
                ("/", "ada:secret", 200),
                ("/nothing", "ada:secret", 404),
            ):
                with opened(base + path, login) as answer:
                    assert answer.status == status, path
            with opened(f"{base}/metrics", "ada:secret") as answer:
                exported = figures(answer.read())
            mine = {name for name in exported if name.startswith("tailrace")}
            assert mine == declared(READER)
            assert "process_cpu_seconds_total" in exported
            assert exported["tailrace_reader_changes_total"] == {("default",): 20}
            assert exported["tailrace_reader_lag_changes"] == {("default",): 0}
            assert exported["tailrace_reader_lag_seconds"] == {("default",): 0}
            node.set("late", 1)
            with opened(f"{base}/api/stats", "ada:secret") as answer:
                assert json.load(answer)["lag_changes"] == 1
            with opened(f"{base}/metrics?vbuckets=1", "ada:secret") as answer:
                exported = figures(answer.read())
            behind = exported["tailrace_reader_vbucket_lag_changes"]
            assert (len(behind), sum(behind.values())) == (4, 1)
            assert sum(exported["tailrace_reader_vbucket_seqno"].values()) == 20
        with opened(f"{base}/metrics", "ada:secret") as answer:
            assert figures(answer.read())["tailrace_reader_changes_total"] == {("default",): 20}, (
                "the last known"
            )
    assert not any(thread.name == "tailrace-http" for thread in threading.enumerate())


def test_a_reader_counts_what_was_taken_back_and_what_came_on_connections_that_are_gone() -> None:
    reader = ReaderFigures("tail", "default")

    def exported() -> dict[str, float]:
        told = figures(exposition_text(reader.metrics(vbuckets=False)))
        return {name: next(iter(told[f"tailrace_reader_{name}_total"].values())) for name in names}

    names = ("received_bytes", "rollbacks", "rolled_back_changes", "lost_connections")
    with RunningNode(vbuckets=2) as node, tailrace.connect_sync(node.url, on_open=reader.watch) as source:
        for number in range(6):
            node.set(f"k{number}", b"x" * 1_000, vbucket=0)
        changes = iter(source.changes())
        while getattr(next(changes), "seqno", 0) < 6:
            pass
        before = exported()
        assert (before["rollbacks"], before["rolled_back_changes"]) == (0, 0)
        assert before["received_bytes"] > 6_000
        node.rewind(0, 2)
        rollback = next(change for change in changes if isinstance(change, tailrace.Rollback))
        node.drop_connections()
        node.set("new", b"x", vbucket=0)
        assert any(getattr(change, "key", b"") == b"new" for change in changes)
        after = exported()
    assert (after["rollbacks"], after["rolled_back_changes"]) == (1, 6 - rollback.seqno)
    assert after["lost_connections"] == 1
    assert after["received_bytes"] > before["received_bytes"], "a counter never falls"


def test_a_node_serves_them_over_tls_as_its_users_log_in(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "node")
    context = ssl.create_default_context(cafile=str(cert))
    options = (
        "--tls-cert",
        str(cert),
        "--tls-key",
        str(key),
        "--tls-port",
        "0",
        "--user",
        "ada:secret",
        "--fenced",
    )
    with serving(tmp_path, "--memory", "--vbuckets", "2", "--http-port", "0", *options) as (_, ready):
        base = f"https://127.0.0.1:{ready['web_port']}"
        with opened(f"{base}/healthz", context=context) as answer:
            assert answer.status == 200
        with opened(f"{base}/readyz", context=context) as answer:
            assert (answer.status, b"cluster map" in answer.read()) == (503, True)
        with opened(f"{base}/metrics", "ada:wrong", context) as answer:
            assert answer.status == 401
        with opened(f"{base}/metrics?vbuckets=1", "ada:secret", context) as answer:
            exported = figures(answer.read())
        assert exported["tailrace_node_ready"] == {(): 0}
        assert exported["tailrace_node_logins_refused_total"] == {(): 1}
        assert exported["tailrace_bucket_vbuckets"]["default", "active"] == 0


@pytest.mark.parametrize("path", ["/api/events", "/metrics"])
def test_only_get(path: str, tmp_path: Path) -> None:
    beside = HttpThread(HttpOptions(0), HttpFigures("reader", dict, lambda _: FigureSheet(()), lambda: ""))
    with beside:
        request = urllib.request.Request(f"http://127.0.0.1:{beside.port}{path}", data=b"x")
        with pytest.raises(urllib.error.HTTPError, match=r"405|404"):
            urllib.request.urlopen(request, timeout=60)


def test_who_is_busy_is_alive() -> None:
    """Figures wait for the command; a health check does not wait for them."""
    busy, asked = threading.Event(), threading.Event()

    def stats() -> dict[str, int]:
        asked.set()
        assert busy.wait(60)
        return {}

    shown = HttpFigures("reader", stats, lambda _vbuckets: FigureSheet(READER), lambda: "")
    with HttpThread(HttpOptions(0), shown) as beside:
        base = f"http://127.0.0.1:{beside.port}"
        waiting = threading.Thread(target=lambda: urllib.request.urlopen(f"{base}/api/stats").read())
        waiting.start()
        try:
            assert asked.wait(60)
            with urllib.request.urlopen(f"{base}/healthz", timeout=20) as answer:
                assert answer.status == 200
        finally:
            busy.set()
            waiting.join()
