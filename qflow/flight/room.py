"""Memory for record batches that are on their way, of all calls together.

A batch counts from before it is made, or decoded, until gRPC has taken it, or it is stored. Batches below 1 MiB take
nothing, and who waits holds nothing. What has been on its way for `STALLED_S` counts no more: it waits for something
else than the owner, as for a client that does not read, whose call pyarrow cannot end, or for room in a queue, and the
others go on; so beside the budget there is one batch, at most, for each of those.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LARGE = 2**20
"""Smaller batches take nothing from the budget."""
BUDGET_BYTES = 128 * 2**20
STALLED_S = 5.0
_LOOK_S = 0.2
"""As often one that waits looks whether its client is there still, and whether others have stalled."""


class Room:
    """See the module. Thread-safe.

    First come, first served. One that is larger than the whole budget has it alone.
    """

    def __init__(self, most_bytes: int = BUDGET_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self.lock = threading.Lock()
        self._held: dict[Share, float] = {}
        """Since when."""
        self._line: dict[Share, None] = {}

    def share(self, check: Callable[[], None]) -> Share:
        """Return what one call holds: nothing yet. `check` is called while it waits, and may raise."""
        return Share(self, check)

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._line)

    def enter(self, share: Share, size: int, wait_s: float) -> bool:
        """Have a call hold so much, in place of what it holds; whether it may, now or after a while. Where it has to
        wait, it gets into line."""
        with self.lock:
            share.size = 0
            if self._held.pop(share, None) is not None:
                self._wake()
            self._line[share] = None
            if not self._may_enter(share, size) and wait_s:
                share.turn.wait(wait_s)
            if not self._may_enter(share, size):
                return False
            del self._line[share]
            share.size = size
            self._held[share] = self._clock()
            self._wake()
            return True

    def leave(self, share: Share) -> None:
        """A call holds nothing any more, and does not wait; twice is fine."""
        if share not in self._held and share not in self._line:  # its own thread alone brings it there
            return
        with self.lock:
            share.size = 0
            self._held.pop(share, None)
            self._line.pop(share, None)
            self._wake()

    def _wake(self) -> None:
        """Have the first in line look again."""
        if self._line:
            next(iter(self._line)).turn.notify()

    def _may_enter(self, share: Share, size: int) -> bool:
        if next(iter(self._line)) is not share:
            return False
        now = self._clock()
        used = sum(one.size for one, since in self._held.items() if now - since < STALLED_S)
        return used == 0 or used + size <= self._most_bytes


class Share:
    """What one call holds of a `Room`: one batch at a time."""

    __slots__ = ("_check", "_room", "size", "turn")

    def __init__(self, room: Room, check: Callable[[], None]) -> None:
        self._room = room
        self._check = check
        self.size = 0
        self.turn = threading.Condition(room.lock)
        """Notified when it may be its turn."""

    def has(self, size: int) -> bool:
        """Hold room for a batch of this size, if it has as much already, as from `wait`, or there is any at once; else
        hold nothing, and be in line for it."""
        return size < LARGE or size <= self.size or self._room.enter(self, size, 0.0)

    def wait(self, size: int) -> None:
        """Wait for that, and hold it. Raises what `check` raises."""
        while size >= LARGE and not self._room.enter(self, size, _LOOK_S):
            self._check()

    def free(self) -> None:
        """Hold nothing, and wait for nothing; twice is fine."""
        self._room.leave(self)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
