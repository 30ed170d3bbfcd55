"""`queue.Queue`, with its items in qflow. What the standard library has is inherited; `shutdown` here before 3.13."""

from __future__ import annotations

import math
import os
import queue
import sys
import time
from typing import TYPE_CHECKING, Literal, TypeVar

from qflow.compat.items import LOOK_S, Items, Serializer
from qflow.errors import QueueEmpty

T = TypeVar("T")

if sys.version_info >= (3, 13):
    from queue import ShutDown

    _Queue = queue.Queue
else:

    class ShutDown(Exception):
        """The queue was shut down."""

    class _Queue(queue.Queue[T]):
        """`queue.Queue` whose puts end by a shutdown, as from Python 3.13 on."""

        is_shutdown = False

        def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
            """Append an item; see `queue.Queue.put`. Raises ShutDown: it was shut down."""
            with self.not_full:
                if not self.is_shutdown and block and timeout is not None and timeout < 0 and self.maxsize > 0:
                    raise ValueError("'timeout' must be a non-negative number")
                ends = None if timeout is None else time.monotonic() + timeout
                while not self.is_shutdown and 0 < self.maxsize <= self._qsize():
                    left = None if ends is None else ends - time.monotonic()
                    if not block or (left is not None and left <= 0):
                        raise queue.Full
                    self.not_full.wait(left)
                if self.is_shutdown:
                    raise ShutDown
                self._put(item)
                self.unfinished_tasks += 1
                self.not_empty.notify()


if TYPE_CHECKING:
    _Base = queue.Queue
else:
    _Base = _Queue


class Queue(_Base[T]):
    """`queue.Queue`, whose items lie in memory up to `capacity_bytes`, and on the disk beyond that.

    An item is settled when it is taken; `task_done` and `join` count in this process, as they do there.

    Args:
        maxsize: how many items there may be; 0 = any number.
        path: a spool where items are kept, synced before `put` returns, also for the next process; None = they go with
            this queue. Those kept from before count as unfinished tasks. While this queue is open, no other process
            may put into the queue in the spool, take from it or purge it: who waits here is not woken by that.
        name: of the queue in the spool.
        serializer: how items become bytes: `"pickle"` (the default) any object; `"json"`, `"bytes"`, or what has
            `dumps` and `loads`. Loading a pickle runs code: take it for spools that nobody else can write.
        capacity_bytes: memory for items.
    """

    if TYPE_CHECKING:
        is_shutdown: bool

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
        self.unfinished_tasks: int = len(self._items)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the first item; see `queue.Queue.get`. Raises ShutDown: it was shut down, and is empty.

        An item that another process holds is waited for like one that is not there.
        """
        with self.not_empty:
            if self.is_shutdown and not self._qsize():
                raise ShutDown
            if block and timeout is not None and timeout < 0:
                raise ValueError("'timeout' must be a non-negative number")
            ends = math.inf if timeout is None else time.monotonic() + timeout
            while True:
                if self._qsize():
                    try:
                        item = self._get()
                        self.not_full.notify()
                        return item
                    except QueueEmpty:
                        """Others hold it."""
                    except BaseException:  # it cannot be loaded, and stays the first: another's turn
                        self.not_empty.notify()
                        raise
                elif self.is_shutdown:
                    raise ShutDown
                left = ends - time.monotonic() if block else 0.0
                try:
                    if left <= 0:
                        raise queue.Empty
                    left = min(left, LOOK_S if self._qsize() else math.inf)
                    self.not_empty.wait(None if left == math.inf else left)
                except BaseException:  # of the time-out, or an interrupt
                    if self._qsize():
                        self.not_empty.notify()  # another looks at what is held, as this one did
                    raise

    def shutdown(self, immediate: bool = False) -> None:
        """Refuse puts from now on, and gets once it is empty; with `immediate`, drop what is there, as it lies.

        Who waits is told, also where dropping raises.
        """
        with self.mutex:
            self.is_shutdown = True
            try:
                if immediate:
                    self.unfinished_tasks = max(0, self.unfinished_tasks - self._items.drop())
            finally:
                for one in (self.all_tasks_done, self.not_empty, self.not_full):
                    one.notify_all()

    def close(self) -> None:
        """Let go of the spool; what was not kept is gone. Done by itself when nothing refers to the queue any more.

        It is shut down then: who waits in `put` or `get` gets ShutDown, and so does who comes later; `join` returns.
        So it is where closing raises, as `Broker.close`.
        """
        try:
            self._items.close()
        finally:
            self.shutdown()
            with self.all_tasks_done:
                self.unfinished_tasks = 0
                self.all_tasks_done.notify_all()

    def _init(self, maxsize: int) -> None:
        """Nothing: the items are there."""

    def _qsize(self) -> int:
        return len(self._items)

    def _put(self, item: T) -> None:
        try:
            self._items.put(item)
        except BaseException:  # it cannot be stored, and leaves the slot: another's turn
            self.not_full.notify()
            raise

    def _get(self) -> T:
        item: T = self._items.get()
        return item
