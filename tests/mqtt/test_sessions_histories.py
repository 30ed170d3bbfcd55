"""Random histories of sessions that come, go, subscribe and are cut off, while others publish and servers restart."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from inside import copy_as_killed
from mqtt_loop import PUBACK, PUBCOMP, PUBLISH, PUBREC, PUBREL, Gone, Packet, Raw, client, serving
from qflow.mqtt import Server
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
HISTORIES = 60 if TORTURE else 2
STEPS = 120 if TORTURE else 60
TOPICS = ("a/1", "a/2", "b/1", "b/2", "c")
FILTERS = {"a/#": ("a/1", "a/2"), "+/1": ("a/1", "b/1"), "b/2": ("b/2",), "c": ("c",)}


class Subscriber:
    """A client with a session that lasts, and what it must have got."""

    def __init__(self, name: str, qos: int, most: int) -> None:
        self.name, self.qos, self.most = name, qos, most
        self.raw: Raw | None = None
        self.filters: set[str] = set()
        self.wanted: list[int] = []
        self.got: list[int] = []
        self._received: set[int] = set()

    def published(self, topic: str, number: int) -> None:
        if any(topic in FILTERS[one] for one in self.filters):
            self.wanted.append(number)

    async def come(self, server: Server) -> None:
        given = {"SessionExpiryInterval": 10_000, "ReceiveMaximum": self.most}
        self.raw = await client(server, self.name, clean=False, **given)  # type: ignore[arg-type]

    async def cut(self) -> None:
        assert self.raw is not None
        await self.raw.cut()
        self.raw = None

    def take(self, packet: Packet, acknowledges: bool) -> None:
        """Do with a packet what a client does; perhaps it is cut off before it acknowledges."""
        assert self.raw is not None
        if packet.kind == PUBREL:
            self._received.discard(packet.packet_id)
            self.raw.ack(PUBCOMP, packet.packet_id)
            return
        assert packet.kind == PUBLISH, packet
        number = int(packet.payload)
        if packet.qos == 2 and packet.packet_id not in self._received:
            assert number not in self.got, f"{number} came twice with QoS 2"
            self._received.add(packet.packet_id)
        if number not in self.got:
            self.got.append(number)
        else:
            assert packet.qos < 2 or packet.dup
        if acknowledges:
            self.raw.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)


class History:
    """One server, some subscribers, one publisher."""

    def __init__(self, chance: random.Random, spool: Path) -> None:
        self.chance, self.spool = chance, spool
        self.number = 0
        self.subscribers = [Subscriber(f"s{n}", chance.choice((1, 2)), chance.choice((1, 3, 1000))) for n in range(4)]
        self.sender: Raw | None = None

    async def run(self) -> None:
        left = STEPS
        while left > 0:
            async with AsyncExitStack() as stack:
                server = await stack.enter_async_context(serving(self.spool))
                self.sender = await client(server)
                for _ in range(self.chance.randrange(10, 50)):
                    left -= 1
                    await self.step(server)
                if left <= 0:
                    await self.finish(server)
                elif self.chance.random() < 0.5:
                    self.spool = copy_as_killed(server.broker.broker, self.spool.with_name(f"killed {left}"))
                for one in self.subscribers:
                    one.raw = None

    async def step(self, server: Server) -> None:
        one = self.chance.choice(self.subscribers)
        kind = self.chance.random()
        if kind < 0.4:
            await self.publish(self.chance.choice((1, 1, 5, 150)))
        elif one.raw is None:
            await one.come(server)
        elif kind < 0.5:
            await one.cut()
        elif kind < 0.6:
            free = [topic for topic in FILTERS if not self.overlaps(one, topic)]
            if free:
                topic_filter = self.chance.choice(free)
                await one.raw.subscribe(topic_filter, qos=one.qos)
                one.filters.add(topic_filter)
        else:
            await self.read(one, self.chance.randrange(40))

    def overlaps(self, one: Subscriber, topic_filter: str) -> bool:
        """Tell whether a client would get a message twice, which the protocol allows."""
        return any(set(FILTERS[topic_filter]) & set(FILTERS[other]) for other in one.filters)

    async def publish(self, count: int) -> None:
        assert self.sender is not None
        for _ in range(count):
            topic = self.chance.choice(TOPICS)
            await self.sender.released(topic, b"%d" % self.number)
            for one in self.subscribers:
                one.published(topic, self.number)
            self.number += 1

    async def read(self, one: Subscriber, most: int) -> None:
        """Have a client take what it can get now, some of it without an acknowledgement before it is cut off."""
        assert one.raw is not None
        fails = self.chance.random() < 0.3
        for index in range(most):
            if not one.raw.unread and set(one.wanted) == set(one.got):
                return
            if not one.filters or (not one.raw.unread and one.got[-1:] == one.wanted[-1:]):
                return
            packet = await one.raw.take()
            acknowledges = not fails or index < most - one.most
            one.take(packet, acknowledges)
            if not acknowledges:
                await one.cut()
                return

    async def finish(self, server: Server) -> None:
        for one in self.subscribers:
            if one.raw is None:
                await one.come(server)
            while set(one.got) != set(one.wanted):
                assert one.raw is not None
                one.take(await one.raw.take(), True)
            assert one.got == one.wanted


@pytest.mark.parametrize("number", range(HISTORIES))
def test_every_session_gets_everything_in_order(number: int, spool: Path) -> None:
    """Once with QoS 2; first in order with QoS 1, and again only if it was not acknowledged."""
    print(f"seed {SEED} (set QFLOW_SEED), history {number}")
    try:
        asyncio.run(History(random.Random(SEED * 1000 + number), spool).run())
    except Gone as error:
        raise AssertionError("a connection was closed") from error
