"""One subscriber among those that share a cursor: how it gets, and whether it was closed."""

from __future__ import annotations

from collections.abc import Callable

from qflow.config import parse_timeout
from qflow.streams.cursor import Cursor, Getting
from qflow.streams.deliveries import StreamDeliveries

READ_AHEAD = 256
"""An iterator takes so many messages at once, where it shares them with nobody."""


class Member:
    """What a `Subscription` does its work with; a task's, too."""

    def __init__(self, cursor: Cursor, *, follow: bool, skip_gaps: bool, ended: Callable[[Member], None]) -> None:
        """`ended` is called once, by whoever closes it."""
        self.cursor = cursor
        """What it shares with the members of its group."""
        self.closed: bool = False
        self._follow = follow
        self._skip_gaps = skip_gaps
        self._ended = ended
        cursor.join(self)

    def begin_get(self, most: int, timeout_s: float | None, taker: object, *, ahead: bool = False) -> Getting:
        """Begin a get, whose steps `Cursor.get` takes, or a task one by one. With `ahead`, it is for an iteration."""
        deadline = self.cursor.deadline(parse_timeout(timeout_s))
        return Getting(self, most, deadline, taker, follow=self._follow, skip_gaps=self._skip_gaps, ahead=ahead)

    def get(self, most: int, timeout_s: float | None, taker: object) -> StreamDeliveries | None:
        """Return the messages that are there, waiting for the first; None at the time-out, or at the end."""
        return self.cursor.get(self.begin_get(most, timeout_s, taker))

    def get_ahead(self, taker: object) -> StreamDeliveries | None:
        """Return a batch for an iteration, which shows one after the other; None at the end."""
        return self.cursor.get(self.begin_get(self.ahead_at_once, None, taker, ahead=True))

    @property
    def ahead_at_once(self) -> int:
        """How many messages an iteration takes at once: one where others share them, or the lease of a batch ends."""
        return 1 if self.cursor.is_group or self.cursor.claims.ack_timeout_s is not None else READ_AHEAD

    def empty_batch(self) -> StreamDeliveries:
        """Return what a get of many gives at the time-out."""
        return StreamDeliveries(self.cursor.claims, [], self, 0)

    def close(self) -> None:
        """Give back what it holds. Twice is fine."""
        if not self.closed:
            self.closed = True
            self._ended(self)
