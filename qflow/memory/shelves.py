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
from itertools import islice, pairwise

from qflow.delivery import Segment
from qflow.memory.group import (
    AHEAD,
    GROUP_BYTES,
    GROUP_MESSAGES,
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
from qflow.message import Record, lowest_by_lane
from qflow.named_tuples import NamedTuple

SHELF = 256
"""A shelf has at most twice as many groups."""
GROUP_WORTH = 16
"""Messages that it takes as long to look at as at the group they are in."""
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


class Sought:
    """A message that somebody looks for, some shelves at a time."""

    __slots__ = ("arrived", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.arrived = False
        """It was put on a shelf meanwhile, perhaps on one that was looked at before."""


class Shelves:
    """See the module. Cost: O(log groups) a group added, O(1) a group taken; sorting included."""

    __slots__ = ("_bytes", "_looked_to", "_lows", "_messages", "_overhead", "_shelves", "incoming", "sought")

    def __init__(self) -> None:
        self.incoming: list[Group] = []
        """Groups on the way to their shelf. What is added to it (by `+= groups_of(...)`) belongs to the schedule; the
        next call puts it in its place."""
        self._shelves = [Shelf()]  # at least one; none is empty, but a lone one
        self._lows: list[Key] = [()]  # for each shelf the least that belongs there
        self._messages = 0
        self._bytes = 0
        self._overhead = 0
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
            shelf = self._shelves[bisect(self._lows, group) - 1]
            size = len(record)
            if not shelf.in_order and len(shelf) < 2 * SHELF:
                # No call from here on, so that an interrupt finds all of it done or nothing.
                shelf += (group,)
                shelf.seen = None
                self._messages += 1
                self._bytes += size
                self._overhead += GROUP_BYTES
                return
        self.incoming += groups_of(due_ms, first, records, marks)
        self.settle()

    def _hand_over(self, most: int, bound: Key, segments: list[Segment]) -> int:
        """Move up to `most` messages that come before `bound` to `segments`; return how many.

        What follows on the last segment there, with the same marks, goes into that one.
        """
        if most <= 0:
            return 0
        shelves = self._shelves
        groups: list[Group] = []
        count = whole = 0  # messages; shelves that are used up
        while True:
            shelf = shelves[whole]
            self._put_in_order(shelf)
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
        self._lows[: whole + 1] = ((),)
        self._messages -= count
        self._bytes -= size
        self._overhead -= charged
        return count

    def settle(self) -> None:
        """Put what is incoming on its shelves."""
        incoming = self.incoming
        lows = self._lows
        if self.sought:
            note_arrival(self.sought, incoming)
        if len(incoming) > 1:
            incoming.sort()
        while incoming:
            at = bisect(lows, incoming[-1]) - 1
            shelf = self._shelves[at]
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
            self._messages += count
            self._bytes += size
            self._overhead += charged
            if len(shelf) > 2 * SHELF:
                self._split(at)

    def _split(self, at: int) -> None:
        shelf = self._shelves[at]
        shelf.looked = 0
        shelf.sort()
        size = -(-len(shelf) // (len(shelf) // SHELF))
        parts = [Shelf(shelf[start : start + size]) for start in range(0, len(shelf), size)]
        lows = [part[0][:2] for part in parts[1:]]
        # No call from here on.
        self._shelves[at : at + 1] = parts
        self._lows[at + 1 : at + 1] = lows

    def _head(self) -> list[Group]:
        shelf = self._shelves[0]
        self._put_in_order(shelf)
        return shelf[:1]

    @staticmethod
    def _put_in_order(shelf: Shelf) -> None:
        if not shelf.in_order:
            if shelf.looked < len(shelf):
                shelf.looked = 0
            shelf.sort()
            shelf.in_order = True

    def _shelved(self) -> Iterator[Group]:
        for shelf in self._shelves:
            self._put_in_order(shelf)
            yield from shelf

    # One message -----------------------------------------------------------------------------------------------------

    def look_for(self, sequence: int, start: Key, most: int) -> tuple[Group | None, Key | None]:
        """Look for a message among about `most` groups, from this (due time, sequence) on.

        Returns:
            the group that has it; else None, and where to go on, None at the end.

        Cost: 0.7 µs a group, for they lie anywhere in memory.
        """
        if self.incoming:
            self.settle()
        at = max(0, bisect(self._lows, start) - 1)
        for shelf in self._shelves[at:]:
            if most <= 0:
                return None, self._lows[at]
            for group in shelf:
                if group[1] <= sequence < group[1] + len(group) - AHEAD:  # as `holds`, in half the time
                    return group, None
            most -= len(shelf)
            at += 1
        return None, None

    def take_out(self, group: Group, sequence: int) -> Segment:
        """Take one message out of a group that `look_for` has found; return it."""
        at = bisect(self._lows, group) - 1
        shelf = self._shelves[at]
        index = shelf.index(group)
        due_ms, first, tag, *records = group
        place = sequence - first
        record = records[place]
        parts: list[Group] = [(due_ms, first, tag, *records[:place])] if place else []
        if place + 1 < len(records):
            parts.append((due_ms, sequence + 1, tag, *records[place + 1 :]))
        one = segments_of([(due_ms, sequence, tag, record)])[0][0]
        size, charged = len(record), GROUP_BYTES * (1 - len(parts))
        is_empty = len(shelf) == 1 < len(self._shelves) and not parts
        looked = shelf.looked + (len(parts) - 1 if index < shelf.looked else 0)
        # No call from here on.
        if is_empty:
            del self._shelves[at]
            if at:
                del self._lows[at]
            else:
                self._lows[:2] = ((),)
        else:
            shelf[index : index + 1] = parts
            shelf.looked = looked
            shelf.seen = None
        self._messages -= 1
        self._bytes -= size
        self._overhead -= charged
        return one

    # Expiry ----------------------------------------------------------------------------------------------------------

    def take_expired(self, now_ms: int, most: int, segments: list[Segment]) -> bool:
        """Move messages that have expired to `segments`, wherever they are; return whether there may be more.

        Looks at about `most` messages, from where the last call ended; each is looked at once after it was added, and
        then when the first one of its shelf has expired. Cost: 0.5 µs a group, 0.15 µs a message; 0.05 µs a shelf.
        """
        if self.incoming:
            self.settle()
        at = max(0, bisect(self._lows, self._looked_to) - 1)
        while at < len(self._shelves):
            if most <= 0:
                self._looked_to = self._lows[at]
                return True
            shelf = self._shelves[at]
            if shelf.looked == len(shelf) and shelf.soonest_ms > now_ms:
                at += 1
                most -= 1
            else:
                most -= self._take_expired_of(at, most, now_ms, segments)
        self._looked_to = ()
        return False

    def _take_expired_of(self, at: int, most: int, now_ms: int, segments: list[Segment]) -> int:
        """Do so with one shelf, or a part of it; return how many messages that was, in the same measure."""
        shelf = self._shelves[at]
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
        is_empty = not looked and stop == len(shelf) and len(self._shelves) > 1
        # No call from here on.
        shelf.looked = looked
        shelf.soonest_ms = soonest_ms
        if changed:
            segments += handed
            if is_empty:
                del self._shelves[at]
                if at:
                    del self._lows[at]
                else:
                    self._lows[:2] = ((),)
            else:
                shelf[start:stop] = kept
                shelf.seen = None
            self.incoming += left
            self._messages -= count
            self._bytes -= size
            self._overhead -= charged
            if left:
                self.settle()
        return worth

    # Checks ----------------------------------------------------------------------------------------------------------

    def begin_check(self) -> None:
        """Forget what an earlier check has found."""
        for shelf in self._shelves:
            shelf.seen = None

    def look(self, most: int) -> int:
        """Look at shelves that nobody has looked at since they changed, at about so many messages; return how many.

        A group counts as `GROUP_WORTH` messages more.
        """
        if self.incoming:
            self.settle()
        looked = 0
        for low, shelf, end in zip(self._lows, self._shelves, [*self._lows[1:], None], strict=True):
            if looked >= most:
                break
            if shelf and shelf.seen is None:
                shelf.seen = _look(shelf, low, end)
                looked += shelf.seen.messages + GROUP_WORTH * len(shelf)
        return looked

    def _seen(self) -> list[Seen]:
        """Return what was found on all shelves, once `look` finds nothing to look at."""
        return [shelf.seen for shelf in self._shelves if shelf.seen is not None]

    def _shelf_problems(self) -> Iterator[str]:
        """Check the rules, once `look` finds nothing to look at; say in words what is wrong. Cost: O(shelves)."""
        if not all(self._shelves) and len(self._shelves) > 1:
            yield "a shelf is empty"
        seen = self._seen()
        for one in seen:
            yield from one.problems
        for before, after in pairwise(seen):
            yield from _overlap(before.last, after.first)


def note_arrival(sought: Iterable[Sought], groups: list[Group]) -> None:
    """Note what of what is sought is among groups that are put on shelves."""
    for one in sought:
        if any(holds(group, one.sequence) for group in groups):
            one.arrived = True


def _look(shelf: Shelf, low: Key, end: Key | None) -> Seen:
    """Check the rules of a shelf for what belongs between these keys, and count what is on it."""
    ordered = sorted(shelf)
    problems: list[str] = []
    if ordered[0] < low or (end is not None and ordered[-1] >= end):
        problems.append(f"the shelf from {low} to {end} holds what belongs on another")
    if max(map(len, shelf)) - AHEAD > GROUP_MESSAGES:
        problems.append(f"the shelf from {low} has a group that is too big")
    if shelf.in_order and ordered != shelf:
        problems.append(f"the shelf from {low} is not in order")
    for one, two in pairwise(ordered):
        problems += _overlap(one, two)
    messages, size = weight(ordered)
    return Seen(problems, messages, size, lowest_by_lane([group[1] for group in ordered]), ordered[0], ordered[-1])


def _overlap(one: Group, two: Group) -> list[str]:
    """Tell if a group has messages that the next one has, too."""
    if one[0] == two[0] and one[1] + len(one) - AHEAD > two[1]:
        return [f"the group of {one[:2]} overlaps that of {two[:2]}"]
    return []
