"""Tasks beside those of the connections, and turns of tasks that have a lot to do."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from qflow.errors import BrokerClosed, QflowError
from qflow.loggers import Logger

TURN_S = 0.005
"""What a client sends, or is sent, is done for so long before others have a turn: a message takes 10 µs, or 40 ms."""


class Turn:
    """The time of one task until others have theirs."""

    __slots__ = ("_began_s",)

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def is_over(self) -> bool:
        """Tell whether others are to have their turn. Cost: 0.1 µs."""
        return time.monotonic() - self._began_s >= TURN_S

    async def next(self) -> None:
        """Return when others had theirs."""
        await asyncio.sleep(0)
        self._began_s = time.monotonic()


class Turns:
    """Turns of many tasks: what all of them do before the loop looks at anything else is bounded. One a server."""

    def __init__(self, most: int) -> None:
        """`most`: of what is counted, such as messages, in one turn of the loop."""
        self._most = most
        self._begun = 0
        """In this turn, or by those that were woken for it."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def begin(self, count: int = 1) -> None:
        """Return when so much may be done: first come, first served."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._begun >= self._most or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            await turn
            return
        self._begun += count

    def _next(self) -> None:
        """Begin the next turn of the loop."""
        self._begun = 0
        while self._waiting and self._begun < self._most:
            count, turn = self._waiting.popleft()
            if not turn.done():  # else its task has ended
                turn.set_result(None)
                self._begun += count
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)


class Tasks:
    """Tasks that somebody owns: kept until they are done, cancelled when the owner ends."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have a task do something; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, BrokerClosed):
            self._logger.error("a task of the server failed", exc_info=error)

    async def close(self) -> None:
        """Cancel all, and return when they have ended."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


P = ParamSpec("P")
T = TypeVar("T")


def ending(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function whose calls are done to their end; see `to_its_end`."""

    @wraps(work)
    async def done(*args: P.args, **kwargs: P.kwargs) -> T:
        return await to_its_end(work(*args, **kwargs))

    return done


async def attempt(work: Coroutine[Any, Any, None], warn: Callable[[str, object], None]) -> None:
    """Do something whose failure must not keep others from being done: it is warned of."""
    try:
        await work
    except QflowError as error:
        warn("something is left of a connection that ended: %s", error)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns, which is done to its end even if this task is cancelled; it is cancelled then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
