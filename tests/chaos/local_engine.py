"""A script on the engine in this process: a kill is an exception that nobody catches, and the objects of
that life are left where they are."""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tailrace.spark as ts
from chaos.inprocess import Killed, Query, Spark
from chaos.script import TIDYING, Life, NotEqual, check_version, make_round
from chaos.tidying import tidy
from chaos.world import World
from spark.naive import table_state
from tailrace.spark import mirroring, rewrite, table
from tailrace.spark.source import spool, stream

_PATIENCE_S = 180.0
"""A life in which nothing happened for so long never comes to its end."""


class Chaos:
    """One script, from its seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        self.directory = directory
        self.table = str(directory / "table")
        self.restarts = 0
        self._met: Counter[str] = Counter()
        self._life: Life | None = None

    def run(self, rounds: int) -> None:
        """All of it; raises `NotEqual`, or whatever a mirror must not raise."""
        with self.world, self._in_our_hands():
            for _ in range(rounds):
                self._round()

    def _round(self) -> None:
        for life in make_round(self.rng):
            for accident in life.before:
                self.world.do(accident)
            self.world.trace.append(f"-- {life}")
            self._live(life)
            if life.tidying is not None and Path(self.table).exists():
                self.world.trace.append(f"-- {life.tidying}")
                tidy(self.table, life.tidying)
        self._compare()

    def _compare(self) -> None:
        verdict = ts.verify(Spark(), self.world.node.url, self.table)  # type: ignore[arg-type]
        check_version(self.world, self.table)
        bucket, rows = self.world.state(), table_state(self.table)
        if verdict.equal != (bucket == rows):
            raise NotEqual(f"verify says {verdict.equal}, the naive reader {bucket == rows}")
        if bucket != rows:
            raise NotEqual("; ".join(map(str, verdict.differences)))
        assert (verdict.documents, verdict.rows, verdict.behind) == (len(bucket), len(rows), 0)

    def _live(self, life: Life) -> None:
        self.restarts += 1
        self._met.clear()
        self._life = life
        spark = Spark()
        work_dir = self.directory / f"work-{self.restarts}"
        options = {"spoolDir": str(self.directory), "retryFor": "120", **life.options}
        try:
            query = ts.mirror(
                spark,  # type: ignore[arg-type]
                self.world.node.url,
                self.table,
                once=life.once,
                work_dir=work_dir,
                options=options,
            )
            if life.once:
                query.awaitTermination()
            else:
                self._run_on(query)  # type: ignore[arg-type]
        except Killed:
            pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            self._life = None
            for started in spark.started:
                started.stop()

    def _run_on(self, query: Query) -> None:
        """Until the table has come to where the bucket is."""
        patience = time.monotonic() + _PATIENCE_S
        while True:
            if query.step():
                patience = time.monotonic() + _PATIENCE_S
            positions = table.MirrorTable.open(self.table).current.positions
            here = {vbucket: position.seqno for vbucket, position in positions.items() if position.seqno}
            if here == {vbucket: seqno for vbucket, seqno in self.world.seqnos().items() if seqno}:
                return
            if time.monotonic() > patience:
                raise NotEqual(f"the mirror stands at {here} and does not move")

    # standing between the steps

    @contextlib.contextmanager
    def _in_our_hands(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in (mirroring, rewrite, stream):
                stack.enter_context(mock.patch.object(module, "crash_point", self._at))
            for module, name in ((spool, "write_scratch"), (table, "atomic_write")):
                write = self._until_the_disk_is_full(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, write))
            stack.enter_context(mock.patch.object(stream, "_remove_at_end", lambda _directory: None))
            stack.enter_context(mock.patch.object(mirroring, "_observed", lambda frame: frame))  # needs a JVM
            yield

    def _at(self, place: str) -> None:
        """The mirror came to a crash point."""
        if self._life is None:
            return
        self._met[place] += 1
        here = self._met[place]
        if place == "mirror.after-commit":
            check_version(self.world, self.table)
        for where, count, accident in self._life.accidents:
            if (where, count) != (place, here):
                continue
            if accident in TIDYING:
                self.world.trace.append(accident)
                tidy(self.table, accident)
            else:
                self.world.do(accident)
        if (self._life.killed_at, self._life.count) == (place, here):
            self.world.trace.append(f"killed at {place}:{here}")
            raise Killed

    def _until_the_disk_is_full(self, write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def write_if_there_is_room(path: Path | str, data: Any) -> Any:
            if self._life is not None and self._life.killed_at == "disk-full":
                self._met["disk-full"] += 1
                if self._met["disk-full"] >= 4 * self._life.count:
                    self.world.trace.append("the disk is full")
                    raise OSError(errno.ENOSPC, "no space left on device", str(path))
            return write(path, data)

        return write_if_there_is_room
