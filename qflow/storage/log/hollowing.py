"""Giving back what is settled above the floor: blocks of which nothing is left, and the bytes of others.

One step of it is bounded, in time and in what it writes; `batch_writing` takes one in a commit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import Message
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks, encoding
from qflow.storage.blocks import BlockKey, Reference, full_length
from qflow.storage.log import removal
from qflow.storage.log.bodies import Releases
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.log.marks import after_mark, settled_ranges
from qflow.storage.log.rows import Row
from qflow.storage.log.table import LAST, number_of

HOLLOWING_BYTES = 2**20
"""Room for one step of `hollow_lane`: what it rewrites, and the list of pages it frees."""
_REWRITTEN_AT_ONCE = HOLLOWING_BYTES // 4
HOLLOWING_STEPS = 2048
"""Looked at in one commit, about."""
_STEPS_A_BLOCK = 8
_STEPS_A_REWRITE = 64
"""Looking at a block costs as much as reading so many marks; decoding and encoding it, so many more."""
_MARKS_A_BLOCK = 2 * encoding.MAX_MESSAGES
LEAST_GIVEN_BACK = 4096
"""A block is hollowed when that gives back so many bytes, and three quarters of it."""
HOLLOW_BYTES = 256 * 1024
"""So much is settled above the floor before blocks are looked at to give it back; a message counts 16 bytes more."""
NOWHERE = 2**64


class Hollowed(NamedTuple):
    """How far `hollow_lane` came."""

    position: int
    """Everything below it has been looked at."""
    more: bool
    """A limit stopped it."""
    steps: int
    """What it cost; a step is about 1.5 µs."""


class Passes:
    """The passes over the blocks of one lane: a step of one in a commit. By the writer alone."""

    __slots__ = ("at", "lowest", "settled_bytes", "settled_messages", "steps")

    def __init__(self, at: int) -> None:
        self.at = at
        """How far the pass that is on its way has come; NOWHERE if there is none."""
        self.settled_messages = self.settled_bytes = 0
        """What was settled above the floor since that one, or the last one, began."""
        self.lowest = NOWHERE
        """The lowest of those sequences: the next pass begins there."""
        self.steps = 0
        """What that one has cost; the next begins when that is spread over what was settled."""

    @property
    def due(self) -> bool:
        """Blocks should be looked at. Passes cost a step, 1.5 µs, for each message or 4 KiB settled."""
        messages, size = self.settled_messages, self.settled_bytes
        enough = size + 16 * messages >= HOLLOW_BYTES and messages + size // 4096 >= self.steps
        return enough or self.at != NOWHERE

    def count(self, ranges: Iterable[list[int]], floor: int) -> None:
        """Count what was settled above the floor. What is tried again counts twice."""
        for first, end, messages, size in ranges:
            if end > floor:
                self.settled_messages += messages
                self.settled_bytes += size
                if first < self.lowest:
                    self.lowest = first

    def begin(self) -> int:
        """Begin a pass, or go on with the one that is on its way; return where."""
        if self.at == NOWHERE:
            self.at, self.lowest = self.lowest, NOWHERE
            self.settled_messages = self.settled_bytes = self.steps = 0
        return self.at

    def note(self, hollowed: Hollowed, tail: int) -> None:
        """Remember how far a pass came, after the commit."""
        self.steps += hollowed.steps
        if hollowed.more:
            self.at = hollowed.position
        else:
            self.at = NOWHERE
            self.lowest = min(self.lowest, tail)  # the tail block was not looked at


def hollow_lane(
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
        if steps >= limit or removed >= removal.REMOVED_AT_ONCE or written >= _REWRITTEN_AT_ONCE:
            return Hollowed(position, True, steps)
        mark = next(settled_ranges(txn, owner, lane, position, LAST), None)
        if mark is None:
            break
        before, first, following = _neighbours(txn, owner, lane, max(position, mark[0]))
        if following == LAST:  # what was found is the last block, or the row
            break
        position = following
        marks = list(islice(settled_ranges(txn, owner, lane, max(first, row.floor), following), _MARKS_A_BLOCK))
        steps += _STEPS_A_BLOCK + len(marks)
        if not marks:
            continue
        if marks[0][0] <= first and marks[0][1] >= following and before is not None:
            if before not in known:
                known = {before: first if before + 1 == first else _end_of(txn, owner, lane, before)}
            end = known[before]
            if end >= row.floor and (end >= first or after_mark(txn, owner, lane, row, end) >= first):
                key = key_of(BLOCKS, owner, lane, first)
                if not removal.let_go(txn, [key], row.referring, releases):
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
    key = key_of(BLOCKS, owner, lane, position)
    with txn.cursor() as cursor:

        def first_at(found: bool) -> int | None:
            ours = found and cursor.key().startswith(key[:-8])
            return number_of(cursor.key()) if ours else None

        following = first_at(cursor.set_range(key))
        before = first_at(cursor.prev())
        if before is None or following == position:
            first = following
            cursor.set_range(key)
            following = first_at(cursor.next())
        else:
            first, before = before, first_at(cursor.prev())
    return before, LAST if first is None else first, LAST if following is None else following


def _end_of(txn: Any, owner: int, lane: int, first: int) -> int:
    """Return where a block ends; -1 if that cannot be read. Makes a copy of it."""
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
    value = txn.get(key_of(*key))
    try:
        header, lengths, offsets = blocks.outline(value, key)
        if first < row.referring and header.columns & blocks.KINDS:
            lengths = [full_length(record) for record in blocks.decode(value, key, where="a block").records]
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
    txn.put(key_of(*key), data)
    return len(data), header.end


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
    data = encoding.encode(
        header.key,
        records,
        previous=header.previous,
        time_ms=base,
        offsets=[block.offsets[index] for index in kept],
        times=[block.times_ms[index] - base for index in kept] if header.columns & blocks.TIMES else None,
    )
    return data, [record for record in dropped if type(record) is Reference]
