"""The bridge of a broker: one task carries from MQTT to AMQP, and one back.

From MQTT: what the stream has, by a durable subscription. Each message is settled in the commit that puts it into the
queues that `amq.topic` sends it to; so it is in each of them once, whatever is killed. What has QoS 0 is in no stream:
it is put as it comes; a little of it may wait for room in queues, more is dropped.

From AMQP: a queue that is bound to `amq.topic` while the bridge is there; each of its messages is settled in the commit
that publishes it to the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from qflow.aio.broker import AsyncBroker, in_thread
from qflow.aio.delivery import AsyncDelivery
from qflow.aio.queue import AsyncQueue
from qflow.aio.subscription import AsyncSubscription
from qflow.amqp.model.queues import BRIDGE_QUEUE, ROOT
from qflow.amqp.server.content import content_of_delivery
from qflow.amqp.server.dead_letters import Letter
from qflow.amqp.server.host import Host, Hosts
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.parcels import Parcel
from qflow.bridge.translation import EXCHANGE, MARK, key_of, message_of, parcel_of, topics_of
from qflow.broker import Broker
from qflow.errors import AlreadySettled, BrokerClosed, InvalidArgument, MessageTooLarge, QflowError, TransactionTooLarge
from qflow.loggers import get_logger
from qflow.memory.waiting import in_place
from qflow.mqtt.model.messages import Message
from qflow.mqtt.model.messages import message_of as message_of_stream
from qflow.mqtt.model.sessions import Subscribed
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.house import House
from qflow.mqtt.server.storing import STREAM
from qflow.serving.tasks import Tasks, ending
from qflow.serving.telling import Telling

QUEUE = BRIDGE_QUEUE
"""What `amq.topic` has for MQTT waits in it."""
SUBSCRIPTION = "amq.topic"
"""Its place in the stream is how far the bridge has come."""
AT_ONCE = 100
MOST_BYTES = 2**20
"""Of messages that are carried at once, about."""
MOST_WAITING_BYTES = 2**20
"""Of messages with QoS 0 on their way into queues; what comes then is dropped."""
AGAIN_S = 1.0
"""After a failure, it goes on after so long."""

_REFUSED = (MessageTooLarge, TransactionTooLarge, InvalidArgument)
_NOTHING = Parcel(b"", {}, False, 0, None, None)
_logger = get_logger("qflow.bridge")


_BRIDGED: WeakSet[Broker] = WeakSet()


class Bridge:
    """See the module. Made by `join`; `async with` ends it."""

    def __init__(self, broker: AsyncBroker, stream: str) -> None:
        self.dropped: int = 0
        """Messages with QoS 0 for which queues had no room, and messages that the other side has no place for."""
        self._broker = broker
        self._stream = stream
        self._house = House.of(broker, Clock())
        self._hosts: Hosts | None = None
        self._host: Host | None = None
        self._tasks = Tasks(_logger)
        self._mqtt_waits, self._amqp_waits, self._drops = Telling(_logger), Telling(_logger), Telling(_logger)
        self._waiting_bytes = 0
        self._tap = Subscribed("#", "#")
        self._is_closed = False
        self._used = broker.broker.engine.spool.used
        self._uses = [("queue", QUEUE), ("subscription", stream, SUBSCRIPTION)]

    async def begin(self) -> None:
        """Carry from now on what is published."""
        if self._broker.broker in _BRIDGED:
            raise InvalidArgument(f"{self._broker.path} has a bridge between AMQP and MQTT: close that one first")
        _BRIDGED.add(self._broker.broker)
        try:
            await self._house.enter(self._stream)
        except BaseException:
            _BRIDGED.discard(self._broker.broker)
            raise
        try:
            await in_thread(self._broker, self._use, self._leave)
            self._hosts = await Hosts.of(self._broker)
            self._host = await self._hosts.find(ROOT)
            await self._bound()
        except BaseException:
            await self.close()
            raise
        self._tap.owner = self
        self._house.hub.add(self._tap)
        self._tasks.spawn(self._from_mqtt())
        self._tasks.spawn(self._from_amqp())

    async def __aenter__(self) -> Bridge:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @ending
    async def close(self) -> None:
        """Carry nothing any more; what is on its way is carried by the next one. Calling it again does nothing.

        Cancelled, it is done all the same.
        """
        if self._is_closed:
            return
        self._is_closed = True
        _BRIDGED.discard(self._broker.broker)
        self._leave()
        if self._tap.owner is not None:
            self._house.hub.remove(self._tap)
        async with AsyncExitStack() as ends:  # each, whichever of the others fails
            ends.push_async_callback(self._house.leave)
            if self._hosts is not None:
                ends.push_async_callback(self._hosts.leave)
            await self._tasks.close()
            for telling in (self._mqtt_waits, self._amqp_waits, self._drops):
                telling.end()
            if self._host is not None:
                with suppress(BrokerClosed):  # which ends what is bound for now, too
                    await self._host.bind_for_now(QUEUE, EXCHANGE, "#", bound=False)

    # From MQTT -------------------------------------------------------------------------------------------------------

    async def _from_mqtt(self) -> None:
        while True:
            try:
                options: Any = {"name": SUBSCRIPTION, "start": "latest", "on_gap": "skip"}
                async with self._broker.subscribe(self._stream, "#", **options) as subscription:
                    while True:
                        await self._carry_next(subscription)
            except BrokerClosed:
                return
            except Exception as error:
                _tell(self._mqtt_waits, "what is published by MQTT waits on its way to AMQP: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _carry_next(self, subscription: AsyncSubscription) -> None:
        """Carry the next messages; none of them is held while it waits for others."""
        batch = await subscription.get_many(AT_ONCE)
        letters = [self._letter(delivery) for delivery in batch]
        if any(letter.targets for letter in letters):
            await self._carry(letters)
        else:
            await batch.ack()

    async def _carry(self, letters: list[Letter]) -> None:
        """Settle messages and put each where it goes, in one commit, or in one for each where that is too much."""
        assert self._hosts is not None
        try:
            await self._hosts.dead_letters.move(letters)
        except TransactionTooLarge:
            for letter in letters:
                with suppress(AlreadySettled):  # it went with those before it
                    await self._carry_alone(letter)

    async def _carry_alone(self, letter: Letter) -> None:
        """The same of one; where it has too many targets for one commit, each has it in a commit of its own."""
        assert self._hosts is not None
        assert letter.delivery is not None
        try:
            await self._hosts.dead_letters.move([letter])
            return
        except TransactionTooLarge:
            pass  # a kill in between may double it: nothing is lost
        for hosted in letter.targets:
            try:
                await self._hosts.dead_letters.move([letter._replace(delivery=None, targets=[hosted])])
            except TransactionTooLarge as error:
                self.dropped += 1
                self._drops.tell("a message of MQTT is dropped, as %s cannot have it: %s", hosted.where, error)
        await letter.delivery.ack()

    def _letter(self, delivery: AsyncDelivery) -> Letter:
        """Return a message of the stream and where it goes."""
        message = message_of_stream(delivery.delivery)  # type: ignore[arg-type]
        targets, parcel = self._targets(message)
        return Letter(delivery, self._host, targets, parcel)

    def _targets(self, message: Message) -> tuple[list[HostedQueue], Parcel]:
        """Return the queues that a message goes to, and what it is there."""
        assert self._host is not None
        key, now_ms = key_of(message.topic), self._house.hub.now_ms()
        if key is None or message.publisher == MARK or message.is_expired(now_ms):
            self.dropped += key is None
            return [], _NOTHING
        parcel, properties = parcel_of(message, key, now_ms)
        found = self._host.route(EXCHANGE, [key], properties, inside=True)
        return [hosted for hosted in found if hosted.name != QUEUE], parcel

    def take(self, message: Message, _: Sequence[Subscribed]) -> None:
        """Put a message with QoS 0 into the queues that have room for it: the hub has it."""
        if message.offset >= 0:
            return  # it is in the stream
        try:
            targets, parcel = self._targets(message)
            for hosted in targets:
                self._put(hosted, parcel, message.size)
        except QflowError as error:
            self.dropped += 1
            _logger.debug("a message with QoS 0 is dropped: %s", error)

    def fail(self, error: Exception) -> None:
        """A message could not be taken; the hub has told why."""
        self.dropped += 1

    def _put(self, hosted: HostedQueue, parcel: Parcel, size: int) -> None:
        if hosted.refuses or self._waiting_bytes >= MOST_WAITING_BYTES:
            self.dropped += 1
            return
        put = hosted.submit(parcel)
        hosted.comes(parcel)
        self._waiting_bytes += size
        put.add_done_callback(partial(self._was_put, hosted, parcel, size))

    def _was_put(self, hosted: HostedQueue, parcel: Parcel, size: int, put: asyncio.Future[Any]) -> None:
        hosted.came(parcel)
        self._waiting_bytes -= size
        if put.cancelled() or put.exception() is not None:
            self.dropped += 1
        elif self._host is not None:
            self._host.trim_soon(hosted)

    # From AMQP -------------------------------------------------------------------------------------------------------

    async def _from_amqp(self) -> None:
        while True:
            try:
                queue = await self._bound()
                while True:
                    await self._publish(list(await queue.get_many(_at_once(queue))))
            except BrokerClosed:
                return
            except Exception as error:
                _tell(self._amqp_waits, "what is published by AMQP waits on its way to MQTT: %s", error)
                await asyncio.sleep(AGAIN_S)

    def _use(self) -> None:
        """Have nobody delete what it needs."""
        for what in self._uses:
            self._used.begin("the bridge between MQTT and AMQP", *what)

    def _leave(self, _: object = None) -> None:
        for what in self._uses:
            self._used.end(*what)

    async def _bound(self) -> AsyncQueue:
        """Return the queue, made and bound if it is not."""
        assert self._host is not None
        queue = await self._broker.declare_queue(QUEUE)
        await self._host.bind_for_now(QUEUE, EXCHANGE, "#")
        return queue

    async def _publish(self, deliveries: list[AsyncDelivery]) -> None:
        """Publish what came by AMQP, in one commit; what cannot be published is dropped."""
        try:
            try:
                await self._commit(deliveries)
            except _REFUSED:
                for delivery in deliveries:
                    await self._publish_alone(delivery)
        except BaseException:
            for delivery in deliveries:
                with suppress(QflowError):
                    in_place(delivery.delivery.nack)
            raise

    async def _publish_alone(self, delivery: AsyncDelivery) -> None:
        try:
            await self._commit([delivery])
        except _REFUSED as error:
            self.dropped += 1
            self._drops.tell("a message of AMQP is dropped, as MQTT cannot have it: %s", error)
            await delivery.ack()

    async def _commit(self, deliveries: list[AsyncDelivery]) -> None:
        dropped = 0
        async with self._broker.transaction() as transaction:
            for delivery in deliveries:
                content = content_of_delivery(delivery.delivery, QUEUE)
                for topic in topics_of(content):
                    if topic is None:
                        dropped += 1
                    else:
                        message = message_of(content, topic, self._house.hub.now_ms())
                        await transaction.publish(topic, message.payload, headers=message.headers())
                await transaction.ack(delivery)
        self.dropped += dropped


def _at_once(queue: AsyncQueue) -> int:
    """Return how many of the messages that wait make a commit of a bounded size, by their mean. Cost: 20 µs."""
    stats = in_place(queue.queue.stats)
    return max(1, min(AT_ONCE, MOST_BYTES * stats.messages // max(1, stats.bytes) if stats.messages else AT_ONCE))


def _tell(telling: Telling, text: str, error: Exception) -> None:
    """Write to the log what failed, with where if it is a fault of the server."""
    telling.tell(text, error, fault=None if isinstance(error, QflowError) else error)


async def join(broker: AsyncBroker | Broker, *, stream: str = STREAM) -> Bridge:
    """Carry messages between the doors of a broker for MQTT and AMQP; see `Bridge`. One a broker.

    Args:
        stream: the one that MQTT has in this broker.

    Raises:
        InvalidArgument: the broker has a bridge.
    """
    bridge = Bridge(broker if isinstance(broker, AsyncBroker) else AsyncBroker(broker), stream)
    await bridge.begin()
    return bridge
