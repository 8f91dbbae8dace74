"""Options of mirrors in combinations that nobody thought of: each life of a mirror has other options.

A bucket with three collections is written to, loses changes, drops a collection and forgets deletions,
between the lives of its mirrors and while they run. Every life takes some of the tables, the change log or
not, other limits of undo, other sizes of rounds. A combination that is refused leaves everything as it was.
After each life every table of it is compared by `verify` and with what the bucket's store says, and every
version that it made is a state that the bucket had.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

import tailrace.testing
from chaos.local_engine import EAGER, Hours, files_age_with
from spark.local_jobs import LocalJobs
from table.s3 import BUCKET, moto_server, options_for
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import RollbackImpossible, UsageError
from tailrace.rng import unique_name
from tailrace.spark.rounds import housekeeping, planning
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.maintenance_once import maintain_once
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.store.format import StoredDocument
from tailrace.table.contract import Table
from tailrace.table.opening import TableOptions, open_table, table_exists

VBUCKETS = 4
KEYS = [f"key-{number}" for number in range(24)]
DEFAULT, ORDERS, USERS = "_default._default", "shop.orders", "shop.users"
COLLECTIONS = (DEFAULT, ORDERS, USERS)
DROPPED = USERS
"""The one that is dropped and created again."""
SCHEMA = "n BIGINT, name STRING"
REFUSED = re.compile(
    "is not typed|has a value column|for typed tables|other columns; with and without kept deletes"
    "|made without transaction records|there is no change log whose changes"
)
"""Combinations that are refused, each with what to do."""

LACKS = "its columns are not what the document has"
RARE = ("branch", "purge", "restart", "cut", "drop")

Documents = frozenset[tuple[str, bytes, int]]
"""Key, value, CAS."""


class Shop:
    """The bucket, and an account of what each collection held at each seqno of each vbucket."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.node = tailrace.testing.node(vbuckets=VBUCKETS)
        self.is_purged = self.was_dropped = False
        self._known: dict[tuple[str, int, int], set[Documents]] = {}
        self._value = 0

    def __enter__(self) -> Shop:
        self.node.__enter__()
        self._connect()
        self.client.set_manifest(with_changes(self.client.manifest(), [ORDERS, USERS]))
        self._note(range(VBUCKETS))
        return self

    def _connect(self) -> None:
        self.client = KvClient(parse(self.node.url))
        self.client.__enter__()

    def __exit__(self, *_: object) -> None:
        self.client.__exit__(None, None, None)
        self.node.__exit__(None, None, None)

    # what happens

    def something(self) -> str:
        what = self.rng.choice((*["write"] * 5, *["rewind"] * 3, *RARE))
        getattr(self, what)()
        return what

    def write(self) -> None:
        rng = self.rng
        there = [path for path in COLLECTIONS if path in self._ids()]
        for _ in range(rng.randrange(1, 50)):
            key, path = rng.choice(KEYS), rng.choice(there)
            if rng.random() < 0.3:
                self.client.delete(key, collection=path)
            else:
                self._value += 1
                self.client.set(key, self._document(), collection=path)
            self._note([self.node.vbucket_of(key)])

    def _document(self) -> Any:
        rng = self.rng
        kind = rng.random()
        if kind < 0.05:
            return b"\x80no text"
        document: dict[str, Any] = {"n": self._value, "name": "x" * rng.randrange(80)}
        if kind < 0.15:
            document["n"] = f"no number, {self._value}"
        if kind < 0.3:
            document[f"later{rng.randrange(3)}"] = self._value
        return document

    def rewind(self) -> None:
        """A failover that loses changes, and other changes with the same seqnos."""
        for vbucket in self.rng.sample(range(VBUCKETS), self.rng.randint(1, 3)):
            high = self.node.high_seqno(vbucket)
            with suppress(RollbackImpossible):  # behind a purge
                self.node.rewind(vbucket, self.rng.randint(max(0, high - self.rng.choice((3, 25))), high))
            self._note([vbucket])
        if self.rng.random() < 0.7:
            self.write()

    def branch(self) -> None:
        vbucket = self.rng.randrange(VBUCKETS)
        self.node.rewind(vbucket, self.node.high_seqno(vbucket))
        self._note([vbucket])

    def purge(self) -> None:
        self.write()
        self.node.compact(drop_tombstones=True)
        self.is_purged = True

    def restart(self) -> None:
        self.client.close()
        self.node.restart()
        self._connect()

    def cut(self) -> None:
        self.client.close()
        self.node.drop_connections()
        self._connect()

    def drop(self) -> None:
        """The collection goes, or comes again."""
        manifest = self.client.manifest()
        is_there = DROPPED in self._ids()
        self.client.set_manifest(with_changes(manifest, *([(), [DROPPED]] if is_there else [[DROPPED]])))
        self.was_dropped = True
        self._note(range(VBUCKETS))

    # the account

    def documents(self, path: str) -> Documents:
        return frozenset().union(*[self._stored(vbucket)[path] for vbucket in range(VBUCKETS)])

    def had(self, path: str, vbucket: int, seqno: int, rows: Documents) -> bool:
        """Whether the bucket ever held exactly this there; what it held below a purge is not known."""
        is_empty = not rows and (not seqno or (path == DROPPED and self.was_dropped))
        return is_empty or rows in self._known.get((path, vbucket, seqno), ())

    def has(self, path: str) -> bool:
        return path in self._ids()

    def _ids(self) -> dict[str, int]:
        return {
            f"{scope['name']}.{collection['name']}": int(collection["uid"], 16)
            for scope in self.client.manifest()["scopes"]
            for collection in scope["collections"]
        }

    def _note(self, vbuckets: Any) -> None:
        for vbucket in vbuckets:
            seqno = self.node.high_seqno(vbucket)
            for path, documents in self._stored(vbucket).items():
                self._known.setdefault((path, vbucket, seqno), set()).add(documents)

    def _stored(self, vbucket: int) -> dict[str, Documents]:
        ids = self._ids()

        def read(node: Any) -> dict[str, Documents]:
            store = node.buckets["default"].store.vbuckets[vbucket]
            held: dict[str, Documents] = {}
            for path in COLLECTIONS:
                documents = set()
                for key in KEYS if path in ids else ():
                    frame = store.get_any(_varint(ids[path]) + key.encode())
                    if frame is not None and not (stored := StoredDocument.of(frame)).deleted:
                        documents.add((key, bytes(stored.value), stored.cas))
                held[path] = frozenset(documents)
            return held

        return self.node.call(read)


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


@dataclass
class Life:
    """A start of a mirror: which tables it keeps, and how."""

    tables: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of `build_mirror`."""

    def __str__(self) -> str:
        return f"{self.tables} {self.settings}"


def make_life(rng: random.Random) -> Life:
    options = {"compression": rng.choice(("snappy", "off"))}
    for name, values in {
        "maxOffsetsPerTrigger": ("2", "9", "40"),
        "flowControlBuffer": ("1024", "6000"),
        "everyVersion": ("true",),
        "persistedOnly": ("true",),
        "includeTransactions": ("true",),
    }.items():
        if rng.random() < 0.3:
            options[name] = rng.choice(values)
    settings: dict[str, Any] = {"options": options}
    for name, choices in {
        "keep_deletes": (True,),
        "schema": (SCHEMA, SCHEMA, "infer"),
        "value_column": (False,),
        "evolve": (True, False),
        "has_log": (True,),
        "changes_keep_s": (0.0, 3600.0),
        "undo_s": (0.0, 60.0, 86400.0),
        "undo_bytes": (0, 4000, 1 << 20),
        "maintenance": (False,),
        "policy": (EAGER, EAGER, None),
    }.items():
        if rng.random() < 0.35:
            settings[name] = rng.choice(choices)
    return Life(rng.sample(COLLECTIONS, rng.randint(1, len(COLLECTIONS))), settings)


class Accidents(LocalJobs):
    """Executors in this process; while they work the bucket has accidents."""

    def __init__(self, shop: Shop, trace: list[str]) -> None:
        super().__init__()
        self._shop = shop
        self._trace = trace
        self._left = shop.rng.choice((0, 0, 1, 3))

    def run(self, work: Any, pieces: Any, description: str, on_done: Any = None) -> list[Any]:
        return super().run(work, pieces, description, lambda number: self._happens(number, on_done))

    def _happens(self, number: int, on_done: Callable[[int], None] | None) -> None:
        if on_done is not None:
            on_done(number)
        if self._left and self._shop.rng.random() < 0.4:
            self._left -= 1
            self._trace.append(f"  meanwhile {self._shop.something()}")


class Combinations:
    """One seed."""

    def __init__(self, seed: int, place: str, storage: Mapping[str, str]) -> None:
        self.rng = random.Random(seed)
        self.shop = Shop(self.rng)
        self.clock = Hours()
        self.trace: list[str] = []
        self.met: Counter[str] = Counter()
        self._storage = dict(storage)
        self._uris = {path: f"{place}/{path}" for path in COLLECTIONS}
        self._log = f"{place}/changes"
        self._kinds: dict[str, dict[str, Any]] = {}
        """The options that a table was made with; later lives give the same, or are refused."""
        self._checked: Counter[str] = Counter()
        self._log_was_kept_short = False
        self._lacking: set[str] = set()
        """Tables that got more columns than their first documents were written with."""

    def run(self, lives: int) -> None:
        with self.shop, files_age_with(self.clock):
            try:
                for _ in range(lives):
                    self._step()
            finally:
                close_idle_sources()

    def _step(self) -> None:
        for _ in range(self.rng.randrange(3)):
            self.trace.append(self.shop.something())
        self.clock.add(self.rng.choice((0.0, 0.0, 0.2, 2.0, 30.0)))
        life = make_life(self.rng)
        if self.rng.random() < 0.8:
            self._fit(life)
        self.trace.append(f"-- {life}")
        before = self._versions()
        try:
            made = self._build(life, Accidents(self.shop, self.trace))
        except UsageError as error:
            assert REFUSED.search(str(error)) or self._is_missing(life, str(error)), str(error)
            self.met["refused"] += 1
            assert self._versions() == before, f"refused, and yet something was made: {error}"
            return
        self.met["lives"] += 1
        made.prepare()
        made.run()
        made = self._build(life, LocalJobs())  # what happened meanwhile is for the next one
        made.prepare()
        made.run()
        if life.settings.get("changes_keep_s") is not None:
            self._log_was_kept_short = True
        if self.rng.random() < 0.3:
            self._maintain(life)
        for path in life.tables:
            if life.settings.get("evolve") and self._kinds[path].get("schema"):
                self._lacking.add(path)
            self._compare(path, life)
        if life.settings.get("has_log"):
            self._compare_log()

    def _fit(self, life: Life) -> None:
        """Most lives give the tables the options that the first one gave."""
        settings = life.settings
        life.tables = [path for path in life.tables if self.shop.has(path)] or [DEFAULT]
        kinds = [self._kinds[path] for path in life.tables if path in self._kinds]
        kind = kinds[0] if kinds else None
        if kind is not None:
            life.tables = [path for path in life.tables if self._kinds.get(path, kind) == kind]
            for name in ("keep_deletes", "schema", "value_column"):
                settings.pop(name, None)
            settings.update({name: value for name, value in kind.items() if value is not None})
            if kind.get("schema") and self.rng.random() < 0.5:  # the table knows it
                del settings["schema"]
                settings.pop("value_column", None)
                new = [path for path in life.tables if path not in self._kinds]
                life.tables = [path for path in life.tables if path not in new]
        if not settings.get("schema") and not (kind or {}).get("schema"):
            settings.pop("value_column", None)
            settings.pop("evolve", None)
        settings["options"].pop("includeTransactions", None)
        if not settings.get("has_log"):
            settings.pop("changes_keep_s", None)

    def _is_missing(self, life: Life, text: str) -> bool:
        return "has no collection" in text and any(not self.shop.has(path) for path in life.tables)

    def _build(self, life: Life, jobs: LocalJobs, start_over: Iterable[int] = ()) -> Mirror:
        settings = dict(life.settings)
        has_log = settings.pop("has_log", False)
        new = [path for path in life.tables if not table_exists(self._uris[path], self._how())]
        made = build_mirror(
            jobs,
            self.shop.node.url,
            {path: self._uris[path] for path in life.tables},
            once=True,
            changes=self._log if has_log else None,
            storage_options=self._storage,
            on_schema=lambda _: None,
            clock=self.clock,
            in_background=False,
            start_over=start_over,
            **settings,
        )
        for path in new:
            self._kinds[path] = {
                name: settings.get(name) for name in ("keep_deletes", "schema", "value_column")
            }
        return made

    def _how(self) -> TableOptions:
        return TableOptions(self._storage, clock=self.clock)

    def _open(self, uri: str) -> Table:
        return open_table(uri, self._how())

    def _versions(self) -> dict[str, int]:
        uris = (*self._uris.values(), self._log)
        return {uri: self._open(uri).version for uri in uris if table_exists(uri, self._how())}

    def _maintain(self, life: Life) -> None:
        for path in life.tables:
            self.trace.append(f"maintain {path}")
            undo = TableOptions(self._storage, self.rng.choice((None, 0.0, 60.0)), None, self.clock)
            held = open_table(self._uris[path], undo)
            due = maintain_once(held, dry_run=True, compact=True, force=True, say=lambda _: None)
            assert self._open(held.uri).version == held.version, "a dry run does nothing"
            done = maintain_once(
                held, dry_run=False, compact=True, force=True, say=lambda _: None, clock=self.clock
            )
            assert done.steps[: len(due.steps)] == due.steps

    # comparing

    def _compare(self, path: str, life: Life) -> None:
        uri = self._uris[path]
        held = self._open(uri)
        verdict = verify_table(LocalJobs(), source_options(self.shop.node.url), held)
        if verdict.differences and path in self._lacking:  # as the docs say: a repair fills them
            assert {told.what for told in verdict.differences} == {LACKS}, verdict.differences[:3]
            self.trace.append(f"repair {path}")
            made = self._build(life, LocalJobs(), start_over={told.vbucket for told in verdict.differences})
            made.prepare()
            made.run()
            held = self._open(uri)
            verdict = verify_table(LocalJobs(), source_options(self.shop.node.url), held)
            self.met["repaired"] += 1
        if not self.shop.has(path):
            assert self._rows(uri, None) == {}, "the collection is gone"
            return
        assert verdict.equal, verdict.differences[:3]
        newest = frozenset(row for rows in self._rows(uri, None).values() for row in rows)
        expected = self.shop.documents(path)
        if not self._has_values(held):
            newest, expected = _without_values(newest), _without_values(expected)
        assert newest == expected
        self._check_versions(path, held)
        self.met["compared"] += 1

    def _has_values(self, held: Table) -> bool:
        return "value" in held.schema.names

    def _check_versions(self, path: str, held: Table) -> None:
        """What was committed since the last look, as far as it can be gone back to."""
        if not self._has_values(held):
            return
        for version in held.versions():
            if version.version <= self._checked[path]:
                break
            rows = self._rows(held.uri, version.version)
            for vbucket in range(VBUCKETS):
                seqno = version.position(vbucket).seqno
                assert self.shop.had(path, vbucket, seqno, frozenset(rows.get(vbucket, ()))), (
                    f"{path}: version {version.version} has at seqno {seqno} of vbucket {vbucket} what the "
                    "bucket never had"
                )
            self.met["versions"] += 1
        self._checked[path] = held.version

    def _rows(self, uri: str, version: int | None) -> dict[int, set[tuple[str, bytes, int]]]:
        table = DeltaTable(uri, version=version, storage_options=self._storage or None)
        query = QueryBuilder().register("mirrored", table).execute("select * from mirrored")
        by_vbucket: dict[int, set[tuple[str, bytes, int]]] = {}
        for row in pa.table(query.read_all()).to_pylist():
            if row.get("deleted"):
                continue
            rows = by_vbucket.setdefault(row["vbucket"], set())
            assert row["key"] not in {key for key, _, _ in rows}, f"{row['key']} is there twice"
            rows.add((row["key"], _value(row), row["cas"]))
        return by_vbucket

    def _compare_log(self) -> None:
        """Every change is there once, and those that were not taken back lead to what the bucket has."""
        table = DeltaTable(self._log, storage_options=self._storage or None)
        query = QueryBuilder().register("changes", table).execute("select * from changes")
        rows: list[dict[str, Any]] = pa.table(query.read_all()).to_pylist()
        changes = [row for row in rows if row["op"] in ("mutation", "deletion", "expiration")]
        stands = Counter((row["vbucket"], row["vb_uuid"], row["seqno"]) for row in changes)
        assert max(stands.values(), default=1) == 1, "a change is in the log twice"
        self.met["logs"] += 1
        if self._log_was_kept_short or self.shop.is_purged or self.shop.was_dropped:
            return
        back: dict[int, list[tuple[int, int]]] = {}
        for row in rows:
            if row["op"] == "rollback":
                back.setdefault(row["vbucket"], []).append((row["log_version"], row["seqno"]))
        state: dict[tuple[str, str], tuple[str, bytes, int]] = {}
        for row in sorted(changes, key=lambda row: (row["vbucket"], row["seqno"])):
            taken = back.get(row["vbucket"], ())
            if any(row["log_version"] < version and row["seqno"] > seqno for version, seqno in taken):
                continue
            document = (f"{row['scope']}.{row['collection']}", row["key"])
            if row["op"] == "mutation":
                state[document] = (row["key"], _value(row), row["cas"])
            else:
                state.pop(document, None)
        for path in COLLECTIONS:
            led = {document for (of, _), document in state.items() if of == path}
            assert led == self.shop.documents(path), f"the log leads to another state of {path}"
        self.met["logs led"] += 1


def _value(row: Mapping[str, Any]) -> bytes:
    text = row.get("value")
    if text is not None:
        return str(text).encode()
    return base64.b64decode(row.get("value_base64") or "")


def _without_values(documents: Documents) -> Documents:
    return frozenset((key, b"", cas) for key, _, cas in documents)


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few documents are worth several tasks and some cleaning."""
    monkeypatch.setattr(planning, "_TASK_CHANGES", 15)
    monkeypatch.setattr(housekeeping, "CLEAN_EVERY_S", 0.0)


def play(seed: int, lives: int, place: str, storage: Mapping[str, str] | None = None) -> Counter[str]:
    script = Combinations(seed, place, storage or {})
    try:
        script.run(lives)
    except BaseException:
        print(f"seed {seed}:", *script.trace, sep="\n")
        raise
    return script.met


@pytest.mark.parametrize("seed", [1, 2])
def test_lives_with_other_options(seed: int, tmp_path: Path) -> None:
    met = play(seed, 8, str(tmp_path))
    assert met["lives"], met


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, dict[str, str]]]:
    with moto_server() as port:
        yield f"s3://{BUCKET}/{unique_name()}", options_for(port)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 104))
def test_lives_on_an_object_store(seed: int, bucket: tuple[str, dict[str, str]]) -> None:
    place, storage = bucket
    assert play(seed, 5, f"{place}/{seed}", storage)["lives"]


@pytest.mark.long
def test_lives_with_other_options_for_long(tmp_path: Path) -> None:
    """``SEED=7`` plays one again, ``SEEDS=40`` that many from there."""
    first = int(os.environ.get("SEED", "1000"))
    met: Counter[str] = Counter()
    for seed in range(first, first + int(os.environ.get("SEEDS", "1" if "SEED" in os.environ else "60"))):
        met += play(seed, 10, str(tmp_path / str(seed)))
    print(json.dumps(met))
