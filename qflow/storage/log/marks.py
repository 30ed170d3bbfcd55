"""Marks: what was settled above the floor; and how the floor rises over it.

What is settled lies in windows (`windows.py`), and what is wider than one in ranges. A range is a record at the key of
its first sequence that says where it ends, with a number; one that is damaged says nothing. Counts of earlier
deliveries lie in ranges, too; they are written when a queue is closed, so that they are known when it is opened again.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import pairwise
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import is_logged
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey, full_length
from qflow.storage.log import table, windows
from qflow.storage.log.keys import ATTEMPTS, MARKS, key_of, parts_of, scan
from qflow.storage.log.rows import Row, Settled
from qflow.storage.log.sealing import seal, unseal
from qflow.storage.log.table import LAST, number_of
from qflow.storage.log.windows import WINDOW, Windows, settled_runs

FRESH_AT_ONCE = 256
"""Ranges of which it is seen with one look that nothing is known near any of them."""
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
    """Yield what was settled above the floor and touches [first, end), in order; no two ranges touch each other.

    A range that reaches over the edges is given as it is, except that it may begin no earlier than `first`.
    """
    wide = ((low, high) for low, high, _ in _ranges(txn, (MARKS, owner, lane), first, LAST))
    for low, high in _joined(merge(wide, settled_runs(txn, owner, lane, first, LAST))):
        if low >= end:
            return
        yield low, high


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges that are in order, those that touch or overlap as one."""
    low = high = -1
    for first, end in ranges:
        if first <= high:
            high = max(high, end)
            continue
        if low >= 0:
            yield low, high
        low, high = first, end
    if low >= 0:
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


def count_marks(txn: Any, owner: int, lane: int, floor: int) -> int:
    """Return how many marks there are above a floor: windows, and ranges."""
    ranges = table.keys(txn, key_of(MARKS, owner, lane, floor), key_of(MARKS, owner, lane, LAST))
    return sum(1 for _ in ranges) + windows.count(txn, owner, lane, floor)


# Settling -----------------------------------------------------------------------------------------------------------


def settle_ranges(txn: Any, owner: int, lane: int, row: Row, settled: Iterable[Settled | list[int]]) -> Row:
    """Raise the floor over what was settled and mark what lies above it.

    What comes a second time, in these ranges or because it was settled before, counts once. The counts given are of
    whole ranges, so where some of one was settled before, what is new in it is counted in the blocks.
    """
    marking = _Marking(txn, owner, lane, row)
    floor, messages, total = row.floor, row.messages, row.bytes
    for one in sorted(settled):
        first, end, count, size = one
        if end <= floor and first < end:
            continue  # it is here a second time; or a purge was committed before this, and has counted it
        if first < end and not (first > floor and marking.add_new(first, end)):  # without any it corrects the counts
            known = marking.settled(max(first, floor), end)
            if count and (known or first < floor):
                count, size = _count(txn, owner, lane, max(first, floor), end, known)
            if first <= floor:
                floor = end
            else:
                marking.add(first, end)
        messages -= count
        total -= size
    floor = marking.reach(floor)
    # A count that is off is noticed when the last block is read; one below zero could not be written at all.
    return row._replace(floor=floor, marks=max(0, marking.write(floor)), messages=max(0, messages), bytes=max(0, total))


class _Marking:
    """What was settled above the floor of a lane, while a transaction settles more: windows, and ranges wider than one.

    A range may lie over windows that hold some of it.
    """

    def __init__(self, txn: Any, owner: int, lane: int, row: Row) -> None:
        self._txn = txn
        self._place = MARKS, owner, lane
        self._floor = row.floor
        self._marks = row.marks
        self._windows = Windows(txn, owner, lane, row.floor)
        key = key_of(*self._place, row.floor)
        self._has_ranges = row.marks > 0 and table.next_number(txn, key) != LAST

    def settled(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return what is settled of [first, end), above the floor, in order."""
        if not (self._marks or self._windows.read):
            return []
        found = self._windows.settled(first, end)
        if self._has_ranges:
            wide = ((low, high) for low, high, _ in _ranges(self._txn, self._place, first, end))
            return list(_joined(merge(wide, found)))
        return found

    def add_new(self, first: int, end: int) -> bool:
        """`add`, if nothing of it is settled, and that is easily seen; else False. Nearly always True."""
        return not self._has_ranges and self._windows.add_new(first, end)

    def add(self, first: int, end: int) -> None:
        """Mark [first, end), above the floor."""
        if end - first < WINDOW:
            self._windows.add(first, end)
            return
        self._has_ranges = True
        key = key_of(*self._place, first)
        with self._txn.cursor() as cursor:
            found, end = _take(cursor, key, end)
            if table.at_or_before(cursor, key):
                before = cursor.key()
                stop = _mark_end(before, cursor.value())
                if stop >= first:
                    found += 1
                    key, end = before, max(end, stop)
        _put_range(self._txn, key, end, 0)
        self._marks += 1 - found

    def reach(self, floor: int) -> int:
        """Return how far everything is settled from a floor on; ranges below that are removed."""
        while self._marks or self._windows.read:
            before = floor
            floor = self._windows.reach(floor)
            if self._has_ranges:
                with self._txn.cursor() as cursor:
                    found, floor = _take(cursor, key_of(*self._place, self._floor), floor)
                self._marks -= found
            if floor == before:
                break
        return floor

    def write(self, floor: int) -> int:
        """Write what has changed, for a new floor; return how many marks there are."""
        return self._marks + (self._windows.write(floor) if self._marks or self._windows.read else 0)


def _take(cursor: Any, start: bytes, end: int) -> tuple[int, int]:
    """Remove the ranges from `start` on that begin by `end`, which grows with them; return how many, and it."""
    found = 0
    prefix = start[:-8]
    more = cursor.set_range(start)
    while more:
        key = cursor.key()
        if not key.startswith(prefix) or number_of(key) > end:
            break
        end = max(end, _mark_end(key, cursor.value()))
        found += 1
        more = cursor.delete()
    return found, end


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


def raise_all(txn: Any, owner: int, lane: int, ranges: list[tuple[int, int, int]]) -> None:
    """`raise_attempts` of many ranges, in their order. Cost: 40 µs each; 6 µs where nothing is known of any near it."""
    apart = sorted(ranges)
    if any(one[1] > two[0] for one, two in pairwise(apart)):
        apart = []  # they overlap: the last one holds
    for start in range(0, len(apart), FRESH_AT_ONCE):
        some = apart[start : start + FRESH_AT_ONCE]
        near = max(0, some[0][0] - 1), some[-1][1] + 1
        if _is_bare(txn, (ATTEMPTS, owner, lane), *near):
            for first, end, number in _joined_alike(some):
                if number and first < end:
                    _put_range(txn, key_of(ATTEMPTS, owner, lane, first), end, number)
        else:
            for first, end, number in some:
                raise_attempts(txn, owner, lane, first, end, number)
    for first, end, number in ranges if not apart else ():
        raise_attempts(txn, owner, lane, first, end, number)


def _is_bare(txn: Any, place: tuple[int, int, int], first: int, end: int) -> bool:
    """Tell whether no range touches [first, end), and none that is damaged begins there."""
    keys = table.keys(txn, key_of(*place, first), key_of(*place, end))
    return next(iter(keys), None) is None and next(_ranges(txn, place, first, end), None) is None


def _joined_alike(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges that are in order, neighbours of the same number as one."""
    found: list[tuple[int, int, int]] = []
    for first, end, number in ranges:
        if found and found[-1][1:] == (first, number):
            found[-1] = found[-1][0], end, number
        else:
            found.append((first, end, number))
    return found


def forget_attempts(txn: Any, owner: int, lane: int, below: int, limit: int = table.LAST) -> int:
    """Forget earlier deliveries below a sequence; a range that reaches over it keeps the rest."""
    found = read_attempts(txn, owner, lane, below - 1, below) if below else []
    border = key_of(ATTEMPTS, owner, lane, below)
    removed = table.delete_between(txn, key_of(ATTEMPTS, owner, lane, 0), border, limit)
    for first, end, number in found:
        if end > below and txn.get(key_of(ATTEMPTS, owner, lane, first)) is None:  # else the limit was met before it
            _put_range(txn, border, end, number)
    return removed
