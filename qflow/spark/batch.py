"""`spark.read.format("qflow")`: the retained messages of streams, as of now; and what reads a range, in tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from qflow.arrow.bounds import OFFSETS
from qflow.arrow.losses import check_floor
from qflow.arrow.schema import Column
from qflow.errors import InvalidArgument
from qflow.spark.options import ReadOptions
from qflow.spark.places.parse import check_hosts
from qflow.spark.places.place import Reading
from qflow.spark.ranges import Range, Ranges, Seen, bound_at, cut, look_at, selected, starts_of
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


class StreamBatchReader(RangeReader, DataSourceReader):
    """Plans the tasks on the driver, and reads in the tasks. A task that is repeated reads the same."""

    def partitions(self) -> list[InputPartition]:
        """Cut the offsets between the bounds into tasks."""
        with plainly():
            options = self._options
            check_hosts(options.places, same=options.same_on_every_host)
            return list(cut([(one.place, one.uuid, self._ranges(one)) for one in look_at(options.places)], options))

    def _ranges(self, seen: Seen) -> Ranges:
        options = self._options
        streams = selected(seen, options)
        which = "endingOffsets"
        starts = starts_of(seen, streams, options)
        ends = seen.place.resolve(seen.uuid, bound_at(seen, options.ending, which, options), which, streams, {})
        ranges = []
        for stream in streams:
            for number, end in ends[stream.name].items():
                first, _ = stream.bounds(number)
                start = starts[stream.name][number]
                _check_order(options, stream.name, number, start, max(first, end))
                start = check_floor(stream.name, number, start, first, fail=options.fail_on_data_loss, end=end)
                ranges.append((stream, number, start, end))
        return ranges


def _check_order(options: ReadOptions, stream: str, number: int, start: int, end: int) -> None:
    """Check that a starting offset is not behind the ending one, if both are given as numbers."""
    if options.starting.kind == options.ending.kind == OFFSETS and start > end:
        raise InvalidArgument(
            f"stream {stream!r}, partition {number}: startingOffsets is {start} and endingOffsets {end}: give an end "
            "that is not before the start"
        )
