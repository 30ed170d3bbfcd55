"""Warnings about what clients do: some of them, for whoever can cause them can cause many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import attrs

from qflow.loggers import Logger

TOLD_EACH_S = 10.0


@attrs.define(eq=False, slots=False)
class Telling:
    """The log has one line about trouble with clients in so many seconds, with how many there were between.

    What was left out comes with the next line: that of the next trouble, or where there is none, of the last one, when
    the seconds are over, or `end` is called. In the thread of an event loop, or without one.

    Args:
        others: how a line ends that tells of others before it; `{}` is their number.
        clock: seconds, monotonic.
    """

    _logger: Logger
    _others: str = attrs.field(default=" (and {:,} more since the last line)", kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _next_s: float | None = attrs.field(default=None, init=False)
    _untold: int = attrs.field(default=0, init=False)
    _last: tuple[str, tuple[object, ...], BaseException | None] = attrs.field(default=("", (), None), init=False)
    """The latest of those that were left out."""
    _timer: asyncio.TimerHandle | None = attrs.field(default=None, init=False)

    def tell(self, text: str, *values: object, fault: BaseException | None = None) -> None:
        """Write a warning, unless there was one a short time ago; with where a `fault` of ours was raised."""
        now_s = self._clock()
        if self._next_s is not None and now_s < self._next_s:
            self._last = text, values, fault
            self._untold += 1
            if self._untold == 1:
                self._end_in(self._next_s - now_s)
            return
        self._write(text, values, fault)

    def end(self) -> None:
        """Write of those that were left out, if there are some."""
        if self._untold:
            self._untold -= 1
            self._write(*self._last)

    def _write(self, text: str, values: tuple[object, ...], fault: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        others = self._others.format(self._untold) if self._untold else ""
        self._logger.warning(text + "%s", *values, others, exc_info=fault)
        self._next_s, self._untold = self._clock() + TOLD_EACH_S, 0

    def _end_in(self, seconds: float) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # nobody waits for it: it comes with the next, or at the end
        self._timer = loop.call_later(seconds, self.end)
