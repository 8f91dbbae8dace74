"""The only module that writes: both homes behave alike, writes are whole, and what a fault leaves."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.errors import NotDurable, StoreCorrupt, StoreLocked
from tailrace.files import (
    DiskFile,
    DiskFiles,
    Files,
    MemoryFiles,
    atomic_write,
    make_folder,
    open_log,
    put_file,
    remove_file,
    temporary_folder,
    whole_file,
    write_scratch,
)
from tailrace.testing.faulty_files import (
    Fault,
    FaultyFiles,
    PowerCut,
    SimulatedDisk,
    at_call,
    io_error,
    no_space,
)


@pytest.fixture(params=["disk", "memory", "simulated"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    makers: dict[str, Callable[[], Files]] = {
        "disk": lambda: DiskFiles(tmp_path),
        "memory": MemoryFiles,
        "simulated": SimulatedDisk,
    }
    return makers[request.param]()


def test_a_file_from_birth_to_death(files: Files) -> None:
    files.make_directory("d")
    file = files.create("d/a")
    file.append([b"one", memoryview(b"two"), bytearray(b""), b"three"])
    file.sync()
    files.sync_directory("d")
    assert file.size == 11
    assert file.read(3, 3) == b"two"
    buffer = bytearray(5)
    file.read_into(memoryview(buffer), 6)
    assert buffer == b"three"
    reads: list[Callable[[], object]] = [
        lambda: file.read(6, 6),
        lambda: file.read_into(memoryview(bytearray(6)), 6),
    ]
    for read in reads:
        with pytest.raises(StoreCorrupt, match="d/a"):
            read()
    with pytest.raises(FileExistsError):
        files.create("d/a")
    again = files.open("d/a")
    files.rename("d/a", "d/b")
    assert files.names("d") == ["b"]
    files.unlink("d/b")
    assert files.names("d") == []
    assert again.read(3, 0) == b"one"  # an open file outlives its name
    again.close()
    with pytest.raises(FileNotFoundError):
        files.open("d/b")
    with pytest.raises(FileNotFoundError):
        files.unlink("d/b")
    files.remove_directory("d")
    assert files.names("nowhere") == []


def test_replacing(files: Files) -> None:
    files.replace("a", b"old")
    files.replace("a", b"new")
    file = files.open("a")
    assert file.read(file.size, 0) == b"new"
    assert files.names("") == ["a"]


def test_the_lock(files: Files) -> None:
    files.lock("LOCK")
    other = DiskFiles(files.root) if isinstance(files, DiskFiles) else files
    with pytest.raises(StoreLocked):
        other.lock("LOCK")
    files.unlock()
    other.lock("LOCK")
    other.unlock()


def test_many_parts_and_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take less than it is given, and no more than 1,024 parts."""
    rng = random.Random(1)
    writev = os.writev

    def short(fd: int, parts: list[bytes]) -> int:
        assert len(parts) <= 1024
        data = b"".join(parts)
        return writev(fd, [data[: rng.randint(1, len(data))]])

    parts = [rng.randbytes(rng.randrange(40)) for _ in range(3_000)]
    monkeypatch.setattr(os, "writev", short)
    file = DiskFiles(tmp_path).create("a")
    file.append(parts)
    assert file.size == sum(map(len, parts))
    file.close()
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


@pytest.mark.parametrize(("umask", "shared"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read(tmp_path: Path, umask: int, shared: int) -> None:
    """What a user asked for follows the umask; a node's files, and secrets, are the user's alone."""

    def mode(name: str) -> int:
        return (tmp_path / name).stat().st_mode & 0o777

    before = os.umask(umask)
    try:
        atomic_write(tmp_path / "state.json", b"{}")
        with whole_file(tmp_path / "export.jsonl") as file:
            file.write(b"{}")
        atomic_write(tmp_path / "secret", b"token", private=True)
        DiskFiles(tmp_path).create("log").close()
    finally:
        os.umask(before)
    assert [mode("state.json"), mode("export.jsonl"), mode("secret"), mode("log")] == [shared] * 2 + [
        0o600
    ] * 2


def test_atomic_write(tmp_path: Path) -> None:
    atomic_write(tmp_path / "state.json", b"{}")
    atomic_write(str(tmp_path / "state.json"), b'{"a":1}')
    assert (tmp_path / "state.json").read_bytes() == b'{"a":1}'
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    with pytest.raises(OSError, match="No such file"):
        atomic_write(tmp_path / "none" / "x", b"")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("how", ["atomic", "whole"])
def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path, how: str, linked: bool) -> None:
    """A pipe, as `/dev/stdout` may be one; a rename would replace a device for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    target = tmp_path / "link" if linked else pipe
    if linked:
        target.symlink_to("pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if how == "atomic":
            atomic_write(target, b"onetwo")
        else:
            with whole_file(target) as file:
                file.writelines([b"one"])
                file.write(b"two")
                assert file.tell() == 6
        assert os.read(reader, 100) == b"onetwo"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == (["link", "pipe"] if linked else ["pipe"])
    assert target.is_symlink() == linked


@pytest.mark.parametrize("at", ["append", "sync"])
@pytest.mark.parametrize("how", ["atomic", "whole", "kept", "scratch"])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, at: str
) -> None:
    """Not even the part that could be written; the old file stays, and the error names it."""
    target = tmp_path / "out"
    target.write_bytes(b"old")

    def full(*_: object) -> None:
        raise no_space()

    monkeypatch.setattr(DiskFile, at, full)
    with pytest.raises(OSError, match=r"No space.*out") as caught:
        match how:
            case "atomic":
                atomic_write(target, b"new")
            case "scratch":
                write_scratch(target, full)
            case _:
                with whole_file(target, keep=how == "kept") as file:
                    file.write(b"new")
    assert caught.value.filename == str(target)
    assert (os.listdir(tmp_path), target.read_bytes()) == (["out"], b"old")


def test_a_replacement_is_old_or_new_whatever_happens() -> None:
    seen = set()
    for call in range(1, 8):
        for fault in (PowerCut, no_space, io_error):
            for seed in range(20):
                rng = random.Random(seed)
                disk = SimulatedDisk()
                disk.replace("a", b"old" * 1000)
                files = FaultyFiles(
                    disk,
                    at_call(call, lambda size, f=fault, r=rng: Fault(f(), r.randint(0, size))),  # type: ignore[misc]
                )
                try:
                    files.replace("a", b"new" * 1000)
                    durable = True
                except NotDurable:
                    assert disk.open("a").read(3, 0) == b"new"
                    durable = None
                except (OSError, PowerCut):
                    durable = False
                    if fault is not PowerCut:
                        assert disk.open("a").read(3, 0) == b"old"
                after = disk.power_cut(rng).open("a")
                content = after.read(after.size, 0)
                assert content in (b"old" * 1000, b"new" * 1000)
                if durable:
                    assert content[:3] == b"new"
                seen.add((durable, content[:3]))
    assert seen == {(True, b"new"), (None, b"old"), (None, b"new"), (False, b"old"), (False, b"new")}


def test_what_a_power_cut_leaves() -> None:
    """Synced bytes stay; others may stay, go, be zeros or garbage; a failed sync can't be made up for."""
    disk = SimulatedDisk()
    file = disk.create("a")
    file.append([b"s" * 1000])
    file.sync()
    disk.sync_directory("")
    file.append([b"u" * 3000])
    kinds = set()
    for seed in range(200):
        reopened = disk.power_cut(random.Random(seed)).open("a")
        data = reopened.read(reopened.size, 0)
        assert data[:1000] == b"s" * 1000
        assert len(data) <= 4000
        kinds.add((len(data) < 4000, b"\0" * 100 in data, b"u" * 512 in data))
    assert len(kinds) >= 4
    FaultyFiles(disk)
    file.lose_unsynced()  # type: ignore[attr-defined]
    file.sync()
    assert any(
        disk.power_cut(random.Random(seed)).open("a").read(4000, 0)[1000:] != b"u" * 3000
        for seed in range(20)
    )


def test_a_file_that_is_put_under_a_free_name(files: Files) -> None:
    assert put_file(files, "7.json", b"first", beside=".a.new")
    assert not put_file(files, "7.json", b"second", beside=".b.new")
    assert files.names("") == ["7.json"]
    file = files.open("7.json")
    assert file.read(5, 0) == b"first"
    file.close()


@pytest.mark.parametrize("seed", range(40))
def test_a_put_file_after_a_power_cut(seed: int) -> None:
    """Once the call has returned it is there; before, it is there whole or not at all."""
    disk = SimulatedDisk()
    data = bytes(range(256)) * 20
    assert put_file(disk, "1.json", data, beside=".1.new")
    files = FaultyFiles(disk, at_call(seed % 5 + 1, lambda _: Fault(PowerCut())))
    with pytest.raises(PowerCut):
        put_file(files, "2.json", data, beside=".2.new")
    left = disk.power_cut(random.Random(seed))
    assert bytes(left.nodes["1.json"].data) == data
    if "2.json" in left.nodes:
        assert bytes(left.nodes["2.json"].data) == data


def test_what_is_there_or_gone_already_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        make_folder(folder)
        with open_log(folder / "log") as log:
            log.write(b"x")
    assert (folder / "log").read_bytes() == b"xx"
    for _ in range(2):
        remove_file(folder / "log")
    assert list(folder.iterdir()) == []


def test_a_temporary_folder_is_new_and_private(tmp_path: Path) -> None:
    folders = [temporary_folder("x-", tmp_path) for _ in range(2)]
    assert sorted(tmp_path.iterdir()) == sorted(folders)
    if os.name == "posix":
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
