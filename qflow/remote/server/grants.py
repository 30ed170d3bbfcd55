"""What a connection holds: batches of deliveries, by number, until the last of each is settled."""

from __future__ import annotations

from typing import Any, Protocol

from qflow.aio.delivery import AsyncDeliveries, held_of
from qflow.errors import AlreadySettled

SWEPT_AT = 1000
"""So many grants, and they are looked through for those whose leases have ended."""


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

    def __init__(self, batch: AsyncDeliveries, lender: Lender) -> None:
        self.batch: Any = batch
        self.request = 0
        """The one it was the answer to."""
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
        self._last = 0
        self._swept_at = SWEPT_AT

    def __len__(self) -> int:
        return len(self._grants)

    def add(self, grant: Grant) -> int:
        """Return the number of a new grant."""
        if len(self._grants) >= self._swept_at:
            self._grants = {number: one for number, one in self._grants.items() if one.is_held}
            self._swept_at = max(SWEPT_AT, 2 * len(self._grants))
        self._last += 1
        self._grants[self._last] = grant
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
            del self._grants[number]

    def answer(self, request: int, result: Any) -> None:
        """Note which request a grant is the answer to, if there is one in its result."""
        if type(result) is dict and (grant := self._grants.get(result.get("grant", 0))) is not None:
            grant.request = request

    def give_up_of(self, request: int) -> None:
        """Give back what was granted to a request that was cancelled as its answer was on its way. Cost: O(grants)."""
        number = next((number for number, one in reversed(self._grants.items()) if one.request == request), 0)
        if number:
            self._grants.pop(number).give_up()

    def holds(self) -> bool:
        """Tell whether a delivery is not settled."""
        return any(one.is_held for one in self._grants.values())

    def take_all(self) -> list[Grant]:
        """Return all grants, the newest first, and forget them."""
        grants = list(self._grants.values())[::-1]
        self._grants.clear()
        return grants
