"""What a node's store holds, for comparison with what readers made of its stream."""

from __future__ import annotations

import struct
from typing import Any

from tailrace.server.node import Node
from tailrace.testing.running import RunningNode


def documents_of(node: RunningNode, number: int, *, deletions: bool = False) -> dict[bytes, Any]:
    """A vbucket's documents by key: value, CAS, rev, flags, expiry.

    With ``deletions`` also tombstones, with their CAS and rev.
    """

    def read(inner: Node) -> dict[bytes, Any]:
        vbucket = inner.buckets["default"].store.vbuckets[number]
        documents: dict[bytes, tuple[Any, ...]] = {}
        position = 0
        while (snapshot := vbucket.snapshot_after(position)) is not None:
            while (chunk := snapshot.read()) is not None:
                ends = [*chunk.offsets.tolist()[1:], len(chunk.data)]
                for at, end in zip(chunk.offsets.tolist(), ends, strict=True):
                    frame = chunk.data[at:end].tobytes()
                    key_at = 24 + frame[4]
                    key = frame[key_at + 1 : key_at + int.from_bytes(frame[2:4], "big")]
                    cas = int.from_bytes(frame[16:24], "big")
                    if frame[1] == 0x57:
                        _, rev, flags, expiry = struct.unpack_from(">QQII", frame, 24)
                        documents[key] = (frame[key_at + 1 + len(key) :], cas, rev, flags, expiry)
                    else:
                        documents.pop(key, None)
                        if deletions:
                            documents[key] = (cas, int.from_bytes(frame[32:40], "big"))
            position = snapshot.end
        return documents

    return node.call(read)


def all_documents(node: RunningNode, **options: Any) -> dict[int, Any]:
    """The same of every vbucket that holds any."""
    by_vbucket = {number: documents_of(node, number, **options) for number in range(node.vbuckets)}
    return {number: documents for number, documents in by_vbucket.items() if documents}


def without_empty(documents: dict[int, Any]) -> dict[int, Any]:
    return {number: held for number, held in documents.items() if held}


def write_for_newer_readers(node: RunningNode) -> None:
    """Write much that older readers do not get, around one document that they do."""

    def write(inner: Node) -> None:
        vbucket = inner.buckets["default"].store.vbuckets[1]
        for number in range(150):
            vbucket.set(b"\x08other%d" % number, b"v" * 20_000)
        vbucket.set(b"\0mine", b"v")
        for number in range(150):
            vbucket.set(b"\x08more%d" % number, b"v" * 20_000)

    node.call(write)
