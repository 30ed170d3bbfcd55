"""What is held and does not fit into the order of the tables of `Held`. Under the queue's lock.

    what        because                                                  in the order of
    extended    its ack timeout ends at a time of its own                that time
    overtaken   it came late: it left a batch, or a commit was refused   since when it is held
    untimed     it is held since before there was an ack timeout         none: it has no end

What has ended is found by a look at the first of each, however many there are. A settle of it goes the long way.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from sortedcontainers import SortedKeyList

from qflow.delivery import Delivery
from qflow.held_batch import HeldBatch

HeldOne = Delivery | HeldBatch
Term = tuple[float | None, float | None]
"""Since when one is held, and when its ack timeout ends if it was extended."""
SOME = 1000
"""So many are looked at, at a time."""
_NONE: SortedKeyList[HeldOne, Any] = SortedKeyList(key=id)
"""Of the many queues that have nothing apart."""


class Apart:
    """See the module."""

    __slots__ = ("_by_end", "_by_since", "_ends", "batches", "singles", "timed_from")

    def __init__(self) -> None:
        self.timed_from = -math.inf
        """What is held since before that is untimed."""
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.singles: dict[Delivery, float] = {}
        self.batches: dict[HeldBatch, float] = {}
        """Since when each is held (monotonic)."""
        self._ends: dict[HeldOne, float] = {}
        self._by_end = self._by_since = _NONE

    def __contains__(self, one: HeldOne) -> bool:
        return one in self._table(one)

    def __bool__(self) -> bool:
        return bool(self.singles or self.batches)

    def _table(self, one: HeldOne) -> dict[Any, float]:
        return self.singles if isinstance(one, Delivery) else self.batches

    def since(self, one: HeldOne) -> float:
        """Return since when one is held."""
        return self._table(one)[one]

    def end(self, one: HeldOne) -> float | None:
        """Return when the ack timeout of one ends that was extended; None of any other."""
        return self._ends.get(one)

    def put(self, one: HeldOne, since: float, end: float | None = None) -> None:
        """Hold one; `end` if it was extended. Cost: 5 µs."""
        if self._by_end is _NONE:
            self._by_end = SortedKeyList(key=lambda one: (self._ends[one], id(one)))
            self._by_since = SortedKeyList(key=lambda one: (self.since(one), id(one)))
        self._table(one)[one] = since
        if end is not None:
            self._ends[one] = end
            self._by_end.add(one)
        elif since >= self.timed_from:
            self._by_since.add(one)

    def pop(self, one: HeldOne) -> float:
        """Hold one no more; return since when it was. Cost: 5 µs."""
        if one in self._ends:
            self._by_end.remove(one)
            del self._ends[one]
        else:
            self._by_since.discard(one)
        since: float = self._table(one).pop(one)
        return since

    def first_end(self, timeout: float) -> float:
        """Return when the first ack timeout ends, or that of one that has none any more."""
        first = self._ends[self._by_end[0]] if self._by_end else math.inf
        return min(first, self.since(self._by_since[0]) + timeout) if self._by_since else first

    def late(self, timeout: float, now: float) -> dict[HeldOne, float | None]:
        """Return some of those whose ack timeout has ended, and since when they are held."""
        late: dict[HeldOne, float | None] = {}
        for order in (self._by_end, self._by_since):
            for one in list(islice(order, SOME)):
                since = self.since(one)
                end = since + timeout
                if self._ends.get(one, end) > now:
                    break
                if end <= now and since >= self.timed_from:
                    late[one] = since
                else:  # it became untimed, or the ack timeout longer than it was extended to
                    self.put(one, self.pop(one))
        return late


def place_of(one: HeldOne) -> tuple[HeldBatch | None, int]:
    """Return the batch a delivery is in, and where; None for a single one, and for a batch."""
    batch = one.settler
    return (batch, batch.position(one.sequence)) if type(batch) is HeldBatch else (None, 0)  # type: ignore[union-attr]
