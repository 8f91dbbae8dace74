"""Stored changes as TAP mutations and deletes, a chunk at a time.

Rules: docs/spec/tap.md#mutation, docs/spec/tap.md#item-flags, docs/spec/tap.md#delete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...frames import OPCODE_AT, Bytes, Chunk, Offsets, Seqnos, Trait, field_everywhere, frames_of, seqnos_at
from ...wire.codes import DcpOpcode, TapConnectFlag, TapFlag
from ...wire.dcp import MUTATION
from ...wire.header import HEADER_LAYOUT
from ...wire.layout import layout
from ...wire.tap import TAP_TTL, TapDelete, TapMutation
from ..dcp.reframing import (
    STORED_DELETION,
    STORED_EXPIRATION,
    STORED_MUTATION,
    Form,
    older_options,
    reframe,
)
from ..dcp.shaping import Shaper
from ..stream_filter import StreamFilter

__all__ = ["TapBatch", "TapShaper", "Ttls"]

Ttls = Callable[[int, Seqnos], "npt.NDArray[np.uint8] | None"]
"""The TTLs to send the changes of a vbucket with; None: all were made here."""

_SENT = HEADER_LAYOUT + TapDelete.LAYOUTS[0]
"""Header and the extras that every message of TAP begins with."""
_OPAQUE = HEADER_LAYOUT.field("opaque")
_FLAGS_AT = _SENT.at("tap_flags") + 1  # the low byte; the high one has no flags
_TTL_AT = _SENT.at("ttl")
_EXPIRY = (HEADER_LAYOUT + MUTATION).field("expiry")
_EXPIRED = 0
"""The kind of a mutation that has expired: it is sent as the delete that it is about to become."""

_REV = layout("Q rev_seqno  how many times the document has changed")
_META = _REV + layout("B nru  cache hint")
_ITEM = {"item_flags": "flags", "item_expiry": "expiry"}


def _forms(*, values: bool) -> Mapping[int, Form]:
    delete = {"private_length": _REV.size}
    return {
        DcpOpcode.MUTATION: Form(
            STORED_MUTATION,
            TapMutation,
            private=_META,
            constants={"private_length": _META.size},
            renamed=_ITEM,
            has_value=values,
        ),
        DcpOpcode.DELETION: Form(STORED_DELETION, TapDelete, private=_REV, constants=delete),
        DcpOpcode.EXPIRATION: Form(STORED_EXPIRATION, TapDelete, private=_REV, constants=delete),
        _EXPIRED: Form(
            STORED_MUTATION,
            TapDelete,
            private=_REV,
            constants=delete,
            raised={"rev_seqno": 1},
        ),
    }


_WITH_VALUES, _KEYS_ONLY = _forms(values=True), _forms(values=False)


@dataclass(slots=True)
class TapBatch:
    """Whole messages of one vbucket back to back, without their numbers."""

    data: Bytes
    offsets: Offsets
    seqnos: Seqnos

    def end_of(self, place: int) -> int:
        """Where the message before this place ends."""
        return int(self.offsets[place]) if place < len(self.offsets) else len(self.data)

    def number(self, start: int, stop: int, numbers: npt.NDArray[np.uint32]) -> None:
        """Give messages their TAP sequence numbers."""
        field_everywhere(self.data, _OPAQUE)[self.offsets[start:stop]] = numbers

    def ask_for_acks(self, places: Offsets) -> None:
        """Set the ack flag of these messages."""
        self.data[self.offsets[places] + _FLAGS_AT] |= int(TapFlag.ACK)


class TapShaper:
    """Makes batches for one connection."""

    def __init__(self, features: frozenset[int], flags: int, ttls: Ttls) -> None:
        options, self._datatypes = older_options(features, has_datatype=True)
        self._shaper = Shaper(options, StreamFilter.of_old_clients(), 0)
        self._forms = _KEYS_ONLY if flags & TapConnectFlag.KEYS_ONLY else _WITH_VALUES
        self._mutation_flags = 0
        if flags & TapConnectFlag.KEYS_ONLY:
            self._mutation_flags |= TapFlag.NO_VALUE
        if flags & TapConnectFlag.FIX_FLAG_BYTEORDER:
            self._mutation_flags |= TapFlag.NETWORK_BYTE_ORDER
        self._living_only = bool(flags & TapConnectFlag.DUMP)
        self._ttls = ttls

    def shape(self, vbucket: int, chunk: Chunk, now_s: int, limit: int | None = None) -> TapBatch | None:
        """The messages of a chunk to send, up to the seqno ``limit``; None if there are none."""
        data, offsets = self._shaper.choose(chunk, skip_deletes=self._living_only)
        if not len(offsets):
            return None
        kinds = data[offsets + OPCODE_AT]
        if chunk.traits & Trait.EXPIRES:
            expiries = field_everywhere(data, _EXPIRY)
            times = expiries[np.minimum(offsets, len(expiries) - 1)]
            kinds[(kinds == DcpOpcode.MUTATION) & (times != 0) & (times <= now_s)] = _EXPIRED
        seqnos = seqnos_at(data, offsets)
        ttls = self._ttls(vbucket, seqnos)
        wanted = np.ones(len(offsets), np.bool_)
        if self._living_only:
            wanted &= kinds != _EXPIRED
        if limit is not None:
            wanted &= seqnos <= limit
        if ttls is not None:
            wanted &= ttls > 0
        if not wanted.all():
            data, offsets = frames_of(data, offsets, wanted)
            kinds, seqnos = kinds[wanted], seqnos[wanted]
            ttls = None if ttls is None else ttls[wanted]
            if not len(offsets):
                return None
        data, offsets = reframe(data, offsets, kinds, self._forms, datatypes=self._datatypes)
        data[offsets + _FLAGS_AT] = np.where(kinds == DcpOpcode.MUTATION, self._mutation_flags, 0)
        data[offsets + _TTL_AT] = TAP_TTL if ttls is None else ttls
        return TapBatch(data, offsets, seqnos)
