"""The handle of a mirror: what a notebook shows of it, from whatever thread or loop it is used."""

from __future__ import annotations

import asyncio
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.client.kv import KvClient
from tailrace.connstr import parse
from tailrace.errors import LoginError
from tailrace.spark import api
from tailrace.spark.rounds.handle import MirrorHandle
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.table.mutation_tokens import wait_for


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_jobs", lambda _spark, _given: LocalJobs())


def use_all(url: str, table: Path) -> None:
    """Call everything that blocks, as cells of a notebook do."""
    handle = api.mirror(None, url, table)  # type: ignore[arg-type]
    try:
        with KvClient(parse(url)) as client:
            stored = client.set("late", b"{}")
        token = (stored.vbucket, stored.vb_uuid, stored.seqno)
        wait_for(table, [token], timeout_s=60)
        assert handle.isActive
        assert "<td style='text-align:left'>none</td>" in handle._repr_html_()
        assert api.verify(None, url, table).equal  # type: ignore[arg-type]
        with tailrace.connect_sync(url) as source:
            assert sum(batch.num_rows for batch in source.batches("beginning", "now")) >= 2
    finally:
        handle.stop()
    assert not handle.isActive and handle.exception() is None


def test_blocking_calls_under_a_running_loop_and_from_any_thread(tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("early", {"n": 1})

        async def cell() -> None:
            use_all(node.url, tmp_path / "in-a-loop")

        asyncio.run(cell())
        failed: list[BaseException] = []

        def work() -> None:
            try:
                use_all(node.url, tmp_path / "in-a-thread")
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert failed == []


def test_it_has_the_calls_of_a_streaming_query(tmp_path: Path) -> None:
    calls = "awaitTermination stop isActive status lastProgress recentProgress exception name id"
    with tailrace.testing.node(vbuckets=2) as node:
        handle = api.mirror(None, node.url, tmp_path / "table")  # type: ignore[arg-type]
        try:
            assert all(hasattr(handle, name) for name in calls.split())
            assert isinstance(handle.name, str) and isinstance(handle.id, str)
            assert handle.awaitTermination(0.05) is False
            assert {"message", "isDataAvailable", "isTriggerActive"} <= handle.status.keys()
        finally:
            handle.stop()
        assert handle.awaitTermination(60) is True
        assert handle.awaitTermination() is None and not handle.isActive
        assert handle.status["message"] == "stopped"
        assert (handle.lastProgress, handle.recentProgress) == (None, []), "it had nothing to do"
        node.set("k", {"n": 1})
        handle = api.mirror(None, node.url, tmp_path / "table", once=True)  # type: ignore[arg-type]
        assert handle.awaitTermination(60) is True
        assert [progress["changes"] for progress in handle.recentProgress] == [1]
        assert handle.lastProgress == handle.recentProgress[-1]


def test_what_a_notebook_shows() -> None:
    handle = MirrorHandle("tailrace mirror of <b>bucket</b>")
    assert "none yet" in handle._repr_html_()
    handle.report(RoundProgress(0, 1500, (), (3,), lag_changes=70, lag_s=1.25, seconds={"read": 0.5}))
    handle.report(RoundProgress(1, 20, (0, 1, 2, 7), (4,)))
    handle.report(RoundProgress(2, 5, (), (5,), lag_changes=12, lag_s=0.5, seconds={"read": 0.5}))
    shown = handle._repr_html_()
    assert "<b>" not in shown and "&lt;b&gt;bucket&lt;/b&gt;" in shown
    for text in (
        "1,525 in 3 commits",
        "12 changes, 0.5 s",
        "10 changes a second",
        "commit 1: 4 vbuckets (0-2, 7)",
    ):
        assert text in shown

    def fail() -> None:
        raise LoginError("no <script> here")

    handle.run(fail, lambda: None)
    with pytest.raises(LoginError):
        handle.awaitTermination()
    shown = handle._repr_html_()
    assert ">failed<" in shown and "no &lt;script&gt; here" in shown


def test_what_ended_a_mirror_is_raised_without_its_history() -> None:
    handle = MirrorHandle("mirror")

    def deep(levels: int) -> Any:
        if levels:
            return deep(levels - 1)
        try:
            raise OSError("socket")
        except OSError as error:
            raise LoginError("the server refuses the login; check user name and password") from error

    handle.run(lambda: deep(20), lambda: None)
    for _ in range(2):  # and asking twice does not make it longer
        with pytest.raises(LoginError) as caught:
            handle.awaitTermination()
        lines = "".join(traceback.format_exception(caught.value)).splitlines()
        assert len(lines) <= 8 and "OSError" not in " ".join(lines)
        assert (
            lines[-1]
            == "tailrace.errors.LoginError: the server refuses the login; check user name and password"
        )
