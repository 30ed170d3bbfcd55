"""What does not fit in memory: a small queue that spills, against plain loops over the same bytes, one by one.

A queue with a capacity of 1 MiB is filled with thirty times as much, drained, and filled again. The loops do nothing
but the file operations: on kept files (open, write, close; open, read, close), on fresh files (created; read and
unlinked), and on one file (append or overwrite; pread).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter

import attrs

import qflow
from bench import loops
from bench.engines.qflow_queues import PATIENCE_S, STORES, open_broker
from bench.measure import Row, Series, Setup, Workload, at_least, at_most, by_side, interleave, rates, ratio
from bench.timing import timed
from qflow.storage.blocks import SINGLE_BYTES

CAPACITY = "1MiB"
BODY = bytes(1024)
BLOCK = bytes(len(BODY) + SINGLE_BYTES)
Move = Callable[[qflow.Queue, int], float]
"""Moves so many messages and returns the seconds."""


@timed
def fill(queue: qflow.Queue, count: int, body: bytes = BODY) -> None:
    put = queue.put
    for _ in range(count):
        put(body)


@timed
def drain(queue: qflow.Queue, count: int) -> None:
    get = queue.get
    for _ in range(count):
        get(PATIENCE_S).ack()


def fill_in_batches(queue: qflow.Queue, count: int, size: int = 100) -> float:
    bodies = [BODY] * size
    start = perf_counter()
    for _ in range(count // size):
        queue.put_many(bodies)
    return perf_counter() - start


@timed
def drain_in_batches(queue: qflow.Queue, count: int, size: int = 100) -> None:
    while count:
        batch = queue.get_many(size, PATIENCE_S)
        count -= len(batch)
        batch.ack()


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


@attrs.frozen
class Refilled:
    """What a queue and the loops did, as rates of the messages that were spilled."""

    ours: Series
    loops: dict[str, Series]
    details: list[Series]
    notes: list[str]

    def row(self, name: str, loop: str, **bound: object) -> Row:
        """Return the rate over that of a loop."""
        figure = ratio(self.ours, self.loops[loop])
        return Row(name=name, figure=figure, details=self.details, notes=self.notes, **bound)  # type: ignore[arg-type]


def refill(
    setup: Setup,
    spill: str,
    fill_it: Move,
    drain_it: Move,
    *,
    broker_capacity: str = "64MiB",
    fresh: bool = False,
) -> Refilled:
    """Fill a queue, then drain it and fill it again in turns with the loops; `fresh` for the slow one, too."""
    count = setup.size(30_000, 1_200)
    setup.need_disk(count * 4 * 4096)
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        broker = stack.enter_context(open_broker(path / "spool", spill=spill, capacity_bytes=broker_capacity))
        queue = broker.declare_queue("bench", durable=False, capacity_bytes=CAPACITY)
        fill_it(queue, count)
        spilled = queue.stats().spilled_messages
        ours = Cycle(partial(drain_it, queue, count), partial(fill_it, queue, count))
        plain = _loops(stack, path, spill, spilled, fresh)
        measured = interleave(setup.few_rounds, 1, ours, *plain.values())
        stats = queue.stats()
    series = {
        name: rates(f"plain loop, {name}", spilled, seconds) for name, seconds in zip(plain, measured[1:], strict=True)
    }
    both = rates("qflow, out and in again", spilled, measured[0])
    halves = [rates("qflow drain", spilled, ours.out[1:]), rates("qflow fill", spilled, ours.back[1:])]
    for name, loop in plain.items():
        halves.append(rates(f"{name}: read", spilled, loop.out[1:]))
        halves.append(rates(f"{name}: write", spilled, loop.back[1:]))
    notes = [
        f"{count} messages through a capacity of {CAPACITY}; rates count the {spilled} that were spilled",
        ", ".join(f"{name} {value}" for name, value in attrs.asdict(stats).items() if name.startswith("spill_")),
    ]
    return Refilled(both, series, [both, *series.values(), *halves], notes)


def _loops(stack: ExitStack, path: Path, spill: str, count: int, with_fresh: bool) -> dict[str, Cycle]:
    """Return the loops to compare a store with, their files in place."""
    if spill == "segments":
        found = {}
        for name, file in stack.enter_context(loops.append_files(path)).items():
            file.append(count, BLOCK)
            found[name] = Cycle(partial(file.read, count, BLOCK), partial(file.append, count, BLOCK))
        return found
    kept, fresh = path / "kept", path / "fresh"
    for directory in (kept, fresh)[: 1 + with_fresh]:
        directory.mkdir()
        loops.create_files(directory, count, BLOCK)
    read, overwrite, create = loops.read_files, loops.overwrite_files, loops.create_files
    found = {"kept files": Cycle(partial(read, kept, count, BLOCK), partial(overwrite, kept, count, BLOCK))}
    if with_fresh:
        out = partial(read, fresh, count, BLOCK, unlink=True)
        found["fresh files"] = Cycle(out, partial(create, fresh, count, BLOCK))
    return found


def through_files(setup: Setup) -> Iterator[Row]:
    found = refill(setup, "files", fill, drain, fresh=True)
    yield Row(
        name="spill to files, 1 KiB, drained and filled again: time over a plain loop on fresh files",
        figure=ratio(found.loops["fresh files"], found.ours),
        bound=at_most(0.6),
        details=found.details,
        notes=[
            *found.notes,
            "of times: the loop's rate over ours",
            "creating on ext4 after deletes is slow; the reason files are kept",
        ],
    )
    yield found.row("the same: rate over a plain loop on kept files", "kept files", bound=at_least(0.7))
    batches = refill(setup, "files", fill_in_batches, drain_in_batches)
    yield batches.row("the same in batches of 100: rate over the loop on kept files", "kept files")
    small = refill(setup, "files", fill, drain, broker_capacity=CAPACITY)
    yield small.row("the same with a broker of 1 MiB altogether", "kept files")


def through_segments(setup: Setup) -> Iterator[Row]:
    for how, fill_it, drain_it in (
        ("one by one", fill, drain),
        ("in batches of 100", fill_in_batches, drain_in_batches),
    ):
        found = refill(setup, "segments", fill_it, drain_it)
        name = f"spill to segments, 1 KiB, drained and filled again, {how}: rate over raw append + pread"
        yield found.row(name, "append")


def first_fill(setup: Setup) -> Iterator[Row]:
    for spill in STORES:
        yield _first_fill(setup, spill)


def _first_fill(setup: Setup, spill: str) -> Row:
    count, rounds = setup.size(20_000, 1_200), setup.few_rounds
    setup.need_disk((rounds + 1) * count * 2 * 4096)
    with setup.scratch() as path, open_broker(path / "spool", spill=spill) as broker:
        numbers = iter(range(2 * rounds + 2))
        spilled = 0

        def mine() -> float:
            nonlocal spilled
            queue = broker.declare_queue(f"bench-{next(numbers)}", durable=False, capacity_bytes=CAPACITY)
            seconds = fill(queue, count)
            spilled = queue.stats().spilled_messages
            return seconds

        def plain() -> float:
            directory = path / f"files-{next(numbers)}"
            directory.mkdir()
            return loops.create_files(directory, spilled or count, BLOCK)

        measured = interleave(rounds, 1, mine, plain)
    ours, theirs = by_side(rates, ("qflow fill", "plain create, pwrite, close"), spilled, measured)
    return Row(
        name=f"the first fill of a queue, {spill}: rate over a plain loop that creates files",
        figure=ratio(ours, theirs),
        details=[ours, theirs],
        notes=["no bound is set; nothing is unlinked before the last round, for deletes slow creation down"],
    )


WORKLOADS = [
    Workload("spill-files", "30 times the capacity leaves and comes again, through a file each", through_files),
    Workload("spill-segments", "30 times the capacity leaves and comes again, through segments", through_segments),
    Workload("spill-first", "the first time a queue spills, when there is nothing to overwrite", first_fill),
]
