"""What leaves a queue without being delivered: purged, dropped at a limit, expired.

Under the queue's lock where a description says nothing else; what reads, or carries dead letters away, lets go of it.
"""

from __future__ import annotations

from itertools import islice

from qflow.delivery import Segment
from qflow.errors import again
from qflow.memory.run import NOTHING, Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.message import OVERHEAD_BYTES, expires_of, lane_of
from qflow.queues.admission import Admission
from qflow.queues.context import Unlocked
from qflow.queues.held import Held
from qflow.queues.lanes import Lanes, by_expiry
from qflow.queues.leaving import Exit, Fate, weigh
from qflow.queues.overflow import Depth
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source
from qflow.queues.spiller import Spiller
from qflow.storage.log.rows import Settled

EXPIRED_AT_ONCE = 10_000
DUE_AT_ONCE = 1_000
DROPPED_AT_ONCE = 10_000
FOREVER_MS = 2**62


class Purging:
    """Everything goes at once."""

    def __init__(self, lanes: Lanes, admission: Admission, held: Held, spiller: Spiller) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self._admission = admission
        self._held = held
        self._spiller = spiller
        self.count = 0

    def purge(self) -> int:
        """Settle every message, acquired ones included; return how many. Takes the lock."""
        log = self._context.log
        with self._context.lock:
            self._context.check_open()
            before = self.count
            if log is None:
                self.drop_all()
                return self.count - before
            self._admission.pending += 1  # what is not logged waits in line behind it
        try:
            batch = log.purge(self._lanes.logged.values())
            log.wait(batch)
        finally:
            with self._context.lock:
                self._admission.pending -= 1
        if batch.error is not None:
            raise again(batch.error)
        return self.count - before

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything: that all lanes are settled below these ends is committed. Takes the lock."""
        with self._context.lock:
            if any(self._lanes.purged_below.get(number, -1) < end for number, end in ends.items()):
                self.drop_all(ends)

    def drop_all(self, ends: dict[int, int] | None = None) -> None:
        """Forget every message, acquired ones included, and every number of a lane below its end."""
        ends = ends or {}
        lanes = self._lanes
        dropped = lanes.messages()
        charged = self._gate.visible
        self.count += dropped
        lanes.gone += dropped
        lanes.message_bytes = 0
        self._held.drop_all()
        for number, runs in lanes.lists.items():
            for run in runs.drop_all(ends.get(number, 0)):
                run.claim = None
                if run.place is Place.SPILLED:
                    self._spiller.trash.append(run.slots)
                run.records = NOTHING
            lanes.purged_below[number] = runs.next
        for schedule in lanes.schedules.values():
            self._spiller.trash += schedule.drop_all()
        lanes.skipped += lanes.messages()
        lanes.renew_front()
        self._admission.rebalance(charged)


class Exits:
    """Messages go that came first, or that have expired."""

    def __init__(
        self, lanes: Lanes, held: Held, source: Source, spiller: Spiller, restorer: Restorer, way_out: Exit
    ) -> None:
        self._context = lanes.context
        self._lanes = lanes
        self._held = held
        self._source = source
        self._spiller = spiller
        self._restorer = restorer
        self._exit = way_out

    # At a limit ------------------------------------------------------------------------------------------------------

    def drops_from_disk(self) -> bool:
        """Tell whether `drop_oldest` would read, as things are."""
        for runs in reversed(self._lanes.ranked):
            place = runs.settle_head().place
            if place is not Place.RESIDENT or runs.head.waiting:
                return place is not Place.RESIDENT
        return False

    def drop_oldest(self, surplus: Depth) -> bool:
        """Drop waiting messages to make room; False if there are none."""
        surplus = Depth(min(surplus.messages, DROPPED_AT_ONCE), surplus.bytes)
        for runs in reversed(self._lanes.ranked):
            if self._drop_from_schedule(runs.number, surplus):
                return True
            if runs.settle_head().place is not Place.RESIDENT:
                # How much is too much may have changed meanwhile.
                return self._restorer.restore_head(runs, to_drop=True)
            segments: list[Segment] = []
            dropped = size = 0
            while (dropped < surplus.messages or size < surplus.bytes) and dropped < DROPPED_AT_ONCE:
                before = len(segments)
                if not runs.take(max(1, surplus.messages - dropped) if surplus.bytes <= 0 else 1, segments):
                    break
                count, weight = weigh(segments[before:])
                dropped += count
                size += weight
            if segments:
                self._exit.settle_away(segments, Fate.DROPPED)
                return True
        return any(self._drop_from_schedule(number, surplus) for number in self._lanes.schedules)

    def _drop_from_schedule(self, number: int, surplus: Depth) -> bool:
        """Drop what comes first in a schedule; False if there is none, or nothing in it."""
        schedule = self._lanes.schedules.get(number)
        if schedule is None:
            return False
        segments: list[Segment] = []
        if not self._source.take_due(schedule, max(1, surplus.messages), FOREVER_MS, segments):
            self._restorer.restore_delayed(number, FOREVER_MS)
            if not self._source.take_due(schedule, 1, FOREVER_MS, segments):
                return False
        self._exit.settle_away(segments, Fate.DROPPED)
        return True

    # Expiry ----------------------------------------------------------------------------------------------------------

    def expire(self) -> bool:
        """Let expired messages go that are first in their lane; return whether there may be more."""
        for runs in self._lanes.ranked:
            gone = 0
            while gone < EXPIRED_AT_ONCE:
                run = runs.settle_head()
                now_ms = self._context.now_ms()
                if run.place is not Place.RESIDENT:
                    if run.place is Place.SPILLED and not 0 < run.expires_ms <= now_ms:
                        break
                    if run.place is Place.SPILLED and self._context.settings.dead_letter is None and run.claim is None:
                        gone += run.count
                        self._drop_run(runs, run)
                    elif not self._restorer.restore_head(runs):
                        if self._context.log is None or not self._held.leaving:
                            break
                        with Unlocked(self._context):  # what has left memory makes room for the next
                            self._context.log.drain()
                        if self._context.ended is not None:
                            return False
                    continue
                late = 0
                for record in islice(run.records, EXPIRED_AT_ONCE):
                    if not 0 < expires_of(record) <= now_ms:
                        break
                    late += 1
                if not late:
                    break
                segments: list[Segment] = []
                gone += runs.take(late, segments)
                if not self._exit.let_go_of((segments, "expired", Fate.EXPIRED)):
                    return False
            else:
                return True
        for number, schedule in self._lanes.schedules.items():
            if self._lanes.lists[number].settle_head().place is Place.RESIDENT:
                self._expire_delayed(schedule)
        return False

    def _expire_delayed(self, schedule: Schedule) -> None:
        """The same of what was delayed, as far as it is in memory. (Nothing expires before it is due.)"""
        late: list[Segment] = []
        segments: list[Segment] = []
        now_ms = self._context.now_ms()
        while not segments and len(late) < DUE_AT_ONCE:
            if not self._source.take_due(schedule, DUE_AT_ONCE, now_ms, segments):
                break
            parts = [part for segment in segments for part in by_expiry(segment, now_ms)]
            first_kept = next((place for place, (_, is_late) in enumerate(parts) if not is_late), len(parts))
            late += [part for part, _ in parts[:first_kept]]
            segments = [part for part, _ in parts[first_kept:]]
        self._source.give_back(segments)
        self._exit.let_go_of((late, "expired", Fate.EXPIRED))

    def _drop_run(self, runs: RunList, run: Run) -> None:
        """Drop a spilled run without reading it: everything in it has expired."""
        lanes, count, charged = self._lanes, run.count, run.charged
        log = self._context.usable_log
        if log is not None:
            settled = Settled(run.first, run.end, run.logged_count, run.logged_bytes)
            log.settle(lanes.logged[lane_of(run.first)], [settled])
        self._spiller.trash.append(run.slots)
        runs.drop_front(run, run.end, count, charged)
        self._exit.count_off(count, charged - OVERHEAD_BYTES * count, Fate.EXPIRED)
