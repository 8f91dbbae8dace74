"""What a mirror is asked to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...clock import SYSTEM, Clock
from ...table.compaction import CompactionPolicy
from ...table.contract import Table
from ...table.document_columns import DocumentColumns
from .jobs import Jobs
from .progress import RoundProgress

__all__ = ["Assignment", "MirrorSettings"]


@dataclass(frozen=True)
class MirrorSettings:
    """How a mirror runs."""

    trigger_s: float | None = None
    """Time between two rounds; None is as short as possible."""
    once: bool = False
    """It ends when it has caught up with the moment of its start."""
    max_changes: int | None = None
    """The most changes of a round, as far as snapshots allow."""
    maintenance: bool = True
    changes_keep_s: float | None = None
    """How long the change log keeps a change; None is for ever."""


@dataclass(frozen=True)
class Assignment:
    """A bucket, the tables to keep equal to it, the settings, and whom to tell."""

    jobs: Jobs
    given: Mapping[str, str] = field(repr=False)
    """Options of the source."""
    tables: Sequence[Table]
    bucket_name: str
    settings: MirrorSettings = field(default_factory=MirrorSettings)
    log: Table | None = None
    """The change log, if there is one."""
    missing: tuple[str, ...] = ()
    """Collections that were dropped: their tables are emptied at the start."""
    start_over: frozenset[int] = frozenset()
    """VBuckets that are read again from the beginning, whatever the tables hold of them."""
    columns: Sequence[DocumentColumns | None] = ()
    """By table, the columns of documents that it should have; missing ones are added at the start."""
    on_progress: Callable[[RoundProgress], None] | None = None
    on_trouble: Callable[[str], None] = lambda _: None
    clock: Clock = SYSTEM
    policy: CompactionPolicy | None = None
    """When compaction is due."""
    in_background: bool = True
    """Whether compaction runs beside the rounds."""
    bucket_uuid: str = ""
    """The uuid of the bucket that the tables mirror from now on; empty if it is not known."""

    @property
    def all_tables(self) -> list[Table]:
        """The tables, and the change log."""
        return [*self.tables, *([] if self.log is None else [self.log])]
