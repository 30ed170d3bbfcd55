"""A connection for tasks: of the event loop it was made in, and without a thread.

A task that is cancelled gives its request up: deliveries that come with the answer go back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from qflow.aio.delivery import AnyDeliveries, AsyncDelivery, held_by
from qflow.aio.loops import running_loop
from qflow.deliveries import Deliveries
from qflow.delivery import SEVERAL, Delivery, Return, each_of
from qflow.errors import AlreadySettled, BrokerClosed, ForkedProcess, InvalidArgument, QflowError, StorageError
from qflow.held_batch import AnyBatch, HeldBatch
from qflow.remote.client import grants
from qflow.remote.client.grants import AnyGrant
from qflow.remote.client.link import CLOSE_S, Link, Reason, Reply, Request, Undo
from qflow.remote.wire.frames import WireError

READ_BYTES = 2**18
T = TypeVar("T")
_connections: weakref.WeakSet[TaskConnection] = weakref.WeakSet()


class _Waiting:
    """A task, or a future, that waits for a reply."""

    __slots__ = ("future", "late", "number", "undo")

    def __init__(self, future: asyncio.Future[Any], undo: Undo | None) -> None:
        self.future = future
        self.number = 0
        self.undo = undo
        self.late: Reply | None = None
        """What came when the future was cancelled, and its task had not heard of that yet."""

    def answered(self, outcome: Reply | QflowError) -> None:
        if self.future.cancelled():
            self.late = outcome if isinstance(outcome, Reply) else None
        elif self.future.done():
            return  # a signal handler has raised behind that, and the connection ends
        elif isinstance(outcome, Reply):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


class TaskConnection(asyncio.Protocol):
    """See the module."""

    def __init__(self, target: str, reason: Reason | None = None) -> None:
        self.target = target
        self.uuid = ""
        """Of the spool, from the owner's first answer on."""
        self.socket: socket.socket | None = None
        """Of the transport, from before there is one."""
        self._process = os.getpid()
        self._loop = running_loop()
        self._link = Link(target, reason)
        self._transport: Any = None
        self._is_ending = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()
        self._undoing: set[asyncio.Task[None]] = set()
        """What was opened for callers that were cancelled, and is closed again."""
        _connections.add(self)

    @property
    def closed(self) -> bool:
        """No call can be made."""
        return self._is_ending or self._link.refuses

    @property
    def is_cut(self) -> bool:
        """No call can be made, and nobody has closed it here."""
        return self._link.refuses and not self._is_ending

    # Calls -----------------------------------------------------------------------------------------------------------

    async def call(self, request: Request, then: Callable[[Any], T] | None = None) -> T:
        """Make a request; return what its answer is read as, or what `then` makes of that.

        Raises:
            What the owner raised. BrokerClosed, InDoubt: the connection has ended.
        """
        await self.writable()
        waiting = self._waiting(request)
        try:
            self._begin(request, waiting)
            result = request.read(await waiting.future)
            return result if then is None else then(result)
        except QflowError:  # of the owner; or it was not begun
            raise
        except BaseException:  # it was cancelled, or a signal handler has raised that
            self._give_up(waiting)
            raise

    async def open(self, request: Request, then: Callable[[Any], T]) -> T:
        """`call` for what has a name: if its caller is cancelled it is closed again, before the next one is opened."""
        while self._undoing:
            await asyncio.wait(self._undoing)
        await self.writable()
        waiting = self._waiting(request)
        try:
            self._begin(request, waiting)
            return then(request.read(await asyncio.shield(waiting.future)))
        except QflowError:
            raise
        except BaseException:
            if waiting.number or self._link.number_of(waiting):
                task = self._loop.create_task(self._undo(waiting.future, request))
                self._undoing.add(task)
                task.add_done_callback(self._undoing.discard)
                self._flush()
            raise

    async def _undo(self, opening: asyncio.Future[Reply], request: Request) -> None:
        """Close what was opened for nobody, if it was; return when the owner has done it."""
        with suppress(QflowError):  # it was refused; or the connection has ended, and all with it
            reply = await opening
            undo = None if request.undo is None else request.undo(reply.result)
            if undo is not None:
                await self.complete(undo)

    def submit(self, request: Request) -> asyncio.Future[Any]:
        """Make a request; the future has what its answer is read as. Cancelled, it is given up."""
        waiting = self._begin(request, self._waiting(request), is_submitted=True)
        result: asyncio.Future[Any] = self._loop.create_future()

        def answered(future: asyncio.Future[Any]) -> None:
            if result.cancelled():
                return
            try:
                value = request.read(future.result())
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        waiting.future.add_done_callback(answered)
        result.add_done_callback(lambda future: self._give_up(waiting) if future.cancelled() else None)
        return result

    async def settle(self, make: Callable[[], Request | None], wait: bool) -> None:
        """Make a request of what is marked as settled then; wait for its answer, or do not.

        Cancelled while it waits for that, it is settled all the same; before, nothing is marked.
        """
        await self.writable()
        self.check_open()
        request = make()
        if request is None:
            return
        if wait:
            await self.complete(request)
        else:
            self.tell(request)

    async def complete(self, request: Request) -> None:
        """Make a request, and wait for its answer; it is made all the same if the task is cancelled meanwhile."""
        await self._begin(request, self._waiting(request)).future

    async def writable(self) -> None:
        """Return when little of what was asked for is not sent yet, or the connection has ended."""
        while not self._writable.is_set():
            self._check_loop()
            await self._writable.wait()

    def tell(self, request: Request) -> None:
        """Make a request that nobody waits for. Who tells much waits until it is `writable` before."""
        self.check_open()
        self._link.tell(request)
        self._flush()

    def check_open(self) -> None:
        """Raises BrokerClosed: it has ended. ForkedProcess, InvalidArgument: it is another process's, or loop's."""
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"this connection to {self.target} belongs to process {self._process}: connect after the fork"
            )
        self._check_loop()
        if self._is_ending:
            raise BrokerClosed(f"the connection to the owner of {self.target} was closed: connect again")
        self._link.check()

    def _check_loop(self) -> None:
        """Refuse a loop that would not hear of an answer: nothing is asked for then."""
        if running_loop() is not self._loop:
            raise InvalidArgument(
                f"this connection to {self.target} belongs to another event loop: connect in this one, and close each "
                "in its own"
            )

    def _waiting(self, request: Request) -> _Waiting:
        return _Waiting(self._loop.create_future(), request.undo)

    def _begin(self, request: Request, waiting: _Waiting, *, is_submitted: bool = False) -> _Waiting:
        self.check_open()
        waiting.number = number = self._link.begin(request, waiting, is_submitted=is_submitted)
        kept_s = self._link.kept_s(number)
        if kept_s is not None:
            timer = self._loop.call_later(kept_s, self._hurry, number)
            waiting.future.add_done_callback(lambda _: timer.cancel())
        self._flush()
        return waiting

    def _hurry(self, number: int) -> None:
        self._link.hurry(number)
        self._flush()

    def _give_up(self, waiting: _Waiting) -> None:
        future = waiting.future
        waiting.number = waiting.number or self._link.number_of(waiting)
        if not waiting.number:
            return  # it was not begun
        if waiting.late is not None:
            self._link.give_back(waiting.undo, waiting.late)
        elif future.cancelled() or not future.done() or future.exception() is not None:
            self._link.give_up(waiting.number)
        else:
            self._link.give_back(waiting.undo, future.result())
        self._flush()

    def _flush(self) -> None:
        if self._link.has_output and self._transport is not None and not self._transport.is_closing():
            out = self._link.take()
            try:
                self._transport.write(b"".join(out))  # see the server: `writelines` pauses nobody
            except BaseException:  # of a signal handler: nobody knows whether it is sent
                self._transport.abort()
                raise

    # Of the transport ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self._link.ended is not None:
            return  # all were told
        try:
            self._link.feed(data)
        except WireError as error:
            self._end(StorageError(f"{self.target}: {error}; the connection was ended: connect again"))
            self._transport.abort()
        except BaseException:  # of a signal handler: what has come is lost
            self._transport.abort()
            raise
        else:
            self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and self.socket is not None:
            self._read_rest(self.socket)
        self._end(None)
        self._lost.set()

    def _read_rest(self, one: socket.socket) -> None:
        """Take what the owner had sent before it ended the connection: asyncio reads no more once a write fails."""
        with suppress(OSError, WireError):
            while data := one.recv(READ_BYTES):
                self._link.feed(data)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # The end ---------------------------------------------------------------------------------------------------------

    def _end(self, why: QflowError | None) -> None:
        self._link.end(why)
        self._writable.set()

    def welcomed(self, welcome: dict[str, Any]) -> None:
        """The owner has told who it is, and its limits."""
        self.uuid = welcome["uuid"]
        self._link.welcomed(welcome["limits"])

    def listen(self, call: Callable[[dict[str, Any]], object]) -> None:
        """Have the heads of notices given to a function."""
        self._link.notices.append(call)

    async def close(self) -> None:
        """End the connection; calls that wait get BrokerClosed, and what nobody waits for is heard. Twice is fine.

        Raises:
            InvalidArgument: it is another loop's, which is not closed.
        """
        if os.getpid() != self._process:
            return
        if self._loop.is_closed():
            self._is_ending = True
            self.leave()
            return
        self._check_loop()
        if not self._is_ending:
            await self._close()
        if self._transport is not None:
            await self._lost.wait()

    async def _close(self) -> None:
        must_be_heard, self._is_ending = self._link.must_be_heard, True
        self._end(BrokerClosed(f"the connection to the owner of {self.target} was closed: connect again"))
        transport = self._transport
        if transport is None:
            return
        try:
            if must_be_heard and not transport.is_closing():
                transport.write_eof()  # the owner ends the connection when it has read all
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._lost.wait()
        finally:
            transport.abort()

    def leave(self) -> None:
        """In a forked child, or without the loop: close the socket, or the owner would not hear of the end."""
        if self.socket is not None:
            self.socket.close()


def _after_fork() -> None:
    for one in list(_connections):
        one.leave()
    _connections.clear()


os.register_at_fork(after_in_child=_after_fork)


class TaskSettler:
    """What a batch of tasks calls its settler: it knows the grant. `Settles` settles."""

    def __init__(self, connection: TaskConnection, name: str, grant: AnyGrant) -> None:
        self.connection = connection
        self.name = name
        self.grant = grant

    def settle_batch(self, batch: HeldBatch, index: int | None, wait: bool) -> None:
        raise InvalidArgument("a delivery of tasks is settled by `await delivery.ack()`")

    def return_batch(self, batch: HeldBatch, index: int | None, how: Return) -> None:
        raise InvalidArgument("a delivery of tasks is given back by `await delivery.nack()`")

    def extend_batch(self, batch: HeldBatch, seconds: float) -> None:
        raise InvalidArgument("a delivery of tasks is held longer by `await delivery.extend()`")


class Settles:
    """Settles what tasks hold of one connection, as `aio.delivery.Settling` says."""

    def __init__(self, connection: TaskConnection) -> None:
        self._connection = connection

    async def settle(self, held: Delivery | AnyDeliveries, wait: bool) -> None:
        """Ack; it is on its way when this returns, and nobody waits for it but with `wait`, or where leases end."""
        grant, batch, index = _held(held)
        await self._ask(grant, batch, partial(grants.ack, grant, batch, index, wait), wait)

    async def give_back(self, held: Delivery | AnyDeliveries, how: Return) -> None:
        """Nack."""
        grant, batch, index = _held(held)
        await self._ask(grant, batch, partial(grants.nack, grant, batch, index, how), True)

    async def extend(self, held: Delivery | AnyDeliveries, seconds: float) -> None:
        """Hold it longer."""
        grant, batch, _ = _held(held)
        await self._ask(grant, batch, partial(grants.extend, grant, batch, seconds), True)

    async def _ask(self, grant: AnyGrant, batch: Any, make: Callable[[], Request | None], wait: bool) -> None:
        if not grant.leased:
            await self._connection.settle(make, wait)
            return
        once = grants.Once(make)
        try:
            await self._connection.settle(once, True)
        except AlreadySettled:
            if once.is_made:
                grant.lost(batch)
            raise

    async def settle_all(self, deliveries: Iterable[AsyncDelivery], wait: bool) -> None:
        """Ack deliveries; one that was settled before is told of when all the others are."""
        listed = [held_by(one, SEVERAL) for one in each_of(deliveries)]
        problem: AlreadySettled | None = None
        for place, one in enumerate(listed):
            try:
                await self.settle(one, wait and place == len(listed) - 1)
            except AlreadySettled as error:
                problem = error
        if problem is not None:
            raise problem


def _held(held: Delivery | AnyDeliveries) -> tuple[AnyGrant, Any, int | None]:
    """Return the grant, the batch, and the place in it, None for all that is left."""
    if isinstance(held, Deliveries | AnyBatch):
        batch: Any = held.held if isinstance(held, Deliveries) else held
        return batch.settler.grant, batch, None
    batch = held.settler
    return batch.settler.grant, batch, batch.position(held.sequence)
