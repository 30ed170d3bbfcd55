"""The broker of a spool that another process owns, for threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Unpack
from uuid import UUID

from qflow.callbacks import check_callback
from qflow.config import BrokerSettings, QueueSettings, StreamSettings, parse_timeout
from qflow.durations import Duration
from qflow.events import Event, EventKind
from qflow.listeners import Bell, Listeners
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
from qflow.pickling import Unpicklable
from qflow.remote.client import requests, stream_requests
from qflow.remote.client.queue import RemoteQueue, queue_of
from qflow.remote.client.streams import RemoteStream, RemoteSubscription, stream_of, subscription_of
from qflow.remote.client.threads import Connection
from qflow.remote.client.transaction import RemoteTransaction, transaction_of
from qflow.restoring import Item
from qflow.routing.results import PublishResult
from qflow.starting import start
from qflow.stats import BrokerStats, CompactionReport, RecoveryReport, RedriveReport, SnapshotReport


def event_of(head: dict[str, Any]) -> Event | None:
    """Return the event that a notice tells of; None if it is none, or of a kind that is not known here."""
    told = head.get("event")
    if not isinstance(told, dict) or told.get("kind") not in [kind.value for kind in EventKind]:
        return None
    return Event(EventKind(told["kind"]), told["queue"], told["detail"], told["time_s"])


class Events:
    """Callbacks of one connection, called by a thread of their own: they may use it, wait for futures, and be slow."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bell = Bell()
        self._listeners = Listeners(connection.target, self._bell, time.time)
        self._thread: threading.Thread | None = None
        self._is_asked = False
        """The owner tells of events."""

    def add(self, callback: Callable[[Event], object]) -> None:
        """Tell `callback` of each event from now on."""
        check_callback(callback, "an event callback")
        self._connection.locked(self._begin)
        if not self._is_asked:
            self._connection.call(requests.EVENTS)  # twice is fine
            self._is_asked = True
        self._listeners.add(callback)

    def _begin(self) -> None:
        """Under the lock of the connection."""
        self._connection.check_open()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="qflow-remote-events", daemon=True)
            start(thread)
            self._thread = thread
            self._connection.listen(self._note, self._bell.end)

    def _note(self, head: dict[str, Any]) -> None:
        event = event_of(head)
        if event is not None:
            self._listeners.note(event)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._bell.wait(None)
            self._listeners.tell_all(BaseException)


class AnyRemoteBroker(Unpicklable):
    """What the brokers of threads and of tasks tell without asking the owner."""

    _connection: Any
    _welcome: dict[str, Any]

    @property
    def path(self) -> str:
        """The directory of the spool, as its owner has it."""
        return str(self._welcome["path"])

    @property
    def uuid(self) -> UUID:
        """The uuid of the spool."""
        return UUID(self._welcome["uuid"])

    @property
    def settings(self) -> BrokerSettings:
        """How its owner opened it."""
        return BrokerSettings.from_dict(self._welcome["settings"])

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return bool(self._connection.closed)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}{', closed' if self.closed else ''}>"


class RemoteBroker(AnyRemoteBroker):
    """A spool that another process owns, and its queues. Made by `qflow.connect`; every method is thread-safe.

    Arguments, results and errors are those of `qflow.Broker`; see there. `close` ends the connection, not the broker.
    """

    _connection: Connection
    _events: Events

    @property
    def recovery(self) -> RecoveryReport:
        """What its owner found when it opened the spool, and damaged since. Cost: a round trip."""
        return self._connection.call(requests.RECOVERY)

    # Queues -------------------------------------------------------------------------------------------------------

    def declare_queue(self, name: str, **settings: Unpack[QueueOptions]) -> RemoteQueue:
        """Return the queue of this name, making it if there is none; see `qflow.Broker.declare_queue`."""
        return self.declare_queues([name], **settings)[0]

    def declare_queues(self, names: Iterable[str], **settings: Unpack[QueueOptions]) -> list[RemoteQueue]:
        """Return the queues of these names, made where there are none; see `qflow.Broker.declare_queues`."""
        checked, request = requests.declare_queues(names, settings)
        found: list[QueueSettings] = self._connection.call(request)
        return [queue_of(self._connection, name, its) for name, its in zip(checked, found, strict=True)]

    def alter_queue(self, name: RemoteQueue | str, **changes: Unpack[QueueChanges]) -> RemoteQueue:
        """Change settings of a queue while it is used; see `qflow.Broker.alter_queue`."""
        settings: QueueSettings = self._connection.call(requests.alter_queue(self._connection.uuid, name, changes))
        return queue_of(self._connection, requests.name_of("queue", name, self._connection.uuid), settings)

    def queue(self, name: str) -> RemoteQueue:
        """Return a queue that exists; see `qflow.Broker.queue`."""
        return queue_of(self._connection, name, self._connection.call(requests.queue(name)))

    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        return self._connection.call(requests.QUEUES)

    def delete_queue(self, name: RemoteQueue | str) -> None:
        """Delete a queue with all its messages; see `qflow.Broker.delete_queue`."""
        self._connection.call(requests.delete_queue(self._connection.uuid, name))

    def bind(self, queue: RemoteQueue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; see `qflow.Broker.bind`."""
        self._connection.call(requests.bind(self._connection.uuid, queue, topic_filter))

    def unbind(self, queue: RemoteQueue | str, topic_filter: str) -> None:
        """Undo `bind`; see `qflow.Broker.unbind`."""
        self._connection.call(requests.unbind(self._connection.uuid, queue, topic_filter))

    def publish(
        self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None,
        producer: str | None = None, number: int | None = None, timeout_s: Duration | None = None,
    ) -> PublishResult:  # fmt: skip
        """Put a message into every stream that takes its topic and every queue bound to it; see `qflow.Broker.publish`.

        Raises:
            InDoubt: the connection ended before the answer came; it may have been published.
        """
        return self._connection.call(requests.publish(topic, body, key, headers, producer, number, timeout_s))

    def publish_many(
        self, messages: Iterable[Publication], *, headers: Headers | None = None, producer: str | None = None,
        number: int | None = None, timeout_s: Duration | None = None,
    ) -> Sequence[PublishResult]:  # fmt: skip
        """Publish (topic, body) pairs, or (topic, body, key), in one commit, all of them or none; see `publish`."""
        request = requests.publish_many(messages, headers, producer, number, timeout_s)
        return [] if request is None else self._connection.call(request)

    def submit_publish(
        self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None,
        producer: str | None = None, number: int | None = None, timeout_s: Duration | None = None,
    ) -> Future[PublishResult]:  # fmt: skip
        """`publish` that does not wait: the future has the result once it is confirmed."""
        return self._connection.submit(requests.publish(topic, body, key, headers, producer, number, timeout_s))

    # Streams ------------------------------------------------------------------------------------------------------

    def declare_stream(self, name: str, **settings: Unpack[StreamOptions]) -> RemoteStream:
        """Return the stream of this name, making it if there is none; see `qflow.Broker.declare_stream`."""
        return stream_of(self._connection, name, self._connection.call(stream_requests.declare_stream(name, settings)))

    def alter_stream(self, stream: RemoteStream | str, /, **changes: Unpack[StreamChanges]) -> RemoteStream:
        """Change settings of a stream while it is used; see `qflow.Broker.alter_stream`."""
        settings: StreamSettings = self._connection.call(
            stream_requests.alter_stream(self._connection.uuid, stream, changes)
        )
        return stream_of(self._connection, requests.name_of("stream", stream, self._connection.uuid), settings)

    def stream(self, name: RemoteStream | str) -> RemoteStream:
        """Return a stream that exists; see `qflow.Broker.stream`."""
        settings: StreamSettings = self._connection.call(stream_requests.stream(self._connection.uuid, name))
        return stream_of(self._connection, requests.name_of("stream", name, self._connection.uuid), settings)

    def streams(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return self._connection.call(stream_requests.STREAMS)

    def delete_stream(self, name: RemoteStream | str) -> None:
        """Delete a stream with its messages and subscriptions; see `qflow.Broker.delete_stream`."""
        self._connection.call(stream_requests.delete_stream(self._connection.uuid, name))

    def subscribe(
        self, stream: RemoteStream | str, filter: str = "#", **options: Unpack[SubscriptionOptions]
    ) -> RemoteSubscription:
        """Return messages of a stream that a filter matches; see `qflow.Broker.subscribe`.

        It ends with the connection, which gives back what it held.
        """
        request = stream_requests.subscribe(self._connection.uuid, stream, filter, options)
        return self._connection.call(request, partial(subscription_of, self._connection))

    def delete_subscription(self, stream: RemoteStream | str, name: str) -> None:
        """Delete a durable subscription, or a group; see `qflow.Broker.delete_subscription`."""
        self._connection.call(stream_requests.delete_subscription(self._connection.uuid, stream, name))

    def schedule(self, name: str, queue: RemoteQueue | str, body: Body, **options: Unpack[ScheduleOptions]) -> Schedule:
        """Have a message put into a queue again and again; see `qflow.Broker.schedule`."""
        return self._connection.call(requests.schedule(self._connection.uuid, name, queue, body, options))

    def schedules(self) -> list[Schedule]:
        """Return what is put again and again, by name."""
        return self._connection.call(requests.SCHEDULES)

    def cancel_schedule(self, name: str) -> None:
        """Put no more messages for a schedule, and forget it; see `qflow.Broker.cancel_schedule`."""
        self._connection.call(requests.cancel_schedule(name))

    def redrive(
        self, name: str, *, to: str | None = None, limit: int | None = None, sequences: Iterable[int] | None = None
    ) -> RedriveReport:
        """Move dead letters back to where they came from, those of AMQP, too; see `qflow.Broker.redrive`."""
        return self._connection.call(requests.redrive(name, to, limit, sequences))

    # Transactions and events --------------------------------------------------------------------------------------

    def transaction(self, timeout_s: Duration | None = None) -> RemoteTransaction:
        """Return a transaction over any of the queues; see `RemoteTransaction`.

        Its commit waits `timeout_s` seconds for room at limits; None = without end.
        """
        self._connection.check_open()
        return transaction_of(self._connection, self.settings.max_transaction_bytes, parse_timeout(timeout_s))

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have `callback(event)` called for each event of the owner from now on, by a thread of its own.

        It may use the connection, and wait for futures. Of events that wait for it, the newest 10,000 are kept. What it
        raises is logged by the logger `qflow`; see `qflow.Broker.on_event`.
        """
        self._events.add(callback)

    # Looking, and copies ------------------------------------------------------------------------------------------

    def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue."""
        return self._connection.call(requests.STATS)

    def figures(self, since: int = 0) -> tuple[int, dict[str, dict[str, Any]]]:
        """Return the number of this look, and the figures of queues that have changed since look number `since`.

        As plain values, by name; none of a queue that is no more. For who looks each second. After many were deleted, 0
        and nothing: begin anew.
        """
        return self._connection.call(requests.figures(since))

    def check(self) -> list[str]:
        """Have the owner compare everything; see `qflow.Broker.check`."""
        return self._connection.call(requests.CHECK)

    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy what is in the log to a new spool, on the owner's host; see `qflow.Broker.snapshot`."""
        return self._connection.call(requests.snapshot(self._connection.target, path))

    def compact(self) -> CompactionReport:
        """Give disk back; see `qflow.Broker.compact`."""
        return self._connection.call(requests.COMPACT)

    # Closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection: what was delivered and not settled goes back; calls that wait get `BrokerClosed`.

        Acks that were made are heard, if the owner hears them within a second. The spool stays open with its owner.
        Calling it again does nothing.
        """
        self._connection.close()

    def __enter__(self) -> RemoteBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def broker_of(connection: Connection, welcome: dict[str, Any]) -> RemoteBroker:
    """Return the broker of a connection, once the owner has answered."""
    made = RemoteBroker()
    made._connection, made._welcome, made._events = connection, welcome, Events(connection)
    connection.welcomed(welcome)
    return made


def delete_session(broker: RemoteBroker, client_id: str) -> None:
    """Delete the session of an MQTT client, for `qflow sessions delete`; one that is connected is told, and closed.

    Raises:
        NotFound: there is no such session. InDoubt: the connection ended before the answer came.
    """
    broker._connection.call(requests.delete_session(client_id))


def restore(broker: RemoteBroker, items: Sequence[Item]) -> int:
    """Have messages put as they were; see `qflow.restoring.restore`."""
    return broker._connection.call(requests.restore(items))
