"""Imports made by threads of the package: none of them is under way at a fork.

A module that a thread imports at a fork stays locked in the child, where nobody finishes it: whoever imports it there,
also without qflow, waits for good. So a fork waits for the thread that is in a block of `importing`. No module begins
such a block while it is imported itself: two threads would wait for each other.

Nor does the main thread import in a call what that is the first to need: a signal's handler that raises in the middle
of an import leaves the lock of all imports taken, and whoever imports after that waits for good. See `imported`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import RLock, Thread, current_thread, main_thread
from types import ModuleType

from qflow.errors import BrokerClosed
from qflow.handlers import is_of_handler

PATIENCE_S = 10.0
"""For so long a fork waits, and the main thread for one that imports."""


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

_found: dict[str, ModuleType] = {}


def imported(name: str) -> ModuleType:
    """Return a module that opening a broker does not need, whichever thread asks. Cost: 0.1 µs, or its import.

    Raises:
        BrokerClosed: it is not there yet, and the interpreter is ending, which imports nothing any more.
    """
    if name in _found:
        return _found[name]
    if sys.is_finalizing():
        raise BrokerClosed("the interpreter is ending: close a broker before that, in the program or by `atexit`")

    def find() -> None:
        with importing:
            _found[name] = import_module(name)

    if current_thread() is not main_thread():
        find()
        return _found[name]

    def attempt() -> None:
        with suppress(Exception):  # which the main thread comes upon, too
            find()

    thread = Thread(target=attempt, name="qflow-importing", daemon=True)
    try:
        thread.start()
        thread.join(PATIENCE_S)
    except RuntimeError as error:  # there can be no more threads
        if is_of_handler(error):
            raise
    # Where a handler struck in an import, or before a fork, the thread waits for this one: which imports it then.
    return _found.get(name) or import_module(name)
