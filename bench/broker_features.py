"""What a broker does beyond a plain queue, in times over a plain queue's: publish, priorities, transactions.

Where nothing syncs, seconds are the thread's time on the processor, as in `bench.hot_path`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from time import perf_counter

import qflow
from bench.durable import CAPACITY
from bench.engines.qflow_queues import PATIENCE_S
from bench.measure import Bound, Row, Setup, Workload, at_most, by_side, interleave, micros, ratio
from bench.timing import thread_timed

BODY = bytes(100)
QUEUES = 10
TOPIC = "plant/7/temperature"
PRIORITIES = 10
BATCH = 100


def publish(setup: Setup) -> Iterator[Row]:
    yield _published(setup, durable=False, times=200, chunks=setup.size(41, 5), bound=at_most(15))
    yield _published(setup, durable=True, times=10, chunks=setup.size(21, 3), bound=at_most(1.5))


def _published(setup: Setup, *, durable: bool, times: int, chunks: int, bound: Bound) -> Row:
    """Put into one queue, and publish to ten others, all of which are emptied after each turn, untimed."""
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        broker = stack.enter_context(qflow.open(path / "spool", capacity_bytes=CAPACITY))
        alone = broker.declare_queue("alone", durable=durable)
        bound_ones = [broker.declare_queue(f"bound-{number}", durable=durable) for number in range(QUEUES)]
        for queue in bound_ones:
            broker.bind(queue, "plant/+/temperature")

        def put() -> float:
            put = alone.put
            start = perf_counter()
            for _ in range(times):
                put(BODY)
            seconds = perf_counter() - start
            _empty(alone, times)
            return seconds

        def publish() -> float:
            publish = broker.publish
            start = perf_counter()
            for _ in range(times):
                publish(TOPIC, BODY)
            seconds = perf_counter() - start
            for queue in bound_ones:
                _empty(queue, times)
            return seconds

        measured = interleave(setup.rounds, chunks, publish, put)
    names = (f"publish to {QUEUES} queues", "put into one")
    ours, one = by_side(micros, names, times, measured)
    return Row(
        name=f"{_kind(durable)} publish to {QUEUES} queues bound to the topic, 100 B: time over one put",
        figure=ratio(ours, one),
        bound=bound,
        details=[ours, one],
    )


def _empty(queue: qflow.Queue, expected: int) -> None:
    batch = queue.get_many(expected, PATIENCE_S)
    if len(batch) != expected:
        raise AssertionError(f"{len(batch)} of {expected} messages came")
    batch.ack()


def _kind(durable: bool) -> str:
    return "durable" if durable else "transient"


def priorities(setup: Setup) -> Iterator[Row]:
    count, chunks = setup.size(1_000, 500), setup.size(51, 5)
    drawn = [Random(number).randrange(PRIORITIES) for number in range(count)]
    with setup.scratch() as path, qflow.open(path) as broker:
        ranked = broker.declare_queue("ranked", durable=False, priorities=PRIORITIES)
        plain = broker.declare_queue("plain", durable=False)

        @thread_timed
        def ranked_singles() -> None:
            put, get = ranked.put, ranked.get
            for priority in drawn:
                put(BODY, priority=priority)
                get().ack()

        @thread_timed
        def plain_singles() -> None:
            put, get = plain.put, plain.get
            for _ in drawn:
                put(BODY)
                get().ack()

        @thread_timed
        def ranked_backlog() -> None:
            put, get = ranked.put, ranked.get
            for priority in drawn:
                put(BODY, priority=priority)
            for _ in drawn:
                get().ack()

        @thread_timed
        def plain_backlog() -> None:
            put, get = plain.put, plain.get
            for _ in drawn:
                put(BODY)
            for _ in drawn:
                get().ack()

        singles = interleave(setup.rounds, chunks, ranked_singles, plain_singles)
        backlog = interleave(setup.rounds, chunks, ranked_backlog, plain_backlog)
    how = f"transient put+get+ack, 100 B, {PRIORITIES} priorities at random"
    yield _over_fifo(f"{how}, one by one", count, singles)
    yield _over_fifo(f"{how}, {count:,} put and then taken", count, backlog)


def _over_fifo(name: str, count: int, measured: list[list[float]]) -> Row:
    ours, plain = by_side(micros, ("with priorities", "FIFO"), count, measured)
    return Row(
        name=f"{name}: time over a FIFO queue", figure=ratio(ours, plain), bound=at_most(1.5), details=[ours, plain]
    )


def transactions(setup: Setup) -> Iterator[Row]:
    times, chunks = 5, setup.size(21, 3)
    bodies = [BODY] * BATCH
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        broker = stack.enter_context(qflow.open(path / "spool", capacity_bytes=CAPACITY))
        work, results, alone = (broker.declare_queue(name) for name in ("work", "results", "alone"))

        def transformed() -> float:
            work.put_many(bodies * times)
            batches = [work.get_many(BATCH, PATIENCE_S) for _ in range(times)]
            start = perf_counter()
            for batch in batches:
                with broker.transaction() as tx:
                    put = tx.put
                    for body in bodies:
                        put(results, body)
                    tx.ack_many(batch)
            seconds = perf_counter() - start
            _empty(results, times * BATCH)
            if len(work):
                raise AssertionError(f"{len(work)} messages were not acked")
            return seconds

        def put_many() -> float:
            put_many = alone.put_many
            start = perf_counter()
            for _ in range(times):
                put_many(bodies)
            seconds = perf_counter() - start
            _empty(alone, times * BATCH)
            return seconds

        measured = interleave(setup.rounds, chunks, transformed, put_many)
    names = ("transaction", "put_many(100)")
    ours, plain = by_side(micros, names, times, measured)
    yield Row(
        name="durable transaction, 100 puts of 100 B and the ack of a batch of 100: time over one put_many(100)",
        figure=ratio(ours, plain),
        bound=at_most(1.5),
        details=[ours, plain],
        notes=["queues are filled and emptied between the turns, which is not timed"],
    )


WORKLOADS = [
    Workload("publish", "a message published to 10 queues, over one put into one queue", publish),
    Workload("priorities", "10 priorities at random, over a FIFO queue", priorities),
    Workload("transactions", "100 puts and 100 acks in one commit, over 100 puts in one commit", transactions),
]
