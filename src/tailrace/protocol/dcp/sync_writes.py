"""Durable writes on a stream whose reader asked for them.

Prepares go out as they are stored, commits and aborts as messages that name their prepare. The store has a
commit as the mutation or deletion that it makes. A reader that got the prepare does not need the value again:
the change with the prepare's CAS becomes a Commit. Other readers get the change itself, which completes a
prepare just as well: docs/spec/servers.md#sync-writes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...frames import OPCODE_AT, Bytes, Offsets
from ...wire.codes import DcpOpcode, Magic
from ...wire.dcp_replication import DcpAbort, DcpCommit, DcpPrepare
from ...wire.header import HEADER, HEADER_SIZE

__all__ = ["PREPARED_DELETION_AT", "PREPARE_SURCHARGE", "SyncWriteShaping"]

PREPARED_DELETION_AT = DcpPrepare.LAYOUTS[0].at("deleted")
"""Where the extras of a prepare say that it is a deletion."""
PREPARE_SURCHARGE = 2
"""Flow control counts more than the bytes of a prepare, at both ends: docs/spec/dcp.md#counted-bytes."""

_PREPARE, _ABORT = int(DcpOpcode.PREPARE), int(DcpOpcode.ABORT)
_DECISION = DcpCommit.LAYOUTS[0].struct
assert _DECISION.format == DcpAbort.LAYOUTS[0].struct.format
_DOCUMENTS = (DcpOpcode.MUTATION, DcpOpcode.DELETION, DcpOpcode.EXPIRATION)


class _Told(NamedTuple):
    """A prepare that the reader knows of."""

    seqno: int
    cas: int


class SyncWriteShaping:
    """The prepares of one stream whose outcome its reader waits for."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: dict[bytes, _Told] = {}

    def shape(self, data: Bytes, offsets: Offsets, *, may_commit: bool) -> tuple[Bytes, Offsets, int]:
        """Stored frames as this reader should get them, and what flow control counts beyond their bytes."""
        opcodes = data[offsets + OPCODE_AT]
        if not self._told and not ((opcodes == _PREPARE) | (opcodes == _ABORT)).any():
            return data, offsets, 0
        ends = np.append(offsets[1:], len(data)).tolist()
        view = data.data
        shaped = []
        surcharge = 0
        for opcode, start, end in zip(opcodes.tolist(), offsets.tolist(), ends, strict=True):
            frame = view[start:end].tobytes()
            shaped.append(self._shape(opcode, frame, may_commit=may_commit))
            surcharge += PREPARE_SURCHARGE * (opcode == _PREPARE)
        sizes = np.fromiter(map(len, shaped), np.int64, len(shaped))
        return np.frombuffer(bytearray().join(shaped), np.uint8), np.cumsum(sizes) - sizes, surcharge

    def _shape(self, opcode: int, frame: bytes, *, may_commit: bool) -> bytes:
        _, _, key_length, extras_length, _, vbucket, _, _, cas = HEADER.unpack_from(frame)
        key_at = HEADER_SIZE + extras_length
        key = frame[key_at : key_at + key_length]
        seqno, second = _DECISION.unpack_from(frame, HEADER_SIZE)
        if opcode == _PREPARE:
            self._told[key] = _Told(seqno, cas)
        elif opcode == _ABORT:
            self._told.pop(key, None)
            return _decision(_ABORT, vbucket, second, seqno, key)
        elif opcode in _DOCUMENTS:
            prepare = self._told.pop(key, None)
            if prepare is not None and prepare.cas == cas and may_commit:
                return _decision(DcpOpcode.COMMIT, vbucket, prepare.seqno, seqno, key)
        return frame


def _decision(opcode: int, vbucket: int, prepared_seqno: int, seqno: int, key: bytes) -> bytes:
    extras = _DECISION.pack(prepared_seqno, seqno)
    body = len(extras) + len(key)
    head = HEADER.pack(Magic.REQUEST, opcode, len(key), len(extras), 0, vbucket, body, 0, 0)
    return head + extras + key
