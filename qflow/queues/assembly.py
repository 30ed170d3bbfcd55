"""What one commit of several queues is made of, while that is put together; and how it waits for room.

A queue is not kept from its end by a commit that has room in it and waits for some elsewhere: that one gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from qflow.errors import QueueDeleted
from qflow.memory.line import Wake
from qflow.queues.exits import Leaving
from qflow.queues.fan_out import FanOut
from qflow.queues.overflow import Depth
from qflow.queues.puts import NOTHING, Puts
from qflow.storage.log.transaction_log import Put, Unit


class Assembly:
    """What one commit is made of, while that is put together."""

    def __init__(self, leavings: Iterable[Leaving], puts: Iterable[Put | FanOut] = ()) -> None:
        self.puts: list[Put] = []
        """Each for one lane. They have their room."""
        self.fans: list[FanOut] = []
        for put in puts:
            (self.fans if isinstance(put, FanOut) else self.puts).append(put)  # type: ignore[arg-type]
        self.leavings = list(leavings)
        self.turned: list[tuple[Puts, int, bool]] = []
        """(queue, messages, they are dropped) of what limits turned away."""
        self.unit: Unit | None = None
        """All of it, once it is to join a batch."""
        self._leave: dict[object, Depth] = {leaving.queue: leaving.depth for leaving in self.leavings}

    def spreads(self) -> list[Put]:
        """Return what fans out into queues that have room for it."""
        return [fan.spread for fan in self.fans if fan.spread.lanes]

    def leaving(self, queue: Puts) -> Depth:
        """Return what leaves a queue, the first time."""
        return self._leave.pop(queue.context, NOTHING)

    def has_leaving(self, queue: Puts) -> bool:
        """Tell whether something leaves a queue that `leaving` was not asked for."""
        return bool(self._leave) and queue.context in self._leave

    def check_not_deleted(self) -> None:
        """Refuse to go on if a queue was deleted since room in it was reserved, perhaps long ago."""
        for fan in self.fans:
            fan.check_not_deleted()
        for put in self.puts:
            publisher: Any = put.lane.publisher
            if not publisher.reserves_together:
                publisher.check_not_deleted()

    def is_in_vain(self) -> bool:
        """Tell whether `check_not_deleted` would refuse to go on."""
        try:
            self.check_not_deleted()
        except QueueDeleted:
            return True
        return False

    def give_back(self) -> None:
        """Give back what was reserved, which joins no batch; by any thread, and twice is fine."""
        for put in [*self.puts, *self.spreads()]:
            put.give_back()

    def withdraw(self) -> None:
        """Give back what was reserved, if it did not join a batch; what was leaving stays."""
        if self.unit is None or not self.unit.joined:
            self.give_back()
        for leaving in self.leavings:
            leaving.give_up()

    def count_turned_away(self) -> None:
        """Count messages that queues turned away, now that what came of it is certain."""
        for queue, messages, dropped in self.turned:
            queue.count_turned_away(messages, dropped=dropped)


class ReserveStep(Protocol):
    """A step of reserving room; see `line`."""

    def __call__(self, wake: Wake | None, may_work: bool) -> float | None: ...


class Reserving:
    """Steps of reserving that are over when a queue was deleted in which the commit has room by then.

    Between two of them, `Together.leave_deleted` finds the commit in the table.
    """

    __slots__ = ("_assembly", "_give_up", "_step", "_table")

    def __init__(
        self, table: dict[Assembly, Wake | None], assembly: Assembly, step: ReserveStep, give_up: Callable[[], object]
    ) -> None:
        self._table = table
        self._assembly = assembly
        self._step = step
        self._give_up = give_up

    def step(self, wake: Wake | None, may_work: bool) -> float | None:
        """Take a step; raises what that raises, and QueueDeleted: `give_up` then."""
        wait_s = None
        self._table[self._assembly] = wake  # before the look: either the end finds it, or it finds the end
        try:
            self._assembly.check_not_deleted()
            wait_s = self._step(wake, may_work=may_work)
        finally:
            if wait_s is None:  # also where it had been given up
                self._table.pop(self._assembly, None)
        return wait_s

    def give_up(self) -> None:
        """Wait no more; twice is fine."""
        self._table.pop(self._assembly, None)
        self._give_up()
