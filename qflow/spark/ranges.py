"""Plans reads as ranges of offsets: resolves bounds, and cuts ranges into tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pyspark.sql.datasource import InputPartition

from qflow.errors import CorruptionError, GapError, InvalidArgument, NotFound, StreamDeleted
from qflow.message import LANE_SHIFT
from qflow.spark.options import COMMITTED, EARLIEST, LATEST, TIMES, Bound, ReadOptions, is_earliest, is_latest
from qflow.spark.parallelism import parallelism
from qflow.spark.spools import SpoolState, StreamState
from qflow.storage import blocks
from qflow.storage.log.keys import scan
from qflow.storage.streams import partitions
from qflow.storage.streams.groups import committed_of

_logger = logging.getLogger("qflow.spark")

LEAST_TASK_BYTES, MOST_TASK_BYTES = 16 * 2**20, 2**30
"""About how many bytes a task reads, unless options say so: between those, so that all tasks run at once. Few large
tasks are best: a task costs Spark as much as reading 50 MiB, and none keeps what it has read."""

Offsets = dict[str, dict[int, int]]
"""By stream and partition."""


class Range(InputPartition):
    """Offsets [start, end) of one partition of a stream: what one task reads."""

    def __init__(self, uuid: str, stream: str, owner: int, partition: int, start: int, end: int) -> None:
        self.uuid = uuid
        self.stream = stream
        self.owner = owner
        self.partition = partition
        self.start = start
        self.end = end


def selected(state: SpoolState, options: ReadOptions, *, all_named: bool = True) -> list[StreamState]:
    """Return the streams to be read, sorted by name.

    Args:
        all_named: streams that options name must exist.

    Raises:
        NotFound: a stream that is named does not exist. CorruptionError: one cannot be read.
    """
    for name in options.streams or () if all_named else ():
        if name not in state.streams:
            names = ", ".join(map(repr, sorted(state.streams))) or "none"
            raise NotFound(
                f"there is no stream {name!r} in {options.path}; there are: {names}. (subscribe names streams; topics "
                "are chosen with filter)"
            )
    found = [state.streams[name] for name in sorted(state.streams) if options.selects(name)]
    for stream in found:
        if not stream.rows:
            raise CorruptionError(f"the rows of stream {stream.name!r} are damaged: see `qflow check {options.path}`")
        missing = options.partitions.get(stream.name, frozenset()) - set(range(len(stream.rows)))
        if missing and all_named:
            raise NotFound(
                f"option 'assign' names partition {min(missing)} of stream {stream.name!r}, which has "
                f"{len(stream.rows)}, numbered from 0: leave it out"
            )
    return [stream._replace(assigned=options.partitions.get(stream.name)) for stream in found]


def resolve(
    txn: Any, bound: Bound, which: str, streams: list[StreamState], committed: Mapping[str, Mapping[int, int]]
) -> Offsets:
    """Return the offset that a bound stands for, in each partition.

    Args:
        which: the option's name, for errors.
        committed: offsets of the group, where they are known.

    Raises:
        InvalidArgument: the bound names a partition that does not exist, or leaves one out.
    """
    names = {stream.name for stream in streams}
    for name in bound.numbers:
        if name not in names:
            raise InvalidArgument(f"{which} names stream {name!r}, which is not read: leave it out, or subscribe to it")
    for stream in streams:
        _check_complete(bound, which, stream)
    return {
        stream.name: {
            number: _resolve_one(txn, bound, which, stream, number, committed.get(stream.name, {}).get(number))
            for number in stream.numbers
        }
        for stream in streams
    }


def _check_complete(bound: Bound, which: str, stream: StreamState) -> None:
    """Check that numbers are given for all partitions of a stream, or for none."""
    if bound.time_ms is not None or bound.kind in (EARLIEST, LATEST, COMMITTED):
        return
    given, there = set(bound.numbers.get(stream.name, {})), set(stream.numbers)
    if given != there:
        what = f"{which} {'names' if given - there else 'leaves out'} partition {min(given ^ there)}"
        names = f"0 to {len(there) - 1}" if stream.assigned is None else ", ".join(map(str, sorted(there)))
        raise InvalidArgument(
            f"{what} of stream {stream.name!r}: give a number for each of its partitions that are read, {names}"
        )


def _resolve_one(txn: Any, bound: Bound, which: str, stream: StreamState, number: int, committed: int | None) -> int:
    first, end = stream.bounds(number)
    if bound.kind == EARLIEST or (bound.kind == COMMITTED and committed is None):
        return first
    if bound.kind == LATEST:
        return end
    if bound.kind == COMMITTED:
        assert committed is not None
        return committed
    if bound.kind == TIMES:
        time_ms = bound.numbers.get(stream.name, {}).get(number, bound.time_ms)
        assert time_ms is not None
        row = stream.rows[number]
        found = partitions.find_time(txn, stream.owner, number, row, row.next, time_ms)
        if found == row.next and bound.must_exist:
            raise InvalidArgument(
                f"stream {stream.name!r}, partition {number}, has no message of {time_ms} ms since 1970 or later, and "
                "startingOffsetsByTimestampStrategy is 'error': give an earlier time, or have it begin at the end with "
                "'latest'"
            )
        return found - (number << LANE_SHIFT)
    offset = bound.numbers[stream.name][number]
    if is_earliest(offset):
        return first
    if is_latest(offset):
        return end
    if offset > end:
        raise InvalidArgument(
            f"{which}: offset {offset} is past the end of stream {stream.name!r}, partition {number}: the next message "
            f"gets {end}"
        )
    return offset


def committed(options: ReadOptions, state: SpoolState, streams: list[StreamState]) -> Offsets:
    """Return the offsets of the group in `startingOffsets`, if one is given."""
    if options.starting.kind != COMMITTED or options.group is None:
        return {}
    known = committed_of(options.path, options.group, state.uuid)
    return {stream.name: known.get(stream.owner, {}) for stream in streams}


def check_floor(stream: str, number: int, start: int, first: int, *, fail: bool, end: int | None = None) -> int:
    """Return where to begin in a partition whose first retained offset is `first`; at most `end`, if given.

    Raises:
        GapError: retention dropped messages that were to be read, and `fail`.
    """
    lost_to = first if end is None else min(first, end)
    if start >= lost_to:
        return start
    text = (
        f"stream {stream!r}, partition {number}: offsets {start} to {lost_to - 1} are gone, retention took them before "
        f"this query has read them; the first that is there is {first}"
    )
    if fail:
        raise GapError(
            f"{text}. Set option failOnDataLoss to false to go on behind them; to have retention wait for the query, "
            "give it a group",
            partition=number,
            first=start,
            end=lost_to,
        )
    _logger.warning("%s; it goes on behind them, for failOnDataLoss is false", text)
    return lost_to


def miss_stream(name: str, *, fail: bool) -> None:
    """Go on without a stream that does not exist any more.

    Raises:
        StreamDeleted: `fail` is set.
    """
    text = f"stream {name!r} was deleted, perhaps before this query has read it to its end"
    if fail:
        raise StreamDeleted(f"{text}: set option failOnDataLoss to false to go on without it")
    _logger.warning("%s; it goes on without it, for failOnDataLoss is false", text)


def cut(txn: Any, uuid: str, ranges: list[tuple[StreamState, int, int, int]], options: ReadOptions) -> list[Range]:
    """Cut (stream, partition, start, end) into ranges for tasks, in order; empty ranges are left out.

    By default there are about as many tasks as Spark runs at once, and they end where blocks do, so that no block is
    read twice; options may give their number or their length instead.
    """
    ranges = [one for one in ranges if one[2] < one[3]]
    sizes = [_bytes_in(*one) for one in ranges]
    task_bytes = min(MOST_TASK_BYTES, max(LEAST_TASK_BYTES, sum(sizes) // parallelism() + 1))
    total = sum(end - start for _, _, start, end in ranges)
    found: list[Range] = []
    for (stream, number, start, end), size in zip(ranges, sizes, strict=True):
        count = end - start
        if options.max_records_per_partition is not None:
            step = options.max_records_per_partition
            cuts = list(range(start + step, end, step))
        else:
            tasks = max(1, round(size / task_bytes))
            if options.min_partitions is not None:
                tasks = max(1, -(-options.min_partitions * count // total))
            tasks = min(tasks, count)
            cuts = [start + count * task // tasks for task in range(1, tasks)]
            if options.min_partitions is None:
                cuts = sorted(set(_at_blocks(txn, stream, number, cuts, start)))
        edges = [start, *cuts, end]
        found += [Range(uuid, stream.name, stream.owner, number, low, high) for low, high in pairwise(edges)]
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
