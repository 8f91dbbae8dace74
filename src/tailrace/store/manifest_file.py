"""The MANIFEST of a bucket: which of its files count, and its state at the end of the last sealed log.

It is replaced as a whole, and from that moment a new segment counts and the files that it replaces don't.
Jobs on several threads change it: each change builds on what the file says then, never on what it said when
the job began, so that a segment can be sealed while others are merged.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from ..errors import NotDurable
from ..files import Files
from .accepted_losses import lost
from .segment import Segment

__all__ = [
    "MANIFEST",
    "Base",
    "Clips",
    "ManifestFile",
    "SegmentTable",
    "clips_of",
    "read_json",
    "spliced",
    "with_clips",
    "write_json",
]

MANIFEST = "MANIFEST"

T = TypeVar("T")
Base: TypeAlias = "dict[str, Any]"
Clips: TypeAlias = "dict[int, int]"
SegmentTable: TypeAlias = "list[tuple[str, Clips]]"
"""The segments, oldest first: the name of each, and the seqno up to which it still counts for each vbucket
that was rolled back.
"""


def read_json(files: Files, path: str) -> Any:
    """What `write_json` wrote; StoreCorrupt if it is not that."""
    file = files.open(path)
    data = file.read(file.size, 0)
    file.close()
    crc, _, text = data.rstrip(b"\n").partition(b" ")
    if b"%08x" % zlib.crc32(text) != crc:
        raise lost(f"{path} is damaged")
    return json.loads(text)


def write_json(files: Files, path: str, content: Any) -> None:
    """Replace a file with JSON, its checksum in front."""
    text = json.dumps(content, separators=(",", ":")).encode()
    files.replace(path, b"%08x %s\n" % (zlib.crc32(text), text))


class ManifestFile:
    """The file, what it says, and the files that it no longer needs."""

    def __init__(self, files: Files, directory: str) -> None:
        self.base: Base = {}
        """The state at the end of the newest log that is sealed."""
        self.is_durable = True
        self.removes_later = False
        """Files are removed only by the jobs of `begin_removal`."""
        self._files = files
        self._directory = directory
        self._path = f"{directory}/{MANIFEST}"
        self._table: SegmentTable = []
        self._retired: dict[str, None] = {}  # a set that keeps its order
        self._lock = threading.Lock()

    def read(self) -> SegmentTable:
        """Take over what the file says; its segments."""
        self.base = read_json(self._files, self._path)
        self.base["vbuckets"] = _by_number(self.base["vbuckets"])
        self._table = [(entry["file"], _by_number(entry["clips"])) for entry in self.base.pop("segments")]
        return self._table

    def change(
        self,
        edit: Callable[[Base, SegmentTable], tuple[Base, SegmentTable]],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Replace the file by what ``edit`` makes of what it says now; an OSError leaves it as it is.

        ``then`` is called when the change counts, before anyone can make the next one.
        """
        with self._lock:
            base, table = edit(self.base, self._table)
            content = {**base, "segments": [{"file": name, "clips": clips} for name, clips in table]}
            try:
                write_json(self._files, self._path, content)
                self.is_durable = True
            except NotDurable:
                # The new file counts from now on, but the old one may come back: what it names must stay.
                self.is_durable = False
            self.base, self._table = base, table
            if then is not None:
                then()

    def retire(self, paths: Iterable[str]) -> None:
        """Nothing needs these files once the newest manifest is durable. Those that can't be removed then are
        removed when the bucket is next opened.
        """
        self._retired |= dict.fromkeys(paths)
        if not self.removes_later and (removal := self.begin_removal()) is not None:
            removal.run()

    def begin_removal(
        self, leaving: list[Any] | None = None, freed: Callable[[], None] | None = None
    ) -> RemovalJob | None:
        """A job that removes the files that nothing needs any more, frees what is leaving memory, and then
        calls ``freed``; None if there is neither.
        """
        paths: list[str] = []
        if self.is_durable:
            paths, self._retired = list(self._retired), {}
        return RemovalJob(self._files, paths, leaving or [], freed) if paths or leaving else None


class RemovalJob:
    """Frees memory and removes files, which takes milliseconds when there is a lot."""

    def __init__(
        self, files: Files, paths: list[str], leaving: list[Any], freed: Callable[[], None] | None
    ) -> None:
        self._files = files
        self._paths = paths
        self._leaving = leaving
        self._freed = freed

    def run(self) -> None:
        while self._leaving:  # one by one, so that other threads may go on in between
            self._leaving.pop()
        for path in self._paths:
            with contextlib.suppress(OSError):
                self._files.unlink(path)

    def finish(self) -> None:
        """On the owner's thread."""
        if self._freed is not None:
            self._freed()


def _by_number(members: dict[str, T]) -> dict[int, T]:
    """With numbers as keys; in JSON they are strings."""
    return {int(number): value for number, value in members.items()}


def clips_of(segments: Iterable[Segment]) -> dict[str, Clips]:
    """How far rollbacks have clipped segments, by their names."""
    return {segment.name: dict(segment.clips) for segment in segments}


def with_clips(table: SegmentTable, clips: dict[str, Clips]) -> SegmentTable:
    """A table with clips that may be newer; what was clipped once never comes back."""
    return [
        (name, {**old, **{vb: min(seqno, old.get(vb, seqno)) for vb, seqno in clips.get(name, {}).items()}})
        for name, old in table
    ]


def spliced(items: Sequence[T], known: Sequence[T], new: T | None, *, drop: bool) -> list[T]:
    """A list with ``new`` right behind the last of the ``known`` items, which ``drop`` leaves out."""
    place = max((items.index(item) for item in known), default=len(items) - 1) + 1
    head, tail = items[:place], items[place:]
    if drop:
        head = [item for item in head if item not in known]
    return [*head, *([] if new is None else [new]), *tail]
