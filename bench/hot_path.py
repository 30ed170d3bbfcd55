"""The paths with no disk: a transient queue against `queue.Queue` of the standard library, in one thread and in two.

In one, seconds are the thread's time on the processor: nothing waits, and a neighbour on the same core is not counted.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from threading import Thread
from time import thread_time

import qflow
from bench.measure import Row, Setup, Workload, at_least, at_most, by_side, interleave, micros, rates, ratio
from bench.timing import thread_timed, timed

BODY_BYTES = 100
BATCH = 1000


def single(setup: Setup) -> Iterator[Row]:
    count, chunks = setup.size(2_000, 500), setup.size(51, 11)
    body = bytes(BODY_BYTES)
    peer: queue.Queue[bytes] = queue.Queue()
    with setup.scratch() as path, qflow.open(path) as broker:
        mine = broker.declare_queue("bench", durable=False)

        @thread_timed
        def put_get_ack() -> None:
            put, get = mine.put, mine.get
            for _ in range(count):
                put(body)
                get().ack()

        @thread_timed
        def put_get() -> None:
            put, get = peer.put, peer.get
            for _ in range(count):
                put(body)
                get()

        measured = interleave(setup.rounds, chunks, put_get_ack, put_get)
    ours, theirs = by_side(micros, ("qflow put+get+ack", "queue.Queue put+get"), count, measured)
    yield Row(
        name="transient put+get+ack, 100 B: time over queue.Queue",
        figure=ratio(ours, theirs),
        bound=at_most(1.15),
        details=[ours, theirs],
    )


def batches(setup: Setup) -> Iterator[Row]:
    times, chunks = setup.size(5, 1), setup.size(21, 5)
    bodies = [bytes((number % 256,)) * BODY_BYTES for number in range(BATCH)]
    peer: queue.Queue[bytes] = queue.Queue()
    with setup.scratch() as path, qflow.open(path) as broker:
        mine = broker.declare_queue("bench", durable=False)

        def taking(take: Callable[[qflow.Deliveries], int]) -> Callable[[], float]:
            def side() -> float:
                start = thread_time()
                for _ in range(times):
                    mine.put_many(bodies)
                    batch = mine.get_many(BATCH)
                    total = take(batch)
                    batch.ack()
                seconds = thread_time() - start
                if total != BATCH * BODY_BYTES:
                    raise AssertionError(f"a batch of {total} bytes came back")
                return seconds

            return side

        @thread_timed
        def put_get() -> None:
            put, get = peer.put, peer.get
            for _ in range(times):
                for body in bodies:
                    put(body)
                for _ in bodies:
                    get()

        measured = interleave(setup.rounds, chunks, taking(_sum_of_bodies), taking(_sum_of_deliveries), put_get)
    names = ("qflow .bodies", "qflow for delivery in batch", "queue.Queue put, get")
    bodies_rate, loop_rate, theirs = by_side(rates, names, BATCH * times, measured)
    yield Row(
        name="transient put_many, get_many, .bodies, ack, 1,000 x 100 B: rate over queue.Queue",
        figure=ratio(bodies_rate, theirs),
        bound=at_least(10),
        details=[bodies_rate, theirs],
    )
    yield Row(
        name="the same with `for delivery in batch`: rate over queue.Queue",
        figure=ratio(loop_rate, theirs),
        bound=at_least(3),
        details=[loop_rate, theirs],
    )


def threads(setup: Setup) -> Iterator[Row]:
    """One thread puts, here the main one, and another takes what there is, and waits for more."""
    count, chunks = setup.size(20_000, 500), setup.size(11, 3)
    body = bytes(BODY_BYTES)
    peer: queue.Queue[bytes] = queue.Queue()
    with setup.scratch() as path, qflow.open(path) as broker:
        mine = broker.declare_queue("bench", durable=False)

        def beside(put: Callable[[bytes], object], take: Callable[[], object]) -> Callable[[], float]:
            def take_all() -> None:
                for _ in range(count):
                    take()

            @timed
            def side() -> None:
                taker = Thread(target=take_all)
                taker.start()
                for _ in range(count):
                    put(body)
                taker.join()

            return side

        sides = beside(mine.put, lambda: mine.get().ack()), beside(peer.put, peer.get)
        measured = interleave(setup.rounds, chunks, *sides)
    ours, theirs = by_side(rates, ("qflow put; get+ack", "queue.Queue put; get"), count, measured)
    yield Row(
        name="transient, one thread puts and another takes, 100 B, one by one: rate over queue.Queue",
        figure=ratio(ours, theirs),
        bound=at_least(0.25),
        details=[ours, theirs],
    )


def _sum_of_bodies(batch: qflow.Deliveries) -> int:
    return sum(map(len, batch.bodies))


def _sum_of_deliveries(batch: qflow.Deliveries) -> int:
    total = 0
    for delivery in batch:
        total += len(delivery.body)
    return total


WORKLOADS = [
    Workload(
        "transient-single", "one message at a time through an empty transient queue, and through queue.Queue", single
    ),
    Workload("transient-threads", "one message at a time from the main thread to another", threads),
    Workload("transient-batch", "1,000 messages in and out at once; queue.Queue takes them one by one", batches),
]
