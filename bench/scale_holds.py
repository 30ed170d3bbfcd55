"""How long a put is held by what is done elsewhere in a broker: maintenance, and each call that looks or changes much.

Beside the puts lie a million durable, a million transient and a million delayed messages, of which memory holds a part.
One thread puts into a durable queue, one into a transient one, each a few hundred times a second. What the disk does by
itself is in each figure, so there is one for a time in which nothing is done, and bare writes and syncs go on: in a
thread, which waits for the interpreter as a put does, and in another process, which waits for the disk alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from struct import Struct
from time import perf_counter, sleep

import qflow
from bench import children
from bench.measure import Row, Series, Setup, Workload, at_most
from bench.scale import BATCH, DELAY_S, calling

BODY = bytes(100)
CAPACITY = "256MiB"
PACE_S = 0.002
NOTHING, COMPACT = "nothing", "compact()"
THREADS = "a durable put", "a transient put", "a bare write and sync in a thread"
BARE = THREADS[2], "a bare write and sync in another process"
TAKEN = Struct("<dd")
"""When one began, by the clock of all processes, and the seconds that it took."""
Step = Callable[[qflow.Broker], object]


def holds(setup: Setup) -> Iterator[Row]:
    size = setup.size(1_000_000, 500)
    setup.need_disk(size * 3 * 1024)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(min(3, setup.few_rounds)):
        with setup.scratch() as path:
            for name, kind, longest_ms in _round(path, size, 0.1 if setup.quick else 3.0):
                found.setdefault((name, kind), []).append(longest_ms)
    counted = [values for (name, kind), values in found.items() if name not in (NOTHING, COMPACT) and kind not in BARE]
    yield Row(
        name=f"the longest put beside 3 x {size:,} messages, whatever is done but {COMPACT}",
        figure=Series("the longest of a round", "ms", list(map(max, zip(*counted, strict=True)))),
        bound=at_most(50, "ms"),
        details=[Series(f"{kind} beside {name}", "ms", values) for (name, kind), values in found.items()],
    )


def _round(path: Path, size: int, rest_s: float) -> Iterator[tuple[str, str, float]]:
    """Yield the longest put in ms beside each step, in order: each finds what the one before has left."""
    with (
        (path / "bare").open("wb", buffering=0) as file,
        children.alive("beside", path / "beside") as times,
        qflow.open(path / "spool", capacity_bytes=CAPACITY, spill="segments") as broker,
    ):

        def bare(body: bytes) -> None:
            file.write(body)
            os.fdatasync(file.fileno())

        quiet = [broker.declare_queue(f"quiet {durable}", durable=durable).put for durable in (True, False)]
        _fill(broker, size)
        steps: dict[str, Step] = {
            NOTHING: lambda _: sleep(rest_s),
            "stats()": lambda _: broker.stats(),
            "browse() to the end": lambda _: sum(1 for _ in broker.queue("much").browse()),
            "check()": lambda _: broker.check(),
            "snapshot()": lambda _: broker.snapshot(path / "copy"),
            "declare_queues() of a thousand": lambda _: broker.declare_queues([f"new {n}" for n in range(1000)]),
            "alter_queue() to half of the messages": lambda _: broker.alter_queue(
                "spilled", limit_messages=size // 2, on_overflow=qflow.Overflow.DROP_OLDEST
            ),
            "acks of a third in random places": _ack_every_third,
            "purge() of a million": lambda _: broker.queue("much").purge(),
            "delete_queue() of a million": lambda _: broker.delete_queue("delayed"),
            "maintenance behind them": lambda _: sleep(rest_s),
            COMPACT: lambda _: broker.compact(),
        }
        for name, step in steps.items():
            os.sync()  # what was written before is not to be waited for now
            start = perf_counter()
            with ExitStack() as stack:
                taken = [stack.enter_context(calling(put, PACE_S)) for put in (*quiet, bare)]
                step(broker)
            for kind, seconds in zip(THREADS, taken, strict=True):
                yield name, kind, max(seconds) * 1e3
            yield name, BARE[1], _longest_since(start, Path(times)) * 1e3


def _longest_since(start: float, times: Path) -> float:
    """Return what the longest took of those that ended after that, or the last one."""
    data = times.read_bytes()
    found = list(TAKEN.iter_unpack(data[: len(data) // TAKEN.size * TAKEN.size]))
    return max([seconds for began, seconds in found if began + seconds > start] or [found[-1][1]])


def _beside(path: str) -> None:
    """Write and sync in a process of its own, and note what each takes."""
    times = path + ".times"
    with open(path, "wb", buffering=0) as file, open(times, "wb", buffering=0) as noted:
        for number in count():
            start = perf_counter()
            file.write(BODY)
            os.fdatasync(file.fileno())
            noted.write(TAKEN.pack(start, perf_counter() - start))
            if not number:
                children.report(times)
            sleep(PACE_S)


def _fill(broker: qflow.Broker, size: int) -> None:
    durable, delayed = broker.declare_queues(["much", "delayed"])
    transient = broker.declare_queue("spilled", durable=False)
    for start in range(0, size, BATCH):
        bodies = [BODY] * min(BATCH, size - start)
        durable.put_many(bodies)
        transient.put_many(bodies)
        delayed.put_many(bodies, delay_s=DELAY_S)


def _ack_every_third(broker: qflow.Broker) -> None:
    """Of what one batch after the other brings; the rest is given back."""
    queue = broker.queue("much")
    held = []
    while len(batch := queue.get_many(BATCH, 0)):
        held.append(batch)
        if len(held) == 100:
            break
    for batch in held:
        for delivery in list(batch)[::3]:
            delivery.ack()
        batch.nack()


WORKLOADS = [
    Workload("scale-holds", "the longest put beside three million messages, and what is done to them", holds),
]
ROLES: dict[str, Callable[..., None]] = {"beside": _beside}
