"""What tasks submit, and an end of the broker right behind it."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import PATIENCE_S, run
from qflow.queues.spiller import Spiller

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


@pytest.mark.parametrize("durable", [True, False])
def test_what_follows_what_was_submitted_goes_behind_it(spool: Path, durable: bool) -> None:
    """Though there is room by then, as a thread makes some meanwhile."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs", durable=durable, limit_messages=8)
            await queue.put_many([BODY] * 8)
            waiting: list[asyncio.Future[Any]] = [queue.submit(b"0")]
            queue.queue.get_many(8).ack(wait=True)
            waiting.append(queue.submit(b"1"))
            waiting += [asyncio.ensure_future(put) for put in (queue.put(b"2"), queue.put_many([b"3", b"4"]))]
            waiting.append(asyncio.ensure_future(queue.put(b"5", headers={"last": True})))
            await asyncio.gather(*waiting)
            assert (await queue.get_many(8)).bodies == [b"%d" % number for number in range(6)]

    run(scenario())


def test_what_was_submitted_is_in_order_where_memory_is_full(spool: Path) -> None:
    """Each waits for the disk to take something, or finds that others have made room."""

    async def scenario() -> None:
        async with qflow.aio.open(spool, capacity_bytes=20 * len(BODY)) as broker:
            queue = await broker.declare_queue("jobs", durable=False)
            puts = []
            for number in range(BURST):
                puts.append(queue.submit(b"%04d" % number + BODY))
                if number % 50 == 0:
                    await asyncio.sleep(0)
            assert await asyncio.gather(*puts) == list(range(BURST))
            numbers: list[int] = []
            while batch := await queue.get_many(BURST, timeout_s=0):
                numbers += [int(body[:4]) for body in batch.bodies]
                await batch.ack()
            assert numbers == list(range(BURST))

    run(scenario())


def test_what_is_cancelled_or_has_waited_long_enough_holds_nobody_up(spool: Path) -> None:
    """Those behind it go on, and once all have their room nothing is in the way of what follows."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs", durable=False, limit_messages=2)
            await queue.put_many([b"", b""])
            first, second, third = [queue.submit(b"%d" % number) for number in range(3)]
            with pytest.raises(qflow.QueueFull):
                await queue.submit(b"at once or never", timeout_s=0)
            with pytest.raises(qflow.QueueFull):
                await queue.put_nowait(b"the same")
            assert not any(one.done() for one in (first, second, third))
            second.cancel()
            for delivery in await queue.get_many(2):
                await delivery.ack()
            await asyncio.gather(first, third)
            batch = await queue.get_many(2)
            assert batch.bodies == [b"0", b"2"]
            await batch.ack()
            assert not isinstance(queue.submit(b"3"), asyncio.Task)

    run(scenario())


def test_what_has_waited_long_enough_for_its_turn_goes_by_itself(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it may need the room that it has found, so it keeps none for its turn."""
    find_room, begun, goes_on = Spiller.find_room, threading.Event(), threading.Event()

    def find_late(spiller: Spiller, missing: int) -> bool:
        if not begun.is_set():
            begun.set()
            goes_on.wait(PATIENCE_S)
        return find_room(spiller, missing)

    async def scenario() -> None:
        async with qflow.aio.open(spool, capacity_bytes=20 * len(BODY)) as broker:
            queue = await broker.declare_queue("jobs", durable=False)
            while not isinstance(last := queue.submit(BODY), asyncio.Task):
                pass
            await last
            monkeypatch.setattr(Spiller, "find_room", find_late)
            while not isinstance(first := queue.submit(BODY), asyncio.Task):
                pass
            await asyncio.to_thread(begun.wait)
            second = queue.submit(BODY, timeout_s=0)
            try:
                passed = await second
            finally:
                goes_on.set()
            assert passed < await first

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


class StruckLine(OrderedDict[Any, Any]):
    """A line of those that wait, where a handler strikes as soon as one has left."""

    strikes = True

    def pop(self, *arguments: Any) -> Any:
        left = super().pop(*arguments)
        self.strike()
        return left

    def __delitem__(self, turn: Any) -> None:
        super().__delitem__(turn)
        self.strike()

    def strike(self) -> None:
        if self.strikes:
            self.strikes = False
            raise Struck


def test_a_handler_that_strikes_as_one_leaves_the_line_leaves_nobody_waiting(spool: Path) -> None:
    """Those behind it go on when its task has ended."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs", durable=False, limit_messages=2)
            await queue.put_many([b"", b""])
            waiting = [queue.submit(b"%d" % number) for number in range(2)]
            for place, line in queue._homes.lines.items():
                queue._homes.lines[place] = StruckLine(line)
            for _ in range(2):
                await (await queue.get()).ack()
            with pytest.raises(Struck):
                await waiting[0]
            await waiting[1]
            assert (await queue.get_many(2)).bodies == [b"0", b"1"]

    run(scenario())


def test_a_handler_that_strikes_as_something_is_submitted_has_nothing_put(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task may have been made by then, and finds that it has no turn."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            queue = await broker.declare_queue("jobs", durable=False, limit_messages=1)
            await queue.put(b"")
            loop, made = asyncio.get_running_loop(), []
            create = loop.create_task

            def strike(*arguments: Any, **options: Any) -> None:
                made.append(create(*arguments, **options))
                raise Struck

            with monkeypatch.context() as patch:
                patch.setattr(loop, "create_task", strike)
                with pytest.raises(Struck):
                    queue.submit(b"struck")
            last = queue.submit(b"next")
            await asyncio.wait(made)
            assert made[0].cancelled()
            await (await queue.get()).ack()
            await last
            assert (await queue.get_many(2)).bodies == [b"next"]
            assert await broker.check() == []

    run(scenario())
