"""What is confirmed is stored where those who want it find it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from paho.mqtt.packettypes import PacketTypes

from mqtt_loop import PUBACK, client, properties_of, serving
from mqtt_wire import packet, string

run = asyncio.run


def test_order_with_a_queue_beside(spool: Path) -> None:
    """Also where messages in between go to a queue, which takes longer."""
    run(_beside(spool))


async def _beside(spool: Path) -> None:
    async with serving(spool) as server:
        await server.broker.declare_queue("q")
        await server.broker.bind("q", "q")
        sender = await client(server)
        empty = properties_of(PacketTypes.PUBLISH, None)
        full = properties_of(PacketTypes.PUBLISH, {"ContentType": "text"})

        def publish(topic: str, number: int, properties: bytes) -> bytes:
            return packet(0x32, string(topic) + number.to_bytes(2, "big") + properties + b"%d" % number)

        sender.send(publish("a", 1, empty), publish("q", 2, empty), publish("a", 3, full))
        for _ in range(3):
            await sender.expect(PUBACK)
        found = [int(one.body) async for one in server.broker.stream("mqtt").query("a")]
        assert found == [1, 3]


def test_a_batch_refused_for_one(spool: Path) -> None:
    """Messages of others are stored, whatever is wrong with one that comes in the same turn of the loop."""
    run(_refused(spool))


async def _refused(spool: Path) -> None:
    async with serving(spool) as server:
        await server.broker.alter_stream("mqtt", max_message_bytes=1000)
        good, bad = await client(server), await client(server)
        for _ in range(20):
            bad.publish("a", b"x" * 2000)
            good.publish("a", b"y")
        assert {(await good.expect(PUBACK)).code for _ in range(20)} == {0}
        assert {(await bad.expect(PUBACK)).code for _ in range(20)} == {0x95}


@pytest.mark.parametrize("of", ["queue", "stream"])
def test_what_is_refused_is_told_in_order(spool: Path, of: str) -> None:
    """Behind what was published before, as MQTT wants acknowledgements; and nothing is kept of it."""
    run(_told_in_order(spool, of))


async def _told_in_order(spool: Path, of: str) -> None:
    async with serving(spool) as server:
        if of == "queue":
            queue = await server.broker.declare_queue("q", max_message_bytes=1000)
            await server.broker.bind(queue, "q")
        else:
            await server.broker.alter_stream("mqtt", max_message_bytes=1000)
        raw = await client(server)
        for number in range(1, 7, 2):
            raw.publish("a", b"y", packet_id=number)
            raw.publish("q", b"x" * 20_000, packet_id=number + 1)
        told = [await raw.expect(PUBACK) for _ in range(6)]
        assert [(one.packet_id, one.code) for one in told] == [(1, 0), (2, 0x95), (3, 0), (4, 0x95), (5, 0), (6, 0x95)]
        assert not server._hub.together._lanes
