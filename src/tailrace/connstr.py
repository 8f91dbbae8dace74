"""Connection strings: where the nodes are, who logs in, and which bucket.

    couchbase://[user[:password]@]host[:port][,host2…][/bucket]

``couchbases://`` is the same over TLS. User, password and bucket may be percent-encoded; an IPv6 address
stands in brackets. No text made here ever shows the password.

Rules: docs/spec/servers.md#connection-string.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes

from .errors import UsageError
from .units import parse_integer

__all__ = ["DEFAULT_BUCKET", "DEFAULT_PORT", "DEFAULT_TLS_PORT", "Address", "ConnectionString", "parse"]

DEFAULT_PORT = 11210
DEFAULT_TLS_PORT = 11207
DEFAULT_BUCKET = "default"

MAX_HOSTS = 64
MAX_LENGTH = 8192
MAX_HOST = 253
MAX_BUCKET = 100

_SCHEMES = {"couchbase": False, "couchbases": True}
_SHAPE = "write it like couchbase://user:password@host:11210/bucket"
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_BUCKET = re.compile(r"[A-Za-z0-9_.%-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """What a connection string says, with the defaults filled in."""

    addresses: tuple[Address, ...]
    bucket: str = DEFAULT_BUCKET
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False

    def __str__(self) -> str:
        """The connection string without the password: for logs, messages and offsets."""
        user = "" if self.username is None else quote(self.username, safe="") + "@"
        hosts = ",".join(str(address).replace("%", "%25") for address in self.addresses)
        scheme = "couchbases" if self.tls else "couchbase"
        return f"{scheme}://{user}{hosts}/{quote(self.bucket, safe='')}"


def parse(text: str, environ: Mapping[str, str] | None = None) -> ConnectionString:
    """A connection string; user and password that it leaves out come from ``environ``, if that is given."""
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a connection string has up to {MAX_LENGTH} characters, not {len(text)}")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise UsageError("a connection string has no blanks or control characters, percent-encode them")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise UsageError(f"a connection string starts with couchbase:// or couchbases://, {_SHAPE}")
    tls = _SCHEMES[scheme]
    authority, _, path = rest.partition("/")
    if "@" in path or authority.count("@") > 1:
        raise UsageError("a '/' or '@' in user or password must be percent-encoded, as %2F or %40")
    user, at, hosts = authority.rpartition("@")
    username, password = _login(user, environ or {}, given=bool(at))
    return ConnectionString(_addresses(hosts, tls=tls), _bucket(path), username, password, tls)


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
            raise UsageError("an IPv6 address stands in brackets with the port behind it, as in [::1]:11210")
        host = _decoded(inner, "the host")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise UsageError(f"[{inner}] is no IPv6 address, write one such as [::1]") from None
        colon, port_text = port_text[:1], port_text[1:]
    else:
        if text.count(":") > 1:
            raise UsageError("an IPv6 address stands in brackets, as in [::1]:11210")
        host, colon, port_text = text.partition(":")
        if not _is_host_name(host):
            raise UsageError(f"{host!r} is no host name, {_SHAPE}")
    if not colon:
        return Address(host, DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    try:
        return Address(host, parse_integer(port_text, minimum=1, maximum=0xFFFF))
    except UsageError:
        raise UsageError(f"the port of {host!r} is no number from 1 to 65535, {_SHAPE}") from None


def _is_host_name(host: str) -> bool:
    """Labels of letters, digits, '-' and '_' with dots between them; the root's dot may stand at the end."""
    return len(host) <= MAX_HOST and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))


def _bucket(path: str) -> str:
    if not path:
        return DEFAULT_BUCKET
    if "?" in path or "#" in path:
        raise UsageError(
            "a connection string has no options behind the bucket, use the command's own options"
        )
    bucket = _decoded(path, "the bucket")
    if _BUCKET.fullmatch(bucket) is None or len(bucket) > MAX_BUCKET:
        raise UsageError(
            f"a bucket's name has up to {MAX_BUCKET} letters, digits, '_', '-', '.' and '%', {_SHAPE}"
        )
    return bucket


def _decoded(text: str, what: str) -> str:
    """Percent-decoded; a '%' that starts no code, or bytes that are no UTF-8, are an error."""
    if re.search(r"%(?![0-9A-Fa-f]{2})", text):
        raise UsageError(f"{what} has a '%' that starts no code, write a percent sign as %25")
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{what} is not UTF-8 after percent-decoding, encode it as UTF-8") from None
    if "\0" in decoded:
        raise UsageError(f"{what} must not have a NUL character, which ends a name in a login")
    return decoded
