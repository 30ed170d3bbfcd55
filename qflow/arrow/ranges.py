"""Cuts reads into ranges of offsets, at the ends of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

from qflow.arrow.states import StreamState
from qflow.errors import InvalidArgument
from qflow.message import LANE_SHIFT
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.log.keys import scan

LEAST_TASK_BYTES, MOST_TASK_BYTES = 16 * 2**20, 2**30
"""About how many bytes a task reads, unless options say so: between those, so that all tasks run at once. Few large
tasks are best: a task costs Spark as much as reading 50 MiB, and none keeps what it has read."""
MOST_SPANS = 100_000
"""Into how many tasks a read is cut at most: what asks for more is a mistake."""


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


def cut(
    transaction: Callable[[], AbstractContextManager[Any]],
    ranges: Sequence[tuple[StreamState, int, int, int]],
    cutting: Cutting,
) -> list[Span]:
    """Cut (stream, partition, start, end) into spans for tasks, in order; empty ones are left out.

    By default there are about as many tasks as run at once, and they end where blocks do, so that no block is read
    twice; `cutting` may give their number or their length instead.

    Args:
        transaction: begins one on the log; it lasts as long as blocks are looked for.

    Raises:
        InvalidArgument: there would be too many spans.
    """
    ranges = [one for one in ranges if one[2] < one[3]]
    planned = _cuts(ranges, cutting)
    if cutting.least is None and cutting.most_messages is None and any(planned):
        with transaction() as txn:
            planned = [
                sorted(set(_at_blocks(txn, stream, number, cuts, start)))
                for (stream, number, start, _), cuts in zip(ranges, planned, strict=True)
            ]
    return [
        Span(stream.name, stream.owner, number, low, high)
        for (stream, number, start, end), cuts in zip(ranges, planned, strict=True)
        for low, high in pairwise([start, *cuts, end])
    ]


def _cuts(ranges: Sequence[tuple[StreamState, int, int, int]], cutting: Cutting) -> list[list[int]]:
    """Return the offsets at which ranges are cut, wherever blocks end."""
    counts = [end - start for _, _, start, end in ranges]
    total = sum(counts)
    if cutting.most_messages is not None:
        tasks = [-(-count // cutting.most_messages) for count in counts]
    elif cutting.least is not None:
        tasks = [min(count, max(1, -(-cutting.least * count // total))) for count in counts]
    else:
        rows = [stream.rows[number] for stream, number, _, _ in ranges]
        sizes = [row.bytes * count // max(1, row.messages) for row, count in zip(rows, counts, strict=True)]
        task_bytes = min(MOST_TASK_BYTES, max(LEAST_TASK_BYTES, sum(sizes) // cutting.parallelism + 1))
        tasks = [min(count, max(1, round(size / task_bytes))) for count, size in zip(counts, sizes, strict=True)]
    if sum(tasks) > MOST_SPANS:
        raise InvalidArgument(
            f"{total:,} messages would be cut into {sum(tasks):,} parts, and {MOST_SPANS:,} are the most: ask "
            "for fewer of them, or for more messages in each"
        )
    step = cutting.most_messages
    return [
        [start + (count * task // many if step is None else step * task) for task in range(1, many)]
        for (_, _, start, _), count, many in zip(ranges, counts, tasks, strict=True)
    ]


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
