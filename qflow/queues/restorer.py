"""Messages come back into memory: from the spill store, or from the log, where they are found at open.

A run on the move carries a claim, and what was moved counts only if the claim still stands. Under the queue's lock;
what reads lets go of it meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qflow.memory.chunk import CHUNK_BYTES, Chunk
from qflow.memory.group import GROUP_BYTES
from qflow.memory.line import Wake
from qflow.memory.run import Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.seeking import Found
from qflow.message import DELAYED, OVERHEAD_BYTES, RETURNED, Record, charge, due_of, is_logged, is_plain, lane_of
from qflow.problems import PROBLEMS_KEPT
from qflow.queues.admission import Admission
from qflow.queues.context import Unlocked
from qflow.queues.fetching import Moved, read_area, read_logged, read_spilled, repair
from qflow.queues.held import Held
from qflow.queues.lanes import Lanes
from qflow.queues.spiller import Spiller, position
from qflow.storage.log.rows import Settled
from qflow.storage.spill.store import Slots

READ_AHEAD_BYTES = 1024 * 1024
"""Restored at once, at most; and no more than an eighth of the capacity."""
FEW = 16
"""Fewer messages than that come into memory with one beside them, where they would be a run, or a chunk, of their own:
each takes about 1 KiB."""


class Restorer:
    """See the module."""

    def __init__(self, lanes: Lanes, admission: Admission, held: Held, spiller: Spiller) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self._admission = admission
        self._held = held
        self._spiller = spiller
        self.lost = self.quarantined = self.repaired = 0
        self.lost_ranges: Sequence[tuple[int, int]] = ()
        self.refilling = False
        """The capacity was raised: what is on disk may come back."""
        self.waiting: dict[object, Wake] = {}
        """Who waits until what another thread is moving is there, and what wakes them: all of them, each time."""
        self._undercounted = False  # the log was found to hold more than its row says

    def bring(self, behind: RunList | int) -> bool:
        """Bring what comes next into memory, from a lane or the schedule of this number. Lets go of the lock.

        Returns:
            False if it has to wait until something is settled, spilled, or restored by another thread.
        """
        if isinstance(behind, int):
            return self.restore_delayed(behind, self._lanes.now_ms(behind))
        return self.restore_head(behind)

    def is_moving(self, behind: RunList | int) -> bool:
        """Tell whether another thread is moving what comes next, so that `bring` has to wait for it."""
        moving = self._lanes.schedules[behind].next_away if isinstance(behind, int) else behind.settle_head()
        return moving is not None and moving.claim is not None

    @property
    def is_busy(self) -> bool:
        """Another thread is spilling, or reads something in."""
        return bool(self._spiller.under_way or self._gate.restoring)

    @property
    def is_refused(self) -> bool:
        """The disk has not taken what was to be spilled last: no room comes of that, and what is in memory goes out."""
        return self._spiller.error is not None

    def find_room(self) -> bool:
        """Have memory given back, or spill. Lets go of the lock."""
        return self._spiller.find_room_for(0)

    def restore_head(self, runs: RunList, *, to_drop: bool = False) -> bool:
        """Bring a lane's head into memory, as much as there is room for; as `bring`.

        One message that is to be dropped at once comes whatever room there is.
        """
        claim = object()
        run = runs.claim_head(claim)
        if run is None:
            return False
        gained = True
        try:
            gained = self._restore(runs, run, claim, to_drop)
            return gained
        finally:
            self._unclaim(run, claim, gained)

    def _unclaim(self, run: Run, claim: object, gained: bool) -> None:
        if run.claim is claim:
            run.claim = None
            self._admission.rebalance(gained=gained)
        self.wake_waiting()

    def wake_waiting(self) -> None:
        """After something was moved, or was not: have those look again who wait for that."""
        if self.waiting:
            wakes, self.waiting = self.waiting, {}
            for wake in wakes.values():
                wake()

    def _restore(self, runs: RunList, run: Run, claim: object, to_drop: bool = False) -> bool:
        """Restore the front of a claimed run; as `bring`."""
        need = run.needs + OVERHEAD_BYTES
        want = max(need, min(self._read_ahead_bytes, run.charged))
        alone = self._gate.find(need, want) < need
        if alone:
            if self._spiller.find_room_for(need) or run.claim is not claim or self._gate.find(need, need) >= need:
                return True
            if self._held.is_any() and not to_drop:
                return False
        return self.read_in(runs, run, claim, want, alone)

    def fetch(self, runs: RunList, run: Run, sequence: int) -> None:
        """Bring one message of a spilled run into memory, if there is room or it can be made. Lets go of the lock.

        As what is dropped, it comes whatever room there is where none can be made. With it come its neighbours, where
        they would be small runs, of which there are too many; in memory they belong into a schedule.
        """
        first, end, few = sequence, sequence + 1, self._few(run.largest)
        if first - run.first < few and runs.scatters(first - run.first):
            first = run.first
        if run.end - end < few and runs.scatters(run.end - end):
            end = run.end
        part = runs.cut_out(run, first, end)
        part.claim = claim = object()
        try:
            self._restore(runs, part, claim, to_drop=True)
        finally:
            if part.claim is claim:
                part.claim = None
                runs.join(part)
            self._admission.rebalance()
            self.wake_waiting()

    def _few(self, largest: int) -> int:
        """Return how many messages of this size, or fewer, take no more than is restored at once, or than a chunk."""
        return min(FEW, max(self._read_ahead_bytes // 2, CHUNK_BYTES) // (largest + OVERHEAD_BYTES + GROUP_BYTES))

    @property
    def _read_ahead_bytes(self) -> int:
        return min(READ_AHEAD_BYTES, self._gate.account.capacity // 8)

    def refill(self) -> bool:
        """Bring back a part of what is first on disk, while less than half of the capacity is used; False at the end.

        After the capacity was raised: else nothing comes back before its turn.
        """
        claim = object()
        with self._context.lock:
            if 2 * self._gate.used >= self._gate.account.capacity:
                return False
            for runs in self._lanes.ranked:
                run = runs.claim_first_away(claim)
                if run is not None:
                    break
            else:
                return False
            try:
                need = max(run.largest, run.needs) + OVERHEAD_BYTES
                if self._gate.find(need, need) < need:  # nobody gives way for what nobody has asked for
                    return False
                return self._restore(runs, run, claim)
            finally:
                self._unclaim(run, claim, True)

    def read_in(self, runs: RunList, run: Run, claim: object, want: int, alone: bool) -> bool:
        """Read what there is room for of the front of a claimed run, at most `want` bytes; as `bring`."""
        with self._reading(want) as budget:
            moved = self._read_head(run, budget, alone)
        if run.claim is not claim:
            return True
        run.claim = None
        for problem, damaged_blocks in moved.problems:  # of a run that was purged meanwhile it is none
            self._context.note_damage(problem, damaged_blocks)
        if moved.purged:
            self._admission.rebalance()
            return False
        self._finish(self._install(runs, run, moved))
        return True

    @contextmanager
    def _reading(self, want: int) -> Iterator[int]:
        """Let go of the lock, with what there is room for charged meanwhile, at most `want` bytes."""
        gate = self._gate
        budget = max(0, min(-gate.over, want))
        gate.used += budget
        gate.restoring += budget
        try:
            with Unlocked(self._context):
                yield budget
        finally:
            gate.used -= budget
            gate.restoring -= budget
            gate.note_change()

    def _finish(self, slots: Slots | None) -> None:
        """After messages came into memory: what is above the bounds is on slack; free where they lay."""
        self._gate.get_slack = max(0, self._gate.over - self._gate.put_slack)
        self._admission.rebalance()
        if slots:
            self._spiller.free(slots)

    def _read_head(self, run: Run, budget: int, alone: bool) -> Moved:
        """Read the front of a claimed run, as much as `budget` bytes hold; without the lock."""
        if run.place is Place.SPILLED:
            return read_spilled(self._context, self._spiller.area, run, budget, alone)
        return read_logged(self._context, self._lanes.logged[lane_of(run.first)], run, budget, alone)

    def _install(self, runs: RunList, run: Run, moved: Moved) -> Slots | None:
        """Put what was read before what is left of its run; return the slots it had. Under the lock."""
        count = sum(len(records) for _, records, _ in moved.pieces)
        charged = sum(charge(records) for _, records, _ in moved.pieces)
        settled = [Settled(first, end, 0, 0) for first, end in moved.lost]
        if moved.damaged_ranges:
            self._note_lost(moved.damaged_ranges)
        logged = run.place is Place.LOGGED
        slots: Slots | None = None
        if logged:
            vanished = self._compare(run, moved, count, charged, settled)
        else:
            slots, run.slots = run.slots.take(moved.position - run.first)
            vanished = self._count_off(run, moved)
        self._lanes.gone += vanished
        log = self._context.usable_log
        if log is not None and settled:
            log.settle(self._lanes.logged[lane_of(run.first)], settled)
        if log is not None and moved.damaged:
            log.quarantine(moved.damaged)
        if moved.position > run.first:
            if logged:
                runs.drop_front(run, moved.position, count, charged)
            else:
                runs.drop_front(run, moved.position, count + vanished, charged + OVERHEAD_BYTES * vanished)
                if moved.position >= run.end:
                    self._lanes.message_bytes -= run.leave_pool()  # what is left of it was lost
        for first, records, marks in moved.pieces:
            if logged and not is_plain(records):
                self._lanes.note_times(records)
            if not self._lanes.add(first, records, marks):
                runs.add(Run(first, marks, deque(records)))
        self._gate.used += charged
        self._gate.note_change()
        run.needs = moved.needs
        return slots

    def _count_off(self, run: Run, moved: Moved) -> int:
        """Note what of a SPILLED run was found, and how much of it by the log; return how many were lost."""
        vanished = sum(end - first for first, end in moved.lost)
        self.lost += vanished
        self.repaired += moved.repaired
        if moved.lost:
            run.expires_ms = 0  # what the log holds of the rest is not known any more
        for _, records, _ in moved.pieces:
            logged_records = [record for record in records if is_logged(record)]
            run.logged_count -= len(logged_records)
            run.logged_bytes -= sum(map(len, logged_records))
        return vanished

    def _compare(self, run: Run, moved: Moved, count: int, charged: int, settled: list[Settled]) -> int:
        """Settle the difference where a LOGGED run's row and blocks disagree; return how many messages are missing."""
        if count >= run.count and moved.more:
            settled.append(self._count_up(run, count, charged))
        left = run.count - count
        if moved.position < run.end or not left:
            return 0
        size = run.charged - charged - OVERHEAD_BYTES * left
        settled.append(Settled(run.first, run.first, left, size))
        self._context.note_damage(f"the log should hold {left} more messages below {run.end}, {size} bytes")
        self.quarantined += max(left, 0)
        self._lanes.message_bytes -= size
        return left

    def _count_up(self, run: Run, count: int, charged: int) -> Settled:
        """Correct a LOGGED run that holds more than the row said: a mark is damaged. Under the lock.

        One more than was read is counted, so that nobody takes the queue for empty before the run's end.
        """
        more = count + 1 - run.count
        size = max(0, charged - OVERHEAD_BYTES * count - (run.charged - OVERHEAD_BYTES * run.count))
        if not self._undercounted:
            self._undercounted = True
            self._context.note_damage(f"the log holds more messages below {run.end} than its row says")
        run.count += more
        run.charged += size + OVERHEAD_BYTES * more
        self._lanes.gone -= more
        self._lanes.message_bytes += size
        return Settled(run.first, run.first, -more, -size)

    def _note_lost(self, ranges: list[tuple[int, int]]) -> None:
        """Remember where messages were lost, as [first, end) of sequences; neighbours are one."""
        known = list(self.lost_ranges)
        for first, end in ranges:
            if known and known[-1][1] == first - 1:
                known[-1] = known[-1][0], end - 1
            elif len(known) < PROBLEMS_KEPT:
                known.append((first, end - 1))
        self.lost_ranges = known

    # Delayed ---------------------------------------------------------------------------------------------------------

    def restore_delayed(self, number: int, now_ms: int, *, to_drop: bool = False) -> bool:
        """Bring what is due next into memory; as `bring`, and as `restore_head` what is to be dropped."""
        claim = object()
        chunk = self._lanes.schedules[number].claim_next(claim, now_ms)
        return chunk is not None and self._restore_chunk(number, chunk, claim, to_drop)

    def fetch_delayed(self, number: int, found: Found) -> None:
        """Bring one message of a spilled chunk that nobody has claimed into memory, as `fetch`.

        It is cut off, with its neighbours where they would be small chunks, and chunks take much of the capacity.
        """
        schedule = self._lanes.schedules[number]
        chunk, sequences, place, rise = found
        first, end, few = place, place + 1, self._few(chunk.largest)
        if 16 * CHUNK_BYTES * len(schedule.spilled) > self._gate.account.capacity:
            first = 0 if first < few else first
            end = len(sequences) if len(sequences) - end < few else end
        due_ms = chunk.bound[0] + rise
        before = schedule.overhead_bytes
        part = schedule.cut_off(chunk, first, due_ms)
        if end < len(sequences):  # it ends with the message
            schedule.cut_off(part, end - first, due_ms + (sequences[end] < sequences[place]))
        self._lanes.cover(schedule.overhead_bytes - before)
        claim = object()
        self._restore_chunk(number, schedule.claim_spilled(claim, part), claim, to_drop=True)

    def _restore_chunk(self, number: int, chunk: Chunk, claim: object, to_drop: bool = False) -> bool:
        """Restore the front of a claimed chunk; as `_restore`."""
        schedule = self._lanes.schedules[number]
        gained = True
        try:
            need = chunk.largest + OVERHEAD_BYTES + GROUP_BYTES
            want = max(need, self._read_ahead_bytes)
            alone = self._gate.find(need, want) < need
            if alone:
                if self._spiller.find_room_for(need) or chunk.claim is not claim or self._gate.find(need, need) >= need:
                    return True
                if self._held.is_any() and not to_drop:
                    gained = False
                    return False
            slots, first = chunk.slots, chunk.first
            with self._reading(want) as budget:
                readable = need if alone else max(chunk.readable(budget), chunk.largest + OVERHEAD_BYTES)
                place, area = position(number, first), self._spiller.area
                pieces, problems = read_area(
                    self._context, area, place, chunk.sequences[0], slots, readable, chunk.largest
                )
                unpacked = chunk.unpacked(pieces)
                found = [(sequence, repair(self._context, sequence)) for sequence in unpacked.lost]
            before, spilled_bytes = schedule.charged, schedule.tally().spilled_bytes
            freed = schedule.restored(claim, unpacked)
            if freed is None:
                return True
            for (sequence, record), (_, text) in zip(found, problems, strict=True):
                self._install_repaired(number, sequence, record, text)
            self._gate.used += schedule.charged - before
            if spilled_bytes - schedule.tally().spilled_bytes != unpacked.message_bytes or unpacked.lost:
                # Some were lost: now, or earlier of this chunk.
                self._lanes.message_bytes = self._lanes.count_bytes(self._held.overhead_bytes)
            self._finish(freed)
            return True
        finally:
            if chunk.claim is claim:
                schedule.unclaim(claim)
                self._admission.rebalance(gained=gained)
            self.wake_waiting()

    def _install_repaired(self, number: int, sequence: int, record: Record | None, problem: str) -> None:
        """Take a message of a schedule from the log whose spill file is damaged; None if the log does not have it."""
        outcome = "lost" if record is None else "read from the log instead"
        what = "delayed message" if number >= DELAYED else "message"
        self._context.note_damage(f"{what} {sequence}: {problem}; {outcome}")
        if record is None:
            self.lost += 1
            self._lanes.gone += 1
            self._note_lost([(sequence, sequence + 1)])
            return
        self.repaired += 1
        due_ms = due_of(record) if number < RETURNED else 0  # that is known no more: at once
        self._lanes.schedules[number].shelves.add(due_ms, sequence, [record], 0)
