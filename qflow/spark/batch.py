"""`spark.read.format("qflow")`: what a stream retains, as of now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qflow.spark.options import ReadOptions
from qflow.spark.ranges import Range, check_floor, committed, cut, resolve, selected
from qflow.spark.schema import Column
from qflow.spark.spools import look, reading
from qflow.spark.words import plainly

if TYPE_CHECKING:
    import pyarrow as pa


class StreamBatchReader(DataSourceReader):
    """Plans on the driver's host what tasks read, and reads it in them. A task that is repeated reads the same."""

    def __init__(self, options: ReadOptions, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """Cut what is between the bounds into tasks."""
        with plainly():
            return self._plan()

    def _plan(self) -> list[InputPartition]:
        options = self._options
        state = look(options.path)
        streams = selected(state, options)
        with reading(options.path, state.uuid) as txn:
            starts = resolve(txn, options.starting, "startingOffsets", streams, committed(options, state, streams))
            ends = resolve(txn, options.ending, "endingOffsets", streams, {})
            ranges = []
            for stream in streams:
                for number, end in ends[stream.name].items():
                    first, _ = stream.bounds(number)
                    start = starts[stream.name][number]
                    start = check_floor(stream.name, number, start, first, fail=options.fail_on_data_loss, end=end)
                    ranges.append((stream, number, start, end))
            return list(cut(txn, state.uuid, ranges, options))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one of those."""
        if not isinstance(partition, Range):  # Spark asks for one where there is nothing to read
            return
        from qflow.spark.reading import Request, read_range

        options = self._options
        request = Request(options.path, options.filter, self._columns, options.fail_on_data_loss)
        with plainly():
            yield from read_range(request, partition)
