"""What a schedule holds, and where: counted, listed, checked. The part of a `Schedule` that changes nothing.

shelves   groups in memory
moving    chunks of the far end that are on their way to the spill store; still in memory
spilled   chunks in the spill store, sorted by the least that their next message may be
"""

from __future__ import annotations

import sys
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from qflow.memory.chunk import CHUNK_BYTES, SEQUENCE_BYTES, Chunk
from qflow.memory.group import GROUP_BYTES, Group, Key, marks_of, weight
from qflow.memory.shelves import Shelves, Whereabouts
from qflow.message import OVERHEAD_BYTES, lowest_by_lane

_bound = attrgetter("bound")


class Inventory(Shelves):
    """See the module."""

    __slots__ = ("_claims", "_position", "_spilled", "_spilled_bytes", "_spilled_messages", "_youngest")

    def __init__(self) -> None:
        super().__init__()  # what it counts includes what is moving
        self._spilled: list[Chunk] = []
        self._youngest: Chunk | None = None  # of the spilled ones: it may be continued
        self._claims: dict[object, Chunk] = {}  # decides which claims stand
        self._position = 0
        self._spilled_messages = 0
        self._spilled_bytes = 0

    @property
    def messages(self) -> int:
        """How many there are. Cost: O(1)."""
        if self.incoming:
            self.settle()
        return self._messages + self._spilled_messages

    @property
    def overhead_bytes(self) -> int:
        """What is charged for groups and spilled chunks: all but the records in memory. Cost: O(1).

        `claim_far` does not change it. It rises with `add`, `restored`, and by a group at most where a claim on a part
        of a group is given up or taken back.
        """
        if self.incoming:
            self.settle()
        return self._overhead

    @property
    def charged(self) -> int:
        """What it is charged: its messages in memory, and what it needs for all of them. Cost: O(1)."""
        overhead = self.overhead_bytes
        return self._bytes + OVERHEAD_BYTES * self._messages + overhead

    def tally(self) -> Whereabouts:
        """Count messages and their bytes. Cost: O(1)."""
        if self.incoming:
            self.settle()
        return Whereabouts(self._messages, self._bytes, self._spilled_messages, self._spilled_bytes)

    def next_due_ms(self) -> int | None:
        """Return when the next message is due at the earliest; None if there is none. Cost: O(claims)."""
        key = self.next_key()
        return None if key is None else key[0]

    def next_key(self) -> Key | None:
        """Return (due time, sequence): nothing comes before it; None if there is nothing. Cost: O(claims)."""
        if self.incoming:
            self.settle()
        moving = self._moving_before(None) if self._claims else None
        keys: list[Key] = [group[:2] for group in self._head()]
        keys += [chunk.bound for chunk in self._spilled[:1]]
        if moving is not None:
            keys.append(moving.bound)
        return min(keys, default=None)

    def entries(self) -> Iterator[tuple[int, int | None, str, int | None]]:
        """Yield (sequence, message bytes, "resident", due time) and (sequence, None, "spilled", None) of each message.

        Those in memory come in order, but for moving ones, which follow them; then those of each chunk in their order.
        """
        if self.incoming:
            self.settle()
        for due_ms, first, _, *records in self._resident():
            for sequence, record in enumerate(records, first):
                yield sequence, len(record), "resident", due_ms
        for chunk in self._spilled:
            for sequence in chunk.sequences:
                yield sequence, None, "spilled", None

    def groups_from(self, start: Key, most: int) -> tuple[list[Group], Key | None]:
        """Return groups on shelves, in order, from this (due time, sequence) on: `most`, and the rest of a shelf.

        Beside them where to go on, None at the end. Cost: 0.01 µs a group; 0.1 where they are put in order.
        """
        if self.incoming:
            self.settle()
        groups: list[Group] = []
        at = max(0, bisect(self._lows, start) - 1)
        for shelf in self._shelves[at:]:
            if len(groups) >= most:
                return groups, self._lows[at]
            self._put_in_order(shelf)
            groups += shelf[bisect_left(shelf, start) :]
            at += 1
        return groups, None

    def moving_groups(self) -> list[list[Group]]:
        """Return what is on its way to the spill store, by chunk."""
        return [[*chunk.groups] for chunk in self._moving()]

    def marked(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first sequence, end, marks) of what is in memory and was delivered before."""
        if self.incoming:
            self.settle()
        for _, first, tag, *records in self._resident():
            if marks_of(tag):
                yield first, first + len(records), marks_of(tag)

    @property
    def spilled(self) -> list[Chunk]:
        """The spilled chunks."""
        return self._spilled.copy()

    def lowest(self) -> dict[int, int]:
        """Return the lowest sequence in memory, by lane, once `look` finds nothing to look at. Cost: O(shelves)."""
        moving = [group[1] for chunk in self._moving() for group in chunk.groups]
        return lowest_by_lane(moving + [low for seen in self._seen() for low in seen.lowest.values()])

    def problems(self) -> list[str]:
        """Recount, and check the rules; return what is wrong, in words. Cost: O(messages)."""
        self.begin_check()
        self.look(sys.maxsize)
        return list(self.problems_seen())

    def problems_seen(self) -> Iterator[str]:
        """Do the same once `look` finds nothing to look at. Cost: O(shelves + spilled chunks)."""
        yield from self._shelf_problems()
        for one, two in pairwise(self._spilled):
            if one.bound >= two.bound:
                yield f"{one!r} is followed by {two!r}"
        for chunk in self._spilled:
            if not chunk.count == len(chunk.sequences) == len(chunk.slots) > 0 or chunk.groups:
                yield f"{chunk!r} has {len(chunk.sequences)} sequences and {len(chunk.slots)} slots"
            if chunk.claim is not None and self._claims.get(chunk.claim) is not chunk:
                yield f"{chunk!r} bears a claim that does not stand"
        weights = Counter(chunk.weight for chunk in self._spilled)
        for held, chunks in weights.items():
            if held.chunks != chunks:
                yield f"{chunks} chunks weigh {held.message_bytes} bytes together, and are taken for {held.chunks}"
        count, size = weight([group for chunk in self._moving() for group in chunk.groups])
        count += sum(seen.messages for seen in self._seen())
        size += sum(seen.message_bytes for seen in self._seen())
        overhead = GROUP_BYTES * sum(map(len, self._shelves)) + sum(chunk.groups_bytes for chunk in self._moving())
        overhead += sum(CHUNK_BYTES + SEQUENCE_BYTES * chunk.count for chunk in self._spilled)
        for what, counted, recount in (
            ("messages in memory", self._messages, count),
            ("bytes in memory", self._bytes, size),
            ("spilled messages", self._spilled_messages, sum(chunk.count for chunk in self._spilled)),
            ("spilled bytes", self._spilled_bytes, sum(held.message_bytes for held in weights)),
            ("bytes for groups and chunks", self._overhead, overhead),
        ):
            if counted != recount:
                yield f"{counted} {what} are counted, a recount gives {recount}"

    # Inside ------------------------------------------------------------------------------------------------------

    def _due_bound(self, now_ms: int) -> Key:
        """Return what a message must come before to be due and preceded by no spilled one."""
        due: Key = (now_ms + 1,)
        return min(due, self._spilled[0].bound) if self._spilled else due

    def _resident_before(self, bound: Key) -> bool:
        if self.incoming:
            self.settle()
        return any(group < bound for group in self._head()) or self._moving_before(bound) is not None

    def _moving_before(self, bound: Key | None) -> Chunk | None:
        """Return the moving chunk that comes first, if it comes before `bound`."""
        first = min(self._moving(), key=_bound, default=None)
        return first if first is None or bound is None or first.bound < bound else None

    def _moving(self) -> list[Chunk]:
        return [chunk for chunk in self._claims.values() if chunk.slots is None]

    def _resident(self) -> Iterator[Group]:
        """Yield the groups in memory, those on shelves in order."""
        yield from self._shelved()
        for chunk in self._moving():
            yield from chunk.groups
