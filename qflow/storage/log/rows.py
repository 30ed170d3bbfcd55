"""Rows: what is true of each lane, in one small record beside its blocks.

Everything below `floor` is settled, whatever blocks lie there; `next` is above every sequence ever handed out;
`messages` and `bytes` count what is logged and not settled.

Sequences of a lane begin at its number in their top byte. The row of lane 0 is written when the queue is declared, that
of another lane by the first commit that touches it: a lane without a row was never used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import LANE_SHIFT, lane_of
from qflow.named_tuples import NamedTuple
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.log import table
from qflow.storage.log.keys import BLOCKS, LAST_LANE, MARKS, WINDOWS, key_of, prefix_of
from qflow.storage.log.sealing import seal, unseal_as

_ROW = struct.Struct("<QQQQQQQQ")


class Row(NamedTuple):
    """What is true of one lane; see the module."""

    next: int = 0
    floor: int = 0
    messages: int = 0
    bytes: int = 0
    tail: int = NO_PREVIOUS
    """First sequence of the last block ever written, or NO_PREVIOUS."""
    marks: int = 0
    """How many windows and ranges say what is settled above the floor."""
    doubtful: int = 0
    """Messages below it may have been delivered before a crash."""
    referring: int = 0
    """Blocks that begin below it may hold references to shared bodies."""


class Settled(NamedTuple):
    """A range that was settled: [first, end), of which `messages` with `bytes` bytes were logged."""

    first: int
    end: int
    messages: int
    bytes: int


def _key(owner: int, lane: int) -> bytes:
    return key_of(BLOCKS, owner, lane, table.LAST)


def read_row(txn: Any, owner: int, lane: int) -> Row:
    value = txn.get(_key(owner, lane))
    if value is None:
        raise CorruptionError(f"{_where(owner, lane)} is missing")
    return _row(value, owner, lane)


def _where(owner: int, lane: int) -> str:
    return f"the row of queue {owner}, lane {lane}"


def _row(value: bytes, owner: int, lane: int) -> Row:
    return Row(*unseal_as(_ROW, value, _where(owner, lane)))


def with_last_block(txn: Any, owner: int, lane: int, row: Row) -> Row:
    """Return a row that names the last block of its lane: some that earlier versions have closed name another one.

    Cost: 3 µs where the row is right.
    """
    behind = 0 if row.tail == NO_PREVIOUS else row.tail + 1
    if table.next_number(txn, key_of(BLOCKS, owner, lane, behind)) >= row.next:
        return row
    with txn.cursor() as cursor:
        table.at_or_before(cursor, key_of(BLOCKS, owner, lane, row.next - 1))
        return row._replace(tail=table.number_of(cursor.key()))


def new_row(lane: int) -> Row:
    """Return the row of a lane that was never used."""
    first = lane << LANE_SHIFT
    return Row(next=first, floor=first)


def read_rows(txn: Any, owner: int) -> dict[int, Row]:
    """Return the row of each lane of a queue that was ever used, by its number.

    Cost: a seek and a row for each.

    Raises:
        CorruptionError: one of them is damaged, or missing where there are blocks, or in lane 0.
    """
    rows = {0: read_row(txn, owner, 0)}
    lane = 0
    stop = table.behind(prefix_of(BLOCKS, owner))
    while lane < LAST_LANE and (key := next(table.keys(txn, key_of(BLOCKS, owner, lane + 1, 0), stop), None)):
        lane = key[-1 - table.NUMBER_BYTES]
        rows[lane] = read_row(txn, owner, lane)
    for lane, row in rows.items():
        if lane_of(row.next) != lane:
            raise CorruptionError(f"the row of queue {owner}, lane {lane} is that of another lane")
    return rows


def rows_among(txn: Any, owner: int, lanes: Iterable[int]) -> dict[int, Row]:
    """Return the rows that there are of some lanes; blocks without a row are not missed, as `read_rows` would.

    Cost: 1 µs a lane. Nothing beside rows is read: the key behind a row has a block, all of which LMDB would bring in.

    Raises:
        CorruptionError: one of them is damaged.
    """
    with txn.cursor() as cursor:
        found = cursor.getmulti([_key(owner, lane) for lane in lanes])
    return {key[-1 - table.NUMBER_BYTES]: _row(value, owner, key[-1 - table.NUMBER_BYTES]) for key, value in found}


def sealed_row(row: Row) -> bytes:
    """Return a row as it is written."""
    return seal(_ROW.pack(*row))


def write_row(txn: Any, owner: int, lane: int, row: Row) -> None:
    txn.put(_key(owner, lane), sealed_row(row))


def renew_row(txn: Any, owner: int, lane: int, row: Row) -> None:
    """Write a row where another one is there: a page that is not touched is not copied."""
    key, value = _key(owner, lane), sealed_row(row)
    if txn.get(key) != value:
        txn.put(key, value)


def purged_row(row: Row, end: int) -> Row:
    """Settle everything below `end`, the next sequence. Marks and blocks below it are removed later."""
    return row._replace(floor=end, messages=0, bytes=0, marks=0)


def clear_marks(txn: Any, owner: int, lane: int) -> None:
    """Forget what was settled above a lane's floor."""
    for number in (MARKS, WINDOWS):
        table.delete_between(txn, key_of(number, owner, lane, 0), key_of(number, owner, lane, table.LAST))
