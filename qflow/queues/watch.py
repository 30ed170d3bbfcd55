"""Which queues maintenance looks at: those that have changed since it did, and those that time does something to.

A queue does not tell that it has changed: that would cost each put and get. Instead a few of its figures are compared
with what they were, without its lock. Each straight line changes one of them: a put and a get what is used, a get of a
batch their number, a settle what was acked; what goes the long way has the numbers of the gate computed anew; a commit
makes another row. What is under way while a queue is looked at is found in the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import attrgetter, ne
from typing import Any

from qflow.memory.gate import Gate
from qflow.queues.lanes import Lanes
from qflow.queues.queue import Queue, parts_of
from qflow.queues.tending import has_something_to_do
from qflow.storage.log.transaction_log import Lane

Column = list[object]
"""One figure of each queue."""
_FIGURES = 5
_NEW = (None,) * _FIGURES
_USED, _CHANGES, _ACKED, _ROW = map(attrgetter, ("used", "changes", "acked", "row"))


class Watch:
    """See the module. By one thread at a time."""

    def __init__(self, all_queues: Callable[[], list[Queue]]) -> None:
        self._all_queues = all_queues
        self._queues: list[Queue] = []
        self._gates: list[Gate] = []
        self._lanes: list[Lanes] = []
        self._batches: list[dict[Any, float | None]] = []
        self._logged: list[dict[int, Lane]] = []
        self._columns = self._read()
        self._awake: dict[Queue, bool] = {}  # what is to be looked at, and whether it has changed since it was

    def look(self) -> None:
        """Find what has changed. Cost: 0.2 µs a queue, of all there are; 0.5 µs a durable one."""
        queues = self._all_queues()
        if queues != self._queues:
            self._take_over(queues)
        columns = self._read()
        for column, before in zip(columns, self._columns, strict=True):
            if column != before:
                self._awake |= dict.fromkeys(compress(queues, map(ne, column, before)), True)
        self._columns = columns

    def _take_over(self, queues: list[Queue]) -> None:
        """Know these queues, and no others."""
        known = dict(zip(self._queues, zip(*self._columns, strict=True), strict=True))
        self._columns = [[known.get(queue, _NEW)[number] for queue in queues] for number in range(_FIGURES)]
        self._queues = queues
        self._gates = [parts_of(queue).gate for queue in queues]
        self._lanes = [parts_of(queue).lanes for queue in queues]
        self._batches = [parts_of(queue).held.batches for queue in queues]
        self._logged = [lanes.logged for lanes in self._lanes]
        there = set(queues)
        self._awake = {queue: changed for queue, changed in self._awake.items() if queue in there}

    def _read(self) -> list[Column]:
        return [
            list(map(_USED, self._gates)),
            list(map(_CHANGES, self._gates)),
            list(map(_ACKED, self._lanes)),
            list(map(len, self._batches)),
            [logged and tuple(map(_ROW, list(logged.values()))) for logged in self._logged],
        ]

    def awake(self) -> list[Queue]:
        """Return what is to be looked at, as it was found last."""
        return list(self._awake)

    def let_rest(self, queue: Queue) -> None:
        """Time has done to a queue what it does: look at it no more, if it has not changed since the last time."""
        if self._awake.get(queue):
            self._awake[queue] = False  # once more, for what was under way
        elif not has_something_to_do(parts_of(queue)):
            self._awake.pop(queue, None)
