"""A time of day that is set, as on a machine without a battery for its clock, while a process goes by it."""

from __future__ import annotations

from collections.abc import Callable

KEPT = 16


class Steps:
    """Moments that were written down since it was made, by the clock as it is set now.

    A step counts if the clock is set by more than it has been looked at for, so that no moment of before can be one of
    after it. Of other steps nothing is known. All in one unit of time.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float], least: float) -> None:
        """`least`: by how much clocks may differ that were not set."""
        self._clock = clock
        self._monotonic = monotonic
        self._least = least
        self._began = clock()
        self._lead = self._began - monotonic()
        self._steps: tuple[tuple[float, float, float], ...] = ()
        self.count = 0
        """How many there were."""

    def look(self) -> None:
        """Note if the clock was set. By one thread at a time. Cost: 0.3 µs."""
        now = self._clock()
        by = now - self._monotonic() - self._lead
        if abs(by) <= self._least:
            return
        began, before = self._began, now - by
        self._lead += by
        if abs(by) <= before - began:
            self._began = began + by if by > 0 else now
        else:
            self._began = began + by
            self._steps = (*self._steps[1 - KEPT :], (began, before, by))
            self.count += 1

    def moment(self, moment: float) -> float:
        """Return a moment that was written down, maybe before the clock was set; any other stays. Thread-safe.

        None is later than now.
        """
        for began, ended, by in self._steps:
            if began <= moment <= ended:
                moment += by
        return min(moment, self._clock())
