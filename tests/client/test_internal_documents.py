"""What a server keeps in a bucket for itself comes only if it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace import Deletion, Mutation
from tailrace.client.events import SystemEvent
from tailrace.client.internal_documents import is_system_scope
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import UsageError
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table

MOBILE = "_system._mobile"
RECORDS = {"_txn:client-record", "_txn:atr-1-#a", "_txn:"}
LOOK_ALIKES = {"_txn", "_", "_txm:x", "a_txn:", "_transaction"}


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    """Documents of all kinds; the last change of every vbucket is one that is left out."""
    with tailrace.testing.node(vbuckets=4) as running, KvClient(parse(running.url)) as client:
        client.set_manifest(with_changes(client.manifest(), [MOBILE, "shop.orders"], []))
        for key in sorted(LOOK_ALIKES):
            running.set(key, {"n": 1})
            client.set(key, {"n": 2}, collection="shop.orders")
        client.set("_txn:atr-2-#b", {"n": 3}, collection="shop.orders")
        client.set("state", {"n": 4}, collection=MOBILE)
        for vbucket in range(4):
            for record in sorted(RECORDS):
                running.set(record, {"vbucket": vbucket}, vbucket=vbucket)
        running.delete("_txn:client-record", vbucket=0)
        yield running
    close_idle_sources()


def keys(events: list[Any]) -> set[str]:
    return {event.key.decode() for event in events if isinstance(event, Mutation | Deletion)}


def test_neither_unless_asked_for(node: Any, connect: Any) -> None:
    source = connect(node.url)
    events = list(source.changes(end="now"))
    assert keys(events) == LOOK_ALIKES
    assert {event.name for event in events if isinstance(event, SystemEvent)} == {"shop", "orders"}
    highs = {vbucket: node.high_seqno(vbucket) for vbucket in range(4)}
    assert {vbucket: position.seqno for vbucket, position in source.positions().items()} == highs
    assert all(position.at_snapshot_end for position in source.positions().values())
    assert list(source.changes(source.positions(), end="now")), "nothing is left but the ends"

    rows = [batch for batch in connect(node.url).batches(end="now") if batch["op"][0].as_py() == "mutation"]
    assert {key.decode() for batch in rows for key in batch["key"].to_pylist()} == LOOK_ALIKES


def test_each_by_its_own_option(node: Any, connect: Any) -> None:
    with_records = list(connect(node.url, include_transactions=True).changes(end="now"))
    assert keys(with_records) == LOOK_ALIKES | RECORDS | {"_txn:atr-2-#b"}
    with_system = list(connect(node.url, include_system=True).changes(end="now"))
    assert keys(with_system) == LOOK_ALIKES | {"state"}
    assert "_mobile" in {event.name for event in with_system if isinstance(event, SystemEvent)}


@pytest.mark.parametrize("named", [{"scope": "_system"}, {"collections": [MOBILE]}])
def test_a_system_collection_that_is_named_is_asked_for(node: Any, connect: Any, named: Any) -> None:
    assert keys(list(connect(node.url, **named).changes(end="now"))) == {"state"}


@pytest.mark.parametrize("dialect", ["upr-a", "upr-b", "tap"])
def test_the_older_dialects_leave_records_out_too(node: Any, connect: Any, dialect: str) -> None:
    assert keys(list(connect(node.url, dialect=dialect).changes(end="now"))) == LOOK_ALIKES
    events = list(connect(node.url, dialect=dialect, include_transactions=True).changes(end="now"))
    assert keys(events) == LOOK_ALIKES | RECORDS


def mirrored(node: Any, tables: Any, **options: str) -> None:
    mirror = build_mirror(
        LocalJobs(), node.url, tables, once=True, in_background=False, options=options or None
    )
    mirror.prepare()
    mirror.run()


def held(node: Any, path: Path) -> set[str]:
    """The keys of a table; compared without any option, it is equal to the bucket."""
    table = open_table(path)
    verdict = verify_table(LocalJobs(), source_options(node.url), table)
    assert verdict.equal, verdict.differences
    return set(tailrace.read_table(path, columns=["key"]).to_arrow()["key"].to_pylist())


def test_a_table_and_who_compares_it_agree(node: Any, tmp_path: Path) -> None:
    mirrored(node, tmp_path / "plain")
    assert held(node, tmp_path / "plain") == LOOK_ALIKES
    mirrored(node, tmp_path / "records", includeTransactions="true")
    assert held(node, tmp_path / "records") == LOOK_ALIKES | RECORDS
    mirrored(node, tmp_path / "records")  # it goes on as the table is
    assert held(node, tmp_path / "records") == LOOK_ALIKES | RECORDS
    mirrored(node, {MOBILE: tmp_path / "mobile"})
    assert held(node, tmp_path / "mobile") == {"state"}
    with pytest.raises(UsageError, match="was made without transaction records"):
        mirrored(node, tmp_path / "plain", includeTransactions="true")


def test_which_scopes_are_the_servers() -> None:
    names = ["_system", "%x", "_default", "shop", ""]
    assert [is_system_scope(name) for name in names] == [True, True, False, False, False]
