"""What happens while a thread does for a task what takes the disk, or before it comes to that."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import qflow.aio
from doors.event_loop import run, until
from qflow.aio.broker import in_thread

MESSAGES = 200


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_purged_while_a_get_waits_for_a_thread_is_not_delivered(tmp_path: Path, durable: bool) -> None:
    """It was held, and settled a second time by the ack: counters and memory in use fell below zero.

    As many other messages, of another size, are charged what they take.
    """

    async def scenario() -> None:
        may_end = threading.Event()
        opening = qflow.aio.open(tmp_path / "spool", capacity_bytes="64KiB", door=False)
        async with opening as broker, AsyncExitStack() as stack:
            stack.callback(may_end.set)
            jobs = await broker.declare_queue("jobs", durable=durable)
            await jobs.put_many([bytes(1000)] * MESSAGES)
            assert await broker.check() == []  # and what is to be spilled is
            assert (await jobs.stats()).spilled_messages
            threads = [asyncio.create_task(in_thread(broker, may_end.wait)) for _ in range(2)]  # all there are
            getting = asyncio.create_task(jobs.get_many(MESSAGES, 0))
            await until(lambda: jobs.queue.stats().acquired_messages)
            taken = jobs.queue.stats().acquired_messages
            assert await asyncio.to_thread(jobs.queue.purge) == MESSAGES
            if durable:
                await jobs.put_many([b"behind"] * taken)
            may_end.set()
            batch = await getting
            assert batch.bodies == [b"behind"] * taken * durable
            assert await broker.check() == []
            await batch.ack(wait=True)
            await asyncio.gather(*threads)
            assert await broker.check() == []
            assert ((await jobs.stats()).messages, (await broker.stats()).resident_bytes) == (0, 0)

    run(scenario())
