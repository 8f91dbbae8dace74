"""The start of a connection: hello, login, bucket, cluster map. Both halves.

The client's half is a script (see `script`); the server's half is `grant_features` here and `SaslServer` in
`sasl`, since a server answers each of these commands separately and in any order.

Rules: docs/spec/bootstrap.md.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..errors import LoginError, MalformedMessage, NoSuchBucket, RemoteProtocolError
from ..wire.admin import (
    GetClusterConfig,
    Hello,
    HelloResponse,
    SaslAuth,
    SaslListMechs,
    SaslStep,
    SelectBucket,
)
from ..wire.codes import Feature, Status, status_name
from ..wire.message import Message, Response
from . import sasl
from .script import Script

__all__ = [
    "KV_FEATURES",
    "READER_FEATURES",
    "REPLICA_FEATURES",
    "Credentials",
    "HandshakeResult",
    "Introduction",
    "grant_features",
    "handshake",
]

KV_FEATURES = (
    Feature.TCP_NODELAY,
    Feature.MUTATION_SEQNO,
    Feature.XATTR,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.SNAPPY,
    Feature.JSON,
    Feature.ALT_REQUEST_SUPPORT,
    Feature.SYNC_REPLICATION,
    Feature.COLLECTIONS,
)

REPLICA_FEATURES = (
    Feature.TCP_NODELAY,
    Feature.XATTR,
    Feature.XERROR,
    Feature.SELECT_BUCKET,
    Feature.SNAPPY,
    Feature.JSON,
    Feature.COLLECTIONS,
)
"""For a node that receives vbuckets: it takes values as they are stored and gets its maps from elsewhere."""

READER_FEATURES = (
    *REPLICA_FEATURES,
    Feature.SYNC_REPLICATION,  # its high seqnos then count prepares, as streams with collections do
    Feature.DUPLEX,
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
    Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
)

_REQUIRES = {
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION: Feature.DUPLEX,
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF: Feature.DUPLEX,
    Feature.VATTR: Feature.XATTR,
    Feature.SUBDOC_DOCUMENT_MACRO: Feature.XATTR,
}


def grant_features(asked: Iterable[int], offered: Collection[int]) -> list[int]:
    """The server's answer to HELLO: the features asked for that it offers, once each, in the order asked.

    Never one that was not asked for: there is a client that crashes on it. A feature without the one that it
    needs is `MalformedMessage`; unknown codes are ignored (docs/spec/header.md#hello).
    """
    granted = [code for code in dict.fromkeys(asked) if code in offered]
    for feature, required in _REQUIRES.items():
        if feature in granted and required not in granted:
            raise MalformedMessage(f"feature {feature.name} needs {required.name}")
    if Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF in granted:  # docs/spec/servers.md#pushed-configs-1
        granted = [code for code in granted if code != Feature.CLUSTERMAP_CHANGE_NOTIFICATION]
    return granted


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who logs in. The password stays out of every log and repr."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a client says about itself."""

    agent: str
    """Name and version, as operators see it in the server's log."""
    bucket: str
    credentials: Credentials | None = None
    features: tuple[int, ...] = READER_FEATURES
    allow_plain: bool = False
    """PLAIN may be used: the connection is encrypted, or the user said so."""
    mechanism: str | None = None
    """Use only this login mechanism."""


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """The result of a handshake."""

    features: frozenset[int]
    config: bytes | None
    """The cluster map's JSON; None if the server has none."""

    @property
    def collections(self) -> bool:
        """Whether keys carry a collection id."""
        return Feature.COLLECTIONS in self.features


def handshake(introduction: Introduction, rng: random.Random) -> Script[HandshakeResult]:
    """Everything before the first real request, in at most four round trips."""
    credentials = introduction.credentials
    first: list[Message] = [
        Hello(
            key=introduction.agent.encode(),
            value=b"".join(struct.pack(">H", code) for code in introduction.features),
        )
    ]
    if credentials is not None and introduction.mechanism is None:
        first.append(SaslListMechs())
    answers = yield first
    features = _features(answers[0], introduction.features)
    if credentials is not None:
        mechanism = introduction.mechanism or sasl.choose_mechanism(
            _mechanisms(answers[1]), allow_plain=introduction.allow_plain
        )
        yield from _login(sasl.client_for(mechanism, credentials.username, credentials.password, rng))
    selected, config = yield [SelectBucket(key=introduction.bucket.encode()), GetClusterConfig()]
    _check_selected(selected, introduction)
    return HandshakeResult(
        features, config.value if config.status == Status.SUCCESS and config.value else None
    )


def _features(answer: Response, asked: tuple[int, ...]) -> frozenset[int]:
    if answer.status != Status.SUCCESS:
        return frozenset()  # an old server: it has none of them
    assert isinstance(answer, HelloResponse)
    granted = frozenset(answer.features)
    if extra := granted - set(asked):
        raise RemoteProtocolError(f"the server turns on features that nobody asked for: {sorted(extra)}")
    return granted


def _mechanisms(answer: Response) -> list[str]:
    if answer.status != Status.SUCCESS:
        raise LoginError(f"the server supports no login ({status_name(answer.status)})")
    return answer.value[: sasl.MAX_MESSAGE].decode("ascii", "replace").split()


def _login(client: sasl.SaslClient) -> Script[None]:
    name = client.mechanism.encode()
    (answer,) = yield [SaslAuth(key=name, value=client.start())]
    if answer.status == Status.AUTH_CONTINUE:
        (answer,) = yield [SaslStep(key=name, value=client.step(answer.value))]
    if answer.status != Status.SUCCESS:
        raise LoginError(
            f"the server refuses the login ({status_name(answer.status)}); check user name and password"
        )
    client.finish(answer.value)


def _check_selected(answer: Response, introduction: Introduction) -> None:
    bucket = introduction.bucket
    if answer.status == Status.SUCCESS:
        return
    if answer.status == Status.EACCESS and introduction.credentials is None:
        # Servers answer both the same way, to hide which buckets there are.
        raise NoSuchBucket(
            f"the server has no bucket {bucket!r}, or requires a login for it; "
            "check the name, or give user name and password"
        )
    if answer.status in (Status.KEY_ENOENT, Status.EACCESS):
        raise NoSuchBucket(f"the server has no bucket {bucket!r} for this user; check the name")
    if answer.status == Status.UNKNOWN_COMMAND and bucket == "default":
        return  # a server with one bucket
    raise LoginError(f"the server refuses bucket {bucket!r} ({status_name(answer.status)})")
