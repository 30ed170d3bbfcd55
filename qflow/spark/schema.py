"""The columns of `format("qflow")`: Kafka's names and types, for Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qflow.arrow.schema import Column
from qflow.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp_ltz",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}
"""Spark's type of each column. (What `timestamp` means is for the session to say.)"""
_SHOWN = {"timestamp_ltz": "timestamp"}
"""What Spark calls a type that it has."""


def whole_schema(*, include_headers: bool) -> str:
    """Return all columns as a schema for Spark."""
    return ", ".join(f"{name} {type_}" for name, type_ in TYPES.items() if include_headers or name != "headers")


def columns_of(schema: StructType) -> tuple[Column, ...]:
    """Return the columns of a schema, in its order. Raises InvalidArgument: one is unknown, or of another type."""
    columns = []
    for field in schema.fields:
        expected, found = TYPES.get(field.name), field.dataType.simpleString()
        if expected is None:
            raise InvalidArgument(
                f"there is no column {field.name!r} in format qflow; there are: {', '.join(TYPES)}. What is in a value "
                "is yours to take apart, for example with from_json(value.cast('string'), ...)"
            )
        if found != _SHOWN.get(expected, expected):
            raise InvalidArgument(
                f"column {field.name!r} of format qflow is {expected}, the schema says {found}: read it as it is, and "
                "cast it afterwards"
            )
        columns.append(Column(field.name, field.nullable))
    return tuple(columns)
