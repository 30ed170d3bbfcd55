"""Publishing to streams alone, the fast path: one put for each partition, one commit for all.

A publish that goes to queues, too, takes the path of `queues.together`, which treats a partition as it does a queue.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from qflow.memory.waiting import shelter
from qflow.message import Headers, Message, Record, encode_headers
from qflow.named_tuples import NamedTuple
from qflow.storage.log.facts import Facts
from qflow.storage.log.transaction_log import Put, Request, TransactionLog, Unit
from qflow.streams.partition import Partition, put_charge
from qflow.streams.producers import Claim
from qflow.streams.room import Room


class Lot:
    """The messages of one call for one partition."""

    __slots__ = ("plain", "records", "topics")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.topics: Any = []
        self.plain = True

    def add_all(self, records: list[Record], topics: list[str]) -> None:
        """Add messages; the caller sets `plain`."""
        self.records += records
        self.topics += topics


def prefix_of(headers: Headers | None, key: bytes | None) -> bytes:
    """Return the bytes before a body in a stream; none without headers and key."""
    header_bytes = encode_headers(headers)
    return bytes(Message(b"", header_bytes, key=key or b"")) if header_bytes or key else b""


class Sent(NamedTuple):
    """Messages handed to the log; when the request is done, its `error` tells the outcome."""

    request: Request
    puts: list[Put]


class Sending:
    """Lots of one call: drafted, then given memory by the caller, then joined to a batch of the log."""

    __slots__ = ("_claim", "_facts", "_lots", "_unit", "amount", "has_room", "puts")

    def __init__(self, lots: dict[Partition, Lot], claim: Claim | None, facts: Facts | None = None) -> None:
        """Draft the puts; raises `MessageTooLarge`, `TransactionTooLarge`. `facts`: kept in the same commit."""
        self.puts = [partition.put_of(lot.records, lot.topics, lot.plain) for partition, lot in lots.items()]
        self.amount = sum(map(put_charge, self.puts))
        """Bytes to reserve, all at once: calls that hold a part and wait for the rest could wait for each other."""
        self.has_room = False
        """It was reserved: `withdraw` gives it back."""
        self._lots = lots
        self._claim = claim
        self._facts = facts
        self._unit: Unit | None = None

    @property
    def room(self) -> Room | None:
        """Where to reserve memory; None if there is nothing to send."""
        for partition in self._lots:
            return partition.room
        return None

    def reserve_at_once(self) -> bool:
        """Reserve its memory, if there is some; see `Room`. An interrupt finds that noted, or not done."""
        room = self.room
        self.has_room = room is None or room.reserve_at_once(self.amount)
        return self.has_room

    def enter(self, log: TransactionLog, future: Future[Any] | None = None, *, soon: bool = True) -> Sent | None:
        """Join puts whose memory is reserved, and the claim, to one batch; None if there are none. `soon`: see the log.

        Raises:
            StreamDeleted, BrokerClosed: nothing was done, and the memory was given back.
        """
        try:
            try:
                return self._join(log, future, soon)
            finally:
                self._end_joining()
        except BaseException:
            shelter(lambda: self._clear_up(log))
            raise

    def _join(self, log: TransactionLog, future: Future[Any] | None, soon: bool) -> Sent | None:
        puts, claim, facts = self.puts, self._claim, self._facts
        for partition in self._lots:
            partition.begin_joining(self)
        if not puts:
            if claim is not None:
                claim.give_up()  # nothing takes the message, so the number stays free
            if facts is None:
                return None
            claim = None
        if claim is None and facts is None and len(puts) == 1:
            puts[0].future = future
            return Sent(log.put(puts[0], soon), puts)
        unit = self._unit = Unit(puts)
        if claim is not None:
            claim.unit = unit
            unit.parties, unit.writes = [claim], [claim.write]
        if facts is not None:
            unit.writes.append(facts.write)
            unit.size, unit.values = facts.size, facts.values
        unit.future = future
        return Sent(log.join(unit, soon), puts)

    def _end_joining(self) -> None:
        for partition in self._lots:
            partition.end_joining(self)

    def _clear_up(self, log: TransactionLog) -> None:
        self._end_joining()
        self.withdraw()
        log.now()  # if it was handed over, the caller does not ask for its commit any more

    def withdraw(self) -> None:
        """Give back the memory of puts that did not join a batch; twice is fine."""
        if self._unit is None or not self._unit.joined:
            for partition, put in zip(self._lots, self.puts, strict=True):
                if not put.joined:
                    partition.refused(put)


def send(
    log: TransactionLog,
    lots: dict[Partition, Lot],
    *,
    claim: Claim | None = None,
    future: Future[Any] | None = None,
) -> Sent | None:
    """Reserve memory for lots, waiting for it, and join them and a claim to one batch; None if there are none.

    Raises:
        MessageTooLarge, TransactionTooLarge, StreamDeleted, BrokerClosed: nothing was done.
    """
    sending = Sending(lots, claim)
    room = sending.room
    if room is None:
        return sending.enter(log, future)
    room.reserve(sending.amount)
    try:
        return sending.enter(log, future)
    except BaseException:
        shelter(sending.withdraw)
        raise
