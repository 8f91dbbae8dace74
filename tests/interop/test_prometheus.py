"""A real Prometheus scrapes a node: rules and configuration are good, and an alert rises and falls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ports import ReservedPort

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
PATIENCE_S = 240.0

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs prometheus (Debian's package)"),
]


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_configuration_are_good() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        return json.load(answer)


def wait_for(condition: Callable[[], bool], otherwise: str = "") -> None:
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < ends, otherwise
        time.sleep(0.1)


def test_a_failover_that_loses_changes_raises_an_alert(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "4"]
    command += ["--http-port", "0", "--fault-token", "letmein", "--ready-file", str(ready)]
    # the rules as they are, over a shorter time
    (tmp_path / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text().replace("[15m]", "[8s]"))
    port = ReservedPort()
    listen = f"127.0.0.1:{port.number}"
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as node:
        try:
            wait_for(ready.exists)
            told = json.loads(ready.read_text())
            page = f"127.0.0.1:{told['web_port']}"
            (tmp_path / "prometheus.yml").write_text(
                "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\n"
                f"scrape_configs: [{{job_name: tailrace-node, static_configs: [{{targets: ['{page}']}}]}}]\n"
            )
            server = ["prometheus", f"--config.file={tmp_path}/prometheus.yml"]
            server += [f"--web.listen-address={listen}", f"--storage.tsdb.path={tmp_path}/data"]
            port.close()  # it does not set SO_REUSEADDR on all systems
            with subprocess.Popen(server, stdout=log, stderr=log) as prometheus:
                try:
                    _watch(f"http://{listen}", f"http://{page}", told["port"])
                finally:
                    prometheus.terminate()
                    prometheus.wait(PATIENCE_S)
        finally:
            node.terminate()
            assert node.wait(PATIENCE_S) == 0


def _watch(prometheus: str, node: str, port: int) -> None:
    def value(query: str) -> float:
        result = get(f"{prometheus}/api/v1/query?query={query}")["data"]["result"]
        return float(result[0]["value"][1]) if result else -1.0

    def alerts() -> set[str]:
        content = get(f"{prometheus}/api/v1/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in content}

    url = f"couchbase://127.0.0.1:{port}"
    load = [sys.executable, "-m", "tailrace", "load", url, "--docs", "40"]
    subprocess.run(load, check=True, capture_output=True)
    wait_for(lambda: value("sum(tailrace_bucket_documents)") == 40)
    wait_for(lambda: value("tailrace_bucket_lost_changes_total") == 0)
    assert "TailraceChangesLost" not in alerts()
    request = urllib.request.Request(
        f"{node}/faults/rewind",
        data=b'{"vbucket": "all", "lose": 2}',
        headers={"Authorization": "Bearer letmein"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert len(json.load(answer)) == 4
    wait_for(lambda: "TailraceChangesLost" in alerts())
    assert value("tailrace_bucket_lost_changes_total") == 8
    assert any(event["event"] == "failover" for event in get(f"{node}/api/events")["events"])
    wait_for(lambda: "TailraceChangesLost" not in alerts())
