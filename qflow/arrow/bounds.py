"""Where reads begin and end: keywords, offsets or times, and the offsets they stand for in a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from qflow.arrow.states import StreamState
from qflow.errors import InvalidArgument
from qflow.message import LANE_SHIFT
from qflow.storage.streams import partitions

EARLIEST, LATEST, COMMITTED, OFFSETS, TIMES = "earliest", "latest", "committed", "offsets", "times"
LATEST_OFFSET, EARLIEST_OFFSET = -1, -2
"""Kafka's numbers for the end and the beginning, in the JSON of offsets."""

Offsets = dict[str, dict[int, int]]
"""By stream and partition."""


@attrs.frozen
class Bound:
    """Where to begin or to end: a keyword, or numbers by stream and partition."""

    kind: str
    numbers: dict[str, dict[int, int]] = attrs.field(factory=dict)
    """By stream and partition. OFFSETS: offsets; TIMES: milliseconds since the epoch."""
    time_ms: int | None = None
    """TIMES: milliseconds since the epoch, for streams that are not in `numbers`."""
    must_exist: bool = False
    """TIMES: it is an error if there is no message of that time or later."""


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
        wrong = given - there or there - given
        what = f"{which} {'names' if given - there else 'leaves out'} partition {min(wrong)}"
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
    if offset == EARLIEST_OFFSET:
        return first
    if offset == LATEST_OFFSET:
        return end
    if offset > end:
        raise InvalidArgument(
            f"{which}: offset {offset} is past the end of stream {stream.name!r}, partition {number}: the next message "
            f"gets {end}"
        )
    return offset
