"""Requests of one connection whose answers may be long: a few are done at once, and the others wait without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from qflow.named_tuples import NamedTuple

LONG = frozenset((
    "query", "query_next", "last", "browse", "browse_next", "queues", "streams", "schedules", "declare_queues", "stats",
    "figures", "queue_stats", "stream_stats", "subscription_stats", "check", "recovery", "hello",
))  # fmt: skip
"""Operations whose answers may be long, and that wait for no other request."""
MADE_TOGETHER = 2
"""Those of one connection that are done at once: as many as there are threads that read the disk."""
MOST_LONG = 100
"""Those that wait: nothing more is read beyond that."""


class Cost(NamedTuple):
    """What a request takes until it is answered."""

    size: int
    has_columns: bool
    taken: int
    """From the budget; see there."""


class Request(NamedTuple):
    """What is done by a task."""

    number: int
    head: dict[str, Any]
    columns: Any
    cost: Cost


class LongRequests:
    """See the module. In one event loop.

    A task takes 2.5 KB, and thousands of requests may have come before the first one is answered.
    """

    def __init__(self, begin: Callable[[Request], asyncio.Task[None]], may_begin: Callable[[], bool]) -> None:
        """`may_begin`: there is room for an answer."""
        self._begin = begin
        self._may_begin = may_begin
        self.waiting: dict[int, Request] = {}
        """Those that are not begun, in order; below 0 those that have no number."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._unnumbered = count(-1, -1)

    def add(self, request: Request) -> None:
        """Have a request done when `look` finds that it is its turn."""
        self.waiting[request.number or next(self._unnumbered)] = request

    def look(self) -> None:
        """Begin what may be begun."""
        while self.waiting and len(self._tasks) < MADE_TOGETHER and self._may_begin():
            task = self._begin(self.waiting.pop(next(iter(self.waiting))))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.look()

    def take_all(self) -> list[Request]:
        """Return those that are not begun, and will not be."""
        waiting, self.waiting = self.waiting, {}
        return list(waiting.values())
