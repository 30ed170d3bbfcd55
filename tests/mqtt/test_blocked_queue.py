"""A bound queue is full and blocks: publishes to it wait, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from doors.event_loop import until
from mqtt_loop import DISCONNECT, PUBACK, PUBREC, SetClock, client, cut_all, serving, serving_at, slept
from qflow.errors import QueueEmpty
from qflow.mqtt import Server
from qflow.mqtt.server import inbound, leaving

LASTS = {"clean": False, "SessionExpiryInterval": 1000}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for but by those who publish."""
    monkeypatch.setattr(inbound, "SETTLE_S", 0.01)
    monkeypatch.setattr(leaving, "ROOM_S", 0.01)


@asynccontextmanager
async def blocked(server: Server) -> AsyncIterator[None]:
    """A queue that is bound to `a/#`, with room for one message, which it has."""
    async with asyncio.timeout(60):
        queue = await server.broker.declare_queue("full", limit_messages=1)
        await server.broker.bind(queue, "a/#")
        await server.broker.publish("a/0", b"0")
        yield


async def taken(server: Server) -> list[bytes]:
    """Make room in the queue until nothing waits for it; return the bodies."""
    queue = server.broker.queue("full")
    bodies: list[bytes] = []
    while (await queue.stats()).messages or server._hub.together._lanes:
        with suppress(QueueEmpty):
            async with await queue.get(0) as delivery:
                bodies.append(delivery.body)
        await asyncio.sleep(0)
    return bodies


def stored(server: Server) -> list[bytes]:
    return [message.body for message in server._hub.stream.query()]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_client_comes_back_while_its_publish_waits(spool: Path, qos: int) -> None:
    """It is let in, and what it sends again is stored once."""
    asyncio.run(_back(spool, qos))


async def _back(spool: Path, qos: int) -> None:
    async with serving(spool) as server, blocked(server):
        old = await client(server, "c", **LASTS)
        old.publish("a/1", b"1", qos=qos, packet_id=7)
        await old.nothing()
        raw = await client(server, "c", **LASTS)
        assert [one.kind for one in await old.gone()] == [DISCONNECT]
        await slept(server, others=1)
        raw.publish("a/1", b"1", qos=qos, packet_id=7, dup=True)
        await raw.nothing()
        assert await taken(server) == [b"0", b"1"]
        assert (await raw.expect(PUBACK if qos == 1 else PUBREC)).packet_id == 7
        assert stored(server) == [b"0", b"1"]


def test_who_has_hung_up_is_forgotten(spool: Path) -> None:
    """However often it came while its publish waits, and publishes behind those of others that wait, too."""
    asyncio.run(_hung_up(spool))


async def _hung_up(spool: Path) -> None:
    async with serving(spool) as server, blocked(server):
        other = await client(server)
        other.publish("a/1", b"other")
        await other.nothing()
        for number in range(20):
            raw = await client(server, "c", **LASTS)
            raw.publish("a/1", b"%d" % number, qos=1 + number % 2, packet_id=7)
            await raw.nothing()
            await raw.cut()
        await slept(server, others=1)
        assert await taken(server) == [b"0", b"other"]
        assert (await other.expect(PUBACK)).code == 0
        assert stored(server) == [b"0", b"other"]


@pytest.mark.parametrize("qos", [1, 2])
def test_the_server_is_closed_while_publishes_wait(spool: Path, qos: int) -> None:
    asyncio.run(_closed(spool, qos))


async def _closed(spool: Path, qos: int) -> None:
    async with serving(spool) as server, blocked(server):
        for number in range(3):
            raw = await client(server, f"c{number}", **LASTS)
            raw.publish("a/1", b"x", qos=qos)
            await raw.nothing()
        await server.drain(0)
        await server.close()
        assert server.connections == 0
        await cut_all()
        assert len(asyncio.all_tasks()) == 1
    async with serving(spool) as server:
        assert stored(server) == [b"0"]


def test_a_will_waits_for_room_elsewhere(spool: Path) -> None:
    """Its client may come back; it is published when there is room, within a minute."""
    asyncio.run(_will(spool))


async def _will(spool: Path) -> None:
    clock = SetClock()
    async with serving_at(clock, spool) as server, blocked(server):
        raw = await client(server, "c", will={"topic": "a/w", "payload": b"w", "qos": 1})
        await raw.cut()
        await slept(server)
        again = await client(server, "c")
        await again.disconnect()
        raw = await client(server, "d", will={"topic": "a/w", "payload": b"w", "qos": 1})
        await raw.cut()
        await slept(server)
        assert await taken(server) == [b"0"]
        clock.now_s += 61
        server.tick()
        await until(lambda: stored(server) == [b"0", b"w"])


def test_what_goes_elsewhere_does_not_wait(spool: Path) -> None:
    """Of the same client and of others; what goes to the full queue as well stays in order by its topic."""
    asyncio.run(_elsewhere(spool))


async def _elsewhere(spool: Path) -> None:
    async with serving(spool) as server, blocked(server):
        await server.broker.bind(await server.broker.declare_queue("other"), "b/#")
        raw, other = await client(server), await client(server)
        for number in range(3):
            raw.publish("a/1", b"%d" % number, packet_id=1 + number)
        await raw.nothing()
        await other.published("free", b"free")
        await other.released("b/1", b"bound")
        raw.publish("b/1", b"behind", packet_id=4)
        raw.publish("c", b"retained", packet_id=5, retain=True)
        await raw.nothing()
        await until(lambda: len(stored(server)) == 5)
        assert {*stored(server)} == {b"0", b"free", b"bound", b"behind", b"retained"}
        await server.broker.unbind("full", "a/#")
        other.publish("a/1", b"3")
        await other.nothing()
        await taken(server)
        assert [(await raw.expect(PUBACK)).packet_id for _ in range(5)] == [1, 2, 3, 4, 5]
        assert (await other.expect(PUBACK)).code == 0
        assert stored(server)[5:] == [b"0", b"1", b"2", b"3"]


def test_what_is_retained_later_stays(spool: Path) -> None:
    """With QoS 0, it does not pass what waits with QoS 1."""
    asyncio.run(_retained(spool))


async def _retained(spool: Path) -> None:
    async with serving(spool) as server, blocked(server):
        raw = await client(server)
        raw.publish("a/1", b"1", retain=True)
        raw.publish("a/1", b"2", qos=0, retain=True)
        raw.publish("free", b"3", qos=0, retain=True)
        await raw.nothing()
        other = await client(server)
        await other.subscribe("free")
        assert (await other.message()).payload == b"3"
        await taken(server)
        await raw.expect(PUBACK)
        await other.subscribe("a/1")
        assert (await other.message()).payload == b"2"
