"""Which queues maintenance looks at: those that have changed since it did, and those that time does something to.

Whoever changes a queue tells that, see `Changed`; what is under way while it is looked at is found in the next round.
"""

from __future__ import annotations

from qflow.memory.changed import Changed
from qflow.queues.queue import Queue, parts_of
from qflow.queues.tending import has_something_to_do


class Watch:
    """See the module. By one thread at a time."""

    def __init__(self, changed: Changed[Queue]) -> None:
        self._changed = changed
        self._awake: dict[Queue, bool] = {}  # what is to be looked at, and whether it has changed since it was

    def look(self) -> None:
        """Find what has changed. Cost: O(queues that have, or that are awake), and 1 ns for any other."""
        for queue in [queue for queue in self._awake if parts_of(queue).context.was_deleted]:
            del self._awake[queue]
        self._awake |= dict.fromkeys(self._changed.take(), True)

    def awake(self) -> list[Queue]:
        """Return what is to be looked at, as it was found last."""
        return list(self._awake)

    def changed(self) -> list[Queue]:
        """Return those of them that have changed since time did to them what it does."""
        return [queue for queue, has_changed in self._awake.items() if has_changed]

    def let_rest(self, queue: Queue) -> None:
        """Time has done to a queue what it does: look at it no more, if it has not changed since the last time."""
        if self._awake.get(queue):
            self._awake[queue] = False  # once more, for what was under way
        elif not has_something_to_do(parts_of(queue)):
            self._awake.pop(queue, None)
