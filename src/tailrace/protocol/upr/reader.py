"""The reader's side of a UPR connection, draft A or B: see `dcp.translating_reader` and `translation`."""

from __future__ import annotations

import random
from typing import ClassVar

from ...model import MAX_U64
from ...wire.header import Frame
from ..dcp.reader import ReaderSettings
from ..dcp.reader_stream import ReaderStream
from ..dcp.translating_reader import TranslatingReader
from ..handshake import Introduction
from ..questions import Patience
from .translation import UprATranslation, UprBTranslation, UprTranslation

__all__ = ["UprAReader", "UprBReader", "UprReader"]


class UprReader(TranslatingReader):
    """What the drafts have in common."""

    TRANSLATION: ClassVar[type[UprTranslation]]

    def __init__(
        self,
        introduction: Introduction,
        settings: ReaderSettings,
        *,
        rng: random.Random,
        now: float,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(introduction, settings, rng=rng, now=now, patience=patience)
        self._upr = self.TRANSLATION(self._made, self._send, self._streams.new_opaque, group=settings.name)

    def open_stream(
        self, stream: ReaderStream, *, end_seqno: int = MAX_U64, flags: int = 0, value: bytes = b""
    ) -> None:
        opaque = self._streams.add(stream)
        self._upr.request(opaque, stream.vbucket, stream.position, stream.log, end_seqno)
        self._pass_on()

    def close_stream(self, vbucket: int) -> None:
        opaque = self._streams.opaque_of(vbucket)
        if opaque is not None:
            self._upr.forget(opaque)
        super().close_stream(vbucket)

    def _translate(self, frame: Frame) -> None:
        if frame.opaque not in self._streams.retired:
            self._upr.receive(frame)


class UprAReader(UprReader):
    """Draft A."""

    TRANSLATION = UprATranslation


class UprBReader(UprReader):
    """Draft B."""

    TRANSLATION = UprBTranslation
