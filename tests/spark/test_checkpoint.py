"""A damaged checkpoint: the error names the file and says what to do; Spark's does neither."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tailrace.spark as ts
import tailrace.testing
from tailrace.cli.main import main
from tailrace.errors import InputError, UsageError
from tailrace.model import Position
from tailrace.spark.source.offsets import to_offset


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As Spark 4 writes it: three batches, of which two are committed."""
    folder = tmp_path / "with space" / "größe"
    for name in ("offsets", "commits", "sources"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"413e2d2f-2531-473b-8458-1a8ccf51f169"}')
    for number in range(3):
        offset = to_offset({0: Position.at(7, number + 1), 1: Position.at(8, 5)}, bucket="default")
        head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1794968631439, "conf": {}})
        (folder / "offsets" / str(number)).write_text(f"v1\n{head}\n{json.dumps(offset)}")
        (folder / "offsets" / f".{number}.crc").write_bytes(b"crc")
        if number < 2:
            (folder / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def test_one_that_is_whole(checkpoint: Path, tmp_path: Path) -> None:
    assert ts.check_checkpoint(checkpoint) == 2
    assert ts.check_checkpoint(f"{checkpoint.as_uri()}/", "default") == 2
    (tmp_path / "new").mkdir()
    assert ts.check_checkpoint(tmp_path / "new") == 0
    with pytest.raises(UsageError, match="is not there"):
        ts.check_checkpoint(tmp_path / "nowhere")


def emptied(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"")


def junk(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"\0junk\xff")


def cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-9])

    return damage


def gone(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def a_file(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        gone(name)(folder)
        (folder / name).write_text("x")

    return damage


def both_gone(folder: Path) -> None:
    gone("offsets/1")(folder)
    gone("offsets/2")(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "metadata emptied": (emptied("metadata"), "metadata", "restore"),
    "metadata is junk": (junk("metadata"), "metadata", "restore"),
    "metadata gone": (gone("metadata"), "metadata", "restore"),
    "newest offsets emptied": (emptied("offsets/2"), "offsets/2", "offsets/1' as startingOffsets"),
    "newest offsets are junk": (junk("offsets/2"), "offsets/2", "offsets/1' as startingOffsets"),
    "newest offsets cut short": (cut("offsets/2"), "offsets/2", "offsets/1' as startingOffsets"),
    "offsets before them": (cut("offsets/1"), "offsets/1", "offsets/0' as startingOffsets"),
    "newest commit emptied": (emptied("commits/1"), "commits/1", "offsets/0' as startingOffsets"),
    "newest commit is junk": (junk("commits/1"), "commits/1", "offsets/0' as startingOffsets"),
    "newest commit gone": (gone("commits/1"), "commits/1", "of its own"),
    "offsets of a commit gone": (both_gone, "offsets/1", "offsets/0' as startingOffsets"),
    "offsets gone": (gone("offsets"), "offsets/1", "of its own"),
    "commits gone": (gone("commits"), "commits/1", "of its own"),
    "offsets are a file": (a_file("offsets"), "offsets", "must be a folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(checkpoint: Path, damage: str) -> None:
    harm, name, way_out = DAMAGES[damage]
    harm(checkpoint)
    with pytest.raises(InputError) as caught:
        ts.check_checkpoint(checkpoint)
    said = str(caught.value)
    assert f"{checkpoint}/{name}'" in said and way_out in said and "\n" not in said, said


def test_offsets_that_are_not_ours(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="is of bucket 'default', not of 'other'"):
        ts.check_checkpoint(checkpoint, "other")
    newest = checkpoint / "offsets" / "2"
    newest.write_text('v1\n{}\n{"0": {"seqno": 1}}')
    with pytest.raises(InputError, match="has an invalid offset"):
        ts.check_checkpoint(checkpoint)


def test_the_doctor_looks_at_it(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        assert main(["doctor", node.url, "--checkpoint", str(checkpoint)]) == 0
        assert "ok       checkpoint: whole, with 2 commits" in capsys.readouterr().out
        (checkpoint / "metadata").write_text("")
        assert main(["doctor", node.url, "--checkpoint", str(checkpoint)]) == 1
    out = capsys.readouterr().out
    assert "error    checkpoint: " in out and "/metadata' is damaged\n" in out and "-> restore it" in out
