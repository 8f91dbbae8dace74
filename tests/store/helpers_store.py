"""What several tests of the store do with a vbucket."""

from __future__ import annotations

from typing import Any

from tailrace.store.format import StoredDocument, collection_of, system_event


def stream(
    vbucket: Any, after: int = 0, *, memory: bool = True, max_bytes: int = 256 << 10
) -> list[list[bytes]]:
    """Every snapshot after a seqno as a list of frames, checked for what a snapshot promises."""
    snapshots = []
    while (snapshot := vbucket.snapshot_after(after, memory=memory)) is not None:
        frames: list[bytes] = []
        while (chunk := snapshot.read(max_bytes)) is not None:
            assert len(chunk.offsets)
            ends = [*chunk.offsets.tolist()[1:], len(chunk.data)]
            part = [chunk.data[a:b].tobytes() for a, b in zip(chunk.offsets.tolist(), ends, strict=True)]
            assert chunk.last_seqno == seqno_of(part[-1])
            chunk.data[chunk.offsets] = 0x80  # it is ours to write on
            frames += part
        seqnos = [seqno_of(frame) for frame in frames]
        assert seqnos == sorted(set(seqnos))
        assert snapshot.start == after + 1
        assert snapshot.start <= seqnos[0]
        assert seqnos[-1] == snapshot.end
        keys = [subject_of(frame) for frame in frames]
        assert len(set(keys)) == len(keys), "a key is in a snapshot twice"
        snapshots.append(frames)
        after = snapshot.end
    return snapshots


def maintain(bucket: Any) -> None:
    """All sealing and merging that is due, at once."""
    while (job := bucket.begin_maintenance()) is not None:
        job.finish()


def subject_of(frame: bytes) -> Any:
    return system_event(frame) if frame[1] == 0x5F else StoredDocument.of(frame).key


def seqno_of(frame: bytes) -> int:
    return int.from_bytes(frame[24:32], "big")


def state_of(snapshots: list[list[bytes]]) -> dict[bytes, StoredDocument]:
    """The documents that a reader has after these snapshots."""
    documents: dict[bytes, StoredDocument] = {}
    for frames in snapshots:
        for frame in frames:
            if frame[1] == 0x5F:
                event, subject = system_event(frame)
                if event in (0, 1):  # a collection begins (again) or ends: its documents go
                    for key in [key for key in documents if collection_of(key) == subject]:
                        del documents[key]
                continue
            document = StoredDocument.of(frame)
            if document.deleted:
                documents.pop(document.key, None)
            else:
                documents[document.key] = document
    return documents


def values(vbucket: Any, **kwargs: Any) -> dict[bytes, bytes]:
    """Key and value of every document that a stream from the beginning leads to."""
    return {key: document.value for key, document in state_of(stream(vbucket, **kwargs)).items()}
