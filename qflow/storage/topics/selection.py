"""A filter against the index of a stream: which blocks may hold a message that it matches."""

from __future__ import annotations

import re
from array import array
from typing import Any

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage.log import table
from qflow.storage.log.keys import key_of
from qflow.storage.topics import names as topic_names
from qflow.storage.topics.postings import Postings, topic_number
from qflow.storage.topics.records import POSTINGS, NamesRow, blocks_between, read_names_row, read_progress

MOST_TOPICS = 16_384
"""A filter that matches more is *broad*: few blocks hold none of them, and all are candidates."""
SEGMENTS_AT_ONCE = 256
"""Looked at in one call."""


class Candidates(NamedTuple):
    """Blocks that may hold a message which a filter matches."""

    blocks: list[int]
    """First sequences, ascending. Some may be gone by now: below the floor, or damaged."""
    end: int
    """No other block holds one that lies at or after the position asked for and below this. Where it is that position,
    nothing is indexed from there on: the reader looks at the blocks."""
    problems: list[str]
    """What was found damaged, in words; all blocks it spoke for are candidates."""


class Selection:
    """What one filter of a subscription matches; used by one thread at a time.

    A filter without wildcards is a topic's number, and never looks at the list of names. One with wildcards reads that
    list once and then what was appended: a match is found whenever its topic appeared. It keeps 4 bytes a topic, and
    none where it is broad.

    More than it must, a selection names blocks: of topics with equal numbers, of segments that are damaged, of a broad
    filter all, and the block a damaged range begins in. It never names too few.
    """

    def __init__(self, owner: int, topic_filter: str) -> None:
        """Take a valid filter; see `topic_filter.check_filter`."""
        self._owner = owner
        levels = topic_filter.split("/")
        self._pattern: re.Pattern[bytes] | None = None
        self._known = array("I")
        self.broad = self._matches_nearly_all = topic_filter in ("#", "+/#")
        """All blocks are candidates, as far as is known now."""
        self._epoch = (-1, -1)
        self._piece = self._offset = 0
        self._seen = (-1, -1)
        if levels[-1] == "#" or "+" in levels:
            self._pattern = topic_names.pattern_of(topic_filter)
        else:
            self._known.append(topic_number(topic_filter.encode()))

    def blocks(self, txn: Any, lane: int, position: int, limit: int) -> Candidates:
        """Return up to `limit` blocks that may hold a match at or after a position of a lane.

        A call looks at `SEGMENTS_AT_ONCE` segments at most, and may so return no block where there are some later: go
        on from `end`. The list of names is read to its end, which takes 0.1 µs a name the first time.
        """
        problems: list[str] = []
        try:
            names = read_names_row(txn, self._owner)
            progress = read_progress(txn, self._owner, lane)
        except CorruptionError as error:
            return Candidates([], position, [str(error)])
        if names is None or position >= progress.indexed_to:
            return Candidates([], position, [])
        wanted = self._resolve(txn, names, problems)
        at = max(position, progress.begin)
        found: list[int] = []
        for _ in range(SEGMENTS_AT_ONCE):
            if at >= progress.indexed_to:
                break
            try:
                segment = segment_at(txn, self._owner, lane, at)
                stop = min(segment.end, progress.indexed_to)
                candidates = segment.find(wanted, at)
            except CorruptionError as error:
                problems.append(str(error))
                stop = min(next_segment(txn, self._owner, lane, at), progress.indexed_to)
                candidates = blocks_between(txn, self._owner, lane, at, stop, limit + 2)
            for first in candidates:
                if first >= stop:
                    break
                if found and first <= found[-1]:
                    continue
                if len(found) == limit:
                    return Candidates(found, first, problems)
                found.append(first)
            at = stop
        return Candidates(found, at, problems)

    def _resolve(self, txn: Any, row: NamesRow, problems: list[str]) -> array[int] | None:
        """Return the numbers of the topics that match, ascending, or None where all blocks are candidates."""
        if self._pattern is None:
            return self._known
        if self._matches_nearly_all:
            return None
        if self._epoch != (row.birth, row.epoch):  # what was listed long ago is gone, and need not be kept
            self._epoch = (row.birth, row.epoch)
            self._piece, self._offset, self._seen = row.first, 0, (-1, -1)
            self._known, self.broad = array("I"), False
        if self._seen != (row.next, row.tail) and not self.broad:
            known = set(self._known)
            for number in range(max(self._piece, row.first), row.next):
                try:
                    text = topic_names.read_piece(txn, self._owner, number)
                except CorruptionError as error:
                    problems.append(str(error))
                    self.broad = True
                    break
                start = self._offset if number == self._piece else 0
                known.update(map(topic_number, self._pattern.findall(text, start)))
                self._piece, self._offset = number, len(text) - 1
                if len(known) > MOST_TOPICS:
                    self.broad = True
                    break
            self._known = array("I", sorted(known) if not self.broad else ())
            self._seen = (row.next, row.tail)
        return None if self.broad else self._known


def segment_at(txn: Any, owner: int, lane: int, position: int) -> Postings:
    """Return the segment that speaks for a position, a view that ends with the transaction.

    Raises:
        CorruptionError: there is none, or its head is damaged.
    """
    key = key_of(POSTINGS, owner, lane, position)
    with txn.cursor() as cursor:
        if table.at_or_before(cursor, key):
            first = table.number_of(bytes(cursor.key()))
            segment = Postings(cursor.value(), owner, lane, first)
            if segment.end > position:
                return segment
    raise CorruptionError(f"the postings for {position} of stream {owner}, lane {lane} have vanished")


def next_segment(txn: Any, owner: int, lane: int, position: int) -> int:
    """Return where the first segment begins after a position; a number above all sequences if there is none."""
    return table.next_number(txn, key_of(POSTINGS, owner, lane, position + 1))
