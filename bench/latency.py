"""How long single operations take: not the mean, but the median and the slow ones, over all rounds together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from bench import contest
from bench.engines.base import KILL, MEMORY, SYNCED, Opened
from bench.family import bodies_of
from bench.measure import Row, Series, Setup, Workload, interleave, percentile

SIZE = 1024
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
OPERATIONS = {MEMORY: 2_000, KILL: 1_000, SYNCED: 250}
"""In a round; twelve rounds are kept, so that even a p99.9 of what syncs stands for three operations or more."""


def single_operations(setup: Setup) -> Iterator[Row]:
    with contest.opened(setup, setup.engines) as every:
        entrants = [one for one in every if one.opened is None or (one.opened.put and one.opened.take)]
        puts: list[list[float]] = [[] for _ in entrants]
        takes: list[list[float]] = [[] for _ in entrants]
        sides = []
        for entrant, put_times, take_times in zip(entrants, puts, takes, strict=True):
            bodies = bodies_of(OPERATIONS[entrant.engine.promise] // setup.size(1, 25), SIZE)
            sides.append(entrant.guarded(_timing(bodies, put_times, take_times)))
        interleave(setup.kept_rounds or setup.size(12, 2), 1, *sides)
    for table, times in (("put, 1 KiB: percentiles, µs", puts), ("get + ack, 1 KiB: percentiles, µs", takes)):
        for entrant, found in zip(entrants, times, strict=True):
            ordered = sorted(found) or [0.0]
            for column, share in SHARES.items():
                yield entrant.row(
                    table,
                    column,
                    Series(entrant.engine.name, "µs", [percentile(ordered, share) * 1e6]),
                    notes=[f"of {len(found):,} operations"],
                )


def _timing(bodies: list[bytes], puts: list[float], takes: list[float]) -> Callable[[Opened], float]:
    """Return a side that notes the time of each operation; the first round's are forgotten."""
    warm = False

    def side(engine: Opened) -> float:
        nonlocal warm
        assert engine.put is not None
        assert engine.take is not None
        put, take = engine.put, engine.take
        start = before = perf_counter()
        for body in bodies:
            put(body)
            after = perf_counter()
            puts.append(after - before)
            before = after
        for _ in bodies:
            take()
            after = perf_counter()
            takes.append(after - before)
            before = after
        if not warm:
            warm = True
            puts.clear()
            takes.clear()
        return before - start

    return side


WORKLOADS = [
    Workload(
        "latency", "each put and each get + ack of 1 KiB timed alone; percentiles for each engine", single_operations
    )
]
