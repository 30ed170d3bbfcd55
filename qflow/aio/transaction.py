"""Commits over several queues for tasks: publishes and transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar, Unpack

from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery, held_by
from qflow.aio.loops import Homes, Worker, attend
from qflow.aio.queue import AsyncQueue, plain_queue
from qflow.config import parse_timeout
from qflow.delivery import each_of
from qflow.durations import Duration
from qflow.errors import InDoubt, QflowError
from qflow.memory.waiting import StraightLock, in_place
from qflow.message import Headers, Message, Record, bodies_bytes
from qflow.options import Body, Key, PutOptions
from qflow.pickling import Unpicklable
from qflow.queues import in_steps
from qflow.queues.assembly import Assembly, Insert, Receipt
from qflow.queues.dedupe import Keys
from qflow.queues.exits import Leaving
from qflow.queues.fan_out import FanOut
from qflow.queues.gathering import Gathering
from qflow.queues.overflow import Decision
from qflow.queues.puts import Puts
from qflow.queues.putting import TurnedAway
from qflow.queues.queue import Queue, parts_of
from qflow.queues.together import Together
from qflow.queues.transaction import Transaction, gathering_of
from qflow.routing.results import PublishResult

T = TypeVar("T")
Result: TypeAlias = int | range | PublishResult | None
"""What a put, a put_many or a publish returned."""


class AsyncTogether:
    """`Together` for tasks."""

    def __init__(self, together: Together, homes: Homes, worker: Worker) -> None:
        self._together = together
        self._homes = homes
        self._worker = worker

    async def commit(
        self,
        inserts: Iterable[Insert],
        leavings: list[Leaving],
        timeout: float | None = None,
        *,
        puts: Iterable[FanOut] = (),
    ) -> list[Receipt]:
        """Put all inserts and settle what is leaving in one commit; see `Together.commit`.

        Cancelled while it waits for room, nothing was done; cancelled while it waits for the commit, it is done all the
        same, or refused.
        """
        home = self._homes.here()
        together = self._together
        assembly = Assembly(inserts, leavings, puts)
        ends = None if timeout is None else home.loop.time() + timeout
        try:
            home.begin(assembly.withdraw)
            while blocked := in_place(assembly.reserve):
                left = None if ends is None else max(0.0, ends - home.loop.time())
                await self._prepare(blocked, left, assembly)
            entered = in_place(partial(together.enter, assembly, soon=False))
        except BaseException:
            home.undo(assembly.withdraw)
            raise
        finally:
            home.unfinished.pop(assembly.withdraw, None)
        home.has_room()
        if entered is not None:
            await home.confirmed(entered)
        assembly.count_turned_away()
        for put in assembly.puts:
            queue: Any = put.lane.publisher
            if queue.exceeds:
                self._worker.spill(queue.spiller)
        return assembly.receipts

    def begin(self, inserts: Iterable[Insert], leavings: list[Leaving], puts: Iterable[FanOut] = ()) -> Assembly | None:
        """Begin a `commit` if there is room now: all of it is handed to the log. None if there is none; what is leaving
        has been given up then, and nothing else was done.
        """
        assembly = Assembly(inserts, leavings, puts)
        try:
            if in_place(assembly.reserve):
                in_place(assembly.withdraw)
                return None
            in_place(partial(self._together.enter, assembly, soon=False))
        except BaseException:
            in_place(assembly.withdraw)
            raise
        return assembly

    async def put_into_all(self, queues: Iterable[Queue], record: Message) -> None:
        """Put a record that neither expires nor is delayed into durable queues, in one commit."""
        puts = sorted((parts_of(queue).puts for queue in queues), key=attrgetter("context.owner"))
        await self.commit([], [], puts=[FanOut(puts, [record])])

    async def put_once(
        self, keys: Keys, puts: Puts, key: object, number: int, record: Record, timeout_s: Duration | None
    ) -> int | None:
        """Put a message unless its key is stored; see `qflow.queues.dedupe.Keys.put`."""
        home, timeout = self._homes.here(), parse_timeout(timeout_s)
        ends = None if timeout is None else home.loop.time() + timeout
        claim = keys.claim(puts, key, record)
        ask = partial(keys.ask, claim)
        try:
            home.begin(claim.give_up)
            while (answer := ask() if keys.is_quick(claim) else await self._worker.run(home, ask)) is not None:
                if isinstance(answer, int):
                    return answer
                left = None if ends is None else max(0.0, ends - home.loop.time())
                try:
                    stored = await asyncio.wait_for(asyncio.wrap_future(answer), left)
                except TimeoutError:
                    raise keys.busy(claim) from None
                if stored is not None:
                    return stored
            left = None if ends is None else max(0.0, ends - home.loop.time())
            receipts = await self.commit([Insert(puts, number, [record])], [claim], left)  # type: ignore[list-item]
        except BaseException:
            home.undo(claim.give_up)
            raise
        finally:
            home.unfinished.pop(claim.give_up, None)
        return receipts[0].first

    async def _prepare(self, receipts: list[Receipt], timeout: float | None, assembly: Assembly) -> None:
        """`Together.preparing`, and waiting for it; in a thread if a queue may have to be declared."""
        home, together = self._homes.here(), self._together
        place = together.preparing(receipts, timeout, assembly)
        try:
            await attend(home, self._worker, place.waiting)
        except TurnedAway as error:
            redirect = partial(together.redirect, place, error.decision)
            if error.decision is Decision.DROP:
                redirect()
            else:
                await self._worker.run(home, redirect)
        else:
            place.note()


class AsyncTransaction(Unpicklable):
    """Puts, publishes and acks over any queues, all or none; see `Transaction`. Used by one task at a time.

    The end of the `async with` block commits. An exception in it, a cancellation too, undoes all of it. Cancelled while
    the commit waits for room, it is rolled back; while it waits for its sync, it is done all the same, or refused.
    """

    _transaction: Transaction
    _gathering: Gathering
    _together: AsyncTogether
    _homes: Homes
    _worker: Worker
    _lock: Any
    """Held by each step: one whose task was cancelled may still run in a thread."""
    _in_thread: bool
    """That one does: it may be at work on the disk."""

    async def put(self, queue: AsyncQueue | Queue | str, body: Body, **options: Unpack[PutOptions]) -> None:
        """Put a message when the transaction commits; options as `Transaction.put`."""
        await self._add(partial(self._transaction.put, plain_queue(queue), body, **options), _size(body))

    async def put_many(
        self, queue: AsyncQueue | Queue | str, bodies: Iterable[Body], **options: Unpack[PutOptions]
    ) -> None:
        """Put messages when the transaction commits; options as `Transaction.put_many`."""
        all_bodies = bodies_bytes(bodies)
        size = sum(map(len, all_bodies))
        await self._add(partial(self._transaction.put_many, plain_queue(queue), all_bodies, **options), size)

    async def publish(self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None) -> None:
        """Publish when the transaction commits; see `Transaction.publish`."""
        inserts = self._gathering.inserts_of(topic, body, headers, key)
        await self._add(partial(self._gathering.publish, inserts), len(inserts) * _size(body))

    async def ack(self, delivery: AsyncDelivery) -> None:
        """Settle a delivery when the transaction commits; see `Transaction.ack`."""
        await self._step(partial(self._transaction.ack, held_by(delivery)), False)

    async def ack_many(self, deliveries: AsyncDeliveries | Iterable[AsyncDelivery]) -> None:
        """Settle deliveries when the transaction commits; see `Transaction.ack_many`."""
        if isinstance(deliveries, AsyncDeliveries):
            await self._step(partial(self._transaction.ack_many, deliveries.deliveries), False)
            return
        held = [held_by(one) for one in each_of(deliveries)]
        await self._step(partial(self._transaction.ack_many, held), len(held) > in_steps.SETTLED_AT_ONCE)

    @property
    def result(self) -> list[Result]:
        """What each put, put_many and publish returned, in order, once it is committed; see `Transaction.result`."""
        return self._transaction.result

    async def commit(self) -> list[Result]:
        """Commit now; returns `result`. The end of the `async with` block does it, too. See `Transaction.commit`."""
        gathering = self._gathering
        inserts, leavings = await self._step(
            gathering.begin_commit, gathering.ends_slowly, lambda begun: gathering.undo(begun[1], "cancelled")
        )
        try:
            receipts = await self._together.commit(inserts, leavings, gathering.timeout_s)
        except BaseException as error:
            ended = "cancelled" if isinstance(error, asyncio.CancelledError) else _state_after(error)
            await self._step(partial(gathering.end, ended), gathering.ends_slowly)
            raise
        return await self._step(partial(gathering.committed, receipts), gathering.ends_slowly)

    async def rollback(self) -> None:
        """Undo everything. Its deliveries stay acquired."""
        await self._step(self._transaction.rollback, self._gathering.ends_slowly)

    async def _add(self, work: Callable[[], None], size: int) -> None:
        await self._step(work, not self._gathering.takes(size))

    async def _step(self, work: Callable[[], T], is_slow: bool, undo: Callable[[T], object] | None = None) -> T:
        """Run a step: in the loop, or in a thread if it is slow, as with the disk, or another step still runs in one.

        Cancelled while a thread runs it, it is done all the same; then `undo(result)` is called.
        """
        if not is_slow and not self._in_thread:
            with self._lock:  # not by a call: a signal handler that raises when that returns would leave it taken
                self._gathering.adopt()
                return in_place(work)

        def job() -> T:
            with self._lock:
                self._in_thread = True
                try:
                    self._gathering.adopt()
                    return work()
                finally:
                    self._in_thread = False

        return await self._worker.run(self._homes.here(), job, undo)

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._gathering.state not in ("open", "being committed"):
            return  # the block ended it itself
        if kind is None:
            await self.commit()
        else:
            await self._step(self._leave, self._gathering.ends_slowly)

    def _leave(self) -> None:
        """Undo everything, unless a commit whose task was cancelled has come to its end meanwhile, in a thread."""
        if self._gathering.state == "open":
            self._transaction.rollback()

    def __repr__(self) -> str:
        return f"<Async{repr(self._transaction)[1:]}"


def transaction_of(transaction: Transaction, together: AsyncTogether, homes: Homes, worker: Worker) -> AsyncTransaction:
    """Return a transaction for tasks."""
    made = AsyncTransaction()
    made._transaction, made._together, made._homes, made._worker = transaction, together, homes, worker
    made._gathering, made._lock = gathering_of(transaction), StraightLock()
    made._in_thread = False
    return made


def _state_after(error: BaseException) -> str:
    """Return what a commit is that an error has ended: one of a signal handler may come when it was handed over."""
    return "rolled back" if isinstance(error, QflowError) and not isinstance(error, InDoubt) else "interrupted"


def _size(body: object) -> int:
    """Return the bytes of a body; 0 if it is not bytes-like, which the transaction refuses."""
    return len(body) if isinstance(body, bytes | bytearray | memoryview) else 0
