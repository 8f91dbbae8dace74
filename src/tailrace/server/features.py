"""The features that a node offers, and what those mean that HELLO granted to a connection."""

from __future__ import annotations

from collections.abc import Sequence

from ..wire.codes import Datatype, Feature

__all__ = ["OFFERED", "GrantedFeatures", "datatypes"]

OFFERED = frozenset(
    {
        Feature.TCP_NODELAY,
        Feature.MUTATION_SEQNO,
        Feature.XATTR,
        Feature.XERROR,
        Feature.SELECT_BUCKET,
        Feature.SNAPPY,
        Feature.JSON,
        Feature.DUPLEX,
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION,
        Feature.UNORDERED_EXECUTION,
        Feature.ALT_REQUEST_SUPPORT,
        Feature.SYNC_REPLICATION,
        Feature.COLLECTIONS,
        Feature.SNAPPY_EVERYWHERE,
        Feature.PRESERVE_TTL,
        Feature.VATTR,
        Feature.SUBDOC_CREATE_AS_DELETED,
        Feature.SUBDOC_DOCUMENT_MACRO,
        Feature.SUBDOC_REPLACE_BODY_WITH_XATTR,
        Feature.SUBDOC_REPLICA_READ,
        Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
        Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP,
        Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF,
        Feature.SUBDOC_MULTIPLE_XATTR_KEYS,
        Feature.RANGE_SCAN_INCLUDE_XATTR,
        Feature.GET_RANDOM_KEY_INCLUDE_XATTR,
        Feature.DCP_SKIP_DELETES_IN_INITIAL_BACKFILL,
    }
)
"""Not Tracing: a duration in every answer would cost more than it is worth."""


def datatypes(features: frozenset[int]) -> int:
    """The datatype bits that a peer with these features may use and see."""
    bits = 0
    if Feature.JSON in features:
        bits |= Datatype.JSON
    if Feature.SNAPPY in features or Feature.SNAPPY_EVERYWHERE in features:
        bits |= Datatype.SNAPPY
    if Feature.XATTR in features:
        bits |= Datatype.XATTR
    return bits


class GrantedFeatures:
    """What a connection may use, in the forms that the code needs."""

    __slots__ = ("codes", "datatypes", "mutation_seqno", "prefixed_keys")

    def __init__(self, granted: Sequence[int] = (), *, is_dcp: bool = False) -> None:
        self.codes = frozenset(granted)
        self.datatypes = int(datatypes(self.codes))  # a plain int, for the hot path
        if is_dcp:
            self.datatypes |= int(Datatype.JSON)
        self.prefixed_keys = Feature.COLLECTIONS in self.codes
        self.mutation_seqno = Feature.MUTATION_SEQNO in self.codes
