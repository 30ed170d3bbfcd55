"""Events on their way to callbacks, and the bell that has a thread hand them over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from qflow.callbacks import check_callback, check_ran
from qflow.events import Event, EventKind
from qflow.loggers import get_logger

EVENTS_KEPT = 10_000
"""Events that wait for their callbacks; of more, the oldest are dropped."""

_logger = get_logger("qflow")


class Bell:
    """Wakes the thread: to look, or to end."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.rung = False
        """The last wait ended by the bell."""
        self.ended = False

    def ring(self) -> None:
        """Have it look. Called anywhere, also under locks."""
        self._event.set()

    def end(self) -> None:
        """Have it end."""
        self.ended = True
        self._event.set()

    def wait(self, timeout: float | None) -> bool:
        """Wait for either; return whether it is the end."""
        self.rung = self._event.wait(timeout)
        if not self.ended:
            self._event.clear()
        return self.ended


class Listeners:
    """Callbacks, and the events they are still to be told."""

    def __init__(self, path: str, bell: Bell, clock: Callable[[], float]) -> None:
        self._path = path
        self._bell = bell
        self._clock = clock
        self._listeners: list[Callable[[Event], object]] = []
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)

    def add(self, callback: Callable[[Event], object]) -> None:
        """Tell `callback` of each event from now on."""
        check_callback(callback, "an event callback")
        self._listeners.append(callback)

    def tell(self, kind: EventKind, queue: str, detail: str = "") -> None:
        """Note an event, to be told soon. Called anywhere, also under locks."""
        if self._listeners:
            self.note(Event(kind, queue, detail, self._clock()))

    def note(self, event: Event) -> None:
        """Note an event that is there already; see `tell`."""
        self._events.append(event)
        self._bell.ring()

    def tell_all(self, harmless: type[BaseException] = Exception) -> None:
        """Hand events to callbacks; what these raise is written to the log of the process where it is `harmless`."""
        while self._events:
            event = self._events.popleft()
            for listener in self._listeners:
                try:
                    check_ran(listener(event))
                except harmless:
                    failed = "%s: the callback for %s failed"
                    _logger.exception(failed, self._path, event, spool=self._path, event="callback_failed")
