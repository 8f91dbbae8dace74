"""The seeded script of a chaos run: what happens to the node and to the mirror, and the comparisons.

A script is a number of rounds. In a round the node has accidents and the mirror has a few lives, most of
which end badly, at a named place; the last one runs undisturbed to the end. After every commit of the table
its rows must be a state that the bucket really had at the position that the table claims; after every round
`verify` and the naive reader must both find table and bucket equal.

Both engines run the same scripts: the one in this process, and a real Spark in processes that are killed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from chaos.world import ACCIDENTS, World
from spark.naive import Doc, table_state
from tailrace.crashpoints import CRASH_POINTS, TABLE_CRASH_POINTS
from tailrace.table.file_reading import scan
from tailrace.table.hashing import KeyHash
from tailrace.table.opening import open_table

ALL_CRASH_POINTS = (*CRASH_POINTS, *TABLE_CRASH_POINTS)

QUIET = ("writes", "writes", "burst", "expiry", "failover")
"""What happens all the time."""
LOUD = (*["rewind"] * 6, "crash", "crash", "restart", "cut", "purge", "flush")
"""What is dangerous for a mirror."""
TORN = ("overwrites", "tear")
"""Before a life, and while it is inside the snapshot."""
assert {*QUIET, *LOUD, *TORN} == set(ACCIDENTS)

TIDYING = ("optimize", "vacuum", "checkpoint")
"""What people do to a table between two lives of its mirror."""
TIDYING_MEANWHILE = ("optimize", "checkpoint")
"""What people do to it while a mirror lives."""


@dataclass(frozen=True)
class Life:
    """One start of the mirror, and how it ends."""

    once: bool
    """It ends when it has what was there at its start; otherwise it runs on until it has caught up."""
    killed_at: str | None
    """A crash point; ``disk-full`` for an error instead of a kill; None for a peaceful end."""
    count: int
    """At the n-th time."""
    accidents: tuple[tuple[str, int, str], ...]
    """What happens to the node when the mirror comes to a crash point for the nth time."""
    options: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    """What happened to the node since the last life."""
    tidying: str | None = None
    """What is done to the table afterwards."""
    hours_before: float = 0.0
    """How much time has passed: retention takes what is too old."""
    comes_back: bool = False
    """It is not killed but paused, and goes on when another one has the table."""
    damage: bool = False
    """Before it, a mirror with a bug has left wrong rows, which are repaired."""

    def __str__(self) -> str:
        how = "stands still" if self.comes_back else "killed"
        end = f"{how} at {self.killed_at}:{self.count}" if self.killed_at else "ends in peace"
        return f"{'once' if self.once else 'runs on'}, {end}, {list(self.accidents)}, {self.options}"


CRASHES = tuple(point for point in ALL_CRASH_POINTS if not point.startswith("source."))
PLACES = tuple(point for point in CRASHES if point != "mirror.in-recovery")
OFTEN = (
    *("mirror.after-commit", "mirror.after-plan", "mirror.in-read", "table.in-write"),
    *("mirror.before-compaction-commit", "table.after-compaction"),
)
"""Places that nearly every life reaches."""


def make_round(rng: random.Random) -> list[Life]:
    """The lives between two comparisons; the last one is undisturbed."""
    lives = [make_torn_life(rng) if rng.random() < 0.15 else make_life(rng) for _ in range(rng.randint(1, 3))]
    return [*lives, Life(once=True, killed_at=None, count=0, accidents=(), options=_options(rng))]


def make_life(rng: random.Random) -> Life:
    """A life of the mirror with faults to survive."""
    before = [rng.choice(QUIET) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.6:
        before.insert(rng.randint(0, len(before)), rng.choice(LOUD))
    killed_at = rng.choice((*CRASHES, "disk-full", *[None] * 5))
    accidents = []
    for _ in range(rng.randint(0, 3)):
        what = rng.choice(LOUD if rng.random() < 0.7 else QUIET)
        place = rng.choice(PLACES if rng.random() < 0.5 else OFTEN)
        accidents.append((place, rng.choice((1, 1, 2, 3, 4)), what))
    if rng.random() < 0.15:
        accidents.append((rng.choice(PLACES), rng.choice((1, 2, 3)), rng.choice(TIDYING_MEANWHILE)))
    return Life(
        once=rng.random() < 0.4,
        killed_at=killed_at,
        count=1 if killed_at == "mirror.in-recovery" else rng.choice((1, 1, 2, 2, 3, 5)),
        accidents=tuple(accidents),
        options=_options(rng),
        before=tuple(before),
        tidying=_tidying(rng),
        hours_before=rng.choice((0.0, 0.0, 0.0, 0.1, 2.0, 30.0)),
        comes_back=killed_at not in (None, "disk-full") and rng.random() < 0.3,
        damage=rng.random() < 0.1,
    )


def make_torn_life(rng: random.Random) -> Life:
    """A life that is inside a snapshot when a failover takes the end of it back."""
    before, meanwhile = TORN
    return Life(
        once=rng.random() < 0.4,
        killed_at=None,
        count=0,
        accidents=(("mirror.in-read", rng.choice((1, 1, 2)), meanwhile),),
        options=_TEARING | {"compression": rng.choice(("snappy", "off"))},
        before=(before,),
    )


_TEARING = {"maxOffsetsPerTrigger": "4", "flowControlBuffer": "1024"}


def _tidying(rng: random.Random) -> str | None:
    return rng.choice(TIDYING) if rng.random() < 0.2 else None


def _options(rng: random.Random) -> dict[str, str]:
    """Small rounds and a small window, so snapshots are torn in many places."""
    options = {"compression": rng.choice(("snappy", "off"))}
    if rng.random() < 0.4:
        return options | _TEARING
    if rng.random() < 0.7:
        options["maxOffsetsPerTrigger"] = str(rng.choice((2, 9, 30)))
    if rng.random() < 0.5:
        options["flowControlBuffer"] = str(rng.choice((1_024, 2_000, 6_000)))
    return options


class NotEqual(AssertionError):
    """Table and bucket are not what they should be."""


def check_version(world: World, table: str) -> None:
    """The table's newest version is a state that the bucket really had, vbucket by vbucket."""
    rows: dict[int, dict[bytes, Doc]] = {}
    try:
        held = table_state(table)
    except Exception as error:  # noqa: BLE001 - delta-rs has many
        raise NotEqual(f"version can't be read: {error}") from None
    for (vbucket, key), doc in held.items():
        rows.setdefault(vbucket, {})[key] = doc
    opened = open_table(table)
    files = opened.files()
    masks = {file.path: opened.mask(file) for file in files}
    scanned = scan(opened.store, files, masks, opened.schema, key_hash=KeyHash(opened.secret))
    if sum(batch.num_rows for batch in scanned) != len(held):
        raise NotEqual("delta-rs and we see other rows in the table")
    current = opened.current
    for vbucket in {*rows, *current.positions}:
        seqno = current.position(vbucket).seqno
        if not world.had(vbucket, seqno, rows.get(vbucket, {})):
            raise NotEqual(
                f"version {current.version} says that vbucket {vbucket} is at seqno {seqno}, "
                f"but the bucket never held this there: {rows.get(vbucket, {})}"
            )
