"""The same messages for several lanes: reserved, handed over, written and published as one put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qflow.message import Record
from qflow.storage.log.batch import Batch, Put
from qflow.storage.log.calls import Calls
from qflow.storage.log.lane import Lane


class SpreadPublisher(Protocol):
    """The queues behind the lanes of spreads."""

    def publish_all(
        self, lanes: Sequence[Lane], firsts: Sequence[int], records: list[Record], puts: int, call: Calls
    ) -> None:
        """Make confirmed messages of so many spreads visible in lanes, in each from such a sequence on."""

    def refused(self, spread: Spread) -> None:
        """Give back the room of a spread that was not confirmed, in all lanes; twice is fine."""


class Spread(Put):
    """See the module. A part of a unit. What a `Put` says of its lane holds for each of these; all of them are logged.

    As long as the spreads of a batch have the same lanes, and nobody else puts anything there, they stay whole. Else
    each lane has its list of puts, and the spread is one of them.
    """

    __slots__ = ("_publisher", "firsts", "lanes", "returned")

    def __init__(
        self, records: list[Record], sizes: list[int], plain: bool, charged: int, publisher: SpreadPublisher
    ) -> None:
        self._publisher = publisher
        self.lanes: list[Lane] = []
        self.firsts: dict[Lane, int] = {}
        """The first sequence in each lane, once confirmed."""
        self.returned = 0
        """So many lanes, the first ones, have their room back. By its publisher."""
        super().__init__(None, records, sizes, plain, sum(sizes), charged)  # type: ignore[arg-type]

    @property
    def is_logged(self) -> bool:
        return True

    def weight(self) -> int:
        return self.charged * len(self.lanes)

    def starts(self, lane: Lane, first: int) -> None:
        self.firsts[lane] = first

    def join(self, batch: Batch) -> None:
        batch.size += self.weight()
        spreads = batch.spreads
        if not spreads and batch.puts.keys().isdisjoint(self.lanes):
            batch.spread_over.update(self.lanes)
        elif not spreads or spreads[0].lanes != self.lanes:
            batch.part()
            for lane in self.lanes:
                batch.puts.setdefault(lane, []).append(self)
            return
        spreads.append(self)

    def give_back(self) -> None:
        self._publisher.refused(self)

    def publish_all(
        self, lanes: Sequence[Lane], firsts: Sequence[int], records: list[Record], puts: int, call: Calls
    ) -> None:
        """See `SpreadPublisher`."""
        self._publisher.publish_all(lanes, firsts, records, puts, call)
