"""The numbers of the protocol: magics, opcodes, statuses, datatypes, flags.

Retired numbers stay listed and are never reused. Opcodes of the change-stream dialects collide with each
other (0x50 is Open in DCP and Stream Request in UPR draft B), so each dialect has an enum of its own and a
frame can only be named with its dialect and direction: see `dialect`.

Rules: docs/spec/header.md, docs/spec/dcp.md, docs/spec/tap.md, docs/spec/upr.md.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

__all__ = [
    "CHANGE_STREAM_OPCODES",
    "SCOPE_EVENTS",
    "AddStreamFlag",
    "ControlKey",
    "Datatype",
    "DcpOpcode",
    "DurabilityLevel",
    "Feature",
    "Magic",
    "MarkerFlag",
    "Op",
    "OpenFlag",
    "OsoFlag",
    "RequestFrameId",
    "ResponseFrameId",
    "ServerOpcode",
    "Status",
    "StreamEndStatus",
    "SystemEventId",
    "TapConnectFlag",
    "TapFlag",
    "TapOpaque",
    "TapOpcode",
    "UprAMessageType",
    "UprAOpcode",
    "UprARequestType",
    "UprAResponseType",
    "UprAStreamEnd",
    "UprBOpcode",
    "UprBStreamEnd",
    "UprBVBucketState",
    "VBucketState",
    "WithMetaOption",
    "status_name",
]


class Magic(IntEnum):
    """Byte 0 of every frame."""

    REQUEST = 0x80
    RESPONSE = 0x81
    FLEX_REQUEST = 0x08
    FLEX_RESPONSE = 0x18
    SERVER_REQUEST = 0x82
    SERVER_RESPONSE = 0x83

    @property
    def is_flexible(self) -> bool:
        """Bytes 2-3 are a framing extras length and a one-byte key length."""
        return self in (Magic.FLEX_REQUEST, Magic.FLEX_RESPONSE)


class Op(IntEnum):
    """Key-value, vbucket, collection and server commands (magics 0x80, 0x81, 0x08 and 0x18)."""

    GET = 0x00
    SET = 0x01
    ADD = 0x02
    REPLACE = 0x03
    DELETE = 0x04
    INCREMENT = 0x05
    DECREMENT = 0x06
    QUIT = 0x07
    FLUSH = 0x08
    GETQ = 0x09
    NOOP = 0x0A
    VERSION = 0x0B
    GETK = 0x0C
    GETKQ = 0x0D
    APPEND = 0x0E
    PREPEND = 0x0F
    STAT = 0x10
    SETQ = 0x11
    ADDQ = 0x12
    REPLACEQ = 0x13
    DELETEQ = 0x14
    INCREMENTQ = 0x15
    DECREMENTQ = 0x16
    QUITQ = 0x17
    FLUSHQ = 0x18
    APPENDQ = 0x19
    PREPENDQ = 0x1A
    VERBOSITY = 0x1B
    TOUCH = 0x1C
    GAT = 0x1D
    GATQ = 0x1E
    HELLO = 0x1F
    SASL_LIST_MECHS = 0x20
    SASL_AUTH = 0x21
    SASL_STEP = 0x22
    SET_VBUCKET = 0x3D
    GET_VBUCKET = 0x3E
    DEL_VBUCKET = 0x3F
    GET_ALL_VB_SEQNOS = 0x48
    STOP_PERSISTENCE = 0x80
    START_PERSISTENCE = 0x81
    GET_REPLICA = 0x83
    SELECT_BUCKET = 0x89
    OBSERVE_SEQNO = 0x91
    OBSERVE = 0x92
    GET_LOCKED = 0x94
    UNLOCK_KEY = 0x95
    GET_FAILOVER_LOG = 0x96
    LAST_CLOSED_CHECKPOINT = 0x97  # obsolete
    DEREGISTER_TAP_CLIENT = 0x9E
    GET_META = 0xA0
    GETQ_META = 0xA1
    SET_WITH_META = 0xA2
    SETQ_WITH_META = 0xA3
    ADD_WITH_META = 0xA4
    ADDQ_WITH_META = 0xA5
    DEL_WITH_META = 0xA8
    DELQ_WITH_META = 0xA9
    CHANGE_VB_FILTER = 0xB0
    COMPACT = 0xB3
    SET_CLUSTER_CONFIG = 0xB4
    GET_CLUSTER_CONFIG = 0xB5
    GET_RANDOM_KEY = 0xB6
    SEQNO_PERSISTENCE = 0xB7
    SET_COLLECTIONS_MANIFEST = 0xB9
    GET_COLLECTIONS_MANIFEST = 0xBA
    GET_COLLECTION_ID = 0xBB
    GET_SCOPE_ID = 0xBC
    SUBDOC_GET = 0xC5
    SUBDOC_EXISTS = 0xC6
    SUBDOC_DICT_ADD = 0xC7
    SUBDOC_DICT_UPSERT = 0xC8
    SUBDOC_DELETE = 0xC9
    SUBDOC_REPLACE = 0xCA
    SUBDOC_ARRAY_PUSH_LAST = 0xCB
    SUBDOC_ARRAY_PUSH_FIRST = 0xCC
    SUBDOC_ARRAY_INSERT = 0xCD
    SUBDOC_ARRAY_ADD_UNIQUE = 0xCE
    SUBDOC_COUNTER = 0xCF
    SUBDOC_MULTI_LOOKUP = 0xD0
    SUBDOC_MULTI_MUTATION = 0xD1
    SUBDOC_GET_COUNT = 0xD2
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0xD3
    RANGE_SCAN_CREATE = 0xDA
    RANGE_SCAN_CONTINUE = 0xDB
    RANGE_SCAN_CANCEL = 0xDC
    REWIND = 0xE0  # Tailrace's own; no released server has assigned it
    REPLICATE = 0xE1  # Tailrace's own too
    GET_ERROR_MAP = 0xFE


class ServerOpcode(IntEnum):
    """Requests that the server starts (magic 0x82)."""

    CLUSTERMAP_CHANGE_NOTIFICATION = 0x01
    AUTHENTICATE = 0x02
    ACTIVE_EXTERNAL_USERS = 0x03


class TapOpcode(IntEnum):
    """TAP; 0x48 is GET_ALL_VB_SEQNOS and not TAP."""

    CONNECT = 0x40
    MUTATION = 0x41
    DELETE = 0x42
    FLUSH = 0x43
    OPAQUE = 0x44
    VBUCKET_SET = 0x45
    CHECKPOINT_START = 0x46
    CHECKPOINT_END = 0x47


class UprAOpcode(IntEnum):
    """UPR draft A; byte 5 of the header says which message it is."""

    REQUEST = 0x01
    RESPONSE = 0x02
    STREAM_BEGIN = 0x03
    STREAM_MESSAGE = 0x04
    STREAM_END = 0x05


class UprARequestType(IntEnum):
    """Byte 5 of a draft A request."""

    STREAM_REQUEST = 1
    FAILOVER_LOG_REQUEST = 2


class UprAResponseType(IntEnum):
    """Byte 5 of a draft A response; type 2 with a body is the failover log (erratum A7)."""

    OK = 1
    NOT_MY_VBUCKET = 2
    ROLLBACK = 3


class UprAMessageType(IntEnum):
    """Byte 5 of a draft A stream message."""

    SNAPSHOT_START = 1
    SNAPSHOT_END = 2
    MUTATION = 3
    DELETION = 4
    EXPIRATION = 5
    FLUSH = 6


class UprAStreamEnd(IntEnum):
    """Byte 5 of a draft A stream end."""

    OK = 1
    STATE_CHANGED = 2


class UprBOpcode(IntEnum):
    """UPR draft B, the prototype of September 2013."""

    STREAM_REQUEST = 0x50
    FAILOVER_LOG_REQUEST = 0x51
    STREAM_START = 0x52
    STREAM_END = 0x53
    SNAPSHOT_START = 0x54
    SNAPSHOT_END = 0x55
    MUTATION = 0x56
    DELETION = 0x57
    EXPIRATION = 0x58
    FLUSH = 0x59
    SET_VBUCKET_STATE = 0x5A


class UprBStreamEnd(IntEnum):
    """Flag of a draft B stream end; its numbers differ from draft A and DCP (erratum B6)."""

    OK = 0
    STATE_CHANGED = 1


class UprBVBucketState(IntEnum):
    """VBucket states in draft B: pending and replica are swapped compared with all others (erratum B5)."""

    ACTIVE = 1
    PENDING = 2
    REPLICA = 3
    DEAD = 4


class DcpOpcode(IntEnum):
    """DCP."""

    OPEN = 0x50
    ADD_STREAM = 0x51
    CLOSE_STREAM = 0x52
    STREAM_REQUEST = 0x53
    GET_FAILOVER_LOG = 0x54
    STREAM_END = 0x55
    SNAPSHOT_MARKER = 0x56
    MUTATION = 0x57
    DELETION = 0x58
    EXPIRATION = 0x59
    FLUSH = 0x5A
    SET_VBUCKET_STATE = 0x5B
    NOOP = 0x5C
    BUFFER_ACK = 0x5D
    CONTROL = 0x5E
    SYSTEM_EVENT = 0x5F
    PREPARE = 0x60
    SEQNO_ACKNOWLEDGED = 0x61
    COMMIT = 0x62
    ABORT = 0x63
    SEQNO_ADVANCED = 0x64
    OSO_SNAPSHOT = 0x65
    CACHE_TRANSFER = 0x66
    CACHE_TRANSFER_END = 0x67


CHANGE_STREAM_OPCODES = range(0x50, 0x68)
"""Opcodes that belong only to DCP or draft B."""


class Status(IntEnum):
    """Bytes 6-7 of a response."""

    SUCCESS = 0x00
    KEY_ENOENT = 0x01
    KEY_EEXISTS = 0x02
    E2BIG = 0x03
    EINVAL = 0x04
    NOT_STORED = 0x05
    DELTA_BADVAL = 0x06
    NOT_MY_VBUCKET = 0x07
    NO_BUCKET = 0x08
    LOCKED = 0x09
    DCP_STREAM_NOT_FOUND = 0x0A
    OPAQUE_NO_MATCH = 0x0B
    WOULD_THROTTLE = 0x0C
    CONFIG_ONLY = 0x0D
    NOT_LOCKED = 0x0E
    CAS_VALUE_INVALID = 0x0F
    AUTH_STALE = 0x1F
    AUTH_ERROR = 0x20
    AUTH_CONTINUE = 0x21
    ERANGE = 0x22
    ROLLBACK = 0x23
    EACCESS = 0x24
    NOT_INITIALIZED = 0x25
    ENCRYPTION_KEY_NOT_AVAILABLE = 0x26
    CHECKSUM_MISMATCH = 0x27
    EXPIRY_OVERFLOW = 0x28
    LOCK_EXPIRY_OVERFLOW = 0x29
    RATE_LIMITED_NETWORK_INGRESS = 0x30
    RATE_LIMITED_NETWORK_EGRESS = 0x31
    RATE_LIMITED_MAX_CONNECTIONS = 0x32
    RATE_LIMITED_MAX_COMMANDS = 0x33
    BUCKET_SIZE_LIMIT_EXCEEDED = 0x35
    BUCKET_RESIDENT_RATIO_TOO_LOW = 0x36
    BUCKET_DATA_SIZE_TOO_BIG = 0x37
    BUCKET_DISK_SPACE_TOO_LOW = 0x38
    BUCKET_PAUSED = 0x50
    CANCELLED = 0x51
    UNKNOWN_FRAME_INFO = 0x80
    UNKNOWN_COMMAND = 0x81
    ENOMEM = 0x82
    NOT_SUPPORTED = 0x83
    EINTERNAL = 0x84
    EBUSY = 0x85
    ETMPFAIL = 0x86
    XATTR_EINVAL = 0x87
    UNKNOWN_COLLECTION = 0x88
    NO_COLLECTIONS_MANIFEST = 0x89  # retired before 7.0
    CANNOT_APPLY_MANIFEST = 0x8A
    MANIFEST_IS_AHEAD = 0x8B  # retired in 2021 (erratum D5)
    UNKNOWN_SCOPE = 0x8C
    DCP_STREAMID_INVALID = 0x8D
    DURABILITY_INVALID_LEVEL = 0xA0
    DURABILITY_IMPOSSIBLE = 0xA1
    SYNC_WRITE_IN_PROGRESS = 0xA2
    SYNC_WRITE_AMBIGUOUS = 0xA3
    SYNC_WRITE_RE_COMMIT_IN_PROGRESS = 0xA4
    RANGE_SCAN_CANCELLED = 0xA5
    RANGE_SCAN_MORE = 0xA6
    RANGE_SCAN_COMPLETE = 0xA7
    VB_UUID_NOT_EQUAL = 0xA8
    SUBDOC_PATH_ENOENT = 0xC0
    SUBDOC_PATH_MISMATCH = 0xC1
    SUBDOC_PATH_EINVAL = 0xC2
    SUBDOC_PATH_E2BIG = 0xC3
    SUBDOC_DOC_E2DEEP = 0xC4
    SUBDOC_VALUE_CANTINSERT = 0xC5
    SUBDOC_DOC_NOT_JSON = 0xC6
    SUBDOC_NUM_ERANGE = 0xC7
    SUBDOC_DELTA_EINVAL = 0xC8
    SUBDOC_PATH_EEXISTS = 0xC9
    SUBDOC_VALUE_E2DEEP = 0xCA
    SUBDOC_INVALID_COMBO = 0xCB
    SUBDOC_MULTI_PATH_FAILURE = 0xCC
    SUBDOC_SUCCESS_DELETED = 0xCD
    SUBDOC_XATTR_INVALID_FLAG_COMBO = 0xCE
    SUBDOC_XATTR_INVALID_KEY_COMBO = 0xCF
    SUBDOC_XATTR_UNKNOWN_MACRO = 0xD0
    SUBDOC_XATTR_UNKNOWN_VATTR = 0xD1
    SUBDOC_XATTR_CANT_MODIFY_VATTR = 0xD2
    SUBDOC_MULTI_PATH_FAILURE_DELETED = 0xD3
    SUBDOC_INVALID_XATTR_ORDER = 0xD4
    SUBDOC_XATTR_UNKNOWN_VATTR_MACRO = 0xD5
    SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS = 0xD6
    SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE = 0xD7
    SUBDOC_FIELD_NOT_BINARY_VALUE = 0xD8


def status_name(status: int) -> str:
    """The name of a status, known or not."""
    try:
        return Status(status).name
    except ValueError:
        return "UNKNOWN_STATUS"


class Datatype(IntFlag):
    """Byte 5 of a frame, except in UPR draft A."""

    RAW = 0x00
    JSON = 0x01
    SNAPPY = 0x02
    XATTR = 0x04


class Feature(IntEnum):
    """HELLO features."""

    DATATYPE = 0x01  # retired
    TLS = 0x02  # never implemented
    TCP_NODELAY = 0x03
    MUTATION_SEQNO = 0x04
    TCP_DELAY = 0x05  # unsupported
    XATTR = 0x06
    XERROR = 0x07
    SELECT_BUCKET = 0x08
    COLLECTIONS_PROTOTYPE = 0x09  # retired
    SNAPPY = 0x0A
    JSON = 0x0B
    DUPLEX = 0x0C
    CLUSTERMAP_CHANGE_NOTIFICATION = 0x0D
    UNORDERED_EXECUTION = 0x0E
    TRACING = 0x0F
    ALT_REQUEST_SUPPORT = 0x10
    SYNC_REPLICATION = 0x11
    COLLECTIONS = 0x12
    SNAPPY_EVERYWHERE = 0x13
    PRESERVE_TTL = 0x14
    VATTR = 0x15
    PITR = 0x16  # retired
    SUBDOC_CREATE_AS_DELETED = 0x17
    SUBDOC_DOCUMENT_MACRO = 0x18
    SUBDOC_REPLACE_BODY_WITH_XATTR = 0x19
    REPORT_UNIT_USAGE = 0x1A
    NON_BLOCKING_THROTTLING = 0x1B
    SUBDOC_REPLICA_READ = 0x1C
    GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION = 0x1D
    DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP = 0x1E
    CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF = 0x1F
    SUBDOC_MULTIPLE_XATTR_KEYS = 0x20
    SUBDOC_BINARY_XATTR = 0x21
    RANGE_SCAN_INCLUDE_XATTR = 0x22
    SUBDOC_ALLOW_REPLICA_READ_ON_DELETED = 0x23
    GET_RANDOM_KEY_INCLUDE_XATTR = 0x24
    MUTATE_WITH_META = 0x25
    DCP_SKIP_DELETES_IN_INITIAL_BACKFILL = 0x26


class RequestFrameId(IntEnum):
    """FrameInfo ids in the framing extras of a request."""

    BARRIER = 0
    DURABILITY = 1
    DCP_STREAM_ID = 2
    IMPERSONATE = 4
    PRESERVE_TTL = 5
    EXTRA_PRIVILEGE = 6
    IMPERSONATE_TOKEN = 7


class ResponseFrameId(IntEnum):
    """FrameInfo ids in the framing extras of a response."""

    SERVER_DURATION = 0
    READ_UNITS = 1
    WRITE_UNITS = 2
    THROTTLE_DURATION = 3


class DurabilityLevel(IntEnum):
    """How far a durable write must have come before it is answered."""

    MAJORITY = 1
    MAJORITY_AND_PERSIST_ON_ACTIVE = 2
    PERSIST_TO_MAJORITY = 3


class VBucketState(IntEnum):
    """VBucket states everywhere but in UPR draft B."""

    ACTIVE = 1
    REPLICA = 2
    PENDING = 3
    DEAD = 4


class WithMetaOption(IntFlag):
    """Options of SET_WITH_META and its siblings."""

    FORCE_ACCEPT = 0x02
    REGENERATE_CAS = 0x04
    SKIP_CONFLICT_RESOLUTION = 0x08
    IS_EXPIRATION = 0x10


class TapConnectFlag(IntFlag):
    """Flags of TAP Connect; the seed omits 0x40 and 0x100 (erratum T1)."""

    BACKFILL = 0x01
    DUMP = 0x02
    LIST_VBUCKETS = 0x04
    TAKEOVER_VBUCKETS = 0x08
    SUPPORT_ACK = 0x10
    KEYS_ONLY = 0x20
    CHECKPOINT = 0x40
    REGISTERED_CLIENT = 0x80
    FIX_FLAG_BYTEORDER = 0x100


class TapFlag(IntFlag):
    """Flags of a TAP producer message."""

    ACK = 0x01
    NO_VALUE = 0x02
    NETWORK_BYTE_ORDER = 0x04


class TapOpaque(IntEnum):
    """Control codes of TAP Opaque; 4 is also the completion of a filter change (erratum T15)."""

    ENABLE_AUTO_NACK = 0
    INITIAL_VBUCKET_STREAM = 1
    ENABLE_CHECKPOINT_SYNC = 2
    OPEN_CHECKPOINT = 3
    START_ONLINEUPDATE = 4
    STOP_ONLINEUPDATE = 5
    REVERT_ONLINEUPDATE = 6
    CLOSE_TAP_STREAM = 7
    CLOSE_BACKFILL = 8


class OpenFlag(IntFlag):
    """Flags of DCP Open."""

    PRODUCER = 0x01
    INVALID = 0x02  # must be clear
    INCLUDE_XATTRS = 0x04
    NO_VALUE = 0x08
    UNUSED = 0x10  # must be clear
    INCLUDE_DELETE_TIMES = 0x20
    NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x40
    PITR = 0x80  # retired, must be clear
    INCLUDE_DELETED_USER_XATTRS = 0x100
    SKIP_DELETES_IN_INITIAL_BACKFILL = 0x200


class AddStreamFlag(IntFlag):
    """Flags of DCP Add Stream and Stream Request."""

    TAKE_OVER = 0x01
    DISK_ONLY = 0x02
    TO_LATEST = 0x04
    NO_VALUE = 0x08  # removed in 5.0
    ACTIVE_VB_ONLY = 0x10
    STRICT_VB_UUID = 0x20
    FROM_LATEST = 0x40
    IGNORE_PURGED_TOMBSTONES = 0x80
    CACHE_TRANSFER = 0x100


class MarkerFlag(IntFlag):
    """Flags of a DCP snapshot marker."""

    MEMORY = 0x01
    DISK = 0x02
    CHECKPOINT = 0x04
    ACK = 0x08
    HISTORY = 0x10
    MAY_CONTAIN_DUPLICATES = 0x20


class OsoFlag(IntFlag):
    """Flags of a DCP OSO snapshot."""

    START = 0x01
    END = 0x02


class StreamEndStatus(IntEnum):
    """Why a DCP stream ended."""

    OK = 0
    CLOSED = 1
    STATE_CHANGED = 2
    DISCONNECTED = 3  # internal, never on the wire
    SLOW = 4
    BACKFILL_FAIL = 5
    ROLLBACK = 6  # internal; 2 is sent instead
    FILTER_EMPTY = 7
    LOST_PRIVILEGES = 8


class SystemEventId(IntEnum):
    """What a DCP system event is about."""

    COLLECTION_BEGIN = 0
    COLLECTION_END = 1
    RESERVED = 2
    SCOPE_CREATED = 3
    SCOPE_DROPPED = 4
    COLLECTION_MODIFIED = 5


SCOPE_EVENTS = frozenset({SystemEventId.SCOPE_CREATED, SystemEventId.SCOPE_DROPPED})
"""The events about a scope; all others are about a collection."""


class ControlKey:
    """Names of DCP control settings."""

    ENABLE_NOOP = b"enable_noop"
    SET_NOOP_INTERVAL = b"set_noop_interval"
    CONNECTION_BUFFER_SIZE = b"connection_buffer_size"
    STREAM_BUFFER_SIZE = b"stream_buffer_size"
    SET_PRIORITY = b"set_priority"
    FORCE_VALUE_COMPRESSION = b"force_value_compression"
    SUPPORTS_CURSOR_DROPPING = b"supports_cursor_dropping"
    SUPPORTS_CURSOR_DROPPING_VULCAN = b"supports_cursor_dropping_vulcan"
    SUPPORTS_HIFI_MFU = b"supports_hifi_MFU"
    SEND_STREAM_END_ON_CLOSE = b"send_stream_end_on_client_close_stream"
    ENABLE_EXPIRY_OPCODE = b"enable_expiry_opcode"
    ENABLE_STREAM_ID = b"enable_stream_id"
    ENABLE_SYNC_WRITES = b"enable_sync_writes"
    CONSUMER_NAME = b"consumer_name"
    ENABLE_OSO = b"enable_out_of_order_snapshots"
    BACKFILL_ORDER = b"backfill_order"
    INCLUDE_DELETED_USER_XATTRS = b"include_deleted_user_xattrs"
    V7_STATUS_CODES = b"v7_dcp_status_codes"
    FLATBUFFERS_SYSTEM_EVENTS = b"flatbuffers_system_events"
    CHANGE_STREAMS = b"change_streams"
    MAX_MARKER_VERSION = b"max_marker_version"
    CACHE_TRANSFER = b"cache_transfer"
    ENABLE_EXT_METADATA = b"enable_ext_metadata"  # 4.x only
