"""What tasks submit, and an end of the broker right behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run

BODY = bytes(2000)
BURST = 800
"""So many of those take more memory than a queue has borrowed for them."""


@pytest.mark.parametrize("options", [{}, {"priority": 1}, {"delay_s": 3600}, {"durable": False}])
def test_what_is_submitted_is_on_its_way_though_memory_must_be_borrowed(spool: Path, options: dict[str, Any]) -> None:
    """Where there is room it takes no task, which the end of the broker would be before."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs", priorities=2)
            futures = [queue.submit(BODY, **options) for _ in range(BURST)]
            assert not any(isinstance(future, asyncio.Task) for future in futures)
        sequences = [future.result() for future in futures]
        assert sequences == list(range(sequences[0], sequences[0] + BURST))

    run(scenario())
    with qflow.open(spool) as broker:
        assert len(broker.queue("jobs")) == (0 if options.get("durable") is False else BURST)
        assert broker.check() == []


def test_what_is_submitted_to_a_queue_that_is_not_durable_is_there_at_once(spool: Path) -> None:
    """Also a burst that its memory must be borrowed for."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("passing", durable=False)
            futures = [queue.submit(BODY) for _ in range(BURST)]
            assert [future.result() for future in futures] == list(range(BURST))
            assert len(queue) == BURST
            assert await broker.check() == []

    run(scenario())


def test_what_is_submitted_at_a_limit_waits_behind_who_waits_there(spool: Path) -> None:
    """It is a task, and passes nobody; the end of the broker refuses it."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs", limit_messages=1)
            first, *waiting = [queue.submit(b"%d" % number) for number in range(3)]
            assert await first == 0
            assert all(isinstance(future, asyncio.Task) for future in waiting)
            await (await queue.get()).ack(wait=True)
            assert await waiting[0] == 1
        with pytest.raises(qflow.BrokerClosed):
            await waiting[1]

    run(scenario())


class Struck(Exception):
    """What a signal handler raises."""


def test_a_handler_that_strikes_where_a_commit_is_asked_for_leaves_nobody_waiting(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next put of the loop has its commit; the one that was struck is there."""

    def strike(*_: object, **__: object) -> None:
        raise Struck

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs")
            with monkeypatch.context() as patch:
                patch.setattr(asyncio.get_running_loop(), "call_soon", strike)
                with pytest.raises(Struck):
                    await queue.put(b"struck")
            await queue.put(b"next")
            assert (await queue.get_many(2)).bodies == [b"struck", b"next"]

    run(scenario())
