"""What is to become dead letters, and could not: it waits out of the way for the next try. Under the queue's lock.

Gets do not find it, so what stands behind it goes on. It is charged, and counted as waiting, as in its place; it cannot
be spilled. Maintenance tries again; after a restart it is in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from qflow.delivery import Segment
from qflow.message import charge


class Leaver(Protocol):
    """A try that came to nothing: `Leaving`."""

    segments: list[Segment]


class Parked:
    """See the module."""

    __slots__ = ("charged", "leavers")

    def __init__(self) -> None:
        self.leavers: OrderedDict[Leaver, None] = OrderedDict()
        """In the order in which they are tried again."""
        self.charged = 0
        """What their messages are charged."""

    def __bool__(self) -> bool:
        return bool(self.leavers)

    def put(self, leaver: Leaver) -> None:
        """Park messages, behind the others."""
        charged = charge_of(leaver.segments)
        self.leavers[leaver] = None  # no calls from here on: a handler that raises finds both done, or none
        self.charged += charged

    def take(self, leaver: Leaver) -> None:
        """Have messages leave that are tried again."""
        charged = charge_of(leaver.segments)
        del self.leavers[leaver]
        self.charged -= charged

    def move_to_front(self, leaver: Leaver) -> None:
        """Have messages be the first that are tried again, if they are parked."""
        if leaver in self.leavers:
            self.leavers.move_to_end(leaver, last=False)

    def clear(self) -> None:
        """Forget everything: it was purged."""
        self.leavers.clear()
        self.charged = 0

    def segments(self) -> list[Segment]:
        """Return all messages. Cost: 0.1 µs for each try that came to nothing, as for what is below."""
        return [part for leaver in self.leavers for part in leaver.segments]

    def messages(self) -> int:
        """Return how many there are."""
        return sum([len(part.records) for part in self.segments()])

    def has(self, sequence: int) -> bool:
        """Tell whether a message is parked."""
        return next(self._with(sequence), None) is not None

    def pick(self, sequence: int) -> list[Segment]:
        """Take one message out, by itself; nothing if it is not parked."""
        for leaver in self._with(sequence):
            picked: list[Segment] = []
            rest: list[Segment] = []
            for first, records, marks in leaver.segments:
                at = sequence - first
                if 0 <= at < len(records):
                    picked.append(Segment(sequence, records[at : at + 1], marks))
                    rest.append(Segment(first, records[:at], marks))
                    rest.append(Segment(sequence + 1, records[at + 1 :], marks))
                else:
                    rest.append(Segment(first, records, marks))
            self.take(leaver)
            leaver.segments = [part for part in rest if part.records]
            if leaver.segments:
                self.put(leaver)
            return picked
        return []

    def _with(self, sequence: int) -> Iterator[Leaver]:
        """Yield what has a message."""
        for leaver in self.leavers:
            if any(first <= sequence < first + len(records) for first, records, _ in leaver.segments):
                yield leaver


def charge_of(segments: list[Segment]) -> int:
    """Return what messages are charged."""
    return sum(charge(records) for _, records, _ in segments)
