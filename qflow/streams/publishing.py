"""Messages on their way into streams alone: one put for each partition, one commit for all. The fast way.

What goes to queues, too, takes the way of `queues.together`, for which a partition is a place as a queue is.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from qflow.errors import StreamDeleted
from qflow.message import Headers, Message, Record, encode_headers
from qflow.storage.transaction_log import Batch, Put, TransactionLog, Unit
from qflow.streams.partition import Partition
from qflow.streams.producers import Claim


class Lot:
    """What one partition gets of one call."""

    __slots__ = ("plain", "records", "topics")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.topics: Any = []
        self.plain = True


def prefix_of(headers: Headers | None, key: bytes | None) -> bytes:
    """Return what stands before a body in a stream; nothing without headers and key."""
    header_bytes = encode_headers(headers)
    return bytes(Message(b"", header_bytes, key=key or b"")) if header_bytes or key else b""


class Sent:
    """Messages that have joined a batch: look at `error` when it is done."""

    __slots__ = ("batch", "puts", "unit")

    def __init__(self, batch: Batch, puts: list[Put], unit: Unit | None) -> None:
        self.batch = batch
        self.puts = puts
        self.unit = unit

    @property
    def error(self) -> BaseException | None:
        return self.puts[0].error if self.unit is None else self.unit.error


def send(
    log: TransactionLog,
    lots: dict[Partition, Lot],
    *,
    claim: Claim | None = None,
    future: Future[Any] | None = None,
) -> Sent | None:
    """Reserve room for lots, waiting for it, and have them join one batch, with a producer's claim; None for nothing.

    Raises:
        MessageTooLarge, TransactionTooLarge, StreamDeleted, BrokerClosed: nothing was done.
    """
    puts = [partition.put_of(lot.records, lot.topics, lot.plain) for partition, lot in lots.items()]
    taken: list[tuple[Partition, Put]] = []
    try:
        for partition, put in zip(lots, puts, strict=True):
            partition.reserve(put)
            taken.append((partition, put))
        for partition in lots:
            if partition.stream.ended is not None:
                partition.stream.check_open()
                raise StreamDeleted(f"stream {partition.name!r} was deleted")
        if claim is None:
            if not puts:
                return None
            if len(puts) == 1:
                puts[0].future = future
                return Sent(log.put(puts[0]), puts, None)
            unit = Unit(puts)
        else:
            unit = claim.unit = Unit(puts, (), [claim], [claim.write])
        unit.future = future
        return Sent(log.join(unit), puts, unit)
    except BaseException:
        for partition, put in taken:
            if not put.joined:
                partition.refused(put)
        raise
