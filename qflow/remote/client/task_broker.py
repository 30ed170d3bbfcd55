"""The broker of a spool that another process owns, for tasks."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Unpack

from qflow.aio.loops import running_loop
from qflow.aio.opening import Opening
from qflow.callbacks import call, check_callback
from qflow.config import QueueSettings, StreamSettings, check_name, is_url, parse_timeout
from qflow.descriptors import occupy_standard
from qflow.durations import Duration
from qflow.errors import BrokerClosed
from qflow.events import Event
from qflow.loggers import get_logger
from qflow.message import Headers
from qflow.options import (
    Body,
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
from qflow.remote.client import replies, requests, stream_requests
from qflow.remote.client.broker import AnyRemoteBroker, event_of
from qflow.remote.client.connecting import AGAIN_S, gone, open_socket, path_of, silent
from qflow.remote.client.task_queue import AsyncRemoteQueue, queue_of
from qflow.remote.client.task_streams import AsyncRemoteStream, AsyncRemoteSubscription, stream_of, subscription_of
from qflow.remote.client.task_transaction import AsyncRemoteTransaction, transaction_of
from qflow.remote.client.tasks import TaskConnection
from qflow.routing.results import PublishResult
from qflow.serving.extras import load
from qflow.stats import BrokerStats, CompactionReport, RecoveryReport, RedriveReport, SnapshotReport
from qflow.tokens import token_of

_logger = get_logger("qflow")


class AsyncRemoteBroker(AnyRemoteBroker):
    """A spool that another process owns, for tasks of one event loop. Made by `qflow.aio.connect`.

    Arguments, results and errors are those of `qflow.aio.AsyncBroker`; see there. What is known there at once is asked
    here: `queues` and `streams` are awaited, and `queue` and `stream` may be, to learn whether there is one.
    """

    _connection: TaskConnection
    _welcome: dict[str, Any]
    _callbacks: list[Callable[[Event], object]]

    @property
    def recovery(self) -> RecoveryReport:
        """What its owner found when it opened the spool, as of the connecting."""
        return replies.report(RecoveryReport, self._welcome["recovery"])

    # Queues ------------------------------------------------------------------------------------------------------

    async def declare_queue(self, name: str, **settings: Unpack[QueueOptions]) -> AsyncRemoteQueue:
        """Return the queue of this name, making it if there is none; see `qflow.Broker.declare_queue`."""
        return (await self.declare_queues([name], **settings))[0]

    async def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions]) -> list[AsyncRemoteQueue]:
        """Return the queues of these names, made where there are none; see `qflow.Broker.declare_queues`."""
        checked, request = requests.declare_queues(names, settings)
        found: list[QueueSettings] = await self._connection.call(request)
        return [queue_of(self._connection, name, its) for name, its in zip(checked, found, strict=True)]

    def queue(self, name: str) -> AsyncRemoteQueue:
        """Return the queue of this name; awaited, it raises `NotFound` if there is none, else its first call does."""
        return queue_of(self._connection, check_name(name))

    async def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        return await self._connection.call(requests.QUEUES)

    async def alter_queue(self, name: AsyncRemoteQueue | str, **changes: Unpack[QueueChanges]) -> AsyncRemoteQueue:
        """Change settings of a queue while it is used; see `qflow.Broker.alter_queue`."""
        settings: QueueSettings = await self._connection.call(
            requests.alter_queue(self._connection.uuid, name, changes)
        )
        return queue_of(self._connection, requests.name_of("queue", name, self._connection.uuid), settings)

    async def delete_queue(self, name: AsyncRemoteQueue | str) -> None:
        """Delete a queue with all its messages; see `qflow.Broker.delete_queue`."""
        await self._connection.call(requests.delete_queue(self._connection.uuid, name))

    async def schedule(
        self, name: str, queue: AsyncRemoteQueue | str, body: Body, **options: Unpack[ScheduleOptions]
    ) -> Schedule:
        """Have a message put into a queue again and again; see `qflow.Broker.schedule`."""
        return await self._connection.call(requests.schedule(self._connection.uuid, name, queue, body, options))

    async def schedules(self) -> list[Schedule]:
        """Return what is put again and again, by name."""
        return await self._connection.call(requests.SCHEDULES)

    async def cancel_schedule(self, name: str) -> None:
        """Put no more messages for a schedule, and forget it; see `qflow.Broker.cancel_schedule`."""
        await self._connection.call(requests.cancel_schedule(name))

    async def redrive(
        self, name: str, *, to: str | None = None, limit: int | None = None, sequences: Iterable[int] | None = None
    ) -> RedriveReport:
        """Move dead letters back to where they came from; see `qflow.Broker.redrive`."""
        return await self._connection.call(requests.redrive(name, to, limit, sequences))

    # Topics ------------------------------------------------------------------------------------------------------

    async def bind(self, queue: AsyncRemoteQueue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; see `qflow.Broker.bind`."""
        await self._connection.call(requests.bind(self._connection.uuid, queue, topic_filter))

    async def unbind(self, queue: AsyncRemoteQueue | str, topic_filter: str) -> None:
        """Undo `bind`; see `qflow.Broker.unbind`."""
        await self._connection.call(requests.unbind(self._connection.uuid, queue, topic_filter))

    async def publish(
        self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None,
        producer: str | None = None, number: int | None = None, timeout_s: Duration | None = None,
    ) -> PublishResult:  # fmt: skip
        """Put a message into every stream that takes its topic and every queue bound to it; see `qflow.Broker.publish`.

        Raises:
            InDoubt: the connection ended before the answer came; it may have been published.
        """
        return await self._connection.call(requests.publish(topic, body, key, headers, producer, number, timeout_s))

    async def publish_many(
        self, messages: Iterable[Publication], *, headers: Headers | None = None, producer: str | None = None,
        number: int | None = None, timeout_s: Duration | None = None,
    ) -> Sequence[PublishResult]:  # fmt: skip
        """Publish (topic, body) pairs, or (topic, body, key), in one commit, all of them or none; see `publish`."""
        request = requests.publish_many(messages, headers, producer, number, timeout_s)
        return [] if request is None else await self._connection.call(request)

    def submit_publish(
        self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None,
        producer: str | None = None, number: int | None = None, timeout_s: Duration | None = None,
    ) -> asyncio.Future[PublishResult]:  # fmt: skip
        """`publish` that does not wait: the future has the result once it is confirmed."""
        return self._connection.submit(requests.publish(topic, body, key, headers, producer, number, timeout_s))

    # Streams -----------------------------------------------------------------------------------------------------

    async def declare_stream(self, name: str, **settings: Unpack[StreamOptions]) -> AsyncRemoteStream:
        """Return the stream of this name, making it if there is none; see `qflow.Broker.declare_stream`."""
        known: StreamSettings = await self._connection.call(stream_requests.declare_stream(name, settings))
        return stream_of(self._connection, name, known)

    def stream(self, name: AsyncRemoteStream | str) -> AsyncRemoteStream:
        """Return the stream of this name; awaited, it raises `NotFound` if there is none, else its first call does."""
        return stream_of(self._connection, requests.name_of("stream", name, self._connection.uuid))

    async def streams(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return await self._connection.call(stream_requests.STREAMS)

    async def alter_stream(
        self, stream: AsyncRemoteStream | str, /, **changes: Unpack[StreamChanges]
    ) -> AsyncRemoteStream:
        """Change settings of a stream while it is used; see `qflow.Broker.alter_stream`."""
        settings: StreamSettings = await self._connection.call(
            stream_requests.alter_stream(self._connection.uuid, stream, changes)
        )
        return stream_of(self._connection, requests.name_of("stream", stream, self._connection.uuid), settings)

    async def delete_stream(self, name: AsyncRemoteStream | str) -> None:
        """Delete a stream with its messages and subscriptions; see `qflow.Broker.delete_stream`."""
        await self._connection.call(stream_requests.delete_stream(self._connection.uuid, name))

    def subscribe(
        self, stream: AsyncRemoteStream | str, filter: str = "#", **options: Unpack[SubscriptionOptions]
    ) -> Opening[AsyncRemoteSubscription]:
        """Return messages of a stream that a filter matches, by `await` or `async with`; see `qflow.Broker.subscribe`.

        It ends with the connection, which gives back what it held. Cancelled while it waits, it is closed again: the
        next one of this connection waits for that.
        """
        request = stream_requests.subscribe(self._connection.uuid, stream, filter, options)
        return Opening(partial(self._connection.open, request, partial(subscription_of, self._connection)))

    async def delete_subscription(self, stream: AsyncRemoteStream | str, name: str) -> None:
        """Delete a durable subscription, or a group; see `qflow.Broker.delete_subscription`."""
        await self._connection.call(stream_requests.delete_subscription(self._connection.uuid, stream, name))

    # Transactions and events -------------------------------------------------------------------------------------

    def transaction(self, timeout_s: Duration | None = None) -> AsyncRemoteTransaction:
        """Return a transaction over any of the queues, for `async with`; see `AsyncRemoteTransaction`."""
        self._connection.check_open()
        return transaction_of(self._connection, self.settings.max_transaction_bytes, parse_timeout(timeout_s))

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have `callback(event)` called in the loop for each event of the owner from now on.

        What it raises is logged by the logger `qflow`; see `qflow.Broker.on_event`.
        """
        check_callback(callback, "an event callback")
        if not self._callbacks:
            self._connection.tell(requests.EVENTS)
            self._connection.listen(self._tell)
        self._callbacks.append(callback)

    def _tell(self, head: dict[str, Any]) -> None:
        event = event_of(head)
        if event is not None:
            loop = asyncio.get_running_loop()
            for callback in self._callbacks:
                loop.call_soon(call, callback, event)

    # Looking, and copies -----------------------------------------------------------------------------------------

    async def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue."""
        return await self._connection.call(requests.STATS)

    async def figures(self, since: int = 0) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the number of this look, and what has changed since another one; see `RemoteBroker.figures`."""
        return await self._connection.call(requests.figures(since))

    async def check(self) -> list[str]:
        """Have the owner compare everything; see `qflow.Broker.check`."""
        return await self._connection.call(requests.CHECK)

    async def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy what is in the log to a new spool, on the owner's host; see `qflow.Broker.snapshot`."""
        return await self._connection.call(requests.snapshot(self._connection.target, path))

    async def compact(self) -> CompactionReport:
        """Give disk back; see `qflow.Broker.compact`."""
        return await self._connection.call(requests.COMPACT)

    # Closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the connection: what was delivered and not settled goes back; calls that wait get `BrokerClosed`.

        Acks that were made are heard, if the owner hears them within a second. The spool stays open with its owner.
        Calling it again does nothing.
        """
        await self._connection.close()

    async def __aenter__(self) -> AsyncRemoteBroker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def broker_of(connection: TaskConnection, welcome: dict[str, Any]) -> AsyncRemoteBroker:
    """Return the broker of a connection, once the owner has answered."""
    made = AsyncRemoteBroker()
    made._connection, made._welcome, made._callbacks = connection, welcome, []
    connection.welcomed(welcome)
    return made


def connect(
    target: str | os.PathLike[str],
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    timeout_s: Duration = 10.0,
) -> Opening[AsyncRemoteBroker]:
    """Use a spool that another process owns, from tasks of the running loop; arguments and errors as `qflow.connect`.

    `broker = await qflow.aio.connect(path)`, or `async with qflow.aio.connect(path) as broker`.
    Close it: the loop keeps it, and the owner what it holds, until then.
    """
    return Opening(partial(_connect, target, (token, token_file), (ca, cert, key), timeout_s))


async def _connect(
    target: str | os.PathLike[str],
    token: tuple[str | None, str | os.PathLike[str] | None],
    files: tuple[str | os.PathLike[str] | None, ...],
    timeout_s: Duration,
) -> AsyncRemoteBroker:
    running_loop()  # first: without one, nothing is opened
    occupy_standard()
    timeout = parse_timeout(timeout_s)
    tunnel: Any = None
    if is_url(target):
        module = load("qflow.flight.client", needs="pyarrow", what="a URL")
        path = os.fspath(target)
        tunnel = module.outlet(path, token_of(*token), files)
    else:
        path = path_of(target, *token, *files)
    connection = TaskConnection(path, None if tunnel is None else tunnel.reason)
    try:
        async with asyncio.timeout(timeout):
            connection.socket = one = await _socket(path) if tunnel is None else tunnel.socket
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=one)
            except BaseException:
                one.close()
                raise
            welcome: dict[str, Any] = await connection.call(requests.hello(os.getpid()))
        return broker_of(connection, welcome)
    except BaseException as error:
        await connection.close()
        if isinstance(error, TimeoutError):
            raise silent(path, timeout) from None
        if isinstance(error, BrokerClosed):
            raise gone(path) if tunnel is None else tunnel.explained() from error
        raise


async def _socket(path: str) -> socket.socket:
    """Return a connected socket; while too many others are about to be let in, try again."""
    while True:
        try:
            return open_socket(path)
        except BlockingIOError:
            await asyncio.sleep(AGAIN_S)
