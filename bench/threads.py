"""Several threads that each put and wait for their sync: qflow lets one sync confirm many, a database takes turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter, sleep

from bench import contest
from bench.engines import by_name
from bench.engines.base import SYNCED, Engine, Opened
from bench.errors import CannotRun
from bench.measure import Bound, Row, Series, Setup, Workload, at_least, interleave, rates, ratio

THREADS = (1, 4, 16, 64)
OURS = "qflow-files-durable"
BODY = bytes(1024)
TABLE = "durable put, 1 KiB, by threads, messages a second"


def producers(setup: Setup) -> Iterator[Row]:
    engines = [one for one in setup.engines if one.promise == SYNCED]
    engines += [by_name(OURS)] * (OURS not in {one.name for one in engines})
    found: dict[int, dict[str, Series]] = {}
    for count in THREADS:
        found[count] = {}
        with contest.opened(setup, engines) as every:
            entrants = [one for one in every if one.opened is None or one.opened.put]
            each = max(setup.size(400, 16) // count, setup.size(16, 2))
            sides = [one.guarded(partial(together, count, each)) for one in entrants]
            measured = interleave(setup.few_rounds, setup.size(2, 1), *sides)
        for entrant, seconds in zip(entrants, measured, strict=True):
            column = f"{count} thread{'s' * (count > 1)}"
            if not entrant.problem:
                found[count][entrant.engine.name] = rates(entrant.engine.name, count * each, seconds)
            series = found[count].get(entrant.engine.name, Series(entrant.engine.name, "/s", []))
            yield entrant.row(TABLE, column, series, more=True)
    yield from _ratios(found, contest.synced_peers(setup))
    raw = found[1].get("lmdb-message")
    if raw is not None:
        yield _bare_gate(setup, 1 / raw.median)


def together(count: int, each: int, opened: Opened) -> float:
    """Return the seconds from the moment all threads stand ready to the last sync; then empty the queue again."""
    assert opened.put is not None
    put: Callable[[bytes], object] = opened.put
    barrier = threading.Barrier(count + 1)
    errors: list[Exception] = []

    def work() -> None:
        try:
            barrier.wait()
            for _ in range(each):
                put(BODY)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        barrier.wait()
        start = perf_counter()
        for worker in workers:
            worker.join()
    except BaseException:
        barrier.abort()  # those that have started would wait for those that never come
        raise
    seconds = perf_counter() - start
    if errors:
        raise errors[0]
    opened.pull(count * each)
    return seconds


class Gate:
    """What waiting together costs by itself: who comes first sleeps for all who come meanwhile, then lets them pass."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._open: threading.Lock | None = None
        self._asleep = threading.Lock()

    def put(self, _body: bytes) -> None:
        with self._lock:
            gate, leads = self._open, self._open is None
            if gate is None:
                gate = self._open = threading.Lock()
                gate.acquire()
        if leads:
            with self._asleep:
                with self._lock:
                    self._open = None
                sleep(self._seconds)
        else:
            gate.acquire()
        gate.release()


def _bare_gate(setup: Setup, commit_s: float) -> Row:
    """Measure 64 threads that wait for each other and for nothing else."""
    gate = Gate(commit_s)
    opened = Opened(put=gate.put, take=lambda: None, close=lambda: None)
    each = setup.size(100, 2)
    (seconds,) = interleave(setup.few_rounds, setup.size(2, 1), lambda: together(64, each, opened))
    return Row(
        name="64 threads at a bare gate, no log: one sleeps as long as a raw commit takes, the others wait: rate",
        figure=rates("bare gate", 64 * each, seconds),
        notes=[f"the sleep is {commit_s * 1e6:.0f} µs; the interpreter's switches between threads are what is left"],
    )


def _ratios(found: dict[int, dict[str, Series]], peers: list[Engine]) -> Iterator[Row]:
    bounds: dict[int, Bound | None] = {1: None, 4: at_least(1), 16: None, 64: at_least(10)}
    for count, series in found.items():
        if OURS not in series:
            raise CannotRun(f"{OURS} could not be measured with {count} threads")
        figure, problem = contest.over_best(series[OURS], list(series.values()), peers)
        yield Row(
            name=f"durable put, 1 KiB, {count} thread{'s' * (count > 1)}: rate over the best synced peer with as many",
            figure=figure,
            bound=bounds[count],
            problem=problem,
            details=[series[OURS], *(one for name, one in series.items() if name != OURS)],
        )
    yield Row(
        name="durable put, 1 KiB, 64 threads: rate over one thread",
        figure=ratio(found[64][OURS], found[1][OURS]),
        bound=at_least(6),
        details=[found[64][OURS], found[1][OURS]],
    )


WORKLOADS = [
    Workload(
        "threads", "1, 4, 16 and 64 threads put 1 KiB each and wait for their syncs, in every synced engine", producers
    )
]
