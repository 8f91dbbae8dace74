"""Who a connection belongs to."""

from __future__ import annotations

from ..protocol.sasl import SaslServer

__all__ = ["Login"]


class Login:
    """Of one connection. ``needed`` is False on a node without users, where logins change nothing."""

    __slots__ = ("authenticated", "failures", "missing_since", "needed", "sasl")

    def __init__(self, sasl: SaslServer, now: float, *, needed: bool) -> None:
        self.sasl = sasl
        self.needed = needed
        self.authenticated = not needed
        self.missing_since = now
        self.failures = 0

    def begin(self, now: float) -> None:
        """A login goes on with another step; the one before it is over."""
        self._log_out(now)

    def succeed(self) -> None:
        """The peer is who it says."""
        self.authenticated = True

    def fail(self, now: float) -> None:
        """An attempt failed; that takes an earlier login away."""
        self.failures += 1
        self._log_out(now)

    def _log_out(self, now: float) -> None:
        if self.authenticated and self.needed:
            self.authenticated = False
            self.missing_since = now
