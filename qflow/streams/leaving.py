"""Deliveries that are settled in one commit with other work, such as the puts of a transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qflow.storage.log.rows import Settled
from qflow.storage.log.transaction_log import Lane, Unit
from qflow.streams.batches import StreamBatch
from qflow.streams.deliveries import Share

Held = list[tuple[StreamBatch, list[int] | None]]
"""Batches, with the indexes of their messages; None = all that are left."""


class Holder(Protocol):
    """The claims of a cursor, which hold the deliveries."""

    def check_leaving(self, held: Held) -> None: ...
    def left(self, held: Held, checked: bool) -> None: ...
    def stays(self, held: Held, checked: bool) -> None: ...


class Leaving:
    """Deliveries that are settled in one commit with other work; a party of the unit. See `Together`."""

    depth = None
    writes = ()

    def __init__(self, claims: Holder, held: Held) -> None:
        self.queue = claims
        self.unit: Unit | None = None
        self._held = held
        self._checked = False

    def settles(self) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane; called just before the unit joins a batch.

        Raises:
            AlreadySettled: some went back meanwhile: the subscription was closed, or moved by `seek`.
        """
        self.queue.check_leaving(self._held)
        self._checked = True
        return settles_of(share for batch, positions in self._held for share in batch.shares_at(positions))

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        held, self._held = self._held, []
        self.queue.left(held, self._checked)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        held, self._held = self._held, []
        self.queue.stays(held, self._checked)

    def give_up(self) -> None:
        """Hold the deliveries as before: the commit was not made."""
        if self.unit is None or not self.unit.joined:
            self.refused(None)


def settles_of(shares: Iterable[Share]) -> list[tuple[Lane, list[Settled]]]:
    """Return the settles of shares, by lane; none for a cursor that is not durable."""
    settles: dict[Lane, list[Settled]] = {}
    for part, piece, _ in shares:
        if part.lane is not None:
            settles.setdefault(part.lane, []).append(Settled(piece.start, piece.end, 0, 0))
    return list(settles.items())
