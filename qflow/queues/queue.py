"""A queue: what its users call. All it does is done by its parts; the fast put and get are here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Unpack

from qflow import config
from qflow.config import QueueSettings, SlowConsumer
from qflow.deliveries import Deliveries
from qflow.delivery import Delivery, Entry
from qflow.durations import Duration
from qflow.identity import OfSpool
from qflow.memory.gate import Gate
from qflow.memory.run_list import RunList
from qflow.memory.waiting import collecting, sheltered, straight
from qflow.message import OVERHEAD_BYTES, SINGLE_BYTES, Headers
from qflow.pickling import Made
from qflow.queues import in_steps, looking, tending
from qflow.queues.claims import Claims
from qflow.queues.consumer import Consumer, begin_consumer
from qflow.queues.context import Context, Tick
from qflow.queues.deleting import delete, delete_many
from qflow.queues.entries import Entries
from qflow.queues.envelope import Moment, check_priority
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Placed
from qflow.queues.parts import Parts
from qflow.takers import here, parse_name, this_thread

if TYPE_CHECKING:
    from qflow.options import ConsumeOptions, PutOnceOptions
    from qflow.stats import QueueStats


class Queue(Made, OfSpool, Generic[Placed], by="Broker.declare_queue"):
    """A named queue. Made by `Broker.declare_queue`; every method is thread-safe.

    To type checkers, `Queue[int]` is one whose `put` never returns None, which its overflow policy decides; `Queue` is
    `Queue[int | None]`.
    """

    __slots__ = "__weakref__", "_claims", "_context", "_gate", "_lanes", "_lock", "_parts", "_runs", "_singles", "_tick"
    _context: Context
    _parts: Parts
    _lock: Any
    _gate: Gate
    _lanes: Lanes
    _runs: RunList
    _claims: Claims
    _singles: dict[Delivery, float | None]
    _tick: Tick
    _kind = "queue"

    def _spool_uuid(self) -> str:
        return self._context.shared.uuid

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}{', ended' if self._context.ended else ''}>"

    @property
    def name(self) -> str:
        """The name it was declared under."""
        return self._context.name

    @property
    def settings(self) -> QueueSettings:
        """How it was declared, or altered since."""
        return self._context.settings

    # Put -------------------------------------------------------------------------------------------------------------

    @straight
    def put(
        self,
        body: bytes | bytearray | memoryview,
        # What follows is given by name; CPython takes a tenth of a put longer to check that.
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: Duration | None = None,
        delay_s: Duration | None = None,
        not_before: Moment | None = None,
        dedupe_key: str | None = None,
        timeout_s: Duration | None = None,
    ) -> int | Placed:
        """Append a message; on a durable queue, return once it is synced in the log.

        Args:
            body: bytes-like; bytearray and memoryview are copied.
            headers: names to str, int, float, bool or None.
            durable: False keeps the message of a durable queue out of the log: in line, and lost at restart.
            priority: 0 to `priorities - 1` of the queue; higher ones are delivered first.
            ttl_s: it expires this long after it is first deliverable; the queue's `ttl_s` wins if shorter.
            delay_s, not_before: it is not delivered before; seconds from now, or a moment (seconds since the epoch, or
                a datetime with a time zone).
            dedupe_key: where a message with this key was put within the queue's `dedupe_window_s`, nothing is stored;
                1 to 255 bytes of UTF-8.
            timeout_s: how long to wait for room at a limit or on a full disk; None = without end, 0 = not at all.

        Returns:
            The message's sequence, higher than that of any before it in this queue and priority; None if the queue's
            overflow policy dropped it, or made it a dead letter. With a `dedupe_key` that was put before, that of the
            first message, which may have been delivered since.

        Raises:
            InvalidArgument: the body is not bytes-like, a header, time or priority makes no sense, or it could never
                fit.
            MessageTooLarge: more than `max_message_bytes`.
            QueueFull: no room came up in time. Nothing was done.
            DiskFull: the disk had no room for it in time. Nothing was done.
            ProducerBusy: another put with this key did not end in time. Nothing was done.
            InDoubt, BrokerFailed: the log failed; see there.
            BrokerClosed, QueueDeleted: it is gone.
        Cost: transient 0.3 µs; durable a share of one commit.
        """
        if timeout_s is not None:  # also where there is room, and nothing is waited for
            config.parse_timeout(timeout_s)
        if (
            type(body) is bytes
            and headers is None
            and durable is None
            and ttl_s is None
            and delay_s is None
            and not_before is None
            and dedupe_key is None
        ):
            cost, one, gate = len(body) + OVERHEAD_BYTES, (body,), self._gate
            if not priority:
                with self._lock:  # a straight line; see `waiting`
                    passes = (used := gate.used + cost) <= gate.ceiling and cost <= gate.largest
                    if passes and not (gate.getters or collecting):
                        runs = self._runs
                        tail = runs.tail
                        sequence = runs.next
                        gate.used = used
                        runs.next = sequence + 1
                        tail += one
                        gate.changed[gate.place] = True
                        return sequence
            puts, number = self._parts.puts, priority or 0
            if puts.context.settings.ttl_s is None:
                if number:
                    check_priority(number, puts.context.settings, self.name)
                at_once = puts.put_at_once(one, len(body), number) if number or gate.places or gate.getters else None
                return puts.put([body], True, number, timeout_s) if at_once is None else at_once  # type: ignore[return-value]
        puts = self._parts.puts
        envelope = puts.envelope(headers, durable, priority, ttl_s, delay_s, not_before)
        record = envelope.record(body)
        number, _, expires_ms = envelope
        if dedupe_key is not None:
            return puts.context.shared.keys.put(puts, dedupe_key, number, record, timeout_s)  # type: ignore[no-any-return]
        at_once = puts.put_at_once((record,), len(record), number, plain=False, expires_ms=expires_ms)
        if at_once is not None:
            return at_once
        return puts.put([record], type(record) is bytes, number, timeout_s, expires_ms)  # type: ignore[return-value]

    def put_nowait(self, body: bytes | bytearray | memoryview, **options: Unpack[PutOnceOptions]) -> int | Placed:
        """`put` that waits for no room; on a durable queue it still waits for the sync. Options as `put`."""
        return self.put(body, **options, timeout_s=0)

    def put_many(
        self,
        bodies: Iterable[bytes | bytearray | memoryview],
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: Duration | None = None,
        delay_s: Duration | None = None,
        not_before: Moment | None = None,
        timeout_s: Duration | None = None,
    ) -> range:
        """Append messages together: all or none of them, with consecutive sequences and one commit.

        Args:
            headers, durable, priority, ttl_s, delay_s, not_before: as `put`, the same for each of them.

        Returns:
            Their sequences, in order; an empty range if the overflow policy dropped them or made them dead letters.

        Raises:
            TransactionTooLarge: more than `max_transaction_bytes` together.
            QflowError: all that `put` raises.
        Cost: transient 0.05 µs a message, durable 0.2 µs and one commit.
        """
        puts = self._parts.puts
        envelope = puts.envelope(headers, durable, priority, ttl_s, delay_s, not_before)
        records, plain = envelope.records(bodies)
        config.parse_timeout(timeout_s)
        if not records:
            return range(0)
        first = puts.put(records, plain, envelope.number, timeout_s, envelope.expires_ms)
        return range(0) if first is None else range(first, first + len(records))

    def submit(
        self,
        body: bytes | bytearray | memoryview,
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: Duration | None = None,
        delay_s: Duration | None = None,
        not_before: Moment | None = None,
        timeout_s: Duration | None = None,
    ) -> Future[int | Placed]:
        """`put` that waits for room but not for the sync: the future has what `put` returns, once it is confirmed.

        It is committed within 3 ms, or with the next call that waits. One thread resolves all futures: a callback of
        one may use the broker, but waits for no other future, which would wait for that callback. An ack that follows
        may be committed first: ack what this message was made of once the future has its result, or in a transaction.
        Cost: 5 µs and a share of one commit.
        """
        puts = self._parts.puts
        envelope = puts.envelope(headers, durable, priority, ttl_s, delay_s, not_before)
        record, number = envelope.record(body), envelope.number
        plain = type(record) is bytes
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        if self._parts.context.log is None:
            future.set_result(puts.put([record], plain, number, timeout_s))
        elif puts.enter([record], plain, number, timeout_s, future) is None:
            future.set_result(None)
        return future

    # Get -------------------------------------------------------------------------------------------------------------

    @straight
    def get(self, timeout_s: Duration | None = None, consumer: str | None = None) -> Delivery:
        """Acquire the first available message, waiting for one.

        Args:
            timeout_s: how long to wait; None = as long as it takes, 0 = not at all: behind more than about 30,000
                expired messages it may then find none. What is on the disk is read in any case, by this thread or
                another, and takes its time.
            consumer: who takes it, for `stats()`; the name of the thread, unless it is given.

        Raises:
            QueueEmpty: none came up in time.
            BrokerClosed, QueueDeleted: it is gone, or went while waiting.
        Cost: 0.4 µs in memory; a batch of file reads when the head was spilled.
        """
        delivery = Delivery()
        delivery.settler = claims = self._claims
        try:
            delivery.taker = taker = here.thread if consumer is None else parse_name(consumer)
        except AttributeError:  # its first; asked for without a call, which would take as long as the rest of this
            delivery.taker = taker = this_thread()
        try:
            with self._lock:  # a straight line; see `waiting`
                gate = self._gate
                run = self._lanes.front.head
                records = run.records
                used = gate.used + SINGLE_BYTES
                if records and used <= gate.account.borrowed and not collecting:
                    delivery.record = records[0]
                    delivery.sequence = sequence = run.first
                    delivery.marks = run.marks
                    run.claim = None
                    self._singles[delivery] = self._tick.now_s
                    gate.used = used
                    run.first = sequence + 1
                    del records[0]
                    gate.changed[gate.place] = True
                    return delivery
            if self._parts.gets.take_otherwise(delivery):
                return delivery
        except BaseException:
            try:
                claims.give_up(delivery)
            finally:  # see `attend`
                claims.give_up(delivery)
            raise
        return self._parts.gets.get_one(timeout_s, taker)

    def get_nowait(self, *, consumer: str | None = None) -> Delivery:
        """`get` that does not wait for a message."""
        return self.get(0, consumer=consumer)

    def get_many(
        self, max_messages: int, timeout_s: Duration | None = None, *, consumer: str | None = None
    ) -> Deliveries:
        """Acquire what is available, at most `max_messages`: waits for the first, never to fill.

        Returns fewer also when memory has no room for more in flight; at the time-out, an empty batch: there is no
        message, or no room for one beside what others hold.

        Raises:
            BrokerClosed, QueueDeleted: as `get`.
        Cost: 0.03 µs a message in memory, 0.005 µs when a whole `put_many` is taken.
        """
        config.parse_count(max_messages, "max_messages")
        taker, shown = this_thread() if consumer is None else parse_name(consumer), Deliveries()
        self._parts.gets.fill(shown, max_messages, timeout_s, taker)
        return shown  # no call before: an interrupt comes earlier, and gives it back, or later

    # Settle ----------------------------------------------------------------------------------------------------------

    def ack_many(self, deliveries: Deliveries | Iterable[Delivery], wait: bool = False) -> None:
        """Settle many deliveries together, two thousand in one commit; with `wait`, return when all are synced.

        Raises:
            AlreadySettled: one of them was settled before; all the others are settled all the same.
            InDoubt: the log failed; whether they are settled is known when the spool is opened again.
            BrokerFailed: it failed earlier; none is settled.
        Cost: a batch 0.01 µs a message, single deliveries 1 µs each.
        """
        if isinstance(deliveries, Deliveries):
            deliveries.ack(wait)
            return
        in_steps.ack_many(self._claims, deliveries, wait)

    # Whole queue -----------------------------------------------------------------------------------------------------

    @sheltered
    def purge(self) -> int:
        """Settle every message, acquired ones included; return how many. Late acks do nothing. Cost: a commit."""
        return self._parts.exits.purge()

    def delete(self, sequence: int) -> bool:
        """Delete one message that waits, wherever it lies: in memory or on disk, delayed, given back, only in the log.

        What was delivered is its consumer's, and what is leaving with a transaction, or as a dead letter, leaves. The
        message comes to nobody, becomes no dead letter, and is not counted as expired, though its time may be over.
        Its `dedupe_key` is kept: another put with that still stores nothing.

        Returns:
            True: it waited, and is gone; on a durable queue that is synced. False: no such message waits: it was never
            put, is held, or was settled, by others perhaps in the middle of this call.

        Raises:
            CorruptionError: only the log has it, in a block that is damaged. Nothing was done.
            StorageError: the disk could not be read, or (`DiskFull`) the log had no room. Nothing was done.
            InDoubt, BrokerFailed: the log failed. BrokerClosed, QueueDeleted: it is gone. InvalidArgument: no int >= 0.
        Cost: 50 to 100 µs in memory, a read where it is on disk, and a share of one commit. Among delayed ones it is
        sought, up to 0.7 µs for each of them; nobody else waits for that.
        """
        return delete(self._parts, sequence)

    def delete_many(self, sequences: Iterable[int]) -> list[int]:
        """Delete messages that wait, as `delete`; return the sequences of those that did, and are gone.

        Raises: as `delete`; others of them may be gone then. Cost: as `delete`, but a commit for many.
        """
        return delete_many(self._parts, sequences)

    def browse(self) -> Iterator[Entry]:
        """Yield every waiting entry in order; nothing is promoted or acquired, and nobody is held up.

        Priorities come from the highest, each followed by what is delayed in it. The sizes of spilled ones are None.
        What is put later is not shown; what is taken, comes back or moves meanwhile may be. Cost: 0.3 µs an entry.
        """
        return Entries(self._parts).browse()

    def __len__(self) -> int:
        """Messages not settled: waiting and acquired."""
        lanes, runs = self._lanes, self._runs
        if len(lanes.lists) == 1:
            with self._lock:  # a straight line; see `waiting`
                messages = runs.next - lanes.skipped - lanes.gone - lanes.acked
            if len(lanes.lists) == 1:  # still: a lane may have begun as this waited for the lock
                return messages
        return looking.length(self._parts)

    def stats(self) -> QueueStats:
        """Return a snapshot, also where it is gone. Cost: O(runs + what is held), most of it outside the lock."""
        return looking.stats(self._parts)

    # Consumers -------------------------------------------------------------------------------------------------------

    def consume(self, callback: Callable[[Delivery], object], **options: Unpack[ConsumeOptions]) -> Consumer:
        """Have a thread of its own, or several, call `callback(delivery)` for each message, until it is closed.

        The delivery is acked when the callback returns and goes back when it raises, unless it settled it itself. An
        async function, which nobody would await here, and a generator function are refused.

        Args:
            options: `prefetch=100`, `concurrency=1`, `name` and `retry=Backoff(...)`; see `qflow.ConsumeOptions`.

        Returns:
            The running `Consumer`, a context manager; `close()` waits for the callbacks that are running.
        """
        consumers = self._parts.consumers
        return begin_consumer(lambda: consumers, callback, consumers.start, options)

    def pause(self) -> None:
        """Deliver nothing until `resume`: gets wait, puts go on, and what is held may be settled.

        It ends when the broker is closed. Calling it again does nothing. Raises: BrokerClosed, QueueDeleted: as `put`.
        """
        tending.pause(self._parts, True)

    def resume(self) -> None:
        """Deliver again. Calling it again does nothing. Raises as `pause`."""
        tending.pause(self._parts, False)

    def on_slow_consumer(self, after_s: Duration | None, policy: SlowConsumer = SlowConsumer.NOTIFY) -> None:
        """Watch for messages that are held for longer than `after_s` seconds; None stops that.

        Each time there is one, the event `SLOW_CONSUMER` tells of it, and the policy is applied. Looked at once a
        second. While it is on, gets take 1 µs more: the time of each is kept. Raises as `pause`, and InvalidArgument.
        """
        tending.watch(self._parts, after_s, policy)


def queue_of(context: Context, kind: type[Queue]) -> Queue:
    """Return a queue that has a context, and no parts."""
    queue: Queue = object.__new__(kind)
    queue._context = context
    return queue


def compose(queue: Queue, parts: Parts) -> None:
    """Have a queue composed of these parts."""
    queue._parts, queue._lock = parts, parts.context.lock
    queue._gate, queue._lanes, queue._runs = parts.gate, parts.lanes, parts.lanes.runs
    queue._claims, queue._singles, queue._tick = parts.claims, parts.held.singles, parts.context.tick


def parts_of(queue: Queue[Any]) -> Parts:
    """Return what a queue is composed of."""
    return queue._parts


def context_of(queue: Queue[Any]) -> Context:
    """Return who a queue is."""
    return queue._context


def disown(queue: Queue, stub: Any) -> None:
    """In a forked child: every call that takes the lock now says so."""
    queue._lock = queue._context.lock = stub
