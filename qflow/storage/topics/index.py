"""Which blocks of a stream hold which topics: made from closed blocks, in the background, in segments.

Publishing writes no index; a block carries its topics. The indexer takes closed blocks, all but the last of a lane,
and inverts up to `SEGMENT_BLOCKS` of them into one segment of postings. Segments of a lane lie end to end, and its row
tells how far they reach; readers look at the topics of the blocks above that themselves. See `selection.py` for
reading, `records.py` for keys and rows.

Whatever is damaged hides nothing: a block whose topics cannot be read may hold any, a segment that is gone or damaged
is replaced by all blocks in its range, and without a row nothing counts as indexed. `delete_index` and indexing anew
repair it.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import NO_PREVIOUS, BlockKey
from qflow.storage.log import table
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.log.rows import Row
from qflow.storage.topics import names as topic_names
from qflow.storage.topics import postings
from qflow.storage.topics.postings import topic_number
from qflow.storage.topics.records import (
    POSTINGS,
    REMOVED_AT_ONCE,
    NamesRow,
    any_left,
    blocks_between,
    progress_of_lanes,
    read_names_row,
    read_progress,
    write_names_row,
    write_progress,
)

SEGMENT_BLOCKS = postings.MOST_BLOCKS
SEGMENT_TOPICS = 16_384
"""A segment ends with the block that brings it to so many topics: they are in memory while it is made."""
NEW_TOPICS = 2_048
"""Or to so many that are not listed: each may dirty a page in the commit that lists it."""
_SEGMENT_NAME_BYTES = 2**21


class Segment(NamedTuple):
    """Some blocks of a lane, inverted, to be written."""

    lane: int
    first: int
    """Where the segments before it end."""
    end: int
    blocks: int
    data: bytes
    names: list[bytes]
    """Topics to be listed."""
    row: NamesRow
    """What was true of the list when it was planned."""
    problems: list[str]
    """Blocks whose topics could not be read."""

    @property
    def values(self) -> int:
        """How many records `write` writes, about."""
        return len(self.names) + 4

    @property
    def value_bytes(self) -> int:
        """And of how many bytes, about."""
        return len(self.data) + 2 * sum(map(len, self.names)) + 64 * len(self.names) + topic_names.PIECE_BYTES


class TopicIndex:
    """The index of one stream, for the one thread that writes it. A segment is written before the next is planned."""

    def __init__(self, owner: int) -> None:
        self.owner = owner

    def check(self, txn: Any) -> None:
        """Read the rows.

        Raises:
            CorruptionError: one is damaged, or `delete_index` was not finished; nothing counts as indexed. Call that
                until nothing is left, and then this again.
        """
        self._names_row(txn)
        progress_of_lanes(txn, self.owner)

    def _names_row(self, txn: Any) -> NamesRow | None:
        """Return the row of the topics; None where there is no index."""
        row = read_names_row(txn, self.owner)
        if row is None and any_left(txn, self.owner):
            raise CorruptionError(
                f"the row of the topics of stream {self.owner} is missing: remove its index, it is made again"
            )
        return row

    def plan(self, txn: Any, lane: int, row: Row, least: int = SEGMENT_BLOCKS) -> Segment | None:
        """Invert the next closed blocks of a lane; None if fewer than `least` wait.

        Args:
            row: the lane's, of this transaction or an earlier one.

        Raises:
            CorruptionError: a row of the index is damaged; see `check`.
        Cost: 2 µs a block and 0.5 µs for each topic in it, 2 µs for each topic in all; 10 µs where too few wait.
        """
        owner = self.owner
        if row.tail == NO_PREVIOUS:
            return None
        done = read_progress(txn, owner, lane).indexed_to
        found = blocks_between(txn, owner, lane, max(done, row.floor), row.tail + 1, SEGMENT_BLOCKS + 2)
        waiting = [first for first in found if first >= done][: SEGMENT_BLOCKS + 1]
        if len(waiting) <= max(1, least):  # the last one may not be closed
            return None
        names = self._names_row(txn) or topic_names.begin()
        holding: dict[str, bytearray] = {}
        new: list[bytes] = []
        unread: list[int] = []
        problems: list[str] = []
        size = count = 0
        end = done
        for number, (first, following) in enumerate(islice(pairwise(waiting), SEGMENT_BLOCKS)):
            try:
                topics = self._topics_of(txn, lane, first)
            except CorruptionError as error:
                topics = []
                problems.append(str(error))
            if not topics:
                unread.append(number)
            fresh = [topic for topic in topics if topic not in holding]
            for topic in fresh:
                holding[topic] = bytearray()
            for topic in topics:
                holding[topic].append(number)
            encoded = [topic.encode() for topic in fresh]
            new += topic_names.unlisted(txn, owner, names.epoch, encoded)
            size += sum(map(len, encoded))
            end, count = following, number + 1
            if len(holding) >= SEGMENT_TOPICS or len(new) >= NEW_TOPICS or size >= _SEGMENT_NAME_BYTES:
                break
        by_number: dict[int, bytes | bytearray] = {}
        while holding:
            topic, where = holding.popitem()
            key = topic_number(topic.encode())
            by_number[key] = bytes(sorted({*by_number[key], *where})) if key in by_number else where
        data = postings.encode(owner, lane, done, end, waiting[:count], unread, by_number)
        return Segment(lane, done, end, count, data, sorted(new), names, problems)

    def _topics_of(self, txn: Any, lane: int, first: int) -> list[str]:
        where = f"block {first} of stream {self.owner}"
        key = key_of(BLOCKS, self.owner, lane, first)
        value = txn.get(key)
        if value is None:
            raise CorruptionError(f"{where} has vanished")
        if blocks.read_header(value, where=where).key != BlockKey(BLOCKS, self.owner, lane, first):
            raise CorruptionError(f"{where}: not the block that belongs here")
        return blocks.read_names(value, where=where)

    def write(self, txn: Any, segment: Segment) -> bool:
        """Write a segment, the topics it lists and how far the lane is indexed; it may be run again if that fails.

        Returns:
            False if the index is not what it was when the segment was planned: nothing was written, plan it again.
        Cost: 20 µs, and 2 µs for each topic that is listed; the commit takes 8 µs more for each, where they come in
            random order among a million, for each dirties a page.
        """
        owner, lane = self.owner, segment.lane
        try:
            known = read_names_row(txn, owner)
            progress = read_progress(txn, owner, lane)
        except CorruptionError:
            return False  # `plan` tells
        planned = segment.row
        names = known or topic_names.begin(planned.birth)
        if progress.indexed_to != segment.first or names._replace(first=0) != planned._replace(first=0):
            return False
        write_names_row(txn, owner, topic_names.append(txn, owner, names, segment.names))
        txn.put(key_of(POSTINGS, owner, lane, segment.first), segment.data)
        write_progress(txn, owner, lane, progress._replace(indexed_to=segment.end))
        return True

    def forget_below(self, txn: Any, lane: int, floor: int, limit: int = REMOVED_AT_ONCE) -> int:
        """Remove at most `limit` segments of a lane that lie below its floor, and a piece of the topics gone with them.

        Returns:
            how many records were removed or changed; 0 when there is nothing left to do.
        Cost: 20 µs where there is nothing to do, 2 µs a segment, 2 ms for a piece of the topics.
        """
        owner = self.owner
        try:
            progress = read_progress(txn, owner, lane)
        except CorruptionError:
            return 0  # `check` and `plan` tell
        start, stop = key_of(POSTINGS, owner, lane, 0), key_of(POSTINGS, owner, lane, table.LAST)
        firsts = list(map(table.number_of, islice(table.keys(txn, start, stop), limit + 1)))
        gone = [(first, end) for first, end in pairwise([*firsts, progress.indexed_to]) if end <= floor][:limit]
        for first, _ in gone:
            txn.delete(key_of(POSTINGS, owner, lane, first))
        if gone:
            write_progress(txn, owner, lane, progress._replace(begin=max(progress.begin, gone[-1][1])))
        return len(gone) + topic_names.forget(txn, owner)
