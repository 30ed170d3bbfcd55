"""The broker as tasks use it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from qflow.aio.loops import Home, Homes, Worker
from qflow.aio.queue import AsyncQueue, Body
from qflow.aio.transaction import AsyncTogether, AsyncTransaction
from qflow.broker import Broker, open_broker
from qflow.errors import BrokerClosed
from qflow.events import Event
from qflow.message import Headers
from qflow.queues.queue import Queue
from qflow.routing import PublishResult
from qflow.stats import BrokerStats, CompactionReport, RecoveryReport, SnapshotReport


class AsyncBroker:
    """A spool and its queues, for tasks of any event loop, and threads beside them.

    Made by `qflow.aio.open`, or around a `qflow.Broker` that is open. `async with` closes it.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        """The same broker for threads; its methods block."""
        self._worker = Worker(broker.path)
        self._homes = Homes(broker.log)
        self._together = AsyncTogether(broker.together, self._homes, self._worker)
        self._queues: dict[Queue, AsyncQueue] = {}

    @property
    def path(self) -> str:
        """The directory of the spool."""
        return self.broker.path

    @property
    def recovery(self) -> RecoveryReport:
        """What was found when the spool was opened."""
        return self.broker.recovery

    @property
    def closed(self) -> bool:
        """It was closed, by anybody."""
        return self.broker.closed

    # Queues ------------------------------------------------------------------------------------------------------

    async def declare_queue(self, name: str, **settings: Any) -> AsyncQueue:
        """Return the queue of this name, making it if there is none; settings as `Broker.declare_queue`."""
        return self._around(await self._run(partial(self.broker.declare_queue, name, **settings)))

    def queue(self, name: str) -> AsyncQueue:
        """Return a queue that exists; see `Broker.queue`."""
        return self._around(self.broker.queue(name))

    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        return self.broker.queues()

    async def alter_queue(self, name: str, **changes: Any) -> AsyncQueue:
        """Change settings of a queue while it is used; see `Broker.alter_queue`."""
        return self._around(await self._run(partial(self.broker.alter_queue, name, **changes)))

    async def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages; waiting tasks get `QueueDeleted`. See `Broker.delete_queue`."""
        await self._run(partial(self.broker.delete_queue, name))
        for queue in [queue for queue in self._queues if queue.name == name]:
            del self._queues[queue]

    def _around(self, queue: Queue) -> AsyncQueue:
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = AsyncQueue(queue, self.broker.log, self._homes, self._worker)
        return found

    # Topics ------------------------------------------------------------------------------------------------------

    async def bind(self, queue: AsyncQueue | Queue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; see `Broker.bind`."""
        await self._run(partial(self.broker.bind, _plain(queue), topic_filter))

    async def unbind(self, queue: AsyncQueue | Queue | str, topic_filter: str) -> None:
        """Undo `bind`; see `Broker.unbind`."""
        await self._run(partial(self.broker.unbind, _plain(queue), topic_filter))

    async def publish(self, topic: str, body: Body, *, headers: Headers | None = None) -> PublishResult:
        """Put a message into every queue that is bound to its topic, all of them or none; see `Broker.publish`.

        Cancelled as `AsyncQueue.put`.
        """
        steps = self.broker.steps_of(topic, body, headers)
        return self.broker.result_of(await self._together.commit(steps, []))

    async def publish_many(
        self, messages: Iterable[tuple[str, Body]], *, headers: Headers | None = None
    ) -> list[PublishResult]:
        """Publish (topic, body) pairs in one commit, all of them or none; see `publish`."""
        groups = [self.broker.steps_of(topic, body, headers) for topic, body in messages]
        places = iter(await self._together.commit([step for steps in groups for step in steps], []))
        return [self.broker.result_of([next(places) for _ in steps]) for steps in groups]

    def submit_publish(
        self, topic: str, body: Body, *, headers: Headers | None = None
    ) -> asyncio.Future[PublishResult]:
        """`publish` as a task: it joins a batch when the task has its first turn."""
        return asyncio.get_running_loop().create_task(self.publish(topic, body, headers=headers))

    def transaction(self, timeout_s: float | None = None) -> AsyncTransaction:
        """Return a transaction over any of the queues, for `async with`; see `Broker.transaction`."""
        return AsyncTransaction(self.broker.transaction(timeout_s), self._together, self._homes, self._worker)

    # Looking -----------------------------------------------------------------------------------------------------

    async def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue."""
        return await self._worker.run(self._homes.here(), self.broker.stats)

    async def check(self) -> list[str]:
        """Return what does not agree, in words, once nothing is being moved for tasks; see `Broker.check`."""
        begun = self._worker.begun()

        def check() -> list[str]:
            futures.wait(begun)
            return self.broker.check()

        return await self._worker.run(self._homes.here(), check)

    async def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy what is in the log to a new spool; see `Broker.snapshot`. Cancelled, it is made all the same."""
        return await self._worker.run(self._homes.here(), partial(self.broker.snapshot, path))

    async def compact(self) -> CompactionReport:
        """Give disk back; see `Broker.compact`. Cancelled, it is done all the same."""
        return await self._worker.run(self._homes.here(), self.broker.compact)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have `callback(event)` called in the running loop for each event from now on; see `Broker.on_event`."""
        home = self._homes.here()
        self.broker.on_event(lambda event: home.call(partial(home.loop.call_soon, callback, event)))

    # Closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the spool; waiting tasks get `BrokerClosed`. Twice is fine. See `Broker.close`.

        Cancelled while it waits, the spool is closed all the same.
        """

        def end() -> None:
            try:
                self.broker.close()
            finally:
                self._worker.end()

        with suppress(BrokerClosed):  # by somebody else
            await self._run(end)

    async def _run(self, function: Callable[[], Any], undo: Callable[[Any], object] | None = None) -> Any:
        return await self._worker.run(self._homes.here(), function, undo)

    async def __aenter__(self) -> AsyncBroker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.broker)[1:]}"


class Opening:
    """A spool that is about to be opened: `await` it, or `async with` it."""

    def __init__(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._path = path
        self._options = options
        self._opened: AsyncBroker | None = None

    def __await__(self) -> Generator[Any, None, AsyncBroker]:
        return self._open().__await__()

    async def _open(self) -> AsyncBroker:
        """Open it in a thread; cancelled meanwhile, it is closed again."""
        worker = Worker(os.fspath(self._path))
        try:
            broker = await worker.run(
                Home(asyncio.get_running_loop(), None),
                partial(open_broker, self._path, **self._options),
                lambda opened: opened.close(),
            )
        finally:
            worker.end()
        return AsyncBroker(broker)

    async def __aenter__(self) -> AsyncBroker:
        self._opened = await self
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.close()


def open(path: str | os.PathLike[str], **options: Any) -> Opening:
    """Open a spool for tasks; arguments and errors as `qflow.open`.

    `broker = await qflow.aio.open(path)`, or `async with qflow.aio.open(path) as broker`.
    """
    return Opening(path, options)


def _plain(queue: AsyncQueue | Queue | str) -> Queue | str:
    return queue.queue if isinstance(queue, AsyncQueue) else queue
