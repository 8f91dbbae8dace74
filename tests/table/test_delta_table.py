"""A mirror's Delta table, compared with two readers that we did not write."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap

from table.independent import (
    SCHEMA,
    SOURCE,
    NaiveMirror,
    check_rows,
    own_rows,
    polars_rows,
    query_rows,
    write_file,
)
from table.test_vectors import inline_vector
from tailrace.clock import ManualClock
from tailrace.errors import UsageError
from tailrace.model import Position
from tailrace.table.contract import Commit, Fenced, TableChanged, TableDamaged, UnknownFeature
from tailrace.table.delta.log import commit_path
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.delta.vectors import VectorFile
from tailrace.table.exporting import export_table
from tailrace.table.store import TableStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make(path: Path | str, clock: ManualClock, **options: int) -> DeltaMirrorTable:
    return DeltaMirrorTable.open_or_create(path, schema=SCHEMA, source=SOURCE, clock=clock, **options)  # type: ignore[arg-type]


@pytest.fixture
def table(tmp_path: Path, clock: ManualClock) -> DeltaMirrorTable:
    table = make(tmp_path / "t", clock)
    table.claim("first")
    return table


def keys(numbers: range | list[int]) -> list[str]:
    return [f"key::{number}" for number in numbers]


def test_rounds(table: DeltaMirrorTable, clock: ManualClock) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(1000)))
    check_rows(table, mirror.rows)
    mirror.change(keys(range(0, 1000, 7)), deleted=keys(range(1, 1000, 50)))
    check_rows(table, mirror.rows)
    mirror.change(keys(range(0, 1000, 2)), deleted=keys(range(5, 1000, 50)))
    check_rows(table, mirror.rows)
    for version, rows in mirror.states.items():
        assert own_rows(table, version) == rows
    again = DeltaMirrorTable.open(table.uri)
    assert again.version == table.version
    assert again.current == table.current
    assert again.secret == table.secret and len(again.secret) == 16
    assert again.source == SOURCE
    assert again.schema == SCHEMA
    check_rows(again, mirror.rows)
    assert again.files() == table.files()


@pytest.mark.parametrize("seed", range(3))
def test_random_rounds_with_checkpoints(tmp_path: Path, clock: ManualClock, seed: int) -> None:
    rng = random.Random(seed)
    table = make(tmp_path / "t", clock, checkpoint_every=7)
    table.claim()
    mirror = NaiveMirror(table)
    for _ in range(25):
        clock.advance(rng.random() * 10)
        written = rng.sample(range(500), rng.randrange(1, 60))
        mirror.change(keys(written), deleted=rng.sample(sorted(mirror.rows), min(len(mirror.rows), 5)))
        if rng.random() < 0.2:
            check_rows(table, mirror.rows)
        if rng.random() < 0.3:
            table = mirror.table = DeltaMirrorTable.open(table.uri, clock=clock, checkpoint_every=7)
            table.claim()
    check_rows(table, mirror.rows)
    assert DeltaTable(table.uri).version() == table.version
    for version, rows in mirror.states.items():
        assert own_rows(table, version) == rows
        assert query_rows(table.uri, version=version) == rows
    fresh = DeltaMirrorTable.open(table.uri)
    assert fresh.current == table.current
    assert dict(fresh.current.positions) == {
        vbucket: Position.at(1000 + vbucket, seqno) for vbucket, seqno in mirror.seqnos.items()
    }


def test_a_file_whose_rows_are_all_dead_is_gone(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    mirror.change(keys(range(10)))
    assert len(table.files()) == 1
    mirror.change([], deleted=keys(range(10)))
    assert table.files() == []
    dead = write_file(table.store, [("a", "b", 1, 1)], dead=[0])
    table.commit(Commit("TAILRACE ROUND", added=[dead]))
    assert table.files() == []


def test_new_files_may_have_dead_rows(table: DeltaMirrorTable) -> None:
    rows = [(f"k{number}", "v", number % 8, number + 1) for number in range(2000)]
    dead = set(range(0, 2000, 3))
    table.commit(Commit("TAILRACE ROUND", added=[write_file(table.store, rows, dead=dead)]))
    check_rows(table, {row[0]: row for number, row in enumerate(rows) if number not in dead})
    (file,) = table.files()
    assert file.vector is not None and file.vector.storage == "u"
    assert file.live_rows == 2000 - len(dead)
    assert json.loads(file.stats)["tightBounds"] is False
    assert json.loads(file.stats)["numRecords"] == 2000


def test_small_vectors_are_in_files_too(table: DeltaMirrorTable) -> None:
    """delta-spark's VACUUM fails if one is in the log itself."""
    mirror = NaiveMirror(table)
    mirror.change(keys(range(100)))
    mirror.change(keys([3]))
    vectors = [file.vector for file in table.files() if file.vector]
    assert [vector.storage for vector in vectors] == ["u"]
    check_rows(table, mirror.rows)


def test_a_table_with_vectors_in_its_log(table: DeltaMirrorTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier Tailrace wrote small ones there."""
    mirror = NaiveMirror(table)
    mirror.change(keys(range(100)))
    with monkeypatch.context() as patched:
        patched.setattr(VectorFile, "add", lambda _, data, rows: inline_vector(data, rows))
        mirror.change(keys([3]))
    assert [file.vector.storage for file in table.files() if file.vector] == ["i"]
    again = DeltaMirrorTable.open(table.uri)
    check_rows(again, mirror.rows)
    mirror.change(keys([3, 4]))
    assert {file.vector.storage for file in table.files() if file.vector} == {"u"}
    check_rows(table, mirror.rows)
    table.checkpoint()
    check_rows(DeltaMirrorTable.open(table.uri), mirror.rows)


def test_exact_vectors_and_files_that_come_back(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    first = mirror.change(keys(range(100)))
    two = mirror.change(keys(range(50)))
    before = {file.path: file for file in table.files(first)}
    (old,) = before
    new = next(file.path for file in table.files(two) if file.path not in before)
    table.commit(
        Commit(
            "TAILRACE ROLLBACK",
            vectors={old: BitMap()},
            removed=[new],
            resets={3: 7},
            positions={3: Position.at(9, 7)},
        )
    )
    check_rows(table, mirror.states[first])
    table.commit(Commit("TAILRACE COMPACT", removed=[old], data_change=False))
    table.commit(Commit("TAILRACE ROLLBACK", readded=[before[old]], vectors={old: BitMap([1, 2])}))
    expected = {
        row[0]: row for number, row in enumerate(mirror.states[first].values()) if number not in (1, 2)
    }
    check_rows(table, expected)
    versions = {version.version: version for version in table.versions()}
    assert versions[two + 1].resets == {3: 7}
    assert versions[two + 1].operation == "TAILRACE ROLLBACK"


def test_what_a_commit_can_not_do(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    (file,) = table.files()
    with pytest.raises(TableChanged, match="no longer part"):
        table.commit(Commit("TAILRACE ROUND", masked={"other.parquet": BitMap([1])}))
    with pytest.raises(TableChanged, match="no longer part"):
        table.commit(Commit("TAILRACE COMPACT", removed=["other.parquet"]))
    with pytest.raises(TableChanged, match="already"):
        table.commit(Commit("TAILRACE ROLLBACK", readded=[file]))
    with pytest.raises(UsageError, match="10 rows"):
        table.commit(Commit("TAILRACE ROUND", masked={file.path: BitMap([10])}))
    with pytest.raises(UsageError, match="removed and masked"):
        table.commit(Commit("TAILRACE ROUND", masked={file.path: BitMap([1])}, removed=[file.path]))
    with pytest.raises(UsageError, match="inside a snapshot"):
        table.commit(Commit("TAILRACE ROUND", positions={1: Position(1, 5, 1, 9)}))
    assert table.version == mirror.table.version == DeltaTable(table.uri).version()


# Who may write.


def test_a_table_is_claimed_before_it_is_written(tmp_path: Path, clock: ManualClock) -> None:
    table = make(tmp_path / "t", clock)
    with pytest.raises(UsageError, match="not claimed"):
        table.commit(Commit("TAILRACE ROUND"))


def test_a_zombie_is_fenced(table: DeltaMirrorTable, clock: ManualClock) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    other = DeltaMirrorTable.open(table.uri, clock=clock)
    other.claim("second")
    with pytest.raises(Fenced, match="second"):
        mirror.change(keys(range(5)))
    with pytest.raises(Fenced):
        table.refresh()
    with pytest.raises(Fenced):
        table.commit(Commit("TAILRACE ROUND"))
    other.commit(Commit("TAILRACE ROUND"))
    assert other.version == DeltaTable(table.uri).version() == 4


def test_a_writer_that_slept_while_the_log_went_on(tmp_path: Path, clock: ManualClock) -> None:
    sleeper = make(tmp_path / "t", clock)
    sleeper.claim("sleeper")
    awake = DeltaMirrorTable.open(sleeper.uri, clock=clock, checkpoint_every=5)
    awake.claim("awake")
    mirror = NaiveMirror(awake)
    for _ in range(20):
        mirror.change(keys(range(5)))
    for version in range(20):  # what log cleaning leaves
        awake.store.delete([commit_path(version)])
    with pytest.raises(TableChanged, match="far beyond"):
        sleeper.commit(Commit("TAILRACE ROUND", positions={1: Position.at(1, 1)}))
    with pytest.raises(Fenced, match="awake"):
        sleeper.refresh()
    with pytest.raises(Fenced, match="awake"):
        sleeper.commit(Commit("TAILRACE ROUND"))
    mirror.change(keys(range(7)))
    check_rows(awake, mirror.rows)
    assert own_rows(DeltaMirrorTable.open(sleeper.uri)) == mirror.rows


def test_delta_rs_does_not_write_it(table: DeltaMirrorTable) -> None:
    rows = pa.table({"key": ["x"], "value": ["y"], "vbucket": [1], "seqno": [1]}).cast(SCHEMA)
    with pytest.raises(Exception, match=r"(?i)feature|domainMetadata"):
        write_deltalake(table.uri, rows, mode="append")


# Tables that are not ours.


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no table at .*; run 'tailrace mirror' first"):
        DeltaMirrorTable.open(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file/t"):
        with pytest.raises((UsageError, NotADirectoryError)):
            DeltaMirrorTable.open_or_create(path, schema=SCHEMA, source=SOURCE)
    rows = pa.table({"key": ["x"]})
    write_deltalake(tmp_path / "plain", rows)
    with pytest.raises(UsageError, match="not made by 'tailrace mirror'; choose another path"):
        DeltaMirrorTable.open(tmp_path / "plain")
    write_deltalake(tmp_path / "old", rows, name="tailrace mirror")
    with pytest.raises(UsageError, match=r"layout of an earlier Tailrace.*beside it") as error:
        DeltaMirrorTable.open_or_create(tmp_path / "old", schema=SCHEMA, source=SOURCE)
    assert "\n" not in str(error.value)


def test_a_table_inside_of_another(table: DeltaMirrorTable, clock: ManualClock, tmp_path: Path) -> None:
    """Cleaning the outer table up deletes unknown files."""
    for inner in ("changes", "a/b/c"):
        with pytest.raises(UsageError, match=r"lies inside the table at .*; choose another path"):
            make(f"{table.uri}/{inner}", clock)
        with pytest.raises(UsageError, match="lies inside the table"):
            export_table(table.uri, f"{table.uri}/{inner}", format="parquet")
    make(tmp_path / "beside", clock)
    assert export_table(table.uri, tmp_path / "export").rows == 0


def test_another_source_or_other_columns(table: DeltaMirrorTable) -> None:
    with pytest.raises(UsageError, match=r"mirrors default\._default\._default, not other\._default"):
        DeltaMirrorTable.open_or_create(table.uri, schema=SCHEMA, source={**SOURCE, "bucket": "other"})
    wider = SCHEMA.append(pa.field("op", pa.string()))
    with pytest.raises(UsageError, match="other columns"):
        DeltaMirrorTable.open_or_create(table.uri, schema=wider, source=SOURCE)


def test_columns_can_be_added(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    before = mirror.change(keys(range(10)))
    wider = SCHEMA.append(pa.field("name", pa.string())).append(pa.field("tags", pa.list_(pa.string())))
    table.commit(Commit("TAILRACE COLUMNS", schema=wider))
    assert DeltaMirrorTable.open(table.uri).schema.names == wider.names
    assert table.schema_of(before) == SCHEMA
    check_rows(table, mirror.rows)
    with pytest.raises(UsageError, match="only be added"):
        table.commit(Commit("TAILRACE COLUMNS", schema=SCHEMA))
    assert DeltaMirrorTable.open_or_create(table.uri, schema=SCHEMA, source=SOURCE).version == table.version


# Damage.


def test_a_damaged_log_names_the_file(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    mirror.change(keys(range(5)))
    path = Path(table.uri) / commit_path(2)
    whole = path.read_bytes()
    for damage in (whole[:-20], b"", b'{"add": 7}\n', b"\xff\xfe", b'{"add":{"path":"x"}}\n', b"[1]\n"):
        path.write_bytes(damage)
        with pytest.raises(TableDamaged, match=r"00000000000000000002\.json"):
            DeltaMirrorTable.open(table.uri)
    path.unlink()
    with pytest.raises(TableDamaged, match=r"00000000000000000002\.json.* is missing"):
        DeltaMirrorTable.open(table.uri)
    path.write_bytes(whole)
    table.checkpoint()
    checkpoint = Path(table.uri) / "_delta_log/00000000000000000003.checkpoint.parquet"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(TableDamaged, match=r"00000000000000000003\.checkpoint\.parquet is damaged"):
        DeltaMirrorTable.open(table.uri)


def test_a_hint_that_leads_nowhere(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    hint = Path(table.uri) / "_delta_log/_last_checkpoint"
    for text in ("", "{", "[]", '{"version":1}', '{"version":"x"}'):
        hint.write_text(text)
        assert own_rows(DeltaMirrorTable.open(table.uri)) == mirror.rows


def test_unknown_actions_and_fields(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    path = Path(table.uri) / commit_path(2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["clusteringProvider"] = "liquid"
    lines.append({"somethingNew": {"a": 1}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = DeltaMirrorTable.open(table.uri)
    assert own_rows(again) == mirror.rows
    again.claim()
    (file,) = again.files()
    again.commit(Commit("TAILRACE ROUND", masked={file.path: BitMap([1])}))
    newest = (Path(table.uri) / commit_path(again.version)).read_text()
    assert '"clusteringProvider":"liquid"' in newest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"readerFeatures": ["deletionVectors", "v2Checkpoint"]}, "needs v2Checkpoint"),
        ({"readerFeatures": ["deletionVectors", "columnMapping"]}, "needs columnMapping"),
        ({"minReaderVersion": 4}, "reader version 4"),
    ],
)
def test_unknown_features(table: DeltaMirrorTable, change: dict[str, object], says: str) -> None:
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "domainMetadata"],
    }
    table.store.put(commit_path(table.version + 1), json.dumps({"protocol": protocol | change}).encode())
    with pytest.raises(UnknownFeature, match=says) as error:
        DeltaMirrorTable.open(table.uri)
    assert "\n" not in str(error.value)
    with pytest.raises(UnknownFeature, match=says):
        table.refresh()


NAMES = ["with space", "größe-表", "a#b", "a?b=c", "100%41"]


@pytest.mark.parametrize("name", NAMES)
def test_any_local_name(
    tmp_path: Path, name: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = make(f"{name}/", clock)
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(2000)))
    mirror.change(keys(range(0, 2000, 2)))
    assert own_rows(DeltaMirrorTable.open((tmp_path / name).as_uri())) == mirror.rows
    assert own_rows(DeltaMirrorTable.open(name)) == mirror.rows


def test_the_log_of_a_round_is_short(tmp_path: Path) -> None:
    store = TableStore(tmp_path / "t")
    table = DeltaMirrorTable.open_or_create(store.uri, schema=SCHEMA, source=SOURCE)
    table.claim()
    positions = {vb: Position.at(vb * 7919 + (1 << 47), 100_000_000 + vb) for vb in range(1024)}
    table.commit(Commit("TAILRACE ROUND", positions=positions))
    later = {vb: Position.at(position.vb_uuid, position.seqno + 3) for vb, position in positions.items()}
    table.commit(Commit("TAILRACE ROUND", positions=later))
    assert dict(DeltaMirrorTable.open(store.uri).current.positions) == later
    size = len(store.read(commit_path(table.version)))
    assert 5000 < size < 6500
    assert b"tailrace.branches" not in store.read(commit_path(table.version))


def test_history_says_what_was_done(table: DeltaMirrorTable) -> None:
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    mirror.change(keys(range(3)))
    newest = DeltaTable(table.uri).history(1)[0]
    assert newest["operation"] == "TAILRACE ROUND"
    assert newest["operationMetrics"]["changes"] == "3"
    assert newest["operationMetrics"]["numDeletedRows"] == "3"
    assert polars_rows(table.uri) == mirror.rows
