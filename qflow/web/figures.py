"""Figures for pages that are open: one look at the broker for all of them, each second or more seldom, in a thread.

Nobody looks, nothing is looked at. What the charts of the overview show is kept here, so that a page that opens has
the last minutes at once, as far as somebody looked.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from qflow.aio.broker import AsyncBroker, at_a_glance
from qflow.pace import LONGEST_S, pause_s

POINTS = 600
_SUMS = (
    "messages", "bytes", "resident_bytes", "spilled_messages", "spilled_bytes", "acquired_messages", "blocked_putters",
)  # fmt: skip
_TOTALS = ("put_total", "delivered_total", "acked_total")


@attrs.frozen(eq=False)
class Look:
    """What a broker was at one moment."""

    at_s: float
    """Since the epoch."""
    totals: Mapping[str, float]
    """Sums over all queues, and what is of the whole broker."""
    queues: Mapping[str, Mapping[str, Any]]
    """Fields of `QueueStats`, by name."""
    streams: Mapping[str, Mapping[str, Any]]
    """Fields of `StreamStats`."""


@attrs.define(eq=False, slots=False)
class Figures:
    """See the module.

    Args:
        broker: whose figures these are.
        clock: seconds, monotonic.
        now: seconds since the epoch.
    """

    _broker: AsyncBroker
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _now: Callable[[], float] = attrs.field(default=time.time, kw_only=True)
    _queues: dict[str, Mapping[str, Any]] = attrs.field(factory=dict, init=False)
    _number: int = attrs.field(default=0, init=False)
    _last: Look | None = attrs.field(default=None, init=False)
    _due_s: float = attrs.field(default=0.0, init=False)
    """When the last look is old, on the clock."""
    _looked_s: float = attrs.field(default=0.0, init=False)
    """When the last look was, on the clock."""
    _looking: asyncio.Task[Look] | None = attrs.field(default=None, init=False)
    _points: deque[dict[str, float]] = attrs.field(factory=lambda: deque(maxlen=POINTS), init=False)

    async def look(self) -> Look:
        """Return the figures of now, or of a moment ago.

        Raises:
            BrokerClosed
        Cost: 0.1 ms; once a second at most, in a thread, 1 µs for each queue, 25 µs for each that has changed, and
        13 µs for each that has rates of the last minute.
        """
        if self._last is not None and self._clock() < self._due_s and not self._broker.closed:
            return self._last
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_anew())
        return await asyncio.shield(self._looking)

    async def one(self, name: str) -> Mapping[str, Any]:
        """Return the figures of a queue as they are now, fields of `QueueStats`."""
        return attrs.asdict(await self._broker.queue(name).stats())

    async def _look_anew(self) -> Look:
        try:
            look, cost_s = await at_a_glance(self._broker, self._timed)
            self._keep_point(look)
            self._last, self._due_s = look, self._clock() + pause_s(cost_s)
            return look
        finally:
            self._looking = None

    def _timed(self) -> tuple[Look, float]:
        """Look; return what the processor took for it, too, in seconds."""
        began_s = time.thread_time()
        return self._read(), time.thread_time() - began_s

    def _read(self) -> Look:
        engine = self._broker.broker.engine
        engine.spool.check_open()
        self._number, changed = engine.figures.changes(self._number)
        if not self._number:
            self._queues.clear()
            self._number, changed = engine.figures.changes(0)
        for name, facts in changed.items():
            if facts:
                self._queues[name] = facts
            else:
                self._queues.pop(name, None)
        streams = {stream.name: attrs.asdict(stream.stats()) for stream in engine.streams.all()}
        queues = dict(self._queues)
        totals: dict[str, float] = {name: sum(facts[name] for facts in queues.values()) for name in (*_SUMS, *_TOTALS)}
        totals["published_total"] = sum(stream["published_total"] for stream in streams.values())
        totals["stream_messages"] = sum(stream["messages"] for stream in streams.values())
        totals["capacity_bytes"] = engine.ledger.capacity
        totals["queues"], totals["streams"] = len(queues), len(streams)
        return Look(self._now(), totals, queues, streams)

    def _keep_point(self, look: Look) -> None:
        before, now_s = self._last, self._clock()
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        if before is not None and look.at_s < before.at_s:
            self._points.clear()  # the clock was set back: charts go from left to right
        point = {
            "at_s": look.at_s,
            **{
                name: look.totals[name] for name in ("messages", "acquired_messages", "resident_bytes", "spilled_bytes")
            },
        }
        if before is not None and 0 < passed_s <= 2 * LONGEST_S:
            for name in (*_TOTALS, "published_total"):
                grown = look.totals[name] - before.totals[name]
                point[name.removesuffix("_total")] = max(0.0, grown / passed_s)  # a deleted queue takes its own along
        self._points.append(point)

    def points(self, since_s: float = 0.0) -> list[dict[str, float]]:
        """Return what charts show: later than so many seconds since the epoch."""
        return [point for point in self._points if point["at_s"] > since_s]
