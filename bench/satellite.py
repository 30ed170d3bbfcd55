"""The shapes SkyWalking Satellite measures its mmap queue with, every message spilled, against raw append and pread.

Its first shape, and one change of each kind. Its own figures (a laptop of 2018) were 19 to 45 µs a push; they are
another machine's, and no ratio is made of them. Each shape is measured twice: in a queue of the default capacity, whose
memory is full of messages before and after the ones that are timed; and in one that has no more memory than Satellite
maps, read through as many maps. Times are divided by the messages that were spilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import attrs

import qflow
from bench import loops
from bench.engines.qflow_queues import open_broker
from bench.measure import Bound, Row, Setup, Workload, at_most, by_side, interleave, micros, ratio
from bench.spill import drain, fill
from qflow.message import OVERHEAD_BYTES
from qflow.storage.blocks import SINGLE_BYTES


@attrs.frozen
class Shape:
    """One configuration of its benchmark."""

    segment_kib: int = 128
    mapped: int = 10
    message_kib: int = 8
    capacity: int = 10_000
    """Messages that wait."""

    def __str__(self) -> str:
        return f"{self.message_kib} KiB messages, segments of {self.segment_kib} KiB, {self.capacity // 1000} k waiting"


SHAPES = (Shape(), Shape(segment_kib=256, mapped=20), Shape(message_kib=16), Shape(capacity=100_000))


CAPACITY = 64 * 2**20


def shapes(setup: Setup) -> Iterator[Row]:
    for shape in SHAPES:
        for measure in (_in_a_full_queue, _in_what_is_mapped):
            try:
                yield from measure(setup, shape)
            except Exception as error:
                reason = str(error).replace(str(setup.directory), "<directory>")
                yield Row(name=f"Satellite's push + pop, {shape}", problem=f"not measured: {reason}")


def _in_a_full_queue(setup: Setup, shape: Shape) -> Iterator[Row]:
    body = bytes(shape.message_kib * 1024)
    capacity = setup.size(CAPACITY, CAPACITY // 16)
    head = capacity // (len(body) + OVERHEAD_BYTES)

    def cycle(queue: qflow.Queue, count: int) -> tuple[float, float]:
        fill(queue, head, body)
        push = fill(queue, count, body)
        drain(queue, head)
        return push, drain(queue, count)

    yield from _measured(setup, shape, body, cycle, capacity_bytes=capacity, mapped=0, bound=at_most(1.7))


def _in_what_is_mapped(setup: Setup, shape: Shape) -> Iterator[Row]:
    body = bytes(shape.message_kib * 1024)

    def cycle(queue: qflow.Queue, count: int) -> tuple[float, float]:
        return fill(queue, count, body), drain(queue, count)

    capacity = shape.mapped * shape.segment_kib * 1024
    yield from _measured(setup, shape, body, cycle, capacity_bytes=capacity, mapped=shape.mapped, bound=None)


def _measured(
    setup: Setup,
    shape: Shape,
    body: bytes,
    cycle: Callable[[qflow.Queue, int], tuple[float, float]],
    *,
    capacity_bytes: int,
    mapped: int,
    bound: Bound | None,
) -> Iterator[Row]:
    count = setup.size(shape.capacity, 1_000)
    setup.need_disk(3 * count * (len(body) + 4096))
    settings = {"segment_bytes": shape.segment_kib * 1024, "max_mapped_segments": mapped}
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        broker = stack.enter_context(open_broker(path / "spool", spill="segments", **settings))
        queue = broker.declare_queue("bench", durable=False, capacity_bytes=capacity_bytes)
        fill(queue, count, body)
        spilled = count if bound else queue.stats().spilled_messages
        drain(queue, count)
        block = bytes(len(body) + SINGLE_BYTES)
        files = stack.enter_context(loops.append_files(path))
        pushes: list[float] = []
        appends: list[float] = []

        def mine() -> float:
            push, pop = cycle(queue, count)
            pushes.append(push)
            return push + pop

        def appended() -> float:
            appends.append(files["append"].append(spilled, block))
            return appends[-1] + files["append"].read(spilled, block)

        def overwritten() -> float:
            return files["overwrite"].append(spilled, block) + files["overwrite"].read(spilled, block)

        measured = interleave(setup.few_rounds, 1, mine, appended, overwritten)
    push, append = micros("qflow put", spilled, pushes[1:]), micros("raw append", spilled, appends[1:])
    names = ("qflow put, get + ack", "raw append, pread", "raw overwrite, pread")
    both, floor, other = by_side(micros, names, spilled, measured)
    memory = f"{capacity_bytes / 2**20:.2f} MiB of memory, {mapped} mapped"
    yield Row(
        name=f"Satellite's push + pop, {shape}, {memory}: time over raw append + pread",
        figure=ratio(both, floor),
        bound=bound,
        details=[both, floor, other, ratio(both, other), push, append, ratio(push, append)],
        notes=[f"{spilled:,} of {count:,} timed messages were spilled; times are per spilled message"],
    )


WORKLOADS = [Workload("satellite", "SkyWalking Satellite's shapes through segments, over raw append and pread", shapes)]
