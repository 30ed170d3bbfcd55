"""Memory for what callers send, of all connections together.

Each connection is told its *credit* when it begins: bytes of requests with columns that may be under way, kept until
its end. What has come within it may wait for as long as it likes. Frames that are larger, one a connection, share a
budget while they come and are worked on.
"""

from __future__ import annotations

from collections.abc import Callable

LARGE = 2**20
"""Smaller frames take nothing from the budget."""
BUDGET_BYTES = 128 * 2**20
CREDITS_BYTES = 256 * 2**20
"""Of all connections; who comes gets an eighth of what is left of it."""
LEAST_CREDIT_BYTES = 2**20
READ_BYTES = 2**18
"""Read at once, into a buffer that is kept: to allocate as much for each request would cost more than to read it."""


class Budget:
    """See the module. In one event loop.

    What counts is what has come of a frame, not what it says it will take. Where all is used, the frame that began to
    come first goes on coming, as soon as no other one is under way: so one always gets through.
    """

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))
        """What a connection reads into: what came is taken out of it before the next one reads."""
        self._credits: dict[object, int] = {}
        self._coming: dict[object, int] = {}
        self._under_way: dict[int, int] = {}
        self._last = 0
        self._waiting: dict[object, Callable[[], object]] = {}

    def grant(self, who: object) -> int:
        """Return the credit of a new connection."""
        left = CREDITS_BYTES - sum(self._credits.values())
        self._credits[who] = max(LEAST_CREDIT_BYTES, left // 8)
        return self._credits[who]

    def give_back(self, who: object) -> None:
        """A connection needs its credit no longer."""
        self._credits.pop(who, None)

    @property
    def wanted(self) -> bool:
        """Somebody waits."""
        return bool(self._waiting)

    def come(self, who: object, size: int, call: Callable[[], object]) -> bool:
        """Note how much of a frame has come; whether more may come now. Else `call` is called when it may."""
        self._coming[who] = size
        if self._may_come(who):
            return True
        self._waiting[who] = call
        return False

    def complete(self, who: object) -> int:
        """All of a frame has come; return what `release` takes, 0 if the frame took nothing."""
        size = self._coming.pop(who, 0)
        if not size:
            return 0
        self._last += 1
        self._under_way[self._last] = size
        return self._last

    def release(self, taken: int) -> None:
        """A frame was answered, or waits for something else than the owner; twice is fine."""
        if self._under_way.pop(taken, 0):
            self._look()

    def leave(self, who: object) -> None:
        """A connection has ended; twice is fine."""
        self._credits.pop(who, None)
        self._coming.pop(who, None)
        self._waiting.pop(who, None)
        self._look()

    def _may_come(self, who: object) -> bool:
        used = sum(self._under_way.values()) + sum(self._coming.values())
        return used <= BUDGET_BYTES or (not self._under_way and next(iter(self._coming)) is who)

    def _look(self) -> None:
        for who, call in list(self._waiting.items()):
            if self._may_come(who):
                del self._waiting[who]
                call()
