"""Messages that came over a connection, for threads: `qflow.Delivery` and `qflow.Deliveries`, settled by requests."""

from __future__ import annotations

from collections.abc import Callable

from qflow.delivery import Deliveries, Delivery, Return
from qflow.remote.client import requests
from qflow.remote.client.grants import AnyGrant, grant_of
from qflow.remote.client.link import Request
from qflow.remote.client.replies import Granted
from qflow.remote.client.requests import Places
from qflow.remote.client.threads import Connection


class Settler:
    """Settles a batch, and deliveries of it, by requests; as `delivery.BatchSettler` says."""

    def __init__(self, connection: Connection, name: str, grant: AnyGrant) -> None:
        self.connection = connection
        self.name = name
        """Of the queue."""
        self.grant = grant

    def settle_batch(self, batch: Deliveries, wait: bool) -> None:
        self._settle(lambda: self.grant.take(batch), wait)

    def settle_part(self, batch: Deliveries, index: int, wait: bool) -> None:
        self._settle(lambda: self.grant.take_part(batch, index), wait)

    def return_batch(self, batch: Deliveries, how: Return) -> None:
        self._return(batch, lambda: self.grant.take(batch), how)

    def return_part(self, batch: Deliveries, index: int, how: Return) -> None:
        self._return(batch, lambda: self.grant.take_part(batch, index), how)

    def extend_batch(self, batch: Deliveries, seconds: float) -> None:
        def make() -> Request | None:
            places = self.grant.left(batch)
            return None if places == [] else requests.extend(self.grant.number, places, seconds)

        self.connection.settle(make, wait=True)

    def _settle(self, take: Callable[[], Places], wait: bool) -> None:
        def make() -> Request | None:
            places = take()
            return None if places == [] else requests.ack(self.grant.number, places, wait)

        self.connection.settle(make, wait or self.grant.leased)

    def _return(self, batch: Deliveries, take: Callable[[], Places], how: Return) -> None:
        def make() -> Request | None:
            places = take()
            if how.requeue:
                self.grant.returned(batch)
            return None if places == [] else requests.nack(self.grant.number, places, how)

        self.connection.settle(make, wait=True)

    # Deliveries have their batch as settler, so nobody calls these.

    def settle_one(self, delivery: Delivery, wait: bool) -> None: ...
    def return_one(self, delivery: Delivery, how: Return) -> None: ...
    def extend_one(self, delivery: Delivery, seconds: float) -> None: ...


def deliveries_of(connection: Connection, name: str, granted: Granted) -> Deliveries:
    """Return the batch that was granted."""
    return Deliveries(Settler(connection, name, grant_of(granted)), granted.segments)


def first_of(connection: Connection, name: str, granted: Granted) -> Delivery | None:
    """Return the message that was granted; None if there was none in time."""
    return deliveries_of(connection, name, granted)[0] if granted.segments else None
