"""Going through all that waits in a queue, beside everybody who uses it: `Queue.browse`.

A part is looked at under the lock and shown without it. A lane's list is gone through by sequence, a schedule by due
time, and then by chunk what of it is on disk. So whatever waits in its place all the while is shown once, and what was
put later is not; what comes back, or moves between memory and disk in a schedule, may be left out, or shown twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from heapq import merge
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import TypeAlias

from qflow.delivery import Entry, Keeper
from qflow.memory.group import Group, Key
from qflow.memory.run import Place
from qflow.memory.waiting import shelter
from qflow.message import DELAYED, RETURNED, lane_of
from qflow.named_tuples import NamedTuple
from qflow.queues.parts import Parts
from qflow.queues.restorer import READ_AHEAD_BYTES
from qflow.storage.log import reading, rows

AT_ONCE = 1_000
"""Entries that are shown before others are let pass: 0.3 ms. So many are looked at first: often nobody wants more."""
LOOKED_AT_ONCE = 16_384
"""Messages of a list that are looked at under the lock: 0.2 to 1 ms. Longer runs are cut, for those behind."""
RUN_WORTH = 16
"""Messages that it takes as long to look at as at the run they are in."""
GROUPS_AT_ONCE = 256

Entries: TypeAlias = Iterator[Entry]
Piece: TypeAlias = tuple[int, Iterable[Entry]]
"""How many entries come next, `AT_ONCE` or fewer but for those of the log, and these."""


class Part(NamedTuple):
    """Messages that lie together."""

    first: int
    stop: int
    place: Place
    sizes: list[int] | None
    """None outside memory."""


class Browsing:
    """What waits in a queue when this is made. See the module."""

    def __init__(self, queue: Parts, keeper: Keeper) -> None:
        self._context = queue.context
        self._lanes = queue.lanes
        self._keeper = keeper
        self._ends: dict[int, int] = {}
        """The sequence after the last one, by lane."""
        self._lists: list[int] = []
        """Lanes to take from, the highest priority first."""
        shelter(self._begin)

    def _begin(self) -> None:
        with self._context.lock:
            self._context.check_open()
            self._ends = {number: runs.next for number, runs in self._lanes.lists.items()}
            self._lists = [runs.number for runs in self._lanes.ranked]

    def entries(self) -> Entries:
        """Yield all entries; behind every few, others are let pass."""
        shown = 0
        for count, some in chain.from_iterable(map(self._lane, self._lists)):
            yield from some
            shown += count
            if shown >= AT_ONCE:
                self._context.shared.let_pass()
                shown = 0

    def _lane(self, number: int) -> Iterator[Piece]:
        """Yield the entries of a lane, and of what is delayed in it."""
        schedules = self._lanes.schedules
        if number in schedules:  # single messages that came back, each in its place
            listed = chain.from_iterable(some for _, some in self._listed(number))
            lines = [listed, self._on_shelves(number, None), *self._away(number, None)]
            yield from _pieces(merge(*lines, key=attrgetter("sequence")))
        else:
            yield from self._listed(number)
        if number + DELAYED in self._ends:
            yield from self._listed(number + DELAYED)
        ahead_ms = self._context.now_ms() - self._lanes.now_ms(RETURNED)
        for place, ahead in ((number + DELAYED, 0), (number + RETURNED, ahead_ms)):
            if place in schedules:
                yield from _pieces(self._on_shelves(place, ahead))
                for line in self._away(place, ahead):
                    yield from _pieces(line)

    # A list ----------------------------------------------------------------------------------------------------------

    def _listed(self, number: int) -> Iterator[Piece]:
        """Yield what is in the list of a lane."""
        position, wanted = 0, AT_ONCE
        while parts := shelter(partial(self._look, number, position, wanted)):
            for first, stop, place, sizes in parts:
                if place is Place.LOGGED:
                    yield from self._logged(first, stop)
                    continue
                known: Iterator[int | None] = iter(sizes) if sizes is not None else repeat(None)
                for start in range(first, stop, AT_ONCE):
                    yield self._entries(range(start, min(stop, start + AT_ONCE)), known, place)
            position, wanted = parts[-1].stop, LOOKED_AT_ONCE

    def _look(self, number: int, position: int, most: int) -> list[Part]:
        """Return what lies in a list from a sequence on: about `most` messages; nothing at the end."""
        parts: list[Part] = []
        with self._context.lock:
            self._context.check_open()
            runs, end = self._lanes.lists[number], self._ends[number]
            while position < end and most > 0:
                run = runs.following(position)
                if run is None or run.first >= end:
                    break
                first, stop, sizes = max(position, run.first), min(run.stop, end), None
                if run.place is Place.RESIDENT:
                    skipped = first - run.first
                    if len(run.records) > LOOKED_AT_ONCE < skipped + most and run.claim is None:
                        runs.cut_left(run, LOOKED_AT_ONCE)  # for a deque is slow to look into
                        continue
                    sizes = list(map(len, islice(run.records, skipped, skipped + min(most, stop - first))))
                    stop = first + len(sizes)
                    most -= stop - first
                if run.waiting:
                    parts.append(Part(first, stop, run.place, sizes))
                    most -= RUN_WORTH
                position = stop
        return parts

    def _logged(self, position: int, stop: int) -> Iterator[Piece]:
        """Yield what the log has of a list."""
        while position < stop:
            found = shelter(partial(self._read, position, stop))
            for first, records in found.pieces:
                yield self._entries(range(first, first + len(records)), map(len, records), Place.LOGGED)
            position = found.position

    def _read(self, position: int, stop: int) -> reading.Replayed:
        context = self._context
        assert context.log is not None
        owner, number = context.owner, lane_of(position)
        with context.log.read(buffers=True) as txn:
            context.check_open()
            row = rows.read_row(txn, owner, number)
            return reading.read_unsettled(txn, owner, number, row, position, stop, READ_AHEAD_BYTES)

    def _entries(self, numbers: range, sizes: Iterable[int | None], place: Place) -> Piece:
        keeper, state = self._keeper, place.value
        return len(numbers), (Entry(number, size, state, keeper) for number, size in zip(numbers, sizes, strict=False))

    # A schedule ------------------------------------------------------------------------------------------------------

    def _on_shelves(self, number: int, ahead_ms: int | None) -> Entries:
        """Yield what a schedule has in memory, in order.

        Args:
            ahead_ms: of the clock, to that of the schedule; None: when it is due is told of none.
        """
        key: Key | None = ()
        while key is not None:
            groups, key = shelter(partial(self._look_at_shelves, number, key))
            yield from self._of_groups(groups, ahead_ms)

    def _look_at_shelves(self, number: int, key: Key) -> tuple[list[Group], Key | None]:
        with self._context.lock:
            self._context.check_open()
            return self._lanes.schedules[number].shelves.groups_from(key, GROUPS_AT_ONCE)

    def _away(self, number: int, ahead_ms: int | None) -> list[Entries]:
        """Return what else a schedule has, by chunk."""
        moving, spilled = shelter(partial(self._look_away, number))
        return [self._of_groups(groups, ahead_ms) for groups in moving] + [self._of_chunk(one) for one in spilled]

    def _look_away(self, number: int) -> tuple[list[list[Group]], list[array[int]]]:
        with self._context.lock:
            self._context.check_open()
            schedule = self._lanes.schedules[number]
            moving = [[*chunk.groups] for chunk in schedule.moving()]
            return moving, [chunk.sequences for chunk in schedule.spilled]

    def _of_groups(self, groups: Iterable[Group], ahead_ms: int | None) -> Entries:
        for due_ms, first, _, *records in groups:
            if self._was_there(first):
                told_ms = None if ahead_ms is None else due_ms + ahead_ms
                for sequence, record in enumerate(records, first):
                    yield Entry(sequence, len(record), Place.RESIDENT.value, self._keeper, told_ms)

    def _of_chunk(self, sequences: array[int]) -> Entries:
        for sequence in sequences:
            if self._was_there(sequence):
                yield Entry(sequence, None, Place.SPILLED.value, self._keeper)

    def _was_there(self, sequence: int) -> bool:
        return sequence < self._ends.get(lane_of(sequence), 0)


def _pieces(entries: Entries) -> Iterator[Piece]:
    while some := list(islice(entries, AT_ONCE)):
        yield len(some), some
