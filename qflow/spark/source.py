"""`format("qflow")` as Spark sees it: a name, a schema, readers, writers. Light to import: Spark's search does so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceStreamReader

from qflow.arrow.schema import Column
from qflow.errors import InvalidArgument, QflowError
from qflow.spark import options as parsing
from qflow.spark.words import check_pyspark, plainly

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        InputPartition,
    )
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
"""Kafka's columns, with Spark's type of each. (What `timestamp` means is for the session to say.)"""
_SHOWN = {"timestamp_ltz": "timestamp"}
"""What Spark calls a type that it has."""


class QflowDataSource(DataSource):
    """Streams and durable queues of a spool as data frames."""

    def __init__(self, options: dict[str, str]) -> None:
        with plainly():
            check_pyspark()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "qflow"

    def schema(self) -> str:
        """Return all columns, after checking the options."""
        with plainly():
            include_headers = parsing.parse(self.options).include_headers
        return ", ".join(f"{name} {type_}" for name, type_ in TYPES.items() if include_headers or name != "headers")

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        with plainly():
            options, columns = parsing.parse(self.options, streaming=False), _columns_of(schema)
            if options.queue is not None:
                from qflow.spark.queue_reading import QueueReader

                return QueueReader(options, columns)
            from qflow.spark.batch import StreamBatchReader

            return StreamBatchReader(options, columns)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a data frame."""
        from qflow.spark.sink import BatchWriter, refuse_overwrite
        from qflow.spark.write_options import parse_for_writing

        with plainly():
            refuse_overwrite(overwrite)
            return BatchWriter(parse_for_writing(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a streaming query; in mode complete, each batch holds all rows."""
        from qflow.spark.sink import StreamWriter
        from qflow.spark.write_options import parse_for_writing

        with plainly():
            return StreamWriter(parse_for_writing(self.options, streaming=True), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query, or one that raises why there is none."""
        try:
            options, columns = parsing.parse(self.options, streaming=True), _columns_of(schema)
        except QflowError as error:
            return _Refusing(error)
        from qflow.spark.streaming import StreamingReader

        return StreamingReader(options, columns)


class _Refusing(DataSourceStreamReader):
    """Raises an error at the first call of Spark: an error raised earlier is lost in Spark."""

    def __init__(self, error: QflowError) -> None:
        self._error = error

    def _refuse(self) -> NoReturn:
        with plainly():
            raise self._error

    def initialOffset(self) -> dict[str, Any]:
        """Raise the error, for a query without a checkpoint."""
        self._refuse()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Raise the error, for a query with a checkpoint."""
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raise the error, for a query that repeats a batch."""
        self._refuse()

    def read(self, partition: InputPartition) -> NoReturn:
        """Raise the error; not called, as nothing is planned."""
        self._refuse()


def _columns_of(schema: StructType) -> tuple[Column, ...]:
    """Return the columns of a schema, in its order. Raises InvalidArgument: one is unknown, or of another type."""
    columns = []
    for field in schema.fields:
        expected, found = TYPES.get(field.name), field.dataType.simpleString()
        if expected is None:
            raise InvalidArgument(
                f"there is no column {field.name!r} in format qflow; there are: {', '.join(TYPES)}. What is in a "
                "value is yours to take apart, for example with from_json(value.cast('string'), ...)"
            )
        if found != _SHOWN.get(expected, expected):
            raise InvalidArgument(
                f"column {field.name!r} of format qflow is {expected}, the schema says {found}: read it as it is, and "
                "cast it afterwards"
            )
        columns.append(Column(field.name, field.nullable))
    return tuple(columns)
