"""The paths that sync: durable puts against raw LMDB commits of the same bytes, and draining against a raw cursor.

Both sides use LMDB in its default, fully synced mode, on the same file system. Confirmed messages wait in memory, so
brokers here have room for all of them: spilling is another theme.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import lmdb

import qflow
from bench import contest
from bench.engines.base import MEMORY, PEER, PLAIN, Opened
from bench.errors import CannotRun
from bench.measure import Row, Setup, Workload, at_least, at_most, by_side, interleave, micros, rates, ratio
from bench.timing import timed

CAPACITY = "1GiB"
BATCH = 1000
BODY_BYTES = 100


def raw_commits(stack: ExitStack, path: Path, values: Sequence[bytes], times: int) -> Callable[[], float]:
    """Return a side that commits values under increasing keys in one transaction, as often as told."""
    path.mkdir()
    env = stack.enter_context(lmdb.open(str(path), map_size=1 << 40, lib_version=0))
    number = 0

    @timed
    def side() -> None:
        nonlocal number
        for _ in range(times):
            with env.begin(write=True) as txn:
                for value in values:
                    txn.put(number.to_bytes(8, "big"), value)
                    number += 1

    return side


def open_queue(stack: ExitStack, path: Path) -> qflow.Queue:
    broker = stack.enter_context(qflow.open(path, capacity_bytes=CAPACITY))
    return broker.declare_queue("bench")


def single(setup: Setup) -> Iterator[Row]:
    times, chunks = 10, setup.size(41, 3)
    body = bytes(1024)
    peers = contest.synced_peers(setup)
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        queue = open_queue(stack, path / "spool")
        puts = putting(queue.put, body, times)
        raw = raw_commits(stack, path / "raw", [body], times)
        plain = [engine for engine in setup.engines if engine.name == "sqlite-full"]
        (ours_s, raw_s), others_s = contest.against(
            setup, [*peers, *plain], chunks, lambda opened: putting(opened.put, body, times)(), puts, raw
        )
    ours, floor = micros("qflow put", times, ours_s), micros("raw LMDB commit", times, raw_s)
    others = [micros(name, times, seconds) for name, seconds in others_s.items()]
    yield Row(
        name="durable put, 1 KiB, one thread: time over a raw LMDB commit",
        figure=ratio(ours, floor),
        bound=at_most(1.1),
        details=[ours, floor],
    )
    figure, problem = contest.over_best(ours, others, peers)
    yield Row(
        name="durable put, 1 KiB, one thread: time over the best synced peer",
        figure=figure,
        problem=problem,
        bound=at_most(0.85),
        details=[ours, *others],
        notes=["a table written by hand, `sqlite-full`, is shown, and is not counted as a peer"],
    )


def putting(put: Callable[[bytes], object] | None, body: bytes, times: int) -> Callable[[], float]:
    """Return a side that puts a message so many times, one by one."""
    assert put is not None

    @timed
    def side() -> None:
        for _ in range(times):
            put(body)

    return side


def batch(setup: Setup) -> Iterator[Row]:
    times, chunks = 5, setup.size(21, 3)
    bodies = [bytes(BODY_BYTES) for _ in range(BATCH)]
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        queue = open_queue(stack, path / "spool")

        @timed
        def puts() -> None:
            put_many = queue.put_many
            for _ in range(times):
                put_many(bodies)

        raw = raw_commits(stack, path / "raw", [b"".join(bodies)], times)
        measured = interleave(setup.rounds, chunks, puts, raw)
    ours, theirs = by_side(rates, ("qflow put_many", "raw LMDB commit of one block"), BATCH * times, measured)
    yield Row(
        name="durable put_many, 1,000 x 100 B: rate over raw LMDB commits of one block",
        figure=ratio(ours, theirs),
        bound=at_least(0.7),
        details=[ours, theirs],
    )


def batch_against_peers(setup: Setup) -> Iterator[Row]:
    """Peers of any promise: the best batch among them is not synced."""
    times, chunks = setup.size(2, 1), setup.size(5, 1)
    bodies = [bytes(1024) for _ in range(BATCH)]
    peers = [engine for engine in setup.engines if engine.kind == PEER]
    others = [engine for engine in setup.engines if engine.kind == PLAIN and engine.promise != MEMORY]

    def side(opened: Opened) -> float:
        if opened.put_many is None:
            raise CannotRun("it has no batches")
        start = perf_counter()
        for _ in range(times):
            opened.put_many(bodies)
        seconds = perf_counter() - start
        opened.pull(times * BATCH)
        return seconds

    with ExitStack() as stack:
        queue = open_queue(stack, stack.enter_context(setup.scratch()))

        def mine() -> float:
            start = perf_counter()
            for _ in range(times):
                queue.put_many(bodies)
            seconds = perf_counter() - start
            _seconds_to_drain(queue, times * BATCH)
            return seconds

        (seconds,), theirs = contest.against(setup, [*peers, *others], chunks, side, mine, rounds=setup.few_rounds)
    ours = rates("qflow put_many", times * BATCH, seconds)
    found = [rates(name, times * BATCH, taken) for name, taken in theirs.items()]
    figure, problem = contest.over_best(ours, found, peers)
    yield Row(
        name="durable put_many, 1,000 x 1 KiB: rate over the best peer's batch, synced or not",
        figure=figure,
        bound=at_least(3),
        problem=problem.replace("synced ", ""),
        details=[ours, *found],
        notes=["queues are emptied after each turn, which is not timed; the tables of SQLite are not counted as peers"],
    )


def drain(setup: Setup) -> Iterator[Row]:
    yield _drain(setup, "durable get_many + ack, batches of 1,000, resident", reopened=False)
    yield _drain(setup, "the same from the log, after a reopen", reopened=True)


def _drain(setup: Setup, name: str, *, reopened: bool) -> Row:
    """Fill a fresh spool, drain it, and read a copy of its log with a bare cursor."""
    batches = setup.size(200, 5)
    bodies = [bytes(BODY_BYTES) for _ in range(BATCH)]
    with setup.scratch() as path:
        copy = path / "copy"

        def mine() -> float:
            with setup.scratch() as spool, ExitStack() as stack:
                queue = open_queue(stack, spool)
                for _ in range(batches):
                    queue.put_many(bodies)
                if not copy.exists():
                    shutil.copytree(spool / "log", copy)
                if reopened:
                    stack.close()
                    queue = open_queue(stack, spool)
                return _seconds_to_drain(queue, batches * BATCH)

        def raw() -> float:
            with lmdb.open(str(copy), map_size=1 << 40, lib_version=0) as env:
                start = perf_counter()
                with env.begin() as txn, txn.cursor() as cursor:
                    total = sum(len(value) for _, value in cursor)
                seconds = perf_counter() - start
            if total < batches * BATCH * BODY_BYTES:
                raise AssertionError(f"the cursor read {total} bytes")
            return seconds

        mine()  # makes the copy
        ours, theirs = by_side(
            rates,
            ("qflow get_many + ack", "raw cursor over the blocks"),
            batches * BATCH,
            interleave(setup.few_rounds, 1, mine, raw),
        )
    return Row(
        name=name,
        figure=ours,
        bound=at_least(1e6, "/s"),
        or_figure=ratio(ours, theirs),
        or_bound=at_least(0.5),
        details=[theirs],
        notes=["timed from the first get until the last ack is synced; the cursor only copies each block out"],
    )


def _seconds_to_drain(queue: qflow.Queue, expected: int) -> float:
    taken = 0
    start = perf_counter()
    while found := queue.get_many(BATCH, timeout_s=0):
        taken += len(found)
        found.ack()
    queue.ack_many([], wait=True)
    seconds = perf_counter() - start
    if taken != expected:
        raise AssertionError(f"{taken} of {expected} messages came back")
    return seconds


WORKLOADS = [
    Workload(
        "durable-single",
        "one thread waits for the sync of each 1 KiB message; raw: one LMDB commit each; peers, too",
        single,
    ),
    Workload("durable-batch", "1,000 messages a commit; raw: the same bytes as one LMDB value", batch),
    Workload(
        "durable-batch-peers", "1,000 messages a commit; peers put theirs in one transaction", batch_against_peers
    ),
    Workload(
        "durable-drain", "everything is taken and acked in batches of 1,000; raw: a cursor over the blocks", drain
    ),
]
