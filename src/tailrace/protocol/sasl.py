"""SASL PLAIN and SCRAM, both halves, without I/O.

    client                                   server
    n,,n=<user>,r=<nonce>            ->
                                     <-      r=<nonce><more>,s=<salt>,i=<iterations>
    c=biws,r=<nonce><more>,p=<proof> ->
                                     <-      v=<signature>

Only the comma separates attributes: nonces of real clients contain spaces. In user names ``=2C`` and ``=3D``
stand for ``,`` and ``=``. Names and passwords are UTF-8 as they are, without SASLprep, as in real servers.
What either side computes is compared in constant time, and a name that doesn't exist takes the same path as
one that does (see `Users`).

Rules: docs/spec/bootstrap.md#login.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from .. import rng as rng_
from ..errors import LoginError, UsageError
from ..wire.codes import Status

__all__ = [
    "MECHANISMS",
    "Credential",
    "PlainClient",
    "SaslAnswer",
    "SaslClient",
    "SaslServer",
    "ScramClient",
    "Users",
    "choose_mechanism",
    "client_for",
    "plain_message",
]

MECHANISMS = ("SCRAM-SHA512", "SCRAM-SHA256", "SCRAM-SHA1", "PLAIN")
"""Strongest first, in the order in which a server lists them."""

MIN_ITERATIONS = 1_000
MAX_ITERATIONS = 1_000_000
"""Fewer make a stolen exchange cheap to break; more let a server waste our time."""

DEFAULT_ITERATIONS = 4_096
SALT_BYTES = 16
MAX_MESSAGE = 4_096
MAX_SALT = 1_024

_HASHES = {"SCRAM-SHA512": "sha512", "SCRAM-SHA256": "sha256", "SCRAM-SHA1": "sha1"}
_PLAIN = "PLAIN"


def choose_mechanism(offered: Iterable[str], *, allow_plain: bool) -> str:
    """The strongest mechanism that both sides know.

    PLAIN shows the password to everybody on the network path. The list of mechanisms is not protected either,
    so PLAIN is not used just because a server offers nothing else: the connection must be encrypted or the
    user must have allowed it.
    """
    names = set(offered)
    for mechanism in MECHANISMS:
        if mechanism in names and (mechanism != _PLAIN or allow_plain):
            return mechanism
    if _PLAIN in names:
        raise LoginError(
            "the server offers only PLAIN, which shows the password on an open connection; use TLS"
        )
    raise LoginError(
        f"the server offers no login that is supported here, only: {' '.join(sorted(names))[:200] or 'none'}"
    )


class SaslClient(Protocol):
    """The client's half of a login."""

    mechanism: str

    def start(self) -> bytes:
        """The value of SASL_AUTH."""
        ...

    def step(self, challenge: bytes) -> bytes:
        """The value of SASL_STEP, for the challenge that came with status 0x21."""
        ...

    def finish(self, final: bytes) -> None:
        """Check the last value; `LoginError` if the server can't prove that it knows the password."""
        ...


def client_for(mechanism: str, username: str, password: str, rng: random.Random) -> SaslClient:
    """The client's half for the mechanism of this name."""
    if mechanism == _PLAIN:
        return PlainClient(username, password)
    if mechanism in _HASHES:
        return ScramClient(mechanism, username, password, rng)
    raise UsageError(f"there is no login mechanism {mechanism!r}; known are {', '.join(MECHANISMS)}")


def plain_message(username: str, password: str) -> bytes:
    """authzid NUL user NUL password, with an empty authzid."""
    if "\0" in username or "\0" in password:
        raise UsageError("a user name or password can't hold a NUL")
    return b"\0" + username.encode() + b"\0" + password.encode()


class PlainClient:
    """Sends the password as it is."""

    mechanism = _PLAIN

    def __init__(self, username: str, password: str) -> None:
        self._message = plain_message(username, password)

    def start(self) -> bytes:
        return self._message

    def step(self, challenge: bytes) -> bytes:
        raise LoginError("the server asks for a second step of a PLAIN login, which has none")

    def finish(self, final: bytes) -> None:
        """PLAIN proves nothing about the server."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What a server keeps of a password: enough to check it, not enough to log in elsewhere."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    @classmethod
    def derive(cls, mechanism: str, password: str, salt: bytes, iterations: int) -> Credential:
        """Derive it from the password."""
        name = _HASHES[mechanism]
        salted = _salted_password(name, password, salt, iterations)
        stored_key = hashlib.new(name, _client_key(name, salted)).digest()
        return cls(salt, iterations, stored_key, _server_key(name, salted))


class ScramClient:
    """The client's half of SCRAM; each object logs in once."""

    def __init__(self, mechanism: str, username: str, password: str, rng: random.Random) -> None:
        self.mechanism = mechanism
        self._hash = _HASHES[mechanism]
        self._password = password
        self._nonce = rng_.nonce(rng)
        self._first_bare = b"n=" + _escape(username) + b",r=" + self._nonce
        self._signature: bytes | None = None

    def start(self) -> bytes:
        return b"n,," + self._first_bare

    def step(self, challenge: bytes) -> bytes:
        if self._signature is not None:
            raise LoginError("the server sends a second SCRAM challenge")
        nonce, salt, iterations = _server_first(challenge)
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise LoginError("the server's SCRAM nonce does not extend ours")
        salted = _salted_once(self._hash, self._password, salt, iterations)
        without_proof = b"c=biws,r=" + nonce
        signed = b",".join((self._first_bare, challenge, without_proof))
        client_key = _client_key(self._hash, salted)
        stored_key = hashlib.new(self._hash, client_key).digest()
        proof = _xor(client_key, hmac.digest(stored_key, signed, self._hash))
        self._signature = hmac.digest(_server_key(self._hash, salted), signed, self._hash)
        return without_proof + b",p=" + base64.b64encode(proof)

    def finish(self, final: bytes) -> None:
        if self._signature is None:
            raise LoginError("the server ends the SCRAM login before its challenge")
        if final.startswith(b"e="):
            raise LoginError("the server refuses the SCRAM login")
        given = _base64(final[2:]) if final.startswith(b"v=") else None
        if given is None:
            raise LoginError("the server's last SCRAM message is not v=SIGNATURE")
        if not hmac.compare_digest(given, self._signature):
            raise LoginError("the server could not prove that it knows the password; it may be an impostor")


class SaslAnswer(NamedTuple):
    """What the server replies to SASL_AUTH or SASL_STEP."""

    status: int
    value: bytes = b""


_REFUSED = SaslAnswer(Status.AUTH_ERROR)

_Keys: TypeAlias = tuple[bytes, bytes]
"""Stored key and server key of one user."""


class Users:
    """Who may log in.

    A known name and an unknown one take the same path: no branch depends on whether a name exists, and what
    is kept of a password is derived for all users together, never for the one who logs in. So neither the
    answers nor the time that they take reveal who exists.
    """

    def __init__(
        self, passwords: Mapping[str, str], rng: random.Random, *, iterations: int = DEFAULT_ITERATIONS
    ) -> None:
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise UsageError(
                f"SCRAM iterations go from {MIN_ITERATIONS} to {MAX_ITERATIONS}, not {iterations}"
            )
        self._passwords = dict(passwords)
        self._iterations = iterations
        self._secret = rng.randbytes(32)
        self._nobody = rng.randbytes(64)
        self._digests = {name: self._digest(password) for name, password in self._passwords.items()}
        self._keys: dict[str, dict[str, _Keys]] = {}

    def derive(self) -> None:
        """Do the expensive part for every user and mechanism now, not in the first login."""
        for mechanism in _HASHES:
            self._keys_of(mechanism)

    def become(self, other: Users) -> frozenset[str]:
        """Take over the other's users; returns the names whose old login is no longer good."""
        before = self._passwords
        self._passwords, self._iterations = other._passwords, other._iterations
        self._secret, self._nobody = other._secret, other._nobody
        self._digests, self._keys = other._digests, other._keys
        return frozenset(name for name, password in before.items() if self._passwords.get(name) != password)

    def check_password(self, username: str, password: str) -> bool:
        """Whether PLAIN may let this user in."""
        expected = self._digests.get(username, self._nobody)
        return hmac.compare_digest(self._digest(password), expected)

    def credential(self, mechanism: str, username: str) -> Credential:
        """What to check a SCRAM proof against; for an unknown user, one that no proof matches."""
        size = hashlib.new(_HASHES[mechanism]).digest_size
        nobody = self._nobody[:size], self._nobody[:size]
        stored_key, server_key = self._keys_of(mechanism).get(username, nobody)
        return Credential(self.salt(mechanism, username), self._iterations, stored_key, server_key)

    def salt(self, mechanism: str, username: str) -> bytes:
        """The salt for a name: the same each time, whether the name exists or not."""
        return hmac.digest(self._secret, f"{mechanism} {username}".encode(), "sha256")[:SALT_BYTES]

    def _digest(self, password: str) -> bytes:
        """As long for any password as `_nobody`: a difference in length would show in the timing."""
        return hmac.digest(self._secret, password.encode(), "sha512")

    def _keys_of(self, mechanism: str) -> dict[str, _Keys]:
        keys = self._keys.get(mechanism)
        if keys is None:
            keys = self._keys[mechanism] = {}
            for name, password in self._passwords.items():
                salt = self.salt(mechanism, name)
                derived = Credential.derive(mechanism, password, salt, self._iterations)
                keys[name] = derived.stored_key, derived.server_key
        return keys


class _Exchange(NamedTuple):
    """A SCRAM login between its two steps."""

    mechanism: str
    username: str
    credential: Credential
    channel: bytes
    nonce: bytes
    signed: bytes


class SaslServer:
    """The server's half, for one connection: any number of attempts, one at a time.

    ``username`` is the user that has logged in, None before. A new attempt cancels the old login.
    """

    def __init__(self, users: Users, rng: random.Random) -> None:
        self._users = users
        self._rng = rng
        self._exchange: _Exchange | None = None
        self.username: str | None = None
        self.claimed = ""
        """The user name of the last attempt, successful or not."""

    def auth(self, mechanism: bytes, value: bytes) -> SaslAnswer:
        """SASL_AUTH; the mechanism is its key."""
        self.username = self._exchange = None
        self.claimed = ""
        name = mechanism.decode("ascii", "replace")
        if len(value) > MAX_MESSAGE:
            return _REFUSED
        if name == _PLAIN:
            return self._plain(value)
        return self._first(name, value) if name in _HASHES else _REFUSED

    def step(self, mechanism: bytes, value: bytes) -> SaslAnswer:
        """SASL_STEP; legal only after a SASL_AUTH that was answered with 0x21, and with its mechanism."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return SaslAnswer(Status.EINVAL)
        if mechanism.decode("ascii", "replace") != exchange.mechanism or len(value) > MAX_MESSAGE:
            return _REFUSED
        return self._final(exchange, value)

    def _plain(self, value: bytes) -> SaslAnswer:
        parts = value.split(b"\0")
        if len(parts) != 3:
            return _REFUSED
        try:
            authzid, username, password = (part.decode() for part in parts)
        except UnicodeDecodeError:
            return _REFUSED
        self.claimed = username
        # acting for somebody else is not offered
        if authzid not in ("", username) or not self._users.check_password(username, password):
            return _REFUSED
        self.username = username
        return SaslAnswer(Status.SUCCESS)

    def _first(self, mechanism: str, value: bytes) -> SaslAnswer:
        channel = value[:3]
        if channel not in (b"n,,", b"y,,"):
            return _REFUSED
        bare = value[3:]
        attributes = bare.split(b",")
        if len(attributes) < 2 or not attributes[0].startswith(b"n=") or not attributes[1].startswith(b"r="):
            return _REFUSED
        username, client_nonce = _unescape(attributes[0][2:]), attributes[1][2:]
        if username is None or not _is_printable(client_nonce):
            return _REFUSED
        self.claimed = username
        credential = self._users.credential(mechanism, username)
        nonce = client_nonce + rng_.nonce(self._rng)
        salt = base64.b64encode(credential.salt)
        challenge = b"r=%b,s=%b,i=%d" % (nonce, salt, credential.iterations)
        signed = bare + b"," + challenge
        self._exchange = _Exchange(mechanism, username, credential, channel, nonce, signed)
        return SaslAnswer(Status.AUTH_CONTINUE, challenge)

    def _final(self, exchange: _Exchange, value: bytes) -> SaslAnswer:
        without_proof, separator, encoded = value.rpartition(b",p=")
        proof = _base64(encoded)
        attributes = without_proof.split(b",")
        expected = [b"c=" + base64.b64encode(exchange.channel), b"r=" + exchange.nonce]
        if not separator or proof is None or attributes[:2] != expected:
            return _REFUSED
        name, credential = _HASHES[exchange.mechanism], exchange.credential
        signed = exchange.signed + b"," + without_proof
        signature = hmac.digest(credential.stored_key, signed, name)
        if len(proof) != len(signature):
            return _REFUSED
        stored_key = hashlib.new(name, _xor(proof, signature)).digest()
        if not hmac.compare_digest(stored_key, credential.stored_key):
            return _REFUSED
        self.username = exchange.username
        server_signature = hmac.digest(credential.server_key, signed, name)
        return SaslAnswer(Status.SUCCESS, b"v=" + base64.b64encode(server_signature))


# the parts of the messages


def _server_first(challenge: bytes) -> tuple[bytes, bytes, int]:
    """Nonce, salt and iterations of ``r=…,s=…,i=…``; nothing else is allowed."""
    attributes = challenge.split(b",")
    if len(challenge) > MAX_MESSAGE or [attribute[:2] for attribute in attributes] != [b"r=", b"s=", b"i="]:
        raise LoginError("the server's first SCRAM message is not r=NONCE,s=SALT,i=ITERATIONS")
    nonce, salt_text, iterations_text = (attribute[2:] for attribute in attributes)
    salt = _base64(salt_text)
    if not salt or len(salt) > MAX_SALT:
        raise LoginError("the server's SCRAM salt is empty, too long or not base64")
    # bytes.isdigit knows only ASCII digits, and the length bound keeps int() cheap
    iterations = int(iterations_text) if iterations_text.isdigit() and len(iterations_text) < 12 else 0
    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise LoginError(
            f"the server asks for {iterations_text[:20].decode('ascii', 'replace')} SCRAM iterations; "
            f"we accept {MIN_ITERATIONS} to {MAX_ITERATIONS}"
        )
    return nonce, salt, iterations


def _escape(username: str) -> bytes:
    if not username or "\0" in username:
        raise UsageError("a user name can't be empty or hold a NUL")
    return username.encode().replace(b"=", b"=3D").replace(b",", b"=2C")


def _unescape(saslname: bytes) -> str | None:
    """The user name, or None if it has an ``=`` that is not an escape."""
    parts = saslname.split(b"=")
    if not saslname or any(part[:2] not in (b"2C", b"3D") for part in parts[1:]):
        return None
    plain = parts[0] + b"".join((b"," if part[:2] == b"2C" else b"=") + part[2:] for part in parts[1:])
    try:
        return plain.decode()
    except UnicodeDecodeError:
        return None


def _is_printable(nonce: bytes) -> bool:
    """Whether a nonce is printable. Spaces are not in the RFC's alphabet, but in real clients' nonces."""
    return bool(nonce) and all(0x20 <= byte <= 0x7E for byte in nonce)


def _base64(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


@lru_cache(maxsize=16)
def _salted_once(name: str, password: str, salt: bytes, iterations: int) -> bytes:
    """Cached for clients: they log in on every connection, with the same salt on all nodes (RFC 5802)."""
    return _salted_password(name, password, salt, iterations)


def _salted_password(name: str, password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac(name, password.encode(), salt, iterations)


def _client_key(name: str, salted_password: bytes) -> bytes:
    return hmac.digest(salted_password, b"Client Key", name)


def _server_key(name: str, salted_password: bytes) -> bytes:
    return hmac.digest(salted_password, b"Server Key", name)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
