"""Looking at a queue: figures, checks, how often messages were delivered. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from qflow.delivery import ONE_ATTEMPT
from qflow.memory.run import Place
from qflow.memory.schedule import Tally
from qflow.memory.waiting import sheltered
from qflow.message import DELAYED, OVERHEAD_BYTES, charge, is_logged, lane_of
from qflow.queues.exits import Fate, weigh
from qflow.queues.parts import Parts
from qflow.stats import QueueStats


@sheltered
def stats(queue: Parts) -> QueueStats:
    """Return a snapshot. Cost: O(runs + deliveries and batches held); under the queue's lock these are only listed."""
    lanes, held, settings = queue.lanes, queue.held, queue.context.settings
    counters = queue.spiller.area.counters()
    with queue.context.lock:
        singles, batches = list(held.singles), list(held.batches)
        leaving = [part for one in held.leaving for part in one.segments]
        tallies = {place: [runs.tally(place) for runs in lanes.lists.values()] for place in Place}
        schedules = {number: schedule.tally() for number, schedule in lanes.schedules.items()}
        overhead = sum(schedule.overhead_bytes for schedule in lanes.schedules.values()) + held.singles_bytes
        visible = queue.gate.visible - overhead
        messages = lanes.messages()
        totals = _totals(queue)
    acquired_bytes = sum(len(one.record) for one in singles) + sum(one.left_size()[1] for one in batches)
    acquired_bytes += weigh(leaving)[1]
    delayed = Tally(*map(sum, zip(Tally(0, 0, 0, 0), *schedules.values(), strict=True)))
    counts = {
        place: (sum(count for count, _ in each), sum(size for _, size in each)) for place, each in tallies.items()
    }
    resident = counts[Place.RESIDENT][0] + delayed.resident_messages
    spilled_bytes = counts[Place.SPILLED][1] - OVERHEAD_BYTES * counts[Place.SPILLED][0] + delayed.spilled_bytes
    spilled = counts[Place.SPILLED][0] + delayed.spilled_messages
    logged, logged_charge = counts[Place.LOGGED]
    waiting = resident + spilled + logged
    acquired = messages - waiting
    return QueueStats(
        name=queue.context.name,
        durable=settings.durable,
        messages=messages,
        bytes=visible - OVERHEAD_BYTES * (resident + acquired + logged) + spilled_bytes + logged_charge,
        resident_messages=resident,
        spilled_messages=spilled,
        spilled_bytes=spilled_bytes,
        logged_messages=logged,
        acquired_messages=acquired,
        acquired_bytes=acquired_bytes,
        lag_messages=waiting,
        delayed_messages=sum(
            part.resident_messages + part.spilled_messages for number, part in schedules.items() if number >= DELAYED
        ),
        capacity_bytes=queue.gate.account.capacity,
        limit_messages=settings.limit_messages,
        limit_bytes=settings.limit_bytes,
        delivered_total=totals["acked_total"] + totals["redelivered_total"] + acquired,
        spill_files_created_total=counters.created,
        spill_files_overwritten_total=counters.overwritten,
        spill_files_read_total=counters.read,
        spill_files_unlinked_total=counters.unlinked,
        **totals,
    )


@sheltered
def oldest_s(queue: Parts) -> float:
    """Return for how long what was delivered first has been held."""
    with queue.context.lock:
        return queue.leases.oldest_s()


def _totals(queue: Parts) -> dict[str, Any]:
    """Return the figures that are counted, by their names in `QueueStats`. Under the lock."""
    lanes, restorer, counts = queue.lanes, queue.restorer, queue.exits.counts
    return {
        "resident_bytes": queue.gate.used,
        "oldest_unacked_s": queue.leases.oldest_s(),
        "put_total": lanes.messages() + lanes.acked + lanes.gone - queue.found,
        "acked_total": lanes.acked,
        "redelivered_total": queue.claims.returned,
        "expired_total": counts[Fate.EXPIRED],
        "dropped_total": counts[Fate.DROPPED],
        "dead_lettered_total": counts[Fate.DEAD_LETTERED],
        "purged_total": queue.exits.purged_total,
        "lost_total": restorer.lost,
        "quarantined_total": restorer.quarantined,
        "lost_ranges": tuple(restorer.lost_ranges),
        "spill_repaired_total": restorer.repaired,
    }


# Checks ----------------------------------------------------------------------------------------------------------


@sheltered
def problems(queue: Parts) -> list[str]:
    """Check every invariant; return what is wrong, in words."""
    with queue.context.lock:
        found = [*_memory_problems(queue), *_count_problems(queue)]
        log = queue.context.log
        on_their_way = queue.admission.pending or queue.held.leaving
        if log is not None and not on_their_way and not log.busy and not log.failed:
            found += _row_problems(queue)
        return [f"queue {queue.context.name!r}: {problem}" for problem in found]


def _memory_problems(queue: Parts) -> Iterator[str]:
    """Check the rules of room and of the lists."""
    gate, lists, schedules = queue.gate, queue.lanes.lists.values(), queue.lanes.schedules.values()
    account = gate.account
    resident = sum(charge(list(run.records)) for runs in lists for run in runs)
    resident += sum(schedule.charged for schedule in schedules)
    expected = resident + gate.incoming + gate.restoring + queue.held.charged()
    if gate.used != expected:
        yield f"{gate.used} bytes are charged, a recount gives {expected}"
    if gate.used < 0 or gate.over > gate.slack:
        yield (
            f"{gate.used} bytes are charged, more than the {account.borrowed} borrowed and a slack of "
            f"{gate.put_slack} + {gate.get_slack}"
        )
    if account.borrowed > max(account.capacity, gate.used):
        yield f"{account.borrowed} bytes are borrowed of a capacity of {account.capacity}, {gate.used} are charged"
    for runs in lists:
        yield from runs.problems()
    for schedule in schedules:
        yield from schedule.problems()


def _count_problems(queue: Parts) -> Iterator[str]:
    """Count messages and what lies in the spill store, and compare."""
    gate, lanes, held, admission = queue.gate, queue.lanes, queue.held, queue.admission
    if min(admission.pending, admission.pending_messages, gate.incoming, gate.restoring) < 0:
        yield "something on its way was given back twice"
    counted = lanes.count_bytes(held.singles_bytes)
    if queue.context.settings.limit_bytes is not None and lanes.message_bytes != counted:
        yield f"{lanes.message_bytes} bytes are counted for the limit, a recount gives {counted}"
    runs = list(chain.from_iterable(lanes.lists.values()))
    delayed = sum(1 for schedule in lanes.schedules.values() for _ in schedule.entries())
    waiting = sum(run.waiting for run in runs) + delayed + weigh(held.segments())[0]
    if waiting != lanes.messages():
        yield f"{lanes.messages()} messages by the counters, {waiting} by the list"
    for batch in held.batches:
        left = [record for _, records, _ in batch.left() for record in records]
        if batch.left_size() != (len(left), sum(map(len, left))):
            yield f"{batch!r} counts {batch.left_size()} unsettled messages and bytes, a recount differs"
    spilled = sorted(slot for run in runs if run.place is Place.SPILLED for slot in run.slots)
    spilled += [slot for schedule in lanes.schedules.values() for chunk in schedule.spilled for slot in chunk.slots]
    spilled += [slot for slots in queue.spiller.trash for slot in slots]
    yield from queue.spiller.area.problems(spilled)


def _row_problems(queue: Parts) -> Iterator[str]:
    """Compare rows and messages, while nothing is on its way."""
    lanes = queue.lanes
    held: list[tuple[int, list[Any]]] = [(first, records) for first, records, _ in queue.held.segments()]
    for schedule in lanes.schedules.values():
        held += [(sequence, []) for sequence, *_ in schedule.entries()]
    in_rows = in_memory = 0
    for number, lane in lanes.logged.items():
        row, runs = lane.row, lanes.lists[number]
        in_rows += row.messages
        in_memory += sum(run.waiting for run in runs if run.place is not Place.RESIDENT)
        in_memory += sum(is_logged(record) for run in runs for record in run.records)
        lowest = min((run.first for run in runs if run.waiting), default=runs.next)
        lowest = min([lowest, *(first for first, _ in held if lane_of(first) == number)])
        if row.floor > lowest or row.next < runs.next:
            yield (
                f"the row of lane {number} has floor {row.floor} and next {row.next}, memory {lowest} and {runs.next}"
            )
    in_memory += sum(is_logged(record) for _, records in held for record in records)
    in_memory += sum(not records for _, records in held)
    if not any(lane.leaves_gaps for lane in lanes.logged.values()) and in_memory != in_rows:
        yield f"the rows say {in_rows} messages, memory {in_memory}"


# Deliveries so far -----------------------------------------------------------------------------------------------


def hides_attempts(queue: Parts) -> bool:
    """Tell whether spilled delayed messages know how often they were delivered, and memory does not."""
    with queue.context.lock:
        return any(schedule.tally().spilled_messages for schedule in queue.lanes.schedules.values())


def attempts(queue: Parts) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
    """Return (below, ranges) by lane: earlier deliveries as they stand if everything acquired goes back now.

    Of messages below `below` memory knows all there is to know; a range is (first, end, number).
    """
    with queue.context.lock:
        return {number: _lane_attempts(queue, number) for number in queue.lanes.logged}


def _lane_attempts(queue: Parts, number: int) -> tuple[int, list[tuple[int, int, int]]]:
    runs = queue.lanes.lists[number]
    known = [
        (run.first, run.stop, run.marks // ONE_ATTEMPT) for run in runs if run.waiting and run.place is not Place.LOGGED
    ]
    for first, records, marks in queue.held.segments():
        known.append((first, first + len(records), marks // ONE_ATTEMPT + 1))
    for schedule in queue.lanes.schedules.values():
        known += ((first, end, marks // ONE_ATTEMPT) for first, end, marks in schedule.marked())
    below = next((run.first for run in runs if run.place is Place.LOGGED), runs.next)
    known = sorted(entry for entry in known if entry[2] and lane_of(entry[0]) == number)
    joined: list[tuple[int, int, int]] = []
    for first, end, count in known:
        if joined and joined[-1][1] == first and joined[-1][2] == count:
            joined[-1] = (joined[-1][0], end, count)
        else:
            joined.append((first, end, count))
    return below, joined
