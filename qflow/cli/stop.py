"""Stops a command on a signal without losing what was read or written so far."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Former: TypeAlias = "list[tuple[signal.Signals, signal._HANDLER]]"


class Stopped(Exception):
    """A signal, or the command itself, has asked to stop."""


class Interrupted(KeyboardInterrupt):
    """A second signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def interrupting() -> Iterator[None]:
    """Have SIGTERM and SIGHUP interrupt what runs, as SIGINT does, so that it removes what it began."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    former = _hear(_SIGNALS[1:], interrupt)
    try:
        yield
    finally:
        _restore(former)


def _hear(numbers: Iterable[signal.Signals], handler: signal._HANDLER) -> _Former:
    """Have a handler called for signals, but those that nohup or a background job has ignored; return those before."""
    former = [(number, signal.getsignal(number)) for number in numbers]
    heard = [(number, before) for number, before in former if before is not signal.SIG_IGN]
    for number, _ in heard:
        signal.signal(number, handler)
    return heard


def _restore(former: _Former) -> None:
    for number, handler in former:
        signal.signal(number, handler)


class Stop:
    """Whether to stop; in its context the first SIGINT, SIGTERM or SIGHUP asks for that, the second interrupts.

    A signal only sets a flag, so no work is cut off half-way; code that waits looks at the flag every `PATIENCE_S`.
    """

    PATIENCE_S = 0.1

    def __init__(self) -> None:
        self.requested = False
        self.signal: int | None = None
        self._former: _Former = []

    @property
    def exit_code(self) -> int | None:
        """128 + the signal's number, as shells have it; None without a signal."""
        return None if self.signal is None else 128 + self.signal

    def request(self) -> None:
        self.requested = True

    def check(self) -> None:
        """Raise `Stopped` if asked to stop."""
        if self.requested:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep; raise `Stopped` soon after a signal."""
        deadline = time.monotonic() + seconds
        self.check()
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, self.PATIENCE_S))
            self.check()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise Interrupted(number)
        self.requested, self.signal = True, number

    def __enter__(self) -> Stop:
        self._former = _hear(_SIGNALS, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._former)
