"""Where positions are kept between two runs: in a file, in memory, or in the application's own store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .. import paths
from ..errors import StoreError, UsageError, reason_of
from ..model import parse_u64
from .progress import SavedPosition

__all__ = ["FileState", "MemoryState", "StateStore", "parse_state"]

_VERSION = 1
_MAX_BYTES = 256 << 20


class StateStore(Protocol):
    """Keeps the position of every vbucket.

    If it has an attribute ``bucket_uuid``, that is set before anything is loaded, so that the store can
    refuse what was saved for an earlier bucket of the same name.
    """

    def load(self) -> dict[int, SavedPosition]:
        """What was saved last; empty if nothing was."""
        ...

    def save(self, positions: Mapping[int, SavedPosition]) -> None:
        """Replace what is kept, all or nothing; durable when it returns. Raises if that fails."""
        ...


class MemoryState:
    """Keeps positions while the process lives."""

    def __init__(self) -> None:
        self.positions: dict[int, SavedPosition] = {}

    def load(self) -> dict[int, SavedPosition]:
        """What was saved last."""
        return dict(self.positions)

    def save(self, positions: Mapping[int, SavedPosition]) -> None:
        """Keep these."""
        self.positions = dict(positions)


class FileState:
    """Keeps positions in a readable JSON file, replaced atomically and synced."""

    def __init__(self, path: str | Path, *, bucket: str | None = None) -> None:
        self.path = paths.file(path, "the state file")
        self.bucket = bucket
        """The file of another bucket is refused."""
        self.bucket_uuid = ""
        """So is that of an earlier bucket of this name; empty until a server has given one."""
        self._texts: dict[int, tuple[SavedPosition, str]] = {}

    def load(self) -> dict[int, SavedPosition]:
        """What the file holds; empty if there is none, `UsageError` if it is not this bucket's state file."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreError(
                f"the state file {str(self.path)!r} can't be read: {reason_of(error)}"
            ) from error
        try:
            bucket, uuid, positions = parse_state(text)
        except UsageError as error:
            raise UsageError(
                f"{str(self.path)!r} is not a state file ({error}); move it away to start over"
            ) from None
        if bucket is not None and self.bucket is not None and bucket != self.bucket:
            raise UsageError(
                f"the state file {str(self.path)!r} belongs to bucket {bucket!r}, not {self.bucket!r}"
            )
        if uuid and self.bucket_uuid and uuid != self.bucket_uuid:
            raise UsageError(
                f"the state file {str(self.path)!r} is of a bucket {bucket!r} that was deleted and created "
                f"again (its uuid was {uuid} and is {self.bucket_uuid}), and its positions mean nothing in "
                "the new one; move it away to start over"
            )
        return positions

    def save(self, positions: Mapping[int, SavedPosition]) -> None:
        """Replace the file; it is durable when this returns."""
        from ..files import atomic_write

        lines = ",\n".join(
            f'  "{vbucket}":{self._text(vbucket, positions[vbucket])}' for vbucket in sorted(positions)
        )
        name, uuid = json.dumps(self.bucket), json.dumps(self.bucket_uuid)
        head = f'"tailrace_state":{_VERSION},"bucket":{name},"bucket_uuid":{uuid}'
        text = f'{{{head},"vbuckets":{{\n{lines}\n}}}}\n'
        try:
            atomic_write(self.path, text.encode())
        except OSError as error:
            raise StoreError(
                f"the state file {str(self.path)!r} can't be written: {reason_of(error)}"
            ) from error

    def _text(self, vbucket: int, position: SavedPosition) -> str:
        """The JSON of a position, cached: most positions have not changed since the last save."""
        cached = self._texts.get(vbucket)
        if cached is None or cached[0] is not position:
            cached = position, json.dumps(position.to_json(), separators=(",", ":"))
            self._texts[vbucket] = cached
        return cached[1]


def parse_state(text: str | bytes) -> tuple[str | None, str, dict[int, SavedPosition]]:
    """Bucket, its uuid if known, and positions: from a state file, or bare ones as Spark keeps them."""
    if len(text) > _MAX_BYTES:
        raise UsageError(f"it has more than {_MAX_BYTES} bytes")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("it is not JSON") from None
    if not isinstance(value, dict):
        raise UsageError("it is not a JSON object")
    bucket: Any = None
    uuid: Any = ""
    if "tailrace_state" in value:
        if value["tailrace_state"] != _VERSION:
            raise UsageError(f"it has version {value['tailrace_state']!r}, written by another Tailrace")
        bucket, uuid, value = value.get("bucket"), value.get("bucket_uuid", ""), value.get("vbuckets")
        has_names = isinstance(uuid, str) and (bucket is None or isinstance(bucket, str))
        if not isinstance(value, dict) or not has_names:
            raise UsageError("its bucket or vbuckets are missing")
    positions = {}
    for name, member in value.items():
        vbucket = parse_u64(name, "a vbucket")
        try:
            positions[vbucket] = SavedPosition.from_json(member)
        except UsageError as error:
            raise UsageError(f"vbucket {vbucket}: {error}") from None
    return bucket, uuid, positions
