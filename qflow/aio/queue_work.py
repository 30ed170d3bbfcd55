"""The part of a queue that async deliveries and consumers use: get a batch, give back, wait for the sync."""

from __future__ import annotations

from functools import partial

from qflow.aio.loops import Home, Homes, Worker, attend
from qflow.delivery import Deliveries, Delivery
from qflow.memory.waiting import in_place
from qflow.queues.getting import Getting
from qflow.queues.queue import Queue, parts_of


class QueueWork:
    """See the module. For tasks of any event loop."""

    def __init__(self, queue: Queue, homes: Homes, worker: Worker) -> None:
        self.queue = queue
        self._gets = parts_of(queue).gets
        self._claims = parts_of(queue).claims
        self._homes = homes
        self._worker = worker

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.queue.name

    async def collect(self, most: int, timeout_s: float | None) -> Deliveries:
        """Acquire available messages, waiting for the first; return the batch as threads have it."""
        home = self._homes.here()
        getting = self._gets.begin(most, timeout_s)
        await attend(home, self._worker, getting.step, getting.give_up)
        await self.log_attempts(home, getting)
        return getting.batch

    async def log_attempts(self, home: Home, getting: Getting) -> None:
        """Have it in the log that messages are delivered a second time, before they are; see `Gets`."""
        try:
            joined = self._gets.join_attempts(getting.batch)
            if joined is not None:
                await home.confirmed(joined)
        except BaseException:
            in_place(getting.give_up)
            raise

    async def settled(self) -> None:
        """Return when everything that was settled so far is synced."""
        joined = self._claims.join_settles()
        if joined is not None:
            await self._homes.here().confirmed(joined)

    async def give_back(self, held: Delivery | Deliveries, requeue: bool, delay_s: float) -> None:
        """Nack; in a thread if that needs the disk."""
        if self._claims.returns_by_disk(requeue):
            await self._worker.run(self._homes.here(), partial(held.nack, requeue, delay_s))
        else:
            in_place(partial(held.nack, requeue, delay_s))
