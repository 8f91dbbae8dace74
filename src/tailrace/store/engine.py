"""The embedded store: one data directory (or memory) with buckets, for one process at a time."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Mapping
from types import TracebackType

from ..clock import SYSTEM, Clock
from ..errors import StoreCorrupt, StoreError, StoreTooNew, UsageError
from ..files import DiskFiles, Files, MemoryFiles
from ..rng import source
from .base import StoreSettings
from .bucket import Bucket
from .format import FORMAT_VERSION
from .manifest_file import MANIFEST

__all__ = ["Engine", "check_bucket_name"]

MAGIC = b"tailrace store, format "
FORMAT = "FORMAT"
LOCK = "LOCK"
PREFIX = "bucket."
MAKING = "MAKING"
DELETED = "DELETED"
_NAME = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,99}", re.ASCII)


def check_bucket_name(name: str) -> None:
    """`UsageError` if no bucket can have this name, which is also a part of its directory's."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:120]!r} is no bucket name: write up to 100 letters, digits, '_', '-', '%' and '.', "
            "no '.' at the start"
        )


class Engine:
    """Opens a data directory, or memory if none is given. See `base.Engine` for the contract."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        files: Files | None = None,
        settings: StoreSettings | None = None,
        clock: Clock = SYSTEM,
        rng: random.Random | None = None,
    ) -> None:
        if files is None:
            files = MemoryFiles() if directory is None else DiskFiles(directory)
        self.files = files
        self.settings = settings or StoreSettings()
        self._clock = clock
        self._rng = rng or source()
        self._buckets: dict[str, Bucket] = {}
        try:
            files.make_directory("")
            version = self._check_format()  # before the lock, which leaves a file
            files.lock(LOCK)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            if version < FORMAT_VERSION:  # what is older is read, and what is written from now on is new
                files.replace(FORMAT, MAGIC + bytes([FORMAT_VERSION]) + b"\n")
            for name in files.names(""):
                if name.startswith(PREFIX):
                    self._open(name)
        except OSError as error:
            files.unlock()
            raise self._unusable(error) from error
        except BaseException:
            files.unlock()
            raise

    @property
    def buckets(self) -> Mapping[str, Bucket]:
        return self._buckets

    def _unusable(self, error: OSError) -> StoreError:
        where = "" if error.filename is None else f" ({os.fsdecode(error.filename)!r})"
        return StoreError(
            f"the data directory can't be used: {error.strerror or error}{where}, choose another one"
        )

    def _check_format(self) -> int:
        """The format of what is there, 0 if this is no store yet. A newer one is refused before anything in
        it is touched.
        """
        names = self.files.names("")
        if FORMAT not in names:
            if any(name.startswith(PREFIX) for name in names):
                raise StoreCorrupt(f"{FORMAT} is missing from the data directory: restore it from a copy")
            if foreign := [name for name in names if name not in (LOCK, FORMAT + ".new")]:
                raise StoreError(
                    f"the data directory is not empty and no store: it has {foreign[0]!r}, choose another one"
                )
            return 0
        file = self.files.open(FORMAT)
        data = file.read(file.size, 0)
        file.close()
        if len(data) != len(MAGIC) + 2 or not data.startswith(MAGIC):
            raise StoreCorrupt(f"{FORMAT} in the data directory is damaged: restore it from a copy")
        version: int = data[len(MAGIC)]
        if version > FORMAT_VERSION:
            raise StoreTooNew(
                f"the data directory has format {version}, this Tailrace reads up to {FORMAT_VERSION}: "
                "use a newer Tailrace"
            )
        return version

    def _open(self, directory: str) -> None:
        name = directory.removeprefix(PREFIX)
        names = self.files.names(directory)
        if MANIFEST not in names:
            if names and not {MAKING, DELETED} & set(names):
                raise StoreCorrupt(f"{directory}/{MANIFEST} is missing: restore it from a copy")
            self._remove(directory)  # its creation or deletion was broken off
            return
        if MAKING in names:
            self.files.unlink(f"{directory}/{MAKING}")
        self._buckets[name] = Bucket.open(name, directory, self.files, self.settings, self._clock, self._rng)

    def create_bucket(
        self,
        name: str,
        vbucket_count: int = 1024,
        *,
        active: bool = True,
        settings: StoreSettings | None = None,
    ) -> Bucket:
        check_bucket_name(name)
        if name in self._buckets:
            raise UsageError(f"bucket {name!r} exists already, choose another name")
        if not 1 <= vbucket_count <= 1024 or vbucket_count & (vbucket_count - 1):
            raise UsageError(f"{vbucket_count} vbuckets: it must be a power of two from 1 to 1024")
        directory = PREFIX + name
        try:
            self.files.make_directory(directory)
            self.files.sync_directory("")
            self.files.create(f"{directory}/{MAKING}").close()
            self.files.sync_directory(directory)
            self._buckets[name] = Bucket.create(
                name,
                directory,
                self.files,
                settings or self.settings,
                self._clock,
                self._rng,
                vbucket_count=vbucket_count,
                active=active,
            )
            self.files.unlink(f"{directory}/{MAKING}")
        except (OSError, StoreError) as error:
            with contextlib.suppress(OSError):
                self._remove(directory)
            raise StoreError(f"bucket {name!r} could not be created: {error}") from error
        return self._buckets[name]

    def delete_bucket(self, name: str) -> None:
        bucket = self._buckets.pop(name)
        bucket.abandon()
        try:
            self._remove(bucket.directory)
        except OSError as error:
            raise StoreError(f"bucket {name!r} could not be removed: {error.strerror or error}") from error

    def _remove(self, directory: str) -> None:
        """Whatever breaks this off, a mark stays until the rest is gone: without one it would be damage."""
        if MANIFEST in self.files.names(directory):
            self.files.rename(f"{directory}/{MANIFEST}", f"{directory}/{DELETED}")
            self.files.sync_directory(directory)
        marks = (MAKING, DELETED)
        for name in self.files.names(directory):
            if name not in marks:
                self.files.unlink(f"{directory}/{name}")
        self.files.sync_directory(directory)
        for name in self.files.names(directory):
            self.files.unlink(f"{directory}/{name}")
        self.files.remove_directory(directory)
        self.files.sync_directory("")

    def close(self) -> None:
        try:
            for bucket in self._buckets.values():
                bucket.close()
        finally:
            self._buckets = {}
            self.files.unlock()

    def crash(self) -> None:
        """Let go of everything without writing a byte, as a kill does; for tests."""
        for bucket in self._buckets.values():
            bucket.abandon()
        self._buckets = {}
        self.files.unlock()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
