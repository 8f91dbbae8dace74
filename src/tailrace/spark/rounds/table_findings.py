"""What `tailrace doctor` says of a table: whether its mirror can go on from where it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...client.doctor.examination import BucketFacts
from ...client.doctor.findings import Finding, error, numbers, ok, warning
from ...clock import SYSTEM, Clock
from ...history import RestartAction
from ...table.contract import Table
from .forecast import VBucketForecast, forecast
from .same_bucket import UUID, is_replaced

__all__ = ["examine_table"]

ASSUMED_PURGE_S = 3 * 86_400.0
"""The default purge interval of servers, which don't report theirs to readers."""


def examine_table(table: Table, bucket: str, facts: BucketFacts, clock: Clock = SYSTEM) -> Iterator[Finding]:
    """What is wrong between a table and its bucket."""
    source = table.source
    mirrored = source.get("bucket")
    if mirrored != bucket:
        yield error(
            "table",
            f"the table mirrors bucket {mirrored!r}, not {bucket!r}",
            f"write the URL of {mirrored!r}, or give {bucket!r} a table of its own",
        )
        return
    if is_replaced(table, facts.map.uuid):
        yield error(
            "table",
            f"the bucket was deleted and created again: its uuid was {source[UUID]} and is {facts.map.uuid}",
            "mirror it into a new table, or replace all rows with 'tailrace mirror --accept-new-bucket'",
        )
        return
    if source.get("vbuckets") != facts.map.vbucket_count:
        yield error(
            "table",
            f"the table mirrors a bucket with {source.get('vbuckets')} vbuckets, but this one has "
            f"{facts.map.vbucket_count}",
            "the bucket was created again: mirror it into a new table",
        )
        return
    collection = f"{source.get('scope', '_default')}.{source.get('collection', '_default')}"
    if facts.collections is not None and "*" not in collection and collection not in facts.collections:
        yield warning(
            "table",
            f"the bucket has no collection {collection}: it was dropped",
            "the mirror empties the table; create the collection again, or end the mirror",
        )
    plans = forecast(table, facts.failover_logs, facts.high_seqnos, facts.purge_seqnos)
    yield from _examine_plans(table, plans)
    yield from _examine_purging(table, plans, facts, clock)


def _examine_plans(table: Table, plans: list[VBucketForecast]) -> Iterator[Finding]:
    back = [plan.vbucket for plan in plans if plan.action is RestartAction.ROLL_BACK]
    over = [plan.vbucket for plan in plans if plan.action is RestartAction.START_OVER]
    to_read = sum(plan.changes for plan in plans)
    if back:
        yield warning(
            "table",
            f"{numbers(back)} failed over behind the table: their rows go back to an earlier version",
            "nothing, the mirror does it in its next round; 'tailrace plan' shows how far",
        )
    if over:
        yield warning(
            "table",
            f"{numbers(over)} can't continue where the table is: they are read from the beginning",
            "nothing, the mirror does it; run it more often than the purge interval, keep more with --undo",
        )
    if not back and not over:
        counts = Counter(plan.action for plan in plans)
        resumed = counts[RestartAction.RESUME] + counts[RestartAction.BACKFILL]
        yield ok(
            "table",
            f"version {table.version}: {resumed} vbuckets continue as they are, {to_read:,} changes to read",
        )


def _examine_purging(
    table: Table, plans: list[VBucketForecast], facts: BucketFacts, clock: Clock
) -> Iterator[Finding]:
    """Compare the purge interval with the positions: a mirror away for longer misses deletions."""
    purged = [plan.vbucket for plan in plans if 0 < plan.held.seqno < facts.purge_seqnos.get(plan.vbucket, 0)]
    if purged:
        yield error(
            "purge",
            f"deletions that the table has not seen are purged in {numbers(purged)}",
            "the mirror reads them from the beginning; run it more often, or set a longer purge interval",
        )
    interval_s = ASSUMED_PURGE_S if facts.tombstone_age_s is None else facts.tombstone_age_s
    age_s = clock.time_ns() / 1e9 - table.current.timestamp_ms / 1000
    behind = any(plan.changes for plan in plans)
    kept = f"deletions are kept for {_span(interval_s)}"
    if facts.tombstone_age_s is None:
        kept += " (assumed, the server does not say)"
    if behind and age_s >= interval_s / 2:
        yield warning(
            "purge",
            f"the table was last written {_span(age_s)} ago, {kept}",
            "run the mirror before the server forgets deletions, or set a longer purge interval",
        )
    elif not purged:
        yield ok("purge", f"{kept}, the table has seen them")


def _span(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
