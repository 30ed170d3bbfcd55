"""Entries by hand: every message that waits, and the moving of one of them between memory and the spill store."""

from __future__ import annotations

from collections.abc import Iterator

from qflow.delivery import Entry
from qflow.errors import NotFound, QueueFull
from qflow.memory import inventory
from qflow.memory.run import Place, Run
from qflow.memory.waiting import sheltered
from qflow.message import OVERHEAD_BYTES, lane_of
from qflow.queues.browsing import Browsing
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
            entry[0] == sequence for schedule in self._lanes.schedules.values() for entry in inventory.entries(schedule)
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
        entries = iter(()) if scattered is None else inventory.entries(scattered)
        return next((state for number, _, state, _ in entries if number == sequence), "delayed")
