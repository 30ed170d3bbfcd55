"""What all doors of a broker share: the hub, and what time does to who is gone."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from qflow.aio.broker import AsyncBroker
from qflow.broker import Broker
from qflow.errors import InvalidArgument
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.groups import Groups
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.leaving import Leaving
from qflow.serving.budget import Budget


class House:
    """See the module. `of` gives that of a broker."""

    def __init__(self, broker: AsyncBroker, clock: Clock) -> None:
        self.hub = Hub(broker, clock)
        self.groups = Groups(self.hub)
        self.leaving = Leaving(self.hub, self.groups)
        self.budget = Budget()
        """Of packets and frames that are not whole."""
        self.loop = asyncio.get_running_loop()
        """In which all of it is used."""
        self._users = 0
        self._opened: asyncio.Future[None] | None = None

    @classmethod
    def of(cls, broker: AsyncBroker, clock: Clock) -> House:
        """Return what is shared in a broker; the first one's clock is that of all."""
        house = _HOUSES.get(broker.broker)
        if house is None:
            house = _HOUSES[broker.broker] = cls(broker, clock)
        return house

    @classmethod
    def found(cls, broker: Broker) -> House | None:
        """Return what is shared in a broker, if there is a door; thread-safe."""
        return _HOUSES.get(broker)

    async def enter(self, stream: str) -> None:
        """Begin to follow a stream, which is declared if there is none; `leave` when it is not needed any more.

        Raises:
            InvalidArgument: the stream has several partitions, or another is followed already.
        """
        self._users += 1
        try:
            if self._opened is None:
                self._opened = asyncio.get_running_loop().create_task(self._open(stream))
            await asyncio.shield(self._opened)
            if self.hub.stream.name != stream:
                raise InvalidArgument(f"MQTT follows stream {self.hub.stream.name!r} in this broker, not {stream!r}")
        except BaseException:
            await self.leave()
            raise

    async def _open(self, stream: str) -> None:
        await self.hub.open(stream)
        await self.leaving.load()
        self.hub.begin()

    async def leave(self) -> None:
        """Need it no more; the last one ends it."""
        self._users -= 1
        if not self._users:
            if _HOUSES.get(self.hub.broker.broker) is self:
                del _HOUSES[self.hub.broker.broker]
            if self._opened is not None and not self._opened.done():
                self._opened.cancel()
                await asyncio.wait([self._opened])
            self.leaving.end()
            await self.hub.leave()

    def tick(self) -> None:
        """Do what time has come for. Once a second, by each door."""
        self.hub.keeper.tick()
        self.leaving.tick()
        self.hub.retained.tick()


_HOUSES: WeakKeyDictionary[Broker, House] = WeakKeyDictionary()
