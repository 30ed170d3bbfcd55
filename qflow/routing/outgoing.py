"""What a publish puts where, if queues have a part in it, and where each message went: a share for each lane."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qflow.message import Record
from qflow.queues.assembly import Insert, Receipt
from qflow.queues.fan_out import FanOut
from qflow.queues.puts import Puts
from qflow.routing.results import PublishResult, PublishResults, result_of, target_of

Part = tuple[Any, int, Record]
"""What a lane gets for a message: a queue or a partition of a stream, the number of the lane in it, and the record."""
Placed = tuple[Record | None, list[Part]]
"""A message: the record for queues that all messages fan out into, if there are such, and what other lanes get."""


class OutgoingOne:
    """What a publish of one message puts where. It has no need of shares: `puts` and the rest as of `OutgoingMany`."""

    __slots__ = ("_inserts", "puts", "unrouted")

    def __init__(self, fanned: tuple[Puts, ...], placed: Placed) -> None:
        record, parts = placed
        self.puts = [] if record is None else [FanOut(fanned, [record])]
        self._inserts = [Insert(owner, number, [record]) for owner, number, record in parts]
        self.unrouted = int(not (fanned or parts))

    def inserts(self) -> list[Insert]:
        """Return what to commit, beside `puts`."""
        return self._inserts

    def results(self, receipts: Sequence[Receipt]) -> list[PublishResult]:
        """Return where it went, given the receipts of all inserts, once it is confirmed."""
        places = [(target_of(receipt.insert.queue), receipt.first) for receipt in receipts]
        return [result_of(places, self.puts[0].firsts() if self.puts else None)]


class Share:
    """Which messages one lane gets, and what a result tells of it."""

    __slots__ = ("first", "messages", "target")

    def __init__(self, owner: Any) -> None:
        self.target = target_of(owner)
        self.messages = array("Q")
        """Their places among all messages, in order."""
        self.first: int | None = None
        """The sequence of the first of them, once that is known; None if they were turned away."""


class OutgoingMany:
    """What a publish of many messages puts where: one insert a lane, however many there are.

    Memory: 16 bytes for each lane that a message goes to, and 8 more.
    """

    def __init__(self, fanned: tuple[Puts, ...], messages: Iterable[Placed]) -> None:
        """`fanned`: queues that get all messages."""
        self._inserts: dict[tuple[Any, int], Insert] = {}
        self._shares: dict[tuple[Any, int], Share] = {}
        self._ways: list[tuple[Share, ...]] = []
        """Of each message: those it is in. Equal ones are the same."""
        known: dict[tuple[Share, ...], tuple[Share, ...]] = {}
        records: list[Record] = []
        for index, (record, parts) in enumerate(messages):
            if record is not None:
                records.append(record)
            way = tuple([self._add(index, part) for part in parts])
            self._ways.append(known.setdefault(way, way))
        self.puts = [FanOut(fanned, records)] if fanned else []
        """Of queues that get all messages."""
        self.unrouted = 0 if fanned else self._ways.count(())
        """How many go nowhere."""

    def _add(self, index: int, part: Part) -> Share:
        owner, number, record = part
        share = self._shares.get((owner, number))
        if share is None:
            share = self._shares[owner, number] = Share(owner)
            self._inserts[owner, number] = Insert(owner, number, [])
        self._inserts[owner, number].records.append(record)
        share.messages.append(index)
        return share

    def inserts(self) -> list[Insert]:
        """Return what to commit, beside `puts`."""
        return list(self._inserts.values())

    def results(self, receipts: Sequence[Receipt]) -> PublishResults:
        """Return where each message went, given the receipts of all inserts, once it is confirmed."""
        for share, receipt in zip(self._shares.values(), receipts, strict=True):
            share.first = receipt.first
        return InLanes(self._ways, self.puts[0].firsts() if self.puts else {})


class InLanes(PublishResults):
    """They went into lanes of queues and streams."""

    __slots__ = ("_fanned", "_ways")

    def __init__(self, ways: list[tuple[Share, ...]], fanned: Mapping[str, int | None]) -> None:
        """`fanned`: the sequences of the first message in queues that got all of them."""
        self._ways = ways
        self._fanned = fanned

    def __len__(self) -> int:
        return len(self._ways)

    def _at(self, index: int) -> PublishResult:
        sequences = {name: None if first is None else first + index for name, first in self._fanned.items()}
        return result_of(
            [
                (share.target, None if share.first is None else share.first + bisect_left(share.messages, index))
                for share in self._ways[index]
            ],
            sequences,
        )
