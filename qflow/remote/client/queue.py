"""A queue of a spool that another process owns, for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import current_thread
from typing import Any, TypeVar, Unpack

from qflow.config import QueueSettings, SlowConsumer
from qflow.deliveries import Deliveries
from qflow.delivery import SEVERAL, Delivery, Entry, each_of
from qflow.durations import Duration
from qflow.errors import AlreadySettled, BrokerClosed, ForkedProcess, InvalidArgument, QueueEmpty
from qflow.identity import OfSpool
from qflow.options import Body, ConsumeOptions, PutOnceOptions, PutOptions
from qflow.pickling import Unpicklable
from qflow.queues.consumer import Consumer, Consuming, begin_consumer
from qflow.remote.client import requests
from qflow.remote.client.consuming import Ending, RemoteConsumed
from qflow.remote.client.deliveries import first_of, shown_of
from qflow.remote.client.link import Request
from qflow.remote.client.threads import Connection
from qflow.stats import QueueStats
from qflow.takers import cut_name, parse_name

T = TypeVar("T")


def browse(name: str) -> Request:
    """Its reply has the first page."""
    return Request({"op": "browse", "queue": name}, undo=_left)


def browse_next(number: int) -> Request:
    return Request({"op": "browse_next", "browse": number}, undo=_left)


def browse_close(number: int) -> Request:
    return Request({"op": "browse_close", "browse": number})


def _left(page: dict[str, Any]) -> Request | None:
    """A page was handed to nobody: those that follow are not asked for."""
    return browse_close(page["browse"]) if page["browse"] else None


def move_entry(name: str, sequence: int, to: str) -> Request:
    """Its reply is the state of the entry."""
    return Request({"op": "move_entry", "queue": name, "sequence": sequence, "to": to})


class Keeper:
    """Moves entries of a queue, for threads; as `delivery.Keeper` says."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    def spill_entry(self, sequence: int) -> str:
        return self._connection.call(move_entry(self._name, sequence, "disk"))

    def restore_entry(self, sequence: int) -> str:
        return self._connection.call(move_entry(self._name, sequence, "memory"))


def entries_of(page: dict[str, Any], keeper: Any) -> list[Entry]:
    """Return the entries of a page."""
    return [Entry(sequence, size, state, keeper, due_ms) for sequence, size, state, due_ms in page["entries"]]


def begun(pages: Iterator[T]) -> Iterator[T]:
    """Return a generator at its first yield, of nothing: it ends what is open, though nobody takes an item of it."""
    next(pages)
    return pages


def entries(connection: Connection, name: str) -> Iterator[Entry]:
    """Yield what waits in a queue, as it was when this was called."""
    keeper = Keeper(connection, name)
    return connection.call(browse(name), lambda page: begun(_pages(connection, keeper, page)))


def _pages(connection: Connection, keeper: Keeper, page: dict[str, Any]) -> Iterator[Any]:
    try:
        yield  # see `begun`
        yield from entries_of(page, keeper)
        while page["browse"] is not None:
            page = connection.call(browse_next(page["browse"]))
            yield from entries_of(page, keeper)
    finally:
        number = page["browse"]
        if number is not None:
            with suppress(BrokerClosed, ForkedProcess):
                connection.tell(lambda: browse_close(number))


class TimedOptions(PutOptions, total=False):
    """Those of `put_many`, and `timeout_s`."""

    timeout_s: Duration | None


class TimedOnceOptions(PutOnceOptions, total=False):
    """Those of a put, and `timeout_s`."""

    timeout_s: Duration | None


class RemoteQueue(Unpicklable, OfSpool):
    """A named queue of a spool that another process owns. Made by `RemoteBroker`; every method is thread-safe.

    Arguments, results and errors are those of `qflow.Queue`; see there. Beside them, `InDoubt` and `BrokerClosed` are
    raised when the connection has ended.
    """

    __slots__ = ("__weakref__", "_connection", "_name", "_settings")
    _connection: Connection
    _name: str
    _settings: QueueSettings
    _kind = "queue"

    def _spool_uuid(self) -> str:
        return self._connection.uuid

    @property
    def name(self) -> str:
        """The name it was declared under."""
        return self._name

    @property
    def settings(self) -> QueueSettings:
        """How it was declared, or altered since. Cost: a round trip; the last known ones where nobody answers."""
        with suppress(BrokerClosed):
            self._settings = self._connection.call(requests.queue(self._name))
        return self._settings

    # Put -------------------------------------------------------------------------------------------------------------

    def put(self, body: Body, **options: Unpack[TimedOnceOptions]) -> int | None:
        """Append a message; on a durable queue, return once it is synced in the owner's log. See `qflow.Queue.put`.

        Raises:
            InDoubt: the connection ended before the answer came; the message may be in the queue.
        """
        sequence: int | None = self._connection.put(requests.put(self._name, body, options))
        return sequence

    def put_nowait(self, body: Body, **options: Unpack[PutOnceOptions]) -> int | None:
        """`put` that waits for no room; on a durable queue it still waits for the sync."""
        return self._connection.call(requests.put(self._name, body, dict(**options, timeout_s=0.0)))

    def put_many(self, bodies: Iterable[Body], **options: Unpack[TimedOptions]) -> range:
        """Append messages together, all or none of them, in one commit; see `qflow.Queue.put_many`."""
        request = requests.put_many(self._name, bodies, options)
        return range(0) if request is None else self._connection.put(request)

    def submit(self, body: Body, **options: Unpack[TimedOptions]) -> Future[int | None]:
        """`put` that does not wait: the future has what `put` returns, once it is confirmed.

        It does wait while 900 messages, or 16 MiB of bodies, are submitted by this connection and not confirmed, into
        whatever queues: one whose submits may wait for room for long gets a connection of its own.
        """
        return self._connection.submit(requests.put(self._name, body, options, requests.TIMED))

    # Get -------------------------------------------------------------------------------------------------------------

    def get(self, timeout_s: Duration | None = None, *, consumer: str | None = None) -> Delivery:
        """Acquire the first available message, waiting for one; see `qflow.Queue.get`."""
        who = cut_name(current_thread().name) if consumer is None else parse_name(consumer)
        first = partial(first_of, self._connection, self._name)
        delivery = self._connection.call(requests.get(self._name, 1, timeout_s, who), first)
        if delivery is None:  # no call before the return: an interrupt comes earlier, and gives it back, or later
            raise QueueEmpty(f"no message in queue {self._name!r} within {timeout_s} s")
        return delivery

    def get_nowait(self, *, consumer: str | None = None) -> Delivery:
        """`get` that does not wait for a message."""
        return self.get(0, consumer=consumer)

    def get_many(
        self, max_messages: int, timeout_s: Duration | None = None, *, consumer: str | None = None
    ) -> Deliveries:
        """Acquire what is available: waits for the first, never to fill; see `qflow.Queue.get_many`.

        Returns at most 1,000 messages, or about 8 MiB of them.
        """
        batch = partial(shown_of, self._connection, self._name)
        who = cut_name(current_thread().name) if consumer is None else parse_name(consumer)
        return self._connection.call(requests.get(self._name, max_messages, timeout_s, who), batch)

    # Settle ----------------------------------------------------------------------------------------------------------

    def ack_many(self, deliveries: Deliveries | Iterable[Delivery], wait: bool = False) -> None:
        """Settle many deliveries together; see `qflow.Queue.ack_many`."""
        if isinstance(deliveries, Deliveries):
            deliveries.ack(wait)
            return
        problem: AlreadySettled | None = None
        listed = list(each_of(deliveries))
        for delivery in listed:
            if not isinstance(delivery, Delivery):
                raise InvalidArgument(f"{SEVERAL}, not {type(delivery).__name__}")
        for place, delivery in enumerate(listed):
            try:
                delivery.ack(wait and place == len(listed) - 1)
            except AlreadySettled as error:
                problem = error
        if problem is not None:
            raise problem

    # Whole queue -----------------------------------------------------------------------------------------------------

    def purge(self) -> int:
        """Settle every message, acquired ones included; return how many. See `qflow.Queue.purge`."""
        return self._connection.call(requests.purge(self._name))

    def delete(self, sequence: int) -> bool:
        """Delete one message that waits; see `qflow.Queue.delete`."""
        return self._connection.call(requests.delete_message(self._name, sequence))

    def delete_many(self, sequences: Iterable[int]) -> list[int]:
        """Delete messages that wait; return which. See `qflow.Queue.delete_many`. Cost: one round trip."""
        return self._connection.call(requests.delete_messages(self._name, sequences))

    def browse(self) -> Iterator[Entry]:
        """Yield every waiting entry in order; see `qflow.Queue.browse`. Cost: a round trip for each 1,000."""
        return entries(self._connection, self._name)

    def __len__(self) -> int:
        """Messages not settled: waiting and acquired."""
        return self._connection.call(requests.length(self._name))

    def stats(self) -> QueueStats:
        """Return a snapshot; see `qflow.Queue.stats`."""
        return self._connection.call(requests.queue_stats(self._name))

    def consume(self, callback: Callable[[Delivery], object], **options: Unpack[ConsumeOptions]) -> Consumer:
        """Have threads of its own call `callback(delivery)` for each message; see `qflow.Queue.consume`.

        What a callback raises is logged here, by the logger `qflow`; the owner tells no event of it. It ends with the
        connection: `running` is False then, and the same logger has a warning.
        """
        self._connection.check_open()
        ending = Ending(self._connection, self._name)
        take_from = partial(RemoteConsumed, self._connection, self._name, ending)
        return begin_consumer(take_from, callback, Consuming.start, options)

    def pause(self) -> None:
        """Deliver nothing until `resume`, to anybody; see `qflow.Queue.pause`."""
        self._connection.call(requests.pause(self._name, True))

    def resume(self) -> None:
        """Deliver again."""
        self._connection.call(requests.pause(self._name, False))

    def on_slow_consumer(self, after_s: Duration | None, policy: SlowConsumer = SlowConsumer.NOTIFY) -> None:
        """Watch for messages that are held for long; see `qflow.Queue.on_slow_consumer`."""
        self._connection.call(requests.on_slow_consumer(self._name, after_s, policy))

    def __repr__(self) -> str:
        return f"<RemoteQueue {self._name!r}>"


def queue_of(connection: Connection, name: str, settings: QueueSettings) -> RemoteQueue:
    """Return a queue of a connection."""
    made = RemoteQueue()
    made._connection, made._name, made._settings = connection, name, settings
    return made
