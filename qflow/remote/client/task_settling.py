"""Settles what tasks hold of a connection, as `aio.delivery.Settling` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from qflow.aio.delivery import AnyDeliveries, AsyncDelivery
from qflow.deliveries import Deliveries
from qflow.delivery import Delivery, Return
from qflow.errors import AlreadySettled, InvalidArgument
from qflow.held_batch import AnyBatch, HeldBatch
from qflow.remote.client import grants
from qflow.remote.client.grants import AnyGrant
from qflow.remote.client.link import Request
from qflow.remote.client.tasks import TaskConnection


class TaskSettler:
    """What a batch of tasks calls its settler: it knows the grant. `Settles` settles."""

    def __init__(self, connection: TaskConnection, name: str, grant: AnyGrant) -> None:
        self.connection = connection
        self.name = name
        self.grant = grant

    def settle_batch(self, batch: HeldBatch, index: int | None, wait: bool) -> None:
        raise InvalidArgument("a delivery of tasks is settled by `await delivery.ack()`")

    def return_batch(self, batch: HeldBatch, index: int | None, how: Return) -> None:
        raise InvalidArgument("a delivery of tasks is given back by `await delivery.nack()`")

    def extend_batch(self, batch: HeldBatch, seconds: float) -> None:
        raise InvalidArgument("a delivery of tasks is held longer by `await delivery.extend()`")


class Settles:
    """See the module; of one connection."""

    def __init__(self, connection: TaskConnection) -> None:
        self._connection = connection

    async def settle(self, held: Delivery | AnyDeliveries, wait: bool) -> None:
        """Ack; it is on its way when this returns, and nobody waits for it but with `wait`, or where leases end."""
        grant, batch, index = _held(held)
        await self._ask(grant, batch, partial(grants.ack, grant, batch, index, wait), wait)

    async def give_back(self, held: Delivery | AnyDeliveries, how: Return) -> None:
        """Nack."""
        grant, batch, index = _held(held)
        await self._ask(grant, batch, partial(grants.nack, grant, batch, index, how), True)

    async def extend(self, held: Delivery | AnyDeliveries, seconds: float) -> None:
        """Hold it longer."""
        grant, batch, _ = _held(held)
        await self._ask(grant, batch, partial(grants.extend, grant, batch, seconds), True)

    async def _ask(self, grant: AnyGrant, batch: Any, make: Callable[[], Request | None], wait: bool) -> None:
        if not grant.leased:
            await self._connection.settle(make, wait)
            return
        once = grants.Once(make)
        try:
            await self._connection.settle(once, True)
        except AlreadySettled:
            if once.is_made:
                grant.lost(batch)
            raise

    async def settle_all(self, deliveries: Iterable[AsyncDelivery], wait: bool) -> None:
        """Ack deliveries; one that was settled before is told of when all the others are."""
        listed = list(deliveries)
        for one in listed:
            if not isinstance(one, AsyncDelivery):
                raise InvalidArgument(f"ack_many takes a batch or deliveries, not {type(one).__name__}")
        problem: AlreadySettled | None = None
        for place, one in enumerate(listed):
            try:
                await self.settle(one.delivery, wait and place == len(listed) - 1)
            except AlreadySettled as error:
                problem = error
        if problem is not None:
            raise problem


def _held(held: Delivery | AnyDeliveries) -> tuple[AnyGrant, Any, int | None]:
    """Return the grant, the batch, and the place in it, None for all that is left."""
    if isinstance(held, Deliveries | AnyBatch):
        batch: Any = held.held if isinstance(held, Deliveries) else held
        return batch.settler.grant, batch, None
    batch = held.settler
    return batch.settler.grant, batch, batch.position(held.sequence)
