"""Writing spreads: lanes that are in one state are left in one state, which is computed once for all of them.

What a spread leaves in tail blocks is remembered, so that they grow without being read. Lanes of which more must be
known, or to which something else happens in the same commit, are written as with any put. By the writer alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

from qflow.message import Record, lane_of
from qflow.named_tuples import NamedTuple
from qflow.storage import encoding
from qflow.storage.blocks import NO_PREVIOUS, BlockKey
from qflow.storage.contents import Content
from qflow.storage.encoding import Messages
from qflow.storage.environment import DAMAGE, Environment
from qflow.storage.log.alike import Alike
from qflow.storage.log.append import full_tail_bytes
from qflow.storage.log.broken_lanes import LaneBroken
from qflow.storage.log.calls import Calls
from qflow.storage.log.changes import Changes
from qflow.storage.log.keys import BLOCKS, key_of, pack_lane
from qflow.storage.log.lane import Lane
from qflow.storage.log.rows import Row, sealed_row
from qflow.storage.log.spread import Spread
from qflow.storage.log.table import LAST, NUMBER_BYTES

CONTENTS_KEPT = 64
"""So many contents of tail blocks are remembered: 1 MiB at most, and mostly 0.1."""
_ROW = LAST.to_bytes(NUMBER_BYTES, "big")


class Tail(NamedTuple):
    """What is known of the tail block of a lane that a spread has written last."""

    content: Content
    end: int
    """Its messages end there."""
    previous: int
    """Where the block before it begins."""


class State(NamedTuple):
    """How lanes are left that were in the same state."""

    row: Row
    value: bytes
    """The row as it is written."""
    next: int
    tail: Tail
    number: bytes
    """Where the tail block begins, as in its key."""
    block: Callable[[int], bytes]
    """Makes that block, given its owner."""


class SpreadOut(NamedTuple):
    """What a committed batch means for the lanes of its spreads that were written together."""

    spreads: list[Spread]
    lanes: list[Lane]
    states: list[State]
    records: list[Record]

    def rest(self) -> list[Lane]:
        """Return the lanes that are to be written as with any put."""
        if len(self.lanes) == len(self.spreads[0].lanes):
            return []
        written = set(self.lanes)
        return [lane for lane in self.spreads[0].lanes if lane not in written]

    def publish(self, env: Environment, call: Calls) -> None:
        """Make it visible."""
        spreads, lanes, states, records = self
        if not lanes:
            return
        count = len(records)
        env.messages += count * len(lanes)
        for lane, state in zip(lanes, states, strict=True):
            lane.row, lane.next, lane.tail, lane.written = state.row, state.next, state.tail, True
        begun = [state.next - count for state in states]
        firsts = begun
        for spread in spreads:
            spread.firsts.update(zip(lanes, firsts, strict=True))
            if spread is not spreads[-1]:
                firsts = [first + len(spread.records) for first in firsts]
        call(spreads[0].publish_all, lanes, begun, records, len(spreads), call)


class Spreading:
    """See the module. One a log."""

    def __init__(self) -> None:
        self._kept: deque[Content] = deque()

    def write(
        self, txn: Any, spreads: list[Spread], messages: Messages, busy: Container[Lane], now_ms: int, path: str
    ) -> SpreadOut:
        """Write spreads of the same lanes, `messages` together, into all those lanes that are in the result."""
        out = SpreadOut(spreads, [], [], messages.records)
        if len(encoding.split(messages.sizes)) > 1:
            return out
        lanes, states = out.lanes, out.states
        full_bytes = full_tail_bytes(len(spreads[0].lanes))
        after = _After(messages, now_ms, full_bytes)
        row: Row | None = None
        before = found = None
        first = -1
        current: list[Lane] = [spreads[0].lanes[0]]
        try:
            for lane in spreads[0].lanes:
                # A message that is not logged takes a number, and leaves row and tail as they are.
                if lane.row is not row or lane.tail is not before or before is None or lane.next != first:
                    current[0] = lane
                    if not lane.tail_is_last:
                        lane.find_tail(txn)
                    row, before, first = lane.row, lane.tail, lane.next
                    found = after.state(txn, lane)
                if found is not None and lane not in busy:
                    lanes.append(lane)
                    states.append(found)
            put = partial(_put, lanes, states, current)
            if isinstance(txn, Changes):
                txn.put_alike(_alike(lanes, states), put)
            else:
                put(txn)
        except DAMAGE as error:
            raise LaneBroken(current[0], error, path) from error
        self._keep(after.contents(), full_bytes)
        return out

    def _keep(self, contents: list[Content], full_bytes: int) -> None:
        """Remember contents of blocks that grow, in place of the oldest ones; forget what others hold."""
        kept = self._kept
        for content in contents:
            if content.block_bytes < full_bytes:
                kept.append(content)
            else:
                content.close()
        while len(kept) > CONTENTS_KEPT:
            kept.popleft().close()


class _After:
    """How lanes are left by some messages."""

    def __init__(self, messages: Messages, now_ms: int, full_bytes: int) -> None:
        self._messages = messages
        self._count = len(messages.records)
        self._size = sum(messages.sizes)
        self._now_ms = now_ms
        self._full_bytes = full_bytes
        self._fresh = Content.of(messages, now_ms)
        self._grown: dict[Content, Content | None] = {}
        self._read: dict[tuple[object, ...], Content] = {}
        self._states: dict[tuple[Row, int, Content | None, int], State] = {}

    def contents(self) -> list[Content]:
        """Return the contents of all tail blocks."""
        return [self._fresh, *filter(None, self._grown.values())]

    def state(self, txn: Any, lane: Lane) -> State | None:
        """Return how a lane is left; None if that takes a closer look."""
        row, first = lane.row, lane.next
        content: Content | None = None
        previous = row.tail
        if row.messages and row.tail != NO_PREVIOUS and self._size < self._full_bytes and row.tail != lane.full_tail:
            tail: Tail | None = lane.tail
            if tail is None or tail.end != first or (self._grows(tail.content) and not tail.content.is_open):
                tail = self._stored(txn, lane)
                if tail is None:
                    return None
            if self._grows(tail.content):
                content, previous = tail.content, tail.previous
        elif first <= row.tail < NO_PREVIOUS:
            return None
        key = (row, first, content, previous)
        if key not in self._states:
            self._states[key] = self._new_state(*key)
        return self._states[key]

    def _grows(self, content: Content) -> bool:
        """Tell whether a tail block is small enough to grow."""
        return content.block_bytes < self._full_bytes

    def _stored(self, txn: Any, lane: Lane) -> Tail | None:
        """Return what is known of the tail block of a lane when it is read."""
        row = lane.row
        key = BlockKey(BLOCKS, lane.owner, lane.lane, row.tail)
        block = txn.get(key_of(*key))
        found = None if block is None else Content.of_block(block, key)
        if found is None or row.tail + found[0].count != lane.next:
            return None
        return Tail(self._read.setdefault(found[0].key, found[0]), lane.next, found[1])

    def _new_state(self, row: Row, first: int, content: Content | None, previous: int) -> State:
        begin, grown = row.tail, None
        if content is not None:
            if content not in self._grown:
                self._grown[content] = content.grown(self._messages, self._now_ms)
            grown = self._grown[content]
        if grown is None:
            grown, begin, previous = self._fresh, first, row.tail
        following = first + self._count
        messages, size = row.messages + self._count, row.bytes + self._size
        left = Row(max(row.next, following), row.floor, messages, size, begin, row.marks, row.doubtful, row.referring)
        block = grown.blocks(BLOCKS, lane_of(first), begin, previous)
        number = begin.to_bytes(NUMBER_BYTES, "big")
        return State(left, sealed_row(left), following, Tail(grown, following, previous), number, block)


def _put(lanes: list[Lane], states: list[State], current: list[Lane], txn: Any) -> None:
    """Put rows and tail blocks."""
    with txn.cursor() as cursor:
        cursor.putmulti(_items(lanes, states, current))


def _alike(lanes: list[Lane], states: list[State]) -> list[Alike]:
    """Return what is put for lanes that are left in the same state, for each state."""
    groups: dict[int, tuple[State, list[int]]] = {}
    known: State | None = None
    for lane, state in zip(lanes, states, strict=True):
        if state is not known:
            known, owners = state, groups.setdefault(id(state), (state, []))[1]
        owners.append(lane.owner)
    return [Alike(state.number, owners, state.value, state.block(owners[0])) for state, owners in groups.values()]


def _items(lanes: list[Lane], states: list[State], current: list[Lane]) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values in order; `current` holds the lane of the last one."""
    known: State | None = None
    for lane, state in zip(lanes, states, strict=True):
        if state is not known:
            known, number, block, value = state, state.number, state.block, state.value
        current[0] = lane
        owner = lane.owner
        place = pack_lane(BLOCKS, owner, lane.lane)
        yield place + number, block(owner)
        yield place + _ROW, value
