"""Tasks of one event loop: durable puts of 1,000 tasks in flight against awaiting one by one; what memory serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import qflow
from bench.measure import Row, Setup, Workload, at_least, by_side, interleave, micros, rates, ratio
from bench.timing import timed

CAPACITY = "1GiB"
TASKS = 1000
BODY = bytes(100)


def _tasks(broker: qflow.Broker) -> Any:
    """Return a broker for tasks. (Imported here: a commit of before, that is compared with, has none.)"""
    from qflow.aio import AsyncBroker

    return AsyncBroker(broker)


def in_flight(setup: Setup) -> Iterator[Row]:
    each, alone, chunks = setup.size(10, 1), setup.size(20, 5), setup.size(5, 2)
    with ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        broker = stack.enter_context(
            qflow.open(stack.enter_context(setup.scratch()) / "spool", capacity_bytes=CAPACITY)
        )
        broker.declare_queue("bench")
        queue = _tasks(broker).queue("bench")

        async def put(times: int) -> None:
            for _ in range(times):
                await queue.put(BODY)

        async def together() -> None:
            await asyncio.gather(*(put(each) for _ in range(TASKS)))

        def emptied(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], float]:
            """Return a side that does some work and purges the queue, which is not timed."""

            def side() -> float:
                start = perf_counter()
                loop.run(work())
                seconds = perf_counter() - start
                queue.queue.purge()
                return seconds

            return side

        many_s, alone_s = interleave(setup.few_rounds, chunks, emptied(together), emptied(lambda: put(alone)))
    many = rates(f"qflow.aio put, {TASKS:,} tasks", TASKS * each, many_s)
    one = rates("qflow.aio put, one by one", alone, alone_s)
    yield Row(
        name="asyncio: durable put, 100 B, 1,000 tasks in flight",
        figure=many,
        bound=at_least(60_000, "/s"),
        details=[one],
    )
    yield Row(
        name="asyncio: durable put, 100 B, 1,000 tasks in flight: rate over awaiting one by one",
        figure=ratio(many, one),
        bound=at_least(20),
        details=[many, one],
        notes=["one sync confirms all that were put meanwhile: the slower the disk syncs, the larger this is"],
    )


def in_memory(setup: Setup) -> Iterator[Row]:
    times, chunks = setup.size(5_000, 100), setup.size(11, 2)
    with ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        broker = stack.enter_context(
            qflow.open(stack.enter_context(setup.scratch()) / "spool", capacity_bytes=CAPACITY)
        )
        threads = broker.declare_queue("bench", durable=False)
        tasks = _tasks(broker).queue("bench")

        @timed
        def by_thread() -> None:
            for _ in range(times):
                threads.put(BODY)
                threads.get().ack()

        async def pass_through() -> None:
            for _ in range(times):
                await tasks.put(BODY)
                await (await tasks.get()).ack()

        @timed
        def by_task() -> None:
            loop.run(pass_through())

        measured = interleave(setup.few_rounds, chunks, by_task, by_thread)
    task, thread = by_side(micros, ("by a task", "by a thread"), times, measured)
    yield Row(
        name="asyncio: transient put+get+ack, 100 B: time over the same by a thread",
        figure=ratio(task, thread),
        details=[task, thread],
    )


WORKLOADS = [
    Workload(
        "asyncio-in-flight",
        "1,000 tasks each await the sync of their put of 100 B, ten times, against one task that awaits one by one",
        in_flight,
    ),
    Workload("asyncio-memory", "a task puts, gets and acks what never leaves memory, against a thread", in_memory),
]
