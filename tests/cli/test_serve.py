"""``tailrace serve`` as a process: what it prints, how it stops, what survives a kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.cli.main import main
from tailrace.cli.serve import _warn_of_a_small_disk
from tailrace.store.base import StoreSettings
from tailrace.wire import admin, kv
from tailrace.wire.codes import Status
from tailrace.wire.framing import Framer

TIMEOUT_S = 60


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tailrace", "serve", *arguments]


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a node as a process; yields it and the content of its ready file."""
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(
        command("--port", "0", "--ready-file", str(ready), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process, json.loads(ready.read_text())  # complete as soon as it is there
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


_opened: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _close_sockets() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


class Wire:
    """A small blocking connection; closed at the end of the test."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        _opened.append(self.socket)
        self._framer = Framer()

    def ask(self, message: Any) -> Any:
        self.socket.sendall(message.encode())
        while (frame := self._framer.maybe_frame()) is None:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._framer.feed(data)
        return frame


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=cwd
    )


def test_first_line_and_ready_file(tmp_path: Path) -> None:
    options = ["--data", "data", "--vbuckets", "8", "--bucket", "shop"]
    options += ["--alternate-address", "external=node1.example.com:31210"]
    with serving(tmp_path, *options) as (process, ready):
        wire = Wire(ready["port"])
        (described,) = json.loads(wire.ask(admin.GetClusterConfig()).value)["nodesExt"]
        outside = {"hostname": "node1.example.com", "ports": {"kv": 31210, "mgmt": 31210}}
        assert described["alternateAddresses"] == {"external": outside}
        assert ready == {
            "pid": process.pid,
            "host": "127.0.0.1",
            "port": ready["port"],
            "tls_port": None,
            "web_port": None,
            "bucket": "shop",
            "vbuckets": 8,
            "data": str(tmp_path / "data"),
        }
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert out == f"tailrace: serving bucket 'shop' (8 vbuckets) on 127.0.0.1:{ready['port']}\n"
        assert err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain_and_end_with_0(tmp_path: Path, number: int) -> None:
    """What was acknowledged, even without asking for the disk, is there after a clean stop."""
    with serving(tmp_path, "--data", "data", "--vbuckets", "4") as (process, ready):
        wire = Wire(ready["port"])
        for at in range(200):
            assert wire.ask(kv.Set(key=b"k%d" % at, value=b"v%d" % at)).status == 0
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == 0
        with pytest.raises((EOFError, ConnectionError)):
            wire.ask(admin.Noop())
    with serving(tmp_path, "--data", "data", "--vbuckets", "4") as (process, ready):
        wire = Wire(ready["port"])
        log = wire.ask(admin.GetFailoverLog()).value
        assert len(log) == 16  # a clean stop begins no new branch
        for at in range(200):
            assert wire.ask(kv.Get(key=b"k%d" % at)).value == b"v%d" % at


def test_kill_loses_nothing_that_was_answered_as_persisted(tmp_path: Path) -> None:
    rng = random.Random(5)
    persisted: dict[bytes, int] = {}
    for attempt in range(3):
        with serving(tmp_path, "--data", "data", "--vbuckets", "1", "--set", "flush_interval=20ms") as (
            process,
            ready,
        ):
            wire = Wire(ready["port"])
            for key, least in persisted.items():
                assert int(wire.ask(kv.Get(key=key)).value) >= least
            killer = threading.Timer(rng.uniform(0.05, 0.4), process.kill)
            seqno = int.from_bytes(wire.ask(admin.GetAllVbSeqnos(state=1)).value[2:10], "big")
            try:
                for count in range(attempt * 1_000_000, 1 << 30):
                    key = b"k%d" % rng.randrange(50)
                    assert wire.ask(kv.Set(key=key, value=b"%d" % count)).status == 0
                    seqno += 1
                    if rng.random() < 0.2:
                        assert wire.ask(admin.SeqnoPersistence(seqno=seqno)).status == 0
                        persisted[key] = count
                        if not killer.ident:
                            killer.start()
            except (EOFError, ConnectionError):
                pass
            killer.join()
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL


def test_a_second_node_on_the_directory_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "--data", "data", "--vbuckets", "1") as (_, ready):
        second = run("--port", "0", "--data", "data", cwd=tmp_path)
        assert second.returncode == 1
        assert second.stdout == ""
        assert re.fullmatch(r"tailrace: error: .*in use.*: stop that one, or .*\n", second.stderr)
        assert Wire(ready["port"]).ask(admin.Noop()).status == 0


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--port", str(port), "--memory")
        assert done.returncode == 1
        assert done.stderr.startswith(f"tailrace: error: can't listen on 127.0.0.1:{port}")
        assert done.stderr.count("\n") == 1
        done = run("--port", str(port), "--data", "data", cwd=tmp_path)
        assert done.returncode == 1
        assert not (tmp_path / "data").exists()  # nothing was begun


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0"],
        ["--host", "::"],
        ["--vbuckets", "3"],
        ["--vbuckets", "0"],
        ["--vbuckets", "2048"],
        ["--memory", "--data", "x"],
        ["--user", "nocolon"],
        ["--user", "a:1", "--user", "a:2"],
        ["--user", ":x"],
        ["--set", "nothing=1"],
        ["--set", "idle_timeout"],
        ["--set", "idle_timeout=1_000"],
        ["--set", "idle_timeout=nan"],
        ["--set", "max_frame=1"],
        ["--set", "last_write_wins=perhaps"],
        ["--tls-port", "0"],
        ["--tls-cert", "x.pem"],
        ["--port", "65536"],
        ["--port", "٣"],
        ["--memory-quota", "lots"],
        ["--alternate-address", "node1.example.com"],
        ["--alternate-address", "external=a", "--alternate-address", "external=b"],
        ["--bucket", "no/slash"],
        ["--bucket", ".."],
        ["--bucket", ""],
    ],
    ids=" ".join,
)
def test_wrong_command_lines(arguments: list[str], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert re.fullmatch(r"tailrace: error: .+\n", done.stderr)
    assert "secret" not in done.stderr
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize(("given", "missing"), [("--tls-cert", "--tls-key"), ("--tls-key", "--tls-cert")])
def test_half_a_certificate(tmp_path: Path, given: str, missing: str) -> None:
    (tmp_path / "x.pem").touch()
    done = run("--memory", "--port", "0", given, "x.pem", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tailrace: error: {given} needs {missing} FILE, ")


def test_on_an_address_of_ipv6(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Addresses with colons are written in brackets, so that they can be copied into a URL."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")

    def shown(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capfd.readouterr().out

    with serving(tmp_path, "--memory", "--host", "::1", "--vbuckets", "4") as (process, ready):
        at = f"[::1]:{ready['port']}"
        assert process.stdout is not None
        assert process.stdout.readline() == f"tailrace: serving bucket 'default' (4 vbuckets) on {at}\n"
        for url in (f"couchbase://{at}/default", f"couchbase://127.0.0.1:1,{at}/default"):
            shown("set", url, "k", "1")
            assert shown("get", url, "k") == "1"
            assert '"key":"k"' in shown("tail", url, "--to", "now", "--json")
            assert f"ok       reach: {at} accepts connections" in shown("doctor", url)


def test_another_number_of_vbuckets_than_there_are(tmp_path: Path) -> None:
    with serving(tmp_path, "--data", "data", "--vbuckets", "4") as (process, _):
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    done = run("--port", "0", "--data", "data", "--vbuckets", "8", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"tailrace: error: bucket 'default' in '.*/data' has 4 vbuckets, not 8: .*\n", done.stderr
    )
    with serving(tmp_path, "--data", "data") as (_, ready):  # without the option it keeps its number
        assert ready["vbuckets"] == 4


def test_a_ready_file_that_can_t_be_written(tmp_path: Path) -> None:
    done = run("--port", "0", "--memory", "--ready-file", "nowhere/ready.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"tailrace: error: .*'--ready-file': .* there is no directory '.*/nowhere'.*\n", done.stderr
    )


def test_set_help_lists_every_setting() -> None:
    from tailrace.server.settings import table

    done = run("--set", "help")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [setting.name for setting in table()]
    promised = "idle_timeout slow_backfill_timeout max_frame max_value max_connections checkpoint_share"
    promised += " tombstone_age expiry_pager_interval flush_interval auth_timeout tap_keepalive tap_ack_grace"
    assert set(promised.split()) <= set(names)


def test_users_file(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("# who may\nada:pass:word\n\nbob:x\n")
    with serving(tmp_path, "--memory", "--users-file", str(users), "--vbuckets", "1") as (_, ready):
        wire = Wire(ready["port"])
        auth = admin.SaslAuth(key=b"PLAIN", value=b"\0ada\0pass:word")
        assert wire.ask(auth).status == 0
        assert (
            Wire(ready["port"]).ask(admin.SaslAuth(key=b"PLAIN", value=b"\0bob\0y")).status
            == Status.AUTH_ERROR
        )
    users.write_bytes(b"ada:\xff\n")
    assert run("--memory", "--users-file", str(users)).returncode == 2
    assert run("--memory", "--users-file", str(tmp_path / "missing")).returncode == 2
    users.write_text("# who may\nada:x\nsecret\n")
    done = run("--memory", "--users-file", str(users))
    assert f"line 3 of {str(users)!r}: a user is written NAME:PASSWORD" in done.stderr
    assert "secret" not in done.stderr


def test_json_api(tmp_path: Path) -> None:
    import urllib.error
    import urllib.request

    with serving(tmp_path, "--memory", "--vbuckets", "2", "--web-port", "0") as (_, ready):
        base = f"http://127.0.0.1:{ready['web_port']}"
        with urllib.request.urlopen(f"{base}/api/stats", timeout=TIMEOUT_S) as answer:
            content = json.load(answer)
        assert content["node"]["pid"] == ready["pid"]
        assert set(content["buckets"]["default"]["vbuckets"]) == {"0", "1"}
        with urllib.request.urlopen(base, timeout=TIMEOUT_S) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            page = answer.read().decode()
        with urllib.request.urlopen(f"{base}/api/view", timeout=TIMEOUT_S) as answer:
            view = json.load(answer)
        with urllib.request.urlopen(f"{base}/node.js", timeout=TIMEOUT_S) as answer:
            script = answer.read().decode()
        assert set(re.findall(r"\bn\.(\w+)", script)) <= set(view["node"])
        assert set(re.findall(r"\bb\.(\w+)", script)) <= {*view["buckets"]["default"], "lag_changes"}
        assert "//" not in re.sub(r"// .*|http://www\.w3\.org/2000/svg", "", page)  # nothing from elsewhere
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{base}/nothing", timeout=TIMEOUT_S)
        assert error.value.code == 404
        assert "error" in json.load(error.value)
        error.value.close()
    with serving(tmp_path, "--memory", "--vbuckets", "2", "--web-port", "0", "--user", "a:b") as (_, ready):
        base = f"http://127.0.0.1:{ready['web_port']}"
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{base}/api/stats", timeout=TIMEOUT_S)
        assert error.value.code == 401
        error.value.close()
        request = urllib.request.Request(f"{base}/api/stats", headers={"Authorization": "Basic YTpi"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert answer.status == 200


def test_damaged_data_is_one_line(tmp_path: Path) -> None:
    with serving(tmp_path, "--data", "data", "--vbuckets", "1") as (process, _):
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
    (manifest,) = (tmp_path / "data").glob("bucket.default/MANIFEST")
    manifest.write_bytes(b"nonsense")
    done = run("--port", "0", "--data", "data", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"tailrace: error: .*MANIFEST.*\n", done.stderr)


def test_a_lost_log_is_one_line_until_the_loss_is_accepted(tmp_path: Path) -> None:
    with serving(tmp_path, "--data", "data", "--vbuckets", "1") as (process, _):
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT_S)
    (log,) = (tmp_path / "data").glob("bucket.default/log-*")
    log.unlink()
    done = run("--port", "0", "--data", "data", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(rf"tailrace: error: .*{log.name} is missing.*--accept-loss.*\n", done.stderr)
    with serving(tmp_path, "--data", "data", "--accept-loss"):
        pass
    with serving(tmp_path, "--data", "data"):
        pass
    done = run("--memory", "--accept-loss", cwd=tmp_path)
    assert done.returncode == 2
    assert "--memory" in done.stderr


def test_a_disk_that_is_too_small_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node may not recover from a full disk of less than six times the quota."""
    for size, told in ((27 << 20, True), (28 << 20, False)):
        caplog.clear()
        usage = SimpleNamespace(total=size)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        _warn_of_a_small_disk(tmp_path, StoreSettings(memory_quota=4 << 20))
        assert ("needs 28.0 MiB" in caplog.text) is told


def test_files_are_private(tmp_path: Path) -> None:
    with serving(tmp_path, "--data", "data", "--vbuckets", "1"):
        for path in (tmp_path / "data").rglob("*"):
            assert not os.stat(path).st_mode & 0o077, path
