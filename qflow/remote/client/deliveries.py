"""Messages that came over a connection, for threads: `qflow.Delivery` and `qflow.Deliveries`, settled by requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from qflow.deliveries import Deliveries, deliveries_of
from qflow.delivery import Delivery, Return
from qflow.errors import AlreadySettled
from qflow.held_batch import HeldBatch
from qflow.remote.client import grants
from qflow.remote.client.grants import AnyGrant, RemoteBatch, grant_of
from qflow.remote.client.link import Request
from qflow.remote.client.replies import Granted
from qflow.remote.client.threads import Connection


class Settler:
    """Settles a batch, and deliveries of it, by requests; as `held_batch.BatchSettler` says."""

    def __init__(self, connection: Connection, name: str, grant: AnyGrant) -> None:
        self.connection = connection
        self.name = name
        """Of the queue."""
        self.grant = grant

    def settle_batch(self, batch: HeldBatch, index: int | None, wait: bool) -> None:
        self._ask(batch, partial(grants.ack, self.grant, batch, index, wait), wait)

    def return_batch(self, batch: HeldBatch, index: int | None, how: Return) -> None:
        self._ask(batch, partial(grants.nack, self.grant, batch, index, how), True)

    def extend_batch(self, batch: HeldBatch, seconds: float) -> None:
        self._ask(batch, partial(grants.extend, self.grant, batch, seconds), True)

    def _ask(self, batch: HeldBatch, make: Callable[[], Request | None], wait: bool) -> None:
        if not self.grant.leased:
            self.connection.settle(make, wait)
            return
        once = grants.Once(make)
        try:
            self.connection.settle(once, True)
        except AlreadySettled:
            if once.is_made:
                self.connection.locked(partial(self.grant.lost, batch))
            raise


def batch_of(connection: Connection, name: str, granted: Granted) -> HeldBatch:
    """Return the batch that was granted."""
    return RemoteBatch(Settler(connection, name, grant_of(granted)), granted.segments)


def shown_of(connection: Connection, name: str, granted: Granted) -> Deliveries:
    """Return the same as its user has it."""
    return deliveries_of(batch_of(connection, name, granted))


def first_of(connection: Connection, name: str, granted: Granted) -> Delivery | None:
    """Return the message that was granted; None if there was none in time."""
    return batch_of(connection, name, granted)[0] if granted.segments else None
