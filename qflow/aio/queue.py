"""A queue for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from itertools import count, islice
from typing import Any, Generic, Unpack

from qflow import config
from qflow.aio.consumer import AsyncConsumer, consumer_of
from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery, held_by
from qflow.aio.home import Log, Promise
from qflow.aio.loops import Homes, Waiter, Worker, task_name
from qflow.aio.putting import AsyncPutting
from qflow.aio.queue_work import QueueWork
from qflow.backoff import Backoff, retried_task
from qflow.callbacks import check_callback
from qflow.config import QueueSettings, SlowConsumer, parse_timeout
from qflow.delivery import SEVERAL, Entry, each_of
from qflow.durations import Duration
from qflow.errors import AlreadySettled, QueueEmpty
from qflow.identity import OfSpool, uuid_at
from qflow.memory.waiting import in_place
from qflow.message import Headers
from qflow.options import Body, Moment, PutOnceOptions, PutOptions
from qflow.pickling import Unpicklable
from qflow.queues.claims import Claims
from qflow.queues.envelope import Envelope
from qflow.queues.gets import Gets
from qflow.queues.overflow import Placed
from qflow.queues.puts import Puts
from qflow.queues.putting import putting_of
from qflow.queues.queue import Queue, parts_of
from qflow.stats import QueueStats
from qflow.takers import Taker, named, parse_name

TURNS = 8
"""Batches an `async for` takes before it lets other tasks run."""
PREFETCH = 100
BROWSED_AT_ONCE = 1000


class AsyncQueue(Unpicklable, OfSpool, Generic[Placed]):
    """A named queue, for tasks of any event loop. Made by `AsyncBroker`; the same messages as `Queue` has.

    To type checkers, `AsyncQueue[int]` is one whose `put` never returns None; see `Queue`.
    """

    _kind = "queue"
    queue: Queue
    """The same queue for threads; its methods block."""
    _log: Log
    _homes: Homes
    _worker: Worker
    _looks: Worker
    _work: QueueWork
    _puts: Puts
    _putting: AsyncPutting
    _lines: dict[Any, Any]
    _gets: Gets
    _claims: Claims
    _put_once: Callable[..., Awaitable[Any]]

    def _spool_uuid(self) -> str:
        return uuid_at(self.queue)

    @property
    def name(self) -> str:
        """The name it was declared under."""
        return self.queue.name

    @property
    def settings(self) -> QueueSettings:
        """How it was declared, or altered since."""
        return self.queue.settings

    # Put ---------------------------------------------------------------------------------------------------------

    async def put(
        self,
        body: Body,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: Duration | None = None,
        delay_s: Duration | None = None,
        not_before: Moment | None = None,
        dedupe_key: str | None = None,
        timeout_s: Duration | None = None,
    ) -> int | Placed:
        """Append a message; on a durable queue, return once it is synced. Arguments and errors as `Queue.put`.

        Cancelled while it waits for room, it did not happen; cancelled while it waits for its sync, it is put all the
        same, or refused with its batch.
        Cost: transient 0.8 µs, without suspending; durable 6 µs and a share of a commit for all that put meanwhile.
        """
        timeout_s = None if timeout_s is None else parse_timeout(timeout_s)  # refused also where there is room
        settings = (puts := self._puts).context.settings
        if (
            type(body) is bytes
            and not self._lines  # of any queue: what waits there for room, perhaps before this
            and not priority
            and headers is None
            and durable is None
            and dedupe_key is None
            and ttl_s is delay_s is not_before is settings.ttl_s is None
        ):
            at_once = None if settings.durable else puts.put_at_once((body,), len(body), 0, True, True)
            if at_once is not None:
                return at_once
            put, home = puts.draft_one(body), self._homes.here()
            if not puts.admission.line and puts.enter_at_once(put):
                if put.lane.is_logged:
                    await home.confirmed(put)
                return put.first
            if settings.durable or timeout_s is not None:
                return await self._putting.wait_for_room(puts.begin([put], timeout_s))  # type: ignore[return-value]
            waiter = Waiter(home)
            waiter.future = home.loop.create_future()
            putting = putting_of(puts, put)
            try:
                home.begin(putting.give_up)
                if putting.stand(waiter):
                    await waiter.future
                    if putting.go_on():
                        return put.first
                return await self._putting.wait_for_room(putting)  # type: ignore[return-value]
            except BaseException:
                try:
                    home.undo(putting.give_up)
                finally:  # see `attend`
                    home.undo(putting.give_up)
                raise
            finally:
                home.unfinished.pop(putting.give_up, None)
        envelope = puts.envelope(headers, durable, priority, ttl_s, delay_s, not_before)
        record = envelope.record(body)
        if dedupe_key is not None:
            return await self._put_once(puts, dedupe_key, envelope.number, record, timeout_s)  # type: ignore[no-any-return]
        number, expires_ms, behind = envelope.number, envelope.expires_ms, self._putting.is_behind()
        at_once = puts.put_at_once((record,), len(record), number, False, True, expires_ms) if not behind else None
        if at_once is not None:
            return at_once
        return await self._putting.put([record], type(record) is bytes, envelope, timeout_s)  # type: ignore[return-value]

    async def put_nowait(self, body: Body, **options: Unpack[PutOnceOptions]) -> int | Placed:
        """`put` that waits for no room; on a durable queue it still waits for the sync. Options as `put`."""
        return await self.put(body, **options, timeout_s=0)

    async def put_many(
        self,
        bodies: Iterable[Body],
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: Duration | None = None,
        delay_s: Duration | None = None,
        not_before: Moment | None = None,
        timeout_s: Duration | None = None,
    ) -> range:
        """Append messages together, all or none; see `Queue.put_many`. Cancelled as `put`."""
        envelope = self._puts.envelope(headers, durable, priority, ttl_s, delay_s, not_before)
        records, plain = envelope.records(bodies)
        parse_timeout(timeout_s)
        if not records:
            return range(0)
        first = await self._putting.put(records, plain, envelope, timeout_s)
        return range(0) if first is None else range(first, first + len(records))

    def submit(
        self,
        body: Body,
        *,
        headers: Headers | None = None,
        durable: bool | None = None,
        priority: int = 0,
        ttl_s: Duration | None = None,
        delay_s: Duration | None = None,
        not_before: Moment | None = None,
        timeout_s: Duration | None = None,
    ) -> asyncio.Future[int | Placed]:
        """`put` that does not wait: the future has what `put` returns, once it is confirmed.

        If there is room, the message is handed over when this returns, without a task of its own, and `close` waits
        for it; else the future is a task that waits for room, and `close` ends it. Cancelling it cancels a `put`. What
        this loop puts into the queue later goes behind it in any case, unless its `timeout_s` is over before. (For
        memory that is not so with a `dedupe_key`, in a transaction, or through a topic: await the future first.)
        """
        envelope = self._puts.envelope(headers, durable, priority, ttl_s, delay_s, not_before)
        record = envelope.record(body)
        return self._putting.submit([record], type(record) is bytes, envelope, timeout_s)

    # Get ---------------------------------------------------------------------------------------------------------

    async def get(self, timeout_s: Duration | None = None, consumer: str | None = None) -> AsyncDelivery:
        """Acquire the first available message, waiting for one; see `Queue.get`.

        Cancelled, it takes nothing: a message it may have acquired goes back to its place, not counted as delivered.
        Waiting tasks are served first come, first served, and before waiting threads.
        Cost: 0.8 µs in memory, without suspending; 8 to 11 µs to wait for a task that puts, however many wait.
        """
        taker = task_name() if consumer is None else parse_name(consumer)
        delivery = self._gets.get_at_once(taker)
        if delivery is None:
            delivery = (await self._work.get_one(timeout_s, taker)).delivery
        if delivery is None:
            raise QueueEmpty(f"no message in queue {self.name!r} within {timeout_s} s")
        return AsyncDelivery(delivery, self._work)

    async def get_nowait(self, *, consumer: str | None = None) -> AsyncDelivery:
        """`get` that does not wait for a message; one that is not in memory is read."""
        return await self.get(0, consumer=consumer)

    async def get_many(
        self, max_messages: int, timeout_s: Duration | None = None, *, consumer: str | None = None
    ) -> AsyncDeliveries:
        """Acquire what is available, at most `max_messages`: waits for the first, never to fill; see `Queue.get_many`.

        Cancelled as `get`.
        """
        config.parse_count(max_messages, "max_messages")
        taker = task_name() if consumer is None else parse_name(consumer)
        return AsyncDeliveries(await self._work.get_many(max_messages, timeout_s, taker), self._work)

    def __aiter__(self) -> AsyncIterator[AsyncDelivery]:
        return self.iterate()

    async def iterate(self, prefetch: int = PREFETCH) -> AsyncGenerator[AsyncDelivery, None]:
        """Yield deliveries without end, as `async for delivery in queue` does. Asking for the next acks nothing.

        Args:
            prefetch: the most messages acquired at once. Those not returned when the loop ends go back, not counted as
                delivered, when the event loop closes the generator; with `contextlib.aclosing`, at once.

        Raises:
            BrokerClosed, QueueDeleted: it is gone; the loop ends with that.
        Cost: 2 µs a message.
        """
        config.parse_count(prefetch, "prefetch")
        claims, home = self._claims, self._homes.here()
        taker = Taker(named(task_name())[0], "get", in_hand=0)  # what it hands out has left its batch
        for turn in count(1):
            if turn % TURNS == 0:
                await asyncio.sleep(0)  # a loop body that never waits must not starve other tasks
            batch = await self._work.collect(prefetch, None, taker)
            give_up = partial(claims.give_up, batch)
            try:
                home.begin(give_up)
                for index in range(len(batch)):
                    try:
                        delivery = claims.leave_batch(batch, index)
                    except AlreadySettled:
                        break  # it was held for too long: all of it went back
                    if delivery is not None:
                        yield AsyncDelivery(delivery, self._work)
            finally:
                home.end(give_up)

    def consume(
        self,
        callback: Callable[[AsyncDelivery], object],
        *,
        prefetch: int = PREFETCH,
        concurrency: int = 1,
        name: str | None = None,
        retry: Backoff | None = None,
    ) -> AsyncConsumer:
        """Have tasks of the running loop call `callback(delivery)` for each message, until the consumer is closed.

        What it returns is awaited; a plain function has run by then, and holds up the loop. The delivery is acked when
        the callback returns and goes back when it raises, unless it settled it itself.

        Args:
            prefetch: the most messages acquired and not handed to a callback yet.
            concurrency: the most callbacks that run at once; with 1, messages are handled in order.
            name: what `stats()` calls it.
            retry: how long a message whose callback failed waits, and how often it is tried; None = back at once.

        Returns:
            The running consumer: `async with` it, or `await close()`, which waits for the callbacks that are running.
        """
        check_callback(callback, awaited=True)
        config.parse_count(prefetch, "prefetch")
        config.parse_count(concurrency, "concurrency")
        return consumer_of(self._work, self._homes.here(), retried_task(callback, retry), prefetch, concurrency, name)

    # Settle ------------------------------------------------------------------------------------------------------

    async def ack_many(self, deliveries: AsyncDeliveries | Iterable[AsyncDelivery], wait: bool = False) -> None:
        """Settle many deliveries together; see `Queue.ack_many`."""
        if isinstance(deliveries, AsyncDeliveries):
            await deliveries.ack(wait)
            return
        await self._work.ack_all([held_by(one, SEVERAL) for one in each_of(deliveries)])
        if wait:
            await self._work.settled()

    # Whole queue -------------------------------------------------------------------------------------------------

    async def purge(self) -> int:
        """Settle every message; return how many. See `Queue.purge`."""
        return await self._worker.run(self._homes.here(), self.queue.purge)

    async def delete(self, sequence: int) -> bool:
        """Delete one message that waits; see `Queue.delete`. Cancelled, it completes anyway, or is not begun."""
        return bool(await self._work.delete_many([sequence]))

    async def delete_many(self, sequences: Iterable[int]) -> list[int]:
        """Delete messages that wait, in a few commits; see `Queue.delete_many`. Cancelled, it is done in part."""
        return await self._work.delete_many(sequences)

    async def browse(self) -> AsyncIterator[Entry]:
        """Yield every waiting entry in order; see `Queue.browse`. (`spill` and `restore` of an entry block.)"""
        home = self._homes.here()
        entries = await self._worker.run(home, self.queue.browse)
        while found := await self._worker.run(home, lambda: list(islice(entries, BROWSED_AT_ONCE))):
            for entry in found:
                yield entry

    async def stats(self) -> QueueStats:
        """Return a snapshot; see `Queue.stats`."""
        return await self._looks.run(self._homes.here(), self.queue.stats)

    async def pause(self) -> None:
        """Deliver nothing for now; see `Queue.pause`."""
        in_place(self.queue.pause)

    async def resume(self) -> None:
        """Deliver again."""
        in_place(self.queue.resume)

    async def on_slow_consumer(self, after_s: Duration | None, policy: SlowConsumer = SlowConsumer.NOTIFY) -> None:
        """Watch for messages that are held for long; see `Queue.on_slow_consumer`."""
        self.queue.on_slow_consumer(after_s, policy)

    def __len__(self) -> int:
        """Messages not settled: waiting and acquired."""
        return len(self.queue)

    def __repr__(self) -> str:
        return f"<AsyncQueue {self.name!r}>"


def queue_of(
    queue: Queue, log: Log, homes: Homes, worker: Worker, looks: Worker, put_once: Callable[..., Awaitable[Any]]
) -> AsyncQueue:
    """Return a queue for tasks; see `AsyncBroker` for the two workers."""
    made = AsyncQueue()
    made.queue, made._log, made._homes, made._worker = queue, log, homes, worker
    made._looks, made._put_once = looks, put_once
    made._work = QueueWork(queue, homes, worker)
    made._puts, made._gets, made._claims = parts_of(queue).puts, parts_of(queue).gets, parts_of(queue).claims
    made._putting, made._lines = AsyncPutting(made._puts, log, homes, worker), homes.lines
    return made


def plain_queue(queue: AsyncQueue | Queue | str) -> Queue | str:
    """Return the queue for threads, of what names one."""
    return queue.queue if isinstance(queue, AsyncQueue) else queue


def work_of(queue: AsyncQueue) -> QueueWork:
    """Return what deliveries and consumers of a queue use."""
    return queue._work


async def nack_all(queue: AsyncQueue, deliveries: Iterable[AsyncDelivery], requeue: bool) -> None:
    """Give deliveries of a queue back together; those that become dead letters leave in one commit.

    Raises:
        AlreadySettled: one of them was settled, or given back, before; all the others are given back all the same.
    Cancelled meanwhile, they go back all the same.
    """
    await queue._work.give_back_all([one.delivery for one in deliveries], requeue)


def submit_many(queue: AsyncQueue, bodies: Iterable[Body], **options: Unpack[PutOptions]) -> asyncio.Future[Any]:
    """Put messages, at least one, in one commit, all or none; the future as that of `AsyncQueue.submit`."""
    envelope = _envelope_of(queue, options)
    return queue._putting.submit(*envelope.records(bodies), envelope, None)


def put_at_once(queue: AsyncQueue, bodies: list[bytes], promise: Promise) -> bool:
    """Put plain messages of a durable queue in one commit, all or none, if there is room for them now.

    Returns:
        Whether there is. The promise is told the first sequence once it is synced, or what became of the put.
    """
    puts = queue._puts
    settings = puts.settings
    if settings.ttl_s is not None or not settings.durable or puts.admission.line:
        return False
    put = puts.draft(bodies, True, 0)
    if not puts.enter_at_once(put):
        return False
    queue._homes.here().promise(put, promise)
    return True


def check_put(queue: AsyncQueue, body: Body, **options: Unpack[PutOptions]) -> None:
    """Refuse a message that the queue does not take when it is empty. Raises: as `AsyncQueue.put`."""
    envelope = _envelope_of(queue, options)
    queue._puts.draft(*envelope.records([body]), envelope.number)


def _envelope_of(queue: AsyncQueue, options: PutOptions) -> Envelope:
    times = options.get("ttl_s"), options.get("delay_s"), options.get("not_before")
    said = options.get("headers"), options.get("durable"), options.get("priority", 0)
    return queue._puts.envelope(*said, *times)
