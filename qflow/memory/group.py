"""A group: messages of a schedule with consecutive sequences, one due time and equal marks.

One flat tuple, because it compares by due time and sequence without help, nothing can change it, and a tuple of
numbers and bytes is not followed by the garbage collector. The marks are as in `delivery.py`.
"""

from __future__ import annotations

from itertools import chain
from typing import Final, TypeAlias

from qflow.delivery import Segment
from qflow.message import Record

Group: TypeAlias = tuple[int, int, int, *tuple[Record, ...]]
"""(due time in milliseconds since the epoch, first sequence, marks, *records)."""
Key: TypeAlias = tuple[int, ...]
"""What groups are compared with: (due time, sequence), or the beginning of it."""
AHEAD: Final = 3
"""Where a group's records begin."""
GROUP_MESSAGES = 256
"""A group has no more: what is cut off one is copied."""
GROUP_BYTES = 168
"""Charged for each group on top of its records: the tuple 64, two numbers 64, its place in line 9, and what the
allocator leaves between them.

A record's own place in the tuple is in `OVERHEAD_BYTES`, as its place in a run is.
"""

_new = tuple.__new__  # half the time of calling a named tuple


def groups_of(due_ms: int, first: int, records: list[Record], marks: int) -> list[Group]:
    """Return groups for records with sequences from `first` on."""
    if len(records) <= GROUP_MESSAGES:
        return [(due_ms, first, marks, *records)] if records else []
    return [
        (due_ms, first + start, marks, *records[start : start + GROUP_MESSAGES])
        for start in range(0, len(records), GROUP_MESSAGES)
    ]


def groups_charge(count: int) -> int:
    """Return what is charged for the groups of so many messages that are added at once, on top of their records."""
    return GROUP_BYTES * -(-count // GROUP_MESSAGES)


def weight(groups: list[Group]) -> tuple[int, int]:
    """Return the number and the bytes of the messages in some groups."""
    if len(groups) == 1:
        records = groups[0][AHEAD:]
        return len(records), sum(map(len, records))
    everything = list(chain.from_iterable([group[AHEAD:] for group in groups]))
    return len(everything), sum(map(len, everything))


def cut(group: Group, behind: int) -> tuple[Group, Group]:
    """Cut a group in two, the second with `behind` messages."""
    due_ms, first, marks, *records = group
    kept = len(records) - behind
    return (due_ms, first, marks, *records[:kept]), (due_ms, first + kept, marks, *records[kept:])


def joined(left: Group, right: Group) -> Group | None:
    """Return the group that these two were cut from; None if they are not of one."""
    due_ms, first, marks, *records = left
    if (due_ms, first + len(records), marks) != right[:AHEAD]:
        return None
    records += right[AHEAD:]
    return (due_ms, first, marks, *records)


def segments_of(groups: list[Group]) -> tuple[list[Segment], int]:
    """Return the messages of groups as segments, and their bytes."""
    segments: list[Segment] = []
    everything: list[Record] = []
    run: list[Record] = []
    following = marks_before = -1
    for _, first, marks, *records in groups:
        if first == following and marks == marks_before:
            run += records
        else:
            run = records
            segments.append(_new(Segment, (first, run, marks)))
            marks_before = marks
        following = first + len(records)
        everything += records
    return segments, sum(map(len, everything))
