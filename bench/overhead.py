"""What one message takes beyond its bytes, waiting or acquired, against what it is charged."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import qflow
from bench import children
from bench.measure import Row, Series, Setup, Workload, at_most
from bench.memory import BATCH, MIB, bodies, put_in_batches, put_one_by_one
from qflow.message import OVERHEAD_BYTES, encode_headers

HEADERS = {"kind": "flight"}
WAYS = (
    ("waiting-singles", "waiting, put one by one"),
    ("waiting-batches", "waiting, put in batches of 1,000"),
    ("waiting-headers", "waiting, with headers"),
    ("acquired-singles", "acquired with get"),
    ("acquired-batches", "acquired with get_many(1000)"),
)


# In the parent -----------------------------------------------------------------------------------------------------


def overhead(setup: Setup) -> Iterator[Row]:
    count = setup.size(50_000, BATCH)
    for size in (100, 1024):
        details = []
        for role, what in WAYS[: setup.size(len(WAYS), 1)]:
            with setup.scratch() as path:
                found = children.run("overhead", path, role, count, size)
            details += [
                Series(f"{what}, by tracemalloc", "B", [found["traced"]]),
                Series(f"{what}, by RssAnon", "B", [found["anonymous"]]),
            ]
        yield Row(
            name=f"memory over the body of a waiting message of {size:,} B",
            figure=Series("put one by one, by RssAnon", "B", details[1].values),
            bound=at_most(OVERHEAD_BYTES, "B"),
            details=details,
            notes=[
                f"the bound is what the engine charges, OVERHEAD_BYTES; {count:,} messages, each way in a process of "
                "its own; tracemalloc counts what was asked for, RssAnon what the allocator took for it"
            ],
        )


def held(setup: Setup) -> Iterator[Row]:
    count, capacity = setup.size(400_000, 5_000), setup.size(64, 1) * MIB
    bare = children.bare_interpreter_bytes()
    with setup.scratch() as path:
        found = children.run("hold", path, count, 100, capacity)
    yield Row(
        name="every 100 B message that fits in 64 MiB held unacked: RssAnon over a bare interpreter",
        figure=Series("RssAnon over a bare interpreter", "MiB", [(found["held"] - bare) / MIB]),
        details=[
            Series("with the same messages waiting", "MiB", [(found["waiting"] - bare) / MIB]),
            Series("deliveries held", "messages", [found["deliveries"]]),
        ],
        notes=["no bound is set; `Delivery` objects are the caller's, the queue's table of them is not"],
    )


WORKLOADS = [
    Workload("memory-held", "a consumer that takes every message it can get, one by one, and settles none", held),
    Workload("memory-overhead", "what one message takes beyond its bytes, against what it is charged", overhead),
]


# In a child --------------------------------------------------------------------------------------------------------


def _hold(path: str, count_text: str, size_text: str, capacity: str) -> None:
    with qflow.open(Path(path) / "spool", capacity_bytes=int(capacity)) as broker:
        queue = broker.declare_queue("bench", durable=False)
        put_one_by_one(queue, int(count_text), int(size_text))
        waiting = children.memory_now()[0]
        deliveries: list[qflow.Delivery] = []
        with suppress(qflow.QueueEmpty):
            while True:
                deliveries.append(queue.get(timeout_s=0))
        held_bytes = children.memory_now()[0]
        queue.ack_many(deliveries)
    children.report({"waiting": waiting, "held": held_bytes, "deliveries": len(deliveries)})


def _overhead(path: str, role: str, count_text: str, size_text: str) -> None:
    count, size = int(count_text), int(size_text)
    with qflow.open(Path(path) / "spool", capacity_bytes=2**30) as broker:
        anonymous = _grown(broker, role, count, size, lambda: children.memory_now()[0])
        gc.collect()
        tracemalloc.start()
        traced = _grown(broker, role, count, size, lambda: tracemalloc.get_traced_memory()[0])
    children.report({"anonymous": anonymous, "traced": traced})


def _grown(broker: qflow.Broker, role: str, count: int, size: int, measure: Callable[[], int]) -> float:
    """Return by how much memory grows for each message, less its bytes."""
    queue = broker.declare_queue(f"{role}-{id(measure)}", durable=False)
    held: list[Any] = [None] * count  # grown beforehand: the list is not the queue's
    before = measure()
    if role == "waiting-headers":
        for body in bodies(count, size):
            queue.put(body, headers=HEADERS)
        size += len(encode_headers(HEADERS))
    else:
        (put_in_batches if "batches" in role else put_one_by_one)(queue, count, size)
    if role == "acquired-singles":
        for position in range(count):
            held[position] = queue.get()
    elif role == "acquired-batches":
        for position in range(count // BATCH):
            held[position] = queue.get_many(BATCH)
    after = measure()
    settled: Sequence[Any] = [one for one in held if one is not None]
    for one in settled:
        one.ack()
    return (after - before) / count - size


ROLES: dict[str, Callable[..., None]] = {
    "hold": _hold,
    "overhead": _overhead,
}
