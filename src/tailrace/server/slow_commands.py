"""Commands that took long from request to answer: reported as an event and as a trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .. import tracing
from ..wire.header import HEADER

if TYPE_CHECKING:
    from .call import Call

__all__ = ["note_answer"]


def note_answer(call: Call[Any], answer: bytes | None) -> None:
    """Report a command that is answered, or has nothing to say, if it took long."""
    session = call.session
    node = session.node
    took_s = node.clock.monotonic() - call.now
    if took_s < node.settings.slow_command:
        return
    status = HEADER.unpack_from(answer)[5] if answer else 0
    facts = {
        "command": call.command.message.__name__,
        "took_ms": round(took_s * 1000),
        "status": f"0x{status:02x}",
        "bucket": "" if session.bucket is None else session.bucket.name,
        "vbucket": call.request.vbucket,
        "peer": session.peer,
    }
    node.events.record("slow_command", level=logging.INFO, **facts)
    now_ns = node.clock.time_ns()
    tracing.add_span("tailrace.command", now_ns - int(took_s * 1e9), now_ns, **facts)
