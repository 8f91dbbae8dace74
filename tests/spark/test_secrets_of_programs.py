"""No secret is in anything that programs print, serve, log, keep or show: everything is searched."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest

import tailrace.testing
from certificates import make_certificate
from spark.local_jobs import LocalJobs
from spark.too_slow import PATIENT
from table.s3 import BUCKET, moto_server, options_for, refusing_store
from tailrace.spark.rounds.setup import build_mirror

pytestmark = [
    pytest.mark.spark,
    pytest.mark.xdist_group("spark-programs"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]

PASSWORD, ACCESS, SECRET, TOKEN = "hush-1-hush", "AKIAHUSH2HUSH", "hush+3/hush==", "hush-4-hush"
FAULTS, PAGE = "hush-5-hush", "hush-6-hush"
"""Without a word such as "password": Spark would hide them by that, wherever they stand."""
OURS = {"aws_access_key_id": ACCESS, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}


@dataclass
class Search:
    """Where secrets were looked for, and where they were found."""

    wanted: tuple[bytes, ...]
    searched: list[str] = field(default_factory=list)
    leaks: list[tuple[str, bytes]] = field(default_factory=list)

    def look(self, where: str, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.searched.append(where)
        for secret in self.wanted:
            at = data.find(secret)
            if at >= 0:
                self.leaks.append((where, data[max(0, at - 60) : at + 60]))

    def look_below(self, folder: Path, *, but: set[Path] | frozenset[Path] = frozenset()) -> None:
        for path in sorted(folder.rglob("*")):
            if path not in but and path.is_file() and not path.is_symlink():
                with contextlib.suppress(FileNotFoundError):  # some of Spark's files are short-lived
                    self.look(str(path.relative_to(folder)), path.read_bytes())


def look_at_processes(search: Search, pid: int) -> set[str]:
    """Search the command lines of a process and all below it; the names of these processes."""
    names = set()
    for process in [pid, *below(pid)]:
        with contextlib.suppress(OSError):
            names.add(Path(f"/proc/{process}/comm").read_text().strip())
            search.look(f"command line of {process}", Path(f"/proc/{process}/cmdline").read_bytes())
    return names


def below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from below(child)


def http(url: str, name: str, password: str, certificate: Path) -> str:
    login = base64.b64encode(f"{name}:{password}".encode()).decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {login}"})
    trusted = ssl.create_default_context(cafile=str(certificate))
    with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
        content: str = answer.read().decode()
    return content


@dataclass
class Programs:
    """Our programs in one place, with one configuration that has all secrets."""

    folder: Path
    search: Search
    configuration: Path

    def command(self, *words: object) -> list[str]:
        first, *rest = map(str, words)
        debug = ["--debug", "--log-level", "debug"]
        config = ["--config", str(self.configuration)]
        return [sys.executable, "-m", "tailrace", *config, first, *rest, *debug]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TAILRACE_PASSWORD": PASSWORD}

    def run(self, *words: object, code: int = 0, more: dict[str, str] | None = None) -> str:
        """Run a command to its end; everything that it printed."""
        done = subprocess.run(
            self.command(*words),
            env=self.environment | (more or {}),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        said: str = done.stdout + done.stderr
        self.search.look(f"what 'tailrace {words[0]}' says", said)
        assert done.returncode == code, said
        return said

    @contextlib.contextmanager
    def started(self, *words: object, until: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """A command, from the line that has ``until``, and that line."""
        said = self.folder / f"{words[0]}.err"
        with (
            said.open("w") as err,
            subprocess.Popen(
                self.command(*words),
                env=self.environment,
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                lines: list[str] = []
                for line in process.stdout:
                    lines.append(line)
                    if until in line:
                        break
                assert lines and until in lines[-1], said.read_text()
                yield process, lines[-1]
                process.send_signal(signal.SIGTERM)
                lines += process.stdout
                assert process.wait() == 0, said.read_text()
                self.search.look(f"what 'tailrace {words[0]}' prints", "".join(lines))
            finally:
                process.kill()


@pytest.mark.slow
def test_all_that_programs_print_serve_and_keep(tmp_path: Path) -> None:
    private, visible = tmp_path / "private", tmp_path / "visible"
    private.mkdir()
    visible.mkdir()
    (visible / "events").mkdir()
    certificate, key = make_certificate(private, "node")
    body = key.read_bytes().splitlines()[1][:40]
    search = Search((*(text.encode() for text in (PASSWORD, ACCESS, SECRET, TOKEN, FAULTS, PAGE)), body))
    (private / "users").write_text(f"app:{PASSWORD}\n")
    (private / "page-users").write_text(f"eve:{PAGE}\n")
    config = private / "tailrace.toml"
    programs = Programs(visible, search, config)
    with moto_server() as store:
        storage = [f"{name}={value}" for name, value in {**options_for(store), **OURS}.items()]
        settings = {
            **PATIENT,
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": str(visible / "events"),
            "spark.eventLog.compress": "false",
            "spark.local.dir": str(visible / "scratch"),
        }
        config.write_text(
            f"storage-option = {json.dumps(storage)}\n"
            f"conf = {json.dumps([f'{name}={value}' for name, value in settings.items()])}\n"
            f"http-users-file = {json.dumps(str(private / 'page-users'))}\n"
            f"tls-ca = {json.dumps(str(certificate))}\n"
            f'[serve]\nusers-file = {json.dumps(str(private / "users"))}\nfault-token = "{FAULTS}"\n'
            f'tls-cert = "{certificate}"\ntls-key = "{key}"\n'
        )
        ready, table = visible / "ready.json", f"s3://{BUCKET}/people"
        serve = ["serve", "--port", "0", "--tls-port", "0", "--http-port", "0", "--vbuckets", "4"]
        serve += ["--data", "data", "--ready-file", str(ready)]
        with programs.started(*serve, until="serving bucket") as (node, _):
            told = json.loads(ready.read_text())
            where = f"127.0.0.1:{told['tls_port']}/default"
            url, bare = f"couchbases://app:{PASSWORD}@{where}", f"couchbases://app@{where}"
            config.write_text(f"url = {json.dumps(url)}\ntable = {json.dumps(table)}\n" + config.read_text())
            programs.run("load", "--docs", "50")
            mirror = ["mirror", "--json", "--http-port", "0", "--metrics-file", str(visible / "figures")]
            with programs.started(*mirror, until='"batch"') as (process, _):
                names = look_at_processes(search, process.pid)
                assert "java" in names and len(names) > 1, names
                page = re.search(r"figures on (http://\S+)", (visible / "mirror.err").read_text())
                assert page is not None
                for path in ("", "api/stats", "api/past", "metrics", "metrics?vbuckets=1", "healthz"):
                    search.look(f"mirror's /{path}", http(f"{page[1]}/{path}", "eve", PAGE, certificate))
                search.look_below(visible)
            look_at_processes(search, node.pid)
            web = f"https://127.0.0.1:{told['web_port']}"
            for path in (
                "",
                "api/view",
                "api/stats",
                "api/past",
                "metrics",
                "pools",
                "pools/default/buckets",
            ):
                search.look(f"node's /{path}", http(f"{web}/{path}", "app", PASSWORD, certificate))
            for group in ("", "settings", "connections", "dcp"):
                programs.run("stats", bare, *([group] if group else []))
            assert '"equal": true' in programs.run("verify", "--json")
            programs.run("maintain", "--json")
            programs.run("plan", "--json")
            programs.run("doctor", "--json")
            programs.run("query", table, "select count(*) from t", "--json")
            programs.run("query", table, "explain verbose select * from t where seqno > 1")
            programs.run("query", table, "show all", code=2)
            programs.run("query", table, "select nothing from t", code=2)
            programs.run("export", table, f"s3://{BUCKET}/plain", "--json")
            programs.run("wait", table, "--token", "0:1:999999", "--timeout", "1s", code=1)
            programs.run("record", bare, "recording", "--once")
            programs.run("tail", "--to", "now", "--json", "--state", "state")
            programs.run("config", "--all")
            programs.run("config", "--json")
            wrong = url.replace(PASSWORD, f"{PASSWORD}-wrong")
            for refused in ("verify", "plan", "tail"):
                programs.run(refused, wrong, *([] if refused == "tail" else [table]), code=3)
            assert "login_refused" in (visible / "serve.err").read_text()
        s3 = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{store}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        objects = [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET)["Contents"]]
        for name in objects:
            search.look(f"object {name}", s3.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        assert any("_delta_log" in name for name in objects)
    search.look_below(visible)
    assert any(where.startswith("events/") for where in search.searched), "Spark's event log"
    assert search.leaks == []


IN_SPARK = """
import json, sys, time
import tailrace.spark as ts

given = json.loads(sys.stdin.read())
source, storage, home = given["source"], given["storage"], given["home"]
spark = ts.session("secrets", master="local[2]", **given["settings"])
login = {"options": given["login"], "storage_options": storage}
mirror = ts.mirror(spark, given["url"], given["table"], once=True, **login)
mirror.awaitTermination(300)
print(repr(mirror), mirror._repr_html_(), json.dumps(mirror.status), json.dumps(mirror.lastProgress))
frame = spark.read.format("tailrace").options(**source).load()
frame.explain("extended")
frame.explain("formatted")
inside = {"connectionString": given["url"].replace("//", "//app:" + source["password"] + "@")}
spark.read.format("tailrace").options(**inside).load().explain("extended")
spark.readStream.format("tailrace").options(**inside).load().explain("extended")
print(frame, frame.count(), frame.rdd.toDebugString(), frame.inputFiles())
rows = ts.table(spark, given["table"], storage_options=storage)
rows.explain("extended")
print(rows.count(), rows.rdd.toDebugString())
spooled = {f"storageOption.{name}": value for name, value in storage.items()}
stream = spark.readStream.format("tailrace").options(**source, **spooled, startingOffsets="earliest")
stream = stream.option("spoolDir", given["spool"]).load()
stream.explain("extended")
query = stream.writeStream.format("parquet").option("checkpointLocation", f"{home}/checkpoint")
query = query.trigger(availableNow=True).start(f"{home}/rows")
query.explain(True)
query.awaitTermination(300)
print(query.lastProgress, query.status, query)
password = source["password"]
for wrong in ({"password": f"{password}-wrong"}, {"passwort": password}, {"retryFor": "x"}):
    try:
        spark.read.format("tailrace").options(**{**source, **wrong}).load().count()
        raise AssertionError(f"{list(wrong)} went well")
    except Exception as error:
        if isinstance(error, AssertionError):
            raise
        import traceback
        traceback.print_exc()
spark.stop()
"""


@pytest.mark.slow
def test_all_that_spark_prints_and_keeps(tmp_path: Path) -> None:
    """Everything in which people look for what Spark does: plans, logs, the event log, checkpoints."""
    search = Search(tuple(text.encode() for text in (PASSWORD, ACCESS, SECRET, TOKEN)))
    (tmp_path / "events").mkdir()
    with moto_server() as store, tailrace.testing.node(vbuckets=4, users={"app": PASSWORD}) as node:
        for n in range(20):
            node.set(f"k{n}", {"n": n})
        login = {"username": "app", "password": PASSWORD}
        given = {
            "url": node.url,
            "login": login,
            "source": {"connectionString": node.url, **login},
            "storage": options_for(store, **OURS),
            "table": f"s3://{BUCKET}/people",
            "spool": f"s3://{BUCKET}/spool",
            "home": str(tmp_path),
            "settings": {
                **PATIENT,
                "spark.ui.enabled": "false",
                "spark.log.level": "DEBUG",
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": str(tmp_path / "events"),
                "spark.eventLog.compress": "false",
                "spark.eventLog.logBlockUpdates.enabled": "true",
                "spark.local.dir": str(tmp_path / "scratch"),
            },
        }
        done = subprocess.run(
            [sys.executable, "-c", IN_SPARK],
            input=json.dumps(given),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    search.look("what it prints", done.stdout)
    search.look("Spark's log", done.stderr)
    assert "== Physical Plan ==" in done.stdout and done.stderr.count(" DEBUG ") > 1_000
    assert done.stderr.count("Traceback") >= 3
    search.look_below(tmp_path)
    for kept in ("events/", "checkpoint/offsets/", "rows/"):
        assert any(where.startswith(kept) for where in search.searched), kept
    assert search.leaks == []


def test_a_store_that_repeats_what_was_signed(tmp_path: Path) -> None:
    """What a store refuses with goes through obstore here and through delta-rs there."""
    search = Search(tuple(text.encode() for text in (ACCESS, SECRET, TOKEN)))
    config = tmp_path / "private.toml"
    programs = Programs(tmp_path, search, config)
    with refusing_store() as port, tailrace.testing.node(vbuckets=2) as node:
        here = tmp_path / "here"
        build_mirror(LocalJobs(), node.url, here, once=True, in_background=False).run()
        options = options_for(port, **OURS)
        storage = [f"{name}={value}" for name, value in options.items()]
        config.write_text(f"storage-option = {json.dumps(storage)}\n")
        table = f"s3://{BUCKET}/people"
        assert "SignatureDoesNotMatch" in programs.run("query", table, "select 1", code=1)
        programs.run("export", table, str(tmp_path / "plain"), code=1)
        assert "SignatureDoesNotMatch" in programs.run("export", here, table, code=1)
        programs.run("wait", table, "--token", "0:1:1", code=1)
        programs.run("maintain", table, code=1)
        programs.run("plan", node.url, table, code=1)
        programs.run("doctor", node.url, table, code=1)
        in_environment = {name.upper(): value for name, value in OURS.items()}
        given = {name: value for name, value in options.items() if name not in OURS}
        config.write_text(
            f"storage-option = {json.dumps([f'{name}={value}' for name, value in given.items()])}\n"
        )
        said = programs.run("query", table, "select 1", code=1, more=in_environment)
        assert "SignatureDoesNotMatch" in said
    assert search.leaks == []
