"""The lanes of a queue: where its messages wait, in memory as far as there is room, else in the spill store or the log.

A lane is a priority, or what is delayed in one. Its messages are in a list of runs, in order of sequence; what waits
for its time is in a schedule: what was put so by the wall clock, for that survives a restart, and what was given back
so by the monotonic one. By the number of a priority, a schedule holds what of it came back scattered: single messages,
too many to be runs. Those are due at once, and come in order of sequence with what the lane's list holds.

All of it under the queue's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from qflow.delivery import ONE_ATTEMPT, Segment
from qflow.memory.chunk import Chunk, index_charge
from qflow.memory.gate import ENDED, Gate
from qflow.memory.line import FOREVER
from qflow.memory.run import Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.message import (
    DELAYED,
    LANE_SHIFT,
    OVERHEAD_BYTES,
    RETURNED,
    Message,
    Record,
    by_due,
    expires_of,
    expiries,
    is_logged,
    is_plain,
    lane_of,
)
from qflow.queues.context import Context
from qflow.storage.log.lane import Publisher
from qflow.storage.log.rows import Row, Settled, new_row, purged_row
from qflow.storage.log.transaction_log import Lane, Request

NOWHERE = RunList(-1)
"""Where a fast get finds nothing, and goes the long way."""

TIMED = 2
"""Why a message is looked at before it goes out, as bits beside `ENDED`: some message may expire;"""
LEASED = 4
"""somebody wants to know since when messages are held;"""
COUNTED = 8
"""messages may have been delivered too often;"""
PAUSED = 16
"""nothing is to be delivered."""


class Lanes:
    """See the module."""

    __slots__ = (
        "_publisher", "_unlogged", "acked", "arrivals", "closed", "context", "front", "front_number", "gate", "gone",
        "lists", "logged", "looked", "message_bytes", "mixed", "purged_below", "ranked", "runs", "schedules", "skipped",
    )  # fmt: skip

    def __init__(self, context: Context, gate: Gate) -> None:
        self.context = context
        self.gate = gate
        self.lists: dict[int, RunList] = {}
        """Each lane's messages, by number; of a delayed lane, what the log holds and the schedule does not know yet."""
        self.schedules: dict[int, Schedule] = {}
        """What waits for its time, by the number of its lane."""
        self.logged: dict[int, Lane] = {}
        """The same lanes as the log knows them."""
        self._unlogged: dict[int, Lane] = {}  # how commits know the lanes of a queue that is not logged
        self.mixed = False
        """Messages that are not logged are put beside others that are."""
        self.skipped = 0
        """Sequences below the `next` of all lanes that never waited here."""
        self.gone = 0
        """Messages that left without an ack."""
        self.acked = 0
        self.message_bytes = 0
        """Of all of them; kept where there is a limit in bytes."""
        self.purged_below: dict[int, int] = {}
        self.closed = 0
        """Why a message may not be handed out before it was looked at: it may be late, or early."""
        self.looked = NOWHERE
        """The lane the next message comes from, if there is nothing but that message to look at."""
        self.front = NOWHERE
        """The same, where nothing closes it: a fast get takes from it."""
        self.front_number = 0
        self.arrivals = 0
        """Grows as a message comes into a lane that is not the lowest, or a front is chosen."""

    def open_all(self, rows: dict[int, Row] | None, publisher: Publisher) -> None:
        """Begin with what the log holds; None if the queue is not logged."""
        self._publisher = publisher
        priorities = self.context.settings.priorities
        for number in {**dict.fromkeys(range(priorities)), **(rows or {})}:
            self.open(number, rows)
        self.runs = self.lists[0]
        self.ranked = [self.lists[number] for number in reversed(range(priorities))]
        """Lanes to take from, the highest priority first."""

    def open(self, number: int, rows: dict[int, Row] | None) -> None:
        """Begin a lane, with what the log holds of it."""
        row = new_row(number)
        if rows is not None:
            row = rows.get(number, row)
            if not row.messages:
                row = purged_row(row, row.next)  # numbers that were reserved, and nothing else
            self.logged[number] = Lane(self.context.owner, number, row, self._publisher)
        runs = self.lists[number] = RunList(row.next)
        self.skipped += row.next - row.messages
        self.message_bytes += row.bytes
        if row.messages:
            runs.add(Run.logged(row.floor, row.next, row.messages, row.bytes, 0))
        if number >= DELAYED:
            self.schedules[number] = Schedule()

    def open_delayed(self, number: int) -> None:
        """Begin a lane for delayed messages."""
        self.open(number, None if self.context.log is None else {})

    def list_of(self, sequence: int) -> RunList:
        """Return the messages of a sequence's lane."""
        return self.lists[sequence >> LANE_SHIFT]

    def commit_lane(self, number: int) -> Lane:
        """Return a lane as commits know it."""
        if self.context.log is not None:
            return self.logged[number]
        lane = self._unlogged.get(number)
        if lane is None:
            lane = self._unlogged[number] = Lane(self.context.owner, number, None, self._publisher)
        return lane

    # How many there are ----------------------------------------------------------------------------------------------

    def messages(self) -> int:
        """Return how many are not settled: waiting and acquired."""
        lists = self.lists
        following = self.runs.next if len(lists) == 1 else sum(runs.next for runs in lists.values())
        return following - self.skipped - self.gone - self.acked

    def spilled_messages(self) -> int:
        """Return how many lie in the spill store."""
        return sum(runs.tally().spilled for runs in self.lists.values()) + sum(
            schedule.tally().spilled_messages for schedule in self.schedules.values()
        )

    def now_ms(self, number: int) -> int:
        """Return the time as the schedule of this number has it."""
        return int(self.context.monotonic() * 1000) if number >= RETURNED else self.context.now_ms()

    def due_in_ms(self, number: int) -> float:
        """Return in how many milliseconds the next message of a schedule may be due; FOREVER if there is none."""
        schedule = self.schedules.get(number)
        due_ms = None if schedule is None else schedule.next_due_ms()
        return FOREVER if due_ms is None else due_ms - self.now_ms(number)

    def next_due_in_ms(self) -> float:
        """Return in how many milliseconds the next delayed message may be due; FOREVER if there is none."""
        return min(map(self.due_in_ms, self.schedules), default=FOREVER)

    def next_expiry_ms(self) -> int | None:
        """Return when the next message expires that is first in its lane and in memory; None if none does."""
        heads = (runs.settle_head() for runs in self.ranked)
        records = (next(iter(run.records), b"") for run in heads if run.place is Place.RESIDENT)
        return min(filter(None, map(expires_of, records)), default=None)

    def count_bytes(self, held_bytes: int) -> int:
        """Return the bytes of all messages, given what is charged for deliveries themselves. Cost: O(runs)."""
        elsewhere = size = overhead = 0
        for runs in self.lists.values():
            tally = runs.tally()
            count = tally.spilled + tally.logged
            elsewhere += count
            size += tally.spilled_charge + tally.logged_charge - OVERHEAD_BYTES * count
        for schedule in self.schedules.values():
            part = schedule.tally()
            elsewhere += part.spilled_messages
            size += part.spilled_bytes
            overhead += schedule.overhead_bytes
        overhead += held_bytes + OVERHEAD_BYTES * (self.messages() - elsewhere)
        return self.gate.visible - overhead + size

    # The front -------------------------------------------------------------------------------------------------------

    def close_front(self, reason: int, closes: bool) -> None:
        """Have a reason why messages are looked at before they go out, or have it no more."""
        self.closed = self.closed | reason if closes else self.closed & ~reason

    @property
    def paused(self) -> bool:
        """Nothing is delivered for now."""
        return bool(self.closed & PAUSED)

    def pause(self, pauses: bool) -> None:
        """Deliver nothing, or deliver again: then those who wait are to be woken."""
        self.close_front(PAUSED, pauses)
        self.refresh()

    def must_look(self) -> bool:
        """Tell whether a message may not be handed out before it was looked at."""
        return bool(self.closed) or self._has_scheduled()

    def _has_scheduled(self) -> bool:
        """Tell whether the next message may come from a schedule."""
        schedules = self.schedules
        return bool(schedules) and (any(one.messages for one in schedules.values()) or self.has_unread())

    def has_unread(self) -> bool:
        """Tell whether the log holds delayed messages that no schedule knows yet."""
        return any(not runs.settle_head().spent for runs in self.delayed_lists())

    def delayed_lists(self) -> list[RunList]:
        """Return what the log holds of delayed messages, by lane, before schedules know it."""
        return [self.lists[number] for number in self.schedules if DELAYED <= number < RETURNED]

    @property
    def is_bare(self) -> bool:
        """No message waits in any lane, and none comes up by itself; False where that takes a closer look."""
        runs, head = self.runs, self.runs.head
        return self.front is runs and head is runs.open and not head.records

    def refresh(self) -> None:
        """After a change of what may pass at once: compute the gate's numbers and the front."""
        self.gate.refresh()
        if self.gate.slack or self.closed & (ENDED | PAUSED) or self._has_scheduled():
            self.front, self.looked, self.front_number = NOWHERE, NOWHERE, 0  # getters go the long way
        else:
            self._choose_front()

    def renew_front(self) -> None:
        """After messages came or went that are not the last of the lowest priority: take from where they are."""
        if self.looked is not NOWHERE:
            self._choose_front()

    def _choose_front(self) -> None:
        """Let fast gets take from the highest priority that has something in memory, or nothing above it."""
        self.arrivals += 1
        for runs in self.ranked:
            head = runs.head
            if head.records or runs is self.runs or (head is not runs.open and runs.settle_head().waiting):
                self.looked, self.front_number = runs, runs.number
                self.front = NOWHERE if self.closed else runs
                return

    def note_times(self, records: list[Record]) -> None:
        """Remember that messages may expire, if one of these does."""
        if not self.closed & TIMED and any(type(record) is Message and record.expires_ms for record in records):
            self.closed |= TIMED
            self.refresh()

    # Coming back -----------------------------------------------------------------------------------------------------

    def add(self, first: int, records: list[Record], marks: int) -> bool:
        """Put messages into a schedule that are delayed, or scattered; False if they belong into a list of runs."""
        before = self.scheduled_bytes()
        if not self.place(first, records, marks):
            return False
        self.cover(self.scheduled_bytes() - before)
        return True

    def place(self, first: int, records: list[Record], marks: int, due_ms: int = 0, *, was_due: bool = False) -> bool:
        """`add`, where the caller is to `cover` what that takes, perhaps of many: see `scheduled_bytes`.

        Args:
            due_ms: when they may be delivered again, on the monotonic clock; 0: at once, or when they are due first.
            was_due: they were due already, whatever the clock says.
        """
        if due_ms or lane_of(first) >= DELAYED:
            self._add_delayed(first, records, marks, due_ms, was_due=was_due)
        elif self.list_of(first).scatters(len(records)):
            self._schedule(lane_of(first)).shelves.add(0, first, records, marks)
        else:
            return False
        return True

    def _add_delayed(self, first: int, records: list[Record], marks: int, due_ms: int, *, was_due: bool) -> None:
        """Put messages into the schedule of their lane, by their own due times, or into that of what was given back."""
        number = lane_of(first)
        if due_ms or was_due:
            number = number % DELAYED + RETURNED
        schedule = self._schedule(number)
        if due_ms:
            schedule.shelves.add(due_ms, first, records, marks)
        else:
            now_ms = self.now_ms(number)
            by_wall_ms = self.context.now_ms() - now_ms
            for due, start, stop in by_due(records):
                # In the order of before.
                moment = max(1, min(due - by_wall_ms, now_ms)) if was_due else due
                schedule.shelves.add(moment, first + start, records[start:stop], marks)

    def _schedule(self, number: int) -> Schedule:
        """Return a schedule, which is made where there is none."""
        schedule = self.schedules.get(number)
        if schedule is None:
            schedule = self.schedules[number] = Schedule()
        return schedule

    def scheduled_bytes(self) -> int:
        """Return what schedules take beyond their messages."""
        return sum([schedule.overhead_bytes for schedule in self.schedules.values()])

    def cover(self, charged: int = 0) -> None:
        """Charge what a schedule takes beyond its messages: it may be on slack, so what is due goes first."""
        gate = self.gate
        gate.used += charged
        gate.get_slack = max(gate.get_slack, gate.over - gate.put_slack)
        self.refresh()

    def cover_held(self) -> None:
        """After deliveries, or a batch of them, are held: borrow for what that takes, or have it on slack."""
        missing = self.gate.over
        if missing > 0 and not self.gate.borrow(missing):
            self.cover()

    # Going to disk ---------------------------------------------------------------------------------------------------

    def claim_victim(self, claim: object, wanted: int, most: int) -> tuple[int, Run | Chunk | None]:
        """Claim what is needed last: what is delayed, then the tail of the lowest priority.

        Args:
            most: messages that are written one by one; what is delayed is written as one.
        """
        for number in self.schedules:
            if number >= DELAYED and (chunk := self._claim_far(number, claim, wanted)) is not None:
                return number, chunk
        for runs in reversed(self.ranked):
            number = runs.number
            if runs.ends_small and (chunk := self._claim_far(number, claim, wanted)) is not None:
                return number, chunk
            run = runs.claim_tail(claim, wanted, most)
            if run is not None:
                return number, run
            if (chunk := self._claim_far(number, claim, wanted)) is not None:
                return number, chunk
        for runs in self.ranked:
            if runs.aside:
                runs.put_back()
                return self.claim_victim(claim, wanted, most)
        return 0, None

    def _claim_far(self, number: int, claim: object, wanted: int) -> Chunk | None:
        """Claim the far end of a schedule, if there is one and that frees something."""
        schedule = self.schedules.get(number)
        chunk = None if schedule is None else schedule.claim_far(claim, wanted)
        if schedule is None or chunk is None:
            return None
        if chunk.charged + chunk.groups_bytes > index_charge(chunk.count):
            return chunk
        schedule.unclaim(claim)  # so little that its place in the index would take more
        return None

    def install_spilled(self, number: int, moving: Run | Chunk, claim: object, slots: object | None) -> int | None:
        """Make what was written leave memory; return what it was charged, None if it stays there."""
        if isinstance(moving, Chunk):
            schedule = self.schedules[number]
            if slots is None:
                before = schedule.overhead_bytes
                schedule.unclaim(claim)
                if schedule.overhead_bytes != before:  # it is no part of a group any more, for the other part has left
                    self.cover(schedule.overhead_bytes - before)
                return None
            return schedule.chunk_spilled(claim, slots)
        if moving.claim is not claim:
            return None
        if slots is None:
            moving.claim = None
            return None
        freed = moving.become_spilled(slots)
        self.lists[number].join(moving)
        return freed

    # In the log ------------------------------------------------------------------------------------------------------

    def log_attempts(self, segments: Iterable[Segment]) -> Request | None:
        """Have it in the log how often messages were delivered; return what to wait for, if there is something."""
        log = self.context.usable_log
        ranges: dict[int, list[tuple[int, int, int]]] = {}
        for first, records, marks in segments:
            ranges.setdefault(lane_of(first), []).append((first, first + len(records), marks // ONE_ATTEMPT))
        joined: Request | None = None
        for number, part in ranges.items() if log is not None else ():
            joined = log.attempts(self.logged[number], part)  # type: ignore[union-attr]
        return joined

    def log_settled(self, segments: list[Segment]) -> Request | None:
        """Have the log settle what is acked; return what to wait for. Raises BrokerClosed."""
        if self.context.log is None:
            return None
        self.context.check_not_closed()
        return self.context.log.settle_all(self.settled_parts(segments))

    def settled_parts(self, segments: list[Segment]) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane; nothing of a queue that is not logged, or was deleted."""
        if self.context.log is None or self.context.was_deleted:
            return []
        parts: dict[int, list[Settled]] = {}
        for first, records, _ in segments:
            parts.setdefault(lane_of(first), []).append(settled(first, records, sum(map(len, records))))
        return [(self.logged[number], part) for number, part in parts.items()]


def settled(first: int, records: list[Record], size: int) -> Settled:
    """Return the range of `size` bytes as the log counts it: messages that were not logged count nothing."""
    end = first + len(records)
    if not is_plain(records):
        records = [record for record in records if is_logged(record)]
        size = sum(map(len, records))
    return Settled(first, end, len(records), size)


def by_expiry(segment: Segment, now_ms: int) -> Iterator[tuple[Segment, bool]]:
    """Cut a segment where messages that have expired and others meet; yield each part and whether it has."""
    first, records, marks = segment
    start = 0
    for is_late, stretch in groupby([0 < moment <= now_ms for moment in expiries(records)]):
        stop = start + len(list(stretch))
        yield Segment(first + start, records[start:stop], marks), is_late
        start = stop


def sorted_out(
    taken: list[Segment], most_deliveries: int | None, now_ms: int | None
) -> tuple[list[Segment], list[Segment], list[Segment]]:
    """Return what may be delivered, what has expired by then, if that is asked, and what was delivered too often."""
    kept: list[Segment] = []
    expired: list[Segment] = []
    spent: list[Segment] = []
    for segment in taken:
        if most_deliveries is not None and segment.marks >> 1 >= most_deliveries:
            spent.append(segment)
        elif now_ms is not None and not is_plain(segment.records):
            for part, is_late in by_expiry(segment, now_ms):
                (expired if is_late else kept).append(part)
        else:
            kept.append(segment)
    return kept, expired, spent
