"""Clusters that are found by name: the SRV records of a connection string's lone host.

Rules: docs/spec/servers.md#dns-srv.
"""

from __future__ import annotations

import logging

from ..connstr import MAX_HOSTS, Address, ConnectionString
from ..errors import ConnectError

__all__ = ["find_seeds"]

_SERVICES = {False: "_couchbase._tcp", True: "_couchbases._tcp"}
_LOOKUP_S = 5.0

_log = logging.getLogger(__name__)


def find_seeds(where: ConnectionString) -> tuple[Address, ...]:
    """The nodes to call first: those that DNS names for the host, or else what the string says itself.

    Blocks for up to five seconds. A lookup that fails is no error, because most names are just a node's. Only
    where DNS knows the cluster with TLS and we were told to come without, the answer is to say so.
    """
    if where.name is None or not where.dns_srv:
        return where.addresses
    addresses = _lookup(where, tls=where.tls)
    if addresses:
        return addresses
    if not where.tls and _lookup(where, tls=True):
        raise ConnectError(f"{where.name} is only known with TLS, write couchbases://{where.name}")
    return where.addresses


def _lookup(where: ConnectionString, *, tls: bool) -> tuple[Address, ...]:
    """The targets of the records, each once, in the order of their names: priority and weight don't count."""
    from dns.exception import DNSException
    from dns.rdtypes.IN.SRV import SRV
    from dns.resolver import Resolver

    assert where.name is not None
    name = f"{_SERVICES[tls]}.{where.name.removesuffix('.')}."
    try:
        resolver = Resolver(configure=where.nameserver is None)
        if where.nameserver is not None:
            resolver.nameservers, resolver.port = [where.nameserver.host], where.nameserver.port
        records = resolver.resolve(name, "SRV", lifetime=_LOOKUP_S, search=False)
    except (DNSException, OSError) as error:
        _log.debug("no SRV records of %s: %s", name, error)
        return ()
    targets = {
        Address(record.target.to_text(omit_final_dot=True), record.port)
        for record in records
        if isinstance(record, SRV) and record.port
    }
    return tuple(sorted(targets, key=str)[:MAX_HOSTS])
