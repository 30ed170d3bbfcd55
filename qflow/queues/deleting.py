"""A delete on its way: one message, by its sequence, is taken from wherever it waits, and leaves with a commit.

What is to be moved is taken out likewise, and leaves with a commit of who moves it.

    in memory              it is taken out, also of what is being spilled: that is written for nothing
    in the spill store     it is brought into memory first, alone or with a few neighbours
    delayed, scattered     it is sought first, for a schedule is in the order of due times
    in the log alone       it is read, and its run claimed until the commit holds: nobody brings it back meanwhile
    being brought in       that is waited for

By steps, which threads and tasks take alike; what was handed over to the log is waited for by who takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from qflow.config import parse_sequences
from qflow.delivery import Segment
from qflow.errors import CorruptionError
from qflow.memory.line import FOREVER, PAUSE_S, WORK, Wake
from qflow.memory.run import Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.memory.seeking import Found, Seeking, find_spilled
from qflow.memory.waiting import attend
from qflow.message import DELAYED, OVERHEAD_BYTES, RETURNED, Record, lane_of
from qflow.queues.context import Unlocked
from qflow.queues.exits import Fate, Leaving
from qflow.queues.parts import Parts
from qflow.storage.log import reading
from qflow.storage.log.rows import Settled, read_row
from qflow.storage.log.transaction_log import Lane, Unit

AT_ONCE = 10_000
"""Messages of a run that one step goes through."""
SOUGHT_AT_ONCE = 2_000
"""Groups of a schedule that one step looks at: 0.7 µs each, for they lie anywhere in memory."""
AGAIN = 0.0
"""There is another step to take, now."""
MOST_ON_THE_WAY = 1_000
"""Deletes of one call that wait for a commit."""


def delete(queue: Parts, sequence: int) -> bool:
    """Delete one waiting message; see `Queue.delete`."""
    return bool(delete_many(queue, [sequence]))


def delete_many(queue: Parts, sequences: Iterable[int]) -> list[int]:
    """Delete waiting messages; see `Queue.delete_many`."""
    deleted: list[int] = []
    for deletings in deletings_of(queue, sequences):
        for deleting in deletings:
            attend(partial(deleting.step, may_work=True), deleting.give_up)
        for deleting in deletings:
            queue.claims.finish(deleting.handed_over, wait=True)
        queue.spiller.keep_within_bounds()
        deleted += [deleting.sequence for deleting in deletings if deleting.outcome()]
    return deleted


def deletings_of(queue: Parts, sequences: Iterable[int]) -> Iterator[list[Deleting]]:
    """Yield the deletes of waiting messages, so many at a time as are on their way together."""
    wanted = parse_sequences(sequences)
    for start in range(0, len(wanted), MOST_ON_THE_WAY):
        yield [Deleting(queue, sequence) for sequence in wanted[start : start + MOST_ON_THE_WAY]]


class Leavers:
    """The claim of deletes that are under way in one run of the log: nobody brings it back before the last is done."""

    __slots__ = ("by_sequence", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.by_sequence: dict[int, InLog] = {}
        """Each message that is leaving, and by what."""

    @property
    def stands(self) -> bool:
        """The run is still what it was, and not purged."""
        return self.run.claim is self


class InLog:
    """A message that memory does not have, on its way out with a `Leaving`. Its run has it until the commit holds."""

    __slots__ = ("_lane", "_leavers", "_queue", "_sequence", "size")

    def __init__(self, queue: Parts, run: Run, sequence: int) -> None:
        self._queue = queue
        self._sequence = sequence
        self._lane = queue.lanes.logged[lane_of(sequence)]
        self.size = 0
        self._leavers = leavers = run.claim if isinstance(run.claim, Leavers) else Leavers(run)
        leavers.by_sequence[sequence] = self
        run.claim = leavers

    @property
    def stands(self) -> bool:
        """It may still be there."""
        return self._leavers.stands

    def read(self) -> Record | None:
        """Return the message; None if it is settled, or never was. Needs no lock. Raises CorruptionError."""
        context, lane, sequence = self._queue.context, self._lane, self._sequence
        assert context.log is not None
        with context.log.read(buffers=True) as txn:
            row = read_row(txn, lane.owner, lane.lane)
            found = reading.read_unsettled(txn, lane.owner, lane.lane, row, sequence, sequence + 1, 1)
        if found.problems and not found.pieces and row.floor <= sequence:
            raise CorruptionError(
                f"message {sequence} of queue {context.name!r} cannot be read, and was neither deleted nor moved: "
                f"{found.problems[0][1]}; what is damaged is set aside when its turn comes"
            )
        record = next((record for _, records in found.pieces for record in records), None)
        self.size = 0 if record is None else len(record)
        return record

    def settled(self) -> tuple[Lane, list[Settled]]:
        """Return what the log is to settle."""
        return self._lane, [Settled(self._sequence, self._sequence + 1, 1, self.size)]

    def discharge(self) -> None:
        """Have its run be without it. Under the lock."""
        run = self._leavers.run
        run.count -= 1
        run.discharge(self.size + OVERHEAD_BYTES)

    def let_go(self) -> None:
        """Claim the run no more; twice is fine. What is settled at its front is no part of it then. Under the lock."""
        queue, leavers = self._queue, self._leavers
        if leavers.by_sequence.get(self._sequence) is self:  # else another one has it by now
            del leavers.by_sequence[self._sequence]
        if not leavers.by_sequence and leavers.stands:
            run = leavers.run
            first = min(max(run.first, self._lane.row.floor), run.end)
            queue.lanes.list_of(self._sequence).drop_front(run, first, 0, 0)
            queue.lanes.renew_front()
            queue.admission.rebalance()
        queue.restorer.wake_waiting()


class Deleting:
    """See the module. Nobody but its steps changes it.

    Args:
        moves: it does not leave by itself; `leaving` then has its `record` to go elsewhere with a commit of the caller,
            who gives up this if there is none.
    """

    __slots__ = ("_is_over", "_moves", "_queue", "_seekings", "handed_over", "leaving", "record", "sequence")

    def __init__(self, queue: Parts, sequence: int, *, moves: bool = False) -> None:
        self._queue = queue
        self.sequence = sequence
        self._moves = moves
        self.leaving: Leaving | None = None
        self.record: Record = b""
        self._seekings: dict[int, Seeking] = {}  # by the number of the schedule
        self._is_over = False
        self.handed_over: Unit | None = None
        """What the log is to do, and is to be waited for."""

    def outcome(self) -> bool:
        """Tell whether this removed the message, once it is committed. Raises QueueDeleted: it went with its queue."""
        if self.leaving is not None and self.leaving.has_left:
            return True
        self._queue.context.check_not_deleted()
        return False

    def step(self, wake: Wake | None, may_work: bool) -> float | None:
        """Find the message, or go on to do so; have it leave when it is there.

        Returns:
            None: it has left, or is on its way out, or no such message waits. Else see `line`.

        Raises:
            BrokerClosed, QueueDeleted: the queue is gone. BrokerFailed: the log. CorruptionError: see `InLog`.
        """
        queue = self._queue
        with queue.context.lock:
            queue.restorer.waiting.pop(self, None)
            if self._is_over:
                return None
            queue.context.check_open()
            number = lane_of(self.sequence)
            runs = queue.lanes.lists.get(number)
            run = None if runs is None else runs.find(self.sequence)
            if runs is None or run is None:
                wait_s = self._seek(may_work)
            elif run.place is Place.RESIDENT:
                wait_s = self._pick(runs, run)
            elif not may_work:
                wait_s = WORK
            elif run.claim is not None and not self._joins(run.claim):
                wait_s = FOREVER
            elif run.place is Place.LOGGED:
                wait_s = self._leave_log(run)
            else:
                queue.restorer.fetch(runs, run, self.sequence)
                wait_s = AGAIN
            if wait_s is None:
                self._end()
            elif wait_s == FOREVER and wake is not None:
                queue.restorer.waiting[self] = wake
            return wait_s

    def give_up(self) -> None:
        """Look no more; what was handed over is done all the same, and else it stays. Twice is fine."""
        with self._queue.context.lock:
            self._queue.restorer.waiting.pop(self, None)
            self._end()
            if self.leaving is not None:
                self.leaving.give_up()

    def _end(self) -> None:
        self._is_over = True
        for seeking in self._seekings.values():
            seeking.end()

    def _joins(self, claim: object) -> bool:
        """Tell whether a claim is one of deletes that this one may share: not where a get waits for them to end."""
        return isinstance(claim, Leavers) and self.sequence not in claim.by_sequence and not self._queue.gate.starved

    def _pick(self, runs: RunList, run: Run) -> float | None:
        """Take the message out of a run in memory."""
        pieces = runs.pick(run, self.sequence, AT_ONCE)
        if pieces is None:
            return PAUSE_S
        self._queue.source.give_back(pieces[1:], gained=False, was_due=False)
        self._let_leave(pieces[:1])
        return None

    def _let_leave(self, segments: list[Segment]) -> None:
        """Have the message leave that was taken out."""
        self._leave(self._queue.exits.begin(segments, self._fate, {}), segments[0].records[0])

    @property
    def _fate(self) -> Fate:
        return Fate.ACKED if self._moves else Fate.DELETED

    def _leave(self, leaving: Leaving, record: Record) -> None:
        """Have what is leaving settled, unless another commit does that."""
        self.leaving = leaving
        if self._moves:
            self.record = record
        elif (log := self._queue.context.log) is None:
            leaving.committed(None)
        else:
            leaving.unit = unit = Unit(settles=leaving.settles(), parties=[leaving])
            try:
                log.join(unit)
            except BaseException:
                leaving.give_up()
                raise
            self.handed_over = unit

    def _leave_log(self, run: Run) -> float | None:
        """Have the message leave that only the log has. Lets go of the lock."""
        queue = self._queue
        in_log = InLog(queue, run, self.sequence)
        try:
            with Unlocked(queue.context):
                record = in_log.read()
            if self._is_over:
                return None
            queue.context.check_open()
            if not in_log.stands:
                return AGAIN
            if record is not None:
                leaving = queue.exits.begin([], self._fate, {})
                leaving.in_log = in_log
                self._leave(leaving, record)
            return None
        finally:
            if self.leaving is None:
                in_log.let_go()

    # In a schedule ---------------------------------------------------------------------------------------------------

    def _seek(self, may_work: bool) -> float | None:
        """Find the message in a schedule, and take it out. May let go of the lock, where it may work."""
        queue, sequence = self._queue, self.sequence
        for place, schedule in self._schedules().items():
            if place not in self._seekings:
                self._seekings[place] = Seeking(schedule, sequence)
        for seeking in self._seekings.values():
            schedule = seeking.schedule
            before = schedule.overhead_bytes
            group = seeking.look(SOUGHT_AT_ONCE)
            if schedule.overhead_bytes != before:  # what was being spilled is back
                queue.lanes.cover(schedule.overhead_bytes - before)
            if group is not None:
                self._let_leave([queue.source.take_scheduled(schedule, group, sequence)])
                return None
            if not seeking.is_over:
                return PAUSE_S
        for place, seeking in self._seekings.items():
            chunks = [(chunk, chunk.sequences) for chunk in seeking.schedule.spilled]
            if not chunks:
                continue
            if not may_work:
                return WORK
            with Unlocked(queue.context):
                found = find_spilled(chunks, sequence)
            if self._is_over:
                return None
            queue.context.check_open()
            if found is not None:
                return self._fetch(place, found)
        return AGAIN if self._was_moved() else None

    def _schedules(self) -> dict[int, Schedule]:
        """Return where it may be delayed or scattered: in the schedule of its lane, or given back for later."""
        number, schedules = lane_of(self.sequence), self._queue.lanes.schedules
        return {place: schedules[place] for place in (number, number % DELAYED + RETURNED) if place in schedules}

    def _was_moved(self) -> bool:
        """Tell whether the message may be where it was not when that was looked at."""
        runs = self._queue.lanes.lists.get(lane_of(self.sequence))
        return (
            any(not seeking.is_over for seeking in self._seekings.values())
            or self._schedules().keys() != self._seekings.keys()
            or (runs is not None and runs.find(self.sequence) is not None)
        )

    def _fetch(self, number: int, found: Found) -> float:
        """Bring the message into memory that was found in a spilled chunk. Lets go of the lock."""
        chunk, seeking = found.chunk, self._seekings[number]
        if chunk.sequences is not found.sequences or not seeking.schedule.has_spilled(chunk):
            return AGAIN
        if chunk.claim is not None:
            return FOREVER
        start = chunk.bound
        self._queue.restorer.fetch_delayed(number, found)
        seeking.begin_at(start)
        return AGAIN
