"""Messages that came back to a cursor, to be delivered again: at once, or after a delay."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable

from qflow.streams.deliveries import Share
from qflow.streams.part import Part


class Returned:
    """See the module. Called under the cursor's lock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.came = 0
        """How often messages became available that had been delivered: they come before what is read ahead."""
        self.messages = 0
        """Messages that can be delivered now."""
        self.later: list[tuple[float, int, Share]] = []  # (due time, number, share)
        self._again: list[tuple[int, int, Share]] = []  # (first sequence, number, share)
        self._number = 0

    def add(self, share: Share, due: float | None = None) -> None:
        """Put a share back in its place; not to be delivered before `due`, if given."""
        self._number += 1
        if due is None:
            insort(self._again, (share.piece.start, self._number, share))
            self.messages += len(share.piece.records)
        else:
            insort(self.later, (due, self._number, share))

    def ripen(self, now: float) -> None:
        """Make the shares available whose delay has ended."""
        while self.later and self.later[0][0] <= now:
            self.add(self.later.pop(0)[2])
            self.came += 1

    def overtakes(self, came: int | None) -> bool:
        """Tell whether more became available than `came`, or is due. Takes no lock."""
        return came != self.came or any(due <= self._monotonic() for due, _, _ in self.later[:1])

    @property
    def due(self) -> float:
        """When the next delay ends, on the monotonic clock."""
        return self.later[0][0] if self.later else math.inf

    def take(self, most: int) -> list[Share]:
        """Return shares that can be delivered now, of at most `most` messages."""
        shares: list[Share] = []
        while self._again and most > 0:
            share = self._again.pop(0)[2]
            piece = share.piece
            count = len(piece.records)
            self.messages -= count
            if count > most:
                self.add(share._replace(piece=piece.part(most, count)))
                share = share._replace(piece=piece.part(0, most))
            shares.append(share)
            most -= count
        return shares

    def shares(self) -> list[Share]:
        """Return all shares."""
        return [share for _, _, share in (*self._again, *self.later)]

    def drop(self, part: Part | None = None) -> int:
        """Forget the shares of a part, or all; return the bytes that were charged."""
        charged = sum(share.charged for share in self.shares() if part is None or share.part is part)
        self._again = [one for one in self._again if part is not None and one[2].part is not part]
        self.later = [one for one in self.later if part is not None and one[2].part is not part]
        self.messages = sum(len(share.piece.records) for _, _, share in self._again)
        return charged

    def __bool__(self) -> bool:
        return bool(self._again or self.later)
