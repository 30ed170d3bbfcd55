"""How many a second: totals as they were at moments of the last minute."""

from __future__ import annotations

from array import array
from bisect import bisect_right

WINDOWS_S = (1.0, 10.0, 60.0)
APART_S = 0.4
"""Moments are kept that are as far apart, at least."""
PAUSE_S = 2.0
"""Nothing is noted while nothing happens: after so long, what is noted next did not come about evenly since."""
Totals = tuple[int, int, int, int]
"""Put, delivered, acked, redelivered."""
_WIDTH = 4
_FLOWS = "put", "delivered", "acked", "redelivered"
_NAMES = [(window_s, [f"{name}_{window_s:.0f}s" for name in _FLOWS]) for window_s in WINDOWS_S]
NO_RATES: dict[str, float] = {name: 0.0 for _, names in _NAMES for name in names}
"""Never changed."""
_NOTHING_YET = array("d")
"""Of all queues to which nothing has happened. Never changed."""


class Meter:
    """See the module. Not thread-safe. Memory: 100 bytes, and 6 KB while something happens each second."""

    __slots__ = ("_began_s", "_moments", "_totals")

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._moments = self._totals = _NOTHING_YET

    def _begin(self) -> None:
        if self._moments is _NOTHING_YET:
            self._totals = array("d", (0,) * _WIDTH)  # as many as `_WIDTH` for each moment
            self._moments = array("d", (self._began_s,))

    def note(self, now_s: float, totals: Totals, before_s: float) -> None:
        """Keep what the totals are, if they have changed; the last time that somebody looked was `before_s`."""
        if self._moments is _NOTHING_YET and not any(totals):
            return
        self._begin()
        last_s, last = self._moments[-1], self._totals[-_WIDTH:]
        if now_s - last_s < APART_S or last == array("d", totals):
            return
        if now_s - last_s > PAUSE_S and before_s > last_s:
            self._moments.append(before_s)
            self._totals.extend(last)
        self._moments.append(now_s)
        self._totals.extend(totals)
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        """Keep one moment that is older than the longest window, at most."""
        old = bisect_right(self._moments, now_s - WINDOWS_S[-1]) - 1
        if old > 0:
            del self._moments[:old], self._totals[: old * _WIDTH]

    def rates(self, now_s: float, totals: Totals) -> dict[str, float]:
        """Return how many a second there were, given the totals of now: the fields of `Rates`. Cost: 4 µs."""
        if self._moments is _NOTHING_YET and not any(totals):
            return NO_RATES.copy()
        self._begin()
        self._forget(now_s)
        moments, kept = self._moments, self._totals
        found, last = NO_RATES.copy(), len(moments) - 1
        is_still = kept[-_WIDTH:] == array("d", totals)
        for window_s, names in _NAMES:
            moment_s = now_s - window_s
            place = bisect_right(moments, moment_s) - 1
            if place == last and is_still:
                continue  # nothing has happened since
            early, later, share = max(0, place) * _WIDTH, (place + 1) * _WIDTH, 0.0
            if place >= 0:  # between two moments, as if all had come about evenly
                early_s, later_s = moments[place], now_s if place == last else moments[place + 1]
                share = (moment_s - early_s) / (later_s - early_s) if later_s > early_s else 0.0
            for number, name in enumerate(names):
                total, before = totals[number], kept[early + number]
                if share:
                    before += share * ((total if place == last else kept[later + number]) - before)
                if total > before:
                    found[name] = round((total - before) / window_s, 3)
        return found
