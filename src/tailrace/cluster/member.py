"""One node of the cluster, as its coordinator sees it: a process, and a connection to steer it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import TypeVar

from ..client.kv_connection import KvConnection
from ..clock import SYSTEM
from ..connstr import Address
from ..errors import ClusterError, ConnectError, StatusError, TailraceError
from ..files import make_folder, open_log, remove_file
from ..protocol.handshake import KV_FEATURES, Introduction
from ..protocol.script import Script, ask
from ..wire.admin import Noop
from .steering import Steering

__all__ = ["Member"]

T = TypeVar("T")

_TIMEOUT_S = 5.0
_START_S = 60.0
_STOP_S = 30.0
_PR_SET_PDEATHSIG = 1


class Member(Steering):
    """A node: its process (ours, from `start` on) and a connection that steers it."""

    def __init__(self, name: str, directory: Path, bucket: str) -> None:
        super().__init__(bucket)
        self.name = name
        self.directory = directory
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: KvConnection | None = None

    # the process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.is_running and self._process is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the process exists, not whether it answers."""
        return self._process is not None and self._process.poll() is None

    def start(self, vbuckets: int, port: int, settings: Sequence[str]) -> None:
        """Run the node, fenced; returns when it accepts connections."""
        make_folder(self.directory)
        ready = self.directory / "ready.json"
        remove_file(ready)
        arguments = [sys.executable, "-m", "tailrace", "serve", "--fenced", "--port", str(port)]
        arguments += ["--data", str(self.directory / "data"), "--bucket", self.bucket]
        arguments += ["--vbuckets", str(vbuckets), "--ready-file", str(ready)]
        for setting in settings:
            arguments += ["--set", setting]
        with open_log(self.directory / "log") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent if hasattr(os, "setpgrp") else None,  # noqa: PLW1509 - one thread
            )
        deadline = SYSTEM.monotonic() + _START_S
        while not ready.exists():
            if not self.is_running or SYSTEM.monotonic() > deadline:
                self.kill()
                raise ClusterError(
                    f"node {self.name} did not start; its log is {str(self.directory / 'log')!r}"
                )
            sleep(0.02)
        self.port = json.loads(ready.read_bytes())["port"]

    def stop(self) -> None:
        """Stop the node cleanly."""
        self.disconnect()
        if self._process is None:
            return
        if self.is_running:
            self._process.terminate()
            if hasattr(signal, "SIGCONT"):
                self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """End the process; when this returns it is certainly gone, and with it everything active on it."""
        self.disconnect()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    # the connection

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _address(self) -> Address:
        """The address at which we steer it; others may need a different one."""
        return Address("127.0.0.1", self.port)

    def _run(self, script: Script[T]) -> T:
        if not self.is_running:
            raise ConnectError(f"node {self.name} is not running")
        try:
            if self._connection is None:
                self._connection = KvConnection(
                    self._address(),
                    Introduction(agent="tailrace coordinator", bucket=self.bucket, features=KV_FEATURES),
                    tls=None,
                    timeout_s=_TIMEOUT_S,
                )
            return self._connection.run(script)
        except StatusError:
            raise
        except TailraceError:
            self.disconnect()
            raise

    def answers(self) -> bool:
        """Whether it answers at all."""
        try:
            self._run(ask(Noop(), "noop"))
        except TailraceError:
            return False
        return True


def _die_with_parent() -> None:
    """Runs in the child: a node that loses its coordinator stops cleanly instead of being left behind, and
    Ctrl-C is left to the coordinator.
    """
    os.setpgrp()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
