"""The door in a spool as a service runs it, among those to the network: at a signal its callers finish, too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from qflow.aio.broker import AsyncBroker
from qflow.door import Door
from qflow.serving.addresses import Address
from qflow.serving.doors import Opening

_LOOK_S = 0.02


class SpoolDoor:
    """A `serving.doors.Door` that nobody is told of: whoever has the path of the spool finds it."""

    sockets: Sequence[Any] = ()

    def __init__(self, door: Door | None) -> None:
        self._door = door

    async def drain(self, grace_s: float) -> None:
        """Give callers no more messages, and return when all have ended, or after so many seconds; see `Door.drain`."""
        if self._door is None:
            return
        self._door.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._door.sockets:
                    await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Nothing: the broker ends the connections when it is closed."""

    def reload(self, **given: object) -> None:
        """Nothing: only processes of the owner's user come in."""


def opening(broker: AsyncBroker) -> Opening:
    """Return the opening of the door in the spool of a broker, which is open already."""

    async def opened(*given: object) -> SpoolDoor:
        return SpoolDoor(broker.broker.engine.door)

    return Opening("door", Address("localhost", 0), opened)
