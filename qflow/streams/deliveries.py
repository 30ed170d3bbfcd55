"""Messages of a stream as subscribers and queries get them: one, or a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from qflow.deliveries import Deliveries
from qflow.delivery import Delivery, Settler
from qflow.inherited import called_after, shows
from qflow.message import LANE_SHIFT, HeaderValue, Message, Record, body_of, decode_headers, lane_of, offset_of
from qflow.named_tuples import NamedTuple
from qflow.storage.streams.partitions import Piece
from qflow.streams.room import charge_for


class StreamMessage:
    """One message of a stream, as queries return it."""

    __slots__ = ("_record", "offset", "partition", "stream", "time_ms", "topic")

    stream: str
    """The stream's name."""
    partition: int
    """The number of its partition."""
    offset: int
    """Its place in its partition: dense, and never used twice."""
    topic: str
    """What it was published under."""
    time_ms: int
    """When it was confirmed, milliseconds since the epoch; it never falls along a partition."""
    _record: Record

    @property
    def body(self) -> bytes:
        """The bytes that were published."""
        return body_of(self._record)

    @property
    def headers(self) -> dict[str, HeaderValue]:
        """The headers it was published with, decoded at each call."""
        return decode_headers(self._record.header_bytes) if isinstance(self._record, Message) else {}

    @property
    def key(self) -> bytes | None:
        """The key it was published with."""
        return key_of(self._record)

    def __repr__(self) -> str:
        where = f"{self.stream!r}, partition {self.partition}, offset {self.offset}"
        return f"<StreamMessage of {where}: {self.topic!r}, {len(self.body)} B>"


def message_of(stream: str, sequence: int, record: Record, topic: str, time_ms: int) -> StreamMessage:
    """Return a message of a stream for a query."""
    message = StreamMessage()
    message.stream, message.topic, message.time_ms = stream, topic, time_ms
    message.partition, message.offset = lane_of(sequence), offset_of(sequence)
    message._record = record
    return message


def record_of(message: StreamMessage) -> Record:
    """Return a message as it is stored."""
    return message._record


def key_of(record: Record) -> bytes | None:
    """Return the key a message was published with."""
    return record.key or None if isinstance(record, Message) else None


def piece_of(sequences: list[int], records: list[Record], topics: list[str], times_ms: list[int]) -> Piece:
    """Return messages with rising sequences, all of one partition, as a piece."""
    return Piece(sequences[0], sequences[-1] + 1, sequences, records, topics, times_ms)


@called_after
@shows(
    "ack body delivery_count expires_at_s extend headers key nack offset partition queue redelivered sequence stream "
    "time_ms topic"
)
class StreamDelivery(Delivery):
    """One message of a stream, leased to a subscriber. As a context manager it acks on success."""

    __slots__ = ("_topic", "time_ms")

    record: Record
    sequence: int
    """The partition's number in the top byte, the offset below it."""
    time_ms: int
    """When it was confirmed, milliseconds since the epoch; it never falls along a partition."""
    _topic: str

    def __init__(self, batch: Settler, piece: Piece, index: int, marks: int) -> None:
        """Made by its batch, of the message at `index` of a piece."""
        self.settler: Settler = batch
        self.marks = marks
        self.record = piece.records[index]
        self.sequence = piece.sequences[index]
        self._topic = piece.topics[index]
        self.time_ms = piece.times_ms[index]

    @property
    def topic(self) -> str:
        """What it was published under."""
        return self._topic

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self.settler.name

    @property
    def partition(self) -> int:
        """The number of its partition."""
        return self.sequence >> LANE_SHIFT

    @property
    def offset(self) -> int:
        """Its place in its partition: dense, and never given again."""
        return offset_of(self.sequence)

    @property
    def key(self) -> bytes | None:
        """The key it was published with."""
        return key_of(self.record)

    def __repr__(self) -> str:
        return f"<StreamDelivery {self.offset} of {self.stream!r}, {self._topic!r}, {len(self.record)} B>"


class Share(NamedTuple):
    """A piece of a partition that is read or held. `marks` are those of a `Delivery`."""

    part: Any
    piece: Piece
    marks: int

    @property
    def charged(self) -> int:
        """Bytes that the ledger counts for it."""
        return charge_for(len(self.piece.records), self.piece.weight)


@called_after
@shows("ack bodies count extend index nack offsets sequences topics")
class StreamDeliveries(Deliveries):
    """A batch of messages of a stream; see `Deliveries`. In order within each partition."""

    __slots__ = ("kept",)

    kept: Any
    """All messages: `KeptShares`."""

    @property
    def shares(self) -> list[Share]:
        found: list[Share] = self.kept.shares
        return found

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, in order."""
        return [body_of(record) for share in self.shares for record in share.piece.records]

    @property
    def topics(self) -> list[str]:
        """All topics, in order."""
        return [topic for share in self.shares for topic in share.piece.topics]

    @property
    def sequences(self) -> Sequence[int]:
        """All sequences, in order: the partition's number in the top byte, the offset below it."""
        return [sequence for share in self.shares for sequence in share.piece.sequences]

    @property
    def offsets(self) -> list[int]:
        """All offsets, in order; of several partitions, see `partition` of each delivery."""
        return [offset_of(sequence) for share in self.shares for sequence in share.piece.sequences]

    @overload
    def __getitem__(self, index: int) -> StreamDelivery: ...
    @overload
    def __getitem__(self, index: slice) -> list[StreamDelivery]: ...
    def __getitem__(self, index: int | slice) -> StreamDelivery | list[StreamDelivery]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self.total))]
        (_, piece, marks), place = self.kept.find(index + self.total if index < 0 else index)
        return StreamDelivery(self.held, piece, place, marks)

    def __iter__(self) -> Iterator[StreamDelivery]:
        for _, piece, marks in self.shares:
            for index in range(len(piece.records)):
                yield StreamDelivery(self.held, piece, index, marks)


def stream_deliveries_of(held: Any) -> StreamDeliveries:
    """Return a batch as users have it; before anything of it is settled."""
    shown = StreamDeliveries()
    shown.held, shown.kept, shown.total = held, held.kept, held.total
    return shown


def root_of(taker: object) -> object:
    """Return the thread or task that a get belongs to; that of an iteration is wrapped."""
    return taker[0] if isinstance(taker, tuple) else taker
