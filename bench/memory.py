"""How much memory a backlog takes: whole processes with a backlog far over the capacity, the larger ones in a cgroup.

Figures are *RssAnon* over that of a bare interpreter. Pages of mapped files are RssFile: the kernel takes them back
when it needs them; their peak is printed beside, and what the cgroup is charged, page cache included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import attrs

import qflow
from bench import cgroup, children, sampler
from bench.engines.qflow_queues import PATIENCE_S, open_broker
from bench.measure import Curve, Row, Series, Setup, Workload, at_most

ALLOWED = 48 * 2**20
BATCH = 1000
MIB = 2**20


# In the parent -----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Backlog:
    """A queue filled far over its capacity, then drained."""

    what: str
    count: int
    size: int
    capacity: int
    spill: str = "files"
    batches: bool = True
    limit: int = 0
    """Of the cgroup it runs in; 0: none is asked for."""

    def need_disk(self, setup: Setup) -> None:
        """Hold that it fits: a file of a message takes whole pages of 4 KiB, an entry in a segment its bytes."""
        each = 4096 * -(-self.size // 4096) + 256 if self.spill == "files" else self.size + 64
        setup.need_disk(self.count * each)

    def rows(self, setup: Setup) -> Iterator[Row]:
        """Run it in a child; give its peak, and in a cgroup whether memory was flat."""
        self.need_disk(setup)
        bare = children.bare_interpreter_bytes()
        with ExitStack() as stack:
            path = stack.enter_context(setup.scratch())
            group, note = cgroup.limited_if_can(stack, self.limit) if self.limit else (None, "")
            how = "batches" if self.batches else "one by one"
            arguments = (path, self.spill, how, self.count, self.size, self.capacity)
            found = children.run("backlog", *arguments, group=group)
        label = f"{self.count:,} x {self.size:,} B, {how}, {self.spill}"
        anonymous = [value - bare for value in found["anonymous"]]
        bound = self.capacity + ALLOWED
        setup.curves.append(
            Curve(
                name=label,
                seconds=found["seconds"],
                backlog=found["backlog"],
                anonymous=anonymous,
                file=found["file"],
                cgroup=found["cgroup"],
                bound_bytes=bound,
            )
        )
        fill_s = found["fill_s"]
        yield Row(
            name=f"{self.what}: peak RssAnon over a bare interpreter",
            figure=Series("peak RssAnon over a bare interpreter", "MiB", [(found["peak_anonymous"] - bare) / MIB]),
            bound=at_most(bound / MIB, "MiB"),
            details=[
                Series("peak RssAnon", "MiB", [found["peak_anonymous"] / MIB]),
                Series("RssAnon of a bare interpreter", "MiB", [bare / MIB]),
                Series("RssAnon over it after the import and open", "MiB", [anonymous[0] / MIB]),
                Series("peak RssFile", "MiB", [found["peak_file"] / MIB]),
                *([Series("peak charge of the cgroup", "MiB", [found["peak_cgroup"] / MIB])] if group else []),
                Series("fill", "/s", [self.count / fill_s]),
                Series("drain", "/s", [self.count / found["drain_s"]]),
            ],
            notes=[
                f"{label}: {self.count * self.size / MIB:,.0f} MiB of bodies through {self.capacity / MIB:.0f} MiB, "
                "filled, then drained",
                *filter(None, [note]),
            ],
        )
        if self.limit:
            start = found["seconds"][0]
            rise = sampler.growth(found["seconds"], found["anonymous"], start + fill_s / 2, start + fill_s)
            yield Row(
                name=f"{self.what}: growth of RssAnon over the last half of the fill",
                figure=Series("rise of a straight line through the samples", "MiB", [rise / MIB]),
                bound=at_most(1, "MiB"),
                notes=[f"while the backlog grew by {self.count * self.size / 2 / MIB:,.0f} MiB"],
            )


def batches(setup: Setup) -> Iterator[Row]:
    capacity = setup.size(64, 1) * MIB
    count = setup.size(2**20, 2_000)
    yield from Backlog(what="1 GiB backlog of 1 KiB messages", count=count, size=1024, capacity=capacity).rows(setup)


def singles(setup: Setup) -> Iterator[Row]:
    capacity = setup.size(64, 1) * MIB
    count = setup.size(1_000_000, 5_000)
    what = "1,000,000 x 100 B put one by one"
    yield from Backlog(what=what, count=count, size=100, capacity=capacity, batches=False).rows(setup)


def ten_gib(setup: Setup) -> Iterator[Row]:
    return _in_a_cgroup(setup, "10 GiB backlog of 1 KiB messages", setup.size(10 * 2**20, 10_000), 1024)


def ten_million(setup: Setup) -> Iterator[Row]:
    return _in_a_cgroup(setup, "10,000,000 x 100 B", setup.size(10_000_000, 50_000), 100)


def _in_a_cgroup(setup: Setup, what: str, count: int, size: int) -> Iterator[Row]:
    return Backlog(
        what=f"{what} through segments, 192 MiB cgroup",
        count=count,
        size=size,
        capacity=setup.size(64, 1) * MIB,
        spill="segments",
        limit=192 * MIB,
    ).rows(setup)


WORKLOADS = [
    Workload(
        "memory-batches", "a process with a backlog of 16 times its capacity, put and taken 1,000 at a time", batches
    ),
    Workload("memory-singles", "a process with a million small messages, put and taken one by one", singles),
    Workload("backlog-10gib", "10 GiB of 1 KiB messages through 64 MiB, in a cgroup of 192 MiB", ten_gib),
    Workload("backlog-10m", "ten million messages of 100 B through 64 MiB, in a cgroup of 192 MiB", ten_million),
]


# In a child --------------------------------------------------------------------------------------------------------


def _backlog(path: str, spill: str, how: str, count_text: str, size_text: str, capacity: str) -> None:
    count, size = int(count_text), int(size_text)
    put, take = (put_in_batches, _take_in_batches) if how == "batches" else (put_one_by_one, _take_one_by_one)
    with open_broker(Path(path) / "spool", spill=spill, capacity_bytes=int(capacity)) as broker:
        queue = broker.declare_queue("bench", durable=False)
        watched = sampler.Sampler(lambda: len(queue) * size, children.joined_group())
        with watched.running():
            start = perf_counter()
            put(queue, count, size)
            filled = perf_counter()
            take(queue, count)
            drained = perf_counter()
    children.report({**watched.curves(), "fill_s": filled - start, "drain_s": drained - filled})


def bodies(count: int, size: int) -> Iterator[bytes]:
    """Make bodies that are objects of their own, as a producer's are."""
    for number in range(count):
        yield number.to_bytes(size, "big")


def put_one_by_one(queue: qflow.Queue, count: int, size: int) -> None:
    for body in bodies(count, size):
        queue.put(body)


def put_in_batches(queue: qflow.Queue, count: int, size: int) -> None:
    for first in range(0, count, BATCH):
        queue.put_many(bodies(min(BATCH, count - first), size))


def _take_one_by_one(queue: qflow.Queue, count: int) -> None:
    for _ in range(count):
        queue.get(PATIENCE_S).ack()


def _take_in_batches(queue: qflow.Queue, count: int) -> None:
    while count:
        batch = queue.get_many(BATCH, PATIENCE_S)
        count -= len(batch)
        batch.ack()


ROLES: dict[str, Callable[..., None]] = {"backlog": _backlog}
