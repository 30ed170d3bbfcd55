"""Which segment of an area holds which slots, and how much of it is freed: plain values, no files, no locks.

Whoever owns the index holds a lock around every call. Memory: for each block 12 bytes, for each segment half a
kilobyte, which is 1 MB for 10 GiB in segments of 8 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import TypeAlias

from qflow.named_tuples import NamedTuple
from qflow.storage.spill.segment import Segment

COMPACTED_AT_ONCE = 8
"""Segments, at most; together they hold no more than one."""


Placed: TypeAlias = tuple[Segment, int, int, int]
"""(segment, first slot, span, first byte) of a block."""


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
        self.used = self.live_bytes = 0
        """Sums over the segments: bytes, and about how many of them are of messages that are not freed."""

    @property
    def head(self) -> Segment | None:
        """The segment with the lowest slot."""
        return self._segments[0] if self._segments else None

    def segments(self) -> set[Segment]:
        return set(self._segments)

    def install(self, blocks: list[Placed], ends: dict[Segment, int]) -> None:
        """Enter blocks that were written, and how far their segments are filled: all, or none if it is interrupted."""
        before = self._keys, self._segments, self.used, self.live_bytes
        known = [(segment, segment.state()) for segment in ends]
        last = self._segments[-1] if self._segments else None
        if any(segment is not last for segment in ends):
            self._keys, self._segments = self._keys.copy(), self._segments.copy()
        try:
            for segment, slot, span, start in blocks:
                if segment is not last:
                    self._keys.append(slot)
                    self._segments.append(segment)
                    segment.keys += (slot,)
                    last = segment
                segment.add(slot, span, start, span)
            for segment, used in ends.items():
                self._count(segment, used, used - segment.used)
        except BaseException:
            self._keys, self._segments, self.used, self.live_bytes = before
            for segment, state in known:
                segment.restore(state)
            raise

    def _count(self, segment: Segment, used: int, live_bytes: int) -> None:
        """Set how far a segment is filled, and add to its live bytes."""
        self.used += used - segment.used
        self.live_bytes += live_bytes
        segment.used = used
        segment.live_bytes += live_bytes

    def take_out(self, segment: Segment) -> None:
        """Forget a segment and all it held."""
        for key in segment.keys:
            place = bisect_left(self._keys, key)
            del self._keys[place], self._segments[place]
        self._empty(segment)

    def _empty(self, segment: Segment) -> None:
        """Take a segment that nothing leads to out of the sums."""
        self.used -= segment.used
        self.live_bytes -= segment.live_bytes
        segment.begin_anew()

    def clear(self) -> None:
        self._keys.clear()
        self._segments.clear()
        self.used = self.live_bytes = 0

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
        size = (segment.end_of(block) - segment.starts[block]) * number // segment.span_of(block)
        segment.live_bytes -= size
        self.live_bytes -= size
        return segment, stop

    # Compaction --------------------------------------------------------------------------------------------------

    def is_sparse(self, patience: int) -> bool:
        """Tell whether more than half of what the segments hold is freed, and four segments and `patience` more."""
        return self.used - 2 * self.live_bytes > 4 * self._segment_bytes + patience

    def sparsest(self, tail: Segment | None) -> list[Segment]:
        """Return segments that are at most half alive, and together fit into one. Cost: O(segments)."""
        candidates = (segment for segment in self.segments() if segment is not tail and not segment.damaged)
        sparse = sorted(candidates, key=lambda segment: segment.live_bytes / segment.used)[:COMPACTED_AT_ONCE]
        totals = accumulate(segment.live_bytes for segment in sparse)
        return [
            segment
            for segment, total in zip(sparse, totals, strict=True)
            if 2 * segment.live_bytes <= segment.used and total <= self._segment_bytes
        ]

    def wanted(self, segment: Segment, block: int) -> int:
        """Return the bits of a block's slots that are not freed."""
        return ((1 << segment.span_of(block)) - 1) & ~segment.freed.get(block, 0)

    def lead_over(
        self, chosen: list[Segment], target: Segment, copies: list[Placed], moved: list[Move], used: int
    ) -> None:
        """Put a target in the place of the chosen segments: wholly, or not at all if it is interrupted.

        Args:
            copies: each block that was copied, in the order of slots.
            moved: where each of them comes from. What was freed there meanwhile is freed in the target, too.
            used: bytes of the target.
        """
        left = [move.wanted & self.wanted(move.segment, move.block) if move.segment.live else 0 for move in moved]
        before = self._keys, self._segments, self.used, self.live_bytes
        known = [(segment, segment.state()) for segment in chosen]
        try:
            for number, ((_, slot, span, start), bits) in enumerate(zip(copies, left, strict=True)):
                target.add(slot, span, start, bits.bit_count())
                target.free(number, ((1 << span) - 1) & ~bits)
            self._keys, self._segments = self._led_over(set(chosen), target, [slot for _, slot, _, _ in copies])
            target.keys = tuple(
                key for key, segment in zip(self._keys, self._segments, strict=True) if segment is target
            )
            self._count(target, used, used)
            for segment in chosen:
                self._empty(segment)
        except BaseException:
            self._keys, self._segments, self.used, self.live_bytes = before
            for segment, state in known:
                segment.restore(state)
            raise

    def _led_over(self, chosen: set[Segment], target: Segment, slots: list[int]) -> tuple[list[int], list[Segment]]:
        """Return keys and segments with the target for the chosen ones, without ranges that hold nothing any more."""
        keys: list[int] = []
        segments: list[Segment] = []
        stops = [*self._keys[1:], 2**64]
        for key, stop, segment in zip(self._keys, stops, self._segments, strict=True):
            if segment in chosen and bisect_left(slots, key) == bisect_left(slots, stop):
                continue
            leads_to = target if segment in chosen else segment
            if leads_to is not target or not segments or segments[-1] is not target:
                keys.append(key)
                segments.append(leads_to)
        return keys, segments

    # Looking -----------------------------------------------------------------------------------------------------

    def ranges(self) -> Iterator[range]:
        """Yield the slots that are not freed, as often as they are held. Cost: O(blocks + ranges)."""
        for segment in self.segments():
            for block, first in enumerate(segment.firsts):
                span = segment.span_of(block)
                if block not in segment.freed:
                    yield range(first, first + span)
                    continue
                wanted, slot = self.wanted(segment, block), first
                while wanted:
                    skipped = (wanted & -wanted).bit_length() - 1
                    wanted >>= skipped
                    count = (~wanted & (wanted + 1)).bit_length() - 1
                    wanted >>= count
                    slot += skipped + count
                    yield range(slot - count, slot)

    def problems(self) -> list[str]:
        """Compare the sums with a recount."""
        segments = self.segments()
        sums = sum(segment.used for segment in segments), sum(segment.live_bytes for segment in segments)
        found = []
        if sums != (self.used, self.live_bytes):
            found.append(f"used and live bytes are {(self.used, self.live_bytes)}, a recount gives {sums}")
        keys = {segment: segment.keys for segment in segments}
        for key, segment in zip(self._keys, self._segments, strict=True):
            if key not in keys[segment]:
                found.append(f"slots from {key} lead to segment {segment.number}, which does not know of it")
        if self._keys != sorted(self._keys) or len(self._keys) != sum(map(len, keys.values())):
            found.append("the ranges of slots are out of order, or some lead nowhere")
        return found
