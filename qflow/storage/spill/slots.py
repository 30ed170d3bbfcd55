"""Slots: where the messages of a run are in a spill store, as an immutable value."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

_COMPACT_AT = 64


class Ranges:
    """Numbers, as ranges in order that do not touch each other."""

    def __init__(self, ranges: Iterable[range]) -> None:
        self.ranges: list[range] = []
        self.twice: list[range] = []
        """What is in more than one of those that were given."""
        for piece in sorted(ranges, key=attrgetter("start")):
            last = self.ranges[-1] if self.ranges else range(-1, -1)
            if piece.start < last.stop:
                self.twice.append(range(piece.start, min(piece.stop, last.stop)))
            if piece.start <= last.stop:
                self.ranges[-1:] = [range(last.start, max(last.stop, piece.stop))]
            else:
                self.ranges.append(piece)
        self._starts = [piece.start for piece in self.ranges]

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Ranges:
        """Return these numbers."""
        return cls(range(number, number + 1) for number in numbers)

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __contains__(self, number: int) -> bool:
        place = bisect(self._starts, number) - 1
        return place >= 0 and number < self.ranges[place].stop

    def without(self, others: Ranges) -> Iterator[range]:
        """Yield what is not in the others."""
        for piece in self.ranges:
            start = piece.start
            place = max(0, bisect(others._starts, start) - 1)
            while place < len(others.ranges) and others.ranges[place].start < piece.stop:
                other = others.ranges[place]
                if start < other.start:
                    yield range(start, other.start)
                start = max(start, other.stop)
                place += 1
            if start < piece.stop:
                yield range(start, piece.stop)


class Slots:
    """Slot numbers of a run, in the order of its messages; an immutable value, kept as ranges.

    Appending is cheap because values share one list of ranges that only grows: a value is a window on that list plus
    its own last range, and the value that ends where the list ends may append to it. (Any number of threads may read a
    value at once; extending the same value from two threads at once needs a lock above.)

    Cost: `len` O(1); `a + b` O(ranges of b), amortised; `take(n)` O(ranges taken).
    Memory: a range is about 110 bytes; slots written one after the other are one range.
    """

    __slots__ = ("_count", "_last", "_ranges", "_skip", "_start", "_stop")

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        """Hold these ranges (step 1); adjacent ones are joined, empty ones left out."""
        self._ranges: list[range] = []
        self._start = self._skip = 0
        self._last = range(0)
        for piece in ranges:
            if not piece:
                continue
            if self._last and self._last.stop == piece.start:
                self._last = range(self._last.start, piece.stop)
                continue
            if self._last:
                self._ranges.append(self._last)
            self._last = piece
        self._stop = len(self._ranges)
        self._count = sum(map(len, self._ranges)) + len(self._last)

    @classmethod
    def _window(cls, ranges: list[range], start: int, stop: int, skip: int, last: range, count: int) -> Slots:
        """Make the value of `ranges[start:stop]` without the first `skip` slots, then `last`."""
        made = cls.__new__(cls)
        made._ranges, made._start, made._stop = ranges, start, stop
        made._skip, made._last, made._count = skip, last, count
        return made

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and list(self.ranges()) == list(other.ranges())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Slots([{', '.join(f'{piece.start}:{piece.stop}' for piece in self.ranges())}])"

    def ranges(self) -> Iterator[range]:
        """Yield the ranges, none of them empty, no two that follow each other adjacent."""
        skip = self._skip
        for index in range(self._start, self._stop):
            yield self._ranges[index][skip:]
            skip = 0
        if self._last:
            yield self._last[skip:]

    def __add__(self, other: Slots) -> Slots:
        if not other:
            return self
        if not self:
            return other
        ranges, start, stop, last = self._ranges, self._start, self._stop, self._last
        if stop != len(ranges) or (start > _COMPACT_AT and start > stop // 2):
            ranges, start, stop = ranges[start:stop], 0, stop - start
        for piece in other.ranges():
            if last.stop == piece.start:
                last = range(last.start, piece.stop)
            else:
                ranges.append(last)
                stop += 1
                last = piece
        return self._window(ranges, start, stop, self._skip, last, self._count + other._count)

    def take(self, count: int) -> tuple[Slots, Slots]:
        """Split into the first `count` slots and the rest; neither this value nor the split ones change later."""
        if count <= 0:
            return Slots(), self
        if count >= self._count:
            return self, Slots()
        taken: list[range] = []
        wanted, index, skip = count, self._start, self._skip
        while True:
            whole = self._ranges[index] if index < self._stop else self._last
            if len(whole) - skip > wanted:
                break
            taken.append(whole[skip:])
            wanted -= len(whole) - skip
            index, skip = index + 1, 0
        taken.append(whole[skip : skip + wanted])
        rest = self._window(self._ranges, index, self._stop, skip + wanted, self._last, self._count - count)
        return Slots(taken), rest
