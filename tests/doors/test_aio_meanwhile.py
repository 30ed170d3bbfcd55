"""What happens while a thread does for a task what takes the disk, or before it comes to that."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run, until
from qflow.aio.broker import in_thread
from qflow.aio.loops import THREADS, Threads
from qflow.memory import waiting
from qflow.streams.history import History
from unit.clocks import LONG_S

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


def test_a_get_that_was_given_up_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread reads on, and its task has ended; asking for more would settle what the next task of its number got."""
    with qflow.open(tmp_path / "spool", door=False) as before:
        before.declare_stream("s", topics=["t"], partitions=2)
        for number in range(20):
            before.publish("t", b"x", key=str(number))
    read, may_read, reading = History.read, threading.Event(), threading.Event()

    def reads(history: History, *arguments: Any) -> Any:
        if not reading.is_set():  # the first of them
            reading.set()
            assert may_read.wait(LONG_S)
        return read(history, *arguments)

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool", door=False) as broker, AsyncExitStack() as stack:
            stack.callback(may_read.set)
            subscription = await stack.enter_async_context(broker.subscribe("s", start="earliest"))
            monkeypatch.setattr(History, "read", reads)
            given_up = asyncio.create_task(subscription.get())
            await until(reading.is_set)
            given_up.cancel()
            await asyncio.wait([given_up])
            delivery = await asyncio.create_task(subscription.get())  # of the other partition
            may_read.set()
            assert await broker.check() == []  # when the threads are done
            assert (await subscription.stats()).unsettled_messages == 1
            await delivery.nack()
            assert (await subscription.get()).offset == delivery.offset

    run(scenario())


def test_statistics_wait_for_no_sync(tmp_path: Path) -> None:
    """Those of a queue and of a stream, as those of a broker: all threads for the disk may wait for one."""

    async def scenario() -> None:
        may_end = threading.Event()
        async with qflow.aio.open(tmp_path / "spool", door=False) as broker, AsyncExitStack() as stack:
            stack.callback(may_end.set)
            jobs, log = await broker.declare_queue("jobs"), await broker.declare_stream("log", topics=["log"])
            await jobs.put(b"x")
            await broker.publish("log", b"x")
            waiting = [asyncio.create_task(in_thread(broker, may_end.wait)) for _ in range(THREADS)]
            assert (await asyncio.wait_for(jobs.stats(), LONG_S)).messages == 1
            assert (await asyncio.wait_for(log.stats(), LONG_S)).messages == 1
            assert not any(one.done() for one in waiting)
            may_end.set()
            await asyncio.gather(*waiting)

    run(scenario())


class Jobs(SimpleQueue[Any]):
    """Tells that a thread waits for a job."""

    def __init__(self) -> None:
        self.waits = threading.Event()

    def get(self, *arguments: Any) -> Any:
        self.waits.set()
        return super().get(*arguments)


def test_a_job_does_not_wait_for_the_one_before_while_there_may_be_another_thread() -> None:
    """The first thread waited before its job was there, and was taken for free while it was at work on that."""
    threads, second = Threads(), threading.Event()
    threads.jobs = jobs = Jobs()
    threads.start()
    assert jobs.waits.wait(LONG_S)
    outcome: list[bool] = []
    threads.put(lambda: outcome.append(second.wait(LONG_S)))
    threads.start()
    threads.put(second.set)
    for begun in list(threads.begun):
        begun.result(LONG_S)
    threads.put(list)
    threads.jobs.put(None)
    assert outcome == [True]


def test_a_loop_of_the_main_thread_publishes_and_consumes_without_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though memory is to be lent to the stream: each turn of the interpreter's lock holds up all tasks."""
    asked: list[object] = []

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool", door=False) as broker:
            await broker.declare_stream("s", topics=["t"])
            jobs = await broker.declare_queue("jobs")
            with monkeypatch.context() as watched:
                watched.setattr(waiting._shelter, "call", asked.append)
                await broker.publish("t", bytes(2**20))
                await broker.publish_many([("t", bytes(2**20))] * 4)
                jobs.consume(print)

    run(scenario())
    assert asked == []
