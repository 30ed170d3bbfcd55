"""Publisher confirms of a channel: told in order, many by one method."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST_OPEN = 20_000
"""A channel with so many publishes that are not confirmed is not read from."""


class Unconfirmed:
    """A publish whose queues have not all taken it, or several that are one put."""

    __slots__ = ("first", "refused", "tag", "waiting")

    def __init__(self, tag: int) -> None:
        self.first = tag
        self.tag = tag
        """Of the last one."""
        self.waiting = 0
        """Puts that are not done."""
        self.refused = False


class Confirms:
    """See the module.

    Publishes are confirmed in the order they came, so that one method confirms all that a commit held: a publish that
    waits for room holds up the ones behind it, which are not read until it has some anyway.
    """

    def __init__(self, confirm: Callable[[int, bool, bool], object], flush: Callable[[], None]) -> None:
        """`confirm(tag, multiple, positive)` writes a confirm; `flush` sends what was written."""
        self._write_confirm = confirm
        self._flush = flush
        self._open: deque[Unconfirmed] = deque()
        self._next = 1
        self._is_due = False
        self._room: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return self._next - self._open[0].first if self._open else 0

    def begin(self) -> Unconfirmed:
        """Return the next publish; `end` it when its puts are known."""
        publish = Unconfirmed(self._next)
        self._next += 1
        self._open.append(publish)
        publish.waiting = 1
        return publish

    def extend(self, publish: Unconfirmed) -> None:
        """Have the next publish be one with the last that `begin` returned."""
        publish.tag = self._next
        self._next += 1

    def end(self, publish: Unconfirmed) -> None:
        """Confirm a publish when all its puts are done."""
        publish.waiting -= 1
        if not publish.waiting:
            self._schedule()

    async def room(self) -> None:
        """Return when fewer than `MOST_OPEN` are open."""
        while len(self) >= MOST_OPEN:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _schedule(self) -> None:
        if not self._is_due and not self._open[0].waiting:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell_done)

    def _tell_done(self) -> None:
        self._is_due = False
        done: list[Unconfirmed] = []
        while self._open and not self._open[0].waiting:
            done.append(self._open.popleft())
        for index, publish in enumerate(done):
            last = index + 1 == len(done)
            if publish.refused:
                self._write_confirm(publish.tag, publish.first < publish.tag, False)
            elif last or done[index + 1].refused:
                first = index == 0 or done[index - 1].refused
                self._write_confirm(publish.tag, not first or publish.first < publish.tag, True)
        self._flush()
        if self._room is not None and len(self) < MOST_OPEN:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None
