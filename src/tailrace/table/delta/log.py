"""The log of a Delta table: reading the state of a version, and adding a version.

    _delta_log/00000000000000000007.json                  the actions of version 7, one per line
    _delta_log/00000000000000000007.checkpoint.parquet    the state of version 7; also in several parts
    _delta_log/_last_checkpoint                           a hint: where the newest checkpoint is

A version is made by putting its file under a name that is free, and in no other way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from ...crashpoints import crash_point
from ..contract import StorageError, TableChanged, TableDamaged
from ..store import StoredFile, TableStore
from .actions import Action, parse_action
from .checkpoint import (
    CheckpointName,
    checkpoint_path,
    encode_checkpoint,
    parse_checkpoint,
    parse_name,
    whole_checkpoints,
)
from .state import TableState

__all__ = ["DeltaLog", "LogCommit", "LogListing", "parse_commit", "parse_listing"]

FOLDER = "_delta_log"
LAST_CHECKPOINT = f"{FOLDER}/_last_checkpoint"
_COMMIT = re.compile(rf"{FOLDER}/([0-9]{{20}})\.json")
_READERS = 16
"""How many log files are read in parallel from an object store, where each takes a while."""


def commit_path(version: int) -> str:
    return f"{FOLDER}/{version:020d}.json"


@dataclass(frozen=True, slots=True)
class LogCommit:
    """A version's file of the log."""

    version: int
    actions: Sequence[Action]
    written_ms: int = 0


@dataclass(frozen=True)
class LogListing:
    """The content of the log's folder."""

    commits: dict[int, StoredFile]
    checkpoints: dict[int, Sequence[CheckpointName]]
    """Whole ones only."""
    others: list[StoredFile]
    """Parts of checkpoints and anything else."""


class DeltaLog:
    """The log of the table in a store."""

    def __init__(self, store: TableStore) -> None:
        self.store = store

    # reading

    def listing(self, after: int = -1) -> LogListing:
        """The folder's files for versions above ``after``."""
        start = f"{FOLDER}/{after + 1:020d}" if after >= 0 else ""
        return parse_listing(self.store.list(FOLDER, start))

    def last_checkpoint(self) -> int:
        """The version of the newest checkpoint according to the hint; -1 if it does not help."""
        try:
            hint = json.loads(self.store.read(LAST_CHECKPOINT))
            return int(hint["version"])
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return -1

    def load(self, version: int | None = None, *, base: TableState | None = None) -> TableState | None:
        """The state of the newest version, or of an earlier one; None if there is no table.

        ``base`` is an earlier state to start from, if no checkpoint is nearer.
        """
        hint = self.last_checkpoint()
        listing = self.listing(hint - 1 if hint > 0 and (version is None or hint <= version) else -1)
        if hint > 0 and version is None and hint not in listing.checkpoints:
            listing = self.listing()  # the hint leads nowhere
        if not listing.commits and not listing.checkpoints:
            return None
        newest = max([*listing.commits, *listing.checkpoints])
        wanted = newest if version is None else version
        start = max((known for known in listing.checkpoints if known <= wanted), default=-1)
        if base is not None and start <= base.version <= wanted:
            state = base.copy()
        else:
            state = self.read_checkpoint(listing.checkpoints[start]) if start >= 0 else TableState()
        for commit in self.read(listing, state.version + 1, wanted):
            state.apply(commit.version, commit.actions, written_ms=commit.written_ms)
        if state.version != wanted:
            raise TableDamaged(f"version {wanted} of the table at {self.store.uri} is no longer in its log")
        if start == wanted and wanted in listing.commits:
            # a checkpoint does not say who made its version
            info = self.read_commit(wanted, listing.commits[wanted].modified_ms)
            named = TableState()
            named.apply(
                wanted, [a for a in info.actions if a.NAME == "commitInfo"], written_ms=info.written_ms
            )
            state.timestamp_ms, state.operation, state.run = named.timestamp_ms, named.operation, named.run
        return state

    def read_checkpoint(self, names: Sequence[CheckpointName]) -> TableState:
        """The state that a checkpoint holds."""
        state = TableState()
        paths = [checkpoint_path(name) for name in names]
        actions: list[Action] = []
        for path, data in zip(paths, self._read_all(paths), strict=True):
            actions += parse_checkpoint(path, data)
        state.apply(names[0][0], actions)
        state.foreign_since = None
        return state

    def read(self, listing: LogListing, first: int, last: int) -> Iterator[LogCommit]:
        """The commits of some versions, in order; TableDamaged if one of them is missing."""
        versions = range(first, last + 1)
        for version in versions:
            if version not in listing.commits:
                raise TableDamaged(
                    f"{commit_path(version)} of the table at {self.store.uri} is missing, and no checkpoint "
                    "stands in for it: restore it, or make a new table beside it"
                )
        data = self._read_all([commit_path(version) for version in versions])
        for version, text in zip(versions, data, strict=True):
            yield LogCommit(version, parse_commit(version, text), listing.commits[version].modified_ms)

    def read_commit(self, version: int, written_ms: int = 0) -> LogCommit:
        """One commit; FileNotFoundError."""
        text = self.store.read(commit_path(version))
        return LogCommit(version, parse_commit(version, text), written_ms)

    def after(self, version: int) -> Iterator[LogCommit]:
        """The commits that follow a version, up to the newest."""
        while True:
            version += 1
            try:
                yield self.read_commit(version)
            except FileNotFoundError:
                return

    def _read_all(self, paths: Sequence[str]) -> Iterator[bytes]:
        if self.store.is_local or len(paths) < 2:
            yield from map(self.store.read, paths)
            return
        with ThreadPoolExecutor(_READERS) as pool:
            ahead = iter(paths)
            while group := list(islice(ahead, 4 * _READERS)):
                yield from pool.map(self.store.read, group)

    # writing

    def commit(self, version: int, actions: Iterable[Action]) -> bool:
        """Make a version; return whether it is ours. If not, somebody else has made that version.

        A lost answer is not a failure if the file is there, byte for byte: every commit has a unique id.
        """
        lines = (json.dumps({action.NAME: action.to_json()}, separators=(",", ":")) for action in actions)
        data = "".join(f"{line}\n" for line in lines).encode()
        path = commit_path(version)
        crash_point("table.before-commit")
        try:
            ours = self.store.put_if_absent(path, data)
        except (StorageError, OSError):
            ours = False
            if not self._is_there(path, data):
                raise
        if not ours and not self._is_there(path, data):
            return False
        crash_point("table.after-commit")
        # A writer that slept while others went on finds its number free if the log was cleaned meanwhile. No
        # reader ever reads that file: a newer checkpoint comes first.
        if self.last_checkpoint() >= version:
            raise TableChanged(
                f"the table at {self.store.uri} has gone far beyond version {version} meanwhile"
            )
        return True

    def _is_there(self, path: str, data: bytes) -> bool:
        try:
            return self.store.read(path) == data
        except FileNotFoundError:
            return False

    def write_checkpoint(self, state: TableState, tombstones: Iterable[str] = ()) -> None:
        """Write a checkpoint of a state, and the hint that points to it."""
        data, count, files = encode_checkpoint(state.actions(tombstones))
        self.store.put(checkpoint_path((state.version, 1, 1)), data)
        crash_point("table.in-checkpoint")
        hint = {"version": state.version, "size": count, "sizeInBytes": len(data), "numOfAddFiles": files}
        self.store.put(LAST_CHECKPOINT, json.dumps(hint).encode())


def parse_listing(files: Iterable[StoredFile]) -> LogListing:
    """Sort files of the log's folder by what they are."""
    commits: dict[int, StoredFile] = {}
    names: list[CheckpointName] = []
    others: list[StoredFile] = []
    for file in files:
        if not file.path.startswith(FOLDER):
            continue
        match = _COMMIT.fullmatch(file.path)
        if match:
            commits[int(match.group(1))] = file
            continue
        others.append(file)
        name = parse_name(file.path)
        if name:
            names.append(name)
    return LogListing(commits, whole_checkpoints(names), others)


def parse_commit(version: int, data: bytes) -> list[Action]:
    """The actions of a commit; TableDamaged with the name of the file and the line."""
    actions: list[Action] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("it is not an object")
            action = parse_action(fields)
        except (ValueError, KeyError, TypeError) as error:
            raise TableDamaged(
                f"line {number} of {commit_path(version)} is damaged ({error!r}): restore it, "
                "or make a new table beside this one"
            ) from None
        if action is not None:
            actions.append(action)
    if not actions:
        raise TableDamaged(f"{commit_path(version)} has no actions")
    return actions
