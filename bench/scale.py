"""What a step costs at three or four sizes of what lies beside it: queues, waiters, what is held, delayed or expired.

A row's figure is the cost at the largest size over that at the smallest; the notes have the exponent of the growth, the
slope of the costs over the sizes where both are logarithms: 0 is flat, 1 in proportion. Sizes are measured one after
the other, so a shared machine shows in the ratio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import log
from pathlib import Path
from time import perf_counter, process_time, sleep

import qflow
import qflow.aio
from bench.measure import Row, Series, Setup, Workload, ratio

BODY = bytes(16)
CAPACITY = "1GiB"
DELAY_S = 3600
TOPIC = "plant/7/power"
Sizes = tuple[int, ...]
Costs = Callable[[Setup, Path, int], list[float]]
"""Given a size: seconds of one step, in each round."""


def _scaled(setup: Setup, step: str, beside: str, sizes: Sizes, costs: Costs) -> Iterator[Row]:
    """Measure a step at each size."""
    series = []
    for size in sizes:
        with setup.scratch() as path:
            micros = [seconds * 1e6 for seconds in costs(setup, path / "spool", size)]
        series.append(Series(f"{step}, {size:,} {beside}", "µs", micros))
    growth = _slope([log(size) for size in sizes], [log(one.median) for one in series])
    yield Row(
        name=f"{step}: with {sizes[-1]:,} {beside} over {sizes[0]:,}",
        figure=ratio(series[-1], series[0]),
        details=series,
        notes=[f"grows with the power {growth:.2f} of the number"],
    )


def _slope(xs: list[float], ys: list[float]) -> float:
    """Return the slope of the line of least squares."""
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - middle_x) ** 2 for x in xs)


# Queues ----------------------------------------------------------------------------------------------------------


def queues(setup: Setup) -> Iterator[Row]:
    sizes = (10, 100, 1_000, 10_000) if not setup.quick else (2, 4, 8)
    yield from _scaled(setup, "transient put, 16 B, to one queue after the other", "queues", sizes, _put_round)
    yield from _scaled(setup, "a second of a broker that nobody uses, on the processor", "queues", sizes, _idle)


def _declared(stack: ExitStack, path: Path, size: int) -> list[qflow.Queue[int]]:
    broker = stack.enter_context(qflow.open(path))
    found = [broker.declare_queue(f"q{number}", durable=False) for number in range(size)]
    for queue in found:
        queue.put(BODY)
    return found


def _put_round(setup: Setup, path: Path, size: int) -> list[float]:
    with ExitStack() as stack:
        found = _declared(stack, path, size)
        times = max(1, setup.size(20_000, 100) // size)
        costs = []
        for _ in range(setup.few_rounds):
            start = perf_counter()
            for _ in range(times):
                for queue in found:
                    queue.put(BODY)
            costs.append((perf_counter() - start) / (times * size))
        return costs


def _idle(setup: Setup, path: Path, size: int) -> list[float]:
    with ExitStack() as stack:
        _declared(stack, path, size)
        costs = []
        for number in range(setup.few_rounds + 1):
            start, used = perf_counter(), process_time()
            sleep(0.1 if setup.quick else 3)
            if number:  # what was new to maintenance is known by now
                costs.append((process_time() - used) / (perf_counter() - start))
        return costs


# Waiters ---------------------------------------------------------------------------------------------------------


def waiters(setup: Setup) -> Iterator[Row]:
    threads = (1, 16, 64, 256) if not setup.quick else (1, 4)
    yield from _scaled(
        setup, "a message of threads that put at a limit of 100, to one that gets", "producers", threads, _blocked
    )
    tasks = (10, 1_000, 20_000) if not setup.quick else (2, 10)
    yield from _scaled(
        setup, "a message to one of the tasks that wait in get, 50 puts a turn", "tasks", tasks, _awaited
    )


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


def _awaited(setup: Setup, path: Path, size: int) -> list[float]:
    at_once = 50

    async def measure() -> list[float]:
        async with await qflow.aio.open(path) as broker:
            queue = await broker.declare_queue("q", durable=False)
            costs = []
            for _ in range(setup.few_rounds):
                tasks = [asyncio.create_task(queue.get()) for _ in range(size)]
                await asyncio.sleep(0)
                start = perf_counter()
                for number in range(size):
                    await queue.put(BODY)
                    if number % at_once == 0:
                        await asyncio.sleep(0)
                for delivery in await asyncio.gather(*tasks):
                    await delivery.ack()
                costs.append((perf_counter() - start) / size)
            return costs

    return asyncio.run(measure())


# Messages --------------------------------------------------------------------------------------------------------


def messages(setup: Setup) -> Iterator[Row]:
    sizes = (1_000, 10_000, 100_000, 1_000_000) if not setup.quick else (10, 100)
    yield from _scaled(setup, "get with extended leases", "of them", sizes[: max(2, len(sizes) - 1)], _leased)
    yield from _scaled(setup, "stats() of a queue whose messages are held in batches of ten", "held", sizes, _stats)
    yield from _scaled(setup, "the first get after an opening", "delayed messages", sizes, _reopened)
    yield from _scaled(setup, "a get that meets expired messages behind one that stays", "of them", sizes, _expired)


def _leased(setup: Setup, path: Path, size: int) -> list[float]:
    with qflow.open(path, capacity_bytes=CAPACITY) as broker:
        queue = broker.declare_queue("q", durable=False, ack_timeout_s=0.2)
        queue.put_many([BODY] * size)
        for _ in range(size):
            queue.get().extend(DELAY_S)
        sleep(0.3)
        times = setup.size(1_000, 10)
        costs = []
        for _ in range(setup.few_rounds):
            queue.put_many([BODY] * times)
            start = perf_counter()
            held = [queue.get() for _ in range(times)]
            costs.append((perf_counter() - start) / times)
            del held
        return costs


def _stats(setup: Setup, path: Path, size: int) -> list[float]:
    with qflow.open(path, capacity_bytes=CAPACITY) as broker:
        queue = broker.declare_queue("q", durable=False)
        queue.put_many([BODY] * size)
        held = [queue.get_many(10) for _ in range(size // 10)]
        costs = []
        for _ in range(setup.few_rounds):
            start = perf_counter()
            queue.stats()
            costs.append(perf_counter() - start)
        assert held
        return costs


def _reopened(setup: Setup, path: Path, size: int) -> list[float]:
    with qflow.open(path, capacity_bytes=CAPACITY) as broker:
        queue = broker.declare_queue("q")
        for _ in range(max(1, size // 10_000)):
            queue.put_many([BODY] * min(size, 10_000), delay_s=DELAY_S)
        queue.put_many([BODY] * (setup.few_rounds + 1))
    costs = []
    for _ in range(setup.few_rounds):
        with qflow.open(path, capacity_bytes=CAPACITY) as broker:
            queue = broker.queue("q")
            start = perf_counter()
            queue.get(0).ack()
            costs.append(perf_counter() - start)
    return costs


def _expired(setup: Setup, path: Path, size: int) -> list[float]:
    costs = []
    for number in range(setup.few_rounds):
        with qflow.open(path.with_name(f"spool-{number}"), capacity_bytes=CAPACITY) as broker:
            queue = broker.declare_queue("q", durable=False)
            queue.put(BODY)
            queue.put_many([BODY] * size, ttl_s=0.001)
            queue.put(BODY)
            queue.get()
            start = perf_counter()
            queue.get()
            costs.append(perf_counter() - start)
    return costs


# Publishing ------------------------------------------------------------------------------------------------------


def publishing(setup: Setup) -> Iterator[Row]:
    sizes = (10, 100, 1_000) if not setup.quick else (2, 4)
    yield from _scaled(setup, "publish, 16 B, for each durable queue bound to the topic", "queues", sizes, _published)


def _published(setup: Setup, path: Path, size: int) -> list[float]:
    with qflow.open(path) as broker:
        for queue in broker.declare_queues([f"q{number}" for number in range(size)]):
            broker.bind(queue, "plant/+/power")
        times = setup.size(20, 2)
        costs = []
        for _ in range(setup.few_rounds):
            start = perf_counter()
            for _ in range(times):
                broker.publish(TOPIC, BODY)
            costs.append((perf_counter() - start) / (times * size))
        return costs


WORKLOADS = [
    Workload("scale-queues", "a put, and an idle second, beside 10 to 10,000 queues", queues),
    Workload("scale-waiters", "a message beside 1 to 256 producers at a limit, or up to 20,000 waiting tasks", waiters),
    Workload("scale-messages", "gets and statistics beside up to a million messages that are not for them", messages),
    Workload("scale-publish", "a publish, for each of 10 to 1,000 durable queues", publishing),
]
