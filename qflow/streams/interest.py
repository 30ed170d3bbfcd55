"""A filter at work on a stream: which topics are wanted, and where an index says they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qflow.storage.topic_selection import Candidates, Selection
from qflow.streams.topic_filter import check_filter, compile_filter


class Interest:
    """What a reader wants of a stream: a `Wanted` of `storage.partitions`.

    Used in transactions of the log's `read`, which are one at a time.
    """

    def __init__(self, topic_filter: str, owner: int, report: Callable[[str], None]) -> None:
        """`owner` is the stream's number; `report` is told of damage to its index."""
        self.filter = check_filter(topic_filter)
        self._matches = compile_filter(topic_filter)
        self._selection = Selection(owner, topic_filter)
        self._report = report

    def blocks(self, txn: Any, lane: int, position: int, limit: int) -> Candidates:
        """Return blocks that may hold a wanted topic."""
        found = self._selection.blocks(txn, lane, position, limit)
        for problem in found.problems:
            self._report(problem)
        return found

    def choose(self, names: Sequence[str]) -> Sequence[bool] | None:
        """Tell which of these topics are wanted; None for all of them."""
        matches = self._matches
        chosen = [bool(matches(name)) for name in names]
        return None if all(chosen) else chosen
