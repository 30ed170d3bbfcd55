"""Which segment of an area holds which slots, and how much of it is freed: plain values, no files, no locks.

Whoever owns the index holds a lock around every call. Memory: for each block 12 bytes, for each segment half a
kilobyte, which is 1 MB for 10 GiB in segments of 8 MiB.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from qflow.storage.segments import Segment

COMPACTED_AT_ONCE = 8
"""Segments, at most; together they hold no more than one."""


class Move(NamedTuple):
    """A block that was copied, and the bits of the messages that were."""

    segment: Segment
    block: int
    wanted: int


class SegmentIndex:
    """See the module. Cost: O(log segments) for everything that does not say otherwise."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._keys: list[int] = []
        self._segments: list[Segment] = []
        """For each key, the segment that has what is left of the slots from there to the next key."""
        self.used = self.held = self.live = 0
        """Sums over the segments: bytes, messages ever put in, and those not freed."""

    @property
    def head(self) -> Segment | None:
        """The segment with the lowest slot."""
        return self._segments[0] if self._segments else None

    def segments(self) -> set[Segment]:
        return set(self._segments)

    def add_block(self, segment: Segment, slot: int, span: int, start: int, messages: int | None = None) -> None:
        """Enter a block behind those its segment has; `messages` are fewer than `span` where it has gaps."""
        if not segment.keys:
            self.lead(slot, segment)
        if slot != segment.end and segment.firsts and segment.spans is None:
            segment.spans = array("H", map(segment.span_of, range(len(segment.firsts))))
        messages = span if messages is None else messages
        segment.firsts.append(slot)
        segment.starts.append(start)
        if segment.spans is not None:
            segment.spans.append(span)
        segment.end = slot + span
        segment.held += messages
        segment.live += messages
        self.held += messages
        self.live += messages

    def fill(self, segment: Segment, used: int) -> None:
        """Set how far a segment is filled."""
        self.used += used - segment.used
        segment.used = used

    def lead(self, key: int, segment: Segment) -> None:
        """Let slots from `key` on lead to a segment."""
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._segments.insert(place, segment)
        segment.keys += (key,)

    def take_out(self, segment: Segment) -> None:
        """Forget a segment and all it held."""
        for key in segment.keys:
            place = bisect_left(self._keys, key)
            del self._keys[place], self._segments[place]
        self.used -= segment.used
        self.held -= segment.held
        self.live -= segment.live
        segment.begin_anew()

    def clear(self) -> None:
        self._keys.clear()
        self._segments.clear()
        self.used = self.held = self.live = 0

    def find(self, slot: int) -> tuple[Segment, int]:
        """Return the segment of a slot in use, and which of its blocks has it."""
        segment = self._segments[bisect_right(self._keys, slot) - 1]
        return segment, bisect_right(segment.firsts, slot) - 1

    def free(self, slot: int, stop: int) -> tuple[Segment, int]:
        """Free what [slot, stop) has in the block of `slot`; return its segment, and where the block or range ends."""
        segment, block = self.find(slot)
        first = segment.firsts[block]
        stop = min(stop, first + segment.span_of(block))
        bits = ((1 << (stop - slot)) - 1) << (slot - first)
        before = segment.freed.get(block, 0)
        segment.free(block, before | bits)
        number = (bits & ~before).bit_count()
        segment.live -= number
        self.live -= number
        return segment, stop

    # Compaction --------------------------------------------------------------------------------------------------

    def is_sparse(self, patience: int) -> bool:
        """Tell whether more than half of what the segments hold is freed, and four segments and `patience` more."""
        live = self.used * self.live // max(1, self.held)
        return self.used - 2 * live > 4 * self._segment_bytes + patience

    def sparsest(self, tail: Segment | None) -> list[Segment]:
        """Return segments that are at most half alive, and together fit into one. Cost: O(segments)."""
        candidates = (segment for segment in self.segments() if segment is not tail and not segment.damaged)
        sparse = sorted(candidates, key=lambda segment: segment.live / segment.held)[:COMPACTED_AT_ONCE]
        totals = accumulate(segment.used * segment.live // segment.held for segment in sparse)
        return [
            segment
            for segment, total in zip(sparse, totals, strict=True)
            if 2 * segment.live <= segment.held and total <= self._segment_bytes
        ]

    def wanted(self, segment: Segment, block: int) -> int:
        """Return the bits of a block's slots that are not freed."""
        return ((1 << segment.span_of(block)) - 1) & ~segment.freed.get(block, 0)

    def lead_over(
        self, chosen: list[Segment], target: Segment, copies: list[tuple[Segment, int, int, int]], moved: list[Move]
    ) -> None:
        """Put a target in the place of the chosen segments. What was freed meanwhile is freed in it, too.

        Args:
            copies: (target, first slot, span, first byte) of each block that was copied.
            moved: where each of them comes from.
        """
        left = [move.wanted & self.wanted(move.segment, move.block) if move.segment.live else 0 for move in moved]
        keys = sorted(key for segment in chosen for key in segment.keys)
        for segment in chosen:
            self.take_out(segment)
        for key in keys:
            self.lead(key, target)
        for number, ((_, slot, span, start), bits) in enumerate(zip(copies, left, strict=True)):
            self.add_block(target, slot, span, start, bits.bit_count())
            target.free(number, ((1 << span) - 1) & ~bits)

    # Looking -----------------------------------------------------------------------------------------------------

    def slots(self) -> Iterator[int]:
        """Yield each slot that is not freed, as often as it is held."""
        for segment in self.segments():
            for block, first in enumerate(segment.firsts):
                wanted = self.wanted(segment, block)
                yield from (first + offset for offset in range(segment.span_of(block)) if wanted >> offset & 1)

    def problems(self) -> list[str]:
        """Compare the sums with a recount."""
        sums = tuple(sum(getattr(segment, name) for segment in self.segments()) for name in ("used", "held", "live"))
        if sums == (self.used, self.held, self.live):
            return []
        return [f"used, held and live are {(self.used, self.held, self.live)}, a recount gives {sums}"]
