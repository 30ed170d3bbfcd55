"""A group: messages of a schedule with consecutive sequences, one due time and one tag.

One flat tuple, because it compares by due time and sequence without help, nothing can change it, and a tuple of
numbers and bytes is not followed by the garbage collector. So its records are bytes, of which the tag says whether each
is a `Message`; the rest of the tag are their marks, as in `delivery.py`.
"""

from __future__ import annotations

from itertools import chain, groupby
from typing import Final, TypeAlias

from qflow.delivery import Segment
from qflow.message import Record, is_plain, pack_all, packed_expiries, unpack_all

Group: TypeAlias = tuple[int, int, int, *tuple[bytes, ...]]
"""(due time in milliseconds, by the clock of its schedule; first sequence, tag, *records)."""
Key: TypeAlias = tuple[int, ...]
"""What groups are compared with: (due time, sequence), or the beginning of it."""
AHEAD: Final = 3
"""Where a group's records begin."""
MESSAGES: Final = 1
"""The low bit of a tag: its records are messages. The rest are their marks."""
GROUP_MESSAGES = 256
"""A group has no more: what is cut off one is copied."""
GROUP_BYTES = 168
"""Charged for each group on top of its records: the tuple 64, two numbers 64, its place in line 9, and what the
allocator leaves between them.

A record's own place in the tuple is in `OVERHEAD_BYTES`, as its place in a run is.
"""

_new = tuple.__new__  # half the time of calling a named tuple


def tag_of(marks: int, *, messages: bool) -> int:
    """Return the tag of records that are messages, or plain."""
    return marks << 1 | messages


def marks_of(tag: int) -> int:
    """Return the marks in a tag."""
    return tag >> 1


def groups_of(due_ms: int, first: int, records: list[Record], marks: int) -> list[Group]:
    """Return groups for records with sequences from `first` on; those of one kind go together."""
    if is_plain(records):
        return _groups_of_kind(due_ms, first, records, tag_of(marks, messages=False))
    groups: list[Group] = []
    for is_bytes, kind in groupby(records, lambda record: type(record) is bytes):
        members = list(kind)
        packed = members if is_bytes else pack_all(members)
        groups += _groups_of_kind(due_ms, first, packed, tag_of(marks, messages=not is_bytes))
        first += len(members)
    return groups


def _groups_of_kind(due_ms: int, first: int, packed: list[bytes], tag: int) -> list[Group]:
    if len(packed) <= GROUP_MESSAGES:
        return [(due_ms, first, tag, *packed)] if packed else []
    return [
        (due_ms, first + start, tag, *packed[start : start + GROUP_MESSAGES])
        for start in range(0, len(packed), GROUP_MESSAGES)
    ]


def holds(group: Group, sequence: int) -> bool:
    """Tell whether a message is in a group. Cost: 0.1 µs."""
    return 0 <= sequence - group[1] < len(group) - AHEAD


def weight(groups: list[Group]) -> tuple[int, int]:
    """Return the number and the bytes of the messages in some groups."""
    if len(groups) == 1:
        records = groups[0][AHEAD:]
        return len(records), sum(map(len, records))
    everything = list(chain.from_iterable([group[AHEAD:] for group in groups]))
    return len(everything), sum(map(len, everything))


def cut(group: Group, behind: int) -> tuple[Group, Group]:
    """Cut a group in two, the second with `behind` messages."""
    due_ms, first, tag, *records = group
    kept = len(records) - behind
    return (due_ms, first, tag, *records[:kept]), (due_ms, first + kept, tag, *records[kept:])


def expiries_of(group: Group) -> list[int]:
    """Return when its messages expire, in milliseconds since the epoch, 0 = never; nothing if they are plain."""
    return packed_expiries(group[AHEAD:]) if group[2] & MESSAGES else []


def by_lateness(group: Group, moments: list[int], now_ms: int) -> tuple[list[Group], list[Group]]:
    """Cut a group where messages that have expired and others meet; return the parts of the ones, and of the others."""
    due_ms, first, tag, *records = group
    parts: tuple[list[Group], list[Group]] = ([], [])
    start = 0
    for is_late, stretch in groupby([0 < moment <= now_ms for moment in moments]):
        stop = start + len(list(stretch))
        parts[not is_late].append((due_ms, first + start, tag, *records[start:stop]))
        start = stop
    return parts


def count_back(group: Group, wanted_bytes: int, each: int) -> tuple[int, int]:
    """Return the number and the bytes of the messages at the end of a group that free so much; at least one.

    Args:
        each: what a message frees beside its bytes.
    """
    count = size = 0
    for record in reversed(group[AHEAD:]):
        size += len(record)
        count += 1
        if size + count * each >= wanted_bytes:
            break
    return count, size


def joined(left: Group, right: Group) -> Group | None:
    """Return the group that these two were cut from; None if they are not of one."""
    due_ms, first, tag, *records = left
    if (due_ms, first + len(records), tag) != right[:AHEAD]:
        return None
    records += right[AHEAD:]
    return (due_ms, first, tag, *records)


def segments_of(groups: list[Group]) -> tuple[list[Segment], int]:
    """Return the messages of groups as segments, and their bytes."""
    segments: list[Segment] = []
    everything: list[Record] = []
    run: list[Record] = []
    following = marks_before = -1
    for _, first, tag, *packed in groups:
        records: list[Record] = unpack_all(packed) if tag & MESSAGES else packed
        marks = tag >> 1
        if first == following and marks == marks_before:
            run += records
        else:
            run = records
            segments.append(_new(Segment, (first, run, marks)))
            marks_before = marks
        following = first + len(records)
        everything += records
    return segments, sum(map(len, everything))
