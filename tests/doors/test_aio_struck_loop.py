"""A handler of a signal that raises, as Ctrl-C does, in what a loop does for tasks; the program goes on in that loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from doors import event_loop
from doors.test_aio_closed_loop import forget
from faults.strikes import Strike
from thorough import TORTURE

Act = Callable[[qflow.aio.AsyncQueue], Awaitable[Any]]


@pytest.fixture
def tasks(spool: Path) -> Iterator[qflow.aio.AsyncBroker]:
    """A broker with a queue, whose maintenance is the test's."""
    with qflow.open(spool) as broker:
        inside.still(broker)
        broker.declare_queue("q")
        yield qflow.aio.AsyncBroker(broker)


def interrupt() -> None:
    raise KeyboardInterrupt


async def tended(tasks: qflow.aio.AsyncBroker, task: asyncio.Task[Any]) -> None:
    """Return when a task has ended; maintenance does meanwhile what it does each second."""

    def look() -> bool:
        inside.is_due(tasks.broker)
        inside.upkeep(tasks.broker).tick()
        tasks.broker.engine.log.look_after()
        return task.done()

    await event_loop.until(look)


def go_on_after_a_strike(tasks: qflow.aio.AsyncBroker, act: Act, at: int) -> tuple[str | None, bool]:
    """Strike one place of what a task has begun, and of what the loop does for it; then go on in the loop.

    Returns where it struck, and whether the task has ended as if nothing had.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(act(tasks.queue("q")))
    strike = Strike(at, interrupt)
    with suppress(KeyboardInterrupt):
        strike.run(lambda: loop.run_until_complete(asyncio.wait([task])))
    if strike.where is None or not strike.where.startswith(os.sep):  # else asyncio may have lost the task
        loop.run_until_complete(tended(tasks, task))
    loop.run_until_complete(tended(tasks, loop.create_task(tasks.queue("q").put(b"later"))))
    loop.close()
    if not task.done():
        forget([task])
        return strike.where, False
    return strike.where, not task.cancelled() and task.exception() is None


async def put(queue: qflow.aio.AsyncQueue) -> None:
    await queue.put(b"a")


async def get(queue: qflow.aio.AsyncQueue) -> None:
    queue.submit(b"a")
    delivery = await queue.get()
    await delivery.ack(wait=True)


@pytest.mark.parametrize(("act", "step"), [(put, 1), (get, 1 if TORTURE else 5)])
def test_what_the_loop_was_to_do_for_tasks_is_done_after_an_interrupt(
    tasks: qflow.aio.AsyncBroker, act: Act, step: int
) -> None:
    """A task that it has not struck ends, and so does what is begun later."""
    struck = unharmed = 0
    for at in count(0, step):
        where, well = go_on_after_a_strike(tasks, act, at)
        if where is None:
            break
        struck, unharmed = struck + 1, unharmed + well
        tasks.broker.queue("q").purge()
    assert 0 < unharmed < struck
    assert tasks.broker.check() == []
