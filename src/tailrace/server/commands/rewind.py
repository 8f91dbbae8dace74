"""Commands that take history away: rewind and flush. Both are on disk when they are answered.

Rules: docs/spec/header.md#connection-commands, docs/spec/header.md#other-commands.
"""

from __future__ import annotations

import json

from ...errors import RollbackImpossible, StoreError
from ...store.base import VBucket
from ...wire import admin
from ...wire.codes import Datatype, Status, VBucketState
from ..call import Call, Refused, Reply, command

_LOSE = 1


@command(admin.Rewind)
def rewind(call: Call[admin.Rewind]) -> Reply:
    """Forgets the newest changes of active vbuckets, as a failover that loses data does."""
    request, bucket = call.request, call.bucket
    pending = call.defer(call.node.settings.compact_timeout)

    def target(vbucket: VBucket) -> int:
        return max(0, vbucket.high_seqno - request.number) if request.mode == _LOSE else request.number

    def act() -> None:
        try:
            vbuckets = _chosen(call)
            targets = {vbucket.id: target(vbucket) for vbucket in vbuckets}
            with call.node.watching_history(bucket, targets, "failover", why="rewind"):
                bucket.store.rollback(targets, branch=True)
        except RollbackImpossible as error:
            pending.fail(Status.ERANGE, str(error))
            return
        except Refused as error:
            pending.fail(error.status, error.context)
            return
        except StoreError as error:
            pending.fail(Status.EINTERNAL, str(error))
            return
        for at in targets:
            bucket.vbucket_changed(at)
        body = json.dumps({str(at): seqno for at, seqno in targets.items()}).encode()
        pending.succeed(call.success(value=body, datatype=Datatype.JSON & call.session.datatypes))

    bucket.work.exclusively(act)
    return pending


def _chosen(call: Call[admin.Rewind]) -> list[VBucket]:
    active = [vbucket for vbucket in call.bucket.store if vbucket.state == VBucketState.ACTIVE]
    wanted = set(call.request.vbuckets)
    if not wanted:
        return active
    chosen = [vbucket for vbucket in active if vbucket.id in wanted]
    if len(chosen) != len(wanted):
        missing = min(wanted - {vbucket.id for vbucket in chosen})
        raise Refused(Status.NOT_MY_VBUCKET, f"vbucket {missing} is not active here")
    return chosen


@command(admin.Flush, admin.FlushQ)
def flush(call: Call[admin.Flush]) -> Reply:
    """Every active vbucket is empty, on a new branch at seqno 0."""
    bucket = call.bucket
    pending = call.defer(call.node.settings.compact_timeout)

    def act() -> None:
        try:
            numbers = [vbucket.id for vbucket in bucket.store]
            with call.node.watching_history(bucket, numbers, "failover", why="flush"):
                bucket.store.flush_all()
        except StoreError as error:
            pending.fail(Status.EINTERNAL, str(error))
            return
        for vbucket in bucket.store:
            bucket.vbucket_changed(vbucket.id)
        pending.succeed(call.success())

    bucket.work.exclusively(act)
    return pending
