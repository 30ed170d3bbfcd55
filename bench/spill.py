"""What does not fit in memory: a small queue that spills to files, against plain loops over files of the same size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import attrs

import qflow
from bench.measure import Bound, Row, Setup, Workload, at_least, interleave, rates, ratio
from qflow.storage.blocks import SINGLE_BYTES

CAPACITY = "1MiB"
BODY = bytes(1024)
BLOCK = bytes(len(BODY) + SINGLE_BYTES)
Move = Callable[[qflow.Queue, int], float]
"""Moves so many messages and returns the seconds."""


def create_files(directory: Path, count: int) -> float:
    directory.mkdir()
    prefix = f"{directory}{os.sep}"
    start = perf_counter()
    for number in range(count):
        fd = os.open(f"{prefix}{number:x}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(fd, BLOCK, 0)
        os.close(fd)
    return perf_counter() - start


def read_files(directory: Path, count: int) -> float:
    prefix = f"{directory}{os.sep}"
    size = len(BLOCK) + 1
    start = perf_counter()
    for number in range(count):
        fd = os.open(f"{prefix}{number:x}", os.O_RDONLY)
        os.read(fd, size)
        os.close(fd)
    return perf_counter() - start


def overwrite_files(directory: Path, count: int) -> float:
    prefix = f"{directory}{os.sep}"
    start = perf_counter()
    for number in range(count):
        fd = os.open(f"{prefix}{number:x}", os.O_WRONLY)
        os.pwrite(fd, BLOCK, 0)
        os.close(fd)
    return perf_counter() - start


def fill(queue: qflow.Queue, count: int) -> float:
    put = queue.put
    start = perf_counter()
    for _ in range(count):
        put(BODY)
    return perf_counter() - start


def drain(queue: qflow.Queue, count: int) -> float:
    get = queue.get
    start = perf_counter()
    for _ in range(count):
        get().ack()
    return perf_counter() - start


def fill_in_batches(queue: qflow.Queue, count: int, size: int = 100) -> float:
    bodies = [BODY] * size
    start = perf_counter()
    for _ in range(count // size):
        queue.put_many(bodies)
    return perf_counter() - start


def drain_in_batches(queue: qflow.Queue, count: int, size: int = 100) -> float:
    start = perf_counter()
    while count:
        batch = queue.get_many(size)
        count -= len(batch)
        batch.ack()
    return perf_counter() - start


@attrs.define
class Cycle:
    """Everything out and in again; remembers what each half took."""

    take_out: Callable[[], float]
    put_in: Callable[[], float]
    out: list[float] = attrs.field(factory=list)
    back: list[float] = attrs.field(factory=list)

    def __call__(self) -> float:
        self.out.append(self.take_out())
        self.back.append(self.put_in())
        return self.out[-1] + self.back[-1]


def kept_files(setup: Setup) -> Iterator[Row]:
    name = "spill through files, 1 KiB, drained and filled again: rate over a plain loop on kept files"
    yield _kept_files(setup, name, fill, drain, bound=at_least(0.7))
    yield _kept_files(setup, "the same in batches of 100", fill_in_batches, drain_in_batches)
    yield _kept_files(setup, "the same with a broker of 1 MiB altogether", fill, drain, broker_capacity=CAPACITY)


def _kept_files(
    setup: Setup,
    name: str,
    fill_it: Move,
    drain_it: Move,
    *,
    bound: Bound | None = None,
    broker_capacity: str = "64MiB",
) -> Row:
    count = setup.size(30_000, 1_500)
    setup.need_disk(count * 2 * 4096)
    with setup.scratch() as path, qflow.open(path / "spool", capacity_bytes=broker_capacity) as broker:
        queue = broker.declare_queue("bench", durable=False, capacity_bytes=CAPACITY)
        fill_it(queue, count)
        spilled = queue.stats().spilled_messages
        files = path / "files"
        create_files(files, spilled)
        ours = Cycle(partial(drain_it, queue, count), partial(fill_it, queue, count))
        theirs = Cycle(partial(read_files, files, spilled), partial(overwrite_files, files, spilled))
        measured = interleave(setup.few_rounds, 1, ours, theirs)
        stats = queue.stats()
    both, loop = rates("qflow, out and in again", spilled, measured[0]), rates("plain loops", spilled, measured[1])
    return Row(
        name=name,
        figure=ratio(both, loop),
        bound=bound,
        details=[
            both,
            loop,
            rates("qflow drain", spilled, ours.out[1:]),
            rates("plain open, read, close", spilled, theirs.out[1:]),
            rates("qflow fill", spilled, ours.back[1:]),
            rates("plain open, pwrite, close", spilled, theirs.back[1:]),
        ],
        notes=[
            f"{count} messages through a capacity of {CAPACITY}; rates count the {spilled} that were spilled",
            f"files created {stats.spill_files_created_total}, overwritten {stats.spill_files_overwritten_total}, "
            f"read {stats.spill_files_read_total}",
        ],
    )


def fresh_files(setup: Setup) -> Iterator[Row]:
    count = setup.size(20_000, 1_500)
    rounds = setup.few_rounds
    setup.need_disk((rounds + 1) * count * 2 * 4096)
    with setup.scratch() as path, qflow.open(path / "spool") as broker:
        numbers = iter(range(2 * rounds + 2))
        spilled = 0

        def mine() -> float:
            nonlocal spilled
            queue = broker.declare_queue(f"bench-{next(numbers)}", durable=False, capacity_bytes=CAPACITY)
            seconds = fill(queue, count)
            spilled = queue.stats().spilled_messages
            return seconds

        def plain() -> float:
            return create_files(path / f"files-{next(numbers)}", spilled or count)

        ours, theirs = (
            rates(name, spilled, seconds)
            for name, seconds in zip(
                ("qflow fill", "plain create, pwrite, close"), interleave(rounds, 1, mine, plain), strict=True
            )
        )
    yield Row(
        name="the first fill, on fresh files: rate over a plain loop that creates them",
        figure=ratio(ours, theirs),
        details=[ours, theirs],
        notes=["no bound is set; nothing is unlinked before the last round, for deletes slow creation down"],
    )


WORKLOADS = [
    Workload(
        "spill-kept", "a backlog 30 times the capacity leaves and comes again; freed files are overwritten", kept_files
    ),
    Workload("spill-fresh", "the first time a queue spills, when it has no files to overwrite", fresh_files),
]
