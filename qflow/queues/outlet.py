"""The way out of a queue: gets. Above `Holding`.

Hot paths are straight lines with one comparison for all that could be different: a queue whose messages must be looked
at before they go out has no `_front`, and they are collected the long way. A get may be made step by step (`try_get`),
by who has no thread to wait with.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from qflow import config
from qflow.delivery import Deliveries, Delivery, Segment
from qflow.errors import QueueEmpty
from qflow.memory.line import FOREVER, WORK, Wake, Watcher
from qflow.memory.run import Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.waiting import attend, collecting, shelter, sheltered, straight
from qflow.message import DELAYED, OVERHEAD_BYTES, SINGLE_BYTES, Message, Record, is_plain
from qflow.queues.backlog import RETRY_S
from qflow.queues.holding import Holding

LOOK_AGAIN_S = 1.0
"""Who waits for a moment on the wall clock looks again so often: it may jump."""


class Lack(enum.Enum):
    """What a get would need to go on."""

    NOTHING = "nothing"
    MESSAGE = "a message"
    ROOM = "room in memory"
    WORK = "work on the disk"
    """Which it was told not to do."""


class Getting:
    """A get by a caller who has no thread to wait with. Nobody but its queue changes it."""

    __slots__ = (
        "batch", "deadline", "delivery", "done", "given_up", "most", "number", "single", "starved", "stopped",
        "watcher",
    )  # fmt: skip

    def __init__(
        self,
        queue: Outlet,
        most: int,
        deadline: float | None,
        *,
        single: bool = False,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        self.batch = Deliveries(queue, [])
        self.single = single
        """It is for one message, which is given out by itself."""
        self.delivery: Delivery | None = None
        self.stopped = stopped
        """Asked, before it waits, whether it is to end."""
        self.most = most
        self.deadline = deadline
        self.done = False
        self.given_up = False
        self.number = -1
        """Its place among those who wait."""
        self.starved = False
        self.watcher: Watcher | None = None

    def is_stopped(self) -> bool:
        """It waits no more, whatever there is."""
        return self.stopped is not None and self.stopped()


class Outlet(Holding):
    """See the module."""

    @straight
    def get(self, timeout_s: float | None = None) -> Delivery:
        """Acquire the first available message, waiting for one.

        Args:
            timeout_s: how long to wait; None = as long as it takes, 0 = not at all.

        Raises:
            QueueEmpty: none came up in time.
            BrokerClosed, QueueDeleted: it is gone, or went while waiting.
        Cost: 0.4 µs in memory; a batch of file reads when the head was spilled.
        """
        delivery = Delivery()
        delivery._settler = self
        try:
            with self._lock:  # a straight line; see `waiting`
                run = self._front.head
                records = run.records
                used = self._used + SINGLE_BYTES
                if records and used <= self._account.borrowed and "a" not in collecting:
                    delivery.record = records[0]
                    delivery.sequence = sequence = run.first
                    delivery._marks = run.marks
                    run.claim = None
                    self._acquired[delivery] = None
                    self._used = used
                    run.first = sequence + 1
                    del records[0]
                    return delivery
        except BaseException:
            try:
                self.give_up_single(delivery)
            finally:  # see `attend`
                self.give_up_single(delivery)
            raise
        getting = Getting(self, 1, self._deadline(config.parse_timeout(timeout_s)), single=True)
        self._attend(getting)
        if getting.delivery is None:
            raise QueueEmpty(f"no message in queue {self._name!r} within {timeout_s} s")
        return getting.delivery

    @straight
    def get_at_once(self) -> Delivery | None:
        """`get` where that takes no waiting and no work on the disk; else None."""
        delivery = Delivery()
        delivery._settler = self
        with self._lock:  # as in `get`
            run = self._front.head
            records = run.records
            used = self._used + SINGLE_BYTES
            if not records or used > self._account.borrowed or "a" in collecting:
                return None
            delivery.record = records[0]
            delivery.sequence = sequence = run.first
            delivery._marks = run.marks
            run.claim = None
            self._acquired[delivery] = None
            self._used = used
            run.first = sequence + 1
            del records[0]
        return delivery

    def get_nowait(self) -> Delivery:
        """`get` that does not wait for a message."""
        return self.get(0)

    def get_many(self, max_messages: int, timeout_s: float | None = None) -> Deliveries:
        """Acquire what is available, at most `max_messages`: waits for the first, never to fill.

        Returns fewer also when memory has no room for more in flight; at the time-out, an empty batch.

        Raises:
            BrokerClosed, QueueDeleted: as `get`.
        Cost: 0.03 µs a message in memory, 0.005 µs when a whole `put_many` is taken.
        """
        config.parse_count(max_messages, "max_messages")
        timeout = config.parse_timeout(timeout_s)
        return self._take_open(max_messages) or self.collect(max_messages, timeout)

    @straight
    def _take_open(self, most: int) -> Deliveries | None:
        """Acquire what a get would if that is the whole of the run messages are put into; else None. Cost: 1 µs."""
        runs = self._front
        run = runs.head
        first = run.first
        if run is not runs.open or not run.records:
            return None
        taken: list[Record] = []
        batch = Deliveries(self, [Segment(first, taken, run.marks)])
        fresh: deque[Record] = deque()
        try:
            with self._lock:  # a straight line; see `waiting`
                found = run.records
                end = runs.next
                is_front = runs is self._front and run is runs.head and run is runs.open and run.first == first
                is_front = is_front and "a" not in collecting
                is_last = runs is self._runs  # of the lowest priority: nothing waits behind it
                if is_front and found and (end - first <= most if is_last else end - first == most):
                    batch.total = end - first
                    self._batches[batch] = None
                    run.first = end
                    run.records = fresh
                    if found is self._tail:
                        self._tail = fresh
                    taken += found
                    return batch
        except BaseException:
            try:
                self.give_up_batch(batch)
            finally:  # see `attend`
                self.give_up_batch(batch)
            raise
        return None

    def collect(self, most: int, timeout: float | None, stopped: Callable[[], bool] | None = None) -> Deliveries:
        """`get_many` that also ends when `stopped` says so; it is asked each time something wakes the caller."""
        getting = Getting(self, most, self._deadline(timeout), stopped=stopped)
        self._attend(getting)
        return getting.batch

    def _attend(self, getting: Getting) -> None:
        """Return when a get is done; whatever ends it earlier, it has acquired nothing."""
        attend(partial(self.try_get, getting, may_work=True), partial(self.give_up_get, getting))
        if self.settings.max_deliveries is not None:
            try:
                self._log_attempts(getting.batch)
            except BaseException:
                try:
                    shelter(partial(self.give_up_get, getting))
                finally:  # see `attend`
                    shelter(partial(self.give_up_get, getting))
                raise

    def _renew(self, batch: Deliveries) -> None:
        """Begin again with a batch that was purged while its caller let go of the lock: what it held is settled."""
        if batch not in self._batches:
            batch.segments.clear()
            batch.total = 0
            self._batches[batch] = None

    def _collected(self, getting: Getting) -> None:
        """A batch is what its caller gets, or the one message in it. Under the lock."""
        batch = getting.batch
        since = self._monotonic() if self._is_watched() else None
        if getting.single and batch.total:
            getting.delivery = delivery = batch[0]
            delivery._settler = self
            self._acquired[delivery] = since
            self._used += SINGLE_BYTES
            self._cover_singles()
        if getting.single or not batch.total:
            del self._batches[batch]
        else:
            self._batches[batch] = since
        self._refresh()

    def _gather(self, batch: Deliveries, most: int, may_work: bool) -> Lack:
        """Move available messages to a batch; return what it would take to go on, nothing if it has all it wants.

        Called with the lock held; lets go of it for work on the disk, and returns `WORK` where it may not do that.
        """
        while batch.total < most and batch in self._batches:
            self._check_open()
            if self._is_leased() and not self._release_late(may_work):
                return Lack.WORK
            over = self._cover()
            if over and (batch.total or self._is_in_flight()):  # what passes on slack waits to be spilled
                if not may_work:
                    return Lack.WORK
                if self._room_for_head(0) or not self._cover():
                    continue
                return Lack.ROOM
            looks = self._must_look()
            segments: list[Segment] = [] if looks else batch.segments
            taken, behind = self._take(1 if over else most - batch.total, segments)
            if taken:
                if over:
                    self._get_slack, self._put_slack = over, 0
                if looks:
                    lack = self._weed(batch, segments, may_work)
                    if lack is not Lack.NOTHING:
                        return lack
                else:
                    batch.total += taken
            elif behind is None:
                return Lack.MESSAGE
            elif not may_work:
                return Lack.WORK
            elif not self._bring(behind):
                return Lack.ROOM
        return Lack.NOTHING

    def _take(self, most: int, segments: list[Segment]) -> tuple[int, RunList | int | None]:
        """Move what is in memory and comes first to `segments`, from one lane. Under the lock.

        Returns:
            how many; if none, what must be brought into memory first: a lane, or a schedule by its number.
        """
        schedules = self._schedules
        now_ms = self._now_ms() if schedules else 0
        for runs in self._ranked:
            if schedules:
                number = runs.number + DELAYED
                schedule = schedules.get(number)
                if schedule is not None and (unread := self._lists[number].settle_head()).place is not Place.RESIDENT:
                    if self._reads_first(unread):
                        return 0, self._lists[number]
                elif schedule is not None:
                    taken = self._take_due(schedule, most, now_ms, segments)
                    if taken:
                        return taken, None
                    due_ms = schedule.next_due_ms()
                    if due_ms is not None and due_ms <= now_ms:
                        return 0, number
                scattered = schedules.get(runs.number)
                key = None if scattered is None else scattered.next_key()
                before = (0, runs.settle_head().first)
                if scattered is not None and key is not None and key < before:
                    taken = self._take_due(scattered, most, now_ms, segments, before)
                    return taken, None if taken else runs.number
            taken = runs.take(most, segments)
            if taken:
                return taken, None
            if runs.settle_head().place is not Place.RESIDENT:
                return 0, runs
        for number in schedules:
            runs = self._lists[number]
            if runs.settle_head().place is not Place.RESIDENT:
                return 0, runs
        return 0, None

    def _reads_first(self, unread: Run) -> bool:
        """Tell whether delayed messages of the log are read before anything else is taken. Under the lock.

        After a restart nobody knows which of them is due. What would take more than half of the capacity is read by
        maintenance, and nobody waits for that.
        """
        account = self._account
        is_room = 2 * self._used < account.capacity and self._could_charge(unread.needs + OVERHEAD_BYTES)
        return unread.claim is not None or is_room

    def _bring(self, behind: RunList | int) -> bool:
        """Bring what `_take` asked for into memory; False if that must wait."""
        if isinstance(behind, int):
            return self._restore_delayed(behind, self._now_ms())
        return self._restore_head(behind)

    def _weed(self, batch: Deliveries, taken: list[Segment], may_work: bool) -> Lack:
        """Give a batch what was taken for it, but what is not to be delivered; ROOM if that could not leave now.

        Called with the lock held; lets go of it where dead letters are carried away. That may take work on the disk:
        where it may not be done, all is back in its place.
        """
        most = self.settings.max_deliveries
        now_ms = self._now_ms()
        kept: list[Segment] = []
        expired: list[Segment] = []
        spent: list[Segment] = []
        for segment in taken:
            if most is not None and segment.marks >> 1 >= most:
                spent.append(segment)
            elif self._timed and not is_plain(segment.records):
                for part, is_late in by_expiry(segment, now_ms):
                    (expired if is_late else kept).append(part)
            else:
                kept.append(segment)
        if (expired or spent) and not may_work and self.settings.dead_letter is not None:
            self._give_back(taken)
            return Lack.WORK
        batch.segments += kept
        batch.total += sum(len(segment.records) for segment in kept)
        if not (expired or spent):
            return Lack.NOTHING
        done = self._let_go_of((expired, "expired", "_expired"), (spent, "max_deliveries", "_dropped"))
        return Lack.NOTHING if done else Lack.ROOM

    def _patience_for_arrival_s(self, deadline: float | None, lack: Lack) -> float | None:
        """Return how long to wait for a message or for room, at most; None when the deadline has passed."""
        # Room may come from another queue, which does not know of this one.
        wait = RETRY_S if lack is Lack.ROOM else FOREVER
        moment = self.next_moment_s()
        if moment is not None:
            wait = min(wait, moment)
        if deadline is not None:
            left = deadline - self._monotonic()
            if left <= 0:
                return None
            wait = min(wait, left)
        return wait

    def begin_get(self, most: int, timeout_s: float | None) -> Getting:
        """Begin a get by a caller who has no thread to wait with: `try_get` until it is done."""
        timeout = config.parse_timeout(timeout_s)
        return Getting(self, most, self._deadline(timeout))

    def try_get(self, getting: Getting, wake: Wake | None, *, may_work: bool) -> float | None:
        """A step of a get: fill `getting.batch`, or see to be woken.

        Returns:
            None: the batch is what it gets; empty at the time-out. Else see `line`; without `wake`, no watcher is left.

        Raises:
            BrokerClosed, QueueDeleted: it is gone; `give_up_get` it then.
        """
        batch = getting.batch
        with self._lock:
            self._unwatch_arrival(getting)
            if getting.done or getting.given_up:
                return None
            while True:
                self._renew(batch)
                lack = self._gather(batch, getting.most, may_work)
                if getting.given_up:
                    return None
                if batch in self._batches:
                    break
            if lack is Lack.WORK:
                return WORK
            wait_s = None
            if lack is not Lack.NOTHING and not batch.total and not getting.is_stopped():
                wait_s = self._patience_for_arrival_s(getting.deadline, lack)
            if wait_s is None:
                getting.done = True
                self._collected(getting)
                return None
            del self._batches[batch]  # until it tries again: many may wait
            if wake is not None:
                if getting.number < 0:
                    getting.number = self._arrivals = self._arrivals + 1
                getting.starved = lack is Lack.ROOM
                getting.watcher = self._arrived.watch(wake, getting.number)
                self._getters += 1
                self._starved += getting.starved
                self._refresh()
            return wait_s

    def give_up_get(self, getting: Getting) -> None:
        """Get no more: what it has goes back uncounted, a wake-up it had goes to another; twice is fine."""
        with self._lock:
            if getting.given_up:
                return
            getting.given_up = True
            self._unwatch_arrival(getting)
            if getting.delivery is not None:
                self._give_up_single(getting.delivery)
            self.give_up_batch(getting.batch)
            self._arrived.notify()

    def _unwatch_arrival(self, getting: Getting) -> None:
        if getting.watcher is not None:
            self._arrived.unwatch(getting.watcher)
            getting.watcher = None
            self._getters -= 1
            self._starved -= getting.starved
            self._refresh()

    @sheltered
    def give_up_single(self, delivery: Delivery) -> None:
        """Take back a message that its caller has not got; nothing if it was not acquired."""
        with self._lock:
            self._give_up_single(delivery)

    def _give_up_single(self, delivery: Delivery) -> None:
        """Under the lock."""
        if delivery in self._acquired:
            self._drop_held([delivery])
            self._give_back([Segment(delivery.sequence, [delivery.record], delivery._marks)])

    def next_moment_s(self) -> float | None:
        """Return in how many seconds something may become available by itself; None = not at all. Under the lock."""
        moments: list[float] = []
        due_ms = self._next_due_ms()
        if due_ms is not None:
            moments.append(min(LOOK_AGAIN_S, (due_ms - self._now_ms() + 1) / 1000))
        timeout = self.settings.ack_timeout_s
        if timeout is not None:
            end = min(self._first_end(self._acquired, timeout), self._first_end(self._batches, timeout))
            if end < math.inf:
                moments.append(min(LOOK_AGAIN_S, end - self._monotonic()))
        return max(0.001, min(moments)) if moments else None

    def _first_end(self, held: Mapping[Any, float | None], timeout: float) -> float:
        """Return when the first lease ends. Cost: O(1), and a step for each that was extended."""
        first = math.inf
        for one, since in held.items():
            if since is not None:
                extended = self._extended.get(one)
                first = min(first, since + timeout if extended is None else extended)
                if extended is None:
                    break
        return first

    def _must_look(self) -> bool:
        return (
            self._ended is not None  # nothing is handed out any more, as a get that looks is told
            or self._timed
            or self._is_watched()
            or self.settings.max_deliveries is not None
            or any(schedule.messages for schedule in self._schedules.values())
            or any(not self._lists[number].settle_head().spent for number in self._schedules if number >= DELAYED)
        )

    def _note_times(self, records: list[Record]) -> None:
        if not self._timed and any(type(record) is Message and record.expires_ms for record in records):
            self._timed = True
            self._refresh()


def by_expiry(segment: Segment, now_ms: int) -> Iterable[tuple[Segment, bool]]:
    """Cut a segment where messages that have expired and others meet; yield each part and whether it has."""
    first, records, marks = segment
    start = 0
    before: bool | None = None
    for index, record in enumerate(records):
        late = type(record) is Message and 0 < record.expires_ms <= now_ms
        if before is not None and late is not before:
            yield Segment(first + start, records[start:index], marks), before
            start = index
        before = late
    if before is not None:
        yield Segment(first + start, records[start:], marks), before
