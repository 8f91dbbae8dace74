"""A full-text index that follows a bucket: `tailrace index` keeps it, `tailrace search` queries it.

The index (Tantivy, the extra ``index``) holds a document for each live document of the bucket, and a document
for each vbucket with the position of the index in it. Both are written in the same commit, so whatever
happens to the process, the index is at the positions that it names. A position may lie inside a snapshot: the
stream request says so, and the server takes it into account when it decides about a rollback.

Older versions are not in the index, so it can't go back to them: it offers no point for a rollback to return
to, and every rollback leads to the beginning. The documents of that vbucket leave the index and come again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from .. import paths
from ..clock import SystemClock
from ..connstr import ConnectionString
from ..errors import FulltextError, UsageError
from ..files import make_folder
from ..model import Position
from ..units import MAX_VBUCKETS
from ..wire.fields import parse_json
from .aio import connect
from .events import Change, Deletion, Event, Expiration, Flush, Mutation, Rollback, SystemEvent
from .options import SourceKeywords
from .progress import SavedPosition

__all__ = ["FullText", "Hit", "follow"]

COMMIT_CHANGES = 20_000
COMMIT_S = 1.0
_HEAP_BYTES = 64 << 20
_MAX_DEPTH = 100
_FORMAT = "1"
_STATE = "state"
"""The id of the documents that hold the owner and the positions; there are at most `_MAX_STATES`."""
_MAX_STATES = MAX_VBUCKETS + 1


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found."""

    score: float
    key: bytes
    vbucket: int
    collection_id: int
    seqno: int


def _tantivy() -> Any:
    try:
        import tantivy
    except ImportError:
        raise UsageError('a full-text index needs the extra: pip install "tailrace[index]"') from None
    return tantivy


def _schema(tantivy: Any) -> Any:
    builder = tantivy.SchemaBuilder()
    for name in ("id", "vbucket", "place", "about"):  # terms to find documents by, as they are
        builder.add_text_field(name, stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("state", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_unsigned_field("seqno", stored=True)
    builder.add_text_field("key", stored=False)
    builder.add_text_field("text", stored=False)
    builder.add_json_field("doc", stored=False)
    return builder.build()


class FullText:
    """One index in a directory; one process writes to it, any number may search."""

    def __init__(self, directory: str | Path, *, bucket: str | None = None) -> None:
        self._tantivy = _tantivy()
        self.directory = directory = paths.directory(directory, "the directory of the index")
        self._saved: dict[int, Position] = {}
        self._writer: Any = None
        self._changes = 0
        if bucket is None:
            self._open()
        else:
            self._open_to_write()
        try:
            self._are_states = self._tantivy.Query.term_query(self._index.schema, "id", _STATE)
        except ValueError:
            raise UsageError(f"{str(directory)!r} is an index, but not one of a bucket") from None
        if bucket is not None:
            self._claim(bucket)

    def _open(self) -> None:
        directory = self.directory
        if not directory.is_dir() or not self._tantivy.Index.exists(str(directory)):
            raise UsageError(f"there is no index in {str(directory)!r}; make one with tailrace index")
        try:
            self._index = self._tantivy.Index.open(str(directory))
        except (ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise FulltextError(f"the index {str(directory)!r} can't be read: {reason}") from None

    def _open_to_write(self) -> None:
        directory = self.directory
        try:
            make_folder(directory)
            self._index = self._tantivy.Index(_schema(self._tantivy), path=str(directory))
            self._writer = self._index.writer(_HEAP_BYTES, 1)
        except (ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise FulltextError(
                f"can't write to the index {str(directory)!r}: {reason}; is another process writing to it?"
            ) from None

    def _claim(self, bucket: str) -> None:
        """Read the index's positions, and check that it is of this bucket."""
        owner = f"{_FORMAT} {bucket}"
        is_claimed = False
        for about, state in self._states():
            if about == "bucket":
                is_claimed = True
                if state != owner:
                    raise UsageError(f"{str(self.directory)!r} is the index of another bucket or version")
            else:
                self._saved[int(about)] = Position.from_json(json.loads(state))
        if not is_claimed:
            self._put_state("bucket", owner)

    def _states(self) -> Iterator[tuple[str, str]]:
        searcher = self._index.searcher()
        for _, address in searcher.search(self._are_states, limit=_MAX_STATES).hits:
            document = searcher.doc(address)
            yield document["about"][0], document["state"][0]

    def _put_state(self, about: str, state: str) -> None:
        self._writer.delete_documents_by_term("about", about)
        document = self._tantivy.Document()
        document.add_text("id", _STATE)
        document.add_text("about", about)
        document.add_text("state", state)
        self._writer.add_document(document)

    # as a place for positions

    def load(self) -> dict[int, SavedPosition]:
        """The positions of the last commit."""
        return {vbucket: SavedPosition(position) for vbucket, position in self._saved.items()}

    def save(self, positions: Mapping[int, SavedPosition]) -> None:
        """Positions are only written by `commit`, with the documents."""

    # writing

    @property
    def uncommitted(self) -> int:
        """Changes since the last commit."""
        return self._changes

    def take(self, event: Event) -> None:
        """Apply an event."""
        with self._writing():
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Rollback() | Flush():
                if isinstance(event, Rollback) and event.seqno:
                    raise FulltextError(f"the index can't go back to seqno {event.seqno}, only to 0")
                self._writer.delete_documents_by_term("vbucket", str(event.vbucket))
                self._changes += 1
            case SystemEvent(event="collection_dropped"):
                self._writer.delete_documents_by_term("place", f"{event.vbucket}/{event.collection_id:x}")
                self._changes += 1
            case Mutation():
                self._remove(event)
                self._writer.add_document(self._document(event))
                self._changes += 1
            case Deletion() | Expiration():
                self._remove(event)
                self._changes += 1

    def commit(self, positions: Mapping[int, Position]) -> None:
        """Publish all that was taken together with these positions."""
        with self._writing():
            self._commit(positions)
        self._saved = {vbucket: position for vbucket, position in positions.items() if position.seqno}
        self._changes = 0

    def _commit(self, positions: Mapping[int, Position]) -> None:
        for vbucket, position in positions.items():
            if position != self._saved.get(vbucket) and position.seqno:
                self._put_state(str(vbucket), json.dumps(position.to_json()))
            elif not position.seqno and vbucket in self._saved:
                self._writer.delete_documents_by_term("about", str(vbucket))
        self._writer.commit()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn Tantivy's errors, such as a full disk, into errors of one line."""
        try:
            yield
        except (ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise FulltextError(f"can't write to the index {str(self.directory)!r}: {reason}") from error

    def close(self) -> None:
        """Release the directory; what was not committed is forgotten."""
        if self._writer is not None:
            self._writer.rollback()
            self._writer.wait_merging_threads()
            self._writer = None

    def _remove(self, change: Change) -> None:
        self._writer.delete_documents_by_term("id", _id(change))

    def _document(self, change: Mutation) -> Any:
        document = self._tantivy.Document()
        document.add_text("id", _id(change))
        document.add_text("vbucket", str(change.vbucket))
        document.add_text("place", f"{change.vbucket}/{change.collection_id:x}")
        document.add_unsigned("seqno", change.seqno)
        document.add_text("key", change.key.decode("utf-8", "replace"))
        value = _parsed(change.value)
        if value is None:
            document.add_text("text", change.value.decode("utf-8", "ignore"))
        else:
            document.add_text("text", " ".join(_words(value)))
            if isinstance(value, dict):
                document.add_json("doc", json.dumps(value))
        return document

    # searching

    def count(self) -> int:
        """How many documents are in the index."""
        searcher, documents = self._documents(self._tantivy.Query.all_query())
        count: int = searcher.search(documents, limit=1).count
        return count

    def search(self, query: str, *, limit: int = 10) -> list[Hit]:
        """Documents that match, best first. Queries: words, "phrases", AND, OR, -not, ``doc.city:paris``."""
        try:
            parsed = self._index.parse_query(query, ["text", "key"])
        except ValueError as error:
            raise UsageError(f"the query can't be read: {error}") from None
        searcher, documents = self._documents(parsed)
        hits = []
        for score, address in searcher.search(documents, limit=limit).hits:
            document = searcher.doc(address)
            vbucket, collection, key = document["id"][0].split("/")
            seqno = document["seqno"][0]
            hits.append(Hit(float(score), bytes.fromhex(key), int(vbucket), int(collection, 16), seqno))
        return hits

    def _documents(self, query: Any) -> tuple[Any, Any]:
        """The newest commit, and the query limited to the bucket's documents."""
        self._index.reload()
        occur = self._tantivy.Occur
        fits = [(occur.Must, query), (occur.MustNot, self._are_states)]
        return self._index.searcher(), self._tantivy.Query.boolean_query(fits)


def _id(change: Change) -> str:
    return f"{change.vbucket}/{change.collection_id:x}/{change.key.hex()}"


def _parsed(value: bytes) -> Any:
    try:
        return parse_json(value)
    except ValueError:
        return None


def _words(value: Any, depth: int = 0) -> Iterator[str]:
    """All text and numbers of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif depth < _MAX_DEPTH:
        members: Iterable[Any] = ()
        if isinstance(value, dict):
            members = value.values()
        elif isinstance(value, list):
            members = value
        for member in members:
            yield from _words(member, depth + 1)


async def follow(
    url: ConnectionString | str, index: FullText, *, end: str = "forever", **options: Unpack[SourceKeywords]
) -> int:
    """Keep an index in step with a bucket; return how many changes it took."""
    taken, clock = 0, SystemClock()
    options |= {"state": index, "autosave": False, "rollback_points": lambda _: ()}
    async with (
        connect(url, **options) as source,
        aclosing(source.portions("beginning", end)) as portions,
    ):
        committed_at = clock.monotonic()
        async for portion in portions:
            for event in portion.events():
                index.take(event)
            taken += portion.row_count
            if (
                index.uncommitted >= COMMIT_CHANGES
                or source.is_idle
                or clock.monotonic() - committed_at >= COMMIT_S
            ):
                index.commit(source.positions())
                committed_at = clock.monotonic()
        index.commit(source.positions())
    return taken
