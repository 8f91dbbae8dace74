"""Connection strings: where the nodes are, who logs in, and which bucket.

    couchbase://[user[:password]@]host[:port[=kv]][,host2…][/bucket][?name=value[&name=value…]]

``couchbases://`` is the same over TLS. User, password, bucket and values may be percent-encoded; an IPv6
address is in brackets. A single name without a port may be known to DNS as a cluster (see
`client.srv_records`). The options are those of the SDKs' connection strings: those that say how to reach a
cluster are used, those for other services are ignored. No text made here ever shows the password.

Rules: docs/spec/servers.md#connection-string.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict
from urllib.parse import quote, unquote_to_bytes

from .errors import UsageError
from .units import host_and_port, parse_duration_s, parse_integer

__all__ = ["DEFAULT_BUCKET", "DEFAULT_PORT", "DEFAULT_TLS_PORT", "Address", "ConnectionString", "parse"]

DEFAULT_PORT = 11210
DEFAULT_TLS_PORT = 11207
DEFAULT_BUCKET = "default"

MAX_HOSTS = 64
MAX_LENGTH = 8192
MAX_HOST = 253
MAX_BUCKET = 100

_SCHEMES = {"couchbase": False, "couchbases": True}
_KV_TYPES = ("kv", "mcd", "cccp")
"""What SDKs write after the port of the key-value service."""
_MANAGEMENT_PORTS = (8091, 18091)
_SRV_PREFIX = re.compile(r"_couchbases?\._tcp\.(?=.)")
_SHAPE = "write it like couchbase://user:password@host:11210/bucket"
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_BUCKET = re.compile(r"[A-Za-z0-9_.%-]+")
_NETWORK = re.compile(r"[A-Za-z0-9_.-]{1,100}")

# The names that SDKs have for each option; the first is what we write.
_OPTIONS = {
    "network": ("network",),
    "ca_file": ("ca_cert_path", "trust_certificate", "certpath"),
    "verify": ("tls_verify", "ssl"),
    "connect_timeout_s": ("kv_connect_timeout", "connect_timeout"),
    "compression": ("compression", "enable_compression"),
    "dns_srv": ("enable_dns_srv", "dnssrv"),
    "nameserver": ("dns_nameserver",),
    "nameserver_port": ("dns_port",),
}
_MEANING = {name: field for field, names in _OPTIONS.items() for name in names}
_FOR_OTHERS = frozenset(  # options of the SDKs that have no use here
    """analytics_timeout bootstrap_timeout config_idle_redial_timeout config_poll_floor config_poll_interval
    config_poll_timeout config_total_timeout console_log_level detailed_errcodes dcp_buffer_size dcp_priority
    disable_mozilla_ca_certificates disconnect_timeout dns_srv_timeout dump_configuration
    enable_clustermap_notification enable_dcp_expiry enable_lazy_connections enable_metrics
    enable_mutation_tokens enable_tcp_keep_alive enable_tls enable_tracing enable_unordered_execution
    fetch_mutation_tokens http_idle_conn_timeout http_idle_connection_timeout http_max_idle_conns
    idle_http_connection_timeout key_value_durable_timeout key_value_timeout kv_buffer_size kv_durable_timeout
    kv_pool_size kv_timeout management_timeout max_http_connections max_queue_size operation_timeout
    orphaned_response_logging orphaned_response_logging_interval orphaned_response_logging_sample_size
    query_timeout resolve_timeout sasl_mech_force search_timeout server_wait_backoff show_queries
    tcp_keep_alive_interval timeout unordered_execution_enabled use_ip_protocol user_agent_extra view_timeout
    views_timeout""".split()  # noqa: SIM905 - sixty names
)
_YES, _NO = ("true", "on", "1", "yes"), ("false", "off", "0", "no")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """What a connection string says, with the defaults filled in."""

    addresses: tuple[Address, ...]
    bucket: str = DEFAULT_BUCKET
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    name: str | None = None
    """The host, if it is a single name without a port: a cluster, if DNS has SRV records for it."""
    network: str = "auto"
    """Which addresses of the nodes to use: ``default``, ``external`` or another; ``auto``: as the seeds."""
    ca_file: str | None = None
    verify: bool = True
    connect_timeout_s: float | None = None
    compression: bool | None = None
    dns_srv: bool = True
    nameserver: Address | None = None
    """The server to ask for SRV records instead of the system's name servers."""

    def __str__(self) -> str:
        """The connection string without the password: for logs, messages and offsets."""
        user = "" if self.username is None else quote(self.username, safe="") + "@"
        hosts = self.name or ",".join(map(_shown, self.addresses))
        scheme = "couchbases" if self.tls else "couchbase"
        options = "&".join(f"{name}={quote(value, safe='')}" for name, value in self._options())
        return f"{scheme}://{user}{hosts}/{quote(self.bucket, safe='')}{'?' + options if options else ''}"

    def _options(self) -> list[tuple[str, str]]:
        """The options that differ from their defaults."""
        options: list[tuple[str, str]] = []
        if self.network != "auto":
            options.append(("network", self.network))
        if self.ca_file is not None:
            options.append(("ca_cert_path", self.ca_file))
        if not self.verify:
            options.append(("tls_verify", "none"))
        if self.connect_timeout_s is not None:
            options.append(("kv_connect_timeout", f"{self.connect_timeout_s:g}s"))
        if self.compression is not None:
            options.append(("compression", "true" if self.compression else "false"))
        if not self.dns_srv:
            options.append(("enable_dns_srv", "false"))
        if self.nameserver is not None:
            options += [("dns_nameserver", self.nameserver.host), ("dns_port", str(self.nameserver.port))]
        return options


def parse(text: str, environ: Mapping[str, str] | None = None) -> ConnectionString:
    """Parse a connection string; user and password that it leaves out come from ``environ``, if given."""
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a connection string has up to {MAX_LENGTH} characters, not {len(text)}")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise UsageError("a connection string has no blanks or control characters, percent-encode them")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise UsageError(f"a connection string starts with couchbase:// or couchbases://, {_SHAPE}")
    tls = _SCHEMES[scheme]
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    if "@" in path or authority.count("@") > 1:
        raise UsageError("a '/' or '@' in user or password must be percent-encoded, as %2F or %40")
    user, at, hosts = authority.rpartition("@")
    hosts = _SRV_PREFIX.sub("", hosts.replace(";", ","), 1)
    username, password = _login(user, environ or {}, given=bool(at))
    addresses = _addresses(hosts, tls=tls)
    return ConnectionString(
        addresses,
        _bucket(path),
        username,
        password,
        tls,
        name=_cluster_name(hosts),
        **_options(query, tls=tls),
    )


class _UrlOptions(TypedDict, total=False):
    network: str
    ca_file: str
    verify: bool
    connect_timeout_s: float
    compression: bool
    dns_srv: bool
    nameserver: Address


def _options(query: str, *, tls: bool) -> _UrlOptions:
    """The options after the question mark."""
    texts: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        encoded, equals, text = pair.partition("=")
        name = _decoded(encoded, "the name of an option")
        if name in _FOR_OTHERS or name.startswith(("timeout.", "io.", "security.")):
            continue
        meaning = _MEANING.get(name)
        if meaning is None and "@" in name:  # don't show the name: it is the rest of a password
            raise UsageError("a '?' in user or password must be percent-encoded, as %3F")
        if meaning is None or not equals:
            near = difflib.get_close_matches(name, [*_MEANING, *_FOR_OTHERS], 1)
            hint = f", is it {near[0]}?" if near and meaning is None else ", write name=value"
            raise UsageError(f"{name[:100]!r} is not an option of a connection string{hint}")
        texts[meaning] = _decoded(text, name)
    options: _UrlOptions = {}
    if "network" in texts:
        if _NETWORK.fullmatch(texts["network"]) is None:
            raise UsageError("network must be auto, default, external, or another name from the cluster map")
        options["network"] = texts["network"]
    if "ca_file" in texts:
        options["ca_file"] = texts["ca_file"]
    if "verify" in texts:
        if texts["verify"] not in ("none", "peer", "on", "off", "no_verify"):
            raise UsageError("tls_verify must be peer or none")
        options["verify"] = texts["verify"] in ("peer", "on", "off")  # ssl=off is about TLS, not about checks
    if not tls and (texts.keys() & {"ca_file", "verify"}):
        raise UsageError("certificates are for couchbases://, which is TLS")
    if "connect_timeout_s" in texts:
        options["connect_timeout_s"] = _seconds(texts["connect_timeout_s"])
    flags: tuple[Literal["compression", "dns_srv"], ...] = ("compression", "dns_srv")
    for name in flags:
        if name in texts:
            if texts[name].lower() not in _YES + _NO:
                raise UsageError(f"{_OPTIONS[name][0]} must be true or false")
            options[name] = texts[name].lower() in _YES
    if "nameserver" in texts:
        try:
            host = str(ipaddress.ip_address(texts["nameserver"]))
        except ValueError:
            raise UsageError("dns_nameserver must be the address of a name server") from None
        options["nameserver"] = Address(host, _port(texts.get("nameserver_port", "53"), "dns_port"))
    elif "nameserver_port" in texts:
        raise UsageError("dns_port is the port of dns_nameserver, write both")
    return options


def _seconds(text: str) -> float:
    """Seconds from a text with a unit, or in milliseconds as the SDKs have it."""
    seconds = parse_integer(text, maximum=86_400_000) / 1000 if text.isdigit() else parse_duration_s(text)
    if seconds <= 0:
        raise UsageError("kv_connect_timeout must be more than 0")
    return seconds


def _cluster_name(hosts: str) -> str | None:
    """The host, if it is a single name without a port that a name server could know."""
    if set(hosts) & set(",:[") or hosts == "localhost" or re.fullmatch(r"[0-9.]+", hosts):
        return None
    return hosts


def _login(user: str, environ: Mapping[str, str], *, given: bool) -> tuple[str | None, str | None]:
    username: str | None = None
    password: str | None = None
    if given:
        name, colon, secret = user.partition(":")
        username = _decoded(name, "the user name")
        if not username:
            raise UsageError(f"the user name before '@' is missing, {_SHAPE}")
        password = _decoded(secret, "the password") if colon else None
    if username is None:
        username = environ.get("TAILRACE_USERNAME") or None
    if password is None and username is not None:
        password = environ.get("TAILRACE_PASSWORD")
    return username, password


def _addresses(hosts: str, *, tls: bool) -> tuple[Address, ...]:
    if not hosts:
        raise UsageError(f"the host is missing, {_SHAPE}")
    addresses = tuple(_address(host, tls=tls) for host in hosts.split(","))
    if len(addresses) > MAX_HOSTS:
        raise UsageError(f"a connection string names up to {MAX_HOSTS} hosts, not {len(addresses)}")
    return addresses


def _address(text: str, *, tls: bool) -> Address:
    if text.startswith("["):
        inner, bracket, port_text = text[1:].partition("]")
        if not bracket or (port_text and not port_text.startswith(":")):
            raise UsageError("an IPv6 address must be in brackets with the port after it, as in [::1]:11210")
        host = _decoded(inner, "the host")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UsageError(f"[{inner}] is not an IPv6 address, write one such as [::1]") from None
        colon, port_text = port_text[:1], port_text[1:]
    else:
        if text.count(":") > 1:
            raise UsageError("an IPv6 address must be in brackets, as in [::1]:11210")
        host, colon, port_text = text.partition(":")
        if not _is_host_name(host):
            raise UsageError(f"{host!r} is not a host name, {_SHAPE}")
    if not colon:
        return Address(host, DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    port_text, equals, service = port_text.partition("=")
    port = _port(port_text, f"the port of {host!r}")
    if equals and service not in _KV_TYPES:
        raise UsageError(
            f"{host}:{port}={service[:20]} is not a key-value service, which is all that is read here"
        )
    if port in _MANAGEMENT_PORTS and not equals:
        raise UsageError(
            f"{port} is where clusters are managed over HTTP, not where data is; leave the port out, "
            f"or write {host}:{port}=kv if a node really listens there"
        )
    return Address(host, port)


def _shown(address: Address) -> str:
    """An address as `_address` reads it."""
    return str(address).replace("%", "%25") + ("=kv" if address.port in _MANAGEMENT_PORTS else "")


def _port(text: str, what: str) -> int:
    try:
        return parse_integer(text, minimum=1, maximum=0xFFFF)
    except UsageError:
        raise UsageError(f"{what} is not a number from 1 to 65535, {_SHAPE}") from None


def _is_host_name(host: str) -> bool:
    """Whether it is labels of letters, digits, '-' and '_' joined by dots; the root's dot may end it."""
    return len(host) <= MAX_HOST and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))


def _bucket(path: str) -> str:
    if not path:
        return DEFAULT_BUCKET
    if "#" in path:
        raise UsageError("a connection string has no part after a '#', options come after a '?'")
    bucket = _decoded(path, "the bucket")
    if _BUCKET.fullmatch(bucket) is None or len(bucket) > MAX_BUCKET:
        raise UsageError(
            f"a bucket's name has up to {MAX_BUCKET} letters, digits, '_', '-', '.' and '%', {_SHAPE}"
        )
    return bucket


def _decoded(text: str, what: str) -> str:
    """Percent-decode a text; a '%' that starts no code, or bytes that are not UTF-8, are an error."""
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise UsageError(f"{what} has a '%' that starts no code, write a percent sign as %25")
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{what} is not UTF-8 after percent-decoding, encode it as UTF-8") from None
    if "\0" in decoded:
        raise UsageError(f"{what} must not have a NUL character, which ends a name in a login")
    return decoded
