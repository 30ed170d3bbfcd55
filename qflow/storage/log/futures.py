"""Futures of requests: resolved in a thread of their own, whose callbacks may use the broker, and take their time."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from qflow.loggers import get_logger
from qflow.starting import start
from qflow.storage.log.batch import Batch, Request
from qflow.storage.log.calls import Calls

_logger = get_logger("qflow")


def mark_done(batch: Batch) -> int:
    """Have each request of a batch say what became of it; return how many of their callers wait at its gate."""
    waiting = 0
    for request in batch.requests:
        if request.error is None:
            request.error = batch.error
        request.done = True  # who looks for this afterwards waits at the gate, or has left a call, before
        waiting += request.rung
    return waiting


class Teller:
    """The thread. It is there from the beginning: who hands over may not start one where a handler may strike."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: SimpleQueue[list[Request] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="qflow-futures", daemon=True)
        start(self._thread)

    def tell(self, batch: Batch) -> None:
        """Tell those who wait for requests of a batch otherwise; have its futures resolved, soon. By the writer."""
        call = Calls()
        futures: list[Request] = []
        for request in batch.requests:
            if request.told is not None:
                call(request.told)
            if request.future is not None:
                futures.append(request)
        if futures:
            self._requests.put(futures)
        if call.error is not None:
            _logger.error("%s: somebody could not be told of a commit", self._name, exc_info=call.error)

    def end(self) -> None:
        """Return when all are resolved; a callback that calls this is the exception. The writer has ended."""
        self._requests.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (requests := self._requests.get()) is not None:
            for request in requests:
                self._resolve(request)
            del requests, request  # they hold bodies

    def _resolve(self, request: Request) -> None:
        future = request.future
        try:
            if future is not None and not future.done():
                if request.error is None:
                    future.set_result(request.outcome())
                else:
                    future.set_exception(request.error)
        except BaseException:  # of a callback that is none of `Exception`, which futures log themselves
            _logger.exception("%s: a callback of a future failed", self._name)
