"""One operation, every engine, five sizes: the ranking tables.

For a size all engines are open at once and take turns. What is not being timed (emptying after puts, filling before
gets) happens in between. Queues hold a few hundred messages at most, so nothing spills here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from bench import contest
from bench.engines.base import KILL, MEMORY, SYNCED, Engine, Opened
from bench.measure import Row, Setup, Workload, bytes_name, interleave, micros

SIZES = (100, 1024, 8 * 1024, 16 * 1024, 64 * 1024)
QUICK_SIZES = (100, 1024)
CHUNK = {MEMORY: 500, KILL: 100, SYNCED: 10}
"""Messages a turn: what syncs gets fewer, so that turns are short."""
BATCH = 1000
BATCH_BYTES = 4 * 2**20
"""A batch is 1,000 messages, or as many as make this."""

Bodies = list[bytes]
Operation = Callable[[Opened, Bodies], float]


def put(engine: Opened, bodies: Bodies) -> float:
    assert engine.put is not None
    put_one = engine.put
    start = perf_counter()
    for body in bodies:
        put_one(body)
    seconds = perf_counter() - start
    _check(engine.pull(len(bodies)), bodies)
    return seconds


def take(engine: Opened, bodies: Bodies) -> float:
    assert engine.take is not None
    engine.push(bodies)
    take_one = engine.take
    body = b""
    start = perf_counter()
    for _ in bodies:
        body = take_one()
    seconds = perf_counter() - start
    _check([body], bodies)
    return seconds


def alternate(engine: Opened, bodies: Bodies) -> float:
    assert engine.put is not None
    assert engine.take is not None
    put_one, take_one = engine.put, engine.take
    taken = b""
    start = perf_counter()
    for body in bodies:
        put_one(body)
        taken = take_one()
    seconds = perf_counter() - start
    _check([taken], bodies)
    return seconds


def put_batch(engine: Opened, bodies: Bodies) -> float:
    assert engine.put_many is not None
    start = perf_counter()
    engine.put_many(bodies)
    seconds = perf_counter() - start
    _check(engine.pull(len(bodies)), bodies)
    return seconds


def take_batch(engine: Opened, bodies: Bodies) -> float:
    engine.push(bodies)
    start = perf_counter()
    taken = engine.pull(len(bodies))
    seconds = perf_counter() - start
    _check(taken, bodies)
    return seconds


def _check(taken: object, bodies: Bodies) -> None:
    """Hold that the last message came back as it was put; a list ends with it."""
    if not isinstance(taken, list) or taken[-1] != bodies[-1]:
        raise AssertionError("a message came back changed, or out of order")


def bodies_of(count: int, size: int) -> Bodies:
    """Make bodies that differ."""
    return [number.to_bytes(4, "big") * (size // 4) for number in range(count)]


def _singles(operation: Operation, table: str, setup: Setup) -> Iterator[Row]:
    def counts(engine: Engine, _: int) -> int:
        return max(CHUNK[engine.promise] // setup.size(1, 5), 1)

    def fits(engine: Opened) -> bool:
        return engine.put is not None and engine.take is not None

    yield from _tables(operation, table, setup, counts, fits)


def _batches(operation: Operation, native: str, table: str, setup: Setup) -> Iterator[Row]:
    def counts(_: Engine, size: int) -> int:
        return min(BATCH, BATCH_BYTES // size) // setup.size(1, 10)

    def fits(engine: Opened) -> bool:
        return getattr(engine, native) is not None

    yield from _tables(operation, table, setup, counts, fits)


def _tables(
    operation: Operation,
    table: str,
    setup: Setup,
    counts: Callable[[Engine, int], int],
    fits: Callable[[Opened], bool],
) -> Iterator[Row]:
    for size in QUICK_SIZES if setup.quick else SIZES:
        with contest.opened(setup, setup.engines) as every:
            entrants = [entrant for entrant in every if entrant.opened is None or fits(entrant.opened)]
            bodies = [bodies_of(counts(entrant.engine, size), size) for entrant in entrants]
            sides = [
                entrant.guarded(partial(_with, operation, some)) for entrant, some in zip(entrants, bodies, strict=True)
            ]
            measured = interleave(setup.few_rounds, setup.size(3, 1), *sides)
        for entrant, some, seconds in zip(entrants, bodies, measured, strict=True):
            yield entrant.row(table, bytes_name(size), micros(entrant.engine.name, len(some), seconds))


def _with(operation: Operation, bodies: Bodies, engine: Opened) -> float:
    return operation(engine, bodies)


WORKLOADS = [
    Workload("put", "one message into each engine, in five sizes", partial(_singles, put, "put, µs a message")),
    Workload(
        "get-ack",
        "one message out of each engine and settled with the engine's own promise",
        partial(_singles, take, "get + ack, µs a message"),
    ),
    Workload(
        "alternate",
        "one message in and out again, the queue otherwise empty",
        partial(_singles, alternate, "put + get + ack in turn, µs a message"),
    ),
    Workload(
        "batch-put",
        "1,000 messages (4 MiB at most) in one call, where the engine has one",
        partial(_batches, put_batch, "put_many", "put in batches, µs a message"),
    ),
    Workload(
        "batch-get-ack",
        "1,000 messages (4 MiB at most) out and settled at once, where the engine can",
        partial(_batches, take_batch, "take_many", "get + ack in batches, µs a message"),
    ),
]
