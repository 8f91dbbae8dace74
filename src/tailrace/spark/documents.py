"""JSON documents as typed columns; what does not fit is kept, and can be counted.

    from tailrace.spark import typed
    people = typed(changes, "name STRING, age INT")

turns the column ``value`` (bytes of the source, or text of the mirror's table) into columns. If a document
is not JSON, or has a field of another type, the columns hold what could be read and ``_rescued`` holds the
whole document; no row is ever dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ..errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

__all__ = ["RESCUED", "infer_schema", "rescued_count", "typed"]

RESCUED = "_rescued"
"""The column that holds the documents that don't fit."""

VARIANT = "VARIANT"


def typed(
    frame: DataFrame, schema: StructType | str, *, column: str = "value", into: str | None = None
) -> DataFrame:
    """``frame`` with the JSON in ``column`` as typed columns beside the others, and ``_rescued``.

    ``schema`` is a Spark schema, a DDL text, or ``"VARIANT"`` for one column that keeps any shape. With
    ``into`` the fields go into one struct column of that name (VARIANT: the name of its column, by default
    ``document``); without it a field that has the name of a column of ``frame`` is an error.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import StringType, StructField, StructType

    text = f.col(column).cast("string")
    if isinstance(schema, str) and schema.strip().upper() == VARIANT:
        document = f.try_parse_json(text)
        rescued = f.when(f.col(column).isNotNull() & document.isNull(), text)
        return frame.withColumn(into or "document", document).withColumn(RESCUED, rescued)
    wanted = _struct(schema)
    if RESCUED in wanted.fieldNames() or RESCUED in frame.columns:
        raise UsageError(f"the column {RESCUED} is made by typed(); rename yours")
    taken = [] if into else [name for name in wanted.fieldNames() if name in frame.columns]
    if taken:
        raise UsageError(
            f"the frame has a column {taken[0]!r} already; give into= to put the fields in a struct"
        )
    with_rescued = StructType([*wanted.fields, StructField(RESCUED, StringType())])
    parsed = f.from_json(text, with_rescued, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": RESCUED})
    made = frame.withColumn("_tailrace_parsed", parsed)
    fields = [f.col("_tailrace_parsed").getField(name).alias(name) for name in wanted.fieldNames()]
    own = [f.col(name) for name in frame.columns]
    rescue = f.col("_tailrace_parsed").getField(RESCUED).alias(RESCUED)
    if into is not None:
        # where there is no document, a struct of nulls would look like an empty one
        return made.select(*own, f.when(f.col(column).isNotNull(), f.struct(*fields)).alias(into), rescue)
    return made.select(*own, *fields, rescue)


def infer_schema(frame: DataFrame, *, column: str = "value", sample: int = 10_000) -> StructType:
    """The schema of the first ``sample`` documents, as Spark's JSON reader finds it; for a batch frame."""
    from pyspark.sql import functions as f

    if frame.isStreaming:
        raise UsageError("a stream has no sample; infer the schema from a batch read of the same bucket")
    rows = frame.select(f.col(column).cast("string").alias("text")).where("text is not null").limit(sample)
    spark = frame.sparkSession
    texts = [row.text for row in rows.collect()]
    reader = spark.read.option("mode", "DROPMALFORMED")
    if hasattr(spark, "sparkContext"):
        inferred = reader.json(spark.sparkContext.parallelize(texts)).schema
    else:  # a remote session
        try:
            inferred = reader.json(spark.createDataFrame([(text,) for text in texts], "text string")).schema
        except (AttributeError, TypeError, AssertionError):
            raise UsageError("infer_schema through Spark Connect needs Spark 4.3; give a schema") from None
    if not inferred.fields:
        raise UsageError(f"none of the first {sample} documents is a JSON object; there is nothing to infer")
    return inferred


def rescued_count(frame: DataFrame) -> int:
    """How many rows of a typed batch frame did not fit."""
    return frame.where(f"{RESCUED} is not null").count()


def _struct(schema: StructType | str) -> StructType:
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise UsageError(f"a schema is a StructType or DDL text, not {str(schema)[:40]!r}")
    try:
        declared = cast(StructType, StructType.fromDDL(schema))
    except Exception as error:  # noqa: BLE001 - Spark's parser raises what its version likes
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"{schema[:80]!r} is not a schema: {first_line}") from None
    return declared
