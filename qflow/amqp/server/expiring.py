"""What expires in a queue is a dead letter when it does, not at the next round of maintenance.

A timer of the event loop stands for what comes next to expire at the head of a queue. It is set when a message with a
time to live is put by AMQP, and when what a client held goes back.
"""

from __future__ import annotations

import asyncio
import time

from qflow.aio.queue import AsyncQueue
from qflow.amqp.model.arguments import QueueArguments
from qflow.amqp.server.stores import QueueStore, StreamStore
from qflow.queues.queue import parts_of
from qflow.queues.tending import expire
from qflow.serving.tasks import Tasks

LATE_S = 0.001
"""Moments of expiry are whole milliseconds: the timer is not to be early."""
AGAIN_S = 0.5
"""What has expired and could not leave is tried again after so long."""


class Expiring:
    """The timer of one queue; see the module."""

    def __init__(self, queue: AsyncQueue, ttl_s: float | None, tasks: Tasks) -> None:
        """`ttl_s` is the queue's own; None = its messages live as long as they say."""
        self._queue = queue
        self._ttl_s = ttl_s
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

    def lives_s(self, ttl_s: float | None) -> float | None:
        """Return how long a message lives that says so itself; None = for ever."""
        if self._ttl_s is None or ttl_s is None:
            return self._ttl_s if ttl_s is None else ttl_s
        return min(self._ttl_s, ttl_s)

    def look_after(self, seconds: float) -> None:
        """Look in so many seconds for what has expired, if not earlier; not after `end`."""
        if self._has_ended:
            return
        loop = asyncio.get_running_loop()
        moment = loop.time() + seconds + LATE_S
        if self._timer is not None:
            if self._timer.when() <= moment:
                return
            self._timer.cancel()
        self._timer = loop.call_at(moment, self._look)

    def end(self) -> None:
        """Look no more."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if len(self._queue):
            self._tasks.spawn(self._let_go())

    async def _let_go(self) -> None:
        began = time.time()
        next_ms = await asyncio.to_thread(expire, parts_of(self._queue.queue))
        if next_ms is not None:
            moment = next_ms / 1000
            self.look_after(AGAIN_S if moment <= began else max(0.0, moment - time.time()))


def expiring_of(arguments: QueueArguments, store: QueueStore | StreamStore, tasks: Tasks) -> Expiring | None:
    """Return the timer of a queue; None if what expires in it becomes no dead letter."""
    if arguments.dead_letter_exchange is None or not isinstance(store, QueueStore):
        return None
    ttl_ms = arguments.message_ttl_ms
    return Expiring(store.queue, ttl_ms / 1000 if ttl_ms is not None else None, tasks)
