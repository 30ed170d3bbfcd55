"""Threads that put together wait a little for each other, as the writer of a log does, and for the same reason.

Those who were answered together mostly come again at once. Were they not waited for, the first of them would go alone,
and all others after it: they would take turns for good, and need twice as many commits.
"""

from __future__ import annotations

import threading
from collections.abc import Sized
from contextlib import suppress
from time import perf_counter

LONGEST_S = 0.002
IN_VAIN = 4
"""So many times nobody is waited for, after it was in vain."""


class Gathering:
    """See the module. `arrived` is called by any thread, all else by the one that asks for all."""

    def __init__(self, came: Sized) -> None:
        """`came`: those who are asked for next."""
        self._came = came
        self._goal = 0
        """So many there are when all have come again who were answered last."""
        self._is_reached = threading.Lock()
        """Opened for the thread that waits for them."""
        self._is_reached.acquire()
        self._took_s = 0.0
        """How long it took to be answered, the last time: so long they are waited for at most."""
        self._began_s = 0.0
        self._impatient = 0
        """Times to come when nobody is waited for."""

    def arrived(self) -> None:
        """One more has come."""
        if len(self._came) >= self._goal:
            with suppress(RuntimeError):  # it was, and nobody waits
                self._is_reached.release()

    def begin(self) -> None:
        """Return when it is time to ask."""
        if self._impatient:
            self._impatient -= 1
        elif len(self._came) < self._goal:
            self._is_reached.acquire(blocking=False)
            if len(self._came) < self._goal and not self._is_reached.acquire(timeout=self._took_s):
                self._impatient = IN_VAIN
        self._began_s = perf_counter()

    def end(self, answered: int) -> None:
        """So many were answered; 0: nobody is to be waited for any more."""
        self._goal = answered + len(self._came) if answered else 0
        self._took_s = min(LONGEST_S, perf_counter() - self._began_s)
