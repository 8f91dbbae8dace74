"""Clusters found by name: the SRV records of a connection string's only host.

Rules: docs/spec/servers.md#dns-srv.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..clock import SYSTEM, Clock
from ..connstr import MAX_HOSTS, Address, ConnectionString
from ..errors import ConnectError

__all__ = ["LOOKUP_S", "SrvAnswer", "find_seeds", "look_up_srv"]

_SERVICES = {False: "_couchbase._tcp", True: "_couchbases._tcp"}
LOOKUP_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SrvAnswer:
    """What DNS says of a cluster."""

    addresses: tuple[Address, ...] = ()
    problem: str | None = None
    """Why there was no answer; None if there was one, even one without records."""


def find_seeds(where: ConnectionString, clock: Clock = SYSTEM) -> tuple[Address, ...]:
    """The nodes to call first: those that DNS names for the host, or else those of the string itself.

    Blocks for up to five seconds in all. A lookup that fails is not an error, because most names are just a
    node's. It is an error if DNS knows the cluster only with TLS and the connection string is without.
    """
    if where.name is None or not where.dns_srv:
        return where.addresses
    deadline = clock.monotonic() + LOOKUP_S
    answer = look_up_srv(where, tls=where.tls)
    if answer.addresses:
        return answer.addresses
    left_s = deadline - clock.monotonic()
    # a name server that could not answer the first question is not asked the second
    asks_again = not where.tls and answer.problem is None and left_s > 0
    if asks_again and look_up_srv(where, tls=True, timeout_s=left_s).addresses:
        raise ConnectError(f"{where.name} is only known with TLS, write couchbases://{where.name}")
    return where.addresses


def look_up_srv(where: ConnectionString, *, tls: bool, timeout_s: float = LOOKUP_S) -> SrvAnswer:
    """The targets of the records, each once, sorted by name: priority and weight are ignored."""
    from dns.exception import DNSException
    from dns.rdtypes.IN.SRV import SRV
    from dns.resolver import NXDOMAIN, NoAnswer, Resolver

    assert where.name is not None
    name = f"{_SERVICES[tls]}.{where.name.removesuffix('.')}."
    try:
        resolver = Resolver(configure=where.nameserver is None)
        if where.nameserver is not None:
            resolver.nameservers, resolver.port = [where.nameserver.host], where.nameserver.port
        records = resolver.resolve(name, "SRV", lifetime=timeout_s, search=False)
    except (NXDOMAIN, NoAnswer):
        return SrvAnswer()
    except (DNSException, OSError) as error:
        _log.debug("no SRV records of %s: %s", name, error)
        return SrvAnswer(problem=str(error) or type(error).__name__)
    targets = {
        Address(record.target.to_text(omit_final_dot=True), record.port)
        for record in records
        if isinstance(record, SRV) and record.port
    }
    return SrvAnswer(tuple(sorted(targets, key=str)[:MAX_HOSTS]))
