"""What was delivered, until it is settled: acks, returns, ack timeouts, and what else leaves. Above `Intake`.

The life of an entry:

    state      event                                     next
    -          put confirmed                             AVAILABLE   in a lane, or in a schedule until it is due
    AVAILABLE  get                                       ACQUIRED    in `_acquired`, or in a batch in `_batches`
    AVAILABLE  expired, dropped                          SETTLED, or LEAVING where it becomes a dead letter
    ACQUIRED   ack                                       SETTLED     logged by value
    ACQUIRED   ack in a transaction                      LEAVING
    ACQUIRED   nack(requeue=False), too many deliveries  LEAVING, or SETTLED without a dead-letter queue
    ACQUIRED   nack, ack timeout, close                  AVAILABLE   in its original place, one more delivery counted
    LEAVING    the commit holds                          SETTLED
    LEAVING    the commit is refused                     what it was before
    any        purge, delete                             SETTLED     late acks do nothing

Order of locks: queue, ledger, log. Hot paths are straight lines with one comparison for all that could be different: a
queue with a limit, a log, waiters or nothing left to borrow sets `_ceiling` so that the comparison fails, and one whose
messages must be looked at before they go out has no `_front`. (CPython 3.11: put 0.3 µs, get 0.4 µs, ack 0.3 µs.)
Changes of state in them come after the last call that can raise, because an interrupt can strike at a call and nowhere
else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from qflow import config
from qflow.delivery import ONE_ATTEMPT, Deliveries, Delivery, Segment
from qflow.errors import AlreadySettled, BrokerClosed, BrokerFailed, InvalidArgument, QueueDeleted, again, in_doubt
from qflow.memory.group import Key
from qflow.memory.run import Place
from qflow.memory.schedule import Schedule
from qflow.memory.waiting import collecting, is_inside, refuse_finalizer, sheltered, straight
from qflow.message import (
    DELAYED,
    LANE_SHIFT,
    OVERHEAD_BYTES,
    SINGLE_BYTES,
    Record,
    charge,
    is_logged,
    is_plain,
    lane_of,
)
from qflow.queues.backlog import NOWHERE, RETRY_S, Unlocked
from qflow.queues.intake import Intake
from qflow.queues.overflow import Depth
from qflow.storage.block_log import Settled
from qflow.storage.log.batch import Settling
from qflow.storage.log.transaction_log import Lane, Request, Unit

LANE_ONE = 1 << LANE_SHIFT
_SINGLE_CHARGE = OVERHEAD_BYTES + SINGLE_BYTES
RELEASED_AT_ONCE = 1000
DROPPED_AT_ONCE = 10_000
FOREVER_MS = 2**62
MOST_STANDING = 4096
"""Requests of 0.4 KB that stand before the writer at most while acks that nobody waits for go on; tasks do not wait."""

Held = Delivery | Deliveries


class Leaving:
    """Messages on their way out of a queue, in a commit with something else. They are charged until that holds."""

    writes: tuple[Any, ...] = ()

    __slots__ = ("counter", "held", "parts", "queue", "segments", "unit")

    def __init__(self, queue: Holding, segments: list[Segment], counter: str, held: dict[Held, float | None]) -> None:
        self.queue = queue
        self.segments = segments
        self.counter = counter
        """What they are counted as, once they are gone."""
        self.held = held
        """Who held them: if the commit is refused, he does again."""
        self.parts: list[tuple[Delivery, Deliveries, int]] = []
        """Which of them were in a batch, and where: they go back there."""
        self.unit: Unit | None = None
        """What takes them away, once they are to join a batch."""

    @property
    def depth(self) -> Depth:
        """How much of the queue's depth it takes with it."""
        records = [records for _, records, _ in self.segments]
        return Depth(sum(map(len, records)), sum(sum(map(len, part)) for part in records))

    def settles(self) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane."""
        return self.queue.settled_parts(self.segments)

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        self.queue.left(self)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        self.queue.stays(self)

    def give_up(self) -> None:
        """Called by who was stopped on the way: nothing leaves, unless it was handed over: the writer knows then."""
        if self.unit is None or not self.unit.joined:
            self.queue.stays(self)


class _Late:
    """Who answers for deliveries that were held for too long."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text

    def _refuse(self, *_: object) -> None:
        raise AlreadySettled(self._text)

    settle_one = return_one = extend_one = settle_batch = return_batch = extend_batch = _refuse
    settle_part = return_part = leave_batch = _refuse


class Holding(Intake):
    """See the module."""

    def __init__(self, *arguments: Any, **parts: Any) -> None:
        """Made by `Broker`; the arguments are those of `Intake`."""
        super().__init__(*arguments, **parts)
        self._acquired: dict[Delivery, float | None] = {}
        self._batches: dict[Deliveries, float | None] = {}
        """What is delivered and not settled, in order, since when (monotonic) where somebody wants to know that."""
        self._extended: dict[Held, float] = {}
        """Ends of ack timeouts that were extended; of what was settled since, until `tick`."""
        self._in_order = True
        """What is held is in order of when it was delivered."""
        self._kept: list[Segment] = []
        """What was held when the broker was closed: nobody settles that any more, and it is counted as delivered."""
        self._leaving: dict[Leaving, None] = {}
        self._arrivals = 0  # of those who wait without a thread
        self._returned = 0
        self._bury_again_at = 0.0
        self._purged_below: dict[int, int] = {}
        self._slow_after_s: float | None = None

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # Settle -----------------------------------------------------------------------------------------------------------

    def ack_many(self, deliveries: Deliveries | Iterable[Delivery], wait: bool = False) -> None:
        """Settle many deliveries together, in one commit; with `wait`, return when that is synced.

        Raises:
            AlreadySettled: one of them was settled before; all the others are settled all the same.
            InDoubt: the log failed; whether they are settled is known when the spool is opened again.
            BrokerFailed: it failed earlier; none is settled.
        Cost: a batch 0.01 µs a message, single deliveries 1 µs each.
        """
        if isinstance(deliveries, Deliveries):
            deliveries.ack(wait)
            return
        mine: list[Delivery] = []
        others: list[Delivery] = []
        for delivery in deliveries:
            if not isinstance(delivery, Delivery):
                raise InvalidArgument(f"ack_many takes a batch or deliveries, not {type(delivery).__name__}")
            holder = delivery._settler
            is_mine = holder is self or (isinstance(holder, Deliveries) and holder._settler is self)
            (mine if is_mine else others).append(delivery)
        joined, problem = self._settle_all(mine) if mine else (None, None)
        for delivery in others:
            try:
                delivery.ack()
            except AlreadySettled as error:
                problem = error
            except BrokerFailed as error:
                raise in_doubt(error) from error
        if wait and (others or not mine):
            joined = self.join_settles()
        if joined is not None:
            self._finish_settle(joined, wait)
        if problem is not None:
            raise problem

    @sheltered
    def _settle_all(self, deliveries: list[Delivery]) -> tuple[Request | None, AlreadySettled | None]:
        """Ack deliveries in one batch of the log; return what to wait for, and why one of them was left out."""
        problem: AlreadySettled | None = None
        wanted: dict[Delivery, None] = {}
        with self._lock:
            for delivery in deliveries:
                try:
                    if delivery in wanted:
                        raise AlreadySettled(f"message {delivery.sequence} of queue {self._name!r} is there twice")
                    if delivery not in self._acquired and self._is_held(delivery):
                        self.leave_batch(*self._place_of(delivery), delivery)  # type: ignore[arg-type]
                    if delivery in self._acquired:
                        wanted[delivery] = None
                except AlreadySettled as error:
                    problem = error
            segments: list[Segment] = []
            end = -1
            for delivery in wanted:
                if delivery.sequence == end:
                    segments[-1].records.append(delivery.record)
                else:
                    segments.append(Segment(delivery.sequence, [delivery.record], delivery._marks))
                end = delivery.sequence + 1
            joined: Request | None = None
            if self._log is not None:
                self._check_settles()
                joined = self._log.settle_all(self.settled_parts(segments))
            self._drop_held(wanted)
            self._forget(segments, "_acked")
        return joined, problem

    @straight
    def settle_one(self, delivery: Delivery, wait: bool) -> None:
        """Ack one delivery; see `Delivery.ack`."""
        if self._log is not None:
            self._settle_logged(delivery, wait)
            return
        size = len(delivery.record)
        looks = False
        try:
            with self._lock:  # a straight line; see `waiting`
                acquired = self._acquired
                held = delivery in acquired
                if held and "a" not in collecting:
                    self._acked += 1
                    self._used = used = self._used - size - _SINGLE_CHARGE
                    self._message_bytes -= size
                    del acquired[delivery]
                    if used >= self._give_back_below:
                        return
                    looks = True
            if looks:
                self._let_others_look()
            elif held:
                self._settle_all([delivery])
            else:
                self._check_late(delivery.sequence)
        except BaseException:
            self._let_others_look()
            raise

    @straight
    def _settle_logged(self, delivery: Delivery, wait: bool) -> None:
        """Ack one delivery of a queue that has a log."""
        if "a" in collecting:
            refuse_finalizer()
        log: Any = self._log
        record = delivery.record
        size = len(record)
        sequence = delivery.sequence
        lane = self._lane if sequence < LANE_ONE else self._log_lane(sequence)
        settling = Settling([(lane, [_settled(sequence, [record], size)])])  # type: ignore[list-item]
        log.check_usable()
        requests, one = log.requests, (settling,)
        found = looks = False
        try:
            with self._lock:  # a straight line; see `waiting`
                acquired = self._acquired
                if delivery in acquired:
                    found = True
                    self._acked += 1
                    self._used = used = self._used - size - _SINGLE_CHARGE
                    self._message_bytes -= size
                    del acquired[delivery]
                    requests += one
                    looks = used < self._give_back_below
            if looks:
                self._let_others_look()
            if not found:
                self._check_late(sequence)
                return
            log.handed_over(settling, urgent=wait)
        except BaseException:
            log.rouse()
            self._let_others_look()
            raise
        self._finish_settle(settling, wait)

    @sheltered
    def _let_others_look(self) -> None:
        """After something was settled: return slack, lend less, wake who waits."""
        with self._lock:
            self._look_around()

    @sheltered
    def return_one(self, delivery: Delivery, requeue: bool, delay_s: float) -> None:
        """Take one delivery back; see `Delivery.nack`."""
        sequence = delivery.sequence
        with self._lock:
            if delivery not in self._acquired:
                self._check_late(sequence)
                return
            since = self._acquired[delivery]
            self._take_back(
                [Segment(sequence, [delivery.record], delivery._marks)], {delivery: since}, requeue, delay_s
            )
        if self._used > self._account.capacity:
            self.spill_excess()

    def settle_batch(self, batch: Deliveries, wait: bool) -> None:
        """Ack what is left of a batch."""
        if self._settle_whole(batch, wait):
            return
        settling = self._settle_batch(batch)
        if settling is not None:
            self._finish_settle(settling, wait)

    @straight
    def _settle_whole(self, batch: Deliveries, wait: bool) -> bool:
        """Ack a batch of which nothing was settled before, as `settle_one`; return whether it was one."""
        messages, size = batch.left_size()
        if messages < batch.total or not messages or "a" in collecting:
            return False
        log = self._log
        requests: Any = None
        one: tuple[Request, ...] = ()
        if log is not None:
            settling = Settling(self.settled_parts(batch.segments))
            log.check_usable()
            requests, one = log.requests, (settling,)
        charged = size + OVERHEAD_BYTES * messages
        found = looks = False
        try:
            with self._lock:  # a straight line; see `waiting`
                batches = self._batches
                if batch in batches and not batch.settled:
                    found = True
                    self._acked += messages
                    self._used = used = self._used - charged
                    batch.settled = None
                    del batches[batch]
                    if log is not None:
                        requests += one
                    self._message_bytes -= size
                    looks = used < self._give_back_below
            if looks:
                self._let_others_look()
            if found and log is not None:
                log.handed_over(settling, urgent=wait)
        except BaseException:
            if log is not None:
                log.rouse()
            self._let_others_look()
            raise
        if found and log is not None:
            self._finish_settle(settling, wait)
        return found

    @sheltered
    def _settle_batch(self, batch: Deliveries) -> Request | None:
        """Settle what is left of a batch; return what was handed over to the log."""
        log = self._log
        joined: Request | None = None
        with self._lock:
            if not self._holds(batch):
                return None
            left = batch.left()
            if log is not None:
                self._check_settles()
                joined = log.settle_all(self.settled_parts(left))
            count = sum(len(records) for _, records, _ in left)
            size = sum(sum(map(len, records)) for _, records, _ in left)
            batch.settled = None
            del self._batches[batch]
            self._acked += count
            self._used -= size + OVERHEAD_BYTES * count
            self._message_bytes -= size
            if self._used < self._give_back_below:
                self._look_around()
        return joined

    @sheltered
    def return_batch(self, batch: Deliveries, requeue: bool = True, delay_s: float = 0.0) -> None:
        """Take back what is left of a batch."""
        with self._lock:
            if not self._holds(batch):
                return
            self._take_back(batch.left(), {batch: self._batches[batch]}, requeue, delay_s)
        if self._used > self._account.capacity:
            self.spill_excess()

    @sheltered
    def settle_part(self, batch: Deliveries, index: int, wait: bool) -> None:
        """Ack one delivery of a batch."""
        delivery = self.leave_batch(batch, index)
        if delivery is not None:
            self.settle_one(delivery, wait)

    @sheltered
    def return_part(self, batch: Deliveries, index: int, requeue: bool, delay_s: float) -> None:
        """Take back one delivery of a batch."""
        delivery = self.leave_batch(batch, index)
        if delivery is not None:
            self.return_one(delivery, requeue, delay_s)

    def leave_batch(self, batch: Deliveries, index: int, delivery: Delivery | None = None) -> Delivery | None:
        """Make one delivery of a batch, this object or a new one, a single one; None if it was purged."""
        with self._lock:
            if batch.settled is not None:
                batch.check_unsettled(index)
            if not self._holds(batch):
                return None
            delivery = delivery or batch[index]
            delivery._settler = self
            assert batch.settled is not None
            batch.settled.add(index)
            batch.settled_bytes += len(delivery.record)
            since = self._batches[batch]
            if since is not None and self._acquired:
                last = self._acquired[next(reversed(self._acquired))]
                self._in_order = self._in_order and last is not None and last <= since
            self._acquired[delivery] = since
            self._used += SINGLE_BYTES
            if batch in self._extended:
                self._extended[delivery] = self._extended[batch]
            if len(batch.settled) == batch.total:
                batch.settled = None
                del self._batches[batch]
            self._cover_singles()
            return delivery

    @sheltered
    def extend_one(self, delivery: Delivery, seconds: float) -> None:
        """Give a holder more time; see `Delivery.extend`."""
        with self._lock:
            if delivery not in self._acquired:
                self._check_late(delivery.sequence)
                return
            self._extend(delivery, self._acquired[delivery], seconds)

    @sheltered
    def extend_batch(self, batch: Deliveries, seconds: float) -> None:
        """Give the holder of a batch more time."""
        with self._lock:
            if self._holds(batch):
                self._extend(batch, self._batches[batch], seconds)

    def _extend(self, held: Held, since: float | None, seconds: float) -> None:
        timeout = self.settings.ack_timeout_s
        if timeout is not None and since is not None:
            end = max(since + timeout, self._extended.get(held, 0.0))
            self._extended[held] = max(end, self._monotonic() + config.parse_span(seconds, "extend"))

    def _holds(self, batch: Deliveries) -> bool:
        """Tell whether a batch is acquired; False if it was purged. Under the lock."""
        if batch in self._batches:
            return True
        if batch.settled is None:
            raise AlreadySettled(f"this batch of queue {self._name!r} was settled before")
        if self._ended is BrokerClosed:
            raise self._gone_error()
        return False

    def _check_late(self, sequence: int) -> None:
        """Explain why a delivery is not acquired; return if it was purged or its queue deleted. Under the lock."""
        if self._ended is BrokerClosed:
            raise self._gone_error()
        if sequence >= self._purged_below.get(lane_of(sequence), 0) and self._ended is None:
            raise AlreadySettled(f"message {sequence} of queue {self._name!r} was settled, or returned, before")

    def _check_settles(self) -> None:
        """Refuse a settle that the log could not take any more. Under the lock."""
        if self._ended is BrokerClosed:
            raise self._gone_error()

    def _finish_settle(self, batch: Request, wait: bool) -> None:
        log = self._log
        assert log is not None
        if not wait:
            if len(log.requests) > MOST_STANDING and not is_inside():  # they take memory, too
                log.wait(batch)
            return
        log.wait(batch)
        if batch.error is not None:
            raise again(batch.error)
        for lane in self._lanes.values():
            if lane.broken is not None:
                raise again(lane.broken)

    def settled_parts(self, segments: list[Segment]) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane; nothing of a queue that is not logged."""
        if self._log is None or self._ended is QueueDeleted:
            return []
        parts: dict[int, list[Settled]] = {}
        for first, records, _ in segments:
            settled = _settled(first, records, sum(map(len, records)))
            parts.setdefault(lane_of(first), []).append(settled)
        return [(self._lanes[number], part) for number, part in parts.items()]

    def _drop_held(self, held: Iterable[Held]) -> None:
        """Take deliveries and batches off the list of what is acquired. Under the lock."""
        for one in held:
            self._extended.pop(one, None)
            if isinstance(one, Deliveries):
                self._batches.pop(one, None)
            elif one in self._acquired:
                del self._acquired[one]
                self._used -= SINGLE_BYTES

    def _take_back(
        self, segments: list[Segment], held: dict[Held, float | None], requeue: bool, delay_s: float
    ) -> None:
        """Return acquired messages to the queue, or let them go if they are not wanted or came too often.

        Called with the lock held; lets go of it where dead letters are carried away.
        """
        most = self.settings.max_deliveries
        self._returned += sum(len(records) for _, records, _ in segments)
        spent = [part for part in segments if not requeue or (most is not None and (part.marks >> 1) + 1 >= most)]
        gone = set(map(id, spent))
        back = [part for part in segments if id(part) not in gone] if spent else segments
        self._drop_held(held)
        for one in held:
            if isinstance(one, Deliveries):
                one.settled = None
        counted = [Segment(first, records, marks + ONE_ATTEMPT) for first, records, marks in spent]
        if back:
            self._give_back(
                [Segment(first, records, marks + ONE_ATTEMPT) for first, records, marks in back],
                self._now_ms() + int(delay_s * 1000) if delay_s else 0,
            )
            if (most is not None or delay_s) and self._log is not None and not self._log.failed:
                for first, records, marks in back:
                    ranges = [(first, first + len(records), (marks >> 1) + 1)]
                    self._log.attempts(self._log_lane(first), ranges)
        if counted:
            self._let_go_of((counted, "max_deliveries" if requeue else "rejected", "_dropped"))

    def _give_back(self, segments: list[Segment], due_ms: int = 0) -> None:
        """Put taken messages back in their place, or in a schedule until they are due. Under the lock."""
        for first, records, marks in segments:
            if due_ms or lane_of(first) >= DELAYED:
                self._add_delayed(first, records, marks, due_ms)
            elif self._list_of(first).scatters(len(records)):
                self._add_scattered(first, records, marks)
            else:
                self._list_of(first).give_back(first, records, marks)
        if self._front is not NOWHERE:
            self._choose_front()
        if self._getters:
            self._arrived.notify(sum(len(records) for _, records, _ in segments))
        self._look_around()

    @sheltered
    def give_up_batch(self, batch: Deliveries) -> None:
        """Take back what is left of a batch that was handed to nobody."""
        with self._lock:
            if batch in self._batches:
                left = batch.left()
                self._drop_held([batch])
                batch.settled = None
                self._give_back(left)

    def _log_attempts(self, batch: Deliveries) -> None:
        """Have it in the log that messages are delivered a second time, before they are: they may kill who has them."""
        joined = self.join_attempts(batch)
        if joined is not None and self._log is not None:
            self._log.wait(joined)
            if joined.error is not None:
                raise again(joined.error)

    def join_settles(self) -> Request | None:
        """Return what to wait for until every settle so far is synced; None where nothing is logged."""
        if self._log is None or self._lane is None:
            return None
        try:
            return self._log.settle(self._lane, [])
        except BrokerFailed as error:
            raise in_doubt(error) from error

    def returns_by_disk(self, requeue: bool) -> bool:
        """Tell whether taking messages back may take work on the disk: for dead letters, or for want of memory."""
        settings = self.settings
        may_bury = settings.dead_letter is not None and (not requeue or settings.max_deliveries is not None)
        return may_bury or self._used > self._account.capacity

    @property
    def exceeds(self) -> bool:
        """Something passed on slack, and is to be spilled."""
        return self._used > self._account.borrowed

    def join_attempts(self, batch: Deliveries) -> Request | None:
        """Log that messages are delivered again; return what to wait for before they are, if there is something."""
        if self.settings.max_deliveries is None:
            return None
        log = self._log
        ranges = [
            (lane_of(first), (first, first + len(records), (marks >> 1) + 1))
            for first, records, marks in batch.segments
            if marks
        ]
        if log is None or not ranges or log.failed:
            return None
        for number in {number for number, _ in ranges}:
            joined = log.attempts(self._lanes[number], [part for lane, part in ranges if lane == number])
        return joined

    # Leaving ----------------------------------------------------------------------------------------------------------

    def begin_leaving(self, deliveries: list[Held]) -> Leaving:
        """Take deliveries from their holders, to be settled by a transaction.

        Raises:
            AlreadySettled: one of them is not acquired any more; nothing was done.
        """
        with self._lock:
            self._check_settles()
            wanted = {} if self._ended else {one: self._place_of(one) for one in deliveries if self._is_held(one)}
            segments: list[Segment] = []
            held: dict[Held, float | None] = {}
            parts: list[tuple[Delivery, Deliveries, int]] = []
            for one, (batch, index) in wanted.items():
                if isinstance(one, Delivery):
                    if batch is not None:
                        self.leave_batch(batch, index, one)
                        parts.append((one, batch, index))
                    segments.append(Segment(one.sequence, [one.record], one._marks))
                    held[one] = self._acquired[one]
            for one in wanted:
                if isinstance(one, Deliveries) and one in self._batches:
                    segments += one.left()
                    held[one] = self._batches[one]
            leaving = Leaving(self, segments, "_acked", held)
            leaving.parts = parts
            self._leaving[leaving] = None
            self._drop_held(held)
            return leaving

    def _place_of(self, one: Held) -> tuple[Deliveries | None, int]:
        """Return the batch a delivery is in, and where; None for a single one, and for a batch."""
        batch = one._settler
        return (batch, batch._position(one.sequence)) if isinstance(batch, Deliveries) else (None, 0)  # type: ignore[union-attr]

    def _is_held(self, one: Held) -> bool:
        """Tell whether a delivery or batch is acquired; False if it was purged. Under the lock.

        Raises:
            AlreadySettled: it was settled, or went back.
        """
        if isinstance(one, Deliveries):
            return self._holds(one)
        batch, index = self._place_of(one)
        if batch is not None:
            batch.check_unsettled(index)
            return self._holds(batch)
        if one not in self._acquired:
            self._check_late(one.sequence)
            return False
        return True

    def left(self, leaving: Leaving) -> None:
        """Forget messages whose leaving is committed."""
        with self._lock:
            if leaving not in self._leaving:
                return
            del self._leaving[leaving]
            for one in leaving.held:
                if isinstance(one, Deliveries):
                    one.settled = None
            self._forget(leaving.segments, leaving.counter)
            if leaving.counter == "_expired":
                self._dead_lettered += sum(len(records) for _, records, _ in leaving.segments)

    def stays(self, leaving: Leaving) -> None:
        """Undo `begin_leaving`: whoever held the messages has them again; the others are in their place."""
        with self._lock:
            if leaving not in self._leaving:
                return
            del self._leaving[leaving]
            self._in_order = False
            if not leaving.held:
                self._give_back(leaving.segments)
                self._bury_again_at = self._monotonic() + RETRY_S
            for one, since in leaving.held.items():
                if isinstance(one, Deliveries):
                    self._batches[one] = since
                else:
                    self._acquired[one] = since
                    self._used += SINGLE_BYTES
            for one, batch, index in leaving.parts:
                self._batches[batch] = self._acquired.pop(one)
                self._used -= SINGLE_BYTES
                batch.take_back(one, index)
            self._cover_singles()

    def _forget(self, segments: list[Segment], counter: str) -> None:
        """Uncharge and count messages that are gone. Under the lock."""
        count = sum(len(records) for _, records, _ in segments)
        size = sum(sum(map(len, records)) for _, records, _ in segments)
        if counter != "_acked":
            self._gone += count
        setattr(self, counter, getattr(self, counter) + count)
        self._message_bytes -= size
        self._discharge(size + OVERHEAD_BYTES * count)

    def _settle_away(self, segments: list[Segment], counter: str) -> None:
        """Have the log settle messages that nobody gets, and forget them. Under the lock."""
        if self._log is not None and not self._log.failed:
            self._log.settle_all(self.settled_parts(segments))
        self._forget(segments, counter)

    def _let_go_of(self, *parties: tuple[list[Segment], str, str]) -> bool:
        """Make messages that neither wait nor are acquired dead letters, or settle them without such a queue.

        Called with the lock held; lets go of it to carry them away.

        Args:
            parties: (messages, reason, what they are counted as if they are dropped) of those with one fate.

        Returns:
            False if some could not leave now and are in their place again.
        """
        if self.settings.dead_letter is None:
            for segments, _, counter in parties:
                if segments:
                    self._settle_away(segments, counter)
            return True
        leavings: dict[Leaving, str] = {}
        for segments, reason, counter in parties:
            if segments:
                leaving = Leaving(self, segments, "_expired" if counter == "_expired" else "_dead_lettered", {})
                leavings[leaving] = reason
        self._leaving |= dict.fromkeys(leavings)
        too_early = self._monotonic() < self._bury_again_at
        done = True
        try:
            for leaving, reason in leavings.items():
                if leaving in self._leaving and (too_early or not self._carry_away(leaving, reason)):
                    self.stays(leaving)
                    done = False
        except BaseException:
            for leaving in leavings:
                leaving.give_up()
            raise
        return done

    def _carry_away(self, leaving: Leaving, reason: str) -> bool:
        """Have messages buried; False if that failed. Called with the lock held; lets go of it."""
        buried = False
        try:
            with Unlocked(self._lock):
                buried = self._undertaker(self, leaving.segments, reason, leaving)
        except BaseException:
            leaving.give_up()
            raise
        return buried

    def _take_due(
        self, schedule: Schedule, most: int, now_ms: int, segments: list[Segment], before: Key | None = None
    ) -> int:
        """Move what is due and in memory to `segments`; return how many. Under the lock."""
        overhead = schedule.overhead_bytes
        taken = schedule.take(most, now_ms, segments, before)
        if taken:
            self._used += schedule.overhead_bytes - overhead
            self._look_around()
        return taken

    def _drops_from_disk(self) -> bool:
        for runs in reversed(self._ranked):
            place = runs.settle_head().place
            if place is not Place.RESIDENT or runs.head.waiting:
                return place is not Place.RESIDENT
        return False

    def _drop_oldest(self, surplus: Depth) -> bool:
        surplus = Depth(min(surplus.messages, DROPPED_AT_ONCE), surplus.bytes)
        for runs in reversed(self._ranked):
            if self._drop_from_schedule(runs.number, surplus):
                return True
            if runs.settle_head().place is not Place.RESIDENT:
                return self._restore_head(runs, to_drop=True)  # how much is too much may have changed meanwhile
            segments: list[Segment] = []
            dropped = size = 0
            while (dropped < surplus.messages or size < surplus.bytes) and dropped < DROPPED_AT_ONCE:
                before = len(segments)
                if not runs.take(max(1, surplus.messages - dropped) if surplus.bytes <= 0 else 1, segments):
                    break
                dropped += sum(len(records) for _, records, _ in segments[before:])
                size += sum(sum(map(len, records)) for _, records, _ in segments[before:])
            if segments:
                self._settle_away(segments, "_dropped")
                return True
        return any(self._drop_from_schedule(number, surplus) for number in self._schedules)

    def _drop_from_schedule(self, number: int, surplus: Depth) -> bool:
        """Drop what comes first in a schedule; False if there is none, or nothing in it."""
        schedule = self._schedules.get(number)
        if schedule is None:
            return False
        segments: list[Segment] = []
        if not self._take_due(schedule, max(1, surplus.messages), FOREVER_MS, segments):
            self._restore_delayed(number, FOREVER_MS)
            if not self._take_due(schedule, 1, FOREVER_MS, segments):
                return False
        self._settle_away(segments, "_dropped")
        return True

    # Holding for too long ---------------------------------------------------------------------------------------------

    def _is_leased(self) -> bool:
        return self.settings.ack_timeout_s is not None

    def _is_watched(self) -> bool:
        """Somebody wants to know since when messages are held."""
        return self.settings.ack_timeout_s is not None or self._slow_after_s is not None

    def _release_late(self, may_work: bool = True) -> bool:
        """Take back what is held for longer than the ack timeout. With the lock held; it may let go of it.

        Returns:
            False if that takes work on the disk, which may not be done: some of it may become dead letters.
        """
        timeout = self.settings.ack_timeout_s
        if timeout is None:
            return True
        if not may_work and self.settings.dead_letter is not None and self._held_for(timeout, respect_extensions=True):
            return False
        self._release(timeout, f"ack_timeout_s={timeout}", respect_extensions=True)
        return True

    def _release(self, longer_than_s: float, why: str, *, respect_extensions: bool) -> list[Held]:
        """Take back what has been held for so long; return it. With the lock held; it may let go of it."""
        late = self._held_for(longer_than_s, respect_extensions=respect_extensions)
        segments: list[Segment] = []
        for one in late:
            if isinstance(one, Deliveries):
                segments += one.left()
            else:
                segments.append(Segment(one.sequence, [one.record], one._marks))
            one._settler = _Late(
                self._name,
                f"a message of queue {self._name!r} was held for longer than {why}: it went back to the queue",
            )
        if late:
            self._take_back(segments, late, True, 0.0)
        return list(late)

    def _held_for(self, longer_than_s: float, *, respect_extensions: bool) -> dict[Held, float | None]:
        """Return some of what has been held for so long, and since when. Under the lock."""
        if not self._in_order:
            self._acquired = dict(sorted(self._acquired.items(), key=_since))
            self._batches = dict(sorted(self._batches.items(), key=_since))
            self._in_order = True
        now = self._monotonic()
        late: dict[Held, float | None] = {}
        for held in (self._acquired, self._batches):
            for one, since in held.items():
                if since is None:
                    continue  # being collected, or delivered before anybody wanted to know
                if since + longer_than_s > now:
                    break
                if respect_extensions and self._extended.get(one, now) > now:
                    continue
                late[one] = since
                if len(late) >= RELEASED_AT_ONCE:
                    break
        return late

    # Looking ----------------------------------------------------------------------------------------------------------

    def _is_in_flight(self) -> bool:
        return bool(self._acquired) or bool(self._leaving) or any(batch.total for batch in self._batches)

    def _held_segments(self) -> list[Segment]:
        """Return everything that is acquired or on its way out. Under the lock."""
        found = [Segment(delivery.sequence, [delivery.record], delivery._marks) for delivery in self._acquired]
        for batch in self._batches:
            found += batch.left()
        found += self._kept
        for leaving in self._leaving:
            found += leaving.segments
        return found

    def _keep_held(self) -> None:
        """Let nobody settle what is held any more: the broker is being closed. Under the lock."""
        self._kept += [Segment(one.sequence, [one.record], one._marks) for one in self._acquired]
        for batch in self._batches:
            self._kept += batch.left()
        self._acquired, self._batches = {}, {}

    def _acquired_charge(self) -> int:
        return sum(charge(records) for _, records, _ in self._held_segments()) + SINGLE_BYTES * len(self._acquired)


def _since(item: tuple[Held, float | None]) -> float:
    """Return since when something is held; what nobody wanted to know that of comes last."""
    return math.inf if item[1] is None else item[1]


def _settled(first: int, records: list[Record], size: int) -> Settled:
    """Return the range of `size` bytes as the log counts it: messages that were not logged count nothing."""
    end = first + len(records)
    if not is_plain(records):
        records = [record for record in records if is_logged(record)]
        size = sum(map(len, records))
    return Settled(first, end, len(records), size)
