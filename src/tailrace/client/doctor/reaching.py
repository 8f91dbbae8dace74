"""The way to the nodes: names, sockets, certificates."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...clock import Clock
from ...connstr import Address, ConnectionString
from ...errors import ConnectError, reason_of
from ..kv_connection import dial
from ..srv_records import look_up_srv
from .findings import Finding, Severity, error, ok, warning

__all__ = ["NAMES", "REACH", "TLS", "examine_names", "examine_sockets"]

NAMES, REACH, TLS = "names", "reach", "tls"

_CERTIFICATE_DAYS = 30
_EXPIRED = 10
_OTHER_HOSTS = (62, 64)  # a name, an address
_UNKNOWN_ISSUERS = (2, 18, 19, 20, 21)
"""Which of OpenSSL's verify codes (X509_V_ERR_…) mean that the issuer is not known."""


@dataclass(slots=True)
class FoundNames:
    """What DNS answered."""

    findings: list[Finding]
    seeds: tuple[Address, ...] = ()
    known: tuple[Address, ...] = ()
    """The seeds that have an address."""


def examine_names(where: ConnectionString, timeout_s: float) -> FoundNames:
    """Whether DNS knows the cluster and its nodes."""
    findings: list[Finding] = []
    seeds = where.addresses
    if where.name is not None and where.dns_srv:
        answer = look_up_srv(where, tls=where.tls, timeout_s=timeout_s)
        other = None
        if answer.addresses:
            seeds = answer.addresses
            listed = ", ".join(map(str, seeds))
            findings.append(ok(NAMES, f"the SRV records of {where.name} name {listed}"))
        elif answer.problem is not None:
            findings.append(
                warning(
                    NAMES,
                    f"no name server says whether {where.name} has SRV records: {answer.problem}",
                    "check the name servers of this machine, or name one with ?dns_nameserver=ADDRESS; "
                    "with enable_dns_srv=false none is asked",
                )
            )
        else:
            other = look_up_srv(where, tls=not where.tls, timeout_s=timeout_s)
        if other is not None and other.addresses:
            scheme = "couchbase" if where.tls else "couchbases"
            make_finding = error if not where.tls else warning
            findings.append(
                make_finding(
                    NAMES,
                    f"{where.name} has SRV records {'without' if where.tls else 'for'} TLS only",
                    f"write {scheme}://{where.name}",
                )
            )
            if not where.tls:
                return FoundNames(findings)  # a client goes no further either
        elif other is not None:
            findings.append(ok(NAMES, f"{where.name} has no SRV records, and is taken for a node"))
    hosts = dict.fromkeys(seed.host for seed in seeds)
    of_hosts = {host: next(examine_hosts([host]), None) for host in hosts}
    unknown = {host for host, finding in of_hosts.items() if finding is not None and finding.way_out}
    is_one_known = len(unknown) < len(of_hosts)
    for host, finding in of_hosts.items():
        if finding is not None:  # one that is gone matters little while there is another
            findings.append(_milder(finding) if host in unknown and is_one_known else finding)
    return FoundNames(findings, seeds, tuple(seed for seed in seeds if seed.host not in unknown))


def _milder(finding: Finding) -> Finding:
    return replace(finding, severity=Severity.WARNING)


def examine_hosts(hosts: Iterable[str]) -> Iterator[Finding]:
    """Whether names have addresses; hosts that are addresses are passed over."""
    for host in dict.fromkeys(hosts):
        if _is_address(host):
            continue
        try:
            addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError) as problem:
            yield error(
                NAMES,
                f"{host} has no address: {reason_of(problem)}",
                "check the name; a cluster in another network needs its outside names (?network=external), "
                "or a name server that knows the inside ones",
            )
        else:
            yield ok(NAMES, f"{host} is {', '.join(sorted(map(str, addresses)))}")


def examine_sockets(
    seeds: Iterable[Address], tls: ssl.SSLContext | None, *, timeout_s: float, clock: Clock
) -> tuple[list[Finding], list[Address]]:
    """Whether the seeds accept connections and have good certificates; and those that could be reached."""
    findings: list[Finding] = []
    reached = []
    for seed in seeds:
        try:
            dialled = dial(seed, tls, timeout_s)
        except ConnectError as problem:
            findings.append(_unreachable(seed, problem))
            continue
        with dialled:
            reached.append(seed)
            findings.append(ok(REACH, f"{seed} accepts connections"))
            if isinstance(dialled, ssl.SSLSocket):
                findings += _examine_certificate(seed, dialled, clock)
    if not reached:  # one that is down matters little while another answers
        findings = [replace(finding, severity=Severity.ERROR) for finding in findings]
    return findings, reached


def _unreachable(seed: Address, problem: ConnectError) -> Finding:
    cause = problem.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code == _EXPIRED:
            way_out = "the certificate has expired: renew it on the node (or this machine's clock is wrong)"
        elif cause.verify_code in _OTHER_HOSTS:
            way_out = "use a name that the certificate has, or make one with this name"
        elif cause.verify_code in _UNKNOWN_ISSUERS:
            way_out = "give the authority that signed it with --tls-ca FILE or ?ca_cert_path=FILE"
        else:
            way_out = "look at it with openssl s_client"
        return error(TLS, f"the certificate of {seed} is not valid: {cause.verify_message}", way_out)
    if isinstance(cause, ssl.SSLError) or "TLS" in str(problem):
        return error(
            TLS,
            f"{seed} does not speak TLS: {getattr(cause, 'reason', None) or cause}",
            "couchbases:// needs the TLS port (11207 unless it was changed); couchbase:// is without TLS",
        )
    return warning(
        REACH,
        str(problem).partition(";")[0],
        "check host and port, whether the node runs, and firewalls on the way",
    )


def _examine_certificate(seed: Address, connection: ssl.SSLSocket, clock: Clock) -> Iterator[Finding]:
    certificate = connection.getpeercert()
    if not certificate:
        yield warning(
            TLS,
            f"the certificate of {seed} is not checked",
            "leave out --tls-no-verify and tls_verify=none, and give the authority with --tls-ca FILE",
        )
        return
    ends = str(certificate["notAfter"])
    days = (ssl.cert_time_to_seconds(ends) - clock.time_ns() / 1e9) / 86_400
    if days < _CERTIFICATE_DAYS:
        yield warning(TLS, f"the certificate of {seed} expires in {days:.0f} days ({ends})", "renew it")
    else:
        yield ok(TLS, f"{seed} speaks {connection.version()}, its certificate is valid until {ends}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
