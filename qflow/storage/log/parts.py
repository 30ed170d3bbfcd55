"""The parts in which a batch is settled where the disk is full.

LMDB writes a transaction to pages that are free: freed by transactions before the last one, and by none that somebody
still reads. What one frees comes to use two commits later, so a transaction that used all free pages at once would be
the last. Each part uses at most half of them: then there is always enough for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from qflow.storage.log.windows import window_of

L = TypeVar("L")
"""A lane."""
Settled = list[int]
"""[first, end, messages, bytes]."""
Attempts = tuple[int, int, int]

PAGES_A_PART = 64
"""At most, however many are free: a commit should not take long."""
PAGES_ANYWAY = 12
"""Changed by any commit: the paths to rows, marks and counts, and the list of free pages."""
_PAGES_A_LANE = 4
"""Its row, a block or two that go, and what is above them."""
_PAGES_A_RANGE = 2
"""Of a record that is the first on its page: that page, and one more if it is split."""
_TOGETHER = 32
"""Counts of deliveries that begin so near each other lie on one page, whatever is between: it holds twice as many."""
REMOVED_IN_A_PART = 16
"""Settled blocks of a lane that are removed, at most."""


class Part(NamedTuple, Generic[L]):
    """What one commit settles, by lane, and the counts of deliveries it writes."""

    settled: dict[L, list[Settled]]
    attempts: dict[L, list[Attempts]]


def extend(settled: list[Settled], ranges: Iterable[Sequence[int]], border: int) -> None:
    """Add settled ranges of a lane, joined with those before where they touch, but at `border`."""
    for first, end, messages, size in ranges:
        last = settled[-1] if settled else None
        # Corrections stay apart, and so do ranges without messages: they may overlap what was settled before.
        if last and last[0] < last[1] == first < end and first != border and (last[2] > 0) == (messages > 0):
            last[1] = end
            last[2] += messages
            last[3] += size
        else:
            settled.append([first, end, messages, size])


def cut(settled: Mapping[L, Sequence[Settled]], attempts: Mapping[L, Sequence[Attempts]], free: int) -> list[Part[L]]:
    """Cut what a batch settles into parts that each take half of the free pages at most, or hold a single range.

    A lane without ranges is one whose blocks are to be removed. Counts come last: those of what is settled by then are
    left out.
    """
    room = min(PAGES_A_PART, free // 2) - PAGES_ANYWAY
    parts: list[Part[L]] = []
    used = room + 1
    page = 0

    def part_for(place: int, together: int, records: int, begins: bool) -> Part[L]:
        """Return the part that takes a range of some records, which begins a lane or goes on with one."""
        nonlocal used, page
        cost = 0 if records == 1 and not begins and 0 <= place - page < together else _PAGES_A_RANGE * records
        whole = _PAGES_A_LANE + _PAGES_A_RANGE * records
        used += whole if begins else cost
        if used > room or not parts:
            parts.append(Part({}, {}))
            used, cost = whole, whole
        if cost or begins:
            page = place
        return parts[-1]

    for lane, ranges in settled.items():
        if not ranges:
            part_for(0, 1, 1, True).settled[lane] = []
        for index, one in enumerate(sorted(ranges)):
            first, last = window_of(one[0]), window_of(one[1] - 1)
            part = part_for(first, 1, 1 if first == last else 2, not index)
            part.settled.setdefault(lane, []).append(one)
    for lane, counts in attempts.items():
        for index, count in enumerate(counts):
            part_for(count[0], _TOGETHER, 1, not index).attempts.setdefault(lane, []).append(count)
    return parts


def joined(parts: Iterable[Part[L]]) -> Part[L]:
    """Return what some parts hold, as one."""
    whole: Part[L] = Part({}, {})
    for part in parts:
        for lane, ranges in part.settled.items():
            whole.settled.setdefault(lane, []).extend(ranges)
        for lane, counts in part.attempts.items():
            whole.attempts.setdefault(lane, []).extend(counts)
    return whole
