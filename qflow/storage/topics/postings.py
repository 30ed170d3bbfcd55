"""Which blocks hold which topics: the byte layout of a segment of postings.

    head       owner, lane, the range of sequences it speaks for, numbers of what follows
    blocks     first sequence of each block (8 bytes)
    unread     numbers of the blocks whose topics could not be read: they may hold any (1 byte each)
    directory  for each group: its first topic (4), where it begins (4), its CRC-32 (4); and where the last one ends
    checksum   CRC-32 of all that stands before it
    groups     up to 128 topics each: their numbers (4 bytes, sorted), where the blocks of each end (2), the blocks (1)

A topic's number is a hash of its name, so it needs no table to be found, and none to be damaged. Topics that share a
number share their postings: a block too many is looked at, for each topic with a chance of 1 : 4,000 among a million.

A reader checks the head and the groups it needs, and so touches few pages of a large segment. Integers are
little-endian.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Literal
from zlib import crc32

from xxhash import xxh32_intdigest

from qflow.errors import CorruptionError
from qflow.storage.blocks import column

MAGIC = b"qfp1"
MOST_BLOCKS = 256
"""In a segment: the number of a block takes a byte."""
GROUP = 128
_FEW = 16
"""So many topics of one group are looked up one by one."""

_HEAD = struct.Struct("<4sIBxHQQHxxI")
_CRC = struct.Struct("<I")

topic_number = xxh32_intdigest
"""Return the number of a topic from its bytes in UTF-8. Cost: 0.08 µs."""


def _values(code: Literal["H", "I", "Q"], data: memoryview) -> Sequence[int]:
    if sys.byteorder == "little":
        return data.cast(code)
    column = array(code)
    column.frombytes(data)
    column.byteswap()
    return column


def encode(
    owner: int,
    lane: int,
    first: int,
    end: int,
    blocks: Sequence[int],
    unread: Iterable[int],
    found: Mapping[int, Iterable[int]],
) -> bytes:
    """Encode a segment that speaks for the sequences in [first, end).

    Args:
        blocks: first sequence of each block, at most `MOST_BLOCKS`.
        unread: which of them may hold any topic.
        found: which of them hold a topic, ascending, by its number.

    Cost: 0.5 µs a topic.
    """
    numbers = sorted(found)
    starts = range(0, len(numbers), GROUP)
    groups: list[bytes] = []
    for start in starts:
        members = numbers[start : start + GROUP]
        lists = [bytes(found[number]) for number in members]
        ends = accumulate(map(len, lists))
        groups.append(b"".join((column(members), column(ends, "H"), *lists)))
    marked = bytes(unread)
    head = b"".join(
        (
            _HEAD.pack(MAGIC, owner, lane, len(blocks), first, end, len(marked), len(numbers)),
            column(blocks, "Q"),
            marked,
            column(numbers[start] for start in starts),
            column(accumulate(map(len, groups), initial=0)),
            column(map(crc32, groups)),
        )
    )
    return b"".join((head, _CRC.pack(crc32(head)), *groups))


class Postings:
    """A segment as it lies in the log; of bytes that belong to a transaction it is a view, and ends with that.

    Raises:
        CorruptionError: its head is damaged, or it belongs elsewhere.
    """

    __slots__ = (
        "_body",
        "_checksums",
        "_group_firsts",
        "_groups",
        "_topics",
        "_unread",
        "blocks",
        "end",
        "first",
        "where",
    )

    def __init__(self, data: bytes | memoryview, owner: int, lane: int, first: int) -> None:
        self.where = f"postings {first} of stream {owner}, lane {lane}"
        view = memoryview(data)
        if len(view) < _HEAD.size + _CRC.size:
            raise CorruptionError(f"{self.where}: {len(view)} bytes are too few")
        magic, its_owner, its_lane, count, self.first, self.end, marked, self._topics = _HEAD.unpack_from(view)
        groups = -(-self._topics // GROUP)
        position = _HEAD.size
        cuts = [position := position + size for size in (8 * count, marked, 4 * groups, 4 * (groups + 1), 4 * groups)]
        if len(view) < cuts[-1] + _CRC.size or _CRC.unpack_from(view, cuts[-1])[0] != crc32(view[: cuts[-1]]):
            raise CorruptionError(f"{self.where}: the head does not match its checksum")
        if (magic, its_owner, its_lane, self.first) != (MAGIC, owner, lane, first):
            raise CorruptionError(f"{self.where}: not the segment that belongs here")
        self.blocks = _values("Q", view[_HEAD.size : cuts[0]])
        self._unread = bytes(view[cuts[0] : cuts[1]])
        self._group_firsts = _values("I", view[cuts[1] : cuts[2]])
        self._groups = _values("I", view[cuts[2] : cuts[3]])
        self._checksums = _values("I", view[cuts[3] : cuts[4]])
        self._body = view[cuts[-1] + _CRC.size :]

    def find(self, wanted: Sequence[int] | None, position: int) -> list[int]:
        """Return the first sequences of the blocks that may hold a topic at or after a position.

        Args:
            wanted: numbers of topics, ascending; None for any topic.

        Raises:
            CorruptionError: a group that may hold one of them is damaged.
        Cost: 6 µs, and 2 µs for each group that may hold one of them.
        """
        start = max(0, bisect_right(self.blocks, position) - 1)
        if wanted is None:
            return list(self.blocks[start:])
        chosen = set(self._unread)
        index = 0
        while index < len(wanted) and len(chosen) < len(self.blocks):
            group = bisect_right(self._group_firsts, wanted[index]) - 1
            stop = len(wanted)
            if group + 1 < len(self._group_firsts):
                stop = bisect_left(wanted, self._group_firsts[group + 1], index)
            if group >= 0:
                chosen.update(self._in_group(group, wanted[index:stop]))
            index = stop
        return [self.blocks[number] for number in sorted(chosen) if number >= start]

    def _in_group(self, group: int, wanted: Sequence[int]) -> Iterable[int]:
        """Return numbers of the blocks that hold one of some topics, as a group says."""
        data = self._body[self._groups[group] : self._groups[group + 1]]
        if crc32(data) != self._checksums[group]:
            raise CorruptionError(f"{self.where}: group {group} does not match its checksum")
        count = min(GROUP, self._topics - GROUP * group)
        members = _values("I", data[: 4 * count])
        ends = _values("H", data[4 * count : 6 * count])
        lists = data[6 * count :]
        common = wanted if len(wanted) <= _FEW else sorted(set(wanted).intersection(members))
        found: list[memoryview] = []
        for number in common:
            at = bisect_left(members, number)
            if at < count and members[at] == number:
                found.append(lists[ends[at - 1] if at else 0 : ends[at]])
        return chain.from_iterable(found)
