"""The page while the disk stands still: whoever looks waits for no sync."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from qflow.aio.broker import in_thread
from qflow.aio.loops import THREADS
from web_served import run, served, users

GUARD_S = 60


def test_who_looks_waits_for_no_sync(spool: Path) -> None:
    """All threads that tasks have for the disk may wait for one: figures, findings and metrics are told all the same."""

    async def test() -> None:
        async with served(spool, users()) as site:
            await site.broker.declare_queue("jobs")
            await site.broker.declare_stream("log", topics=["log/#"])
            api, goes_on = site.api(), threading.Event()
            waiting = [asyncio.create_task(in_thread(site.broker, goes_on.wait)) for _ in range(THREADS)]
            try:
                for page in (
                    "/", "/queues", "/consumers", "/streams", "/queue?queue=jobs", "/stream?stream=log", "/metrics",
                    "/api/overview", "/api/queue?queue=jobs", "/api/stream?stream=log",
                ):  # fmt: skip
                    answer = await asyncio.wait_for(api.get(page), GUARD_S)
                    assert answer.status_code == 200, answer.text
                assert set((await asyncio.wait_for(site.broker.stats(), GUARD_S)).queues) == {"jobs"}
                assert "jobs" in (await asyncio.wait_for(site.broker.figures(), GUARD_S))[1]
                assert not any(one.done() for one in waiting)
            finally:
                goes_on.set()
                await asyncio.gather(*waiting)

    run(test)
