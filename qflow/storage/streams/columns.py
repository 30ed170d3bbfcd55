"""A partition of a stream read in columns: blocks as they lie in the log, checked, and not cut into messages.

What reads much, and hands it on as columns, pays per block here and not per message. Only messages that are more than a
body, or stored elsewhere, have to be looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import Record
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import Columns, Header, Reference
from qflow.storage.log import bodies
from qflow.storage.streams import partitions
from qflow.storage.streams.partitions import Asked, FoundOf, Hole, Query

_REFERENCE = (2).to_bytes(4, "little")


class ColumnPiece(NamedTuple):
    """Messages `low` to `high` of a block."""

    columns: Columns
    low: int
    high: int
    chosen: Sequence[bool] | None
    """Which of the block's names are wanted; None for all of them."""
    fetched: dict[int, Record]
    """What is stored elsewhere, by its place in the block."""

    @property
    def first(self) -> int:
        """The sequence of the first message."""
        return self.columns.header.key.first + self.low

    @property
    def end(self) -> int:
        """The sequence behind the last one."""
        return self.columns.header.key.first + self.high

    @property
    def messages(self) -> int:
        """How many of them there are, wanted or not."""
        return self.high - self.low

    @property
    def weight(self) -> int:
        """About how many bytes that is in memory."""
        header = self.columns.header
        size = header.payload_bytes * self.messages // header.count
        return size + sum(map(len, self.fetched.values()))


def read(txn: Any, query: Query) -> FoundOf[ColumnPiece]:
    """Read as `partitions.read` does. Where the transaction gives buffers, what is returned ends with it.

    Cost: 12 µs a block, and 0.1 µs a KiB.
    """
    return partitions.read_pieces(_take, txn, query)


def _take(txn: Any, value: bytes, header: Header, asked: Asked) -> tuple[ColumnPiece, Hole | None]:
    columns = blocks.columns(value, header, where=asked.where)
    first = header.key.first
    low, high = asked.position - first, asked.stop - first
    fetched: dict[int, Record] = {}
    hole = None
    if columns.kinds is not None and _REFERENCE in bytes(columns.kinds):
        records = blocks.decode(value, header.key, where=asked.where, header=header).records
        room = asked.room
        chosen = (
            None
            if asked.chosen is None
            else [asked.chosen[number] for number in memoryview(columns.topics or b"").cast("I")]
        )
        for index, record in enumerate(records[low:high], low):
            if type(record) is not Reference:
                continue
            if chosen is not None and not chosen[index]:
                fetched[index] = b""  # nobody looks at it
                continue
            if room < record.size and (index > low or not asked.first):
                high = index
                break
            try:
                fetched[index] = bodies.fetch(txn, record)
            except CorruptionError as error:
                high, hole = index, Hole(first + index, first + index + 1, str(error))
                break
            room -= record.size
    return ColumnPiece(columns, low, high, asked.chosen, fetched), hole
