"""How the suite's Javas start. Run as ``quick_java.py ARCHIVE``, it makes the archive that they start from.

A Spark that lives for seconds mostly loads classes. Java can save those that one Spark has loaded in a file,
verified and linked, and the next one maps them into its memory, which halves its cost. A Java that the file
does not fit (another version, other jars) starts without it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

__all__ = ["OPTIONS"]

ARCHIVE = Path(__file__).resolve().parents[1] / "build" / "spark.jsa"
"""Made by the Makefile, before the tests."""

_SHORT_LIVED = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
"""A second compiler and a parallel collector do not pay off for a Java that lives for seconds."""

_SILENT = "-Xlog:disable"
"""Silences messages about the archive: tests check what programs print."""

_PATIENCE_S = 300

OPTIONS = list(_SHORT_LIVED)
if ARCHIVE.is_file() and ARCHIVE.stat().st_size:
    OPTIONS += [f"-XX:SharedArchiveFile={ARCHIVE}", _SILENT]


def make(archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        made = Path(folder) / archive.name
        options = [*_SHORT_LIVED, f"-XX:ArchiveClassesAtExit={made}", _SILENT]
        os.environ |= {"SPARK_SUBMIT_OPTS": shlex.join(options), "SPARK_LOCAL_IP": "127.0.0.1"}
        _use_spark(Path(folder))
        if made.is_file():
            made.replace(archive)
        else:
            archive.touch()  # this Java can't; an empty file shows that it was tried


def _use_spark(folder: Path) -> None:
    """Do what most tests do with a Spark, and wait until its Java has ended."""
    import tailrace.spark as ts
    import tailrace.testing

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    table = str(folder / "table")
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("key", {"n": 1})
        spark = ts.session("quick java", master="local[2]", **settings)
        gateway = spark.sparkContext._gateway
        source = {"connectionString": node.url, "startingOffsets": "earliest"}
        spark.read.format("tailrace").options(**source).load().groupBy("op").count().collect()
        stream = spark.readStream.format("tailrace").options(**source).load().writeStream
        stream = stream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
        stream.trigger(availableNow=True).start(str(folder / "rows")).awaitTermination(_PATIENCE_S)
        ts.mirror(spark, node.url, table, once=True).awaitTermination(_PATIENCE_S)
        assert ts.table(spark, table).count() == 1
        spark.stop()
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(_PATIENCE_S)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
