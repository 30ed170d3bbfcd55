"""Where callers wait for their batch: a gate, which each of them opens for the next one as it passes."""

from __future__ import annotations

from operator import methodcaller
from threading import Lock

LOOK_S = 1.0
"""A caller looks so often whether it has been forked: nobody opens a gate in the child."""


class Gate:
    """Closed when it is made, until somebody releases it; a thread that passes has taken it, and releases it.

    It is taken without a call, for a signal handler may raise when a call returns: `if gate.taken: gate.release()`.
    """

    __slots__ = ("acquire", "release")
    taken = property(methodcaller("acquire", True, LOOK_S))
    """Waits, and is True; False after `LOOK_S`. No function of Python: those look for signals where they begin."""

    def __init__(self) -> None:
        lock = Lock()
        lock.acquire()
        self.acquire, self.release = lock.acquire, lock.release
