"""The public face of a stream; `stream_log` does its work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from qflow.config import StreamSettings
from qflow.identity import OfSpool
from qflow.pickling import Unpicklable

if TYPE_CHECKING:
    from qflow.stats import StreamStats
    from qflow.streams.deliveries import StreamMessage
    from qflow.streams.history import Bound


class Stream(Unpicklable, OfSpool, ABC):
    """A named log of what is published to some topics. Made by `Broker.declare_stream`; every method is thread-safe."""

    _kind = "stream"

    name: str
    """The name it was declared under."""
    settings: StreamSettings
    """How it was declared, or altered since."""

    @abstractmethod
    def query(
        self,
        topic_filter: str = "#",
        *,
        partition: int | None = None,
        start: Bound = None,
        end: Bound = None,
        skip: int = 0,
        limit: int | None = None,
        newest: int | None = None,
    ) -> Iterator[StreamMessage]:
        """Yield retained messages that a filter matches, without subscribing: as of now, in order.

        Messages of several partitions are merged by their times. Messages that retention drops meanwhile, or that are
        damaged, are left out.

        Args:
            topic_filter: as in MQTT.
            partition: number of the only one to read; None = all.
            start, end: offsets, or datetimes with a time zone; `end` is not included.
            skip, limit: matching messages to leave out, and to return at most; up to 2^60.
            newest: return only so many, the last ones; up to 2^60.

        Raises:
            InvalidArgument: a filter, bound or number makes no sense. StreamDeleted, BrokerClosed.
        Cost: as a replay; blocks without a match are not read.
        """

    @abstractmethod
    def last(self, topic_filter: str = "#") -> dict[str, StreamMessage]:
        """Return the newest retained message of each topic that a filter matches.

        Cost: for one topic, a read backwards until it is found; for a filter with wildcards, a replay.
        """

    @abstractmethod
    def stats(self) -> StreamStats:
        """Return a snapshot of the stream. Cost: O(partitions x subscriptions)."""
