"""A stream for tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from itertools import islice

from qflow.aio.loops import Homes, Worker
from qflow.config import StreamSettings
from qflow.identity import OfSpool, uuid_at
from qflow.stats import StreamStats
from qflow.streams.deliveries import StreamMessage
from qflow.streams.history import Bound
from qflow.streams.stream import Stream

QUERIED_AT_ONCE = 256


class AsyncStream(OfSpool):
    """A named stream, for tasks of any event loop. Made by `AsyncBroker`; the same messages as `Stream` has."""

    _kind = "stream"
    stream: Stream
    """The same stream for threads; its methods block."""
    _homes: Homes
    _worker: Worker
    _looks: Worker

    def _spool_uuid(self) -> str:
        return uuid_at(self.stream)

    @property
    def name(self) -> str:
        """The name it was declared under."""
        return self.stream.name

    @property
    def settings(self) -> StreamSettings:
        """How it was declared, or altered since."""
        return self.stream.settings

    async def query(
        self,
        topic_filter: str = "#",
        *,
        partition: int | None = None,
        start: Bound = None,
        end: Bound = None,
        skip: int = 0,
        limit: int | None = None,
        newest: int | None = None,
    ) -> AsyncIterator[StreamMessage]:
        """Yield retained messages that a filter matches, without subscribing; arguments and errors as `Stream.query`.

        Cost: as `Stream.query`, and one call in a thread for each 256 messages.
        """
        home = self._homes.here()
        query = partial(
            self.stream.query, topic_filter, partition=partition, start=start, end=end, skip=skip, limit=limit,
            newest=newest,
        )  # fmt: skip
        messages = await self._worker.run(home, query)
        while found := await self._worker.run(home, lambda: list(islice(messages, QUERIED_AT_ONCE))):
            for message in found:
                yield message

    async def last(self, topic_filter: str = "#") -> dict[str, StreamMessage]:
        """Return the newest retained message of each topic that a filter matches; see `Stream.last`."""
        return await self._worker.run(self._homes.here(), partial(self.stream.last, topic_filter))

    async def stats(self) -> StreamStats:
        """Return a snapshot; see `Stream.stats`."""
        return await self._looks.run(self._homes.here(), self.stream.stats)

    def __repr__(self) -> str:
        return f"<Async{repr(self.stream)[1:]}"


def stream_of(stream: Stream, homes: Homes, worker: Worker, looks: Worker) -> AsyncStream:
    """Return a stream for tasks; see `AsyncBroker` for the two workers."""
    made = AsyncStream()
    made.stream, made._homes, made._worker, made._looks = stream, homes, worker, looks
    return made
