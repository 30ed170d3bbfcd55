"""The broker for tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Any, TypeVar, Unpack, overload
from uuid import UUID

from qflow.aio.home import Home
from qflow.aio.loops import Worker, homes_of, running_loop
from qflow.aio.opening import Opening
from qflow.aio.publishing import AsyncPublishing
from qflow.aio.queue import AsyncQueue, plain_queue, queue_of
from qflow.aio.stream import AsyncStream, stream_of
from qflow.aio.subscription import AsyncSubscription, subscription_of
from qflow.aio.transaction import AsyncTogether, AsyncTransaction, transaction_of
from qflow.allocator import share_heap
from qflow.broker import Broker
from qflow.callbacks import call, check_callback
from qflow.config import BrokerSettings, check_names
from qflow.durations import Duration
from qflow.errors import BrokerClosed
from qflow.events import Event
from qflow.message import Headers, Message, encode_headers
from qflow.opening import open as open_broker
from qflow.options import (
    Admits,
    Body,
    BrokerOptions,
    Key,
    Publication,
    QueueChanges,
    QueueOptions,
    ScheduleOptions,
    StreamChanges,
    StreamOptions,
    SubscriptionOptions,
)
from qflow.periodic import Schedule
from qflow.pickling import Unpicklable
from qflow.publishing import Rooms, listed
from qflow.queues.queue import Queue
from qflow.routing.results import PublishResult
from qflow.stats import BrokerStats, CompactionReport, RecoveryReport, RedriveReport, SnapshotReport
from qflow.streams.stream import Stream
from qflow.streams.subscription import Subscription

T = TypeVar("T")


class AsyncBroker(Unpicklable):
    """A spool, its queues and its streams, for tasks of any event loop, and threads beside them.

    Made by `qflow.aio.open`, or around a `qflow.Broker` that is open. `async with` closes it.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        """The same broker for threads; its methods block."""
        self._worker = Worker(broker.path)
        self._long = Worker(broker.path)
        """Does what may take minutes: others wait for the few threads of `_worker`."""
        self._looks = Worker(broker.path)
        """Looks at what is in memory, also while all that `_worker` does waits for a disk that stands still."""
        self._homes = homes_of(broker.engine)
        self._together = AsyncTogether(broker.engine.together, self._homes, self._worker)
        self._publishing = AsyncPublishing(broker.engine.publisher, self._together, self._homes, self._worker)
        self._put_once = partial(self._together.put_once, broker.engine.queues.keys)
        self._queues: dict[Queue, AsyncQueue] = {}
        self._streams: dict[Stream, AsyncStream] = {}

    @property
    def path(self) -> str:
        """The directory of the spool."""
        return self.broker.path

    @property
    def uuid(self) -> UUID:
        """The uuid of the spool, which it keeps as long as it exists; a snapshot has one of its own."""
        return self.broker.uuid

    @property
    def settings(self) -> BrokerSettings:
        """How it was opened."""
        return self.broker.settings

    @property
    def recovery(self) -> RecoveryReport:
        """What was found when the spool was opened."""
        return self.broker.recovery

    @property
    def closed(self) -> bool:
        """Whether it was closed, by any thread or task."""
        return self.broker.closed

    # Queues ------------------------------------------------------------------------------------------------------

    @overload
    async def declare_queue(self, name: str, **settings: Unpack[QueueOptions[Admits]]) -> AsyncQueue[int]: ...
    @overload
    async def declare_queue(self, name: str, **settings: Unpack[QueueOptions]) -> AsyncQueue: ...
    async def declare_queue(self, name: str, **settings: Unpack[QueueOptions]) -> AsyncQueue:
        """Return the queue of this name, making it if there is none; settings as `Broker.declare_queue`."""
        return (await self.declare_queues([name], **settings))[0]

    @overload
    async def declare_queues(
        self, names: Iterable[str], **settings: Unpack[QueueOptions[Admits]]
    ) -> list[AsyncQueue[int]]: ...
    @overload
    async def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions]) -> list[AsyncQueue]: ...
    async def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions]) -> list[AsyncQueue[Any]]:
        """Return the queues of these names, made in one commit where there are none; see `Broker.declare_queues`."""
        declare = partial(self.broker.declare_queues, check_names(names), **settings)
        declared = await self._run(lambda: self.broker.engine.queues.ready(declare()))
        return [self._around(queue) for queue in declared]

    def queue(self, name: str) -> AsyncQueue:
        """Return a queue that exists; see `Broker.queue`."""
        return self._around(self.broker.queue(name))

    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        return self.broker.queues()

    async def alter_queue(self, name: AsyncQueue | Queue | str, **changes: Unpack[QueueChanges]) -> AsyncQueue:
        """Change settings of a queue while it is used; see `Broker.alter_queue`."""
        return self._around(await self._run(partial(self.broker.alter_queue, plain_queue(name), **changes)))

    async def delete_queue(self, name: AsyncQueue | Queue | str) -> None:
        """Delete a queue with all its messages; waiting tasks get `QueueDeleted`. See `Broker.delete_queue`."""
        deleted = plain_queue(name)
        await self._run(partial(self.broker.delete_queue, deleted))
        if isinstance(deleted, Queue):
            deleted = deleted.name
        for queue in [queue for queue in self._queues if queue.name == deleted]:
            del self._queues[queue]

    async def redrive(
        self, name: str, *, to: str | None = None, limit: int | None = None, sequences: Iterable[int] | None = None
    ) -> RedriveReport:
        """Move dead letters back; see `Broker.redrive`. Cancelled, it goes on."""
        return await at_length(self, partial(self.broker.redrive, name, to=to, limit=limit, sequences=sequences))

    async def schedule(
        self, name: str, queue: AsyncQueue | Queue | str, body: Body, **options: Unpack[ScheduleOptions]
    ) -> Schedule:
        """Have a message put into a queue again and again; see `Broker.schedule`."""
        return await self._run(partial(self.broker.schedule, name, plain_queue(queue), body, **options))

    def schedules(self) -> list[Schedule]:
        """Return what is put again and again, by name."""
        return self.broker.schedules()

    async def cancel_schedule(self, name: str) -> None:
        """Put no more messages for a schedule, and forget it; see `Broker.cancel_schedule`."""
        await self._run(partial(self.broker.cancel_schedule, name))

    def _around(self, queue: Queue) -> AsyncQueue:
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = queue_of(
                queue, self.broker.engine.log, self._homes, self._worker, self._looks, self._put_once
            )
        return found

    # Topics ------------------------------------------------------------------------------------------------------

    async def bind(self, queue: AsyncQueue | Queue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; see `Broker.bind`."""
        await self._run(partial(self.broker.bind, plain_queue(queue), topic_filter))

    async def unbind(self, queue: AsyncQueue | Queue | str, topic_filter: str) -> None:
        """Undo `bind`; see `Broker.unbind`."""
        await self._run(partial(self.broker.unbind, plain_queue(queue), topic_filter))

    async def publish(
        self,
        topic: str,
        body: Body,
        *,
        key: Key | None = None,
        headers: Headers | None = None,
        producer: str | None = None,
        number: int | None = None,
        timeout_s: Duration | None = None,
    ) -> PublishResult:
        """Put a message into every stream that takes its topic and every queue bound to it; see `Broker.publish`.

        Cancelled as `AsyncQueue.put`.
        Cost: a share of one commit for all tasks that publish meanwhile, and 12 µs if it goes to one stream.
        """
        return await self._publishing.publish_one((topic, body, key), headers, producer, number, timeout_s)

    async def publish_many(
        self,
        messages: Iterable[Publication],
        *,
        headers: Headers | None = None,
        producer: str | None = None,
        number: int | None = None,
        timeout_s: Duration | None = None,
    ) -> Sequence[PublishResult]:
        """Publish (topic, body) pairs, or (topic, body, key), in one commit, all of them or none; see `publish`."""
        return await self._publishing.publish(listed(messages), headers, producer, number, timeout_s)

    def submit_publish(
        self,
        topic: str,
        body: Body,
        *,
        key: Key | None = None,
        headers: Headers | None = None,
        producer: str | None = None,
        number: int | None = None,
        timeout_s: Duration | None = None,
    ) -> asyncio.Future[PublishResult]:
        """`publish` that does not wait: the future has what it returns, once it is confirmed.

        If there is room where the message goes, and no producer is named, it is handed to the log when this returns,
        and comes before what is published later; else the future is a task that publishes, and does not keep others
        from passing it. Cancelling it cancels a `publish`.
        """
        return self._publishing.submit((topic, body, key), headers, producer, number, timeout_s)

    # Streams -----------------------------------------------------------------------------------------------------

    async def declare_stream(self, name: str, **settings: Unpack[StreamOptions]) -> AsyncStream:
        """Return the stream of this name, making it if there is none; settings as `Broker.declare_stream`."""
        return self._around_stream(await self._run(partial(self.broker.declare_stream, name, **settings)))

    def stream(self, name: AsyncStream | Stream | str) -> AsyncStream:
        """Return a stream that exists; see `Broker.stream`."""
        return self._around_stream(self.broker.stream(_plain_stream(name)))

    def streams(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return self.broker.streams()

    async def alter_stream(
        self, stream: AsyncStream | Stream | str, /, **changes: Unpack[StreamChanges]
    ) -> AsyncStream:
        """Change settings of a stream while it is used; see `Broker.alter_stream`."""
        return self._around_stream(await self._run(partial(self.broker.alter_stream, _plain_stream(stream), **changes)))

    async def delete_stream(self, name: AsyncStream | Stream | str) -> None:
        """Delete a stream with its messages and subscriptions; waiting tasks get `StreamDeleted`."""
        plain = _plain_stream(name)
        await self._run(partial(self.broker.delete_stream, plain))
        name = plain if isinstance(plain, str) else plain.name
        for stream in [stream for stream in self._streams if stream.name == name]:
            del self._streams[stream]

    def subscribe(
        self, stream: AsyncStream | Stream | str, filter: str = "#", **options: Unpack[SubscriptionOptions]
    ) -> Opening[AsyncSubscription]:
        """Return messages of a stream that a filter matches, as they come; options and errors as `Broker.subscribe`.

        `subscription = await broker.subscribe("flights")`, or `async with broker.subscribe("flights") as subscription`.
        Cancelled while it waits, it is closed again.
        """
        return Opening(partial(self._subscribe, _plain_stream(stream), filter, options))

    async def _subscribe(
        self, stream: Stream | str, topic_filter: str, options: SubscriptionOptions
    ) -> AsyncSubscription:
        work = partial(self.broker.subscribe, stream, topic_filter, **options)
        subscription = await self._run(work, Subscription.close)
        return subscription_of(subscription, self._homes, self._worker)

    async def delete_subscription(self, stream: AsyncStream | Stream | str, name: str) -> None:
        """Delete a durable subscription, or a group; see `Broker.delete_subscription`."""
        await self._run(partial(self.broker.delete_subscription, _plain_stream(stream), name))

    def _around_stream(self, stream: Stream) -> AsyncStream:
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = stream_of(stream, self._homes, self._worker, self._looks)
        return found

    # Transactions ------------------------------------------------------------------------------------------------

    def transaction(self, timeout_s: Duration | None = None) -> AsyncTransaction:
        """Return a transaction over any of the queues, for `async with`; see `Broker.transaction`."""
        return transaction_of(self.broker.transaction(timeout_s), self._together, self._homes, self._worker)

    # Looking -----------------------------------------------------------------------------------------------------

    async def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue."""
        return await at_a_glance(self, self.broker.stats)

    async def check(self) -> list[str]:
        """Wait for the tasks' work on the disk, then compare everything; see `Broker.check`."""
        begun = self._worker.begun()

        def check() -> list[str]:
            futures.wait(begun)
            return self.broker.check()

        return await at_length(self, check)

    async def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy what is in the log to a new spool; see `Broker.snapshot`. Cancelled, it completes anyway."""
        return await at_length(self, partial(self.broker.snapshot, path))

    async def compact(self) -> CompactionReport:
        """Give disk back; see `Broker.compact`. Cancelled, it completes anyway."""
        return await at_length(self, self.broker.compact)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have `callback(event)` called in the running loop for each event from now on; see `Broker.on_event`."""
        check_callback(callback, "an event callback")
        home = self._homes.here()
        self.broker.on_event(lambda event: home.call(partial(home.loop.call_soon, call, callback, event)))

    # Closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the spool; waiting tasks get `BrokerClosed`. Calling it again does nothing. See `Broker.close`.

        Cancelled while it waits, the spool is closed all the same.
        """

        def end() -> None:
            try:
                self.broker.close()
            finally:
                self._worker.end()
                self._long.end()
                self._looks.end()

        try:
            await self._run(end)
        except BrokerClosed:  # it was closed elsewhere, or the interpreter is ending, and starts no thread
            end()

    async def _run(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        return await self._worker.run(self._homes.here(), function, undo)

    async def figures(self, since: int = 0) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the number of this look, and what has changed since another one; see `RemoteBroker.figures`."""
        return await at_a_glance(self, partial(self.broker.engine.figures.changes, since))

    async def __aenter__(self) -> AsyncBroker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.broker)[1:]}"


async def put_into_all(broker: AsyncBroker, queues: Sequence[AsyncQueue], body: bytes, headers: Headers) -> None:
    """Put a message into durable queues, without a time to live, in one commit; memory has it once for all of them.

    Cancelled as `AsyncQueue.put`. Cost: with the commit, 0.2 ms for one queue, 0.5 ms for 50, 5 ms for 400.
    """
    await broker._together.put_into_all([queue.queue for queue in queues], Message(body, encode_headers(headers)))


def publish_and_keep(
    broker: AsyncBroker, topic: str, body: bytes, headers: Headers | None, rooms: Rooms
) -> asyncio.Future[PublishResult]:
    """`AsyncBroker.submit_publish` with facts that are kept in the same commit, also where nobody wants the message.

    Raises:
        InvalidArgument: a fact is too large.
    """
    return broker._publishing.submit_and_keep((topic, body, None), headers, rooms)


def submit_all(broker: AsyncBroker, messages: list[tuple[str, bytes]]) -> asyncio.Future[Sequence[PublishResult]]:
    """`publish_many` that does not wait: if there is room, it is handed to the log when this returns."""
    return broker._publishing.submit_many(messages)


def room_of(broker: AsyncBroker, put: asyncio.Future[Any]) -> asyncio.Future[bool]:
    """Return what is done once a put or publish that waits for room has it, True, or has ended without.

    From then on it waits for its sync alone, and what is put next comes behind it. To be called before its task runs.
    """
    return broker._homes.here().room_of(put)


def has_room(broker: AsyncBroker, task: asyncio.Future[Any]) -> None:
    """Tell who waits for the room of a task that the put on which it waits has its own."""
    broker._homes.here().has_room(task)


def keep(broker: AsyncBroker, rooms: Rooms) -> asyncio.Future[Any]:
    """Keep facts, all in one commit; the future is done when they are synced. Errors as `TransactionLog.keep_facts`."""
    return broker._publishing.keep(rooms)


def end_work(broker: AsyncBroker) -> None:
    """End its threads; the spool stays as it is, for whoever closes it."""
    broker._worker.end()
    broker._long.end()
    broker._looks.end()


def forget_unchanged(broker: AsyncBroker, room: str, values: Mapping[str, bytes]) -> asyncio.Future[Any]:
    """Forget facts that still have these values when that is committed; else as `keep`."""
    return broker._publishing.forget_unchanged(room, values)


async def in_thread(broker: AsyncBroker, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Return what a function returns that reads the disk. Cancelled, it is done all the same, and `undo` after it."""
    return await broker._run(function, undo)


async def at_length(broker: AsyncBroker, function: Callable[[], T]) -> T:
    """`in_thread` for what may take minutes: two of these are done at once, and hold up nothing but others of them."""
    return await broker._long.run(broker._homes.here(), function)


async def at_a_glance(broker: AsyncBroker, function: Callable[[], T]) -> T:
    """`in_thread` for a look at what is in memory: the threads for the disk may all wait for a sync meanwhile."""
    return await broker._looks.run(broker._homes.here(), function)


def open(path: str | os.PathLike[str], **options: Unpack[BrokerOptions]) -> Opening[AsyncBroker]:
    """Open a spool for tasks; arguments and errors as `qflow.open`.

    `broker = await qflow.aio.open(path)`, or `async with qflow.aio.open(path) as broker`.
    """
    return Opening(partial(_open, path, options))


async def _open(path: str | os.PathLike[str], options: BrokerOptions) -> AsyncBroker:
    """Open it in a thread; cancelled meanwhile, it is closed again."""
    share_heap()  # before the first thread
    worker = Worker(os.fspath(path))
    try:
        broker = await worker.run(Home(running_loop(), None), partial(open_broker, path, **options), Broker.close)
    finally:
        worker.end()
    return AsyncBroker(broker)


def _plain_stream(stream: AsyncStream | Stream | str) -> Stream | str:
    return stream.stream if isinstance(stream, AsyncStream) else stream
