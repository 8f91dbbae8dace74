"""A merge in a process of its own: a large one then takes nothing from writers and readers.

A merge only reads sealed files and writes a new one. So the other process gets the plan, which names the
segments, and the new file, open: it can't write to anything else, even if this process is killed and another
one opens the directory and removes that file. It answers with what is lost, or with the error. If it can't be
started, or dies, the merge runs here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from ..errors import MergeProcessLost, StoreError
from ..files import DiskFile, DiskFiles
from .merging import Losses, merge
from .segment import Segment
from .segment_writer import SegmentWriter

if TYPE_CHECKING:
    from .compaction import MergePlan

__all__ = ["merge_in_a_process"]

_POLL_S = 0.1
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tailrace.store.merge_process import main; main()"
)


class _Pickler(pickle.Pickler):
    """Segments by name."""

    def persistent_id(self, thing: Any) -> Any:
        return (thing.path, thing.clips) if isinstance(thing, Segment) else None


class _Unpickler(pickle.Unpickler):
    """Opens the segments that are named."""

    def __init__(self, file: IO[bytes], files: DiskFiles) -> None:
        super().__init__(file)
        self._files = files
        self._segments: dict[str, Segment] = {}

    def persistent_load(self, name: Any) -> Segment:
        path, clips = name
        segment = self._segments.get(path)
        if segment is None:
            segment = self._segments[path] = Segment(self._files, path)
            segment.set_clips(clips)
        return segment


def merge_in_a_process(
    plan: MergePlan, files: DiskFiles, file: DiskFile, number: int, go_on: Callable[[], None]
) -> dict[int, Losses]:
    """`merge` into this empty file, which is whole and synced afterwards. `go_on` may stop it."""
    if getattr(sys, "frozen", False):
        raise MergeProcessLost("no process for a merge: this program is packaged with its own Python")
    if not hasattr(select, "poll"):
        raise MergeProcessLost("no process for a merge: Windows can't pass an open file to another process")
    order = io.BytesIO()
    pickle.dump((os.fspath(files.root.absolute()), file.path, file.fileno(), number), order)
    _Pickler(order).dump(plan)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps([str(path) for path in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(file.fileno(),),
            process_group=0,  # Ctrl-C reaches only this process, which ends the other one
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    except OSError as error:
        raise MergeProcessLost(f"no process for a merge: {error}") from error
    with process:
        try:
            answer = _answer(process, order.getvalue(), go_on)
        except BaseException:
            process.kill()
            raise
    try:
        outcome: dict[int, Losses] | Exception = pickle.loads(answer)
    except (EOFError, pickle.UnpicklingError):
        raise MergeProcessLost(f"the process of a merge ended with {process.returncode}") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _answer(process: subprocess.Popen[bytes], order: bytes, go_on: Callable[[], None]) -> bytes:
    _send(process, order, go_on)
    while True:
        go_on()
        try:
            return process.communicate(timeout=_POLL_S)[0]
        except subprocess.TimeoutExpired:
            continue


def _send(process: subprocess.Popen[bytes], order: bytes, go_on: Callable[[], None]) -> None:
    """Send an order that is larger than a pipe: `communicate` sends nothing more after a timeout."""
    pipe, process.stdin = process.stdin, None
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    rest = memoryview(order)
    with pipe, contextlib.suppress(BrokenPipeError):  # the process is gone: its answer says why
        while rest:
            go_on()
            if poll.poll(_POLL_S * 1000):
                rest = rest[os.write(pipe.fileno(), rest) :]


def main() -> None:
    """Run the merge, in the other process."""
    parent = os.getppid()

    def go_on() -> None:
        if os.getppid() != parent:
            raise SystemExit(1)  # nobody waits for the answer any more

    order = sys.stdin.buffer
    root, path, fd, number = pickle.load(order)
    outcome: dict[int, Losses] | Exception
    try:
        plan: MergePlan = _Unpickler(order, DiskFiles(root)).load()
        writer = SegmentWriter(DiskFile(path, fd), number)
        outcome = merge(plan.piece_plans(), writer, go_on)
        writer.finish()
    except (OSError, StoreError) as error:
        outcome = error
    sys.stdout.buffer.write(pickle.dumps(outcome))
    sys.stdout.buffer.flush()
