"""Which of many things have changed since somebody looked: a list of flags, one for each, that who changes it sets.

That is `flags[place] = True`: 10 ns, no lock, no call, so straight lines can. It comes behind the change, so that who
looks between the two finds it at the next look.
"""

from __future__ import annotations

from itertools import compress
from typing import Generic, TypeVar

from qflow.memory.waiting import StraightLock

T = TypeVar("T")


class Changed(Generic[T]):
    """See the module. Places are looked through by one thread at a time."""

    __slots__ = ("_free", "_lock", "_things", "_unset", "flags")

    def __init__(self) -> None:
        self.flags: list[bool] = []
        """Always the same list."""
        self._unset: list[bool] = []  # as long, to compare with
        self._things: list[T | None] = []
        self._free: list[int] = []
        self._lock = StraightLock()  # held to give a place

    def enter(self) -> int:
        """Return the place of one more thing, which `know` tells."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self._things.append(None)
            self._unset.append(False)
            self.flags.append(False)
            return len(self.flags) - 1

    def know(self, place: int, thing: T) -> None:
        """Have a thing found at its place. It counts as changed."""
        self._things[place] = thing
        self.flags[place] = True

    def leave(self, place: int) -> None:
        """Have a thing forgotten. Who changes it still tells nothing, or a change too many of the next thing there."""
        self._things[place] = None
        self._free.append(place)

    def take(self) -> list[T]:
        """Return what has changed since this was asked. Cost: 1 ns for each thing there is; 30 where any has."""
        flags = self.flags
        if flags == self._unset:
            return []
        places = list(compress(range(len(flags)), flags))
        for place in places:
            flags[place] = False
        return [thing for place in places if (thing := self._things[place]) is not None]
