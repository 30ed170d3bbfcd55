"""What a ring drops to make room. Under the queue's lock; what reads lets go of it.

What gets have set aside goes first: it has expired. Then what waits, of the lowest priority: what is delivered next
goes next. Where nothing waits, what is delayed and not due goes: of the lowest priority, what is due soonest. What is
held stays. Right after an opening, what is delayed goes as far as it was read.
"""

from __future__ import annotations

from collections.abc import Iterator

from qflow.delivery import Segment
from qflow.memory.group import Key
from qflow.memory.run import Place
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.message import DELAYED, RETURNED
from qflow.named_tuples import NamedTuple
from qflow.queues.exits import FOREVER_MS, Exits, Fate, weigh
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Depth
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source

DROPPED_AT_ONCE = 10_000


class _Part(NamedTuple):
    """What of a schedule comes before what is elsewhere."""

    number: int
    until_ms: int
    before: Key | None


class Ring:
    """See the module."""

    def __init__(self, lanes: Lanes, source: Source, restorer: Restorer, exits: Exits) -> None:
        self._lanes = lanes
        self._source = source
        self._restorer = restorer
        self._exits = exits

    def reads(self) -> bool:
        """Tell whether `drop` would read, as things are."""
        if any(runs.aside for runs in self._lanes.ranked):
            return False
        for place in self._in_order():
            if isinstance(place, RunList):
                head = place.settle_head()
                if head.place is not Place.RESIDENT or head.waiting:
                    return head.place is not Place.RESIDENT
            elif (schedule := self._lanes.schedules[place.number]).messages:
                return _is_away(schedule)
        return False

    def drop(self, surplus: Depth) -> bool:
        """Drop messages, or bring some into memory for that; False if there are none that may go."""
        for runs in self._lanes.ranked:
            if runs.aside:
                self._exits.settle_away([runs.take_aside(DROPPED_AT_ONCE)], Fate.EXPIRED)
                return True
        surplus = Depth(min(surplus.messages, DROPPED_AT_ONCE), surplus.bytes)
        for place in self._in_order():
            # How much is too much may have changed where the lock was let go of: no other place is looked at then.
            if not isinstance(place, RunList):
                if self._lanes.schedules[place.number].messages:
                    return self._drop_scheduled(place, surplus)
            elif place.settle_head().place is not Place.RESIDENT:
                return self._restorer.restore_head(place, to_drop=True)
            elif self._drop_listed(place, surplus):
                return True
        return False

    def _in_order(self) -> Iterator[RunList | _Part]:
        """Return where messages are that may be dropped."""
        lanes = self._lanes
        return self._with_scheduled(lanes) if lanes.schedules else reversed(lanes.ranked)

    def _with_scheduled(self, lanes: Lanes) -> Iterator[RunList | _Part]:
        for runs in reversed(lanes.ranked):
            for number in self._delayed(runs.number):
                if lanes.due_in_ms(number) <= 0:
                    yield _Part(number, min(lanes.now_ms(number), self._until_ms(number)), None)
            scattered = lanes.schedules.get(runs.number)
            key = None if scattered is None else scattered.next_key()
            before = (0, runs.settle_head().first)
            if key is not None and key < before:
                yield _Part(runs.number, 0, before)
            yield runs
        for runs in reversed(lanes.ranked):
            for number in self._delayed(runs.number):
                yield _Part(number, self._until_ms(number), None)
        yield from lanes.delayed_lists()

    def _delayed(self, priority: int) -> list[int]:
        """Return the schedules of what is delayed in a priority, the one that is due sooner first."""
        numbers = [number for number in (priority + DELAYED, priority + RETURNED) if number in self._lanes.schedules]
        return sorted(numbers, key=self._lanes.due_in_ms)

    def _until_ms(self, number: int) -> int:
        """Return until when a schedule comes before the other one of its priority, by its own clock.

        Where both are due at once, what was put so comes first, as it is delivered first.
        """
        lanes = self._lanes
        is_second = number >= RETURNED
        other = number - DELAYED if is_second else number + DELAYED
        until_ms = int(min(FOREVER_MS, lanes.now_ms(number) + lanes.due_in_ms(other) - is_second))
        return max(until_ms, lanes.schedules[number].next_due_ms() or 0)  # clocks go on

    def _drop_listed(self, runs: RunList, surplus: Depth) -> bool:
        """Drop from the head of a list, one where scattered ones may come between; False if nothing is there."""
        scattered = self._lanes.schedules.get(runs.number)
        most = 1 if scattered is not None and scattered.messages else DROPPED_AT_ONCE
        segments: list[Segment] = []
        dropped = size = 0
        while (dropped < surplus.messages or size < surplus.bytes) and dropped < most:
            before = len(segments)
            wanted = max(1, surplus.messages - dropped) if surplus.bytes <= 0 else 1
            if not runs.take(min(most, wanted), segments):
                break
            count, weight = weigh(segments[before:])
            dropped += count
            size += weight
        if segments:
            self._exits.settle_away(segments, Fate.DROPPED)
        return bool(segments)

    def _drop_scheduled(self, part: _Part, surplus: Depth) -> bool:
        """Drop what comes first in a schedule, or bring it into memory; False if it cannot be had now."""
        schedule = self._lanes.schedules[part.number]
        segments: list[Segment] = []
        most = max(1, surplus.messages) if surplus.bytes <= 0 else 1
        changed = False
        if not self._source.take_due(schedule, most, part.until_ms, segments, part.before):
            changed = self._restorer.restore_delayed(part.number, FOREVER_MS, to_drop=True) or not schedule.messages
            self._source.take_due(schedule, 1, part.until_ms, segments, part.before)
        if segments:
            self._exits.settle_away(segments, Fate.DROPPED)
        return changed or bool(segments)


def _is_away(schedule: Schedule) -> bool:
    """Tell whether what comes first in a schedule may have to be read."""
    away, key = schedule.next_away, schedule.next_key()
    return away is not None and key is not None and away.bound <= key
