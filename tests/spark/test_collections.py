"""Several collections into several tables from one stream, against a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.naive import table_state
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import UsageError
from tailrace.spark.rounds import idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table

ORDERS, USERS = "shop.orders", "shop.users"


@pytest.fixture
def node() -> Any:
    with tailrace.testing.node(vbuckets=4) as running:
        yield running


@pytest.fixture
def client(node: Any) -> Iterator[KvClient]:
    with KvClient(parse(node.url)) as connected:
        connected.set_manifest(with_changes(connected.manifest(), [ORDERS, USERS], []))
        yield connected


def keys(path: str) -> set[str]:
    return {key.decode() for _, key in table_state(path)}


def once(node: Any, tables: dict[str, str]) -> Mirror:
    mirror = build_mirror(LocalJobs(), node.url, tables, once=True, in_background=False)
    mirror.prepare()
    mirror.run()
    return mirror


def test_each_collection_has_its_table(node: Any, client: KvClient, tmp_path: Path) -> None:
    tables = {ORDERS: str(tmp_path / "orders"), USERS: str(tmp_path / "users")}
    for number in range(20):
        client.set(f"o{number}", {"n": number}, collection=ORDERS)
        client.set(f"u{number}", {"n": number}, collection=USERS)
        client.set(f"d{number}", {"n": number})  # the default collection goes nowhere
    once(node, tables)
    assert keys(tables[ORDERS]) == {f"o{number}" for number in range(20)}
    assert keys(tables[USERS]) == {f"u{number}" for number in range(20)}
    for path in tables.values():
        assert verify_table(LocalJobs(), source_options(node.url), open_table(path)).equal

    client.set_manifest(with_changes(client.manifest(), [], [ORDERS]))
    client.delete("u3", collection=USERS)
    once(node, tables)
    assert keys(tables[ORDERS]) == set(), "a collection that was dropped empties its table"
    assert keys(tables[USERS]) == {f"u{number}" for number in range(20) if number != 3}

    client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
    client.set("again", {"n": 1}, collection=ORDERS)
    once(node, tables)
    assert keys(tables[ORDERS]) == {"again"}, "one that was made again fills it again"

    client.flush()
    once(node, tables)
    assert keys(tables[ORDERS]) == keys(tables[USERS]) == set()


def test_a_collection_that_never_was_is_an_error(node: Any, client: KvClient, tmp_path: Path) -> None:
    """An empty table would look like a mirror of a collection without documents."""
    tables = {ORDERS: str(tmp_path / "orders"), "shop.odrers": str(tmp_path / "odrers")}
    with pytest.raises(UsageError, match=r"no collection 'shop\.odrers'.*shop\.orders"):
        build_mirror(LocalJobs(), node.url, tables)
    assert not list(tmp_path.iterdir()), "nothing was made, also not for those that are there"


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (["t", "./t", None], "two tables can't be at .*/t; choose another path"),
        (["t", "u", "u/"], "two tables can't be at .*/u; choose another path"),
        (["t", "t/u", None], "/t/u lies inside the table at .*/t, "),
        (["t", "u", "t/a/log"], "/t/a/log lies inside the table at .*/t, "),
    ],
)
def test_tables_in_one_place_are_refused_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    orders, users, changes = places
    with pytest.raises(UsageError, match=says):  # and before anybody is asked: nobody listens there
        build_mirror(LocalJobs(), "couchbase://127.0.0.1:1", {ORDERS: orders, USERS: users}, changes=changes)
    assert not list(tmp_path.iterdir())


def test_a_collection_that_was_dropped_is_said(node: Any, client: KvClient, tmp_path: Path) -> None:
    """Its table exists, so the command is not wrong: the table becomes as empty as the collection."""
    tables = {ORDERS: str(tmp_path / "orders")}
    client.set("o1", {"n": 1}, collection=ORDERS)
    once(node, tables)
    client.set_manifest(with_changes(client.manifest(), [], [ORDERS]))
    assert once(node, tables).asked.missing == (ORDERS,)
    assert keys(tables[ORDERS]) == set()


def test_a_worker_that_did_not_see_a_collection_begin(
    node: Any, client: KvClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is older than the collection, and the creation event went to another worker."""
    idle: list[Any] = []
    monkeypatch.setattr(idle_sources, "_idle", idle)
    tables = {ORDERS: str(tmp_path / "orders")}
    client.set("before", {"n": 0}, collection=ORDERS)
    once(node, tables)
    of_one_worker, idle[:] = list(idle), []
    assert of_one_worker
    client.set_manifest(with_changes(client.manifest(), [], [ORDERS]))
    client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
    once(node, tables)
    idle_sources.close_idle_sources()
    idle[:] = of_one_worker
    for number in range(20):
        client.set(f"o{number}", {"n": number}, collection=ORDERS)
    once(node, tables)
    assert keys(tables[ORDERS]) == {f"o{number}" for number in range(20)}
    assert verify_table(LocalJobs(), source_options(node.url), open_table(tables[ORDERS])).equal
    idle_sources.close_idle_sources()
