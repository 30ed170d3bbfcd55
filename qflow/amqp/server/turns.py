"""Turns of consumers: what all of them send before the loop looks at anything else is bounded."""

from __future__ import annotations

import asyncio
from collections import deque

MOST = 512
"""Messages that consumers send in one turn of the loop, before others wait for the next: some 20 ms of work."""


class Turns:
    """See the module. One a server."""

    def __init__(self) -> None:
        self._sent = 0
        """In this turn, or by those that were woken for it."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def begin(self, messages: int) -> None:
        """Return when so many messages may be sent: first come, first served."""
        if not self._sent:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._sent >= MOST or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((messages, turn))
            await turn
            return
        self._sent += messages

    def _next(self) -> None:
        """Begin the next turn of the loop."""
        self._sent = 0
        while self._waiting and self._sent < MOST:
            messages, turn = self._waiting.popleft()
            if not turn.done():  # else its consumer ended
                turn.set_result(None)
                self._sent += messages
        if self._sent:
            asyncio.get_running_loop().call_soon(self._next)
