"""A reader that we did not write, in a process of its own, and what it has received."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

PATIENCE_S = 120.0

State = dict[int, dict[bytes, tuple[int, bytes]]]
"""By vbucket and key: the seqno and the value."""


@dataclass
class ForeignReader:
    """Reads the lines of a program (see java/ and go/), and does just what they say.

    A rollback drops what came after its seqno; what was there before comes back, as far as it was received.
    """

    command: list[str]
    port: int
    changes: dict[int, list[tuple[int, bytes, bytes | None]]] = field(default_factory=dict)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    words: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Self:
        command = [*self.command, f"127.0.0.1:{self.port}", "default", "Administrator", "password"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends by itself then
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def until(self, check: Callable[[], object], what: str) -> None:
        """Take lines until something is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not check():
            assert time.monotonic() < deadline, f"{what}: {self.words}, {self.rollbacks}"
            assert self._process.poll() is None, "the reader has ended"
            try:
                self._take(self._lines.get(timeout=0.1))
            except queue.Empty:
                continue

    def _take(self, line: str) -> None:
        word, vbucket_text, seqno_text, *more = line.split()
        vbucket, seqno = int(vbucket_text), int(seqno_text)
        self.words[word] += 1
        changes = self.changes.setdefault(vbucket, [])
        if word == "rollback":
            self.rollbacks.append((vbucket, seqno))
            self.changes[vbucket] = [change for change in changes if change[0] <= seqno]
        elif word in ("mutation", "deletion"):
            assert not changes or seqno > changes[-1][0], f"seqnos must rise: {line}"
            key, value = (b"" if text == "-" else bytes.fromhex(text) for text in more[:2])
            changes.append((seqno, key, value if word == "mutation" else None))
        assert word != "failure", line

    def state(self) -> State:
        """The documents that it has, in the vbuckets that have some."""
        states: State = {}
        for vbucket, changes in self.changes.items():
            newest = {key: (seqno, value) for seqno, key, value in changes}
            live = {key: (seqno, value) for key, (seqno, value) in newest.items() if value is not None}
            if live:
                states[vbucket] = live
        return states
