"""What a connection holds: batches of deliveries, by number, until the last of each is settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from qflow.aio.delivery import AsyncDeliveries, held_of
from qflow.errors import AlreadySettled

SWEPT_AT = 1000
"""So many grants, and they are looked through for those whose leases have ended."""
MOST_GAPS = 1000
"""More answers of one connection are not on their way at once that tell of messages that are gone."""


class Lender(Protocol):
    """Where a batch comes from: a queue, or a subscription."""

    def give_up(self, batch: Any) -> None:
        """Give back what is left of a batch, not counted."""

    def give_up_from(self, batch: Any, index: int) -> None:
        """`give_up` from this position on; a subscription gives back all."""

    async def settled(self) -> None:
        """Return when all that was settled so far is synced."""

    async def abandon(self, batch: Any) -> None:
        """Give back what is left of a batch, counted, and what is leaving with a commit, if that is refused."""


class Grant:
    """A batch of deliveries, and who gives it back uncounted. Thousands may be held: `BATCH_BYTES` covers each."""

    __slots__ = ("_lender", "batch", "request")

    def __init__(self, batch: AsyncDeliveries, lender: Lender, request: int) -> None:
        self.batch: Any = batch
        self.request = request
        """The one it is the answer to."""
        self._lender = lender

    def give_up(self, first: int = 0) -> None:
        """Give back what is left, from a place on, not counted."""
        if first:
            self._lender.give_up_from(self.batch, first)
        else:
            self._lender.give_up(self.batch)

    async def settled(self) -> None:
        """Return when all that was settled so far is synced."""
        await self._lender.settled()

    async def abandon(self) -> None:
        """Give back what is left, and what may be, counted: who held it has gone."""
        await self._lender.abandon(self.batch)

    @property
    def is_held(self) -> bool:
        """Something of it is not settled, or is settled by a commit that is under way, and may be refused."""
        held = held_of(self.batch)
        return bool(held.leaving or held.left_count)


class Grants:
    """See the module. In the loop of the connection."""

    def __init__(self) -> None:
        self._grants: dict[int, Grant] = {}
        self._answers: dict[int, int] = {}
        """Of these, the one that a request was answered with."""
        self._gaps: dict[int, Callable[[], object]] = {}
        """By request, as long as a cancel may come: `MOST_GAPS` that were answered last."""
        self._last = 0
        self._swept_at = SWEPT_AT

    def __len__(self) -> int:
        return len(self._grants)

    def add(self, grant: Grant) -> int:
        """Return the number of a new grant."""
        if len(self._grants) >= self._swept_at:
            for number in [number for number, one in self._grants.items() if not one.is_held]:
                self._forget(number)
            self._swept_at = max(SWEPT_AT, 2 * len(self._grants))
        self._last += 1
        self._grants[self._last] = grant
        self._answers[grant.request] = self._last
        return self._last

    def get(self, number: int) -> Grant:
        """Return a grant. Raises AlreadySettled: nothing of it is left, or there was none."""
        found = self._grants.get(number)
        if found is None:
            raise AlreadySettled("these deliveries were settled before, or went back")
        return found

    def find(self, number: int) -> Grant | None:
        """Return a grant of which something may be left."""
        return self._grants.get(number)

    def drop(self, number: int, *, given_up: bool = False) -> None:
        """Forget a grant, if nothing of it is left, or it was given up."""
        grant = self._grants.get(number)
        if grant is not None and (given_up or not grant.is_held):
            self._forget(number)

    def add_gap(self, request: int, give_up: Callable[[], object]) -> None:
        """Keep how a gap goes back that a request is answered with: that it was told, nobody says."""
        self._gaps[request] = give_up
        if len(self._gaps) > MOST_GAPS:
            del self._gaps[next(iter(self._gaps))]

    def forget_request(self, request: int) -> None:
        """Another request has its number."""
        self._answers.pop(request, None)
        self._gaps.pop(request, None)

    def give_up_of(self, request: int) -> None:
        """Give back what a request was answered with that is cancelled: nobody was handed that."""
        if request in self._answers:
            self._forget(self._answers[request]).give_up()
        elif (give_up := self._gaps.pop(request, None)) is not None:
            give_up()

    def _forget(self, number: int) -> Grant:
        grant = self._grants.pop(number)
        if self._answers.get(grant.request) == number:
            del self._answers[grant.request]
        return grant

    def holds(self) -> bool:
        """Tell whether a delivery is not settled."""
        return any(one.is_held for one in self._grants.values())

    def take_all(self) -> list[Grant]:
        """Return all grants, the newest first, and forget them."""
        grants = list(self._grants.values())[::-1]
        for held in (self._grants, self._answers, self._gaps):
            held.clear()
        return grants
