"""What a bucket stores beside its changes: its collections, the cursors of named readers, and which metadata
of the bucket and its vbuckets the next batch of the log has to carry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .collections import Manifest

if TYPE_CHECKING:
    from .vbucket_history import History

__all__ = ["BucketMetadata"]


class BucketMetadata:
    """Collections and cursors as they are now, and the metadata that is not on disk yet."""

    def __init__(self) -> None:
        self.uuid = ""
        """Tells the bucket from others of its name. Empty in stores made before there were uuids."""
        self.collections = Manifest()
        self.cursors: dict[str, Mapping[str, Any]] = {}
        self._manifest_json: dict[str, Any] | None = None
        self._histories = self.collections, self.collections.histories
        self._changes: dict[str, Any] = {}  # of the bucket, for the next batch
        self._vbuckets: dict[History, None] = {}  # whose metadata the next batch carries, in order

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The collections as their JSON object."""
        if self._manifest_json is None:
            self._manifest_json = self.collections.to_json()
        return self._manifest_json

    @property
    def histories(self) -> dict[int, bool]:
        """See `Manifest.histories`; cached, because every snapshot needs it."""
        if self._histories[0] is not self.collections:
            self._histories = self.collections, self.collections.histories
        return self._histories[1]

    def set_uuid(self, uuid: str) -> None:
        """Note that the bucket is, or has become part of, the one with this uuid."""
        if uuid != self.uuid:
            self.uuid = self._changes["uuid"] = uuid

    def set_collections(self, new: Manifest) -> None:
        """Take over a manifest that follows the current one."""
        self.collections, self._manifest_json = new, None
        self._changes["manifest"] = new.to_json()

    def set_cursor(self, name: str, positions: Mapping[str, Any] | None) -> None:
        """Remember a reader's positions, or forget them (None)."""
        self._keep_cursor(name, positions)
        self._changes.setdefault("cursor_changes", {})[name] = positions

    def _keep_cursor(self, name: str, positions: Mapping[str, Any] | None) -> None:
        if positions is None:
            self.cursors.pop(name, None)
        else:
            self.cursors[name] = positions

    # What is not on disk yet.

    @property
    def is_queued(self) -> bool:
        """Whether the next batch has something to carry."""
        return bool(self._vbuckets or self._changes)

    def queue(self, vbucket: History) -> None:
        """Have the next batch carry a vbucket's metadata, which has changed."""
        self._vbuckets[vbucket] = None

    def forget(self, vbucket: History) -> None:
        """Forget a vbucket that is gone."""
        self._vbuckets.pop(vbucket, None)

    def take(self) -> dict[str, Any]:
        """The metadata of the bucket itself that a batch has to carry."""
        changes, self._changes = self._changes, {}
        return changes

    def take_vbuckets(self) -> list[History]:
        """The vbuckets whose metadata a batch has to carry."""
        vbuckets, self._vbuckets = self._vbuckets, {}
        return list(vbuckets)

    def give_back(self, meta: Mapping[str, Any], vbuckets: list[History]) -> None:
        """A batch could not be written: the next one carries what it did, unless there is something newer."""
        for vbucket in vbuckets:
            self.queue(vbucket)
        for name in ("uuid", "manifest"):
            if name in meta:
                self._changes.setdefault(name, meta[name])
        if "cursor_changes" in meta:
            self._changes["cursor_changes"] = meta["cursor_changes"] | self._changes.get("cursor_changes", {})

    # On disk.

    def to_json(self) -> dict[str, Any]:
        """All of it, for the manifest file."""
        return {"uuid": self.uuid, "manifest": self.collections.to_json(), "cursors": dict(self.cursors)}

    def take_json(self, meta: Mapping[str, Any]) -> None:
        """Take over what a manifest file or a batch says about the bucket as a whole."""
        if "uuid" in meta:
            self.uuid = str(meta["uuid"])
        if "manifest" in meta:
            self.collections = Manifest.parse(json.dumps(meta["manifest"]).encode())
            self._manifest_json = None
        if "cursors" in meta:
            self.cursors = dict(meta["cursors"])
        for name, positions in meta.get("cursor_changes", {}).items():
            self._keep_cursor(name, positions)
