"""The streams of a log as of one transaction: what plans of reads are made from."""

from __future__ import annotations

from typing import Any

from qflow.message import LANE_SHIFT
from qflow.named_tuples import NamedTuple
from qflow.storage.log import recovery
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row, new_row


class StreamState(NamedTuple):
    """A stream as of one transaction."""

    name: str
    owner: int
    rows: list[Row]
    """The row of each partition."""
    assigned: frozenset[int] | None = None
    """Partitions to read; None = all."""

    @property
    def numbers(self) -> list[int]:
        """The partitions to read that exist."""
        return [number for number in range(len(self.rows)) if self.assigned is None or number in self.assigned]

    def bounds(self, number: int) -> tuple[int, int]:
        """Return (first retained offset, end) of a partition."""
        first = number << LANE_SHIFT
        return self.rows[number].floor - first, self.rows[number].next - first


class SpoolState(NamedTuple):
    """The streams of a spool as of one transaction."""

    uuid: str
    streams: dict[str, StreamState]
    found: Recovery


def state_of(txn: Any, spool: str) -> SpoolState:
    """Return the streams of a log. Cost: reads a record and the rows of each stream, queue and cursor.

    Raises:
        FormatTooNew, CorruptionError: as `qflow.open`.
    """
    found = recovery.read(txn, spool)
    streams = {record.name: state for record in found.streams if (state := _state(record)) is not None}
    return SpoolState(found.uuid, streams, found)


def stream_of(txn: Any, owner: int) -> StreamState | None:
    """Return one stream of a log, None if there is none. Cost: reads its record and rows. Raises CorruptionError."""
    record = recovery.read_record(txn, owner)
    return None if record is None or record.kind != recovery.STREAM else _state(record)


def _state(record: QueueRecord) -> StreamState | None:
    if record.deleted:
        return None
    rows = record.rows or {}
    count = record.settings["partitions"] if record.rows is not None else 0
    return StreamState(record.name, record.owner, [rows.get(number) or new_row(number) for number in range(count)])
