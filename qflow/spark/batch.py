"""`spark.read.format("qflow")`: the retained messages of streams, as of now."""

from __future__ import annotations

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qflow.errors import InvalidArgument
from qflow.spark.options import OFFSETS, ReadOptions
from qflow.spark.ranges import check_floor, committed, cut, resolve, selected
from qflow.spark.reading import RangeReader
from qflow.spark.spools import look, reading
from qflow.spark.words import plainly


class StreamBatchReader(RangeReader, DataSourceReader):
    """Plans the tasks on the driver, and reads in the tasks. A task that is repeated reads the same."""

    def partitions(self) -> list[InputPartition]:
        """Cut the offsets between the bounds into tasks."""
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
                    _check_order(options, stream.name, number, start, max(first, end))
                    start = check_floor(stream.name, number, start, first, fail=options.fail_on_data_loss, end=end)
                    ranges.append((stream, number, start, end))
            return list(cut(txn, state.uuid, ranges, options))


def _check_order(options: ReadOptions, stream: str, number: int, start: int, end: int) -> None:
    """Check that a starting offset is not behind the ending one, if both are given as numbers."""
    if options.starting.kind == options.ending.kind == OFFSETS and start > end:
        raise InvalidArgument(
            f"stream {stream!r}, partition {number}: startingOffsets is {start} and endingOffsets {end}: give an end "
            "that is not before the start"
        )
