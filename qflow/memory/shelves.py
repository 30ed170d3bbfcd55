"""Shelves: groups in memory, in order of (due time, sequence). The lower half of a schedule.

A shelf is a list of groups, all of them before those of the next shelf. A shelf in the middle is in no order: groups
are added at its end, and it is sorted when it is split, or needed because it has become the first or the last one.
(Finding the exact place among 160,000 groups takes longer than all else about adding one, for it misses the caches.)

Plain lists, no library's: those change several lists in steps, and an interrupt between two of them would tear the
order. Here every change is a straight line without a call, because an interrupt can strike at a call and nowhere else.
"""

from __future__ import annotations

import sys
from bisect import bisect, bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

from qflow.delivery import Segment
from qflow.memory.group import (
    AHEAD,
    GROUP_BYTES,
    Group,
    Key,
    by_lateness,
    cut,
    expiries_of,
    groups_of,
    holds,
    segments_of,
    tag_of,
    weight,
)
from qflow.message import Record
from qflow.named_tuples import NamedTuple

SHELF = 256
"""A shelf has at most twice as many groups."""
LATE_WORTH = 3
"""Messages of which it takes as long to see that they have not expired as to take a group out that has."""
NEVER_MS = sys.maxsize


class Whereabouts(NamedTuple):
    """How many messages are where, and their bytes."""

    resident_messages: int
    resident_bytes: int
    spilled_messages: int
    spilled_bytes: int


class Seen(NamedTuple):
    """What a check has found on a shelf."""

    problems: list[str]
    messages: int
    message_bytes: int
    lowest: dict[int, int]
    """The lowest sequence of each lane."""
    first: Group
    last: Group


class Shelf(list[Group]):
    """Groups, in order or not."""

    __slots__ = ("in_order", "looked", "seen", "soonest_ms")

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        super().__init__(groups)
        self.seen: Seen | None = None
        """What a check has found; None after a change."""
        self.in_order = False
        """It was put in order because that was needed, and what is added is added in its place if that is one."""
        self.looked = 0
        self.soonest_ms = NEVER_MS
        """So many groups at its beginning `take_expired` has looked at, and nothing in them expires before."""

    def put_in_order(self) -> None:
        """Sort it, unless it is in order."""
        if not self.in_order:
            if self.looked < len(self):
                self.looked = 0
            self.sort()
            self.in_order = True


class Sought:
    """A message that somebody looks for, some shelves at a time."""

    __slots__ = ("arrived", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.arrived = False
        """It was put on a shelf meanwhile, perhaps on one that was looked at before."""


class Shelves:
    """See the module. Cost: O(log groups) a group added, O(1) a group taken; sorting included."""

    __slots__ = ("_looked_to", "all", "bytes", "incoming", "lows", "messages", "overhead", "sought")

    def __init__(self) -> None:
        self.incoming: list[Group] = []
        """Groups on the way to their shelf. What is added to it (by `+= groups_of(...)`) belongs to the schedule; the
        next call puts it in its place."""
        self.all = [Shelf()]  # at least one; none is empty, but a lone one
        self.lows: list[Key] = [()]  # for each shelf the least that belongs there: () for the first
        self.messages = 0
        self.bytes = 0
        self.overhead = 0
        self._looked_to: Key = ()  # `take_expired` goes on there
        self.sought: set[Sought] = set()

    def add(self, due_ms: int, first: int, records: list[Record], marks: int) -> None:
        """Add messages with sequences from `first` on, due at one time. All or nothing, if interrupted.

        Cost: 0.6 to 1 µs for one message; for more 2 µs, and 0.05 µs each.
        """
        if len(records) == 1 and not (self.incoming or self.sought):  # the common case, in less than half the time
            record = records[0]
            plain = type(record) is bytes
            group = (due_ms, first, tag_of(marks, messages=not plain), record if plain else record[:])
            shelf = self.all[bisect(self.lows, group) - 1]
            size = len(record)
            if not shelf.in_order and len(shelf) < 2 * SHELF:
                # No call from here on, so that an interrupt finds all of it done or nothing.
                shelf += (group,)
                shelf.seen = None
                self.messages += 1
                self.bytes += size
                self.overhead += GROUP_BYTES
                return
        self.incoming += groups_of(due_ms, first, records, marks)
        self.settle()

    def hand_over(self, most: int, bound: Key, segments: list[Segment]) -> int:
        """Move up to `most` messages that come before `bound` to `segments`; return how many.

        What follows on the last segment there, with the same marks, goes into that one.
        """
        if most <= 0:
            return 0
        shelves = self.all
        groups: list[Group] = []
        count = whole = 0  # messages; shelves that are used up
        while True:
            shelf = shelves[whole]
            shelf.put_in_order()
            part = 0  # groups of this one
            for group in islice(shelf, bisect_left(shelf, bound)):
                part += 1
                count += len(group) - AHEAD
                if count >= most:
                    break
            groups += shelf[:part]
            if count >= most or part < len(shelf) or whole + 1 == len(shelves):
                break
            whole += 1
        if not groups:
            return 0
        rest: list[Group] = []
        if count > most:
            groups[-1], cut_off = cut(groups[-1], count - most)
            rest.append(cut_off)
            count = most
        elif part == len(shelf) and whole + 1 < len(shelves):
            whole, part = whole + 1, 0
        handed, size = segments_of(groups)
        charged = GROUP_BYTES * (len(groups) - len(rest))
        looked = shelf.looked - part + len(rest) if shelf.looked >= part else 0
        last: list[Record] = []
        following: list[Record] = []
        if segments and segments[-1].marks == handed[0].marks:
            last = segments[-1].records
            if segments[-1].first + len(last) == handed[0].first:
                following = handed[0].records
                handed = handed[1:]
        # No call from here on.
        last += following
        segments += handed
        if part:
            shelf[:part] = rest
            shelf.looked = looked
            shelf.seen = None
        del shelves[:whole]
        self.lows[: whole + 1] = ((),)
        self.messages -= count
        self.bytes -= size
        self.overhead -= charged
        return count

    def settle(self) -> None:
        """Put what is incoming on its shelves."""
        incoming = self.incoming
        lows = self.lows
        if self.sought:
            note_arrival(self.sought, incoming)
        if len(incoming) > 1:
            incoming.sort()
        while incoming:
            at = bisect(lows, incoming[-1]) - 1
            shelf = self.all[at]
            start = bisect_left(incoming, lows[at])
            groups = incoming[start:]
            count, size = weight(groups)
            charged = GROUP_BYTES * len(groups)
            index = len(shelf)
            in_order = shelf.in_order
            if in_order:
                index = bisect(shelf, groups[0])
                in_order = index == len(shelf) or groups[-1] < shelf[index]
            looked = min(shelf.looked, index)
            # No call from here on.
            shelf[index:index] = groups
            shelf.looked = looked
            shelf.in_order = in_order
            shelf.seen = None
            del incoming[start:]
            self.messages += count
            self.bytes += size
            self.overhead += charged
            if len(shelf) > 2 * SHELF:
                self._split(at)

    def _split(self, at: int) -> None:
        shelf = self.all[at]
        shelf.looked = 0
        shelf.sort()
        size = -(-len(shelf) // (len(shelf) // SHELF))
        parts = [Shelf(shelf[start : start + size]) for start in range(0, len(shelf), size)]
        lows = [part[0][:2] for part in parts[1:]]
        # No call from here on.
        self.all[at : at + 1] = parts
        self.lows[at + 1 : at + 1] = lows

    def head(self) -> list[Group]:
        """Return the first group, alone; nothing, where there is none."""
        shelf = self.all[0]
        shelf.put_in_order()
        return shelf[:1]

    def groups(self) -> Iterator[Group]:
        """Yield all groups, in order."""
        for shelf in self.all:
            shelf.put_in_order()
            yield from shelf

    def groups_from(self, start: Key, most: int) -> tuple[list[Group], Key | None]:
        """Return groups on shelves, in order, from this (due time, sequence) on: `most`, and the rest of a shelf.

        Beside them where to go on, None at the end. Cost: 0.01 µs a group; 0.1 where they are put in order.
        """
        if self.incoming:
            self.settle()
        groups: list[Group] = []
        at = max(0, bisect(self.lows, start) - 1)
        for shelf in self.all[at:]:
            if len(groups) >= most:
                return groups, self.lows[at]
            shelf.put_in_order()
            groups += shelf[bisect_left(shelf, start) :]
            at += 1
        return groups, None

    # One message -----------------------------------------------------------------------------------------------------

    def look_for(self, sequence: int, start: Key, most: int) -> tuple[Group | None, Key | None]:
        """Look for a message among about `most` groups, from this (due time, sequence) on.

        Returns:
            the group that has it; else None, and where to go on, None at the end.

        Cost: 0.7 µs a group, for they lie anywhere in memory.
        """
        if self.incoming:
            self.settle()
        at = max(0, bisect(self.lows, start) - 1)
        for shelf in self.all[at:]:
            if most <= 0:
                return None, self.lows[at]
            for group in shelf:
                if group[1] <= sequence < group[1] + len(group) - AHEAD:  # as `holds`, in half the time
                    return group, None
            most -= len(shelf)
            at += 1
        return None, None

    def take_out(self, group: Group, sequence: int) -> Segment:
        """Take one message out of a group that `look_for` has found; return it."""
        at = bisect(self.lows, group) - 1
        shelf = self.all[at]
        index = shelf.index(group)
        due_ms, first, tag, *records = group
        place = sequence - first
        record = records[place]
        parts: list[Group] = [(due_ms, first, tag, *records[:place])] if place else []
        if place + 1 < len(records):
            parts.append((due_ms, sequence + 1, tag, *records[place + 1 :]))
        one = segments_of([(due_ms, sequence, tag, record)])[0][0]
        size, charged = len(record), GROUP_BYTES * (1 - len(parts))
        is_empty = len(shelf) == 1 < len(self.all) and not parts
        looked = shelf.looked + (len(parts) - 1 if index < shelf.looked else 0)
        # No call from here on.
        if is_empty:
            del self.all[at]
            del self.lows[at or 1]
        else:
            shelf[index : index + 1] = parts
            shelf.looked = looked
            shelf.seen = None
        self.messages -= 1
        self.bytes -= size
        self.overhead -= charged
        return one

    # Expiry ----------------------------------------------------------------------------------------------------------

    def take_expired(self, now_ms: int, most: int, segments: list[Segment]) -> bool:
        """Move messages that have expired to `segments`, wherever they are; return whether there may be more.

        Looks at about `most` messages, from where the last call ended; each is looked at once after it was added, and
        then when the first one of its shelf has expired. Cost: 0.5 µs a group, 0.15 µs a message; 0.05 µs a shelf.
        """
        if self.incoming:
            self.settle()
        at = max(0, bisect(self.lows, self._looked_to) - 1)
        while at < len(self.all):
            if most <= 0:
                self._looked_to = self.lows[at]
                return True
            shelf = self.all[at]
            if shelf.looked == len(shelf) and shelf.soonest_ms > now_ms:
                at += 1
                most -= 1
            else:
                most -= self._take_expired_of(at, most, now_ms, segments)
        self._looked_to = ()
        return False

    def _take_expired_of(self, at: int, most: int, now_ms: int, segments: list[Segment]) -> int:
        """Do so with one shelf, or a part of it; return how many messages that was, in the same measure."""
        shelf = self.all[at]
        start = shelf.looked if shelf.looked < len(shelf) else 0
        soonest_ms = shelf.soonest_ms if start else NEVER_MS
        kept: list[Group] = []
        changed: list[Group] = []
        gone: list[Group] = []
        left: list[Group] = []
        worth = 0
        for group in islice(shelf, start, None):
            if worth >= most:
                break
            worth += len(group) - AHEAD + 1
            moments = expiries_of(group)
            first_ms = min(filter(None, moments), default=NEVER_MS)
            if first_ms > now_ms:
                soonest_ms = min(soonest_ms, first_ms)
                kept.append(group)
                continue
            late, others = by_lateness(group, moments, now_ms)
            changed.append(group)
            gone += late
            left += others
            worth += LATE_WORTH * len(late)
        looked = start + len(kept)
        stop = looked + len(changed)
        handed = segments_of(sorted(gone))[0]
        count, size = weight(changed)
        charged = GROUP_BYTES * len(changed)
        is_empty = not looked and stop == len(shelf) and len(self.all) > 1
        # No call from here on.
        shelf.looked = looked
        shelf.soonest_ms = soonest_ms
        if changed:
            segments += handed
            if is_empty:
                del self.all[at]
                del self.lows[at or 1]
            else:
                shelf[start:stop] = kept
                shelf.seen = None
            self.incoming += left
            self.messages -= count
            self.bytes -= size
            self.overhead -= charged
            if left:
                self.settle()
        return worth


def note_arrival(sought: Iterable[Sought], groups: list[Group]) -> None:
    """Note what of what is sought is among groups that are put on shelves."""
    for one in sought:
        if any(holds(group, one.sequence) for group in groups):
            one.arrived = True
