"""What a ring drops to make room. Under the queue's lock; what reads lets go of it.

What waits goes first: of the lowest priority, in order of sequence. Where nothing waits, what is delayed goes: of the
lowest priority, what is due soonest, also what is due by now. What is held stays. Right after an opening, what is
delayed goes as far as it was read.
"""

from __future__ import annotations

from qflow.delivery import Segment
from qflow.memory.group import Key
from qflow.memory.run import Place
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.message import DELAYED, RETURNED
from qflow.queues.exits import FOREVER_MS, Exits, Fate, weigh
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Depth
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source

DROPPED_AT_ONCE = 10_000


class Ring:
    """See the module."""

    def __init__(self, lanes: Lanes, source: Source, restorer: Restorer, exits: Exits) -> None:
        self._lanes = lanes
        self._source = source
        self._restorer = restorer
        self._exits = exits

    def reads(self) -> bool:
        """Tell whether `drop` would read, as things are."""
        lanes = self._lanes
        for runs in reversed(lanes.ranked):
            scattered = lanes.schedules.get(runs.number)
            if scattered is not None and self._is_first(scattered, runs):
                return _is_away(scattered)
            head = runs.settle_head()
            if head.place is not Place.RESIDENT or head.waiting:
                return head.place is not Place.RESIDENT
        for number in self._delayed():
            if lanes.schedules[number].messages:
                return _is_away(lanes.schedules[number])
        return lanes.has_unread()

    def drop(self, surplus: Depth) -> bool:
        """Drop messages, or bring some into memory for that; False if there are none that may go."""
        lanes = self._lanes
        surplus = Depth(min(surplus.messages, DROPPED_AT_ONCE), surplus.bytes)
        for runs in reversed(lanes.ranked):
            scattered = lanes.schedules.get(runs.number)
            if scattered is not None and self._is_first(scattered, runs):
                before = (0, runs.settle_head().first)
                if self._drop_scheduled(runs.number, surplus, 0, before):
                    return True
            if runs.settle_head().place is not Place.RESIDENT:
                # How much is too much may have changed meanwhile.
                return self._restorer.restore_head(runs, to_drop=True)
            if self._drop_listed(runs, surplus, one=scattered is not None and scattered.messages > 0):
                return True
        if any(self._drop_scheduled(number, surplus, self._until_ms(number)) for number in self._delayed()):
            return True
        unread = [runs for runs in lanes.delayed_lists() if not runs.settle_head().spent]
        return any(self._restorer.restore_head(runs, to_drop=True) for runs in unread)

    def _is_first(self, scattered: Schedule, runs: RunList) -> bool:
        """Tell whether something that is scattered comes before what the list of its lane holds."""
        key = scattered.next_key()
        return key is not None and key < (0, runs.settle_head().first)

    def _delayed(self) -> list[int]:
        """Return the schedules of what is delayed, in the order in which they are dropped from."""
        delayed = [number for number in self._lanes.schedules if number >= DELAYED]
        return sorted(delayed, key=lambda number: (number % DELAYED, self._lanes.due_in_ms(number)))

    def _until_ms(self, number: int) -> int:
        """Return until when a schedule comes before the other one of its priority, by its own clock."""
        other = number - DELAYED if number >= RETURNED else number + DELAYED
        return int(min(FOREVER_MS, self._lanes.now_ms(number) + self._lanes.due_in_ms(other)))

    def _drop_listed(self, runs: RunList, surplus: Depth, *, one: bool) -> bool:
        """Drop from the head of a list, at most `one` where others may come between; False if nothing is there."""
        most = 1 if one else DROPPED_AT_ONCE
        segments: list[Segment] = []
        dropped = size = 0
        while (dropped < surplus.messages or size < surplus.bytes) and dropped < most:
            before = len(segments)
            wanted = max(1, surplus.messages - dropped) if surplus.bytes <= 0 and not one else 1
            if not runs.take(wanted, segments):
                break
            count, weight = weigh(segments[before:])
            dropped += count
            size += weight
        if segments:
            self._exits.settle_away(segments, Fate.DROPPED)
        return bool(segments)

    def _drop_scheduled(self, number: int, surplus: Depth, until_ms: int, before: Key | None = None) -> bool:
        """Drop what comes first in a schedule, up to a moment; False if nothing can be had."""
        schedule = self._lanes.schedules[number]
        segments: list[Segment] = []
        most = max(1, surplus.messages) if surplus.bytes <= 0 else 1
        restored = False
        if not self._source.take_due(schedule, most, until_ms, segments, before):
            restored = self._restorer.restore_delayed(number, FOREVER_MS, to_drop=True)
            self._source.take_due(schedule, 1, FOREVER_MS, segments, before)
        if segments:
            self._exits.settle_away(segments, Fate.DROPPED)
        return restored or bool(segments)


def _is_away(schedule: Schedule) -> bool:
    """Tell whether what comes first in a schedule may have to be read."""
    away, key = schedule.next_away, schedule.next_key()
    return away is not None and key is not None and away.bound <= key
