"""What one connection asks for, done: operations by name, over the broker for tasks. It knows nothing of sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from inspect import isawaitable
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import qflow
from qflow.aio.broker import AsyncBroker, in_thread
from qflow.aio.home import Promise
from qflow.aio.queue import put_at_once
from qflow.delivery import Entry
from qflow.errors import (
    AlreadySettled,
    BrokerClosed,
    InvalidArgument,
    NotFound,
    QflowError,
    QueueDeleted,
    StreamDeleted,
)
from qflow.loggers import get_logger
from qflow.memory.waiting import in_place
from qflow.message import is_plain
from qflow.queues.consumer import Consumers
from qflow.remote.server.arguments import Columns
from qflow.remote.server.grants import Grants
from qflow.remote.server.lone import PLAIN_PUT
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.values import plain
from qflow.streams.deliveries import StreamMessage
from qflow.takers import Taker

MOST_OPEN = 100
"""Of one kind, at one connection, that have not come to their end."""
MOST_BYTES = 8 * 2**20
"""Of messages in one page; the first is always there."""
T = TypeVar("T")
Reply = tuple[dict[str, Any], list[Any]]
"""A head and columns."""
Operation = Callable[["Session", dict[str, Any], Columns], Awaitable[Any]]
"""Gives the result, which is no tuple; with columns, a `Reply`."""
Notify = Callable[[dict[str, Any]], object]

_logger = get_logger("qflow")


class Pages(Generic[T]):
    """What a connection reads page by page, up to the last one: queries of streams, or what waits in queues.

    Those of one kind. In the loop of the connection; pages are read in threads.
    """

    def __init__(
        self, broker: AsyncBroker, kind: str, most: int, size_of: Callable[[T], int], numbers: count[int]
    ) -> None:
        """Begin.

        Args:
            kind: what errors call one of these.
            most: as many items are in a page.
            size_of: returns the bytes of an item.
            numbers: of what is opened.
        """
        self._broker = broker
        self._kind = kind
        self._most = most
        self._size_of = size_of
        self._numbers = numbers
        self._open: dict[int, Iterator[T] | None] = {}
        """By number: what is left of each; None while a page of it is read."""

    def __len__(self) -> int:
        return len(self._open)

    async def begin(self, make: Callable[[], Iterator[T]]) -> tuple[list[T], int | None]:
        """Return the first page of what `make` returns, and the number under which it goes on; None: that was all.

        Raises:
            InvalidArgument: too many are open.
        """
        if len(self._open) >= MOST_OPEN:
            raise InvalidArgument(
                f"{MOST_OPEN} of operation {self._kind!r} have not come to their end at this connection: end some of "
                "them, or connect once more"
            )
        return await self._page(next(self._numbers), make)

    async def go_on(self, number: int) -> tuple[list[T], int | None]:
        """Return the next page of one. Raises NotFound: it is not open."""
        items = self._open.get(number)
        if items is None:
            raise NotFound(f"there is no {self._kind} {number} of this connection: it has come to its end")
        return await self._page(number, lambda: items)

    async def _page(self, number: int, make: Callable[[], Iterator[T]]) -> tuple[list[T], int | None]:
        self._open[number] = None
        items: Any = None
        try:
            found, items = await in_thread(self._broker, partial(self._read, make))
        finally:
            if items is None:
                self.close(number)
        if number not in self._open:  # it was closed meanwhile
            return found, None
        self._open[number] = items
        return found, number

    def _read(self, make: Callable[[], Iterator[T]]) -> tuple[list[T], Iterator[T] | None]:
        """Return a page, and what is left; None: nothing."""
        items, found, size = make(), [], 0
        for item in items:
            found.append(item)
            size += self._size_of(item)
            if len(found) == self._most or size >= MOST_BYTES:
                return found, items
        return found, None

    def close(self, number: int) -> None:
        """Forget one; twice is fine."""
        self._open.pop(number, None)

    def close_all(self) -> None:
        """Forget all."""
        self._open.clear()


def by_name(*operations: Operation) -> dict[str, Operation]:
    """Return operations by their names."""
    return {operation.__name__: operation for operation in operations}


def of_calls(**calls: Callable[[Session, dict[str, Any]], Any]) -> dict[str, Operation]:
    """Return operations that are a call each, which is awaited if it is to be; what it returns is told `plain`."""

    def operation(call: Callable[[Session, dict[str, Any]], Any]) -> Operation:
        async def answered(session: Session, head: dict[str, Any], columns: Columns) -> Any:
            found = call(session, head)
            return plain(await found if isawaitable(found) else found)

        return answered

    return {name: operation(call) for name, call in calls.items()}


class Flow(Protocol):
    """Tells whether there is room for answers."""

    def is_open(self) -> bool: ...

    async def opened(self, timeout_s: float | None) -> bool:
        """Wait until there is; False: there will be none, and the time is over."""


class Session:
    """See the module. One for each connection; made and used in one event loop; `close` ends it."""

    def __init__(
        self,
        broker: AsyncBroker,
        operations: dict[str, Operation],
        *,
        flow: Flow,
        notify: Notify,
    ) -> None:
        """Begin.

        Args:
            operations: see `operations.OPERATIONS`.
            flow: asked before messages are acquired.
            notify: takes the heads of notices.
        """
        self.broker = broker
        self.grants = Grants()
        self.credit_bytes = 0
        """Of requests with columns that may be under way; `hello` tells it."""
        self.known: dict[str, set[str]] = {"queue": set(), "stream": set()}
        """Names of queues, and of streams, that were there when the caller named them."""
        self.pace: dict[str, int] = {}
        """By queue: how many messages fitted in an answer."""
        self.subscriptions: dict[int, Any] = {}
        self.numbers = count(1)
        """Of what the session opens."""
        self.browsing: Pages[Entry] = Pages(broker, "browse", 1000, lambda entry: 0, self.numbers)
        self.queries: Pages[StreamMessage] = Pages(
            broker, "query", 256, lambda message: len(message.body), self.numbers
        )
        self.flow = flow
        self.notify = notify
        self.peer_pid: int | None = None
        """The process that made the connection, 0 if it has no number here; None where there is no connection."""
        self.pid = 0
        """The process of the caller; 0 where that is not known."""
        self.takers: dict[str, Taker] = {}
        """Who gets, by name: as many as there is room for."""
        self.consumers: dict[int, tuple[Taker, Consumers]] = {}
        """Those that run, and where they are known."""
        self.ended: list[Callable[[], object]] = []
        """Called when the session ends."""
        self._operations = operations

    async def call(self, head: dict[str, Any], columns: Columns) -> Reply:
        """Do what a request asks for; what it raises is an answer, too.

        Cancelled, it gives up what it waits for; what it acquired meanwhile is given back.
        """
        try:
            answer = await self._operation(head)(self, head, columns)
            return answer if type(answer) is tuple else ({"result": answer}, [])
        except NotFound as error:
            return encode_error(self.deleted(head, error)), []
        except BrokerClosed:
            return encode_error(self.closed()), []
        except QflowError as error:
            return encode_error(error), []
        except Exception as error:
            if self.broker.closed:
                return encode_error(self.closed()), []
            _logger.exception("%s: operation %r of a connection failed", self.broker.path, head.get("op"))
            return encode_error(error), []

    def closed(self) -> BrokerClosed:
        """Return what is told of a broker that is closed, or about to."""
        return BrokerClosed(f"the broker of {self.broker.path} is closed: connect again when it is open")

    def named(self, kind: str, name: str, find: Callable[[str], T]) -> T:
        """Return the queue or stream of a name, and know from now on that it was there.

        Raises:
            NotFound: there is none. QueueDeleted, StreamDeleted: the caller has used it before.
        """
        try:
            found = find(name)
        except NotFound as error:
            raise self.deleted({kind: name, "known": True}, error) from error
        self.known[kind].add(name)
        return found

    def deleted(self, head: dict[str, Any], error: NotFound) -> QflowError:
        """Return what is told of something that is not there: that it was deleted, where the caller has it."""
        for kind, find, gone in (
            ("queue", self.broker.queue, QueueDeleted),
            ("stream", self.broker.stream, StreamDeleted),
        ):
            name = head.get(kind)
            if head.get("known") and name in self.known[kind]:
                try:
                    find(name)
                except NotFound:
                    return gone(f"{kind} {name!r} was deleted: declare it again")
        return error

    def put_at_once(self, head: dict[str, Any], columns: Columns, promise: Promise) -> bool:
        """Begin a put of plain messages without a task, if there is room for them; False: it takes a `call`.

        The promise is told the first sequence, or what became of the put.
        """
        if head.get("op") != "put" or len(columns) != 1 or not PLAIN_PUT.issuperset(head):
            return False
        name, bodies = head.get("queue"), columns[0]
        if type(name) is not str or not bodies or not is_plain(bodies):
            return False
        try:
            return put_at_once(self.broker.queue(name), bodies, promise)
        except QflowError:
            return False  # the call says why

    async def acquire(
        self,
        collect: Callable[[float | None], Awaitable[T | None]],
        give_up: Callable[[T], object],
        timeout_s: float | None,
    ) -> T | None:
        """Return messages, acquired when there is room for an answer; None: there were none in time.

        Args:
            collect: waits so long for messages, and acquires them.
            give_up: gives back what was acquired.
        """
        now = asyncio.get_running_loop().time
        ends = None if timeout_s is None else now() + timeout_s
        while True:
            if not self.flow.is_open() and not await self.flow.opened(None if ends is None else ends - now()):
                return None
            batch = await collect(None if ends is None else max(0.0, ends - now()))
            if batch is None or self.flow.is_open():
                return batch
            give_up(batch)  # others may take it, until this client has read what it was sent

    def holds(self) -> bool:
        """Tell whether it has deliveries that are not settled, or pages that are still to come."""
        return self.grants.holds() or bool(self.browsing or self.queries)

    def _operation(self, head: dict[str, Any]) -> Operation:
        name = head.get("op")
        found = self._operations.get(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidArgument(
                f"this owner (qflow {qflow.__version__}) does not know the operation {name!r:.100}: upgrade it"
            )
        return found

    async def close(self) -> None:
        """Give everything back that was delivered and not settled, counted, in order; close subscriptions."""
        for call in self.ended:
            call()
        for taker, known in self.consumers.values():
            in_place(partial(known.see_off, taker))
        self.browsing.close_all()
        self.queries.close_all()
        left = [grant.abandon for grant in self.grants.take_all()]
        left += [one.close for one in self.subscriptions.values()]
        for let_go in left:
            try:
                await let_go()
            except (AlreadySettled, BrokerClosed):
                continue  # it went back before, or with all others
            except Exception as error:
                trace = not isinstance(error, QflowError)
                _logger.warning("%s: what a connection held is free later: %s", self.broker.path, error, exc_info=trace)
