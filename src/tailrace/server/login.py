"""Who a connection belongs to."""

from __future__ import annotations

from ..protocol.sasl import SaslServer

__all__ = ["Login"]


class Login:
    """The login of one connection. ``needed`` is False on a node without users: there it changes nothing."""

    __slots__ = ("authenticated", "failures", "missing_since", "needed", "sasl")

    def __init__(self, sasl: SaslServer, now: float, *, needed: bool) -> None:
        self.sasl = sasl
        self.needed = needed
        self.authenticated = not needed
        self.missing_since = now
        self.failures = 0

    def begin(self, now: float) -> None:
        """A login needs another step; an earlier login is over."""
        self._log_out(now)

    def succeed(self) -> None:
        """The peer is who it says it is."""
        self.authenticated = True

    def fail(self, now: float) -> None:
        """An attempt failed; an earlier login is over, too."""
        self.failures += 1
        self._log_out(now)

    def _log_out(self, now: float) -> None:
        if self.authenticated and self.needed:
            self.authenticated = False
            self.missing_since = now
