"""Entries by hand: every message that waits, and the moving of one of them between memory and the spill store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, repeat
from typing import Any

from qflow.delivery import Entry
from qflow.errors import NotFound, QueueFull
from qflow.memory.run import Place, Run
from qflow.memory.waiting import shelter, sheltered
from qflow.message import DELAYED, OVERHEAD_BYTES, RETURNED, Record, lane_of
from qflow.queues.parts import Parts
from qflow.queues.restorer import READ_AHEAD_BYTES
from qflow.storage.log import reading, rows

AT_ONCE = 1000
"""Entries that are shown before others are let pass: 0.3 ms."""
MEASURED_AT_ONCE = 65_536
"""Records whose sizes are taken in one call of C, for which all threads stand still: 1 ms."""


class Entries:
    """See the module."""

    def __init__(self, queue: Parts) -> None:
        self._queue = queue
        self._context = queue.context
        self._lanes = queue.lanes

    def browse(self) -> Iterator[Entry]:
        """Yield every waiting entry; see `Queue.browse`."""
        return self._entries(self._browsed())

    @sheltered
    def _browsed(self) -> list[Any]:
        """Return what `browse` shows, in parts."""
        lists, schedules = self._lanes.lists, self._lanes.schedules
        with self._context.lock:
            self._context.check_open()
            parts: list[Any] = []
            for runs in self._lanes.ranked:
                number = runs.number
                for line in (runs, lists.get(number + DELAYED, ())):
                    places = [(run.first, run.stop, run.place, _sizes(run.records)) for run in line if run.waiting]
                    if line is runs and number in schedules:
                        places += (
                            (sequence, sequence + 1, Place(state), [] if size is None else [size])
                            for sequence, size, state, _ in schedules[number].entries()
                        )
                        places.sort()
                    parts += places
                if number + DELAYED in schedules:
                    parts.append(list(schedules[number + DELAYED].entries()))
                if number + RETURNED in schedules:
                    ahead_ms = self._context.now_ms() - self._lanes.now_ms(RETURNED)
                    parts.append(
                        [
                            (sequence, size, state, None if due_ms is None else due_ms + ahead_ms)
                            for sequence, size, state, due_ms in schedules[number + RETURNED].entries()
                        ]
                    )
        return parts

    def _entries(self, parts: list[Any]) -> Iterator[Entry]:
        """Yield what some parts show; behind every few, others are let pass."""
        shown = 0
        for part in parts:
            for count, entries in self._pieces(part):
                yield from entries
                shown += count
                if shown >= AT_ONCE:
                    self._context.shared.let_pass()
                    shown = 0

    def _pieces(self, part: Any) -> Iterator[tuple[int, Iterator[Entry]]]:
        """Yield how many entries come next, `AT_ONCE` or fewer, and those; a part of the log brings more at once."""
        if isinstance(part, list):
            for place in range(0, len(part), AT_ONCE):
                some = part[place : place + AT_ONCE]
                yield len(some), (Entry(number, size, state, self, due_ms) for number, size, state, due_ms in some)
            return
        first, stop, place, sizes = part
        if place is Place.LOGGED:
            yield from self._logged_pieces(first, stop)
            return
        state, known = place.value, iter(sizes or repeat(None))
        for start in range(first, stop, AT_ONCE):
            numbers = range(start, min(stop, start + AT_ONCE))
            yield len(numbers), (Entry(number, size, state, self) for number, size in zip(numbers, known, strict=False))

    def _logged_pieces(self, position: int, stop: int) -> Iterator[tuple[int, Iterator[Entry]]]:
        while position < stop:
            found = shelter(partial(self._read_logged_entries, position, stop))
            if found is None:
                return
            for first, records in found.pieces:
                sizes = enumerate(map(len, records), first)
                yield len(records), (Entry(number, size, Place.LOGGED.value, self) for number, size in sizes)
            position = found.position

    def _read_logged_entries(self, position: int, stop: int) -> reading.Replayed | None:
        context = self._context
        assert context.log is not None
        owner, number = context.owner, lane_of(position)
        with context.log.read() as txn:
            if context.ended is not None:
                return None
            row = rows.read_row(txn, owner, number)
            return reading.read_unsettled(txn, owner, number, row, position, stop, READ_AHEAD_BYTES)

    @sheltered
    def spill_entry(self, sequence: int) -> str:
        """Spill one message; see `Entry.spill`."""
        claim = object()
        spiller = self._queue.spiller
        with self._context.lock:
            run = self._waiting_run(sequence)
            if run is None or run.place is not Place.RESIDENT or run.claim is not None:
                return self._state_of(run, sequence)
            runs = self._lanes.list_of(sequence)
            run = runs.cut_out(run, sequence, sequence + 1)
            run.claim = claim
            records = list(run.records)
            spiller.under_way.add(claim)
        slots = None
        try:
            slots = spiller.area.write(sequence, records)
        finally:
            with self._context.lock:
                installed = spiller.install(lane_of(sequence), run, claim, slots)
                if not installed and run.claim is None and run.records:
                    runs.join(run)
            try:
                if slots is not None and not installed:
                    spiller.area.free(slots)
            finally:
                spiller.under_way.discard(claim)
        return self._state(sequence)

    @sheltered
    def restore_entry(self, sequence: int) -> str:
        """Restore one message; see `Entry.restore`."""
        claim = object()
        queue = self._queue
        with self._context.lock:
            run = self._waiting_run(sequence)
            if run is None or run.place is not Place.SPILLED or run.claim is not None:
                return self._state_of(run, sequence)
            runs = self._lanes.list_of(sequence)
            run = runs.cut_out(run, sequence, sequence + 1)
            run.claim = claim
            try:
                need = run.largest + OVERHEAD_BYTES
                while queue.gate.find(need, need) < need:
                    if run.claim is claim and not queue.spiller.find_room_for(need):
                        raise QueueFull(
                            f"message {sequence} of queue {self._context.name!r} finds no room in memory: what is "
                            "acquired, or on its way, takes it; settle some of it first"
                        )
                    if run.claim is not claim:
                        return self._state(sequence)
                queue.restorer.read_in(runs, run, claim, need, False)
            finally:
                if run.claim is claim:
                    run.claim = None
                    runs.join(run)
                queue.admission.rebalance()
                queue.restorer.wake_waiting()
            return self._state(sequence)

    def _waiting_run(self, sequence: int) -> Run | None:
        """Return the run of a waiting message; None: a schedule has it. Under the lock. Raises NotFound: it left."""
        self._context.check_open()
        runs = self._lanes.lists.get(lane_of(sequence))
        run = runs.find(sequence) if runs is not None else None
        if run is None and not any(
            entry[0] == sequence for schedule in self._lanes.schedules.values() for entry in schedule.entries()
        ):
            raise NotFound(f"message {sequence} does not wait in queue {self._context.name!r} any more")
        return run

    def _state(self, sequence: int) -> str:
        with self._context.lock:
            return self._state_of(self._waiting_run(sequence), sequence)

    def _state_of(self, run: Run | None, sequence: int) -> str:
        if run is not None:
            return run.place.value
        scattered = self._lanes.schedules.get(lane_of(sequence))
        entries = iter(()) if scattered is None else scattered.entries()
        return next((state for number, _, state, _ in entries if number == sequence), "delayed")


def _sizes(records: Iterable[Record]) -> list[int]:
    """Return how many bytes each of these has. Cost: 0.01 µs each."""
    found: list[int] = []
    sizes = map(len, records)
    while some := list(islice(sizes, MEASURED_AT_ONCE)):
        found += some
    return found
