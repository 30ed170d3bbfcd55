"""A batch as its queue and its deliveries refer to it, until all of it is settled: it has what is not settled yet.

Whoever wants all messages of it, settled or not, has a `Deliveries`, which keeps them beside it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, overload

from qflow.batch_index import BatchIndex
from qflow.config import parse_span
from qflow.delivery import Delivery, Return, Segment, parse_return
from qflow.durations import Duration
from qflow.errors import AlreadySettled
from qflow.message import Record
from qflow.named_tuples import NamedTuple

SPARSE = 4
"""What was settled one by one leaves empty places; there are at most so many places for each message that is left."""
FEW_PLACES = 4
"""And so many more."""
NOTHING: list[Segment] = []
"""Of what is over; nobody changes it."""


class BatchSettler(Protocol):
    """What settles one delivery of a batch, or with None all that is left of it: its queue."""

    @property
    def name(self) -> str: ...
    def settle_batch(self, batch: Any, index: int | None, wait: bool) -> None: ...
    def return_batch(self, batch: Any, index: int | None, how: Return) -> None: ...
    def extend_batch(self, batch: Any, seconds: float) -> None: ...


class AnyBatch(Sequence[Delivery]):
    """What batches of queues and of streams have in common: whoever settles one, or a delivery of it, is sent here."""

    __slots__ = ("leaving", "settler", "taker", "total")

    settler: BatchSettler
    taker: Any
    """Who took it, as its queue notes that."""
    total: int
    """How many messages it came with."""
    leaving: int
    """Commits that are under way and settle some of it: what is refused is held again."""

    @property
    def name(self) -> str:
        return self.settler.name

    @abstractmethod
    def position(self, sequence: int) -> int:
        """Return where in the batch a message of it is."""

    @abstractmethod
    def is_settled(self, position: int) -> bool:
        """Tell whether a message was settled, or is held by itself. Also without the lock."""

    @abstractmethod
    def check_unsettled(self, position: int, sequence: int | None = None) -> None:
        """Refuse a message that was settled on its own, or with all others; with its sequence, the error names it."""

    @abstractmethod
    def delivery_at(self, position: int) -> Delivery:
        """Return a delivery of a message that is not settled yet."""

    def ack(self, wait: bool = False) -> None:
        """Settle what is left of it."""
        self.settler.settle_batch(self, None, wait)

    def nack(self, requeue: bool = True, delay_s: Duration = 0.0, reason: str | None = None) -> None:
        """Give back what is left of it."""
        self.settler.return_batch(self, None, parse_return(requeue, delay_s, reason))

    def extend(self, seconds: Duration) -> None:
        """Hold what is left of it longer."""
        self.settler.extend_batch(self, parse_span(seconds, "seconds"))

    def settle_one(self, delivery: Delivery, wait: bool) -> None:
        """Ack a delivery of it."""
        self.settler.settle_batch(self, self.position(delivery.sequence), wait)

    def return_one(self, delivery: Delivery, how: Return) -> None:
        """Give a delivery of it back."""
        self.settler.return_batch(self, self.position(delivery.sequence), how)

    def extend_one(self, delivery: Delivery, seconds: float) -> None:
        """Hold a delivery of it longer, and with it what is left of the batch."""
        self.settler.extend_batch(self, seconds)

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, index: int) -> Delivery: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Delivery]: ...
    def __getitem__(self, index: int | slice) -> Delivery | Sequence[Delivery]:
        if isinstance(index, slice):
            return [self.delivery_at(position) for position in range(*index.indices(self.total))]
        return self.delivery_at(index)

    def __iter__(self) -> Iterator[Delivery]:
        """Yield deliveries of what is not settled."""
        for position in range(self.total):
            if self.is_settled(position):
                continue
            try:
                delivery = self.delivery_at(position)
            except AlreadySettled:
                continue  # by another thread
            yield delivery

    def __repr__(self) -> str:
        return f"<Deliveries {self.total} of {self.name!r}>"


def index_of(segments: list[Segment], positions: list[int] | None = None) -> BatchIndex:
    """Return where the messages of segments lie, one behind the other, or at these positions."""
    return BatchIndex([part.first for part in segments], [len(part.records) for part in segments], positions)


class Kept(NamedTuple):
    """What is left of a batch of which messages were settled one by one. It is read without the lock."""

    records: list[Record | None]
    """None in place of what was settled since it was made."""
    places: BatchIndex
    marks: list[int]
    """Of each segment of that."""

    def pieces(self) -> Iterator[tuple[int, Segment]]:
        """Yield what is left as segments, each with its position."""
        records = self.records
        for marks, (first, position, low, high) in zip(self.marks, self.places.segments(), strict=True):
            end = low
            while end < high:
                begin = end
                while end < high and records[end] is not None:
                    end += 1
                if end > begin:
                    some: Any = records[begin:end]
                    yield position + begin - low, Segment(first + begin - low, some, marks)
                end += 1


def _first_gone(records: list[Record | None], begin: int, end: int) -> int:
    """Return the first place of a message that is gone; `end` if there is none."""
    try:
        return records.index(None, begin, end)
    except ValueError:
        return end


class HeldBatch(AnyBatch):
    """A batch of a queue; see the module. Under the lock of the queue, where a description says nothing else."""

    __slots__ = ("_front", "_index", "_left", "_measured", "is_over", "kept", "late", "segments", "was_seen")

    def __init__(self, settler: BatchSettler, segments: list[Segment], taker: Any = None) -> None:
        self.settler = settler
        self.taker = taker
        self.segments: list[Segment] = segments
        """All messages, until some are settled by themselves."""
        self.kept: Kept | None = None
        """What is left then."""
        self.is_over = False
        """It was settled, or went back, as a whole, or nothing of it is left."""
        self.late: str | None = None
        """What whoever settles it is told, where it was held for too long."""
        self.was_seen = False
        """Somebody has had it, of one that nobody has now: it was delivered; see `Held.unseen`."""
        self.total = sum([len(segment.records) for segment in segments]) if segments else 0
        self.leaving = 0
        self._measured = (0, 0)  # messages and bytes of `segments`, once somebody has asked
        self._left = (0, 0)  # of `kept`, counted under the lock alone
        self._index: BatchIndex | None = None  # of `segments`, made when somebody looks for one message
        self._front = (0, 0)  # segment and place in `kept` up to which `take_some` has taken

    # What is left ----------------------------------------------------------------------------------------------------

    def left(self) -> list[Segment]:
        """Return what is not settled yet, as segments."""
        if self.is_over:
            return []
        return self.segments if self.kept is None else [segment for _, segment in self.kept.pieces()]

    def left_size(self) -> tuple[int, int]:
        """Return (messages, bytes) of what is not settled yet. Cost: O(1), but for the first time.

        Without the queue's lock, too, of one that is not being collected: it is then what it was at some moment. What
        is remembered while messages come and go would be wrong for good.
        """
        segments, measured = self.segments, self._measured
        if self.is_over:
            return 0, 0
        if self.kept is not None:
            return self._left
        if measured[0] != self.total:
            measured = self._measured = self.total, sum(sum(map(len, part.records)) for part in segments)
        return measured

    @property
    def left_count(self) -> int:
        """How many are not settled yet; as `left_size`. Cost: O(1)."""
        if self.is_over:
            return 0
        return self.total if self.kept is None else self._left[0]

    def unsettled(self, first: int = 0) -> list[int]:
        """Return the positions of what is not settled yet, from one on."""
        if self.is_over or self.kept is None:
            return [] if self.is_over else list(range(first, self.total))
        pieces = self.kept.pieces()
        return [at for start, part in pieces for at in range(start, start + len(part.records)) if at >= first]

    def left_records(self) -> list[tuple[int, Record]]:
        """Return what is not settled yet, by position."""
        records = [record for part in self.left() for record in part.records]
        return list(zip(self.unsettled(), records, strict=True))

    def now(self) -> HeldBatch:
        """Return a copy that has what is left now, and counts it as this does. Cost: O(messages left)."""
        copy = HeldBatch(self.settler, self.left().copy(), self.taker)
        copy._measured = self.left_size()
        copy.total = copy._measured[0]
        return copy

    # A part at a time ------------------------------------------------------------------------------------------------

    def is_long(self, messages: int, pieces: int) -> bool:
        """Tell whether more is left than so many messages, or perhaps more pieces of them than so many. Cost: O(1)."""
        left, kept = self.left_count, self.kept
        most_pieces = len(self.segments) if kept is None else len(kept.marks) + len(kept.records) - left
        return left > messages or min(left, most_pieces) > pieces

    def hand_over(self) -> HeldBatch:
        """End it, and return a batch of what was left of it, which only the caller knows. Cost: O(segments)."""
        rest = HeldBatch(self.settler, self.segments, self.taker)
        if (kept := self.kept) is not None:
            rest.kept, rest._left = kept, self._left
            rest.total = self._left[0]
            self.kept = kept._replace(records=[None] * len(kept.records))
        self.end()
        return rest

    def begin_to_take(self) -> None:
        """Do what the first `take_some` would that takes longer than others; needs no lock. Cost: 0.03 µs a message."""
        if self.kept is None:
            self._keep()

    def take_some(self, most: int, most_pieces: int) -> HeldBatch:
        """Take messages out from the first on, of one that `hand_over` has returned; it is over with the last.

        Returns:
            A batch of them, which is held by nobody: about `most` at most, in so many pieces.
        """
        records, places, marks = self.kept or self._keep()
        parts: list[Segment] = []
        number, at = self._front
        looked = 0
        while number < len(marks) and looked < most and len(parts) < most_pieces:
            low, high = places.bounds(number)
            at = max(at, low)
            end = min(high, at + most - looked)
            first = places.first(number) - low
            stop = at
            while stop < end and len(parts) < most_pieces:
                begin = stop
                stop = _first_gone(records, begin, end)
                if stop > begin:
                    some: Any = records[begin:stop]
                    parts.append(Segment(first + begin, some, marks[number]))
                while stop < end and records[stop] is None:
                    stop += 1
            records[at:stop] = [None] * (stop - at)
            looked += stop - at
            number, at = (number + 1, 0) if stop == high else (number, stop)
        self._front = number, at
        taken = HeldBatch(self.settler, parts, self.taker)
        count, size = taken.left_size()
        self._left = self._left[0] - count, self._left[1] - size
        self.total -= count
        if number == len(marks):
            self.end()
        return taken

    # Where messages are; also without the lock ------------------------------------------------------------------------

    def position(self, sequence: int) -> int:
        """See `AnyBatch`; any, if nothing of it is left. Raises AlreadySettled: it was settled before."""
        segments, kept = self.segments, self.kept
        if kept is None:
            return self._places(segments).position(sequence) if segments else 0
        try:
            return kept.places.position(sequence)
        except IndexError as error:
            raise AlreadySettled(f"message {sequence} of queue {self.name!r} was settled before") from error

    def check_unsettled(self, position: int, sequence: int | None = None) -> None:
        """See `AnyBatch`."""
        if self.is_settled(position):
            raise self._settled(self._what(position) if sequence is None else f"message {sequence}")

    def is_settled(self, position: int) -> bool:
        """Tell whether a message of it was settled, or is held by itself."""
        kept = self.kept
        if self.is_over or kept is None:
            return self.is_over
        try:
            return kept.records[kept.places.place(position)] is None
        except IndexError:
            return True

    def delivery_at(self, position: int) -> Delivery:
        """See `AnyBatch`. Raises AlreadySettled: it is."""
        found = self._find(position)
        if found is None:
            raise self._settled(self._what(position))
        delivery = Delivery()
        delivery.settler = self
        delivery.sequence, delivery.record, delivery.marks = found
        return delivery

    def _settled(self, what: str) -> AlreadySettled:
        return AlreadySettled(self.late or f"{what} of queue {self.name!r} was settled before")

    def _what(self, position: int) -> str:
        """Return what a message is called in errors, as far as that is known."""
        try:
            kept, segments = self.kept, self.segments
            places = self._places(segments) if kept is None else kept.places
            number, index = places.at(position)
            return f"message {places.first(number) + index}"
        except IndexError:
            return f"message {position + 1} of a batch"

    def _find(self, position: int) -> tuple[int, Record, int] | None:
        """Return (sequence, record, marks) of a message that is left."""
        segments, kept = self.segments, self.kept
        if self.is_over:
            return None
        if kept is None:
            number, index = self._places(segments).at(position)
            first, records, marks = segments[number]
            return first + index, records[index], marks
        try:
            number, index = kept.places.at(position)
        except IndexError:
            return None
        record = kept.records[kept.places.place(position)]
        return None if record is None else (kept.places.first(number) + index, record, kept.marks[number])

    def _places(self, segments: list[Segment]) -> BatchIndex:
        """Return where its messages lie, while none was settled by itself."""
        if self._index is None:
            self._index = index_of(segments)
        return self._index

    # Settled one by one ----------------------------------------------------------------------------------------------

    def note_settled(self, position: int) -> None:
        """Let go of a message that is left: it is settled, or held by itself. Cost: 0.5 µs."""
        kept = self.kept or self._keep()
        records, place = kept.records, kept.places.place(position)
        record = records[place]
        assert record is not None
        records[place] = None
        count, size = self._left
        self._left = count - 1, size - len(record)
        if len(records) > SPARSE * count + FEW_PLACES:
            self.tidy()

    def take_back(self, records: Iterable[tuple[int, Record]]) -> None:
        """Have messages again, by position, that a commit did not settle; the others may be settled by now."""
        kept = self.kept or self._keep()
        if self.is_over:
            kept.records[:] = [None] * len(kept.records)
            self._left, self.is_over = (0, 0), False
        count, size = self._left
        for position, record in records:
            kept.records[kept.places.place(position)] = record  # which is there as long as that is `leaving`
            count, size = count + 1, size + len(record)
        self._left = count, size

    def end(self) -> None:
        """Hold nothing of it any more."""
        self.is_over = True
        if self.kept is not None:
            self.kept.records[:] = [None] * len(self.kept.records)
        self.tidy()

    def tidy(self) -> None:
        """Have few places of what is gone, and none if all is; but for commits that may be refused."""
        if self.leaving:
            return
        if self.is_over:
            self.segments, self.kept, self._index = NOTHING, None, None
        elif self.kept is not None and len(self.kept.records) > SPARSE * self._left[0] + FEW_PLACES:
            self._keep()

    def _keep(self) -> Kept:
        """Refer to what is left message by message."""
        if self.kept is None:
            self._left = self.left_size()
            parts, places = self.segments, self._places(self.segments)
        else:
            pieces = list(self.kept.pieces())
            parts = [part for _, part in pieces]
            places = index_of(parts, [position for position, _ in pieces])
        records: list[Record | None] = list(chain.from_iterable([part.records for part in parts]))
        self.kept = kept = Kept(records, places, [part.marks for part in parts])
        self.segments, self._index = NOTHING, None  # behind that: see `position`
        return kept
