"""The pages in use, in a real Chromium: pointing, keys, the width of a phone and dark mode. Screenshots are
kept below build/screenshots.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from interop.browser import Browser, browsing
from interop.test_pages_in_chromium import CHROMIUM, SHOTS
from tailrace.clock import ManualClock
from tailrace.spark.rounds.progress import RoundProgress, Standing, TableFigures
from tailrace.web import ChartSamples, HttpFigures, HttpOptions, HttpThread
from tailrace.web.mirror_figures import MirrorFigures

pytestmark = [
    pytest.mark.interop,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package)"),
]
TEXT = "(document.body ? document.body.innerText : '')"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browsing(CHROMIUM, tmp_path / "profile") as made:
        yield made


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """The page of a loaded node with a stream."""
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    program = [sys.executable, "-m", "tailrace"]
    serve = [*program, "serve", "--memory", "--port", "0", "--vbuckets", "64", "--http-port", "0"]
    serve += ["--fault-token", "letmein", "--ready-file", str(ready)]
    with ExitStack() as stack, log.open("wb") as file:
        node = stack.enter_context(subprocess.Popen(serve, stdout=file, stderr=file))
        stack.callback(node.terminate)
        while not ready.exists():
            assert node.poll() is None, log.read_text()
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        url = f"couchbase://127.0.0.1:{told['port']}"
        subprocess.run([*program, "load", url, "--docs", "500"], check=True, capture_output=True)
        tail = stack.enter_context(subprocess.Popen([*program, "tail", url], stdout=file, stderr=file))
        stack.callback(tail.terminate)
        yield f"http://127.0.0.1:{told['web_port']}/"


def press_until(browser: Browser, key: str, wanted: str) -> None:
    """Press a key until something holds; there are few places to go to."""
    for _ in range(100):
        if browser.ask(wanted):
            return
        browser.press(key)
    raise AssertionError(f"{wanted} is not reached: {browser.ask('document.activeElement.outerHTML')}")


def test_a_disk_that_takes_nothing_is_not_well(browser: Browser, page: str) -> None:
    browser.go(page)
    browser.wait_for(f"{TEXT}.includes('All is well.')")
    for on, told in (("true", "be written to disk: changes stay in memory"), ("false", "All is well.")):
        request = urllib.request.Request(
            f"{page}faults/disk-full",
            data=f'{{"on": {on}}}'.encode(),
            headers={"Authorization": "Bearer letmein"},
        )
        urllib.request.urlopen(request, timeout=60).close()
        browser.wait_for(f"{TEXT}.includes('{told}')")
    browser.wait_for(f"{TEXT}.includes('flush_recovered')")


def test_a_node_by_keyboard_alone(browser: Browser, page: str) -> None:
    browser.resize(1100, 900)
    browser.go(page)
    browser.wait_for("document.querySelector('#streams button') && typeof charts === 'object' && charts.rate")
    focused = "document.activeElement && document.activeElement"
    press_until(browser, "Tab", f"{focused}.name === 'number'")
    browser.ask("document.activeElement.select()")
    browser.type("7")
    browser.press("Enter")
    browser.wait_for(
        f"{TEXT}.includes('vbucket 7 of default is active') && document.querySelector('ul.tree')"
    )

    press_until(browser, "Tab", f"{focused}.textContent === 'break'")
    browser.ask("window.before = document.activeElement")
    browser.wait_for("!window.before.isConnected")  # the table was drawn anew, as every two seconds
    assert browser.ask(f"{focused}.textContent === 'break'"), "and the focus is where it was"
    browser.press("Enter")
    browser.wait_for(f"{TEXT}.includes('Bearer TOKEN')")
    press_until(browser, "Tab", f"{focused}.name === 'token'")
    browser.type("letmein")
    browser.press("Enter")
    browser.wait_for(f"{TEXT}.includes('rewind: done')")
    browser.wait_for(f"{TEXT}.includes('has lost 1 change in 1 failover')")  # in the vbucket looked at
    browser.wait_for("document.querySelectorAll('#rate .mark').length >= 1")
    branches = "document.querySelectorAll('ul.tree')"
    browser.wait_for(f"{branches}.length === 2")
    browser.ask(f"window.before = {branches}[0].textContent")
    press_until(browser, "Tab", f"{focused}.value === 'failover'")
    browser.press("Enter")
    browser.wait_for(f"{TEXT}.includes('failover: done')")
    browser.wait_for(f"{TEXT}.includes('why=failover')")
    # another branch, in place of the one before it, on which nothing had been written
    browser.wait_for(f"{branches}.length === 2 && {branches}[0].textContent !== window.before")
    browser.wait_for("document.querySelector('#streams button')")  # the reader has come back
    browser.click("#streams button")
    browser.wait_for(f"{TEXT}.includes('drop: done') && {TEXT}.includes('fault kind=drop')")
    browser.keep(SHOTS / "node-by-keyboard.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_node_on_a_phone(browser: Browser, page: str, scheme: str) -> None:
    browser.resize(390, 844, mobile=True)
    browser.prefer(scheme)
    browser.go(page)
    browser.wait_for("document.querySelector('#streams button') && typeof charts === 'object' && charts.rate")
    assert browser.ask("document.documentElement.scrollWidth") <= 390, "nothing is beside the screen"
    dark = browser.ask(
        "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
    )
    assert ("255, 255, 255" in dark) == (scheme == "dark"), "the writing is light in the dark"
    browser.keep(SHOTS / f"node-phone-{scheme}.png")


def test_a_mirror_after_a_long_run(browser: Browser) -> None:
    """An hour of rounds: pointing shows the figures of a moment, and the charts the chosen time span."""
    clock = ManualClock(time.time() - 3700)
    figures, past = MirrorFigures("default", "people", clock=clock), ChartSamples(clock)
    figures.standing = lambda: Standing(clock.monotonic() - 0.4, (0,))
    seconds = {"plan": 0.1, "read": 0.4, "write": 0.3, "schedule": 0.1, "commit": 0.2, "maintain": 0.05}
    for number in range(740):
        back = (3, 4) if number in {100, 700} else ()
        tables = (TableFigures("people", 12 + number // 50, number % 340, 40, 3600.0 + 5 * number, number),)
        figures.add(
            RoundProgress(
                number,
                100,
                back,
                (number + 2,),
                lag_changes=number % 19,
                lag_s=0.5 + number % 7,
                rows_rolled_back=17 if back else 0,
                went_back={vbucket: (120 + vbucket, 100) for vbucket in back},
                seconds=seconds,
                tables=tables,
            )
        )
        past.add(figures.sample())
        clock.advance(5)
    shown = HttpFigures("mirror", figures.stats, figures.metrics, figures.why_not_ready, figures.sample, past)
    with HttpThread(HttpOptions(0), shown) as beside:
        browser.resize(1100, 900)
        browser.go(f"http://127.0.0.1:{beside.port}/")
        browser.wait_for(
            "window.uPlot && typeof charts === 'object' && charts.lag && charts.lag.data[0].length > 600"
        )
        shown_s = "charts.lag.scales.x.max - charts.lag.scales.x.min"
        assert 3500 < browser.ask(shown_s) <= 3700
        marks = "document.querySelectorAll('#lag .mark').length"
        assert browser.ask(marks) == 2, "both rollbacks are within the hour"
        caption = "document.querySelector('#lag figcaption').innerText"
        assert "most 6.5 s" in browser.ask(caption)
        browser.point_at("#lag .u-over", across=0.25)
        browser.wait_for(f"{caption}.includes('· at ')")
        browser.keep(SHOTS / "mirror-pointed-at.png")
        browser.point_at("h1")
        browser.wait_for(f"{caption}.includes('· most ')")
        browser.ask("document.getElementById('span').focus()")
        press_until(browser, "ArrowUp", "document.getElementById('span').value === '300'")
        browser.wait_for(f"{shown_s} <= 310")
        assert browser.ask(marks) == 1, "the older one is not"
        browser.resize(390, 844, mobile=True)
        browser.prefer("dark")
        browser.wait_for("document.documentElement.scrollWidth <= 390")
        browser.keep(SHOTS / "mirror-phone-dark.png")
