"""The dialects that a source speaks, and what each of them can't do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..protocol.dcp_consumer import ConsumerSettings, DcpConsumer
from ..protocol.handshake import CONSUMER_FEATURES, Introduction
from ..protocol.old_consumer import old_features
from ..protocol.tap_reader import TapReader, TapSettings
from ..protocol.upr_consumer import UprAConsumer, UprBConsumer

__all__ = ["CANNOT", "DCP_SPEECH", "DIALECTS", "Speech", "speech_of"]

DIALECTS = ("dcp", "upr-a", "upr-b", "tap")

_NOT_OLD = (
    "scope",
    "collections",
    "rollback_mitigation",
    "priority",
    "backfill_order",
    "on_wire",
)
_NOT_UPR = (*_NOT_OLD, "no_value", "tap_settings")
CANNOT: Mapping[str, tuple[str, ...]] = {
    "dcp": ("tap_settings",),
    "upr-a": (*_NOT_UPR, "include_xattrs", "compression"),
    "upr-b": (*_NOT_UPR, "compression"),
    "tap": (*_NOT_OLD, "compression", "state", "rollback_points"),
}
"""Options of a source that mean nothing in a dialect."""


@dataclass(frozen=True, slots=True)
class Speech:
    """How connections are made in one dialect."""

    features: tuple[int, ...]
    connect: Callable[[Introduction, ConsumerSettings, random.Random, float], DcpConsumer]


def _dcp(
    introduction: Introduction, settings: ConsumerSettings, rng: random.Random, now: float
) -> DcpConsumer:
    return DcpConsumer(introduction, settings, rng=rng, now=now)


DCP_SPEECH = Speech(CONSUMER_FEATURES, _dcp)


def speech_of(dialect: str, *, xattrs: bool, tap: TapSettings) -> Speech:
    """How to speak a dialect of `DIALECTS`."""

    def old(
        introduction: Introduction, settings: ConsumerSettings, rng: random.Random, now: float
    ) -> DcpConsumer:
        if dialect == "tap":
            return TapReader(introduction, settings, tap, rng=rng, now=now)
        made = UprAConsumer if dialect == "upr-a" else UprBConsumer
        return made(introduction, settings, rng=rng, now=now)

    return DCP_SPEECH if dialect == "dcp" else Speech(old_features(xattrs=xattrs), old)
