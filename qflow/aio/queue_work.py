"""The part of a queue that async deliveries and consumers use: get a batch, give back, wait for the sync."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from qflow.aio.delivery import AnyDeliveries, AsyncDeliveries, InMemory, batch_of, held_of
from qflow.aio.home import Home
from qflow.aio.loops import Homes, Worker, attend
from qflow.deliveries import Deliveries
from qflow.delivery import AT_ONCE, Delivery, Return
from qflow.durations import Duration
from qflow.held_batch import HeldBatch
from qflow.memory.waiting import in_place
from qflow.queues import in_steps, portions
from qflow.queues.claims import Claims
from qflow.queues.consumer import Consumers
from qflow.queues.deleting import deletings_of
from qflow.queues.getting import Getting
from qflow.queues.queue import Queue, parts_of
from qflow.takers import Noted


class QueueWork(InMemory):
    """See the module. For tasks of any event loop."""

    def __init__(self, queue: Queue, homes: Homes, worker: Worker) -> None:
        self.queue = queue
        self._log = parts_of(queue).context.log
        self._gets = parts_of(queue).gets
        self._claims: Claims = parts_of(queue).claims
        self._homes = homes
        self._worker = worker

    def settle(self, held: Delivery | AnyDeliveries, wait: bool) -> Awaitable[None] | None:
        """See `InMemory.settle`; an ack that is not logged is a straight line, where nobody waits for its room."""
        claims = self._claims
        if self._log is None and type(held) is Delivery and held.settler is claims and claims.settle_at_once(held):
            return None
        if not isinstance(held, Delivery) and portions.has_many_pieces(batch_of(held)):
            return self._worker.run(self._homes.here(), partial(held.ack, wait))
        return super().settle(held, wait)

    @property
    def consumed(self) -> Consumers:
        """What knows its consumers."""
        return parts_of(self.queue).consumers

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.queue.name

    async def get_many(self, most: int, timeout_s: Duration | None, taker: Noted) -> Deliveries:
        """Acquire available messages, waiting for the first; return the batch as users of threads have it."""
        shown = Deliveries()
        await self.collect(most, timeout_s, taker, shown)
        return shown

    async def collect(
        self, most: int, timeout_s: Duration | None, taker: Noted, shown: Deliveries | None = None
    ) -> HeldBatch:
        """The same for who does not keep what is settled; `shown` is to be what is acquired, as its user has it."""
        home = self._homes.here()
        getting = self._gets.begin(most, timeout_s, taker)
        getting.shown = shown
        await attend(home, self._worker, getting)
        await self.log_attempts(home, getting)
        return getting.batch

    async def get_one(self, timeout_s: Duration | None, taker: Noted) -> Getting:
        """Return a get of one message that is done: it has its `delivery`, or says whether it `is_short`."""
        home = self._homes.here()
        getting = self._gets.begin(1, timeout_s, taker, single=True)
        await attend(home, self._worker, getting)
        if self._gets.context.settings.max_deliveries is not None:
            await self.log_attempts(home, getting)
        return getting

    async def log_attempts(self, home: Home, getting: Getting) -> None:
        """Have it in the log that messages are delivered a second time, before they are; see `Gets`."""
        try:
            home.begin(getting.give_up)
            joined = self._gets.join_attempts(getting.batch)
            if joined is not None:
                await home.confirmed(joined)
        except BaseException:
            home.undo(getting.give_up)
            raise
        finally:
            home.unfinished.pop(getting.give_up, None)

    async def delete_many(self, sequences: Iterable[int]) -> list[int]:
        """Delete waiting messages; see `AsyncQueue.delete_many`."""
        queue, home = parts_of(self.queue), self._homes.here()
        deleted: list[int] = []
        for deletings in deletings_of(queue, sequences):
            for deleting in deletings:
                await attend(home, self._worker, deleting)
                await asyncio.sleep(0)  # steps that never wait must not starve other tasks
            for deleting in deletings:
                if deleting.handed_over is not None:
                    await home.confirmed(deleting.handed_over)
            if queue.spiller.exceeds:
                self._worker.spill(queue.spiller)
            deleted += [deleting.sequence for deleting in deletings if deleting.outcome()]
        return deleted

    @property
    def is_leased(self) -> bool:
        """What is held may be taken back from whoever holds it."""
        return parts_of(self.queue).held.is_watched

    async def ack_all(self, held: list[Delivery]) -> None:
        """Ack deliveries; in a thread if they are so many that other tasks are to go on meanwhile."""
        work = partial(self.queue.ack_many, held)
        if len(held) > in_steps.SETTLED_AT_ONCE:
            await self._worker.run(self._homes.here(), work)
        else:
            in_place(work)

    def give_up(self, batch: AsyncDeliveries) -> None:
        """Give back what is left of a batch, not counted as delivered: nobody was handed it."""
        in_place(partial(self._claims.give_up, held_of(batch)))

    def give_up_from(self, batch: AsyncDeliveries, index: int) -> None:
        """`give_up` of the deliveries of a batch from this position on."""
        in_place(partial(self._claims.give_up_from, held_of(batch), index))

    async def give_back(self, held: Delivery | AnyDeliveries, how: Return) -> None:
        """Nack."""
        is_long = not isinstance(held, Delivery) and portions.is_long(batch_of(held))
        await self._return(partial(held.nack, *how), how, is_long=is_long)

    async def give_back_all(self, held: list[Delivery], requeue: bool) -> None:
        """Nack deliveries together."""
        how = Return(requeue)
        await self._return(partial(self._claims.return_all, held, how), how)

    async def abandon(self, batch: AsyncDeliveries) -> None:
        """Nack what is left of a batch whose holder has gone, and what is leaving with a commit if that is refused."""
        held = held_of(batch)
        await self._return(partial(self._claims.abandon, held), AT_ONCE, is_long=portions.is_long(held))

    async def _return(self, work: Callable[[], object], how: Return, *, is_long: bool = False) -> None:
        """Give back; in a thread if that needs the disk, or takes long."""
        if is_long or self._claims.returns.takes_disk(how.requeue):
            await self._worker.run(self._homes.here(), work)
        else:
            in_place(work)
            if self._claims.is_crowded and self._claims.returns.is_logged(how):
                await self.hold_up()
        spiller = parts_of(self.queue).spiller
        if spiller.exceeds_capacity:
            self._worker.spill(spiller)
