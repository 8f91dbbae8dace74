"""An S3 server on loopback, and a proxy before it that loses answers, refuses and dawdles."""

from __future__ import annotations

import http.client
import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import boto3

from ports import ReservedPort

Fault = Literal["lost", "refused", "slow", "dropped"]
Plan = Callable[[str, str], "Fault | None"]
"""Told the method and the path of a request; what goes wrong with it.

    lost       the server does it, and the answer never comes
    dropped    it never reaches the server
    refused    503, the server is busy
    slow       the answer takes a while
"""

BUCKET = "bucket"


@contextmanager
def moto_server() -> Iterator[int]:
    """A moto server in a process of its own, with an empty bucket; its port."""
    reserved = ReservedPort()
    port = reserved.number
    process = subprocess.Popen(
        [sys.executable, "-c", f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                break
            except Exception:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()
        reserved.close()


def options_for(port: int, **more: str) -> dict[str, str]:
    return {
        "aws_endpoint_url": f"http://127.0.0.1:{port}",
        "aws_allow_http": "true",
        "aws_access_key_id": "key",
        "aws_secret_access_key": "hush-hush-hush",
        "aws_region": "us-east-1",
        **more,
    }


class Proxy:
    """Stands before the server; ``plan`` can be set at any time."""

    def __init__(self, upstream: int) -> None:
        self.plan: Plan = lambda method, path: None
        self.struck: list[tuple[Fault, str, str]] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                fault = proxy.plan(self.command, self.path)
                if fault:
                    proxy.struck.append((fault, self.command, self.path))
                if fault == "refused":
                    self.send_response(503)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                if fault == "dropped":
                    self.hang_up()
                    return
                connection = http.client.HTTPConnection("127.0.0.1", upstream)
                headers = {
                    name: value for name, value in self.headers.items() if name.lower() != "connection"
                }
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if fault == "lost":
                    self.hang_up()
                    return
                if fault == "slow":
                    time.sleep(0.5)
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("content-length") if self.command == "HEAD" else str(len(content))
                self.send_header("content-length", length or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def hang_up(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, format: str, *args: object) -> None:
                pass

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def once(fault: Fault, method: str, part: str) -> Plan:
    """A plan that strikes once."""
    struck = threading.Event()

    def plan(wanted: str, path: str) -> Fault | None:
        if wanted == method and part in path and not struck.is_set():
            struck.set()
            return fault
        return None

    return plan
