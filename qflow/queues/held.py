"""The table of what was delivered and is not settled, or is on its way out with a commit. Under the queue's lock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from qflow.delivery import Delivery, Segment
from qflow.held_batch import HeldBatch
from qflow.memory.gate import Gate
from qflow.message import BATCH_BYTES, SINGLE_BYTES, Record
from qflow.queues.apart import SOME, Apart, HeldOne, Term

LATE = 1 / 64
"""By so much of the ack timeout, or so many seconds where there is none, an end may be noticed late: for less, what
several threads take from their batches by turns is not set apart."""


class Held:
    """See the module."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.singles: dict[Delivery, float | None] = {}
        self.batches: dict[HeldBatch, float | None] = {}
        """What is delivered and not settled, in order, since when (monotonic); see `Leases.since`.

        A batch that is being collected is there since None, and not charged for itself.
        """
        self.charged = 0
        """How many batches are."""
        self.apart = Apart()
        """The same, of what does not fit into that order."""
        self.timeout_s: float | None = None
        """The ack timeout."""
        self.is_watched = False
        """Something follows from how long messages are held."""
        self.quiet_until = 0.0
        """No ack timeout ends before that; it is looked again then."""
        self.leaving: dict[Any, None] = {}
        """On its way out with a commit: see `Leaving`."""
        self._kept: Sequence[Segment] = ()  # what was held when the broker was closed: it is counted as delivered

    def __contains__(self, one: HeldOne) -> bool:
        return one in self._table(one) or one in self.apart

    def _table(self, one: HeldOne) -> dict[Any, float | None]:
        return self.singles if isinstance(one, Delivery) else self.batches

    def term(self, one: HeldOne) -> Term:
        """Return since when one is held, and until when if it was extended."""
        table = self._table(one)
        return (table[one], None) if one in table else (self.apart.since(one), self.apart.end(one))

    def is_any(self) -> bool:
        """Tell whether something is in flight."""
        return bool(self.singles or self.apart or self.leaving) or any(batch.total for batch in self.batches)

    def add_single(self, delivery: Delivery, since: float | None) -> None:
        """Hold one delivery by itself; it is charged for that."""
        self.singles[delivery] = since
        self._gate.used += SINGLE_BYTES
        self._gate.note_change()

    def add_batch(self, batch: HeldBatch, since: float | None) -> None:
        """Hold a batch that was collected; it is charged for that."""
        self.batches.pop(batch, None)  # its place is that of when it began to be
        self.batches[batch] = since
        self.charged += 1
        self._gate.used += BATCH_BYTES
        self._gate.note_change()

    def leave_batch(self, delivery: Delivery, batch: HeldBatch, stays: bool) -> None:
        """Hold one delivery of a batch by itself, as long as the batch; `stays` if not just for now."""
        since, end = self.term(batch)
        delivery.taker = batch.taker
        self.add_single(delivery, since)
        if since is not None and (end is not None or (stays and self._is_overtaken(since))):
            self._set_apart(delivery, end)

    def _is_overtaken(self, since: float) -> bool:
        """Tell whether what was added last would have to be before others."""
        if not self.is_watched:
            return False
        last = next(islice(reversed(self.singles.values()), 1, None), None)
        late_s = LATE if self.timeout_s is None else LATE * self.timeout_s
        return last is not None and last > since + late_s

    def rejoin(self, one: Delivery, batch: HeldBatch, position: int) -> None:
        """Put a single delivery back into the batch it came in."""
        self.take_back(batch, [(position, one.record)], self.term(one))
        self.drop([one])
        one.settler = batch

    def take_back(self, batch: HeldBatch, records: Iterable[tuple[int, Record]], term: Term) -> None:
        """Have messages, by position, held by their batch again; `term` for a batch that holds nothing now."""
        if batch not in self:
            self.hold_again({batch: term})
        batch.take_back(records)

    def hold_again(self, held: Mapping[HeldOne, Term]) -> None:
        """Hold what was leaving."""
        self.quiet_until = 0.0
        for one, (since, end) in held.items():
            if isinstance(one, HeldBatch):
                self.add_batch(one, since)
            else:
                self.add_single(one, since)
            self._set_apart(one, end)

    def extend(self, one: HeldOne, until: float) -> None:
        """Have the ack timeout of one end then, unless it ends later, or never."""
        since, end = self.term(one)
        if self.timeout_s is not None and since is not None and since >= self.apart.timed_from:
            self._set_apart(one, max(until, since + self.timeout_s, end or 0.0))

    def _set_apart(self, one: HeldOne, end: float | None = None) -> None:
        """Hold one in an order of its own; `end` if it was extended."""
        since = self._pop(one)
        assert since is not None
        self.apart.put(one, since, end)

    def _pop(self, one: HeldOne) -> float | None:
        """Take one off the table; return since when it was held."""
        table = self._table(one)
        return table.pop(one) if one in table else self.apart.pop(one)

    def drop(self, held: Iterable[HeldOne], *, ends: bool = True) -> None:
        """Take deliveries and batches off the table; a batch has nothing then if that `ends` it."""
        for one in held:
            table = self._table(one)
            if one in table:
                since = table.pop(one)
            elif one in self.apart:
                since = self.apart.pop(one)
            else:
                continue
            if isinstance(one, Delivery):
                self._gate.used -= SINGLE_BYTES
                continue
            if ends:
                one.end()
            if since is not None:
                self.charged -= 1
                self._gate.used -= BATCH_BYTES
        self._gate.note_change()

    def drop_all(self) -> None:
        """Forget everything: it was purged. What it was charged is not given back here."""
        self._clear()
        for leaving in self.leaving:
            leaving.end()
        self.leaving.clear()
        self._kept = ()

    def unseen(self) -> list[HeldBatch]:
        """Return what nobody has seen, and nobody has: what gets are collecting, or is being given up."""
        return [batch for batch, since in self.batches.items() if since is None and not batch.was_seen]

    def keep_all(self) -> None:
        """Let nobody settle what is held any more: the broker is being closed."""
        self._kept = [*self._kept, *segments_of(self.all())]
        self._clear()

    def _clear(self) -> None:
        self.singles.clear()
        self.batches.clear()
        self.apart.clear()
        self.charged = 0

    def all(self) -> list[HeldOne]:
        """Return all deliveries and batches. Cost: 0.01 µs each."""
        return [*self.singles, *self.apart.singles, *self.batches, *self.apart.batches]

    def all_since(self) -> tuple[list[HeldOne], list[float | None]]:
        """Return all, and since when each is held; None of what is being collected, or has gone meanwhile.

        Also without the lock: each table is then as it was at a moment of its own. Cost: 0.06 µs each.
        """
        ones: list[HeldOne] = []
        since: list[float | None] = []
        tables: tuple[dict[Any, Any], ...] = (self.singles, self.apart.singles, self.batches, self.apart.batches)
        for table in tables:
            some = [*table]  # one step of the interpreter
            ones += some
            since += [table.get(one) for one in some]
        return ones, since

    def by_delivered(self) -> dict[bool, list[Segment]]:
        """Return what is acquired or on its way out, by whether it was delivered: else it left its place by itself."""
        found: dict[bool, list[Segment]] = {True: [*segments_of(self.all()), *self._kept], False: []}
        for leaving in self.leaving:
            found[leaving.is_delivered] += leaving.segments
        return found

    def listed(self) -> tuple[list[Delivery], list[HeldBatch], list[Segment]]:
        """Return what there is now: single deliveries, copies of batches, and all else. Cost: 0.01 µs a delivery."""
        others = [*self._kept, *(part for leaving in self.leaving for part in leaving.segments)]
        batches = [batch.now() for batch in (*self.batches, *self.apart.batches)]
        return [*self.singles, *self.apart.singles], batches, others

    @property
    def overhead_bytes(self) -> int:
        """What single deliveries, and batches, are charged on top of their messages. Cost: O(1)."""
        return SINGLE_BYTES * (len(self.singles) + len(self.apart.singles)) + BATCH_BYTES * self.charged

    # Since when ------------------------------------------------------------------------------------------------------

    def late(self, now: float) -> dict[HeldOne, float | None]:
        """Return some of those whose ack timeout has ended, and since when they are held. Looks at a bounded number."""
        assert self.timeout_s is not None
        late = self.apart.late(self.timeout_s, now)
        for table in self._tables():
            untimed: list[HeldOne] = []
            for one, since in self._first(table):
                if since < self.apart.timed_from:
                    untimed.append(one)
                elif since + self.timeout_s > now:
                    break
                else:
                    late[one] = since
            for one in untimed:
                self._set_apart(one)
        return late

    def first_end(self) -> float:
        """Return when the first ack timeout ends, at the earliest."""
        assert self.timeout_s is not None
        firsts = [since + self.timeout_s for table in self._tables() for _, since in islice(self._first(table), 1)]
        return min(self.apart.first_end(self.timeout_s), *firsts, math.inf)

    def longer_than(self, seconds: float, now: float) -> dict[HeldOne, float | None]:
        """Return some of what has been held for so long, extended or not. Cost: O(1), and 0.05 µs for each apart."""
        late: dict[HeldOne, float | None] = {}
        for table in self._tables():
            late.update(takewhile(lambda item: item[1] + seconds <= now, self._first(table)))  # type: ignore[operator]
        for apart in (self.apart.singles, self.apart.batches):
            late.update([(one, since) for one, since in apart.items() if since + seconds <= now][:SOME])
        return late

    def oldest_since(self) -> float | None:
        """Return since when the first of it is held; None if nothing is. Cost: O(1), and 0.02 µs for each apart."""
        firsts = [since for table in self._tables() for _, since in islice(self._first(table), 1)]
        return min([*firsts, *self.apart.singles.values(), *self.apart.batches.values()], default=None)

    def _tables(self) -> tuple[dict[Any, float | None], ...]:
        return self.singles, self.batches

    def _first(self, table: dict[Any, float | None]) -> Iterator[tuple[Any, float]]:
        """Yield the first of a table, but for what is being collected."""
        return islice(((one, since) for one, since in table.items() if since is not None), SOME)


def segments_of(held: Iterable[HeldOne]) -> list[Segment]:
    """Return the messages of deliveries, and what is left of batches; deliveries in a row are one segment."""
    found: list[Segment] = []
    follows, marks, records = -1, 0, [b""]
    for one in held:
        if not isinstance(one, Delivery):
            found += one.left()
        elif one.sequence == follows and one.marks == marks:
            records.append(one.record)
            follows += 1
        else:
            follows, marks, records = one.sequence + 1, one.marks, [one.record]
            found.append(Segment(one.sequence, records, marks))
    return found
