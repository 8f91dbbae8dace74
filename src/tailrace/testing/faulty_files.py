"""Files that fail: errors and kills at a chosen call, and a disk that loses power.

`FaultyFiles` wraps any `Files` and asks a plan before each call that writes. `SimulatedDisk` keeps apart what
was written and what is durable, as a disk with a cache does, and `power_cut` leaves what a real one may
leave: each sector that was not synced may be there, be missing or be garbage, files may be shorter, and each
name may be old or new. It assumes one thing: synced bytes stay, even if bytes after them in the same sector
are not synced (SQLite calls that powersafe overwrite).
"""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias
from weakref import WeakValueDictionary

from ..errors import StoreCorrupt, StoreLocked
from ..files import Buffer, File, Files, MemoryFile, MemoryFiles, replace_file

__all__ = [
    "Fault",
    "FaultyFiles",
    "PowerCut",
    "SimulatedDisk",
    "SmallDisk",
    "at_call",
    "io_error",
    "kill_myself",
    "no_space",
]

SECTOR = 512
BLOCK = 4096


class PowerCut(BaseException):
    """The machine is gone; no code of ours can catch this by accident."""


class Fault(NamedTuple):
    """What happens in place of a call; for an append, also how many bytes are written first."""

    raises: BaseException | Callable[[], NoReturn]
    written: int = 0

    def strike(self) -> NoReturn:
        if isinstance(self.raises, BaseException):
            raise self.raises
        self.raises()


FaultPlan: TypeAlias = Callable[[int, str, str, int], "Fault | None"]
"""Called with the call's number (from 1), its name, its path and the bytes that it would write."""


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def kill_myself() -> NoReturn:
    """SIGKILL this process, as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows SIGTERM kills, too
    raise AssertionError("this process is dead")


def at_call(number: int, fault: Callable[[int], Fault]) -> FaultPlan:
    """A plan that strikes once, at the n-th call; `fault` is told how many bytes that call would write."""
    return lambda call, _name, _path, size: fault(size) if call == number else None


class FaultyFiles:
    """Wraps a tree of files, with a plan of what goes wrong."""

    def __init__(self, inner: Files, plan: FaultPlan | None = None, *, syncs: bool = True) -> None:
        self.inner = inner
        self.plan = plan
        self.syncs = syncs  # False: don't wait for the disk, which makes no difference to a killed process
        self.calls = 0
        self.trace: list[tuple[str, str]] = []

    def strike(self, name: str, path: str, size: int = 0) -> Fault | None:
        """Count a call; the fault that strikes it, if any."""
        self.calls += 1
        self.trace.append((name, path))
        return self.plan(self.calls, name, path, size) if self.plan is not None else None

    def _guard(self, name: str, path: str) -> None:
        fault = self.strike(name, path)
        if fault is not None:
            fault.strike()

    def lock(self, path: str) -> None:
        self.inner.lock(path)

    def unlock(self) -> None:
        self.inner.unlock()

    def names(self, directory: str) -> list[str]:
        return self.inner.names(directory)

    def create(self, path: str) -> File:
        self._guard("create", path)
        return FaultyFile(self, self.inner.create(path))

    def open(self, path: str) -> File:
        return self.inner.open(path)

    def rename(self, old: str, new: str) -> None:
        self._guard("rename", new)
        self.inner.rename(old, new)

    def link(self, old: str, new: str) -> None:
        self._guard("link", new)
        self.inner.link(old, new)

    def unlink(self, path: str) -> None:
        self._guard("unlink", path)
        self.inner.unlink(path)

    def make_directory(self, path: str) -> None:
        self._guard("make_directory", path)
        self.inner.make_directory(path)

    def remove_directory(self, path: str) -> None:
        self._guard("remove_directory", path)
        self.inner.remove_directory(path)

    def sync_directory(self, path: str) -> None:
        self._guard("sync_directory", path)
        if self.syncs:
            self.inner.sync_directory(path)

    def replace(self, path: str, data: bytes) -> None:
        replace_file(self, path, data)


class FaultyFile:
    """A file that is being written under a plan."""

    def __init__(self, files: FaultyFiles, inner: File) -> None:
        self.path = inner.path
        self._files = files
        self._inner = inner

    @property
    def size(self) -> int:
        return self._inner.size

    def append(self, parts: Iterable[Buffer]) -> None:
        data = b"".join(parts)
        fault = self._files.strike("append", self.path, len(data))
        if fault is not None:
            self._inner.append([data[: fault.written]])
            fault.strike()
        self._inner.append([data])

    def sync(self) -> None:
        fault = self._files.strike("sync", self.path)
        if fault is not None:
            if isinstance(self._inner, SimulatedFile):
                self._inner.lose_unsynced()
            fault.strike()
        if self._files.syncs:
            self._inner.sync()

    def read(self, size: int, offset: int) -> bytes:
        return self._inner.read(size, offset)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self._inner.read_into(buffer, offset)

    def close(self) -> None:
        self._inner.close()


class _Blocks(bytearray):
    """The bytes of a file; a weak reference lets the disk count them while they exist."""

    __slots__ = ("__weakref__",)


class SmallDisk(MemoryFiles):
    """A disk in memory with room for ``capacity`` bytes, of which others use ``foreign_bytes``.

    As on a real disk, a file takes whole blocks, data is written as far as it fits, a name takes no room, and
    a removed file takes its room until it is closed.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.foreign_bytes = 0
        self._contents: WeakValueDictionary[int, _Blocks] = WeakValueDictionary()

    @property
    def free_bytes(self) -> int:
        used = sum(_in_blocks(len(content)) for content in self._contents.values())
        return max(self.capacity - self.foreign_bytes - used, 0) // BLOCK * BLOCK

    def create(self, path: str) -> File:
        super().create(path)
        content = self.files[path] = _Blocks()
        self._contents[id(content)] = content
        return SmallDiskFile(path, content, self)

    def open(self, path: str) -> File:
        super().open(path)
        return SmallDiskFile(path, self.files[path], self)


class SmallDiskFile(MemoryFile):
    """An open file on a small disk."""

    __slots__ = ("_disk",)

    def __init__(self, path: str, content: bytearray, disk: SmallDisk) -> None:
        super().__init__(path, content)
        self._disk = disk

    def append(self, parts: Iterable[Buffer]) -> None:
        data = b"".join(parts)
        room = _in_blocks(self.size) - self.size + self._disk.free_bytes
        super().append([data[:room]])
        if len(data) > room:
            raise no_space()

    def close(self) -> None:
        self._data = bytearray()


def _in_blocks(size: int) -> int:
    """How much room a file of this size takes."""
    return -(-size // BLOCK) * BLOCK


@dataclass(slots=True, eq=False)
class Inode:
    """What a name leads to."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0  # this many bytes are durable ...
    holes: list[tuple[int, int]] = field(default_factory=list)  # ... except these, whose sync failed


class SimulatedFile:
    """A file on the simulated disk."""

    def __init__(self, path: str, node: Inode) -> None:
        self.path = path
        self._node = node

    @property
    def size(self) -> int:
        return len(self._node.data)

    def append(self, parts: Iterable[Buffer]) -> None:
        for part in parts:
            self._node.data += part

    def sync(self) -> None:
        self._node.synced = len(self._node.data)

    def lose_unsynced(self) -> None:
        """A sync failed. As on Linux, the next one succeeds without writing these bytes."""
        node = self._node
        if node.synced < len(node.data):
            node.holes.append((node.synced, len(node.data)))
            node.synced = len(node.data)

    def read(self, size: int, offset: int) -> bytes:
        data = bytes(self._node.data[offset : offset + size])
        if len(data) != size:
            raise StoreCorrupt(f"{self.path} is shorter than {offset + size} bytes")
        return data

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.read(len(buffer), offset)

    def close(self) -> None:
        pass


class SimulatedDisk:
    """A disk with a cache: names are durable after `sync_directory`, bytes after `sync`."""

    def __init__(self) -> None:
        self.nodes: dict[str, Inode] = {}
        self._durable: dict[str, Inode] = {}
        self._changes: list[
            tuple[str, dict[str, Inode | None]]
        ] = []  # directory, and where its names lead now
        self._locked = False

    def lock(self, path: str) -> None:
        if self._locked:
            raise StoreLocked("this disk is in use by another store")
        self._locked = True

    def unlock(self) -> None:
        self._locked = False

    def names(self, directory: str) -> list[str]:
        prefix = f"{directory}/" if directory else ""
        inside = (path[len(prefix) :] for path in self.nodes if path.startswith(prefix))
        return sorted({path.partition("/")[0] for path in inside if path})

    def create(self, path: str) -> File:
        if path in self.nodes:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        node = self.nodes[path] = Inode()
        self._change({path: node})
        return SimulatedFile(path, node)

    def open(self, path: str) -> File:
        try:
            return SimulatedFile(path, self.nodes[path])
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def rename(self, old: str, new: str) -> None:
        node = self.nodes[new] = self.nodes.pop(old)
        self._change({new: node, old: None})

    def link(self, old: str, new: str) -> None:
        if new in self.nodes:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        node = self.nodes[new] = self.nodes[old]
        self._change({new: node})

    def unlink(self, path: str) -> None:
        try:
            del self.nodes[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        self._change({path: None})

    def make_directory(self, path: str) -> None:
        """Do nothing: a directory is there while a file is in it."""

    def remove_directory(self, path: str) -> None:
        """Do nothing: a directory goes with its last file."""

    def sync_directory(self, path: str) -> None:
        self._apply([change for change in self._changes if change[0] == path])
        self._changes = [change for change in self._changes if change[0] != path]

    def replace(self, path: str, data: bytes) -> None:
        replace_file(self, path, data)

    def _change(self, names: dict[str, Inode | None]) -> None:
        self._changes.append((next(iter(names)).rpartition("/")[0], names))

    def _apply(self, changes: Iterable[tuple[str, dict[str, Inode | None]]]) -> None:
        for _, names in changes:
            for path, node in names.items():
                if node is None:
                    self._durable.pop(path, None)
                else:
                    self._durable[path] = node

    def power_cut(self, rng: random.Random) -> SimulatedDisk:
        """The disk as it is afterwards."""
        self._apply([change for change in self._changes if rng.random() < 0.5])
        disk = SimulatedDisk()
        for path, node in self._durable.items():
            survivor = Inode(_survivor(node, rng))
            survivor.synced = len(survivor.data)
            disk.nodes[path] = disk._durable[path] = survivor
        return disk


def _survivor(node: Inode, rng: random.Random) -> bytearray:
    """A file's bytes after a power cut."""
    data = bytearray(node.data[: rng.randint(node.synced, len(node.data))])
    loose = [*node.holes, (node.synced, len(data))]
    how = rng.choice(("whole", "zeros", "mixed", "mixed"))
    for start, stop in loose:
        for at in range(start - start % SECTOR, min(stop, len(data)), SECTOR):
            low, high = max(at, start), min(at + SECTOR, stop, len(data))
            match rng.randrange(3) if how == "mixed" else how:
                case 0 | "zeros":
                    data[low:high] = bytes(high - low)
                case 1:
                    data[low:high] = rng.randbytes(high - low)
    return data
