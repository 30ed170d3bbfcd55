"""Events of an owner, handed to callbacks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from qflow.callbacks import check_callback, check_ran
from qflow.events import Event, EventKind
from qflow.remote.client import requests
from qflow.remote.client.threads import Connection

_logger = logging.getLogger("qflow")


def event_of(head: dict[str, Any]) -> Event | None:
    """Return the event that a notice tells of; None if it is none, or of a kind that is not known here."""
    told = head.get("event")
    if not isinstance(told, dict) or told.get("kind") not in [kind.value for kind in EventKind]:
        return None
    return Event(EventKind(told["kind"]), told["queue"], told["detail"], told["time_s"])


class Events:
    """Callbacks of one connection, which are called by the thread that resolves its futures."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._callbacks: list[Callable[[Event], object]] = []
        self._lock = threading.Lock()

    def add(self, callback: Callable[[Event], object]) -> None:
        """Tell `callback` of each event from now on."""
        check_callback(callback, "an event callback")
        with self._lock:
            self._callbacks.append(callback)
            if len(self._callbacks) > 1:
                return
        self._connection.listen(self._take)
        self._connection.call(requests.events())

    def _take(self, head: dict[str, Any]) -> None:
        event = event_of(head)
        for callback in list(self._callbacks) if event is not None else ():
            try:
                check_ran(callback(event))  # type: ignore[arg-type]
            except Exception:
                _logger.exception("%s: the callback for %s failed", self._connection.target, event)
