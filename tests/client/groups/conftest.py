"""A real Redis for all tests of groups."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from ports import ReservedPort


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    folder = tmp_path_factory.mktemp("redis")
    with ReservedPort() as port:
        settings = ["--save", "", "--requirepass", "secret", "--dir", str(folder)]
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", *settings]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(1_000):
                assert server.poll() is None
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.02)
            yield f"redis://:secret@127.0.0.1:{port}/3"
        finally:
            server.terminate()
            server.wait()
