"""How long a spool takes to open after its owner was killed, to the first message.

A child fills a queue and is killed with SIGKILL; fresh children then time `qflow.open` up to the first `get`, after
their imports, and are killed, so each round finds the same spool. Before each opening the caches of the system are
dropped where that is allowed; a row says when it was not.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter

import qflow
from bench import children
from bench.measure import Row, Series, Setup, Workload, at_most

BODY = bytes(100)
BATCH = 1000
BOUND = at_most(200, "ms")
FLAT = at_most(1.5)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
ROOM = "4GiB"
"""The capacity of the child that fills, so that nothing spills and the run stays short."""


# In the parent -----------------------------------------------------------------------------------------------------


def in_batches(setup: Setup) -> Iterator[Row]:
    sizes = (1_000, 2_000, 3_000) if setup.quick else (10_000, 100_000, 1_000_000, 10_000_000)
    yield from _opened(setup, "put in batches of 1,000", [("put_many", size, ROOM) for size in sizes])


def one_by_one(setup: Setup) -> Iterator[Row]:
    if setup.quick:
        fillings = [("put", 100, ROOM), ("put", 200, ROOM), ("submit", 2_000, ROOM)]
    else:
        fillings = [("put", 10_000, ROOM), ("put", 100_000, ROOM), ("submit", 1_000_000, ROOM)]
    yield from _opened(setup, "put one by one", fillings)


def with_spill(setup: Setup) -> Iterator[Row]:
    size = setup.size(100_000, 3_000)
    setup.need_disk(size * 4096 * 2)
    yield from _opened(setup, "batches, most of it spilled", [("put_many", size, "1MiB")])


def _opened(setup: Setup, how: str, fillings: list[tuple[str, int, str]]) -> Iterator[Row]:
    """Fill one spool after the other, then open them in turns."""
    setup.need_disk(sum(size for method, size, _ in fillings if method == "put_many") * 200)
    with setup.scratch() as path:
        spools = [path / str(number) for number in range(len(fillings))]
        filled = [
            children.run_and_kill("fill", spool, *filling) for spool, filling in zip(spools, fillings, strict=True)
        ]
        times: list[list[dict[str, float]]] = [[] for _ in spools]
        for _ in range(setup.few_rounds):
            for spool, found in zip(spools, times, strict=True):
                cold = drop_caches(setup)
                found.append(children.run_and_kill("open", spool))
    medians = []
    for (method, size, _), seconds, found in zip(fillings, filled, times, strict=True):
        figure = Series("open to the first get", "ms", [one["first_get_s"] * 1e3 for one in found])
        medians.append(figure.median)
        yield Row(
            name=f"open after SIGKILL to the first get, {size:,} durable messages, {how}",
            figure=figure,
            bound=BOUND,
            details=[Series("of that, open", "ms", [one["open_s"] * 1e3 for one in found])],
            notes=[f"put with `{method}`, in {seconds:.1f} s; {cold}"],
        )
    if len(fillings) > 1:
        yield Row(
            name=f"flat: {fillings[-1][1]:,} over {fillings[0][1]:,} messages, {how}",
            figure=Series("ratio of the medians", "x", [medians[-1] / medians[0]]),
            bound=FLAT,
        )


def with_journal(setup: Setup) -> Iterator[Row]:
    """Open a spool whose owner was killed with a journal that is nearly full, and once more without it."""
    with setup.scratch() as path:
        records = children.run_and_kill("fill_journal", path / "spool", setup.size(0, 200))
        full: list[float] = []
        empty: list[float] = []
        for number in range(setup.few_rounds):
            copy = path / str(number)
            shutil.copytree(path / "spool", copy, ignore=shutil.ignore_patterns("door", "stats.json*"))
            for found in (full, empty):
                cold = drop_caches(setup)
                found.append(children.run_and_kill("open", copy)["open_s"] * 1e3)
    yield Row(
        name="open after SIGKILL with a journal that is nearly full, over one that is empty",
        figure=Series("longer", "ms", [more - less for more, less in zip(full, empty, strict=True)]),
        bound=at_most(100, "ms"),
        details=[Series("full", "ms", full), Series("empty", "ms", empty)],
        notes=[f"{records:,} records, each a message of 100 B; {cold}"],
    )


def drop_caches(setup: Setup) -> str:
    """Write everything out and drop the page cache of the system; return what was done. Not in a quick run."""
    if setup.quick:
        return "caches kept, for a quick run"
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError as error:
        return f"caches kept: {error.strerror}"
    return "caches dropped"


WORKLOADS = [
    Workload("restart-batches", "open after SIGKILL when messages came 1,000 a commit", in_batches),
    Workload(
        "restart-singles",
        "open after SIGKILL when messages came one a commit; the million with `submit`, whose commits hold several",
        one_by_one,
    ),
    Workload("restart-journal", "open after SIGKILL with a full journal, and with an empty one", with_journal),
    Workload("restart-spilled", "open after SIGKILL with a directory of spill files to set aside", with_spill),
]


# In a child --------------------------------------------------------------------------------------------------------


def _fill(path: str, method: str, count_text: str, capacity: str) -> None:
    count = int(count_text)
    queue = qflow.open(Path(path), capacity_bytes=capacity).declare_queue("bench")
    start = perf_counter()
    if method == "put_many":
        for first in range(0, count, BATCH):
            queue.put_many([BODY] * min(BATCH, count - first))
    elif method == "put":
        for _ in range(count):
            queue.put(BODY)
    else:
        waited: list[Future[int]] = []
        for _ in range(count):
            waited.append(queue.submit(BODY))
            if len(waited) == BATCH:
                waited.pop().result()
                waited.clear()
        for future in waited:
            future.result()
    children.report(perf_counter() - start)
    children.wait_to_be_killed()


def _open(path: str) -> None:
    start = perf_counter()
    broker = qflow.open(Path(path))
    opened = perf_counter()
    delivery = broker.queue("bench").get()
    done = perf_counter()
    if delivery.body != BODY:
        raise AssertionError("the first message came back changed")
    children.report({"open_s": opened - start, "first_get_s": done - start})
    children.wait_to_be_killed()


def _fill_journal(path: str, most_text: str) -> None:
    """Put until the journal has as many records as it had when it was full, or so many; and be killed at once."""
    broker = qflow.open(Path(path))
    queue, log = broker.declare_queue("bench"), broker.engine.log
    before, most = 0, int(most_text)
    while (held_back := log.held_back) >= before and not 0 < most <= held_back:
        before = held_back
        queue.put(BODY)
    while (held_back := log.held_back) < 0.95 * before:
        queue.put(BODY)
    children.report(held_back)
    os.kill(os.getpid(), signal.SIGKILL)  # soon it would be applied


ROLES: dict[str, Callable[..., None]] = {"fill": _fill, "fill_journal": _fill_journal, "open": _open}
