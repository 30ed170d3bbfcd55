"""Reading a queue's messages back from its lanes: what nobody settled, in order, with damage named."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from qflow.errors import CorruptionError, NotFound
from qflow.message import Record, charge, is_logged
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import NO_PREVIOUS, Block, BlockKey, Reference
from qflow.storage.log import bodies
from qflow.storage.log.keys import BLOCKS, key_of, scan
from qflow.storage.log.marks import after_mark, settled_ranges
from qflow.storage.log.rows import Row, with_last_block
from qflow.storage.log.table import LAST, number_of

_NO_RANGE = LAST, LAST


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


def read_unsettled(
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
        position = after_mark(txn, owner, lane, row, position)
        for key, value in scan(txn, owner, lane, position, end):
            if pieces and size >= most_bytes:
                return Replayed(pieces, position, problems, expected)
            first = number_of(key)
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
            if torn and previous < first and after_mark(txn, owner, lane, row, previous) >= first:
                pass  # it was removed: all of it is settled
            elif previous != expected and previous != NO_PREVIOUS and previous >= position:
                problems.append((first, f"{where}: the block before it, {previous}, has vanished", b""))
            elif expected is not None and previous != expected:
                named = "none" if previous == NO_PREVIOUS else previous
                problems.append((first, f"{where}: names {named} as the block before it, found {expected}", b""))
            unsettled = _unsettled(txn, owner, lane, row, block, position, end)
            if first < row.referring:
                unsettled, stopped = _resolve(txn, unsettled, most_bytes - size, problems)
            for piece in unsettled:
                pieces.append(piece)
                size += charge(piece[1])
            if stopped is not None:
                return Replayed(pieces, stopped, problems, None)  # what it names as the one before it was looked at
            expected, torn = first, False
            position = max(position, min(block.end, end))
            if after_mark(txn, owner, lane, row, position) > position:
                expected = None  # what is settled is not read, however much it is
                break
        else:
            break
    if row.tail != NO_PREVIOUS and row.tail >= max(position, row.floor) and row.tail < end and expected != row.tail:
        problems.append((row.tail, f"block {row.tail}, the last one, has vanished", b""))
    return Replayed(pieces, end, problems, expected)


class Verified(NamedTuple):
    """Blocks that are whole, and hold nothing but messages that are not settled."""

    messages: int
    bytes: int
    position: int
    last_block: int | None


def verify_plain(
    txn: Any, owner: int, lane: int, position: int, end: int, most_bytes: int, expected: int | None
) -> Verified:
    """Check every byte of blocks in [position, end), above which nothing is settled, without making messages of them.

    Ends before a block that is damaged, does not follow the one before, or needs a closer look: see `read_unsettled`.

    Cost: 0.2 ms a MiB, where that takes 0.3 µs a message.
    """
    messages = size = 0
    for key, value in scan(txn, owner, lane, position, end):
        first = number_of(key)
        try:
            header = blocks.read_header(value, where="a block")
            known = header.previous == NO_PREVIOUS or header.previous < position
            follows = known if expected is None else header.previous == expected
            is_plain = header.key == BlockKey(BLOCKS, owner, lane, first) and not header.columns & ~blocks.TIMES
            if first < position or header.end > end or not (follows and is_plain):
                break
            if sum(blocks.values(blocks.columns(value, header, where="a block").lengths)) != header.payload_bytes:
                break
        except CorruptionError:
            break
        messages += header.count
        size += header.payload_bytes
        position, expected = header.end, first
        if size >= most_bytes:
            break
    return Verified(messages, size, position, expected)


def behind_tail(txn: Any, owner: int, lane: int, row: Row) -> str | None:
    """Return, in words, that blocks with messages that wait are behind the one that a row names as the last; else None.

    A damaged one is named by whoever reads it.
    """
    last = with_last_block(txn, owner, lane, row).tail
    if last == row.tail:
        return None
    try:
        if blocks.read_header(txn.get(key_of(BLOCKS, owner, lane, last)), where="a block").end <= row.floor:
            return None
    except CorruptionError:
        return None
    named = "no block" if row.tail == NO_PREVIOUS else f"block {row.tail}"
    return (
        f"the row of lane {lane} names {named} as the last one, and block {last} is behind it: nothing is lost, and "
        "the next put of this qflow puts that right; one of an earlier qflow may hide what is behind it"
    )


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


def _unsettled(
    txn: Any, owner: int, lane: int, row: Row, block: Block, position: int, end: int
) -> list[tuple[int, list[Record]]]:
    """Return what a block holds of [position, end) and nobody settled, as pieces with consecutive sequences."""
    first = block.first
    start = max(position, row.floor)
    settled = settled_ranges(txn, owner, lane, max(start, first), block.end) if row.marks else iter(())
    low, high = next(settled, _NO_RANGE)  # one at a time: they may be wide, or many, beside what the block holds
    if start <= first and end >= block.end and low == LAST and type(block.offsets) is range:
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
    txn: Any, pieces: list[tuple[int, list[Record]]], room: int, problems: list[tuple[int, str, bytes]]
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
                key = bodies.key_of_damage(txn, stored.number)  # type: ignore[attr-defined]
                problems.append((sequence, f"message {sequence}: {error}", key))
                continue
            if sequence == following:
                resolved[-1][1].append(record)
            else:
                resolved.append((sequence, [record]))
            following = sequence + 1
            size += charge([record])
    return resolved, None


def find_message(txn: Any, owner: int, lane: int, sequence: int) -> tuple[Record, int]:
    """Return (record, time in ms) of one logged message, settled or not.

    Raises:
        NotFound: no block holds it (any more).
        CorruptionError: its block is damaged, or the shared body it refers to.
    """
    for key, value in scan(txn, owner, lane, sequence, sequence + 1):
        first = number_of(key)
        block = blocks.decode(value, BlockKey(BLOCKS, owner, lane, first), where=f"block {first}")
        if block.first <= sequence < block.end:
            for index, offset in enumerate(block.offsets):
                record = block.records[index]
                if first + offset == sequence and is_logged(record):
                    if type(record) is Reference:
                        record = bodies.fetch(txn, record)
                    return record, block.times_ms[index]
    raise NotFound(f"no block holds message {sequence}")


def is_empty(txn: Any, owner: int, lane: int, row: Row) -> bool:
    """Tell whether no block holds anything that waits, whatever the row counts: a count may be wrong.

    Cost: 5 µs where the last block ends below the floor.
    """
    found = read_unsettled(txn, owner, lane, row, row.floor, row.next, 1)
    return not found.pieces and not found.problems
