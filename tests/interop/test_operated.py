"""An operator's day in one test: node, mirror and Prometheus run, a failover loses changes, and it is seen
everywhere: the alert rises and falls, the event is on both pages (screenshots are kept), in both logs, in the
metrics; and table and bucket are equal afterwards.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from interop.test_pages_in_chromium import CHROMIUM, browse
from interop.test_prometheus import DEPLOY, PATIENCE_S, get, wait_for
from ports import ReservedPort

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian's package)"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package)"),
]
LOST = 3
VBUCKETS = 8


@contextmanager
def running(log: Path, *command: object) -> Iterator[None]:
    """A program in the background, with its log; it must end cleanly when told to."""
    words = [str(word) for word in command]
    with log.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=file) as process:
        try:
            yield
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            code = process.wait(PATIENCE_S)
        assert code == 0, log.read_text()


def tailrace(*words: object) -> None:
    command = [sys.executable, "-m", "tailrace", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def events_in(log: Path, kind: str) -> list[dict[str, object]]:
    """The lines of a JSON log about one kind of event."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return [event for event in map(json.loads, lines) if event.get("event") == kind]


def queries() -> list[str]:
    """Everything that the dashboard draws or marks, and each side of what the alert rules compare."""
    board = json.loads((DEPLOY.parent / "grafana" / "tailrace.json").read_text())
    drawn = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    marked = [mark["target"]["expr"] for mark in board["annotations"]["list"]]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    watched = [rule["expr"] for group in rules for rule in group["rules"]]
    sides = [
        side
        for expression in (*marked, *watched)
        for side in re.split(r" (?:and|[<>]=?|==) ", expression)
        if not side.replace(".", "").isdigit()
    ]
    assert len(drawn) > 30 and len(marked) == 2 and len(sides) > 15
    return list(dict.fromkeys(drawn + sides))


def test_a_failover_is_seen_by_whoever_looks(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tailrace"]
    ready, table = tmp_path / "ready.json", tmp_path / "people"
    logs = {name: tmp_path / f"{name}.log" for name in ("node", "mirror", "reader", "prometheus")}
    quick = (DEPLOY / "alerts.yml").read_text().replace("[15m]", "[20s]")  # the rules, over a shorter time
    (tmp_path / "alerts.yml").write_text(quick)
    ports = ReservedPort(), ReservedPort(), ReservedPort()
    listen, mirror_http, reader_http = (f"127.0.0.1:{port.number}" for port in ports)
    with ExitStack() as stack:
        node = [*program, "serve", "--data", tmp_path / "data", "--port", "0", "--vbuckets", VBUCKETS]
        node += ["--http-port", "0", "--fault-token", "letmein", "--ready-file", ready]
        node += ["--log-level", "info", "--log-json"]
        stack.enter_context(running(logs["node"], *node))
        wait_for(ready.exists)
        told = json.loads(ready.read_text())
        url, node_http = f"couchbase://127.0.0.1:{told['port']}/default", f"127.0.0.1:{told['web_port']}"
        tailrace("load", url, "--docs", 400)

        mirror = [*program, "mirror", url, table, "--http-port", ports[1].number]
        ports[1].close()
        stack.enter_context(running(logs["mirror"], *mirror, "--log-level", "info", "--log-json"))
        reader = [*program, "tail", url, "--http-port", ports[2].number]
        ports[2].close()
        stack.enter_context(running(logs["reader"], *reader))
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            "rule_files: [alerts.yml]\nscrape_configs:\n"
            f"- {{job_name: tailrace-node, static_configs: [{{targets: ['{node_http}']}}]}}\n"
            f"- {{job_name: tailrace-mirror, static_configs: [{{targets: ['{mirror_http}']}}]}}\n"
            f"- {{job_name: tailrace-reader, static_configs: [{{targets: ['{reader_http}']}}]}}\n"
        )
        ports[0].close()
        prometheus = ["prometheus", f"--config.file={tmp_path}/prometheus.yml"]
        prometheus += [f"--web.listen-address={listen}", f"--storage.tsdb.path={tmp_path}/series"]
        stack.enter_context(running(logs["prometheus"], *prometheus))

        def answer_to(query: str) -> list[Any]:
            answer = get(f"http://{listen}/api/v1/query?query={urllib.parse.quote(query)}")
            result: list[Any] = answer["data"]["result"]
            return result

        def has_data(query: str) -> bool:
            return bool(answer_to(query))

        def value(query: str) -> float:
            result = answer_to(query)
            return float(result[0]["value"][1]) if result else -1.0

        def alerts() -> set[str]:
            raised = get(f"http://{listen}/api/v1/alerts")["data"]["alerts"]
            return {alert["labels"]["alertname"] for alert in raised if alert["state"] == "firing"}

        wanted = {"TailraceChangesLost", "TailraceMirrorRolledBack"}
        wait_for(lambda: value("tailrace_mirror_changes_total") == 400)
        wait_for(lambda: value("tailrace_mirror_lag_changes") == 0)
        wait_for(lambda: value("tailrace_bucket_lost_changes_total") == 0)
        assert not wanted & alerts()

        request = urllib.request.Request(
            f"http://{node_http}/faults/failover",
            data=json.dumps({"vbucket": "all", "lose": LOST}).encode(),
            headers={"Authorization": "Bearer letmein"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert len(json.load(answer)) == VBUCKETS

        seen: set[str] = set()

        def has_risen() -> bool:
            seen.update(wanted & alerts())  # one may have fallen when the other rises
            return seen == wanted

        wait_for(has_risen)
        assert value("tailrace_bucket_lost_changes_total") == LOST * VBUCKETS
        assert value("tailrace_mirror_rollbacks_total") == VBUCKETS
        rows = int(value("tailrace_mirror_rolled_back_rows_total"))
        assert rows >= LOST * VBUCKETS, "it goes back to a version of the table, and on from there"
        (failover,) = events_in(logs["node"], "failover")
        assert (failover["lost_changes"], failover["why"]) == (LOST * VBUCKETS, "failover")
        (back,) = events_in(logs["mirror"], "rollback")
        assert int(str(back["rows_gone"])) + int(str(back["rows_back"])) == rows

        for query in queries():
            wait_for(partial(has_data, query), f"no data for {query}")

        tailrace("verify", url, table)  # exit code 0: they are equal
        page = browse(f"http://{node_http}/", tmp_path / "one", "operated-node")
        assert f"has lost {LOST * VBUCKETS} changes in {VBUCKETS} failovers" in page
        assert 'data-event="failover"' in page
        page = browse(f"http://{mirror_http}/", tmp_path / "two", "operated-mirror")
        assert f"and the table followed: {rows} rows" in page
        assert 'data-event="rollback"' in page and 'class="mark"' in page
        assert ">equal</span>" in page and "Verify has since found them equal." in page

        wait_for(lambda: not wanted & alerts())
        assert "letmein" not in "".join(log.read_text() for log in logs.values())
