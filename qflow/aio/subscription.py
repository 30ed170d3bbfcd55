"""A subscription of a stream, for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from copy import copy
from datetime import datetime
from functools import partial
from itertools import count
from typing import TypeVar

from qflow.aio.delivery import AnyDeliveries, AsyncStreamDeliveries, AsyncStreamDelivery, InMemory, held_of
from qflow.aio.loops import Homes, Steps, Worker, attend, running_loop
from qflow.config import parse_count
from qflow.delivery import Delivery, Return
from qflow.durations import Duration
from qflow.errors import BrokerClosed, QueueEmpty
from qflow.memory.waiting import in_place
from qflow.pickling import Unpicklable
from qflow.stats import SubscriptionStats
from qflow.streams.batches import StreamBatch, shown_by_one
from qflow.streams.cursor import Getting
from qflow.streams.deliveries import stream_deliveries_of
from qflow.streams.member import Member
from qflow.streams.subscription import Subscription, member_of
from qflow.streams.task_numbers import TaskNumbers

T = TypeVar("T")
TURNS = 8
"""Batches an `async for` takes before it lets other tasks run."""


class AsyncSubscription(Unpicklable):
    """A subscription of a stream. Made by `AsyncBroker.subscribe`; `async with` closes it. For tasks of any event loop.

    Several tasks may use it. Without a name there is nothing to ack: asking for more settles what the same task got
    before, or one that has ended.
    """

    subscription: Subscription
    """The same subscription for threads; its methods block."""
    _member: Member
    _settling: MemberSettling
    _homes: Homes
    _worker: Worker
    _tasks: TaskNumbers

    @property
    def name(self) -> str | None:
        """The name its position is kept under, its own or that of its group; None if it is not kept."""
        return self.subscription.name

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.subscription.stream.name

    @property
    def filter(self) -> str:
        """The filter that topics of its messages match."""
        return self.subscription.filter

    @property
    def closed(self) -> bool:
        """Whether `close` was called; closing the broker or deleting the stream does not set this."""
        return self.subscription.closed

    # Getting ---------------------------------------------------------------------------------------------------------

    async def get(self, timeout_s: Duration | None = None) -> AsyncStreamDelivery:
        """Return the next message, waiting for it; arguments and errors as `Subscription.get`.

        Cancelled, it takes nothing: a message it may have got goes back to its place, not counted as delivered.
        Cost: 10 µs if it was read ahead, without suspending; else a thread reads from the disk.
        """
        batch = await self._collect(1, timeout_s)
        if batch is None:
            raise QueueEmpty(f"no message of stream {self.stream!r} for {self.filter!r} came in time")
        return AsyncStreamDelivery(next(iter(batch)), self._settling)

    async def get_nowait(self) -> AsyncStreamDelivery:
        """`get` that does not wait for a message; one that is not in memory is read."""
        return await self.get(0)

    async def get_many(self, max_messages: int, timeout_s: Duration | None = None) -> AsyncStreamDeliveries:
        """Return available messages, in order, about 1 MiB at most; an empty batch at the time-out.

        Errors as `Subscription.get_many`. Cancelled as `get`.
        """
        batch = await self._collect(parse_count(max_messages, "max_messages"), timeout_s)
        shown = stream_deliveries_of(self._member.empty_batch() if batch is None else batch)
        return AsyncStreamDeliveries(shown, self._settling)

    async def _collect(self, most: int, timeout_s: Duration | None, *, ahead: bool = False) -> StreamBatch | None:
        running_loop()
        getting = self._member.begin_get(most, timeout_s, self._tasks.current(), ahead=ahead)
        await self._attend(getting)
        if getting.gap is not None:
            raise getting.gap
        return getting.batch

    async def _attend(self, getting: Getting) -> None:
        cursor = self._member.cursor
        steps = Steps(partial(cursor.try_get, getting), partial(cursor.give_up_get, getting))
        await attend(self._homes.here(), self._worker, steps)

    def __aiter__(self) -> AsyncIterator[AsyncStreamDelivery]:
        return self.iterate()

    async def iterate(self) -> AsyncGenerator[AsyncStreamDelivery, None]:
        """Yield messages, as `async for delivery in subscription` does. Asking for the next acks the previous.

        It waits for messages to come; with `follow=False` it ends at the end of the stream. After a `break` the last
        message and those read ahead go back when the event loop closes the generator; with `contextlib.aclosing`, at
        once.

        Cost: 2 µs a message in a replay.
        """
        claims, home = self._member.cursor.claims, self._homes.here()
        held = claims.held
        most = self._member.ahead_at_once
        for turn in count(1):
            if turn % TURNS == 0:
                await asyncio.sleep(0)  # a loop body that never waits must not starve other tasks
            batch = await self._collect(most, None, ahead=True)
            if batch is None:
                return
            give_up = partial(claims.release, batch)
            try:
                home.begin(give_up)
                for delivery in shown_by_one(batch, held.returned, held.ahead.get(batch)):
                    yield AsyncStreamDelivery(delivery, self._settling)
                    settled = batch.settled
                    if settled is not None and (last := batch.shown - 1) not in settled:  # type: ignore[operator]
                        in_place(partial(claims.settle_batch, batch, last, False))
                        if claims.is_crowded:
                            await self._settling.hold_up()
            finally:
                home.end(give_up)

    # Settling and moving ---------------------------------------------------------------------------------------------

    async def ack(self, delivery: AsyncStreamDelivery | AsyncStreamDeliveries, wait: bool = False) -> None:
        """Settle a message, or a batch; see `AsyncDelivery.ack`."""
        await delivery.ack(wait)

    async def seek(self, to: int | datetime, *, partition: int | None = None) -> None:
        """Go on at an offset or a time; see `Subscription.seek`. Cancelled while it waits, it completes anyway."""
        await self._run(partial(self.subscription.seek, to, partition=partition))

    @property
    def position(self) -> int:
        """The next offset to be delivered, of a stream with one partition; see `Subscription.position`."""
        return self.subscription.position

    @property
    def positions(self) -> list[int]:
        """The next offset to be delivered, of each partition."""
        return self.subscription.positions

    @property
    def lag(self) -> int:
        """Messages of all topics that it is behind; see `Subscription.lag`."""
        return self.subscription.lag

    async def stats(self, *, matching: bool = False) -> SubscriptionStats:
        """Return a snapshot; for a group, of all its members together; see `Subscription.stats`."""
        if not matching:
            return self.subscription.stats()
        return await self._run(partial(self.subscription.stats, matching=True))

    async def close(self) -> None:
        """Give back what is held; tasks that wait get `InvalidArgument`. See `Subscription.close`.

        Cancelled while it waits, it is closed all the same.
        """
        if self.subscription.closed:
            return
        try:
            await self._run(self.subscription.close)
        except BrokerClosed:
            self.subscription.close()  # nothing is left to give back or to log

    async def _run(self, function: Callable[[], T]) -> T:
        return await self._worker.run(self._homes.here(), function)

    async def __aenter__(self) -> AsyncSubscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.subscription)[1:]}"


class MemberSettling(InMemory):
    """The part of a subscription that async deliveries use: give back, wait for the sync."""

    def __init__(self, member: Member, homes: Homes) -> None:
        self._claims = member.cursor.claims
        self._homes = homes

    async def give_back(self, held: Delivery | AnyDeliveries, how: Return) -> None:
        """Nack; done in memory."""
        held.nack(*how)


def subscription_of(subscription: Subscription, homes: Homes, worker: Worker) -> AsyncSubscription:
    """Return a subscription for tasks."""
    made = AsyncSubscription()
    made.subscription, made._member, made._homes, made._worker = subscription, member_of(subscription), homes, worker
    made._settling = MemberSettling(made._member, homes)
    made._tasks = TaskNumbers()
    return made


# For whoever reads in the name of others, whose threads and tasks are told apart by keys ------------------------------

Taker = tuple[Hashable, int]
"""A thread or a task by a key of its own, and the number of a loop of its; 0 = none."""


async def acquire(
    subscription: AsyncSubscription,
    most: int | None,
    timeout_s: Duration | None,
    taker: Taker,
    gaps: Callable[[Callable[[], object]], object],
) -> AsyncStreamDeliveries | None:
    """Return messages for a taker; without `most`, for a loop of its, which returns one after the other; see `show`.

    A loop gets one at a time while some are to come back later: it does not hear when they are due. Before `GapError`
    is raised, `gaps` is given what to call if nobody is told of that: the next get raises it then.
    """
    member = subscription._member
    key, loop = taker
    ahead = most is None
    if most is None:
        most = 1 if member.cursor.held.returned.later else member.ahead_at_once
    getting = member.begin_get(most, timeout_s, (key, loop) if loop else key, ahead=ahead)
    await subscription._attend(getting)
    if getting.gap is not None:
        gaps(partial(member.cursor.give_up_get, getting))
        raise copy(getting.gap)  # which the getting keeps, without what a raised one leads to
    return None if getting.batch is None else AsyncStreamDeliveries(getting.batch, subscription._settling)


async def show(batch: AsyncStreamDeliveries, count: int, settled: int | None) -> None:
    """Note that a loop has returned so many of its batch, and settle the one that it asked for the next after."""
    held = held_of(batch)
    if held.shown is not None and held.settled is not None:
        held.shown = min(max(held.shown, count), held.total)
        if settled is not None and settled < held.shown and settled not in held.settled:
            await batch[settled].ack()


def abandon(subscription: AsyncSubscription, key: Hashable) -> None:
    """Put back what earlier loops of a taker have left, as another one begins."""
    in_place(partial(subscription._member.cursor.claims.abandon, key))


def release(subscription: AsyncSubscription, batch: AsyncStreamDeliveries) -> None:
    """Put back what is left of a batch: what a loop has returned counts as delivered, and nothing else does."""
    in_place(partial(subscription._member.cursor.claims.release, held_of(batch)))


async def settled(subscription: AsyncSubscription) -> None:
    """Return when everything that was settled so far is synced."""
    await subscription._settling.settled()


def is_leased(subscription: AsyncSubscription) -> bool:
    """Tell whether what is held may be taken back from whoever holds it."""
    return subscription._member.ack_timeout_s is not None
