"""Entries by hand: every message that waits, and the moving of one of them between memory and the spill store."""

from __future__ import annotations

from collections.abc import Iterator
from time import sleep

from qflow.delivery import Entry
from qflow.errors import NotFound, QueueFull
from qflow.memory.line import PAUSE_S
from qflow.memory.run import Place, Run
from qflow.memory.seeking import Seeking, find_spilled
from qflow.memory.waiting import sheltered
from qflow.message import DELAYED, OVERHEAD_BYTES, RETURNED, lane_of
from qflow.queues.browsing import Browsing
from qflow.queues.context import Unlocked
from qflow.queues.deleting import SOUGHT_AT_ONCE
from qflow.queues.parts import Parts


class Entries:
    """See the module."""

    def __init__(self, queue: Parts) -> None:
        self._queue = queue
        self._context = queue.context
        self._lanes = queue.lanes

    def browse(self) -> Iterator[Entry]:
        """Yield every waiting entry; see `Queue.browse`."""
        return Browsing(self._queue, self).entries()

    @sheltered
    def spill_entry(self, sequence: int) -> str:
        """Spill one message; see `Entry.spill`."""
        claim = object()
        spiller = self._queue.spiller
        with self._context.lock:
            run = self._waiting_run(sequence)
            moves = run is not None and run.place is Place.RESIDENT and run.claim is None
            if run is not None and moves:
                runs = self._lanes.list_of(sequence)
                run = runs.cut_out(run, sequence, sequence + 1)
                run.claim = claim
                records = list(run.records)
                spiller.under_way.add(claim)
        if run is None or not moves:
            return self._state(sequence)
        slots = None
        try:
            slots = spiller.area.write(sequence, records)
        finally:
            with self._context.lock:
                installed, _ = spiller.install(lane_of(sequence), run, claim, slots)
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
        with self._context.lock:
            run = self._waiting_run(sequence)
            if run is not None and run.place is Place.SPILLED and run.claim is None:
                self._restore(run, sequence)
        return self._state(sequence)

    def _restore(self, run: Run, sequence: int) -> None:
        """Bring one message of a spilled run into memory. Under the lock; lets go of it."""
        claim = object()
        queue, runs = self._queue, self._lanes.list_of(sequence)
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
                    return
            queue.restorer.read_in(runs, run, claim, need, False)
        finally:
            if run.claim is claim:
                run.claim = None
                runs.join(run)
            queue.admission.rebalance()
            queue.restorer.wake_waiting()

    def _waiting_run(self, sequence: int) -> Run | None:
        """Return the run of a waiting message; None: a schedule has it, or nobody. Under the lock."""
        self._context.check_open()
        runs = self._lanes.lists.get(lane_of(sequence))
        return None if runs is None else runs.find(sequence)

    def _state(self, sequence: int) -> str:
        """Return where a message is, in steps where a schedule may have it. Raises NotFound: it waits no more."""
        seekings: dict[int, Seeking] = {}
        try:
            while True:
                with self._context.lock:
                    run = self._waiting_run(sequence)
                    state = self._seek(sequence, seekings) if run is None else run.place.value
                if state is not None:
                    return state
                sleep(PAUSE_S)
        finally:
            with self._context.lock:
                for seeking in seekings.values():
                    seeking.end()

    def _seek(self, sequence: int, seekings: dict[int, Seeking]) -> str | None:
        """Take a step of looking through schedules; None if there is another one. Under the lock; lets go of it."""
        lanes, number = self._lanes, lane_of(sequence)
        for place in (number, number % DELAYED + RETURNED):
            if place in lanes.schedules and place not in seekings:
                seekings[place] = Seeking(lanes.schedules[place], sequence)
        for place, seeking in seekings.items():
            before = lanes.scheduled_bytes()
            group = seeking.look(SOUGHT_AT_ONCE)
            if (charged := lanes.scheduled_bytes() - before) != 0:  # what was being spilled is back
                lanes.cover(charged)
            if group is not None:
                return "delayed" if place >= DELAYED else Place.RESIDENT.value
            if not seeking.is_over:
                return None
        for place, seeking in seekings.items():
            chunks = [(chunk, chunk.sequences) for chunk in seeking.schedule.spilled]
            with Unlocked(self._context):
                found = find_spilled(chunks, sequence)
            if found is not None:
                return "delayed" if place >= DELAYED else Place.SPILLED.value
        if self._waiting_run(sequence) is None and all(seeking.is_over for seeking in seekings.values()):
            raise NotFound(f"message {sequence} does not wait in queue {self._context.name!r} any more")
        return None
