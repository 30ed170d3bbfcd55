"""Where the messages of an AMQP queue are: in a queue of qflow, or, of one of the type `stream`, in a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

from qflow.aio.delivery import AsyncStreamDelivery
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.arguments import seconds_of
from qflow.amqp.server.content import content_of_delivery
from qflow.amqp.wire.properties import changed
from qflow.errors import AlreadySettled, BrokerClosed, QflowError, QueueDeleted, StreamDeleted
from qflow.memory.waiting import in_place
from qflow.options import Start
from qflow.queues.queue import parts_of

if TYPE_CHECKING:
    from qflow.aio.broker import AsyncBroker
    from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery
    from qflow.aio.queue import AsyncQueue
    from qflow.aio.stream import AsyncStream
    from qflow.aio.subscription import AsyncSubscription
    from qflow.aio.transaction import AsyncTransaction
    from qflow.amqp.server.parcels import Parcel
    from qflow.amqp.wire.frames import Content
    from qflow.delivery import Deliveries

PURGED_AT_ONCE = 1000
FILTER_VALUE = "x-stream-filter-value"
DELIVERY_COUNT = "x-delivery-count"
OFFSET, FILTER, UNFILTERED = "x-stream-offset", "x-stream-filter", "x-stream-match-unfiltered"
TOPICS = "amqp-stream/"
"""How the topics of streams begin that AMQP declared; a name follows, and, of a message with one, its filter value."""


class Depth(NamedTuple):
    """What waits in a queue."""

    messages: int
    bytes: int
    """With what is kept of each beside its body."""


class Source(Protocol):
    """What a consumer takes messages from."""

    async def get_many(self, most: int) -> AsyncDeliveries: ...
    def content_of(self, delivery: AsyncDelivery) -> Content | None:
        """Return a message as it is delivered; None if this consumer is not to have it."""

    def give_up(self, batch: AsyncDeliveries, first: int) -> None:
        """Have the messages of a batch from `first` on go back, which no client was sent: they are not redelivered."""

    async def close(self) -> None: ...


class QueueStore:
    """A queue of qflow."""

    __slots__ = ("_counts", "_name", "queue")

    def __init__(self, name: str, queue: AsyncQueue, *, counts: bool) -> None:
        """`counts`: clients are told how often a message was delivered before, as quorum queues do."""
        self._name = name
        self._counts = counts
        self.queue = queue

    @property
    def is_gone(self) -> bool:
        """The broker has it no more."""
        return parts_of(self.queue.queue).context.ended is not None

    def depth(self) -> Depth:
        """Return what waits. Cost: 20 µs."""
        stats = in_place(self.queue.queue.stats)
        return Depth(stats.lag_messages - stats.delayed_messages, stats.bytes - stats.acquired_bytes)

    @property
    def ready(self) -> int:
        """How many messages wait. Cost: 20 µs."""
        return self.depth().messages

    @property
    def waiting(self) -> int:
        """How many messages wait, with those that are delayed."""
        return in_place(self.queue.queue.stats).lag_messages

    def has_room(self, parcel: Parcel) -> bool:
        """Tell whether a message could be put now."""
        settings = self.queue.settings
        if len(parcel.body) >= settings.max_message_bytes:
            return False
        return settings.limit_messages is None or len(self.queue) < settings.limit_messages

    def submit(self, parcel: Parcel) -> asyncio.Future[Any]:
        """Put a message; the future is a task if it has to wait for room."""
        return self.queue.submit(parcel.body, **parcel.options(self.queue.settings))

    async def put_in(self, transaction: AsyncTransaction, parcel: Parcel) -> None:
        """Put a message when a transaction commits."""
        await transaction.put(self.queue, parcel.body, **parcel.options(self.queue.settings))

    async def open(self, _: Mapping[str, Any]) -> Source:
        """Return what a new consumer takes from."""
        return _QueueSource(self)

    def check_consumer(self, prefetch: int, no_ack: bool) -> None:
        """Refuse a consumer that cannot be served."""

    async def get(self) -> tuple[AsyncDelivery, Content]:
        """Return a message; raises `QueueEmpty`."""
        delivery = await self.queue.get(0)
        return delivery, self.content_of(delivery)

    def content_of(self, delivery: AsyncDelivery) -> Content:
        """Return a message as it is delivered, with how often it was before, if that is to be told."""
        content = content_of_delivery(delivery.delivery, self._name)
        earlier = delivery.delivery_count - 1
        if not self._counts or not earlier:
            return content
        return content._replace(properties=changed(content.properties, {DELIVERY_COUNT: earlier}))

    async def purge(self) -> int:
        """Drop what waits, and return how many messages that were; what consumers hold stays."""
        stats = await self.queue.stats()
        if not stats.acquired_messages:
            return await self.queue.purge()
        left = count = stats.lag_messages - stats.delayed_messages
        while left > 0:
            batch = await self.queue.get_many(min(left, PURGED_AT_ONCE), 0)
            if not len(batch):
                break
            left -= len(batch)
            await batch.ack()
        return count - max(left, 0)


class _QueueSource:
    def __init__(self, store: QueueStore) -> None:
        self._queue = store.queue
        self.content_of = store.content_of

    async def get_many(self, most: int) -> AsyncDeliveries:
        return await self._queue.get_many(most)

    def give_up(self, batch: AsyncDeliveries, first: int) -> None:
        in_place(partial(self._give_up, batch.deliveries, first))

    def _give_up(self, batch: Deliveries, first: int) -> None:
        claims = parts_of(self._queue.queue).claims
        for index in range(first, len(batch)):
            with suppress(AlreadySettled, QueueDeleted, BrokerClosed):  # there is nothing to go back to, or it is there
                left = claims.leave_batch(batch, index)
                if left is not None:
                    claims.give_up(left)

    async def close(self) -> None:
        return None


class StreamStore:
    """A stream of qflow. What is consumed stays; each consumer says where it begins."""

    __slots__ = ("_broker", "_name", "_topic", "stream")

    def __init__(self, name: str, engine_name: str, stream: AsyncStream, broker: AsyncBroker) -> None:
        self._name = name
        self._topic = topic_of(engine_name)
        self._broker = broker
        self.stream = stream

    @property
    def is_gone(self) -> bool:
        """The broker has it no more."""
        try:
            return self._broker.broker.engine.streams.get(self.stream.name) is not self.stream.stream
        except QflowError:
            return True

    def depth(self) -> Depth:
        """Return what it has."""
        stats = in_place(self.stream.stream.stats)
        return Depth(stats.messages, stats.bytes)

    @property
    def ready(self) -> int:
        """How many messages it has."""
        return self.depth().messages

    @property
    def waiting(self) -> int:
        """How many messages it has."""
        return self.depth().messages

    def has_room(self, parcel: Parcel) -> bool:
        """Tell whether a message could be put now."""
        return len(parcel.body) < self.stream.settings.max_message_bytes

    def submit(self, parcel: Parcel) -> asyncio.Future[Any]:
        """Publish a message; the future is a task if it has to wait for room."""
        return self._broker.submit_publish(self._topic_of(parcel), parcel.body, headers=parcel.headers)

    async def put_in(self, transaction: AsyncTransaction, parcel: Parcel) -> None:
        """Publish a message when a transaction commits."""
        await transaction.publish(self._topic_of(parcel), parcel.body, headers=parcel.headers)

    def _topic_of(self, parcel: Parcel) -> str:
        return self._topic if parcel.filter_value is None else f"{self._topic}/{quote(parcel.filter_value, safe='')}"

    def check_consumer(self, prefetch: int, no_ack: bool) -> None:
        """Refuse a consumer that cannot be served."""
        if no_ack:
            raise AmqpError(
                ReplyCode.NOT_IMPLEMENTED, f"queue '{self._name}' does not support automatic acknowledgement"
            )
        if not prefetch:
            raise AmqpError(
                ReplyCode.PRECONDITION_FAILED, f"consumer prefetch count is not set for stream queue '{self._name}'"
            )

    async def open(self, arguments: Mapping[str, Any]) -> Source:
        """Return what a new consumer takes from; the argument `x-stream-offset` says where it begins.

        Raises:
            AmqpError: PRECONDITION_FAILED; an argument is wrong.
        """
        start = await self._start(arguments.get(OFFSET, "next"))
        wanted = _filters(arguments.get(FILTER))
        unfiltered = bool(arguments.get(UNFILTERED, False))
        topics = None if wanted is None else {f"{self._topic}/{quote(value, safe='')}" for value in wanted}
        topic_filter = f"{self._topic}/#"
        if topics is not None:
            if unfiltered:
                topics.add(self._topic)
            if len(topics) == 1:
                topic_filter = next(iter(topics))
        subscription = await self._broker.subscribe(self.stream, topic_filter, start=start, on_gap="skip")
        return _StreamSource(self._name, subscription, topics)

    async def _start(self, offset: Any) -> Start:
        if offset == "first":
            return "earliest"
        if offset == "next":
            return "latest"
        if offset == "last":
            stats = await self.stream.stats()
            return max(stats.next_offsets[0] - 1, stats.first_offsets[0])
        if isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0:
            stats = await self.stream.stats()
            return min(max(offset, stats.first_offsets[0]), stats.next_offsets[0])
        if isinstance(offset, datetime):
            return offset.replace(tzinfo=UTC) if offset.tzinfo is None else offset
        ago_s = seconds_of(offset) if isinstance(offset, str) else None
        if ago_s is None:
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, f"invalid {OFFSET} {offset!r} for stream '{self._name}'")
        return datetime.now(UTC) - timedelta(seconds=min(ago_s, int(time.time())))

    async def get(self) -> tuple[AsyncDelivery, Content]:
        """Refused: a stream is consumed."""
        raise AmqpError(ReplyCode.NOT_IMPLEMENTED, f"basic.get is not supported by stream queues: queue '{self._name}'")

    async def purge(self) -> int:
        """Refused: what is in a stream is retained as its arguments say."""
        raise AmqpError(
            ReplyCode.NOT_IMPLEMENTED, f"queue.purge is not supported by stream queues: queue '{self._name}'"
        )


class _StreamSource:
    def __init__(self, name: str, subscription: AsyncSubscription, topics: set[str] | None) -> None:
        self._name = name
        self._subscription = subscription
        self._topics = topics
        """Those of the messages that the consumer is to have; None for all."""

    async def get_many(self, most: int) -> AsyncDeliveries:
        return await self._subscription.get_many(most)

    def content_of(self, delivery: AsyncDelivery) -> Content | None:
        assert isinstance(delivery, AsyncStreamDelivery)
        if self._topics is not None and delivery.topic not in self._topics:
            in_place(partial(delivery.delivery.ack, False))
            return None
        content = content_of_delivery(delivery.delivery, self._name)
        return content._replace(properties=changed(content.properties, {OFFSET: delivery.offset}))

    def give_up(self, batch: AsyncDeliveries, first: int) -> None:
        for delivery in batch[first:]:
            with suppress(AlreadySettled, StreamDeleted, BrokerClosed):
                in_place(delivery.delivery.nack)

    async def close(self) -> None:
        await self._subscription.close()


def topic_of(engine_name: str) -> str:
    """Return the topic of what is published to a stream, given its name in the broker."""
    return TOPICS + quote(engine_name, safe="")


def _filters(wanted: Any) -> Sequence[str] | None:
    if wanted is None:
        return None
    values = wanted if isinstance(wanted, list) else [wanted]
    if not values or not all(isinstance(value, str) for value in values):
        raise AmqpError(ReplyCode.PRECONDITION_FAILED, f"{FILTER} is a text, or an array of text")
    return values
