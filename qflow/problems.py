"""What was found damaged, in words, as far as there is room for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Self

PROBLEMS_KEPT = 1000
"""As many lines a report has of what is damaged."""


class Problems(list[str]):
    """What was found damaged, in words: the first ones, and how many there were. Added to by any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._more = 0
        self._lock = threading.RLock()  # a signal handler may ask while its thread adds

    def append(self, problem: str) -> None:
        """Keep it as far as there is room, else count it."""
        self.add(problem)

    def add(self, problem: str) -> int:
        """The same; return how many there are now, with those that are not kept."""
        with self._lock:
            if len(self) < PROBLEMS_KEPT:
                super().append(problem)
            else:
                self._more += 1
            return len(self) + self._more

    def __iadd__(self, problems: Iterable[str]) -> Self:  # type: ignore[override, misc]
        for problem in problems:
            self.append(problem)
        return self

    def lines(self) -> tuple[str, ...]:
        """Return what is kept, and a line about what is not."""
        with self._lock:
            return (*self, f"{self._more} more") if self._more else tuple(self)
