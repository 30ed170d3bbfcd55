"""One caller's connection: frames in, a task for each request, frames out; and when to stop reading.

Requests without columns are always read, for a put may wait for the ack that makes room, and a get for the put; with
columns, those within the credit of the connection, which clients keep to. Nothing is read while the caller goes beyond
that or does not read its answers, while many requests with long answers wait for each other, or while a large frame
waits for room in the budget of all connections. So a caller that hangs holds up itself alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from qflow.aio.broker import AsyncBroker
from qflow.errors import AlreadySettled, BrokerClosed, FormatTooNew, InvalidArgument
from qflow.loggers import get_logger
from qflow.remote.server.answers import Answers
from qflow.remote.server.budget import LARGE, Budget
from qflow.remote.server.lone import MOST_LONE, MOST_TOGETHER, Lone, LoneThread
from qflow.remote.server.long import LONG, MOST_LONG, Cost, LongRequests, Request
from qflow.remote.server.operations import OPERATIONS
from qflow.remote.server.operations.admin import MOST_REQUESTS, frame_bytes
from qflow.remote.server.session import Session
from qflow.remote.wire import frames
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.frames import Frame, FrameReader, WireError

MOST_WAITING = 10_000
"""Requests without columns that are under way of one connection: more are refused."""
SLACK_BYTES = 4 * 2**20
"""What is under way beyond the credit of a connection, for requests without columns."""
STALLED_S = 10.0
"""A large frame that somebody else waits for must go on coming within that."""
WAITS = "get", "subscription_get"
"""Operations that wait for messages, perhaps without end."""
LAST_WORDS_S = 2.0
"""As long is waited, at the end, for a caller to take what became of its calls."""
TOO_LATE = AlreadySettled.__name__
"""What was settled is not held any more: an error of nobody, where nobody waits to be told."""
CLOSED = BrokerClosed.__name__
"""The owner has closed the spool meanwhile: the end of the connection, of which all its calls are told."""
HELD_S = 1.0
"""A large frame that is not answered within that waits for room in a queue: it takes nothing from the budget then."""

_logger = get_logger("qflow")


class _Put:
    """A put that takes no task; told its outcome as a future would be."""

    __slots__ = ("connection", "cost", "count", "number")

    def __init__(self, connection: Connection, number: int, count: int, cost: Cost) -> None:
        self.connection = connection
        self.number = number
        self.count = count
        self.cost = cost

    def done(self) -> bool:
        return self.number not in self.connection.puts

    def set_result(self, first: int | None) -> None:
        if first is None:
            self.connection.put_done(self, {"result": {"first": None, "count": 0}})
        else:
            self.connection.put_done(self, b'{"result":{"first":%d,"count":%d}}' % (first, self.count))

    def set_exception(self, error: BaseException) -> None:
        self.connection.put_done(self, encode_error(error))


class Connection(asyncio.BufferedProtocol):
    """See the module."""

    def __init__(
        self,
        broker: AsyncBroker,
        budget: Budget,
        thread: LoneThread,
        refusal: str | None,
        gone: Callable[[Connection], object],
    ) -> None:
        self._broker = broker
        self._budget = budget
        self._thread = thread
        self._refusal = refusal
        self._gone = gone
        self._transport: Any = None
        self._socket: socket.socket | None = None
        self.lone: Lone | None = None
        self._answers = Answers(self._look)
        self._long = LongRequests(self._begin_task, lambda: self._answers.has_room)
        self._session = Session(broker, OPERATIONS, flow=self._answers, notify=self._notify)
        self._reader = FrameReader(frame_bytes(broker.broker.settings))
        self._start: bytearray | None = bytearray()
        """What came of the preamble; None once it is complete."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        """Those of the tasks that are of `WAITS`."""
        self.puts: dict[int, _Put] = {}
        self._quiet = asyncio.Event()
        """Set when the last put is done, at the end, and no thread is at work."""
        self._is_full = False
        self._unnumbered: set[asyncio.Task[None]] = set()
        self._under_way_bytes = 0
        """But for requests that are larger than the credit, of which there may be one."""
        self._large = 0
        self._with_columns = 0
        """Requests that are under way."""
        self._credit = 0
        self._loop = asyncio.get_running_loop()
        self._waits = False
        self._stalled: asyncio.TimerHandle | None = None
        self._ending = False
        self._connecting: asyncio.Task[Any] | None = None
        self._drained: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def begin(self, one: socket.socket, pid: int) -> None:
        """Take over a socket, and know whose it is; see `serving.peer`."""
        self._socket = one
        self._session.peer_pid = pid
        self._connecting = self._loop.create_task(self._loop.connect_accepted_socket(lambda: self, one))

    # Of the transport ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._credit = self._session.credit_bytes = self._budget.grant(self)
        self._answers.begin(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._ending = True
        self._stop_watching()
        self._budget.leave(self)
        self._answers.end()
        for request in self._long.take_all():
            self._release(request.cost)
        for task in [*self._tasks.values(), *self._unnumbered]:
            task.cancel()
        self._closing = self._loop.create_task(self._close_session())

    async def _close_session(self) -> None:
        tasks = [*self._tasks.values(), *self._unnumbered]
        if tasks:
            await asyncio.wait(tasks)
        try:
            await self._session.close()
        finally:
            self._answers.lost.set()
            self._gone(self)

    def pause_writing(self) -> None:
        self._answers.pause()

    def resume_writing(self) -> None:
        self._answers.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._budget.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._budget.buffer[:nbytes]
        if self._transport.is_closing():
            return
        try:
            if self._start is not None:
                data = memoryview(self._greeted(data))
            if self._start is None and data:
                for frame in self._reader.feed(data):
                    self._begin(frame)
                self._count()
        except WireError as error:
            self._refuse(encode_error(InvalidArgument(str(error))))

    def _notify(self, head: dict[str, Any]) -> None:
        if not self._ending and self._answers.has_room:
            self._answers.write(0, head, [])

    # Requests --------------------------------------------------------------------------------------------------------

    def _greeted(self, data: memoryview) -> bytes:
        """Take what the connection begins with, and answer it; return what follows."""
        assert self._start is not None
        self._start += data
        if len(self._start) < frames.PREAMBLE_BYTES:
            return b""
        version, rest = frames.read_preamble(bytes(self._start)), bytes(self._start[frames.PREAMBLE_BYTES :])
        self._transport.write(frames.preamble(min(version, frames.VERSION)))
        if self._refusal is not None:
            self._refuse(encode_error(InvalidArgument(self._refusal)))
            return b""
        if version < frames.OLDEST:
            text = (
                f"this owner speaks versions {frames.OLDEST} to {frames.VERSION} of the protocol of its door, and "
                f"this client speaks {version}: upgrade qflow there"
            )
            self._refuse(encode_error(FormatTooNew(text)))
            return b""
        self._start = None
        return rest

    def _begin(self, frame: Frame) -> None:
        if self.lone is not None:  # what came before the answer to that is lost
            self.lone.stop()  # the thread ends it
            return
        number, head, columns, size = frame
        if head.get("op") == "cancel":
            self._cancel(head.get("request"))
            return
        if head.get("op") == "lone" and number and not self._ending:
            self._answers.write(number, {"result": self._begin_lone() and MOST_TOGETHER}, [])
            self._answers.flush()
            return
        if number in self._tasks or number in self.puts or number in self._long.waiting:
            raise WireError(f"request {number} is under way already: each has a number of its own")
        self._session.grants.forget_request(number)
        taken = self._budget.complete(self)
        self._stop_watching()
        cost = Cost(size, bool(columns), taken)
        if self._ending or (number and not columns and len(self._tasks) >= MOST_WAITING):
            self._budget.release(taken)
            text = f"{MOST_WAITING} requests of this connection are under way: let some end, or connect once more"
            if number:
                why = self._session.closed() if self._ending else InvalidArgument(text)
                self._answers.write(number, encode_error(why), [])
            return
        self._under_way_bytes += size if size <= self._credit else 0
        self._with_columns += cost.has_columns
        self._large += size > self._credit
        if taken:
            self._loop.call_later(HELD_S, self._budget.release, taken)
        if number and columns:
            put = _Put(self, number, len(columns[0]), cost)
            if self._session.put_at_once(head, columns, put):
                self.puts[number] = put
                self._look()
                return
        op, request = head.get("op"), Request(number, head, columns, cost)
        if type(op) is str and op in LONG:
            self._long.add(request)
        else:
            self._begin_task(request)
        self._look()

    def _begin_task(self, request: Request) -> asyncio.Task[None]:
        number, head, columns, cost = request
        task = self._loop.create_task(self._answer(number, head, columns))
        if number:
            self._tasks[number] = task
            if head.get("op") in WAITS:
                self._waiting.add(task)
        else:
            self._unnumbered.add(task)
        task.add_done_callback(lambda task: self._answered(number, task, cost))
        return task

    def _begin_lone(self) -> bool:
        """Have the thread serve this connection from now on; False: it cannot."""
        if self._tasks or self.puts or self._is_full or not self._answers.are_sent or self._socket is None:
            return False
        if len(self._thread) >= MOST_LONE:
            return False
        self._transport.pause_reading()
        self.lone = Lone(self._broker.broker, self._thread, self._socket, self._lone_ends)
        try:
            self._thread.add(self.lone)
        except (RuntimeError, OSError):  # there are as many threads, or files, as there may be
            self.lone = None
            self._transport.resume_reading()
            return False
        self._budget.give_back(self)
        return True

    def _lone_ends(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._lone_over)

    def _lone_over(self) -> None:
        """The thread is done with it, for the caller has ended, or the broker is closed."""
        self.lone = None
        if self._ending:
            self._quiet.set()
        else:
            self.abort()

    async def _answer(self, number: int, head: dict[str, Any], columns: Any) -> None:
        head = {**head, "request": number}  # what it is answered with may go back by that; others have the same head
        reply = await self._session.call(head, columns)
        if number:
            self._answers.write(number, *reply)
        elif (error := reply[0].get("error", TOO_LATE)) == CLOSED:
            self._refuse(reply[0])  # no fault of this operation: calls that wait say the same
        elif error != TOO_LATE:
            text = f"nobody waits for operation {head.get('op')!r}, and it failed: {reply[0]['text']}"
            self._refuse({**reply[0], "text": text})

    def put_done(self, put: _Put, answer: bytes | dict[str, Any]) -> None:
        """A put without a task is done: answer it."""
        self._release(put.cost)
        del self.puts[put.number]
        if self._ending and not self.puts:
            self._quiet.set()
        self._answers.write(put.number, answer, [])
        if self._is_full:
            self._look()

    def _answered(self, number: int, task: asyncio.Task[None], cost: Cost) -> None:
        self._release(cost)
        if number:
            self._tasks.pop(number, None)
            self._waiting.discard(task)
            if task.cancelled():
                self._answers.write(number, _cancelled(), [])
        else:
            self._unnumbered.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("%s: an answer failed", self._broker.path, exc_info=task.exception())
            self.abort()
        self._look()

    def _release(self, cost: Cost) -> None:
        self._under_way_bytes -= cost.size if cost.size <= self._credit else 0
        self._with_columns -= cost.has_columns
        self._large -= cost.size > self._credit
        self._budget.release(cost.taken)

    def _cancel(self, number: object) -> None:
        if not isinstance(number, int):
            return
        if (task := self._tasks.get(number)) is not None and not task.done():
            task.cancel()
        elif (request := self._long.waiting.pop(number, None)) is not None:
            self._give_up(request, _cancelled())
        elif number:  # its answer is on its way: what is asked for next comes behind what that holds
            self._session.grants.give_up_of(number)

    def _give_up(self, request: Request, why: dict[str, Any]) -> None:
        """Tell why a request will not be begun."""
        self._release(request.cost)
        if request.number:
            self._answers.write(request.number, why, [])

    # When to read ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read, or not, as things stand."""
        if self.lone is not None or self._transport is None or self._transport.is_closing():
            return
        full = self._with_columns > MOST_REQUESTS or len(self._unnumbered) >= MOST_REQUESTS
        full = full or self._large > 1 or self._under_way_bytes > self._credit + SLACK_BYTES
        full = full or self._waits or not self._answers.has_room or len(self._long.waiting) > MOST_LONG
        if full != self._is_full:
            self._is_full = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
        if self._long.waiting:
            self._long.look()

    def _count(self) -> None:
        """Note how much of a large frame has come, and whether more of it may."""
        if self._reader.held > LARGE:
            self._waits = not self._budget.come(self, self._reader.held, self._may_come)
            self._look()
            self._stop_watching()
            self._stalled = self._loop.call_later(STALLED_S, self._check_stalled)

    def _may_come(self) -> None:
        self._waits = False
        self._look()

    def _check_stalled(self) -> None:
        """Nothing has come for a while of a large frame."""
        if self._budget.wanted and not self._waits:
            text = f"nothing came of a frame for {STALLED_S:.0f} s that others wait for"
            self._refuse(encode_error(InvalidArgument(text)))
        else:
            self._stalled = self._loop.call_later(STALLED_S, self._check_stalled)

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # The end ---------------------------------------------------------------------------------------------------------

    def _refuse(self, head: dict[str, Any]) -> None:
        """End the connection of a caller that does not keep to the protocol, which may read nothing, either."""
        self._say_last(head)
        self._loop.call_later(LAST_WORDS_S, self._transport.abort)

    def _say_last(self, head: dict[str, Any]) -> None:
        """Tell the caller in a sentence why, and end the connection when it has read all that it is sent."""
        if not self._transport.is_closing():
            self._ending = True
            self._answers.write(0, head, [])
            self._answers.flush()
            self._transport.close()

    def drain(self, *, ends: bool) -> None:
        """Give the caller no more messages, and end the connection if it may and the caller holds none."""
        self._answers.is_draining = True
        if ends and not self._drained and not self._session.holds():
            self._drained = self._loop.create_task(self.end())

    async def end(self) -> None:
        """End the connection: the broker closes. What is under way is answered before, but for waits for messages.

        What comes meanwhile is not begun, and told so; what is under way may be cancelled.
        """
        self._ending = True
        if self.lone is not None:
            self.lone.stop()
        for request in self._long.take_all():
            self._give_up(request, encode_error(self._session.closed()))
        if self.puts or self.lone is not None:
            await self._quiet.wait()
        tasks: set[asyncio.Task[Any]] = {*self._tasks.values(), *self._unnumbered} - self._waiting
        if self._connecting is not None:
            tasks.add(self._connecting)
        if tasks:
            await asyncio.wait(tasks)
        if self._transport is not None:
            if self._start is not None and not self._transport.is_closing():  # it has just come, and is told no less
                self._transport.write(frames.preamble())
            self._say_last({"closing": str(self._session.closed())})
            await self._answers.lost.wait()

    def abort(self) -> None:
        """End the connection as it is."""
        self._ending = True
        if self.lone is not None:
            self.lone.stop()
        if self._transport is not None:
            self._transport.abort()


def _cancelled() -> dict[str, Any]:
    return encode_error(InvalidArgument("the request was cancelled"))
