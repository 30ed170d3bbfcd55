"""Dead letters whose target blocks: they wait in a queue of their own, so that those for others go on.

Only queues that a program declared block. Each that a dead letter has had to wait for has such a queue, in which order
is kept: as long as one waits in it, those that follow to the same target wait behind it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from qflow.aio.broker import AsyncBroker
from qflow.aio.delivery import AsyncDelivery
from qflow.aio.queue import AsyncQueue
from qflow.aio.transaction import AsyncTransaction
from qflow.amqp.server.content import content_of, read_properties
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.server.stores import DEAD_LETTERS, QueueStore
from qflow.errors import (
    BrokerClosed,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    QflowError,
    QueueDeleted,
    TransactionTooLarge,
)
from qflow.loggers import get_logger
from qflow.queues.queue import parts_of
from qflow.serving.tasks import Tasks

PREFIX = DEAD_LETTERS + "/"
"""How the names of queues begin in which they wait; the name of the target in qflow follows."""
AGAIN_S = 1.0
"""After a failure, it is tried again after so long."""

_logger = get_logger("qflow.amqp")


class HeldUp:
    """See the module. One a server."""

    def __init__(self, broker: AsyncBroker, tasks: Tasks) -> None:
        self._broker = broker
        self._tasks = tasks
        self._queues: dict[str, AsyncQueue] = {}
        """By the name of the target in the broker."""

    async def find(self) -> None:
        """Take up the queues that an earlier server left."""
        for name in self._broker.queues():
            if name.startswith(PREFIX):
                if len(self._broker.queue(name)):
                    self._take_up(name.removeprefix(PREFIX), self._broker.queue(name))
                    continue
                try:
                    await self._broker.delete_queue(name)
                except QflowError as error:
                    _logger.warning("queue %r, which is empty, is not deleted: %s", name, error)

    def is_for(self, hosted: HostedQueue) -> bool:
        """Tell whether dead letters wait for a target."""
        queue = self._queues.get(hosted.store.queue.name) if isinstance(hosted.store, QueueStore) else None
        return queue is not None and len(queue) > 0

    async def put_in(self, transaction: AsyncTransaction, hosted: HostedQueue, parcel: Parcel) -> None:
        """Have a dead letter wait for its target, from when a transaction commits."""
        assert isinstance(hosted.store, QueueStore)
        name = hosted.store.queue.name
        queue = self._queues.get(name)
        if queue is None or parts_of(queue.queue).context.ended is not None:
            queue = await self._broker.declare_queue(PREFIX + name)
            self._take_up(name, queue)
        await transaction.put(queue, parcel.body, **parcel.options(queue.settings))

    def _take_up(self, target: str, queue: AsyncQueue) -> None:
        if self._queues.get(target) is not queue:
            self._queues[target] = queue
            self._tasks.spawn(self._run(target, queue))

    async def _run(self, target: str, waiting: AsyncQueue) -> None:
        """Have dead letters go to their target, one by one as it has room, until the broker is closed."""
        while True:
            try:
                await self._pass_on(await waiting.get(), target)
            except BrokerClosed:
                return
            except QueueDeleted as error:
                _logger.error("dead letters that waited for queue %r were deleted: %s", target, error)
                return
            except QflowError as error:
                _logger.warning("dead letters wait for queue %r: %s", target, error)
                await asyncio.sleep(AGAIN_S)

    async def _pass_on(self, delivery: AsyncDelivery, target: str) -> None:
        """Put a dead letter into its target; where that is deleted, or never takes it, the letter is dropped."""
        try:
            async with self._broker.transaction() as transaction:
                await transaction.ack(delivery)
                with suppress(NotFound):
                    queue = self._broker.queue(target)
                    await transaction.put(queue, delivery.body, **_parcel_of(delivery).options(queue.settings))
        except (MessageTooLarge, InvalidArgument, TransactionTooLarge) as error:
            _logger.warning("a dead letter is dropped, as queue %r never takes it: %s", target, error)
            await delivery.ack()
        except BaseException as error:
            with suppress(QflowError):  # cancelled in its commit, it is there all the same
                await delivery.nack()
            if not isinstance(error, QueueDeleted):  # else it is looked for anew
                raise


def _parcel_of(delivery: AsyncDelivery) -> Parcel:
    """Return a dead letter as it was put."""
    read = read_properties(content_of(delivery.headers, delivery.queue, b"").properties)
    return Parcel(delivery.body, delivery.headers, read.durable, read.priority, read.ttl_s, None)
