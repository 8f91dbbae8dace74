"""Several tables of one mirror, on the engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tailrace.testing
from chaos.chaos_jobs import Killed
from spark.local_jobs import LocalJobs
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.spark.rounds import committing
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table

ORDERS = "shop.orders"
COLLECTIONS = ("_default._default", ORDERS)


class Mirrors:
    """Two collections in two tables, and lives of their mirror."""

    def __init__(self, node: Any, client: KvClient, directory: Path) -> None:
        self.node = node
        self._client = client
        self.tables = {path: str(directory / path) for path in COLLECTIONS}

    def live(self, *, killed_at: str = "", count: int = 1) -> None:
        left = count

        def at(place: str) -> None:
            nonlocal left
            if place == killed_at:
                left -= 1
                if not left:
                    raise Killed

        made = build_mirror(LocalJobs(), self.node.url, self.tables, once=True, in_background=False)
        try:
            with mock.patch.object(committing, "crash_point", at):
                made.prepare()
                made.run()
        except Killed:
            assert killed_at
        else:
            assert not killed_at, "it did not come to that place"

    def write(self, what: str) -> None:
        """Write every document of both collections."""
        for number in range(40):
            self._client.set(f"k{number}", {what: number})
            self._client.set(f"k{number}", {what: -number}, collection=ORDERS)

    def seqnos(self) -> list[dict[int, int]]:
        held = [open_table(uri).current.positions for uri in self.tables.values()]
        return [{vbucket: position.seqno for vbucket, position in positions.items()} for positions in held]

    def assert_equal(self) -> None:
        for uri in self.tables.values():
            verdict = verify_table(LocalJobs(), source_options(self.node.url), open_table(uri))
            assert verdict.equal, verdict.differences
            assert verdict.documents == verdict.rows > 0
            assert verdict.behind == 0


@pytest.fixture
def mirrors(tmp_path: Path) -> Iterator[Mirrors]:
    with tailrace.testing.node(vbuckets=4) as node, KvClient(parse(node.url)) as client:
        client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
        made = Mirrors(node, client, tmp_path)
        made.write("first")
        made.live()
        yield made
    close_idle_sources()


@pytest.mark.parametrize("takes_back", [False, True])
def test_a_kill_between_the_commits_of_two_tables(mirrors: Mirrors, takes_back: bool) -> None:
    node = mirrors.node
    marks = {vbucket: node.high_seqno(vbucket) for vbucket in range(4)}
    mirrors.write("second")
    mirrors.live(killed_at="mirror.after-commit")
    first, second = mirrors.seqnos()
    assert first != second, "the tables are not apart"
    if takes_back:
        for vbucket, seqno in marks.items():
            node.rewind(vbucket, seqno + 1)
        node.set("k1", {"third": 1})
    mirrors.live()
    first, second = mirrors.seqnos()
    assert first == second
    mirrors.assert_equal()
