"""Imports made by threads of the package: none of them is under way at a fork.

A module that a thread imports at a fork stays locked in the child, where nobody finishes it: whoever imports it there,
also without qflow, waits for good. So a fork waits for the thread that is in a block of `importing`. No module begins
such a block while it is imported itself: two threads would wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from threading import RLock

PATIENCE_S = 10.0
"""For so long a fork waits."""


class _Importing:
    def __init__(self) -> None:
        self._lock = RLock()

    @property
    def __enter__(self) -> Callable[[], bool]:
        """Those of the lock itself: a signal's handler that raises in one of Python would leave it taken."""
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302  of the method that it gives
        return self._lock.__exit__

    def begin_fork(self) -> None:
        """Not for good: who forks may be importing what that thread waits for, as where a signal's handler forks."""
        self._lock.acquire(timeout=PATIENCE_S)

    def end_fork(self) -> None:
        """In the parent. It has no lock where it waited for too long, or a signal's handler has raised meanwhile."""
        with suppress(RuntimeError):
            self._lock.release()


importing = _Importing()
os.register_at_fork(
    before=importing.begin_fork,
    after_in_parent=importing.end_fork,
    after_in_child=importing.__init__,  # type: ignore[misc]
)
