"""Reads spans of a stream as record batches: whoever may have a read transaction of the log can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any, Protocol

import attrs
import pyarrow as pa

from qflow.arrow.ranges import Span
from qflow.arrow.record_batches import BatchMaker, joined
from qflow.arrow.schema import Column, arrow_schema
from qflow.message import LANE_SHIFT
from qflow.storage.log import recovery
from qflow.storage.log.rows import read_row
from qflow.storage.streams import columns as column_pieces
from qflow.storage.streams.partitions import Query
from qflow.streams.interest import Interest, leave_to_check

BATCH_BYTES, BATCH_MESSAGES = 2 * 2**20, 64 * 1024
"""About the size of a record batch."""
_LEAST_BYTES, _LEAST_ROWS = BATCH_BYTES // 2, 4096
"""Messages that pass a filter are gathered until there are so many."""

Transaction = Callable[[], AbstractContextManager[Any]]
"""Gives a new read transaction whose values are views, valid until its end; to be short."""


class Losses(Protocol):
    """What becomes of messages that are to be read and are not there: each raises, or returns to go on behind them."""

    def stream(self, span: Span) -> None:
        """The stream was deleted."""

    def gap(self, span: Span, start: int, first: int) -> int:
        """Retention dropped the offsets from `start` to `first`; return where to go on, at most the end of the span."""

    def damage(self, span: Span, start: int, end: int, problem: str) -> None:
        """These offsets cannot be read."""


class Room(Protocol):
    """Memory for batches."""

    def has(self, size: int) -> bool:
        """Take it for a batch of about so many bytes, if there is any at once, or `wait` has taken as much."""

    def wait(self, size: int) -> None:
        """Take it once there is any."""

    def free(self) -> None:
        """Give it back: the batch is with whoever asked for it, or is one of some small ones that are gathered."""


class Unbounded:
    """A `Room` of whoever has a process of its own."""

    def has(self, size: int) -> bool:
        return True

    def wait(self, size: int) -> None: ...

    def free(self) -> None: ...


_UNBOUNDED = Unbounded()


@attrs.frozen
class Request:
    """What is to be read."""

    span: Span
    filter: str
    """`#`: all topics."""
    columns: Sequence[Column]


def read_span(
    transaction: Transaction, request: Request, losses: Losses, room: Room = _UNBOUNDED, quiet_s: float = inf
) -> Iterator[pa.RecordBatch]:
    """Yield the matching messages of a span, in order; each batch in a transaction of its own.

    Args:
        room: asked before each batch is made.
        quiet_s: an empty batch comes where a filter has let nothing through for so long.

    Raises:
        What `losses` raises. StorageError: the log cannot be read.
    Cost: 0.2 µs a message of 100 bytes; with a filter, only blocks are read that hold a match.
    """
    batches = _batches(transaction, request, losses, room)
    return batches if request.filter == "#" else joined(batches, _LEAST_BYTES, _LEAST_ROWS, quiet_s)


def _batches(transaction: Transaction, request: Request, losses: Losses, room: Room) -> Iterator[pa.RecordBatch]:
    span = request.span
    base = span.partition << LANE_SHIFT
    position, end = base + span.start, base + span.end
    schema = arrow_schema(request.columns)
    maker = BatchMaker(schema, span.partition, base)
    nothing = None
    interest = None
    if request.filter != "#":
        interest = Interest(request.filter, span.owner, leave_to_check)
        nothing = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
    while position < end:
        with transaction() as txn:
            if not recovery.is_there(txn, span.owner):
                losses.stream(span)
                return
            floor = read_row(txn, span.owner, span.partition).floor
            if floor > position:
                position = base + losses.gap(span, position - base, floor - base)
                continue
            query = Query(span.owner, span.partition, position, end, BATCH_BYTES, interest, BATCH_MESSAGES)
            found = column_pieces.read(txn, query)
            size = maker.size(found.pieces)
            has_room = room.has(size)
            made = found.pieces and has_room
            batch = maker.make(found.pieces) if made else nothing  # copied once, from the map into its columns
            following, hole = found.position, found.hole
            del found  # shared bodies are copies
        if not has_room:
            room.wait(size)  # without a transaction
            continue
        if hole is not None:
            losses.damage(span, hole.start - base, hole.end - base, hole.problem)
        position = following
        if batch is not None:
            yield batch
            del batch  # before the next one is made
        room.free()
