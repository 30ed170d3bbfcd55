"""Imports made by threads of the package: none of them is under way at a fork.

A module that a thread imports at a fork stays locked in the child, where nobody finishes it: whoever imports it there,
also without qflow, waits for good. So a fork waits for the thread that is in a block of `importing`. No module begins
such a block while it is imported itself: two threads would wait for each other.
"""

from __future__ import annotations

import os
from contextlib import suppress
from threading import RLock


class _Importing:
    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def end_fork(self) -> None:
        """In the parent. It does not have the lock where a signal's handler has raised while it waited."""
        with suppress(RuntimeError):
            self._lock.release()


importing = _Importing()
os.register_at_fork(before=importing.__enter__, after_in_parent=importing.end_fork, after_in_child=importing.__init__)  # type: ignore[misc]
