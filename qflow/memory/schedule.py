"""A schedule: the messages of one queue that wait for a moment, in order of (due time, sequence).

When memory is short, the owner spills the far end: `claim_far`, then `packed` and the writing without the lock, then
`chunk_spilled`. A spilled chunk that may hold the next due message is restored piece by piece: `claim_next`, then the
reading and `unpacked` without the lock, then `restored`. Chunks overlap in time, so many can be due at once; `take`
never passes a message that one of them might precede. A moving chunk that comes due is taken back, which makes its
claim void; so does a purge.

One message leaves from wherever it is: from a group in memory by `take_out`; in the spill store it is made the first of
a chunk of its own by `cut_off`, and that is restored. `seeking` finds it.

No I/O, no locks, no clock: the queue that owns the schedule holds its lock around every call. Whoever made a claim
calls `unclaim` on every way out; a claim that was settled or is void is none, and that does nothing.

Cost in CPython 3.11, all calls together, for a message of 100 bytes with a random due time that is added, spilled in
chunks of 1 MiB, restored and taken: 0.6 µs in batches of 1,000 (0.4 of it without the lock), 3.5 µs one by one (0.9 to
1.2 of it without the lock).
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from operator import attrgetter
from typing import Any

from qflow.delivery import Segment
from qflow.memory.chunk import CHUNK_BYTES, SEQUENCE_BYTES, Chunk, Unpacked
from qflow.memory.group import AHEAD, GROUP_BYTES, Group, Key, count_back, cut, holds, joined, weight
from qflow.memory.shelves import Shelves, Whereabouts, note_arrival
from qflow.message import OVERHEAD_BYTES

GROUPS_AT_ONCE = 2048
"""Spilled at once, at most: how often each was delivered is noted elsewhere then."""
_FREED_BYTES = OVERHEAD_BYTES - SEQUENCE_BYTES
_bound = attrgetter("bound")


class Schedule:
    """See the module. Cost: O(log groups) a group added; O(1) for each that is taken, claimed or restored."""

    __slots__ = ("_position", "_youngest", "claims", "shelves", "spilled", "spilled_bytes", "spilled_messages")

    def __init__(self) -> None:
        self.shelves = Shelves()
        """What is in memory; what it counts includes what is moving."""
        self.spilled: list[Chunk] = []
        """In order of the least that their next message may be."""
        self.spilled_messages = 0
        self.spilled_bytes = 0
        self.claims: dict[object, Chunk] = {}
        """Decides which claims stand; each is on a spilled chunk, or on one that is moving: still in memory."""
        self._youngest: Chunk | None = None  # of the spilled ones: it may be continued
        self._position = 0

    # Counts ------------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> int:
        """How many there are. Cost: O(1)."""
        shelves = self.shelves
        if shelves.incoming:
            shelves.settle()
        return shelves.messages + self.spilled_messages

    @property
    def overhead_bytes(self) -> int:
        """What is charged for groups and spilled chunks: all but the records in memory. Cost: O(1).

        `claim_far` does not change it. It rises with `add`, `restored`, and by a group at most where a claim on a part
        of a group is given up or taken back.
        """
        shelves = self.shelves
        if shelves.incoming:
            shelves.settle()
        return shelves.overhead + CHUNK_BYTES * len(self.spilled) + SEQUENCE_BYTES * self.spilled_messages

    @property
    def charged(self) -> int:
        """What it is charged: its messages in memory, and what it needs for all of them. Cost: O(1)."""
        overhead = self.overhead_bytes
        return self.shelves.bytes + OVERHEAD_BYTES * self.shelves.messages + overhead

    def tally(self) -> Whereabouts:
        """Count messages and their bytes. Cost: O(1)."""
        shelves = self.shelves
        if shelves.incoming:
            shelves.settle()
        return Whereabouts(shelves.messages, shelves.bytes, self.spilled_messages, self.spilled_bytes)

    def next_due_ms(self) -> int | None:
        """Return when the next message is due at the earliest; None if there is none. Cost: O(claims)."""
        key = self.next_key()
        return None if key is None else key[0]

    def next_key(self) -> Key | None:
        """Return (due time, sequence): nothing comes before it; None if there is nothing. Cost: O(claims)."""
        shelves = self.shelves
        if shelves.incoming:
            shelves.settle()
        moving = self._moving_before(None) if self.claims else None
        keys: list[Key] = [group[:2] for group in shelves.head()]
        keys += [chunk.bound for chunk in self.spilled[:1]]
        if moving is not None:
            keys.append(moving.bound)
        return min(keys, default=None)

    # Taking ------------------------------------------------------------------------------------------------------

    def take(self, most: int, now_ms: int, segments: list[Segment], before: Key | None = None) -> int:
        """Move up to `most` due messages to `segments`, in order; return how many.

        With `before`, only what comes before that (due time, sequence).

        They are joined where sequences follow and marks are equal, with the last segment that was there, too.
        Stops before a message that a spilled chunk might precede: `claim_next` then has something. Takes back a moving
        chunk when it gets there.

        Cost: 0.05 µs a message of a batch, 1 µs a single one, 2 to 3 µs where only one is taken.
        """
        shelves = self.shelves
        if shelves.incoming:
            shelves.settle()
        bound = self._due_bound(now_ms)
        if before is not None:
            bound = min(bound, before)
        taken = 0
        while True:
            moving = self._moving_before(bound) if self.claims else None
            taken += shelves.hand_over(most - taken, bound if moving is None else moving.bound, segments)
            if moving is None or taken >= most:
                return taken
            self._take_back(moving)

    # Spilling ----------------------------------------------------------------------------------------------------

    def claim_far(self, claim: object, wanted_bytes: int) -> Chunk | None:
        """Claim messages of the far end for spilling: what frees `wanted_bytes`, or few groups, at least one.

        What a spilled chunk costs is reckoned with, so a few small messages alone free nothing, or less.

        Returns:
            A moving chunk, or None if nothing is in memory that is not moving.

        Cost: 0.02 µs a message of a batch, 0.3 µs a single one.
        """
        assert claim not in self.claims
        if self.shelves.incoming:
            self.shelves.settle()
        shelves = self.shelves.all
        if not shelves[0]:
            return None
        groups: list[Group] = []
        kept: list[Group] = []
        missing = wanted_bytes + CHUNK_BYTES
        count = size = index = 0
        at = len(shelves)
        while at and (missing > 0 or not groups):
            at -= 1
            shelf = shelves[at]
            shelf.put_in_order()
            index = len(shelf)
            while index and (missing > 0 or not groups):
                index -= 1
                group = shelf[index]
                members = len(group) - AHEAD
                length = len(group[AHEAD]) if members == 1 else sum(map(len, group[AHEAD:]))  # type: ignore[misc]
                if members > 1 and length + members * _FREED_BYTES > missing:
                    behind, length = count_back(group, missing, _FREED_BYTES)
                    if behind < members:
                        left, group = cut(group, behind)
                        kept.append(left)
                        members = behind
                groups.append(group)
                count += members
                size += length
                missing -= length + members * _FREED_BYTES + GROUP_BYTES
                if len(groups) >= GROUPS_AT_ONCE:
                    missing = 0
        groups.reverse()
        chunk = Chunk(self._position, groups, count, size, bool(kept))
        stay = at if at and not (index or kept) else at + 1
        looked = min(shelf.looked, index)
        # No call from here on.
        if stay > at:
            shelf[index:] = kept
            shelf.looked = looked
            shelf.seen = None
        del shelves[stay:]
        del self.shelves.lows[stay:]
        self._position += count
        chunk.claim = claim
        self.claims[claim] = chunk
        return chunk

    def chunk_spilled(self, claim: object, slots: Any) -> int | None:
        """Install a moving chunk that was written; return how many bytes of charge that freed.

        It continues the chunk written before it, where that makes one of two.

        Args:
            slots: where `packed` was written, in that order. It has a length, adds to others, and `take(n)` splits it.

        Returns:
            None if the claim does not stand: the slots are for the caller to free.
        """
        chunk = self.claims.get(claim)
        if chunk is None:
            return None
        count, size = chunk.count, chunk.weight.message_bytes
        assert len(chunk.sequences) == len(slots) == count
        grouped = chunk.groups_bytes
        chunk_bytes = SEQUENCE_BYTES * count
        shelves = self.shelves
        before = self._youngest
        if before is not None and before.goes_on_with(chunk):
            sequences = before.sequences + chunk.sequences
            slots = before.slots + slots
            largest, smallest = max(before.largest, chunk.largest), min(before.smallest, chunk.smallest)
            # No call from here on.
            before.sequences = sequences
            before.slots = slots
            before.largest = largest
            before.smallest = smallest
            before.last_due_ms = chunk.last_due_ms
            before.count += count
            before.weight.message_bytes += size
        else:
            chunk_bytes += CHUNK_BYTES
            place = bisect(self.spilled, chunk.bound, key=_bound)
            # No call from here on.
            chunk.slots = slots
            self.spilled[place:place] = (chunk,)
            self._youngest = chunk
        chunk.groups = []
        chunk.claim = None
        del self.claims[claim]
        shelves.messages -= count
        shelves.bytes -= size
        self.spilled_messages += count
        self.spilled_bytes += size
        shelves.overhead -= grouped
        return size + OVERHEAD_BYTES * count + grouped - chunk_bytes

    def unclaim(self, claim: object) -> None:
        """Give up what was claimed for spilling or restoring, if the claim still stands."""
        chunk = self.claims.get(claim)
        if chunk is None:
            return
        if chunk.slots is None:
            self._take_back(chunk)
            return
        # No call from here on.
        chunk.claim = None
        del self.claims[claim]

    # Restoring ---------------------------------------------------------------------------------------------------

    @property
    def next_away(self) -> Chunk | None:
        """The spilled chunk that may hold the next due message."""
        return self.spilled[0] if self.spilled else None

    def claim_next(self, claim: object, now_ms: int) -> Chunk | None:
        """Claim the spilled chunk that may hold the next due message, if nothing in memory comes before it.

        Returns:
            None too if somebody else has claimed it.
        """
        assert claim not in self.claims
        chunk = self.next_away
        if chunk is None or chunk.bound[0] > now_ms or chunk.claim is not None or self._resident_before(chunk.bound):
            return None
        return self.claim_spilled(claim, chunk)

    def claim_spilled(self, claim: object, chunk: Chunk) -> Chunk:
        """Claim a spilled chunk that nobody has claimed, wherever it comes."""
        # No call from here on.
        chunk.claim = claim
        self.claims[claim] = chunk
        return chunk

    def restored(self, claim: object, unpacked: Unpacked) -> Any:
        """Take the leading messages of a claimed chunk into memory; those that are lost are gone from the schedule.

        Args:
            unpacked: of the claimed chunk.

        Returns:
            The slots they had, for the caller to free; None if the claim does not stand, and nothing is changed.

        Cost: 0.01 µs a message, and for each shelf it belongs to, a sorting of that one by the next call.
        """
        chunk = self.claims.get(claim)
        if chunk is None:
            return None
        count, size = unpacked.messages, unpacked.message_bytes
        slots, rest = chunk.slots.take(count)
        sequences = chunk.sequences[count:]
        place = bisect_left(self.spilled, chunk.bound, key=_bound)
        weight = chunk.weight
        gone_bytes = size if sequences or weight.chunks > 1 else weight.message_bytes
        bound = (unpacked.due_ms, sequences[0]) if sequences else chunk.bound
        new_place = bisect(self.spilled, bound, key=_bound) - 1
        # No call from here on.
        del self.spilled[place]
        if sequences:
            self.spilled[new_place:new_place] = (chunk,)
        else:
            weight.chunks -= 1
            if self._youngest is chunk:
                self._youngest = None
        chunk.first += count
        chunk.count -= count
        weight.message_bytes -= gone_bytes
        chunk.sequences = sequences
        chunk.slots = rest
        chunk.bound = bound
        chunk.claim = None
        del self.claims[claim]
        self.spilled_messages -= count
        self.spilled_bytes -= gone_bytes
        self.shelves.incoming += unpacked.groups
        return slots

    def drop_all(self) -> tuple[list[Any], list[list[Group]]]:
        """Empty the schedule (purge); return the slots of what was spilled, and what was in memory.

        No claim stands afterwards.
        """
        slots = [chunk.slots for chunk in self.spilled]
        dropped = [self.shelves.incoming, *self.shelves.all]
        shelves = Shelves()
        shelves.sought = self.shelves.sought
        # No call from here on.
        self.shelves = shelves
        self.spilled = []
        self._youngest = None
        self.claims = {}
        self.spilled_messages = self.spilled_bytes = 0
        return slots, dropped

    # One message ------------------------------------------------------------------------------------------------------

    def take_back_with(self, sequence: int) -> Key | None:
        """Take back the moving chunk that holds a message; return its (due time, sequence), None if none does."""
        for chunk in self.moving():
            if any(holds(group, sequence) for group in chunk.groups):
                bound = chunk.bound
                self._take_back(chunk)
                return bound
        return None

    def has_spilled(self, chunk: Chunk) -> bool:
        """Tell whether a spilled chunk is there, and was not purged."""
        place = bisect_left(self.spilled, chunk.bound, key=_bound)
        return self.spilled[place : place + 1] == [chunk]

    def cut_off(self, chunk: Chunk, index: int, due_ms: int) -> Chunk:
        """Make what lies from `index` on in a spilled chunk that nobody has claimed a chunk of its own; return it.

        Both are charged as chunks, and share what they weigh: nobody knows how that is spread.

        Args:
            due_ms: the message there is not due before; higher than that of the first one where its sequence is lower.
        """
        if not 0 < index < chunk.count:
            return chunk
        right, sequences, slots = chunk.divided(index, due_ms)
        place = bisect(self.spilled, right.bound, key=_bound)
        # No call from here on.
        self.spilled[place:place] = (right,)
        if self._youngest is chunk:
            self._youngest = right
        chunk.weight.chunks += 1
        chunk.count = index
        chunk.sequences = sequences
        chunk.slots = slots
        return right

    # Inside ------------------------------------------------------------------------------------------------------

    def _due_bound(self, now_ms: int) -> Key:
        """Return what a message must come before to be due and preceded by no spilled one."""
        due: Key = (now_ms + 1,)
        return min(due, self.spilled[0].bound) if self.spilled else due

    def _resident_before(self, bound: Key) -> bool:
        shelves = self.shelves
        if shelves.incoming:
            shelves.settle()
        return any(group < bound for group in shelves.head()) or self._moving_before(bound) is not None

    def _moving_before(self, bound: Key | None) -> Chunk | None:
        """Return the moving chunk that comes first, if it comes before `bound`."""
        first = min(self.moving(), key=_bound, default=None)
        return first if first is None or bound is None or first.bound < bound else None

    def moving(self) -> list[Chunk]:
        """Return the chunks that are on their way to the spill store."""
        return [chunk for chunk in self.claims.values() if chunk.slots is None]

    def _take_back(self, moving: Chunk) -> None:
        """Put the groups of a moving chunk in their place again; its claim is void."""
        groups, shelves = moving.groups, self.shelves
        if shelves.sought:
            note_arrival(shelves.sought, groups)
        shelf = shelves.all[bisect(shelves.lows, groups[0]) - 1]
        shelf.put_in_order()
        index = bisect(shelf, groups[0]) - 1
        whole = joined(shelf[index], groups[0]) if moving.cut and index >= 0 else None
        if whole is not None:
            groups = groups[1:]
        count, size = weight(groups)
        charged = moving.groups_bytes
        looked = min(shelf.looked, max(0, index))
        # No call from here on.
        if whole is not None:
            shelf[index] = whole
            shelf.looked = looked
            shelf.seen = None
        shelves.incoming += groups
        del self.claims[moving.claim]
        moving.claim = None
        shelves.messages -= count
        shelves.bytes -= size
        shelves.overhead -= charged
        shelves.settle()
