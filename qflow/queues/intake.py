"""The way into a queue: puts, and what is said with them. Above `Admission`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from qflow import config
from qflow.delivery import Segment
from qflow.errors import InvalidArgument, again
from qflow.memory.line import Wake
from qflow.memory.run_list import RunList
from qflow.memory.waiting import attend, collecting, shelter, sheltered, straight
from qflow.message import (
    DELAYED,
    OVERHEAD_BYTES,
    Headers,
    Message,
    Record,
    body_bytes,
    encode_headers,
    is_plain,
    with_prefix,
)
from qflow.queues.admission import Admission, Asking, TurnedAway
from qflow.queues.overflow import Decision
from qflow.storage.log.transaction_log import Put

Moment = datetime | float
MOST_AT_ONCE = 64
"""Queues that a message is put into at once: their locks are held together."""


class Form(NamedTuple):
    """What the messages of one call have in common."""

    number: int
    """Of their lane."""
    prefix: bytes
    """What stands before each body; nothing where a message is its body."""

    def record(self, body: object) -> Record:
        """Return the record for a body."""
        plain = body_bytes(body)
        return with_prefix(self.prefix, plain) if self.prefix else plain

    def records(self, bodies: Iterable[Any]) -> tuple[list[Record], bool]:
        """Return the records for some bodies, and whether they are plain. Cost: 0.2 µs each, 0.01 where they are."""
        try:
            records: list[Any] = list(bodies)
        except TypeError as error:
            raise InvalidArgument(f"bodies must be iterable, not {type(bodies).__name__}") from error
        if not is_plain(records):
            records = list(map(body_bytes, records))
        if self.prefix:
            return [with_prefix(self.prefix, body) for body in records], False
        return records, True


_PLAIN = Form(0, b"")


class Intake(Admission):
    """See the module."""

    @straight
    def put(
        self,
        body: bytes | bytearray | memoryview,
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: float | None = None,
        delay_s: float | None = None,
        not_before: Moment | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Append a message; on a durable queue, return once it is synced in the log.

        Args:
            body: bytes-like; bytearray and memoryview are copied.
            headers: names to str, int, float, bool or None.
            durable: False keeps the message of a durable queue out of the log: in line, and lost at restart.
            priority: 0 to `priorities - 1` of the queue; higher ones are delivered first.
            ttl_s: it expires so long after it could first be delivered; the queue's own, if that is shorter.
            delay_s, not_before: it is not delivered before; seconds from now, or a moment (seconds since the epoch, or
                a datetime with a time zone).
            timeout_s: how long to wait for room at a limit or on a full disk; None = without end, 0 = not at all.

        Returns:
            The message's sequence, higher than that of any before it in this queue and priority; None if the queue's
            overflow policy dropped it, or made it a dead letter.

        Raises:
            InvalidArgument: the body is not bytes-like, a header, time or priority makes no sense, or it could never
                fit.
            MessageTooLarge: more than `max_message_bytes`.
            QueueFull: no room came up in time. Nothing was done.
            DiskFull: the disk had no room for it in time. Nothing was done.
            InDoubt, BrokerFailed: the log failed; see there.
            BrokerClosed, QueueDeleted: it is gone.
        Cost: transient 0.3 µs; durable a share of one commit.
        """
        if (
            type(body) is bytes
            and headers is None
            and durable is None
            and ttl_s is None
            and delay_s is None
            and not_before is None
        ):
            cost = len(body) + OVERHEAD_BYTES
            one = (body,)
            with self._lock:  # a straight line; see `waiting`
                used = self._used + cost
                passes = used <= self._ceiling and cost <= self._largest
                if passes and not (priority or self._getters or "a" in collecting):
                    runs = self._runs
                    tail = self._tail
                    sequence = runs.next
                    self._used = used
                    runs.next = sequence + 1
                    tail += one
                    return sequence
        form = self.form(headers, durable, priority, ttl_s, delay_s, not_before)
        record = form.record(body)
        return self._put([record], type(record) is bytes, form.number, timeout_s)

    @straight
    def put_at_once(self, body: bytes) -> int | None:
        """`put` of a plain message where that takes no commit, no waiting and no work on the disk; else None."""
        cost = len(body) + OVERHEAD_BYTES
        one = (body,)
        with self._lock:
            used = self._used + cost
            if used > self._ceiling or cost > self._largest or "a" in collecting:
                return None
            runs = self._runs
            tail = self._tail
            sequence = runs.next
            self._used = used
            runs.next = sequence + 1
            tail += one
            if self._getters:
                self._arrived.notify()
            return sequence

    def put_nowait(self, body: bytes | bytearray | memoryview, **options: Any) -> int | None:
        """`put` that waits for no room; on a durable queue it still waits for the sync. Options as `put`."""
        return self.put(body, **options, timeout_s=0)

    def put_many(
        self,
        bodies: Iterable[bytes | bytearray | memoryview],
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: float | None = None,
        delay_s: float | None = None,
        not_before: Moment | None = None,
        timeout_s: float | None = None,
    ) -> range:
        """Append messages together: all or none of them, with consecutive sequences and one commit.

        Args:
            headers, durable, priority, ttl_s, delay_s, not_before: as `put`, the same for each of them.

        Returns:
            Their sequences, in order; an empty range if the overflow policy dropped them or made them dead letters.

        Raises:
            TransactionTooLarge: more than `max_transaction_bytes` together.
            All that `put` raises.
        Cost: transient 0.05 µs a message, durable 0.2 µs and one commit.
        """
        form = self.form(headers, durable, priority, ttl_s, delay_s, not_before)
        records, plain = form.records(bodies)
        if not records:
            return range(0)
        first = self._put(records, plain, form.number, timeout_s)
        return range(0) if first is None else range(first, first + len(records))

    def submit(
        self,
        body: bytes | bytearray | memoryview,
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: float | None = None,
        delay_s: float | None = None,
        not_before: Moment | None = None,
        timeout_s: float | None = None,
    ) -> Future[int | None]:
        """`put` that waits for room but not for the sync: the future has what `put` returns, once it is confirmed.

        It is committed within 3 ms, or with the next call that waits. One thread resolves all futures: a callback of
        one may use the broker, but waits for no other future, which would wait for that callback.
        Cost: 5 µs and a share of one commit.
        """
        form = self.form(headers, durable, priority, ttl_s, delay_s, not_before)
        record, number = form.record(body), form.number
        plain = type(record) is bytes
        future: Future[int | None] = Future()
        future.set_running_or_notify_cancel()
        log = self._log
        if log is None:
            future.set_result(self._put([record], plain, number, timeout_s))
            return future
        put = self._enter([record], plain, number, timeout_s, future)
        if put is None:
            future.set_result(None)
        return future

    def form(
        self,
        headers: Headers | None,
        durable: bool | None,
        priority: int,
        ttl_s: float | None,
        delay_s: float | None,
        not_before: Moment | None,
        topic: str = "",
        key: bytes | None = None,
    ) -> Form:
        """Return what the messages of one call have in common, after checking it."""
        settings = self.settings
        if durable is None:
            durable = settings.durable
        elif not isinstance(durable, bool):
            raise InvalidArgument(f"durable must be True, False or None, got {durable!r}")
        elif durable and not settings.durable:
            raise InvalidArgument(f"queue {self._name!r} is not durable: declare a durable one for this message")
        number = 0
        if priority:
            self._priority_list(priority)
            number = priority
        expires_ms = due_ms = 0
        if not (ttl_s is delay_s is not_before is settings.ttl_s is None):
            expires_ms, due_ms = self._times(ttl_s, delay_s, not_before)
        if expires_ms and not self._timed:
            self._begin_times()
        if due_ms:
            number += DELAYED
            if number not in self._schedules:
                self._begin_delayed(number)
        logged = durable or not settings.durable
        if not (headers or expires_ms or due_ms or topic or key) and logged:
            return Form(number, b"") if number else _PLAIN
        prefix = Message(
            b"", encode_headers(headers), logged, expires_ms=expires_ms, due_ms=due_ms, topic=topic, key=key or b""
        )
        return Form(number, bytes(prefix))

    @sheltered
    def _begin_times(self) -> None:
        """From now on messages may expire."""
        with self._lock:
            self._timed = True
            self._refresh()

    @sheltered
    def _begin_delayed(self, number: int) -> None:
        """Have a lane for delayed messages."""
        with self._lock:
            if number not in self._schedules:  # nobody opened it meanwhile
                self._open_delayed(number)

    def _times(self, ttl_s: float | None, delay_s: float | None, not_before: Moment | None) -> tuple[int, int]:
        """Return (when it expires, when it is due) in milliseconds since the epoch; 0 = never, and at once."""
        now = self._clock()
        due = now
        if delay_s is not None:
            if not_before is not None:
                raise InvalidArgument("give delay_s or not_before, not both")
            due += config.parse_span(delay_s, "delay_s")
        elif not_before is not None:
            due = max(now, config.parse_moment(not_before, "not_before"))
        spans = [span for span in (ttl_s, self.settings.ttl_s) if span is not None]
        expires_ms = max(1, int((due + min(config.parse_span(span, "ttl_s") for span in spans)) * 1000)) if spans else 0
        return expires_ms, int(due * 1000) if due > now else 0

    def _priority_list(self, priority: int) -> RunList:
        """Return the messages of a priority. Cost: 0.1 µs."""
        if type(priority) is not int or not 0 <= priority < self.settings.priorities:
            raise InvalidArgument(
                f"priority must be an int from 0 to {self.settings.priorities - 1} in queue {self._name!r} "
                f"(priorities={self.settings.priorities}), got {priority!r}"
            )
        return self._lists[priority]

    def _put(self, records: list[Record], plain: bool, number: int, timeout_s: float | None) -> int | None:
        log = self._log
        if log is not None and type(records[0]) is Message and not records[0].logged:
            direct = shelter(partial(self.put_unlogged, records, number))
            if direct is not None:
                return direct
        put = self._enter(records, plain, number, timeout_s)
        if put is None:
            return None
        if log is not None:
            log.wait(put)
            if put.error is not None:
                raise again(put.error)
        self.keep_within_bounds()
        return put.first

    def _enter(
        self,
        records: list[Record],
        plain: bool,
        number: int,
        timeout_s: float | None,
        future: Future[int | None] | None = None,
    ) -> Put | None:
        """Hand messages over, or make them visible where they are not logged; None if a limit turned them away."""
        put = self.draft(records, plain, number)
        put.future = future
        if self.enter_at_once(put, urgent=future is None):
            return put
        asking = self.begin_put([put], timeout_s)
        try:
            attend(partial(self._try_enter, put, asking), partial(self.give_up_put, [put], asking))
        except TurnedAway as turned:
            shelter(partial(self.turn_away, records, turned.decision))
            return None
        return put

    def _try_enter(self, put: Put, asking: Asking, wake: Wake) -> float | None:
        """A step of `_enter`: reserve room, then enter."""
        wait_s = self.try_put([put], asking, wake, may_work=True)
        if wait_s is None and not asking.given_up:
            if put.lane.is_logged:
                assert self._log is not None
                self._log.put(put)  # refused by `give_up_put`, if that fails
            else:
                self.publish_transient(put)
        return wait_s

    def turn_away(self, records: list[Record], decision: Decision) -> None:
        """Do with what was not admitted what the policy says."""
        if decision is Decision.DEAD_LETTER:
            self._undertaker(self, [Segment(-1, records, 0)], "limit", None)
        self.count_turned_away(len(records), dropped=decision is Decision.DROP)


@straight
def put_into_all(queues: Sequence[Any], record: Message) -> dict[str, int | None] | None:
    """Put a record that neither expires nor is delayed into queues that all take it at once, without a commit.

    Args:
        queues: in the order of their numbers, which is that of their locks where more than one is held.

    Returns:
        its sequence in each, by name; None if one of them does not take it at once, and nothing was done.

    Cost: 0.4 µs a queue; of several, 15 µs more for the main thread.
    """
    cost = len(record) + OVERHEAD_BYTES
    if len(queues) == 1:
        queue, one, sequence = queues[0], (record,), None
        with queue._lock:  # a straight line; see `waiting`
            used = queue._used + cost
            if used <= queue._ceiling and cost <= queue._largest and not (queue._getters or "a" in collecting):
                runs = queue._runs
                tail = queue._tail
                sequence = runs.next
                queue._used = used
                runs.next = sequence + 1
                tail += one
        if sequence is not None:
            return {queue._name: sequence}
    if len(queues) > MOST_AT_ONCE:
        return None
    sequences: dict[str, int | None] = {}
    return sequences if shelter(partial(_put_into, queues, 0, record, cost, sequences)) else None


def _put_into(queues: Sequence[Any], index: int, record: Message, cost: int, sequences: dict[str, int | None]) -> bool:
    """Put a record into the queues from `index` on, or into none: each is locked while those behind it are asked."""
    if index == len(queues):
        return True
    queue = queues[index]
    with queue._lock:
        if queue._used + cost > queue._ceiling or cost > queue._largest:
            return False
        if not _put_into(queues, index + 1, record, cost, sequences):
            return False
        runs = queue._runs
        sequences[queue._name] = sequence = runs.next
        queue._used += cost
        runs.next = sequence + 1
        queue._tail.append(record)
        if queue._getters:
            queue._arrived.notify()
        return True
