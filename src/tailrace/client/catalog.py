"""Names of scopes and collections, and the filter that a stream request takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..columns.batch import Names
from ..errors import RemoteProtocolError, UsageError
from ..protocol.script import Script
from ..wire.admin import GetCollectionsManifest
from ..wire.codes import Status
from .internal_documents import InternalDocuments
from .nodes import KnownNode

__all__ = ["Catalog", "full_path"]

if TYPE_CHECKING:
    from ..protocol.dcp.reader import DcpReader

T = TypeVar("T")

_MOST_NAMES = 100_000
"""Collections come and go in a bucket's life; servers have ten thousand at a time at most."""


class Catalog:
    """What is known of the bucket's collections: from the manifest, then from the stream itself."""

    def __init__(
        self,
        bucket: str,
        *,
        scope: str = "",
        collections: Sequence[str] = (),
        include_system: bool = False,
        include_transactions: bool = False,
    ) -> None:
        if scope and collections:
            raise UsageError("a reading is limited to a scope or to collections, not both")
        self.left_out = InternalDocuments(
            # a filter at the node lets nothing else through, so all that comes was asked for
            system=not (include_system or scope or collections),
            transactions=not include_transactions,
        )
        self.names = Names(bucket, {0: ("_default", "_default")})
        self.is_ready = False
        self.stream_filter: dict[str, Any] = {}
        """Members of the stream request that limit the stream."""
        self._scope = scope
        self._collections = tuple(full_path(path) for path in collections)
        self._scopes: dict[int, str] = {0: "_default"}
        self._asked: set[DcpReader] = set()
        self._told: set[DcpReader] = set()

    def renew(self) -> None:
        """A reading begins: ask for the manifest again. Collections may have been made since the last one,
        and streams that begin after that don't name them.
        """
        self.is_ready = False
        self._asked, self._told = set(), set()

    def turn(self, ready: Sequence[KnownNode], now: float) -> None:
        """Ask every node for the manifest, once per reading: one's may be older than another's, but a node
        knows the names of what it streams.
        """
        links = {node.link for node in ready}
        if not links or (self.is_ready and links <= self._told):
            return
        for node in ready:
            link = node.link
            assert link is not None and link.granted is not None
            if link in self._asked:
                continue
            self._asked.add(link)
            if not link.granted.handshake.collections:
                if self._scope or self._collections:
                    raise UsageError("the server has no collections, so a reading can't be limited to some")
                self._told.add(link)
            else:
                link.ask(_manifest(), partial(self._answered, self._told, link), now)
        self._asked &= links  # a node that is gone will not answer
        self._told &= links
        self._settle()

    def _answered(self, answered_by: set[DcpReader], link: DcpReader, text: bytes | None) -> None:
        if text is not None:
            self._read(text)
        elif self._scope or self._collections:
            raise UsageError("the server has no collections manifest, so a reading can't be limited")
        answered_by.add(link)  # an answer to an earlier reading's question counts for that reading only
        self._settle()

    def can_request(self, link: DcpReader) -> bool:
        """Whether streams may be requested from a node. Only a filter needs names for that; without one, what
        comes is kept until the names are there (`awaits_names_of`).
        """
        if self._scope or self._collections:
            return self.is_ready and link in self._told
        return link in self._asked

    @property
    def trouble(self) -> str:
        """What it waits for, in words."""
        return "waits for the collections manifest" if self._asked - self._told else ""

    def awaits_names_of(self, link: DcpReader) -> bool:
        """Whether a node has yet to name the collections that it streams."""
        return link not in self._told

    def request_value(self, link: DcpReader, purge_seqno: int) -> bytes:
        """The JSON of a stream request: what to send, and what we know of purges."""
        assert link.granted is not None
        if not link.granted.handshake.collections:
            return b""
        members = dict(self.stream_filter)
        if purge_seqno:
            members["purge_seqno"] = str(purge_seqno)
        return json.dumps(members, separators=(",", ":")).encode() if members else b""

    def _settle(self) -> None:
        answered = self._asked & self._told
        # a filter is made from what all of them know; without one, no node waits for another
        self.is_ready = bool(answered) and (answered == self._asked or not (self._scope or self._collections))
        if self.is_ready and not self.stream_filter:  # made once: a source keeps what it is limited to
            self._make_filter()

    def _read(self, text: bytes) -> None:
        try:
            for scope in json.loads(text)["scopes"]:
                scope_name = _name(scope)
                self.add_scope(int(scope["uid"], 16), scope_name)
                for collection in scope["collections"]:
                    self.add(int(collection["uid"], 16), scope_name, _name(collection))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RemoteProtocolError("the collections manifest is not what it should be") from None

    def _make_filter(self) -> None:
        if self._scope:
            number = next((key for key, name in self._scopes.items() if name == self._scope), None)
            if number is None:
                raise UsageError(f"there is no scope {self._scope!r}")
            self.stream_filter = {"scope": f"{number:x}"}
        elif self._collections:
            numbers = {f"{scope}.{name}": key for key, (scope, name) in self.names.collections.items()}
            if missing := [path for path in self._collections if path not in numbers]:
                raise UsageError(f"there is no collection {missing[0]!r}")
            self.stream_filter = {"collections": [f"{numbers[path]:x}" for path in self._collections]}

    def add(self, collection_id: int, scope: str, name: str) -> None:
        """A collection that the manifest or the stream named."""
        assert isinstance(self.names.collections, dict)
        _remember(self.names.collections, collection_id, (scope, name))
        self.left_out.learn(collection_id, scope)

    def add_scope(self, scope_id: int, name: str) -> None:
        """A scope that the manifest or the stream named."""
        _remember(self._scopes, scope_id, name)

    def scope_name(self, scope_id: int) -> str:
        """The name of a scope, as far as it is known."""
        return self._scopes.get(scope_id, f"0x{scope_id:x}")

    def cover(self, collection_ids: Sequence[int]) -> None:
        """Make sure that each of these has a name; an unknown one is called by its number."""
        for number in collection_ids:
            if number not in self.names.collections:
                self.add(number, "?", f"0x{number:x}")


def _name(member: dict[str, Any]) -> str:
    """What a scope or a collection of the manifest is called."""
    name = member["name"]
    if not isinstance(name, str):
        raise TypeError
    name.encode()  # ValueError if it has half of a surrogate pair
    return name


def _remember(names: dict[int, T], number: int, name: T) -> None:
    """Keep a name, but no more names than a server may have; the default one stays."""
    names[number] = name
    if len(names) > _MOST_NAMES:
        del names[next(collection_id for collection_id in names if collection_id)]


def full_path(path: str) -> str:
    """A collection as ``scope.name``; the default scope need not be written."""
    scope, dot, name = path.partition(".")
    if not path or (dot and not name) or "." in name:
        raise UsageError(f"{path!r} is not a collection, write it like shop.orders")
    return f"{scope or '_default'}.{name}" if dot else f"_default.{path}"


def _manifest() -> Script[bytes | None]:
    (answer,) = yield [GetCollectionsManifest()]
    return answer.value if answer.status == Status.SUCCESS else None
