"""A subscription of a stream for threads, and its iteration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from qflow.config import parse_count
from qflow.durations import Duration
from qflow.errors import ForkedProcess, InvalidArgument, QueueEmpty
from qflow.memory.waiting import sheltered
from qflow.pickling import Made
from qflow.streams.batches import StreamBatch, shown_by_one
from qflow.streams.deliveries import StreamDeliveries, StreamDelivery
from qflow.streams.member import Member
from qflow.streams.stream import Stream
from qflow.streams.stream_log import StreamLog

if TYPE_CHECKING:
    from qflow.stats import SubscriptionStats


class Subscription(Made, by="Broker.subscribe"):
    """A subscription of a stream. Made by `Broker.subscribe`; a context manager; every method is thread-safe."""

    _stream: StreamLog
    _member: Member

    @property
    def name(self) -> str | None:
        """The name its position is kept under, its own or that of its group; None if it is not kept."""
        return self._member.cursor.title

    @property
    def stream(self) -> Stream:
        """The stream it reads."""
        return self._stream

    @property
    def filter(self) -> str:
        """The filter that topics of its messages match."""
        return self._member.cursor.interest.filter

    @property
    def closed(self) -> bool:
        """Whether `close` was called; closing the broker or deleting the stream does not set this."""
        return self._member.closed

    # Getting ---------------------------------------------------------------------------------------------------------

    def get(self, timeout_s: Duration | None = None) -> StreamDelivery:
        """Return the next message, waiting for it.

        Args:
            timeout_s: seconds to wait; None = without end, 0 = not at all.

        Raises:
            QueueEmpty: none came in time; or, with `follow=False`, there is no more.
            TooManyUnsettled: as many messages are held as may be, and none was settled in time, or `follow` is False.
            GapError: messages that were next are gone; the next call goes on behind them.
            StreamDeleted, BrokerClosed: it was deleted or closed, perhaps while this waited.
            InvalidArgument: the subscription is closed.
        Cost: 8 µs where it was read ahead, with its ack 10; a loop takes 2, 3 with a name.
        """
        batch = self._member.get(1, timeout_s, threading.get_ident())
        if batch is None:
            raise QueueEmpty(f"no message of stream {self.stream.name!r} for {self.filter!r} came in time")
        try:
            delivery: StreamDelivery = next(iter(batch))
            return delivery
        except BaseException:
            self._member.cursor.claims.release(batch)
            raise

    def get_nowait(self) -> StreamDelivery:
        """`get` that does not wait."""
        return self.get(0)

    def get_many(self, max_messages: int, timeout_s: Duration | None = None) -> StreamDeliveries:
        """Return available messages, in order, about 1 MiB at most; an empty batch at the time-out.

        Raises:
            QflowError: as `get`, but for `QueueEmpty`.
        Cost: 0.3 µs a message in a replay.
        """
        shown, nothing = StreamDeliveries(), self._member.empty_batch()
        batch = self._member.get(parse_count(max_messages, "max_messages"), timeout_s, threading.get_ident())
        shown.held = batch = nothing if batch is None else batch
        shown.kept, shown.total = batch.kept, batch.total
        return shown  # no call before: an interrupt comes earlier, and gives it back, or later

    def __iter__(self) -> Iteration:
        """Return an iteration over the messages; asking it for the next acks the previous one.

        With `follow=False` it ends at the end of the stream. After a `GapError` it goes on behind the gap. After a
        `break` or an exception the message returned last is held until it is acked, and is delivered again by the next
        iteration; messages acquired and not returned are delivered by the next get.
        """
        return Iteration(self._member)

    # Settling and moving ---------------------------------------------------------------------------------------------

    def ack(self, delivery: StreamDelivery | StreamDeliveries, wait: bool = False) -> None:
        """Settle a message, or a batch; see `Delivery.ack`."""
        delivery.ack(wait)

    def seek(self, to: int | datetime, *, partition: int | None = None) -> None:
        """Go on at an offset, or at the first message that is not earlier than a time.

        Messages held are taken back: acks of them do nothing. A durable subscription is moved in the log, for
        all members of its group.

        Args:
            to: an offset, from that of the first retained message to that of the next one published; or a datetime
                with a time zone.
            partition: the one to move; None = all, with a datetime, or with an offset if there is only one.

        Raises:
            InvalidArgument: the offset is past the end; or there are several partitions, and `partition` is not given.
        Cost: durable, a commit.
        """
        stream = self._stream
        count = len(stream.partitions)
        if partition is None and count > 1 and not isinstance(to, datetime):
            raise InvalidArgument(
                f"stream {stream.name!r} has {count} partitions: say which with partition=, or seek a datetime"
            )
        numbers = range(count) if partition is None else [partition]
        places = {number: stream.history.position_for(number, to) for number in numbers}
        self._member.cursor.place.seek(self._member, places)

    @property
    def position(self) -> int:
        """The next offset to be delivered, of a stream with one partition. Raises InvalidArgument: see `positions`."""
        positions = self.positions
        if len(positions) > 1:
            raise InvalidArgument(f"stream {self.stream.name!r} has {len(positions)} partitions: see `positions`")
        return positions[0]

    @property
    def positions(self) -> list[int]:
        """The next offset to be delivered, of each partition."""
        return self._member.cursor.place.positions()

    @property
    def lag(self) -> int:
        """Messages of all topics after the last one it delivered or passed over.

        Messages that were given back count, too; those that retention dropped do not, nor those that were settled
        out of order. `stats(matching=True)` counts those that the filter matches.

        Cost: 6 µs, in the main thread 20; nothing is read.
        """
        return self._member.cursor.place.lag()

    def stats(self, *, matching: bool = False) -> SubscriptionStats:
        """Return a snapshot; for a group, of all its members together.

        Args:
            matching: count in `matching_messages` the messages of `lag` that its filter matches.

        Cost: 30 µs; `matching` reads the blocks ahead that hold a matching topic, 0.2 s for a million
            messages of 100 bytes.
        """
        return self._member.cursor.stats(matching=matching)

    @sheltered
    def close(self) -> None:
        """Give back what is held. A durable subscription can be opened again, any other is gone.

        Calling it again does nothing.
        """
        self._member.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ForkedProcess):  # the parent goes on with it
            self.close()

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        return f"<Subscription{name} of stream {self.stream.name!r}, {self.filter!r}>"


def subscription_of(stream: StreamLog, member: Member) -> Subscription:
    """Return a subscription around a member."""
    subscription = object.__new__(Subscription)
    subscription._stream, subscription._member = stream, member
    return subscription


def member_of(subscription: Subscription) -> Member:
    """Return the working part of a subscription."""
    return subscription._member


class Iteration(Iterator[StreamDelivery]):
    """A loop over a subscription; see `Subscription.__iter__`. Of one thread.

    An interrupt comes before a message is returned, or after that was noted: then the next call returns the next one.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._claims, self._held = member.cursor.claims, member.cursor.held
        self._taker = (threading.get_ident(), object())
        self._batch: StreamBatch | None = None
        self._left: Iterator[StreamDelivery] = iter(())
        """Of the batch."""
        self._claims.abandon(self._taker[0])

    def __next__(self) -> StreamDelivery:
        while True:
            batch = self._batch
            if batch is not None and (shown := batch.shown):
                settled = batch.settled
                if settled is not None and shown - 1 not in settled:
                    self._claims.settle_batch(batch, shown - 1, False)
            for delivery in self._left:
                return delivery
            self._batch = batch = self._member.get_ahead(self._taker)
            if batch is None:
                raise StopIteration
            self._left = shown_by_one(batch, self._held.returned, self._held.ahead.get(batch))
