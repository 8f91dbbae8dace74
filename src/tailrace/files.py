"""Every write, sync, rename and unlink of Tailrace happens in this module, so that faults can be injected
here.

`Files` is a small tree of append-only files with two homes: `DiskFiles` is a directory, `MemoryFiles` the
memory of this process (all that ``tailrace serve --memory`` has). `tailrace.testing.faulty_files` has a third
that loses power. Nothing is ever written in place: a file grows at its end until it is synced, or is replaced
as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias, cast

from .errors import NotDurable, StoreCorrupt, StoreLocked

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = [
    "Buffer",
    "DiskFile",
    "DiskFiles",
    "File",
    "FileWriter",
    "Files",
    "MemoryFile",
    "MemoryFiles",
    "WriteOnly",
    "atomic_write",
    "make_folder",
    "open_log",
    "put_file",
    "remove_file",
    "remove_tree",
    "replace_file",
    "scratch_file",
    "scratch_folder",
    "temporary_folder",
    "user_folder",
    "whole_file",
    "whole_file_in",
    "write_scratch",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
IOV_MAX = 1024
# File modes, before the umask: a node's documents are private, an export is the user's.
_PRIVATE, _SHARED = 0o600, 0o666


class File(Protocol):
    """An open file. It stays readable after it is unlinked, until it is closed or dropped."""

    path: str

    @property
    def size(self) -> int:
        """Bytes written so far, synced or not."""
        ...

    def append(self, parts: Iterable[Buffer]) -> None:
        """Write everything at the end; after an OSError the end of the file is undefined."""
        ...

    def sync(self) -> None:
        """All bytes and the size are on disk when this returns. After an error they may never get there: give
        the file up.
        """
        ...

    def read(self, size: int, offset: int) -> bytes:
        """Exactly these bytes; StoreCorrupt if the file is shorter."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer; StoreCorrupt if the file is shorter."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """A tree of files; paths are relative, with slashes. Names are durable after `sync_directory`,
    contents after `sync`.
    """

    def lock(self, path: str) -> None:
        """Reserve the tree for this process until `unlock`; StoreLocked if another has it."""
        ...

    def unlock(self) -> None: ...

    def names(self, directory: str) -> list[str]:
        """The names in a directory, sorted; empty if there is no such directory."""
        ...

    def create(self, path: str) -> File:
        """A new file to append to; FileExistsError if it exists."""
        ...

    def open(self, path: str) -> File:
        """An existing file, to read."""
        ...

    def rename(self, old: str, new: str) -> None: ...

    def link(self, old: str, new: str) -> None:
        """A second name for a file; FileExistsError if it is taken."""
        ...

    def unlink(self, path: str) -> None: ...

    def make_directory(self, path: str) -> None:
        """Make a directory, durable when this returns, and those above it; no error if it exists."""
        ...

    def remove_directory(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a whole file atomically: after a crash it has either the old content or the new.

        NotDurable if it is replaced but the old content may come back; another OSError if it is not replaced.
        """
        ...


def replace_file(files: Files, path: str, data: bytes) -> None:
    """`Files.replace` for every home: write beside, sync, rename, sync the directory."""
    beside = path + ".new"
    with contextlib.suppress(FileNotFoundError):
        files.unlink(beside)
    try:
        _write_new(files, beside, data)
        files.rename(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(beside)
        raise
    try:
        files.sync_directory(path.rpartition("/")[0])
    except OSError as error:
        raise NotDurable(error.errno, error.strerror, path) from error


def _write_new(files: Files, path: str, data: bytes) -> None:
    """Write a new file with its content on disk; its name may be gone after a power cut."""
    file = files.create(path)
    try:
        file.append([data])
        file.sync()
    finally:
        file.close()


def put_file(files: Files, path: str, data: bytes, *, beside: str) -> bool:
    """Write a whole file if the name is free; return whether it was. Durable when it returns, and never
    visible in part. ``beside`` is the name to write it under first, which no other writer may use.

    After an OSError the file is not there; after `NotDurable` it is, but may be gone after a power cut.
    """
    try:
        _write_new(files, beside, data)
        try:
            files.link(beside, path)
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(OSError):
            files.unlink(beside)
    try:
        files.sync_directory(path.rpartition("/")[0])
    except OSError as error:
        raise NotDurable(error.errno, error.strerror, path) from error
    return True


def atomic_write(path: str | os.PathLike[str], data: bytes, *, private: bool = False) -> None:
    """Write a whole file anywhere on disk: write beside, sync, rename, sync the directory.

    The user's umask says who may read it; if it is ``private``, only the user. A device or pipe
    (`_written_through`) is written to and not replaced.
    """
    target = Path(path)
    if _written_through(target):
        with _open_through(target) as file:
            file.write(data)
        return
    with _error_names(target):
        DiskFiles(target.parent, mode=_PRIVATE if private else _SHARED).replace(target.name, data)


def _written_through(path: Path) -> bool:
    """Whether this is a device or a pipe, which a rename would replace by a file, for everybody."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


@contextlib.contextmanager
def _open_through(path: Path) -> Iterator[FileWriter]:
    """A device or a pipe, to write to; there is nothing to sync."""
    with _error_names(path):
        file = DiskFile(str(path), os.open(path, os.O_WRONLY | _PLAIN))
    try:
        yield FileWriter(file, path)
    finally:
        file.close()


@contextlib.contextmanager
def _error_names(path: Path) -> Iterator[None]:
    """Add the file's name to errors while writing it, which lack one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, keep: bool = False) -> Iterator[FileWriter]:
    """A file anywhere on disk that is written bit by bit and appears when it is whole.

    It is written beside, synced and renamed at the end of the block; after an error nothing of it is left,
    unless something was written and ``keep`` is set. A device or pipe (`_written_through`) is written to
    directly and not replaced.
    """
    target = Path(path)
    if _written_through(target):
        with _open_through(target) as file:
            yield file
        return
    with whole_file_in(DiskFiles(target.parent, mode=_SHARED), target.name, keep=keep) as file:
        yield file


@contextlib.contextmanager
def whole_file_in(files: Files, path: str, *, keep: bool = False) -> Iterator[FileWriter]:
    """`whole_file` in a tree of files."""
    beside, target = path + ".new", Path(path)
    if isinstance(files, DiskFiles):
        target = files.root / path
    with contextlib.suppress(FileNotFoundError):
        files.unlink(beside)
    file = files.create(beside)
    done = renamed = False
    try:
        yield FileWriter(file, target)
        done = True
    finally:
        try:
            if done or (keep and file.size):
                with _error_names(target):
                    file.sync()
                    files.rename(beside, path)
                    renamed = True
                    files.sync_directory(path.rpartition("/")[0])
        finally:
            file.close()
            if not renamed:
                files.unlink(beside)


class WriteOnly:
    """What Python's and Arrow's writers want to know of a file that is only written, from its start to its
    end, and that the end of a block closes.
    """

    closed = False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        """The file is closed at the end of its block."""


class FileWriter(WriteOnly):
    """A `File` with the interface that Python's and Arrow's writers need."""

    def __init__(self, file: File, target: Path) -> None:
        self._file = file
        self._target = target

    def write(self, data: Buffer) -> int:
        """Write at the end."""
        size = memoryview(data).nbytes
        with _error_names(self._target):
            self._file.append([data])
        return size

    def writelines(self, lines: Iterable[Buffer]) -> None:
        """Write many lines, a mebibyte or so at a time."""
        waiting: list[Buffer] = []
        size = 0
        for line in lines:
            waiting.append(line)
            size += len(line)
            if size >= 1 << 20:
                self.write(b"".join(waiting))
                waiting, size = [], 0
        self.write(b"".join(waiting))

    def tell(self) -> int:
        """How much has been written."""
        return self._file.size


def write_scratch(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> int:
    """Write a file that need not survive a reboot: whole or not at all, never synced; its size.

    ``write`` gets the open file, so that large content need not be assembled in memory.
    """
    target = Path(path)
    beside = target.with_name(f"{target.name}.part")
    try:
        with _error_names(target), beside.open("wb") as file:
            write(file)
            size = file.tell()
        beside.rename(target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return size


def scratch_file() -> BinaryIO:
    """A file without a name, in `scratch_folder`: it is gone when it is closed or its process ends."""
    return cast("BinaryIO", tempfile.TemporaryFile(prefix="tailrace-", dir=scratch_folder()))


def scratch_folder() -> Path:
    """Where temporary files are (``TMPDIR``)."""
    return Path(tempfile.gettempdir())


# calls that not every system has: macOS lacks fdatasync, Windows all of them

_PLAIN: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Not inherited by the processes that we start, and no conversion of line ends."""
_seeking = threading.Lock()


def _seek_and_read(fd: int, size: int, offset: int) -> bytes:
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


def _write_some(fd: int, parts: list[memoryview]) -> int:
    if hasattr(os, "writev"):
        return os.writev(fd, parts)
    with _seeking:  # the file is open for appending, so seeks of readers don't matter
        return os.write(fd, b"".join(parts))


def _read_into(fd: int, buffer: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = _read_at(fd, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


_read_at: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)
_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class DiskFile:
    """A file in a directory."""

    __slots__ = ("_fd", "path", "size")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.size = os.fstat(fd).st_size
        self._fd = fd

    def append(self, parts: Iterable[Buffer]) -> None:
        rest = [memoryview(part).cast("B") for part in parts if len(part)]
        while rest:
            written = _write_some(self._fd, rest[:IOV_MAX])
            if not written:
                raise OSError(errno.EIO, "nothing was written", self.path)
            self.size += written
            done = 0
            while done < len(rest) and written >= len(rest[done]):
                written -= len(rest[done])
                done += 1
            del rest[:done]
            if written:
                rest[0] = rest[0][written:]

    def sync(self) -> None:
        _sync_data(self._fd)

    def read(self, size: int, offset: int) -> bytes:
        data = _read_at(self._fd, size, offset)
        if len(data) == size:
            return data
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = _read_into(self._fd, buffer[done:], offset + done)
            if not count:
                raise _too_short(self.path, offset + len(buffer))
            done += count

    def fileno(self) -> int:
        """The descriptor, for another process that is to write the file."""
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class DiskFiles:
    """A directory. New files get this ``mode``; by default only their owner may read them."""

    def __init__(self, root: str | os.PathLike[str], *, mode: int = _PRIVATE) -> None:
        self.root = Path(root)
        self._mode = mode
        self._directory_mode = mode | mode >> 2 & 0o111  # whoever may read a directory may enter it
        self._lock: BaseFileLock | None = None

    def lock(self, path: str) -> None:
        from filelock import FileLock, Timeout

        # a lock of the process, not of a thread: one thread may open a store and another close it
        lock = FileLock(self.root / path, mode=_PRIVATE, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreLocked(
                f"{self.root} is in use by another process: stop that one, or use another directory"
            ) from None
        self._lock = lock

    def unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release(force=True)

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(path.name for path in (self.root / directory).iterdir())
        except FileNotFoundError:
            return []

    def create(self, path: str) -> File:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | _PLAIN
        return DiskFile(path, os.open(self.root / path, flags, self._mode))

    def open(self, path: str) -> File:
        return DiskFile(path, os.open(self.root / path, os.O_RDONLY | _PLAIN))

    def rename(self, old: str, new: str) -> None:
        (self.root / old).replace(self.root / new)

    def link(self, old: str, new: str) -> None:
        try:
            (self.root / new).hardlink_to(self.root / old)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            self._copy(old, new)  # a file system without hard links

    def _copy(self, old: str, new: str) -> None:
        source, target = self.open(old), self.create(new)
        try:
            target.append([source.read(source.size, 0)])
            target.sync()
        except OSError:
            self.unlink(new)
            raise
        finally:
            source.close()
            target.close()

    def unlink(self, path: str) -> None:
        (self.root / path).unlink()

    def make_directory(self, path: str) -> None:
        target = (self.root / path).absolute()
        missing = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(mode=self._directory_mode, parents=True, exist_ok=True)
        for directory in missing:
            _sync_directory(directory.parent)

    def remove_directory(self, path: str) -> None:
        (self.root / path).rmdir()

    def sync_directory(self, path: str) -> None:
        _sync_directory(self.root / path)

    def replace(self, path: str, data: bytes) -> None:
        replace_file(self, path, data)


class MemoryFile:
    """A file in memory; it is gone when the last reference is."""

    __slots__ = ("_data", "path")

    def __init__(self, path: str, data: bytearray) -> None:
        self.path = path
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, parts: Iterable[Buffer]) -> None:
        for part in parts:
            self._data += part

    def sync(self) -> None:
        pass

    def read(self, size: int, offset: int) -> bytes:
        # Slicing twice would copy twice; a view must not live on, or the bytearray could not grow any more.
        with memoryview(self._data) as view:
            data = bytes(view[offset : offset + size])
        if len(data) != size:
            raise _too_short(self.path, offset + size)
        return data

    def read_into(self, buffer: memoryview, offset: int) -> None:
        with memoryview(self._data) as view:
            if offset + len(buffer) > len(view):
                raise _too_short(self.path, offset + len(buffer))
            buffer[:] = view[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class MemoryFiles:
    """Files in the memory of this process; a second store on the same object finds what the first left."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.locked = False

    def lock(self, path: str) -> None:
        if self.locked:
            raise StoreLocked("this memory is in use by another store")
        self.locked = True

    def unlock(self) -> None:
        self.locked = False

    def names(self, directory: str) -> list[str]:
        prefix = f"{directory}/" if directory else ""
        inside = (path[len(prefix) :] for path in self.files if path.startswith(prefix))
        return sorted({path.partition("/")[0] for path in inside if path})

    def create(self, path: str) -> File:
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "it already exists", path)
        self.files[path] = bytearray()
        return MemoryFile(path, self.files[path])

    def open(self, path: str) -> File:
        try:
            return MemoryFile(path, self.files[path])
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None

    def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    def link(self, old: str, new: str) -> None:
        if new in self.files:
            raise FileExistsError(errno.EEXIST, "it already exists", new)
        self.files[new] = self.files[old]

    def unlink(self, path: str) -> None:
        try:
            del self.files[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None

    def make_directory(self, path: str) -> None:
        """Nothing to do: a directory exists while a file is in it."""

    def remove_directory(self, path: str) -> None:
        """Nothing to do: a directory goes with its last file."""

    def sync_directory(self, path: str) -> None:
        pass

    def replace(self, path: str, data: bytes) -> None:
        replace_file(self, path, data)


def _sync_directory(path: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows can't open directories, and its file system's log makes names durable
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _PLAIN)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _too_short(path: str, end: int) -> StoreCorrupt:
    return StoreCorrupt(f"{path} is shorter than {end} bytes: restore it from a copy")


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those above it; no error if it exists. The user's umask says who may enter it."""
    Path(path).mkdir(parents=True, exist_ok=True)


def open_log(path: str | os.PathLike[str]) -> BinaryIO:
    """A file that a process writes what it prints to, after what is there already."""
    return Path(path).open("ab")


def remove_file(path: str | os.PathLike[str]) -> None:
    """Remove a file; no error if there is none."""
    Path(path).unlink(missing_ok=True)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a folder with everything in it, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)


def temporary_folder(prefix: str, inside: str | os.PathLike[str] | None = None) -> Path:
    """A new folder that only this user may enter, in `scratch_folder` or ``inside`` another one. It is the
    caller's to remove.
    """
    return Path(tempfile.mkdtemp(prefix=prefix, dir=inside))


def user_folder() -> Path:
    """A folder among the system's temporary files that belongs to this user alone."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    place = Path(tempfile.gettempdir()) / f"tailrace-{user}"
    place.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and place.stat().st_uid != user:  # another user made it: don't use it
        return temporary_folder("tailrace-")
    return place
