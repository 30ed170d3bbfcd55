"""Which deliveries of a batch are settled, as the client knows it: for threads and for tasks.

A batch is a `qflow.Deliveries`; what it calls its settler is made of this.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from qflow.delivery import Deliveries
from qflow.errors import AlreadySettled
from qflow.remote.client.replies import Granted
from qflow.remote.client.requests import Places
from qflow.remote.wire.values import ranges


class AnyGrant(Protocol):
    """A grant of a queue, or of a subscription. No places = there is nothing to be done."""

    @property
    def number(self) -> int: ...
    @property
    def leased(self) -> bool: ...
    def take(self, batch: Any) -> Places: ...
    def take_part(self, batch: Any, place: int) -> Places: ...
    def left(self, batch: Any) -> Places: ...
    def returned(self, batch: Any) -> None: ...
    def in_doubt(self) -> AnyGrant: ...


class Grant(NamedTuple):
    """A grant of the owner. Its methods are called under one lock of the connection."""

    number: int
    leased: bool
    """Whoever settles it waits for the answer: the owner may have taken it back."""

    def returned(self, batch: Deliveries) -> None:
        """Some of a batch goes back: no matter for the rest of it."""

    def in_doubt(self) -> Grant:
        """Return the same, of which somebody else may have settled some."""
        return self._replace(leased=True)

    def take(self, batch: Deliveries) -> Places:
        """Mark what is left of a batch as settled; return it. Raises AlreadySettled: nothing is."""
        places = self.left(batch)
        if batch.total:  # an empty one may be settled again
            batch.settled = None
        return places

    def take_part(self, batch: Deliveries, place: int) -> Places:
        """Mark one delivery of a batch as settled. Raises AlreadySettled: it is."""
        batch.check_unsettled(place)
        assert batch.settled is not None
        batch.settled.add(place)
        batch.settled_bytes += len(batch.at(place)[1])
        if len(batch.settled) == batch.total:
            batch.settled = None
        return [[place, place + 1]]

    def left(self, batch: Deliveries) -> Places:
        """Return what is left of a batch. Raises AlreadySettled: nothing is."""
        if not batch.total:
            return []
        if batch.settled is None:
            raise AlreadySettled(f"this batch of {batch.name!r} was settled before")
        if not batch.settled:
            return None
        return ranges([place for place in range(batch.total) if place not in batch.settled])


def grant_of(granted: Granted) -> Grant:
    """Return the grant that messages came with."""
    return Grant(granted.number, granted.leased)
