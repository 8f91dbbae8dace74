"""The embedded store: one data directory (or memory) with buckets, for one process at a time."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Mapping
from itertools import count
from types import TracebackType

from ..clock import SYSTEM, Clock
from ..errors import StoreCorrupt, StoreError, UsageError, reason_of
from ..files import DiskFiles, Files, MemoryFiles
from ..rng import source
from .accepted_losses import LOST, LossPolicy, lost
from .base import StoreSettings
from .bucket import EngineBucket
from .format import FORMAT_VERSION, check_version
from .manifest_file import MANIFEST, read_json, write_json

__all__ = ["Engine", "check_bucket_name"]

MAGIC = b"tailrace store, format "
FORMAT = "FORMAT"
LOCK = "LOCK"
BUCKETS = "BUCKETS"
PREFIX = "bucket."
MAKING = "MAKING"
DELETED = "DELETED"
_FIRST_WITH_LISTS = 3  # the format since which the files BUCKETS and SYNCED must be there
_NAME = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,99}", re.ASCII)


def check_bucket_name(name: str) -> None:
    """`UsageError` if no bucket can have this name, which is also part of its directory's name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:120]!r} is not a bucket name: write up to 100 letters, digits, '_', '-', '%' and '.', "
            "no '.' at the start"
        )


class Engine:
    """Opens a data directory, or memory if none is given, and locks it until it is closed.

    With ``accept_loss`` it continues without files that are missing or damaged, see `accepted_losses`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        files: Files | None = None,
        settings: StoreSettings | None = None,
        clock: Clock = SYSTEM,
        rng: random.Random | None = None,
        accept_loss: bool = False,
    ) -> None:
        if files is None:
            files = MemoryFiles() if directory is None else DiskFiles(directory)
        self.files = files
        self.settings = settings or StoreSettings()
        self._clock = clock
        self._rng = rng or source()
        self._policy = LossPolicy(accept=accept_loss)
        self._buckets: dict[str, EngineBucket] = {}
        try:
            files.make_directory("")
            version = self._check_format()  # before the lock, which leaves a file
            files.lock(LOCK)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            if not version:  # a new store; the list comes first: where FORMAT is, it must be too
                self._list_buckets()
                self._write_format()
            self._open_buckets(version or FORMAT_VERSION)
            is_older = version < FORMAT_VERSION and all(
                bucket.journal.synced.is_written for bucket in self._buckets.values()
            )
            if (version and is_older) or self._policy.losses:
                # Older formats are read; what is written from now on has the new one.
                self._write_format()
        except OSError as error:
            files.unlock()
            raise self._unusable(error) from error
        except BaseException:
            files.unlock()
            raise

    @property
    def buckets(self) -> Mapping[str, EngineBucket]:
        return self._buckets

    def _unusable(self, error: OSError) -> StoreError:
        where = "" if error.filename is None else f" ({os.fsdecode(error.filename)!r})"
        return StoreError(f"the data directory can't be used: {reason_of(error)}{where}, choose another one")

    def _check_format(self) -> int:
        """The format of the store, 0 if there is none yet. A newer one is refused before anything in it is
        touched.
        """
        names = self.files.names("")
        if FORMAT not in names:
            if any(name.startswith(PREFIX) for name in names) or (
                BUCKETS in names and self._listed_buckets(0) != set()
            ):
                self._policy.report(lost(f"{FORMAT} is missing from the data directory"))
                return FORMAT_VERSION
            ours = (LOCK, FORMAT + ".new", BUCKETS, BUCKETS + ".new")
            if foreign := [name for name in names if name not in ours]:
                raise StoreError(
                    f"the data directory is not empty and not a store: it has {foreign[0]!r}, "
                    "choose another one"
                )
            return 0
        file = self.files.open(FORMAT)
        data = file.read(file.size, 0)
        file.close()
        if len(data) != len(MAGIC) + 2 or not data.startswith(MAGIC):
            self._policy.report(lost(f"{FORMAT} in the data directory is damaged"))
            return FORMAT_VERSION
        version: int = data[len(MAGIC)]
        check_version("the data directory", version)
        return version

    def _write_format(self) -> None:
        self.files.replace(FORMAT, MAGIC + bytes([FORMAT_VERSION]) + b"\n")

    def _list_buckets(self, *, without: str = "") -> None:
        """Record which buckets there are: without the list nobody would miss one whose directory is gone."""
        write_json(self.files, BUCKETS, sorted(name for name in self._buckets if name != without))

    def _listed_buckets(self, version: int) -> set[str] | None:
        """The buckets that must be there; None if that is not known."""
        try:
            return set(read_json(self.files, BUCKETS))
        except FileNotFoundError:
            if version >= _FIRST_WITH_LISTS:
                self._policy.report(lost(f"{BUCKETS} is missing from the data directory"))
        except StoreCorrupt as error:
            self._policy.report(error)
        return None

    def _open_buckets(self, version: int) -> None:
        listed = self._listed_buckets(version)
        there = [name for name in self.files.names("") if name.startswith(PREFIX)]
        for name in sorted(listed or ()):
            if PREFIX + name not in there:
                self._policy.report(lost(f"{PREFIX}{name} is missing from the data directory"))
        for directory in there:
            name = directory.removeprefix(PREFIX)
            is_listed = listed is not None and name in listed
            try:
                self._open(name, directory, is_listed=is_listed, has_marks=version >= _FIRST_WITH_LISTS)
            except StoreCorrupt as error:
                self._policy.report(error)
                self._set_aside(directory)
        if listed is None or listed != set(self._buckets):
            self._list_buckets()

    def _open(self, name: str, directory: str, *, is_listed: bool, has_marks: bool) -> None:
        names = self.files.names(directory)
        if MANIFEST not in names:
            is_unfinished = not is_listed and (not names or MAKING in names)
            if not is_unfinished and DELETED not in names:
                raise lost(f"{directory}/{MANIFEST} is missing")
            self._remove(directory)  # its creation or deletion was interrupted
            return
        if MAKING in names:
            self.files.unlink(f"{directory}/{MAKING}")
        self._buckets[name] = EngineBucket.open(
            name,
            directory,
            self.files,
            self.settings,
            self._clock,
            self._rng,
            accept_loss=self._policy.accept,
            has_marks=has_marks,
        )

    def _set_aside(self, directory: str) -> None:
        """Keep the remains of a bucket that can't be opened, under another name."""
        names = set(self.files.names(""))
        aside = next(name for number in count() if (name := f"{LOST}{number or ''}{directory}") not in names)
        self.files.make_directory(aside)
        for name in self.files.names(directory):
            self.files.rename(f"{directory}/{name}", f"{aside}/{name}")
        self.files.sync_directory(aside)
        self.files.remove_directory(directory)
        self.files.sync_directory("")

    def create_bucket(
        self,
        name: str,
        vbucket_count: int = 1024,
        *,
        active: bool = True,
        settings: StoreSettings | None = None,
    ) -> EngineBucket:
        """A new bucket, durable when it returns; with `active` all its vbuckets are active here."""
        check_bucket_name(name)
        if name in self._buckets:
            raise UsageError(f"bucket {name!r} already exists, choose another name")
        if not 1 <= vbucket_count <= 1024 or vbucket_count & (vbucket_count - 1):
            raise UsageError(f"{vbucket_count} vbuckets: it must be a power of two from 1 to 1024")
        directory = PREFIX + name
        try:
            self.files.make_directory(directory)
            self.files.sync_directory("")
            self.files.create(f"{directory}/{MAKING}").close()
            self.files.sync_directory(directory)
            bucket = EngineBucket.create(
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
            self._buckets[name] = bucket
            self._list_buckets()
        except (OSError, StoreError) as error:
            self._buckets.pop(name, None)
            with contextlib.suppress(OSError):
                self._remove(directory)
            raise StoreError(f"bucket {name!r} could not be created: {error}") from error
        return self._buckets[name]

    def _remove(self, directory: str) -> None:
        """Remove a bucket's directory. A mark stays until the rest is gone: if this is interrupted, the rest
        would look like damage without it.
        """
        if MANIFEST in self.files.names(directory):
            self.files.rename(f"{directory}/{MANIFEST}", f"{directory}/{DELETED}")
            self.files.sync_directory(directory)
            self._list_buckets(without=directory.removeprefix(PREFIX))
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
        """A clean stop: everything flushed, the marker written. Jobs under way must be finished first."""
        try:
            for bucket in self._buckets.values():
                bucket.close()
        finally:
            self._buckets = {}
            self.files.unlock()

    def crash(self) -> None:
        """Release everything without writing a byte, as a kill does; for tests."""
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
