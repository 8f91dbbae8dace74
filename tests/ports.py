"""Ports for programs that can't pick a free one themselves, and ports that nobody listens on."""

from __future__ import annotations

import socket


class ReservedPort:
    """A port that the system gives to nobody else while this exists.

    It is bound here and not listened on: connections are refused, and a program that is given its number can
    bind it too, however often it is started, if it sets SO_REUSEADDR, as servers do.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
