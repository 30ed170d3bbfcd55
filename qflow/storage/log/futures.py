"""Futures of requests: resolved in a thread of their own, whose callbacks may use the broker, and take their time."""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

from qflow.storage.log.batch import Request

_logger = logging.getLogger("qflow")


class Teller:
    """The thread. It is there from the beginning: who hands over may not start one where a handler may strike."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: SimpleQueue[list[Request] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="qflow-futures", daemon=True)
        self._thread.start()

    def resolve(self, requests: list[Request]) -> None:
        """Resolve the futures of requests that are done, soon. By the writer."""
        self._requests.put(requests)

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
