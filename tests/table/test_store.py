"""Where a table's files are: the same calls on a disk and on an object store."""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.errors import NotDurable, UsageError
from tailrace.files import DiskFiles
from tailrace.table.contract import StorageError
from tailrace.table.store import TableStore
from tailrace.testing.faulty_files import Fault, FaultyFiles, at_call, io_error, no_space


@pytest.fixture(params=["disk", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    if request.param == "disk":
        return TableStore(tmp_path / "table")
    return TableStore(f"memory://{uuid.uuid4().hex}")


def test_whole_files(store: TableStore) -> None:
    store.put("_log/a.json", b"one")
    assert store.read("_log/a.json") == b"one"
    store.put("_log/a.json", b"two, longer")
    assert store.read("_log/a.json") == b"two, longer"
    assert store.read("_log/a.json", 5) == b"longer"
    assert store.read("_log/a.json", 5, 2) == b"lo"
    assert store.read("_log/a.json", 5, 0) == b""
    with pytest.raises(FileNotFoundError):
        store.read("_log/b.json")
    with pytest.raises(FileNotFoundError):
        store.open("b.parquet")
    stored = store.head("_log/a.json")
    assert stored is not None and stored.size == 11 and stored.modified_ms > 1_700_000_000_000
    assert store.head("_log/b.json") is None


def test_a_taken_name_stays_what_it_was(store: TableStore) -> None:
    assert store.put_if_absent("x/1", b"first")
    assert not store.put_if_absent("x/1", b"second")
    assert store.read("x/1") == b"first"
    assert [file.path for file in store.list()] == ["x/1"]


def test_of_eight_writers_one_wins(store: TableStore) -> None:
    start = threading.Barrier(8)
    won: list[int] = []

    def write(number: int) -> None:
        start.wait()
        if store.put_if_absent("log/7.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("log/7.json") == b"%d" % won[0]
    assert [file.path for file in store.list()] == ["log/7.json"]


def test_listing(store: TableStore) -> None:
    for path in ("b", "a/2", "a/1", "a/b/c", "a.x", "a-x", "_d/1"):
        store.put(path, path.encode())
    everything = [file.path for file in store.list()]
    assert everything == sorted(["b", "a/2", "a/1", "a/b/c", "a.x", "a-x", "_d/1"])
    assert [file.path for file in store.list("a")] == ["a/1", "a/2", "a/b/c"]
    assert [file.path for file in store.list("a/")] == ["a/1", "a/2", "a/b/c"]
    for after in everything:
        assert [file.path for file in store.list(start_after=after)] == [p for p in everything if p > after]
    assert [file.path for file in store.list("a", "a/1")] == ["a/2", "a/b/c"]
    assert list(store.list("nothing")) == []
    assert [file.size for file in store.list("a")] == [3, 3, 5]


def test_deleting(store: TableStore) -> None:
    for path in ("a", "b", "c/d"):
        store.put(path, b"x")
    store.delete(["a", "c/d", "never/was"])
    store.delete([])
    assert [file.path for file in store.list()] == ["b"]


def test_a_file_that_is_written_piece_by_piece(store: TableStore) -> None:
    rows = pa.table({"key": [f"k{number}" for number in range(100_000)], "n": range(100_000)})
    with store.create("tier0-1.parquet") as file, pq.ParquetWriter(file, rows.schema) as writer:
        for batch in rows.to_batches(max_chunksize=10_000):
            writer.write_batch(batch)
    with store.open("tier0-1.parquet") as file:
        parquet = pq.ParquetFile(file)
        assert parquet.num_row_groups == 10
        assert parquet.read_row_group(7, columns=["n"])["n"][0].as_py() == 70_000
        assert parquet.read() == rows


def test_nothing_is_left_of_a_file_that_failed(store: TableStore) -> None:
    with pytest.raises(ZeroDivisionError), store.create("a.parquet") as file:
        file.write(b"some")
        raise ZeroDivisionError
    assert list(store.list()) == []


def test_a_store_can_be_pickled(tmp_path: Path) -> None:
    store = TableStore(tmp_path / "t", {"aws_secret_access_key": "hush"})
    store.put("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert again.read("a") == b"1"
    assert again.storage_options == {"aws_secret_access_key": "hush"}
    assert "hush" not in repr(store)


NAMES = [
    "plain",
    "with space",
    "größe-表",
    "a#b",
    "a?b=c",
    "100%41",
    "a%2Fb",
    "'quoted\"",
    "a+b&c",
    ".hidden",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_local_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / name
    TableStore(place).put("f", b"here")
    assert (place / "f").read_bytes() == b"here"
    assert TableStore(f"{place}/").read("f") == b"here"
    assert TableStore(place.as_uri()).read("f") == b"here"
    monkeypatch.chdir(tmp_path)
    relative = TableStore(name)
    monkeypatch.chdir("/")
    assert relative.read("f") == b"here"
    assert relative.local_path("f") == place / "f"
    link = tmp_path / "link to it"
    link.symlink_to(place)
    assert TableStore(link).read("f") == b"here"
    assert [file.path for file in TableStore(link).list()] == ["f"]


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "empty name"),
        ("hdfs://x/y", "unknown scheme"),
        ("s3://", "names no bucket"),
        ("s3://AKIA:hush@bucket/x", "storage option"),
        ("file://host/x", "another machine"),
    ],
)
def test_places_that_are_none(uri: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        TableStore(uri)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize("name", ["retry_timeout", "max_retries", "AWS_MAX_RETRIES"])
@pytest.mark.parametrize("value", ["hush", "1_0", "-1", "", "9" * 20])
def test_values_of_options_that_are_none(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^the storage option {name} must be a ") as error:
        TableStore("s3://bucket/table", {name: value}).read("a")
    assert "hush" not in str(error.value)


def test_errors_are_one_line_without_secrets() -> None:
    options = {
        "aws_endpoint_url": "http://127.0.0.1:9",
        "AWS_ALLOW_HTTP": "true",
        "aws_access_key_id": "AKIAHUSH",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "aws_region": "us-east-1",
        "max_retries": "0",
    }
    store = TableStore("s3://bucket/table", options)
    for call in (
        lambda: store.read("a"),
        lambda: store.put("a", b"hush-hush"),
        lambda: list(store.list()),
        lambda: store.put_if_absent("a", b""),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StorageError, match=r"^can't \w+ s3://bucket/table") as error:
            call()
        assert "\n" not in str(error.value)
        assert "hush" not in str(error.value).lower()
        assert error.value.__cause__ is None
    with pytest.raises(StorageError, match="bogus") as error:
        TableStore("s3://bucket/table", {**options, "bogus": "hush-hush"}).read("a")
    assert "hush" not in str(error.value)
    assert "hush" not in repr(store)


# Faults of the disk, at the one place that writes.


def faulty(tmp_path: Path, call: int, fault: Fault) -> tuple[TableStore, FaultyFiles]:
    files = FaultyFiles(DiskFiles(tmp_path), at_call(call, lambda _: fault), syncs=False)
    return TableStore(tmp_path, files=files), files


@pytest.mark.parametrize("fault", [no_space, io_error])
@pytest.mark.parametrize("how", ["put", "put_if_absent", "create"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, how: str, fault: Callable[[], OSError]) -> None:
    for call in range(1, 20):
        root = tmp_path / f"{call}"
        root.mkdir()
        store, files = faulty(root, call, Fault(fault()))
        try:
            if how == "create":
                with store.create("_dv/file") as file:
                    file.write(b"whole")
            else:
                getattr(store, how)("_dv/file", b"whole")
        except NotDurable:
            assert (root / "_dv/file").read_bytes() == b"whole"
        except OSError:
            if files.trace[-1][0] != "sync_directory":
                assert not (root / "_dv/file").exists()
        else:
            assert (root / "_dv/file").read_bytes() == b"whole"
            if call > files.calls:
                return
        left = {path.name for path in root.rglob("*") if path.is_file()} - {"file"}
        # what is left if even the clean-up fails is not taken for a file of a table
        assert all(name.endswith(".new") for name in left)
    raise AssertionError("the write never came through")


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    store = TableStore(tmp_path)
    assert store.put_if_absent("a/1", b"first")
    assert not store.put_if_absent("a/1", b"second")
    assert store.read("a/1") == b"first"
    assert os.listdir(tmp_path / "a") == ["1"]


def test_others_may_read_a_table_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        TableStore(tmp_path / "t").put("_dv/x", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "t/_dv").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "t/_dv/x").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("gs://bucket/people", {"google_skip_signature": "true"}),
        (
            "az://container/people",
            {"azure_storage_account_name": "n", "azure_storage_account_key": "aHVzaA=="},
        ),
        ("abfss://container@n.dfs.core.windows.net/people", {"azure_storage_account_key": "aHVzaA=="}),
    ],
)
def test_other_stores_are_opened_with_their_options(uri: str, options: dict[str, str]) -> None:
    """Nothing is requested of them: there is no such server here."""
    store = TableStore(uri, options)
    assert store.home.local_path("x") is None
    assert not store.is_local and store.uri == uri
    assert "aHVzaA" not in repr(store) + repr(store.home)
