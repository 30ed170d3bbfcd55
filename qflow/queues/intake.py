"""The way into a queue: puts, and what is said with them. Above `Admission`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from datetime import datetime
from typing import Any, NamedTuple

from qflow import config
from qflow.delivery import Segment
from qflow.errors import (
    InvalidArgument,
    QueueDeleted,
    again,
)
from qflow.memory.run_list import RunList
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
from qflow.queues.admission import Admission, TurnedAway
from qflow.queues.backlog import NOWHERE
from qflow.queues.overflow import Decision
from qflow.storage.transaction_log import Batch, Put, TransactionLog

Moment = datetime | float


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
            with self._lock:
                used = self._used + cost
                if used <= self._ceiling and cost <= self._largest:
                    runs = self._runs
                    append = self._append
                    if priority:
                        runs = self._priority_list(priority)
                        append = runs.open.records.append
                        if priority > self._front_number and self._front is not NOWHERE:
                            self._front, self._front_number = runs, priority
                    sequence = runs.next
                    self._used = used
                    runs.next = sequence + 1
                    append(body)
                    if self._getters:
                        self._arrived.notify()
                    return sequence
        form = self.form(headers, durable, priority, ttl_s, delay_s, not_before)
        record = form.record(body)
        return self._put([record], type(record) is bytes, form.number, timeout_s)

    def put_at_once(self, body: bytes) -> int | None:
        """`put` of a plain message where that takes no commit, no waiting and no work on the disk; else None."""
        cost = len(body) + OVERHEAD_BYTES
        with self._lock:
            return self.put(body) if self._used + cost <= self._ceiling and cost <= self._largest else None

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

        The commit is led by the broker within 3 ms, or by the next caller that waits for one.
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
        try:
            log.flush(self._send(log, [record], plain, number, config.parse_timeout(timeout_s), future)[1])
        except TurnedAway as turned:
            self.turn_away([record], turned.decision)
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
            with self._lock:
                self._timed = True
                self._refresh()
        if due_ms:
            number += DELAYED
            if number not in self._schedules:
                with self._lock:
                    if number not in self._schedules:  # nobody opened it meanwhile
                        self._open_delayed(number)
        logged = durable or not settings.durable
        if not (headers or expires_ms or due_ms or topic or key) and logged:
            return Form(number, b"") if number else _PLAIN
        prefix = Message(
            b"", encode_headers(headers), logged, expires_ms=expires_ms, due_ms=due_ms, topic=topic, key=key or b""
        )
        return Form(number, bytes(prefix))

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
        timeout = config.parse_timeout(timeout_s)
        try:
            if log is None:
                size = sum(map(len, records))
                charged = self._charge_for(records, size, number)
                with self._lock:
                    self._reserve(len(records), size, charged, timeout)
                    first = self._lists[number].next
                    self._publish(first, records, size, charged, 0)
            elif (
                type(records[0]) is Message
                and not records[0].logged
                and (direct := self.put_unlogged(records, number)) is not None
            ):
                first = direct
            else:
                put, batch = self._send(log, records, plain, number, timeout, None)
                log.wait(batch)
                if put.error is not None:
                    raise again(put.error)
                first = put.first
        except TurnedAway as turned:
            self.turn_away(records, turned.decision)
            return None
        self.keep_within_bounds()
        return first

    def turn_away(self, records: list[Record], decision: Decision) -> None:
        """Do with what was not admitted what the policy says."""
        if decision is Decision.DEAD_LETTER:
            self._undertaker(self, [Segment(-1, records, 0)], "limit", None)
        self.count_turned_away(len(records), dropped=decision is Decision.DROP)

    def _send(
        self,
        log: TransactionLog,
        records: list[Record],
        plain: bool,
        number: int,
        timeout: float | None,
        future: Future[int | None] | None,
    ) -> tuple[Put, Batch]:
        """Reserve room and join the open batch."""
        put = self._prepare(records, plain, number, timeout)
        put.future = future
        try:
            return put, log.put(put)
        except BaseException:
            if not put.joined:
                self.refused(put)
            raise

    def _prepare(self, records: list[Record], plain: bool, number: int, timeout: float | None) -> Put:
        """`prepare` for the messages of one put."""
        put = self.draft(records, plain, number)
        with self._lock:
            self._reserve(len(records), put.size, put.charged, timeout)
            self._pending += 1
        return put


def put_into_all(queues: Iterable[Any], record: Message) -> dict[str, int | None] | None:
    """Put a record that neither expires nor is delayed into queues that take it at once, without a commit.

    Returns:
        its sequence in each, by name; None if that is not so, and nothing was done.

    Cost: 0.3 µs a queue.
    """
    cost = len(record) + OVERHEAD_BYTES
    for queue in queues:
        if queue._used + cost > queue._ceiling or cost > queue._largest:
            return None
    sequences: dict[str, int | None] = {}
    for queue in queues:
        with queue._lock:
            used = queue._used + cost
            passes = used <= queue._ceiling
            if passes:
                runs = queue._runs
                sequence = runs.next
                queue._used = used
                runs.next = sequence + 1
                queue._append(record)
                if queue._getters:
                    queue._arrived.notify()
        if not passes:
            try:
                sequence = queue._put([record], False, 0, None)
            except QueueDeleted:
                continue  # since it was looked at
        sequences[queue._name] = sequence
    return sequences
