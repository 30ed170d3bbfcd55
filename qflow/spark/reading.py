"""Reads a range of a stream in record batches: a task in a worker of Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from qflow.arrow.schema import Column
from qflow.spark.options import ReadOptions
from qflow.spark.places.place import Reading
from qflow.spark.ranges import Range
from qflow.spark.words import plainly

if TYPE_CHECKING:
    import pyarrow as pa


class RangeReader:
    """The part of both readers of streams that runs in tasks. Pickled to Spark's workers."""

    def __init__(self, options: ReadOptions, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one of the planned ranges. A task that is repeated reads the same."""
        if not isinstance(partition, Range):  # Spark asks for one where there is nothing to read
            return
        options = self._options
        asked = Reading(
            partition.uuid, partition.span, options.filter, self._columns, options.fail_on_data_loss, partition.known
        )
        with plainly():
            yield from partition.place.read(asked)
