"""Where callers wait for a queue: threads, as at any condition, and callbacks of those who have no thread for that."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Watcher = Callable[[], object]


class Line(threading.Condition):
    """A condition that also wakes watchers: callbacks, called once each, under the lock, so they must not do much."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.watchers: deque[Watcher] = deque()

    def notify(self, n: int = 1) -> None:
        """Wake `n` of those who wait, watchers first."""
        watchers = self.watchers
        while watchers and n > 0:
            n -= 1
            watchers.popleft()()
        if n > 0:
            super().notify(n)

    def notify_all(self) -> None:
        """Wake everybody."""
        watchers = self.watchers
        while watchers:
            watchers.popleft()()
        super().notify_all()
