"""Where callers wait for a queue: threads, as at any condition, and watchers of those who have no thread for that.

Who has none goes by *steps*: each tries, and returns None when it is done, the seconds it may wait at most when it left
a watcher behind, or `WORK` when only the disk would help, and it was told not to touch that.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Wake = Callable[[], object]

WORK = -1.0
"""A step would go on with work on the disk, in a thread that may do that."""
FOREVER = math.inf


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

    __slots__ = ("_wake", "called", "number")

    def __init__(self, wake: Wake, number: int) -> None:
        self._wake = wake
        self.number = number
        self.called = False

    def __call__(self) -> None:
        self.called = True
        self._wake()


class Line(threading.Condition):
    """A condition that also wakes watchers."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.watchers: deque[Watcher] = deque()

    def watch(self, wake: Wake, number: int) -> Watcher:
        """Have `wake()` called at the next notification; the lower its number, the earlier. Under the lock."""
        watcher = Watcher(wake, number)
        watchers = self.watchers
        if not watchers or watchers[-1].number <= number:
            watchers.append(watcher)
        else:  # it was here before, and found nothing
            place = next(index for index, other in enumerate(watchers) if other.number > number)
            watchers.insert(place, watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Call it no more. Under the lock."""
        if not watcher.called:
            watcher.called = True
            self.watchers.remove(watcher)

    def notify(self, n: int = 1) -> None:
        """Wake `n` of those who wait, watchers first."""
        watchers = self.watchers
        while watchers and n > 0:
            n -= 1
            watchers.popleft()()
        if n > 0:
            super().notify(n)

    def notify_first(self) -> None:
        """Wake all threads, but only the first watcher: it has the next one look when it leaves something."""
        watchers = self.watchers
        if watchers:
            watchers.popleft()()
        super().notify_all()

    def notify_all(self) -> None:
        """Wake everybody."""
        watchers = self.watchers
        while watchers:
            watchers.popleft()()
        super().notify_all()
