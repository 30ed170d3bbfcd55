"""What a subscriber at the door holds, as this side knows it: for threads and for tasks.

The owner knows what is held; this mirrors what follows from the calls of this side, so that nothing is sent that could
only fail: what a seek takes back, what a get settles without a name, what a loop has not returned.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from qflow.errors import AlreadySettled, InvalidArgument
from qflow.pickling import Unpicklable
from qflow.remote.client import stream_requests
from qflow.remote.client.link import Request
from qflow.remote.client.requests import Places
from qflow.remote.client.stream_replies import Granted, Opened
from qflow.remote.wire.values import ranges
from qflow.streams.batches import StreamBatch, shown_by_one
from qflow.streams.deliveries import Share, StreamDelivery
from qflow.streams.held import Returned
from qflow.streams.room import HELD_BYTES

_NOTHING = Returned(time.monotonic)
"""What came back to a cursor: its owner tells of that."""


class RemoteStreamBatch(StreamBatch):
    """A batch of messages of a stream that came through a door; see `StreamBatch`."""

    __slots__ = ("__weakref__", "grant")
    grant: int
    """The owner's number of it."""

    def position(self, sequence: int) -> int:
        """See `AnyBatch`. Raises AlreadySettled: nothing of it is left, which the owner need not be asked for."""
        if self.settled is None and not self.taken:
            self.check_unsettled(0, sequence)
        return super().position(sequence)


class Holding:
    """See the module; of one subscription. Its methods are called under one lock of the connection.

    Cost of a call: what the loops of its taker hold, and what a get settles; not what is held beside.
    """

    def __init__(self, opened: Opened) -> None:
        self.stream = opened.stream
        self.number = opened.number
        self.leased = opened.leased
        self.loops = itertools.count(1)
        self.closed = False
        self._is_named = opened.name is not None
        self._parts = [object() for _ in range(opened.settings.partitions)]
        self._held: weakref.WeakSet[RemoteStreamBatch] = weakref.WeakSet()
        self._of: defaultdict[object, weakref.WeakSet[RemoteStreamBatch]] = defaultdict(weakref.WeakSet)
        """Of each taker, what a get or loop of its may change: what loops asked for; without a name, all.

        A task or thread that comes has the number of one that has ended, so there are as many as were at once.
        """

    def add(self, granted: Granted, settler: Any, taker: int, *, ahead: bool = False) -> RemoteStreamBatch:
        """Return what came as a batch that `settler` settles."""
        shares = [Share(self._parts[partition], piece, marks) for partition, piece, marks in granted.shares]
        charged = HELD_BYTES + sum([share.charged for share in shares])  # so it knows when to let go of what is settled
        batch = RemoteStreamBatch(settler, shares, self, charged, taker)
        batch.grant = granted.number
        if ahead:
            batch.shown = 0
        if shares:
            self._held.add(batch)
            if ahead or not self._is_named:
                self._of[taker].add(batch)
        return batch

    def check_open(self) -> None:
        """Raises InvalidArgument: it is closed."""
        if self.closed:
            raise InvalidArgument("the subscription is closed: subscribe again")

    def get_begins(self, taker: int) -> None:
        """A thread or task asks for more: what a loop of its has not returned goes back, or all is settled."""
        self.check_open()
        self.drop_unshown(taker)
        if not self._is_named:
            self._drop(taker)

    def loop_begins(self, taker: int) -> Request | None:
        """A thread begins a loop: what an earlier one of its has left goes back."""
        if self.closed:
            return None
        self.drop_unshown(taker)
        if self._is_named:
            self._drop(taker)
        return stream_requests.loop_begins(self.number, taker)

    def held(self) -> list[RemoteStreamBatch]:
        """Return what is held now."""
        return list(self._held)

    def seek(self, partition: int | None, before: list[RemoteStreamBatch]) -> None:
        """All that was held before is taken back, or what is of one partition."""
        for part in self._parts if partition is None else self._parts[partition : partition + 1]:
            for batch in before:
                batch.take_part(part)
                if not batch.unsettled:
                    batch.end()

    def close(self) -> None:
        """All that is held goes back."""
        self.closed = True
        for batch in list(self._held):
            batch.settled = None  # a get may be about to return it: it is not let go of

    def drop_unshown(self, taker: object) -> None:
        """What loops of a thread or task have not returned goes back."""
        for batch in list(self._of.get(taker, ())):
            if batch.shown is not None and batch.settled is not None:
                batch.note_settled(range(batch.shown, batch.total))
                if not batch.unsettled:
                    batch.end()

    def _drop(self, taker: object) -> None:
        for batch in list(self._of.pop(taker, ())):
            batch.end()


class StreamGrant:
    """A grant of the owner to a subscription; see `grants.Grant`."""

    def __init__(self, number: int, holding: Holding) -> None:
        self.number = number
        self.leased = holding.leased
        self._holding = holding

    def take(self, batch: Any) -> Places:
        """Mark what is left of a batch as settled; return it. Raises AlreadySettled: nothing is."""
        places = self.left(batch)
        if places != []:
            batch.end()
        return places

    def take_part(self, batch: Any, place: int) -> Places:
        """Mark one message of a batch as settled. Raises AlreadySettled: it is."""
        if place in batch.taken:
            return []
        batch.check_unsettled(place)
        batch.note_settled([place])
        if not batch.unsettled:
            batch.end()
        elif batch.unsettled <= batch.lets_go_at:
            batch.let_go()
        return [[place, place + 1]]

    def left(self, batch: Any) -> Places:
        """Return what is left of a batch. Raises AlreadySettled: nothing is."""
        if not batch.total or batch.taken:
            return []
        if batch.settled is None:
            raise AlreadySettled(f"this batch of stream {batch.name!r} was settled, or went back, before")
        if batch.shown is None and batch.unsettled == batch.total:
            return None
        return ranges(list(batch.indexes()))

    def lost(self, batch: Any) -> None:
        """Some of a batch was taken back; of other partitions it may be held on."""

    def shared(self) -> StreamGrant:
        """Return the same, of which a transaction may settle some."""
        return self

    def in_doubt(self) -> StreamGrant:
        """Return the same, of which somebody else may have settled some."""
        self.leased = True
        return self

    def returned(self, batch: Any) -> None:
        """Some of a batch goes back: what a loop has not returned goes back, too, so that it comes behind that."""
        self._holding.drop_unshown(batch.taker)


class Loop:
    """A loop over a subscription: what it returns next, and what the owner is told of that."""

    def __init__(self, holding: Holding, taker: int) -> None:
        self._holding = holding
        self.taker = taker
        self.number = next(holding.loops)
        self.delivery: StreamDelivery | None = None
        """What is to be returned now, and forgotten by whoever does that; None: another batch is to be asked for."""
        self.batch: RemoteStreamBatch | None = None
        """What it goes through."""
        self._left: Iterator[StreamDelivery] = iter(())
        """Of the batch."""

    def begin(self, batch: RemoteStreamBatch) -> None:
        """Go through a batch that it has asked for."""
        self.batch, self._left = batch, shown_by_one(batch, _NOTHING)

    def step(self) -> Request | None:
        """Go on to the next message of the batch; return what is to be told before it is returned."""
        batch, unseen, self.delivery = self.batch, self.delivery, None
        if batch is None:
            return None
        last, settled = (batch.shown or 0) - 1, batch.settled
        done = last if last >= 0 and settled is not None and last not in settled else None
        if unseen is not None and done is not None:
            self.delivery = unseen  # whoever asked for it was interrupted
            return None
        if done is not None:
            batch.note_settled([done])
        self.delivery = next(self._left, None)
        if self.delivery is None:
            if batch.settled is not None and not batch.unsettled:
                batch.end()
            self.batch = None
            if done is None:
                return None
        return stream_requests.shown(batch.grant, batch.shown or 0, done)

    def get_begins(self) -> None:
        """It asks for another batch."""
        self._holding.get_begins(self.taker)

    def request(self) -> Request:
        """Return the request for another batch."""
        return stream_requests.get_ahead(self._holding.number, self.taker, self.number)

    def end(self) -> Request | None:
        """The loop is left: what it did not return goes back, and so does the message it returned last."""
        batch, self.batch = self.batch, None
        if batch is None or batch.settled is None:
            return None
        batch.end()
        return stream_requests.loop_ends(batch.grant)


class Subscribed(Unpicklable):
    """What the subscriptions of threads and of tasks tell without asking the owner."""

    _opened: Opened
    _holding: Holding

    @property
    def name(self) -> str | None:
        """The name its position is kept under, its own or that of its group; None if it is not kept."""
        return self._opened.name

    @property
    def filter(self) -> str:
        """The filter that topics of its messages match."""
        return self._opened.filter

    @property
    def closed(self) -> bool:
        """Whether `close` was called; closing the broker or deleting the stream does not set this."""
        return self._holding.closed

    def _only(self, positions: list[int]) -> int:
        if len(positions) > 1:
            raise InvalidArgument(f"stream {self._opened.stream!r} has {len(positions)} partitions: see `positions`")
        return positions[0]

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        return f"<{type(self).__name__}{name} of stream {self._opened.stream!r}, {self.filter!r}>"
