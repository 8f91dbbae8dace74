"""A second, naive reader: what a bucket holds, and what a table holds, without any code of the pipeline.

The bucket is read over a plain socket with `struct`: one DCP stream per vbucket from the beginning, frame by
frame into a dict. The table is read with delta-rs, which knows nothing of us. `verify` and this reader must
agree.
"""

from __future__ import annotations

import base64
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

HEADER = struct.Struct(">BBHBBHIIQ")


class Doc(NamedTuple):
    value: bytes
    seqno: int
    rev: int
    cas: int
    flags: int
    expiry: int


class _Wire:
    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=30)
        self.buffer = b""

    def send(
        self,
        opcode: int,
        *,
        key: bytes = b"",
        extras: bytes = b"",
        vbucket: int = 0,
        opaque: int = 0,
        magic: int = 0x80,
    ) -> None:
        body = extras + key
        head = HEADER.pack(magic, opcode, len(key), len(extras), 0, vbucket, len(body), opaque, 0)
        self.socket.sendall(head + body)

    def frame(self) -> tuple[int, int, int, int, int, bytes, bytes, bytes]:
        while len(self.buffer) < 24:
            self._more()
        magic, opcode, keys, extras, _, status, total, opaque, cas = HEADER.unpack_from(self.buffer)
        while len(self.buffer) < 24 + total:
            self._more()
        body, self.buffer = self.buffer[24 : 24 + total], self.buffer[24 + total :]
        return (
            magic,
            opcode,
            status,
            opaque,
            cas,
            body[:extras],
            body[extras : extras + keys],
            body[extras + keys :],
        )

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        assert data, "the node closed the connection"
        self.buffer += data


def bucket_state(host: str, port: int) -> dict[tuple[int, bytes], Doc]:
    """Every live document by (vbucket, key), in the default collection."""
    wire = _Wire(host, port)
    try:
        wire.send(0x50, key=b"naive-reader", extras=struct.pack(">II", 0, 1))
        assert wire.frame()[2] == 0
        wire.send(0x48)
        seqnos = wire.frame()[7]
        ends = {v: s for v, s in struct.iter_unpack(">HQ", seqnos) if s}
        for vbucket, end in ends.items():
            extras = struct.pack(">IIQQQQQ", 0, 0, 0, end, 0, 0, 0)
            wire.send(0x53, extras=extras, vbucket=vbucket, opaque=vbucket)
        documents: dict[tuple[int, bytes], Doc] = {}
        open_streams = set(ends)
        while open_streams:
            magic, opcode, status, opaque, cas, extras, key, value = wire.frame()
            if magic == 0x81:
                assert (opcode, status) == (0x53, 0), f"refused: 0x{opcode:02x} 0x{status:02x}"
            elif opcode == 0x57:
                seqno, rev, flags, expiry = struct.unpack_from(">QQII", extras)
                documents[opaque, key] = Doc(value, seqno, rev, cas, flags, expiry)
            elif opcode in (0x58, 0x59):
                documents.pop((opaque, key), None)
            elif opcode == 0x55:
                open_streams.discard(opaque)
            elif opcode == 0x5C:
                wire.send(0x5C, opaque=opaque, magic=0x81)
        return documents
    finally:
        wire.socket.close()


def table_state(path: str | Path, version: int | None = None) -> dict[tuple[int, bytes], Doc]:
    """Every live row by (vbucket, key), as delta-rs and DataFusion read the table."""
    table = DeltaTable(str(path), version=version)
    rows = QueryBuilder().register("mirrored", table).execute("select * from mirrored").read_all()
    documents: dict[tuple[int, bytes], Doc] = {}
    for row in pa.table(rows).to_pylist():
        if row.get("deleted"):
            continue
        key, value = _bytes(row, "key"), _bytes(row, "value")
        at = (row["vbucket"], key)
        assert at not in documents, f"{at} is there twice"
        documents[at] = Doc(value, row["seqno"], row["rev"], row["cas"], row["flags"], row["expiry"])
    return documents


def _bytes(row: dict[str, Any], name: str) -> bytes:
    text = row[name]
    return base64.b64decode(row[f"{name}_base64"]) if text is None else text.encode()
