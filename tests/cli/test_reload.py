"""Users and certificates are read again on SIGHUP, by a node and by commands that serve figures."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificate
from server.serverkit import Wire
from tailrace.cli.signals import on_hangup, on_signal, run_loop
from tailrace.testing.running import RunningNode
from tailrace.wire import admin
from tailrace.wire.codes import Status

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no such signal here")


def read(url: str, login: str, context: ssl.SSLContext | None = None) -> tuple[int, Any]:
    headers = {"Authorization": "Basic " + b64encode(login.encode()).decode()}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def certificate_of(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain) as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def login(wire: Wire, name: bytes, password: bytes) -> int:
    status: int = wire.call(admin.SaslAuth(key=b"PLAIN", value=b"\0%b\0%b" % (name, password))).status
    return status


def test_a_node_reads_users_and_certificate_again(tmp_path: Path) -> None:
    users, ready = tmp_path / "users", tmp_path / "ready.json"
    users.write_text("ada:old\neve:hers\n")
    cert, key = make_certificate(tmp_path, "node")
    other = make_certificate(tmp_path, "other")
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "2"]
    command += ["--user", "boss:always", "--users-file", str(users), "--ready-file", str(ready)]
    command += ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-port", "0", "--http-port", "0"]
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        try:
            wait_for(ready.exists)
            told = json.loads(ready.read_text())

            def events(kind: str) -> list[dict[str, Any]]:
                url = f"https://127.0.0.1:{told['web_port']}/api/events"
                status, content = read(url, "boss:always", unverified)
                assert status == 200
                return [event for event in content["events"] if event["event"] == kind]

            with Wire(told["port"]) as ada, Wire(told["port"]) as eve, Wire(told["port"]) as late:
                assert login(ada, b"ada", b"old") == login(eve, b"eve", b"hers") == Status.SUCCESS
                before = certificate_of(told["tls_port"])
                users.write_text("this line is no user\n")
                node.send_signal(signal.SIGHUP)
                wait_for(lambda: len(events("reload_failed")) == 1)
                assert "NAME:PASSWORD" in events("reload_failed")[0]["reason"]
                ada.ok(admin.Noop())  # nothing has changed

                users.write_text("ada:new\neve:hers\n")
                cert.write_bytes(other[0].read_bytes())
                node.send_signal(signal.SIGHUP)
                wait_for(lambda: len(events("reload_failed")) == 2)  # a certificate without its key: neither
                assert login(late, b"ada", b"old") == Status.SUCCESS
                assert certificate_of(told["tls_port"]) == before

                key.write_bytes(other[1].read_bytes())
                node.send_signal(signal.SIGHUP)
                wait_for(lambda: len(events("reloaded")) == 1)
                (done,) = events("reloaded")
                assert (done["users"], done["certificate"], done["connections_closed"]) == (3, "true", 2)
                assert ada.is_closed() and late.is_closed()
                eve.ok(admin.Noop())  # her password has not changed
                assert certificate_of(told["tls_port"]) != before
            with Wire(told["port"]) as ada:
                assert login(ada, b"ada", b"old") == Status.AUTH_ERROR
                assert login(ada, b"ada", b"new") == Status.SUCCESS
            users.write_text("")
            node.send_signal(signal.SIGHUP)
            wait_for(lambda: len(events("reloaded")) == 2)  # boss remains
            with Wire(told["port"]) as ada:
                assert login(ada, b"ada", b"new") == Status.AUTH_ERROR
        finally:
            node.terminate()
            assert node.wait(60) == 0


def test_figures_beside_a_reader_have_new_users(tmp_path: Path) -> None:
    users, said = tmp_path / "users", tmp_path / "stderr"
    users.write_text("ada:old\n")
    with RunningNode(vbuckets=2) as node, said.open("wb") as stderr:
        command = [sys.executable, "-m", "tailrace", "tail", node.url, "--log-level", "info"]
        command += ["--http-port", "0", "--http-users-file", str(users)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as tail:
            try:
                wait_for(lambda: "figures on " in said.read_text())
                url = said.read_text().partition("figures on ")[2].split()[0] + "/api/stats"
                assert read(url, "ada:old")[0] == 200
                users.write_text("ada:new\n")
                tail.send_signal(signal.SIGHUP)
                wait_for(lambda: read(url, "ada:new")[0] == 200)
                assert read(url, "ada:old")[0] == 401
                users.write_text("\n")
                tail.send_signal(signal.SIGHUP)
                wait_for(lambda: "reload_failed" in said.read_text())
                assert read(url, "ada:new")[0] == 200, "what was good before stays"
            finally:
                tail.terminate()
                assert tail.wait(60) == 0


def test_where_a_loop_knows_no_signals_it_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows; afterwards the signal does what it did before."""

    def unknown(*_: object) -> None:
        raise NotImplementedError

    async def stopped() -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        monkeypatch.setattr(loop, "add_signal_handler", unknown)
        with on_signal(loop, signal.SIGTERM, told.set):
            signal.raise_signal(signal.SIGTERM)
            await told.wait()

    before = signal.getsignal(signal.SIGTERM)
    run_loop(stopped())
    assert signal.getsignal(signal.SIGTERM) is before


def test_figures_beside_a_reader_in_a_thread_leave_the_signal_alone() -> None:
    before = signal.getsignal(signal.SIGHUP)

    def beside() -> bool:
        with on_hangup(lambda: None):
            return signal.getsignal(signal.SIGHUP) is before

    with ThreadPoolExecutor() as threads:
        assert threads.submit(beside).result()


def test_without_such_files_a_hangup_ends_a_node_as_ever(tmp_path: Path) -> None:
    """Closing a terminal ends what runs in it."""
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "2"]
    # whoever runs the suite may ignore hangups, and children inherit that
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        started = subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, kept)
    with started as node:
        try:
            wait_for(ready.exists)
            node.send_signal(signal.SIGHUP)
            assert node.wait(60) == -signal.SIGHUP
        finally:
            node.kill()
