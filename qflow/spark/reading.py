"""Reads a range of a stream in record batches: a task in a worker of Spark, beside the owner of the spool."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import attrs
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from qflow.errors import CorruptionError
from qflow.message import LANE_SHIFT
from qflow.spark.options import ReadOptions
from qflow.spark.ranges import Range, check_floor, miss_stream
from qflow.spark.record_batches import BatchMaker, joined
from qflow.spark.schema import Column, arrow_schema
from qflow.spark.spools import reading
from qflow.spark.words import plainly
from qflow.storage.log import recovery
from qflow.storage.log.rows import read_row
from qflow.storage.streams import columns as column_pieces
from qflow.storage.streams.partitions import Query
from qflow.streams.interest import Interest

_logger = logging.getLogger("qflow.spark")

BATCH_BYTES, BATCH_MESSAGES = 2 * 2**20, 64 * 1024
"""About the size of a record batch."""
_LEAST_BYTES, _LEAST_ROWS = BATCH_BYTES // 2, 4096
"""Messages that pass a filter are gathered until there are so many."""


@attrs.frozen
class Request:
    """The arguments that all tasks of a query share. Pickled to Spark's workers."""

    spool: str
    filter: str
    columns: Sequence[Column]
    fail_on_data_loss: bool


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
        request = Request(options.path, options.filter, self._columns, options.fail_on_data_loss)
        with plainly():
            yield from read_range(request, partition)


def read_range(request: Request, part: Range) -> Iterator[pa.RecordBatch]:
    """Yield the matching messages of a range, in order; each batch in a transaction of its own.

    Raises:
        GapError, StreamDeleted, CorruptionError: retention dropped some of it, the stream was deleted, or some of it is
            damaged; unless options have that left out.
        NotFound, StorageError: the spool cannot be reached from this host, or is another one.
    Cost: 0.2 µs a message of 100 bytes; with a filter, only blocks are read that hold a match.
    """
    batches = _batches(request, part)
    return batches if request.filter == "#" else joined(batches, _LEAST_BYTES, _LEAST_ROWS)


def _batches(request: Request, part: Range) -> Iterator[pa.RecordBatch]:
    base = part.partition << LANE_SHIFT
    position, end = base + part.start, base + part.end
    maker = BatchMaker(arrow_schema(request.columns), part.partition, base)
    interest = None if request.filter == "#" else Interest(request.filter, part.owner, _leave_to_check)
    while position < end:
        with reading(request.spool, part.uuid, buffers=True) as txn:
            if not recovery.is_there(txn, part.owner):
                miss_stream(part.stream, fail=request.fail_on_data_loss)
                return
            floor = read_row(txn, part.owner, part.partition).floor
            if floor > position:
                position = base + check_floor(
                    part.stream,
                    part.partition,
                    position - base,
                    floor - base,
                    fail=request.fail_on_data_loss,
                    end=part.end,
                )
                continue
            query = Query(part.owner, part.partition, position, end, BATCH_BYTES, interest, BATCH_MESSAGES)
            found = column_pieces.read(txn, query)
            batch = maker.make(found.pieces) if found.pieces else None  # copied once, from the map into its columns
        if found.hole is not None:
            _miss(request, part, found.hole.start - base, found.hole.end - base, found.hole.problem)
        if batch is not None:
            yield batch
        position = found.position


def _miss(request: Request, part: Range, start: int, end: int, problem: str) -> None:
    text = f"stream {part.stream!r}, partition {part.partition}: offsets {start} to {end - 1} cannot be read: {problem}"
    if request.fail_on_data_loss:
        raise CorruptionError(
            f"{text}. See `qflow check {request.spool}`; set option failOnDataLoss to false to go on behind them"
        )
    _logger.warning("%s; it goes on behind them, for failOnDataLoss is false", text)


def _leave_to_check(_problem: str) -> None:
    """Ignore damage of an index, which costs time, not messages: `qflow check` reports it."""
