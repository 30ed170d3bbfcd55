"""The thread that looks at a spool, again and again, as often as it may cost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from qflow.pace import SHORTEST_S, pause_s
from qflow.top.look import Look
from qflow.top.source import Source


class Watcher:
    """Takes looks until it is stopped, as far apart as a look costs both processes together, and what shows it.

    A daemon, so that an owner that hangs does not keep the process from ending.

    Args:
        tell: called in the thread with each look, or with the error that ended the watching.
    """

    def __init__(self, source: Source, tell: Callable[[Look | Exception], object]) -> None:
        self._source = source
        self._tell = tell
        self._wake = threading.Event()
        self._stopped = False
        self._began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="qflow-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the look that is being taken."""
        self._stopped = True
        self._wake.set()

    def look_now(self) -> None:
        """Do not wait for the next look to be due."""
        self._wake.set()

    @property
    def silent_s(self) -> float:
        """How long the look that is being taken has taken; 0 between looks."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def _run(self) -> None:
        costs_s: deque[float] = deque(maxlen=3)
        shown_s = time.process_time()
        while not self._stopped:
            self._began_s = began_s = time.monotonic()
            drawn_s = time.process_time() - shown_s
            try:
                told: Look | Exception = self._source.look()
            except Exception as error:
                told = error
            costs_s.append(drawn_s + time.monotonic() - began_s)
            self._began_s, shown_s = None, time.process_time()
            self._tell(told)
            if isinstance(told, Exception):
                return
            self._wake.wait(pause_s(min(costs_s)) if len(costs_s) > 1 else SHORTEST_S)  # the first one connected
            self._wake.clear()
        self._source.leave()
