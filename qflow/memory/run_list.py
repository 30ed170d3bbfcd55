"""The list of a queue's waiting messages, as runs in order of sequence.

    head    the first run; messages are taken from its left
    …       runs in between, each RESIDENT, SPILLED or LOGGED
    open    the last run, always RESIDENT, never claimed; messages are appended to its right

Rules: ranges never overlap and grow to the right; neighbours that can be one run are one. No I/O, no locks: the queue
that owns the list holds its lock around every call. Every step that hands a record over is a straight line whose only
calls come before the first change, because an interrupt can strike at a call and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat, starmap

from sortedcontainers import SortedKeyList

from qflow.delivery import Segment
from qflow.memory.run import NOTHING, Place, Run, Tally, tally_of
from qflow.message import OVERHEAD_BYTES, Record, lane_of

OWN_RUN = 256
"""A batch of at least so many messages is a run of its own, handed over whole if it is taken whole."""
SMALL_RUN = 16
"""A run takes some 900 bytes, for which nothing is charged: of runs with fewer messages there may not be many."""
SMALL_RUNS = 256
"""So many of them may be."""


def _key(run: Run) -> int:
    return run.key


_NO_RUNS: SortedKeyList[Run, int] = SortedKeyList(key=_key)
"""Of all lists that have had an open run only. Never changed."""


class RunList:
    """See the module. Cost: O(1) a message at both ends, O(log runs) for all else."""

    __slots__ = ("_runs", "aside", "head", "next", "number", "open", "tail")

    def __init__(self, first: int = 0) -> None:
        self.next = first
        """The sequence the next appended record gets, if none is skipped."""
        self.open = Run(first)
        self.tail = self.open.records
        """The records of that: what a put touches besides lies near it, for with many queues that is what it costs."""
        self.head = self.open
        self.number = lane_of(first)  # of its lane
        self._runs = _NO_RUNS  # all but `open`
        self.aside: tuple[Run, ...] = ()
        """Runs in memory in which everything has expired, from the first on: they are counted, and taken by nobody."""

    # Filling -----------------------------------------------------------------------------------------------------

    def tail_for(self, first: int, count: int) -> deque[Record]:
        """Return where `count` records with sequences from `first` on belong.

        The caller extends it and sets `next`, in one straight line with what else depends on both.
        """
        if first != self.next or count >= OWN_RUN:
            self.renew_open(first)
        return self.tail

    def add(self, run: Run) -> None:
        """Put a run in its place, joined with neighbours where that makes one run of two."""
        self._insert(run)
        if self.head is self.open or run.key < self.head.first or self.head.spent:
            self.settle_head()

    def scatters(self, count: int) -> bool:
        """Tell whether so many messages would be one more small run than may be: they belong into a schedule."""
        return count < SMALL_RUN and len(self._runs) > SMALL_RUNS and bool(self._runs[SMALL_RUNS].waiting < SMALL_RUN)

    @property
    def ends_small(self) -> bool:
        """What it would spill next is a small run."""
        return not self.open.records and bool(self._runs) and bool(self._runs[-1].waiting < SMALL_RUN)

    def give_back(self, sequence: int, records: list[Record], marks: int) -> None:
        """Return taken records to their original place."""
        place = self._rank(sequence)
        before = self._runs[place - 1] if place else None
        if (
            before is not None
            and before.place is Place.RESIDENT
            and before.claim is None
            and before.marks == marks
            and before.stop == sequence
            and before.records
        ):
            before.records += records
            before.soonest_ms = 0
            self._join(place - 1)
        else:
            self._insert(Run(sequence, marks, deque(records)))
        self.settle_head()

    # Taking ------------------------------------------------------------------------------------------------------

    def settle_head(self) -> Run:
        """Make `head` the first run that holds anything (or `open`) and return it."""
        runs = self._runs
        while runs:
            run: Run = runs[0]
            if not run.spent:
                self.head = run
                return run
            del runs[0]
        self.head = self.open
        return self.head

    def take(self, most: int, segments: list[Segment]) -> int:
        """Move up to `most` records from a resident head to `segments`; return how many.

        Revokes the claim of somebody who is spilling the head.
        """
        run = self.head
        records = run.records
        if not records:
            run = self.settle_head()
            records = run.records
        count = min(most, len(records))
        if not count:
            return 0
        run.claim = None
        first = run.first
        taken: list[Record] = []
        segment = Segment(first, taken, run.marks)
        if count == len(records):
            segments += (segment,)
            taken += records
            run.first = first + count
            records.clear()
        else:
            popped = starmap(records.popleft, repeat((), count))
            segments += (segment,)
            taken += popped
            run.first = first + count
        return count

    # Moving ------------------------------------------------------------------------------------------------------

    def claim_tail(self, claim: object, wanted: int, most: int) -> Run | None:
        """Claim the tail-most resident records for spilling: about `wanted` bytes of one run, 1 to `most` records."""
        run = self.open
        index = len(self._runs)
        while run.place is not Place.RESIDENT or run.claim is not None or not run.records:
            if index == 0:
                return None
            index -= 1
            run = self._runs[index]
        records = run.records
        total = count = 0
        for record in reversed(records):
            total += len(record) + OVERHEAD_BYTES
            count += 1
            if total >= wanted or count >= most:
                break
        if count == len(records):
            if run is self.open:
                self.renew_open(self.next)
            run.claim = claim
            return run
        cut = run.first + len(records) - count
        right = Run(cut, run.marks)
        right.claim = claim
        if run is self.open:
            self.renew_open(self.next)
        self._insert(right)
        right.records.extendleft(starmap(records.pop, repeat((), count)))
        return right

    def find(self, sequence: int) -> Run | None:
        """Return the run that holds a sequence."""
        return run if (run := self.following(sequence)) is not None and run.first <= sequence else None

    def following(self, sequence: int) -> Run | None:
        """Return the first run that holds a sequence, or later ones."""
        return next((run for run in self.behind(sequence) if run.stop > sequence), None)

    def cut_out(self, run: Run, first: int, end: int) -> Run:
        """Make a part of a run a run of its own, that is in memory or spilled, and return it.

        Of a spilled run nobody knows how its bytes are spread, so its parts share them evenly. Cost: O(1); in memory
        O(messages behind `first`).
        """
        if run is self.open:
            self.renew_open(self.next)
        parts = [run]
        for cut in (first, end):
            if parts[-1].first < cut < parts[-1].stop:
                parts.append(parts[-1].split(cut))
        for part in parts[1:]:
            self._put_in(part)
        return next(part for part in parts if part.first == first)

    def cut_right(self, run: Run, most: int) -> Run:
        """Return the run; of one with more messages than that in memory so many on its right, as a run of their own."""
        count = len(run.records)
        if count <= most:
            return run
        if run is self.open:
            self.renew_open(self.next)
        right = run.split(run.first + count - most)
        self._put_in(right)
        return right

    def cut_left(self, run: Run, most: int) -> Run:
        """Return the run; of one with more messages than that in memory so many on its left, as a run of their own."""
        if len(run.records) <= most:
            return run
        if run is self.open:
            self.renew_open(self.next)
        left = Run(run.first, run.marks, deque(starmap(run.records.popleft, repeat((), most))))
        left.soonest_ms = run.soonest_ms
        left.know_as(run)
        self._runs.remove(run)
        run.key = run.first = left.first + most
        self._put_in(left)
        self._put_in(run)
        self.settle_head()
        return left

    def remove(self, run: Run) -> Segment:
        """Take a run that is in memory off the list, and return what it holds."""
        if run is self.open:
            self.renew_open(self.next)
        self._runs.remove(run)
        records, run.records = list(run.records), NOTHING
        self.settle_head()
        return Segment(run.first, records, run.marks)

    def set_aside(self, run: Run) -> None:
        """Take a run in memory off the list in which everything has expired: that it goes takes longer than a get."""
        if run is self.open:
            self.renew_open(self.next)
        run.claim = None
        self._runs.remove(run)
        self.aside = (*self.aside, run)
        self.settle_head()

    def take_aside(self, most: int) -> Segment:
        """Take the first messages of what was set aside; at most so many."""
        run = self.aside[0]
        count = min(most, len(run.records))
        taken = list(starmap(run.records.popleft, repeat((), count)))
        run.first += count
        if not run.records:
            self.aside = self.aside[1:]
        return Segment(run.first - count, taken, run.marks)

    def put_back(self) -> None:
        """Have what was set aside in the list again, to be spilled."""
        aside, self.aside = self.aside, ()
        for run in aside:
            run.key = run.first
            self._put_in(run)
        self.settle_head()

    def pick(self, run: Run, sequence: int, most: int) -> list[Segment] | None:
        """Take one message of a run in memory, and what lies between it and the nearer end; all of a small one.

        Revokes the claim of somebody who is spilling them. Cost: O(messages taken), about `most` at most.

        Returns:
            the message, then what is to be given back. None if it lies deeper: so many were cut off; try again.
        """
        run.claim = None
        left, right = sequence - run.first, run.stop - sequence
        count = min(right, left + 1, most)
        if left + right - count < SMALL_RUN:
            count = left + right
        part = self.cut_right(run, count) if right <= left else self.cut_left(run, count)
        if not part.first <= sequence < part.stop:
            return None
        first, records, marks = self.remove(part)
        place = sequence - first
        pieces = [Segment(first, records[:place], marks), Segment(sequence + 1, records[place + 1 :], marks)]
        return [Segment(sequence, records[place : place + 1], marks), *[piece for piece in pieces if piece.records]]

    def join(self, run: Run) -> None:
        """Join a run with its neighbours where they are alike again."""
        self._join(self._runs.index(run))

    def claim_head(self, claim: object) -> Run | None:
        """Claim the head for restoring, if it is not resident and nobody has."""
        run = self.settle_head()
        if run.place is Place.RESIDENT or run.claim is not None:
            return None
        run.claim = claim
        return run

    def claim_first_away(self, claim: object) -> Run | None:
        """Claim the first run that is not resident for restoring, if nobody has claimed it."""
        run = next((run for run in self._runs if run.place is not Place.RESIDENT and not run.spent), None)
        if run is None or run.claim is not None:
            return None
        run.claim = claim
        return run

    def drop_front(self, run: Run, first: int, count: int, charged: int) -> None:
        """Take restored or lost messages off the left of a run that is not resident; an empty one leaves the list."""
        run.first = first
        run.count -= count
        run.discharge(charged)
        run.claim = None
        if run.first >= run.end:
            run.count = 0
            self._runs.remove(run)
        if self.head is run:
            self.settle_head()

    def drop_all(self, end: int) -> list[Run]:
        """Empty the list (purge); return the runs it had. Sequences below `end` do not come back."""
        dropped = list(self)
        self._runs, self.aside = _NO_RUNS, ()
        self.next = max(self.next, end)
        self.open = self.head = fresh = Run(self.next)
        self.tail = fresh.records
        return dropped

    # Looking -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Run]:
        return chain(self.aside, self._runs, (self.open,))

    def behind(self, sequence: int) -> Iterator[Run]:
        """Yield the runs from that on which holds a sequence or comes next, or one before. Until the list changes."""
        return chain(self._runs.islice(max(0, self._rank(sequence) - 1)), (self.open,))

    def tally(self) -> Tally:
        """Count messages by place. Cost: O(runs)."""
        return tally_of(self) if self._runs or self.aside else Tally(self.open.waiting, 0, 0, 0, 0)

    def problems(self) -> list[str]:
        """Check the rules; return what is wrong, in words."""
        problems = []
        last = last_key = -1
        for run in chain(self._runs, (self.open,)):
            if run.spent and run is not self.open:
                continue  # it goes when it is the first, wherever it is
            if run.first < last or run.stop < run.first:
                problems.append(f"{run!r} overlaps the run before it, which ends at {last}")
            if run.key <= last_key and run is not self.open:
                problems.append(f"{run!r} is out of order")
            if run.place is not Place.RESIDENT and (run.records or run.count > run.end - run.first or run.charged < 0):
                problems.append(f"{run!r} has a wrong count")
            last, last_key = max(last, run.stop), run.key
        if self.open.place is not Place.RESIDENT or self.open.claim is not None or self.open.stop != self.next:
            problems.append(f"the open run {self.open!r} does not end at {self.next}")
        if self.tail is not self.open.records:
            problems.append(f"what is put goes elsewhere than into the open run {self.open!r}")
        return problems

    # Inside ------------------------------------------------------------------------------------------------------

    def renew_open(self, first: int) -> None:
        """Start a new open run at `first`; the one before joins the others, unless it is empty."""
        fresh = Run(first)
        tail = self.open
        if tail.records:
            tail.key = tail.first
            self._add(tail)
        elif self.head is tail:
            self.head = fresh
        self.open, self.tail = fresh, fresh.records

    def _rank(self, sequence: int) -> int:
        """Return how many runs lie before `sequence`, which is in none of them."""
        runs = self._runs
        place: int = runs.bisect_key_right(sequence)
        # Consumed past `sequence`: its key is out of date; or empty, and before it may be such a one.
        while place and (runs[place - 1].first > sequence or runs[place - 1].spent):
            self._renew_key(place - 1)
            place = runs.bisect_key_right(sequence)
        return place

    def _renew_key(self, index: int) -> None:
        """Put a run in by where it begins now, and those behind it, whose old keys are not behind that, by theirs."""
        runs = self._runs
        stale: list[Run] = [runs.pop(index)]
        last = stale[0].first
        while index < len(runs) and runs[index].key <= last:
            stale.append(runs.pop(index))
            last = max(last, stale[-1].first)
        for run in stale:
            if not run.spent:
                run.key = run.first
                runs.add(run)

    def _insert(self, run: Run) -> None:
        self._put_in(run)
        self.join(run)

    def _put_in(self, run: Run) -> None:
        """Put a run in by where it begins: behind it, no key may be out of date that is not behind its own."""
        self._rank(run.first)
        self._add(run)

    def _add(self, run: Run) -> None:
        if self._runs is _NO_RUNS:
            self._runs = SortedKeyList(key=_key)
        self._runs.add(run)

    def _join(self, index: int) -> None:
        """Join the run at `index` with the one after it and the one before it, where they are alike."""
        for left in (index, index - 1):
            if left < 0 or left + 1 >= len(self._runs):
                continue
            one: Run = self._runs[left]
            two: Run = self._runs[left + 1]
            alike = one.marks == two.marks and one.place is two.place and one.pool is two.pool
            if one.claim or two.claim or not alike or one.stop != two.first:
                continue
            if one.place is Place.RESIDENT:
                one.soonest_ms = two.soonest_ms = min(one.soonest_ms, two.soonest_ms)
                if len(one.records) >= OWN_RUN and len(two.records) >= OWN_RUN:
                    continue
                if len(one.records) < len(two.records):
                    two.records.extendleft(reversed(one.records))
                    two.first = one.first
                    del self._runs[left : left + 2]
                    two.key = one.key  # else a part that is cut off it later would stand before it
                    self._runs.add(two)
                    if self.head is one:
                        self.head = two
                    continue
                one.records += two.records
            elif one.place is Place.SPILLED:
                one.slots = one.slots + two.slots
                one.count += two.count
                one.charged += two.charged
                one.largest = max(one.largest, two.largest)
                one.logged_count += two.logged_count
                one.logged_bytes += two.logged_bytes
                one.expires_ms = max(one.expires_ms, two.expires_ms) if one.expires_ms and two.expires_ms else 0
                one.end = two.end
                if one.pool is not None:
                    one.pool.parts -= 1
                    if one.pool.parts == 1:  # it is whole again
                        one.charged, one.pool = one.pool.charged, None
            else:
                continue
            del self._runs[left + 1]
            if self.head is two:
                self.head = one
