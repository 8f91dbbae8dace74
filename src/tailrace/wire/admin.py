"""Commands to the server itself: login, vbuckets and seqnos, collections, cluster map, and their answers.

Rules: docs/spec/header.md#connection-commands, docs/spec/header.md#vbucket-commands,
docs/spec/header.md#collection-commands.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..errors import MalformedMessage
from .codes import Datatype, Magic, Op, ServerOpcode, Status, VBucketState
from .dcp import DcpFailoverLogResponse
from .fields import is_json
from .layout import NO_EXTRAS, layout
from .message import Direction, Message, Part, Response, message

JSON = int(Datatype.JSON)

_CODE = struct.Struct(">H")
VB_SEQNO = struct.Struct(">HQ")  # vbucket id and seqno, in answers and in filters
OBSERVED_KEY = struct.Struct(">HH")  # vbucket id and length of the key that follows
OBSERVED_STATE = struct.Struct(">BQ")  # after the key: its state and its CAS


# answers


@message
class RandomKeyResponse(Response):
    """Some document; older descriptions leave the flags out, so both forms are accepted."""

    LAYOUTS = (NO_EXTRAS, layout("I flags  chosen by the writer, opaque to us"))
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL

    flags: int | None = None


@message
class ValueResponse(Response):
    """An answer with nothing but a value: a text, a JSON document, a list."""

    VALUE = Part.OPTIONAL


@message
class StatResponse(Response):
    """One statistic; the last packet has neither key nor value."""

    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL


@message
class HelloResponse(Response):
    """The features that the server turned on, a subset of what was asked for."""

    VALUE = Part.OPTIONAL
    DATATYPES = 0

    @property
    def features(self) -> list[int]:
        """Feature codes in the server's order."""
        return _codes("hello response", self.value)

    def check_fields(self) -> None:
        _ = self.features


@message
class SaslResponse(Response):
    """The login has succeeded, continues (0x21) or has failed (0x20); the value is the server's challenge."""

    OK = frozenset({Status.SUCCESS, Status.AUTH_CONTINUE})
    VALUE = Part.OPTIONAL
    DATATYPES = 0


@message
class VBucketStateResponse(Response):
    """The state of a vbucket, 4 bytes."""

    VALUE = Part.REQUIRED
    DATATYPES = 0

    @property
    def state(self) -> int:
        """1 active, 2 replica, 3 pending, 4 dead."""
        if len(self.value) != 4:
            raise MalformedMessage(f"vbucket state response: a state has 4 bytes, not {len(self.value)}")
        return int.from_bytes(self.value, "big")

    def check_fields(self) -> None:
        _ = self.state


@message
class AllVbSeqnosResponse(Response):
    """Pairs of vbucket id (u16) and seqno (u64), in ascending order."""

    VALUE = Part.OPTIONAL
    DATATYPES = 0

    @property
    def seqnos(self) -> dict[int, int]:
        """Seqno by vbucket."""
        if len(self.value) % VB_SEQNO.size:
            raise MalformedMessage("all vb seqnos response: a record has 10 bytes")
        return dict(VB_SEQNO.iter_unpack(self.value))

    def check_fields(self) -> None:
        _ = self.seqnos


OBSERVE_SEQNO_SAME = struct.Struct(">BHQQQ")
OBSERVE_SEQNO_FAILED_OVER = struct.Struct(">BHQQQQQ")


@message
class ObserveSeqnoResponse(Response):
    """How far a vbucket is persisted; format 1 if the UUID sent is an older one.

    The value: u8 format, u16 vbucket, u64 current UUID, u64 persisted seqno, u64 current seqno, and in format
    1 u64 the UUID that was sent, u64 the seqno at which that history ended.
    """

    VALUE = Part.REQUIRED
    DATATYPES = 0

    def _numbers(self) -> tuple[int, ...]:
        """What the value says, without the format."""
        for number, shape in enumerate((OBSERVE_SEQNO_SAME, OBSERVE_SEQNO_FAILED_OVER)):
            if len(self.value) == shape.size and self.value[0] == number:
                return shape.unpack(self.value)[1:]
        raise MalformedMessage(f"observe seqno response: {len(self.value)} bytes are not a known format")

    def check_fields(self) -> None:
        self._numbers()

    @property
    def current_vb_uuid(self) -> int:
        """The newest branch."""
        return self._numbers()[1]

    @property
    def persisted_seqno(self) -> int:
        """Everything up to here is on disk."""
        return self._numbers()[2]

    @property
    def current_seqno(self) -> int:
        """The high seqno."""
        return self._numbers()[3]

    @property
    def old_branch(self) -> tuple[int, int] | None:
        """The UUID that was sent and where it ended, if it is not the newest."""
        _vbucket, _vb_uuid, _persisted, _current, *old = self._numbers()
        return (old[0], old[1]) if old else None


@message
class ObserveResponse(Response):
    """Records of u16 vbucket, u16 key length, key, u8 state, u64 CAS."""

    VALUE = Part.OPTIONAL
    DATATYPES = 0

    def records(self) -> Iterator[tuple[int, bytes, int, int]]:
        """VBucket, key, state (0 not persisted, 1 persisted, 0x80 not found, 0x81 deleted) and CAS."""
        at, data = 0, self.value
        while at < len(data):
            if at + 4 > len(data):
                raise MalformedMessage("observe response: a record is cut off")
            vbucket, length = OBSERVED_KEY.unpack_from(data, at)
            key_at = at + 4
            at = key_at + length + OBSERVED_STATE.size
            if at > len(data):
                raise MalformedMessage("observe response: a record is cut off")
            state, cas = OBSERVED_STATE.unpack_from(data, key_at + length)
            yield vbucket, data[key_at : key_at + length], state, cas

    def check_fields(self) -> None:
        for _ in self.records():
            pass


@message
class CollectionIdResponse(Response):
    """The id of a collection, and the uid of the manifest."""

    LAYOUTS = (
        layout("""
            Q manifest_uid   the manifest
            I collection_id  the collection
        """),
    )

    manifest_uid: int = 0
    collection_id: int = 0


@message
class ScopeIdResponse(Response):
    """The id of a scope, and the uid of the manifest."""

    LAYOUTS = (
        layout("""
            Q manifest_uid  the manifest
            I scope_id      the scope
        """),
    )

    manifest_uid: int = 0
    scope_id: int = 0


# connection and server


@message
class Quit(Message):
    """Says goodbye; answered, then the server closes the connection."""

    OPCODE = Op.QUIT
    RESPONSE = Response


@message
class QuitQ(Quit):
    """Says goodbye; the server closes the connection."""

    OPCODE = Op.QUITQ
    REPLY = "never"


@message
class Flush(Message):
    """Deletes everything."""

    OPCODE = Op.FLUSH
    LAYOUTS = (NO_EXTRAS, layout("I expiry  must be 0"))
    RESPONSE = Response

    expiry: int | None = None

    def check_fields(self) -> None:
        if self.expiry:
            raise MalformedMessage("flush: a delayed flush is not possible")


@message
class FlushQ(Flush):
    """Flush that is silent on success."""

    OPCODE = Op.FLUSHQ
    REPLY = "only on error"


@message
class Noop(Message):
    """Does nothing but get an answer: a fence, or a sign of life."""

    OPCODE = Op.NOOP
    DIRECTION = None
    RESPONSE = Response


@message
class Version(Message):
    """Asks for the server's version."""

    OPCODE = Op.VERSION
    RESPONSE = ValueResponse


@message
class Stat(Message):
    """Asks for statistics; the key is the group. Many answers, the last one empty."""

    OPCODE = Op.STAT
    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL
    DATATYPES = JSON
    RESPONSE = StatResponse

    def check_fields(self) -> None:
        if bool(self.value) != bool(self.datatype) or (self.value and not is_json(self.value)):
            raise MalformedMessage("stat: a value is JSON and says so in the datatype")


@message
class Verbosity(Message):
    """Sets the log level."""

    OPCODE = Op.VERBOSITY
    LAYOUTS = (layout("I level  0 is the quietest"),)
    RESPONSE = Response

    level: int = 0


@message
class Hello(Message):
    """Introduces the client and asks for features; each HELLO revokes those granted before."""

    OPCODE = Op.HELLO
    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL
    RESPONSE = HelloResponse

    @property
    def features(self) -> list[int]:
        """Feature codes in the client's order."""
        return _codes("hello", self.value)

    def check_fields(self) -> None:
        _ = self.features


@message
class SaslListMechs(Message):
    """Asks for the login mechanisms."""

    OPCODE = Op.SASL_LIST_MECHS
    RESPONSE = ValueResponse


@message
class SaslAuth(Message):
    """Begins a login; the key is the mechanism."""

    OPCODE = Op.SASL_AUTH
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    RESPONSE = SaslResponse


@message
class SaslStep(SaslAuth):
    """The next step of a login."""

    OPCODE = Op.SASL_STEP


@message
class SelectBucket(Message):
    """Binds the connection to a bucket."""

    OPCODE = Op.SELECT_BUCKET
    KEY = Part.REQUIRED
    RESPONSE = Response


_CONFIG_REVISION = layout("""
    q epoch     of the newest config that the sender knows
    q revision  of it
""")


def _check_revision(what: str, epoch: int, revision: int) -> None:
    """A config's place in the order of configs: docs/spec/servers.md#order-of-configs."""
    if revision < 1 or (epoch < 1 and epoch != -1):
        raise MalformedMessage(f"{what}: a revision is at least 1, an epoch at least 1 or -1")


@message
class GetClusterConfig(Message):
    """Asks for the cluster map; with a known revision the answer is empty if nothing is newer."""

    OPCODE = Op.GET_CLUSTER_CONFIG
    LAYOUTS = (NO_EXTRAS, _CONFIG_REVISION)
    RESPONSE = ValueResponse

    epoch: int | None = None
    revision: int | None = None

    def known_version(self) -> tuple[int, int] | None:
        """Epoch and revision of the config that the client has; None if it names none."""
        return None if self.epoch is None or self.revision is None else (self.epoch, self.revision)

    def check_fields(self) -> None:
        if (known := self.known_version()) is not None:
            _check_revision("get cluster config", *known)


@message
class SetClusterConfig(Message):
    """Gives the server a cluster map; the key is the bucket, or empty."""

    OPCODE = Op.SET_CLUSTER_CONFIG
    LAYOUTS = (_CONFIG_REVISION,)
    KEY = Part.OPTIONAL
    VALUE = Part.REQUIRED
    DATATYPES = JSON
    RESPONSE = Response

    epoch: int
    revision: int

    def check_fields(self) -> None:
        _check_revision("set cluster config", self.epoch, self.revision)


@message
class GetErrorMap(Message):
    """Asks what the status codes mean."""

    OPCODE = Op.GET_ERROR_MAP
    VALUE = Part.REQUIRED
    RESPONSE = ValueResponse

    @property
    def version(self) -> int:
        """The highest version that the client understands."""
        return int.from_bytes(self.value, "big")

    def check_fields(self) -> None:
        if len(self.value) != 2 or self.vbucket:
            raise MalformedMessage("get error map: the value is a version of 2 bytes, the vbucket 0")


@message
class ServerRequestResponse(Response):
    """The client's answer to a request that the server started."""

    MAGIC = Magic.SERVER_RESPONSE
    DIRECTION = Direction.TO_PRODUCER


@message
class ClustermapChangeNotification(Message):
    """The server says that the cluster map changed; the key is the bucket. The reply is ignored."""

    OPCODE = ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION
    MAGIC = Magic.SERVER_REQUEST
    LAYOUTS = (layout("I old_revision  of the config, old form"), _CONFIG_REVISION)
    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL
    DATATYPES = JSON | int(Datatype.SNAPPY)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = ServerRequestResponse
    REPLY = "ignored"

    old_revision: int | None = None
    epoch: int | None = None
    revision: int | None = None


# vbuckets and seqnos


@message
class SetVBucket(Message):
    """Sets a vbucket's state; the value may say topology, use_snapshot or next_expected_state."""

    OPCODE = Op.SET_VBUCKET
    LAYOUTS = (layout("B state  1 active, 2 replica, 3 pending, 4 dead"),)
    VALUE = Part.OPTIONAL
    CAS = Part.FORBIDDEN
    DATATYPES = JSON
    RESPONSE = Response

    state: int

    def check_fields(self) -> None:
        if self.state not in VBucketState.__members__.values():
            raise MalformedMessage(f"set vbucket: there is no state {self.state}")
        if self.value and not self.datatype & JSON:
            raise MalformedMessage("set vbucket: a value is JSON and says so in the datatype")


@message
class GetVBucket(Message):
    """Asks for a vbucket's state."""

    OPCODE = Op.GET_VBUCKET
    RESPONSE = VBucketStateResponse


@message
class DelVBucket(Message):
    """Deletes a dead vbucket; the value ``async=0`` waits until it is gone."""

    OPCODE = Op.DEL_VBUCKET
    VALUE = Part.OPTIONAL
    RESPONSE = Response

    def check_fields(self) -> None:
        if self.value not in (b"", b"async=0"):
            raise MalformedMessage("del vbucket: the value may only be async=0")


@message
class GetAllVbSeqnos(Message):
    """Asks for the high seqnos of all vbuckets in a state, or of one collection in them."""

    OPCODE = Op.GET_ALL_VB_SEQNOS
    LAYOUTS = (
        NO_EXTRAS,
        layout("I state  0 all that live, 1 active, 2 replica, 3 pending, 4 dead"),
        layout("""
            I state          0 all that live, 1 active, 2 replica, 3 pending, 4 dead
            I collection_id  only the seqnos of this collection
        """),
    )
    RESPONSE = AllVbSeqnosResponse

    state: int | None = None
    collection_id: int | None = None

    def check_fields(self) -> None:
        if (self.state or 0) > VBucketState.DEAD:
            raise MalformedMessage(f"get all vb seqnos: there is no state {self.state}")


@message
class ObserveSeqno(Message):
    """Asks how far a vbucket is persisted; the value is a vbucket UUID."""

    OPCODE = Op.OBSERVE_SEQNO
    VALUE = Part.REQUIRED
    RESPONSE = ObserveSeqnoResponse

    @property
    def vb_uuid(self) -> int:
        """The branch that the client is on."""
        return int.from_bytes(self.value, "big")

    def check_fields(self) -> None:
        if len(self.value) != 8:
            raise MalformedMessage(f"observe seqno: a UUID has 8 bytes, not {len(self.value)}")


@message
class Observe(Message):
    """Asks whether documents are persisted; the value has records of u16 vbucket, u16 key length, key."""

    OPCODE = Op.OBSERVE
    VALUE = Part.REQUIRED
    RESPONSE = ObserveResponse

    def records(self) -> Iterator[tuple[int, bytes]]:
        """VBucket and key."""
        at, data = 0, self.value
        while at < len(data):
            if at + 4 > len(data):
                raise MalformedMessage("observe: a record is cut off")
            vbucket, length = OBSERVED_KEY.unpack_from(data, at)
            at += 4 + length
            if at > len(data):
                raise MalformedMessage("observe: a record is cut off")
            yield vbucket, data[at - length : at]

    def check_fields(self) -> None:
        for _ in self.records():
            pass


@message
class GetFailoverLog(Message):
    """Asks for a vbucket's failover log; not a DCP command."""

    OPCODE = Op.GET_FAILOVER_LOG
    RESPONSE = DcpFailoverLogResponse


@message
class SeqnoPersistence(Message):
    """Answered once everything up to a seqno is on disk."""

    OPCODE = Op.SEQNO_PERSISTENCE
    LAYOUTS = (layout("Q seqno  what must be on disk"),)
    RESPONSE = Response

    seqno: int


@message
class StopPersistence(Message):
    """Stops writing to disk; a kill loses what is written after it."""

    OPCODE = Op.STOP_PERSISTENCE
    RESPONSE = Response


@message
class StartPersistence(Message):
    """Resumes writing the queue to disk."""

    OPCODE = Op.START_PERSISTENCE
    RESPONSE = Response


@message
class Compact(Message):
    """Compacts a vbucket; answered when it is done."""

    OPCODE = Op.COMPACT
    LAYOUTS = (
        layout("""
            Q purge_before_s      drop tombstones older than this time, unix seconds
            Q purge_before_seqno  drop tombstones below this seqno; 0: no such bound
            B drop_deletes        1: drop all tombstones
            7s padding            0
        """),
    )
    RESPONSE = Response

    purge_before_s: int = 0
    purge_before_seqno: int = 0
    drop_deletes: int = 0
    padding: bytes = b"\0" * 7

    def check_fields(self) -> None:
        if self.drop_deletes > 1:
            raise MalformedMessage(f"compact: drop deletes is 0 or 1, not {self.drop_deletes}")


# collections


@message
class _CollectionsCommand(Message):
    CAS = Part.FORBIDDEN

    def check_fields(self) -> None:
        if self.vbucket:
            raise MalformedMessage(f"{self.name()}: the vbucket must be 0")


@message
class SetCollectionsManifest(_CollectionsCommand):
    """Gives the bucket its scopes and collections."""

    OPCODE = Op.SET_COLLECTIONS_MANIFEST
    VALUE = Part.REQUIRED
    DATATYPES = JSON
    RESPONSE = Response


@message
class GetCollectionsManifest(_CollectionsCommand):
    """Asks for the bucket's scopes and collections."""

    OPCODE = Op.GET_COLLECTIONS_MANIFEST
    RESPONSE = ValueResponse


@message
class _ByPath(_CollectionsCommand):
    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL

    @property
    def path(self) -> bytes:
        """The path, from the value or the key."""
        return self.value or self.key

    def check_fields(self) -> None:
        super(_ByPath, self).check_fields()
        if bool(self.key) == bool(self.value):
            raise MalformedMessage(f"{self.name()}: the path must be in the value or in the key, not in both")


@message
class GetCollectionId(_ByPath):
    """Asks for the id of ``scope.collection``, in the value or as the key."""

    OPCODE = Op.GET_COLLECTION_ID
    RESPONSE = CollectionIdResponse


@message
class GetScopeId(_ByPath):
    """Asks for the id of a scope."""

    OPCODE = Op.GET_SCOPE_ID
    RESPONSE = ScopeIdResponse


# rewind


@message
class Rewind(Message):
    """Forgets the newest changes of vbuckets as a failover with data loss does. Tailrace's own command.

    The value is a list of u16 vbucket ids; empty means all active ones. All or nothing; durable when
    answered. The answer is a JSON object, vbucket to the seqno that it now ends at; 0x22 names the lowest
    possible seqno.
    """

    OPCODE = Op.REWIND
    LAYOUTS = (
        layout("""
            B mode    0: back to this seqno; 1: lose this many of the newest changes
            Q number  the seqno, or how many
        """),
    )
    VALUE = Part.OPTIONAL
    RESPONSE = ValueResponse

    mode: int = 0
    number: int

    @property
    def vbuckets(self) -> list[int]:
        """The vbuckets; empty means all."""
        return _codes("rewind", self.value)

    def check_fields(self) -> None:
        if self.mode > 1:
            raise MalformedMessage(f"rewind: there is no mode {self.mode}")
        _ = self.vbuckets


# replication


@message
class Replicate(Message):
    """Tells a node which vbuckets to receive, and from where. Tailrace's own command.

    The value is a JSON object: ``{"sources": [{"host": "127.0.0.1", "port": 11210, "vbuckets": [0, 1],
    "takeover": [2], "dialect": "dcp", "username": …, "password": …}, …]}``. The list is complete: a vbucket
    that it does not name is no longer received. Without a value nothing changes. The node connects to the
    source and requests the vbuckets in the dialect: ``dcp`` (the default), ``upr-a`` (without takeover) or
    ``upr-b``. With ``"tls": {"ca": "PEM …", "verify": true}`` it connects over TLS and trusts those
    certificates, or those of its system if there is no ``ca``. The answer is a JSON object with the state of
    each vbucket of the node.
    """

    OPCODE = Op.REPLICATE
    VALUE = Part.OPTIONAL
    DATATYPES = int(Datatype.JSON)
    RESPONSE = ValueResponse


# others


@message
class GetRandomKey(Message):
    """Asks for some document."""

    OPCODE = Op.GET_RANDOM_KEY
    LAYOUTS = (
        NO_EXTRAS,
        layout("I collection_id  of this collection"),
        layout("""
            I collection_id   of this collection
            B include_xattrs  not 0: with xattrs
        """),
    )
    RESPONSE = RandomKeyResponse

    collection_id: int | None = None
    include_xattrs: int | None = None


@message
class DeregisterTapClient(Message):
    """Forgets a registered TAP client; always a success."""

    OPCODE = Op.DEREGISTER_TAP_CLIENT
    KEY = Part.REQUIRED
    RESPONSE = Response


@message
class ChangeVbFilter(Message):
    """Replaces the vbucket list of a live TAP producer: u16 count, then u16 vbucket, u64 checkpoint id."""

    OPCODE = Op.CHANGE_VB_FILTER
    KEY = Part.REQUIRED
    VALUE = Part.REQUIRED
    RESPONSE = Response

    @property
    def filter(self) -> list[tuple[int, int]]:
        """VBucket and checkpoint id."""
        return list(VB_SEQNO.iter_unpack(self.value[2:]))

    def check_fields(self) -> None:
        size = len(self.value) - 2
        count = int.from_bytes(self.value[:2], "big")
        if not count or size != count * VB_SEQNO.size:
            raise MalformedMessage("change vb filter: the count is 0 or not that of the records")


@message
class LastClosedCheckpoint(Message):
    """Obsolete: asks for the id of the last closed checkpoint of a vbucket."""

    OPCODE = Op.LAST_CLOSED_CHECKPOINT
    RESPONSE = ValueResponse


def _codes(what: str, value: bytes) -> list[int]:
    if len(value) % _CODE.size:
        raise MalformedMessage(f"{what}: each number has 2 bytes")
    return [code for (code,) in _CODE.iter_unpack(value)]
