"""Looking at a queue: figures, who is at it, how often messages were delivered. Nothing is changed."""

from __future__ import annotations

from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from qflow.delivery import ONE_ATTEMPT, Delivery
from qflow.memory import inventory
from qflow.memory.run import Place, Tally
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.memory.shelves import Whereabouts
from qflow.memory.waiting import sheltered
from qflow.message import DELAYED, OVERHEAD_BYTES, lane_of
from qflow.named_tuples import NamedTuple
from qflow.queues.apart import HeldOne
from qflow.queues.exits import Fate, weigh
from qflow.queues.parts import Parts
from qflow.rates import Totals
from qflow.takers import Noted, kind_of, named

if TYPE_CHECKING:
    from qflow.stats import QueueStats

_NOWHERE = Whereabouts(0, 0, 0, 0)
TOLD = 100
"""As many holders and consumers a queue tells of by name."""


@sheltered
def stats(queue: Parts) -> QueueStats:
    """Return a snapshot. Cost: as `figures` and `rates`."""
    facts = figures(queue)
    return told({**facts, "rates": rates(queue, facts)})


def told(facts: dict[str, Any]) -> QueueStats:
    """Return a snapshot of these figures and rates. What calls this is `sheltered`."""
    from qflow.stats import ConsumerStats, HolderStats, QueueStats, Rates

    holders = tuple([HolderStats(**one) for one in facts["holders"]])
    consumers = tuple([ConsumerStats(**one) for one in facts["consumers"]])
    return QueueStats(**{**facts, "rates": Rates(**facts["rates"]), "holders": holders, "consumers": consumers})


def figures(queue: Parts) -> dict[str, Any]:
    """Return the fields of `QueueStats` as plain values, but for `rates`. What calls this is `sheltered`.

    Cost: 15 µs, and O(runs) under the queue's lock; without it 0.2 µs for each delivery and batch that is held.
    """
    lanes, held, settings = queue.lanes, queue.held, queue.context.settings
    counters = queue.spiller.counters()
    with queue.context.lock:
        leaving = [part for one in held.leaving for part in one.segments]
        undelivered = _undelivered(queue)
        tallies = [runs.tally() for runs in lanes.lists.values()]
        schedules = {number: schedule.tally() for number, schedule in lanes.schedules.items()}
        overhead = sum([schedule.overhead_bytes for schedule in lanes.schedules.values()]) + held.overhead_bytes
        visible = queue.gate.visible - overhead
        messages = lanes.messages()
        in_log = _in_log(queue)
        totals = _totals(queue)
        delivered = _delivered(queue)
    there = present(queue)
    waits = tallies[0] if len(tallies) == 1 else Tally(*map(sum, zip(*tallies, strict=True)))
    delayed = Whereabouts(*map(sum, zip(*schedules.values(), strict=True))) if schedules else _NOWHERE
    resident = waits.resident + delayed.resident_messages
    spilled_bytes = waits.spilled_charge - OVERHEAD_BYTES * waits.spilled + delayed.spilled_bytes
    spilled = waits.spilled + delayed.spilled_messages
    waiting = resident + spilled + waits.logged
    acquired = messages - waiting
    in_memory = OVERHEAD_BYTES * (resident + acquired + waits.logged)
    holders = there.holders() if acquired else []
    size_bytes = visible - in_memory + spilled_bytes + waits.logged_charge
    return {
        "name": queue.context.name,
        "durable": settings.durable,
        "messages": messages,
        "bytes": size_bytes,
        "transient_messages": 0 if in_log is None else max(0, messages - in_log[0]),
        "transient_bytes": 0 if in_log is None else max(0, size_bytes - in_log[1]),
        "resident_messages": resident,
        "spilled_messages": spilled,
        "spilled_bytes": spilled_bytes,
        "logged_messages": waits.logged,
        "acquired_messages": acquired,
        "acquired_bytes": there.held_bytes() + weigh(leaving)[1] if acquired else 0,
        "lag_messages": waiting,
        "delayed_messages": sum(
            [part.resident_messages + part.spilled_messages for number, part in schedules.items() if number >= DELAYED]
        ),
        "capacity_bytes": queue.gate.account.capacity,
        "limit_messages": settings.limit_messages,
        "limit_bytes": settings.limit_bytes,
        "delivered_total": delivered + acquired - undelivered,
        "spill_files_created_total": counters.created,
        "spill_files_overwritten_total": counters.overwritten,
        "spill_files_read_total": counters.read,
        "spill_files_unlinked_total": counters.unlinked,
        "holders": holders,
        "oldest_unacked_s": holders[0]["oldest_s"] if holders else 0.0,
        "consumers": there.consumers(),
        "consumers_total": len(there.takers),
        **totals,
    }


def _in_log(queue: Parts) -> tuple[int, int] | None:
    """Return how many messages and bytes are in the log, acked ones included whose acks are not; None: all there are.

    Under the lock.
    """
    lanes = queue.lanes
    if lanes.logged and not lanes.mixed:
        return None
    rows = [lane.row for lane in lanes.logged.values()]
    return sum([row.messages for row in rows]), sum([row.bytes for row in rows])


@sheltered
def length(queue: Parts) -> int:
    """Return how many messages there are, waiting and acquired."""
    with queue.context.lock:
        return queue.lanes.messages()


@sheltered
def not_due(queue: Parts) -> int:
    """Return how many messages wait for their time, as far as a get that found nothing has looked. Cost: O(runs)."""
    lanes = queue.lanes
    with queue.context.lock:
        known = [schedule.messages for number, schedule in lanes.schedules.items() if number >= DELAYED]
        logged = [runs.tally().logged for number, runs in lanes.lists.items() if number >= DELAYED]
    return sum(known) + sum(logged)


def note_totals(queue: Parts, now_s: float, before_s: float) -> None:
    """Note for its rates what has happened so far. Cost: 4 µs, and O(runs), however much is held."""
    with queue.context.lock:
        queue.meter.note(now_s, _flow(queue), before_s)


def rates(queue: Parts, facts: dict[str, Any]) -> dict[str, float]:
    """Return how many messages a second come and go, given `figures` of now: the fields of `Rates`. Cost: 5 µs."""
    with queue.context.lock:
        return queue.meter.rates(queue.context.monotonic(), flow_in(facts))


def flow_in(facts: dict[str, Any]) -> Totals:
    """Return what `figures` say of how many have come and gone."""
    return facts["put_total"], facts["delivered_total"], facts["acked_total"], facts["redelivered_total"]


def _flow(queue: Parts) -> Totals:
    """Return how many were put, delivered, acked and given back so far. Under the lock."""
    lanes = queue.lanes
    waiting = sum([part.resident + part.spilled + part.logged for part in map(RunList.tally, lanes.lists.values())])
    delayed = map(Schedule.tally, lanes.schedules.values())
    waiting += sum([part.resident_messages + part.spilled_messages for part in delayed])
    delivered = _delivered(queue) + lanes.messages() - waiting - _undelivered(queue)
    put = lanes.messages() + lanes.acked + lanes.gone - queue.found
    return put, delivered, lanes.acked, queue.claims.returns.total


def _delivered(queue: Parts) -> int:
    """Return how many deliveries are over. Under the lock."""
    returns = queue.claims.returns
    return queue.lanes.acked + returns.total + returns.given_up


def _undelivered(queue: Parts) -> int:
    """Return how many messages are on their way out that nobody got. Under the lock."""
    return sum([weigh(one.segments)[0] for one in queue.held.leaving if not one.is_delivered])


def _totals(queue: Parts) -> dict[str, Any]:
    """Return the figures that are counted, by their names in `QueueStats`. Under the lock."""
    lanes, restorer, counts = queue.lanes, queue.restorer, queue.exits.counts
    blocked, longest_s, on = queue.admission.told_blocked()
    return {
        "blocked_putters": blocked,
        "blocked_longest_s": longest_s,
        "blocked_on": on,
        "at_limit": queue.gate.at_limit,
        "paused": lanes.paused,
        "resident_bytes": queue.gate.used,
        "put_total": lanes.messages() + lanes.acked + lanes.gone - queue.found,
        "acked_total": lanes.acked,
        "redelivered_total": queue.claims.returns.total,
        "expired_total": counts[Fate.EXPIRED],
        "dropped_total": counts[Fate.DROPPED],
        "dead_lettered_total": counts[Fate.DEAD_LETTERED],
        "deleted_total": counts[Fate.DELETED],
        "purged_total": queue.exits.purged_total,
        "lost_total": restorer.lost,
        "quarantined_total": restorer.quarantined,
        "lost_ranges": tuple(restorer.lost_ranges),
        "spill_repaired_total": restorer.repaired,
    }


# Who is there ------------------------------------------------------------------------------------------------------


class Present(NamedTuple):
    """Who is there, as the queue has it."""

    now_s: float
    held: list[HeldOne]
    since: list[float | None]
    """Since when each of it is held; None of what is being collected, or has gone."""
    takers: list[tuple[Noted, float]]
    """Consumers, and gets that wait, and since when."""

    def held_bytes(self) -> int:
        """Return how much is held."""
        return sum([_bytes_of(one, since) for one, since in zip(self.held, self.since, strict=True)])

    def holders(self) -> list[dict[str, Any]]:
        """Return who holds what, from the oldest on: fields of `HolderStats`. Cost: 0.15 µs a delivery or batch."""
        found: dict[tuple[str, int], list[Any]] = {}
        by_taker: dict[Any, list[Any]] = {}
        for one, since in zip(self.held, self.since, strict=True):
            if since is None:
                continue
            count = 1 if isinstance(one, Delivery) else one.left_size()[0]
            known = by_taker.get(one.taker)
            if known is None:
                known = by_taker[one.taker] = found.setdefault(named(one.taker), [0, since])
            known[0] += count
            if since < known[1]:
                known[1] = since
        oldest = nsmallest(TOLD, ((since, *who, count) for who, (count, since) in found.items() if count))
        return [
            {"consumer": name, "pid": pid, "messages": count, "oldest_s": max(0.0, self.now_s - since)}
            for since, name, pid, count in oldest
        ]

    def consumers(self) -> list[dict[str, Any]]:
        """Return who is there to take, from the longest on: fields of `ConsumerStats`."""
        found = []
        for taker, since in nsmallest(TOLD, self.takers, key=itemgetter(1)) if self.takers else ():
            name, pid = named(taker)
            since_s = max(0.0, self.now_s - since)
            found.append({"name": name, "pid": pid, "kind": kind_of(taker), "since_s": since_s})
        return found


def _bytes_of(one: HeldOne, since: float | None) -> int:
    if isinstance(one, Delivery):
        return len(one.record)
    return weigh(one.left())[1] if since is None else one.left_size()[1]


_NOBODY = Present(0.0, [], [], [])


def present(queue: Parts) -> Present:
    """Return who is there. Without the lock. Cost: 0.1 µs a delivery or batch, and consumer."""
    held, waiting = queue.held, queue.gets.waiting.copy()
    known = queue.consumers.takers()
    if not (known or waiting or held.singles or held.batches or held.apart):
        return _NOBODY
    takers: list[tuple[Noted, float]] = [(taker, taker.since_s) for taker in known]
    takers += [(getting.taker, since) for getting, since in waiting.items() if getting.taker not in known]
    return Present(queue.context.monotonic(), *held.all_since(), takers)


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
    for delivered, segments in queue.held.by_delivered().items():
        known += ((first, first + len(records), marks // ONE_ATTEMPT + delivered) for first, records, marks in segments)
    for schedule in queue.lanes.schedules.values():
        known += ((first, end, marks // ONE_ATTEMPT) for first, end, marks in inventory.marked(schedule))
    below = next((run.first for run in runs if run.place is Place.LOGGED), runs.next)
    known = sorted(entry for entry in known if entry[2] and lane_of(entry[0]) == number)
    joined: list[tuple[int, int, int]] = []
    for first, end, count in known:
        if joined and joined[-1][1] == first and joined[-1][2] == count:
            joined[-1] = (joined[-1][0], end, count)
        else:
            joined.append((first, end, count))
    return below, joined
