"""The first messages of a queue that nobody has settled, as the log has them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from qflow.inspect.facts import MessageFacts
from qflow.message import DELAYED, Message, Record, body_of, decode_headers, lane_of
from qflow.storage.log.reading import find_message, read_unsettled
from qflow.storage.log.recovery import QueueRecord

READ_BYTES = 256 * 1024
"""Read at once, or one block."""


def first_unsettled(txn: Any, record: QueueRecord, most: int) -> list[MessageFacts]:
    """Return at most so many messages, those of high priority first; what is delayed is behind those that wait."""
    found = []
    for sequence, message in islice(unsettled(txn, record), most):
        found.append(
            MessageFacts(
                queue=record.name,
                sequence=sequence,
                body=body_of(message),
                headers=decode_headers(message.header_bytes) if isinstance(message, Message) else {},
                time_ms=find_message(txn, record.owner, lane_of(sequence), sequence)[1],
                settled=False,
            )
        )
    return found


def unsettled(txn: Any, record: QueueRecord) -> Iterator[tuple[int, Record]]:
    """Yield sequence and record of what nobody has settled, those of high priority first."""
    for lane, row in sorted((record.rows or {}).items(), key=lambda row: (row[0] >= DELAYED, -row[0])):
        position, expected = row.floor, None
        while position < row.next:
            read = read_unsettled(txn, record.owner, lane, row, position, row.next, READ_BYTES, expected)
            for first, records in read.pieces:
                yield from enumerate(records, first)
            position, expected = read.position, read.last_block
