"""What areas of a spill store keep for later goes back to a disk that is full, for whichever area has to write."""

from __future__ import annotations

import errno
from collections.abc import Callable
from threading import Lock
from typing import Protocol, TypeVar
from weakref import WeakSet

Result = TypeVar("Result")
MOST = 1000
"""Files that are unlinked before a write is tried again: 10 ms."""


class Sheds(Protocol):
    """An area."""

    def shed(self, most: int) -> int:
        """Unlink files that hold nothing, so many at most; return how many. Takes the locks of the area."""
        ...


class Shedding:
    """The areas of a store."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._areas: WeakSet[Sheds] = WeakSet()

    def add(self, area: Sheds) -> None:
        """Have an area give up what it keeps when another one needs it."""
        with self._lock:
            self._areas.add(area)

    def written(self, area: Sheds, write: Callable[[], Result]) -> Result:
        """Return what a write of an area returns, once the others have made as much room for it as they can.

        What it keeps itself it writes over.

        Raises:
            OSError: what it raises, which leaves nothing behind.
        """
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._shed(area):
                    raise

    def _shed(self, area: Sheds) -> bool:
        """Unlink some files of others; tell whether there were any."""
        with self._lock:
            others = [one for one in self._areas if one is not area]
        return any(other.shed(MOST) for other in others)
