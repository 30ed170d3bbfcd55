"""Python's garbage collector stands still while many queues are made, of which nothing is garbage.

Else it goes through all that there is again and again: three quarters of what opening 50,000 queues takes. In a process
that only serves it looks rarely, and at its end not at all.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

MANY = 1_000
"""Queues for which it pays."""
RARELY = (5000, 5, 20)
"""Thresholds of the generations in a process that serves: all objects are looked at after half a million new ones.

A message that a client holds is four of them. With Python's own, all there is was looked at two dozen times as 200,000
came to be held, for up to a second each, in which nobody is served; with these, twice. Garbage is bounded as well: a
connection that has ended is 70 objects, and 10 KB.
"""


class _Stops:
    """Threads that have it stand still: it goes on with the last of them, unless somebody else has switched it off."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
            self._count += 1  # before it stands still, and until it goes on: another thread may fork in between
            gc.disable()

    def end(self) -> None:
        with self._lock:
            if self._count == 1 and self._was_on:
                gc.enable()
            self._count -= 1

    def forget(self) -> None:
        """In a forked child: those threads are not there."""
        if self._count and self._was_on:
            gc.enable()
        self.__init__()  # type: ignore[misc]


_stops = _Stops()
os.register_at_fork(after_in_child=_stops.forget)


@contextmanager
def without_collections() -> Iterator[None]:
    """Have the collector stand still; for what comes to an end soon, in a thread where no signal strikes."""
    _stops.begin()
    try:
        yield
    finally:
        _stops.end()


def making_many(count: int) -> AbstractContextManager[None]:
    """Have the collector stand still where so many queues are made that it pays; see `without_collections`."""
    return without_collections() if count >= MANY else nullcontext()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Have the collector look rarely, in this process, until the block ends; see `RARELY`."""
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def keep_to_the_end() -> None:
    """Have the collector look no more at what there is: this process ends soon, and would wait for it.

    Of 5,000 queues and as many subscriptions the collector takes a second or two, and the end of Python as long again.
    """
    gc.freeze()
