"""How much memory a process takes whose messages, deliveries, topics or gaps have an unusual shape.

Whole processes, sampled while they work. Figures are *RssAnon* over that of a bare interpreter, as in `bench.memory`:
what is charged may be the capacity, and all that is not charged must find room in `ALLOWED`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import qflow
from bench import children, sampler
from bench.engines.qflow_queues import open_broker
from bench.measure import Row, Series, Setup, Workload, at_most
from bench.memory import ALLOWED, BATCH, MIB, put_in_batches

TOPIC_CHARACTERS = 2_000


# In the parent -----------------------------------------------------------------------------------------------------


def _row(setup: Setup, role: str, what: str, count: int, capacity: int, note: str) -> Row:
    bare = children.bare_interpreter_bytes()
    with setup.scratch() as path:
        found = children.run(role, path, count, capacity)
    return Row(
        name=f"{what}: peak RssAnon over a bare interpreter",
        figure=Series("peak RssAnon over a bare interpreter", "MiB", [(found["peak"] - bare) / MIB]),
        bound=at_most((capacity + ALLOWED) / MIB, "MiB"),
        details=[Series("peak charged", "MiB", [found["charged"] / MIB])],
        notes=[f"{note}; {found['what']}"],
    )


def returned(setup: Setup) -> Iterator[Row]:
    count, capacity = setup.size(629_145, 10_000), setup.size(64, 1) * MIB
    note = f"{count:,} x 20 B taken in batches of 1,000; of each, every other message is given back, the rest acked"
    yield _row(setup, "returned", "every other small message given back", count, capacity, note)


def held(setup: Setup) -> Iterator[Row]:
    count, capacity = setup.size(372_827, 5_000), setup.size(64, 1) * MIB
    note = f"{count:,} x 100 B, taken one by one and held, until memory has no room for another"
    yield _row(setup, "held", "deliveries taken one by one and held", count, capacity, note)


def gaps(setup: Setup) -> Iterator[Row]:
    count, capacity = setup.size(3_000_000, 50_000), setup.size(64, 2) * MIB
    note = (
        f"one unacked message, {count:,} that were not logged and are settled, and one more; reopened, and both taken"
    )
    yield _row(setup, "gaps", "a wide range of settled messages", count, capacity, note)


def topics(setup: Setup) -> Iterator[Row]:
    count, capacity = setup.size(100_000, 2_000), setup.size(16, 1) * MIB
    note = f"{count:,} topics of {TOPIC_CHARACTERS:,} characters, published, and held by a subscriber as far as it may"
    yield _row(setup, "topics", "long topics", count, capacity, note)


WORKLOADS = [
    Workload("memory-returned", "every other one of many small messages given back", returned),
    Workload("memory-singles-held", "deliveries that are taken one by one and held", held),
    Workload("memory-gaps", "one unacked message and millions of settled ones behind it, reopened", gaps),
    Workload("memory-topics", "topics of 2,000 characters, published and held", topics),
]


# In a child --------------------------------------------------------------------------------------------------------

Work = Callable[[str, int, int, list[int]], str]


def _measured(work: Work) -> Callable[[str, str, str], None]:
    def run(path: str, count: str, capacity: str) -> None:
        charged = [0]
        watched = sampler.Sampler(lambda: 0)
        with watched.running():
            what = work(str(Path(path) / "spool"), int(count), int(capacity), charged)
        found = watched.curves()
        # What is allocated and freed within one call of C no sample sees; the kernel's own peak has mapped files in it.
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - found["peak_file"]
        children.report({"peak": max(found["peak_anonymous"], whole), "charged": max(charged), "what": what})

    return run


def _opened(path: str, capacity: int) -> Any:
    return open_broker(Path(path), spill="segments", capacity_bytes=capacity)


def _returned(path: str, count: int, capacity: int, charged: list[int]) -> str:
    with _opened(path, capacity) as broker:
        queue = broker.declare_queue("bench", durable=False)
        put_in_batches(queue, count, 20)
        batches = []
        while batch := queue.get_many(BATCH, timeout_s=0):
            batches.append(batch)
        while batches:
            for index, delivery in enumerate(batches.pop()):
                if index % 2:
                    delivery.nack()
                else:
                    delivery.ack()
            charged.append(broker.stats().resident_bytes)
        left = 0
        while batch := queue.get_many(BATCH, timeout_s=0):
            left += len(batch)
            batch.ack()
    return f"{left:,} came again"


def _held(path: str, count: int, capacity: int, charged: list[int]) -> str:
    with _opened(path, capacity) as broker:
        queue = broker.declare_queue("bench", durable=False)
        put_in_batches(queue, count, 100)
        deliveries = []
        try:
            for _ in range(count):
                deliveries.append(queue.get(0))
        except qflow.QueueEmpty:
            charged.append(broker.stats().resident_bytes)
    return f"{len(deliveries):,} were held"


def _gaps(path: str, count: int, capacity: int, charged: list[int]) -> str:
    with _opened(path, capacity) as broker:
        queue = broker.declare_queue("bench")
        queue.put(b"first")
        unacked = queue.get()
        for _ in range(0, count, 10_000):
            queue.put_many([b""] * 10_000, durable=False)
            queue.get_many(10_000).ack()
        queue.put(b"last")
        assert unacked.body == b"first"
    with _opened(path, capacity) as broker:
        queue = broker.declare_queue("bench")
        found = [queue.get(0).body, queue.get(0).body]
        charged.append(broker.stats().resident_bytes)
    return f"{found!r} were found"


def _topics(path: str, count: int, capacity: int, charged: list[int]) -> str:
    with _opened(path, capacity) as broker:
        broker.declare_stream("bench", topics=["#"])
        subscription = broker.subscribe("bench", name="reader")
        for first in range(0, count, 100):
            broker.publish_many(
                [(f"{number}/".ljust(TOPIC_CHARACTERS, "t"), b"") for number in range(first, first + 100)]
            )
        batches = []
        try:
            while batch := subscription.get_many(BATCH, timeout_s=0):
                batches.append(batch)
        except qflow.TooManyUnsettled:
            charged.append(broker.stats().resident_bytes)
    return f"{sum(map(len, batches)):,} were held"


ROLES: dict[str, Callable[..., None]] = {
    "returned": _measured(_returned),
    "held": _measured(_held),
    "gaps": _measured(_gaps),
    "topics": _measured(_topics),
}
