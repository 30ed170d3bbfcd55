"""Which tasks are woken: as many as there is something for, in their order, and none of it is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from calls import count
from doors.event_loop import leave_nothing_behind, run, turns, until
from qflow.aio.loops import Waiter

Scenario = Callable[[qflow.aio.AsyncBroker], Awaitable[Any]]


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tasks were woken."""
    counts: Counter[str] = Counter()
    count(monkeypatch, counts, Waiter, "wake", "tasks")
    return counts


def on(path: Path, scenario: Scenario) -> None:
    """Run a scenario that leaves nothing behind."""

    async def whole() -> None:
        async with qflow.aio.open(path) as broker:
            await scenario(broker)
            await leave_nothing_behind(broker)

    run(whole())


def test_what_leaves_wakes_as_many_tasks_as_there_is_room_for(spool: Path, woken: Counter[str]) -> None:
    """2,000 wait at a limit of 10: nobody is woken above the mark, then two at a time, in their order."""

    async def scenario(broker: qflow.aio.AsyncBroker) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=10)
        await queue.put_many([b"old"] * 10)
        line = queue.queue.parts.admission.line
        putters = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(2_000)]
        await until(lambda: len(line) == 2_000)
        woken.clear()
        await (await queue.get()).ack()
        assert not woken["tasks"]
        await (await queue.get()).ack()
        assert woken["tasks"] == 2
        while woken["tasks"] < 2_000:
            await turns()
            assert sum(putter.done() for putter in putters) == woken["tasks"]
            await (await queue.get_many(2)).ack()
        await asyncio.gather(*putters)
        assert woken["tasks"] == 2_000
        assert [putter.result() for putter in putters] == list(range(10, 2_010))

    on(spool, scenario)


def test_a_task_that_was_admitted_and_is_cancelled_hands_its_place_on(spool: Path) -> None:
    """Cancelled before its turn in the loop came, its put did not happen; the next one's does."""

    async def scenario(broker: qflow.aio.AsyncBroker) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=2, resume_ratio=1)
        await queue.put_many([b"old"] * 2)
        line = queue.queue.parts.admission.line
        putters = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(6)]
        await until(lambda: len(line) == 6)
        await (await queue.get_many(2)).ack()
        assert len(line) == 4
        putters[0].cancel()
        putters[4].cancel()
        await turns()
        got = [delivery.body async for delivery in take(queue, 2)]
        await turns()
        got += [delivery.body async for delivery in take(queue, 2)]
        assert got == [b"1", b"2", b"3", b"5"]
        outcomes = await asyncio.gather(*putters, return_exceptions=True)
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [
            number in (0, 4) for number in range(6)
        ]

    on(spool, scenario)


def test_a_put_behind_tasks_that_were_admitted_does_not_pass_them(spool: Path) -> None:
    """They have their places, and have not put yet."""

    async def scenario(broker: qflow.aio.AsyncBroker) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=4, resume_ratio=0)
        await queue.put_many([b"old"] * 4)
        first = [queue.submit(b"1"), queue.submit(b"2")]
        await until(lambda: len(queue.queue.parts.admission.line) == 2)
        await (await queue.get_many(4)).ack()
        last = queue.submit(b"3")
        assert not first[0].done()
        await asyncio.gather(*first, last)
        assert [delivery.body async for delivery in take(queue, 3)] == [b"1", b"2", b"3"]

    on(spool, scenario)


def test_a_message_wakes_one_task_and_the_next_if_that_is_cancelled(spool: Path, woken: Counter[str]) -> None:
    """2,000 wait for messages."""

    async def scenario(broker: qflow.aio.AsyncBroker) -> None:
        queue = await broker.declare_queue("q", durable=False)
        getters = [asyncio.create_task(queue.get()) for _ in range(2_000)]
        await until(lambda: queue.queue.parts.gate.getters == 2_000)
        woken.clear()
        await queue.put(b"1")
        assert woken["tasks"] == 1
        getters[0].cancel()
        await turns()
        assert woken["tasks"] == 2
        assert getters[1].done()
        await (await getters[1]).ack()
        for number in range(2, 1_000):
            await queue.put(b"%d" % number)
            await turns()
            await (await getters[number]).ack()
        assert woken["tasks"] == 1_000
        for getter in getters:
            getter.cancel()
        await asyncio.gather(*getters, return_exceptions=True)
        assert not inside.left_behind(queue.queue)

    on(spool, scenario)


async def take(queue: qflow.aio.AsyncQueue, messages: int) -> Any:
    """Yield so many messages, settled."""
    for _ in range(messages):
        async with await queue.get() as delivery:
            yield delivery
