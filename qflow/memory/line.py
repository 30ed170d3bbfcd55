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

    __slots__ = ("_lock", "rang")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.rang = False
        """It has rung: of one that is a bell, whose thread waits by it once, that looks soon."""

    def __call__(self) -> None:
        """End the wait of now, or the next one."""
        self.rang = True  # and it rings before a handler can strike
        try:  # noqa: SIM105  that would be a call
            self._lock.release()
        except RuntimeError:  # it has rung before
            pass

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

    Who may call nothing under the lock, as in a straight line, adds to `rung` instead, and rings the bell next, unless
    that has rung: who counted before may be beneath a signal handler, and ring when that has returned. Whoever that
    wakes has the others woken (`notify(-1)`), unless another notification comes before. Who was woken by one, and finds
    a bell rung, has that done by `notify(0)`: it came for something else.
    """

    __slots__ = ("_back", "_turns", "bell", "fresh", "order", "rung")

    def __init__(self) -> None:
        self._turns = 0
        self.fresh = _NOBODY
        self._back: dict[int, Watcher] = {}  # were here before, and found nothing
        self.order = _NO_ORDER
        """The numbers of those, below 0, the first one at the end. Nobody waits where this and `fresh` are empty."""
        self.bell: Alarm | None = None
        """Of who waits first, if that is a thread: it looks soon, where a loop may be busy."""
        self.rung = 0
        """How many notifications that have to be made up for."""

    @property
    def watching(self) -> int:
        """How many watchers there are. Counted, for a signal handler may end whoever takes one out."""
        return len(self.fresh) + len(self.order)

    def watch(self, wake: Wake, number: int | None = None) -> Watcher:
        """Have `wake()` called when it is its turn at a notification.

        Args:
            number: that of an earlier watcher, to have its place.
        """
        if self.fresh is _NOBODY:
            self.order, self.fresh = [], OrderedDict()
        if number is None:
            self._turns = turn = self._turns + 1
            watcher = self.fresh[turn] = Watcher(wake, turn)
        else:
            watcher = self._back[number] = Watcher(wake, number)
            insort(self.order, -number)
        self._find_bell()
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Call it no more."""
        if not watcher.called:
            number, order = watcher.number, self.order
            if self.fresh.pop(number, None) is None:
                at = bisect_left(order, -number)
                if order[at : at + 1] == [-number]:
                    del order[at]
                self._back.pop(number, None)
            self._find_bell()
            watcher.called = True  # behind all that a handler may strike, for it is tried again

    def notify(self, n: int = 1) -> None:
        """Wake the first `n` of those who wait, and as many more as were to be by `rung`."""
        fresh, order = self.fresh, self.order
        n, self.rung = n + self.rung, 0
        while n > 0 and (fresh or order):
            n -= 1
            is_back = self._is_back_first()
            number = -order[-1] if is_back else next(iter(fresh))
            watcher = self._back[number] if is_back else fresh[number]
            watcher.wake()  # and leaves behind that, so that a handler that raises keeps no wake-up from it
            watcher.called = True
            if is_back:
                del order[-1], self._back[number]
            else:
                del fresh[number]
        self._find_bell()

    def _is_back_first(self) -> bool:
        """Tell whether who waits first was here before."""
        fresh, order = self.fresh, self.order
        return bool(order) and (not fresh or -order[-1] < next(iter(fresh)))

    def _find_bell(self) -> None:
        first = None
        if self._is_back_first():
            first = self._back[-self.order[-1]].wake
        elif self.fresh:
            first = next(iter(self.fresh.values())).wake
        self.bell = first if isinstance(first, Alarm) else None

    def notify_all(self) -> None:
        """Wake everybody."""
        while self.watching:
            self.notify()
