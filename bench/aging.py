"""Whether a queue gets slower with use: after ten million messages, and with a million unacked out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import perf_counter, sleep
from typing import Any

import qflow
from bench.engines.qflow_queues import PATIENCE_S, open_broker
from bench.measure import Row, Setup, Workload, at_least, by_side, interleave, rates, ratio
from bench.timing import timed

BODY = bytes(100)
BATCH = 1000
MAINTENANCE_S = 150
"""How long maintenance may take to look at what was settled out of order."""
CAPACITY = "2GiB"
"""Room for all that is unacked, so that nothing spills: that is another theme."""
Aging = Callable[[qflow.Queue, int], list[qflow.Deliveries]]
"""Makes a queue old by so many messages; returns what is held."""


def passed(queue: qflow.Queue, count: int) -> list[qflow.Deliveries]:
    """Let so many messages through."""
    for _ in range(count // BATCH):
        queue.put_many([BODY] * BATCH)
        queue.get_many(BATCH, PATIENCE_S).ack()
    queue.ack_many([], wait=True)
    return []


def unacked(queue: qflow.Queue, count: int) -> list[qflow.Deliveries]:
    """Take twice as many and ack every other one, so that so many gaps are open."""
    held = []
    for _ in range(2 * count // BATCH):
        queue.put_many([BODY] * BATCH)
        held.append(queue.get_many(BATCH, PATIENCE_S))
    for batch in held:
        for position in range(0, len(batch), 2):
            batch[position].ack()
    queue.ack_many([], wait=True)
    return held


def after_passing(setup: Setup) -> Iterator[Row]:
    count = setup.size(10_000_000, 20_000)
    for durable in (False, True):
        yield from _aged(setup, f"after {count:,} messages passed", passed, count, durable)


def after_unacked(setup: Setup) -> Iterator[Row]:
    count = setup.size(1_000_000, 5_000)
    for durable in (False, True):
        yield from _aged(setup, f"with {count:,} unacked out of order", unacked, count, durable)


def _aged(setup: Setup, how: str, aging: Aging, count: int, durable: bool) -> Iterator[Row]:
    times = setup.size(20, 3)
    bodies = [BODY] * BATCH
    with ExitStack() as stack:
        queues = []
        for _ in range(2):
            path = stack.enter_context(setup.scratch())
            broker = stack.enter_context(open_broker(path / "spool", capacity_bytes=CAPACITY))
            queues.append(broker.declare_queue("bench", durable=durable))
        old, fresh = queues

        def through(queue: qflow.Queue) -> Callable[[], float]:
            @timed
            def side() -> None:
                for _ in range(times):
                    queue.put_many(bodies)
                    queue.get_many(BATCH, PATIENCE_S).ack()

            return side

        (alone,) = interleave(setup.rounds, setup.size(5, 1), through(fresh))
        held = aging(old, count)
        begun = perf_counter()
        during = interleave(setup.rounds, setup.size(5, 1), through(old), through(fresh))
        parts: Any = getattr(old, "_parts", None) or getattr(old, "parts", None)  # by commit: now, before, or in itself
        lanes = old.lanes if parts is None else parts.logged_lanes  # type: ignore[attr-defined]
        while any(lane.hollow_due for lane in lanes) and perf_counter() - begun < MAINTENANCE_S:
            sleep(0.1)
        looked = perf_counter() - begun
        measured = interleave(setup.rounds, setup.size(5, 1), through(old), through(fresh))
        for batch in held:
            batch.nack()
    sides = (how, "fresh", "fresh, before there was an old one", f"{how}, at once", "fresh, at once")
    ours, theirs, before, ours_at_once, theirs_at_once = by_side(
        rates, sides, times * BATCH, [*measured, alone, *during]
    )
    name = f"{'durable' if durable else 'transient'} put_many, get_many, ack of 1,000 x 100 B {how}"
    yield Row(
        name=f"{name}: rate over fresh", figure=ratio(ours, theirs), bound=at_least(0.9), details=[ours, theirs, before]
    )
    yield Row(
        name=f"{name}: rate over fresh, at once",
        figure=ratio(ours_at_once, theirs_at_once),
        notes=[f"maintenance had looked at what was settled {looked:.0f} s later; the row above is from then on"],
    )
    yield Row(
        name=f"{name}: rate over fresh, alone",
        figure=ratio(ours, before),
        notes=["not in turns: what the old queue makes the process do beside, the fresh one in turns with it shares"],
    )


WORKLOADS = [
    Workload(
        "aging-passed", "the rate of a queue that ten million messages went through, over a fresh one's", after_passing
    ),
    Workload("aging-unacked", "the rate of a queue with a million messages unacked, every other one", after_unacked),
]
