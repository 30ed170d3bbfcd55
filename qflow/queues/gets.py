"""The way out of a queue: gets.

Hot paths are straight lines with one comparison for all that could be different. A queue whose messages must be looked
at before they go out has no `front`: a look at the first one mostly is enough; else they are collected the long way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from qflow import config
from qflow.deliveries import Deliveries
from qflow.delivery import ONE_ATTEMPT, Delivery, Segment
from qflow.durations import Duration
from qflow.errors import QueueEmpty, again
from qflow.held_batch import HeldBatch
from qflow.memory.line import FOREVER
from qflow.memory.run import Run
from qflow.memory.run_list import RunList
from qflow.memory.waiting import attend, collecting, shelter, straight
from qflow.message import BATCH_BYTES, SINGLE_BYTES, Message, Record
from qflow.queues.admission import Admission
from qflow.queues.expiry import Expiry
from qflow.queues.getting import Getting
from qflow.queues.held import Held
from qflow.queues.lanes import Lanes
from qflow.queues.leases import Leases
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source
from qflow.storage.log.transaction_log import Request
from qflow.takers import Noted

FEW_BEHIND = 50
"""A get looks at each priority for so many, one after the other: that takes as long as the long way once."""
LOOK_AGAIN_S = 1.0
"""Who waits for a moment on the wall clock looks again so often: it may jump."""


class Gets:
    """See the module."""

    def __init__(
        self,
        lanes: Lanes,
        admission: Admission,
        held: Held,
        source: Source,
        leases: Leases,
        restorer: Restorer,
        expiry: Expiry,
    ) -> None:
        self.context = lanes.context
        self.gate = lanes.gate
        self.lanes = lanes
        self.admission = admission
        self.held = held
        self.source = source
        self.leases = leases
        self.claims = leases.claims
        self.restorer = restorer
        self.expiry = expiry
        self.exits = expiry.exits
        self.waiting: dict[Getting, float] = {}
        """Those that wait now, in the order they came, and since when (monotonic)."""

    @straight
    def take_looked(self, delivery: Delivery) -> bool:
        """Acquire the first message of a queue with a closed front, if it takes no more than a look at that message.

        That is: it has not expired, was not delivered before where deliveries are counted, and no lease ends just now.
        Return whether it did. Cost: 1 µs.
        """
        context, lanes, held = self.context, self.lanes, self.held
        settings, since, run = context.settings, self.leases.since(), lanes.looked.head
        try:
            first = run.records[0]
        except IndexError:
            return False
        if type(first) is Message and 0 < first.expires_ms <= context.now_ms():
            return False
        if settings.ack_timeout_s is not None and since >= held.quiet_until:
            return False
        if settings.max_deliveries is not None and run.marks:
            return False
        with context.lock:  # a straight line; see `waiting`
            gate = self.gate
            records = run.records
            used = gate.used + SINGLE_BYTES
            if (
                run is not lanes.looked.head
                or not records
                or records[0] is not first
                or context.settings is not settings
            ):
                return False
            if used > gate.account.borrowed or collecting:
                return False
            delivery.record = first
            delivery.sequence = sequence = run.first
            delivery.marks = run.marks
            run.claim = None
            held.singles[delivery] = since
            gate.used = used
            run.first = sequence + 1
            del records[0]
            gate.changed[gate.place] = True
        return True

    def take_otherwise(self, delivery: Delivery) -> bool:
        """Acquire the first message where the front has none, if that takes no more than a look; tell whether it did.

        Cost: 1 µs.
        """
        if self.lanes.closed:
            return self.take_looked(delivery)
        return len(self.lanes.ranked) > 1 and self.take_behind(delivery)

    def _first_of_few(self) -> tuple[RunList, Run, int] | None:
        """Return lane, run and sequence of the first message, if all lanes above are empty; without the lock.

        None where many wait with it: the long way has the front there, and those that follow come from that.
        """
        for runs in self.lanes.ranked:
            run = runs.head
            if run.records:
                return (runs, run, run.first) if len(run.records) <= FEW_BEHIND else None
            if run is not runs.open:
                return None  # something of it is on the disk, perhaps
        return None

    @straight
    def take_behind(self, delivery: Delivery) -> bool:
        """Acquire the first message, of a priority below an empty front, if all that is before it is in memory.

        If something has arrived meanwhile, it looks again: the message was there before, and again nothing is above it.
        What comes there later is later. Where nothing has arrived, the lane is the front from now on.
        """
        lanes, held, front = self.lanes, self.held, self.lanes.front
        arrivals = lanes.arrivals
        found = self._first_of_few()
        if found is None or (lanes.arrivals != arrivals and found != self._first_of_few()):
            return False
        runs, run, sequence = found
        with self.context.lock:  # a straight line; see `waiting`
            gate = self.gate
            records = run.records
            used = gate.used + SINGLE_BYTES
            if lanes.front is not front or front.head.records or front.number <= runs.number:
                return False
            if run is not runs.head or not records or run.first != sequence:
                return False
            if used > gate.account.borrowed or collecting:
                return False
            if lanes.arrivals == arrivals:
                lanes.front = lanes.looked = runs
                lanes.front_number = runs.number
            delivery.record = records[0]
            delivery.sequence = sequence
            delivery.marks = run.marks
            run.claim = None
            held.singles[delivery] = self.context.tick.now_s
            gate.used = used
            run.first = sequence + 1
            del records[0]
            gate.changed[gate.place] = True
        return True

    @straight
    def get_at_once(self, taker: Noted) -> Delivery | None:
        """`Queue.get` where that takes no waiting and no work on the disk; else None."""
        delivery = Delivery()
        delivery.settler = self.claims
        delivery.taker = taker
        with self.context.lock:  # as in `Queue.get`
            gate = self.gate
            run = self.lanes.front.head
            records = run.records
            used = gate.used + SINGLE_BYTES
            if records and used <= gate.account.borrowed and not collecting:
                delivery.record = records[0]
                delivery.sequence = sequence = run.first
                delivery.marks = run.marks
                run.claim = None
                self.held.singles[delivery] = self.context.tick.now_s
                gate.used = used
                run.first = sequence + 1
                del records[0]
                gate.changed[gate.place] = True
                return delivery
        return delivery if self.take_otherwise(delivery) else None

    @straight
    def take_open(self, most: int, taker: Noted, shown: Deliveries) -> bool:
        """Acquire what a get would if that is the whole of the run messages are put into; else False. Cost: 1 µs.

        Args:
            shown: is to be what is acquired, as its user has it.
        """
        context, lanes, held = self.context, self.lanes, self.held
        gate, runs = self.gate, lanes.front
        run = runs.head
        first = run.first
        if run is not runs.open or not run.records:
            return False
        taken: list[Record] = []
        batch = HeldBatch(self.claims, [Segment(first, taken, run.marks)], taker)
        shown.held, shown.segments = batch, batch.segments
        fresh: deque[Record] = deque()
        try:
            with context.lock:  # a straight line; see `waiting`
                found = run.records
                end = runs.next
                is_front = runs is lanes.front and run is runs.head and run is runs.open and run.first == first
                used = gate.used + BATCH_BYTES
                is_front = is_front and used <= gate.account.borrowed and not collecting
                is_last = runs is lanes.runs  # of the lowest priority: nothing waits behind it
                if is_front and found and (end - first <= most if is_last else end - first == most):
                    batch.total = shown.total = end - first
                    held.batches[batch] = context.tick.now_s
                    held.charged += 1
                    gate.used = used
                    run.first = end
                    run.records = runs.tail = fresh
                    taken += found
                    gate.changed[gate.place] = True
                    return True
        except BaseException:
            try:
                self.claims.give_up(batch)
            finally:  # see `attend`
                self.claims.give_up(batch)
            raise
        return False

    def begin(self, most: int, timeout_s: Duration | None, taker: Noted, *, single: bool = False) -> Getting:
        """Begin a get: a `step` until it is done. `single`: what it gets is its `delivery`, if it is not None."""
        return Getting(self, most, self.context.deadline(config.parse_timeout(timeout_s)), taker, single=single)

    def get_one(self, timeout_s: Duration | None, taker: Noted) -> Delivery:
        """Acquire the first available message, waiting for one; see `Queue.get`."""
        getting = self.begin(1, timeout_s, taker, single=True)
        self.attend(getting)
        if getting.delivery is None:
            raise QueueEmpty(f"no message in queue {self.context.name!r} within {timeout_s} s")
        return getting.delivery

    def collect(
        self, most: int, timeout_s: Duration | None, taker: Noted, stopped: Callable[[], bool] | None = None
    ) -> HeldBatch:
        """`Queue.get_many` that also ends when `stopped` says so; it is asked each time something wakes the caller."""
        getting = self.begin(most, timeout_s, taker)
        getting.stopped = stopped
        self.attend(getting)
        return getting.collected  # type: ignore[return-value]  # no call: one that is struck would lose what it has

    def fill(self, shown: Deliveries, most: int, timeout_s: Duration | None, taker: Noted) -> None:
        """`Queue.get_many`; `shown` is to be what is acquired, as its user has it."""
        config.parse_timeout(timeout_s)
        if not self.take_open(most, taker, shown):
            getting = self.begin(most, timeout_s, taker)
            getting.shown = shown
            self.attend(getting)

    def attend(self, getting: Getting) -> None:
        """Return when a get is done; whatever ends it earlier, it has acquired nothing."""
        attend(partial(getting.step, may_work=True), getting.give_up)
        if self.context.settings.max_deliveries is not None:
            try:
                self._log_attempts(getting.batch)
            except BaseException:
                try:
                    shelter(getting.give_up)
                finally:  # see `attend`
                    shelter(getting.give_up)
                raise

    def _log_attempts(self, batch: HeldBatch) -> None:
        """Have it in the log that messages are delivered a second time, before they are: they may kill who has them."""
        joined = self.join_attempts(batch)
        if joined is not None and self.context.log is not None:
            self.context.log.wait(joined)
            if joined.error is not None:
                raise again(joined.error)

    def join_attempts(self, batch: HeldBatch) -> Request | None:
        """Log that messages are delivered again; return what to wait for before they are, if there is something."""
        if self.context.settings.max_deliveries is None:
            return None
        repeated = [part._replace(marks=part.marks + ONE_ATTEMPT) for part in batch.segments if part.marks]
        return self.lanes.log_attempts(repeated) if repeated else None

    def next_moment_s(self) -> float | None:
        """Return in how many seconds something may become available by itself; None = not at all. Under the lock."""
        if not self.lanes.schedules and self.context.settings.ack_timeout_s is None:
            return None
        moments = [(self.lanes.next_due_in_ms() + 1) / 1000]
        if self.held.timeout_s is not None:
            moments.append(self.leases.next_end_s())
        soonest = min(moments)
        return None if soonest == FOREVER else max(0.001, min(LOOK_AGAIN_S, soonest))
