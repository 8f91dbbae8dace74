"""Several tables of one mirror, and files that go away under it, on the engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tailrace.spark as ts
import tailrace.testing
from chaos.inprocess import Killed, Spark
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import TailraceError
from tailrace.spark import mirroring
from tailrace.spark.table import MirrorTable

ORDERS = "shop.orders"
COLLECTIONS = ("_default._default", ORDERS)


class Mirrors:
    """Two collections in two tables, and lives of their mirror."""

    def __init__(self, node: Any, client: KvClient, directory: Path) -> None:
        self.node = node
        self._client = client
        self.directory = directory
        self.tables = {path: str(directory / path) for path in COLLECTIONS}

    def live(self, *, killed_at: str = "", count: int = 1) -> Spark:
        spark, left = Spark(), count

        def at(place: str) -> None:
            nonlocal left
            if place == killed_at:
                left -= 1
                if not left:
                    raise Killed

        try:
            with (
                mock.patch.object(mirroring, "crash_point", at),
                mock.patch.object(mirroring, "_observed", lambda frame: frame),
            ):
                query = ts.mirror(
                    spark,  # type: ignore[arg-type]
                    self.node.url,
                    self.tables,
                    once=True,
                    work_dir=self.directory / "work",
                )
                query.awaitTermination()
        except Killed:
            assert killed_at
        else:
            assert not killed_at, "it did not come to that place"
        finally:
            for started in spark.started:
                started.stop()
        return spark

    def write(self, what: str) -> None:
        """Every document of both collections."""
        for number in range(40):
            self._client.set(f"k{number}", {what: number})
            self._client.set(f"k{number}", {what: -number}, collection=ORDERS)

    def seqnos(self) -> list[dict[int, int]]:
        held = [MirrorTable.open(uri).current.positions for uri in self.tables.values()]
        return [{vbucket: position.seqno for vbucket, position in one.items()} for one in held]

    def assert_equal(self) -> None:
        for uri in self.tables.values():
            verdict = ts.verify(Spark(), self.node.url, uri)  # type: ignore[arg-type]
            assert verdict.equal, verdict.differences
            assert verdict.documents == verdict.rows > 0
            assert verdict.behind == 0


@pytest.fixture
def mirrors(tmp_path: Path) -> Any:
    with tailrace.testing.node(vbuckets=4) as node, KvClient(parse(node.url)) as client:
        client.set_manifest(with_changes(client.manifest(), [ORDERS], []))
        made = Mirrors(node, client, tmp_path)
        made.write("first")
        made.live()
        yield made


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


def test_spool_files_that_somebody_deletes_stop_the_query_and_nothing_else(mirrors: Mirrors) -> None:
    mirrors.write("second")
    before = mirrors.seqnos()

    def clean(place: str) -> None:
        if place == "source.in-read":
            for path in mirrors.directory.rglob("*.arrow"):
                path.unlink()

    with (
        mock.patch("tailrace.spark.source.stream.crash_point", clean),
        pytest.raises(TailraceError, match="of the spool is gone"),
    ):
        mirrors.live()
    assert mirrors.seqnos() == before
    mirrors.live()
    mirrors.assert_equal()
