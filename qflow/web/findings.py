"""What is wrong, as `qflow doctor` says it, of what the page has at hand: judged in a thread, every few seconds."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from qflow import doctor
from qflow.aio.broker import AsyncBroker, in_thread
from qflow.web.figures import Figures

JUDGE_S = 5.0


class Findings:
    """Those of one broker; see the module."""

    def __init__(self, broker: AsyncBroker, figures: Figures, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._broker = broker
        self._figures = figures
        self._clock = clock
        self._found: list[Mapping[str, Any]] = []
        self._judged_s: float | None = None
        self._turn = asyncio.Lock()

    async def now(self) -> list[Mapping[str, Any]]:
        """Return what is wrong, worst first: fields of `Finding`.

        Cost: every few seconds, in a thread, 20 µs a queue.
        """
        async with self._turn:
            if self._judged_s is None or self._clock() - self._judged_s >= JUDGE_S:
                look = await self._figures.look()
                totals = {name: look.totals[name] for name in ("capacity_bytes", "resident_bytes", "spilled_bytes")}
                stats = {"queues": look.queues, "streams": look.streams, **totals}
                self._found = await in_thread(self._broker, lambda: self._judged(stats))
                self._judged_s = self._clock()
        return self._found

    def _judged(self, stats: dict[str, Any]) -> list[Mapping[str, Any]]:
        broker = self._broker.broker
        stats["inbox"] = attrs.asdict(broker.engine.adoption.stats())
        disk = shutil.disk_usage(broker.path)
        look = doctor.Look(
            path=broker.path,
            stats=stats,
            owner_pid=os.getpid(),
            letters={
                name: doctor.Letters(messages=stats["queues"][name]["messages"]) for name in self._for_letters(stats)
            },
            disk_bytes=disk.total,
            disk_free_bytes=disk.free,
        )
        return [finding.to_dict() for finding in doctor.judge(look)]

    def _for_letters(self, stats: dict[str, Any]) -> set[str]:
        """Return the queues that others name for their dead letters."""
        queues = self._broker.broker.engine.queues.named().values()
        named = {queue.settings.dead_letter for queue in queues} - {None}
        return {name for name in stats["queues"] if name in named}
