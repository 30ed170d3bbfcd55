"""What all calls of the door know of the spool: its log, read beside whoever writes it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from qflow.arrow.states import SpoolState, StreamState, state_of, stream_of
from qflow.broker import Broker
from qflow.errors import BrokerClosed, NotFound, QflowError, StorageError
from qflow.flight.room import Room
from qflow.names import choices, command


class Owner:
    """The broker whose door it is. Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.uuid = str(broker.uuid)
        self.room = Room()
        """For batches on their way."""
        self.draining = threading.Event()
        """Nothing is begun any more, and who follows a stream is told."""
        self.leaving = threading.Event()
        """The door is being closed: reads end where they are."""

    @property
    def path(self) -> str:
        """Where the spool lies at this moment: files are made there."""
        self.broker.engine.spool.place.follow()
        return self.broker.path

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A short read transaction whose values are views. Raises BrokerClosed, StorageError."""
        with self.broker.engine.log.read(buffers=True) as txn:
            yield txn

    def state(self) -> SpoolState:
        """Return all streams and queues. Cost: reads a record and the rows of each, 0.1 s for a thousand queues."""
        with self.broker.engine.log.read() as txn:
            return state_of(txn, self.path)

    def streams(self) -> list[StreamState]:
        """Return the streams there are, by name, but for those that are damaged. Cost: reads the rows of each."""
        found = self.numbered(stream.owner for stream in self.broker.engine.streams.all())
        return sorted(stream for stream in found.values() if stream.rows)

    def numbered(self, numbers: Iterable[int]) -> dict[int, StreamState]:
        """Return the streams with these numbers, as far as they are there. Cost: reads the rows of each."""
        with self.broker.engine.log.read() as txn:
            found = {number: stream_of(txn, number) for number in set(numbers) if 0 <= number < 2**32}
        return {number: stream for number, stream in found.items() if stream is not None}

    def stream(self, name: str, number: int | None = None) -> StreamState:
        """Return a stream.

        Args:
            number: that it must have in the log; None = any.

        Raises:
            NotFound: there is none. StorageError: its rows are damaged.
        """
        with suppress(QflowError):  # what is wrong is told below
            known = self.broker.engine.streams.get(name).owner
            found = self.numbered([known]).get(known)
            if found is not None and found.rows and number in (None, known):
                return found
        streams = self.state().streams
        found = streams.get(name)
        if found is None or (number is not None and found.owner != number):
            again = f" with number {number}: it was deleted, and declared again" if found is not None else ""
            raise NotFound(f"there is no stream {name!r}{again} in {self.path}; {choices(name, streams)}")
        if not found.rows:
            raise StorageError(f"the rows of stream {name!r} are damaged: see {command('check', self.path)}")
        return found

    def check_uuid(self, expected: str | None) -> None:
        """Check that a client means this log. Raises StorageError: it means another one."""
        if expected is not None and expected != self.uuid:
            raise StorageError(
                f"the spool at {self.path} was made anew: its log is {self.uuid}, and what was asked for belongs to "
                f"{expected}. Bring that spool back, or begin anew with this one"
            )

    def check_open(self) -> None:
        """Check that something may begin. Raises BrokerClosed: the door is being closed, or the broker is."""
        if self.draining.is_set() or self.broker.closed:
            raise self._closing()

    def check_staying(self) -> None:
        """Check that what has begun may go on. Raises BrokerClosed: the door is being closed."""
        if self.leaving.is_set():
            raise self._closing()

    def _closing(self) -> BrokerClosed:
        return BrokerClosed(f"the door of {self.path} is being closed: connect again later")
