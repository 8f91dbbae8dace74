"""Object stores on loopback, and a proxy before them that loses answers, refuses and delays.

An S3 API is served by moto. Google's XML API has the same requests and answers except for the login and one
condition, which the proxy translates for the same server. (The emulators of Google's store know neither that
condition in the XML API nor its uploads in parts.)
"""

from __future__ import annotations

import base64
import email.utils
import hmac
import http.client
import http.server
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import boto3
import pytest

from ports import ReservedPort
from table.independent import Row, check_rows, own_rows
from tailrace.rng import unique_name
from tailrace.table.contract import Table

Fault = Literal["lost", "refused", "slow", "dropped"]
Plan = Callable[[str, str], "Fault | None"]
"""Takes the method and the path of a request; returns what goes wrong with it.

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


def google_options_for(port: int, **more: str) -> dict[str, str]:
    account = {
        "gcs_base_url": f"http://127.0.0.1:{port}",
        "disable_oauth": True,
        "client_email": "",
        "private_key": "hush-hush-hush",
        "private_key_id": "",
    }
    return {"google_service_account_key": json.dumps(account), "allow_http": "true", **more}


_S3_LOGIN = (
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)


def _as_s3(headers: dict[str, str]) -> dict[str, str]:
    """The headers of a request to Google's store, for one to S3."""
    given = {name.lower(): value for name, value in headers.items()}
    generation = given.pop("x-goog-if-generation-match", None)
    assert generation in (None, "0")
    assert not any(name.startswith("x-goog-") for name in given)
    condition = {} if generation is None else {"if-none-match": "*"}
    return given | condition | {"authorization": _S3_LOGIN}


class Proxy:
    """Stands before the server; ``plan`` can be set at any time."""

    def __init__(self, upstream: int, *, is_google: bool = False) -> None:
        self.plan: Plan = lambda method, path: None
        self.struck: list[tuple[Fault, str, str]] = []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                path = urllib.parse.unquote(self.path)  # Google's client writes dots as %2E
                fault = proxy.plan(self.command, path)
                if fault:
                    proxy.struck.append((fault, self.command, path))
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
                connection.request(self.command, self.path, body, _as_s3(headers) if is_google else headers)
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


@dataclass(frozen=True)
class Cloud:
    """An object store on loopback."""

    scheme: str
    upstream: int
    """The server itself."""
    port: int
    """Where requests go."""
    options_for: Callable[..., dict[str, str]]

    @property
    def options(self) -> dict[str, str]:
        return self.options_for(self.port)

    def check_rows(self, table: Table, expected: Mapping[str, Row]) -> None:
        """All readers agree. That of delta-rs would not let the proxy run that translates for Google."""
        if self.scheme == "gs":
            assert own_rows(table) == dict(expected)
        else:
            check_rows(table, expected, self.options)

    def place(self) -> str:
        """A place for a new table."""
        return f"{self.scheme}://{BUCKET}/{unique_name()}/table"

    @contextmanager
    def proxy(self) -> Iterator[Proxy]:
        proxy = Proxy(self.upstream, is_google=self.scheme == "gs")
        try:
            yield proxy
        finally:
            proxy.close()


@contextmanager
def s3_cloud(port: int) -> Iterator[Cloud]:
    """``port`` is that of a moto server."""
    yield Cloud("s3", port, port, options_for)


@contextmanager
def google_cloud(port: int) -> Iterator[Cloud]:
    """``port`` is that of a moto server."""
    proxy = Proxy(port, is_google=True)
    yield Cloud("gs", port, proxy.port, google_options_for)
    proxy.close()


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The credentials of every Azurite; not a secret."""


def azure_options_for(port: int, **more: str) -> dict[str, str]:
    return {
        "azure_storage_account_name": AZURE_ACCOUNT,
        "azure_storage_account_key": AZURE_KEY,
        "azure_storage_endpoint": f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}",
        "allow_http": "true",
        **more,
    }


@contextmanager
def azure_cloud(folder: Path) -> Iterator[Cloud]:
    """Azurite, the emulator of Azure's store, by npm; skips the test if it can't be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    install = [
        npm,
        "install",
        "--no-audit",
        "--no-fund",
        "--no-package-lock",
        "--loglevel=error",
        "azurite@3",
    ]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"azurite can't be installed: {(done.stderr.strip().splitlines() or ['npm failed'])[-1]}")
    program = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    settings = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    settings += ["--skipApiVersionCheck", "--disableTelemetry"]
    log = folder / "azurite.log"
    with log.open("wb") as out:
        process = subprocess.Popen([node, str(program), *settings], stdout=out)
    try:
        while not (listens := re.search(r"listens on http://127\.0\.0\.1:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        port = int(listens[1])
        _make_container(port)
        yield Cloud("az", port, port, azure_options_for)
    finally:
        process.kill()
        process.wait()


def _make_container(port: int) -> None:
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
    signed += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    signature = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}",
        "Content-Length": "0",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("PUT", f"/{AZURE_ACCOUNT}/{BUCKET}?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()


@contextmanager
def refusing_store() -> Iterator[int]:
    """Refuses everything as S3 does for a wrong signature, repeating all that was signed. Its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            told = " ".join(f"{name}:{value}" for name, value in self.headers.items())
            text = "<Error><Code>SignatureDoesNotMatch</Code>"
            answer = f"{text}<CanonicalRequest>{told}</CanonicalRequest></Error>".encode()
            self.send_response(403)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = refuse

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def once(fault: Fault, method: str, part: str) -> Plan:
    """A plan that strikes once."""
    struck = threading.Event()

    def plan(wanted: str, path: str) -> Fault | None:
        if wanted == method and part in path and not struck.is_set():
            struck.set()
            return fault
        return None

    return plan
