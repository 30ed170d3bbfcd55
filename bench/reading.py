"""How spilled messages come back from segments: through maps or with `pread`, and with the allocator told or not.

A queue is filled with eight times its capacity, untimed, and drained one by one. Its segments lie in the page cache, so
seconds are the thread's time on the processor, the kernel's for it included. What the allocator was told cannot be
undone in a process, so each side of that row has one of its own. They import compiled modules and open a
spool that exists, as most processes do: compiling a module, or creating a log, happens to tell the allocator the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import thread_time

import qflow
from bench import children
from bench.engines.qflow_queues import PATIENCE_S, open_broker
from bench.measure import Row, Setup, Workload, by_side, bytes_name, interleave, micros, ratio
from bench.spill import fill
from qflow.message import OVERHEAD_BYTES

SIZES = (1024, 16 * 1024)
MAPPED = 16


# In the parent -----------------------------------------------------------------------------------------------------


def mapped(setup: Setup) -> Iterator[Row]:
    for size in SIZES:
        yield _mapped(setup, size)


def _mapped(setup: Setup, size: int) -> Row:
    count = _count(setup, size)
    setup.need_disk(3 * count * size)
    with ExitStack() as stack:

        def side(most: int) -> Callable[[], float]:
            path = stack.enter_context(setup.scratch())
            broker = stack.enter_context(open_broker(path / "spool", spill="segments", max_mapped_segments=most))
            queue = _declare(broker, count, size)
            return lambda: _drained(queue, count, size)

        measured = interleave(setup.few_rounds, setup.size(5, 1), side(MAPPED), side(0))
    names = (f"max_mapped_segments={MAPPED}", "pread")
    maps, reads = by_side(micros, names, count, measured)
    return Row(
        name=f"get + ack from segments, {bytes_name(size)}, one by one: time through maps over pread",
        figure=ratio(maps, reads),
        details=[maps, reads],
        notes=[_note(count)],
    )


def told(setup: Setup) -> Iterator[Row]:
    for size in SIZES:
        yield _told(setup, size)


def _told(setup: Setup, size: int) -> Row:
    from qflow.spool import ALLOCATOR_HINT_BYTES  # here: other workloads run with commits that have it elsewhere

    count = _count(setup, size)
    setup.need_disk(3 * count * size)
    with setup.scratch() as path:
        prefix = sys.pycache_prefix or str(path / "compiled")
        compiled = {"PYTHONPYCACHEPREFIX": prefix, "PYTHONDONTWRITEBYTECODE": ""}

        def side(hint: int) -> Callable[[], float]:
            def run() -> float:
                with setup.scratch() as spool:
                    open_broker(spool, spill="segments").close()
                    return float(children.run("drain-told", spool, hint, count, size, environment=compiled))

            return run

        measured = interleave(setup.few_rounds, 1, side(ALLOCATOR_HINT_BYTES), side(0))
    names = ("told", "not told")
    ours, other = by_side(micros, names, count, measured)
    return Row(
        name=f"get + ack from segments, {bytes_name(size)}, one by one: time with the allocator not told over told",
        figure=ratio(other, ours),
        details=[other, ours],
        notes=[
            _note(count),
            "a process for each side and round, in turns; `qflow.spool.ALLOCATOR_HINT_BYTES` is 0 or not",
        ],
    )


def _count(setup: Setup, size: int) -> int:
    """Return how many messages make 64 MiB: an eighth of them in memory is enough to restore a MiB at a time."""
    return setup.size(64, 1) * 2**20 // size


def _note(count: int) -> str:
    return f"{count:,} messages wait, seven of eight spilled; filling is not timed"


WORKLOADS = [
    Workload("read-mapped", "spilled messages read through maps of segments, and with pread", mapped),
    Workload("read-told", "spilled messages read when the allocator was told to keep memory, and was not", told),
]


# In either ---------------------------------------------------------------------------------------------------------


def _declare(broker: qflow.Broker, count: int, size: int) -> qflow.Queue:
    return broker.declare_queue("bench", durable=False, capacity_bytes=count * (size + OVERHEAD_BYTES) // 8)


def _drained(queue: qflow.Queue, count: int, size: int) -> float:
    """Fill a queue, then return the seconds of the processor it takes to drain it."""
    fill(queue, count, bytes(size))
    get = queue.get
    start = thread_time()
    for _ in range(count):
        get(PATIENCE_S).ack()
    return thread_time() - start


# In a child --------------------------------------------------------------------------------------------------------


def _drain_told(path: str, hint: str, messages: str, message_bytes: str) -> None:
    """Drain a second time: the first warms up."""
    import qflow.spool

    count, size = int(messages), int(message_bytes)
    qflow.spool.ALLOCATOR_HINT_BYTES = int(hint)
    with open_broker(Path(path), spill="segments") as broker:
        queue = _declare(broker, count, size)
        _drained(queue, count, size)
        children.report(_drained(queue, count, size))


ROLES: dict[str, Callable[..., None]] = {"drain-told": _drain_told}
