"""Events of an owner, handed to callbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from qflow.callbacks import check_callback
from qflow.events import Event, EventKind
from qflow.listeners import Bell, Listeners
from qflow.remote.client import requests
from qflow.remote.client.threads import Connection
from qflow.starting import start


def event_of(head: dict[str, Any]) -> Event | None:
    """Return the event that a notice tells of; None if it is none, or of a kind that is not known here."""
    told = head.get("event")
    if not isinstance(told, dict) or told.get("kind") not in [kind.value for kind in EventKind]:
        return None
    return Event(EventKind(told["kind"]), told["queue"], told["detail"], told["time_s"])


class Events:
    """Callbacks of one connection, called by a thread of their own: they may use it, wait for futures, and be slow."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bell = Bell()
        self._listeners = Listeners(connection.target, self._bell, time.time)
        self._thread: threading.Thread | None = None
        self._is_asked = False
        """The owner tells of events."""

    def add(self, callback: Callable[[Event], object]) -> None:
        """Tell `callback` of each event from now on."""
        check_callback(callback, "an event callback")
        self._connection.locked(self._begin)
        if not self._is_asked:
            self._connection.call(requests.EVENTS)  # twice is fine
            self._is_asked = True
        self._listeners.add(callback)

    def _begin(self) -> None:
        """Under the lock of the connection."""
        self._connection.check_open()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="qflow-remote-events", daemon=True)
            start(thread)
            self._thread = thread
            self._connection.listen(self._note, self._bell.end)

    def _note(self, head: dict[str, Any]) -> None:
        event = event_of(head)
        if event is not None:
            self._listeners.note(event)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._bell.wait(None)
            self._listeners.tell_all(BaseException)
