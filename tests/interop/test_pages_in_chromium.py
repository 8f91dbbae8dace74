"""What a person sees in a real browser: a node after load, a failover and a refused login; a mirror after a
rollback. Screenshots are kept below build/screenshots.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from html import unescape
from pathlib import Path

import pytest

from server.serverkit import Wire
from tailrace.clock import ManualClock
from tailrace.spark.rounds.progress import RoundProgress, Standing, TableFigures
from tailrace.web import ChartSamples, HttpFigures, HttpOptions, HttpThread
from tailrace.web.mirror_figures import MirrorFigures
from tailrace.wire import admin

CHROMIUM = shutil.which("chromium")
SHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package)"),
]


def browse(url: str, folder: Path, shot: str, *, dark: bool = False, width: int = 1100) -> str:
    """The text of a page after some seconds, with its attributes; the scripts have run by then."""
    assert CHROMIUM is not None
    SHOTS.mkdir(parents=True, exist_ok=True)
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += [f"--window-size={width},1500", "--hide-scrollbars", "--virtual-time-budget=9000"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    shown = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
    )
    subprocess.run(
        [*command, f"--screenshot={SHOTS / shot}.png", url], capture_output=True, timeout=120, check=True
    )
    return unescape(re.sub(r"<script.*?</script>", "", shown.stdout, flags=re.S))


def past_of(page: str) -> list[float]:
    with urllib.request.urlopen(f"{page}api/past", timeout=60) as answer:
        times: list[float] = json.load(answer)["samples"].get("time", [])
        return times


def test_a_node_after_load_failover_and_a_refused_login(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "64"]
    command += ["--http-port", "0", "--fault-token", "letmein", "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        try:
            while not ready.exists():
                assert node.poll() is None
                time.sleep(0.02)
            told = json.loads(ready.read_text())
            url = f"couchbase://127.0.0.1:{told['port']}"
            page = f"http://127.0.0.1:{told['web_port']}/"
            load = [sys.executable, "-m", "tailrace", "load", url, "--docs", "500"]
            subprocess.run(load, check=True, capture_output=True)
            while len(past_of(page)) < 3:
                time.sleep(0.5)
            before = browse(page, tmp_path / "one", "node-well")
            assert "All is well." in before and before.count('data-vbucket="') == 64
            assert re.search(r"<b>500</b><span[^>]*>documents", before)
            most = re.search(r"Writes and reads a second: writes 0, reads 0 · most (\d+)", before)
            assert most is not None and int(most[1]) > 10, "what was before the page was opened is drawn"
            with Wire(told["port"]) as wire:
                wire.call(admin.SaslAuth(key=b"PLAIN", value=b"\0ada\0wrong"))
            request = urllib.request.Request(
                f"{page}faults/rewind",
                data=b'{"vbucket": "0-9", "lose": 2}',
                headers={"Authorization": "Bearer letmein"},
            )
            urllib.request.urlopen(request, timeout=60).close()
            after = browse(page, tmp_path / "two", "node-after-failover")
            assert "has lost 20 changes in 10 failovers" in after
            assert 'data-event="failover"' in after and 'data-event="login_refused"' in after
            assert "why=rewind" in after and "letmein" not in after
            browse(page, tmp_path / "three", "node-phone-dark", dark=True, width=420)
        finally:
            node.terminate()
            assert node.wait(60) == 0


def test_a_mirror_after_a_rollback(tmp_path: Path) -> None:
    clock = ManualClock(time.time() - 100)
    figures, past = MirrorFigures("default", "people", clock=clock), ChartSamples(clock)
    figures.standing = lambda: Standing(clock.monotonic() - 1.4, (0,))
    seconds = {"plan": 0.1, "read": 0.4, "write": 0.3, "schedule": 0.1, "commit": 0.2, "maintain": 0.05}
    tables = (TableFigures("people", 12, 340, 40, 3600.0),)
    for number in range(20):
        back = (3, 4) if number == 12 else ()
        round_done = RoundProgress(
            number,
            100 + number,
            back,
            (number + 2,),
            rows_written=100,
            lag_changes=19 - number,
            lag_s=0.5 + number / 10,
            rows_rolled_back=17 if back else 0,
            went_back={vbucket: (120 + vbucket, 100) for vbucket in back},
            seconds=seconds,
            tables=tables,
        )
        figures.add(round_done)
        past.add(figures.sample())
        clock.advance(5)
    figures.last_verdict = lambda: {
        "time": time.time() - 86_400,
        "equal": True,
        "differences": 0,
        "documents": 2_190,
        "rows": 2_190,
        "table_version": 21,
        "behind": 0,
    }
    shown = HttpFigures("mirror", figures.stats, figures.metrics, figures.why_not_ready, figures.sample, past)
    with HttpThread(HttpOptions(0), shown) as beside:
        page = browse(f"http://127.0.0.1:{beside.port}/", tmp_path / "one", "mirror-after-rollback")
        figures.status = {"message": "waiting for nodes; 64 vbuckets: 127.0.0.1:1 (connection refused)"}
        alone = browse(f"http://127.0.0.1:{beside.port}/", tmp_path / "two", "mirror-without-a-node")
    assert "and the table followed: 17 rows" in page
    assert page.count('class="mark"') == 4, "the rollback is marked in every chart"
    assert re.search(r"Age of the table: \S+ s · most 2.4 s", page), "from before it was opened"
    assert re.search(r"<td class=\"n\">17</td>", page)
    assert "3: 123 → 100, 4: 124 → 100" in page and "13 → 14" in page
    assert "equal</span> on " in page
    assert "Not in step with all of the bucket, and the mirror keeps trying: waiting for nodes; 64 v" in alone
    assert 'id="verdict" role="status" aria-live="polite" class="bad"' in alone


def test_a_mirror_that_has_not_committed_yet_is_not_well_yet(tmp_path: Path) -> None:
    figures, past = MirrorFigures("default", "people"), ChartSamples(ManualClock(time.time()))
    figures.status = {"message": "round 0: reading 3,000 changes of 64 vbuckets"}
    shown = HttpFigures("mirror", figures.stats, figures.metrics, figures.why_not_ready, figures.sample, past)
    with HttpThread(HttpOptions(0), shown) as beside:
        page = browse(f"http://127.0.0.1:{beside.port}/", tmp_path / "one", "mirror-starting")
    assert 'class="waits">Nothing is committed yet: round 0: reading 3,000 changes' in page
    assert "known after the first round" in page
