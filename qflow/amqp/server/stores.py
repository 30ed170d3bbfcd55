"""Where the messages of an AMQP queue are: in a queue of qflow, or, of one of the type `stream`, in a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

from qflow.aio.broker import AsyncBroker
from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery, AsyncStreamDelivery
from qflow.aio.queue import AsyncQueue, check_put, nack_all, submit_many, work_of
from qflow.aio.stream import AsyncStream
from qflow.aio.subscription import AsyncSubscription
from qflow.aio.transaction import AsyncTransaction
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.arguments import seconds_of
from qflow.amqp.model.queues import Queue
from qflow.amqp.server.content import content_of_delivery
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.properties import changed
from qflow.config import AMQP_STREAMS
from qflow.delivery import Delivery
from qflow.errors import (
    AlreadySettled,
    BrokerClosed,
    InvalidArgument,
    MessageTooLarge,
    QflowError,
    QueueDeleted,
    QueueEmpty,
    StreamDeleted,
)
from qflow.memory.waiting import in_place
from qflow.named_tuples import NamedTuple
from qflow.options import Start
from qflow.queues.overflow import Decision, may_hold, when_full
from qflow.queues.queue import parts_of
from qflow.takers import Taker, cut_name

DEAD_LETTERS = "amqp:dead-letters"
"""The queue of qflow in which they are on their way."""
PURGED_AT_ONCE = 1000
ROOM_S = 1.0
"""A get waits for so long for room in memory: other clients may be about to ack."""
FILTER_VALUE = "x-stream-filter-value"
DELIVERY_COUNT = "x-delivery-count"
OFFSET, FILTER, UNFILTERED = "x-stream-offset", "x-stream-filter", "x-stream-match-unfiltered"


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

    def hand_out(self, delivery: AsyncDelivery) -> None:
        """A client is to hold a message until it acks."""

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

    @property
    def may_block(self) -> bool:
        """It may be full, and who puts a message then waits."""
        settings = self.queue.settings
        has_limit = settings.limit_messages is not None or settings.limit_bytes is not None
        return has_limit and when_full(settings) is Decision.WAIT

    def has_room(self, messages: int, size: int) -> bool:
        """Tell whether it takes so many messages, of so many bytes together, at once, by its limits."""
        stats = in_place(self.queue.queue.stats)
        is_open = not parts_of(self.queue.queue).gate.at_limit
        return is_open and may_hold(self.queue.settings, stats.messages + messages, stats.bytes + size)

    def takes(self, parcel: Parcel) -> bool:
        """Tell whether a message can be put, if need be after a while."""
        if self.is_gone or not self._may_pass(parcel):
            return False
        return self.may_block or self.has_room(1, len(parcel.body))

    def _may_pass(self, parcel: Parcel) -> bool:
        """Tell whether the queue takes such a message when it is empty."""
        try:
            check_put(self.queue, parcel.body, **parcel.options(self.queue.settings))
        except (MessageTooLarge, InvalidArgument):
            return False
        return True

    def submit(self, parcel: Parcel) -> asyncio.Future[Any]:
        """Put a message; the future is a task if it has to wait for room."""
        return self.queue.submit(parcel.body, **parcel.options(self.queue.settings))

    async def put_in(self, transaction: AsyncTransaction, parcel: Parcel) -> None:
        """Put a message when a transaction commits."""
        await transaction.put(self.queue, parcel.body, **parcel.options(self.queue.settings))

    async def give_back(self, deliveries: Sequence[AsyncDelivery], requeue: bool) -> None:
        """Have messages go back, or, with `requeue=False`, to where dead letters go. Cost: one commit, if to those."""
        with suppress(AlreadySettled, QueueDeleted, BrokerClosed):  # there is nothing to go back to, or it is there
            await nack_all(self.queue, deliveries, requeue)

    def store_of_runs(self, parcel: Parcel) -> QueueStore | None:
        """Return it if messages like this one may be put many at once: logged, without a limit that turns some away."""
        settings = self.queue.settings
        limited = settings.limit_messages is not None or settings.limit_bytes is not None
        return self if parcel.durable and settings.durable and not limited else None

    def submit_run(self, parcel: Parcel, bodies: Sequence[bytes]) -> asyncio.Future[Any]:
        """Put messages that differ in their bodies alone, all or none; as `submit`."""
        return submit_many(self.queue, bodies, **parcel.options(self.queue.settings))

    async def open(self, _: Mapping[str, Any], name: str) -> Source:
        """Return what a new consumer of this name takes from."""
        return _QueueSource(self, name)

    def check_consumer(self, prefetch: int, no_ack: bool) -> None:
        """Refuse a consumer that cannot be served."""

    async def get(self, may_wait: bool) -> tuple[AsyncDelivery, Content]:
        """Return a message.

        Args:
            may_wait: it waits a while for the room that other clients may leave.

        Raises:
            QueueEmpty: there is none.
            AmqpError: RESOURCE_ERROR, what clients hold leaves no room for it.
        """
        work = work_of(self.queue)
        for timeout_s in (0, ROOM_S) if may_wait else (0,):
            getting = await work.get_one(timeout_s, "basic.get")
            if getting.delivery is not None:
                delivery = AsyncDelivery(getting.delivery, work)
                return delivery, self.content_of(delivery)
            if not (getting.is_short and self.ready):
                raise QueueEmpty(f"no message in queue {self._name!r}")
        text = f"queue '{self._name}' has messages, but no room in memory for one beside what clients hold: "
        raise AmqpError(ReplyCode.RESOURCE_ERROR, text + "ack, or raise --capacity", hard=False)

    def content_of(self, delivery: AsyncDelivery) -> Content:
        """Return a message as it is delivered, with how often it was before, if that is to be told."""
        content = content_of_delivery(delivery.delivery, self._name)
        earlier = delivery.delivery_count - 1
        if not self._counts or not earlier:
            return content
        return content._replace(properties=changed(content.properties, {DELIVERY_COUNT: earlier}))

    def settle(self, deliveries: list[Delivery]) -> None:
        """Settle messages of it, in one commit. Those that are settled, or gone with the queue, need it no more."""
        with suppress(AlreadySettled, QueueDeleted):
            in_place(partial(self.queue.queue.ack_many, deliveries))

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
    def __init__(self, store: QueueStore, name: str) -> None:
        self._queue = store.queue
        self._work = work_of(store.queue)
        self._taker = Taker(cut_name(name), "amqp", pid=0)
        self.content_of = store.content_of
        in_place(partial(self._work.consumed.welcome, self._taker))

    async def get_many(self, most: int) -> AsyncDeliveries:
        return AsyncDeliveries(await self._work.collect(most, None, self._taker), self._work)

    def hand_out(self, delivery: AsyncDelivery) -> None:
        """Have it by itself, so that it is charged for what it takes."""
        in_place(partial(self._leave, delivery.delivery))

    def _leave(self, delivery: Delivery) -> None:
        batch: Any = delivery.settler
        with suppress(AlreadySettled, QueueDeleted, BrokerClosed):  # who acks it is told
            parts_of(self._queue.queue).claims.leave_batch(batch, batch.position(delivery.sequence), delivery)

    def give_up(self, batch: AsyncDeliveries, first: int) -> None:
        self._work.give_up_from(batch, first)

    async def close(self) -> None:
        in_place(partial(self._work.consumed.see_off, self._taker))


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

    waiting = ready

    def takes(self, parcel: Parcel) -> bool:
        """Tell whether a message can be put."""
        return not self.is_gone and len(parcel.body) < self.stream.settings.max_message_bytes

    def submit(self, parcel: Parcel) -> asyncio.Future[Any]:
        """Publish a message; the future is a task if it has to wait for room."""
        return self._broker.submit_publish(self._topic_of(parcel), parcel.body, headers=parcel.headers)

    def store_of_runs(self, _: Parcel) -> None:
        """Messages of a stream are published one by one."""

    async def put_in(self, transaction: AsyncTransaction, parcel: Parcel) -> None:
        """Publish a message when a transaction commits."""
        await transaction.publish(self._topic_of(parcel), parcel.body, headers=parcel.headers)

    async def give_back(self, deliveries: Sequence[AsyncDelivery], _: bool) -> None:
        """Settle messages: a stream delivers nothing again."""
        self.settle([one.delivery for one in deliveries])

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

    async def open(self, arguments: Mapping[str, Any], name: str) -> Source:
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

    async def get(self, may_wait: bool) -> tuple[AsyncDelivery, Content]:
        """Refused: a stream is consumed."""
        raise AmqpError(ReplyCode.NOT_IMPLEMENTED, f"basic.get is not supported by stream queues: queue '{self._name}'")

    def settle(self, deliveries: list[Delivery]) -> None:
        """Settle messages for their subscriptions. Those that are settled, or gone, need it no more."""
        for delivery in deliveries:
            with suppress(AlreadySettled, StreamDeleted):
                in_place(delivery.ack)

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

    def hand_out(self, delivery: AsyncDelivery) -> None:
        """It is held with its batch."""

    def give_up(self, batch: AsyncDeliveries, first: int) -> None:
        for delivery in batch[first:]:
            with suppress(AlreadySettled, StreamDeleted, BrokerClosed):
                in_place(delivery.delivery.nack)

    async def close(self) -> None:
        await self._subscription.close()


async def make_stores(broker: AsyncBroker, queues: Mapping[str, Queue]) -> None:
    """Have queues, or streams, in the broker under their names, as AMQP queues are declared; twice is fine.

    Cost: one commit for all durable queues that are alike, and one for each stream.
    """
    alike: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, queue in queues.items():
        if queue.settled.is_stream:
            await broker.declare_stream(name, topics=[f"{topic_of(name)}/#"], **queue.settled.retention())
        else:
            alike.setdefault(tuple(_settings_of(queue).items()), []).append(name)
    for settings, names in alike.items():
        await broker.declare_queues(names, **dict(settings))


def _settings_of(queue: Queue) -> dict[str, Any]:
    settings = queue.settings(dead_letter=DEAD_LETTERS)
    if not settings.get("ttl_s"):
        settings.pop("ttl_s", None)  # 0 is told with each message: see `HostedQueue.submit`
    for name_of_limit in ("ack_timeout_s", "limit_messages", "limit_bytes", "on_overflow"):
        settings.pop(name_of_limit, None)  # type: ignore[misc]  # those are counted here: see `Channel.tick`, `trim`
    return dict(settings)


def topic_of(engine_name: str) -> str:
    """Return the topic of what is published to a stream, given its name in the broker; filter values are below."""
    return AMQP_STREAMS + quote(engine_name, safe="")


def _filters(wanted: Any) -> Sequence[str] | None:
    if wanted is None:
        return None
    values = wanted if isinstance(wanted, list) else [wanted]
    if not values or not all(isinstance(value, str) for value in values):
        raise AmqpError(ReplyCode.PRECONDITION_FAILED, f"{FILTER} is a text, or an array of text")
    return values
