"""Changes of what is declared: one after the other, but such as wait together and add something share commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.plans import Plan
from qflow.amqp.server.stores import make_stores
from qflow.errors import InvalidArgument, SettingsConflict

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from qflow.aio.broker import AsyncBroker
    from qflow.amqp.model.vhost import VirtualHost

T = TypeVar("T")
MOST = 50
"""Changes that share commits: planning and making them holds the loop for some milliseconds."""


class Change(Generic[T]):
    """One change, from its plan, which is made when it is its turn, to what `done` returns of that."""

    def __init__(
        self, model: VirtualHost, decide: Callable[[VirtualHost], Plan], done: Callable[[Plan], T | None] | None = None
    ) -> None:
        self.model = model
        self.plan = Plan()
        self.result: T | None = None
        self.error: Exception | None = None
        self.is_over = False
        self._decide = decide
        self._done = done

    def decide(self) -> None:
        """Plan it, perhaps once more."""
        self.plan = self._decide(self.model)

    def finish(self) -> None:
        """Make it in memory: the log has it."""
        self.is_over = True
        try:
            self.plan.apply()
            self.result = None if self._done is None else self._done(self.plan)
        except Exception as error:
            self.error = error

    def fail(self, error: Exception) -> None:
        """Have who asked for it told why it is not made."""
        self.is_over = True
        self.error = error


class _Lot:
    """Changes that came while the first of them waited for its turn."""

    def __init__(self) -> None:
        self.changes: list[Change[Any]] = []
        self.over = asyncio.Event()


class Changes:
    """See the module. One for all virtual hosts of a broker; in the order in which they came."""

    def __init__(self, broker: AsyncBroker, keep: Callable[[Plan], Awaitable[None]]) -> None:
        """`keep` has the records of a plan in the log."""
        self._broker = broker
        self._keep = keep
        self._lock = asyncio.Lock()
        self._last: _Lot | None = None
        """Which one that comes now may join."""

    def alone(self) -> asyncio.Lock:
        """Return what is to be held, from now on, by a change of another kind. None that comes later is made before."""
        self._last = None
        return self._lock

    async def make(self, change: Change[T]) -> T | None:
        """Have a change made; return its result once it is synced. Raises what its plan, its commit or it raises."""
        while not change.is_over:  # once, if no task is cancelled
            lot = self._last
            if lot is None or len(lot.changes) >= MOST:
                self._last = _Lot()
                self._last.changes.append(change)
                await self._lead(self._last)
            else:
                lot.changes.append(change)
                await lot.over.wait()
        if change.error is not None:
            raise change.error
        return change.result

    async def _lead(self, lot: _Lot) -> None:
        """Make the changes of a lot when it is its turn; the line is joined before anything is waited for."""
        try:
            async with self._lock:
                if self._last is lot:
                    self._last = None
                left = lot.changes
                while left:
                    number = _plan(left)
                    await self._commit([one for one in left[:number] if not one.is_over])
                    left = left[number:]
        finally:
            lot.over.set()

    async def _commit(self, changes: Sequence[Change[Any]]) -> None:
        """Make changes together; if that fails, each for itself, so that none fails for another one's sake."""
        together = Plan(facts={key: value for one in changes for key, value in one.plan.facts.items()})
        try:
            await self._keep(together)
            await self._make_stores(changes, together)
        except Exception as error:
            if len(changes) == 1:
                changes[0].fail(error)
            else:
                for one in changes:
                    await self._commit([one])
        else:
            for one in changes:
                one.finish()

    async def _make_stores(self, changes: Sequence[Change[Any]], together: Plan) -> None:
        """Have the new queues in the broker, whose records are in the log."""
        new = {
            one.model.engine_name(queue.name): queue
            for one in changes
            if one.plan.is_new and (queue := one.plan.queue) is not None
        }
        try:
            await make_stores(self._broker, new)
        except (SettingsConflict, InvalidArgument) as error:
            await self._keep(Plan(facts=together.undoing))
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, str(error)) from error


def _plan(changes: Sequence[Change[Any]]) -> int:
    """Plan changes that may share commits, and finish those that change nothing; return how many: the first at least.

    One that others before it may make right, or that does more than to add one thing, is none of them.
    """
    added: set[str] = set()
    for number, change in enumerate(changes):
        try:
            change.decide()
        except Exception as error:
            if added:
                return number
            change.fail(error)
            continue
        plan = change.plan
        if plan.is_nothing:
            change.finish()
        elif plan.adds and plan.adds not in added:
            added.add(plan.adds)
        else:
            return number or 1
    return len(changes)
