"""Publishes of a channel: routed, handed to queues, returned where nobody takes them, confirmed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

from qflow.aio.broker import put_into_all, room_of
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.arguments import REJECT_DLX
from qflow.amqp.server.client import until_done
from qflow.amqp.server.confirms import MOST_OPEN, Confirms, Unconfirmed
from qflow.amqp.server.content import Properties, content_of, headers_of, read_properties
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.server.stores import FILTER_VALUE, QueueStore
from qflow.amqp.server.units import Unit, UnitChannel
from qflow.amqp.wire.events import Published
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.properties import changed
from qflow.errors import (
    InDoubt,
    InvalidArgument,
    MessageTooLarge,
    QflowError,
    QueueDeleted,
    QueueFull,
    StreamDeleted,
    TransactionTooLarge,
)

LARGEST_BYTES = 16 * 1024
"""A larger body is put on its own: there is nothing to gain."""
RUN_BYTES = 256 * 1024
"""A run ends with this. They are put together or not at all, so a queue has to have room for so much."""


class Run:
    """Publishes that follow each other into one queue, of which only the bodies differ: one put for all of them.

    It ends before its connection does anything else, so nothing changes what its first one found.
    """

    __slots__ = ("bodies", "hosted", "left_bytes", "parcel", "publish", "said", "store")

    def __init__(
        self,
        said: tuple[str, str, bytes],
        hosted: HostedQueue,
        store: QueueStore,
        parcel: Parcel,
        publish: Unconfirmed | None,
    ) -> None:
        self.said = said
        """Exchange, routing key and properties, as the client sent them."""
        self.hosted = hosted
        self.store = store
        self.parcel = parcel
        """The first one."""
        self.publish = publish
        """Its confirm; None if there are none."""
        self.bodies = [parcel.body]
        self.left_bytes = RUN_BYTES - len(parcel.body)

    def add(self, event: Published) -> bool:
        """Take one more message; False if it does not belong to the run."""
        _, exchange, routing_key, _, immediate, properties, body = event
        size = len(body)
        if size > LARGEST_BYTES or size > self.left_bytes or immediate:
            return False
        if (exchange, routing_key, properties) != self.said:
            return False
        self.bodies.append(body)
        self.left_bytes -= size
        return True


PUBLISH = 60, 40
"""Numbers of class and method."""
FEW = 8
"""Up to so many queues take a message each on its own; of more, up to so many puts wait for room at once."""
TURN = 64
"""After puts into so many queues, others have their turn."""
_REFUSES_NOTHING = type(None), QueueDeleted, StreamDeleted
"""How a put may end whose message is in all its queues that are there."""
DELAY = "x-delay"
LONGEST_DELAY_S = 365 * 86_400.0
FILTER_FIELD = bytes([len(FILTER_VALUE)]) + FILTER_VALUE.encode()
_COPIES = (b"\x02CC", b"\x03BCC")


class PublishingChannel(UnitChannel, Protocol):
    """A channel, as far as its publishes see it."""

    @property
    def number(self) -> int: ...
    @property
    def confirms(self) -> Confirms | None: ...
    @property
    def unit(self) -> Unit | None: ...
    def fail_channel(self, error: AmqpError) -> None: ...


class Publishing:
    """See the module."""

    def __init__(self, channel: PublishingChannel) -> None:
        self._channel = channel
        self._client = channel.client
        self._host = channel.host
        self._waiting: list[asyncio.Future[Any]] = []
        self.pending = 0
        """Puts that are not done."""
        self._all_done: asyncio.Future[None] | None = None
        self._run: Run | None = None
        self._is_in_doubt = False
        self._is_over = False

    def goes_on(self, event: Published) -> bool:
        """Take a message if it is like the one before: `hand_over` puts both."""
        run = self._run
        if run is None or event.channel != self._channel.number or not run.add(event):
            return False
        if run.publish is not None:
            assert self._channel.confirms is not None
            self._channel.confirms.extend(run.publish)
        return True

    def hand_over(self) -> Coroutine[Any, Any, None] | None:
        """Put what was taken of late; returns what is to be awaited before the next one, if anything is.

        To be called before the connection waits, or does anything else.
        """
        run, self._run = self._run, None
        if run is None:
            return None
        puts = self._put_run(run)
        return self._handed_over(run.publish, [put for put in puts if isinstance(put, asyncio.Task)])

    def publish(
        self, exchange: str, routing_key: str, mandatory: bool, raw: bytes, body: bytes
    ) -> Coroutine[Any, Any, None] | None:
        """Hand a message to its queues, or begin a run with it; returns what is to be awaited before the next one."""
        channel, client = self._channel, self._client
        client.may("write", exchange)
        properties = read_properties(raw)
        if properties.user_id is not None:
            client.check_user_id(properties.user_id)
        queues, properties = self._route(exchange, routing_key, properties)
        if channel.unit is not None:
            parcel = self._parcel(exchange, routing_key, properties, body)
            channel.unit.publish(queues, parcel, mandatory, (exchange, routing_key, properties))
            return None
        publish = None if channel.confirms is None else channel.confirms.begin()
        blocked: list[asyncio.Future[Any]] = []
        if queues:
            parcel = self._parcel(exchange, routing_key, properties, body)
            store = queues[0].store_of_runs(parcel) if len(queues) == 1 else None
            if store is not None:
                self._run = Run((exchange, routing_key, raw), queues[0], store, parcel, publish)
                return None
            if len(queues) > FEW:
                return self._put_into_many(queues, parcel, publish)
            for hosted in queues:
                put = self._put(hosted, parcel, publish)
                if isinstance(put, asyncio.Task):  # it waits for room
                    blocked.append(put)
        elif mandatory:
            self.return_(exchange, routing_key, properties, body)
        return self._handed_over(publish, blocked)

    def _handed_over(
        self, publish: Unconfirmed | None, blocked: list[asyncio.Future[Any]]
    ) -> Coroutine[Any, Any, None] | None:
        """Have a publish be confirmed when its puts are done; returns what is to be awaited before the next one."""
        if publish is not None:
            confirms = self._channel.confirms
            assert confirms is not None
            confirms.end(publish)
            if not blocked and len(confirms) >= MOST_OPEN:
                return confirms.room()
        return self._until_put(blocked) if blocked else None

    def return_(self, exchange: str, routing_key: str, properties: Properties, body: bytes) -> None:
        """Send a message back that no queue takes."""
        channel = self._channel
        content = Content(exchange, routing_key, properties.raw, body)
        channel.client.machine.return_(channel.number, ReplyCode.NO_ROUTE, "NO_ROUTE", content)

    def _route(self, exchange: str, routing_key: str, properties: Properties) -> tuple[list[HostedQueue], Properties]:
        """Return the queues that take a message, and its properties as its consumers see them: without BCC."""
        if not any(name in properties.table for name in _COPIES):
            return self._host.route(exchange, [routing_key], properties), properties
        headers = properties.headers()
        keys = [routing_key]
        for name in ("CC", "BCC"):
            copies = headers.get(name, [])
            if not isinstance(copies, list) or not all(isinstance(key, str) for key in copies):
                raise AmqpError(ReplyCode.PRECONDITION_FAILED, f"header '{name}' is no array of text")
            keys += copies
        queues = self._host.route(exchange, keys, properties)
        if "BCC" in headers:
            properties = read_properties(changed(properties.raw, {}, dropped=["BCC"]))
        return queues, properties

    def _parcel(self, exchange: str, routing_key: str, properties: Properties, body: bytes) -> Parcel:
        filter_value = properties.headers().get(FILTER_VALUE) if FILTER_FIELD in properties.table else None
        return Parcel(
            body,
            headers_of(properties, exchange, routing_key),
            properties.durable,
            properties.priority,
            properties.ttl_s,
            _delay_s(properties) if self._host.is_delayed(exchange) else None,
            filter_value if isinstance(filter_value, str) else None,
        )

    def _put_run(self, run: Run) -> list[asyncio.Future[Any]]:
        """Put the messages of a run: together, but where the broker takes less at once."""
        if len(run.bodies) > 1:
            try:
                put = run.hosted.submit_run(run.store, run.parcel, run.bodies)
            except (MessageTooLarge, TransactionTooLarge):
                pass  # what is too large on its own is refused below
            except QflowError as error:
                return [self._follow(_failed(error), run.publish)]
            else:
                return [self._follow(put, run.publish)]
        puts: list[asyncio.Future[Any]] = []
        try:
            for body in run.bodies:
                puts.append(self._put(run.hosted, run.parcel._replace(body=body), run.publish))
        except AmqpError as error:
            self._refuse(error, run.publish)
        return puts

    def _put(self, hosted: HostedQueue, parcel: Parcel, publish: Unconfirmed | None) -> asyncio.Future[Any]:
        try:
            put = self._put_limited(hosted, parcel) if hosted.has_limit else hosted.submit(parcel)
        except (MessageTooLarge, InvalidArgument) as error:
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, str(error)) from error
        except QflowError as error:
            put = _failed(error)
        return self._follow(put, publish)

    def _put_limited(self, hosted: HostedQueue, parcel: Parcel) -> asyncio.Future[Any]:
        if hosted.refuses:
            if hosted.arguments.overflow == REJECT_DLX:
                content = content_of(parcel.headers, hosted.name, parcel.body)
                return asyncio.ensure_future(self._host.refuse(hosted, content))
            raise QueueFull(f"{hosted.where} is full")
        put = hosted.submit(parcel)
        hosted.comes(parcel)

        def done(_: object) -> None:
            hosted.came(parcel)
            self._host.trim_soon(hosted)

        put.add_done_callback(done)
        return put

    async def _put_into_many(self, queues: list[HostedQueue], parcel: Parcel, publish: Unconfirmed | None) -> None:
        """Put a message into many queues: others have their turn meanwhile, and few of its puts wait for room."""
        self._waiting = blocked = []
        many, others = _sharing(queues, parcel)
        if many:
            blocked.append(self._follow(asyncio.ensure_future(self._put_many(many, parcel)), publish))
        left = deque(sorted(others, key=lambda hosted: hosted.may_block))  # those that wait for memory alone come first
        await self._fill(left, parcel, publish, blocked)
        if left and not self._is_over:
            blocked = [self._follow(asyncio.ensure_future(self._put_rest(left, parcel, publish, blocked)), publish)]
        if (rest := self._handed_over(publish, blocked)) is not None:
            await rest

    async def _fill(
        self,
        left: deque[HostedQueue],
        parcel: Parcel,
        publish: Unconfirmed | None,
        waiting: list[asyncio.Future[Any]],
    ) -> None:
        """Put a message into queues that are left, until `FEW` puts wait for room."""
        count = 0
        while left and len(waiting) < FEW and not self._is_over:
            put = self._put(left.popleft(), parcel, publish)
            if isinstance(put, asyncio.Task):
                waiting.append(put)
            count += 1
            if count % TURN == 0:
                await asyncio.sleep(0)

    async def _put_rest(
        self,
        left: deque[HostedQueue],
        parcel: Parcel,
        publish: Unconfirmed | None,
        waiting: list[asyncio.Future[Any]],
    ) -> None:
        """Put a message into queues that are left, as puts get room that wait for it."""
        try:
            while waiting:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                waiting[:] = [put for put in waiting if not put.done()]
                await self._fill(left, parcel, publish, waiting)
        except AmqpError as error:
            self._refuse(error, publish)
        except asyncio.CancelledError:
            for put in waiting:
                put.cancel()
            raise

    def _refuse(self, error: AmqpError, publish: Unconfirmed | None) -> None:
        """End the channel because of a publish that nobody waits for."""
        if publish is not None:
            publish.refused = True  # confirms may be told before the channel is closed
        error.class_id, error.method_id = PUBLISH
        self._channel.fail_channel(error)

    async def _put_many(self, stores: list[QueueStore], parcel: Parcel) -> None:
        while stores:
            try:
                await put_into_all(self._host.broker, [one.queue for one in stores], parcel.body, parcel.headers)
                return
            except QueueDeleted:
                left = [one for one in stores if not one.is_gone]
                if len(left) == len(stores):
                    raise
                stores = left

    def _follow(self, put: asyncio.Future[Any], publish: Unconfirmed | None) -> asyncio.Future[Any]:
        """Have a publish wait for a put; return the put."""
        self.pending += 1
        if publish is not None:
            publish.waiting += 1
        put.add_done_callback(partial(self._done, publish))
        return put

    def _done(self, publish: Unconfirmed | None, put: asyncio.Future[Any]) -> None:
        """Look how a put ended: one that nobody confirms ends its channel where its message could not be kept."""
        self.pending -= 1
        error = None if put.cancelled() else put.exception()
        if isinstance(error, InDoubt):
            self._end_in_doubt(error)
        elif publish is not None and self._channel.confirms is not None:
            publish.refused |= put.cancelled() or not isinstance(error, _REFUSES_NOTHING)
            self._channel.confirms.end(publish)
        if not self.pending and self._all_done is not None and not self._all_done.done():
            self._all_done.set_result(None)
        if error is None or isinstance(error, InDoubt | QueueFull | QueueDeleted | StreamDeleted):
            return
        if self._channel.confirms is None:
            self._channel.fail_channel(AmqpError(ReplyCode.PRECONDITION_FAILED, f"a message was not kept: {error}"))
        else:
            self._client.warn("publishes are refused: %s", error)

    def _end_in_doubt(self, error: InDoubt) -> None:
        """End the connection in place of a confirm that nobody can give, behind those of what was kept before."""
        if self._is_in_doubt:
            return
        self._is_in_doubt = True
        text = f"it is not known whether what was published last is kept: {error}"
        self._client.warn("%s", text)
        asyncio.get_running_loop().call_soon(self._client.fail, AmqpError(ReplyCode.INTERNAL_ERROR, text))

    async def _until_put(self, puts: list[asyncio.Future[Any]]) -> None:
        """Return when puts have the room that they wait for, or were given up; nobody waits for their sync."""
        self._waiting = puts
        try:
            await until_done(self._client, [room_of(self._host.broker, put) for put in puts])
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._waiting = []
        if self._channel.confirms is not None:
            await self._channel.confirms.room()

    async def done(self) -> None:
        """Return when what was published is in its queues: what the channel asks next sees it there."""
        while self.pending:
            self._all_done = asyncio.get_running_loop().create_future()
            await self._all_done

    def end(self) -> None:
        """Give up what waits for room, and put nothing more."""
        self._is_over = True
        for put in self._waiting:
            put.cancel()


def _sharing(queues: list[HostedQueue], parcel: Parcel) -> tuple[list[QueueStore], list[HostedQueue]]:
    """Return the queues that may share a message, as nothing is said of the one that is not of all; and the others."""
    sharing: list[QueueStore] = []
    others: list[HostedQueue] = []
    for hosted in queues:
        store = hosted.store
        if isinstance(store, QueueStore) and not hosted.has_limit and not hosted.lives_no_time(parcel):
            settings = store.queue.settings
            if settings.durable and settings.ttl_s is parcel.ttl_s is None and settings.priorities == 1:
                sharing.append(store)
                continue
        others.append(hosted)
    return (sharing, others) if parcel.durable and not parcel.delay_s else ([], queues)


def _failed(error: QflowError) -> asyncio.Future[Any]:
    put = asyncio.get_running_loop().create_future()
    put.set_exception(error)
    return put


def _delay_s(properties: Properties) -> float | None:
    """Return how long a message says that it is to wait; None for not at all."""
    delay = properties.headers().get(DELAY)
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not delay > 0:  # it may be no number, too
        return None
    return min(delay / 1000, LONGEST_DELAY_S)
