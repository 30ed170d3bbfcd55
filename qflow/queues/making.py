"""Makes queues: one that is not durable gets its parts when something is first asked of it.

Who declares 100,000 queues, as for so many devices, uses few of them at a time. One that nobody has used has a context:
the ledger and maintenance do not know it, and the garbage collector has three objects to look at in place of forty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qflow.config import QueueSettings
from qflow.errors import QflowError
from qflow.events import Teller
from qflow.identity import new_number
from qflow.memory.changed import Changed
from qflow.memory.gate import Gate
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import sheltered
from qflow.queues import looking
from qflow.queues.context import Context, Shared, Tick
from qflow.queues.dead_letter_router import DeadLetterRouter
from qflow.queues.dedupe import Keys
from qflow.queues.parts import Parts
from qflow.queues.queue import Queue, compose, context_of, parts_of, queue_of
from qflow.queues.tending import refuse_calls
from qflow.rates import NO_RATES
from qflow.spool import Spool
from qflow.storage.log.rows import Row

if TYPE_CHECKING:
    from qflow.stats import QueueStats


class Unused(Queue):
    """A queue that nobody has used: a look at what it has not makes its parts, and a `Queue` of it.

    One that has ended stays one of these: the parts it gets refuse every call, and nobody else has to do with them.
    """

    __slots__ = ()
    __qualname__ = "Queue"  # for users there is no other

    def __getattr__(self, name: str) -> Any:
        if name not in Queue.__slots__:
            raise AttributeError(f"'Queue' object has no attribute {name!r}", name=name, obj=self)
        give_parts(self)
        return getattr(self, name)

    def __len__(self) -> int:
        return Queue.__len__(self) if has_parts(self) else 0

    @sheltered
    def stats(self) -> QueueStats:
        return looking.told(figures(self))


@sheltered
def give_parts(queue: Queue) -> None:
    """Make the parts of a queue, unless it has them; return when it has. Cost: 50 to 100 µs."""
    context = context_of(queue)
    with context.lock:
        if context.maker is not None:
            context.maker.make_parts(queue, None)
            if context.ended is None:
                queue.__class__ = Queue


def shared_by(spool: Spool, tick: Tick, tell: Teller, router: DeadLetterRouter, keys: Keys) -> Shared:
    """Return what all queues of a spool have in common."""
    return Shared(
        tick=tick,
        report=spool.report,
        tell=tell,
        bury=router.carry,
        max_transaction_bytes=spool.settings.max_transaction_bytes,
        clock=spool.clock,
        monotonic=spool.monotonic,
        uuid=spool.uuid,
        let_pass=spool.log.let_pass,
        keys=keys,
    )


class Maker:
    """See the module."""

    def __init__(self, spool: Spool, ledger: Ledger, shared: Shared) -> None:
        self._spool = spool
        self._ledger = ledger
        self._shared = shared
        self._opening = new_number()
        """A copy of the spool, opened where this one lay, has another one: neither spills into files of the other."""
        self._blank: tuple[QueueSettings, dict[str, Any]] | None = None  # figures of a queue of such settings, unused
        self.changed: Changed[Queue] = Changed()
        """Which queues have changed, for maintenance, which takes them."""

    def make(
        self, name: str, settings: QueueSettings, owner: int, incarnation: int, rows: dict[int, Row] | None
    ) -> Queue:
        """Return a new queue, with what the log holds of it; None if it is not logged: it has no parts yet."""
        log = self._spool.log if rows is not None else None
        context = Context(name, owner, settings, self._shared, log, incarnation ^ self._opening, self)
        queue = queue_of(context, Queue if rows is not None else Unused)
        if rows is not None:
            self.make_parts(queue, rows)
        return queue

    def make_parts(self, queue: Queue, rows: dict[int, Row] | None) -> None:
        """Make the parts of a queue. Under its lock, unless nobody knows it yet."""
        context = context_of(queue)
        name, owner, capacity = context.name, context.owner, context.settings.capacity_bytes
        if context.ended is None:
            account = self._ledger.open(owner, name, capacity)
            gate = Gate(account, self._ledger, self.changed.flags, self.changed.enter())
        else:
            gate = Gate(self._ledger.draft(owner, name, capacity), self._ledger, [False], 0)
        parts = Parts(context, gate, self._spool.store, rows)
        if context.ended is None:
            gate.account.give_way = parts.spiller.give_way
        compose(queue, parts)  # from here on nothing needs memory: a failure before leaves a queue without parts
        context.maker = None
        if context.ended is None:
            self.changed.know(gate.place, queue)

    def figures(self, context: Context) -> dict[str, Any]:
        """Return the figures of a queue without parts: those of any other of its settings, but for its name."""
        blank, settings = self._blank, context.settings
        if blank is None or blank[0] != settings:
            gate = Gate(self._ledger.draft(0, "", settings.capacity_bytes), self._ledger, [False], 0)
            parts = Parts(Context("", 0, settings, self._shared, None, 0, None), gate, self._spool.store, None)
            self._blank = blank = settings, looking.figures(parts)
        return {**blank[1], "name": context.name}


def figures(queue: Queue, rates: Any = looking.rates) -> dict[str, Any]:
    """Return the fields of `QueueStats` as plain values."""
    maker = context_of(queue).maker
    if maker is not None:
        return {**maker.figures(context_of(queue)), "rates": NO_RATES}
    facts = looking.figures(parts_of(queue))
    facts["rates"] = rates(parts_of(queue), facts)
    return facts


def has_parts(queue: Queue) -> bool:
    return context_of(queue).maker is None


def is_used(queue: Queue) -> bool:
    """Tell whether a queue has parts that others have to do with."""
    return not isinstance(queue, Unused)


def end(queue: Queue, reason: type[QflowError]) -> bool:
    """Let nobody use a queue; return whether anybody has. Twice is fine."""
    context = context_of(queue)
    with context.lock:
        if not is_used(queue):
            context.ended = context.ended or reason
            return False
    refuse_calls(parts_of(queue), reason)
    return True
