"""How many a second: totals as they were at moments of the last minute."""

from __future__ import annotations

from array import array

from qflow.stats import Rates

WINDOWS_S = (1.0, 10.0, 60.0)
APART_S = 0.4
"""Moments are kept that are as far apart, at least."""
PAUSE_S = 2.0
"""Nothing is noted while nothing happens: after so long, what is noted next did not come about evenly since."""
Totals = tuple[int, int, int]
"""Put, delivered, acked."""
_WIDTH = 4
_NONE = Rates()


class Meter:
    """See the module. Not thread-safe. Memory: 200 bytes, and 5 KB while something happens each second."""

    __slots__ = ("_moments",)

    def __init__(self, now_s: float) -> None:
        self._moments = array("d", (now_s, 0, 0, 0))

    def note(self, now_s: float, totals: Totals, before_s: float) -> None:
        """Keep what the totals are, if they have changed; the last time that somebody looked was `before_s`."""
        moments = self._moments
        last_s, last = moments[-_WIDTH], moments[1 - _WIDTH :]
        if now_s - last_s < APART_S or last == array("d", totals):
            return
        if now_s - last_s > PAUSE_S and before_s > last_s:
            moments.extend((before_s, *last))
        moments.extend((now_s, *totals))
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        """Keep one moment that is older than the longest window, at most."""
        moments, first = self._moments, 0
        while first + _WIDTH < len(moments) and moments[first + _WIDTH] <= now_s - WINDOWS_S[-1]:
            first += _WIDTH
        del moments[:first]

    def rates(self, now_s: float, totals: Totals) -> Rates:
        """Return how many a second there were, given the totals of now."""
        self._forget(now_s)
        moments = self._moments
        if len(moments) == _WIDTH and moments[1:] == array("d", totals):
            return _NONE
        found: list[float] = []
        pasts = [self._at(now_s - window_s, now_s, totals) for window_s in WINDOWS_S]
        for number, total in enumerate(totals):
            found += [
                round(max(0.0, total - past[number]) / window_s, 3)
                for past, window_s in zip(pasts, WINDOWS_S, strict=True)
            ]
        names = ("put", "delivered", "acked")
        keys = [f"{name}_{window_s:.0f}s" for name in names for window_s in WINDOWS_S]
        return Rates(**dict(zip(keys, found, strict=True)))

    def _at(self, moment_s: float, now_s: float, totals: Totals) -> list[float]:
        """Return what the totals were: between two moments, as if all had come about evenly."""
        moments = self._moments
        after: tuple[float, ...] = (now_s, *totals)
        for place in range(len(moments) - _WIDTH, -1, -_WIDTH):
            before = moments[place : place + _WIDTH]
            if before[0] <= moment_s:
                share = (moment_s - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
                return [
                    earlier + share * (later - earlier) for earlier, later in zip(before[1:], after[1:], strict=True)
                ]
            after = tuple(before)
        return list(after[1:])
