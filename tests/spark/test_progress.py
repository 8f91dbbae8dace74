"""What a mirror reports about a round while it goes on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.clock import ManualClock
from tailrace.model import Position
from tailrace.spark.rounds import planning
from tailrace.spark.rounds.handle import MirrorHandle
from tailrace.spark.rounds.jobs import _DonePieces, _Listener
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.planning import ReadRange
from tailrace.spark.rounds.progress import RoundUnderway
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table


def piece(*vbuckets: int, changes: int) -> dict[int, ReadRange]:
    return {vbucket: ReadRange(Position.BEGINNING, changes) for vbucket in vbuckets}


PIECES = [piece(0, 1, 2, changes=1000), piece(3, 4, changes=2000)]


def test_what_is_done_of_a_round() -> None:
    clock = ManualClock()
    underway = RoundUnderway(3, 7000, clock=clock)
    assert str(underway) == "round 3: 7,000 changes to read"
    underway.read(PIECES)
    assert str(underway) == "round 3: reading 7,000 changes of 5 vbuckets"
    clock.advance(2)
    underway.done(1)
    underway.done(1)  # it ran twice
    clock.advance(60)  # how fast it goes is known of what is done
    assert str(underway) == "round 3: 4,000 of 7,000 changes, 2 of 5 vbuckets, 2,000/s"
    assert underway.to_json() == {
        "batch": 3,
        "step": "read",
        "changes": 4000,
        "changes_planned": 7000,
        "changes_later": 0,
        "vbuckets": 2,
        "vbuckets_planned": 5,
        "tasks": 1,
        "tasks_planned": 2,
        "rate": 2000.0,
    }
    underway.read([*PIECES, piece(9, changes=1)])
    underway.done(2)
    assert str(underway) == "round 3: 1 of 7,001 changes, 1 of 6 vbuckets", "a small task tells no rate"
    underway.read(PIECES)
    assert str(underway) == "round 3: reading 7,000 changes of 5 vbuckets", "again, with new columns"
    underway.step = "commit"
    assert str(underway) == "round 3: committing 7,000 changes"
    underway.step = "go back"
    assert str(underway) == "round 3: vbuckets go back with the bucket"
    underway.step = "maintain"
    assert str(underway) == "round 3: compacting and cleaning"


def test_a_cluster_without_executors_is_told() -> None:
    clock = ManualClock()
    is_waiting = True
    underway = RoundUnderway(0, 1, 0, clock, lambda: is_waiting)
    underway.read(PIECES)
    assert "executors" not in str(underway), "it takes a moment"
    clock.advance(6)
    assert str(underway).endswith("; Spark has not started any task: are there executors?")
    is_waiting = False
    assert "executors" not in str(underway)


def test_the_status_of_a_handle() -> None:
    handle = MirrorHandle("mirror")
    assert handle.status["message"] == "stopped" and "round" not in handle.status
    seen: list[dict[str, Any]] = []
    underway = RoundUnderway(0, 7000)

    def work() -> None:
        for doing in (underway, "waiting for changes"):
            handle.say(doing)
            seen.append(handle.status)

    handle.run(work, lambda: None)
    handle.awaitTermination()
    first, second = seen
    assert first["message"] == str(underway) and first["round"] == underway.to_json()
    assert first["isDataAvailable"] and first["isTriggerActive"] and first["seconds"] >= 0
    assert not second["isDataAvailable"] and "round" not in second


class WatchedJobs(LocalJobs):
    """Notes what the mirror reports when a task has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror: Mirror | None = None
        self.said: list[str] = []

    def run(self, work: Any, pieces: Any, description: str, on_done: Any = None) -> list[Any]:
        def watched(number: int) -> None:
            on_done(number)
            assert self.mirror is not None
            self.said.append(str(self.mirror.handle._doing))

        return super().run(work, pieces, description, watched if on_done else None)


def test_a_first_load_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_TASK_CHANGES", 10)
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(80):
            node.set(f"k{number}", {"n": number}, vbucket=number % 4)
        jobs = WatchedJobs()
        jobs.mirror = build_mirror(jobs, node.url, tmp_path / "table", once=True, in_background=False)
        jobs.mirror.prepare()
        jobs.mirror.run()
        assert [said.rpartition(", ")[0] for said in jobs.said] == [
            f"round 0: {20 * done} of 80 changes, {done} of 4 vbuckets" for done in (2, 3, 4)
        ]
        assert str(jobs.mirror.handle._doing) == "cleaning"
        told: list[tuple[int, int]] = []
        verdict = verify_table(
            LocalJobs(),
            source_options(node.url),
            open_table(str(tmp_path / "table")),
            lambda done, planned: told.append((done, planned)),
        )
        assert verdict.equal and told == [(40, 80), (60, 80), (80, 80)]


def test_what_tasks_tell_by_an_accumulator() -> None:
    """Late attempts of a run that is over are ignored; tasks get no more than they need."""
    listener = _Listener()
    done: list[int] = []
    listener.waiting[4] = done.append
    assert type(pickle.loads(pickle.dumps(listener))) is _DonePieces
    in_a_task = _DonePieces()
    told = in_a_task.addInPlace(in_a_task.addInPlace(in_a_task.zero(set()), {(4, 0)}), {(4, 1)})
    assert listener.addInPlace(set(), told | {(3, 7)}) == set()
    assert sorted(done) == [0, 1]
