"""Reads the messages that wait in a durable queue, from the log, without acquiring them.

Each lane is a task: `partition` is its number, and `offset` a message's sequence. The owner of the spool goes on
meanwhile: messages settled before a task reaches them are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from qflow.arrow.record_batches import check_nulls, headers_of
from qflow.arrow.schema import LOG_APPEND_TIME, Column, arrow_schema
from qflow.errors import CorruptionError, InvalidArgument, NotFound
from qflow.message import Message, Record, is_logged
from qflow.names import choices, command
from qflow.spark.options import ReadOptions
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.parse import check_hosts
from qflow.spark.spools import look, reading
from qflow.spark.words import plainly
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey, Reference
from qflow.storage.log import bodies, recovery
from qflow.storage.log.keys import BLOCKS, scan
from qflow.storage.log.marks import settled_ranges
from qflow.storage.log.rows import read_row
from qflow.storage.log.table import LAST

_BLOCKS_AT_ONCE, BATCH_BYTES = 32, 2 * 2**20
_NO_RANGE = (LAST, LAST)
"""Behind all messages."""


class Lane(InputPartition):
    """One lane of a queue."""

    def __init__(self, uuid: str, owner: int, lane: int) -> None:
        self.uuid = uuid
        self.owner = owner
        self.lane = lane


class QueueReader(DataSourceReader):
    """Reads a queue's messages, lane by lane."""

    def __init__(self, options: ReadOptions, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """Return the lanes."""
        with plainly():
            check_hosts(self._options.places, same=self._options.same_on_every_host)
            if len(self._options.places) > 1 or not isinstance(self._options.places[0], LocalPlace):
                raise InvalidArgument(
                    "option 'queue' reads from one spool, on the host where it lies: give the path of its directory"
                )
            state = look(self._options.path)
            queues = {record.name: record for record in state.found.queues if not record.deleted}
            record = queues.get(self._options.queue or "")
            if record is None:
                name = self._options.queue or ""
                raise NotFound(f"there is no durable queue {name!r} in {self._options.path}; {choices(name, queues)}")
            if record.rows is None:
                raise CorruptionError(
                    f"the rows of queue {record.name!r} are damaged: see {command('check', self._options.path)}"
                )
            return [Lane(state.uuid, record.owner, lane) for lane in sorted(record.rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one lane. Cost: 3 µs a message; `BATCH_BYTES` of memory, or the largest message."""
        if not isinstance(partition, Lane):
            return
        with plainly():
            schema = arrow_schema(self._columns)
            position = 0
            while True:
                with reading(self._options.path, partition.uuid) as txn:
                    if not recovery.is_there(txn, partition.owner):
                        return
                    rows, position = _rows(txn, partition, position)
                if rows:
                    columns = list(zip(*rows, strict=True))
                    arrays = [pa.array(columns[_NAMES.index(field.name)], field.type) for field in schema]
                    yield check_nulls(pa.RecordBatch.from_arrays(arrays, schema=schema))
                if position < 0:
                    return


_NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")


def _rows(txn: Any, lane: Lane, position: int) -> tuple[list[Sequence[Any]], int]:
    """Return (rows of the next blocks, position to go on at; -1 at the end)."""
    row = read_row(txn, lane.owner, lane.lane)
    position = max(position, row.floor)
    rows: list[Sequence[Any]] = []
    looked = size = 0
    for key, value in islice(scan(txn, lane.owner, lane.lane, position, row.next), _BLOCKS_AT_ONCE):
        looked += 1
        first = int.from_bytes(key[-8:], "big")
        block = blocks.decode(value, BlockKey(BLOCKS, lane.owner, lane.lane, first), where=f"block {first} of a queue")
        settled = settled_ranges(txn, lane.owner, lane.lane, first, block.end) if row.marks else iter(())
        low, high = next(settled, _NO_RANGE)
        for offset, record, time_ms in zip(block.offsets, block.records, block.times_ms, strict=True):
            sequence = first + offset
            while sequence >= high:
                low, high = next(settled, _NO_RANGE)
            if sequence < position or sequence >= low or not is_logged(record):
                continue
            size += record.size if isinstance(record, Reference) else len(record)
            if rows and size > BATCH_BYTES:
                return rows, sequence
            whole = bodies.fetch(txn, record) if isinstance(record, Reference) else record
            rows.append(_row(whole, lane.lane, sequence, time_ms))
        position = max(position, block.end)
    return rows, position if looked == _BLOCKS_AT_ONCE else -1


def _row(record: Record, lane: int, sequence: int, time_ms: int) -> Sequence[Any]:
    if isinstance(record, Message):
        key, body, topic, headers = record.key or None, record.body, record.topic or None, record.header_bytes
    else:
        key, body, topic, headers = None, bytes(record), None, b""
    said = headers_of(headers)
    value = None if said.is_null else body
    return key, value, topic, lane, sequence, time_ms * 1000, LOG_APPEND_TIME, said.headers
