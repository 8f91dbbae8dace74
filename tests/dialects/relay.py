"""From one node's TAP stream into another node: a pipe, since a node takes what a producer sends."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

from dialects.raw_peer import Peer, packet, tap_connect
from tailrace.testing.running import RunningNode

_FEATURES = struct.pack(">3H", 0x06, 0x0A, 0x0B)  # xattrs, snappy, JSON: documents stay what they are


class Relay:
    """Moves bytes both ways, acknowledgements too, until one side closes."""

    def __init__(
        self, source: RunningNode, target: RunningNode, name: bytes, flags: int, value: bytes = b""
    ) -> None:
        self._source, self._target = Peer(source), Peer(target)
        for peer in (self._source, self._target):
            assert peer.ask(packet(0x80, 0x1F, key=b"relay", value=_FEATURES)).half == 0
        self._source.send(tap_connect(name, flags, value))
        self.moved = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pairs = {
            self._source.socket: self._target.socket,
            self._target.socket: self._source.socket,
        }
        try:
            while True:
                ready, _, _ = select.select(list(pairs), [], [])
                for socket_ in ready:
                    data = socket_.recv(1 << 16)
                    if not data:
                        return
                    if socket_ is self._source.socket:
                        self.moved += len(data)
                    pairs[socket_].sendall(data)
        except (OSError, ValueError):
            return  # closed by `stop`, or a node is gone
        finally:
            for peer in (self._source, self._target):
                with contextlib.suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the end of the stream."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        for peer in (self._source, self._target):
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        for peer in (self._source, self._target):
            peer.socket.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
