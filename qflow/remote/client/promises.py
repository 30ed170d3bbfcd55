"""Who waits for replies on a connection for threads: a thread, or a future; and how many futures there may be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from qflow.loggers import get_logger
from qflow.memory.line import Line, Wake, Watcher
from qflow.remote.client.link import Reply, Request
from qflow.starting import start

MOST_SUBMITTED = 900
"""Under way without anybody who waits; the owner reads no more than 1,000 requests ahead."""
MOST_SUBMITTED_BYTES = 16 * 2**20
"""Of bodies: half of what the owner reads ahead, so that it goes on reading what other threads ask for."""
_logger = get_logger("qflow")


class Call:
    """A thread that waits for a reply, and what came."""

    __slots__ = ("begun", "gate", "given_up", "number", "outcome")

    def __init__(self, begun: Callable[[int], Request | None] | None = None) -> None:
        self.begun = begun
        self.gate = threading.Lock()
        self.gate.acquire()
        self.number = 0
        self.given_up = False
        self.outcome: Reply | Exception | None = None

    def answered(self, outcome: Reply | Exception) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.gate.release()


class JobThread:
    """A thread that does one job after the other, started when first needed: they may use the connection."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have the thread run. Called under the lock of the connection, before anything is to be done."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            start(thread)
            self._thread = thread

    def do(self, job: Callable[[], object]) -> None:
        """Have something done."""
        self._jobs.put(job)

    def end(self) -> None:
        """Stop, when all is done that is to be."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # also `SystemExit` of a callback of a future: others wait for theirs
                _logger.exception("a callback of a connection failed")


class Room:
    """How much is submitted and not answered; threads that want to submit more wait in line. Under one lock."""

    def __init__(self) -> None:
        self._line = Line()
        self.messages = 0
        self.bytes = 0

    def enter(self, promise: Promise, wake: Wake) -> bool:
        """Take room for a promise; tell whether there is any: else `wake` is called when it is worth to try again.

        However large, it finds room when there is no other.
        """
        is_full = self.messages >= MOST_SUBMITTED or (
            self.messages > 0 and self.bytes + promise.size > MOST_SUBMITTED_BYTES
        )
        watcher, promise.watcher = promise.watcher, None
        if is_full:
            promise.watcher = self._line.watch(wake, None if watcher is None else watcher.number)
            return False
        self.messages += 1
        self.bytes += promise.size
        if self._line.watching:
            self._line.notify()  # the next one may find room, too
        return True

    def leave(self, promise: Promise) -> None:
        """Give back what `enter` took."""
        self.messages -= 1
        self.bytes -= promise.size
        if self._line.watching:
            self._line.notify()

    def give_up(self, promise: Promise) -> None:
        """A promise waits in line no more."""
        watcher, promise.watcher = promise.watcher, None
        if watcher is None:
            return
        if watcher.called:
            self._line.notify()  # it was another's turn
        else:
            self._line.unwatch(watcher)


class Promise:
    """A future that waits for a reply."""

    def __init__(self, request: Request, room: Room, futures: JobThread, connection: object) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self.size = request.size
        self.watcher: Watcher | None = None
        """In line for room."""
        self._read = request.read
        self._room = room
        self._futures = futures
        self._connection: object = connection
        """Kept until it is answered: its caller may have nothing but the future."""

    def answered(self, outcome: Reply | Exception) -> None:
        self._room.leave(self)
        self._connection = None
        self._futures.do(partial(self._resolve, outcome))

    def _resolve(self, outcome: Reply | Exception) -> None:
        if isinstance(outcome, Reply):
            try:
                result = self._read(outcome)
            except Exception as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        else:
            self.future.set_exception(outcome)
