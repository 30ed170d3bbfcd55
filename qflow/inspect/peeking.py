"""Messages of a queue that nobody has settled, as the log has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qflow.message import DELAYED, Record
from qflow.storage.log.reading import read_unsettled
from qflow.storage.log.recovery import QueueRecord

READ_BYTES = 256 * 1024
"""Read at once, or one block."""


def unsettled(txn: Any, record: QueueRecord) -> Iterator[tuple[int, Record]]:
    """Yield sequence and record of what nobody has settled, those of high priority first."""
    for lane, row in sorted((record.rows or {}).items(), key=lambda row: (row[0] >= DELAYED, -row[0])):
        position, expected = row.floor, None
        while position < row.next:
            read = read_unsettled(txn, record.owner, lane, row, position, row.next, READ_BYTES, expected)
            for first, records in read.pieces:
                yield from enumerate(records, first)
            position, expected = read.position, read.last_block
