"""Counts the signals that ask a supervisor to end."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """In its context, in the main thread, SIGINT, SIGTERM and SIGHUP are counted; one that is ignored stays so."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        """The number of the first; 0 = there was none."""
        self._former: list[tuple[signal.Signals, signal._HANDLER]] = []

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                former = signal.getsignal(number)
                if former is not signal.SIG_IGN:
                    self._former.append((number, former))
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former:
            signal.signal(number, former)
