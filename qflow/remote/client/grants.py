"""Which deliveries of a batch are settled, as the client knows it: for threads and for tasks.

A batch is a `RemoteBatch`; what it calls its settler is made of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from qflow.delivery import Return
from qflow.errors import AlreadySettled
from qflow.held_batch import HeldBatch
from qflow.named_tuples import NamedTuple
from qflow.remote.client import requests
from qflow.remote.client.link import Request
from qflow.remote.client.replies import Granted
from qflow.remote.client.requests import Places
from qflow.remote.client.stream_holding import StreamGrant
from qflow.remote.wire.values import ranges


class RemoteBatch(HeldBatch):
    """A batch of a queue that came through a door."""

    __slots__ = ()

    def position(self, sequence: int) -> int:
        """See `AnyBatch`. Raises AlreadySettled: nothing of it is left, which the owner need not be asked for."""
        if self.is_over:
            self.check_unsettled(0, sequence)
        return super().position(sequence)


class Grant(NamedTuple):
    """A grant of the owner. Its methods are called under one lock of the connection."""

    number: int
    leased: bool
    """Whoever settles it waits for the answer: the owner may have taken it back."""
    is_whole: bool = True
    """It is taken back as a whole."""

    def returned(self, batch: HeldBatch) -> None:
        """Some of a batch goes back: no matter for the rest of it."""

    def shared(self) -> Grant:
        """Return the same, of which a transaction may settle some: what is refused then says nothing of the rest."""
        return self._replace(is_whole=False)

    def in_doubt(self) -> Grant:
        """Return the same, of which somebody else may have settled some."""
        return self._replace(leased=True, is_whole=False)

    def lost(self, batch: HeldBatch) -> None:
        """The owner says that it has taken some of a batch back: nothing of it is held any more."""
        if self.is_whole:
            batch.end()

    def take(self, batch: HeldBatch) -> Places:
        """Mark what is left of a batch as settled; return it. Raises AlreadySettled: nothing is."""
        places = self.left(batch)
        if batch.total:  # an empty one may be settled again
            batch.end()
        return places

    def take_part(self, batch: HeldBatch, place: int) -> Places:
        """Mark one delivery of a batch as settled. Raises AlreadySettled: it is."""
        batch.check_unsettled(place)
        batch.note_settled(place)
        if not batch.left_count:
            batch.end()
        return [[place, place + 1]]

    def left(self, batch: HeldBatch) -> Places:
        """Return what is left of a batch. Raises AlreadySettled: nothing is."""
        if not batch.total:
            return []
        if batch.is_over:
            raise AlreadySettled(f"this batch of {batch.name!r} was settled before")
        return None if batch.kept is None else ranges(batch.unsettled())


def grant_of(granted: Granted) -> Grant:
    """Return the grant that messages came with."""
    return Grant(granted.number, granted.leased)


AnyGrant: TypeAlias = Grant | StreamGrant
"""Its methods return places: none of them = there is nothing to be done."""


class Once:
    """Makes a request, and knows whether it did: if so, what is refused then was refused by the owner."""

    __slots__ = ("_make", "is_made")

    def __init__(self, make: Callable[[], Request | None]) -> None:
        self._make = make
        self.is_made = False

    def __call__(self) -> Request | None:
        request = self._make()
        self.is_made = True
        return request


# Under the lock, as a grant's methods; None = there is nothing to be asked for.


def _take(grant: AnyGrant, batch: Any, place: int | None) -> Places:
    return grant.take(batch) if place is None else grant.take_part(batch, place)


def ack(grant: AnyGrant, batch: Any, place: int | None, wait: bool) -> Request | None:
    """Mark what is left of a batch, or one delivery, as settled; return the request. Raises AlreadySettled."""
    places = _take(grant, batch, place)
    return None if places == [] else requests.ack(grant.number, places, wait)


def nack(grant: AnyGrant, batch: Any, place: int | None, how: Return) -> Request | None:
    """As `ack`, to give it back."""
    places = _take(grant, batch, place)
    if how.requeue:
        grant.returned(batch)
    return None if places == [] else requests.nack(grant.number, places, how)


def extend(grant: AnyGrant, batch: Any, seconds: float) -> Request | None:
    """Return the request to hold what is left of a batch longer. Raises AlreadySettled."""
    places = grant.left(batch)
    return None if places == [] else requests.extend(grant.number, places, seconds)
