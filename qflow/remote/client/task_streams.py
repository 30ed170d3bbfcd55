"""Streams and subscriptions of a spool that another process owns, for tasks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from qflow.aio.delivery import AsyncStreamDeliveries, AsyncStreamDelivery
from qflow.config import StreamSettings
from qflow.durations import Duration
from qflow.errors import BrokerClosed, InvalidArgument, QueueEmpty
from qflow.identity import OfSpool
from qflow.remote.client import stream_requests
from qflow.remote.client.stream_holding import Holding, Loop, RemoteStreamBatch, StreamGrant, Subscribed
from qflow.remote.client.stream_replies import Granted, Opened, Page
from qflow.remote.client.tasks import Settles, TaskConnection, TaskSettler
from qflow.stats import StreamStats, SubscriptionStats
from qflow.streams.deliveries import StreamMessage, stream_deliveries_of
from qflow.streams.history import Bound
from qflow.streams.task_numbers import TaskNumbers

T = TypeVar("T")


class AsyncRemoteStream(OfSpool):
    """A named stream of a spool that another process owns, for tasks of one event loop. Made by `AsyncRemoteBroker`.

    Arguments, results and errors are those of `qflow.aio.AsyncStream`; see there. Awaited, it asks the owner whether it
    is there, and returns itself.
    """

    name: str
    """The name it was declared under."""
    _connection: TaskConnection
    _settings: StreamSettings | None
    _kind = "stream"

    def _spool_uuid(self) -> str:
        return self._connection.uuid

    @property
    def settings(self) -> StreamSettings:
        """How it was declared, or altered, as the owner told. Raises InvalidArgument: the stream was not awaited."""
        if self._settings is None:
            raise InvalidArgument(f"the owner was not asked for stream {self.name!r}: await broker.stream(...)")
        return self._settings

    def __await__(self) -> Generator[Any, None, AsyncRemoteStream]:
        return self._known().__await__()

    async def _known(self) -> AsyncRemoteStream:
        self._settings = await self._connection.call(stream_requests.stream(self._connection.uuid, self.name))
        return self

    async def query(
        self,
        topic_filter: str = "#",
        *,
        partition: int | None = None,
        start: Bound = None,
        end: Bound = None,
        skip: int = 0,
        limit: int | None = None,
        newest: int | None = None,
    ) -> AsyncIterator[StreamMessage]:
        """Yield retained messages that a filter matches; see `qflow.Stream.query`. Cost: a round trip for each 256."""
        options = {
            "partition": partition, "start": start, "end": end, "skip": skip, "limit": limit, "newest": newest
        }  # fmt: skip
        page: Page = await self._connection.call(stream_requests.query(self.name, topic_filter, options))
        try:
            while True:
                for message in page.messages:
                    yield message
                if page.query is None:
                    return
                page = await self._connection.call(stream_requests.query_next(self.name, page.query))
        finally:
            if page.query is not None and not self._connection.closed:
                self._connection.tell(stream_requests.query_close(page.query))

    async def last(self, topic_filter: str = "#") -> dict[str, StreamMessage]:
        """Return the newest retained message of each topic that a filter matches; see `qflow.Stream.last`."""
        return await self._connection.call(stream_requests.last(self.name, topic_filter))

    async def stats(self) -> StreamStats:
        """Return a snapshot; see `qflow.Stream.stats`."""
        return await self._connection.call(stream_requests.stream_stats(self.name))

    def __repr__(self) -> str:
        return f"<AsyncRemoteStream {self.name!r}>"


def stream_of(connection: TaskConnection, name: str, settings: StreamSettings | None = None) -> AsyncRemoteStream:
    """Return a stream of a connection."""
    made = AsyncRemoteStream()
    made._connection, made.name, made._settings = connection, name, settings
    return made


class AsyncRemoteSubscription(Subscribed):
    """A subscription of a stream at the owner of its spool, for tasks of one event loop.

    Made by `AsyncRemoteBroker.subscribe`; `async with` closes it. Arguments, results and errors are those of
    `qflow.aio.AsyncSubscription`, but that `position`, `positions` and `lag` are awaited.
    """

    _connection: TaskConnection
    _settles: Settles
    _opened: Opened
    _holding: Holding
    _tasks: TaskNumbers

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._opened.stream

    # Getting ---------------------------------------------------------------------------------------------------------

    async def get(self, timeout_s: Duration | None = None) -> AsyncStreamDelivery:
        """Return the next message, waiting for it; see `qflow.aio.AsyncSubscription.get`."""
        delivery = await self._get(1, timeout_s, self._first)
        if delivery is None:  # no call before the return: see `qflow.RemoteQueue.get`
            raise QueueEmpty(f"no message of stream {self.stream!r} for {self.filter!r} came in time")
        return delivery

    async def get_nowait(self) -> AsyncStreamDelivery:
        """`get` that does not wait for a message."""
        return await self.get(0)

    async def get_many(self, max_messages: int, timeout_s: Duration | None = None) -> AsyncStreamDeliveries:
        """Return available messages, in order, 1,000 at most; an empty batch at the time-out."""
        return await self._get(max_messages, timeout_s, self._shown)

    async def _get(self, max_messages: int, timeout_s: Duration | None, take: Callable[[int, Granted], T]) -> T:
        mine = self._tasks.current()
        request = stream_requests.get(self._opened.number, max_messages, timeout_s, mine)
        self._holding.get_begins(mine)
        return await self._connection.call(request, partial(take, mine))

    def _first(self, taker: int, granted: Granted) -> AsyncStreamDelivery | None:
        batch = self._shown(taker, granted)
        return batch[0] if batch else None

    def _shown(self, taker: int, granted: Granted) -> AsyncStreamDeliveries:
        return AsyncStreamDeliveries(stream_deliveries_of(self._take(taker, False, granted)), self._settles)

    def _take(self, taker: int, ahead: bool, granted: Granted) -> RemoteStreamBatch:
        settler = TaskSettler(self._connection, self.stream, StreamGrant(granted.number, self._holding))
        return self._holding.add(granted, settler, taker, ahead=ahead)

    def __aiter__(self) -> AsyncIterator[AsyncStreamDelivery]:
        return self.iterate()

    async def iterate(self) -> AsyncGenerator[AsyncStreamDelivery, None]:
        """Yield messages; asking for the next acks the previous. See `qflow.aio.AsyncSubscription.iterate`."""
        loop = Loop(self._holding, self._tasks.current())
        try:
            while True:
                await self._connection.writable()
                told = loop.step()
                if told is not None:
                    self._connection.tell(told)
                delivery, loop.delivery = loop.delivery, None
                if delivery is not None:
                    yield AsyncStreamDelivery(delivery, self._settles)
                    continue
                loop.get_begins()
                batch = await self._connection.call(loop.request(), partial(self._take, loop.taker, True))
                if not batch.total:
                    return
                loop.begin(batch)
        finally:
            left = loop.end()
            if left is not None and not self._connection.closed:
                self._connection.tell(left)

    # Settling and moving ---------------------------------------------------------------------------------------------

    async def ack(self, delivery: AsyncStreamDelivery | AsyncStreamDeliveries, wait: bool = False) -> None:
        """Settle a message, or a batch; see `AsyncDelivery.ack`."""
        await delivery.ack(wait)

    async def seek(self, to: int | datetime, *, partition: int | None = None) -> None:
        """Go on at an offset or a time; see `qflow.Subscription.seek`."""
        request, before = stream_requests.seek(self._opened.number, to, partition), self._holding.held()
        await self._connection.call(request)
        self._holding.seek(partition, before)

    @property
    def position(self) -> Awaitable[int]:
        """The next offset to be delivered, of a stream with one partition, awaited."""
        return self._position()

    async def _position(self) -> int:
        return self._only(await self.positions)

    @property
    def positions(self) -> Awaitable[list[int]]:
        """The next offset to be delivered, of each partition, awaited."""
        return self._connection.call(stream_requests.positions(self._opened.number))

    @property
    def lag(self) -> Awaitable[int]:
        """Messages of all topics that it is behind, awaited; see `qflow.Subscription.lag`."""
        return self._connection.call(stream_requests.lag(self._opened.number))

    async def stats(self, *, matching: bool = False) -> SubscriptionStats:
        """Return a snapshot; for a group, of all its members together; see `qflow.Subscription.stats`."""
        return await self._connection.call(stream_requests.subscription_stats(self._opened.number, matching))

    async def close(self) -> None:
        """Give back what is held; tasks that wait get `InvalidArgument`. See `Subscription.close`.

        Cancelled while it waits, it is closed all the same.
        """
        if not self._holding.closed:
            self._holding.close()
            with suppress(BrokerClosed):  # what is held is back already
                await self._connection.complete(stream_requests.subscription_close(self._opened.number))

    async def __aenter__(self) -> AsyncRemoteSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def subscription_of(connection: TaskConnection, opened: Opened) -> AsyncRemoteSubscription:
    """Return a subscription of a connection."""
    made = AsyncRemoteSubscription()
    made._connection, made._settles, made._opened = connection, Settles(connection), opened
    made._holding, made._tasks = Holding(opened), TaskNumbers()
    return made
