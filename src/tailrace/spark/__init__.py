"""Spark: a source of changes, and a mirror that stays true.

    import tailrace.spark as ts

    spark = ts.session()
    changes = spark.read.format("tailrace").option("connectionString", "couchbase://127.0.0.1/default").load()
    people = ts.typed(changes, "name STRING, age INT")

    run = ts.mirror(spark, "couchbase://127.0.0.1/default", "/data/people")  # like a streaming query
    print(ts.verify(spark, "couchbase://127.0.0.1/default", "/data/people").equal)

Modules are imported only when they are used: this package is also loaded on every executor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..table.mutation_tokens import wait_for
    from .api import mirror, verify
    from .documents import infer_schema, rescued_count, typed
    from .live_table import table
    from .rounds.change_log import live_changes
    from .source.checkpoint import check_checkpoint
    from .source.data_source import register
    from .source.lag import Lag, LagListener
    from .spark_session import prepare_environment, session

__all__ = [
    "Lag",
    "LagListener",
    "check_checkpoint",
    "infer_schema",
    "live_changes",
    "mirror",
    "prepare_environment",
    "register",
    "rescued_count",
    "session",
    "table",
    "typed",
    "verify",
    "wait_for",
]

_HOMES = {
    "mirror": ".api",
    "verify": ".api",
    "live_changes": ".rounds.change_log",
    "Lag": ".source.lag",
    "LagListener": ".source.lag",
    "check_checkpoint": ".source.checkpoint",
    "infer_schema": ".documents",
    "rescued_count": ".documents",
    "typed": ".documents",
    "register": ".source.data_source",
    "table": ".live_table",
    "prepare_environment": ".spark_session",
    "session": ".spark_session",
    "wait_for": "..table.mutation_tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name], __name__), name)
