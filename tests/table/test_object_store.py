"""Tables on object stores that are served on loopback: races, lost answers, refusals.

S3 and Google's store in every run, Azure's by its emulator in `make interop`.
"""

from __future__ import annotations

import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from table.independent import SCHEMA, SOURCE, NaiveMirror, check_rows, own_rows
from table.s3 import (
    BUCKET,
    Cloud,
    Fault,
    Proxy,
    azure_cloud,
    google_cloud,
    moto_server,
    once,
    options_for,
    s3_cloud,
)
from tailrace.clock import ManualClock
from tailrace.errors import UsageError
from tailrace.model import Position
from tailrace.rng import unique_name
from tailrace.table.contract import Commit, Fenced, StorageError, TableChanged
from tailrace.table.delta.log import commit_path
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.opening import query_table
from tailrace.table.store import TableStore

pytestmark = pytest.mark.xdist_group("moto")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with moto_server() as port:
        yield port


@pytest.fixture
def proxy(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    yield proxy
    proxy.close()


AZURE = pytest.param("az", marks=[pytest.mark.interop, pytest.mark.timeout(1800)])
"""Its emulator comes from npm, which may take a while."""


@pytest.fixture(scope="module", params=["s3", "gs", AZURE])
def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    if request.param == "az":
        with azure_cloud(tmp_path_factory.mktemp("azurite")) as cloud:
            yield cloud
        return
    with {"s3": s3_cloud, "gs": google_cloud}[request.param](request.getfixturevalue("port")) as cloud:
        yield cloud


@pytest.fixture
def cloud_proxy(cloud: Cloud) -> Iterator[Proxy]:
    with cloud.proxy() as proxy:
        yield proxy


def place() -> str:
    return f"s3://{BUCKET}/{unique_name()}/table"


def make(uri: str, options: dict[str, str]) -> DeltaMirrorTable:
    return DeltaMirrorTable.open_or_create(uri, schema=SCHEMA, source=SOURCE, storage_options=options)


def keys(numbers: range) -> list[str]:
    return [f"key::{number}" for number in numbers]


def test_rounds_checkpoint_and_cleaning(cloud: Cloud) -> None:
    options = cloud.options
    uri = cloud.place()
    table = DeltaMirrorTable.open_or_create(
        uri, schema=SCHEMA, source=SOURCE, storage_options=options, checkpoint_every=4
    )
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(2000)))
    mirror.change(keys(range(0, 2000, 2)))
    mirror.change(keys(range(0, 2000, 3)), deleted=keys(range(1, 50, 2)))
    cloud.check_rows(table, mirror.rows)
    again = DeltaMirrorTable.open(uri, storage_options=options)
    assert again.files() == table.files()
    assert own_rows(again) == mirror.rows
    for version, rows in mirror.states.items():
        assert own_rows(again, version) == rows
    assert len(list(again.lineage(0))) == 3
    assert table.maintain(force=True).versions_kept == 5


NAMES = {"größe 1-表": False, "a%41b": False, "a%23b%3Fc%25": False, "100%": False, "slash/": True}
NAMES["a+b&c='d'@e:f(g)!$,;_.-"] = True
"""Names, and whether the engine of `tailrace query` finds the files below them."""


@pytest.mark.parametrize("name", NAMES)
def test_any_name(port: int, name: str) -> None:
    """A URI means the same to all of us, and a query says in one line that its engine can't."""
    around, options = f"s3://{BUCKET}/{unique_name()}", options_for(port)
    table = make(f"{around}/{name}", options)
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(2000)))
    mirror.change(keys(range(0, 2000, 2)))
    meant = urllib.parse.unquote(name.rstrip("/"))
    assert {file.path.partition("/")[0] for file in TableStore(around, options).list()} == {meant}
    for written in (name, urllib.parse.quote(meant), urllib.parse.quote(meant) + "/"):
        opened = DeltaMirrorTable.open(f"{around}/{written}", storage_options=options)
        assert own_rows(opened) == mirror.rows
    if NAMES[name]:
        check_rows(table, mirror.rows, options)
        (count,) = query_table(table, options, "select count(*) n from t", names=["t"], batch_rows=100)
        assert count["n"][0].as_py() == 2000
    else:
        with pytest.raises(UsageError, match=r"^the engine finds no file below a name with .*another name$"):
            query_table(table, options, "select 1", names=["t"], batch_rows=100)


def test_a_store_keeps_its_promises(cloud: Cloud) -> None:
    store = TableStore(cloud.place(), cloud.options)
    assert store.put_if_absent("log/1", b"a")
    assert not store.put_if_absent("log/1", b"b")
    assert store.read("log/1") == b"a"
    with store.create("large") as file:
        for number in range(40):
            file.write(bytes([number]) * (1 << 19))
    assert (large := store.head("large")) is not None and large.size == 20 << 20
    assert store.read("large", (1 << 19) * 7, 3) == b"\x07\x07\x07"
    with pytest.raises(ZeroDivisionError), store.create("torn") as file:
        file.write(bytes(10 << 20))
        raise ZeroDivisionError
    assert [file.path for file in store.list()] == ["large", "log/1"]
    assert [file.path for file in store.list("log", "log/1")] == []
    store.delete(["large", "log/1", "never"])
    assert list(store.list()) == []


def test_two_mirrors_race(cloud: Cloud) -> None:
    options, uri = cloud.options, cloud.place()
    start = threading.Barrier(2)
    tables: dict[str, DeltaMirrorTable] = {}
    ends: dict[str, BaseException | None] = {}

    def run(name: str) -> None:
        start.wait()
        table = tables[name] = make(uri, options)
        try:
            table.claim(name)
            for number in range(5):
                table.commit(Commit("TAILRACE ROUND", positions={1: Position.at(7, number + 1)}))
            ends[name] = None
        except (Fenced, TableChanged) as error:
            ends[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [name for name, end in ends.items() if end is None]
    final = DeltaMirrorTable.open(uri, storage_options=options)
    runs = [version.run for version in final.versions()]
    assert runs[-1] == "create"
    # once the other has claimed it, the first does not come back: the runs are two blocks
    blocks = [run for number, run in enumerate(runs) if number == 0 or runs[number - 1] != run]
    assert len(blocks) == len(set(blocks))
    assert winners and winners[-1] in runs
    loser = next((name for name, end in ends.items() if end is not None), None)
    if loser is not None:
        with pytest.raises(Fenced):
            tables[loser].refresh()


@pytest.mark.parametrize("fault", ["lost", "dropped", "refused", "slow"])
def test_a_commit_whose_answer_goes_wrong(cloud: Cloud, cloud_proxy: Proxy, fault: Fault) -> None:
    uri = cloud.place()
    table = make(uri, cloud.options_for(cloud_proxy.port))
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    cloud_proxy.plan = once(fault, "PUT", f"{table.version + 1:020d}.json")
    before = table.version
    assert mirror.change(keys(range(5))) == before + 1
    assert cloud_proxy.struck
    cloud.check_rows(table, mirror.rows)
    mirror.change(keys(range(5)))
    cloud.check_rows(DeltaMirrorTable.open(uri, storage_options=cloud.options), mirror.rows)


def test_a_commit_that_is_lost_for_good(cloud: Cloud, cloud_proxy: Proxy) -> None:
    """The store can't be reached any more; whether the commit was made is known only when it can."""
    uri = cloud.place()
    table = make(uri, cloud.options_for(cloud_proxy.port, max_retries="1", retry_timeout="5"))
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    down = threading.Event()

    def plan(method: str, path: str) -> Fault | None:
        if f"{table.version + 1:020d}.json" in path and method == "PUT" and not down.is_set():
            down.set()
            return "lost"
        return "dropped" if down.is_set() else None

    cloud_proxy.plan = plan
    with pytest.raises(StorageError, match=r"^can't \w+ (s3|gs|az)://") as error:
        mirror.change(keys(range(5)))
    assert "hush" not in str(error.value) and "\n" not in str(error.value)
    cloud_proxy.plan = lambda method, path: None
    # it was made: the round counts as done, and is not done a second time
    with pytest.raises(TableChanged):
        table.commit(Commit("TAILRACE ROUND"))
    assert own_rows(table) == mirror.rows
    assert (
        table.current.positions == DeltaMirrorTable.open(uri, storage_options=cloud.options).current.positions
    )
    table.commit(Commit("TAILRACE ROUND"))


def test_reads_that_are_slow_or_refused(port: int, proxy: Proxy) -> None:
    uri = place()
    mirror = NaiveMirror(table := make(uri, options_for(port)))
    table.claim()
    mirror.change(keys(range(2000)))
    mirror.change(keys(range(0, 2000, 2)))
    count = 0

    def plan(method: str, path: str) -> Fault | None:
        nonlocal count
        count += 1
        faults: dict[int, Fault] = {0: "slow", 2: "refused", 4: "dropped"}
        return faults.get(count % 6) if method in ("GET", "HEAD") else None

    proxy.plan = plan
    assert own_rows(DeltaMirrorTable.open(uri, storage_options=options_for(proxy.port))) == mirror.rows
    assert {fault for fault, _, _ in proxy.struck} == {"slow", "refused", "dropped"}


def test_the_usual_environment(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in options_for(port).items():
        monkeypatch.setenv(name.upper(), value)
    table = make(place(), {})
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    assert own_rows(DeltaMirrorTable.open(table.uri)) == mirror.rows


def test_a_key_that_is_wrong_is_told_in_one_line(port: int, proxy: Proxy) -> None:
    proxy.plan = lambda method, path: "refused"
    options = options_for(proxy.port, max_retries="0")
    with pytest.raises(StorageError) as error:
        make(place(), options)
    assert "hush" not in str(error.value) and "\n" not in str(error.value)


def test_a_lost_checkpoint_does_not_fail_the_commit(port: int, proxy: Proxy) -> None:
    uri = place()
    table = DeltaMirrorTable.open_or_create(
        uri,
        schema=SCHEMA,
        source=SOURCE,
        storage_options=options_for(proxy.port, max_retries="0"),
        checkpoint_every=3,
        clock=ManualClock(),
    )
    table.claim()
    mirror = NaiveMirror(table)
    proxy.plan = lambda method, path: "refused" if "checkpoint" in path and method == "PUT" else None
    for _ in range(6):
        mirror.change(keys(range(5)))
    assert proxy.struck
    proxy.plan = lambda method, path: None
    for _ in range(3):
        mirror.change(keys(range(5)))
    assert TableStore(uri, options_for(port)).head("_delta_log/_last_checkpoint") is not None
    assert TableStore(uri, options_for(port)).head(commit_path(table.version)) is not None
    check_rows(table, mirror.rows, options_for(port))
