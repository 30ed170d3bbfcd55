"""What a publish puts where, if queues have a part in it, and where each message went: a share for each lane."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qflow.message import Record
from qflow.queues.fan_out import FanOut
from qflow.queues.puts import Puts
from qflow.queues.together import Insert, Receipt
from qflow.routing.results import PublishResult, PublishResults, result_of, target_of

Part = tuple[Any, int, Record]
"""What a lane gets for a message: a queue or a partition of a stream, the number of the lane in it, and the record."""


class Outgoing:
    """What one message is, as `OutgoingMany`: it has no need of shares."""

    __slots__ = ("_inserts", "puts", "unrouted")

    def __init__(self, fanned: tuple[Puts, ...], parts: list[Part]) -> None:
        self.puts = [FanOut(fanned, [parts.pop(0)[2]])] if fanned else []
        self._inserts = [Insert(owner, number, [record]) for owner, number, record in parts]
        self.unrouted = int(not (fanned or parts))

    def inserts(self) -> list[Insert]:
        """As that of `OutgoingMany`."""
        return self._inserts

    def results(self, receipts: Sequence[Receipt]) -> list[PublishResult]:
        """As that of `OutgoingMany`."""
        places = [(target_of(receipt.insert.queue), receipt.first) for receipt in receipts]
        return [result_of(places, self.puts[0].firsts() if self.puts else None)]


class Share:
    """The messages that one lane gets."""

    __slots__ = ("first", "insert", "messages", "target")

    def __init__(self, owner: Any, number: int) -> None:
        self.insert: Insert | None = Insert(owner, number, [])
        self.target = target_of(owner)
        self.messages = array("Q")
        """Which of all messages they are, in order."""
        self.first: int | None = None
        """The sequence of the first of them, once that is known; None if they were turned away."""


class OutgoingMany:
    """See the module. Memory: 16 bytes for each lane that a message goes to, and 8 more."""

    def __init__(self, fanned: tuple[Puts, ...], messages: Iterable[list[Part]]) -> None:
        """`fanned`: queues that get all messages: the first part of each is the record that goes there."""
        self._shares: dict[tuple[Any, int], Share] = {}
        self._ways: list[tuple[Share, ...]] = []
        """Of each message: those it is in. Equal ones are the same."""
        known: dict[tuple[Share, ...], tuple[Share, ...]] = {}
        records: list[Record] = []
        for index, parts in enumerate(messages):
            if fanned:
                records.append(parts.pop(0)[2])
            way = tuple([self._add(index, part) for part in parts])
            self._ways.append(known.setdefault(way, way))
        self.puts = [FanOut(fanned, records)] if fanned else []
        self.unrouted = 0 if fanned else self._ways.count(())

    def _add(self, index: int, part: Part) -> Share:
        owner, number, record = part
        share = self._shares.get((owner, number))
        if share is None:
            share = self._shares[owner, number] = Share(owner, number)
        assert share.insert is not None
        share.insert.records.append(record)
        share.messages.append(index)
        return share

    def inserts(self) -> list[Insert]:
        """Return what to commit, beside `puts`."""
        return [share.insert for share in self._shares.values() if share.insert is not None]

    def results(self, receipts: Sequence[Receipt]) -> PublishResults:
        """Return where each message went, given the receipts of all inserts, once it is confirmed."""
        for share, receipt in zip(self._shares.values(), receipts, strict=True):
            share.first = receipt.first
            share.insert = None
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
