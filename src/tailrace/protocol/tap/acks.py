"""TAP's acknowledgements, the producer's half: what was sent and has not been answered.

An answer acknowledges its message and everything before it. Of a message only what is needed to send it again
is kept: for items the seqnos, since the store has the changes; for other messages their content. Sending
again means going back: every vbucket returns to the last change that arrived.

Rules: docs/spec/tap.md#acknowledgements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...frames import Seqnos
from .clients import TapClient, TapControl, TapCursor

__all__ = ["AckLog", "wire_number", "wire_numbers"]

_NUMBERS = 0xFFFF_FFFF
"""Sequence numbers run from 1 to this and then start at 1 again; 0 is for no-ops."""


def wire_number(number: int) -> int:
    """A message's number as it is in its header."""
    return (number - 1) % _NUMBERS + 1


def wire_numbers(first: int, count: int) -> npt.NDArray[np.uint32]:
    """The same for consecutive messages."""
    return ((first - 1 + np.arange(count)) % _NUMBERS + 1).astype(np.uint32)


@dataclass(slots=True)
class _Sent:
    first: int
    last: int
    cursor: TapCursor | None
    epoch: int
    control: TapControl | None
    seqnos: Seqnos | None


class AckLog:
    """Messages on their way, in order. Their number is bounded by the window."""

    def __init__(self, client: TapClient, *, enabled: bool) -> None:
        self.enabled = enabled
        self.acked = client.sent
        """Number of the last message that is known to have arrived."""
        self._client = client
        self._sent: deque[_Sent] = deque()

    @property
    def unacked(self) -> int:
        return self._client.sent - self.acked if self.enabled else 0

    def add_control(self, control: TapControl, cursor: TapCursor | None) -> int:
        """A message that is not an item is sent; returns its number."""
        client = self._client
        client.sent += 1
        if self.enabled:
            epoch = 0
            if cursor is not None:
                epoch = cursor.epoch
                cursor.outstanding += 1
            self._sent.append(_Sent(client.sent, client.sent, cursor, epoch, control, None))
        return client.sent

    def add_items(self, cursor: TapCursor, seqnos: Seqnos) -> int:
        """Items are sent; returns the number of the first."""
        client, first = self._client, self._client.sent + 1
        client.sent += len(seqnos)
        if self.enabled:
            cursor.outstanding += len(seqnos)
            self._sent.append(_Sent(first, client.sent, cursor, cursor.epoch, None, seqnos))
        return first

    def find(self, wire: int) -> int | None:
        """The number of an unanswered message, from the one in its header; None if none has that."""
        first = self.acked + 1
        number = first + (wire - wire_number(first)) % _NUMBERS
        return number if wire and number <= self._client.sent else None

    def acknowledge(self, number: int) -> None:
        """This message has arrived, and all before it."""
        self.acked = max(self.acked, number)
        sent = self._sent
        while sent and sent[0].first <= number:
            oldest = sent[0]
            count = min(number, oldest.last) - oldest.first + 1
            cursor = (
                oldest.cursor if oldest.cursor is not None and oldest.cursor.epoch == oldest.epoch else None
            )
            if cursor is not None:
                cursor.outstanding -= count
                if not cursor.outstanding:
                    cursor.acked = cursor.position
                elif oldest.seqnos is not None:
                    cursor.acked = int(oldest.seqnos[count - 1])
            if oldest.last > number:
                assert oldest.seqnos is not None
                oldest.first, oldest.seqnos = number + 1, oldest.seqnos[count:]
                return
            sent.popleft()

    def go_back(self) -> list[TapControl]:
        """Have everything that was not acknowledged sent again, under new numbers.

        Controls that belong to a vbucket go back to its cursor; the rest are returned.
        """
        unclaimed: list[TapControl] = []
        for message in reversed(self._sent):
            if message.control is None:
                continue
            if message.cursor is None:
                unclaimed.insert(0, message.control)
            elif message.cursor.epoch == message.epoch:
                message.cursor.controls.insert(0, message.control)
        for cursor in self._cursors():
            cursor.go_back()
        self._sent.clear()
        self.acked = self._client.sent
        return unclaimed

    def _cursors(self) -> Iterator[TapCursor]:
        for message in self._sent:
            if (
                message.cursor is not None
                and message.cursor.epoch == message.epoch
                and message.cursor.outstanding
            ):
                yield message.cursor

    def __len__(self) -> int:
        return len(self._sent)
