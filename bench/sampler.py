"""Memory of this process over time: RssAnon, RssFile, what the cgroup is charged, and the backlog beside it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import linear_regression
from time import perf_counter
from typing import Any

from bench import children
from bench.cgroup import Group

SAMPLE_S = 0.01
MOST = 2_000
"""With twice as many samples, every other one is dropped, so that watching takes no more memory as time goes by."""
NAMES = ("anonymous", "file", "backlog", "cgroup")


class Sampler:
    """Notes the memory of this process again and again while it works."""

    def __init__(self, backlog: Callable[[], int], group: Group | None = None) -> None:
        self._backlog = backlog
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._start = perf_counter()
        self._pause_s = SAMPLE_S
        self._seconds = array("d")
        self._samples = {name: array("q") for name in NAMES}
        self._peaks = dict.fromkeys(NAMES, 0)

    def take(self) -> None:
        charged = self._group.usage() if self._group is not None else 0
        found = (*children.memory_now(), self._backlog(), charged)
        self._seconds.append(perf_counter() - self._start)
        for name, value in zip(NAMES, found, strict=True):
            self._samples[name].append(value)
            self._peaks[name] = max(self._peaks[name], value)
        if len(self._seconds) == 2 * MOST:
            del self._seconds[1::2]
            for values in self._samples.values():
                del values[1::2]
            self._pause_s *= 2

    def _sample(self) -> None:
        while not self._stop.wait(self._pause_s):
            self.take()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.take()
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
        self.take()

    def curves(self) -> dict[str, Any]:
        """Return the samples by name, and the peak of each, for the parent."""
        curves: dict[str, Any] = {"seconds": list(self._seconds)}
        for name, values in self._samples.items():
            curves[name] = list(values) if name != "cgroup" or self._group is not None else []
            curves[f"peak_{name}"] = self._peaks[name]
        return curves


def growth(seconds: Sequence[float], values: Sequence[int], start: float, stop: float) -> float:
    """Return by how much a straight line through the values rises between two moments (least squares)."""
    points = [(x, y) for x, y in zip(seconds, values, strict=True) if start <= x <= stop]
    if len({x for x, _ in points}) < 2:
        return 0.0
    slope, _ = linear_regression(*zip(*points, strict=True))
    return slope * (stop - start)
