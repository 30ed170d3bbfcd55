"""Time as tests have it: it stands still until it is told to move."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
from qflow.broker import Broker, make_broker
from qflow.config import BrokerSettings
from qflow.storage.files import Files

LONG_S = 30.0
"""What a thread is waited for, at most; nothing is measured by it."""


class Clock:
    """A wall clock and a monotonic one; the wall clock may jump alone."""

    def __init__(self) -> None:
        self.wall_s = 1_700_000_000.0
        self.monotonic_s = 1_000.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.wall_s += seconds
        self.monotonic_s += seconds


def until(condition: Callable[[], object]) -> None:
    """Return when another thread has come to where the test wants it."""
    for _ in range(int(LONG_S * 1000)):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came to that")


def open_still(path: Path, clock: Clock, files: Files | None = None, **settings: Any) -> Broker:
    """Open a spool whose time is the clock's, and where maintenance is a step of the test: `Queue.tick` and so on."""
    made = BrokerSettings(**settings)
    with inside.without_maintenance():
        broker = make_broker(path, made, files=files, clock=clock.wall, monotonic=clock.monotonic)
    inside.still(broker)
    return broker
