"""What a consumer holds until it is settled: a `Delivery`, or a batch of them, `Deliveries`.

Neither knows a queue: each is given a *settler*, an object that acks and returns by value. The first settling counts;
later ones raise `AlreadySettled` (after a purge or delete they do nothing).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, overload

from qflow.batch_index import BatchIndex, missing
from qflow.config import parse_span
from qflow.durations import Duration
from qflow.errors import AlreadySettled, ForkedProcess, InvalidArgument
from qflow.inherited import shows
from qflow.message import HeaderValue, Message, Record, decode_headers, is_plain
from qflow.named_tuples import NamedTuple
from qflow.pickling import Unpicklable

MAY_BE_REPEATED = 1
"""The low bit of a delivery's *marks*; the rest count its earlier deliveries."""
ONE_ATTEMPT = 2
MAX_REASON_BYTES = 1024
"""A reason of a `nack` is cut there, in UTF-8."""
_NONE: Any = frozenset()  # settled of a batch, until one of it is: most are settled as a whole


class Raised(str):
    """What an exception said; as the reason of a `nack` it is told apart from what somebody wrote."""

    __slots__ = ()


def reason_of(error: BaseException) -> Raised:
    """Return what an exception says, as the last lines of its traceback: the reason of a message that it failed."""
    return Raised("".join(traceback.format_exception_only(error)).strip())


class Return(NamedTuple):
    """How messages are given back; see `Delivery.nack`."""

    requeue: bool = True
    delay_s: float = 0.0
    reason: str | None = None


AT_ONCE = Return()


def parse_return(requeue: bool, delay_s: object, reason: object) -> Return:
    return Return(requeue, parse_span(delay_s, "delay_s"), _parse_reason(reason))


def _parse_reason(value: object) -> str | None:
    """Return a reason of a `nack`, cut to `MAX_REASON_BYTES`; what is not Unicode is written with backslashes.

    Raises:
        InvalidArgument: it is neither text nor None.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgument(f"reason must be str, or None, not {type(value).__name__}: give it str(error), or repr()")
    cut = value.encode("utf-8", "backslashreplace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
    return Raised(cut) if isinstance(value, Raised) else cut


class Settler(Protocol):
    """What settles a delivery: its queue, or the batch it came in."""

    @property
    def name(self) -> str: ...
    def settle_one(self, delivery: Delivery, wait: bool) -> None: ...
    def return_one(self, delivery: Delivery, how: Return) -> None: ...
    def extend_one(self, delivery: Delivery, seconds: float) -> None: ...


class BatchSettler(Protocol):
    """What settles a batch, and deliveries of it: its queue."""

    @property
    def name(self) -> str: ...
    def settle_batch(self, batch: Deliveries, wait: bool) -> None: ...
    def return_batch(self, batch: Deliveries, how: Return) -> None: ...
    def extend_batch(self, batch: Deliveries, seconds: float) -> None: ...
    def settle_part(self, batch: Deliveries, index: int, wait: bool) -> None: ...
    def return_part(self, batch: Deliveries, index: int, how: Return) -> None: ...


@shows("ack body delivery_count expires_at_s extend headers nack queue redelivered sequence topic")
class Delivery(Unpicklable):
    """One message, acquired. As a context manager it acks on success and goes back on an exception."""

    # Its queue sets the slots itself: that takes half the time of a call of `__init__`.
    __slots__ = ("marks", "record", "sequence", "settler", "taker")

    record: Record
    sequence: int
    settler: Settler
    marks: int
    taker: Any
    """Who took it, as its queue notes that; not set of one that is made of a batch, which knows."""

    @property
    def body(self) -> bytes:
        """The bytes that were put."""
        record = self.record
        return record if type(record) is bytes else record.body  # type: ignore[attr-defined]

    @property
    def headers(self) -> dict[str, HeaderValue]:
        """The headers that were put, decoded at each call."""
        record = self.record
        return decode_headers(record.header_bytes) if type(record) is Message else {}

    @property
    def topic(self) -> str:
        """What it was published under; empty for a message that was put."""
        record = self.record
        return record.topic if isinstance(record, Message) else ""

    @property
    def expires_at_s(self) -> float | None:
        """When it expires, in seconds since the epoch; None = never."""
        record = self.record
        return record.expires_ms / 1000 if isinstance(record, Message) and record.expires_ms else None

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.settler.name

    @property
    def delivery_count(self) -> int:
        """1 at the first delivery, one more after each return."""
        return (self.marks >> 1) + 1

    @property
    def redelivered(self) -> bool:
        """It was, or before a crash may have been, delivered before."""
        return self.marks != 0

    def ack(self, wait: bool = False) -> None:
        """Settle the message.

        Args:
            wait: return only when the ack is synced in the log; else it rides the next commit, within milliseconds.

        Raises:
            AlreadySettled: it was acked or returned before.
            BrokerClosed: the message went back to its queue when the broker was closed.
        Cost: 0.3 µs; with `wait`, a commit.
        """
        self.settler.settle_one(self, wait)

    def nack(self, requeue: bool = True, delay_s: Duration = 0.0, reason: str | None = None) -> None:
        """Give the message back to its original place, to be delivered again.

        Args:
            requeue: False = it is not wanted: it becomes a dead letter, or is dropped where there is no such queue.
            delay_s: it is not delivered again before; it comes then before what waits. A restart ends the delay.
            reason: what went wrong, in words. If the message becomes a dead letter with this call, that is its header
                `dead_letter_nack_reason`, cut to 1,024 bytes; else the reason is not kept.

        A message that was delivered `max_deliveries` times becomes a dead letter, or is dropped, too.

        Raises:
            AlreadySettled, BrokerClosed: as `ack`.
        """
        self.settler.return_one(self, parse_return(requeue, delay_s, reason))

    def extend(self, seconds: Duration) -> None:
        """Hold the message for so many seconds from now, if its queue's `ack_timeout_s` would take it back earlier.

        Raises:
            InvalidArgument: it is no time span, or below 0. AlreadySettled, BrokerClosed: as `ack`, or it went back.
        """
        self.settler.extend_one(self, parse_span(seconds, "seconds"))

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.ack()
            else:
                self.nack(reason=None if error is None else reason_of(error))
        except AlreadySettled:
            pass  # the block settled it itself
        except ForkedProcess:
            if kind is None:
                raise  # what a child is done with is not acked

    def __repr__(self) -> str:
        return f"<Delivery {self.sequence} of {self.queue!r}, {len(self.record)} B>"


class Segment(NamedTuple):
    """Messages of a batch with consecutive sequences and equal marks."""

    first: int
    records: list[Record]
    marks: int


@shows("ack bodies count extend index nack sequences")
class Deliveries(Unpicklable, Sequence[Delivery]):
    """A batch of acquired messages; each `Delivery` is made on access, the batch is acked as a whole, run by run.

    A delivery of it may be settled on its own; the batch then settles what is left.
    Cost: 0.1 µs a delivery made; `.bodies` and `.ack()` 0.01 µs a message.
    """

    __slots__ = ("_measured", "_places", "leaving", "segments", "settled", "settled_bytes", "settler", "taker", "total")

    def __init__(self, settler: BatchSettler, segments: list[Segment], taker: Any = None) -> None:
        self.settler: BatchSettler = settler
        self.taker: Any = taker
        """Who took it, as its queue notes that."""
        self.segments: list[Segment] = segments
        self.total: int = sum([len(segment.records) for segment in segments]) if segments else 0
        self.settled: set[int] | None = _NONE
        """Positions settled one by one, see `note_settled`; None once the batch is settled as a whole."""
        self.settled_bytes: int = 0
        self.leaving: int = 0  # commits that are under way and settle some of it: what is refused is held again
        self._measured = (0, 0)
        self._places: BatchIndex | None = None  # made when somebody looks for one of its messages

    @property
    def name(self) -> str:
        return self.settler.name

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, in order."""
        if len(self.segments) == 1 and is_plain(records := self.segments[0].records):
            return records.copy()
        return [
            record if type(record) is bytes else record.body  # type: ignore[union-attr]
            for segment in self.segments
            for record in segment.records
        ]

    @property
    def sequences(self) -> Sequence[int]:
        """All sequences, in order."""
        if len(self.segments) == 1:
            first, records, _ = self.segments[0]
            return range(first, first + len(records))
        return [first + index for first, records, _ in self.segments for index in range(len(records))]

    def ack(self, wait: bool = False) -> None:
        """Settle what is left of the batch; see `Delivery.ack`."""
        self.settler.settle_batch(self, wait)

    def nack(self, requeue: bool = True, delay_s: Duration = 0.0, reason: str | None = None) -> None:
        """Give what is left of the batch back to its original place; see `Delivery.nack`."""
        self.settler.return_batch(self, parse_return(requeue, delay_s, reason))

    def extend(self, seconds: Duration) -> None:
        """Hold what is left of the batch longer; see `Delivery.extend`."""
        self.settler.extend_batch(self, parse_span(seconds, "seconds"))

    def settle_one(self, delivery: Delivery, wait: bool) -> None:
        """Ack a delivery of it."""
        self.settler.settle_part(self, self.position(delivery.sequence), wait)

    def return_one(self, delivery: Delivery, how: Return) -> None:
        """Give a delivery of it back."""
        self.settler.return_part(self, self.position(delivery.sequence), how)

    def extend_one(self, delivery: Delivery, seconds: float) -> None:
        """Hold a delivery of it longer, and with it what is left of the batch."""
        self.settler.extend_batch(self, seconds)

    def check_unsettled(self, position: int) -> None:
        """Refuse a delivery of it that was settled on its own, or with all others."""
        if self.settled is None or position in self.settled:
            raise AlreadySettled(f"message {self.at(position)[0]} of queue {self.name!r} was settled before")

    def unsettled_place(self, delivery: Delivery) -> tuple[BatchSettler, int]:
        """Return who settles a delivery of it, and where in it that is. Raises as `check_unsettled`."""
        position = self.position(delivery.sequence)
        self.check_unsettled(position)
        return self.settler, position

    def note_settled(self, positions: Iterable[int]) -> None:
        """Note that messages of it are settled, or held by themselves."""
        self.settled = self.settled or set()
        self.settled.update(positions)

    def take_back(self, positions: Iterable[int], size: int) -> None:
        """Have messages of `size` bytes again that were held otherwise; the others may have been settled meanwhile."""
        if self.settled is None:
            self.settled = set(range(self.total))
            self.settled_bytes = sum(sum(map(len, segment.records)) for segment in self.segments)
        self.settled.difference_update(positions)
        self.settled_bytes -= size

    def now(self) -> Deliveries:
        """Return a copy that stays as the batch is now. Under the lock of its queue. Cost: O(segments + settled)."""
        copy = Deliveries(self.settler, self.segments.copy())
        copy.total = self.total
        copy.settled = None if self.settled is None else self.settled.copy()
        copy.settled_bytes = self.settled_bytes
        copy._measured = self._measured
        return copy

    def left(self) -> list[Segment]:
        """Return what is not settled yet, as segments."""
        settled = self.settled
        if not settled:
            return [] if settled is None else self.segments
        left: list[Segment] = []
        position = 0
        for first, records, marks in self.segments:
            start = 0
            for index in range(len(records) + 1):
                if index == len(records) or position + index in settled:
                    if index > start:
                        left.append(Segment(first + start, records[start:index], marks))
                    start = index + 1
            position += len(records)
        return left

    def left_size(self) -> tuple[int, int]:
        """Return (messages, bytes) of what is not settled yet. Cost: O(1), but for the first time.

        Without the queue's lock, too: it is then about what it was at some moment.
        """
        settled, (total, size) = self.settled, self._measured
        if settled is None:
            return 0, 0
        if total != self.total:
            total, size = self._measured = self.total, sum(sum(map(len, part.records)) for part in self.segments)
        return total - len(settled), size - self.settled_bytes

    @property
    def left_count(self) -> int:
        """How many are not settled yet. Cost: O(1), but for the first time."""
        return self.left_size()[0]

    @property
    def places(self) -> BatchIndex:
        """Where its messages lie. Not before it has all of them."""
        if self._places is None:
            self._places = self.find_places()
        return self._places

    def find_places(self) -> BatchIndex:
        return BatchIndex([part.first for part in self.segments], [len(part.records) for part in self.segments])

    def at(self, position: int) -> tuple[int, Record, int]:
        """Return (sequence, record, marks) of one message."""
        number, place = self.places.at(position)
        first, records, marks = self.segments[number]
        return first + place, records[place], marks

    def position(self, sequence: int) -> int:
        number, start = self.places.of(sequence)
        first, records, _ = self.segments[number]
        if sequence >= first + len(records):
            raise missing(sequence)
        return start + sequence - first

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | Sequence[Delivery]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self.total))]
        delivery = Delivery()
        delivery.settler = self
        delivery.sequence, delivery.record, delivery.marks = self.at(index + self.total if index < 0 else index)
        return delivery

    def __iter__(self) -> Iterator[Delivery]:
        for first, records, marks in self.segments:
            for sequence, record in enumerate(records, first):
                delivery = Delivery()
                delivery.record, delivery.sequence = record, sequence
                delivery.settler = self
                delivery.marks = marks
                yield delivery

    def __repr__(self) -> str:
        return f"<Deliveries {self.total} of {self.name!r}>"


class Keeper(Protocol):
    """What moves a waiting message between memory and disk when asked to: its queue."""

    def spill_entry(self, sequence: int) -> str: ...
    def restore_entry(self, sequence: int) -> str: ...


class Entry:
    """One waiting message as `browse()` shows it: its place in line and where its body lies."""

    __slots__ = ("_keeper", "due_ms", "sequence", "size_bytes", "state")

    def __init__(
        self, sequence: int, size_bytes: int | None, state: str, keeper: Keeper, due_ms: int | None = None
    ) -> None:
        self.sequence: int = sequence
        self.size_bytes: int | None = size_bytes
        """Body and headers; None where only the disk knows."""
        self.state: str = state
        """`"resident"`, `"spilled"` or `"logged"`, as of `browse`, or of the last move.

        `"delayed"` after `spill` or `restore` of a delayed message, which do not move it.
        """
        self.due_ms: int | None = due_ms
        """When a delayed message is due, milliseconds since the epoch, where memory knows that."""
        self._keeper = keeper

    @property
    def spilled(self) -> bool:
        """Its body lies in the spill store."""
        return self.state == "spilled"

    def spill(self) -> None:
        """Move the message from memory to the spill store, whatever room there is.

        Nothing if it is not in memory, or delayed, or one of hundreds that came back singly: those move by themselves.

        Raises:
            NotFound: it waits no more; it was delivered or dropped.
            StorageError: the disk did not take it; it is where it was.
        """
        self.state = self._keeper.spill_entry(self.sequence)

    def restore(self) -> None:
        """Move the message from the spill store into memory; others may have to leave it for that.

        What is only in the log, or delayed, comes by itself when its turn does, and not before.

        Raises: NotFound: as `spill`. QueueFull: what is acquired takes all the room.
        """
        self.state = self._keeper.restore_entry(self.sequence)

    def __repr__(self) -> str:
        return f"<Entry {self.sequence}, {self.state}>"
