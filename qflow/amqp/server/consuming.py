"""Consumers: messages of a queue on their way to a client, as many as it may hold and its connection takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import attrs

from qflow.aio.delivery import AsyncDelivery
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.server.client import Client
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.stores import Source
from qflow.amqp.wire.frames import Content
from qflow.errors import AlreadySettled, BrokerClosed, QflowError, QueueDeleted, StreamDeleted
from qflow.loggers import get_logger
from qflow.memory.waiting import in_place
from qflow.serving.tasks import Turn

AT_ONCE = 64
"""The most messages a consumer takes from its queue at once."""
BUFFER_BYTES = 256 * 1024
"""A consumer takes no more while its connection has so much to write."""

_logger = get_logger("qflow.amqp")


class Outlet(Protocol):
    """Where a consumer's messages go; see `channel.Channel`."""

    @property
    def client(self) -> Client: ...
    @property
    def credit(self) -> int:
        """How many messages may be sent now, for all consumers of the channel; 0 while its flow is stopped."""

    def deliver(self, consumer: Consumer, delivery: AsyncDelivery, content: Content) -> bool:
        """Send a message; False if the channel is closed."""

    def consumer_gone(self, consumer: Consumer) -> None:
        """Its queue was deleted."""

    def fail_channel(self, error: AmqpError) -> None: ...


@attrs.define(eq=False)
class Consumer:
    """Takes messages of one queue for one client. A task of its own; it ends with its channel, or its queue."""

    _outlet: Outlet
    hosted: HostedQueue
    tag: str
    no_ack: bool = attrs.field(kw_only=True)
    exclusive: bool = attrs.field(kw_only=True)
    prefetch: int = attrs.field(kw_only=True)
    """The most messages it may hold; 0 = no limit."""
    priority: int = attrs.field(default=0, kw_only=True)
    """Those with a higher one are served first."""
    unacked: int = attrs.field(default=0, init=False)
    _waits: bool = attrs.field(default=False, init=False)
    _steps_back: bool = attrs.field(default=False, init=False)
    _source: Source | None = attrs.field(default=None, init=False)
    _average: int = attrs.field(default=BUFFER_BYTES, init=False)
    """Bytes of a message, lately."""
    _wake: asyncio.Future[None] | None = attrs.field(default=None, init=False)
    _task: asyncio.Task[None] | None = attrs.field(default=None, init=False)

    async def open(self, arguments: Mapping[str, Any], client: Mapping[str, Any] | None = None) -> None:
        """Look where it is to begin. Statistics call it by its tag and the name of its connection, if there is one.

        Raises:
            AmqpError: PRECONDITION_FAILED; an argument is wrong.
        """
        told = (client or {}).get("connection_name")
        name = f"{self.tag} ({told})" if told and isinstance(told, str) else self.tag
        self._source = await self.hosted.store.open(arguments, name)

    def start(self) -> None:
        """Begin to take messages."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Look again whether a message may be taken: one was settled, or it is this consumer's turn now."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def look_again(self) -> None:
        """Look whether it is still this consumer's turn, also if it waits for a message already."""
        if self.hosted.is_served(self):
            self.wake()
        elif self._waits and not self._steps_back and self._task is not None:
            self._steps_back = True
            self._task.cancel()

    async def stop(self) -> None:
        """Take no more messages; what it took and did not send goes back. Returns when that is done."""
        task = self._task
        if task is asyncio.current_task():
            return
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._source is not None:
            with suppress(QflowError):  # it is closed, or gone
                await self._source.close()

    @property
    def may_have_more(self) -> bool:
        """Its client may be sent a message now."""
        return self._credit() > 0 and not self._outlet.client.is_full

    def _most(self) -> int:
        """Return how many messages may be taken now."""
        return self._credit() if self.hosted.is_served(self) else 0

    def _credit(self) -> int:
        most = min(AT_ONCE, self._outlet.credit, max(1, BUFFER_BYTES // self._average))
        return min(most, self.prefetch - self.unacked) if self.prefetch and not self.no_ack else most

    async def _run(self) -> None:
        try:
            await self._serve()
        except (QueueDeleted, StreamDeleted):
            self._outlet.consumer_gone(self)
        except BrokerClosed:
            self._outlet.client.fail(AmqpError(ReplyCode.CONNECTION_FORCED, "the broker is closed"))
        except QflowError as error:
            _logger.warning("queue %r: %s", self.hosted.name, error)
            self._outlet.fail_channel(AmqpError(ReplyCode.INTERNAL_ERROR, f"queue {self.hosted.name!r}: {error}"))
        except ConnectionError:
            return  # the session, which reads, ends
        except Exception as error:
            _logger.error("queue %r: a message cannot be delivered: %r", self.hosted.name, error)
            self._outlet.fail_channel(AmqpError(ReplyCode.INTERNAL_ERROR, f"queue {self.hosted.name!r}: {error!r}"))

    async def _serve(self) -> None:
        """Take messages until the channel is closed, or the queue is gone."""
        while True:
            await self._drain()
            most = self._most()
            if most > 0:
                if not await self._take(most):
                    return
                await asyncio.sleep(0)  # a deep queue and a client that reads fast would let no other task run
            elif self.hosted.store.is_gone:
                self._outlet.consumer_gone(self)
                return
            else:
                await self._wait()

    async def _drain(self) -> None:
        """Wait until the client has read what it was sent: meanwhile those after this one have their turn."""
        if self._outlet.client.is_full:
            self.hosted.wake()
            while self._outlet.client.is_full:
                await self._outlet.client.drain()
            self.hosted.wake()

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    async def _take(self, most: int) -> bool:
        """Take messages and send them; False if the channel is closed, so that no other is to be taken."""
        assert self._source is not None
        self._waits = True
        try:
            batch = await self._source.get_many(most)
        except asyncio.CancelledError:
            if not self._steps_back or self._task is None or self._task.uncancel():
                raise
            return True
        finally:
            self._waits = self._steps_back = False
        sent = 0
        try:
            await self._outlet.client.turns.begin(len(batch))
            turn = Turn()
            for delivery in batch:
                await self._drain()
                if turn.is_over():
                    await asyncio.sleep(0)
                    await self._outlet.client.turns.begin(len(batch) - sent)
                    turn = Turn()
                if self._credit() <= 0:
                    return True  # other consumers of the channel have used it: what is left is for whoever has some
                if not self._send(delivery):
                    return False
                sent += 1
            return True
        finally:
            self._source.give_up(batch, sent)
            if self._credit() <= 0:
                self.hosted.wake()

    def _send(self, delivery: AsyncDelivery) -> bool:
        """Send a message; False if the channel is closed."""
        assert self._source is not None
        content = self._source.content_of(delivery)
        if content is None:
            return True
        self._average = (7 * self._average + len(content.body)) // 8 + 1
        if not self._outlet.deliver(self, delivery, content):
            return False
        if self.no_ack:
            settle(delivery)
        else:
            self._source.hand_out(delivery)
        return True


def priority_of(arguments: Mapping[str, Any] | None) -> int:
    """Return the priority of a consumer."""
    priority = (arguments or {}).get("x-priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise AmqpError(ReplyCode.PRECONDITION_FAILED, f"invalid arg 'x-priority': {priority!r} is no integer")
    return priority


def limits_those_there(client: Mapping[str, Any]) -> bool:
    """Tell whether a client means its consumers that are there, too, by a `qos` without `global`.

    kombu does, of any server but RabbitMQ 3: Celery has a worker take one more for each task that is for later.
    """
    return client.get("product") == "py-amqp"


async def give_back(delivery: AsyncDelivery) -> None:
    """Have a message go back to its queue."""
    with suppress(AlreadySettled, QueueDeleted, StreamDeleted, BrokerClosed):  # it is there, or has nowhere to go
        await delivery.nack()


def settle(delivery: AsyncDelivery) -> None:
    """Settle a message; one that is gone, with its queue, needs it no more."""
    in_place(partial(_ack, delivery))


def _ack(delivery: AsyncDelivery) -> None:
    with suppress(AlreadySettled, QueueDeleted, StreamDeleted):
        delivery.delivery.ack()
