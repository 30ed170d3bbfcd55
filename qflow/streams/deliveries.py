"""Messages of a stream as subscribers and queries get them: one, or a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from qflow.batch_index import BatchIndex, missing
from qflow.delivery import Deliveries, Delivery, Settler
from qflow.errors import AlreadySettled
from qflow.inherited import called_after, shows
from qflow.message import LANE_SHIFT, HeaderValue, Message, Record, body_of, decode_headers, lane_of, offset_of
from qflow.named_tuples import NamedTuple
from qflow.storage.streams.partitions import Piece
from qflow.streams.room import charge_for

_NONE: frozenset[int] = frozenset()


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

    def __init__(self, batch: StreamDeliveries, piece: Piece, index: int, marks: int) -> None:
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

    __slots__ = ("bound", "charged", "later", "member", "shares", "shown", "taken", "taker", "unsettled")

    shares: list[Share]
    total: int
    unsettled: int
    """How many of `total` are not settled; changed with `settled`."""
    member: object
    """The subscription that got it."""
    taker: object
    """The thread or task that got it."""
    charged: int
    """What it takes of memory, as the ledger counts."""
    bound: frozenset[int] | set[int] | range
    """Indexes of messages that commits settle which have begun, those that wait for room, too: each is for one commit.
    No lease runs as long as there are some."""
    later: list[Callable[[], object]]
    """What is done when no commit is under way that settles some of it."""

    def __init__(self, settler: Any, shares: list[Share], member: object, charged: int, taker: object = None) -> None:
        super().__init__(settler, [])
        self.shares = shares
        self.total = self.unsettled = sum(len(share.piece.records) for share in shares)
        self.member = member
        self.charged = charged
        self.bound = _NONE
        self.later = []
        self.taken: frozenset[int] = _NONE
        """Indexes of messages that a seek has taken back: settling them does nothing."""
        self.taker = taker
        self.shown: int | None = None
        """How many of its messages an iteration has returned; None if it is not for an iteration."""

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

    def left_shares(self, low: int = 0, high: int | None = None) -> list[Share]:
        """Return what is not settled yet of the indexes [low, high)."""
        settled = self.settled
        if settled is None:
            return []
        if low or high is not None:
            settled = settled | set(range(low)) | set(range(self.total if high is None else high, self.total))
        if not settled:
            return self.shares
        left: list[Share] = []
        position = 0
        for part, piece, marks in self.shares:
            start = 0
            count = len(piece.records)
            for index in range(count + 1):
                if index == count or position + index in settled:
                    if index > start:
                        left.append(Share(part, piece.part(start, index), marks))
                    start = index + 1
            position += len(piece.records)
        return left

    def free(self) -> list[int]:
        """Return the indexes of what is neither settled nor bound."""
        settled, bound = self.settled, self.bound
        if settled is None:
            return []
        return [index for index in range(self.total) if index not in settled and index not in bound]

    def bind(self, position: int | None) -> list[int] | None:
        """Have a commit settle one message, or all that no other one does; return the indexes, None = all there are."""
        if position is None and not self.bound:
            self.bound = range(self.total)
            return None
        positions = self.free() if position is None else [position]
        bound = self.bound if isinstance(self.bound, set) else set(self.bound)
        bound.update(positions)
        self.bound = bound
        return positions

    def unbind(self, positions: list[int] | None) -> None:
        """End what `bind` began and returned."""
        if isinstance(self.bound, set) and positions is not None:
            self.bound.difference_update(positions)
        else:
            self.bound = _NONE

    def take_part(self, part: Any) -> list[int]:
        """Take back what is not settled of one partition; return the indexes."""
        settled = self.settled
        taken: list[int] = []
        position = 0
        for share in self.shares if settled is not None else ():
            count = len(share.piece.records)
            if share.part is part:
                taken += (index for index in range(position, position + count) if index not in settled)  # type: ignore[operator]
            position += count
        if taken:
            self.note_settled(taken)
            self.taken = self.taken.union(taken)
        return taken

    def note_settled(self, positions: Iterable[int]) -> None:
        """Note that messages are settled, or went back."""
        super().note_settled(positions)
        assert self.settled is not None
        self.unsettled = self.total - len(self.settled)

    def span_at(self, position: int) -> tuple[Any, int, int]:
        """Return (part, start, end) of the sequences that one message covers; see `Piece.part`."""
        (part, piece, _), index = self._find(position)
        sequences = piece.sequences
        start = sequences[index - 1] + 1 if index else piece.start
        return part, start, sequences[index] + 1 if index + 1 < len(sequences) else piece.end

    def share_at(self, position: int) -> Share:
        """Return one message as a share."""
        share, index = self._find(position)
        return share._replace(piece=share.piece.part(index, index + 1))

    def shares_at(self, positions: list[int] | None) -> list[Share]:
        """Return messages as shares; None = all that is not settled."""
        return self.left_shares() if positions is None else list(map(self.share_at, positions))

    def check_unsettled(self, position: int) -> None:
        """Refuse a message that was settled, or went back."""
        if self.settled is None or position in self.settled:
            offset = offset_of(self.at(position)[0])
            raise AlreadySettled(
                f"message {offset} of stream {self.name!r} was settled, or went back, before; or its stream or "
                "subscription was deleted"
            )

    def check_free(self, position: int | None = None) -> None:
        """Refuse one message, or all that is left, if it was settled, or a commit settles it that has begun."""
        if position is not None:
            self.check_unsettled(position)
        if self.bound and (position in self.bound if position is not None else not self.free()):
            what = "this batch" if position is None else f"message {offset_of(self.at(position)[0])}"
            raise AlreadySettled(f"{what} of stream {self.name!r} is settled by a transaction that is being committed")

    def take_back(self, positions: Iterable[int], size: int) -> None:
        """Not called for streams."""
        raise NotImplementedError("deliveries of a stream never leave their batch")

    def left_size(self) -> tuple[int, int]:
        """Return (messages, bytes) of what is not settled yet. Cost: O(messages)."""
        left = self.left_shares()
        return sum(len(share.piece.records) for share in left), sum(share.piece.size for share in left)

    @property
    def left_count(self) -> int:
        """How many are not settled yet. Cost: O(1)."""
        return 0 if self.settled is None else self.unsettled

    def at(self, position: int) -> tuple[int, Record, int]:
        """Return (sequence, record, marks) of one message."""
        (_, piece, marks), index = self._find(position)
        return piece.sequences[index], piece.records[index], marks

    def _find(self, position: int) -> tuple[Share, int]:
        """Return the share that holds one message, and its index there."""
        number, index = self.places.at(position)
        return self.shares[number], index

    def find_places(self) -> BatchIndex:
        pieces = [share.piece for share in self.shares]
        return BatchIndex([piece.sequences[0] for piece in pieces], [len(piece.records) for piece in pieces])

    def position(self, sequence: int) -> int:
        number, start = self.places.of(sequence)
        sequences = self.shares[number].piece.sequences
        index = bisect_left(sequences, sequence)
        if index == len(sequences) or sequences[index] != sequence:
            raise missing(sequence)
        return start + index

    @overload
    def __getitem__(self, index: int) -> StreamDelivery: ...
    @overload
    def __getitem__(self, index: slice) -> list[StreamDelivery]: ...
    def __getitem__(self, index: int | slice) -> StreamDelivery | list[StreamDelivery]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self.total))]
        (_, piece, marks), place = self._find(index + self.total if index < 0 else index)
        return StreamDelivery(self, piece, place, marks)

    def __iter__(self) -> Iterator[StreamDelivery]:
        for _, piece, marks in self.shares:
            for index in range(len(piece.records)):
                yield StreamDelivery(self, piece, index, marks)


def place_of(held: Any) -> tuple[StreamDeliveries, int | None]:
    """Return (batch, index) of a delivery; (batch, None) of a batch."""
    if isinstance(held, StreamDeliveries):
        return held, None
    batch: StreamDeliveries = held.settler
    return batch, batch.position(held.sequence)


def root_of(taker: object) -> object:
    """Return the thread or task that a get belongs to; that of an iteration is wrapped."""
    return taker[0] if isinstance(taker, tuple) else taker
