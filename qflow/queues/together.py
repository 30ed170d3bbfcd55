"""Puts into several queues, and what leaves others for them, in one commit: publish, transactions, dead letters.

Room is reserved queue by queue, in the order of their numbers, so that two who want the same queues never wait for one
another. Then all of it enters one batch of the log as a unit. Queues that are not durable take part: their messages
become visible when the commit holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import groupby
from typing import Any, NamedTuple

from qflow.delivery import Segment
from qflow.message import Record
from qflow.queues.dead_letters import dead_letters
from qflow.queues.intake import NOTHING, TurnedAway, again
from qflow.queues.outlet import Leaving, Outlet
from qflow.queues.overflow import Decision, Depth
from qflow.queues.queue import Queue
from qflow.storage.transaction_log import Put, TransactionLog, Unit


class Step(NamedTuple):
    """Messages for one lane of one queue."""

    queue: Queue
    number: int
    records: list[Record]


class Place:
    """Where a step's messages are in the put of their lane."""

    __slots__ = ("count", "first_records", "lane", "offset", "put", "step")

    def __init__(self, step: Step, lane: Place | None = None, offset: int = 0) -> None:
        self.step = step
        self.first_records = step.records
        self.count = len(step.records)
        self.lane = self if lane is None else lane
        self.offset = offset
        self.put: Put | None = None
        """Of the first step of a lane; None if the queue's policy turned it away."""

    @property
    def first(self) -> int | None:
        """The first sequence, once it is committed; None if it was turned away."""
        put = self.lane.put
        return None if put is None else put.first + self.offset


class Together:
    """Commits steps. One a broker; thread-safe."""

    def __init__(
        self,
        log: TransactionLog,
        dead_letter_queue: Callable[[Queue], Queue],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._log = log
        self._dead_letter_queue = dead_letter_queue
        self._clock = clock
        self._monotonic = monotonic

    def commit(
        self,
        steps: Iterable[Step],
        leavings: Iterable[Leaving] = (),
        *,
        timeout: float | None = None,
        wait: bool = True,
        future: Future[Any] | None = None,
        dead: bool = False,
    ) -> list[Place]:
        """Put all steps, and let go of what is leaving, in one commit.

        Args:
            timeout: seconds to wait for room, in all queues together; None = without end.
            wait: return when it holds; else the flusher leads it, and `future` has None then.
            dead: they are dead letters: no limit holds them back.

        Returns:
            The place of each step.

        Raises:
            All that a put raises; nothing was done then, and what was leaving stays.
        """
        leavings = list(leavings)
        places, lanes = _by_lane(steps)
        puts: list[Put] = []
        turned: list[tuple[Queue, int, bool]] = []
        unit: Unit | None = None
        deadline = None if timeout is None else self._monotonic() + timeout
        leave: dict[Outlet, Depth] = {leaving.queue: leaving.depth for leaving in leavings}
        try:
            lanes.sort(key=_owner)
            for _, group in groupby(lanes, _owner):
                left = None if deadline is None else max(0.0, deadline - self._monotonic())
                places_of = list(group)
                leave_of = leave.pop(places_of[0].step.queue, NOTHING)
                self._prepare(places_of, left, puts, turned, leave_of, dead)
            for put in puts:
                put.lane.publisher.check_not_deleted()  # type: ignore[attr-defined]
            settles = [part for leaving in leavings for part in leaving.settles()]
            if not settles and not any(put.lane.is_logged for put in puts):
                self._publish_unlogged(puts, leavings, future)
                _count(turned)
                return places
            unit = Unit(puts, settles, leavings)
            unit.future = future
            for leaving in leavings:
                leaving.unit = unit
            batch = self._log.join(unit)
        except BaseException:
            if unit is None or not unit.joined:
                for put in puts:
                    put.lane.publisher.refused(put)
            for leaving in leavings:
                leaving.give_up()
            raise
        if not wait:
            self._log.flush(batch)
            _count(turned)
            return places
        self._log.wait(batch)
        if unit.error is not None:
            raise again(unit.error)
        _count(turned)
        for place in lanes:
            place.step.queue.keep_within_bounds()
        return places

    def _prepare(
        self,
        places: list[Place],
        timeout: float | None,
        puts: list[Put],
        turned: list[tuple[Queue, int, bool]],
        leaving: Depth,
        dead: bool,
    ) -> None:
        """Reserve room for all lanes of one queue, and add their puts, or that of their dead letters."""
        queue = places[0].step.queue
        lots = [(place.step.number, place.step.records) for place in places]
        wanted = places
        while True:
            try:
                found = queue.prepare(lots, timeout, leaving=leaving, dead=dead)
            except TurnedAway as error:
                records = [record for _, lot in lots for record in lot]
                turned.append((queue, len(records), error.decision is Decision.DROP))
                if error.decision is Decision.DROP:
                    return
                if not dead:
                    records = dead_letters(queue.name, [Segment(-1, records, 0)], "limit", self._clock())
                queue, lots, leaving, dead = self._dead_letter_queue(queue), [(0, records)], NOTHING, True
                wanted = []
            else:
                puts += found
                for place, put in zip(wanted, found, strict=bool(wanted)):
                    place.put = put
                return

    def _publish_unlogged(self, puts: list[Put], leavings: list[Leaving], future: Future[Any] | None) -> None:
        """Do all of it without the log, which has no part in it."""
        for put in puts:
            put.lane.publisher.publish_transient(put)
        for leaving in leavings:
            leaving.committed(None)
        for put in puts:
            put.lane.publisher.keep_within_bounds()  # type: ignore[attr-defined]
        if future is not None:
            future.set_result(None)


def _owner(place: Place) -> int:
    return place.step.queue.owner


def _count(turned: list[tuple[Queue, int, bool]]) -> None:
    """Count messages that queues turned away, now that what came of it is certain."""
    for queue, messages, dropped in turned:
        queue.count_turned_away(messages, dropped=dropped)


def _by_lane(steps: Iterable[Step]) -> tuple[list[Place], list[Place]]:
    """Join steps for the same lane; return the place of each step, and of each lane."""
    places: list[Place] = []
    lanes: dict[tuple[Queue, int], Place] = {}
    for step in steps:
        lane = lanes.get(step[:2])
        if lane is None:
            lanes[step[:2]] = place = Place(step)
        else:
            if lane.step.records is lane.first_records:
                lane.step = lane.step._replace(records=list(lane.step.records))
            place = Place(step, lane, len(lane.step.records))
            lane.step.records.extend(step.records)
        places.append(place)
    return places, list(lanes.values())
