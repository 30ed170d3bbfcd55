"""A queue of a spool that another process owns, for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable
from typing import Any, Unpack

from qflow import config
from qflow.aio.consumer import AsyncConsumer, consumer_of
from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery
from qflow.aio.home import Home
from qflow.aio.loops import running_loop, task_name
from qflow.backoff import Backoff, retried_task
from qflow.callbacks import check_callback
from qflow.config import QueueSettings, SlowConsumer
from qflow.deliveries import deliveries_of
from qflow.delivery import Entry
from qflow.durations import Duration
from qflow.errors import InvalidArgument, NotFound, QueueDeleted, QueueEmpty
from qflow.held_batch import HeldBatch
from qflow.identity import OfSpool
from qflow.options import Body, PutOnceOptions
from qflow.pickling import Unpicklable
from qflow.queues.consumer import Listed
from qflow.remote.client import requests
from qflow.remote.client.consuming import AnyConsumed, Ending
from qflow.remote.client.grants import RemoteBatch, grant_of
from qflow.remote.client.queue import TimedOnceOptions, TimedOptions, browse, browse_close, browse_next, entries_of
from qflow.remote.client.replies import Granted
from qflow.remote.client.tasks import Settles, TaskConnection, TaskSettler
from qflow.stats import QueueStats
from qflow.takers import Taker, cut_name, named, parse_name

PREFETCH = 100


class AsyncRemoteQueue(Unpicklable, OfSpool):
    """A named queue of a spool that another process owns, for tasks of one event loop. Made by `AsyncRemoteBroker`.

    Arguments, results and errors are those of `qflow.aio.AsyncQueue`; see there. Awaited, it asks the owner whether it
    is there, and returns itself. Instead of `len` there is `length`.
    """

    _connection: TaskConnection
    _settles: Settles
    _name: str
    _settings: QueueSettings | None
    _kind = "queue"

    def _spool_uuid(self) -> str:
        return self._connection.uuid

    @property
    def name(self) -> str:
        """The name it was declared under."""
        return self._name

    @property
    def settings(self) -> QueueSettings:
        """How it was declared, or altered, as the owner told. Raises InvalidArgument: the queue was not awaited."""
        if self._settings is None:
            raise InvalidArgument(f"the owner was not asked for queue {self._name!r}: await broker.queue(...)")
        return self._settings

    def __await__(self) -> Generator[Any, None, AsyncRemoteQueue]:
        return self._known().__await__()

    async def _known(self) -> AsyncRemoteQueue:
        self._settings = await self._connection.call(requests.queue(self._name))
        return self

    # Put -------------------------------------------------------------------------------------------------------------

    async def put(self, body: Body, **options: Unpack[TimedOnceOptions]) -> int | None:
        """Append a message; on a durable queue, return once it is synced; see `qflow.aio.AsyncQueue.put`.

        Raises:
            InDoubt: the connection ended before the answer came; the message may be in the queue.
        """
        return await self._connection.call(requests.put(self._name, body, options))

    async def put_nowait(self, body: Body, **options: Unpack[PutOnceOptions]) -> int | None:
        """`put` that waits for no room; on a durable queue it still waits for the sync."""
        return await self._connection.call(requests.put(self._name, body, dict(**options, timeout_s=0.0)))

    async def put_many(self, bodies: Iterable[Body], **options: Unpack[TimedOptions]) -> range:
        """Append messages together, all or none of them, in one commit; see `qflow.aio.AsyncQueue.put_many`."""
        request = requests.put_many(self._name, bodies, options)
        return range(0) if request is None else await self._connection.call(request)

    def submit(self, body: Body, **options: Unpack[TimedOptions]) -> asyncio.Future[int | None]:
        """`put` that does not wait: the future has what `put` returns, once it is confirmed."""
        return self._connection.submit(requests.put(self._name, body, options, requests.TIMED))

    # Get -------------------------------------------------------------------------------------------------------------

    async def get(self, timeout_s: Duration | None = None, *, consumer: str | None = None) -> AsyncDelivery:
        """Acquire the first available message, waiting for one; see `qflow.aio.AsyncQueue.get`."""
        delivery = await self._connection.call(requests.get(self._name, 1, timeout_s, _who(consumer)), self._first)
        if delivery is None:  # no call before the return: see `qflow.RemoteQueue.get`
            raise QueueEmpty(f"no message in queue {self._name!r} within {timeout_s} s")
        return delivery

    async def get_nowait(self, *, consumer: str | None = None) -> AsyncDelivery:
        """`get` that does not wait for a message."""
        return await self.get(0, consumer=consumer)

    async def get_many(
        self, max_messages: int, timeout_s: Duration | None = None, *, consumer: str | None = None
    ) -> AsyncDeliveries:
        """Acquire what is available, at most 1,000 messages, or about 8 MiB: waits for the first, never to fill."""
        request = requests.get(self._name, max_messages, timeout_s, _who(consumer))
        return await self._connection.call(request, self._shown)

    async def _collect(self, most: int, timeout_s: Duration | None, who: str | int) -> HeldBatch:
        """`get_many` that returns the batch as threads have it; it is settled by what `AsyncDeliveries` calls."""
        return await self._connection.call(requests.get(self._name, most, timeout_s, who), self._batch)

    def _first(self, granted: Granted) -> AsyncDelivery | None:
        return AsyncDelivery(self._batch(granted)[0], self._settles) if granted.segments else None

    def _shown(self, granted: Granted) -> AsyncDeliveries:
        return AsyncDeliveries(deliveries_of(self._batch(granted)), self._settles)

    def _batch(self, granted: Granted) -> HeldBatch:
        return RemoteBatch(TaskSettler(self._connection, self._name, grant_of(granted)), granted.segments)

    def __aiter__(self) -> AsyncIterator[AsyncDelivery]:
        return self.iterate()

    async def iterate(self, prefetch: int = PREFETCH) -> AsyncGenerator[AsyncDelivery, None]:
        """Yield deliveries without end; see `qflow.aio.AsyncQueue.iterate`."""
        config.parse_count(prefetch, "prefetch")
        consumed = TaskConsumed(self._connection, self._name)
        while True:
            batch = await self._collect(prefetch, None, _who(None))
            index = -1
            try:
                for index in range(len(batch)):
                    delivery = consumed.leave_batch(batch, index)
                    if delivery is not None:
                        yield AsyncDelivery(delivery, self._settles)
            finally:
                consumed.give_back_from(batch, index + 1)

    def consume(
        self,
        callback: Callable[[AsyncDelivery], object],
        *,
        prefetch: int = PREFETCH,
        concurrency: int = 1,
        name: str | None = None,
        retry: Backoff | None = None,
    ) -> AsyncConsumer:
        """Have tasks call `callback(delivery)` for each message; see `qflow.aio.AsyncQueue.consume`.

        What a callback raises is logged here, by the logger `qflow`; the owner tells no event of it. It ends with the
        connection: `running` is False then, and the same logger has a warning.
        """
        check_callback(callback, awaited=True)
        config.parse_count(prefetch, "prefetch")
        config.parse_count(concurrency, "concurrency")
        self._connection.check_open()
        consumed = TaskConsumed(self._connection, self._name, self._collect, concurrency)
        home = Home(running_loop(), None)
        return consumer_of(consumed, home, retried_task(callback, retry), prefetch, concurrency, name)

    # Settle ----------------------------------------------------------------------------------------------------------

    async def ack_many(self, deliveries: AsyncDeliveries | Iterable[AsyncDelivery], wait: bool = False) -> None:
        """Settle many deliveries together; see `qflow.aio.AsyncQueue.ack_many`."""
        if isinstance(deliveries, AsyncDeliveries):
            await deliveries.ack(wait)
        else:
            await self._settles.settle_all(deliveries, wait)

    # Whole queue -----------------------------------------------------------------------------------------------------

    async def purge(self) -> int:
        """Settle every message; return how many. See `qflow.Queue.purge`."""
        return await self._connection.call(requests.purge(self._name))

    async def delete(self, sequence: int) -> bool:
        """Delete one message that waits; see `qflow.Queue.delete`."""
        return await self._connection.call(requests.delete_message(self._name, sequence))

    async def delete_many(self, sequences: Iterable[int]) -> list[int]:
        """Delete messages that wait; return which. See `qflow.Queue.delete_many`. Cost: one round trip."""
        return await self._connection.call(requests.delete_messages(self._name, sequences))

    async def length(self) -> int:
        """Return how many messages are not settled: waiting and acquired."""
        return await self._connection.call(requests.length(self._name))

    async def browse(self) -> AsyncIterator[Entry]:
        """Yield every waiting entry in order; see `qflow.Queue.browse`. (They cannot be moved from tasks.)"""
        page: dict[str, Any] = await self._connection.call(browse(self._name))
        try:
            while True:
                for entry in entries_of(page, _Unmoved()):
                    yield entry
                if page["browse"] is None:
                    return
                page = await self._connection.call(browse_next(page["browse"]))
        finally:
            if page["browse"] is not None and not self._connection.closed:
                self._connection.tell(browse_close(page["browse"]))

    async def stats(self) -> QueueStats:
        """Return a snapshot; see `qflow.Queue.stats`."""
        return await self._connection.call(requests.queue_stats(self._name))

    async def pause(self) -> None:
        """Deliver nothing until `resume`, to anybody; see `qflow.Queue.pause`."""
        await self._connection.call(requests.pause(self._name, True))

    async def resume(self) -> None:
        """Deliver again."""
        await self._connection.call(requests.pause(self._name, False))

    async def on_slow_consumer(self, after_s: Duration | None, policy: SlowConsumer = SlowConsumer.NOTIFY) -> None:
        """Watch for messages that are held for long; see `qflow.Queue.on_slow_consumer`."""
        await self._connection.call(requests.on_slow_consumer(self._name, after_s, policy))

    def __repr__(self) -> str:
        return f"<AsyncRemoteQueue {self._name!r}>"


def _who(consumer: str | None) -> str:
    """Return who gets: the name that was given, else that of the task."""
    return cut_name(named(task_name())[0]) if consumer is None else parse_name(consumer)


class _Unmoved:
    """The keeper of entries that tasks look at."""

    def spill_entry(self, sequence: int) -> str:
        raise InvalidArgument("an entry is moved by the owner, or by a thread: `qflow.connect`")

    restore_entry = spill_entry


def queue_of(connection: TaskConnection, name: str, settings: QueueSettings | None = None) -> AsyncRemoteQueue:
    """Return a queue of a connection."""
    made = AsyncRemoteQueue()
    made._connection, made._settles, made._name, made._settings = connection, Settles(connection), name, settings
    return made


class TaskConsumed(AnyConsumed, Settles):
    """What consumers and loops take from, as `aio.consumer.AsyncConsumed` and `AsyncListed` say."""

    def __init__(
        self,
        connection: TaskConnection,
        name: str,
        collect: Callable[[int, float | None, str | int], Awaitable[HeldBatch]] | None = None,
        at_once: int = 1,
    ) -> None:
        AnyConsumed.__init__(self, name, Ending(connection, name))
        Settles.__init__(self, connection)
        self._collect = collect
        self._at_once = at_once
        self._consumer = 0
        """What the owner calls it."""

    async def collect(self, most: int, timeout_s: float | None, taker: Taker) -> HeldBatch:
        """Acquire messages, waiting for the first."""
        assert self._collect is not None
        try:
            if not self._consumer:
                self._consumer = await self._connection.call(requests.consume(self.name, taker.name, self._at_once))
            return await self._collect(most, timeout_s, self._consumer)
        except NotFound as error:
            raise QueueDeleted(f"queue {self.name!r} was deleted: declare it again") from error

    @property
    def consumed(self) -> TaskConsumed:
        """It knows its consumers itself."""
        return self

    def give_up_batch(self, batch: HeldBatch) -> None:
        """Give back what was not handed out, not counted: all that is not settled."""
        self.give_back_from(batch, 0)

    def give_back_from(self, batch: HeldBatch, index: int) -> None:
        """Give back what is left of a batch from a place on, not counted."""
        settler = batch.settler
        assert isinstance(settler, TaskSettler)
        if batch.is_over or not batch.total or self._connection.closed:
            return
        places = batch.unsettled(index)
        if places:
            for place in places:
                batch.note_settled(place)
            self._connection.tell(requests.give_back(settler.grant.number, index))

    def forget_consumer(self, consumer: Listed) -> None:
        """It has ended."""
        if self._consumer and not self._connection.closed:
            self._connection.tell(requests.consume_end(self._consumer))

    def holding(self, held: Iterable[object]) -> list[Listed]:
        """The owner asks for none."""
        return []
