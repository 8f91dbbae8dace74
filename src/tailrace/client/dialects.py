"""The dialects that a source speaks, and what each of them can't do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..protocol.dcp.reader import DcpReader, ReaderSettings
from ..protocol.dcp.translating_reader import older_features
from ..protocol.handshake import READER_FEATURES, Introduction
from ..protocol.questions import Patience
from ..protocol.tap.reader import TapReader, TapSettings
from ..protocol.upr.reader import UprAReader, UprBReader

__all__ = ["CANNOT", "DCP_SPEECH", "DIALECTS", "Speech", "speech_of"]

DIALECTS = ("dcp", "upr-a", "upr-b", "tap")

_NOT_OLD = (
    "scope",
    "collections",
    "persisted_only",
    "priority",
    "backfill_order",
    "every_version",
    "sync_replication",
    "out_of_order",
    "on_wire",
    "group_store",
)
_NOT_UPR = (*_NOT_OLD, "no_value", "tap_settings")
CANNOT: Mapping[str, tuple[str, ...]] = {
    "dcp": ("tap_settings",),
    "upr-a": (*_NOT_UPR, "include_xattrs", "compression"),
    "upr-b": (*_NOT_UPR, "compression"),
    "tap": (*_NOT_OLD, "compression", "state", "rollback_points"),
}
"""Options of a source that mean nothing in a dialect."""


class Connects(Protocol):
    """Makes the reader of one connection."""

    def __call__(
        self,
        introduction: Introduction,
        settings: ReaderSettings,
        *,
        rng: random.Random,
        now: float,
        patience: Patience,
    ) -> DcpReader: ...


@dataclass(frozen=True, slots=True)
class Speech:
    """How connections are made in one dialect."""

    features: tuple[int, ...]
    connect: Connects


DCP_SPEECH = Speech(READER_FEATURES, DcpReader)


def speech_of(dialect: str, *, xattrs: bool, tap: TapSettings) -> Speech:
    """How to speak a dialect of `DIALECTS`."""
    if dialect == "dcp":
        return DCP_SPEECH
    old: Mapping[str, Connects] = {
        "upr-a": UprAReader,
        "upr-b": UprBReader,
        "tap": partial(TapReader, tap=tap),
    }
    return Speech(older_features(xattrs=xattrs), old[dialect])
