"""Traces of a mirror's rounds and of slow commands, by OpenTelemetry; none unless they are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tailrace.testing
from server.serverkit import Bench, ask
from spark.local_jobs import LocalJobs
from tailrace.errors import StorageError
from tailrace.spark.rounds.setup import build_mirror
from tailrace.wire import admin, kv


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The provider of the whole process: OpenTelemetry lets it be set only once."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield kept
    provider.shutdown()


def test_a_round_is_a_trace_with_its_phases(exporter: InMemorySpanExporter, tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number}, vbucket=number % 4)
        build_mirror(LocalJobs(), node.url, tmp_path / "t", once=True).start().awaitTermination()
        node.rewind(vbucket=1, to_seqno=2)
        build_mirror(LocalJobs(), node.url, tmp_path / "t", once=True).start().awaitTermination()
    spans: tuple[Any, ...] = exporter.get_finished_spans()
    first, *_, last = [span for span in spans if span.name == "tailrace.mirror.round"]
    assert first.attributes["tailrace.bucket"] == "default"
    assert first.attributes["tailrace.changes"] == first.attributes["tailrace.rows_written"] == 20
    assert last.attributes["tailrace.rolled_back_vbuckets"] == 1
    parts = [span for span in spans if span.parent and span.parent.span_id == first.context.span_id]
    assert [span.name.rpartition(".")[2] for span in sorted(parts, key=lambda span: span.end_time)] == [
        "plan",
        "go_back",
        "read_and_write",
        "commit",
        "maintain",
    ]
    assert all(span.start_time <= span.end_time for span in spans)


def test_a_round_that_fails_has_its_error(
    exporter: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, calls = LocalJobs.run, []

    def fail_once(jobs: LocalJobs, work: Any, pieces: Any, description: str, on_done: Any) -> list[Any]:
        calls.append(description)
        if len(calls) == 1:
            raise StorageError("no room")
        return play(jobs, work, pieces, description, on_done)

    monkeypatch.setattr(LocalJobs, "run", fail_once)
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("k", {"n": 1})
        build_mirror(LocalJobs(), node.url, tmp_path / "t", once=True).start().awaitTermination()
    rounds: list[Any] = [
        span for span in exporter.get_finished_spans() if span.name == "tailrace.mirror.round"
    ]
    assert [span.status.is_ok for span in rounds][:2] == [False, True]
    assert "no room" in rounds[0].status.description


def test_a_slow_command_is_a_trace_and_an_event(exporter: InMemorySpanExporter) -> None:
    bench = Bench(vbuckets=2)
    session = bench.session()
    ask(bench, session, kv.Set(key=b"secret-key", value=b"secret-value", vbucket=1))
    assert exporter.get_finished_spans() == ()
    bench.node.settings.slow_command = 0.0
    ask(bench, session, kv.Append(key=b"secret-key", value=b"secret-too", vbucket=1))
    ask(bench, session, admin.Noop())
    spans: tuple[Any, ...] = exporter.get_finished_spans()
    assert [span.attributes["tailrace.command"] for span in spans] == ["Append", "Noop"]
    assert spans[0].attributes["tailrace.status"] == "0x00" and spans[0].attributes["tailrace.vbucket"] == 1
    assert [event["event"] for event in bench.node.events.recent] == ["slow_command"] * 2
    assert "secret" not in json.dumps([*bench.node.events.recent, *(dict(span.attributes) for span in spans)])


def test_the_command_line_sends_them_where_the_environment_says(tmp_path: Path) -> None:
    received: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                received.extend(attribute.value.string_value for attribute in resource.resource.attributes)
                received.extend(span.name for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    program = (
        "from tailrace import tracing; from tailrace.cli.main import main\n"
        "assert main(['decode', '--json', 'empty']) in (0, 1, 2)\n"
        "with tracing.span('a span'): pass\n"
    )
    (tmp_path / "empty").touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        environment = {
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        }
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, check=False
        )
        collector.shutdown()
    assert done.returncode == 0, done.stderr
    assert "a span" in received and "tailrace" in received


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, 'pip install "tailrace[otel]"'),
    ],
)
def test_without_the_extra_nothing_is_sent(environment: dict[str, str], said: str, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from tailrace import tracing; from tailrace.cli.main import main\n"
        "with tracing.span('a span', a=1) as told: told['b'] = 2\n"
        "tracing.add_span('another', 1, 2)\n"
        "main(['decode', 'empty'])\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.')]\n"
    )
    (tmp_path / "empty").touch()
    bare = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**bare, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr and ("tailrace[otel]" in done.stderr) == bool(said)
