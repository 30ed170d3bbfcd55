"""Consumers at the door, for threads: `qflow.Consumer` over a queue that another process owns; and what tasks share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Protocol

from qflow.delivery import Delivery
from qflow.errors import BrokerClosed, InvalidArgument, NotFound, QflowError, QueueDeleted
from qflow.held_batch import HeldBatch
from qflow.loggers import get_logger
from qflow.queues.consumer import Listed
from qflow.remote.client import requests
from qflow.remote.client.deliveries import Settler, batch_of
from qflow.remote.client.grants import Grant
from qflow.remote.client.link import Request
from qflow.remote.client.threads import Connection
from qflow.takers import Noted, named

_logger = get_logger("qflow")


class Cut(Protocol):
    """A connection that may end by itself."""

    @property
    def is_cut(self) -> bool: ...


class Ending:
    """The end of one consumer, which is told of once, however many threads or tasks it has."""

    def __init__(self, connection: Cut, name: str) -> None:
        self._connection = connection
        self._name = name
        self._times = count()

    def tell(self, error: QflowError) -> None:
        """A thread or task of it ends: say so, if it is for its connection, and nobody has closed that here."""
        if self._connection.is_cut and next(self._times) == 0:
            _logger.warning(
                "the consumer of queue %r has ended with its connection: %s",
                self._name,
                error,
                extra={"queue": self._name, "event": "consumer_ended"},
            )


class AnyConsumed:
    """What consumers at the door share, of threads and of tasks."""

    def __init__(self, name: str, ending: Ending) -> None:
        self.name = name
        self.tell_end = ending.tell

    def leave_batch(self, batch: HeldBatch, index: int) -> Delivery | None:
        """Return a delivery of a batch; None if it is settled, or the owner has taken the batch back."""
        return None if batch.is_settled(index) else batch.delivery_at(index)

    def list_consumer(self, consumer: Listed) -> None:
        """The owner is told when it gets first."""

    def tell_failure(self, sequence: int | None, error: BaseException) -> None:
        """A consumer's callback has raised; or, without a sequence, the consumer could not get a message."""
        what = "to get a message, and tries again" if sequence is None else f"with message {sequence}"
        _logger.error("the consumer of queue %r failed %s", self.name, what, exc_info=error)


class RemoteConsumed(AnyConsumed):
    """What one consumer takes from, as `queues.consumer.Consumed` says."""

    def __init__(self, connection: Connection, name: str, ending: Ending) -> None:
        super().__init__(name, ending)
        self._connection = connection
        self._number = 0
        """Of the request that waits."""
        self._consumer = 0
        """What the owner calls it."""
        self._stopped: Callable[[], bool] = lambda: False

    def collect(
        self, most: int, timeout_s: float | None, taker: Noted, stopped: Callable[[], bool] | None = None
    ) -> HeldBatch:
        """Acquire messages, waiting for the first; an empty batch when the consumer stops."""
        self._stopped = stopped or self._stopped
        then = partial(batch_of, self._connection, self.name)
        try:
            if not self._consumer:
                self._consumer = self._connection.call(requests.consume(self.name, named(taker)[0]))
            request = requests.get(self.name, most, timeout_s, self._consumer)
            return self._connection.call(request, then, begun=self._begun)
        except InvalidArgument:
            if self._stopped():
                return HeldBatch(Settler(self._connection, self.name, Grant(0, False)), [])
            raise
        except NotFound as error:
            raise QueueDeleted(f"queue {self.name!r} was deleted: declare it again") from error
        finally:
            self._number = 0

    def _begun(self, number: int) -> Request | None:
        """A request is about to wait. Under the lock of the connection."""
        self._number = number
        return requests.cancel(number) if self._stopped() else None

    def wake(self) -> None:
        """The consumer stops: what waits for messages waits no more."""
        with suppress(BrokerClosed):
            self._connection.tell(lambda: requests.cancel(self._number) if self._number else None)

    def give_up_batch(self, batch: HeldBatch) -> None:
        """Give back what was not handed out, not counted."""
        settler = batch.settler
        assert isinstance(settler, Settler)
        if batch.is_over or not settler.grant.number:
            return

        def make() -> Request | None:
            settler.grant.take(batch)
            return requests.give_back(settler.grant.number)

        try:
            self._connection.tell(make)
        except BrokerClosed:
            return  # it went back with all else

    def forget_consumer(self, consumer: Listed) -> None:
        """It has ended."""
        with suppress(BrokerClosed):
            if self._consumer:
                self._connection.tell(lambda: requests.consume_end(self._consumer))
