"""What areas of a spill store keep for later goes back to a disk that is full, for whichever area has to write."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol, TypeVar
from weakref import WeakSet

from qflow.message import Record

Result = TypeVar("Result")
LEAST_BYTES = 2**20
"""Given back before a write is tried again, if there is so much: 256 files of a block each take 2 ms."""


class Sheds(Protocol):
    """An area."""

    def shed(self, wanted: int) -> int:
        """Unlink files that hold nothing, until they have `wanted` bytes; return about how many they had.

        Takes the locks of the area, none of which is held while files are unlinked.
        """


class Shedding:
    """The areas of a store."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._areas: WeakSet[Sheds] = WeakSet()
        self._kept_last = object()
        """Another one with each file that is kept; unless it is that of a look that found none, one may be there."""
        self._found_none: object = None

    def add(self, area: Sheds) -> None:
        """Have an area give up what it keeps when one needs it."""
        with self._lock:
            self._areas.add(area)

    def note_kept(self) -> None:
        """Note that an area has kept a file, so that looking for some may be of use. Cost: 0.1 µs."""
        self._kept_last = object()

    def written(self, area: Sheds, records: Sequence[Record], write: Callable[[], Result]) -> Result:
        """Return what a write of records to an area returns, once all have made as much room for it as they can.

        Raises:
            OSError: what it raises, which leaves nothing behind.
        """
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._shed(area, sum(map(len, records))):
                    raise

    def _shed(self, area: Sheds, size: int) -> bool:
        """Unlink files that areas keep, those of `area` last, which it would write over; tell whether there were any.

        Cost: where there are none, 1 µs an area, once.
        """
        kept_last = self._kept_last
        if kept_last is self._found_none:
            return False
        with self._lock:
            others = [one for one in self._areas if one is not area]
        left = wanted = max(size, LEAST_BYTES)
        for one in (*others, area):
            left -= one.shed(left)
            if left <= 0:
                break
        if left == wanted:
            self._found_none = kept_last  # a disk that stays full costs no look at every area
        return left < wanted
