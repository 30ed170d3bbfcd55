"""What a clean end leaves of queues in the log: their rows, and how often messages were delivered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from qflow.message import LANE_SHIFT
from qflow.queues.looking import attempts, hides_attempts
from qflow.queues.queue import Queue, parts_of
from qflow.storage.log.ending import FEW_AT_ONCE, Piece, of_row
from qflow.storage.log.marks import raise_attempts, read_attempts, write_attempts
from qflow.storage.log.rows import Row
from qflow.storage.log.transaction_log import Lane

_RANGE_BYTES = 64


def endings(queues: Iterable[Queue]) -> Iterator[Piece]:
    """Yield what is to be written, in order; nobody puts, gets or settles any more."""
    for queue in queues:
        known = attempts(parts_of(queue))
        logged = hides_attempts(parts_of(queue))  # those were logged when they were given back
        for lane in parts_of(queue).logged_lanes:
            unused = Row(next=lane.lane << LANE_SHIFT, floor=lane.lane << LANE_SHIFT)
            if lane.row != unused or not lane.lane:
                below, ranges = known[lane.lane]
                for start in range(0, len(ranges), FEW_AT_ONCE) or (0,):
                    part = ranges[start : start + FEW_AT_ONCE]
                    write = _raise_counts if logged else _write_counts
                    work = partial(write, lane=lane, below=0 if start else below, ranges=part)
                    yield Piece(1 + len(part), _RANGE_BYTES * len(part), work)
                yield of_row(lane)


def _write_counts(txn: Any, *, lane: Lane, below: int, ranges: list[tuple[int, int, int]]) -> None:
    """Write counts; first of all, forget those of what memory knows better."""
    if below and read_attempts(txn, lane.owner, lane.lane, 0, below) == ranges:
        return
    write_attempts(txn, lane.owner, lane.lane, below, ranges)


def _raise_counts(txn: Any, *, lane: Lane, below: int, ranges: list[tuple[int, int, int]]) -> None:
    """Write the counts of what memory knows, beside those of what it does not."""
    for part in ranges:
        raise_attempts(txn, lane.owner, lane.lane, *part)
