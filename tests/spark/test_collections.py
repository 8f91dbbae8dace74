"""Several collections into several tables from one stream, against a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import tailrace.spark as ts
import tailrace.testing
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ORDERS, USERS = "shop.orders", "shop.users"


@pytest.fixture
def node() -> Any:
    with tailrace.testing.node(vbuckets=4) as running:
        yield running


@pytest.fixture
def client(node: Any) -> Iterator[KvClient]:
    with KvClient(parse(node.url)) as found:
        found.set_manifest(with_changes(found.manifest(), [ORDERS, USERS], []))
        yield found


def keys(path: str) -> set[str]:
    return set(DeltaTable(path).to_pyarrow_table(columns=["key"])["key"].to_pylist())


def test_each_collection_has_its_table(spark: Any, node: Any, client: KvClient, tmp_path: Path) -> None:
    tables = {ORDERS: str(tmp_path / "orders"), USERS: str(tmp_path / "users")}

    def once() -> None:
        ts.mirror(spark, node.url, tables, once=True).awaitTermination()

    for number in range(20):
        client.set(f"o{number}", {"n": number}, collection=ORDERS)
        client.set(f"u{number}", {"n": number}, collection=USERS)
        client.set(f"d{number}", {"n": number})  # the default collection goes nowhere
    once()
    assert keys(tables[ORDERS]) == {f"o{number}" for number in range(20)}
    assert keys(tables[USERS]) == {f"u{number}" for number in range(20)}
    for path in tables.values():
        assert ts.verify(spark, node.url, path).equal

    client.set_manifest(with_changes(client.manifest(), [], [ORDERS]))
    client.delete("u3", collection=USERS)
    once()
    assert keys(tables[ORDERS]) == set(), "a collection that was dropped empties its table"
    assert keys(tables[USERS]) == {f"u{number}" for number in range(20) if number != 3}

    client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
    client.set("again", {"n": 1}, collection=ORDERS)
    once()
    assert keys(tables[ORDERS]) == {"again"}, "one that was made again fills it again"

    client.flush()
    once()
    assert keys(tables[ORDERS]) == keys(tables[USERS]) == set()
