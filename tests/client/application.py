"""An application that does what the events tell it and nothing else: it must hold what the server has."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tailrace import Deletion, Expiration, Flush, Mutation, Rollback, SeqnoAdvanced, Snapshot, StreamEnd
from tailrace.store.format import StoredDocument


class Application:
    """Documents by vbucket and key, with every whole state that it ever had, to return to.

    It checks what every application may rely on: seqnos rise between rollbacks, a change lies in the
    snapshot that was announced, a rollback leads to a state that was whole.
    """

    def __init__(self) -> None:
        self.documents: dict[int, dict[bytes, tuple[int, bytes]]] = {}
        self.whole: dict[int, dict[int, dict[bytes, tuple[int, bytes]]]] = {}
        self.last: dict[int, int] = {}
        self.snapshot: dict[int, tuple[int, int]] = {}
        self.rollbacks: list[Rollback] = []
        self.ended: dict[int, str] = {}
        self.changes = self.flushes = 0

    def take(self, events: Iterable[Any]) -> Application:
        for event in events:
            self.handle(event)
        return self

    def handle(self, event: Any) -> None:
        vbucket = event.vbucket
        held = self.documents.setdefault(vbucket, {})
        if isinstance(event, Rollback):
            self.rollbacks.append(event)
            states = self.whole.setdefault(vbucket, {})
            assert event.seqno == 0 or event.seqno in states, f"no whole state at {event}"
            self.documents[vbucket] = dict(states.get(event.seqno, {}))
            self.whole[vbucket] = {at: state for at, state in states.items() if at <= event.seqno}
            self.last[vbucket] = event.seqno
        elif isinstance(event, Flush):
            self.flushes += 1
            self.documents[vbucket], self.whole[vbucket], self.last[vbucket] = {}, {}, 0
        elif isinstance(event, Snapshot):
            self.snapshot[vbucket] = (event.start, event.end)
        elif isinstance(event, Mutation | Deletion | Expiration | SeqnoAdvanced):
            assert event.seqno > self.last.get(vbucket, 0)
            assert event.snapshot == self.snapshot[vbucket]
            assert event.snapshot[0] <= event.seqno <= event.snapshot[1]
            self.last[vbucket] = event.seqno
            self.changes += 1
            if isinstance(event, Mutation):
                held[event.key] = (event.seqno, event.value)
            elif not isinstance(event, SeqnoAdvanced):
                held.pop(event.key, None)
            if event.seqno == event.snapshot[1]:
                self.whole.setdefault(vbucket, {})[event.seqno] = dict(held)
        elif isinstance(event, StreamEnd):
            self.ended[vbucket] = event.reason

    def state(self) -> dict[int, dict[bytes, tuple[int, bytes]]]:
        """What it holds now."""
        return {vbucket: held for vbucket, held in self.documents.items() if held}


def events_of(batch: pa.RecordBatch) -> Iterator[Any]:
    """The rows of a batch as the events that `changes` would give."""
    for row in batch.to_pylist():
        numbers = ("vb_uuid", "seqno", "rev", "cas", "snapshot_start", "snapshot_end")
        unsigned: list[Any] = [None if row[name] is None else row[name] % 2**64 for name in numbers]
        vb_uuid, seqno, rev, cas, start, end = unsigned
        if row["op"] == "rollback":
            yield Rollback(row["vbucket"], vb_uuid, seqno)
            continue
        if row["op"] == "flush":
            yield Flush(row["vbucket"])
            continue
        place = row["vbucket"], vb_uuid, seqno, rev, cas, row["key"]
        yield Snapshot(row["vbucket"], vb_uuid, start, end, "memory")
        if row["op"] == "mutation":
            is_json = row["datatype"] == "json"
            yield Mutation(*place, row["value"], row["flags"], row["expiry"], is_json, (start, end))
        else:
            yield Deletion(*place, 0, (start, end))


def server_state(node: Any, keys: Iterable[bytes]) -> dict[int, dict[bytes, tuple[int, bytes]]]:
    """What a node holds of these keys now, by vbucket and key: seqno and value."""
    chosen = [(node.vbucket_of(key), key) for key in keys]

    def look(running: Any) -> dict[int, dict[bytes, tuple[int, bytes]]]:
        state: dict[int, dict[bytes, tuple[int, bytes]]] = {}
        for vbucket, key in chosen:
            frame = running.buckets[node.bucket].store.vbuckets[vbucket].get(b"\0" + key)
            if frame is not None:
                document = StoredDocument.of(frame)
                state.setdefault(vbucket, {})[key] = (document.seqno, document.value)
        return state

    held: dict[int, dict[bytes, tuple[int, bytes]]] = node.call(look)
    return held


@contextlib.contextmanager
def writing(node: Any, key: bytes) -> Iterator[None]:
    """Write a document again and again, for a reader that waits for a change."""
    enough = threading.Event()

    def write_on() -> None:
        while not enough.wait(0.02):
            node.set(key, 0)

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
