"""The way out of a queue: gets.

Hot paths are straight lines with one comparison for all that could be different: a queue whose messages must be looked
at before they go out has no `front`, and they are collected the long way, step by step.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from functools import partial

from qflow import config
from qflow.delivery import Deliveries, Delivery, Segment
from qflow.errors import QueueEmpty, again
from qflow.memory.line import FOREVER, PAUSE_S, WORK, Wake, Watcher
from qflow.memory.run_list import RunList
from qflow.memory.waiting import attend, collecting, shelter, straight
from qflow.message import DELAYED, SINGLE_BYTES, Record, is_plain, lane_of
from qflow.queues.admission import RETRY_S, Admission
from qflow.queues.exits import Fate, weigh
from qflow.queues.expiry import Expiry
from qflow.queues.held import Held
from qflow.queues.lanes import TIMED, Lanes, by_expiry
from qflow.queues.leases import Leases
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source
from qflow.storage.log.transaction_log import Request

TURNS = 2
"""A get that does not wait has this many turns to let expired messages go that lie before others."""
LOOK_AGAIN_S = 1.0
"""Who waits for a moment on the wall clock looks again so often: it may jump."""


class Lack(enum.Enum):
    """What a get would need to go on."""

    NOTHING = "nothing"
    MESSAGE = "a message"
    ROOM = "room in memory"
    WORK = "work on the disk"
    """Which it was told not to do."""
    TURN = "another turn"
    """It has let go of as many expired messages as go at once: it lets go of the lock before the next ones."""


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

    @straight
    def get_at_once(self) -> Delivery | None:
        """`Queue.get` where that takes no waiting and no work on the disk; else None."""
        delivery = Delivery()
        delivery.settler = self.claims
        with self.context.lock:  # as in `Queue.get`
            gate = self.gate
            run = self.lanes.front.head
            records = run.records
            used = gate.used + SINGLE_BYTES
            if not records or used > gate.account.borrowed or "a" in collecting:
                return None
            delivery.record = records[0]
            delivery.sequence = sequence = run.first
            delivery.marks = run.marks
            run.claim = None
            self.held.singles[delivery] = None
            gate.used = used
            run.first = sequence + 1
            del records[0]
        return delivery

    @straight
    def take_open(self, most: int) -> Deliveries | None:
        """Acquire what a get would if that is the whole of the run messages are put into; else None. Cost: 1 µs."""
        context, lanes, held = self.context, self.lanes, self.held
        runs = lanes.front
        run = runs.head
        first = run.first
        if run is not runs.open or not run.records:
            return None
        taken: list[Record] = []
        batch = Deliveries(self.claims, [Segment(first, taken, run.marks)])
        fresh: deque[Record] = deque()
        try:
            with context.lock:  # a straight line; see `waiting`
                found = run.records
                end = runs.next
                is_front = runs is lanes.front and run is runs.head and run is runs.open and run.first == first
                is_front = is_front and "a" not in collecting
                is_last = runs is lanes.runs  # of the lowest priority: nothing waits behind it
                if is_front and found and (end - first <= most if is_last else end - first == most):
                    batch.total = end - first
                    held.batches[batch] = None
                    run.first = end
                    run.records = fresh
                    taken += found
                    return batch
        except BaseException:
            try:
                self.claims.give_up(batch)
            finally:  # see `attend`
                self.claims.give_up(batch)
            raise
        return None

    def begin(self, most: int, timeout_s: float | None, *, single: bool = False) -> Getting:
        """Begin a get: a `step` until it is done. `single`: what it gets is its `delivery`, if it is not None."""
        return Getting(self, most, self.context.deadline(config.parse_timeout(timeout_s)), single=single)

    def get_one(self, timeout_s: float | None) -> Delivery:
        """Acquire the first available message, waiting for one; see `Queue.get`."""
        getting = self.begin(1, timeout_s, single=True)
        self.attend(getting)
        if getting.delivery is None:
            raise QueueEmpty(f"no message in queue {self.context.name!r} within {timeout_s} s")
        return getting.delivery

    def collect(self, most: int, timeout_s: float | None, stopped: Callable[[], bool] | None = None) -> Deliveries:
        """`Queue.get_many` that also ends when `stopped` says so; it is asked each time something wakes the caller."""
        getting = self.begin(most, timeout_s)
        getting.stopped = stopped
        self.attend(getting)
        return getting.batch

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

    def _log_attempts(self, batch: Deliveries) -> None:
        """Have it in the log that messages are delivered a second time, before they are: they may kill who has them."""
        joined = self.join_attempts(batch)
        if joined is not None and self.context.log is not None:
            self.context.log.wait(joined)
            if joined.error is not None:
                raise again(joined.error)

    def join_attempts(self, batch: Deliveries) -> Request | None:
        """Log that messages are delivered again; return what to wait for before they are, if there is something."""
        if self.context.settings.max_deliveries is None:
            return None
        log = self.context.usable_log
        ranges: dict[int, list[tuple[int, int, int]]] = {}
        for first, records, marks in batch.segments:
            if marks:
                ranges.setdefault(lane_of(first), []).append((first, first + len(records), (marks >> 1) + 1))
        joined: Request | None = None
        for number, part in ranges.items() if log is not None else ():
            joined = log.attempts(self.lanes.logged[number], part)  # type: ignore[union-attr]
        return joined

    def wake_all(self) -> None:
        """Let every waiting getter look whether it is to stop, or has something by now. Under the lock."""
        self.gate.arrived.notify_all()

    def next_moment_s(self) -> float | None:
        """Return in how many seconds something may become available by itself; None = not at all. Under the lock."""
        if not self.lanes.schedules and self.context.settings.ack_timeout_s is None:
            return None
        moments: list[float] = []
        due_ms = self.lanes.next_due_ms()
        if due_ms is not None:
            moments.append((due_ms - self.context.now_ms() + 1) / 1000)
        timeout = self.context.settings.ack_timeout_s
        if timeout is not None:
            moments.append(self.leases.next_end_s(timeout))
        soonest = min(moments, default=FOREVER)
        return None if soonest == FOREVER else max(0.001, min(LOOK_AGAIN_S, soonest))


class Getting:
    """A get on its way. Nobody but its steps changes it."""

    __slots__ = (
        "_deadline", "_done", "_given_up", "_most", "_queue", "_single", "_starved", "_turn", "_turns",
        "_watcher", "batch", "delivery", "stopped",
    )  # fmt: skip

    def __init__(self, queue: Gets, most: int, deadline: float | None, *, single: bool = False) -> None:
        self._queue = queue
        self._most = most
        self._deadline = deadline
        self._single = single  # it is for one message, which is given out by itself
        self.batch = Deliveries(queue.claims, [])
        self.delivery: Delivery | None = None
        self.stopped: Callable[[], bool] | None = None
        """Asked, before it waits, whether it is to end."""
        self._done = False
        self._given_up = False
        self._turn: int | None = None  # its place among those that wait
        self._turns = 0  # that it had because there were so many expired messages
        self._starved = False
        self._watcher: Watcher | None = None

    def step(self, wake: Wake | None, *, may_work: bool) -> float | None:
        """Fill `batch`, or see to be woken.

        Returns:
            None: the batch is what it gets; empty at the time-out. Else see `line`; without `wake`, no watcher is left.

        Raises:
            BrokerClosed, QueueDeleted: it is gone; `give_up` then.
        """
        queue, batch = self._queue, self.batch
        gate, batches = queue.gate, queue.held.batches
        with queue.context.lock:
            self._unwatch()
            if self._done or self._given_up:
                return None
            if self._single and self._turn is not None and (delivery := queue.get_at_once()) is not None:
                self.delivery = delivery
                self._done = True
                if gate.starved:
                    gate.arrived.notify()
                return None
            lack = Lack.MESSAGE
            while not queue.lanes.is_bare or queue.admission.ready:
                self._renew()
                lack = self._gather(may_work)
                if self._given_up:
                    return None
                if batch in batches:
                    break
            if lack is Lack.WORK:
                return WORK
            wait_s = None
            if lack is not Lack.NOTHING and not batch.total and not (self.stopped is not None and self.stopped()):
                wait_s = self._patience_s(lack)
            if wait_s is None:
                self._done = True
                self._finish()
                return None
            batches.pop(batch, None)  # until it tries again: many may wait
            if wake is not None:
                self._starved = lack is Lack.ROOM
                self._watcher = gate.arrived.watch(wake, self._turn)
                self._turn = self._watcher.number
                gate.getters += 1
                if self._starved:
                    gate.starved += 1
                    queue.lanes.refresh()
            return wait_s

    def give_up(self) -> None:
        """Get no more: what it has goes back uncounted, a wake-up it had goes to another; twice is fine."""
        queue = self._queue
        with queue.context.lock:
            if self._given_up:
                return
            self._given_up = True
            self._unwatch()
            if self.delivery is not None:
                queue.claims.give_up(self.delivery)
            queue.claims.give_up(self.batch)
            queue.gate.arrived.notify()

    def _unwatch(self) -> None:
        if self._watcher is not None:
            gate = self._queue.gate
            gate.arrived.unwatch(self._watcher)
            self._watcher = None
            gate.getters -= 1
            if self._starved:
                gate.starved -= 1
                self._queue.lanes.refresh()

    def _renew(self) -> None:
        """Begin again if the batch was purged while its caller let go of the lock: what it held is settled."""
        batches, batch = self._queue.held.batches, self.batch
        if batch not in batches:
            batch.segments.clear()
            batch.total = 0
            batches[batch] = None

    def _finish(self) -> None:
        """Hand out the batch, or the one message in it. Under the lock."""
        queue, batch = self._queue, self.batch
        since = queue.leases.since()
        if queue.gate.starved and batch.total:
            queue.gate.arrived.notify()  # what is left may be enough for the next one
        if self._single and batch.total:
            self.delivery = delivery = batch[0]
            delivery.settler = queue.claims
            queue.held.add_single(delivery, since)
            queue.lanes.cover_singles()
        if self._single or not batch.total:
            queue.held.batches.pop(batch, None)
        else:
            queue.held.batches[batch] = since
        queue.lanes.refresh()

    def _gather(self, may_work: bool) -> Lack:
        """Move available messages to the batch; return what it would take to go on, nothing if it has all it wants.

        Called with the lock held; lets go of it for work on the disk, and returns `WORK` where it may not do that.
        """
        queue, batch, most = self._queue, self.batch, self._most
        gate, held, admission = queue.gate, queue.held, queue.admission
        while batch.total < most and batch in held.batches:
            queue.context.check_open()
            if not queue.leases.release_late(may_work):
                return Lack.WORK
            over = admission.cover()
            if over and (batch.total or held.is_any()):  # what passes on slack waits to be spilled
                if not may_work:
                    return Lack.WORK
                if queue.restorer.find_room() or not admission.cover():
                    continue
                return Lack.ROOM
            looks = queue.lanes.must_look()
            segments: list[Segment] = [] if looks else batch.segments
            taken, behind = queue.source.take(1 if over else most - batch.total, segments)
            if taken:
                if over:
                    gate.get_slack, gate.put_slack = over, 0
                if looks:
                    lack = self._weed(segments, may_work)
                    if lack is not Lack.NOTHING:
                        return lack
                else:
                    batch.total += taken
            elif behind is None:
                if not admission.publish_ready():
                    return Lack.MESSAGE
            elif self._leaves_unread(behind):
                return Lack.MESSAGE
            elif not may_work:
                return Lack.WORK
            elif not queue.restorer.bring(behind):
                return Lack.ROOM
        return Lack.NOTHING

    def _leaves_unread(self, behind: RunList | int) -> bool:
        """Tell whether the deadline has passed while delayed messages are read, of which some may be due."""
        if isinstance(behind, int) or behind.number < DELAYED or self._deadline is None:
            return False
        return self._queue.context.monotonic() >= self._deadline and not self._queue.source.waits_for_unread()

    def _weed(self, taken: list[Segment], may_work: bool) -> Lack:
        """Have what was taken, but what is not to be delivered; ROOM if that could not leave now.

        Called with the lock held; lets go of it where dead letters are carried away. That may take work on the disk:
        where it may not be done, all is back in its place.
        """
        queue = self._queue
        settings, timed = queue.context.settings, TIMED in queue.lanes.closed
        most, now_ms = settings.max_deliveries, queue.context.now_ms()
        kept: list[Segment] = []
        expired: list[Segment] = []
        spent: list[Segment] = []
        for segment in taken:
            if most is not None and segment.marks >> 1 >= most:
                spent.append(segment)
            elif timed and not is_plain(segment.records):
                for part, is_late in by_expiry(segment, now_ms):
                    (expired if is_late else kept).append(part)
            else:
                kept.append(segment)
        if (expired or spent) and not may_work and settings.dead_letter is not None:
            queue.source.give_back(taken)
            return Lack.WORK
        self.batch.segments += kept
        self.batch.total += weigh(kept)[0]
        if not (expired or spent):
            return Lack.NOTHING
        done = queue.exits.let_go_of((expired, "expired", Fate.EXPIRED), (spent, "max_deliveries", Fate.DROPPED))
        if not done:
            return Lack.ROOM
        if expired and not kept:  # so may those behind them: many at once
            if not may_work:
                return Lack.WORK
            if queue.expiry.expire():
                return Lack.TURN
        return Lack.NOTHING

    def _patience_s(self, lack: Lack) -> float | None:
        """Return how long to wait for a message or for room, at most; None when the deadline has passed."""
        if lack is Lack.TURN and self._turns < TURNS:
            self._turns += 1
            return PAUSE_S
        # Room may come from another queue, which does not know of this one.
        wait = {Lack.ROOM: RETRY_S, Lack.TURN: PAUSE_S}.get(lack, FOREVER)
        moment = self._queue.next_moment_s()
        if moment is not None:
            wait = min(wait, moment)
        if self._deadline is not None:
            left = self._deadline - self._queue.context.monotonic()
            if left <= 0:
                return None
            wait = min(wait, left)
        return wait
