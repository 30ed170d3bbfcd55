"""The columns of `format("qflow")`: Kafka's names and types, for Spark and for Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qflow.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Spark's type of each column."""
LOG_APPEND_TIME = 1
"""The only `timestampType`: when a message was confirmed. (Kafka has 0, too: when it was created.)"""


NULL_HEADER = "qflow-null"
"""Marks a null value: a message always has a body, so it is empty, with this header set to true. Headers of Spark are
text, so none of them is taken for it."""


class Column(NamedTuple):
    """One column of a query."""

    name: str
    nullable: bool = True


def whole_schema(*, include_headers: bool) -> str:
    """Return all columns as a schema for Spark."""
    return ", ".join(f"{name} {type_}" for name, type_ in TYPES.items() if include_headers or name != "headers")


def columns_of(schema: StructType) -> tuple[Column, ...]:
    """Return the columns of a schema, in its order.

    Raises:
        InvalidArgument: one of them does not exist, or has another type.
    """
    columns = []
    for field in schema.fields:
        expected, found = TYPES.get(field.name), field.dataType.simpleString()
        if expected is None:
            raise InvalidArgument(
                f"there is no column {field.name!r} in format qflow; there are: {', '.join(TYPES)}. What is in a value "
                "is yours to take apart, for example with from_json(value.cast('string'), ...)"
            )
        if found != expected:
            raise InvalidArgument(
                f"column {field.name!r} of format qflow is {expected}, the schema says {found}: read it as it is, and "
                "cast it afterwards"
            )
        columns.append(Column(field.name, field.nullable))
    return tuple(columns)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the exact schema that Spark expects of Arrow batches with these columns."""
    import pyarrow as pa

    types: dict[str, Any] = {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestampType": pa.int32(),
        "headers": headers_type(),
    }
    return pa.schema([pa.field(column.name, types[column.name], nullable=column.nullable) for column in columns])


def headers_type() -> pa.DataType:
    """Return the type of the column of headers."""
    import pyarrow as pa

    pair = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    return pa.list_(pa.field("element", pair))
