"""The columns of messages in Arrow: Kafka's names and types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qflow.named_tuples import NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
LOG_APPEND_TIME = 1
"""The only `timestampType`: when a message was confirmed. (Kafka has 0, too: when it was created.)"""


NULL_HEADER = "qflow-null"
"""Marks a null value: a message always has a body, so it is empty, with this header set to true. Headers of Spark are
text, so none of them is taken for it."""


class Column(NamedTuple):
    """One column of a query."""

    name: str
    nullable: bool = True


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
