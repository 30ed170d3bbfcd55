"""Retention of a partition of a stream: how far its floor may rise, given what may stay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey, full_length
from qflow.storage.log.keys import BLOCKS, next_block, scan
from qflow.storage.log.rows import Row
from qflow.storage.log.table import LAST, number_of

LOOKED_AT_ONCE = 8192
"""Looked at in one step of retention."""


class Retained(NamedTuple):
    """What is to be dropped: everything below a floor."""

    floor: int
    messages: int
    bytes: int
    more: bool
    """A limit stopped the count before it was complete."""


class Limits(NamedTuple):
    """What may stay of a partition."""

    ceiling: int
    """Nothing goes from here on."""
    messages: int | None
    bytes: int | None
    """How much may stay at most; None for any."""
    before_ms: int | None
    """What is older goes; None for nothing."""
    all_below: bool
    """Everything below the ceiling goes, whatever the limits say."""


def surplus(txn: Any, owner: int, lane: int, row: Row, limits: Limits) -> Retained:
    """Return how far the floor may rise, looking at a bounded number of blocks.

    A damaged block goes when those behind it are to go, or what is left without it is as many as may stay: what cannot
    be read may be repaired as long as no limit asks for it. Its bytes are those its header names, else about its own.

    Cost: 5 µs a block that goes as a whole. The transaction should give buffers, so that those are not copied.
    """
    floor, left, left_bytes = row.floor, row.messages, row.bytes
    kept = floor, left, left_bytes
    """What was true before the damaged blocks that were come upon last: they stay if nothing behind them goes."""
    looked = 0
    more = False
    for key, value in scan(txn, owner, lane, floor, LAST):
        first = number_of(key)
        more = looked >= LOOKED_AT_ONCE
        if more or first >= limits.ceiling:
            break
        looked += 1
        header = None
        try:
            header = _sound_header(value, BlockKey(BLOCKS, owner, lane, first))
            stop, size = header.end, header.payload_bytes
            whole = floor <= first and stop <= limits.ceiling
            if whole and first < row.referring and header.columns & blocks.KINDS:
                size = sum(_lengths(value, header, row.referring))
            goes = whole and _goes(left - stop + floor, left_bytes - size, value, header, limits)
            if stop > floor and not goes:
                gap = max(0, first - floor)  # what was there has vanished
                high, size = _part_that_goes(
                    left - gap, left_bytes, value, header, floor - first, row.referring, limits
                )
                if first + high > max(first, floor):
                    left -= first + high - floor
                    left_bytes -= size
                    floor = first + high
                    kept = floor, left, left_bytes
                if floor < stop:
                    break
                continue
        except CorruptionError:
            header = None
            size = _size_of_damaged(value, BlockKey(BLOCKS, owner, lane, first))
            stop = min(next_block(txn, owner, lane, first), max(row.next, first + 1))
            if stop > limits.ceiling:
                break
        if stop <= floor:
            continue
        left -= stop - floor
        left_bytes -= min(size, left_bytes)
        floor = stop
        if header is not None or limits.all_below or (limits.messages is not None and left >= limits.messages):
            kept = floor, left, left_bytes
    floor, left, left_bytes = kept
    return Retained(floor, row.messages - left, row.bytes - left_bytes, more)


def _sound_header(value: Any, key: BlockKey) -> blocks.Header:
    """Return the header of a block. Raises CorruptionError: another one belongs here, or it is cut short."""
    header = blocks.read_header(value, where="a block")
    if header.key != key or len(value) != header.total_bytes(value):
        raise CorruptionError("a block: not the block that belongs here")
    return header


def _size_of_damaged(value: Any, key: BlockKey) -> int:
    """Return how many bytes of messages a damaged block held: by its header, else about."""
    try:
        header = blocks.read_header(value, where="a block")
    except CorruptionError:
        return len(value)
    return header.payload_bytes if header.key == key else len(value)


def _goes(left: int, left_bytes: int, value: Any, header: blocks.Header, limits: Limits) -> bool:
    """Tell whether a whole block goes, given what is left without it."""
    if limits.all_below:
        return True
    if limits.messages is not None and left >= limits.messages:
        return True
    if limits.bytes is not None and left_bytes >= limits.bytes:
        return True
    return limits.before_ms is not None and blocks.last_time(value, header) < limits.before_ms


def _part_that_goes(
    left: int, left_bytes: int, value: Any, header: blocks.Header, low: int, referring: int, limits: Limits
) -> tuple[int, int]:
    """Return where what goes of a block ends, given what is left with `low` and all behind; and the bytes of that."""
    low = max(0, low)
    most = min(header.end, limits.ceiling) - header.key.first
    lengths = _lengths(value, header, referring)
    high = most if limits.all_below else low
    if limits.messages is not None:
        high = max(high, low + left - limits.messages)
    if limits.before_ms is not None:
        high = max(high, bisect_left(blocks.times(bytes(value), header), limits.before_ms))
    if limits.bytes is not None:
        for index in range(low, most):
            if left_bytes <= limits.bytes:
                break
            left_bytes -= lengths[index]
            high = max(high, index + 1)
    high = min(high, most)
    return high, sum(lengths[low:high])


def _lengths(value: Any, header: blocks.Header, referring: int) -> Sequence[int]:
    """Return the lengths of the messages in a block, shared bodies included. Raises CorruptionError."""
    data = bytes(value)
    if header.key.first < referring and header.columns & blocks.KINDS:
        records = blocks.decode(data, header.key, where="a block").records
        return list(map(full_length, records))
    lengths = blocks.outline(data, header.key)[1]
    if sum(lengths) != header.payload_bytes:
        raise CorruptionError("a block: the lengths of the messages do not add up")
    return lengths
