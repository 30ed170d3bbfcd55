"""A stream's log with an index, without a broker: blocks with topics, and what a plain scan of them says."""

from __future__ import annotations

from typing import Any

from qflow.message import LANE_SHIFT
from qflow.storage import encoding
from qflow.storage.blocks import NO_PREVIOUS, BlockKey
from qflow.storage.log.keys import BLOCKS, key_of
from qflow.storage.log.rows import Row, write_row
from qflow.storage.topics.index import TopicIndex
from qflow.storage.topics.records import read_progress
from qflow.storage.topics.selection import Selection
from qflow.streams.topic_filter import matches

OWNER = 7
Block = tuple[int, int, list[str]]
"""First sequence, where the next one begins or may begin, topics."""


class Indexed:
    """A stream in one transaction, and a model of it."""

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        self.index = TopicIndex(OWNER)
        self.index.check(txn)
        self.lanes: dict[int, list[Block]] = {}
        self.floors: dict[int, int] = {}

    def publish(self, lane: int, topics: list[str]) -> int:
        """Write one block of a lane; return its first sequence."""
        known = self.lanes.setdefault(lane, [])
        self.floors.setdefault(lane, lane << LANE_SHIFT)
        first = known[-1][1] if known else lane << LANE_SHIFT
        key = BlockKey(BLOCKS, OWNER, lane, first)
        self.txn.put(key_of(*key), encoding.encode(key, [b"body"] * len(topics), topics=topics))
        known.append((first, first + len(topics), topics))
        write_row(self.txn, OWNER, lane, self.row(lane))
        return first

    def row(self, lane: int) -> Row:
        known = self.lanes.get(lane)
        if not known:
            return Row(lane << LANE_SHIFT, lane << LANE_SHIFT, tail=NO_PREVIOUS)
        return Row(next=known[-1][1], floor=self.floors[lane], tail=known[-1][0])

    def indexed_to(self, lane: int) -> int:
        """Return below which sequence segments speak for a lane."""
        return read_progress(self.txn, OWNER, lane).indexed_to

    def index_all(self, least: int = 1) -> list[str]:
        """Index what can be; return what was wrong with it."""
        problems: list[str] = []
        for lane in self.lanes:
            while segment := self.index.plan(self.txn, lane, self.row(lane), least):
                assert self.index.write(self.txn, segment)
                problems += segment.problems
        return problems

    def retain(self, lane: int, floor: int, calls: int = 1000) -> None:
        """Raise a floor, and remove the blocks below it and what the index knows of them, in so many calls at most."""
        self.floors[lane] = max(self.floors[lane], floor)
        for first, end, _ in self.lanes[lane][:-1]:
            if end <= floor:
                self.txn.delete(key_of(BLOCKS, OWNER, lane, first))
        write_row(self.txn, OWNER, lane, self.row(lane))
        while calls and self.index.forget_below(self.txn, lane, self.floors[lane], limit=2):
            calls -= 1

    def expected(self, topic_filter: str, lane: int, position: int, end: int | None = None) -> list[int]:
        """Return the indexed blocks that a scan finds: with a match, and a sequence at or after `position` that is kept.

        Those that begin at `end` or after it are left out.
        """
        end = self.indexed_to(lane) if end is None else end
        position = max(position, self.floors.get(lane, 0))
        return [
            first
            for first, stop, topics in self.lanes.get(lane, ())
            if stop > position and first < end and any(matches(topic_filter, topic) for topic in topics)
        ]

    def found(
        self, selection: Selection, lane: int, position: int, limit: int = 1000
    ) -> tuple[list[int], int, list[str]]:
        """Return what a selection names of the blocks that are kept, in as many calls as that takes."""
        names: list[int] = []
        problems: list[str] = []
        begin = position
        while True:
            candidates = selection.blocks(self.txn, lane, position, limit)
            problems += candidates.problems
            assert len(candidates.blocks) <= limit
            assert candidates.blocks == sorted(set(candidates.blocks))
            names += [first for first in candidates.blocks if not names or first > names[-1]]
            assert candidates.end >= position
            if candidates.end == position:
                break
            position = candidates.end
        floor = max(begin, self.floors.get(lane, 0))
        kept = {first for first, stop, _ in self.lanes.get(lane, ()) if stop > floor}
        return [first for first in names if first in kept], position, problems

    def records(self, table: int) -> dict[bytes, bytes]:
        """Return all records of one table of the index."""
        with self.txn.cursor() as cursor:
            found = cursor.iternext() if cursor.set_range(bytes((table,))) else ()
            return {bytes(key): bytes(value) for key, value in found if bytes(key)[0] == table}
