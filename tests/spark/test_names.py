"""Tables, spools and checkpoints of any name, on a real Spark; the rest is `cli.test_names_everywhere`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.spark as ts
import tailrace.testing

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


@pytest.mark.parametrize("name", ["größe #1 a?b", "a%41b"])
def test_any_name(spark: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = tmp_path / name
    around.mkdir()
    (tmp_path / "link").symlink_to(around)
    target = around / "table"
    monkeypatch.chdir(around)
    ways: list[str | Path] = [str(target), "./table/", target.as_uri(), tmp_path / "link" / "table"]
    with tailrace.testing.node(vbuckets=2) as node:
        for number, way in enumerate(ways):
            node.set(f"k{number}", {"n": number})
            ts.mirror(spark, node.url, way, once=True, changes=around / "changes").awaitTermination()
            assert ts.verify(spark, node.url, way).equal
            assert ts.table(spark, way).count() == tailrace.read_table(way).count() == number + 1
            positions = tailrace.read_table(way).table.current.positions
            ts.wait_for(way, [(vb, at.vb_uuid, at.seqno) for vb, at in positions.items()], 10)
        assert (around / "changes" / "_delta_log").is_dir()
        spools = [str(around / "spool"), "spool/", (around / "spool").as_uri()]
        for number, spool in enumerate(spools):
            # what Spark itself is given is Spark's to read: of a URI it decodes nothing
            checkpoint = str(around / "checkpoint")
            rows: list[Any] = []
            node.set(f"s{number}", {"n": number})
            query = (
                spark.readStream.format("tailrace")
                .option("startingOffsets", "earliest")
                .option("spoolDir", spool)
                .load(node.url)
                .writeStream.option("checkpointLocation", checkpoint)
                .foreachBatch(lambda batch, _, rows=rows: rows.extend(batch.collect()))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            assert len(rows) == (len(ways) + 1 if number == 0 else 1)
            assert ts.check_checkpoint(checkpoint) >= number + 1
    there = sorted(path.name for path in around.iterdir())
    assert there == ["changes", "checkpoint", "spool", "table"]
