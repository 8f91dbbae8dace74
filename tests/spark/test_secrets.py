"""No secret of a bucket or of an object store is in anything that we show, log or write."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

import tailrace.testing
from spark.local_jobs import LocalJobs
from table.s3 import BUCKET, moto_server, options_for
from tailrace.cli.main import main
from tailrace.errors import LoginError
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.rounds.verify import verify_table
from tailrace.spark.source.batch import BatchReader
from tailrace.table.opening import open_table
from tailrace.table.store import TableStore
from tailrace.web.http import exposition_text
from tailrace.web.mirror_figures import MirrorFigures

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


@pytest.mark.xdist_group("moto")
def test_a_mirror_on_a_store_tells_and_writes_no_secret(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log at its most talkative, progress, metrics, all that lies in the store, and what commands say."""
    caplog.set_level(logging.DEBUG)
    place = f"s3://{BUCKET}/people"
    figures, told = MirrorFigures("default", place), list[RoundProgress]()
    users = {"Administrator": PASSWORD}
    with moto_server() as port, tailrace.testing.node(vbuckets=2, users=users) as node:
        storage = options_for(port)
        secrets = [PASSWORD, storage["aws_secret_access_key"]]
        assert all(len(secret) > 10 for secret in secrets)
        url = node.url.replace("://", f"://Administrator:{PASSWORD}@")
        for number in range(20):
            node.set(f"k{number % 10}", {"n": number})
            if number % 10 == 9:
                mirror = build_mirror(
                    LocalJobs(),
                    url,
                    place,
                    once=True,
                    changes=f"{place}-changes",
                    storage_options=storage,
                    on_progress=told.append,
                    in_background=False,
                )
                mirror.prepare()
                mirror.run()
        for progress in told:
            figures.add(progress)
        shown = [json.dumps(progress.to_json()) for progress in told]
        shown += [json.dumps(figures.stats(), default=str), exposition_text(figures.metrics()).decode()]
        given = [word for item in storage.items() for word in ("--storage-option", "=".join(item))]
        for words in (
            ["plan", url, place],
            ["maintain", place, "--dry-run"],
            ["query", place, "select count(*) from t"],
            ["doctor", url, place],
            ["wait", place, "--token", "0:1:99999", "--timeout", "0s"],
            ["plan", url, f"{place}-none"],
            ["query", f"{place}-none", "select 1"],
        ):
            main([*words, *given])
            shown += capsys.readouterr()
        for file in TableStore(f"s3://{BUCKET}", storage).list():
            data = TableStore(f"s3://{BUCKET}", storage).read(file.path)
            assert not any(secret.encode() in data for secret in secrets), file.path
    close_idle_sources()
    assert len(told) == 2
    assert caplog.records
    for secret in secrets:
        assert [text for text in [*shown, caplog.text] if secret in text] == []
