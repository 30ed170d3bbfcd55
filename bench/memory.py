"""How much memory a backlog takes: whole processes with a backlog far over the capacity, and the cost of one message.

Figures are *RssAnon* over that of a bare interpreter. Pages of the mapped log are RssFile: the kernel takes them back
when it needs them; their peak is printed beside.
"""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import qflow
from bench import children
from bench.measure import Curve, Row, Series, Setup, Workload, at_most
from qflow.message import OVERHEAD_BYTES, encode_headers

ALLOWED = 48 * 2**20
SAMPLE_S = 0.01
BATCH = 1000
MIB = 2**20
HEADERS = {"kind": "flight"}


# In the parent -----------------------------------------------------------------------------------------------------


def batches(setup: Setup) -> Iterator[Row]:
    name = "1 GiB backlog of 1 KiB messages, put in batches: peak RssAnon over a bare interpreter"
    yield _backlog(setup, name, "fill-in-batches", setup.size(2**20, 8_000), 1024)


def singles(setup: Setup) -> Iterator[Row]:
    name = "1,000,000 x 100 B put one by one: peak RssAnon over a bare interpreter"
    yield _backlog(setup, name, "fill-one-by-one", setup.size(1_000_000, 40_000), 100)


def _backlog(setup: Setup, name: str, role: str, count: int, size: int) -> Row:
    setup.need_disk(count * (4096 * -(-size // 4096) + 256))
    bare = children.bare_interpreter_bytes()
    capacity = setup.size(64, 4) * MIB
    with setup.scratch() as path:
        found = children.run(role, path, count, size, capacity)
    anonymous = [value - bare for value in found["anonymous"]]
    label = f"{count:,} x {size:,} B, {'batches' if role == 'fill-in-batches' else 'one by one'}"
    setup.curves.append(
        Curve(
            name=label,
            seconds=found["seconds"],
            anonymous_bytes=anonymous,
            backlog_bytes=found["backlog"],
            bound_bytes=capacity + ALLOWED,
        )
    )
    return Row(
        name=name,
        figure=Series("peak RssAnon over a bare interpreter", "MiB", [max(anonymous) / MIB]),
        bound=at_most((capacity + ALLOWED) / MIB, "MiB"),
        details=[
            Series("peak RssAnon", "MiB", [max(found["anonymous"]) / MIB]),
            Series("RssAnon of a bare interpreter", "MiB", [bare / MIB]),
            Series("RssAnon over it after the import and open", "MiB", [anonymous[0] / MIB]),
            Series("peak RssFile", "MiB", [max(found["file"]) / MIB]),
            Series("fill", "/s", [count / found["fill_s"]]),
            Series("drain", "/s", [count / found["drain_s"]]),
        ],
        notes=[
            f"{label}: {count * size / MIB:,.0f} MiB of bodies through {capacity / MIB:.0f} MiB, filled, then drained; "
            f"sampled {len(anonymous):,} times"
        ],
    )


def overhead(setup: Setup) -> Iterator[Row]:
    count = setup.size(50_000, 10_000)
    for size in (100, 1024):
        details = []
        for role, what in (
            ("waiting-singles", "waiting, put one by one"),
            ("waiting-batches", "waiting, put in batches of 1,000"),
            ("waiting-headers", "waiting, with headers"),
            ("acquired-singles", "acquired with get"),
            ("acquired-batches", "acquired with get_many(1000)"),
        ):
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
    count, capacity = setup.size(400_000, 30_000), setup.size(64, 4) * MIB
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
    Workload(
        "memory-batches", "a process with a backlog of 16 times its capacity, put and taken 1,000 at a time", batches
    ),
    Workload("memory-singles", "a process with a million small messages, put and taken one by one", singles),
    Workload("memory-held", "a consumer that takes every message it can get, one by one, and settles none", held),
    Workload("memory-overhead", "what one message takes beyond its bytes, against what it is charged", overhead),
]


# In a child --------------------------------------------------------------------------------------------------------


class _Sampler:
    """Notes the memory of this process again and again while it works."""

    def __init__(self, backlog: Callable[[], int]) -> None:
        self._backlog = backlog
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._start = perf_counter()
        self.samples: list[tuple[float, int, int, int]] = []

    def take(self) -> None:
        self.samples.append((perf_counter() - self._start, *children.memory_now(), self._backlog()))

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.take()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.take()
        self._thread.start()
        yield
        self._stop.set()
        self._thread.join()
        self.take()


def _fill_and_drain(one_by_one: bool, path: str, count_text: str, size_text: str, capacity: str) -> None:
    count, size = int(count_text), int(size_text)
    with qflow.open(Path(path) / "spool", capacity_bytes=int(capacity)) as broker:
        queue = broker.declare_queue("bench", durable=False)
        sampler = _Sampler(lambda: len(queue) * size)
        with sampler.running():
            start = perf_counter()
            (_put_one_by_one if one_by_one else _put_in_batches)(queue, count, size)
            filled = perf_counter()
            (_take_one_by_one if one_by_one else _take_in_batches)(queue, count)
            drained = perf_counter()
    seconds, anonymous, file, backlog = zip(*sampler.samples, strict=True)
    children.report(
        {
            "seconds": seconds,
            "anonymous": anonymous,
            "file": file,
            "backlog": backlog,
            "fill_s": filled - start,
            "drain_s": drained - filled,
        }
    )


def _bodies(count: int, size: int) -> Iterator[bytes]:
    """Make bodies that are objects of their own, as a producer's are."""
    for number in range(count):
        yield number.to_bytes(size, "big")


def _put_one_by_one(queue: qflow.Queue, count: int, size: int) -> None:
    for body in _bodies(count, size):
        queue.put(body)


def _put_in_batches(queue: qflow.Queue, count: int, size: int) -> None:
    for first in range(0, count, BATCH):
        queue.put_many(_bodies(min(BATCH, count - first), size))


def _take_one_by_one(queue: qflow.Queue, count: int) -> None:
    for _ in range(count):
        queue.get().ack()


def _take_in_batches(queue: qflow.Queue, count: int) -> None:
    while count:
        batch = queue.get_many(BATCH)
        count -= len(batch)
        batch.ack()


def _hold(path: str, count_text: str, size_text: str, capacity: str) -> None:
    with qflow.open(Path(path) / "spool", capacity_bytes=int(capacity)) as broker:
        queue = broker.declare_queue("bench", durable=False)
        _put_one_by_one(queue, int(count_text), int(size_text))
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
        for body in _bodies(count, size):
            queue.put(body, headers=HEADERS)
        size += len(encode_headers(HEADERS))
    else:
        (_put_in_batches if "batches" in role else _put_one_by_one)(queue, count, size)
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
    "fill-in-batches": partial(_fill_and_drain, False),
    "fill-one-by-one": partial(_fill_and_drain, True),
    "hold": _hold,
    "overhead": _overhead,
}
