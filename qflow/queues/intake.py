"""The way into a queue: puts, and the room they wait for. The middle of a queue, above `Backlog`.

A put decides about the limit, reserves memory and depth, and joins the log's open batch; `publish` makes it visible
once it is committed; `refused` gives back what it reserved. What is reserved counts from then on, so a limit is never
passed, by however many producers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from qflow import config
from qflow.config import Overflow, QueueSettings
from qflow.errors import (
    BrokerClosed,
    DiskFull,
    InvalidArgument,
    MessageTooLarge,
    QflowError,
    QueueDeleted,
    QueueFull,
    TransactionTooLarge,
)
from qflow.memory.ledger import Account, Ledger
from qflow.message import OVERHEAD_BYTES, Headers, Message, Record, is_plain, record_of
from qflow.queues.backlog import RETRY_S, Backlog, Relief, Unlocked
from qflow.queues.overflow import Decision, Depth, check_can_ever_fit, decide
from qflow.storage.block_log import Row
from qflow.storage.spill import SpillArea
from qflow.storage.transaction_log import Batch, Put, TransactionLog


class Intake(Backlog):
    """See the module."""

    def __init__(
        self,
        name: str,
        settings: QueueSettings,
        *,
        account: Account,
        ledger: Ledger,
        area: SpillArea,
        log: TransactionLog | None,
        row: Row | None,
        owner: int,
        relief: Relief,
        report: Callable[[str, int], None],
        max_transaction_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            name, account=account, ledger=ledger, area=area, log=log, row=row, owner=owner, relief=relief, report=report
        )
        self.settings = settings
        self._max_transaction_bytes = max_transaction_bytes
        self._monotonic = monotonic
        self._largest = settings.max_message_bytes + OVERHEAD_BYTES
        self._ended: type[QflowError] | None = None
        """Why nothing works any more: BrokerClosed or QueueDeleted."""
        self._pending = 0  # puts that are on their way through the log
        self._pending_messages = self._pending_bytes = 0  # their depth
        self._acked = 0

    # Put ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        body: bytes | bytearray | memoryview,
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Append a message; on a durable queue, return once it is synced in the log.

        Args:
            body: bytes-like; bytearray and memoryview are copied.
            headers: names to str, int, float, bool or None.
            durable: False keeps the message of a durable queue out of the log: in line, and lost at restart.
            timeout_s: how long to wait for room at a limit or on a full disk; None = without end, 0 = not at all.

        Returns:
            The message's sequence, higher than that of any before it in this queue.

        Raises:
            InvalidArgument: the body is not bytes-like, a header is not plain, or it could never fit.
            MessageTooLarge: more than `max_message_bytes`.
            QueueFull: no room came up in time. Nothing was done.
            DiskFull: the disk had no room for it in time. Nothing was done.
            InDoubt, BrokerFailed: the log failed; see there.
            BrokerClosed, QueueDeleted: it is gone.
        Cost: transient 0.3 µs; durable a share of one commit.
        """
        if type(body) is bytes and headers is None and durable is None:
            cost = len(body) + OVERHEAD_BYTES
            with self._lock:
                used = self._used + cost
                if used <= self._ceiling and cost <= self._largest:
                    runs = self._runs
                    sequence = runs.next
                    self._used = used
                    runs.next = sequence + 1
                    self._append(body)
                    if self._getters:
                        self._arrived.notify()
                    return sequence
        record = self._record(body, headers, durable)
        return self._put([record], type(record) is bytes, timeout_s)

    def put_nowait(
        self, body: bytes | bytearray | memoryview, *, headers: Headers | None = None, durable: bool | None = None
    ) -> int:
        """`put` that waits for no room; on a durable queue it still waits for the sync."""
        return self.put(body, headers=headers, durable=durable, timeout_s=0)

    def put_many(
        self,
        bodies: Iterable[bytes | bytearray | memoryview],
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        timeout_s: float | None = None,
    ) -> range:
        """Append messages together: all or none of them, with consecutive sequences and one commit.

        Args:
            headers: the same for each of them.

        Returns:
            Their sequences, in order.

        Raises:
            TransactionTooLarge: more than `max_transaction_bytes` together.
            All that `put` raises.
        Cost: transient 0.05 µs a message, durable 0.2 µs and one commit.
        """
        records: list[Record] = list(bodies)  # type: ignore[arg-type]
        plain = is_plain(records)
        if headers or durable is not None or not plain:
            records = [self._record(body, headers, durable) for body in records]
            plain = is_plain(records)
        if not records:
            return range(0)
        first = self._put(records, plain, timeout_s)
        return range(first, first + len(records))

    def submit(
        self,
        body: bytes | bytearray | memoryview,
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        timeout_s: float | None = None,
    ) -> Future[int]:
        """`put` that waits for room but not for the sync: the future has the sequence once it is confirmed.

        The commit is led by the broker within 3 ms, or by the next caller that waits for one.
        Cost: 5 µs and a share of one commit.
        """
        record = self._record(body, headers, durable)
        plain = type(record) is bytes
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        log = self._log
        if log is None:
            future.set_result(self._put([record], plain, timeout_s))
        else:
            log.flush(self._send(log, [record], plain, timeout_s, future)[1])
        return future

    def _record(self, body: object, headers: Headers | None, durable: bool | None) -> Record:
        is_durable = self.settings.durable
        if durable is None:
            durable = is_durable
        elif not isinstance(durable, bool):
            raise InvalidArgument(f"durable must be True, False or None, got {durable!r}")
        elif durable and not is_durable:
            raise InvalidArgument(f"queue {self._name!r} is not durable: declare a durable one for this message")
        return record_of(body, headers, logged=durable or not is_durable)

    def _put(self, records: list[Record], plain: bool, timeout_s: float | None) -> int:
        log = self._log
        if log is None:
            size = sum(map(len, records))
            charged = self._charge_for(records, size)
            with self._lock:
                self._reserve(len(records), size, charged, config.parse_timeout(timeout_s))
                first = self._runs.next
                self._publish(first, records, size, charged, 0)
        elif (
            type(records[0]) is Message
            and not records[0].logged
            and (direct := self._put_unlogged(records)) is not None
        ):
            first = direct
        else:
            put, batch = self._send(log, records, plain, timeout_s, None)
            log.wait(batch)
            if put.error is not None:
                raise again(put.error)
            first = put.first
        if self._used > self._account.borrowed:
            self.spill_excess()
        return first

    def _send(
        self,
        log: TransactionLog,
        records: list[Record],
        plain: bool,
        timeout_s: float | None,
        future: Future[int] | None,
    ) -> tuple[Put, Batch]:
        """Reserve room and join the open batch."""
        assert self._lane is not None
        sizes = list(map(len, records))
        size = sum(sizes)
        charged = self._charge_for(records, size)
        put = Put(self._lane, records, sizes, plain, size, charged)
        put.future = future
        timeout = config.parse_timeout(timeout_s)
        with self._lock:
            self._reserve(len(records), size, charged, timeout)
            self._pending += 1
            try:
                return put, log.put(put)
            except BaseException:
                if not put.joined:
                    self.refused(put)
                raise

    def _put_unlogged(self, records: list[Record]) -> int | None:
        """Append messages that are not logged at once, if nothing of the queue is on its way before them."""
        assert self._lane is not None
        size = sum(map(len, records))
        charged = self._charge_for(records, size)
        with self._lock:
            lane = self._lane
            lane.leaves_gaps = True
            if self._pending or lane.next + len(records) > lane.row.next or not self._admits(len(records), size):
                return None
            self._check_open()
            if not self._charge(charged):
                return None
            self._incoming += charged
            self._pending_messages += len(records)
            self._pending_bytes += size
            first = lane.next
            lane.next = first + len(records)
            self._publish(first, records, size, charged, 0)
            return first

    def _charge_for(self, records: list[Record], size: int) -> int:
        """Return what records of `size` bytes together are charged, after checking that they may pass."""
        settings = self.settings
        if size > settings.max_message_bytes:
            largest = max(map(len, records))
            if largest > settings.max_message_bytes:
                raise MessageTooLarge(
                    f"a message of {largest} bytes is more than max_message_bytes={settings.max_message_bytes} of "
                    f"queue {self._name!r}: split it, or declare the queue with a larger one"
                )
        if size > self._max_transaction_bytes and len(records) > 1:
            raise TransactionTooLarge(
                f"{len(records)} messages of {size} bytes together are more than max_transaction_bytes="
                f"{self._max_transaction_bytes}: put them in smaller batches"
            )
        if self._has_limit():
            check_can_ever_fit(self._name, settings, Depth(len(records), size))
        return size + OVERHEAD_BYTES * len(records)

    # Room --------------------------------------------------------------------------------------------------------

    def _admits(self, messages: int, size: int) -> bool:
        if not self._has_limit():
            return True
        depth = Depth(self._messages() + self._pending_messages, self._message_bytes + self._pending_bytes)
        decision = decide(self.settings, depth, Depth(messages, size))
        if decision is Decision.REFUSE:
            raise self._full()
        return decision is Decision.ADMIT

    def _full(self) -> QueueFull:
        settings = self.settings
        return QueueFull(
            f"queue {self._name!r} is at its limit (limit_messages={settings.limit_messages}, "
            f"limit_bytes={settings.limit_bytes}): settle messages, or wait longer with timeout_s"
        )

    def _reserve(self, messages: int, size: int, charged: int, timeout: float | None) -> None:
        """Take depth and memory for messages on their way in, waiting for it. Called with the lock held; lets go of it.

        The time-out counts at a limit and on a disk that is full. Memory that is being moved always comes free.
        """
        deadline = None if timeout is None else self._monotonic() + timeout
        account = self._account
        while True:
            self._check_open()
            if not self._admits(messages, size):
                self._wait_for_room(deadline, None)
                continue
            if self._charge(charged):
                break
            fits = charged <= account.capacity
            self._cover()
            excess = self._used + (charged if fits else 0) - account.borrowed
            if excess > 0:
                with Unlocked(self._lock):
                    moved = self._find_room(excess)
                self._check_open()
                if moved or (fits and self._could_charge(charged)):
                    continue
            if self._spill_error is not None and excess > 0:
                self._wait_for_room(deadline, self._spill_error)
            elif self._put_slack or self._spilling:
                self._wait_for_room(None, None)
            else:  # it passes, alone, and is spilled as soon as it is visible
                self._ledger.borrow_most(account, self._used + charged - account.borrowed)
                self._put_slack = max(0, self._used + charged - max(account.borrowed, self._used))
                self._used += charged
                self._refresh()
                break
        self._incoming += charged
        self._pending_messages += messages
        self._pending_bytes += size

    def _could_charge(self, charged: int) -> bool:
        account = self._account
        free = min(account.capacity - account.borrowed, self._ledger.free())
        return self._used + charged <= account.borrowed + free

    def _wait_for_room(self, deadline: float | None, disk: Exception | None) -> None:
        """Wait until something changes, or it is time to look again. Called with the lock held."""
        wait = RETRY_S
        if deadline is not None:
            wait = min(wait, deadline - self._monotonic())
        if wait <= 0 or (disk is not None and self.settings.on_overflow is Overflow.REJECT):
            if disk is None:
                raise self._full()
            raise DiskFull(f"queue {self._name!r} is out of memory and could not spill: {disk}") from disk
        self._putters += 1
        self._refresh()
        try:
            self._room.wait(wait)
        finally:
            self._putters -= 1
            self._refresh()

    def spill_excess(self) -> None:
        """After messages passed on slack or came back: spill until the queue is within its bounds."""
        while True:
            with self._lock:
                self._cover()
                excess = self._used - min(self._account.borrowed, self._account.capacity)
            if excess <= 0 or not self._find_room(excess):
                return

    # Called by the leader of a commit -----------------------------------------------------------------------------

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        """Make confirmed messages of `size` bytes together visible; a second time is a no-op."""
        charged = size + OVERHEAD_BYTES * len(records)
        with self._lock:
            if first >= self._runs.next:
                self._publish(first, records, size, charged, puts)

    def refused(self, put: Put) -> None:
        """Give back the room of a put that was not confirmed; a second time is a no-op."""
        with self._lock:
            if put.refused:
                return
            messages = len(put.records)
            put.refused = True
            self._pending -= 1
            self._pending_messages -= messages
            self._pending_bytes -= put.size
            self._incoming -= put.charged
            self._used -= put.charged
            self._look_around()

    def _publish(self, first: int, records: list[Record], size: int, charged: int, puts: int) -> None:
        """Append what was reserved. Under the lock."""
        runs = self._runs
        count = len(records)
        gap = first - runs.next
        gone = self._ended is not None
        tail = runs.tail_for(first, count)
        # No call from here on, so that an interrupt finds all of it done or nothing.
        runs.next = first + count
        if gone:
            runs.open.first = runs.next
            self._used -= charged
            self._gone += count
        else:
            tail += records
        self._append = runs.open.records.append
        self._pending -= puts
        self._skipped += gap
        self._incoming -= charged
        self._pending_messages -= count
        self._pending_bytes -= size
        self._message_bytes += size
        if self._getters:
            self._arrived.notify(count)
        if self._putters:
            self._room.notify_all()

    # State -------------------------------------------------------------------------------------------------------

    def _messages(self) -> int:
        return self._runs.next - self._skipped - self._gone - self._acked

    def _plain_puts_pass(self) -> bool:
        return self._ended is None and self._log is None and not self._putters and not self._has_limit()

    def _has_limit(self) -> bool:
        return self.settings.limit_bytes is not None or self.settings.limit_messages is not None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._gone_error()

    def _gone_error(self) -> QflowError:
        if self._ended is BrokerClosed:
            return BrokerClosed(f"the broker of queue {self._name!r} is closed: open the spool again")
        return QueueDeleted(f"queue {self._name!r} was deleted: declare it again")


def again(error: BaseException) -> BaseException:
    """Return an error of a batch for one more caller to raise."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
