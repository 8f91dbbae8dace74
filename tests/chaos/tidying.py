"""What people do to a mirror's table with other tools."""

from __future__ import annotations

from deltalake import DeltaTable


def tidy(table: str, how: str) -> None:
    """Join small files, take old files away, or write a checkpoint of the log."""
    delta = DeltaTable(table)
    if how == "optimize":
        delta.optimize.compact()
    elif how == "vacuum":
        delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    else:
        assert how == "checkpoint"
        delta.create_checkpoint()
