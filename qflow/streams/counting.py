"""Counts the messages that a filter matches, by the topics in the blocks, without decoding a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import Header
from qflow.storage.log.marks import settled_ranges
from qflow.storage.log.rows import read_row
from qflow.storage.log.transaction_log import TransactionLog
from qflow.storage.streams import partitions
from qflow.storage.streams.partitions import Asked, Hole
from qflow.storage.topics.selection import Candidates
from qflow.streams.interest import Interest, leave_to_check
from qflow.streams.topic_filter import FilterTrie

READ_BYTES = 16 * 2**20
"""Bytes of blocks that are read in one transaction."""
FEW_FILTERS = 8
"""So many are looked up in the index together; with more, the topics of all blocks are looked at."""


class _Counted(NamedTuple):
    """A piece of a block, of which only the number of matching messages is kept."""

    weight: int
    messages: int
    end: int


def count_matching(
    log: TransactionLog, stream: int, owner: int, spans: list[tuple[int, int]], interest: Interest
) -> int:
    """Return how many messages of a stream a filter matches, in short transactions of the log.

    Args:
        stream: its number.
        owner: number of a durable cursor, whose settled messages do not count; 0 = of none.
        spans: for each partition, [first sequence, end).

    Messages that are damaged, or that retention dropped, do not count.

    Cost: blocks without a matching topic are not read; of others, 0.2 µs a message.
    """
    total = 0
    for number, span in enumerate(spans):
        for low, high in _unsettled(log, stream, owner, number, *span):
            position = low
            while position < high:
                with log.read() as txn:
                    query = partitions.Query(stream, number, position, high, READ_BYTES, interest)
                    found = partitions.read_pieces(_count, txn, query)
                total += sum(piece.messages for piece in found.pieces)
                position = found.position
    return total


class Waiting(NamedTuple):
    """How many messages wait for a reader of some filters."""

    messages: int
    is_exact: bool
    """False: they are so many at the most."""


def count_waiting(
    read: Callable[[], AbstractContextManager[Any]], stream: int, starts: list[tuple[str, int]], end: int, reads: int
) -> Waiting:
    """Return how many messages of the first partition of a stream any of some filters matches, each counted once.

    Args:
        read: begins a transaction that reads the log.
        stream: its number.
        starts: filters, and from which retained offset on each of them counts.
        end: the offset behind the last one.
        reads: so many transactions at the most, each of which looks at `partitions.BLOCKS_AT_ONCE` blocks; what is
            behind them is counted as if all of it matched.

    Cost: as `count_matching`.
    """
    total = 0
    for low, high in pairwise(sorted({*(start for _, start in starts if start < end), end})):
        wanted = _AnyOf(stream, [one for one, start in starts if start <= low])
        position = low
        while position < high:
            if not reads:
                return Waiting(total + end - position, False)
            reads -= 1
            with read() as txn:
                query = partitions.Query(stream, 0, position, high, READ_BYTES, wanted)
                found = partitions.read_pieces(_count, txn, query)
            total += sum(piece.messages for piece in found.pieces)
            position = found.position
    return Waiting(total, True)


class _AnyOf:
    """Messages that any of some filters matches: a `Wanted` of `storage.streams.partitions`."""

    def __init__(self, stream: int, filters: list[str]) -> None:
        self._few = [Interest(one, stream, leave_to_check) for one in filters] if len(filters) <= FEW_FILTERS else []
        self._trie: FilterTrie[str] = FilterTrie()
        for one in filters:
            self._trie.add(one, one)

    def blocks(self, txn: Any, lane: int, position: int, limit: int) -> Candidates:
        """Return what the index says of a few filters; nothing of many."""
        found = [one.blocks(txn, lane, position, limit) for one in self._few]
        end = min((one.end for one in found), default=position)
        firsts = sorted({first for one in found for first in one.blocks if first < end})
        return Candidates(firsts[:limit], firsts[limit] if len(firsts) > limit else end, [])

    def choose(self, names: Sequence[str]) -> Sequence[bool] | None:
        """Tell which of these topics match; None = all of them."""
        if len(self._few) == 1:
            return self._few[0].choose(names)
        chosen = [bool(self._trie.match(name)) for name in names]
        return None if all(chosen) else chosen


def _unsettled(
    log: TransactionLog, stream: int, owner: int, number: int, position: int, end: int
) -> list[tuple[int, int]]:
    """Return the ranges in [position, end) of a partition that are retained and not settled out of order."""
    with log.read() as txn:
        position = max(position, read_row(txn, stream, number).floor)
        settled = list(settled_ranges(txn, owner, number, position, end)) if owner else []
    edges = [position, *(edge for span in settled for edge in span), end]
    return [(low, min(high, end)) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _count(txn: Any, value: bytes, header: Header, asked: Asked) -> tuple[_Counted, Hole | None]:
    """Count the matching messages of a block, after checking every byte of it."""
    numbers = blocks.columns(value, header, where=asked.where).topics
    topics = () if numbers is None else blocks.values(numbers)
    low, high = asked.position - header.key.first, asked.stop - header.key.first
    chosen = asked.chosen
    wanted = high - low if chosen is None else sum(map(chosen.__getitem__, topics[low:high]))
    return _Counted(len(value), wanted, asked.stop), None
