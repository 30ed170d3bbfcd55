"""How a worker's process ends: within a bound, whatever a function has left, and in one process.

    its run is over               the event loop is closed and threads are joined, as the interpreter does it
    `GRACE_S` later               threads that still run are cut off: handlers of `atexit` are called without their end
    as long again                 the process ends, whatever hangs

A process that a function has forked ends where it would return to the worker: it has no connection and no slot.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

GRACE_S = 5.0
"""How long a process whose run is over waits for threads and tasks that a function has left."""
LONGEST_END_S = 3 * GRACE_S
"""A process that is told to end is killed when it has had nothing at hand for so long."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def bounded() -> Iterator[None]:
    """What is done in its context ends by an exception, such as `sys.exit`; from then on the process has a bound."""
    try:
        yield
    except BaseException as error:
        _bound(code_of(error))
        raise


def _bound(code: int) -> None:
    turn = threading.RLock()
    atexit.register(turn.acquire)  # called before the others: handlers are called by one thread
    cut = threading.Timer(GRACE_S, _cut_off, (turn, code))
    last = threading.Timer(2 * GRACE_S, os._exit, (code,))
    for timer in cut, last:
        timer.daemon = True
        timer.start()


def _cut_off(turn: threading.RLock, code: int) -> None:
    """End the process, unless the main thread calls handlers already."""
    if not turn.acquire(blocking=False):
        return
    try:
        main = threading.main_thread()
        left = [repr(one.name) for one in threading.enumerate() if not one.daemon and one is not main]
        what = "threads " + ", ".join(left) if left else "tasks"
        with suppress(Exception):  # the function may have closed it
            sys.stderr.write(f"qflow: process {os.getpid()} waits no longer for what its function has left: {what}\n")
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(code)


def in_one_process(function: Callable[[T], R]) -> Callable[[T], R]:
    """Return a function that does what another does; a process that is forked meanwhile does not return from it."""
    process = os.getpid()

    def call(argument: T) -> R:
        try:
            outcome = function(argument)
        except BaseException as error:
            if os.getpid() != process:
                _end_forked(error)
            raise
        if os.getpid() != process:
            _end_forked(None)
        return outcome

    return call


def _end_forked(error: BaseException | None) -> None:
    """End a forked process as the interpreter would, but for what its parent is to do at its own end."""
    try:
        if isinstance(error, SystemExit):
            if not isinstance(error.code, int | None):
                sys.stderr.write(f"{error.code}\n")
        elif error is not None:
            traceback.print_exception(error)
        _flush()
    finally:
        os._exit(code_of(error))


def code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that ends by an exception."""
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        return 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def _flush() -> None:
    for stream in sys.stdout, sys.stderr:
        if stream is not None:
            stream.flush()
