"""Settling that is known to be on the disk: `ack(wait=True)`, against what peers sync, in each one's best batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter

from bench import contest
from bench.durable import open_queue
from bench.engines.base import PLAIN, SYNCED, Opened
from bench.errors import CannotRun
from bench.measure import Row, Setup, Workload, at_least, rates

BATCH = 1000
BODY = bytes(1024)


def batches(setup: Setup) -> Iterator[Row]:
    """A peer without batches settles one by one; that is its best."""
    yield from _settled(setup, setup.size(3, 1) * BATCH, setup.size(20, 5), batch=True)


def singles(setup: Setup) -> Iterator[Row]:
    yield from _settled(setup, setup.size(20, 3), setup.size(20, 3), batch=False)


def _settled(setup: Setup, count: int, alone: int, *, batch: bool) -> Iterator[Row]:
    """Let everyone fill, untimed, and take: `count` messages where there are batches, `alone` one by one."""
    peers = contest.synced_peers(setup)
    others = [engine for engine in setup.engines if engine.kind == PLAIN and engine.promise == SYNCED]

    def side(opened: Opened) -> float:
        """Return the seconds for one message: engines take different numbers of them."""
        in_batches = batch and opened.take_many is not None
        wanted = count if in_batches else alone
        opened.push([BODY] * wanted)
        taken = 0
        start = perf_counter()
        while taken < wanted:
            if in_batches and opened.take_many is not None:
                taken += len(opened.take_many(BATCH))
            elif opened.take is not None:
                opened.take()
                taken += 1
            else:
                raise CannotRun("it takes no single messages")
        return (perf_counter() - start) / wanted

    with ExitStack() as stack:
        queue = open_queue(stack, stack.enter_context(setup.scratch()))

        def mine() -> float:
            queue.put_many([BODY] * (count if batch else alone))
            left = count if batch else alone
            start = perf_counter()
            for _ in range(left // BATCH if batch else left):
                if batch:
                    queue.get_many(BATCH).ack(wait=True)
                else:
                    queue.get().ack(wait=True)
            seconds = perf_counter() - start
            if len(queue):
                raise AssertionError(f"{len(queue)} messages are left")
            return seconds / left

        (seconds,), theirs = contest.against(
            setup, [*peers, *others], setup.size(5, 1), side, mine, rounds=setup.few_rounds
        )
    ours = rates("qflow ack(wait=True)", 1, seconds)
    found = [rates(name, 1, taken) for name, taken in theirs.items()]
    figure, problem = contest.over_best(ours, found, peers)
    how = "batches of 1,000" if batch else "one by one"
    yield Row(
        name=f"get + ack(wait=True), {how}, 1 KiB: rate over the best peer's synced ack" + " in its best batch" * batch,
        figure=figure,
        bound=at_least(20) if batch else None,
        problem=problem,
        details=[ours, *found],
        notes=["sqlite-full, a table written by hand, is shown, and is not counted as a peer"],
    )


WORKLOADS = [
    Workload("ack-batches", "1,000 messages taken and settled with one sync, against each peer's best", batches),
    Workload("ack-singles", "each message taken and settled with a sync of its own", singles),
]
