"""Processes that are killed while they write, and the check of what they leave. Run as a program by
test_kills.

    crash_child.py nth DIRECTORY SEED OPERATIONS     a kill at each call that writes, one run for each
    crash_child.py random DIRECTORY SEED KILLS       kills at random moments, all on the same data

This process makes its children by fork, so that each costs milliseconds and no interpreter's start; it has no
other threads. A child reports through a pipe what is durable. The store that it leaves is opened and checked
here.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from store.crash_script import begin, check_recovered, open_store, rehearse
from tailrace.clock import SYSTEM
from tailrace.errors import DocumentRefused
from tailrace.files import DiskFiles
from tailrace.rng import source
from tailrace.store.base import StoreSettings
from tailrace.store.engine import Engine
from tailrace.store.format import StoredDocument
from tailrace.testing.faulty_files import Fault, FaultyFiles, at_call, kill_myself

NUMBER = struct.Struct("<Q")


def fork(child: Any) -> tuple[int, int]:
    """Run `child(write)` in a new process; returns its pid and the pipe's end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        child(lambda number: os.write(writing, NUMBER.pack(number)))
        os._exit(0)
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
        os._exit(1)


def last_number(reading: int, pid: int) -> tuple[int, int]:
    """The last number that the child reported, and how it ended."""
    data = bytearray()
    while part := os.read(reading, 1 << 16):
        data += part
    os.close(reading)
    status = os.waitpid(pid, 0)[1]
    size = len(data) // NUMBER.size * NUMBER.size
    return (NUMBER.unpack_from(data, size - NUMBER.size)[0] if size else 0), os.waitstatus_to_exitcode(status)


def every_call(directory: str, seed: int, operations: int) -> int:
    """A kill at the first call that writes, at the second, and so on, until a run comes to its end."""
    script = rehearse(seed, operations)
    call = 0
    while True:
        call += 1
        place = Path(directory) / str(call)
        place.mkdir(parents=True)

        def child(tell: Any, place: Any = place, call: Any = call) -> None:
            cut = random.Random(call)
            plan = at_call(call, lambda size: Fault(kill_myself, cut.randint(0, size)))
            files = FaultyFiles(DiskFiles(place), plan, syncs=False)
            _, mine = begin(files, seed, looking=False)
            mine.run(operations, tell)

        pid, reading = fork(child)
        durable, code = last_number(reading, pid)
        assert code in (0, -signal.SIGKILL), code
        engine = open_store(FaultyFiles(DiskFiles(place), syncs=False), seed + 1_000)
        if "default" in engine.buckets:
            check_recovered(engine.buckets["default"], script, durable=durable)
        else:
            assert not durable
        engine.close()
        shutil.rmtree(place)
        if code == 0:
            return call


def random_kills(directory: str, seed: int, kills: int) -> int:
    """A writer with all its threads, killed again and again; its data grows over all lives.

    Each life writes value n to key n % KEYS, n rising over all lives. So the store must hold a run of numbers
    without a gap, up to one that is not below the last that was reported as durable.
    """
    keys, vbuckets = 200, 8
    settings = StoreSettings(memory_quota=1 << 20, history_changes=20, segment_fanout=4)
    rng = random.Random(seed)
    with Engine(DiskFiles(directory).root, settings=settings) as engine:
        engine.create_bucket("default", vbuckets)
    written = 0
    uuids: set[int] = set()

    def child(tell: Any, start: int) -> None:
        engine = Engine(directory, settings=settings, clock=SYSTEM, rng=source())
        bucket = engine.buckets["default"]
        tell(start)
        number = start
        flushing = None
        maintaining = []
        while True:
            for _ in range(10):
                value = b"%d " % (number + 1) + bytes((number + 1) % 900)
                try:
                    bucket.vbuckets[(number + 1) % vbuckets].set(b"\0%d" % ((number + 1) % keys), value)
                except DocumentRefused:
                    break  # the disk is behind
                number += 1
            if flushing is None:
                if (job := bucket.begin_flush()) is not None:
                    flushing = (job, number, start_thread(job.run))
            elif not flushing[2].is_alive():
                flushing[0].finish()
                tell(flushing[1])
                flushing = None
                while (job := bucket.begin_maintenance()) is not None:
                    maintaining.append((job, start_thread(job.run)))
            for job, thread in maintaining[:]:
                if not thread.is_alive():
                    job.finish()
                    maintaining.remove((job, thread))
            time.sleep(0)

    for _ in range(kills):
        pid, reading = fork(lambda tell, start=written: child(tell, start))
        os.read(reading, NUMBER.size)  # it is open
        time.sleep(rng.uniform(0.001, 0.04))
        os.kill(pid, signal.SIGKILL)
        durable, code = last_number(reading, pid)
        assert code == -signal.SIGKILL
        engine = Engine(directory, settings=settings)
        bucket = engine.buckets["default"]
        changes = {}
        for vb in bucket:
            assert vb.uuid not in uuids
            assert vb.failover_log.newest.seqno == vb.high_seqno
            for number in range(keys):
                frame = vb.get(b"\0%d" % number)
                if frame is not None:
                    text, _, rest = StoredDocument.of(frame).value.partition(b" ")
                    assert rest == bytes(int(text) % 900)
                    changes[number] = int(text)
        uuids |= {vb.uuid for vb in bucket}
        newest = max(changes.values(), default=0)
        assert newest >= max(durable, written), (newest, durable, written)
        wanted = {n % keys: n for n in range(max(newest - keys, 0) + 1, newest + 1)}
        assert changes == wanted, "something before the newest change is missing"
        written = newest
        engine.crash()
    return written


def start_thread(run: Any) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread


if __name__ == "__main__":
    what, directory, seed, count = sys.argv[1:]
    print({"nth": every_call, "random": random_kills}[what](directory, int(seed), int(count)))
