"""What a message costs beside those who wait: threads at a limit, and tasks in `get`, at a limit, or of a consumer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import qflow
import qflow.aio
from bench.growth import scaled
from bench.measure import Row, Setup, Workload

BODY = bytes(16)
AT_ONCE = 50
"""Puts in one turn of the loop."""


def waiters(setup: Setup) -> Iterator[Row]:
    threads = (1, 16, 64, 256) if not setup.quick else (1, 4)
    yield from scaled(
        setup, "a message of threads that put at a limit of 100, to one that gets", "producers", threads, _blocked
    )
    tasks = (10, 1_000, 20_000) if not setup.quick else (2, 10)
    yield from scaled(setup, "a message to one of the tasks that wait in get, 50 puts a turn", "tasks", tasks, _awaited)
    yield from scaled(setup, "the same with an asyncio.Queue", "tasks", tasks, _bare)
    yield from scaled(
        setup, "a message of tasks that put at a limit of 100, to one that gets", "tasks", tasks, _admitted
    )
    yield from scaled(setup, "a message to a consumer with so many tasks, 50 puts a turn", "tasks", tasks, _consumed)


def _blocked(setup: Setup, path: Path, size: int) -> list[float]:
    broker = qflow.open(path)
    queue = broker.declare_queue("q", durable=False, limit_messages=100)

    def produce() -> None:
        try:
            while True:
                queue.put(BODY)
        except qflow.BrokerClosed:
            pass

    threads = [threading.Thread(target=produce) for _ in range(size)]
    for thread in threads:
        thread.start()
    costs = []
    times = setup.size(20_000, 200)
    for _ in range(setup.few_rounds):
        start = perf_counter()
        for _ in range(times):
            queue.get().ack()
        costs.append((perf_counter() - start) / times)
    broker.close()
    for thread in threads:
        thread.join()
    return costs


async def _put(queue: qflow.aio.AsyncQueue | asyncio.Queue[bytes], times: int) -> None:
    for number in range(times):
        await queue.put(BODY)
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)


def _awaited(setup: Setup, path: Path, size: int) -> list[float]:
    async def measure() -> list[float]:
        async with await qflow.aio.open(path) as broker:
            queue = await broker.declare_queue("q", durable=False)
            costs = []
            for _ in range(setup.few_rounds):
                tasks = [asyncio.create_task(queue.get()) for _ in range(size)]
                await asyncio.sleep(0)
                start = perf_counter()
                await _put(queue, size)
                for delivery in await asyncio.gather(*tasks):
                    await delivery.ack()
                costs.append((perf_counter() - start) / size)
            return costs

    return asyncio.run(measure())


def _bare(setup: Setup, path: Path, size: int) -> list[float]:
    """What tasks and the loop cost alone: nothing is acked."""

    async def measure() -> list[float]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        costs = []
        for _ in range(setup.few_rounds):
            tasks = [asyncio.create_task(queue.get()) for _ in range(size)]
            await asyncio.sleep(0)
            start = perf_counter()
            await _put(queue, size)
            await asyncio.gather(*tasks)
            costs.append((perf_counter() - start) / size)
        return costs

    return asyncio.run(measure())


def _admitted(setup: Setup, path: Path, size: int) -> list[float]:
    async def measure() -> list[float]:
        async with await qflow.aio.open(path) as broker:
            queue = await broker.declare_queue("q", durable=False, limit_messages=100)

            async def produce() -> None:
                while True:
                    await queue.put(BODY)

            tasks = [asyncio.create_task(produce()) for _ in range(size)]
            costs = []
            times = setup.size(20_000, 200)
            for _ in range(setup.few_rounds):
                start = perf_counter()
                for _ in range(times):
                    await (await queue.get()).ack()
                costs.append((perf_counter() - start) / times)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return costs

    return asyncio.run(measure())


def _consumed(setup: Setup, path: Path, size: int) -> list[float]:
    async def measure() -> list[float]:
        async with await qflow.aio.open(path) as broker:
            queue = await broker.declare_queue("q", durable=False)
            times = setup.size(20_000, 200)
            costs = []

            async def take(_: qflow.aio.AsyncDelivery) -> None:
                pass

            async with queue.consume(take, concurrency=size):
                for _ in range(setup.few_rounds):
                    start = perf_counter()
                    await _put(queue, times)
                    while len(queue):
                        await asyncio.sleep(0)
                    costs.append((perf_counter() - start) / times)
            return costs

    return asyncio.run(measure())


WORKLOADS = [
    Workload("scale-waiters", "a message beside 1 to 256 producers at a limit, or up to 20,000 waiting tasks", waiters)
]
