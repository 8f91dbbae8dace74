"""Stored changes as messages of the older dialects, many at a time.

The store's frames are DCP's. A message of TAP or UPR has the same key and value after a different head:
header, extras and, in TAP, the engine-private section. Its `Form` describes the head; it is made from the
message's own declaration, and fields that have the same name in both are copied, for all frames of a chunk in
one assignment per field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...frames import Bytes, Offsets, field_everywhere, keys_at
from ...wire.codes import Datatype, Feature, OpenFlag
from ...wire.dcp import DELETION_V2, EXPIRATION, MUTATION
from ...wire.header import HEADER_LAYOUT, HEADER_SIZE
from ...wire.layout import NO_EXTRAS, Layout, record
from ...wire.message import Message, Part
from .controls import ConnectionOptions

__all__ = [
    "STORED_DELETION",
    "STORED_EXPIRATION",
    "STORED_MUTATION",
    "Form",
    "older_options",
    "reframe",
]

Record: TypeAlias = "np.dtype[np.void]"

_KEY_LENGTH = HEADER_LAYOUT.field("key_length")
_PREFIX = 1
"""Only the default collection gets here: its prefix is the byte 00 in front of the key."""


STORED_MUTATION = record(HEADER_LAYOUT + MUTATION)
STORED_DELETION = record(HEADER_LAYOUT + DELETION_V2)
STORED_EXPIRATION = record(HEADER_LAYOUT + EXPIRATION)


class Form:
    """How one kind of stored change is sent in a dialect.

    ``constants`` are fields with one value for all; ``renamed`` are those that have another name in the
    store; ``raised`` are numbers to add to what was copied. ``private`` is TAP's engine-private section.
    """

    __slots__ = ("_copied", "_given", "_made", "_raised", "_stored", "has_datatype", "has_value")

    def __init__(
        self,
        stored: Record,
        message: type[Message],
        *,
        private: Layout = NO_EXTRAS,
        constants: Mapping[str, int] | None = None,
        renamed: Mapping[str, str] | None = None,
        raised: Mapping[str, int] | None = None,
        has_value: bool | None = None,
    ) -> None:
        (layout,) = message.LAYOUTS
        self.has_value = message.VALUE is not Part.FORBIDDEN if has_value is None else has_value
        self.has_datatype = self.has_value and bool(message.DATATYPES)
        self._stored = stored
        self._made = record(HEADER_LAYOUT + layout + private)
        self._given = {
            "magic": int(message.MAGIC),
            "opcode": int(message.OPCODE),
            "extras_length": layout.size,
            **({} if self.has_datatype else {"datatype": 0}),
            **(constants or {}),
        }
        sources = {name: (renamed or {}).get(name, name) for name in self._made.names or ()}
        stored_fields = stored.names or ()
        self._copied = {to: of for to, of in sources.items() if of in stored_fields and to not in self._given}
        self._raised = dict(raised or {})

    def heads(self, data: Bytes, offsets: Offsets) -> npt.NDArray[np.void]:
        """The heads of the messages for these stored frames; lengths and opaque are left to the caller."""
        at = offsets[:, None] + np.arange(self._stored.itemsize)
        stored = data[at].view(self._stored)[:, 0]
        heads = np.zeros(len(offsets), self._made)
        for to, of in self._copied.items():
            heads[to] = stored[of]
        for name, value in self._given.items():
            heads[name] = value
        for name, more in self._raised.items():
            heads[name] += np.array(more, heads[name].dtype)
        return heads


def reframe(
    data: Bytes,
    offsets: Offsets,
    kinds: npt.NDArray[np.integer[Any]],
    forms: Mapping[int, Form],
    *,
    opaque: int = 0,
    datatypes: int = 0,
) -> tuple[Bytes, Offsets]:
    """Stored frames of the default collection in the forms for their kinds, back to back and writable.

    ``datatypes`` are the bits that the reader may see.
    """
    key_lengths = field_everywhere(data, _KEY_LENGTH)[offsets].astype(np.int64) - _PREFIX
    starts = keys_at(data, offsets) + _PREFIX
    ends = np.append(offsets[1:], len(data))
    sizes = np.empty(len(offsets), np.int64)
    heads: list[memoryview] = [memoryview(b"")] * len(offsets)
    for kind, form in forms.items():
        places = np.flatnonzero(kinds == kind)
        if not len(places):
            continue
        made = form.heads(data, offsets[places])
        if not form.has_value:
            ends[places] = starts[places] + key_lengths[places]
        if form.has_datatype:
            made["datatype"] &= datatypes
        made["opaque"] = opaque
        made["key_length"] = key_lengths[places]
        bodies = made.itemsize - HEADER_SIZE + ends[places] - starts[places]
        made["body_length"] = bodies
        sizes[places] = HEADER_SIZE + bodies
        view, size = memoryview(made.tobytes()), made.itemsize
        for at, place in enumerate(places.tolist()):
            heads[place] = view[at * size : (at + 1) * size]
    bodies_view = data.data
    pieces: list[memoryview] = []
    for head, start, end in zip(heads, starts.tolist(), ends.tolist(), strict=True):
        pieces += (head, bodies_view[start:end])
    return np.frombuffer(bytearray().join(pieces), np.uint8), np.cumsum(sizes) - sizes


def older_options(features: frozenset[int], *, has_datatype: bool) -> tuple[ConnectionOptions, int]:
    """What a reader of an older dialect can take, in DCP's terms, and which datatype bits it may see.

    Changes keep the form in which the store has them until they are reframed. Where the dialect has a
    datatype, it follows what HELLO granted; where it has none, values are plain.
    """
    datatypes = 0
    if has_datatype:
        if Feature.JSON in features:
            datatypes |= Datatype.JSON
        if Feature.XATTR in features:
            datatypes |= Datatype.XATTR
        datatypes |= Datatype.SNAPPY if features & {Feature.SNAPPY, Feature.SNAPPY_EVERYWHERE} else 0
    granted = features & {Feature.SNAPPY, Feature.SNAPPY_EVERYWHERE} if has_datatype else frozenset()
    flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
    if datatypes & Datatype.XATTR:
        flags |= OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETED_USER_XATTRS
    return ConnectionOptions(frozenset(granted), flags=int(flags), expiry_opcode=True), int(datatypes)
