"""Ctrl-C, MemoryError and SystemExit at each place where one can strike, and real signals at random moments.

An interrupt strikes where the interpreter looks for signals: when a function of ours is entered, and after a call of a
built-in function returned. A profile hook raises there, at the n-th such place of an operation, for every n. Afterwards
nothing confirmed is lost, the broker's own check finds nothing, and other threads go on.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import qflow
from qflow.broker import Broker

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
PATIENCE_S = 30
ENGINE = os.path.dirname(qflow.__file__)


class Strike:
    """Raises an exception at the n-th place of the current thread's work in the engine, once."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.left = number
        self.error = error
        self.place: str | None = None

    def __enter__(self) -> Strike:
        sys.setprofile(self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        sys.setprofile(None)
        return kind is self.error

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(ENGINE):
            return
        if self.place is None and self.left == 0:
            name = os.path.relpath(frame.f_code.co_filename, ENGINE)
            what = f" after {argument.__name__}" if event == "c_return" else ", entering"
            self.place = f"{name}:{frame.f_lineno} {frame.f_code.co_name}{what}"
            raise self.error
        self.left -= 1


class Trial:
    """One queue, one operation, struck once; then what must still be true."""

    def __init__(self, broker: Broker, name: str, durable: bool) -> None:
        self.broker = broker
        self.queue = broker.declare_queue(name, durable=durable, capacity_bytes=1_000)
        self.sent: list[bytes] = []
        self.maybe: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.held: list[Any] = []

    def fill(self, number: int) -> None:
        for index in range(number):
            body = b"%03d" % index * 30
            self.queue.put(body)
            self.sent.append(body)

    def hold(self, number: int) -> None:
        self.held = [self.queue.get(0) for _ in range(number)]

    def settle(self) -> str | None:
        """Do what another thread would do next, in another thread; return what went wrong."""
        found: list[str] = []

        def work() -> None:
            try:
                self.queue.put(b"next")
                if self.held:
                    self.queue.ack_many([], wait=True)
                before = self.queue.stats().acquired_messages
                while True:
                    try:
                        with self.queue.get(0) as delivery:
                            body = delivery.body
                    except qflow.QueueEmpty:
                        break
                    if body in self.sent and body not in self.gone:
                        self.gone.add(body)
                    elif body == b"next" or body in self.maybe:
                        self.maybe.discard(body)
                    else:
                        found.append(f"{body!r} came and should not")
                if self.queue.durable_work_is_done():
                    found.append("?")
            except AttributeError:
                pass
            except BaseException as error:
                found.append(f"the next caller got {error!r}")
            del before

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(PATIENCE_S)
        if worker.is_alive():
            return "the next caller hangs"
        return "; ".join(found) or None
