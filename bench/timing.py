"""Sides of a comparison whose seconds are those of all they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, thread_time
from typing import ParamSpec

P = ParamSpec("P")


def timed(work: Callable[P, object], clock: Callable[[], float] = perf_counter) -> Callable[P, float]:
    """Return what does some work, and returns the seconds that it took."""

    def side(*args: P.args, **kwargs: P.kwargs) -> float:
        start = clock()
        work(*args, **kwargs)
        return clock() - start

    return side


thread_timed = partial(timed, clock=thread_time)
"""The same in seconds of the processor that the thread takes."""
