"""What the tasks of one event loop share in one broker: their wake-ups, and the requests of one turn.

A handler of a signal that raises may strike what the loop was to call here, and asyncio calls it no more. Where the
program goes on in the same loop, maintenance has it called again: see `Home.look_after`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

from qflow.errors import again
from qflow.handlers import is_of_handler
from qflow.memory.waiting import in_place

T = TypeVar("T")

MOST_AHEAD = 4_096
"""As many tasks at most, some 5 KB each, have room and wait for their sync while what comes behind them is taken."""


class Request(Protocol):
    """A put, settle or unit handed to the log."""

    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...
    def outcome(self) -> Any: ...


class Promise(Protocol):
    """A future, or what is told the same."""

    def done(self) -> bool: ...
    def set_result(self, result: Any) -> None: ...
    def set_exception(self, exception: BaseException) -> None: ...


Crowd = list[tuple[Promise, Request, Callable[[], Any]]]
"""Requests that tasks handed to the log in one turn of their loop, with their futures."""


class Log(Protocol):
    """The transaction log, as far as tasks need it."""

    def put(self, put: Any, soon: bool = True) -> Any: ...
    def tell(self, request: Any, told: Callable[[], object]) -> None: ...
    def now(self) -> None: ...


class Home:
    """State that the tasks of one event loop share in one broker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Log | None) -> None:
        self.loop = loop
        self._thread = get_ident()
        """That of the loop: under gevent, all that it calls threads have the same loop running."""
        self._log = log
        self._calls: deque[Callable[[], object]] = deque()
        self._called = False
        self._crowd: Crowd | None = None
        self._rooms: dict[asyncio.Future[Any], asyncio.Future[bool]] = {}
        self.unfinished: dict[Callable[[], object], asyncio.Task[Any] | None] = {}
        """What gives up each thing that a task has begun and not ended, twice is fine; and the task, so that it is not
        collected before: the collector comes in the middle of any call, under whatever lock."""
        self.is_over = False
        """The loop is closed, and all that was unfinished given up: what is left of a task has nothing to do."""

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function; from any thread, also under locks. Cost: 0.2 µs, 10 µs if the loop sleeps."""
        self._calls.append(function)
        if not self._called:
            if asyncio._get_running_loop() is self.loop and get_ident() == self._thread:
                self.loop.call_soon(self._run)
                self._called = True  # behind that: a handler may raise between, and twice is harmless
                return
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # the loop is closed
                self._forget_calls()

    def _forget_calls(self) -> None:
        self._called = False
        self._calls.clear()

    def give_up(self) -> None:
        """Give up what tasks have begun, which do not go on: the loop is closed."""
        self._crowd = None
        self._forget_calls()
        unfinished = dict(self.unfinished)  # with the tasks, until the end
        with ExitStack() as each:  # whichever of them fails
            each.callback(setattr, self, "is_over", True)  # the last one
            for one in unfinished:
                each.callback(self.end, one)

    def begin(self, give_up: Callable[[], object]) -> None:
        """Note what gives up something that the running task begins."""
        self.unfinished[give_up] = asyncio.current_task(self.loop)

    def undo(self, give_up: Callable[[], object]) -> None:
        """Give up what a task has begun, unless maintenance has: of a closed loop, the collector may be at work."""
        if not self.is_over:
            in_place(give_up)

    def end(self, give_up: Callable[[], object]) -> None:
        """Give up what a task has begun, once more if that was struck, and have it unfinished no more."""
        try:
            try:
                in_place(give_up)
            except BaseException:
                in_place(give_up)
                raise
        finally:
            self.unfinished.pop(give_up, None)

    def look_after(self) -> None:
        """Have a loop that runs do what stands here: an interrupt may have struck what was to do it. Any thread."""
        if (self._calls or self._crowd) and self.loop.is_running():
            with suppress(RuntimeError):  # it was closed meanwhile
                self.loop.call_soon_threadsafe(self._catch_up)

    def _catch_up(self) -> None:
        self._run()
        self._ring()

    def _run(self) -> None:
        """Do what the loop was to call; what an interrupt strikes stands here still, and is done again."""
        self._called = False
        calls = self._calls
        while calls:
            try:
                calls[0]()
            except Exception as error:
                if not is_of_handler(error):
                    calls.popleft()
                raise
            calls.popleft()

    def room_of(self, task: asyncio.Future[Any]) -> asyncio.Future[bool]:
        """Return what is done once a task that puts has its room, True, or ends without. Asked for before it runs.

        Where `MOST_AHEAD` others are on their way, it is done when the task ends.
        """
        room: asyncio.Future[bool] = self.loop.create_future()
        if len(self._rooms) < MOST_AHEAD:
            self._rooms[task] = room
        task.add_done_callback(partial(self._ended, room))
        return room

    def has_room(self, task: asyncio.Future[Any] | None = None) -> None:
        """Tell that what a task puts, the running one if it says none, is in the log: only its sync is waited for."""
        room = self._rooms.get(task or asyncio.current_task(self.loop)) if self._rooms else None  # type: ignore[arg-type]
        if room is not None and not room.done():
            room.set_result(True)

    def _ended(self, room: asyncio.Future[bool], task: asyncio.Future[Any]) -> None:
        self._rooms.pop(task, None)
        if not room.done():
            room.set_result(False)

    def resolved(self, result: T) -> asyncio.Future[T]:
        """Return a future that has a result."""
        future: asyncio.Future[T] = self.loop.create_future()
        future.set_result(result)
        return future

    def confirmed(self, request: Request, outcome: Callable[[], Any] | None = None) -> asyncio.Future[Any]:
        """Return a future of a request just handed to the log: resolved when it is done, with its outcome or another.

        Requests of one turn of the loop are written together, after all tasks that are ready now have run. Their
        futures are resolved together, when the last request is done: the log does most of them in order. Those that
        others have passed, as they pass what is stored ahead, are looked at again when the last of them is done.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        self.promise(request, future, outcome)
        return future

    def promise(self, request: Request, promise: Promise, outcome: Callable[[], Any] | None = None) -> None:
        """`confirmed` with something that is told the outcome as a future would be."""
        if self._crowd is None:
            self.loop.call_soon(self._ring)
            self._crowd = []  # behind that: a handler may raise between, and a call for nobody is harmless
        self._crowd.append((promise, request, outcome or request.outcome))

    def _ring(self) -> None:
        crowd = self._crowd
        if crowd:
            self._await_last(crowd)
        self._crowd = None  # behind that: an interrupt may come before, and twice is fine
        if crowd and self._log is not None:
            self._log.now()

    def _await_last(self, crowd: Crowd) -> None:
        """Have futures resolved when the last of their requests is done."""
        assert self._log is not None
        _, last, _ = crowd[-1]
        self._log.tell(last, partial(self.call, partial(self._resolve, crowd)))

    def _resolve(self, crowd: Crowd) -> None:
        """Resolve the futures of requests that are done; twice is fine. In the loop."""
        left: Crowd = []
        for one in crowd:
            future, request, outcome = one
            if future.done():
                continue  # resolved before, or cancelled
            if not request.done:
                left.append(one)
            elif request.error is not None:
                future.set_exception(again(request.error))
            else:
                future.set_result(outcome())
        if left:
            self._await_last(left)
        crowd.clear()  # requests lead here
