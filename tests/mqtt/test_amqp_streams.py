"""Messages of AMQP's streams are none of MQTT."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mqtt_loop import PUBACK, Gone, client, serving, slept, unconnected

TOPIC = "amqp-stream/amqp%3Asecret%3Aaudit"


async def _reserved(spool: Path) -> None:
    async with serving(spool) as server:
        stream = await server.broker.declare_stream("amqp:secret:audit", topics=[f"{TOPIC}/#"])
        await server.broker.alter_stream("mqtt", topics=["#", "amqp-stream/#"])  # it has some of before
        raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        await raw.subscribe("#", f"{TOPIC}/#", "$replay/0/#", "$share/g/#")
        await server.broker.publish(TOPIC, b"secret")
        await raw.published("b", b"last")
        assert {one.payload for one in [await raw.message(), await raw.message()]} == {b"last"}
        await raw.disconnect()
        await slept(server)
        await server.broker.publish(TOPIC, b"secret")
        await server.broker.publish("b", b"end")
        raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        assert (await raw.message()).payload == b"end"
        for qos in (0, 1):
            raw.publish(TOPIC, b"forged", qos=qos)
        assert (await raw.expect(PUBACK, skip=True)).code == 0x90
        assert (await stream.stats()).messages == 2


def test_clients_neither_read_nor_write_them(spool: Path) -> None:
    """Live, later, replayed, in a group."""
    asyncio.run(_reserved(spool))


async def _apart(spool: Path) -> None:
    async with serving(spool) as server:
        await server.broker.declare_stream("amqp:secret:audit", topics=[f"{TOPIC}/#"])
        bodies = [b"%d" % number for number in range(4)]
        await server.broker.publish(TOPIC, bodies[0])
        await server.broker.publish_many([(f"{TOPIC}/a", bodies[1]), (f"{TOPIC}/b", bodies[2])])
        async with server.broker.transaction() as transaction:
            await transaction.publish(TOPIC, bodies[3])
        stats = {name: await server.broker.stream(name).stats() for name in ("mqtt", "amqp:secret:audit")}
        assert [one.messages for one in stats.values()] == [0, 4]


def test_they_take_no_room_in_the_stream_of_mqtt(spool: Path) -> None:
    """By each way of publishing: what sleeping sessions are to get is not evicted by them."""
    asyncio.run(_apart(spool))


@pytest.mark.parametrize(("version", "code"), [(5, 0x90), (4, None)])
def test_no_will_goes_there(spool: Path, version: int, code: int | None) -> None:
    asyncio.run(_will(spool, version, code))


async def _will(spool: Path, version: int, code: int | None) -> None:
    async with serving(spool) as server:
        raw = await unconnected(server, version=version)
        try:
            assert (await raw.connect("c", will={"topic": TOPIC, "payload": b"w"})).code == code
        except Gone:
            assert code is None
