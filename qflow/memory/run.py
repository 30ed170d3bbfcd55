"""A run: consecutive sequences of one queue that share one place.

    RESIDENT  the records are in memory, in `records`
    SPILLED   the records are in the spill store, at `slots`; only the range, bytes and largest size are known here
    LOGGED    the records are known from the log, not yet replayed; `count` may be less than the range is wide

A *claim* says that somebody is moving the run's records without holding the queue's lock. What he brings counts only if
his claim still stands when he returns; until then the run stays what it was, so whoever needs it now may revoke the
claim: a getter takes the records of a run that is being spilled.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from qflow.message import OVERHEAD_BYTES, Record, is_logged, is_plain, latest_expiry
from qflow.named_tuples import NamedTuple

NOTHING: deque[Record] = deque(maxlen=0)
"""The records of a run that is not resident: always empty, so the hot path needs no second check."""


class Place(enum.Enum):
    RESIDENT = "resident"
    SPILLED = "spilled"
    LOGGED = "logged"


class Pool:
    """What the parts of a spilled run that was cut are charged together: nobody knows how its bytes are spread."""

    __slots__ = ("charged", "parts")

    def __init__(self, charged: int) -> None:
        self.charged = charged
        self.parts = 1


class Run:
    """See the module. `first` is the next sequence to deliver; `key` is its rank in the list and stays as it is."""

    __slots__ = (
        "charged",
        "claim",
        "count",
        "end",
        "expires_ms",
        "first",
        "key",
        "largest",
        "logged_bytes",
        "logged_count",
        "marks",
        "needs",
        "place",
        "pool",
        "records",
        "slots",
        "soonest_ms",
        "timed_end",
        "timed_from",
        "timed_ms",
    )

    def __init__(self, first: int, marks: int = 0, records: deque[Record] | None = None) -> None:
        self.key = self.first = first
        self.marks = marks
        """As in `delivery.py`: earlier deliveries, and whether there may have been one."""
        self.place = Place.RESIDENT
        self.records: deque[Record] = deque() if records is None else records
        self.claim: object | None = None
        self.end = first
        """Sequence after the last; of a resident run, read `stop` instead."""
        self.count = 0
        self.charged = 0
        """What its records would cost in memory; of a run that is not resident."""
        self.pool: Pool | None = None
        """Where `charged` is a guess, a share of what a larger run was charged: what is known; of a spilled run."""
        self.largest = 0
        """No record of it has more message bytes; of a run that is not resident."""
        self.expires_ms = 0
        """Everything in it has expired then; 0 = not everything does. Of a spilled run, and so are these:"""
        self.logged_count = self.logged_bytes = 0
        """What of it the log holds, as long as nothing was taken from it; to settle it without reading it."""
        self.timed_from = self.timed_end = first
        self.timed_ms = 0
        """Messages from the one to the other have all expired then, whether or not they are here still: a sequence is
        that of one message for good. Of a run in memory, and so is this:"""
        self.soonest_ms = 0
        """None of its records expires before; 0 = nobody has looked."""
        self.needs = 0
        """Size of its next message, where it was found not to fit; of a run that is not resident."""
        self.slots: Any = None

    @classmethod
    def logged(cls, first: int, end: int, count: int, message_bytes: int, marks: int) -> Run:
        run = cls(first, marks, NOTHING)
        run.place = Place.LOGGED
        run.end, run.count = end, count
        run.charged = message_bytes + OVERHEAD_BYTES * count
        return run

    @property
    def stop(self) -> int:
        """Sequence after the last one."""
        return self.first + len(self.records) if self.place is Place.RESIDENT else self.end

    @property
    def waiting(self) -> int:
        """How many messages it holds."""
        return len(self.records) if self.place is Place.RESIDENT else self.count

    @property
    def spent(self) -> bool:
        """It will never hold a message again. (A logged run without any may still have gaps to settle.)"""
        return not self.waiting and not (self.place is Place.LOGGED and self.first < self.end)

    def late(self, now_ms: int) -> int:
        """Return how many messages at its front are known to have expired, without a look at any; in memory."""
        is_known = self.timed_from <= self.first and self.timed_ms <= now_ms
        return max(0, min(self.timed_end, self.stop) - self.first) if is_known else 0

    def know_as(self, other: Run) -> None:
        """Know of messages in memory when they have expired, as another run does that some of them are from."""
        self.timed_from, self.timed_end, self.timed_ms = other.timed_from, other.timed_end, other.timed_ms

    def split(self, cut: int) -> Run:
        """Give what lies from `cut` on to a new run and return it; of a run that is in memory or spilled."""
        right = Run(cut, self.marks)
        count = cut - self.first
        if self.place is Place.RESIDENT:
            moved = [self.records.pop() for _ in range(len(self.records) - count)]
            right.records.extend(reversed(moved))
            right.soonest_ms = self.soonest_ms
            right.know_as(self)
            return right
        right.place, right.records = self.place, NOTHING
        right.end, right.largest = self.end, self.largest
        right.count = self.count - count
        right.charged = self.charged * right.count // self.count
        self.slots, right.slots = self.slots.take(count)
        self.end, self.count = cut, count
        self.charged -= right.charged
        self.expires_ms = 0
        pool = self.pool or Pool(self.charged + right.charged)
        pool.parts += 1
        self.pool = right.pool = pool
        return right

    def discharge(self, charged: int) -> None:
        """Take what some messages were charged off; of a run that is not resident."""
        if self.pool is None:
            self.charged -= charged
        else:
            self.pool.charged -= charged
            self.charged -= min(charged, self.charged)

    def leave_pool(self) -> int:
        """Return what is left charged when the last message is gone: what was lost. Of a spilled run."""
        pool = self.pool
        if pool is None:
            return self.charged
        self.pool = None
        pool.parts -= 1
        return 0 if pool.parts else pool.charged

    def become_spilled(self, slots: Any) -> int:
        """Drop the records, which now lie at `slots`; return what they were charged."""
        sizes = list(map(len, self.records))
        self.count = len(sizes)
        self.charged = sum(sizes) + OVERHEAD_BYTES * len(sizes)
        self.largest = max(sizes)
        if is_plain(self.records):
            self.logged_count, self.logged_bytes, self.expires_ms = len(sizes), sum(sizes), 0
        else:
            logged = [size for size, record in zip(sizes, self.records, strict=True) if is_logged(record)]
            self.logged_count, self.logged_bytes = len(logged), sum(logged)
            self.expires_ms = latest_expiry(self.records)
        self.end = self.first + self.count
        self.slots = slots
        self.place = Place.SPILLED
        self.claim = None
        self.records = NOTHING
        return self.charged

    def __repr__(self) -> str:
        claimed = ", claimed" if self.claim else ""
        return f"<Run {self.place.value} {self.first}..{self.stop} ({self.waiting}{claimed})>"


def note_expiry(run: Run, first: int, count: int, expires_ms: int) -> None:
    """Note when messages have expired that a run was given at its right: with those before, if those do no later."""
    if run.timed_end != first or expires_ms < run.timed_ms:
        run.timed_from = first
    run.timed_end, run.timed_ms = first + count, expires_ms


class Tally(NamedTuple):
    """How many messages are where, and what those outside memory are charged, in bytes."""

    resident: int
    spilled: int
    spilled_charge: int
    logged: int
    logged_charge: int


def tally_of(runs: Iterable[Run]) -> Tally:
    """Count the messages of some runs by place. Cost: O(runs)."""
    away: dict[Place, list[Run]] = {Place.SPILLED: [], Place.LOGGED: []}
    resident = 0
    for run in runs:
        if run.place is Place.RESIDENT:
            resident += len(run.records)
        else:
            away[run.place].append(run)
    return Tally(resident, *_weigh(away[Place.SPILLED]), *_weigh(away[Place.LOGGED]))


def _weigh(runs: Sequence[Run]) -> tuple[int, int]:
    """Return how many messages some runs have that are not resident, and what they are charged."""
    pools = {run.pool for run in runs if run.pool is not None}
    charged = sum(run.charged for run in runs if run.pool is None) + sum(pool.charged for pool in pools)
    return sum(run.count for run in runs), charged
