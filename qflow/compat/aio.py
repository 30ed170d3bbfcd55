"""`asyncio.Queue`, with its items in qflow. What the standard library has is inherited; `shutdown` here before 3.13."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from qflow.compat.items import Items, Serializer

T = TypeVar("T")

if sys.version_info >= (3, 13):
    from asyncio import QueueShutDown

    _Queue = asyncio.Queue
else:

    class QueueShutDown(Exception):
        """The queue was shut down."""

    class _Queue(asyncio.Queue[T]):
        """`asyncio.Queue` with the `shutdown` of Python 3.13."""

        _is_shutdown = False

        def put_nowait(self, item: T) -> None:
            """Append an item. Raises QueueShutDown: it was shut down."""
            if self._is_shutdown:
                raise QueueShutDown
            super().put_nowait(item)

        async def put(self, item: T) -> None:
            """Append an item, waiting for a free slot. Raises QueueShutDown: it was shut down."""
            own: Any = self
            await self._wait(own._putters, self.full)
            self.put_nowait(item)

        def get_nowait(self) -> T:
            """Take the first item. Raises QueueShutDown: it was shut down, and is empty."""
            if self._is_shutdown and self.empty():
                raise QueueShutDown
            return super().get_nowait()

        async def get(self) -> T:
            """Take the first item, waiting for one. Raises QueueShutDown: it was shut down, and is empty."""
            own: Any = self
            await self._wait(own._getters, self.empty)
            return self.get_nowait()

        async def _wait(self, waiters: deque[asyncio.Future[None]], is_stuck: Callable[[], bool]) -> None:
            own: Any = self
            while is_stuck() and not self._is_shutdown:
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                waiters.append(waiter)
                try:
                    await waiter
                except BaseException:
                    waiter.cancel()
                    with suppress(ValueError):
                        waiters.remove(waiter)
                    if not is_stuck() and not waiter.cancelled():
                        own._wakeup_next(waiters)  # it was this one's turn
                    raise

        def shutdown(self, immediate: bool = False) -> None:
            """Refuse puts from now on, and gets once it is empty; with `immediate`, drop what is there."""
            self._is_shutdown = True
            own: Any = self
            if immediate:
                while not self.empty():
                    self._get()
                    if own._unfinished_tasks > 0:
                        own._unfinished_tasks -= 1
                if own._unfinished_tasks == 0:
                    own._finished.set()
            for waiting in (own._getters, own._putters):
                while waiting:
                    waiter = waiting.popleft()
                    if not waiter.done():
                        waiter.set_result(None)


if TYPE_CHECKING:
    _Base = asyncio.Queue
else:
    _Base = _Queue


class AsyncQueue(_Base[T]):
    """`asyncio.Queue`, whose items lie in memory up to `capacity_bytes`, and on the disk beyond that.

    With a `path` each put waits for its sync in the event loop: `qflow.aio` has queues whose puts do not.

    Args:
        maxsize, path, name, serializer, capacity_bytes: as `qflow.compat.Queue`.
    """

    if TYPE_CHECKING:

        def shutdown(self, immediate: bool = False) -> None:
            """Refuse puts from now on, and gets once it is empty; with `immediate`, drop what is there."""

    def __init__(
        self,
        maxsize: int = 0,
        *,
        path: str | os.PathLike[str] | None = None,
        name: str = "items",
        serializer: Literal["pickle", "json", "bytes"] | Serializer = "pickle",
        capacity_bytes: int | str = "64MiB",
    ) -> None:
        self._queue = Items(path, name, serializer, capacity_bytes)
        super().__init__(maxsize)
        if len(self._queue):
            self._unfinished_tasks = len(self._queue)
            self._finished.clear()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let go of the spool; what was not kept is gone. Done by itself when nothing refers to the queue any more."""
        self._queue.close()

    def _format(self) -> str:
        found = {"qsize": self.qsize(), "tasks": self._unfinished_tasks}
        return " ".join([f"maxsize={self.maxsize!r}", *(f"{name}={count}" for name, count in found.items() if count)])

    def _init(self, maxsize: int) -> None:
        """Nothing: the items are there."""

    def _put(self, item: T) -> None:
        self._queue.put(item)

    def _get(self) -> T:
        item: T = self._queue.get()
        return item


Queue = AsyncQueue
"""As `asyncio` calls it."""
