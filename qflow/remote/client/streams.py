"""Streams and subscriptions of a spool that another process owns, for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from qflow.config import StreamSettings
from qflow.durations import Duration
from qflow.errors import BrokerClosed, ForkedProcess, QueueEmpty
from qflow.remote.client import stream_requests
from qflow.remote.client.deliveries import Settler
from qflow.remote.client.link import Request
from qflow.remote.client.queue import begun
from qflow.remote.client.stream_holding import Holding, Loop, RemoteStreamBatch, StreamGrant, Subscribed
from qflow.remote.client.stream_replies import Granted, Opened, Page
from qflow.remote.client.threads import Connection
from qflow.stats import StreamStats, SubscriptionStats
from qflow.streams.deliveries import StreamDeliveries, StreamDelivery, StreamMessage, stream_deliveries_of
from qflow.streams.history import Bound
from qflow.streams.stream import Stream

T = TypeVar("T")


class RemoteStream(Stream):
    """A named stream of a spool that another process owns. Made by `RemoteBroker`; every method is thread-safe.

    Arguments, results and errors are those of `qflow.Stream`; see there.
    """

    _connection: Connection

    def _spool_uuid(self) -> str:
        return self._connection.uuid

    def query(
        self,
        topic_filter: str = "#",
        *,
        partition: int | None = None,
        start: Bound = None,
        end: Bound = None,
        skip: int = 0,
        limit: int | None = None,
        newest: int | None = None,
    ) -> Iterator[StreamMessage]:
        """Yield retained messages that a filter matches; see `qflow.Stream.query`. Cost: a round trip for each 256."""
        options = {
            "partition": partition, "start": start, "end": end, "skip": skip, "limit": limit, "newest": newest
        }  # fmt: skip
        request = stream_requests.query(self.name, topic_filter, options)
        return self._connection.call(request, lambda page: begun(self._pages(page)))

    def _pages(self, page: Page) -> Iterator[Any]:
        try:
            yield  # see `begun`
            yield from page.messages
            while page.query is not None:
                page = self._connection.call(stream_requests.query_next(self.name, page.query))
                yield from page.messages
        finally:
            if page.query is not None:
                query = page.query
                with suppress(BrokerClosed, ForkedProcess):
                    self._connection.tell(lambda: stream_requests.query_close(query))

    def last(self, topic_filter: str = "#") -> dict[str, StreamMessage]:
        """Return the newest retained message of each topic that a filter matches; see `qflow.Stream.last`."""
        return self._connection.call(stream_requests.last(self.name, topic_filter))

    def stats(self) -> StreamStats:
        """Return a snapshot; see `qflow.Stream.stats`."""
        return self._connection.call(stream_requests.stream_stats(self.name))

    def __repr__(self) -> str:
        return f"<RemoteStream {self.name!r}>"


def stream_of(connection: Connection, name: str, settings: StreamSettings) -> RemoteStream:
    """Return a stream of a connection."""
    made = RemoteStream()
    made._connection, made.name, made.settings = connection, name, settings
    return made


class RemoteSubscription(Subscribed):
    """A subscription of a stream at the owner of its spool. Made by `RemoteBroker.subscribe`; a context manager.

    Arguments, results and errors are those of `qflow.Subscription`; see there. Every method is thread-safe.
    """

    _connection: Connection
    _opened: Opened
    _holding: Holding

    @property
    def stream(self) -> RemoteStream:
        """The stream it reads."""
        return stream_of(self._connection, self._opened.stream, self._opened.settings)

    # Getting ---------------------------------------------------------------------------------------------------------

    def get(self, timeout_s: Duration | None = None) -> StreamDelivery:
        """Return the next message, waiting for it; see `qflow.Subscription.get`."""
        delivery = self._get(1, timeout_s, self._first)
        if delivery is None:  # no call before the return: an interrupt comes earlier, and gives it back, or later
            raise QueueEmpty(f"no message of stream {self._opened.stream!r} for {self.filter!r} came in time")
        return delivery

    def get_nowait(self) -> StreamDelivery:
        """`get` that does not wait."""
        return self.get(0)

    def get_many(self, max_messages: int, timeout_s: Duration | None = None) -> StreamDeliveries:
        """Return available messages, in order, 1,000 at most; an empty batch at the time-out.

        See `qflow.Subscription.get_many`. Cost: a round trip.
        """
        return self._get(max_messages, timeout_s, self._shown)

    def _get(self, most: int, timeout_s: Duration | None, take: Callable[[int, bool, Granted], T]) -> T:
        taker = threading.get_ident()
        request = stream_requests.get(self._opened.number, most, timeout_s, taker)
        self._connection.locked(partial(self._holding.get_begins, taker))
        return self._connection.call(request, partial(take, taker, False))

    def _first(self, taker: int, ahead: bool, granted: Granted) -> StreamDelivery | None:
        batch = self._take(taker, ahead, granted)
        return batch.delivery_at(0) if batch.total else None

    def _shown(self, taker: int, ahead: bool, granted: Granted) -> StreamDeliveries:
        return stream_deliveries_of(self._take(taker, ahead, granted))

    def _take(self, taker: int, ahead: bool, granted: Granted) -> RemoteStreamBatch:
        settler = Settler(self._connection, self._opened.stream, StreamGrant(granted.number, self._holding))
        return self._holding.add(granted, settler, taker, ahead=ahead)

    def __iter__(self) -> RemoteIteration:
        """Return an iteration over the messages; asking it for the next acks the previous one.

        See `qflow.Subscription.__iter__`.
        """
        return RemoteIteration(self._connection, self._holding, self._take)

    # Settling and moving ---------------------------------------------------------------------------------------------

    def ack(self, delivery: StreamDelivery | StreamDeliveries, wait: bool = False) -> None:
        """Settle a message, or a batch; see `qflow.Delivery.ack`."""
        delivery.ack(wait)

    def seek(self, to: int | datetime, *, partition: int | None = None) -> None:
        """Go on at an offset, or at the first message not earlier than a time; see `qflow.Subscription.seek`."""
        request = stream_requests.seek(self._opened.number, to, partition)
        before = self._connection.locked(self._holding.held)
        self._connection.call(request)
        self._connection.locked(partial(self._holding.seek, partition, before))

    @property
    def position(self) -> int:
        """The next offset to be delivered, of a stream with one partition; see `qflow.Subscription.position`."""
        return self._only(self.positions)

    @property
    def positions(self) -> list[int]:
        """The next offset to be delivered, of each partition. Cost: a round trip."""
        return self._connection.call(stream_requests.positions(self._opened.number))

    @property
    def lag(self) -> int:
        """Messages of all topics that it is behind; see `qflow.Subscription.lag`. Cost: a round trip."""
        return self._connection.call(stream_requests.lag(self._opened.number))

    def stats(self, *, matching: bool = False) -> SubscriptionStats:
        """Return a snapshot; for a group, of all its members together; see `qflow.Subscription.stats`."""
        return self._connection.call(stream_requests.subscription_stats(self._opened.number, matching))

    def close(self) -> None:
        """Give back what is held. A durable subscription can be opened again, any other is gone.

        Calling it again does nothing.
        """
        if not self._holding.closed:
            try:
                self._connection.settle(self._close, wait=True)
            except BrokerClosed:  # what is held is back already
                self._connection.locked(self._holding.close)

    def _close(self) -> Request | None:
        """Under the lock of the connection."""
        if self._holding.closed:
            return None
        self._holding.close()
        return stream_requests.subscription_close(self._opened.number)

    def __enter__(self) -> RemoteSubscription:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ForkedProcess):  # the parent goes on with it
            self.close()


def subscription_of(connection: Connection, opened: Opened) -> RemoteSubscription:
    """Return a subscription of a connection."""
    made = RemoteSubscription()
    made._connection, made._opened, made._holding = connection, opened, Holding(opened)
    return made


class RemoteIteration(Iterator[StreamDelivery]):
    """A loop over a subscription; see `RemoteSubscription.__iter__`. Of one thread."""

    def __init__(self, connection: Connection, holding: Holding, take: Any) -> None:
        self._connection = connection
        self._take = take
        self._loop = Loop(holding, threading.get_ident())
        connection.tell(partial(holding.loop_begins, self._loop.taker))

    def __next__(self) -> StreamDelivery:
        loop, connection = self._loop, self._connection
        while True:
            connection.settle(loop.step, wait=False)
            delivery, loop.delivery = loop.delivery, None  # no call from here to the return, and none where it comes
            if delivery is not None:
                return delivery
            connection.locked(loop.get_begins)
            batch = connection.call(loop.request(), partial(self._take, loop.taker, True))
            if not batch.total:
                raise StopIteration
            loop.begin(batch)
