"""A schedule: the messages of one queue that wait for a moment, in order of (due time, sequence).

    shelves   groups in memory
    moving    chunks of the far end that are on their way to the spill store; still in memory
    spilled   chunks in the spill store, sorted by the least that their next message may be

When memory is short, the owner spills the far end: `claim_far`, then `packed` and the writing without the lock, then
`chunk_spilled`. A spilled chunk that may hold the next due message is restored piece by piece: `claim_next`, then the
reading and `unpacked` without the lock, then `restored`. Chunks overlap in time, so many can be due at once; `take`
never passes a message that one of them might precede. A moving chunk that comes due is taken back, which makes its
claim void; so does a purge.

No I/O, no locks, no clock: the queue that owns the schedule holds its lock around every call. Whoever made a claim
calls `unclaim` on every way out; a claim that was settled or is void is none, and that does nothing.

Cost in CPython 3.11, all calls together, for a message of 100 bytes with a random due time that is added, spilled in
chunks of 1 MiB, restored and taken: 0.6 µs in batches of 1,000 (0.4 of it without the lock), 3.5 µs one by one (0.9 to
1.2 of it without the lock).
"""

from __future__ import annotations

import sys
from bisect import bisect, bisect_left
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any

from qflow.delivery import Segment
from qflow.memory.chunk import CHUNK_BYTES, SEQUENCE_BYTES, Chunk, Unpacked
from qflow.memory.group import AHEAD, GROUP_BYTES, Group, Key, count_back, cut, joined, marks_of, weight
from qflow.memory.shelves import Shelf, Shelves, Whereabouts
from qflow.message import OVERHEAD_BYTES, lowest_by_lane

_FREED_BYTES = OVERHEAD_BYTES - SEQUENCE_BYTES
_bound = attrgetter("bound")


class Schedule(Shelves):
    """See the module. Cost: O(log groups) a group added; O(1) for each that is taken, claimed or restored."""

    __slots__ = ("_claims", "_position", "_spilled", "_spilled_bytes", "_spilled_messages", "_youngest")

    def __init__(self) -> None:
        super().__init__()  # what it counts includes what is moving
        self._spilled: list[Chunk] = []
        self._youngest: Chunk | None = None  # of the spilled ones: it may be continued
        self._claims: dict[object, Chunk] = {}  # decides which claims stand
        self._position = 0
        self._spilled_messages = 0
        self._spilled_bytes = 0

    # Taking ------------------------------------------------------------------------------------------------------

    def take(self, most: int, now_ms: int, segments: list[Segment], before: Key | None = None) -> int:
        """Move up to `most` due messages to `segments`, in order; return how many.

        With `before`, only what comes before that (due time, sequence).

        They are joined where sequences follow and marks are equal, with the last segment that was there, too.
        Stops before a message that a spilled chunk might precede: `claim_next` then has something. Takes back a moving
        chunk when it gets there.

        Cost: 0.05 µs a message of a batch, 1 µs a single one, 2 to 3 µs where only one is taken.
        """
        if self.incoming:
            self._settle()
        bound = self._due_bound(now_ms)
        if before is not None:
            bound = min(bound, before)
        taken = 0
        while True:
            moving = self._moving_before(bound) if self._claims else None
            taken += self._hand_over(most - taken, bound if moving is None else moving.bound, segments)
            if moving is None or taken >= most:
                return taken
            self._take_back(moving)

    # Spilling ----------------------------------------------------------------------------------------------------

    def claim_far(self, claim: object, wanted_bytes: int) -> Chunk | None:
        """Claim messages of the far end for spilling: as many as free `wanted_bytes`, at least one.

        What a spilled chunk costs is reckoned with, so a few small messages alone free nothing, or less.

        Returns:
            A moving chunk, or None if nothing is in memory that is not moving.

        Cost: 0.02 µs a message of a batch, 0.3 µs a single one.
        """
        assert claim not in self._claims
        if self.incoming:
            self._settle()
        shelves = self._shelves
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
            self._put_in_order(shelf)
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
        groups.reverse()
        chunk = Chunk(self._position, groups, count, size, bool(kept))
        stay = at if at and not (index or kept) else at + 1
        # No call from here on.
        if stay > at:
            shelf[index:] = kept
            shelf.seen = None
        del shelves[stay:]
        del self._lows[stay:]
        self._position += count
        chunk.claim = claim
        self._claims[claim] = chunk
        return chunk

    def chunk_spilled(self, claim: object, slots: Any) -> int | None:
        """Install a moving chunk that was written; return how many bytes of charge that freed.

        It continues the chunk written before it, where that makes one of two.

        Args:
            slots: where `packed` was written, in that order. It has a length, adds to others, and `take(n)` splits it.

        Returns:
            None if the claim does not stand: the slots are for the caller to free.
        """
        chunk = self._claims.get(claim)
        if chunk is None:
            return None
        count, size = chunk.count, chunk.message_bytes
        assert len(chunk.sequences) == len(slots) == count
        grouped = chunk.groups_bytes
        chunk_bytes = SEQUENCE_BYTES * count
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
            before.message_bytes += size
            before.logged += chunk.logged
            before.logged_bytes += chunk.logged_bytes
        else:
            chunk_bytes += CHUNK_BYTES
            place = bisect(self._spilled, chunk.bound, key=_bound)
            # No call from here on.
            chunk.slots = slots
            self._spilled[place:place] = (chunk,)
            self._youngest = chunk
        chunk.groups = []
        chunk.claim = None
        del self._claims[claim]
        self._messages -= count
        self._bytes -= size
        self._spilled_messages += count
        self._spilled_bytes += size
        self._overhead += chunk_bytes - grouped
        return size + OVERHEAD_BYTES * count + grouped - chunk_bytes

    def unclaim(self, claim: object) -> None:
        """Give up what was claimed for spilling or restoring, if the claim still stands."""
        chunk = self._claims.get(claim)
        if chunk is None:
            return
        if chunk.slots is None:
            self._take_back(chunk)
            return
        # No call from here on.
        chunk.claim = None
        del self._claims[claim]

    # Restoring ---------------------------------------------------------------------------------------------------

    @property
    def next_away(self) -> Chunk | None:
        """The spilled chunk that may hold the next due message."""
        return self._spilled[0] if self._spilled else None

    def claim_next(self, claim: object, now_ms: int) -> Chunk | None:
        """Claim the spilled chunk that may hold the next due message, if nothing in memory comes before it.

        Returns:
            None too if somebody else has claimed it.
        """
        assert claim not in self._claims
        chunk = self.next_away
        if chunk is None or chunk.bound[0] > now_ms or chunk.claim is not None or self._resident_before(chunk.bound):
            return None
        # No call from here on.
        chunk.claim = claim
        self._claims[claim] = chunk
        return chunk

    def restored(self, claim: object, unpacked: Unpacked) -> Any:
        """Take the leading messages of a claimed chunk into memory; those that are lost are gone from the schedule.

        Args:
            unpacked: of the claimed chunk.

        Returns:
            The slots they had, for the caller to free; None if the claim does not stand, and nothing is changed.

        Cost: 0.01 µs a message, and for each shelf it belongs to, a sorting of that one by the next call.
        """
        chunk = self._claims.get(claim)
        if chunk is None:
            return None
        count, size = unpacked.messages, unpacked.message_bytes
        slots, rest = chunk.slots.take(count)
        sequences = chunk.sequences[count:]
        place = bisect_left(self._spilled, chunk.bound, key=_bound)
        gone_bytes = size if sequences else chunk.message_bytes
        given_back = SEQUENCE_BYTES * count + (0 if sequences else CHUNK_BYTES)
        bound = (unpacked.due_ms, sequences[0]) if sequences else chunk.bound
        new_place = bisect(self._spilled, bound, key=_bound) - 1
        # No call from here on.
        del self._spilled[place]
        if sequences:
            self._spilled[new_place:new_place] = (chunk,)
        elif self._youngest is chunk:
            self._youngest = None
        chunk.first += count
        chunk.count -= count
        chunk.message_bytes -= size
        chunk.logged -= unpacked.logged
        chunk.logged_bytes -= unpacked.logged_bytes
        chunk.sequences = sequences
        chunk.slots = rest
        chunk.bound = bound
        chunk.claim = None
        del self._claims[claim]
        self._spilled_messages -= count
        self._spilled_bytes -= gone_bytes
        self._overhead -= given_back
        self.incoming += unpacked.groups
        return slots

    def drop_all(self) -> list[Any]:
        """Empty the schedule (purge); return the slots of what was spilled. No claim stands afterwards."""
        slots = [chunk.slots for chunk in self._spilled]
        shelves = [Shelf()]
        # No call from here on.
        self.incoming = []
        self._shelves = shelves
        self._lows = [()]
        self._spilled = []
        self._youngest = None
        self._claims = {}
        self._messages = self._bytes = self._overhead = self._spilled_messages = self._spilled_bytes = 0
        return slots

    # Looking -----------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> int:
        """How many there are. Cost: O(1)."""
        if self.incoming:
            self._settle()
        return self._messages + self._spilled_messages

    @property
    def overhead_bytes(self) -> int:
        """What is charged for groups and spilled chunks: all but the records in memory. Cost: O(1).

        `claim_far` does not change it. It rises with `add`, `restored`, and by a group at most where a claim on a part
        of a group is given up or taken back.
        """
        if self.incoming:
            self._settle()
        return self._overhead

    @property
    def charged(self) -> int:
        """What it is charged: its messages in memory, and what it needs for all of them. Cost: O(1)."""
        overhead = self.overhead_bytes
        return self._bytes + OVERHEAD_BYTES * self._messages + overhead

    def tally(self) -> Whereabouts:
        """Count messages and their bytes. Cost: O(1)."""
        if self.incoming:
            self._settle()
        return Whereabouts(self._messages, self._bytes, self._spilled_messages, self._spilled_bytes)

    def next_due_ms(self) -> int | None:
        """Return when the next message is due at the earliest; None if there is none. Cost: O(claims)."""
        key = self.next_key()
        return None if key is None else key[0]

    def next_key(self) -> Key | None:
        """Return (due time, sequence): nothing comes before it; None if there is nothing. Cost: O(claims)."""
        if self.incoming:
            self._settle()
        moving = self._moving_before(None) if self._claims else None
        keys: list[Key] = [group[:2] for group in self._head()]
        keys += [chunk.bound for chunk in self._spilled[:1]]
        if moving is not None:
            keys.append(moving.bound)
        return min(keys, default=None)

    def due_resident(self, now_ms: int) -> bool:
        """Tell whether `take` would find something. Cost: O(claims)."""
        return self._resident_before(self._due_bound(now_ms))

    def entries(self) -> Iterator[tuple[int, int | None, str, int | None]]:
        """Yield (sequence, message bytes, "resident", due time) and (sequence, None, "spilled", None) of each message.

        Those in memory come in order, but for moving ones, which follow them; then those of each chunk in their order.
        """
        if self.incoming:
            self._settle()
        for due_ms, first, _, *records in self._resident():
            for sequence, record in enumerate(records, first):
                yield sequence, len(record), "resident", due_ms
        for chunk in self._spilled:
            for sequence in chunk.sequences:
                yield sequence, None, "spilled", None

    def marked(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first sequence, end, marks) of what is in memory and was delivered before."""
        if self.incoming:
            self._settle()
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
            if chunk.logged < 0 or not 0 <= chunk.logged_bytes <= chunk.message_bytes:
                yield f"{chunk!r} has {chunk.logged} logged messages, {chunk.logged_bytes} bytes"
            if chunk.claim is not None and self._claims.get(chunk.claim) is not chunk:
                yield f"{chunk!r} bears a claim that does not stand"
        count, size = weight([group for chunk in self._moving() for group in chunk.groups])
        count += sum(seen.messages for seen in self._seen())
        size += sum(seen.message_bytes for seen in self._seen())
        overhead = GROUP_BYTES * sum(map(len, self._shelves)) + sum(chunk.groups_bytes for chunk in self._moving())
        overhead += sum(CHUNK_BYTES + SEQUENCE_BYTES * chunk.count for chunk in self._spilled)
        for what, counted, recount in (
            ("messages in memory", self._messages, count),
            ("bytes in memory", self._bytes, size),
            ("spilled messages", self._spilled_messages, sum(chunk.count for chunk in self._spilled)),
            ("spilled bytes", self._spilled_bytes, sum(chunk.message_bytes for chunk in self._spilled)),
            ("bytes for groups and chunks", self._overhead, overhead),
        ):
            if counted != recount:
                yield f"{counted} {what} are counted, a recount gives {recount}"

    # Inside ------------------------------------------------------------------------------------------------------

    def _take_back(self, moving: Chunk) -> None:
        """Put the groups of a moving chunk in their place again; its claim is void."""
        groups = moving.groups
        shelf = self._shelves[bisect(self._lows, groups[0]) - 1]
        self._put_in_order(shelf)
        index = bisect(shelf, groups[0]) - 1
        whole = joined(shelf[index], groups[0]) if moving.cut and index >= 0 else None
        if whole is not None:
            groups = groups[1:]
        count, size = weight(groups)
        charged = moving.groups_bytes
        # No call from here on.
        if whole is not None:
            shelf[index] = whole
            shelf.seen = None
        self.incoming += groups
        del self._claims[moving.claim]
        moving.claim = None
        self._messages -= count
        self._bytes -= size
        self._overhead -= charged
        self._settle()

    def _due_bound(self, now_ms: int) -> Key:
        """Return what a message must come before to be due and preceded by no spilled one."""
        due: Key = (now_ms + 1,)
        return min(due, self._spilled[0].bound) if self._spilled else due

    def _resident_before(self, bound: Key) -> bool:
        if self.incoming:
            self._settle()
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
