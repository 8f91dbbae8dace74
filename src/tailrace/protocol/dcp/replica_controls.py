"""What a replica agrees on with its producer before the first stream: one control after the other.

A producer may refuse all of them but flow control, without which a node could be made to hold any amount.

Rules: docs/spec/dcp.md#control-keys-of-a-replica.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from ...wire.codes import ControlKey, Status, status_name
from ...wire.dcp import DcpControl

if TYPE_CHECKING:
    from ..handler import Host

__all__ = ["ReplicaControls"]

_OPAQUE = 0

_log = logging.getLogger(__name__)


class ReplicaControls:
    """The controls of one connection: what is still to be asked, and what was granted."""

    def __init__(self) -> None:
        self.v7_status_codes = False
        self.sync_writes = False
        """The producer sends durable writes before they are decided, and wants to know which are here."""
        self._left: deque[tuple[bytes, bytes]] = deque()

    def begin(self, host: Host) -> None:
        """The connection is open: everything is still to be asked."""
        settings = host.settings
        self._left.extend(
            [
                (ControlKey.ENABLE_NOOP, b"true"),
                (ControlKey.SET_NOOP_INTERVAL, f"{settings.replication_noop_interval:g}".encode()),
                (ControlKey.SET_PRIORITY, b"high"),
                (ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN, b"true"),
                (ControlKey.SEND_STREAM_END_ON_CLOSE, b"true"),
                (ControlKey.ENABLE_EXPIRY_OPCODE, b"true"),
                (ControlKey.ENABLE_SYNC_WRITES, b"true"),
                (ControlKey.CONSUMER_NAME, host.own_name.encode()),
                (ControlKey.INCLUDE_DELETED_USER_XATTRS, b"true"),
                (ControlKey.V7_STATUS_CODES, b"true"),
                (ControlKey.MAX_MARKER_VERSION, b"2.2"),
                (ControlKey.FLATBUFFERS_SYSTEM_EVENTS, b"true"),
                # versions that are kept here can be passed on when this node is the active one
                (ControlKey.CHANGE_STREAMS, b"true"),
                (ControlKey.CONNECTION_BUFFER_SIZE, str(settings.replication_buffer).encode()),
            ]
        )

    @property
    def is_done(self) -> bool:
        """Whether streams can be asked for."""
        return not self._left

    def request(self) -> DcpControl:
        """The control to send now."""
        key, value = self._left[0]
        return DcpControl(key=key, value=value, opaque=_OPAQUE)

    def answered(self, status: int, peer: str) -> str | None:
        """The last control was answered; returns why the connection can't be used, if it can't."""
        if not self._left:
            return "a control was answered that was not sent"
        key, _ = self._left.popleft()
        if status == Status.SUCCESS:
            self.v7_status_codes |= key == ControlKey.V7_STATUS_CODES
            self.sync_writes |= key == ControlKey.ENABLE_SYNC_WRITES
            return None
        if key == ControlKey.CONNECTION_BUFFER_SIZE:
            return "the producer supports no flow control"
        _log.debug("%s: %s is refused: %s", peer, key.decode(), status_name(status))
        return None
