"""Marks: ranges above the floor that were settled; and how the floor rises over them.

A range is a record at the key of its first sequence that says where it ends, with a number; one that is damaged says
nothing. Counts of earlier deliveries lie in ranges, too; they are written when a queue is closed, so that they are
known when it is opened again.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import is_logged
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey, full_length
from qflow.storage.log import table
from qflow.storage.log.keys import ATTEMPTS, MARKS, key_of, parts_of, scan
from qflow.storage.log.rows import Row, Settled
from qflow.storage.log.sealing import seal, unseal
from qflow.storage.log.table import LAST, number_of

_RANGE = struct.Struct("<QI")
_SEALED_RANGE_BYTES = len(seal(bytes(_RANGE.size)))


# Ranges -------------------------------------------------------------------------------------------------------------


def _put_range(txn: Any, key: bytes, end: int, number: int) -> None:
    """Write a range that begins at a key."""
    txn.put(key, seal(_RANGE.pack(end, number), key))


def _read_range(key: bytes, value: bytes) -> tuple[int, int]:
    """Return end and number of a range; raises CorruptionError, whose words nobody sees."""
    if len(value) != _SEALED_RANGE_BYTES:
        raise CorruptionError("a range is too long, or too short")
    return _RANGE.unpack(unseal(value, "a range", key))


def _ranges(txn: Any, place: tuple[int, int, int], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first, end, number) of the ranges that touch [first, end); `place` is their table, owner and lane."""
    for key, value in table.items(txn, key_of(*place, first), key_of(*place, end), reaching=True):
        try:
            high, number = _read_range(key, value)
        except CorruptionError:
            continue
        if high > first:
            yield number_of(key), high, number


def settled_ranges(txn: Any, owner: int, lane: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the marked ranges that touch [first, end)."""
    for low, high, _ in _ranges(txn, (MARKS, owner, lane), first, end):
        yield low, high


def after_mark(txn: Any, owner: int, lane: int, row: Row, position: int) -> int:
    """Return the end of the mark that `position` lies in, else `position`."""
    if row.marks:
        for _, high in settled_ranges(txn, owner, lane, position, position + 1):
            return high
    return position


def is_settled(txn: Any, owner: int, lane: int, row: Row, sequence: int) -> bool:
    """Tell whether a sequence lies below the floor or in a mark."""
    return sequence < row.floor or after_mark(txn, owner, lane, row, sequence) > sequence


# Settling -----------------------------------------------------------------------------------------------------------


def settle_ranges(txn: Any, owner: int, lane: int, row: Row, settled: Iterable[Settled]) -> Row:
    """Raise the floor over what was settled and mark what lies above it.

    What comes a second time, in these ranges or because it was settled before, counts once. The counts given are of
    whole ranges, so where some of one was settled before, what is new in it is counted in the blocks.
    """
    joined: list[_Range] = []
    messages, total = row.messages, row.bytes
    for one in sorted(settled):
        first, end, count, size = one
        if first == end:  # it only corrects the counts
            messages -= count
            total -= size
            continue
        if end <= row.floor:
            continue  # a purge was committed before this, and has counted it; or it is here a second time
        if joined and first <= joined[-1].end:
            joined[-1].end = max(joined[-1].end, end)
        else:
            joined.append(_Range(first, end))
        if count:
            joined[-1].counted.append(one)
    floor, marks = row.floor, row.marks
    swallowed: list[tuple[int, int]] = []
    for part in joined:
        if part.first <= floor:
            floor = max(floor, part.end)
            if marks:  # those below the row's floor are left from a purge
                with txn.cursor() as cursor:
                    more, floor = _take(cursor, key_of(MARKS, owner, lane, row.floor), floor)
                swallowed += more
            before = swallowed
        else:
            before, grown = _mark(txn, owner, lane, part.first, part.end)
            marks += grown
        reached = row.floor
        for one in part.counted:
            count, size = one.messages, one.bytes
            place = bisect_left(before, (one.end,)) - 1  # the last mark that begins below its end
            if one.first < reached or (place >= 0 and before[place][1] > one.first):
                count, size = _count(txn, owner, lane, max(one.first, reached), one.end, before)
            messages -= count
            total -= size
            reached = max(reached, one.end)
    marks -= len(swallowed)
    # A count that is off is noticed when the last block is read; one below zero could not be written at all.
    return row._replace(floor=floor, marks=max(0, marks), messages=max(0, messages), bytes=max(0, total))


class _Range:
    """Settled ranges that touch each other, on their way into the log."""

    __slots__ = ("counted", "end", "first")

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end
        self.counted: list[Settled] = []
        """Those of them that hold messages, in order. (What was found to hold none overlaps what was settled.)"""


def _take(cursor: Any, start: bytes, end: int) -> tuple[list[tuple[int, int]], int]:
    """Remove the marks from `start` on that begin no later than `end`, which grows with them; return them, and it."""
    found: list[tuple[int, int]] = []
    prefix = start[:-8]
    more = cursor.set_range(start)
    while more:
        key = cursor.key()
        if not key.startswith(prefix) or (low := number_of(key)) > end:
            break
        stop = _mark_end(key, cursor.value())
        found.append((low, stop))
        end = max(end, stop)
        more = cursor.delete()
    return found, end


def _mark(txn: Any, owner: int, lane: int, first: int, end: int) -> tuple[list[tuple[int, int]], int]:
    """Add a settled range above the floor, joined with its neighbours.

    Returns:
        the marks it was joined with, in order, and by how much the number of marks grew.
    """
    key = key_of(MARKS, owner, lane, first)
    with txn.cursor() as cursor:
        found, end = _take(cursor, key, end)
        if table.at_or_before(cursor, key):
            before = cursor.key()
            stop = _mark_end(before, cursor.value())
            if stop >= first:
                found.insert(0, (number_of(before), stop))
                key, end = before, max(end, stop)
    _put_range(txn, key, end, 0)
    return found, 1 - len(found)


def _mark_end(key: bytes, value: bytes) -> int:
    """Return the end of a mark; a damaged one covers nothing: its messages are delivered again, never lost."""
    try:
        return _read_range(key, value)[0]
    except CorruptionError:
        return number_of(key)


def _count(txn: Any, owner: int, lane: int, first: int, end: int, out: list[tuple[int, int]]) -> tuple[int, int]:
    """Count the messages in blocks of [first, end) that lie in none of the ranges `out`, in order, and their bytes.

    A damaged block counts nothing: who reads it corrects the row.
    """
    messages = size = 0
    for key, value in scan(txn, owner, lane, first, end):
        try:
            block = blocks.decode(value, BlockKey(*parts_of(key)), where="a block")
        except CorruptionError:
            continue
        for sequence, record in zip(map(block.first.__add__, block.offsets), block.records, strict=True):
            place = bisect_right(out, (sequence, LAST)) - 1
            settled = place >= 0 and sequence < out[place][1]
            if first <= sequence < end and not settled and is_logged(record):
                messages += 1
                size += full_length(record)
    return messages, size


# Attempts -----------------------------------------------------------------------------------------------------------


def read_attempts(txn: Any, owner: int, lane: int, first: int, end: int) -> list[tuple[int, int, int]]:
    """Return (first, end, number) of the ranges with earlier deliveries that touch [first, end)."""
    return list(_ranges(txn, (ATTEMPTS, owner, lane), first, end))


def write_attempts(txn: Any, owner: int, lane: int, below: int, known: Iterable[tuple[int, int, int]]) -> None:
    """Replace what is kept of earlier deliveries below a sequence by (first, end, number) of each range."""
    forget_attempts(txn, owner, lane, below)
    for first, end, number in known:
        _put_range(txn, key_of(ATTEMPTS, owner, lane, first), end, number)


def raise_attempts(txn: Any, owner: int, lane: int, first: int, end: int, number: int) -> None:
    """Set the number of earlier deliveries of [first, end), whatever was known of parts of it.

    Ranges that reach over its edges are cut there, and neighbours of the same number become one.
    """
    if first >= end:
        return
    start, stop = first, end
    for low, high, known in read_attempts(txn, owner, lane, max(0, first - 1), end + 1):
        if low < first:
            if known == number:
                start = low
            elif high > first:
                _put_range(txn, key_of(ATTEMPTS, owner, lane, low), first, known)
        if high > end:
            if known == number:
                stop = high
            else:
                _put_range(txn, key_of(ATTEMPTS, owner, lane, end), high, known)
    joined = stop > end  # with a range that begins at `end`, perhaps
    table.delete_between(txn, key_of(ATTEMPTS, owner, lane, first), key_of(ATTEMPTS, owner, lane, end + joined))
    if number:
        _put_range(txn, key_of(ATTEMPTS, owner, lane, start), stop, number)


def forget_attempts(txn: Any, owner: int, lane: int, below: int, limit: int = table.LAST) -> int:
    """Forget earlier deliveries below a sequence; a range that reaches over it keeps the rest."""
    found = read_attempts(txn, owner, lane, below - 1, below) if below else []
    border = key_of(ATTEMPTS, owner, lane, below)
    removed = table.delete_between(txn, key_of(ATTEMPTS, owner, lane, 0), border, limit)
    for first, end, number in found:
        if end > below and txn.get(key_of(ATTEMPTS, owner, lane, first)) is None:  # else the limit was met before it
            _put_range(txn, border, end, number)
    return removed
