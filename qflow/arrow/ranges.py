"""Cuts reads into ranges of offsets, at the ends of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from qflow.arrow.states import StreamState
from qflow.message import LANE_SHIFT
from qflow.storage import blocks
from qflow.storage.log.keys import scan

LEAST_TASK_BYTES, MOST_TASK_BYTES = 16 * 2**20, 2**30
"""About how many bytes a task reads, unless options say so: between those, so that all tasks run at once. Few large
tasks are best: a task costs Spark as much as reading 50 MiB, and none keeps what it has read."""


class Span(NamedTuple):
    """Offsets [start, end) of one partition of a stream."""

    stream: str
    owner: int
    partition: int
    start: int
    end: int


class Cutting(NamedTuple):
    """Into how many tasks reads are cut."""

    parallelism: int
    """How many tasks run at once."""
    least: int | None = None
    """How many tasks there are to be at least, in all."""
    most_messages: int | None = None
    """How many messages one of them is to read at most."""


def cut(txn: Any, ranges: Sequence[tuple[StreamState, int, int, int]], cutting: Cutting) -> list[Span]:
    """Cut (stream, partition, start, end) into spans for tasks, in order; empty ones are left out.

    By default there are about as many tasks as run at once, and they end where blocks do, so that no block is read
    twice; `cutting` may give their number or their length instead.
    """
    ranges = [one for one in ranges if one[2] < one[3]]
    sizes = [_bytes_in(*one) for one in ranges]
    task_bytes = min(MOST_TASK_BYTES, max(LEAST_TASK_BYTES, sum(sizes) // cutting.parallelism + 1))
    total = sum(end - start for _, _, start, end in ranges)
    found: list[Span] = []
    for (stream, number, start, end), size in zip(ranges, sizes, strict=True):
        count = end - start
        if cutting.most_messages is not None:
            step = cutting.most_messages
            cuts = list(range(start + step, end, step))
        else:
            tasks = max(1, round(size / task_bytes))
            if cutting.least is not None:
                tasks = max(1, -(-cutting.least * count // total))
            tasks = min(tasks, count)
            cuts = [start + count * task // tasks for task in range(1, tasks)]
            if cutting.least is None:
                cuts = sorted(set(_at_blocks(txn, stream, number, cuts, start)))
        edges = [start, *cuts, end]
        found += [Span(stream.name, stream.owner, number, low, high) for low, high in pairwise(edges)]
    return found


def _bytes_in(stream: StreamState, number: int, start: int, end: int) -> int:
    """Return about how many bytes are in a range."""
    row = stream.rows[number]
    return row.bytes * (end - start) // max(1, row.messages)


def _at_blocks(txn: Any, stream: StreamState, number: int, cuts: list[int], start: int) -> Iterator[int]:
    """Yield, for each offset of `cuts`, where its block begins, if that is after `start`."""
    base = number << LANE_SHIFT
    for offset in cuts:
        for key, _ in scan(txn, stream.owner, number, base + offset, base + offset + 1):
            first = int.from_bytes(key[-8:], "big") - base
            if first > start:
                yield first
            break


def offset_after(txn: Any, owner: int, number: int, start: int, end: int, most_bytes: int) -> int:
    """Return the offset at the end of the block that reaches so many bytes.

    A block that refers to shared bodies may stand for a thousand times its size: those are cut by messages.

    Cost: 3 µs a block; one with references is decoded.
    """
    base = number << LANE_SHIFT
    size = 0
    for key, value in scan(txn, owner, number, base + start, base + end):
        where = f"block {key.hex()}"
        header = blocks.read_header(value, where=where)
        if header.columns & blocks.KINDS and blocks.references(bytes(value), header.key, where=where):
            block = blocks.decode(bytes(value), header.key, where=where)
            for offset, record in zip(block.offsets, block.records, strict=True):
                stop = block.first + offset + 1 - base
                if stop > start:
                    size += record.size if isinstance(record, blocks.Reference) else len(record)
                    if size >= most_bytes:
                        return min(stop, end)
            continue
        size += header.payload_bytes
        stop = header.end - base
        if size >= most_bytes and stop > start:
            return min(stop, end)
    return end
