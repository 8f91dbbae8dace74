"""Real nodes for tests, ours and yours, that can be killed, rewound, cut off and slowed down.

    with tailrace.testing.node(vbuckets=16) as node:
        node.set("user::1", {"name": "Ada"})
        reader = start_my_reader(node.url)
        node.rewind(vbucket=3, to_seqno=100)        # like a failover that loses data

In pytest the fixture ``tailrace_node`` is one of these; the plugin comes with the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..clock import SYSTEM, Clock

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from .running import RunningNode

__all__ = ["node"]


def node(
    vbuckets: int = 16,
    *,
    bucket: str = "default",
    buckets: Iterable[str] = (),
    data: str | Path | None = None,
    users: Mapping[str, str] | None = None,
    settings: Mapping[str, str | bool | int | float] | None = None,
    tls: ssl.SSLContext | None = None,
    clock: Clock = SYSTEM,
) -> RunningNode:
    """A node on a free port of this machine, in a thread of this process; see `RunningNode`."""
    from .running import RunningNode

    return RunningNode(
        vbuckets,
        bucket=bucket,
        buckets=buckets,
        data=data,
        users=users,
        settings=settings,
        tls=tls,
        clock=clock,
    )
