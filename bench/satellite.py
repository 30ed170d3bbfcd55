"""The shapes SkyWalking Satellite measures its mmap queue with, every message spilled, against raw append and pread.

Its first shape, and one change of each kind. Its own figures (a laptop of 2018) were 19 to 45 µs a push; they are
another machine's, and no ratio is made of them. The queue's capacity is what Satellite maps, so that everything but
that is spilled; times are divided by the messages that were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import attrs

from bench import loops
from bench.engines.qflow_queues import open_broker
from bench.measure import Row, Setup, Workload, at_most, interleave, micros, ratio
from bench.spill import drain, fill
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
        return (
            f"segments of {self.segment_kib} KiB, {self.mapped} mapped, messages of {self.message_kib} KiB, "
            f"{self.capacity // 1000} k waiting"
        )


SHAPES = (Shape(), Shape(segment_kib=256), Shape(mapped=20), Shape(message_kib=16), Shape(capacity=100_000))


def shapes(setup: Setup) -> Iterator[Row]:
    for shape in SHAPES:
        try:
            yield from _measured(setup, shape)
        except Exception as error:
            reason = str(error).replace(str(setup.directory), "<directory>")
            yield Row(name=f"Satellite's push + pop, {shape}", problem=f"not measured: {reason}")


def _measured(setup: Setup, shape: Shape) -> Iterator[Row]:
    body = bytes(shape.message_kib * 1024)
    count = setup.size(shape.capacity, shape.capacity // 20)
    setup.need_disk(3 * count * (len(body) + 4096))
    settings: dict[str, Any] = {"segment_bytes": shape.segment_kib * 1024, "max_mapped_segments": shape.mapped}
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        broker = stack.enter_context(open_broker(path / "spool", spill="segments", **settings))
        queue = broker.declare_queue("bench", durable=False, capacity_bytes=shape.mapped * shape.segment_kib * 1024)
        fill(queue, count, body)
        spilled = queue.stats().spilled_messages
        drain(queue, count)
        block = bytes(len(body) + SINGLE_BYTES)
        files = stack.enter_context(loops.append_files(path))
        pushes: list[float] = []
        appends: list[float] = []

        def mine() -> float:
            pushes.append(fill(queue, count, body))
            return pushes[-1] + drain(queue, count)

        def appended() -> float:
            appends.append(files["append"].append(spilled, block))
            return appends[-1] + files["append"].read(spilled, block)

        def overwritten() -> float:
            return files["overwrite"].append(spilled, block) + files["overwrite"].read(spilled, block)

        measured = interleave(setup.few_rounds, 1, mine, appended, overwritten)
    push, append = micros("qflow put", spilled, pushes[1:]), micros("raw append", spilled, appends[1:])
    names = ("qflow put, get + ack", "raw append, pread", "raw overwrite, pread")
    both, floor, other = (micros(name, spilled, seconds) for name, seconds in zip(names, measured, strict=True))
    yield Row(
        name=f"Satellite's push + pop, {shape}: time over raw append + pread",
        figure=ratio(both, floor),
        bound=at_most(1.7),
        details=[both, floor, other, ratio(both, other)],
        notes=[f"{spilled:,} of {count:,} messages were spilled; times are per spilled message"],
    )
    yield Row(name=f"its push alone, {shape}: time over raw append", figure=ratio(push, append), details=[push, append])


WORKLOADS = [Workload("satellite", "SkyWalking Satellite's shapes through segments, over raw append and pread", shapes)]
