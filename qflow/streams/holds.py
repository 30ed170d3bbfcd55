"""A get on its way, and what leaves a cursor in a commit with something else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qflow.memory.line import Watcher
from qflow.storage.log.rows import Settled
from qflow.storage.log.transaction_log import Lane, Unit
from qflow.streams.deliveries import Share, StreamDeliveries

if TYPE_CHECKING:
    from qflow.streams.cursor import Cursor


class Getting:
    """A get by a caller who has no thread to wait with. Nobody but its cursor changes it."""

    __slots__ = (
        "ahead", "batch", "deadline", "follow", "given_up", "is_full", "member", "most", "number", "skip_gaps",
        "taker", "watcher",
    )  # fmt: skip

    def __init__(
        self, member: Any, most: int, deadline: float | None, taker: object, *, follow: bool, skip_gaps: bool
    ) -> None:
        self.batch: StreamDeliveries | None = None
        """What it got; None at the time-out, or at the end of what must not grow."""
        self.member = member
        self.most = most
        self.deadline = deadline
        self.taker = taker
        self.follow = follow
        self.skip_gaps = skip_gaps
        self.given_up = False
        self.ahead = False
        """It is for an iteration, which shows one after the other."""
        self.is_full = False
        """It holds so much that it gets no more."""
        self.number = -1
        """Its place among those who wait."""
        self.watcher: Watcher | None = None


class Leaving:
    """Messages that are settled in one commit with something else; a party of the unit. See `Together`."""

    depth = None
    writes = ()

    def __init__(self, cursor: Cursor, held: list[tuple[StreamDeliveries, list[int] | None]]) -> None:
        self.queue = cursor
        self.unit: Unit | None = None
        self._held = held
        self._checked = False
        self._shares = [
            share
            for batch, positions in held
            for share in (batch.left_shares() if positions is None else map(batch.share_at, positions))
        ]

    def settles(self) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane: called when it is about to join a batch of it.

        Raises:
            AlreadySettled: some of it went back since, for its subscription was closed or went elsewhere.
        """
        self.queue.check_leaving(self._held)
        self._checked = True
        return settles_of(self._shares)

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        held, self._held = self._held, []
        self.queue.left(held, self._checked)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        held, self._held = self._held, []
        self.queue.stays(held, self._checked)

    def give_up(self) -> None:
        """Called by who was stopped on the way."""
        if self.unit is None or not self.unit.joined:
            self.refused(None)


def settles_of(shares: Iterable[Share]) -> list[tuple[Lane, list[Settled]]]:
    """Return what shares settle, by lane; nothing for a cursor that is not durable."""
    settles: dict[Lane, list[Settled]] = {}
    for part, piece, _ in shares:
        if part.lane is not None:
            settles.setdefault(part.lane, []).append(Settled(piece.start, piece.end, 0, 0))
    return list(settles.items())
