"""A million messages that wait for a moment: scheduled at random, delivered in order, most of them spilled.

Time is the workload's: it stands still while messages are scheduled, and then moves on in a hundred steps; at each of
them everything that is due is taken. What is timed are the calls of the queue, whoever else works meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import perf_counter

import attrs

import qflow
from bench.durable import BATCH
from bench.engines.qflow_queues import make_broker
from bench.measure import Bound, Row, Series, Setup, Workload, at_least, rates, ratio
from qflow.config import BrokerSettings

CAPACITY = 64 * 2**20
BODY_BYTES = 100
SPAN_MS = 1_000_000
"""Delays are drawn up to that."""
STEPS = 100
START_S = 1_700_000_000.0
SEED = 1


@attrs.define
class Clock:
    """Stands still until it is moved."""

    now_s: float = START_S

    def __call__(self) -> float:
        return self.now_s


@attrs.define
class Passage:
    """A queue of delayed messages, its clock, and what was seen of it."""

    queue: qflow.Queue
    clock: Clock
    scheduling_s: float = 0.0
    delivering_s: float = 0.0
    peak_resident: int = 0
    peak_spilled: int = 0
    last: bytes = b""
    """The body delivered last."""
    taken: int = 0

    def look(self) -> None:
        """Note the peaks; not timed."""
        stats = self.queue.stats()
        self.peak_resident = max(self.peak_resident, stats.resident_bytes)
        self.peak_spilled = max(self.peak_spilled, stats.spilled_messages)

    def check(self, bodies: list[bytes]) -> None:
        """Raise unless these came in order, and no earlier than they were due."""
        order = [self.last, *bodies]
        if order != sorted(order):
            raise AssertionError("delayed messages came out of order")
        self.last, self.taken = order[-1], self.taken + len(bodies)
        if int.from_bytes(self.last[:8], "big") > (self.clock.now_s - START_S) * 1000 + 1:
            raise AssertionError("a delayed message came too early")


def schedule_batches(passage: Passage, count: int) -> None:
    draw = Random(SEED)
    for number in range(count // BATCH):
        delay_ms = draw.randrange(1, SPAN_MS)
        bodies = [_body(delay_ms, number * BATCH + one) for one in range(BATCH)]
        start = perf_counter()
        passage.queue.put_many(bodies, delay_s=delay_ms / 1000)
        passage.scheduling_s += perf_counter() - start
        passage.look()


def schedule_singles(passage: Passage, count: int) -> None:
    draw = Random(SEED)
    put = passage.queue.put
    for first in range(0, count, BATCH):
        delays_ms = [draw.randrange(1, SPAN_MS) for _ in range(BATCH)]
        pairs = [(_body(ms, first + one), ms / 1000) for one, ms in enumerate(delays_ms)]
        start = perf_counter()
        for body, delay_s in pairs:
            put(body, delay_s=delay_s)
        passage.scheduling_s += perf_counter() - start
        passage.look()


def _body(due_ms: int, number: int) -> bytes:
    """Return a body that sorts as it is to be delivered."""
    return (due_ms << 64 | number).to_bytes(16, "big") + bytes(BODY_BYTES - 16)


def deliver_batches(passage: Passage) -> None:
    """Take and ack everything that is due."""
    get_many = passage.queue.get_many
    while True:
        start = perf_counter()
        batch = get_many(BATCH, timeout_s=0)
        bodies = batch.bodies
        batch.ack()
        passage.delivering_s += perf_counter() - start
        if not bodies:
            return
        passage.check(bodies)
        passage.look()


def deliver_singles(passage: Passage) -> None:
    """Likewise, one by one."""
    get = passage.queue.get
    more = True
    while more:
        bodies = []
        start = perf_counter()
        try:
            for _ in range(BATCH):
                delivery = get(timeout_s=0)
                bodies.append(delivery.body)
                delivery.ack()
        except qflow.QueueEmpty:
            more = False
        passage.delivering_s += perf_counter() - start
        if bodies:
            passage.check(bodies)
            passage.look()


@attrs.frozen
class Way:
    """How messages get in and out, and how many rounds are enough."""

    name: str
    schedule: Callable[[Passage, int], None]
    deliver: Callable[[Passage], None]
    rounds: int


IN_BATCHES = Way("in batches of 1,000", schedule_batches, deliver_batches, rounds=5)
ONE_BY_ONE = Way("one by one", schedule_singles, deliver_singles, rounds=2)


def batches(setup: Setup) -> Iterator[Row]:
    yield from _delayed(setup, IN_BATCHES, durable=False, bound=at_least(200_000, "/s"))


def durable_batches(setup: Setup) -> Iterator[Row]:
    yield from _delayed(setup, IN_BATCHES, durable=True)


def singles(setup: Setup) -> Iterator[Row]:
    yield from _delayed(setup, ONE_BY_ONE, durable=False)


def _delayed(setup: Setup, way: Way, *, durable: bool, bound: Bound | None = None) -> Iterator[Row]:
    """Let the messages pass through a fresh spool in each round."""
    count, capacity = setup.size(1_000_000, 5_000), setup.size(CAPACITY, CAPACITY // 200)
    setup.need_disk(count * BODY_BYTES * 4)
    found = []
    for _ in range((setup.kept_rounds or setup.size(way.rounds, 1)) + 1):
        with setup.scratch() as path:
            found.append(_pass(path, capacity, count, way, durable=durable))
    ours = found[1:]  # the first one warms up
    kind = "durable" if durable else "transient"
    name = f"{count:,} {kind} delayed messages, 100 B, through {capacity / 2**20:.3g} MiB, {way.name}"
    peak = Series("peak resident_bytes", "MiB", [one.peak_resident / 2**20 for one in ours])
    room = Series("capacity", "MiB", [capacity / 2**20] * len(ours))
    yield Row(
        name=f"{name}: rate",
        figure=rates("all of it", count, [one.scheduling_s + one.delivering_s for one in ours]),
        bound=bound,
        details=[
            rates("scheduled", count, [one.scheduling_s for one in ours]),
            rates("delivered and acked", count, [one.delivering_s for one in ours]),
        ],
        notes=[f"up to {max(one.peak_spilled for one in ours):,} of them were spilled, to segments"],
    )
    yield Row(name=f"{name}: peak resident_bytes over the capacity", figure=ratio(peak, room), details=[peak])


def _pass(path: Path, capacity: int, count: int, way: Way, *, durable: bool) -> Passage:
    clock = Clock()
    settings = BrokerSettings(capacity_bytes=capacity, spill="segments")
    with make_broker(path / "spool", settings, clock=clock) as broker:
        passage = Passage(broker.declare_queue("bench", durable=durable), clock)
        way.schedule(passage, count)
        for step in range(1, STEPS + 1):
            clock.now_s = START_S + step * SPAN_MS / 1000 / STEPS
            way.deliver(passage)
        start = perf_counter()
        passage.queue.ack_many([], wait=True)
        passage.delivering_s += perf_counter() - start
    if passage.taken != count:
        raise AssertionError(f"{passage.taken} of {count} messages came")
    return passage


WORKLOADS = [
    Workload("delayed-batches", "a million delayed messages, 1,000 a call with one delay each", batches),
    Workload("delayed-durable", "the same in a durable queue, a commit for each call", durable_batches),
    Workload("delayed-singles", "a million delayed messages, each with a delay of its own, one by one", singles),
]
