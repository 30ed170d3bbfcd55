"""Deliveries and batches for tasks: as in `qflow.delivery`, with `ack` and `nack` to be awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, Self, overload

from qflow.config import parse_span
from qflow.deliveries import Deliveries
from qflow.delivery import ONE, Delivery, Return, parse_return, reason_of
from qflow.durations import Duration
from qflow.errors import AlreadySettled, InvalidArgument, QflowError
from qflow.held_batch import AnyBatch
from qflow.inherited import called_after
from qflow.memory.waiting import in_place
from qflow.message import HeaderValue
from qflow.pickling import Unpicklable
from qflow.streams.deliveries import StreamDeliveries, StreamDelivery

AnyDeliveries = Deliveries | AnyBatch
"""A batch as its user has it, or as its queue does: who has no more does not keep what is settled."""


class Settling(Protocol):
    """Settles without blocking the loop: a queue, or a subscription."""

    def settle(self, held: Delivery | AnyDeliveries, wait: bool) -> Awaitable[None] | None: ...
    async def give_back(self, held: Delivery | AnyDeliveries, how: Return) -> None: ...
    async def extend(self, held: Delivery | AnyDeliveries, seconds: float) -> None: ...


class InMemory:
    """Settles what is held of a broker of this process: at once, in memory."""

    _claims: Any
    _homes: Any

    def settle(self, held: Delivery | AnyDeliveries, wait: bool) -> Awaitable[None] | None:
        """Ack; return what is to be awaited then, which mostly is nothing: a coroutine takes as long as the ack."""
        in_place(held.ack)
        if wait:
            return self.settled()
        return self.hold_up() if self._claims.is_crowded else None

    async def hold_up(self) -> None:
        """Return when the log has what stands before it: acks that nobody waits for take memory, too."""
        with suppress(QflowError):  # what becomes of them, nobody asks
            await self.settled()

    async def extend(self, held: Delivery | AnyDeliveries, seconds: float) -> None:
        """Hold it longer."""
        in_place(partial(held.extend, seconds))

    async def settled(self) -> None:
        """Return when everything that was settled so far is synced."""
        joined = self._claims.join_settles()
        if joined is not None:
            await self._homes.here().confirmed(joined)
            self._claims.check_settled(joined)


class AsyncDelivery(Unpicklable):
    """One message, acquired. `async with` acks it on success and gives it back on an exception, a cancellation too.

    Settling does not suspend the task, but for `ack(wait=True)`, for `nack` if the message becomes a dead letter, and
    where the log is thousands of acks behind.
    """

    __slots__ = ("_settling", "delivery")

    def __init__(self, delivery: Delivery, settling: Settling) -> None:
        self.delivery: Delivery = delivery
        """The same delivery for threads; its methods block."""
        self._settling = settling

    @property
    def body(self) -> bytes:
        """The bytes that were put."""
        return self.delivery.body

    @property
    def headers(self) -> dict[str, HeaderValue]:
        """The headers that were put, decoded at each call."""
        return self.delivery.headers

    @property
    def topic(self) -> str:
        """What it was published under; empty for a message that was put."""
        return self.delivery.topic

    @property
    def sequence(self) -> int:
        """Its number in its queue; never used twice."""
        return self.delivery.sequence

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.delivery.queue

    @property
    def delivery_count(self) -> int:
        """1 at the first delivery, one more after each return."""
        return self.delivery.delivery_count

    @property
    def redelivered(self) -> bool:
        """It was delivered before, or may have been, before a crash."""
        return self.delivery.redelivered

    @property
    def expires_at_s(self) -> float | None:
        """When it expires, in seconds since the epoch; None = never."""
        return self.delivery.expires_at_s

    async def ack(self, wait: bool = False) -> None:
        """Settle the message; see `qflow.Delivery.ack`. Cancelled while it waits, it is settled all the same.

        Cost: 1 µs, without suspending; with `wait`, a share of a commit.
        """
        rest = self._settling.settle(self.delivery, wait)
        if rest is not None:
            await rest

    async def nack(self, requeue: bool = True, delay_s: Duration = 0.0, reason: str | None = None) -> None:
        """Give the message back; see `qflow.Delivery.nack`. Cancelled while it waits, it goes back all the same."""
        await self._settling.give_back(self.delivery, parse_return(requeue, delay_s, reason))

    async def extend(self, seconds: Duration) -> None:
        """Hold it for so many seconds from now, if its lease would end earlier; see `qflow.Delivery.extend`."""
        await self._settling.extend(self.delivery, parse_span(seconds, "seconds"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                rest = self._settling.settle(self.delivery, False)
                if rest is not None:
                    await rest
            else:
                await self.nack(reason=None if error is None else reason_of(error))
        except AlreadySettled:
            pass  # the block settled it itself

    def __repr__(self) -> str:
        return f"<Async{repr(self.delivery)[1:]}"


@called_after
class AsyncStreamDelivery(AsyncDelivery):
    """One message of a stream, leased to a subscriber; see `AsyncDelivery`."""

    __slots__ = ()
    delivery: StreamDelivery

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.delivery.stream

    @property
    def partition(self) -> int:
        """The number of its partition."""
        return self.delivery.partition

    @property
    def offset(self) -> int:
        """Its place in its partition: dense, and never used twice."""
        return self.delivery.offset

    @property
    def key(self) -> bytes | None:
        """The key it was published with."""
        return self.delivery.key

    @property
    def time_ms(self) -> int:
        """When it was confirmed, milliseconds since the epoch; it never falls along a partition."""
        return self.delivery.time_ms


class AsyncDeliveries(Unpicklable, Sequence[AsyncDelivery]):
    """A batch of acquired messages; see `qflow.Deliveries`."""

    __slots__ = ("_settling", "deliveries")

    def __init__(self, deliveries: Any, settling: Settling) -> None:
        self.deliveries: Deliveries = deliveries
        """The same batch for threads; its methods block."""
        self._settling = settling

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, in order."""
        return self.deliveries.bodies

    @property
    def sequences(self) -> Sequence[int]:
        """All sequences, in order."""
        return self.deliveries.sequences

    async def ack(self, wait: bool = False) -> None:
        """Settle the messages of the batch that are not settled yet; see `AsyncDelivery.ack`."""
        rest = self._settling.settle(self.deliveries, wait)
        if rest is not None:
            await rest

    async def nack(self, requeue: bool = True, delay_s: Duration = 0.0, reason: str | None = None) -> None:
        """Give back the messages of the batch that are not settled yet; see `AsyncDelivery.nack`."""
        await self._settling.give_back(self.deliveries, parse_return(requeue, delay_s, reason))

    async def extend(self, seconds: Duration) -> None:
        """Hold the rest of the batch longer; see `AsyncDelivery.extend`."""
        await self._settling.extend(self.deliveries, parse_span(seconds, "seconds"))

    def __len__(self) -> int:
        return len(self.deliveries)

    @overload
    def __getitem__(self, index: int) -> AsyncDelivery: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AsyncDelivery]: ...
    def __getitem__(self, index: int | slice) -> AsyncDelivery | Sequence[AsyncDelivery]:
        if isinstance(index, slice):
            return [AsyncDelivery(one, self._settling) for one in self.deliveries[index]]
        return AsyncDelivery(self.deliveries[index], self._settling)

    def __iter__(self) -> Iterator[AsyncDelivery]:
        for one in self.deliveries:
            yield AsyncDelivery(one, self._settling)

    def __repr__(self) -> str:
        return f"<Async{repr(self.deliveries)[1:]}"


def held_by(one: object, takes: str = ONE) -> Delivery:
    """Return the same delivery as threads have it. Raises InvalidArgument: it is none; `takes` says what it is for."""
    if not isinstance(one, AsyncDelivery):
        raise InvalidArgument(f"{takes}, not {type(one).__name__}")
    return one.delivery


def held_of(batch: AsyncDeliveries) -> Any:
    """Return a batch as its queue, or its subscription, has it."""
    return batch_of(batch.deliveries)


def batch_of(held: AnyDeliveries) -> Any:
    """Return what `held_of` does, of what a batch of tasks holds."""
    return held.held if isinstance(held, Deliveries) else held


@called_after
class AsyncStreamDeliveries(AsyncDeliveries):
    """A batch of messages of a stream; see `AsyncDeliveries`. In order within each partition."""

    __slots__ = ()
    deliveries: StreamDeliveries

    @property
    def topics(self) -> list[str]:
        """All topics, in order."""
        return self.deliveries.topics

    @property
    def offsets(self) -> list[int]:
        """All offsets, in order; of several partitions, see `partition` of each delivery."""
        return self.deliveries.offsets

    @overload
    def __getitem__(self, index: int) -> AsyncStreamDelivery: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AsyncStreamDelivery]: ...
    def __getitem__(self, index: int | slice) -> AsyncStreamDelivery | Sequence[AsyncStreamDelivery]:
        if isinstance(index, slice):
            return [AsyncStreamDelivery(one, self._settling) for one in self.deliveries[index]]
        return AsyncStreamDelivery(self.deliveries[index], self._settling)

    def __iter__(self) -> Iterator[AsyncStreamDelivery]:
        for one in self.deliveries:
            yield AsyncStreamDelivery(one, self._settling)
