"""A filter at work on a stream: which topics are wanted, and where an index says they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qflow.streams.topic_filter import check_filter, compile_filter


class Interest:
    """What a reader wants of a stream: a `Wanted` of `storage.partitions`."""

    def __init__(self, topic_filter: str, selection: Any = None) -> None:
        """`selection` finds blocks in the stream's index; without one, each block's names are looked at."""
        self.filter = check_filter(topic_filter)
        self._matches = compile_filter(topic_filter)
        self._selection = selection

    def indexed_to(self, lane: int) -> int:
        """Return up to which sequence the index knows the blocks of a lane."""
        return 0 if self._selection is None else int(self._selection.indexed_to(lane))

    def blocks(self, txn: Any, lane: int, position: int, limit: int) -> tuple[list[int], int]:
        """Return the first sequences of blocks that may hold a wanted topic, and up to where these are all."""
        found: tuple[list[int], int] = self._selection.blocks(txn, lane, position, limit)
        return found

    def choose(self, names: Sequence[str]) -> Sequence[bool] | None:
        """Tell which of these topics are wanted; None for all of them."""
        matches = self._matches
        chosen = [bool(matches(name)) for name in names]
        return None if all(chosen) else chosen
