"""Numbers that a peer sends have limits, and are refused on arrival: later would be too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from store.conftest import Home
from store.test_replica_store import frames_after
from tailrace.errors import DocumentRefused
from tailrace.model import MAX_CAS, MAX_REPLICA_REV, MAX_REV, MAX_SEQNO
from tailrace.store.format import DELETION, MUTATION, MUTATION_START, rev_of
from tailrace.store.vbucket import EngineVBucket
from tailrace.wire.codes import DcpOpcode, Status, VBucketState

TOO_HIGH = [MAX_SEQNO + 1, 1 << 56, 1 << 63, (1 << 64) - 1]


def mutation(seqno: int, rev: int = 1, cas: int = 1, key: bytes = b"\0k") -> bytes:
    return MUTATION.pack(MUTATION_START, len(key), 31, 0, 0, 31 + len(key), cas, seqno, rev, 0, 0) + key


def deletion(seqno: int, rev: int = 1, cas: int = 1, key: bytes = b"\0k") -> bytes:
    body = 21 + len(key)
    fields = (0x80, DcpOpcode.DELETION, len(key), 21, 0, 0, body, 0, cas, seqno, rev, 0, 0)
    return DELETION.pack(*fields) + key


def replica(home: Home) -> EngineVBucket:
    bucket = home.bucket(2)
    bucket.set_state(0, VBucketState.REPLICA)
    vbucket = bucket.vbuckets[0]
    assert vbucket is not None
    return vbucket


def refuses(vbucket: EngineVBucket, status: Status, what: str, *args: object) -> None:
    before = vbucket.high_seqno, vbucket.received, vbucket.purge_seqno, vbucket.deleted_rev
    with pytest.raises(DocumentRefused) as refused:
        getattr(vbucket, what)(*args)
    assert refused.value.status == status
    assert (vbucket.high_seqno, vbucket.received, vbucket.purge_seqno, vbucket.deleted_rev) == before


@pytest.mark.parametrize("number", TOO_HIGH)
def test_seqnos_of_a_replica(home: Home, number: int) -> None:
    vbucket = replica(home)
    refuses(vbucket, Status.ERANGE, "begin_snapshot", 0, number)
    refuses(vbucket, Status.ERANGE, "begin_snapshot", number, number)
    refuses(vbucket, Status.ERANGE, "begin_snapshot", 0, 9, number)
    vbucket.begin_snapshot(0, MAX_SEQNO, MAX_SEQNO)
    refuses(vbucket, Status.ERANGE, "receive", mutation(number))


@pytest.mark.parametrize("number", [1, (1 << 64) - 1])
@pytest.mark.parametrize("change", [mutation, deletion])
def test_revs_and_cas_values_of_a_replica(home: Home, number: int, change: Callable[..., Any]) -> None:
    vbucket = replica(home)
    vbucket.begin_snapshot(0, 9)
    refuses(vbucket, Status.EINVAL, "receive", change(1, rev=max(number, MAX_REPLICA_REV + 1)))
    refuses(vbucket, Status.EINVAL, "receive", change(1, cas=max(number, MAX_CAS + 1)))
    vbucket.receive(change(1, rev=MAX_REPLICA_REV, cas=MAX_CAS))


def test_a_replica_takes_what_its_active_has_made(home: Home) -> None:
    """Somebody writes a document with the highest numbers, and others write on."""
    bucket = home.bucket(2)
    vbucket = bucket.vbuckets[0]
    assert vbucket is not None
    vbucket.set_with_meta(b"\0k", b"", 0, 0, MAX_REV, MAX_CAS)
    vbucket.delete_with_meta(b"\0gone", 0, 0, MAX_REV, MAX_CAS)
    for key in (b"\0k", b"\0gone", b"\0new"):
        vbucket.set(key, b"2")
    vbucket.delete(b"\0k")
    vbucket.set(b"\0k", b"3")
    frames, _ = frames_after(vbucket, 0)
    assert max(map(rev_of, frames)) > MAX_REV
    bucket.set_state(1, VBucketState.REPLICA)
    other = bucket.vbuckets[1]
    assert other is not None
    other.begin_snapshot(0, vbucket.high_seqno)
    for frame in frames:
        other.receive(frame)
    assert other.high_seqno == vbucket.high_seqno


@pytest.mark.parametrize("number", [MAX_REV + 1, (1 << 64) - 1])
def test_metadata_that_was_made_elsewhere(home: Home, number: int) -> None:
    vbucket = home.bucket(2).vbuckets[0]
    assert vbucket is not None
    refuses(vbucket, Status.EINVAL, "set_with_meta", b"\0k", b"", 0, 0, number, 5)
    refuses(vbucket, Status.EINVAL, "delete_with_meta", b"\0k", 0, 0, number, 5)
    refuses(vbucket, Status.EINVAL, "set_with_meta", b"\0k", b"", 0, 0, 5, number)
    refuses(vbucket, Status.EINVAL, "delete_with_meta", b"\0k", 0, 0, 5, number)
    vbucket.set_with_meta(b"\0k", b"", 0xFFFFFFFF, 0xFFFFFFFF, MAX_REV, MAX_CAS)


def test_a_vbucket_at_its_limits_goes_on(home: Home) -> None:
    """It becomes active, and its documents are overwritten in every way; the other vbuckets' changes go to
    disk with it.
    """
    vbucket = replica(home)
    vbucket.begin_snapshot(0, MAX_SEQNO)
    vbucket.receive(mutation(MAX_SEQNO - 1, MAX_REPLICA_REV, MAX_CAS, b"\0a"))
    vbucket.receive(deletion(MAX_SEQNO, MAX_REPLICA_REV, MAX_CAS, b"\0b"))
    bucket = home.bucket()
    bucket.set_state(0, VBucketState.ACTIVE)
    bucket.vbuckets[1].set(b"\0other", b"1")
    vbucket.set(b"\0a", b"2")
    vbucket.put(b"\0a", b"3", 0, 0, 0)
    vbucket.set(b"\0a", b"4")
    vbucket.set(b"\0b", b"5")
    vbucket.delete(b"\0b")
    bucket.flush()
    assert vbucket.persisted_seqno == vbucket.high_seqno == MAX_SEQNO + 5
    bucket.seal()
    bucket.compact()
    bucket = home.crash()
    assert bucket.vbuckets[0].get(b"\0a").endswith(b"4")
    assert bucket.vbuckets[1].get(b"\0other").endswith(b"1")
