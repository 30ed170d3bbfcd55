"""The layout of the log: blocks, a row and marks for each lane of a queue, in one keyspace.

    key                                      value
    BLOCKS  owner  lane  first sequence      a block
    BLOCKS  owner  lane  ffffffffffffffff    the lane's row: it sorts beside the tail block, on the same page
    MARKS   owner  lane  first sequence      a settled range above the floor: its end
    ATTEMPTS owner lane  first sequence      earlier deliveries of a range: its end and their number; none overlap
    DAMAGED owner  lane  first sequence      a block that did not match its checksum, kept as it was found
    QUEUES  owner                            name, incarnation, settings (JSON)
    META    name                             format, uuid, clean mark
    BODIES  0  0  number                     what several queues share: see `bodies.py`
    ERAS    owner  lane  first sequence      by which opening a stream's messages were written: see `eras.py`

All numbers in keys are big-endian, so keys sort as numbers. The *row* says what is true: everything below `floor` is
settled, whatever blocks lie there; `next` is above every sequence ever handed out; `messages` and `bytes` count what is
logged and not settled. Small records of ours (rows, marks, attempts) carry a CRC-32, for LMDB has none.

Where the records of a block are references to shared bodies, readers see the bodies, and rows count those. What removes
a block, or a message from one, counts its references down; the row tells how far up there may be any.

Sequences of a lane begin at its number in their top byte. The row of lane 0 is written when the queue is declared, that
of another lane by the first commit that touches it: a lane without a row was never used.

Every function works inside a transaction it is given and returns the row that holds if that transaction commits.
"""

from __future__ import annotations

import struct
from bisect import bisect, bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, takewhile
from typing import Any, NamedTuple
from zlib import crc32

from qflow.errors import CorruptionError, NotFound
from qflow.message import LANE_SHIFT, Message, Record, charge, is_logged, lane_of
from qflow.storage import blocks, bodies
from qflow.storage.blocks import NO_PREVIOUS, Block, BlockKey, Reference
from qflow.storage.bodies import Releases

BLOCKS, MARKS, ATTEMPTS, DAMAGED, QUEUES, META, ERAS = 1, 2, 3, 4, 5, 6, 15
FORMAT = 4
TAIL_BYTES = 16 * 1024
"""The tail block grows under its key up to so many bytes."""
SMALL_TAIL_BYTES = 1600
"""And up to so many, however many lanes a commit writes to: about where LMDB begins to use pages of their own."""
REMOVED_AT_ONCE = 256
"""Settled blocks removed in one commit, at most."""
HOLLOWING_BYTES = 2**20
"""Room for one step of `hollow`: what it rewrites, and the list of pages it frees."""
_REWRITTEN_AT_ONCE = HOLLOWING_BYTES // 4
HOLLOWING_STEPS = 2048
"""Looked at in one commit, about."""
_STEPS_A_BLOCK = 8
_STEPS_A_REWRITE = 64
"""Looking at a block costs as much as reading so many marks; decoding and encoding it, so many more."""
_MARKS_A_BLOCK = 2 * blocks.MAX_MESSAGES
LEAST_GIVEN_BACK = 4096
"""A block is hollowed when that gives back so many bytes, and three quarters of it."""
RESERVED_SEQUENCES = 2**16
"""How far `next` runs ahead of numbers that are handed out without being logged."""

_KEY = struct.Struct(">BIBQ")
_LAST = NO_PREVIOUS
_NO_RANGE = _LAST, _LAST
LAST_LANE = 255
_ROW = struct.Struct("<QQQQQQQQ")
_RANGE = struct.Struct("<QI")
_CRC = struct.Struct("<I")


class Row(NamedTuple):
    """What is true of one lane; see the module."""

    next: int = 0
    floor: int = 0
    messages: int = 0
    bytes: int = 0
    tail: int = NO_PREVIOUS
    """First sequence of the last block ever written, or NO_PREVIOUS."""
    marks: int = 0
    """Number of settled ranges above the floor."""
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


class Hollowed(NamedTuple):
    """How far `hollow` came."""

    position: int
    """Everything below it has been looked at."""
    more: bool
    """A limit stopped it."""
    steps: int
    """What it cost; a step is about 1.5 µs."""


class Replayed(NamedTuple):
    """Some messages read back in order."""

    pieces: list[tuple[int, list[Record]]]
    """(first sequence, records with consecutive ones) of what is not settled."""
    position: int
    """Everything below it has been looked at."""
    problems: list[tuple[int, str, bytes]]
    """(sequence of the block, what is wrong, its key if it could not be read)."""
    last_block: int | None
    """First sequence of the last block looked at."""


def key_of(table: int, owner: int, lane: int, first: int) -> bytes:
    return _KEY.pack(table, owner, lane, first)


def queue_key(owner: int) -> bytes:
    return struct.pack(">BI", QUEUES, owner)


def meta_key(name: str) -> bytes:
    return bytes((META,)) + name.encode()


def seal(value: bytes) -> bytes:
    """Append a checksum to a small record."""
    return value + _CRC.pack(crc32(value))


def unseal(value: bytes, where: str) -> bytes:
    """Check and strip the checksum of `seal`."""
    if len(value) < _CRC.size or crc32(value[: -_CRC.size]) != _CRC.unpack(value[-_CRC.size :])[0]:
        raise CorruptionError(f"{where} does not match its checksum")
    return value[: -_CRC.size]


def read_row(txn: Any, owner: int, lane: int) -> Row:
    value = txn.get(key_of(BLOCKS, owner, lane, _LAST))
    if value is None:
        raise CorruptionError(f"the row of queue {owner}, lane {lane} is missing")
    bare = unseal(value, f"the row of queue {owner}, lane {lane}")
    if len(bare) != _ROW.size:
        raise CorruptionError(f"the row of queue {owner}, lane {lane} is {len(bare)} bytes long, not {_ROW.size}")
    return Row(*_ROW.unpack(bare))


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
    prefix = key_of(BLOCKS, owner, 0, 0)[:-9]
    with txn.cursor() as cursor:
        while lane < LAST_LANE and cursor.set_range(key_of(BLOCKS, owner, lane + 1, 0)):
            key = cursor.key()
            if not key.startswith(prefix):
                break
            lane = key[len(prefix)]
            rows[lane] = read_row(txn, owner, lane)
    for lane, row in rows.items():
        if lane_of(row.next) != lane:
            raise CorruptionError(f"the row of queue {owner}, lane {lane} is that of another lane")
    return rows


def write_row(txn: Any, owner: int, lane: int, row: Row) -> None:
    txn.put(key_of(BLOCKS, owner, lane, _LAST), seal(_ROW.pack(*row)))


def renew_row(txn: Any, owner: int, lane: int, row: Row) -> None:
    """Write a row where another one is there: a page that is not touched is not copied."""
    key, value = key_of(BLOCKS, owner, lane, _LAST), seal(_ROW.pack(*row))
    if txn.get(key) != value:
        txn.put(key, value)


# Writing ------------------------------------------------------------------------------------------------------------


def append(
    txn: Any,
    owner: int,
    lane: int,
    row: Row,
    first: int,
    records: Sequence[Record],
    sizes: Sequence[int],
    plain: bool,
    now_ms: int,
    lanes: int = 1,
    topics: Sequence[str] | None = None,
) -> Row:
    """Write records with sequences from `first` on; those not logged only leave a gap.

    `sizes` are `len` of each, and `plain` says that all are bytes: known since they were put, and not asked again.
    Where a commit writes to many `lanes`, their tail blocks grow to less: each is written as a whole, and synced.
    `topics` are those of a stream's records, all of which are logged.
    """
    offsets: Sequence[int] = range(len(records))
    if not plain and not all(map(is_logged, records)):
        offsets = [index for index, record in enumerate(records) if is_logged(record)]
        records = [records[index] for index in offsets]
        sizes = [sizes[index] for index in offsets]
        if not records:
            return row
    total = sum(sizes)
    tail = row.tail
    start = 0
    full_bytes = TAIL_BYTES if lanes == 1 else max(SMALL_TAIL_BYTES, TAIL_BYTES // lanes)
    if tail != NO_PREVIOUS and total < full_bytes:
        grown = _grow_tail(txn, owner, lane, row, first, records, sizes, plain, offsets, now_ms, full_bytes, topics)
        if grown is not None:
            txn.put(key_of(BLOCKS, owner, lane, tail), grown)
            start = len(records)
    if start < len(records):
        if first + offsets[0] <= tail < NO_PREVIOUS:
            raise _taken(owner, lane, first + offsets[0], f"the last block begins at {tail}")
        dense = type(offsets) is range
        for piece in blocks.split(sizes) if topics is None else _split_with_topics(sizes, topics):
            key = BlockKey(BLOCKS, owner, lane, first + offsets[piece.start])
            relative = None if dense else [offset - offsets[piece.start] for offset in offsets[piece]]
            txn.put(
                _KEY.pack(*key),
                blocks.encode(
                    key,
                    records[piece],
                    previous=tail,
                    time_ms=now_ms,
                    offsets=relative,
                    sizes=sizes[piece],
                    plain=plain,
                    topics=None if topics is None else topics[piece],
                ),
            )
            tail = key.first
    # Not `_replace`, which takes 1 µs more for each put; nor `Row(…)`, which takes 0.2 more.
    messages, size = row.messages + len(records), row.bytes + total
    return tuple.__new__(Row, (row.next, row.floor, messages, size, tail, row.marks, row.doubtful, row.referring))


def _taken(owner: int, lane: int, sequence: int, why: str) -> CorruptionError:
    return CorruptionError(
        f"message {sequence} of queue {owner}, lane {lane}, was not written, for {why}: what is in the log is not what "
        "was read from it; close the broker and open the spool again"
    )


def _split_with_topics(sizes: Sequence[int], topics: Sequence[str]) -> list[slice]:
    """Cut messages with topics into blocks, as `blocks.split`. Cost: 0.02 µs a message, 0.1 where topics are many."""
    distinct = set(topics)
    text = "".join(distinct)
    room = len(text) + len(distinct)
    if not text.isascii():
        return blocks.split([size + len(topic.encode()) + 1 for size, topic in zip(sizes, topics, strict=True)])
    if room > blocks.MAX_BYTES // 8:
        return blocks.split([size + length + 1 for size, length in zip(sizes, map(len, topics), strict=True)])
    return blocks.split(sizes, blocks.MAX_BYTES - room)


def append_stand_ins(
    txn: Any,
    owner: int,
    lane: int,
    row: Row,
    first: int,
    records: Sequence[Record],
    now_ms: int,
    topics: Sequence[str] | None = None,
) -> Row:
    """`append` of records some of which are references; the row counts what those stand for."""
    row = append(txn, owner, lane, row, first, records, list(map(len, records)), False, now_ms, topics=topics)
    longer = [record.size - len(record) for record in records if type(record) is Reference]
    return row._replace(bytes=row.bytes + sum(longer), referring=first + len(records) if longer else row.referring)


def _grow_tail(
    txn: Any,
    owner: int,
    lane: int,
    row: Row,
    first: int,
    records: Sequence[Record],
    sizes: Sequence[int],
    plain: bool,
    offsets: Sequence[int],
    now_ms: int,
    full_bytes: int,
    topics: Sequence[str] | None,
) -> bytes | None:
    """Return the tail block with the records added and what is settled dropped; None if it is full or gone."""
    if not row.messages:
        return None  # nothing in it is waiting any more
    if row.tail < row.referring and row.tail < row.floor:
        return None  # what is settled in it may be a reference, and must not be dropped uncounted
    key = BlockKey(BLOCKS, owner, lane, row.tail)
    value = txn.get(_KEY.pack(*key))
    if value is None or len(value) >= full_bytes:
        return None
    if type(offsets) is range:
        settled = max(0, row.floor - row.tail)
        grown = blocks.grow(
            value, key, first, records, sizes, plain=plain, settled=settled, time_ms=now_ms, topics=topics
        )
        if grown is not None:
            return grown
    try:
        block = blocks.decode(value, key, where="the tail block")
    except CorruptionError:
        return None  # it stays as it is, to be quarantined by whoever reads it
    if row.floor >= block.end or len(block.records) + len(records) > blocks.MAX_MESSAGES:
        return None
    if first + offsets[0] < block.end:
        raise _taken(owner, lane, first + offsets[0], f"the last block ends at {block.end}")
    span = first + offsets[-1] - row.tail
    times = [*block.times_ms, *[now_ms] * len(records)]
    base = block.header.time_ms
    if span >= 2**32 or not all(0 <= moment - base < 2**32 for moment in times):
        return None
    old = block.records
    if row.floor > block.first:  # what is settled keeps its position and loses its bytes
        old = [
            b"" if row.tail + offset < row.floor else record for record, offset in zip(old, block.offsets, strict=True)
        ]
    both = [*block.offsets, *[first + offset - row.tail for offset in offsets]]
    dense = both[-1] == len(both) - 1
    if (topics is not None) != bool(block.names):
        return None
    known = None if topics is None else [*map(block.names.__getitem__, block.topics), *topics]
    return blocks.encode(
        key,
        [*old, *records],
        previous=block.header.previous,
        time_ms=base,
        offsets=None if dense else both,
        times=[moment - base for moment in times],
        topics=known,
    )


def settle(txn: Any, owner: int, lane: int, row: Row, ranges: Iterable[Settled]) -> Row:
    """Raise the floor over what was settled and mark what lies above it.

    What comes a second time, in these ranges or because it was settled before, counts once. The counts given are of
    whole ranges, so where some of one was settled before, what is new in it is counted in the blocks.
    """
    joined: list[_Range] = []
    messages, total = row.messages, row.bytes
    for one in sorted(ranges):
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
            if marks:
                floor = _swallow(txn, owner, lane, row.floor, floor, swallowed)
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


def _swallow(txn: Any, owner: int, lane: int, before: int, floor: int, found: list[tuple[int, int]]) -> int:
    """Move the marks that a floor raised from `before` reaches into `found`; return the floor with them."""
    prefix = key_of(MARKS, owner, lane, 0)[:-8]
    with txn.cursor() as cursor:
        more = cursor.set_range(key_of(MARKS, owner, lane, before))  # those below are left from a purge
        while more and cursor.key().startswith(prefix) and int.from_bytes(cursor.key()[-8:], "big") <= floor:
            end = _mark_end(cursor.key(), cursor.value())
            found.append((int.from_bytes(cursor.key()[-8:], "big"), end))
            floor = max(floor, end)
            more = cursor.delete() and bool(cursor.key())
    return floor


def _mark(txn: Any, owner: int, lane: int, first: int, end: int) -> tuple[list[tuple[int, int]], int]:
    """Add a settled range above the floor, joined with its neighbours.

    Returns:
        the marks it was joined with, in order, and by how much the number of marks grew.
    """
    found: list[tuple[int, int]] = []
    prefix = key_of(MARKS, owner, lane, 0)[:-8]
    with txn.cursor() as cursor:
        more = cursor.set_range(prefix + first.to_bytes(8, "big"))
        while more and cursor.key().startswith(prefix) and int.from_bytes(cursor.key()[-8:], "big") <= end:
            found.append((int.from_bytes(cursor.key()[-8:], "big"), _mark_end(cursor.key(), cursor.value())))
            end = max(end, found[-1][1])
            more = cursor.delete() and bool(cursor.key())
        more = cursor.set_range(prefix + first.to_bytes(8, "big"))
        grown = 1 - len(found)
        if (cursor.prev() if more else cursor.last()) and cursor.key().startswith(prefix):
            before = int.from_bytes(cursor.key()[-8:], "big")
            stop = _mark_end(cursor.key(), cursor.value())
            if stop >= first:
                found.insert(0, (before, stop))
                first, end = before, max(end, stop)
                grown -= 1
    key = prefix + first.to_bytes(8, "big")
    txn.put(key, _range_value(key, end, 0))
    return found, grown


def _count(txn: Any, owner: int, lane: int, first: int, end: int, out: list[tuple[int, int]]) -> tuple[int, int]:
    """Count the messages in blocks of [first, end) that lie in none of the ranges `out`, in order, and their bytes.

    A damaged block counts nothing: who reads it corrects the row.
    """
    messages = size = 0
    for key, value in scan(txn, owner, lane, first, end):
        try:
            block = blocks.decode(value, BlockKey(*_KEY.unpack(key)), where="a block")
        except CorruptionError:
            continue
        for sequence, record in zip(map(block.first.__add__, block.offsets), block.records, strict=True):
            place = bisect_right(out, (sequence, _LAST)) - 1
            settled = place >= 0 and sequence < out[place][1]
            if first <= sequence < end and not settled and is_logged(record):
                messages += 1
                size += _full_length(record)
    return messages, size


def is_empty(txn: Any, owner: int, lane: int, row: Row) -> bool:
    """Tell whether no block holds anything that waits, whatever the row counts: a count may be wrong.

    Cost: 5 µs where the last block ends below the floor.
    """
    found = read(txn, owner, lane, row, row.floor, row.next, 1)
    return not found.pieces and not found.problems


def _range_value(key: bytes, end: int, number: int) -> bytes:
    value = _RANGE.pack(end, number)
    return value + _CRC.pack(crc32(value, crc32(key)))


def _read_range(key: bytes, value: bytes) -> tuple[int, int]:
    bare = value[: _RANGE.size]
    if len(value) != _RANGE.size + _CRC.size or crc32(bare, crc32(key)) != _CRC.unpack(value[_RANGE.size :])[0]:
        raise CorruptionError(f"the record at key {key.hex()} does not match its checksum")
    end, number = _RANGE.unpack(bare)
    return end, number


def _mark_end(key: bytes, value: bytes) -> int:
    """Return the end of a mark; a damaged one covers nothing: its messages are delivered again, never lost."""
    try:
        return _read_range(key, value)[0]
    except CorruptionError:
        return int.from_bytes(key[-8:], "big")


def clear_marks(txn: Any, owner: int, lane: int) -> None:
    """Forget what was settled above a lane's floor."""
    _delete_below(txn, MARKS, owner, lane, _LAST, limit=2**62)


def purge(row: Row, end: int) -> Row:
    """Settle everything below `end`, the next sequence. Marks and blocks below it are removed later."""
    return row._replace(floor=end, messages=0, bytes=0, marks=0)


def write_attempts(txn: Any, owner: int, lane: int, below: int, known: Iterable[tuple[int, int, int]]) -> None:
    """Replace what is kept of earlier deliveries below a sequence by (first, end, number) of each range."""
    _delete_attempts(txn, owner, lane, below, limit=2**62)
    for first, end, number in known:
        _put_attempts(txn, owner, lane, first, end, number)


def raise_attempts(txn: Any, owner: int, lane: int, first: int, end: int, number: int) -> None:
    """Set the number of earlier deliveries of [first, end), whatever was known of parts of it.

    Ranges that reach over its edges are cut there, and neighbours of the same number become one.
    """
    if first >= end:
        return
    start, stop = first, end
    for low, high, known in attempts(txn, owner, lane, max(0, first - 1), end + 1):
        if low < first:
            if known == number:
                start = low
            elif high > first:
                _put_attempts(txn, owner, lane, low, first, known)
        if high > end:
            if known == number:
                stop = high
            else:
                _put_attempts(txn, owner, lane, end, high, known)
    joined = stop > end  # with a range that begins at `end`, perhaps
    _delete_between(txn, ATTEMPTS, owner, lane, first, end + joined)
    if number:
        _put_attempts(txn, owner, lane, start, stop, number)


def _delete_between(txn: Any, table: int, owner: int, lane: int, first: int, end: int) -> None:
    """Delete the records of a table whose keys lie in [first, end)."""
    prefix = key_of(table, owner, lane, 0)[:-8]
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix + first.to_bytes(8, "big"))
        while found and cursor.key().startswith(prefix) and int.from_bytes(cursor.key()[-8:], "big") < end:
            found = cursor.delete() and bool(cursor.key())


def _put_attempts(txn: Any, owner: int, lane: int, first: int, end: int, number: int) -> None:
    key = key_of(ATTEMPTS, owner, lane, first)
    txn.put(key, _range_value(key, end, number))


def _delete_attempts(txn: Any, owner: int, lane: int, below: int, limit: int) -> int:
    """Forget earlier deliveries below a sequence; a range that reaches over it keeps the rest."""
    reaching = [entry for entry in attempts(txn, owner, lane, below - 1, below) if entry[1] > below] if below else []
    removed = _delete_below(txn, ATTEMPTS, owner, lane, below, limit)
    for first, end, number in reaching:
        if txn.get(key_of(ATTEMPTS, owner, lane, first)) is None:  # else the limit stopped it before that one
            _put_attempts(txn, owner, lane, below, end, number)
    return removed


def remove_settled(
    txn: Any, owner: int, lane: int, row: Row, limit: int = REMOVED_AT_ONCE, releases: Releases | None = None
) -> tuple[int, bool]:
    """Remove blocks, marks and attempts wholly below the floor, at most `limit`, and the references `releases` admits.

    Returns:
        the floor at which there will be something to remove again, and whether the limit stopped it.
    """
    removed = _delete_below(txn, MARKS, owner, lane, row.floor, limit)
    removed += _delete_attempts(txn, owner, lane, row.floor, limit)
    start, border = key_of(BLOCKS, owner, lane, 0), key_of(BLOCKS, owner, lane, row.floor)
    room = max(0, limit - removed)
    with txn.cursor() as cursor:
        if not cursor.set_range(start):
            return row.floor + 1, False
        begun = list(islice(takewhile(border.__ge__, cursor.iternext(values=False)), room + 1))
        if not begun:
            return row.floor + 1, False
        # A block ends before the next begins, so only the last one's header must be read (3 µs, and a copy of it).
        cursor.set_range(begun[-1])
        end = _block_end(cursor, start[:-8], int.from_bytes(begun[-1][-8:], "big"))
        whole = len(begun) - (end > row.floor)
        gone = min(whole, room)
        if row.referring and int.from_bytes(begun[0][-8:], "big") < row.referring:
            gone = _let_go(txn, begun[:gone], row.referring, releases or Releases())
        cursor.set_range(start)
        for _ in range(gone):
            cursor.delete()
    if whole > gone:
        return 0, True
    return max(end, row.floor + 1), False


def _let_go(txn: Any, keys: list[bytes], below: int, releases: Releases) -> int:
    """Count down the references in blocks that are about to be removed; return how many of those blocks may be."""
    for index, key in enumerate(keys):
        if int.from_bytes(key[-8:], "big") >= below:
            break
        if not releases.take(txn, _references(key, txn.get(key))):
            return index
    return len(keys)


def _references(key: bytes, value: bytes) -> list[Reference]:
    """Return the references in a block; of a damaged one nobody knows them, and what they stand for is kept."""
    try:
        return blocks.references(value, BlockKey(*_KEY.unpack(key)), where="a block")
    except CorruptionError:
        return []


def _block_end(cursor: Any, prefix: bytes, first: int) -> int:
    """Return the end of the block under the cursor: by its header, or where that is damaged, where the next begins."""
    try:
        return blocks.read_header(cursor.value()[: blocks.HEADER_BYTES], where="a block").end
    except CorruptionError:
        end = first + 1
        if cursor.next():
            if cursor.key().startswith(prefix):
                end = int.from_bytes(cursor.key()[-8:], "big")
            cursor.prev()
        else:
            cursor.last()
        return end


def hollow(
    txn: Any, owner: int, lane: int, row: Row, position: int, limit: int, releases: Releases | None = None
) -> Hollowed:
    """Give back what is settled above the floor, from `position` on, in about `limit` steps.

    A block is removed if everything is settled from the end of the block before it to the beginning of the one after
    it; that is how a reader tells it from one that vanished. A block of which at most a quarter of the bytes is left is
    written anew without what is settled, under its key and with the same span. A sequence that is not in it is a gap,
    so a mark that is damaged later cannot bring a message back without its bytes. The tail block stays as it is, and
    so does a damaged one that holds anything. What a reference stands for counts as bytes of its block.
    """
    releases = releases or Releases()
    position = max(position, row.floor)
    steps = removed = written = 0
    known: dict[int, int] = {}  # the end of the block that was looked at last, by its first sequence
    while row.marks:
        if steps >= limit or removed >= REMOVED_AT_ONCE or written >= _REWRITTEN_AT_ONCE:
            return Hollowed(position, True, steps)
        mark = next(settled_ranges(txn, owner, lane, position, _LAST), None)
        if mark is None:
            break
        before, first, following = _neighbours(txn, owner, lane, max(position, mark[0]))
        if following == _LAST:  # what was found is the last block, or the row
            break
        position = following
        marks = list(islice(settled_ranges(txn, owner, lane, max(first, row.floor), following), _MARKS_A_BLOCK))
        steps += _STEPS_A_BLOCK + len(marks)
        if not marks:
            continue
        if marks[0][0] <= first and marks[0][1] >= following and before is not None:
            if before not in known:
                known = {before: _end_of(txn, owner, lane, before)}
            if marks[0][0] <= known[before]:
                key = key_of(BLOCKS, owner, lane, first)
                if not _let_go(txn, [key], row.referring, releases):
                    return Hollowed(first, True, steps)
                txn.delete(key)
                removed += 1
                continue
        if len(marks) < _MARKS_A_BLOCK:
            rewritten = _hollow_block(txn, BlockKey(BLOCKS, owner, lane, first), row, marks, releases)
            if rewritten is None:
                return Hollowed(first, True, steps)
            size, end = rewritten
            written += size
            steps += _STEPS_A_REWRITE if size else 0
            known = {first: end}
    return Hollowed(position, False, steps)


def _neighbours(txn: Any, owner: int, lane: int, position: int) -> tuple[int | None, int, int]:
    """Return the first sequences of three blocks: the one before, the one at or before `position`, the next.

    If none is at or before, the first one after `position` takes its place, with none before it. The row counts as one.
    """
    prefix = key_of(BLOCKS, owner, lane, 0)[:-8]
    with txn.cursor() as cursor:

        def first_at(found: bool) -> int | None:
            ours = found and cursor.key().startswith(prefix)
            return int.from_bytes(cursor.key()[-8:], "big") if ours else None

        following = first_at(cursor.set_range(prefix + position.to_bytes(8, "big")))
        before = first_at(cursor.prev())
        if before is None or following == position:
            first = following
            cursor.set_range(prefix + position.to_bytes(8, "big"))
            following = first_at(cursor.next())
        else:
            first, before = before, first_at(cursor.prev())
    return before, _LAST if first is None else first, _LAST if following is None else following


def _end_of(txn: Any, owner: int, lane: int, first: int) -> int:
    """Return where a block ends; -1 if that cannot be read."""
    value = txn.get(key_of(BLOCKS, owner, lane, first))
    try:
        return blocks.read_header(value[: blocks.HEADER_BYTES], where="a block").end
    except CorruptionError:
        return -1


def _hollow_block(
    txn: Any, key: BlockKey, row: Row, marks: list[tuple[int, int]], releases: Releases
) -> tuple[int, int] | None:
    """Write a block anew without what is settled, if that is worth it; return (bytes written, its end or -1).

    None: it is worth it, and counts more references down than `releases` admits.
    """
    first, floor = key.first, row.floor
    value = txn.get(_KEY.pack(*key))
    try:
        header, lengths, offsets = blocks.outline(value, key, where="a block")
        if first < row.referring and header.columns & blocks.KINDS:
            lengths = [_full_length(record) for record in blocks.decode(value, key, where="a block").records]
    except CorruptionError:
        return 0, -1  # whoever reads it sets it aside
    ranges = [(first, floor), *marks] if floor > first else marks
    settled = [slice(bisect_left(offsets, low - first), bisect_left(offsets, high - first)) for low, high in ranges]
    kept = 1 + header.count - sum(part.stop - part.start for part in settled)
    columns = 1 + (header.columns | blocks.OFFSETS | blocks.KINDS).bit_count()
    payload = sum(lengths)
    whole = len(value) + payload - header.payload_bytes
    left = payload - sum(sum(lengths[part]) for part in settled) + 4 * columns * kept
    if 4 * left > whole or whole - left < LEAST_GIVEN_BACK:
        return 0, header.end
    hollowed = _without(value, header, settled)
    if hollowed is None:
        return 0, -1
    data, dropped = hollowed
    if not releases.take(txn, dropped):
        return None
    txn.put(_KEY.pack(*key), data)
    return len(data), header.end


def _full_length(record: Record) -> int:
    return record.size if type(record) is Reference else len(record)


def _without(value: bytes, header: blocks.Header, settled: list[slice]) -> tuple[bytes, list[Reference]] | None:
    """Return a block without some of its messages, and the references among those; None if it is damaged.

    The last one keeps its place, without its bytes and as one that is not logged, for the span ends with it.
    """
    try:
        block = blocks.decode(value, header.key, where="a block")
    except CorruptionError:
        return None
    count = header.count
    gone = set().union(*(range(part.start, part.stop) for part in settled))
    kept = [index for index in range(count) if index not in gone or index == count - 1]
    records = [block.records[index] for index in kept]
    dropped = [block.records[index] for index in gone]
    if count - 1 in gone:
        records[-1] = Message(b"", b"", False)
    base = header.time_ms
    data = blocks.encode(
        header.key,
        records,
        previous=header.previous,
        time_ms=base,
        offsets=[block.offsets[index] for index in kept],
        times=[block.times_ms[index] - base for index in kept] if header.columns & blocks.TIMES else None,
    )
    return data, [record for record in dropped if type(record) is Reference]


def _delete_below(txn: Any, table: int, owner: int, lane: int, below: int, limit: int) -> int:
    prefix = key_of(table, owner, lane, 0)[:-8]
    removed = 0
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix + bytes(8))
        while found and removed < limit:
            key = cursor.key()
            if not key.startswith(prefix) or int.from_bytes(key[-8:], "big") >= below:
                break
            found = cursor.delete() and bool(cursor.key())
            removed += 1
    return removed


def delete_lanes(txn: Any, owner: int, limit: int = REMOVED_AT_ONCE, releases: Releases | None = None) -> bool:
    """Remove records of all lanes of a deleted queue, at most `limit`; return whether more is left."""
    releases = releases or Releases()
    removed = 0
    referring: dict[int, int] = {}
    for table in (MARKS, ATTEMPTS, DAMAGED, ERAS, BLOCKS):
        prefix = key_of(table, owner, 0, 0)[:-9]
        with txn.cursor() as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key().startswith(prefix):
                key = cursor.key()
                lane = key[len(prefix)]
                if table == BLOCKS and lane not in referring:
                    referring[lane] = _referring(txn, owner, lane)
                if removed >= limit or (table == BLOCKS and not _let_go(txn, [key], referring[lane], releases)):
                    return True
                found = cursor.delete() and bool(cursor.key())
                removed += 1
    return False


def _referring(txn: Any, owner: int, lane: int) -> int:
    """Return where the blocks of a lane end that may hold references: by its row, else with the last of them."""
    try:
        return read_row(txn, owner, lane).referring
    except CorruptionError:
        return _LAST


def count_references(txn: Any, start: bytes, limit: int) -> tuple[Counter[int], bytes | None]:
    """Count the references in blocks of all queues, by number, from a key on, in about `limit` blocks.

    Returns:
        the counts, and the key to go on from; None at the end.
    """
    counted: Counter[int] = Counter()
    place, below = b"", 0
    with txn.cursor() as cursor:
        found = cursor.set_range(max(start, bytes((BLOCKS,))))
        while found and cursor.key()[0] == BLOCKS:
            key = cursor.key()
            if limit <= 0:
                return counted, key
            limit -= 1
            if key[:-8] != place:
                place = key[:-8]
                below = _referring(txn, *_KEY.unpack(key)[1:3])
            if int.from_bytes(key[-8:], "big") < below:
                counted.update(reference.number for reference in _references(key, cursor.value()))
                found = cursor.next()
            else:
                found = cursor.set_range(place + bytes((255,)) * 9)  # behind the row
    return counted, None


# Reading ------------------------------------------------------------------------------------------------------------


def scan(txn: Any, owner: int, lane: int, position: int, end: int) -> Iterator[tuple[bytes, Any]]:
    """Yield (key, value) of each block that may hold a sequence in [position, end), in order.

    Values are what the transaction gives: bytes, or views that end with it.
    """
    prefix = key_of(BLOCKS, owner, lane, 0)[:-8]
    wanted = prefix + position.to_bytes(8, "big")
    with txn.cursor() as cursor:
        if not cursor.set_range(wanted):
            return
        key = bytes(cursor.key())
        if key != wanted:  # the block before may reach here
            if cursor.prev() and bytes(cursor.key()).startswith(prefix):
                key = bytes(cursor.key())
            else:
                cursor.set_range(wanted)
        while key.startswith(prefix) and int.from_bytes(key[-8:], "big") < end:
            yield key, cursor.value()
            if not cursor.next():
                return
            key = bytes(cursor.key())


def read(
    txn: Any, owner: int, lane: int, row: Row, position: int, end: int, most_bytes: int, expected: int | None = None
) -> Replayed:
    """Read what is not settled in [position, end), in order, about `most_bytes` of it, at least one block.

    Of a block that refers to shared bodies, at least one message: it may hold references to any number of bytes.

    Args:
        expected: first sequence of the block read before, if one was.

    A damaged or vanished block is named in `problems` and stepped over. One that `hollow` removed is not missed: the
    block after it is reached over a mark, never from the block before.
    """
    pieces: list[tuple[int, list[Record]]] = []
    problems: list[tuple[int, str, bytes]] = []
    size = 0
    stopped = None
    torn = False  # the block before was damaged: nobody knows where it ended
    while position < end:
        position = _after_mark(txn, owner, lane, row, position)
        for key, value in scan(txn, owner, lane, position, end):
            if pieces and size >= most_bytes:
                return Replayed(pieces, position, problems, expected)
            first = int.from_bytes(key[-8:], "big")
            where = f"block {first}"
            try:
                block = blocks.decode(value, BlockKey(BLOCKS, owner, lane, first), where=where)
            except CorruptionError as error:
                problems.append((first, str(error), key))
                expected, torn = first, True
                position = max(position, first + 1)
                continue
            if block.end <= position:
                expected, torn = first, False
                continue
            previous = block.header.previous
            if torn and previous < first and _after_mark(txn, owner, lane, row, previous) >= first:
                pass  # it was removed: all of it is settled
            elif previous != expected and previous != NO_PREVIOUS and previous >= position:
                problems.append((first, f"{where}: the block before it, {previous}, has vanished", b""))
            elif expected is not None and previous != expected:
                named = "none" if previous == NO_PREVIOUS else previous
                problems.append((first, f"{where}: names {named} as the block before it, found {expected}", b""))
            unsettled = _unsettled(txn, owner, lane, row, block, position, end)
            if first < row.referring:
                unsettled, stopped = _resolve(txn, owner, unsettled, most_bytes - size, problems)
            for piece in unsettled:
                pieces.append(piece)
                size += charge(piece[1])
            if stopped is not None:
                return Replayed(pieces, stopped, problems, None)  # what it names as the one before it was looked at
            expected, torn = first, False
            position = max(position, min(block.end, end))
            if _after_mark(txn, owner, lane, row, position) > position:
                expected = None  # what is settled is not read, however much it is
                break
        else:
            break
    if row.tail != NO_PREVIOUS and row.tail >= max(position, row.floor) and row.tail < end and expected != row.tail:
        problems.append((row.tail, f"block {row.tail}, the last one, has vanished", b""))
    return Replayed(pieces, end, problems, expected)


def in_words(found: Replayed) -> Iterator[tuple[str, int]]:
    """Yield (what is wrong, how many records are damaged): a line for all blocks in a row with the same damage."""
    starts = [first for first, _ in found.pieces]

    def stretch(problem: tuple[int, str, bytes]) -> object:
        first, text, key = problem
        return (text.partition(": ")[2], bisect(starts, first)) if key else first

    for _, group in groupby(found.problems, key=stretch):
        alike = list(group)
        text = alike[0][1]
        if len(alike) > 1:
            what, _, reason = text.partition(": ")
            text = f"{what.replace(' ', 's ', 1)} to {alike[-1][0]}, {len(alike)} of them: {reason}"
        yield text, sum(1 for problem in alike if problem[2])


def _after_mark(txn: Any, owner: int, lane: int, row: Row, position: int) -> int:
    """Return the end of the mark that `position` lies in, else `position`."""
    if row.marks:
        for _, high in settled_ranges(txn, owner, lane, position, position + 1):
            return high
    return position


def _unsettled(
    txn: Any, owner: int, lane: int, row: Row, block: Block, position: int, end: int
) -> list[tuple[int, list[Record]]]:
    """Return what a block holds of [position, end) and nobody settled, as pieces with consecutive sequences."""
    first = block.first
    start = max(position, row.floor)
    settled = settled_ranges(txn, owner, lane, max(start, first), block.end) if row.marks else iter(())
    low, high = next(settled, _NO_RANGE)  # one at a time: they may be wide, or many, beside what the block holds
    if start <= first and end >= block.end and low == _LAST and type(block.offsets) is range:
        return [(first, block.records)]
    pieces: list[tuple[int, list[Record]]] = []
    following = -1
    for sequence, record in zip(map(first.__add__, block.offsets), block.records, strict=True):
        while sequence >= high:
            low, high = next(settled, _NO_RANGE)
        if not start <= sequence < end or sequence >= low or not is_logged(record):
            continue
        if sequence == following:
            pieces[-1][1].append(record)
        else:
            pieces.append((sequence, [record]))
        following = sequence + 1
    return pieces


def _resolve(
    txn: Any, owner: int, pieces: list[tuple[int, list[Record]]], room: int, problems: list[tuple[int, str, bytes]]
) -> tuple[list[tuple[int, list[Record]]], int | None]:
    """Return pieces with what references stand for, of about `room` bytes, and where that stopped, if it did.

    A reference to nothing, or to a body that is damaged, is named in `problems` and left out.
    """
    resolved: list[tuple[int, list[Record]]] = []
    following = -1
    size = 0
    for first, records in pieces:
        for sequence, stored in enumerate(records, first):
            if resolved and size >= room:
                return resolved, sequence
            try:
                record = bodies.fetch(txn, stored) if type(stored) is Reference else stored
            except CorruptionError as error:
                number = stored.number  # type: ignore[attr-defined]
                key = bodies.key_of_body(number) if bodies.is_stored(txn, number) else b""
                problems.append((sequence, f"message {sequence}: {error}", key))
                continue
            if sequence == following:
                resolved[-1][1].append(record)
            else:
                resolved.append((sequence, [record]))
            following = sequence + 1
            size += charge([record])
    return resolved, None


def settled_ranges(txn: Any, owner: int, lane: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the marked ranges that touch [first, end)."""
    yield from ((low, high) for low, high, _ in _ranges(txn, MARKS, owner, lane, first, end))


def is_settled(txn: Any, owner: int, lane: int, row: Row, sequence: int) -> bool:
    """Tell whether a sequence lies below the floor or in a mark."""
    return sequence < row.floor or _after_mark(txn, owner, lane, row, sequence) > sequence


def attempts(txn: Any, owner: int, lane: int, first: int, end: int) -> list[tuple[int, int, int]]:
    """Return (first, end, number) of the ranges with earlier deliveries that touch [first, end)."""
    return list(_ranges(txn, ATTEMPTS, owner, lane, first, end))


def _ranges(txn: Any, table: int, owner: int, lane: int, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    prefix = key_of(table, owner, lane, 0)[:-8]
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix + first.to_bytes(8, "big"))
        if not found or cursor.key()[-8:] != first.to_bytes(8, "big") or not cursor.key().startswith(prefix):
            before = cursor.prev() if found else cursor.last()
            if not before or not cursor.key().startswith(prefix):
                found = cursor.set_range(prefix + first.to_bytes(8, "big"))
            else:
                found = True
        while found and cursor.key().startswith(prefix):
            low = int.from_bytes(cursor.key()[-8:], "big")
            if low >= end:
                return
            try:
                high, number = _read_range(cursor.key(), cursor.value())
            except CorruptionError:
                high, number = 0, 0  # it says nothing
            if high > first:
                yield low, high, number
            found = cursor.next()


def kept_damaged(txn: Any, owner: int) -> Iterator[tuple[int, int]]:
    """Yield (first sequence, size) of the damaged blocks that were set aside, of all lanes."""
    prefix = key_of(DAMAGED, owner, 0, 0)[:-9]
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix)
        while found and cursor.key().startswith(prefix):
            yield int.from_bytes(cursor.key()[-8:], "big"), len(cursor.value())
            found = cursor.next()


def find(txn: Any, owner: int, lane: int, sequence: int) -> tuple[Record, int]:
    """Return (record, time in ms) of one logged message, settled or not.

    Raises:
        NotFound: no block holds it (any more).
        CorruptionError: its block is damaged, or the shared body it refers to.
    """
    for key, value in scan(txn, owner, lane, sequence, sequence + 1):
        first = int.from_bytes(key[-8:], "big")
        block = blocks.decode(value, BlockKey(BLOCKS, owner, lane, first), where=f"block {first}")
        if block.first <= sequence < block.end:
            for index, offset in enumerate(block.offsets):
                record = block.records[index]
                if first + offset == sequence and is_logged(record):
                    if type(record) is Reference:
                        record = bodies.fetch(txn, record)
                    return record, block.times_ms[index]
    raise NotFound(f"no block holds message {sequence}")
