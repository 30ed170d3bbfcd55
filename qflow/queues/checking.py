"""Checks: whether what a queue counts agrees with what it holds.

A queue goes on while it is checked. What is in memory is counted a part at a time, and the lock is let go of between
two parts; what is compared is taken at one moment, and compared without the lock. What seems to be wrong is looked at
again, for it may only have been on its way.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from time import perf_counter, sleep

from qflow.delivery import Delivery, Segment
from qflow.held_batch import HeldBatch
from qflow.memory import inventory
from qflow.memory.line import PAUSE_S
from qflow.memory.run import Place, Run
from qflow.memory.waiting import sheltered
from qflow.message import OVERHEAD_BYTES, Record, charge, is_logged, is_plain, lowest_by_lane
from qflow.named_tuples import NamedTuple
from qflow.queues.exits import weigh
from qflow.queues.parts import Parts
from qflow.storage.log.rows import Row
from qflow.storage.spill.store import Ranges

LOOKED_AT_ONCE = 32_768
"""Messages that are counted in one step."""
ROUNDS = 4
"""What is wrong is wrong each time."""
PATIENCE_S = 10.0
"""How long what is on its way when something seems to be wrong is waited for."""
GIVING_BACK_S = 0.2
"""The same for what a thread that acks is about to give back: that is its next step."""

_record = attrgetter("record")
_sequence = attrgetter("sequence")
_digits = re.compile(r"\d+")


@sheltered
def problems(queue: Parts) -> list[str]:
    """Check every invariant; return what is wrong, in words.

    Cost: 0.03 µs a message in memory, of which 1 ms at once under the lock, and for each run, delivery and block.
    """
    found = _look(queue)
    for _ in range(ROUNDS - 1):
        if not found:
            break
        _wait_for_what_is_under_way(queue)
        again = _look(queue)
        found = {kind: text for kind, text in again.items() if kind in found}
    return [f"queue {queue.context.name!r}: {problem}" for problem in found.values()]


def _look(queue: Parts) -> dict[str, str]:
    """Return what seems to be wrong, by what tells it from other problems: numbers may be others each time."""
    counting = _Counting(queue)
    moment = counting.step()
    while moment is None:
        sleep(PAUSE_S)
        moment = counting.step()
    if queue.context.was_deleted:
        return {}  # what is left of it is on its way out
    held = _Held(*moment.held)
    texts = [*_charge_problems(moment, held), *_count_problems(moment, held), *_row_problems(moment, held)]
    found = {_digits.sub("#", text): text for text in texts + moment.problems}
    exact = [*_lending_problems(moment), *queue.spiller.problems(_slots_in_use(queue))]
    return found | {text: text for text in exact}


def _wait_for_what_is_under_way(queue: Parts) -> None:
    """Return when what is being spilled, freed, given back, or was handed over to be logged, has come to its end."""
    before = queue.spiller.under_way.copy()
    if queue.context.log is not None and not queue.context.log.failed:
        queue.context.log.drain()
    began = perf_counter()
    while (before & queue.spiller.under_way and perf_counter() < began + PATIENCE_S) or (
        _lends_too_much(queue) and perf_counter() < began + GIVING_BACK_S
    ):
        sleep(0.01)


def _lends_too_much(queue: Parts) -> bool:
    """Tell whether a queue has more than its capacity and does not use it: who acks gives that back a moment later."""
    account = queue.gate.account
    return account.borrowed > max(account.capacity, queue.gate.used)


def _slots_in_use(queue: Parts) -> Ranges:
    """Return where the messages lie that are not in memory, and what is still to be freed."""
    with queue.context.lock:
        runs = [run for each in queue.lanes.lists.values() for run in each if run.place is Place.SPILLED]
        slots = [run.slots for run in runs] + queue.spiller.trash
        slots += [chunk.slots for schedule in queue.lanes.schedules.values() for chunk in schedule.spilled]
    return Ranges(piece for part in slots for piece in part.ranges())


# In memory -------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What was counted of messages in a row."""

    stop: int
    charged: int
    logged: int


class _LaneNow(NamedTuple):
    """What the log, and memory, say of a lane."""

    row: Row
    next: int
    lowest: int
    """Of what waits in memory, in the spill store, or in the log."""


class _Moment:
    """What a queue says at one moment, and what was counted of it. Made under the lock; read without it."""

    def __init__(self, queue: Parts, charged: int, logged: int) -> None:
        gate, lanes, admission = queue.gate, queue.lanes, queue.admission
        schedules, account = lanes.schedules.values(), gate.account
        self.used = gate.used
        self.counted = charged + gate.incoming + gate.restoring + gate.dropped
        self.counted += sum(schedule.charged for schedule in schedules)
        self.over, self.slack = gate.over, (gate.put_slack, gate.get_slack)
        self.borrowed, self.capacity = account.borrowed, account.capacity
        self.least = min(admission.pending, admission.pending_messages, gate.incoming, gate.restoring, gate.dropped)
        self.problems = [text for runs in lanes.lists.values() for text in runs.problems()]
        self.problems += [text for schedule in schedules for text in inventory.problems_seen(schedule)]
        self.held_bytes = queue.held.overhead_bytes
        limited = queue.context.settings.limit_bytes is not None
        self.bytes = (lanes.message_bytes, lanes.count_bytes(self.held_bytes)) if limited else (0, 0)
        self.messages = lanes.messages()
        self.delayed = sum(schedule.messages for schedule in schedules)
        self.waiting = sum(run.waiting for runs in lanes.lists.values() for run in runs) + self.delayed
        self.held = queue.held.listed()
        self.lanes: dict[int, _LaneNow] = {}
        self.logged: int | None = None
        """Messages in memory that the log holds; None where the rows cannot be compared."""
        self.sequences = [chunk.sequences for schedule in schedules for chunk in schedule.spilled]
        log = queue.context.log
        if log is not None and not (admission.pending or queue.held.leaving or log.busy or log.failed):
            self._note_rows(queue, logged)

    def _note_rows(self, queue: Parts, logged: int) -> None:
        """Note what the log's rows say, while nothing is on its way there."""
        lanes = queue.lanes
        delayed: dict[int, int] = lowest_by_lane(
            [low for schedule in lanes.schedules.values() for low in inventory.lowest(schedule).values()]
        )
        for number, lane in lanes.logged.items():
            runs = lanes.lists[number]
            logged += sum(run.waiting for run in runs if run.place is not Place.RESIDENT)
            lowest = min(map(_highest_first, (run for run in runs if run.waiting)), default=runs.next)
            self.lanes[number] = _LaneNow(lane.row, runs.next, min(lowest, delayed.get(number, lowest)))
        if not lanes.mixed:
            self.logged = logged + self.delayed


class _Counting:
    """Counts what is in memory, a bounded number of messages in each step.

    Messages do not change and their sequences are never used again: what was counted of a part holds for as long as all
    of that part is there. So parts end at multiples of their size, whatever is taken from the front meanwhile.
    """

    def __init__(self, queue: Parts) -> None:
        self._queue = queue
        self._parts: dict[int, _Part] = {}
        with queue.context.lock:
            for schedule in queue.lanes.schedules.values():
                inventory.begin_check(schedule)

    def step(self) -> _Moment | None:
        """Count some; return what is to be compared once everything there is has been counted."""
        lanes, left = self._queue.lanes, LOOKED_AT_ONCE
        has_log = self._queue.context.log is not None
        charged = logged = 0
        with self._queue.context.lock:
            for runs in lanes.lists.values():
                for run in runs:
                    place, stop = run.first, run.first + len(run.records)
                    while place < stop:
                        part = self._parts.get(place)
                        if part is None or part.stop > stop:
                            if left <= 0:
                                return None
                            end = min(stop, place - place % LOOKED_AT_ONCE + LOOKED_AT_ONCE)
                            records = _between(run.records, place - run.first, end - run.first)
                            counted = _count_logged(records) if has_log else 0
                            part = self._parts[place] = _Part(end, charge(records), counted)
                            left -= end - place
                        charged += part.charged
                        logged += part.logged
                        place = part.stop
            for schedule in lanes.schedules.values():
                left -= inventory.look(schedule, max(1, left))
                if left <= 0:
                    return None
            return _Moment(self._queue, charged, logged)


def _between(records: deque[Record], start: int, stop: int) -> list[Record]:
    """Return some of the records, from the end that is nearer. Cost: 0.005 µs for each there, too."""
    count = len(records)
    if start <= count - stop:
        return list(islice(records, start, stop))
    return list(islice(reversed(records), count - stop, count - start))


# What is compared ------------------------------------------------------------------------------------------------


class _Held:
    """What was held at a moment, counted."""

    def __init__(self, singles: list[Delivery], batches: list[HeldBatch], others: list[Segment]) -> None:
        left = [(batch, batch.left()) for batch in batches]
        self.problems = [
            f"{batch!r} counts {batch.left_size()} unsettled messages and bytes, a recount differs"
            for batch, parts in left
            if batch.left_size() != weigh(parts)
        ]
        segments = [*others, *(part for _, parts in left for part in parts)]
        messages, size = weigh(segments)
        self.messages = len(singles) + messages
        self.bytes = sum(map(len, map(_record, singles))) + size
        self.logged = sum(map(is_logged, map(_record, singles)))
        self.logged += sum(_count_logged(records) for _, records, _ in segments)
        self.lowest = lowest_by_lane([*map(_sequence, singles), *(first for first, _, _ in segments)])


def _charge_problems(moment: _Moment, held: _Held) -> Iterator[str]:
    """Check the rules of room."""
    expected = moment.counted + held.bytes + OVERHEAD_BYTES * held.messages + moment.held_bytes
    if moment.used != expected:
        yield f"{moment.used} bytes are charged, a recount gives {expected}"
    if moment.used < 0 or moment.over > sum(moment.slack):
        yield (
            f"{moment.used} bytes are charged, more than the {moment.borrowed} borrowed and a slack of "
            f"{moment.slack[0]} + {moment.slack[1]}"
        )


def _lending_problems(moment: _Moment) -> Iterator[str]:
    """Check what is borrowed. It is wrong if it stays as it is: above the capacity it only becomes less."""
    if moment.borrowed > max(moment.capacity, moment.used):
        yield f"{moment.borrowed} bytes are borrowed of a capacity of {moment.capacity}, and fewer are charged"


def _count_problems(moment: _Moment, held: _Held) -> Iterator[str]:
    """Compare what is counted with what is there."""
    if moment.least < 0:
        yield "something on its way was given back twice"
    counted, recount = moment.bytes
    if counted != recount:
        yield f"{counted} bytes are counted for the limit, a recount gives {recount}"
    found = moment.waiting + held.messages
    if found != moment.messages:
        yield f"{moment.messages} messages by the counters, {found} by the list"
    yield from held.problems


def _row_problems(moment: _Moment, held: _Held) -> Iterator[str]:
    """Compare rows and messages."""
    spilled = lowest_by_lane([low for part in moment.sequences for low in lowest_by_lane(part).values()])
    for number, lane in moment.lanes.items():
        lowest = min(lane.lowest, *(lows.get(number, lane.lowest) for lows in (spilled, held.lowest)))
        if lane.row.floor > lowest or lane.row.next < lane.next:
            yield (
                f"the row of lane {number} has floor {lane.row.floor} and next {lane.row.next}, memory {lowest} and "
                f"{lane.next}"
            )
    in_rows = sum(lane.row.messages for lane in moment.lanes.values())
    if moment.logged is not None and moment.logged + held.logged != in_rows:
        yield f"the rows say {in_rows} messages, memory {moment.logged + held.logged}"


def _highest_first(run: Run) -> int:
    """Return where the first message of a run is, at most: of one that only the log has, some may have been deleted."""
    return run.end - run.count if run.place is Place.LOGGED else run.first


def _count_logged(records: list[Record]) -> int:
    """Return how many of these the log holds."""
    return len(records) if is_plain(records) else sum(map(is_logged, records))
