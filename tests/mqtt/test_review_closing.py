"""The broker closes, or the door does, with everything under way."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import pytest

import qflow.aio
from mqtt_loop import PUBACK, PUBCOMP, PUBREC, PUBREL, Gone, client, cut_all, serving
from qflow.mqtt import serve

run = asyncio.run


@pytest.mark.parametrize("first", ["broker", "server"])
@pytest.mark.parametrize("turns", [0, 3, 10, 40])
def test_closing_with_everything_under_way(
    first: str, turns: int, spool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what clients of other tests have left says so when it goes, and some of it goes later
    with caplog.at_level(logging.WARNING):
        run(_closing(first, turns, spool))
    records = [record for record in caplog.records if "MqttCodeError" not in record.getMessage()]
    assert not [record for record in records if record.levelno >= logging.ERROR]
    assert len(records) < 20


async def _closing(first: str, turns: int, spool: Path) -> None:
    lasts: dict[str, Any] = {"clean": False, "SessionExpiryInterval": 1000}
    broker = await qflow.aio.open(spool)
    server = await serve(broker, port=0)
    raws = []
    for number in range(6):
        raw = await client(
            server, f"c{number}", will={"topic": "w", "payload": b"w", "qos": 1, "retain": True}, **lasts
        )
        await raw.subscribe("a/#", "w", qos=2)
        await raw.subscribe("$share/g/a/#", qos=number % 3)
        raws.append(raw)
    for number in range(300):
        for raw in raws:
            raw.publish(f"a/{number % 7}", b"x" * 500, qos=number % 3, packet_id=number + 1, retain=number % 5 == 0)
    raws[0].send(b"\x82\x08\x00\x01\x00\x00\x02a/\x01")
    raws[1].writer.transport.abort()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        if first == "broker":
            await broker.close()
            await server.close()
        else:
            await server.close()
            await broker.close()
    assert server.connections == 0
    for raw in raws[2:]:
        try:
            while True:
                await raw.next()
        except Gone:
            pass
    await cut_all()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left


def test_what_cannot_be_retained_is_told_once(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Until something can; each message is given to who is there."""
    run(_told_once(spool))
    assert len([record for record in caplog.records if "retained" in record.message]) == 2


async def _told_once(spool: Path) -> None:
    async with qflow.aio.open(spool) as broker, await serve(broker, port=0) as server:
        raw = await client(server)
        body = b"x" * (2**20 - 20)  # with what stands beside it, more than a record takes
        for _ in range(5):
            raw.publish("a", body, qos=0, retain=True)
        raw.publish("a", b"x", qos=0, retain=True)
        await raw.published("a")
        for _ in range(5):
            raw.publish("a", body, qos=0, retain=True)
        await raw.nothing()
        await cut_all()


def test_a_close_that_is_cancelled_is_closed_by_the_next(spool: Path) -> None:
    run(_cancelled(spool))


async def _cancelled(spool: Path) -> None:
    async with qflow.aio.open(spool) as broker:
        server = await serve(broker, port=0)
        raw = await client(server, "c", clean=False, SessionExpiryInterval=1000)
        await raw.subscribe("a")
        task = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await server.close()
        await cut_all()
        async with await serve(broker, port=0) as again:
            await client(again, "d")
            await cut_all()
        left = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
        assert not left


def test_a_drain_waits_for_what_clients_are_to_acknowledge(spool: Path) -> None:
    """They get nothing more, and nothing that they have acknowledged comes again."""
    run(_drained(spool))


async def _drained(spool: Path) -> None:
    async with serving(spool) as server:
        raw, other = await client(server, "c", SessionExpiryInterval=1000), await client(server)
        await raw.subscribe("#", qos=2)
        await other.published("a", b"1")
        await other.released("a", b"2")
        one, two = await raw.message(ack=False), await raw.message(ack=False)
        draining = asyncio.create_task(server.drain(60))
        await other.gone()
        await server.broker.publish("a", b"3")
        raw.ack(PUBACK, one.packet_id)
        raw.ack(PUBREC, two.packet_id)
        await raw.expect(PUBREL)
        await raw.nothing()
        raw.ack(PUBCOMP, two.packet_id)
        await raw.gone()
        await draining
    async with serving(spool) as server:
        raw = await client(server, "c", clean=False)
        assert await raw.messages(1) == [b"3"]
        await raw.nothing()
