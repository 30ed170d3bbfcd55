"""One subscription among those that share a cursor: how it gets messages, and whether it was closed."""

from __future__ import annotations

from collections.abc import Callable

from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.streams.batches import StreamBatch
from qflow.streams.cursor import Cursor, Getting
from qflow.streams.terms import Terms

READ_AHEAD = 256
"""Messages an iteration acquires at once, if its cursor has no other members."""


class Member:
    """The working part of a `Subscription` or an `AsyncSubscription`."""

    def __init__(self, cursor: Cursor, terms: Terms, ended: Callable[[Member], None]) -> None:
        """`ended` is called once, when it is closed."""
        self.cursor = cursor
        """The cursor, shared by the members of a group."""
        self.ack_timeout_s = terms.ack_timeout_s
        """How long it may hold a message; None = without end."""
        self.closed: bool = False
        self._follow = terms.follow
        self._skip_gaps = terms.on_gap == "skip"
        self._ended = ended
        cursor.join(self)

    def begin_get(self, most: int, timeout_s: Duration | None, taker: object, *, ahead: bool = False) -> Getting:
        """Return a new get, for `Cursor.get` or `Cursor.try_get`; with `ahead`, for an iteration."""
        deadline = self.cursor.deadline(parse_timeout(timeout_s))
        return Getting(self, most, deadline, taker, follow=self._follow, skip_gaps=self._skip_gaps, ahead=ahead)

    def get(self, most: int, timeout_s: Duration | None, taker: object) -> StreamBatch | None:
        """Return available messages, waiting for the first; None at the time-out, or at the end."""
        return self.cursor.get(self.begin_get(most, timeout_s, taker))

    def get_ahead(self, taker: object) -> StreamBatch | None:
        """Return a batch for an iteration, which returns one message after the other; None at the end."""
        return self.cursor.get(self.begin_get(self.ahead_at_once, None, taker, ahead=True))

    @property
    def ahead_at_once(self) -> int:
        """Messages an iteration acquires at once; 1 if members share the cursor, or if leases end."""
        return 1 if self.cursor.is_group or self.ack_timeout_s is not None else READ_AHEAD

    def empty_batch(self) -> StreamBatch:
        """Return an empty batch: the result of `get_many` at the time-out."""
        return StreamBatch(self.cursor.claims, [], self, 0)

    def close(self) -> None:
        """Give back what it holds. Twice is fine."""
        if not self.closed:
            self.closed = True
            self._ended(self)
