"""Whether the index of a stream hides nothing: every topic of every indexed block is found by it.

Done in steps, each in a transaction of its own; between them the owner may index more, or forget what retention took.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

from qflow.errors import CorruptionError
from qflow.storage import blocks
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.log.rows import read_row
from qflow.storage.topics import names as topic_names
from qflow.storage.topics.postings import Postings, topic_number
from qflow.storage.topics.records import (
    NamesRow,
    any_left,
    blocks_between,
    progress_of_lanes,
    read_names_row,
    read_progress,
)
from qflow.storage.topics.selection import next_segment, segment_at

PIECES_AT_ONCE = 64
"""Pieces of the list of names read in one step: 1 MiB."""
_ALL = 2**62


class IndexCheck:
    """A walk through the index of one stream: first the list of names, then the segments of each lane.

    It keeps 4 bytes a topic.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._problems: list[str] = []
        self._birth: int | None = None
        self._piece = self._pieces_end = 0
        self._numbers = array("I")
        self._listed: array[int] | None = None
        """Numbers of all names that are listed, ascending, once the list is read."""
        self._list_is_whole = True
        self._lanes: list[tuple[int, int]] = []
        """Each lane that is left, and how far it was indexed in the beginning."""
        self._position = 0

    def take_problems(self) -> list[str]:
        """Return what was found since the last call, in words."""
        found, self._problems = self._problems, []
        return found

    def step(self, txn: Any) -> bool:
        """Look at a part; return whether there is more. Raises CorruptionError: nothing counts as indexed."""
        row = read_names_row(txn, self._owner)
        if row is None:
            if self._birth is None and any_left(txn, self._owner):
                raise CorruptionError("its index of topics has no row; it is made anew when the spool is opened")
            return False
        if self._birth is None:
            self._birth, self._piece, self._pieces_end = row.birth, row.first, row.next
            progress = progress_of_lanes(txn, self._owner)
            self._lanes = [(lane, progress[lane].indexed_to) for lane in sorted(progress, reverse=True)]
        if row.birth != self._birth:
            return False  # it was made anew
        if self._listed is None:
            self._read_names(txn, row)
            return True
        if not self._lanes:
            return False
        lane, indexed_to = self._lanes[-1]
        if not self._check_segment(txn, lane, indexed_to):
            self._lanes.pop()
            self._position = 0
        return bool(self._lanes)

    def _read_names(self, txn: Any, row: NamesRow) -> None:
        self._piece = max(self._piece, row.first)
        stop = min(self._piece + PIECES_AT_ONCE, self._pieces_end)
        while self._piece < stop:
            try:
                text = topic_names.read_piece(txn, self._owner, self._piece)
            except CorruptionError as error:
                self._problems.append(str(error))
                self._list_is_whole = False
            else:
                self._numbers.extend(topic_number(name) for name in text.split(b"\0") if name)
            self._piece += 1
        if self._piece >= self._pieces_end:
            self._listed = array("I", sorted(self._numbers))
            self._numbers = array("I")

    def _check_segment(self, txn: Any, lane: int, indexed_to: int) -> bool:
        """Check the next segment of a lane; return whether there may be another one."""
        progress = read_progress(txn, self._owner, lane)
        floor = read_row(txn, self._owner, lane).floor
        if progress.begin > floor and not self._position:
            self._problems.append(f"its index begins at {progress.begin} of lane {lane}, above the floor {floor}")
        position = max(self._position, progress.begin, floor)
        if position >= indexed_to:
            return False
        try:
            segment = segment_at(txn, self._owner, lane, position)
            self._position = segment.end
            self._compare(txn, lane, segment, max(position, segment.first))
        except CorruptionError as error:
            self._problems.append(str(error))
            self._position = next_segment(txn, self._owner, lane, position)
        return self._position < indexed_to

    def _compare(self, txn: Any, lane: int, segment: Postings, position: int) -> None:
        assert self._listed is not None
        holding: dict[str, list[int]] = {}
        present = blocks_between(txn, self._owner, lane, position, segment.end, _ALL)
        known = set(segment.blocks)
        for first in present:
            if not segment.first <= first < segment.end:
                continue
            if first not in known:
                self._problems.append(f"{segment.where} leave out block {first}")
                continue
            value = txn.get(key_of(BLOCKS, self._owner, lane, first))
            try:
                for name in blocks.read_names(value, where=f"block {first}"):
                    holding.setdefault(name, []).append(first)
            except CorruptionError:
                continue  # whoever reads the partition names it
        for name, firsts in holding.items():
            number = topic_number(name.encode())
            found = segment.find([number], segment.first)
            missing = sorted(set(firsts).difference(found))
            if missing:
                self._problems.append(f"{segment.where} leave out topic {name!r:.200} in block {missing[0]}")
            at = bisect_left(self._listed, number)
            if self._list_is_whole and (at == len(self._listed) or self._listed[at] != number):
                self._problems.append(f"topic {name!r:.200} is in {segment.where} and not in the list of topics")
