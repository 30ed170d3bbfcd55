"""The hub: all that is published comes by here, in the order of the stream, and goes to those who are there.

One a broker, whatever doors it has. The thread of the loop owns all of it; there are no locks but those by client id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from qflow.aio.broker import AsyncBroker, in_thread, keep, publish_and_keep
from qflow.aio.subscription import AsyncSubscription
from qflow.errors import BrokerClosed, InvalidArgument, NotFound, QflowError
from qflow.loggers import get_logger
from qflow.message import offset_of
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.model.marks import Marks
from qflow.mqtt.model.messages import Message, message_of
from qflow.mqtt.model.sessions import Subscribed
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.keeping import Keeper
from qflow.mqtt.server.outbound import Counts
from qflow.mqtt.server.recent import Recent
from qflow.mqtt.server.retaining import Retaining
from qflow.mqtt.server.storing import RETAINED, Records, Rooms
from qflow.mqtt.server.sys_topics import SysTopics
from qflow.mqtt.server.together import LARGE_BYTES, Stored, Together
from qflow.serving.tasks import Tasks, Turns
from qflow.serving.telling import Telling
from qflow.steps import Steps
from qflow.streams.partition import Partition
from qflow.streams.stream import Stream
from qflow.streams.stream_log import StreamLog
from qflow.streams.topic_filter import FilterTrie

RETENTION_BYTES = 2**30
BATCH = 256
MOST_LATE_S = 1.0
PASSED_S = 0.05
"""How often it is looked where there may be messages with a topic such as $app/a, which it does not follow."""
SET_MS = 60_000.0
"""By more than that the time of day goes ahead if it is set."""
MOST_IN_A_TURN = 4_000
"""Deliveries, after which the loop does other things."""
MOST_LEAVING = 64
"""Clients whose sessions go to sleep in one turn of the loop: 0.2 ms each, and a network that is cut has thousands."""

_logger = get_logger("qflow.mqtt")


class Hub:
    """See the module. `open`, then `begin`."""

    stream: Stream
    _partition: Partition

    def __init__(self, broker: AsyncBroker, clock: Clock) -> None:
        self.broker = broker
        self.clock = clock
        self.monotonic = clock.monotonic
        self.counts = Counts()
        self.recent = Recent()
        self.steps = Steps(clock.now_ms, lambda: clock.monotonic() * 1000, SET_MS)
        self.started_ms = clock.now_ms()
        self.records = Records(broker, self.started_ms, self.steps)
        self.keeper = Keeper(broker)
        self.tasks = Tasks(_logger)
        self.telling = Telling(_logger)
        self.tell = self.telling.tell
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.leaving = Turns(MOST_LEAVING)
        self.retained = Retaining(broker, self.records, clock, self.tasks)
        self.sessions: dict[str, Any] = {}
        """Of connected clients, by client id."""
        self.next = 0
        """The offset of the next message of the stream."""
        self.retaining: asyncio.Future[Any] | None = None
        """The commit of what was retained last with QoS 0, for which no publisher waits."""
        self.unsynced_bytes = 0
        """Of what clients have published, and wait for the sync of."""
        self.failed = False
        """It follows the stream no more: the broker is closed, or has failed."""
        self._has_warned = False
        """That messages with QoS 0 are not retained, since one was."""
        self._late: dict[asyncio.Future[None], int] = {}
        """Those who wait for it to come to an offset."""
        self.together = Together(broker)
        self.marks = Marks()
        self._trie: FilterTrie[Subscribed] = FilterTrie()
        self._used = broker.broker.engine.spool.used
        self._name = ""
        """Of the stream."""

    def now_ms(self) -> int:
        """Return the time of day, milliseconds since the epoch; if it was set, `steps` knows."""
        self.steps.look()
        return self.clock.now_ms()

    def turn(self, name: str) -> asyncio.Lock:
        """Return the lock of a name, which there is as long as somebody has it, or waits for it."""
        return self._turns.setdefault(name, asyncio.Lock())

    async def open(self, name: str) -> None:
        """Know the stream, which is declared if there is none; nobody deletes it before `leave`.

        Raises:
            InvalidArgument: it has several partitions, or does not take all topics.
        """
        self._name = name
        begin = partial(self._used.begin, "the server for MQTT", "stream", name)
        await in_thread(self.broker, begin, lambda _: self._used.end("stream", name))
        try:
            around = self.broker.stream(name)
        except NotFound:
            around = await self.broker.declare_stream(name, topics=["#"], retention_bytes=RETENTION_BYTES)
        if around.settings.partitions != 1:
            raise InvalidArgument(
                f"stream {name!r} has {around.settings.partitions} partitions: MQTT takes one with a single one"
            )
        if "#" not in around.settings.topics:
            raise InvalidArgument(
                f"stream {name!r} takes the topics {', '.join(map(repr, around.settings.topics))}: MQTT needs one that "
                "takes all that clients publish, with the topics ['#']"
            )
        log = around.stream
        assert isinstance(log, StreamLog)  # of a broker of this process
        self.stream, self._partition = log, log.partitions[0]
        self.next = (await around.stats()).next_offsets[0]

    async def leave(self) -> None:
        """Follow the stream no more."""
        self._used.end("stream", self._name)
        await self.tasks.close()
        self.together.end()
        self.telling.end()

    @property
    def floor(self) -> int:
        """The lowest offset that the stream still has: who comes gets nothing below it, though `recent` may have it."""
        return min(self.next, offset_of(self._partition.floor))

    async def catch_up(self) -> None:
        """Return once it has seen what is confirmed now: who subscribes then gets nothing of that.

        It is not waited for longer than `MOST_LATE_S`: what is damaged, it never sees.
        """
        present = offset_of(self._partition.next)
        if self._has_passed(present):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._late[waiting] = present
        try:
            await asyncio.wait([waiting], timeout=MOST_LATE_S)
        finally:
            self._late.pop(waiting, None)

    def _has_passed(self, offset: int) -> bool:
        return self.failed or max(self.next, offset_of(self._partition.floor)) >= offset

    def wake(self, ones: Sequence[Subscribed]) -> None:
        """Have subscriptions that slept go on behind what retention took meanwhile, and count that as lost."""
        cursors = [one.cursor or 0 for one in ones]
        if not cursors:
            return
        floor = self.floor
        self.counts.lost += max(0, floor - min(cursors))
        for one, cursor in zip(ones, cursors, strict=True):
            one.cursor = max(cursor, floor)

    def begin(self) -> None:
        """Follow the stream from then on."""
        self.tasks.spawn(self._follow())
        self.retained.begin()
        self.tasks.spawn(SysTopics(self).run())

    async def _follow(self) -> None:
        """Give each message of the stream to those who are there."""
        try:
            options: Any = {"start": self.next, "on_gap": "skip"}
            async with self.broker.subscribe(self.stream, "#", **options) as subscription:
                while True:
                    await self._take_next(subscription)
                    await asyncio.sleep(0)
        finally:
            self.failed = True
            self._has_moved()

    async def _take_next(self, subscription: AsyncSubscription) -> None:
        """Give the next messages; none of them is held while it waits for others."""
        given = 0
        wakes_nobody = any(topic.startswith("$") for topic in self.stream.settings.topics)  # '#' does not match these
        batch = await subscription.get_many(BATCH, PASSED_S if wakes_nobody else None)
        if not len(batch):
            self.next = max(self.next, subscription.positions[0])
        for delivery in batch:
            given += self._pass(delivery.delivery)
            if given > MOST_IN_A_TURN:
                given = 0
                await asyncio.sleep(0)
        self._has_moved()

    def _pass(self, delivery: Any) -> int:
        """Give a message of the stream to those who are there; return to how many. What makes that fail is left out."""
        try:
            message = message_of(delivery)
            self.recent.add(message)
            self.next = message.offset + 1
            if message.mark:
                self.marks.passes(message)
            given = self._give(message)
            message.forget_encodings()
            return given
        except Exception:
            self.next = delivery.offset + 1
            _logger.exception("a message of the stream is left out by a fault of the server")
            return 0

    def _has_moved(self) -> None:
        for waiting, present in self._late.items():
            if self._has_passed(present) and not waiting.done():
                waiting.set_result(None)

    # Messages --------------------------------------------------------------------------------------------------------

    def store(self, message: Message, rooms: Rooms) -> Stored:
        """Store a message in the stream, and keep facts in the same commit, its retained copy among them."""
        if message.retain:
            self.marks.give(message)
            self.retained.add(message)
            rooms = {**rooms, RETAINED: {message.topic: message.pack() if message.payload else None}}
        headers = message.headers()
        if headers is None and not rooms and len(message.payload) < LARGE_BYTES:
            return self.together.store(message.topic, message.payload)
        if rooms:
            return self.together.alone(
                message.topic, partial(publish_and_keep, self.broker, message.topic, message.payload, headers, rooms)
            )
        return self.together.alone(
            message.topic, partial(self.broker.submit_publish, message.topic, message.payload, headers=headers)
        )

    def forget(self, rooms: Rooms) -> asyncio.Future[Any]:
        """Keep facts, or forget some."""
        self.together.send()
        return keep(self.broker, rooms)

    def fan_out(self, message: Message) -> Stored | None:
        """Give a message with QoS 0 to those who are there; return what tells when it is retained, if it is to be."""
        retained: Stored | None = None
        if message.retain and (not message.payload or self.retained.has_room()):
            self.marks.give_at_once(message)
            self.retained.add(message)
            packed = message.pack() if message.payload else None
            try:
                retained = self.together.alone(message.topic, partial(self._retain, message.topic, packed))
                retained.future.add_done_callback(self._is_retained)
            except QflowError as error:
                self._warn(error)
        self._give(message)
        return retained

    def _retain(self, topic: str, packed: bytes | None) -> asyncio.Future[Any]:
        self.retaining = keep(self.broker, {RETAINED: {topic: packed}})
        return self.retaining

    def _is_retained(self, kept: asyncio.Future[Any]) -> None:
        error = None if kept.cancelled() else kept.exception()
        if error is None:
            self._has_warned = False
        else:
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        """Tell of the first of many messages in a row that are not retained."""
        if not self._has_warned and not isinstance(error, BrokerClosed):
            self._has_warned = True
            _logger.warning("messages with QoS 0 are not retained: %s", error)

    def _give(self, message: Message) -> int:
        """Give a message to all live subscriptions that match; return to how many."""
        found = self._trie.match(message.topic)
        if not found or message.is_expired(self.clock.now_ms()):
            return 0
        targets: dict[Any, list[Subscribed]] = {}
        is_stored = message.offset >= 0
        for one in found:
            if is_stored and one.cursor is not None:
                continue  # it is behind, and reads this from the stream
            others = targets.get(one.owner)
            if others is None:
                targets[one.owner] = [one]
            else:
                others.append(one)
        for owner, matching in targets.items():
            try:
                owner.take(message, matching)
            except Exception:
                _logger.exception("a message is not given to somebody by a fault of the server")
                owner.fail(MqttError(ReasonCode.UNSPECIFIED, "the server has failed"))
        return len(targets)

    # Subscriptions ---------------------------------------------------------------------------------------------------

    def add(self, subscribed: Subscribed) -> None:
        """Have a subscription get messages from now on."""
        self._trie.add(subscribed.filter, subscribed)

    def remove(self, subscribed: Subscribed) -> None:
        """Have a subscription get no messages any more; where it has got all, it says from where on it does not."""
        self._trie.remove(subscribed.filter, subscribed)
        if subscribed.cursor is None:
            subscribed.cursor = self.next

    @property
    def subscriptions(self) -> int:
        """How many there are of connected clients."""
        return len(self._trie)

    # What `SysTopics` asks ------------------------------------------------------------------------------------------

    @property
    def connected(self) -> int:
        """How many clients are."""
        return len(self.sessions)

    def has_subscribers(self, topic: str) -> bool:
        """Tell whether somebody who is there subscribes to a topic."""
        return bool(self._trie.match(topic))

    async def count_retained(self) -> int:
        """Count the retained messages; some of them may have expired."""
        return await in_thread(self.broker, self.records.count_retained)
