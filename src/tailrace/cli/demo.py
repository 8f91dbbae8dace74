"""``tailrace demo``: a bucket, its mirror, a failover that loses changes, and the proof of the repair."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import click

from .. import rng
from ..clock import SYSTEM
from ..errors import TailraceError
from ..files import atomic_write, make_folder, remove_file, temporary_folder
from .common import DIRECTORY, Integer, counted, note
from .common import command as make_command
from .spark_options import need_spark, open_spark

if TYPE_CHECKING:
    from ..client.kv import KvClient
    from ..spark.report import LostChange, Moment, Sample
    from ..spark.rounds.progress import RoundProgress
    from ..spark.rounds.verify import Verdict

VBUCKETS = 16
_PATIENCE_S = 180.0


@make_command("demo", example="tailrace demo\ntailrace demo --docs 50000 --dir ./my-demo")
@click.option(
    "--docs", type=Integer(1_000, 1_000_000), default=10_000, show_default=True, help="Documents to write."
)
@click.option(
    "--seed", type=Integer(), default=1, show_default=True, help="The same seed makes the same documents."
)
@click.option(
    "--dir",
    "directory",
    type=DIRECTORY,
    help="Where to put everything.  [default: a new folder]",
)
def command(docs: int, seed: int, directory: Path | None) -> int:
    """Run a demo: a node, a mirror, a failover that loses changes, the repair.

    Starts a node, writes documents, mirrors them into a Delta table with Spark, changes and deletes some,
    forces a failover that loses changes, lets the mirror roll back and repair itself, and proves with
    'verify' that table and source are equal. Leaves a report behind.
    """
    need_spark()
    home = directory or temporary_folder("tailrace-demo-")
    make_folder(home)
    with _node(home) as url:
        return _Demo(home, url, docs, seed).run()


@contextmanager
def _node(home: Path) -> Iterator[str]:
    """A node in a process of its own."""
    ready = home / "node.json"
    remove_file(ready)
    arguments = ["serve", "--port", "0", "--vbuckets", str(VBUCKETS), "--data", str(home / "data")]
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace", *arguments, "--ready-file", str(ready)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = SYSTEM.monotonic() + _PATIENCE_S
        while not ready.exists():
            if process.poll() is not None or SYSTEM.monotonic() > deadline:
                error_text = (
                    process.stderr.read().strip() if process.stderr and process.poll() is not None else ""
                )
                raise TailraceError(f"the node did not start: {error_text or 'no answer'}, try another --dir")
            sleep(0.05)
        node = json.loads(ready.read_text())
        yield f"couchbase://{node['host']}:{node['port']}/default"
    finally:
        process.terminate()
        process.wait(timeout=_PATIENCE_S)


class _Demo:
    """One run of the demo, and what its screen shows."""

    def __init__(self, home: Path, url: str, docs: int, seed: int) -> None:
        self.home = home
        self.url = url
        self.table = str(home / "table")
        self.docs = docs
        self.seed = seed
        self.rng = rng.source(seed)
        self.began = SYSTEM.monotonic()
        self.samples: list[Sample] = []
        self.moments: list[Moment] = []
        self.applied = 0
        self.positions: dict[int, int] = {}
        self.rolled_back: set[int] = set()
        self.table_rows = 0
        self.count_rows: Callable[[], int] = lambda: 0
        self.version = 0
        self.phase = ""
        self._version_before = 0
        self._kept: dict[int, int] = {}
        """The seqno of each vbucket up to which the failover lost nothing."""
        self._lock = threading.Lock()
        self._done = threading.Event()

    def run(self) -> int:
        from ..client.kv import KvClient
        from ..connstr import parse

        where = parse(self.url)
        with KvClient(where) as writer, KvClient(where) as watcher, self._view():
            self._say("a node is running; Spark is starting")
            sampler = threading.Thread(target=self._sample, daemon=True)
            sampler.start()
            loader = threading.Thread(target=self._load, args=(writer,), daemon=True)
            loader.start()
            with open_spark(None, (), name="tailrace demo") as spark:
                from ..spark.api import prepare_mirror, verify

                loader.join()
                mirror = prepare_mirror(spark, self.url, self.table, on_progress=self._on_progress)
                self.count_rows = lambda: sum(file.live_rows for file in mirror.tables[0].files())
                query = mirror.start()
                try:
                    self._story(writer, watcher, query.exception)
                finally:
                    query.stop()
                    self._done.set()
                    sampler.join()
                self._say("verify: comparing every document of bucket and table")
                verdict = verify(spark, self.url, self.table)
            answer = "equal" if verdict.equal else f"{len(verdict.differences)} differences"
            summary = (
                f"{answer}: {verdict.documents} documents in the bucket, {verdict.rows} rows in the table at "
                f"version {verdict.table_version}"
            )
            self._say(f"verify: {summary}")
            self._add_last_sample(verdict)
        self._finish(summary, self._lost_changes())
        return 0 if verdict.equal else 1

    # the story

    def _story(self, writer: KvClient, watcher: KvClient, failure: Callable[[], Any]) -> None:
        self._say(f"the mirror copies {self.docs} documents into a Delta table")
        self._wait_equal(watcher, failure)
        changed, deleted = self.docs // 10, self.docs // 20
        self._say(f"{changed} documents are changed, {deleted} deleted")
        numbers = self.rng.sample(range(self.docs), changed + deleted)
        self._write(writer, numbers[:changed], {"changed": True}, deleted=numbers[changed:])
        alive = sorted({*range(self.docs)} - {*numbers[changed:]})
        self._wait_equal(watcher, failure)
        new, again = self.docs // 5, self.docs // 20
        self._say(f"{new} new documents arrive and {again} are changed again, and the mirror takes them")
        self._write(writer, range(self.docs, self.docs + new), {"new": True})
        numbers = self.rng.sample(alive, again + 200)
        self._write(writer, numbers[:again], {"changed": "again"})
        self._wait_equal(watcher, failure)
        self._take_sample(watcher)
        lost = new // (VBUCKETS * 2)
        self._version_before = self.version
        kept = {vbucket: seqno - lost for vbucket, seqno in watcher.high_seqnos().items()}
        self._say(
            f"failover! the last {lost} changes of each vbucket are lost, others are made instead",
            is_rollback=True,
        )
        writer.rewind(None, lose=lost)
        self._kept = kept
        self._take_sample(watcher)
        self._write(writer, numbers[again:], {"made": "after the failover"})
        # the new branch may be at the very seqno that the table has reached on the old one
        self._wait_equal(watcher, failure, rolled_back=VBUCKETS)
        self._take_sample(watcher)
        self._say("the mirror went back with the bucket, and is in step again")

    def _write(
        self, writer: KvClient, numbers: Iterable[int], value: dict[str, Any], deleted: Iterable[int] = ()
    ) -> None:
        """Write and delete many documents in batches."""
        from ..client.load import from_json_lines

        lines = [{"key": self._key(number).decode(), "value": {**value, "n": number}} for number in numbers]
        lines += [{"key": self._key(number).decode(), "op": "deletion"} for number in deleted]
        batches = from_json_lines(
            (json.dumps(line).encode() for line in lines),
            writer.vbucket_count,
            collections=writer.collections,
            json_type=writer.json_type,
            most=4_096,
        )
        for _ in writer.write_many(batches):
            pass

    def _load(self, writer: KvClient) -> None:
        from ..client.load import MadeUp

        made = MadeUp(self.docs, 256, prefix="demo::", seed=self.seed)
        batches = made.batches(
            writer.vbucket_count, collections=writer.collections, json_type=writer.json_type, most=4_096
        )
        for _ in writer.write_many(batches):
            pass
        self._say(f"{self.docs} documents are in the bucket")

    def _key(self, number: int) -> bytes:
        from ..client.load import MadeUp

        return MadeUp(self.docs, 256, prefix="demo::").key(number)

    def _wait_equal(self, watcher: KvClient, failure: Callable[[], Any], *, rolled_back: int = 0) -> None:
        """Wait until the table has caught up with the bucket."""
        deadline = SYSTEM.monotonic() + _PATIENCE_S
        while SYSTEM.monotonic() < deadline:
            if (error := failure()) is not None:
                raise TailraceError(f"the mirror stopped: {error}")
            high = watcher.high_seqnos()
            with self._lock:
                level = all(self.positions.get(vbucket, 0) == seqno for vbucket, seqno in high.items())
                is_back = len(self.rolled_back) >= rolled_back
            if level and is_back:
                return
            sleep(0.1)
        raise TailraceError("the mirror did not catch up in time; is the machine very busy?")

    # what is shown

    def _on_progress(self, applied: RoundProgress) -> None:
        with self._lock:
            self.applied += applied.changes
            self.version = applied.versions[0]
            self.table_rows = self.count_rows()
            self.positions = {vbucket: position.seqno for vbucket, position in applied.positions.items()}
            self.rolled_back.update(applied.rolled_back)
        if applied.rolled_back:
            self._say(
                f"the mirror rolled {counted(len(applied.rolled_back), 'vbucket')} back", is_rollback=True
            )

    def _sample(self) -> None:
        from ..client.kv import KvClient
        from ..connstr import parse

        with KvClient(parse(self.url)) as asker:
            while not self._done.wait(0.2):
                self._take_sample(asker)

    def _take_sample(self, asker: KvClient) -> None:
        from ..spark.report import Sample

        with self._lock:
            high = asker.high_seqnos()
            documents = int(asker.stats().get("curr_items", 0))
            lag = sum(max(0, seqno - self._reached(vbucket)) for vbucket, seqno in high.items())
            self.samples.append(
                Sample(self._now(), documents, self.table_rows, lag, self.applied, self.version)
            )

    def _reached(self, vbucket: int) -> int:
        """The seqno to which the table has the bucket's history, not counting what the failover lost."""
        seqno = self.positions.get(vbucket, 0)
        return seqno if vbucket in self.rolled_back else min(seqno, self._kept.get(vbucket, seqno))

    def _add_last_sample(self, verdict: Verdict) -> None:
        """Its version is from verify: compaction and cleaning have made more since the last round."""
        from ..spark.report import Sample

        self.version, self.table_rows = verdict.table_version, verdict.rows
        self.samples.append(
            Sample(
                self._now(),
                verdict.documents,
                verdict.rows,
                verdict.behind,
                self.applied,
                verdict.table_version,
            )
        )

    def _lost_changes(self) -> list[LostChange]:
        """The lost changes by key, from two versions of the table: before the failover, and now."""
        from ..spark.report import LostChange
        from ..table.reading import read_table

        def rows(version: int | None) -> dict[str, dict[str, Any]]:
            columns = ["key", "value", "vbucket", "seqno"]
            read = read_table(self.table, version=version, columns=columns).to_arrow()
            return {row["key"]: row for row in read.to_pylist()}

        after = rows(None)
        return [
            LostChange(key, row["vbucket"], row["seqno"], row["value"], after.get(key, {}).get("value"))
            for key, row in rows(self._version_before).items()
            if row["seqno"] > self._kept[row["vbucket"]]
        ]

    def _now(self) -> float:
        return SYSTEM.monotonic() - self.began

    def _say(self, text: str, *, is_rollback: bool = False) -> None:
        from ..spark.report import Moment

        with self._lock:
            self.moments.append(Moment(self._now(), text, is_rollback))
            self.phase = text
        if not sys.stderr.isatty():
            note(text)

    @contextmanager
    def _view(self) -> Iterator[None]:
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        with Live(get_renderable=self._screen, console=Console(stderr=True), refresh_per_second=8):
            yield

    def _screen(self) -> Any:
        """The terminal view: node and mirror side by side, and what happened."""
        from rich.columns import Columns
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        last = self.samples[-1] if self.samples else None
        before = next(
            (sample for sample in reversed(self.samples) if last and last.at_s - sample.at_s > 1.0), None
        )
        rate = (last.changes - before.changes) / (last.at_s - before.at_s) if last and before else 0.0
        node = f"documents  {last.bucket_documents if last else 0:>9,}\nvbuckets   {VBUCKETS:>9}\n{self.url}"
        mirror = (
            f"rows       {self.table_rows:>9,}\nversion    {self.version:>9}\n"
            f"lag        {last.lag if last else 0:>9,}\nchanges/s  {rate:>9,.0f}"
        )
        story = Text()
        for moment in self.moments[-8:]:
            story.append(f"{moment.at_s:6.1f} s  ", style="dim")
            story.append(f"{moment.text}\n", style="bold yellow" if moment.is_rollback else "")
        panels = Columns(
            [Panel(node, title="node", width=44), Panel(mirror, title="mirror (Delta)", width=28)]
        )
        return Group(panels, Panel(story, title="what happens", width=100))

    def _finish(self, summary: str, lost: list[LostChange]) -> None:
        from ..spark.report import render

        report = self.home / "report.html"
        text = render(
            self.samples,
            self.moments,
            title="Tailrace demo: a mirror that stays true",
            summary=summary,
            lost=lost,
        )
        atomic_write(report, text.encode())
        drawn = {"samples": list(map(asdict, self.samples)), "moments": list(map(asdict, self.moments))}
        atomic_write(self.home / "report.json", json.dumps(drawn).encode())
        click.echo(f"verify: {summary}")
        gone = sum(change.after is None for change in lost)
        click.echo(
            f"the failover took {counted(len(lost), 'change')} back: {counted(gone, 'document')} never "
            f"existed, {len(lost) - gone} are back to what they were. Among them:"
        )
        for change in [*_first(lost, is_gone=False), *_first(lost, is_gone=True)]:
            click.echo(f"  {change}")
        click.echo(f"report: {report}")
        click.echo(f"table:  {self.table}")
        click.echo(
            f"\nTry next:\n{_way_to_the_command()}"
            "  tailrace serve                                            # a node; then, beside it:\n"
            "  tailrace load couchbase://127.0.0.1 --docs 100000         # documents in it\n"
            "  tailrace tail couchbase://127.0.0.1 --from now            # watch it change\n"
            "  tailrace mirror couchbase://127.0.0.1 ./people            # and keep a table in step"
        )


def _way_to_the_command() -> str:
    """`make demo` installs into an environment that the shell does not know yet."""
    activate = Path(sys.executable).with_name("activate")
    if shutil.which("tailrace") is not None or not activate.exists():
        return ""
    return f"  {f'. {shlex.quote(str(activate))}':57} # so that the shell finds tailrace\n"


def _first(lost: list[LostChange], *, is_gone: bool) -> list[LostChange]:
    return [change for change in lost if (change.after is None) == is_gone][:2]
