"""What is wrong, as `qflow doctor` says it, of what the page has at hand: judged in a thread, every few seconds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from qflow import doctor
from qflow.aio.broker import AsyncBroker, in_thread
from qflow.errors import QflowError
from qflow.inspect import Health, owner_of
from qflow.loggers import get_logger
from qflow.web import reading
from qflow.web.figures import Figures

JUDGE_S = 2.0
HEALTH_S = 60.0
"""How often the log is read for that, while a page is open: it takes a process for 0.3 s."""
_logger = get_logger("qflow.web")


class Findings:
    """Those of one broker; see the module."""

    def __init__(self, broker: AsyncBroker, figures: Figures) -> None:
        self._broker = broker
        self._figures = figures
        self._found: list[Mapping[str, Any]] = []
        self._judged_s: float | None = None
        self._turn = asyncio.Lock()
        self._health: Health | None = None
        self._health_due_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self.inside = doctor.Look(path=broker.path)
        """What the log and the disk tell, as of the last time that was judged; nothing before."""

    async def now(self) -> list[Mapping[str, Any]]:
        """Return what is wrong, worst first: fields of `Finding`. What only the log tells comes a moment later.

        Cost: every few seconds, in a thread, 20 µs a queue; see also `HEALTH_S`.
        """
        async with self._turn:
            if self._reading is None and time.monotonic() >= self._health_due_s:
                self._reading = asyncio.create_task(self._read_health())
            if self._judged_s is None or time.monotonic() - self._judged_s >= JUDGE_S:
                look = await self._figures.look()
                totals = {name: look.totals[name] for name in ("capacity_bytes", "resident_bytes", "spilled_bytes")}
                stats = {"queues": look.queues, "streams": look.streams, **totals}
                self._found = await in_thread(self._broker, lambda: self._judged(stats))
                self._judged_s = time.monotonic()
        return self._found

    def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read_health(self) -> None:
        try:
            self._health = await in_thread(self._broker, partial(reading.health, self._broker.path))
        except QflowError as error:
            if not self._broker.closed:
                _logger.warning("findings are without what the log tells: %s", error)
        finally:
            self._reading, self._judged_s = None, None
            self._health_due_s = time.monotonic() + HEALTH_S

    def _judged(self, stats: dict[str, Any]) -> list[Mapping[str, Any]]:
        broker = self._broker.broker
        stats["inbox"] = attrs.asdict(broker.engine.adoption.stats())
        stats["troubles"] = dict(broker.engine.figures.troubles)
        inside = self.inside = doctor.seen_in(broker.path, self._health)
        letters = {name: inside.letters.get(name, doctor.Letters(messages=0)) for name in self._for_letters(stats)}
        letters |= {name: one for name, one in inside.letters.items() if not one.is_named and name in stats["queues"]}
        is_there = owner_of(broker.path) is not None
        look = attrs.evolve(inside, stats=stats, is_there=is_there, owner_pid=os.getpid(), letters=letters)
        return [finding.to_dict() for finding in doctor.judge(look)]

    def _for_letters(self, stats: dict[str, Any]) -> set[str]:
        """Return the queues that others name for their dead letters."""
        queues = self._broker.broker.engine.queues.named().values()
        named = {queue.settings.dead_letter for queue in queues} - {None}
        return {name for name in stats["queues"] if name in named}
