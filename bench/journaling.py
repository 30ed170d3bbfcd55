"""The journal before the log: what one write and one sync confirm, against the bare operations and against none.

All sides lie on one file system and take turns. The bare operation writes the same bytes to a file that was written as
a whole before, and syncs them, as the journal does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import qflow
from bench.durable import CAPACITY, putting
from bench.measure import Row, Series, Setup, Workload, at_most, interleave, micros, percentile, ratio

FILE_BYTES = 4 * 2**20
WARMING_UP = 40
"""Puts before there is a journal, and some more."""


def puts(setup: Setup) -> Iterator[Row]:
    times, chunks = 10, setup.size(41, 3)
    body = bytes(1024)
    waits: dict[str, list[float]] = {"auto": [], "off": []}
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        sides = [_timed(_open(stack, path, mode).put, body, times, waits[mode]) for mode in waits]
        seconds = interleave(setup.rounds, chunks, *sides, _bare(stack, path / "bare", body, times))
    journal, log, bare = map(micros, ("with a journal", "without", "bare"), (times,) * 3, seconds)
    what = "durable put, 1 KiB, one thread"
    yield Row(
        name=f"{what}: time over write and sync of its bytes",
        figure=ratio(journal, bare),
        bound=at_most(1.4),
        details=[journal, bare],
    )
    yield Row(
        name=f"{what}: time over that of commits of the log",
        figure=ratio(journal, log),
        bound=at_most(0.62),
        details=[journal, log],
    )
    slow = [Series(mode, "µs", [percentile(sorted(one), 0.99) * 1e6]) for mode, one in waits.items()]
    yield Row(name=f"{what}: the slowest hundredth", figure=ratio(*slow), bound=at_most(1), details=slow)


def behind_acks(setup: Setup) -> Iterator[Row]:
    """As a consumer does all day: a message is taken, acked, and its result put, in one queue for simplicity."""
    times, chunks, body = 20, setup.size(41, 3), bytes(1024)
    with ExitStack() as stack:
        queue = _open(stack, stack.enter_context(setup.scratch()), "auto")

        def passed_on(body: bytes) -> None:
            queue.get().ack()
            queue.put(body)

        measured = interleave(setup.rounds, chunks, putting(passed_on, body, times), putting(queue.put, body, times))
    ours, alone = map(micros, ("get, ack, put", "put"), (times,) * 2, measured)
    yield Row(
        name="durable get, ack and put, 1 KiB, one by one: time over that of the put alone",
        figure=ratio(ours, alone),
        details=[ours, alone],
    )


def written(setup: Setup) -> Iterator[Row]:
    """What reaches the device, by the account that the kernel keeps of this process."""
    times = setup.size(10_000, 50)
    sides = []
    for mode in ("auto", "off"):
        with ExitStack() as stack:
            queue = _open(stack, stack.enter_context(setup.scratch()), mode)
            before = _written_bytes()
            for _ in range(times):
                queue.put(bytes(100))
            sides.append(Series(f"journal={mode!r}", "B", [(_written_bytes() - before) / times]))
    yield Row(
        name=f"bytes written for each of {times:,} durable puts of 100 B, over those without a journal",
        figure=ratio(*sides),
        bound=at_most(0.25),
        details=sides,
    )


def beside_a_busy_thread(setup: Setup) -> Iterator[Row]:
    """A thread that computes gives the interpreter away each 5 ms, and a put asks for it several times."""
    times, body = setup.size(40, 3), bytes(1024)
    series = []
    with ExitStack() as stack:
        queue = _open(stack, stack.enter_context(setup.scratch()), "auto")
        side = putting(queue.put, body, times)
        series.append(micros("alone", times, [side() for _ in range(setup.few_rounds)]))
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        stack.enter_context(_busy())
        for interval_s in (0.005, 0.0005):
            sys.setswitchinterval(interval_s)
            seconds = [side() for _ in range(setup.few_rounds)]
            series.append(micros(f"beside it, sys.setswitchinterval({interval_s})", times, seconds))
    yield Row(
        name="durable put, 1 KiB, beside a thread that computes: 0.5 ms between switches over 5 ms",
        figure=ratio(series[2], series[1]),
        details=series,
    )


@contextmanager
def _busy() -> Iterator[None]:
    """Have a thread compute meanwhile."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(number for number in range(1_000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _open(stack: ExitStack, path: Path, mode: str) -> qflow.Queue:
    """Return a queue that has put some messages."""
    settings = qflow.BrokerOptions(capacity_bytes=CAPACITY, journal="off" if mode == "off" else "auto")
    queue = stack.enter_context(qflow.open(path / mode, **settings)).declare_queue("bench")
    for _ in range(WARMING_UP):
        queue.put(bytes(100))
    return queue


def _timed(put: Callable[[bytes], object], body: bytes, times: int, waits: list[float]) -> Callable[[], float]:
    """Return a side that puts messages, and notes how long each took."""

    def one(body: bytes) -> None:
        start = perf_counter()
        put(body)
        waits.append(perf_counter() - start)

    return putting(one, body, times)


def _bare(stack: ExitStack, path: Path, body: bytes, times: int) -> Callable[[], float]:
    """Return a side that writes and syncs, one after the other, in a file of fixed size."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    os.pwrite(fd, bytes(FILE_BYTES), 0)
    os.fsync(fd)
    position = 0

    def put(body: bytes) -> None:
        nonlocal position
        if position + len(body) > FILE_BYTES:
            position = 0
        os.pwrite(fd, body, position)
        os.fdatasync(fd)
        position += len(body)

    return putting(put, body, times)


def _written_bytes() -> int:
    """Return what this process has had written to devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


WORKLOADS = [
    Workload("journal", "one thread waits for each 1 KiB message; bare: write and sync; without a journal", puts),
    Workload(
        "journal-busy", "single puts beside a thread that computes, by the interval of switches", beside_a_busy_thread
    ),
    Workload(
        "journal-behind-acks", "a message is taken, acked, and another one put, against the put alone", behind_acks
    ),
    Workload("journal-bytes", "what reaches the device for single puts, with a journal and without", written),
]
