"""Where callers wait for a queue, threads and tasks alike: each leaves a watcher, which is woken in its turn.

They go by *steps*: each tries, and returns None when it is done, the seconds it may wait at most when it left a watcher
behind, or `WORK` when only the disk would help, and it was told not to touch that.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

Wake = Callable[[], object]

WORK = -1.0
"""A step would go on with work on the disk, in a thread that may do that."""
FOREVER = math.inf
PAUSE_S = 0.0005
"""Whoever works in many steps waits so long between two of them, with nothing held: the lock goes to who waits for it.

(A lock that is let go of and taken again at once nobody else gets.)
"""


class Alarm:
    """Wakes the thread that waits for it; any may ring it, a signal handler too, under locks and more than once.

    A lock, for in CPython 3.11 a `SimpleQueue.get` with a time-out never returns where a signal comes as its time is
    over, and most such gets wait for no more than milliseconds.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End the wait of now, or the next one."""
        with suppress(RuntimeError):  # it has rung before
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        """Return when it rings, or after so long."""
        self._lock.acquire(timeout=-1 if timeout_s == FOREVER else min(max(0.0, timeout_s), threading.TIMEOUT_MAX))


class Watcher:
    """A callback that is called once, under the lock, so it must not do much. Made by `Line.watch`."""

    __slots__ = ("called", "number", "wake")

    def __init__(self, wake: Wake, number: int) -> None:
        self.wake = wake
        self.number = number
        self.called = False


_NOBODY: OrderedDict[int, Watcher] = OrderedDict()
_NO_ORDER: list[int] = []
"""Of all lines in which nobody has waited so far. Never changed."""


class Line:
    """Watchers of what a lock guards, first come first served; all of it under that lock.

    To watch, to end that, to wake one: 1 µs. A broker has two for each queue, so one in which nobody waits is small.
    """

    __slots__ = ("_back", "_fresh", "_order", "_turns")

    def __init__(self) -> None:
        self._turns = 0
        self._fresh = _NOBODY
        self._back: dict[int, Watcher] = {}  # were here before, and found nothing
        self._order = _NO_ORDER  # their numbers below 0, the first of them at the end

    @property
    def watching(self) -> int:
        """How many watchers there are. Counted, for a signal handler may end whoever takes one out."""
        return len(self._fresh) + len(self._order)

    def watch(self, wake: Wake, number: int | None = None) -> Watcher:
        """Have `wake()` called when it is its turn at a notification.

        Args:
            number: that of an earlier watcher, to have its place.
        """
        if self._fresh is _NOBODY:
            self._order, self._fresh = [], OrderedDict()
        if number is None:
            self._turns = turn = self._turns + 1
            watcher = self._fresh[turn] = Watcher(wake, turn)
        else:
            watcher = self._back[number] = Watcher(wake, number)
            insort(self._order, -number)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Call it no more."""
        if not watcher.called:
            number, order = watcher.number, self._order
            if self._fresh.pop(number, None) is None:
                at = bisect_left(order, -number)
                if order[at : at + 1] == [-number]:
                    del order[at]
                self._back.pop(number, None)
            watcher.called = True  # behind all that a handler may strike, for it is tried again

    def notify(self, n: int = 1) -> None:
        """Wake the first `n` of those who wait."""
        fresh, order = self._fresh, self._order
        while n > 0 and (fresh or order):
            n -= 1
            if order and (not fresh or -order[-1] < next(iter(fresh))):
                watcher = self._back.pop(-order.pop())
            else:
                watcher = fresh.popitem(last=False)[1]
            watcher.called = True
            watcher.wake()

    def notify_all(self) -> None:
        """Wake everybody."""
        while self.watching:
            self.notify()
