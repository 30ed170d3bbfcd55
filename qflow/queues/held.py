"""The table of what was delivered and is not settled, or is on its way out with a commit. Under the queue's lock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from qflow.delivery import Deliveries, Delivery, Segment
from qflow.memory.gate import Gate
from qflow.message import SINGLE_BYTES

HeldOne = Delivery | Deliveries
SOME = 1000
"""What was held for too long is taken back so many at a time."""


class Held:
    """See the module."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.singles: dict[Delivery, float | None] = {}
        self.batches: dict[Deliveries, float | None] = {}
        """What is delivered and not settled, in order, since when (monotonic); see `Leases.since`."""
        self.extended: dict[HeldOne, float] = {}
        """Ends of ack timeouts that were extended; of what was settled since, until maintenance looks."""
        self.quiet_until = 0.0
        """No ack timeout ends before that; it is looked again then."""
        self.leaving: dict[Any, None] = {}
        """On its way out with a commit: see `Leaving`."""
        self._kept: list[Segment] = []  # what was held when the broker was closed: it is counted as delivered
        self._in_order = True  # of when it was delivered

    def __contains__(self, one: HeldOne) -> bool:
        return one in (self.batches if isinstance(one, Deliveries) else self.singles)

    def is_any(self) -> bool:
        """Tell whether something is in flight."""
        return bool(self.singles) or bool(self.leaving) or any(batch.total for batch in self.batches)

    def add_single(self, delivery: Delivery, since: float | None) -> None:
        """Hold one delivery by itself; it is charged for that."""
        self.singles[delivery] = since
        self._gate.used += SINGLE_BYTES

    def leave_batch(self, delivery: Delivery, batch: Deliveries) -> None:
        """Hold one delivery of a batch by itself, as long as the batch."""
        since = self.batches[batch]
        delivery.taker = batch.taker
        if since is not None and self.singles:
            last = self.singles[next(reversed(self.singles))]
            self._in_order = self._in_order and last is not None and last <= since
        self.add_single(delivery, since)
        if batch in self.extended:
            self.extended[delivery] = self.extended[batch]

    def rejoin(self, one: Delivery, batch: Deliveries, position: int) -> None:
        """Put a single delivery back into the batch it came in."""
        self.batches[batch] = self.singles.pop(one)
        self._gate.used -= SINGLE_BYTES
        batch.take_back(one, position)

    def hold_again(self, held: Mapping[HeldOne, float | None]) -> None:
        """Hold what was leaving."""
        self._in_order = False
        self.quiet_until = 0.0
        for one, since in held.items():
            if isinstance(one, Deliveries):
                self.batches[one] = since
            else:
                self.add_single(one, since)

    def drop(self, held: Iterable[HeldOne]) -> None:
        """Take deliveries and batches off the table."""
        for one in held:
            self.extended.pop(one, None)
            if isinstance(one, Deliveries):
                self.batches.pop(one, None)
            elif one in self.singles:
                del self.singles[one]
                self._gate.used -= SINGLE_BYTES

    def drop_all(self) -> None:
        """Forget everything: it was purged. What it was charged is not given back here."""
        self.singles.clear()
        self.batches.clear()
        self.extended.clear()
        self.leaving.clear()
        self._kept.clear()

    def keep_all(self) -> None:
        """Let nobody settle what is held any more: the broker is being closed."""
        self._kept += segments_of([*self.singles, *self.batches])
        self.singles.clear()
        self.batches.clear()

    def segments(self) -> list[Segment]:
        """Return everything that is acquired or on its way out."""
        found = [*segments_of([*self.singles, *self.batches]), *self._kept]
        for leaving in self.leaving:
            found += leaving.segments
        return found

    def listed(self) -> tuple[list[Delivery], list[Deliveries], list[Segment]]:
        """Return what there is now: single deliveries, copies of batches, and all else. Cost: 0.01 µs a delivery."""
        others = [*self._kept, *(part for leaving in self.leaving for part in leaving.segments)]
        return list(self.singles), [batch.now() for batch in self.batches], others

    @property
    def singles_bytes(self) -> int:
        """What single deliveries are charged on top of their messages."""
        return SINGLE_BYTES * len(self.singles)

    # Since when ------------------------------------------------------------------------------------------------------

    def longer_than(self, seconds: float, now: float, *, respect_extensions: bool) -> dict[HeldOne, float | None]:
        """Return some of what has been held for so long, and since when."""
        tables: list[dict[Any, float | None]] = [self.singles, self.batches]
        if not self._in_order:
            for table in tables:
                ordered = sorted(table.items(), key=_since)
                table.clear()
                table.update(ordered)
            self._in_order = True
        late: dict[HeldOne, float | None] = {}
        for table in tables:
            for one, since in table.items():
                if since is None:
                    continue  # being collected
                if since + seconds > now:
                    break
                if respect_extensions and self.extended.get(one, now) > now:
                    continue
                late[one] = since
                if len(late) >= SOME:
                    break
        return late

    def first_end(self, timeout: float) -> float:
        """Return when the first lease ends."""
        return min(self._first_end(self.singles, timeout), self._first_end(self.batches, timeout))

    def _first_end(self, held: Mapping[Any, float | None], timeout: float) -> float:
        """Return when the first lease ends. Cost: O(1), and a step for each that was extended."""
        first = math.inf
        for one, since in held.items():
            if since is not None:
                extended = self.extended.get(one)
                first = min(first, since + timeout if extended is None else extended)
                if extended is None:
                    break
        return first

    def oldest_since(self) -> float | None:
        """Return since when the first of it is held; None if nothing is. Cost: O(1) where it is in order."""
        if not (self.singles or self.batches):
            return None
        firsts = [next((since for since in self.batches.values() if since is not None), None)]
        if not self._in_order:
            self._in_order = len(self.singles) + len(self.batches) < 2
            firsts += self.singles.values()
        elif self.singles:
            firsts.append(next(iter(self.singles.values())))
        return min((since for since in firsts if since is not None), default=None)

    def disorder(self) -> None:
        """What is held from now on may be told to be held for longer than what is held already."""
        self._in_order = False

    def extend_all(self, end: float) -> None:
        """Have the ack timeouts of all that is held end then. Cost: 0.1 µs each."""
        self.extended.update(dict.fromkeys([*self.singles, *self.batches], end))

    def forget_extensions(self) -> None:
        """Forget ends of what was settled since."""
        for one in [one for one in self.extended if one not in self]:
            del self.extended[one]


def segments_of(held: Iterable[HeldOne]) -> list[Segment]:
    """Return the messages of deliveries, and what is left of batches; deliveries in a row are one segment."""
    found: list[Segment] = []
    follows, marks, records = -1, 0, [b""]
    for one in held:
        if isinstance(one, Deliveries):
            found += one.left()
        elif one.sequence == follows and one.marks == marks:
            records.append(one.record)
            follows += 1
        else:
            follows, marks, records = one.sequence + 1, one.marks, [one.record]
            found.append(Segment(one.sequence, records, marks))
    return found


def _since(item: tuple[Any, float | None]) -> float:
    """Return since when something is held; what is being collected comes last."""
    return math.inf if item[1] is None else item[1]
