"""Range scans: the documents of a vbucket in the order of their keys, a portion at a time.

A scan holds the keys that there were when it was made, not the documents: for each key it gives the version
that is newest when its turn comes, or nothing if the document is gone by then.

Rules: docs/spec/servers.md#range-scans.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import rng as rng_
from ..errors import MalformedMessage, UsageError
from ..model import MAX_U64, parse_u64
from ..store.base import VBucket
from ..wire.codes import Status
from ..wire.fields import decode_leb128
from .call import Refused

if TYPE_CHECKING:
    from .session import Session

__all__ = ["RangeScan", "RangeScans", "ScanRequest"]

_MAX_KEY = 250
_MAX_NAME = 50
_MAX_COLLECTION_DIGITS = 8


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """What a client wants to read."""

    collection: int
    key_only: bool
    include_xattrs: bool
    start: bytes = b""
    end: bytes | None = None
    """None: no bound."""
    excludes_start: bool = False
    excludes_end: bool = False
    samples: int | None = None
    seed: int = 0
    vb_uuid: int | None = None
    """The branch that must be here; the fields below count only with it."""
    seqno: int = 0
    needs_seqno: bool = False
    """Whether a document with exactly this seqno must be there."""
    timeout_ms: int = 0

    @classmethod
    def parse(cls, text: bytes) -> ScanRequest:
        """From the JSON of a request; unknown members are ignored."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise MalformedMessage("the description of a range scan must be JSON") from None
        if not isinstance(content, dict):
            raise MalformedMessage("the description of a range scan must be a JSON object")
        if ("range" in content) == ("sampling" in content):
            raise MalformedMessage("a range scan must have either a range or a sampling")
        if len(str(content.get("name", "")).encode("utf-8", "replace")) > _MAX_NAME:
            raise MalformedMessage(f"the name of a scan has up to {_MAX_NAME} bytes")
        fields: dict[str, Any] = {
            "collection": _collection(content.get("collection", "0")),
            "key_only": _flag(content, "key_only"),
            "include_xattrs": _flag(content, "include_xattrs"),
        }
        if fields["key_only"] and fields["include_xattrs"]:
            raise MalformedMessage("keys have no xattrs")
        if "range" in content:
            bounds = _object(content["range"], "range")
            fields["start"], fields["excludes_start"] = _bound(bounds, "start")
            fields["end"], fields["excludes_end"] = _bound(bounds, "end")
        else:
            sampling = _object(content["sampling"], "sampling")
            fields["samples"] = _number(sampling, "samples")
            fields["seed"] = _number(sampling, "seed", 0)
            if not fields["samples"]:
                raise MalformedMessage("a sample has at least one document")
        if "snapshot_requirements" in content:
            wanted = _object(content["snapshot_requirements"], "snapshot_requirements")
            try:
                fields["vb_uuid"] = parse_u64(wanted.get("vb_uuid"), "vb_uuid")
            except UsageError as error:
                raise MalformedMessage(str(error)) from None
            fields["seqno"] = _number(wanted, "seqno")
            fields["needs_seqno"] = _flag(wanted, "seqno_exists")
            fields["timeout_ms"] = _number(wanted, "timeout_ms", 0)
        return cls(**fields)

    def covers(self, key: bytes) -> bool:
        """Whether a key, without its collection, lies in the range."""
        if key < self.start or (self.excludes_start and key == self.start):
            return False
        return self.end is None or key < self.end or (key == self.end and not self.excludes_end)


@dataclass(slots=True)
class RangeScan:
    """A scan that is not finished."""

    vbucket: int
    request: ScanRequest
    session: Session
    """The connection that asked last: the scan ends with it."""
    ends_at: float
    keys: list[bytes] = field(repr=False)
    """As the store has them, the next one last."""


class RangeScans:
    """The unfinished range scans of a bucket."""

    def __init__(self, most: int, lifetime_s: float) -> None:
        self._scans: dict[bytes, RangeScan] = {}
        self._most = most
        self._lifetime_s = lifetime_s

    def __len__(self) -> int:
        return len(self._scans)

    def make_room(self, now: float) -> None:
        """Forget scans that are too old; 0x85 if there are still too many."""
        for scan_id in [scan_id for scan_id, scan in self._scans.items() if scan.ends_at <= now]:
            del self._scans[scan_id]
        if len(self._scans) >= self._most:
            raise Refused(Status.EBUSY, f"there are {self._most} range scans already")

    def make(self, vbucket: VBucket, request: ScanRequest, session: Session, now: float) -> bytes:
        """Make a scan; returns its id."""
        keys = _chosen(vbucket.live_keys(request.collection), request)
        scan_id = session.node.rng.randbytes(16)
        self._scans[scan_id] = RangeScan(vbucket.id, request, session, now + self._lifetime_s, keys)
        return scan_id

    def find(self, scan_id: bytes, vbucket: int, now: float) -> RangeScan:
        """A scan of this vbucket; 0x01 if there is none."""
        scan = self._scans.get(scan_id)
        if scan is None or scan.vbucket != vbucket:
            raise Refused(Status.KEY_ENOENT, "there is no such range scan")
        if scan.ends_at <= now:
            del self._scans[scan_id]
            raise Refused(Status.RANGE_SCAN_CANCELLED, "the range scan took too long")
        return scan

    def end(self, scan_id: bytes) -> None:
        """Forget a scan that is finished, or whose rest nobody wants."""
        self._scans.pop(scan_id, None)

    def forget(self, session: Session) -> None:
        """Forget the scans of a connection that is gone."""
        self._scans = {scan_id: scan for scan_id, scan in self._scans.items() if scan.session is not session}

    def vbucket_changed(self, vbucket: int) -> None:
        """Forget the scans of a vbucket that moved or changed its branch: the rest may not fit the start."""
        self._scans = {scan_id: scan for scan_id, scan in self._scans.items() if scan.vbucket != vbucket}


def _chosen(keys: Iterable[tuple[bytes, int]], request: ScanRequest) -> list[bytes]:
    """The keys of a scan, the last one first."""
    there = list(keys)
    if request.needs_seqno and all(seqno != request.seqno for _, seqno in there):
        raise Refused(Status.NOT_STORED, f"no document has seqno {request.seqno}")
    chosen = sorted(key for key, _ in there if request.covers(key[decode_leb128(key)[1] :]))
    if request.samples is not None:
        if request.samples > len(chosen):
            raise Refused(Status.ERANGE, f"the collection has {len(chosen)} documents here")
        chosen = sorted(rng_.source(request.seed).sample(chosen, request.samples))
    if not chosen:
        raise Refused(Status.KEY_ENOENT, "there is no document in the range")
    chosen.reverse()
    return chosen


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedMessage(f"{name} must be a JSON object")
    return value


def _flag(content: dict[str, Any], name: str) -> bool:
    value = content.get(name, False)
    if not isinstance(value, bool):
        raise MalformedMessage(f"{name} must be true or false")
    return value


def _number(content: dict[str, Any], name: str, default: int | None = None) -> int:
    value = content.get(name, default)
    if type(value) is not int or not 0 <= value <= MAX_U64:
        raise MalformedMessage(f"{name} must be a number")
    return value


def _collection(text: object) -> int:
    if not isinstance(text, str) or not 0 < len(text.removeprefix("0x")) <= _MAX_COLLECTION_DIGITS:
        raise MalformedMessage("a collection must be written in hex")
    try:
        return int.from_bytes(bytes.fromhex(text.removeprefix("0x").zfill(_MAX_COLLECTION_DIGITS)), "big")
    except ValueError:
        raise MalformedMessage("a collection must be written in hex") from None


def _bound(bounds: dict[str, Any], name: str) -> tuple[bytes, bool]:
    names = [given for given in (name, f"excl_{name}") if given in bounds]
    if len(names) != 1:
        raise MalformedMessage(f"a range must have one of {name} and excl_{name}")
    try:
        key = base64.b64decode(bounds[names[0]], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise MalformedMessage(f"{names[0]} must be a key in base64") from None
    if len(key) > _MAX_KEY:
        raise MalformedMessage(f"a key has up to {_MAX_KEY} bytes")
    return key, names[0] != name
