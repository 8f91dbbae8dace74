"""The product's mirror and its Spark source in the simulated cluster, with ``persisted_only``.

All decisions are the product's: which changes a round may read, what its tasks hold back and answer, what is
committed; how portions become deliveries, segments of the spool and offsets, and what is read again after a
kill. Only the table's log (a list), Spark (a loop over micro-batches that keeps offsets as Spark does) and
the sink are ours.
"""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.sim_network import HOST, Dial
from cluster.sim_pump import Fiber, Process
from spark.local_jobs import LocalJobs
from table.memory_table import MemoryTable
from tailrace.clock import ManualClock
from tailrace.errors import ConnectError
from tailrace.model import Position
from tailrace.spark.rounds import idle_sources
from tailrace.spark.rounds.assignment import Assignment, MirrorSettings
from tailrace.spark.rounds.mirror import Mirror as RoundsMirror
from tailrace.spark.source.offsets import from_offset
from tailrace.spark.source.stream import StreamReader


class Follower:
    """Hands on what a cluster's vbuckets have, and may be killed and started again."""

    PLACE = "mirror"
    """Its place in the network: what happens to the mirror's connections happens to these."""
    NAME = "follower"

    def __init__(self, rng: random.Random, ports: dict[str, int], dial: Dial, clock: ManualClock) -> None:
        self._rng = random.Random(rng.random())
        self._dial = dial
        self.clock = clock
        self._folder = Path(tempfile.mkdtemp(prefix="tailrace-sim-"))
        where = ",".join(f"{HOST}:{port}" for port in ports.values())
        self._given = {
            "connectionString": f"couchbase://{where}",
            "bucket": "default",
            "retryFor": "100000",
            "failOnDataLoss": "false",
            "persistedOnly": "true",
            "startingOffsets": "earliest",
            "spoolDir": str(self._folder / "spool"),
        }
        self.on_publish: Callable[[int, int, int, dict[bytes, bytes]], None] = lambda *_: None
        self.on_hand_out: Callable[[int, int, int], None] = lambda *_: None
        self.published: dict[int, tuple[int, dict[bytes, bytes]]] = {}
        self.said: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self.process = Process(self.PLACE, self._dial, self.clock.monotonic)
        self.process.start(self._live)

    def _live(self) -> None:
        """What its process does."""
        raise NotImplementedError

    def restart(self) -> None:
        """A kill: what was committed stays."""
        self.process.kill()
        self._begin()

    def turn(self) -> None:
        """Let it do what it can do now."""
        try:
            self.process.turn()
        except ConnectError as error:  # no node could be reached: a real one ends, and is started again
            self.said.append(str(error))
            self.restart()

    def can_read(self, ports: list[int]) -> bool:
        """A vbucket whose copies are at these ports."""
        return True

    def close(self) -> None:
        """It is over."""
        self.process.kill()
        shutil.rmtree(self._folder)

    def _publish(self, vbucket: int, position: Position, state: dict[bytes, bytes]) -> None:
        self.published[vbucket] = position.seqno, state
        self.on_publish(vbucket, position.vb_uuid, position.seqno, state)


class _Stopping:
    """The event that ends a mirror, and by which it waits."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        self._process.sleep(seconds)
        return False


class TableMirror(Follower):
    """The mirror, with its table in memory."""

    NAME = "table mirror"

    def __init__(self, *args: Any) -> None:
        self._seen = 0
        self._table: MemoryTable | None = None
        super().__init__(*args)

    def _live(self) -> None:
        idle_sources._idle.clear()  # those of the process that was killed
        if self._table is None:
            self._table = MemoryTable(self._folder / "table")
        mirror = RoundsMirror(
            Assignment(
                LocalJobs(),
                self._given_to_mirror(),
                [self._table],
                "default",
                MirrorSettings(maintenance=False),
                on_trouble=self.said.append,
                clock=self.clock,
                in_background=False,
            )
        )
        mirror.handle.stopping = _Stopping(self.process)  # type: ignore[assignment]
        mirror.prepare()
        mirror.run()

    def _given_to_mirror(self) -> dict[str, str]:
        return {key: text for key, text in self._given.items() if key not in ("startingOffsets", "spoolDir")}

    def turn(self) -> None:
        super().turn()
        while self._table is not None and self._seen < self._table.version:
            self._seen += 1
            self._committed(self._table, self._seen)

    def _committed(self, table: MemoryTable, number: int) -> None:
        version = next(version for version in table.versions() if version.version == number)
        states: dict[int, dict[bytes, bytes]] = {vbucket: {} for vbucket in version.positions}
        for row in table.rows(number).select(["vbucket", "key", "value"]).to_pylist():
            states[row["vbucket"]][_bytes(row["key"])] = _bytes(row["value"])
        for vbucket, position in version.positions.items():
            if self.published.get(vbucket) != (position.seqno, states[vbucket]):
                self.on_hand_out(vbucket, position.vb_uuid, position.seqno)
                self._publish(vbucket, position, states[vbucket])


class _SimulatedStreamReader(StreamReader):
    """The source's stream reader, whose thread is another fiber of its process."""

    process: Process

    def _in_background(self, work: Callable[[], None]) -> None:
        self.process.start(work)


class StreamingQuery(Follower):
    """A query that reads the Spark source: micro-batches as Spark makes them, and a sink with versions."""

    NAME = "streaming query"
    _PAUSE_S = 0.1

    def __init__(self, *args: Any) -> None:
        self._done: dict[str, Any] | None = None
        """The offset of the last batch that is done."""
        self._planned: dict[str, Any] | None = None
        """The end of a batch that was begun: Spark's write-ahead log."""
        self._held: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
        self.replayed = 0
        super().__init__(*args)

    def _live(self) -> None:
        reader = _SimulatedStreamReader(self._given)
        reader.process = self.process
        if self._done is None:
            self._done = reader.initialOffset()
        if self._planned is not None:
            self.replayed += 1
            self._run_batch(reader, self._done, self._planned)
        while True:
            end = reader.latestOffset(self._done, reader.getDefaultReadLimit())
            if end == self._done:
                self._wait_for_more(reader)
                continue
            self._planned = end
            if self._rng.random() < 0.3:
                self.process.sleep(self._PAUSE_S)
            self._run_batch(reader, self._done, end)

    def _wait_for_more(self, reader: StreamReader) -> None:
        due, spool = self.process.now() + self._PAUSE_S, reader._spool
        assert spool is not None
        Fiber.current().wait_until(lambda: self.process.now() >= due or spool.held_bytes > 0)

    def _run_batch(self, reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> None:
        rows: list[dict[str, Any]] = []
        for partition in reader.partitions(start, end):
            executor = pickle.loads(pickle.dumps(reader))
            for batch in executor.read(pickle.loads(pickle.dumps(partition))):
                rows += batch.to_pylist()
        self._write(rows, from_offset(end))
        self._done, self._planned = end, None
        reader.commit(end)

    def _write(self, rows: list[dict[str, Any]], positions: dict[int, Position]) -> None:
        """The sink: all of a batch, once."""
        for row in rows:
            held = self._held.setdefault(row["vbucket"], [])
            if row["op"] == "rollback":
                held[:] = [version for version in held if version[0] <= row["seqno"]]
            elif row["op"] in ("mutation", "deletion", "expiration"):
                if held and row["seqno"] <= held[-1][0]:
                    continue  # it came with a batch that was read again, up to the end of a snapshot
                value = _bytes(row["value"]) if row["op"] == "mutation" else None
                held.append((row["seqno"], _bytes(row["key"]), value))
        for vbucket, position in positions.items():
            if position.seqno:
                self.on_hand_out(vbucket, position.vb_uuid, position.seqno)
            held = self._held.get(vbucket, [])
            if position.at_snapshot_end and (not held or held[-1][0] <= position.seqno):
                self._publish_held(vbucket, position, held)

    def _publish_held(
        self, vbucket: int, position: Position, held: list[tuple[int, bytes, bytes | None]]
    ) -> None:
        state: dict[bytes, bytes] = {}
        for _, key, value in held:
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        if self.published.get(vbucket) != (position.seqno, state):
            self._publish(vbucket, position, state)


def _bytes(shown: str | bytes) -> bytes:
    return shown.encode() if isinstance(shown, str) else shown
