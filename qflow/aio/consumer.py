"""Consumers for tasks: messages of a queue are handed to an async callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Protocol

from qflow.aio.delivery import AsyncDelivery, Settling
from qflow.aio.home import Home
from qflow.callbacks import is_failure, run
from qflow.delivery import Delivery
from qflow.errors import AlreadySettled, QflowError
from qflow.held_batch import HeldBatch
from qflow.memory.waiting import in_place
from qflow.queues import consumer
from qflow.queues.consumer import GONE, Listed, Troubles, consuming_taker
from qflow.takers import Taker


class AsyncListed(Protocol):
    """What knows the consumers of a queue, and takes messages out of what they acquired."""

    def leave_batch(self, batch: HeldBatch, index: int) -> Delivery | None: ...
    def give_up_batch(self, batch: HeldBatch) -> None: ...
    def list_consumer(self, consumer: Listed) -> None: ...
    def forget_consumer(self, consumer: Listed) -> None: ...
    def tell_failure(self, sequence: int | None, error: BaseException) -> None: ...
    def tell_end(self, error: QflowError) -> None: ...


class AsyncConsumed(Settling, Protocol):
    """The queue that a consumer takes from."""

    @property
    def name(self) -> str: ...
    @property
    def consumed(self) -> AsyncListed: ...
    async def collect(self, most: int, timeout_s: float | None, taker: Taker) -> HeldBatch: ...


class ConsumerTasks:
    """Tasks that hand a queue's messages to a callback."""

    def __init__(
        self,
        queue: AsyncConsumed,
        home: Home,
        callback: Callable[[AsyncDelivery], object],
        prefetch: int,
        concurrency: int,
        name: str | None,
    ) -> None:
        self.taker = consuming_taker(queue.name, name)
        self._queue = queue
        self._consumed = queue.consumed
        self._home = home
        self._callback = callback
        self._prefetch = prefetch
        self._stopped = False
        self._batch: HeldBatch | None = None
        self._index = 0
        self._turn = asyncio.Lock()
        self._troubles = Troubles(self._consumed.tell_failure)
        self._current: dict[asyncio.Task[None], Delivery] = {}
        in_place(partial(self._consumed.list_consumer, self))
        home.begin(self._give_up)
        self._tasks = [home.loop.create_task(self._run()) for _ in range(concurrency)]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @property
    def running(self) -> bool:
        """It takes messages; False once it was closed, its queue was deleted or the broker closed."""
        return not self._stopped

    def stop(self) -> None:
        """Take no more messages; the callbacks that are running are not waited for. From any thread."""
        self._stopped = True
        self._home.call(self._stop_idle)

    def end(self) -> None:
        """Take no more messages, and put back at once those not handed out. Under the lock of the queue."""
        self.stop()
        if self._batch is not None:
            in_place(partial(self._consumed.give_up_batch, self._batch))

    async def close(self) -> None:
        """See `AsyncConsumer.close`."""
        self._stopped = True
        self._stop_idle()
        others = [task for task in self._tasks if not task.done()]
        if others and asyncio.current_task() not in others:
            await asyncio.wait(others)

    def holds(self, held: Iterable[Any]) -> bool:
        """Tell whether it holds one of these deliveries or batches."""
        current = list(self._current.values())
        return any(one is self._batch or any(one is other for other in current) for one in held)

    def _stop_idle(self) -> None:
        for task in self._tasks:
            if task not in self._current:
                task.cancel()

    async def _run(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        try:
            while not self._stopped:
                delivery = await self._next()
                if delivery is None:
                    continue
                self._current[me] = delivery
                try:
                    await self._handle(delivery, me)
                finally:
                    del self._current[me]
        except GONE as error:
            if not self._stopped:
                self._stopped = True
                self._consumed.tell_end(error)

    def _task_ended(self, _: object) -> None:
        if all(task.done() for task in self._tasks):
            self._home.end(self._give_up)

    def _give_up(self) -> None:
        """Give back what it has, for no task goes on."""
        self._stopped = True
        with ExitStack() as each:  # whichever of them fails
            each.callback(self._consumed.forget_consumer, self)
            if self._batch is not None:
                each.callback(self._consumed.give_up_batch, self._batch)
            for delivery in self._current.values():
                each.callback(_return, delivery)

    async def _next(self) -> Delivery | None:
        """Take the next message of the batch that all tasks share; None if it is gone.

        A task that comes from a callback takes it at once. One that waits is woken when the one before has taken a
        message, so no more are than there are messages, whatever their number; the first of them gets the next batch.
        """
        batch = self._batch
        if batch is not None and self._index < batch.total:
            return self._take(batch)
        async with self._turn:
            batch = self._batch
            if batch is None or self._index >= batch.total:
                self._batch = None
                await asyncio.sleep(0)  # a callback that never waits must not starve other tasks
                try:
                    self._batch = batch = await self._queue.collect(self._prefetch, None, self.taker)
                except GONE:
                    raise
                except Exception as error:
                    self._troubles.tell(error)
                    await asyncio.sleep(consumer.AGAIN_S)
                    return None
                self._troubles.end()
                self._index = 0
            return self._take(batch)

    def _take(self, batch: HeldBatch) -> Delivery | None:
        index, self._index = self._index, self._index + 1
        try:
            return self._consumed.leave_batch(batch, index)
        except AlreadySettled:
            self._batch = None  # it was held for too long: all of it went back
            return None

    async def _handle(self, delivery: Delivery, task: asyncio.Task[None]) -> None:
        raised: BaseException | None = None
        try:
            async with AsyncDelivery(delivery, self._queue) as held:
                try:
                    await run(self._callback, held)
                except BaseException as error:
                    raised = error
                    raise
        except BaseException as error:
            if not is_failure(error, task) or (error is not raised and isinstance(error, GONE)):
                raise
            self._consumed.tell_failure(delivery.sequence, error)
        finally:
            raised = None  # its traceback leads here


class AsyncConsumer:
    """Tasks that hand a queue's messages to a callback. Made by `AsyncQueue.consume`; `async with` closes it."""

    _name: str
    _tasks: ConsumerTasks

    @property
    def running(self) -> bool:
        """It takes messages; False once it was closed, its queue was deleted or the broker closed."""
        return self._tasks.running

    def stop(self) -> None:
        """Take no more messages; the callbacks that are running are not waited for. From any thread."""
        self._tasks.stop()

    async def close(self) -> None:
        """Stop, and wait for the callbacks that are running; called by a callback, it waits for none.

        Messages not handed out go back to their places and are not counted as delivered. Cancelled while it
        waits, the consumer is stopped all the same.
        """
        await self._tasks.close()

    async def __aenter__(self) -> AsyncConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncConsumer of {self._name!r}{'' if self.running else ', closed'}>"


def consumer_of(
    queue: AsyncConsumed,
    home: Home,
    callback: Callable[[AsyncDelivery], object],
    prefetch: int,
    concurrency: int,
    name: str | None,
) -> AsyncConsumer:
    """Return a running consumer."""
    made = AsyncConsumer()
    made._name = queue.name
    made._tasks = ConsumerTasks(queue, home, callback, prefetch, concurrency, name)
    return made


def _return(delivery: Delivery) -> None:
    with suppress(AlreadySettled):
        delivery.nack()
