"""What a schedule holds, and where: listed, and checked in steps. Changes nothing but what was noted of each shelf."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from qflow.memory.group import AHEAD, GROUP_BYTES, GROUP_MESSAGES, Group, Key, marks_of, weight
from qflow.memory.schedule import Schedule
from qflow.memory.shelves import Seen, Shelf
from qflow.message import lowest_by_lane

GROUP_WORTH = 16
"""Messages that it takes as long to look at as at the group they are in."""


def marked(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield (first sequence, end, marks) of what is in memory and was delivered before."""
    for _, first, tag, *records in _resident(schedule):
        if marks_of(tag):
            yield first, first + len(records), marks_of(tag)


def _resident(schedule: Schedule) -> Iterator[Group]:
    """Yield the groups in memory, those on shelves in order."""
    schedule.shelves.settle()
    yield from schedule.shelves.groups()
    for chunk in schedule.moving():
        yield from chunk.groups


# Checks --------------------------------------------------------------------------------------------------------------


def begin_check(schedule: Schedule) -> None:
    """Forget what an earlier check has found."""
    for shelf in schedule.shelves.all:
        shelf.seen = None


def look(schedule: Schedule, most: int) -> int:
    """Look at shelves that nobody has looked at since they changed, at about so many messages; return how many.

    A group counts as `GROUP_WORTH` messages more.
    """
    shelves = schedule.shelves
    shelves.settle()
    looked = 0
    for low, shelf, end in zip(shelves.lows, shelves.all, [*shelves.lows[1:], None], strict=True):
        if looked >= most:
            break
        if shelf and shelf.seen is None:
            shelf.seen = _look(shelf, low, end)
            looked += shelf.seen.messages + GROUP_WORTH * len(shelf)
    return looked


def _seen(schedule: Schedule) -> list[Seen]:
    """Return what was found on all shelves, once `look` finds nothing to look at."""
    return [shelf.seen for shelf in schedule.shelves.all if shelf.seen is not None]


def lowest(schedule: Schedule) -> dict[int, int]:
    """Return the lowest sequence in memory, by lane, once `look` finds nothing to look at. Cost: O(shelves)."""
    moving = [group[1] for chunk in schedule.moving() for group in chunk.groups]
    return lowest_by_lane(moving + [low for seen in _seen(schedule) for low in seen.lowest.values()])


def problems(schedule: Schedule) -> list[str]:
    """Recount, and check the rules; return what is wrong, in words. Cost: O(messages)."""
    begin_check(schedule)
    look(schedule, sys.maxsize)
    return list(problems_seen(schedule))


def problems_seen(schedule: Schedule) -> Iterator[str]:
    """Do the same once `look` finds nothing to look at. Cost: O(shelves + spilled chunks)."""
    shelves, spilled, seen = schedule.shelves, schedule.spilled, _seen(schedule)
    if not all(shelves.all) and len(shelves.all) > 1:
        yield "a shelf is empty"
    for one in seen:
        yield from one.problems
    for before, after in pairwise(seen):
        yield from _overlap(before.last, after.first)
    for earlier, later in pairwise(spilled):
        if earlier.bound >= later.bound:
            yield f"{earlier!r} is followed by {later!r}"
    for chunk in spilled:
        if not chunk.count == len(chunk.sequences) == len(chunk.slots) > 0 or chunk.groups:
            yield f"{chunk!r} has {len(chunk.sequences)} sequences and {len(chunk.slots)} slots"
        if chunk.claim is not None and schedule.claims.get(chunk.claim) is not chunk:
            yield f"{chunk!r} bears a claim that does not stand"
    weights = Counter(chunk.weight for chunk in spilled)
    for held, chunks in weights.items():
        if held.chunks != chunks:
            yield f"{chunks} chunks weigh {held.message_bytes} bytes together, and are taken for {held.chunks}"
    moving = schedule.moving()
    count, size = weight([group for chunk in moving for group in chunk.groups])
    for what, counted, recount in (
        ("messages in memory", shelves.messages, count + sum(one.messages for one in seen)),
        ("bytes in memory", shelves.bytes, size + sum(one.message_bytes for one in seen)),
        ("spilled messages", schedule.spilled_messages, sum(chunk.count for chunk in spilled)),
        ("spilled bytes", schedule.spilled_bytes, sum(held.message_bytes for held in weights)),
        (
            "bytes for groups",
            shelves.overhead,
            GROUP_BYTES * sum(map(len, shelves.all)) + sum(chunk.groups_bytes for chunk in moving),
        ),
    ):
        if counted != recount:
            yield f"{counted} {what} are counted, a recount gives {recount}"


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
