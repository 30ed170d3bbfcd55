"""Makes queues: one that is not durable gets its parts when something is first asked of it.

Who declares 100,000 queues, as for so many devices, uses few of them at a time. One that nobody has used is a name, its
settings and a number: the ledger and maintenance do not know it, and the garbage collector has two objects to look at
in place of forty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qflow.config import QueueSettings
from qflow.errors import BrokerClosed, QflowError, QueueDeleted
from qflow.identity import new_number
from qflow.memory.changed import Changed
from qflow.memory.gate import Gate
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import StraightLock, sheltered
from qflow.queues import looking
from qflow.queues.context import Context, Shared
from qflow.queues.parts import Parts
from qflow.queues.queue import Queue, compose, parts_of
from qflow.rates import NO_RATES
from qflow.spool import Spool
from qflow.storage.log.rows import Row

if TYPE_CHECKING:
    from qflow.stats import QueueStats


class Seed:
    """What a queue is made of; `ended` and `has_parts` change under the lock of its maker."""

    __slots__ = ("ended", "has_parts", "incarnation", "maker", "name", "owner", "settings")

    def __init__(self, maker: Maker, name: str, settings: QueueSettings, owner: int, incarnation: int) -> None:
        self.maker = maker
        self.name = name
        self.settings = settings
        self.owner = owner
        self.incarnation = incarnation
        self.ended: type[QflowError] | None = None
        """Why it can not be used any more, if nobody ever did."""
        self.has_parts = False


class Unused(Queue):
    """A queue that nobody has used: a look at what it has not makes its parts, and a `Queue` of it.

    One that has ended stays one of these: what parts it gets refuse every call.
    """

    __slots__ = ()
    __qualname__ = "Queue"  # for users there is no other
    _seed: Seed

    def __getattr__(self, name: str) -> Any:
        if name not in Queue.__slots__:
            raise AttributeError(f"'Queue' object has no attribute {name!r}", name=name, obj=self)
        self._seed.maker.give_parts(self)
        return getattr(self, name)

    def __repr__(self) -> str:
        seed = self._seed
        return f"<Queue {seed.name!r}{', ended' if seed.ended or seed.maker.closed else ''}>"

    @property
    def name(self) -> str:
        return self._seed.name

    @property
    def settings(self) -> QueueSettings:
        return self._seed.settings

    def __len__(self) -> int:
        return Queue.__len__(self) if self._seed.has_parts else 0

    @sheltered
    def stats(self) -> QueueStats:
        return Queue.stats(self) if self._seed.has_parts else looking.told(figures(self))


class Maker:
    """See the module."""

    def __init__(self, spool: Spool, ledger: Ledger, shared: Shared) -> None:
        self._spool = spool
        self._ledger = ledger
        self._shared = shared
        self._lock = StraightLock()  # held to make parts, and for what is not done to a queue that gets some
        self._opening = new_number()
        """A copy of the spool, opened where this one lay, has another one: neither spills into files of the other."""
        self._blank: tuple[QueueSettings, dict[str, Any]] | None = None  # figures of a queue of such settings, unused
        self.changed: Changed[Queue] = Changed()
        """Which queues have changed, for maintenance, which takes them."""
        self.closed = False

    def make(
        self, name: str, settings: QueueSettings, owner: int, incarnation: int, rows: dict[int, Row] | None
    ) -> Queue:
        """Return a new queue, with what the log holds of it; None if it is not logged: it has no parts yet."""
        queue: Queue = object.__new__(Queue if rows is not None else Unused)
        queue._seed = seed = Seed(self, name, settings, owner, incarnation)
        if rows is not None:
            with self._lock:
                self._make_parts(queue, seed, rows)
        return queue

    @sheltered
    def give_parts(self, queue: Unused) -> None:
        """Make the parts of a queue, for the first call that needs them; twice is fine. Cost: 50 to 100 µs."""
        with self._lock:
            seed = queue._seed
            if seed.has_parts:
                return
            if seed.ended is None and self.closed:
                seed.ended = BrokerClosed
            self._make_parts(queue, seed, None)
            if seed.ended is None:
                queue.__class__ = Queue  # type: ignore[assignment]

    def _make_parts(self, queue: Queue, seed: Seed, rows: dict[int, Row] | None) -> None:
        """Make the parts of a queue. Under the lock."""
        context = Context(
            seed.name, seed.owner, seed.settings, self._shared, self._spool.log if rows is not None else None
        )
        context.ended = seed.ended
        if seed.ended is None:
            account = self._ledger.open(seed.owner, seed.name, seed.settings.capacity_bytes)
            gate = Gate(account, self._ledger, self.changed.flags, self.changed.enter())
        else:
            account = self._ledger.draft(seed.owner, seed.name, seed.settings.capacity_bytes)
            gate = Gate(account, self._ledger, [False], 0)
        parts = Parts(context, gate, self._spool.store, seed.incarnation ^ self._opening, rows)
        compose(queue, parts)
        seed.has_parts = True
        if seed.ended is None:
            gate.account.give_way = parts.spiller.give_way
            self.changed.know(gate.place, queue)

    def end_unused(self, queue: Queue) -> bool:
        """Have a queue that nobody has used refuse all calls from now on, as a deleted one; False: somebody has."""
        with self._lock:
            if isinstance(queue, Unused):
                queue._seed.ended = QueueDeleted
                return True
            return False

    def close(self) -> None:
        """Have every queue that nobody has used refuse all calls from now on: the broker is being closed."""
        with self._lock:
            self.closed = True

    def die(self, stub: Any) -> None:
        """In a forked child: refuse everything."""
        self._lock = stub

    def forget(self, queue: Parts) -> None:
        """Let go of the parts of a queue that is no more."""
        with self._lock:
            self.changed.leave(queue.gate.place)

    def figures(self, seed: Seed) -> dict[str, Any]:
        """Return the figures of a queue without parts: those of any other of its settings, but for its name."""
        blank = self._blank
        if blank is None or blank[0] != seed.settings:
            context = Context("", 0, seed.settings, self._shared, None)
            gate = Gate(self._ledger.draft(0, "", seed.settings.capacity_bytes), self._ledger, [False], 0)
            self._blank = blank = seed.settings, looking.figures(Parts(context, gate, self._spool.store, 0, None))
        return {**blank[1], "name": seed.name}


def figures(queue: Queue, rates: Any = looking.rates) -> dict[str, Any]:
    """Return the fields of `QueueStats` as plain values."""
    if isinstance(queue, Unused) and not queue._seed.has_parts:
        return {**queue._seed.maker.figures(queue._seed), "rates": NO_RATES}
    facts = looking.figures(parts_of(queue))
    facts["rates"] = rates(parts_of(queue), facts)
    return facts


def is_used(queue: Queue) -> bool:
    """Tell whether a queue has parts that others have to do with."""
    return not isinstance(queue, Unused)


def was_deleted(queue: Queue) -> bool:
    """Tell whether a queue takes no calls any more."""
    if isinstance(queue, Unused):
        return queue._seed.ended is QueueDeleted
    return parts_of(queue).context.was_deleted
