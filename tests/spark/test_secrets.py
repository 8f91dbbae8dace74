"""Secrets of a bucket are in nothing that our objects and errors show."""

from __future__ import annotations

from pathlib import Path

import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.errors import LoginError
from tailrace.spark.rounds.connections import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.rounds.verify import verify_table
from tailrace.spark.source.batch import BatchReader
from tailrace.table.opening import open_table

PASSWORD = "hush-password-7"


def test_objects_and_errors_show_no_password(tmp_path: Path) -> None:
    options = {"username": "Administrator", "password": PASSWORD}
    with tailrace.testing.node(vbuckets=2, users={"Administrator": PASSWORD}) as node:
        node.set("key", {"n": 1})
        mirror = build_mirror(
            LocalJobs(), node.url, tmp_path / "table", once=True, options=options, in_background=False
        )
        mirror.prepare()
        mirror.run()
        reader = BatchReader({"connectionString": node.url, **options})
        partitions = reader.partitions()
        objects = [mirror, mirror.handle, reader, *partitions, *mirror.tables]
        shown = [repr(thing) + str(thing) for thing in objects]
        wrong = {"connectionString": node.url, **options, "password": f"{PASSWORD}-wrong"}
        try:
            verify_table(LocalJobs(), wrong, open_table(tmp_path / "table"))
        except LoginError as error:
            shown.append(str(error) + repr(error))
    close_idle_sources()
    assert partitions and len(shown) == len(objects) + 1
    assert [text for text in shown if PASSWORD in text] == []
