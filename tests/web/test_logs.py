"""The log: one line per event, as text or JSON, and never a value or a password."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace
from server.serverkit import Bench, Wire, ask
from tailrace.logs import configure_logging, log_event
from tailrace.wire import admin, kv
from tailrace.wire.codes import Status

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) tailrace[\w.]*: .+")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("tailrace")
    before = root.handlers[:], root.level, ours.level
    yield io.StringIO()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.parametrize("as_json", [False, True])
def test_an_event_is_one_line_whatever_is_in_it(stream: io.StringIO, as_json: bool) -> None:
    configure_logging(stream, "info", as_json=as_json)
    log = logging.getLogger("tailrace.test")
    log_event(
        log,
        logging.INFO,
        "rollback",
        vbucket=7,
        name="two words",
        nasty="a\nb\x1b[0m\u202e",
        error=ValueError("x"),
    )
    log_event(log, logging.DEBUG, "not_shown")
    (line,) = stream.getvalue().splitlines()
    if as_json:
        content = json.loads(line)
        assert (content["event"], content["level"], content["vbucket"]) == ("rollback", "INFO", 7)
        assert content["nasty"] == "a\nb\x1b[0m\u202e" and content["error"] == "x"
    else:
        assert LINE.fullmatch(line)
        assert line.endswith(r'rollback vbucket=7 name="two words" nasty="a\nb\u001b[0m\u202e" error=x')


@pytest.mark.parametrize("as_json", [False, True])
def test_no_stream_and_no_message_makes_something_else_of_a_line(as_json: bool, stream: io.StringIO) -> None:
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, "ascii", "backslashreplace", write_through=True)  # as stderr may be
    configure_logging(narrow, "info", as_json=as_json)
    log = logging.getLogger("tailrace.test")
    log_event(log, logging.INFO, "joined", user="Zoë", share=float("nan"))
    log.info("refused: %s", "x\n2026-01-01T00:00:00.000Z ERROR tailrace: a line of the peer's")
    first, second = raw.getvalue().decode().splitlines()
    if as_json:
        assert json.loads(first, parse_constant=pytest.fail)["user"] == "Zoë"
        assert json.loads(second)["message"].startswith("refused: x\n")
    else:
        assert LINE.fullmatch(second)


def test_every_event_has_its_line_in_the_docs() -> None:
    source = DOCS.parent / "src" / "tailrace"
    text = "\n".join(path.read_text() for path in source.rglob("*.py") if path.name != "logs.py")
    used = set(re.findall(r'(?:record\(|log_event\(\s*\w+,\s*[\w.]+,)\s*"(\w+)"', text))
    used |= set(re.findall(r'watching_history\([^"]*"(\w+)"', text))
    used |= {"back_pressure_on", "back_pressure_off"}
    used |= {f"{what}_{how}" for what in ("flush", "maintenance") for how in ("failed", "recovered")}
    listed = re.findall(r"^\| (`.+?) \|", (DOCS / "logs.md").read_text(), re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) == used


def test_a_node_and_a_reader_never_log_values_or_passwords(stream: io.StringIO) -> None:
    """Everything that is logged while logins fail, documents are written, read, taken back and refused."""
    configure_logging(stream, "debug", as_json=False)
    with tailrace.testing.node(vbuckets=2, users={"ada": "p4ssw0rd-right"}) as node:
        with Wire(node.port) as wire:
            wrong = admin.SaslAuth(key=b"PLAIN", value=b"\0ada\0p4ssw0rd-wrong")
            assert wire.refused(wrong) == Status.AUTH_ERROR
        node.set("k3y", {"secret": "v4lue"}, vbucket=0)
        node.set("k3y", {"secret": "v4lue again"}, vbucket=0)
        url = node.url.replace("//", "//ada:p4ssw0rd-right@")
        with tailrace.connect_sync(url, allow_plain=True) as source:
            changes = iter(source.changes())
            assert next(change for change in changes if getattr(change, "key", b""))
            node.rewind(0, 1)
            assert any(isinstance(change, tailrace.Rollback) for change in changes)
    text = stream.getvalue()
    assert "login_refused" in text and "user=ada" in text
    assert "reader_must_roll_back" in text and re.search(
        r"rollback vbucket=0 from_seqno=\d+ to_seqno=\d+", text
    )
    for secret in ("p4ssw0rd", "v4lue", "k3y"):
        assert secret not in text


def test_back_pressure_is_told_when_it_begins_and_ends() -> None:
    bench = Bench(memory_quota=1 << 20)
    session = bench.session()
    bench.node.buckets["default"].store.persistence = False
    status = Status.SUCCESS
    for number in range(300):
        (answer,) = ask(bench, session, kv.Set(key=b"%d" % number, value=b"x" * 10_000, vbucket=0))
        status = Status(answer.status)
    assert status == Status.ETMPFAIL
    pressure = bench.node.buckets["default"].work.back_pressure
    pressure.look()
    assert pressure.is_on
    pressure.look()
    assert pressure.is_on, "memory is still full"
    bench.node.buckets["default"].store.flush_all()
    pressure.look()
    kinds = [event["event"] for event in bench.node.events.recent]
    assert kinds == ["back_pressure_on", "back_pressure_off"]


def test_a_node_says_it_on_stderr_as_it_was_told(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "2"]
    command += ["--user", "ada:p4ssw0rd", "--ready-file", str(ready), "--log-json"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as node:
        while not ready.exists():
            assert node.poll() is None
            time.sleep(0.02)
        with Wire(json.loads(ready.read_text())["port"]) as wire:
            wire.refused(admin.SaslAuth(key=b"PLAIN", value=b"\0ada\0wrong"))
        node.send_signal(signal.SIGTERM)
        _, text = node.communicate(timeout=60)
    (line,) = text.splitlines()
    assert json.loads(line)["event"] == "login_refused"
    assert "wrong" not in line and "p4ssw0rd" not in line
