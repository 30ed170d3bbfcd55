"""Threads for what the tasks of a broker have to do on the disk."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from threading import Thread
from weakref import WeakSet

from qflow.errors import QflowError
from qflow.starting import start

THREADS = 2
"""Threads for the disk: one may wait for a commit or a large spill while the other restores messages for a get."""


class Threads:
    """Up to `THREADS` of them, started when first needed.

    They work on while the main thread has returned and others have not, and the interpreter does not end before what
    was begun is done. (What the standard library has for that refuses jobs once the main thread has returned.)
    """

    def __init__(self) -> None:
        self.begun: set[Future[object]] = set()
        """Jobs that are not done."""
        self.jobs: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        self._count = 0
        self._free: list[None] = []
        """As many as wait for a job."""
        _all.add(self)

    def put(self, job: Callable[[], object]) -> None:
        """Have a job done; see `start` first."""
        begun: Future[object] = Future()
        self.jobs.put((job, begun))
        self.begun.add(begun)
        begun.add_done_callback(self.begun.discard)

    def start(self) -> None:
        """See that there is one for the next job, or are as many as may be.

        Raises:
            QflowError: there is none, and can be none. BrokerClosed: since the interpreter is ending.
        """
        if self._free:
            self._free.pop()
        elif self._count < THREADS:
            try:
                start(Thread(target=self._serve, name="qflow-aio", daemon=True))
            except QflowError:
                if not self._count:
                    raise
            else:
                self._count += 1

    def _serve(self) -> None:
        found = self.jobs.get()  # that it was started for, and which may not be there yet: it is not free
        while found is not None:
            job, begun = found
            try:
                begun.set_result(job())
            except BaseException as error:
                begun.set_exception(error)
            del found, job, begun
            try:
                found = self.jobs.get_nowait()
            except Empty:
                self._free.append(None)
                found = self.jobs.get()
        self.jobs.put(None)  # for the next one


_all: WeakSet[Threads] = WeakSet()


@atexit.register
def _finish() -> None:
    """Return when what was begun is done: after all threads but daemons have ended, and what was registered later."""
    for threads in list(_all):
        wait(list(threads.begun))


os.register_at_fork(after_in_child=_all.clear)
