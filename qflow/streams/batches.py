"""Batches of messages of a stream as a cursor, and each delivery, refers to them: with what is not settled yet.

Whoever wants all messages of one, settled or not, has `StreamDeliveries`, which keep them beside it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from qflow.batch_index import BatchIndex, missing
from qflow.errors import AlreadySettled
from qflow.held_batch import AnyBatch
from qflow.message import offset_of
from qflow.named_tuples import NamedTuple
from qflow.streams.deliveries import Share, StreamDelivery
from qflow.streams.room import HELD_BYTES

NONE: frozenset[int] = frozenset()
"""Indexes of nothing."""
PIECE_BYTES = 400
"""Charged for each piece that is left of a batch, where messages between them were let go of."""


class KeptShares(NamedTuple):
    """What a batch of a stream refers to: all of it, or what is left. It is read without the lock."""

    shares: list[Share]
    places: BatchIndex
    is_cut: bool
    """Some of it is gone."""

    def find(self, position: int) -> tuple[Share, int]:
        """Return the share that has one message, and its index there. Raises IndexError: none has."""
        number, index = self.places.at(position)
        return self.shares[number], index


def kept_of(shares: list[Share], starts: list[int] | None = None) -> KeptShares:
    """Return shares as they are kept; `starts` are the positions of their first messages, if others are gone."""
    pieces = [share.piece for share in shares]
    places = BatchIndex([piece.sequences[0] for piece in pieces], [len(piece.records) for piece in pieces], starts)
    return KeptShares(shares, places, starts is not None)


class StreamBatch(AnyBatch):
    """See the module. In order within each partition.

    Under the lock of the cursor, where a description says nothing else.
    """

    __slots__ = (
        "bound", "charged", "kept", "later", "lets_go_at", "member", "settled", "shown", "taken", "unsettled",
    )  # fmt: skip

    kept: KeptShares
    """All of it but for what was let go of."""
    settled: Any
    """Indexes of messages of that which are settled, or went back; None once nothing of the batch is held."""
    unsettled: int
    """How many of `total` are not settled; changed with `settled`."""
    lets_go_at: int
    """When as few are left, it is to let go of what is settled; or it has come to its end."""
    member: Any
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
        self.settler = settler
        self.kept = kept_of(shares)
        self.settled = NONE
        self.total = self.unsettled = sum(len(share.piece.records) for share in shares)
        self.lets_go_at = max(1, self.total // 3)
        self.member = member
        self.charged = charged
        self.bound = NONE
        self.leaving = 0
        self.later = []
        self.taken: frozenset[int] = NONE
        """Indexes of messages that a seek has taken back: settling them does nothing."""
        self.taker = taker
        self.shown: int | None = None
        """How many of its messages an iteration has returned; None if it is not for an iteration."""

    @property
    def shares(self) -> list[Share]:
        """What it refers to. Also without the lock."""
        return self.kept.shares

    def _indexed(self) -> Iterator[tuple[int, Share]]:
        """Yield what it refers to, with the index of the first message of each share."""
        return zip(self.kept.places.starts(), self.kept.shares, strict=False)

    def indexes(self, part: Any = None) -> Iterator[int]:
        """Yield the indexes of what is not settled yet; with a part, of that one."""
        settled = self.settled
        for start, share in self._indexed() if settled is not None else ():
            if part is None or share.part is part:
                yield from (index for index in range(start, start + len(share.piece.records)) if index not in settled)

    def is_settled(self, position: int) -> bool:
        """Tell whether a message was settled, or went back; or is not of what was kept. Also without the lock."""
        kept, settled = self.kept, self.settled
        if settled is None or position in settled:
            return True
        try:
            kept.places.at(position)
        except IndexError:
            return True
        return False

    def left_shares(self, low: int = 0, high: int | None = None) -> list[Share]:
        """Return what is not settled yet of the indexes [low, high)."""
        high = self.total if high is None else high
        if low == 0 and high == self.total and not self.settled:
            return [] if self.settled is None else self.shares
        return [share for _, share in self._left(low, high)]

    def _left(self, low: int, high: int) -> Iterator[tuple[int, Share]]:
        """Yield what is not settled yet of some indexes, each share with the index of its first message."""
        settled = self.settled
        for position, (part, piece, marks) in self._indexed() if settled is not None else ():
            start = end = min(max(low - position, 0), len(piece.records))
            stop = max(start, min(high - position, len(piece.records)))
            while end < stop:
                start = end
                while end < stop and position + end not in settled:
                    end += 1
                if end > start:
                    yield position + start, Share(part, piece.part(start, end), marks)
                end += 1

    def let_go(self) -> int:
        """Refer no more to what is settled; return the bytes that were charged for that. Cost: 0.2 µs a message.

        What went back is charged where it is: if that is most of it, what is left takes more than was charged here.
        """
        if self.leaving or self.bound or self.taken:
            return 0
        if self.settled is None:
            self.kept = _NOTHING
            return 0
        if self.shown is not None:
            return 0
        self.lets_go_at = max(1, self.unsettled // 3)
        kept, freed = self.cut()
        if kept is not self.kept:
            self.kept, self.settled = kept, NONE
            self.charged -= freed
        return freed

    def end(self) -> None:
        """Hold nothing of it any more."""
        self.settled = None
        self.let_go()

    def cut(self) -> tuple[KeptShares, int]:
        """Return what would be kept without what is settled, and what is charged for that; also without the lock.

        It is what is kept now where letting go would gain nothing.
        """
        left = list(self._left(0, self.total))
        there, kept = sum([share.charged for _, share in left]), self.kept
        pieces = PIECE_BYTES * (len(left) - len(kept.shares))
        if sum([share.charged for share in kept.shares]) <= there + max(0, pieces):
            return kept, 0  # pieces take memory, too
        freed = self.charged - (HELD_BYTES + PIECE_BYTES * max(0, len(left) - 1) + there)
        return kept_of([share for _, share in left], [start for start, _ in left]), freed

    def free(self) -> list[int]:
        """Return the indexes of what is neither settled nor bound."""
        return [index for index in self.indexes() if index not in self.bound]

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
            self.bound = NONE

    def take_part(self, part: Any) -> int:
        """Take back what is not settled of one partition; return how many messages that are."""
        taken = list(self.indexes(part))
        self.taken = self.taken.union(taken)
        return self.note_settled(taken) if taken else 0

    def note_settled(self, positions: Iterable[int]) -> int:
        """Note that messages are settled, or went back; return how many were not before."""
        self.settled = settled = self.settled or set()
        before = len(settled)
        settled.update(positions)
        self.unsettled -= (fresh := len(settled) - before)
        return fresh

    def span_at(self, position: int, kept: KeptShares | None = None) -> tuple[Any, int, int] | None:
        """Return (part, start, end) of the sequences that one message covers, of what is kept; None: it is not there.

        See `Piece.part`. One call, as it is made for each ack.
        """
        shares, places, _ = kept or self.kept
        starts = places.starts()
        number = bisect_right(starts, position, 0, len(shares)) - 1
        if number < 0:
            return None
        (part, piece, _), index = shares[number], position - starts[number]
        sequences = piece.sequences
        if index >= len(sequences):
            return None
        start = sequences[index - 1] + 1 if index else piece.start
        return part, start, sequences[index] + 1 if index + 1 < len(sequences) else piece.end

    def share_at(self, position: int) -> Share:
        """Return one message as a share."""
        share, index = self.kept.find(position)
        return share._replace(piece=share.piece.part(index, index + 1))

    def shares_at(self, positions: list[int] | None) -> list[Share]:
        """Return messages as shares; None = all that is not settled."""
        return self.left_shares() if positions is None else list(map(self.share_at, positions))

    def check_unsettled(self, position: int, sequence: int | None = None) -> None:
        """Refuse a message that was settled, or went back; see `AnyBatch`."""
        if self.is_settled(position):
            what = self._what(position) if sequence is None else f"message {offset_of(sequence)}"
            raise AlreadySettled(
                f"{what} of stream {self.name!r} was settled, or went back, before; or its stream or "
                "subscription was deleted"
            )

    def check_free(self, position: int | None = None) -> None:
        """Refuse one message, or all that is left, if it was settled, or a commit settles it that has begun."""
        if position is not None:
            self.check_unsettled(position)
        if self.bound and (position in self.bound if position is not None else not self.free()):
            what = "this batch" if position is None else self._what(position)
            raise AlreadySettled(f"{what} of stream {self.name!r} is settled by a transaction that is being committed")

    def _what(self, position: int) -> str:
        """Return what a message is called in errors, as far as that is known."""
        try:
            return f"message {offset_of(self.share_at(position).piece.sequences[0])}"
        except IndexError:
            return f"message {position + 1} of a batch"

    @property
    def left_count(self) -> int:
        """How many are not settled yet. Cost: O(1)."""
        return 0 if self.settled is None else self.unsettled

    def position(self, sequence: int) -> int:
        """See `AnyBatch`; any, if nothing of it is left. Raises AlreadySettled: it was settled before."""
        kept = self.kept
        if kept is _NOTHING:
            return 0
        try:
            return _position(kept, sequence)
        except IndexError as error:
            if not kept.is_cut:
                raise
            offset = offset_of(sequence)
            raise AlreadySettled(
                f"message {offset} of stream {self.name!r} was settled, or went back, before"
            ) from error

    def delivery_at(self, position: int) -> StreamDelivery:
        """See `AnyBatch`."""
        try:
            (_, piece, marks), place = self.kept.find(position + self.total if position < 0 else position)
        except IndexError:
            self.check_unsettled(position)
            raise
        return StreamDelivery(self, piece, place, marks)

    def __iter__(self) -> Iterator[StreamDelivery]:
        for _, piece, marks in self.shares:
            for index in range(len(piece.records)):
                yield StreamDelivery(self, piece, index, marks)


def shown_by_one(batch: StreamBatch, returned: Any, came: int | None = 0) -> Iterator[StreamDelivery]:
    """Yield what an iteration returns of a batch, each noted as `shown` before; end where the next get is to begin.

    Interrupted, it ends: what it has not shown goes back with that get. Needs no lock. Cost: 0.5 µs a message.

    Args:
        returned, came: `Returned` of the cursor, and its `came` when the batch was got.
    """
    shown = 0
    for _, piece, marks in batch.shares:
        for place in range(len(piece.records)):
            shown += 1
            delivery = StreamDelivery(batch, piece, place, marks)
            settled = batch.settled
            if settled is None:  # it went back, or a seek took it back: what is next is not in this batch
                return
            if (returned.later or returned.came != came) and returned.overtakes(came):
                return  # the next get gives back what is not shown, and begins with what came back
            if shown - 1 not in settled:  # went back, or a seek took it back
                batch.shown = shown
                yield delivery


def _position(kept: KeptShares, sequence: int) -> int:
    number, start = kept.places.of(sequence)
    sequences = kept.shares[number].piece.sequences
    index = bisect_left(sequences, sequence)
    if index == len(sequences) or sequences[index] != sequence:
        raise missing(sequence)
    return start + index


_NOTHING = kept_of([], [])


def place_of(held: Any) -> tuple[StreamBatch, int | None]:
    """Return (batch, index) of a delivery; (batch, None) of a batch."""
    if isinstance(held, StreamBatch):
        return held, None
    batch: StreamBatch = held.settler
    return batch, batch.position(held.sequence)
