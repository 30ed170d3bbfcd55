"""What a step costs at three or four sizes of what lies beside it: queues, waiters, what is held, delayed or expired.

Also acks in random order, `check()`, and the memory that a large body takes, at sizes of their own.

A row is read as `growth` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from os import urandom
from pathlib import Path
from random import Random
from time import perf_counter, process_time, sleep

import qflow
from bench import children, scale_waiters
from bench.growth import grown, scaled
from bench.measure import Row, Setup, Workload
from bench.sampler import Sampler
from bench.timing import timed

BODY = bytes(16)
BATCH = 1000
MIB = 2**20
CAPACITY = "1GiB"
DELAY_S = 3600
TOPIC = "plant/7/power"


# Queues ----------------------------------------------------------------------------------------------------------


def queues(setup: Setup) -> Iterator[Row]:
    sizes = (10, 100, 1_000, 10_000) if not setup.quick else (2, 4, 8)
    yield from scaled(setup, "transient put, 16 B, to one queue after the other", "queues", sizes, _put_round)
    many = (1_000, 10_000, 100_000) if not setup.quick else (20, 40)
    yield from scaled(setup, "declare_queue(), not durable, in a thread", "queues", many, _declare_in_thread)
    yield from scaled(setup, "declare_queue(), not durable, in the main thread", "queues", many, _declare)
    yield from scaled(setup, "a second of a broker that nobody uses, on the processor", "queues", sizes, _idle)


def _declared(stack: ExitStack, path: Path, size: int) -> list[qflow.Queue[int]]:
    broker = stack.enter_context(qflow.open(path))
    found = [broker.declare_queue(f"q{number}", durable=False) for number in range(size)]
    for queue in found:
        queue.put(BODY)
    return found


def _declare(setup: Setup, path: Path, size: int) -> list[float]:
    """Each cost is that of a tenth of them, one after the other."""
    costs = []
    with qflow.open(path) as broker:
        for tenth in range(10):
            start = perf_counter()
            for number in range(size // 10):
                broker.declare_queue(f"q{tenth}-{number}", durable=False)
            costs.append((perf_counter() - start) / (size // 10))
    return costs


def _declare_in_thread(setup: Setup, path: Path, size: int) -> list[float]:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_declare, setup, path, size).result()


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


# Messages --------------------------------------------------------------------------------------------------------


def messages(setup: Setup) -> Iterator[Row]:
    sizes = (1_000, 10_000, 100_000, 1_000_000) if not setup.quick else (10, 100)
    yield from scaled(setup, "get with extended leases", "of them", sizes[: max(2, len(sizes) - 1)], _leased)
    yield from scaled(setup, "stats() of a queue whose messages are held in batches of ten", "held", sizes, _stats)
    yield from scaled(setup, "the first get after an opening", "delayed messages", sizes, _reopened)
    yield from scaled(setup, "a get that meets expired messages behind one that stays", "of them", sizes, _expired)


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
        costs = [timed(queue.stats)() for _ in range(setup.few_rounds)]
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


# Acks in random order --------------------------------------------------------------------------------------------


def acks(setup: Setup) -> Iterator[Row]:
    sizes = (10_000, 100_000, 500_000) if not setup.quick else (100, 400)
    found = []
    for size in sizes:
        with setup.scratch() as path:
            found.append(_scattered(setup, path / "spool", size))
    ack, longest, file = zip(*found, strict=True)
    beside = "durable messages, half of them acked in random order"
    yield grown("an ack until it is synced, on the clock", beside, sizes, "µs", ack)
    yield grown("the longest durable put into another queue meanwhile", beside, sizes, "ms", longest)
    yield grown("the log's file over what it needs then", beside, sizes, "x", file)


def _scattered(setup: Setup, path: Path, size: int) -> tuple[list[float], list[float], list[float]]:
    """Return what an ack takes, the longest put beside them, and the log's file over what a compaction leaves."""
    order = Random(size)
    ack, longest, file = [], [], []
    for number in range(min(3, setup.few_rounds)):
        with qflow.open(path.with_name(f"spool-{number}"), capacity_bytes=CAPACITY) as broker:
            queue, other = broker.declare_queues(["q", "other"])
            _fill(queue, size)
            held = [queue.get() for _ in range(size)]
            scattered = order.sample(held, size // 2)
            start = perf_counter()
            with calling(other.put) as puts:
                for delivery in scattered:
                    delivery.ack()
                queue.get_many(1, 0).ack(wait=True)
                broker.engine.log.drain()
            ack.append((perf_counter() - start) / len(scattered) * 1e6)
            longest.append(max(puts) * 1e3)
            compacted = broker.compact()
            file.append(compacted.bytes_before / compacted.bytes_after)
    return ack, longest, file


def _fill(queue: qflow.Queue[int], size: int) -> None:
    for start in range(0, size, BATCH):
        queue.put_many([BODY] * min(BATCH, size - start))


@contextmanager
def calling(put: Callable[[bytes], object], pace_s: float = 0.0) -> Iterator[list[float]]:
    """Put one message after the other in a thread, with a pause; give the list of what each takes, in seconds."""
    taken: list[float] = []
    ended = threading.Event()

    def work() -> None:
        while not taken or not ended.is_set():
            start = perf_counter()
            put(BODY)
            taken.append(perf_counter() - start)
            ended.wait(pace_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join()


# Memory ----------------------------------------------------------------------------------------------------------


def checks(setup: Setup) -> Iterator[Row]:
    sizes = (10_000, 100_000, 400_000) if not setup.quick else (100, 1_000)
    found = [_in_child(setup, "checked", size) for size in sizes]
    beside = "durable messages, half of them held one by one"
    for figure, unit in (("check()", "ms"), ("the longest put while it runs", "ms"), ("memory it takes", "MiB")):
        yield grown(figure, beside, sizes, unit, [one[figure] for one in found])


def bodies(setup: Setup) -> Iterator[Row]:
    sizes = (4, 16, 64) if not setup.quick else (1, 2)
    found = [_in_child(setup, "large", size * MIB) for size in sizes]
    for call in ("put", "get"):
        step = f"peak RssAnon in the {call} of a durable body through 64 MiB, over the body"
        yield grown(step, "MiB", sizes, "x", [one[call] for one in found])


def _in_child(setup: Setup, role: str, size: int) -> dict[str, list[float]]:
    """Return each figure in some rounds, each in a process of its own."""
    rounds = []
    for _ in range(min(3, setup.few_rounds)):
        with setup.scratch() as path:
            rounds.append(children.run(role, path / "spool", size))
    return {figure: [one[figure] for one in rounds] for figure in rounds[0]}


def _checked(path: str, size_text: str) -> None:
    size = int(size_text)
    with qflow.open(path, capacity_bytes=CAPACITY) as broker:
        queue, other = broker.declare_queues(["q", "other"])
        _fill(queue, size)
        held = [queue.get() for _ in range(size // 2)]
        before, _ = children.memory_now()
        watched = Sampler(lambda: 0)
        with calling(other.put) as puts, watched.running():
            start = perf_counter()
            problems = broker.check()
            seconds = perf_counter() - start
        if problems:
            raise AssertionError(problems)
        peak = watched.curves()["peak_anonymous"]
        children.report(
            {
                "check()": seconds * 1e3,
                "the longest put while it runs": max(puts) * 1e3,
                "memory it takes": max(peak - before, 2**12) / MIB,
            }
        )
        del held


def _large(path: str, size_text: str) -> None:
    size = int(size_text)
    with qflow.open(path) as broker:
        queue = broker.declare_queue("q", max_message_bytes=size)
        before, _ = children.memory_now()
        body = urandom(size)
        putting, getting = Sampler(lambda: 0), Sampler(lambda: 0)
        with putting.running():
            queue.put(body)
        del body
        with getting.running():
            queue.get().ack(wait=True)
        peaks = {"put": putting, "get": getting}
        children.report({call: (one.curves()["peak_anonymous"] - before) / size for call, one in peaks.items()})


# Publishing ------------------------------------------------------------------------------------------------------


def publishing(setup: Setup) -> Iterator[Row]:
    sizes = (10, 100, 1_000) if not setup.quick else (2, 4)
    yield from scaled(setup, "publish, 16 B, for each durable queue bound to the topic", "queues", sizes, _published)


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
    Workload("scale-queues", "a put, a declaration and an idle second beside 10 to 100,000 queues", queues),
    *scale_waiters.WORKLOADS,
    Workload("scale-messages", "gets and statistics beside up to a million messages that are not for them", messages),
    Workload("scale-acks", "acks in random order of half of up to 500,000 messages: time, file, puts beside", acks),
    Workload("scale-check", "`check()` over 10,000 to 400,000 messages: time, memory, and puts beside it", checks),
    Workload("scale-bodies", "memory in the put and the get of a durable body of 4 to 64 MiB", bodies),
    Workload("scale-publish", "a publish, for each of 10 to 1,000 durable queues", publishing),
]
ROLES: dict[str, Callable[..., None]] = {"checked": _checked, "large": _large}
