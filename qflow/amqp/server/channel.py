"""A channel: what its client asks of queues, consumers and messages, method by method."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pamqp import commands
from pamqp.commands import Basic, Confirm, Exchange, Queue, Tx

from qflow.aio.delivery import AsyncDelivery
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.queues import check_not_the_servers, new_name
from qflow.amqp.model.vhost import declared_name
from qflow.amqp.server.client import Client
from qflow.amqp.server.confirms import Confirms
from qflow.amqp.server.consuming import Consumer, give_back, limits_those_there, priority_of, settle
from qflow.amqp.server.holding import SETTLED_AT_ONCE, Held, Holding, lots, settle_all
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.publishing import Publishing
from qflow.amqp.server.units import Unit
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.methods import unchecked
from qflow.errors import QueueEmpty
from qflow.serving.tasks import attempt, ending

TICK_S = 1.0
"""Between looks for heartbeats, and for what takes too long."""
NO_LIMIT = 1 << 30

Handled = Coroutine[Any, Any, None] | None


class Channel:
    """See the module. Calls of one channel come one after the other."""

    def __init__(self, client: Client, number: int) -> None:
        self.number = number
        self.client = client
        self.machine = client.machine
        self.host = client.host
        self.consumers: dict[str, Consumer] = {}
        self.holding = Holding()
        self.confirms: Confirms | None = None
        self.unit: Unit | None = None
        self.publishing = Publishing(self)
        self._last_queue: str | None = None
        self._prefetch = 0
        self._shared_prefetch = 0
        self._unacked = 0
        """Messages that consumers were sent and are not settled; acks in a transaction count when it is committed."""
        self._flows = not client.is_draining
        self._is_over = False
        self._gone: list[Consumer] | None = None
        """While the channel deletes a queue: consumers that have ended; its client is told of them after the answer."""

    # What a consumer sees ----------------------------------------------------------------------------------------

    @property
    def credit(self) -> int:
        if not self._flows:
            return 0
        return self._shared_prefetch - self._unacked if self._shared_prefetch else NO_LIMIT

    def deliver(self, consumer: Consumer, delivery: AsyncDelivery, content: Content) -> bool:
        """Send a message to a client, who has it then; False if the channel is closed."""
        tag = self.holding.last_tag + 1
        if not self.machine.deliver(self.number, consumer.tag, tag, delivery.redelivered, content):
            return False
        if consumer.no_ack:
            self.holding.add(None)
        else:
            self.holding.add(Held(delivery, consumer.hosted, consumer, time.monotonic()))
            consumer.unacked += 1
            self._unacked += 1
        if self._shared_prefetch and self.consumers.pop(consumer.tag, None) is not None:
            self.consumers[consumer.tag] = consumer  # the others come first when there is room again
        self.client.flush_soon()
        return True

    def consumer_gone(self, consumer: Consumer) -> None:
        if self._gone is not None:
            self._gone.append(consumer)
        elif self.consumers.pop(consumer.tag, None) is not None and self.client.cancels_consumers:
            self.machine.send(self.number, Basic.Cancel(consumer.tag, True))
            self.client.flush_soon()

    def fail_channel(self, error: AmqpError) -> None:
        self.client.fail_channel(self, error)

    # Methods -----------------------------------------------------------------------------------------------------

    def handle(self, method: Any) -> Handled:
        """Do what a method says; returns what is left to be awaited."""
        handler = _HANDLERS.get(type(method))
        if handler is None:
            raise AmqpError(ReplyCode.NOT_IMPLEMENTED, f"{method.name} is not for a client to send")
        return handler(self, method)

    def _send(self, method: Any) -> None:
        self.machine.send(self.number, method)

    def _answer(self, asked: Any, answer: Any) -> None:
        """Send an answer, unless its client wants none."""
        if not asked.nowait:
            self.machine.send(self.number, answer)

    def _named(self, name: str) -> str:
        """Return the name of a queue; an empty one is the last that was declared."""
        found = name or self._last_queue
        if not found:
            raise AmqpError(ReplyCode.NOT_FOUND, "no previously declared queue")
        check_not_the_servers(found)
        return found

    def _queue(self, name: str) -> HostedQueue:
        return self.host.queue(self._named(name), self.client.number)

    def channel_flow(self, method: commands.Channel.Flow) -> Handled:
        """Stop or go on sending."""
        self._flows = bool(method.active) and not self.client.is_draining
        self._send(commands.Channel.FlowOk(method.active))
        self._wake_consumers()
        return None

    async def exchange_declare(self, method: Exchange.Declare) -> None:
        name = declared_name(method.exchange)
        if method.passive:
            self.host.check_exchange(name)
        else:
            self.client.may("configure", name)
            arguments = method.arguments or {}
            if "alternate-exchange" in arguments:
                self.client.may("read", name)
                self.client.may("write", str(arguments["alternate-exchange"]))
            await self.host.change(
                lambda model: model.plan_declare_exchange(
                    name,
                    method.exchange_type,
                    durable=method.durable,
                    auto_delete=method.auto_delete,
                    internal=method.internal,
                    arguments=arguments,
                )
            )
        self._answer(method, Exchange.DeclareOk())

    async def exchange_delete(self, method: Exchange.Delete) -> None:
        self.client.may("configure", method.exchange)
        await self.host.change(lambda model: model.plan_delete_exchange(method.exchange, if_unused=method.if_unused))
        self._answer(method, Exchange.DeleteOk())

    async def exchange_bind(self, method: Exchange.Bind) -> None:
        self.client.may("write", method.destination)
        self.client.may("read", method.source)
        where = (method.destination, method.source, method.routing_key, method.arguments or {})
        await self.host.change(lambda model: model.plan_bind_exchange(*where))
        self._answer(method, Exchange.BindOk())

    async def exchange_unbind(self, method: Exchange.Unbind) -> None:
        self.client.may("write", method.destination)
        self.client.may("read", method.source)
        where = (method.destination, method.source, method.routing_key, method.arguments or {})
        await self.host.change(lambda model: model.plan_unbind_exchange(*where))
        self._answer(method, Exchange.UnbindOk())

    async def queue_declare(self, method: Queue.Declare) -> None:
        await self.publishing.done()
        name = declared_name(method.queue)
        if method.passive:
            hosted = self.host.queue(name or self._named(name), self.client.number)
            hosted.used()
        else:
            asked = name or new_name()
            self.client.may("configure", asked)
            arguments = method.arguments or {}
            if "x-dead-letter-exchange" in arguments:
                self.client.may("read", asked)
                self.client.may("write", str(arguments["x-dead-letter-exchange"]))
            hosted = await self.host.declare_queue(
                self.client.number,
                name,
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
                arguments=arguments,
            )
        self._last_queue = hosted.name
        if not method.nowait:
            self._send(unchecked(Queue.DeclareOk, hosted.name, hosted.store.ready, len(hosted.consumers)))

    async def queue_bind(self, method: Queue.Bind) -> None:
        name = self._named(method.queue)
        self.client.may("write", name)
        self.client.may("read", method.exchange)
        key = method.routing_key or ("" if method.queue else name)
        await self.host.bind_queue(name, method.exchange, key, method.arguments or {}, self.client.number)
        self._answer(method, Queue.BindOk())

    async def queue_unbind(self, method: Queue.Unbind) -> None:
        name = self._named(method.queue)
        self.client.may("write", name)
        self.client.may("read", method.exchange)
        where = (name, method.exchange, method.routing_key, method.arguments or {}, self.client.number)
        await self.host.change(lambda model: model.plan_unbind_queue(*where))
        self._send(Queue.UnbindOk())

    async def queue_purge(self, method: Queue.Purge) -> None:
        await self.publishing.done()
        hosted = self._queue(method.queue)
        self.client.may("read", hosted.name)
        count = await hosted.store.purge()
        self._answer(method, Queue.PurgeOk(count))

    async def queue_delete(self, method: Queue.Delete) -> None:
        await self.publishing.done()
        name = self._named(method.queue)
        self.client.may("configure", name)
        self._gone = []
        try:
            count = await self.host.delete_queue(name, self.client.number, method.if_unused, method.if_empty)
            self._answer(method, Queue.DeleteOk(count))
        finally:
            gone, self._gone = self._gone, None
            for consumer in gone:
                self.consumer_gone(consumer)

    def qos(self, method: Basic.Qos) -> Handled:
        if method.prefetch_size:
            raise AmqpError(ReplyCode.NOT_IMPLEMENTED, f"prefetch_size!=0 ({method.prefetch_size})")
        self._shared_prefetch = method.prefetch_count if method.global_ else 0
        if not method.global_:
            self._prefetch = method.prefetch_count
            for consumer in self.consumers.values() if limits_those_there(self.machine.client_properties) else ():
                consumer.prefetch = method.prefetch_count
        self._wake_consumers()
        self._send(Basic.QosOk())
        return None

    async def consume(self, method: Basic.Consume) -> None:
        hosted = self._queue(method.queue)
        self.client.may("read", hosted.name)
        tag = method.consumer_tag or self.client.new_tag()
        if tag in self.consumers:
            raise AmqpError(ReplyCode.NOT_ALLOWED, f"attempt to reuse consumer tag '{tag}'")
        consumer = Consumer(
            self,
            hosted,
            tag,
            no_ack=bool(method.no_ack),
            exclusive=bool(method.exclusive),
            prefetch=self._prefetch,
            priority=priority_of(method.arguments),
        )
        hosted.store.check_consumer(self._prefetch or self._shared_prefetch, bool(method.no_ack))
        hosted.add(consumer)
        try:
            await consumer.open(method.arguments or {}, self.client.machine.client_properties)
            self.client.may("read", hosted.name)  # still
        except BaseException:
            await consumer.stop()
            hosted.remove(consumer)
            raise
        if self._is_over:  # another task has ended the channel meanwhile
            await consumer.stop()
            await self.host.consumer_left(consumer)
            return
        self.consumers[tag] = consumer
        self._answer(method, Basic.ConsumeOk(tag))
        consumer.start()

    async def cancel(self, method: Basic.Cancel) -> None:
        consumer = self.consumers.pop(method.consumer_tag or "", None)
        if consumer is not None:
            await consumer.stop()
            await self.host.consumer_left(consumer)
        self._answer(method, Basic.CancelOk(method.consumer_tag))

    async def get(self, method: Basic.Get) -> None:
        await self.publishing.done()
        hosted = self._queue(method.queue)
        self.client.may("read", hosted.name)
        hosted.check_may_get()
        hosted.used()
        try:
            if self.client.is_draining:
                raise QueueEmpty("the server ends")
            delivery, content = await hosted.store.get(not self.client.holds)
        except QueueEmpty:
            self._send(Basic.GetEmpty())
            return
        tag = self.holding.last_tag + 1
        if not self.machine.get_ok(self.number, tag, delivery.redelivered, hosted.store.ready, content):
            await give_back(delivery)  # another task has ended the channel meanwhile
            return
        if method.no_ack:
            settle(delivery)
        self.holding.add(None if method.no_ack else Held(delivery, hosted, None, time.monotonic()))

    def ack(self, method: Basic.Ack) -> Handled:
        taken = self.holding.take(method.delivery_tag, method.multiple)
        if self.unit is not None:
            self.unit.ack(taken)
            return None
        if len(taken) > SETTLED_AT_ONCE:
            return self.holding.settle(taken, self._left)
        settle_all(taken.values())
        for held in taken.values():
            self._left(held)
        return None

    def nack(self, method: Basic.Nack) -> Handled:
        return self._return(method.delivery_tag, method.multiple, method.requeue)

    def reject(self, method: Basic.Reject) -> Handled:
        return self._return(method.delivery_tag or 0, False, method.requeue)

    def _return(self, tag: int, multiple: bool, requeue: bool) -> Handled:
        taken = self.holding.take(tag, multiple)
        if self.unit is not None:
            self.unit.nack(taken, requeue)
            return None
        return self.give_back(taken, requeue)

    async def give_back(self, taken: dict[int, Held], requeue: bool) -> None:
        """Have messages go back to their queues, or to where dead letters go; what is left over is held again."""
        await self.holding.give_back(taken, requeue, self._left)

    async def recover(self, method: Basic.Recover) -> None:
        if not method.requeue:
            raise AmqpError(ReplyCode.NOT_IMPLEMENTED, "requeue=false")
        await self.give_back(self.holding.take_all(), True)
        self._send(Basic.RecoverOk())

    async def recover_async(self, _: Basic.RecoverAsync) -> None:
        await self.give_back(self.holding.take_all(), True)

    def confirm_select(self, method: Confirm.Select) -> Handled:
        if self.unit is not None:
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, "cannot switch from tx to confirm mode")
        if self.confirms is None:
            self.confirms = Confirms(partial(self.machine.confirm, self.number), self.client.flush)
        self._answer(method, Confirm.SelectOk())
        return None

    def tx_select(self, _: Tx.Select) -> Handled:
        if self.confirms is not None:
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, "cannot switch from confirm to tx mode")
        if self.unit is None:
            self.unit = Unit(self)
        self._send(Tx.SelectOk())
        return None

    async def tx_commit(self, _: Tx.Commit) -> None:
        await self._unit().commit()
        self._send(Tx.CommitOk())

    async def tx_rollback(self, _: Tx.Rollback) -> None:
        self._unit().rollback()
        self._send(Tx.RollbackOk())

    def _unit(self) -> Unit:
        if self.unit is None:
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, "channel is not transactional")
        return self.unit

    # What the client holds ---------------------------------------------------------------------------------------

    def _left(self, held: Held) -> None:
        """Let the consumer of a message that was settled have another."""
        consumer = held.consumer
        if consumer is not None:
            consumer.unacked -= 1
            self._unacked -= 1
            if self._shared_prefetch - self._unacked == 1:  # there was no room
                self._wake_consumers()
            consumer.wake()
            consumer.hosted.wake()

    async def settled(self, taken: dict[int, Held]) -> None:
        """Let consumers have others for messages that a transaction settled."""
        async for _, tags in lots(taken, SETTLED_AT_ONCE):
            for tag in tags:
                self._left(taken[tag])

    def _wake_consumers(self) -> None:
        for consumer in self.consumers.values():
            consumer.wake()

    async def stop_consumers(self) -> None:
        """Send no more messages; what the client holds it can still settle."""
        self._flows = False
        for consumer in list(self.consumers.values()):
            await consumer.stop()

    def tick(self, now: float) -> None:
        """End the channel if a message has been held for too long."""
        if (overdue := self.holding.overdue(now)) is not None:
            tag, timeout_s = overdue
            text = f"delivery acknowledgement on channel {self.number} timed out: delivery tag {tag}"
            text += f". Timeout value used: {timeout_s * 1000:.0f} ms"
            self.fail_channel(AmqpError(ReplyCode.PRECONDITION_FAILED, text))

    @ending
    async def end(self) -> None:
        """Stop consumers, and have what the client holds go back; also if this task is cancelled meanwhile."""
        self._is_over = True
        consumers, self.consumers = list(self.consumers.values()), {}
        for consumer in consumers:
            await consumer.stop()
        self.publishing.end()
        if self.unit is not None:
            await self.unit.end()
        await self.holding.end(self.client.warn)
        for consumer in consumers:
            await attempt(self.host.consumer_left(consumer), self.client.warn)


_HANDLERS: dict[type, Callable[[Channel, Any], Handled]] = {
    commands.Channel.Flow: Channel.channel_flow,
    Exchange.Declare: Channel.exchange_declare,
    Exchange.Delete: Channel.exchange_delete,
    Exchange.Bind: Channel.exchange_bind,
    Exchange.Unbind: Channel.exchange_unbind,
    Queue.Declare: Channel.queue_declare,
    Queue.Bind: Channel.queue_bind,
    Queue.Unbind: Channel.queue_unbind,
    Queue.Purge: Channel.queue_purge,
    Queue.Delete: Channel.queue_delete,
    Basic.Qos: Channel.qos,
    Basic.Consume: Channel.consume,
    Basic.Cancel: Channel.cancel,
    Basic.Get: Channel.get,
    Basic.Ack: Channel.ack,
    Basic.Nack: Channel.nack,
    Basic.Reject: Channel.reject,
    Basic.Recover: Channel.recover,
    Basic.RecoverAsync: Channel.recover_async,
    Confirm.Select: Channel.confirm_select,
    Tx.Select: Channel.tx_select,
    Tx.Commit: Channel.tx_commit,
    Tx.Rollback: Channel.tx_rollback,
}
