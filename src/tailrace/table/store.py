"""Where the files of a table are: a folder on a local disk, or a prefix of an object store.

    TableStore("out/people")                         any local name, taken as it is; file:///… too
    TableStore("s3://bucket/people", {"aws_endpoint_url": "…"})       gs://, az:// and abfss:// likewise

Paths inside a store are relative, with slashes, and taken literally: nothing in them is encoded. A local disk
is written through `tailrace.files`, an object store through obstore. A store can be pickled, so executors get
what the driver was given; no text it makes contains the values of its options.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast

import pyarrow as pa

from ..errors import NotDurable, UsageError
from ..files import Buffer, DiskFiles, Files, WriteOnly, put_file, replace_file, whole_file_in
from ..paths import location
from ..rng import unique_name
from ..units import parse_duration_s, parse_integer
from .contract import StorageError

__all__ = ["StoredFile", "TableStore", "Writable", "without_secrets"]

T = TypeVar("T")
_SHARED = 0o666  # before the umask: a table is the user's, not ours alone

_PART_BYTES = 8 << 20
"""Size of a part of an upload. An object may have at most 10,000 parts."""

_READ_AHEAD = 1 << 20

_CLIENT_OPTIONS = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
        *("http1_only", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_ca_certificate"),
        *("proxy_excludes", "proxy_url", "randomize_addresses", "timeout", "user_agent"),
    }
)
"""Options of the HTTP client, which obstore takes separately from those of the store; as in the latter, a
prefix (``aws_allow_http``) and capitals are allowed."""
_PREFIX = re.compile(r"^(aws|azure|google)_")
_MAX_RETRIES, _RETRY_TIMEOUT = "max_retries", "retry_timeout"
_SECRET_VARIABLE = re.compile(r"(AWS|AZURE|GOOGLE)_\w*(KEY|KEY_ID|SECRET|TOKEN)")
"""Variables with secrets: stores take what the options leave out from the environment."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a listing found."""

    path: str
    size: int
    modified_ms: int


class Writable(Protocol):
    """What `TableStore.create` yields: Arrow's and Parquet's writers accept it as a file."""

    def write(self, data: Buffer) -> int: ...

    def tell(self) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    @property
    def closed(self) -> bool: ...


class Home(Protocol):
    """What a local disk and an object store have in common."""

    def read(self, path: str, offset: int, size: int | None) -> bytes: ...

    def open(self, path: str) -> Any: ...

    def create(self, path: str) -> contextlib.AbstractContextManager[Writable]: ...

    def put(self, path: str, data: bytes) -> None: ...

    def put_if_absent(self, path: str, data: bytes) -> bool: ...

    def head(self, path: str) -> StoredFile | None: ...

    def list(self, prefix: str, start_after: str) -> Iterator[StoredFile]: ...

    def delete(self, paths: Sequence[str]) -> None: ...

    def local_path(self, path: str) -> Path | None: ...


class TableStore:
    """The files of one table."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        storage_options: Mapping[str, str] | None = None,
        *,
        files: Files | None = None,
    ) -> None:
        """``files`` replaces the plain disk in tests."""
        self._options = dict(storage_options or {})
        self._files = files
        self.uri = _normal_uri(uri)
        self._home: Home | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is a folder on this machine."""
        return self.uri.startswith("/")

    def parents(self) -> Iterator[TableStore]:
        """The folders that it lies in, or the shorter prefixes, nearest first."""
        scheme, separator, rest = ("", "", self.uri) if self.is_local else self.uri.partition("://")
        while rest := rest.rpartition("/")[0]:
            yield TableStore(f"{scheme}{separator}{rest}", self._options)

    @property
    def storage_options(self) -> dict[str, str]:
        """The options as given, for other readers of the table; they include secrets."""
        return dict(self._options)

    def __repr__(self) -> str:
        return f"TableStore({self.uri!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TableStore):
            return NotImplemented
        return (self.uri, self._options) == (other.uri, other._options)

    def __hash__(self) -> int:
        return hash(self.uri)

    def __getstate__(self) -> tuple[str, dict[str, str]]:
        return self.uri, self._options

    def __setstate__(self, state: tuple[str, dict[str, str]]) -> None:
        self.uri, self._options = state
        self._files = self._home = None

    @property
    def home(self) -> Home:
        if self._home is None:
            if self.is_local:
                self._home = DiskHome(Path(self.uri), self._files)
            else:
                self._home = ObjectHome(self.uri, self._options)
        return self._home

    def read(self, path: str, offset: int = 0, size: int | None = None) -> bytes:
        """The bytes of a file, or a range of them; fewer if it is shorter. FileNotFoundError."""
        return self.home.read(path, offset, size)

    def open(self, path: str) -> Any:
        """A file to read and seek in, for ``pq.ParquetFile``; close it. FileNotFoundError."""
        return self.home.open(path)

    def create(self, path: str) -> contextlib.AbstractContextManager[Writable]:
        """A new file, written piece by piece: whole and durable at the end of the block; nothing remains
        after an error.
        """
        return self.home.create(path)

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file, replacing any earlier one."""
        self.home.put(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write a whole file if the name is free; return whether it was. Of several writers one succeeds.

        False may also mean that our own put was retried after its first answer was lost: compare the bytes.
        """
        return self.home.put_if_absent(path, data)

    def head(self, path: str) -> StoredFile | None:
        """What a listing would say of a file; None if there is none."""
        return self.home.head(path)

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[StoredFile]:
        """The files in a folder and below, in the order of their paths, from the first path that is greater
        than ``start_after``. A folder that is not there has none.
        """
        return self.home.list(prefix.rstrip("/"), start_after)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; a missing one is not an error."""
        doomed = list(paths)
        if doomed:
            self.home.delete(doomed)

    def local_path(self, path: str) -> Path | None:
        """Where a file is on this machine's disk, to map it; None in an object store."""
        return self.home.local_path(path)


def without_secrets(text: str, options: Mapping[str, str]) -> str:
    """A text without the values of a store's options and the keys in the environment: a store that refuses a
    request may repeat them. Query strings of addresses, which may hold a signature, are left out.
    """
    given = list(options.values())
    given += [value for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name)]
    for secret in sorted((value for value in given if len(value) > 3), key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"(\w+://[^\s?]*)\?\S*", r"\1", text)


class DiskHome:
    """A folder."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self._root = root
        self._files: Files = DiskFiles(root, mode=_SHARED) if files is None else files
        self._made: set[str] = set()

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        with (self._root / path).open("rb", buffering=0) as file:
            if offset:
                file.seek(offset)
            return _read_fully(file, size)

    def open(self, path: str) -> Any:
        return pa.OSFile(os.fspath(self._root / path), "rb")

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Writable]:
        self._make_folder(path)
        with whole_file_in(self._files, path) as file:
            yield file

    def put(self, path: str, data: bytes) -> None:
        self._make_folder(path)
        replace_file(self._files, path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._make_folder(path)
        folder, _, name = path.rpartition("/")
        beside = f"{folder}/.{name}.{unique_name()}.new".lstrip("/")
        try:
            return put_file(self._files, path, data, beside=beside)
        except NotDurable as error:
            # It can't be undone: somebody may have built upon it. The next sync of the folder covers it.
            error.filename = os.fspath(self._root / path)
            raise

    def head(self, path: str) -> StoredFile | None:
        try:
            return _stored(self._root / path, path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, prefix: str, start_after: str) -> Iterator[StoredFile]:
        # Folders sort like their paths with a slash.
        try:
            with os.scandir(self._root / prefix) as entries:
                names = sorted(
                    entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name
                    for entry in entries
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            path = f"{prefix}/{name}" if prefix else name
            if name.endswith("/"):
                if path + "\U0010ffff" > start_after:
                    yield from self.list(path[:-1], start_after)
            elif path > start_after:
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                    yield _stored(self._root / path, path)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(path)

    def local_path(self, path: str) -> Path | None:
        return self._root / path

    def _make_folder(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if folder not in self._made or not (self._root / folder).is_dir():
            self._files.make_directory(folder)
            self._made.add(folder)


def _read_fully(file: io.FileIO, size: int | None) -> bytes:
    """This many bytes, or all: a single system call may return fewer."""
    if size is None:
        return file.readall()
    parts: list[bytes] = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


def _stored(place: Path, path: str) -> StoredFile:
    status = place.stat()
    return StoredFile(path, status.st_size, status.st_mtime_ns // 1_000_000)


class ObjectHome:
    """A prefix of an object store."""

    def __init__(self, uri: str, options: Mapping[str, str]) -> None:
        self._uri = uri
        self._options = options
        with self._one_line("open"):
            self._store = _object_store(uri, options)

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        import obstore

        with self._one_line("read", path):
            if size == 0:
                return b""
            if offset == 0 and size is None:
                return bytes(obstore.get(self._store, path).bytes())
            if size is None:
                return bytes(obstore.get(self._store, path, options={"range": {"offset": offset}}).bytes())
            return bytes(obstore.get_range(self._store, path, start=offset, length=size))

    def open(self, path: str) -> Any:
        head = self.head(path)
        if head is None:
            raise FileNotFoundError(f"{self._uri}/{path} is not there")
        return ObjectReader(self, path, head.size)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Writable]:
        import obstore

        with self._one_line("write", path):
            writer = obstore.open_writer(self._store, path, buffer_size=_PART_BYTES)
        upload = ObjectWriter(writer, lambda: self._one_line("write", path))
        try:
            yield upload
        except BaseException:
            # An upload that is never finished is never visible; the store drops its parts.
            upload.abandon()
            raise
        upload.finish()

    def put(self, path: str, data: bytes) -> None:
        import obstore

        with self._one_line("write", path):
            obstore.put(self._store, path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._one_line("write", path):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

    def head(self, path: str) -> StoredFile | None:
        import obstore

        try:
            with self._one_line("look at", path):
                return _listed(obstore.head(self._store, path))
        except FileNotFoundError:
            return None

    def list(self, prefix: str, start_after: str) -> Iterator[StoredFile]:
        import obstore

        with self._one_line("list", prefix):
            pages = obstore.list(self._store, prefix or None, offset=start_after or None, chunk_size=1000)
        files: list[StoredFile] = []
        with self._one_line("list", prefix):
            for page in pages:
                files.extend(_listed(entry) for entry in page)
        # Not every store lists them in order.
        yield from sorted(files, key=lambda file: file.path)

    def delete(self, paths: Sequence[str]) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), self._one_line("delete", paths[0]):
            obstore.delete(self._store, paths)
            return
        for path in paths:  # one was gone already, which is an error to some stores
            with contextlib.suppress(FileNotFoundError), self._one_line("delete", path):
                obstore.delete(self._store, path)

    def local_path(self, path: str) -> Path | None:
        return None

    @contextlib.contextmanager
    def _one_line(self, what: str, path: str = "") -> Iterator[None]:
        """Raise errors of the store as ours: one line, without the values of the options."""
        from obstore.exceptions import BaseError, NotFoundError

        place = f"{self._uri}/{path}" if path else self._uri
        try:
            yield
        except (NotFoundError, FileNotFoundError):
            raise FileNotFoundError(f"{place} is not there") from None
        except (BaseError, OSError, ValueError, TypeError) as error:
            text = without_secrets(str(error).strip().partition("\n")[0], self._options)
            raise StorageError(f"can't {what} {place}: {text or type(error).__name__}") from None


class ObjectReader(io.RawIOBase):
    """An object as a file to read: ranges on demand, at least a mebibyte at a time."""

    def __init__(self, home: ObjectHome, path: str, size: int) -> None:
        super().__init__()
        self._home = home
        self._path = path
        self._size = size
        self._at = 0
        self._start, self._held = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        if not self._start <= self._at <= self._at + wanted <= self._start + len(self._held):
            ahead = min(max(wanted, _READ_AHEAD), left)
            self._held = self._home.read(self._path, self._at, ahead)
            self._start = self._at
            if len(self._held) < wanted:
                raise StorageError(f"{self._path} is shorter than it was")
        first = self._at - self._start
        self._at += wanted
        return self._held[first : first + wanted]

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class ObjectWriter(WriteOnly):
    """An upload, part by part; its data is in the store only at the end of the block."""

    def __init__(
        self,
        writer: IO[bytes] | Any,
        one_line: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._writer = writer
        self._one_line = one_line
        self._written = 0

    def write(self, data: Buffer) -> int:
        size = memoryview(data).nbytes
        with self._one_line():
            self._writer.write(bytes(data))
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def finish(self) -> None:
        with self._one_line():
            self._writer.close()
        self.closed = True

    def abandon(self) -> None:
        self.closed = True
        self._writer = None


def _listed(entry: Mapping[str, Any]) -> StoredFile:
    return StoredFile(entry["path"], entry["size"], int(entry["last_modified"].timestamp() * 1000))


_MEMORY: dict[str, Any] = {}
"""Stores in the memory of this process, by name."""


def _object_store(uri: str, options: Mapping[str, str]) -> Any:
    from obstore.store import MemoryStore, from_url

    scheme = uri.partition("://")[0]
    if scheme == "memory":
        return _MEMORY.setdefault(uri, MemoryStore())
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    retry: dict[str, Any] = {}
    for name, value in options.items():
        plain = _PREFIX.sub("", name.lower())
        if plain in _CLIENT_OPTIONS:
            client[plain] = _flag(value)
        elif plain == _MAX_RETRIES:
            retry[plain] = _parsed(name, parse_integer, value, "a whole number")
        elif plain == _RETRY_TIMEOUT:
            retry[plain] = _parsed(name, _duration, value, "a duration such as 30s or 5m")
        else:
            config[name.lower()] = value
    for variable in ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP"):
        if variable in os.environ:
            client.setdefault("allow_http", _flag(os.environ[variable]))
    return from_url(
        uri.replace("gcs://", "gs://", 1) if scheme == "gcs" else uri,
        config=cast(Any, config or None),
        client_options=cast(Any, client or None),
        retry_config=cast(Any, retry or None),
    )


def _flag(value: str) -> Any:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
        value.lower(), value
    )


def _parsed(name: str, parse: Callable[[str], T], value: str, form: str) -> T:
    """The value of an option, which the error does not show: it may be a secret in the wrong place."""
    try:
        return parse(value)
    except (UsageError, OverflowError):
        raise UsageError(f"the storage option {name} must be {form}") from None


def _duration(value: str) -> timedelta:
    return timedelta(seconds=parse_duration_s(value))


def _normal_uri(given: str | os.PathLike[str]) -> str:
    """An absolute local path, or the address of a prefix without a slash at its end."""
    if isinstance(given, str) and given.startswith("memory://"):
        return given.rstrip("/")
    return location(given, "the table").text
