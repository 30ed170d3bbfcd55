"""A filter applied to a stream: which topics match, and in which blocks the index finds them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from qflow.storage.topics.names import joined, pattern_of
from qflow.storage.topics.selection import Candidates, Selection
from qflow.streams.topic_filter import check_filter, compile_filter

FEW = 4
"""Up to so many topics are matched one by one."""


def leave_to_check(_problem: str) -> None:
    """Ignore damage of an index, which costs time, not messages: `qflow check` reports it."""


class Interest:
    """The messages of a stream that a reader wants: a `Wanted` of `storage.streams.partitions`.

    Used in transactions of the log's `read`, of which there is one at a time.
    """

    def __init__(self, topic_filter: str, owner: int, report: Callable[[str], None]) -> None:
        """`owner` is the stream's number; `report` is called with damage of its index."""
        self.filter = check_filter(topic_filter)
        self._matches = compile_filter(topic_filter)
        self._pattern = pattern_of(topic_filter) if {"+", "#"} & set(topic_filter.split("/")) else None
        self._selection = Selection(owner, topic_filter)
        self._report = report
        self._ahead: dict[int, tuple[int, Candidates]] = {}

    def blocks(self, txn: Any, lane: int, position: int, limit: int) -> Candidates:
        """Return the blocks that may hold a matching topic. The first one may end before `position`.

        An indexed segment never changes, so its answer is kept until the reader has passed it.
        """
        start, known = self._ahead.get(lane, (0, None))
        if known is not None and start <= position < known.end:
            here = known.blocks[max(0, bisect_right(known.blocks, position) - 1) :]
            return known._replace(blocks=here[:limit], end=here[limit] if len(here) > limit else known.end)
        found = self._selection.blocks(txn, lane, position, limit)
        for problem in found.problems:
            self._report(problem)
        if found.end > position:
            self._ahead[lane] = position, found._replace(problems=[])
        else:
            self._ahead.pop(lane, None)
        return found

    def choose(self, names: Sequence[str]) -> Sequence[bool] | None:
        """Tell which of these topics match; None = all of them. Cost: 0.1 µs a topic."""
        if self._pattern is None or len(names) < FEW:
            matches = self._matches
            chosen = [bool(matches(name)) for name in names]
            return None if all(chosen) else chosen
        found = self._pattern.findall(joined(names))
        if len(found) == len(names):
            return None
        wanted = set(b"\0".join(found).decode().split("\0"))
        return [name in wanted for name in names]
