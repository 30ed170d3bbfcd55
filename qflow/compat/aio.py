"""`asyncio.Queue`, with its items in qflow; `shutdown`, of Python 3.13, is there before."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from qflow.compat.items import LOOK_S, Items, Serializer
from qflow.errors import QueueEmpty

T = TypeVar("T")

if sys.version_info >= (3, 13):
    from asyncio import QueueShutDown
else:

    class QueueShutDown(Exception):
        """The queue was shut down."""


class _Line(deque[asyncio.Future[None]]):
    """Tasks that wait for their turn, first come first served."""

    async def wait(self, is_stuck: Callable[[], bool]) -> None:
        """Return once it is not stuck. A turn that a cancelled task has got goes to the next one."""
        while is_stuck():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.append(turn)
            try:
                await turn
            except BaseException:
                turn.cancel()
                with suppress(ValueError):
                    self.remove(turn)
                if not turn.cancelled() and not is_stuck():
                    self.wake_one()
                raise

    def wake_one(self) -> None:
        while self:
            turn = self.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def wake_all(self) -> None:
        while self:
            self.wake_one()


class AsyncQueue(asyncio.Queue[T]):
    """`asyncio.Queue`, whose items lie in memory up to `capacity_bytes`, and on the disk beyond that.

    With a `path` each put waits for its sync in the event loop: `qflow.aio` has queues whose puts do not.

    Args:
        maxsize, path, name, serializer, capacity_bytes: as `qflow.compat.Queue`.
    """

    def __init__(
        self,
        maxsize: int = 0,
        *,
        path: str | os.PathLike[str] | None = None,
        name: str = "items",
        serializer: Literal["pickle", "json", "bytes"] | Serializer = "pickle",
        capacity_bytes: int | str = "64MiB",
    ) -> None:
        self._items = Items(path, name, serializer, capacity_bytes)
        super().__init__(maxsize)
        self._unfinished_tasks = len(self._items)
        self._all_done = asyncio.Event()
        self._count_done(0)
        self._closed_to_puts = False
        self._getters = _Line()
        self._putters = _Line()

    def qsize(self) -> int:
        """Return how many items there are."""
        return len(self._items)

    def empty(self) -> bool:
        """Tell whether there is no item."""
        return not self._items

    def full(self) -> bool:
        """Tell whether there are `maxsize` items."""
        return 0 < self.maxsize <= len(self._items)

    def put_nowait(self, item: T) -> None:
        """Append an item. Raises asyncio.QueueFull; QueueShutDown: it was shut down."""
        if self._closed_to_puts:
            raise QueueShutDown
        if self.full():
            raise asyncio.QueueFull
        try:
            self._items.put(item)
        except BaseException:  # it cannot be stored, and leaves the slot: another's turn
            self._putters.wake_one()
            raise
        self._unfinished_tasks += 1
        self._all_done.clear()
        self._getters.wake_one()

    async def put(self, item: T) -> None:
        """Append an item, waiting for a free slot. Raises QueueShutDown: it was shut down."""
        await self._putters.wait(lambda: self.full() and not self._closed_to_puts)
        self.put_nowait(item)

    def get_nowait(self) -> T:
        """Take the first item. Raises asyncio.QueueEmpty; QueueShutDown: it was shut down, and is empty."""
        if self.empty():
            raise QueueShutDown if self._closed_to_puts else asyncio.QueueEmpty
        try:
            item: T = self._items.get()
        except QueueEmpty:
            raise asyncio.QueueEmpty from None
        except BaseException:  # it cannot be loaded, and stays the first: another's turn
            self._getters.wake_one()
            raise
        self._putters.wake_one()
        return item

    async def get(self) -> T:
        """Take the first item, waiting for one. Raises QueueShutDown: it was shut down, and is empty.

        An item that another process holds is waited for like one that is not there.
        """
        while True:
            await self._getters.wait(lambda: self.empty() and not self._closed_to_puts)
            try:
                return self.get_nowait()
            except asyncio.QueueEmpty:
                try:
                    await asyncio.sleep(LOOK_S)
                except BaseException:
                    self._getters.wake_one()  # another looks at what is held, as this one did
                    raise

    def task_done(self) -> None:
        """Count an item that was taken as done. Raises ValueError: more often than there were items."""
        if self._unfinished_tasks <= 0:
            raise ValueError("task_done() called too many times")
        self._count_done(1)

    async def join(self) -> None:
        """Wait until each item that was put is done."""
        await self._all_done.wait()

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse puts from now on, and gets once it is empty; with `immediate`, drop what is there, as it lies.

        Who waits is told, also where dropping raises.
        """
        self._closed_to_puts = True
        try:
            if immediate:
                self._count_done(self._items.drop())
        finally:
            self._getters.wake_all()
            self._putters.wake_all()

    def close(self) -> None:
        """Let go of the spool; what was not kept is gone. Done by itself when nothing refers to the queue any more.

        It is shut down then: who waits in `put` or `get` gets QueueShutDown, and so does who comes later; `join`
        returns. So it is where closing raises, as `Broker.close`.
        """
        try:
            self._items.close()
        finally:
            self.shutdown()
            self._count_done(self._unfinished_tasks)

    def _count_done(self, items: int) -> None:
        self._unfinished_tasks = max(0, self._unfinished_tasks - items)
        if not self._unfinished_tasks:
            self._all_done.set()

    def _format(self) -> str:
        """Return what `repr` shows."""
        found = {"qsize": self.qsize(), "tasks": self._unfinished_tasks}
        return " ".join([f"maxsize={self.maxsize!r}", *(f"{name}={count}" for name, count in found.items() if count)])


Queue = AsyncQueue
"""As `asyncio` calls it."""
