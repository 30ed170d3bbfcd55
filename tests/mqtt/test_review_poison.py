"""Messages of programs that MQTT has no place for: they hold nobody up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mqtt_loop import PUBACK, client, serving

run = asyncio.run
POISONS: list[dict[str, Any]] = [
    {"key": "a\0b"},
    {"key": "v" * 70_000},
    {"mqtt.content_type": "a\0b"},
    {"mqtt.user_properties": "[" * 100_000},
]


@pytest.mark.parametrize("headers", POISONS, ids=["NUL", "long", "type", "deep"])
def test_a_live_client_gets_what_follows(headers: dict[str, Any], spool: Path) -> None:
    run(_live(headers, spool))


async def _live(headers: dict[str, Any], spool: Path) -> None:
    async with serving(spool) as server:
        subscriber = await client(server)
        await subscriber.subscribe("a")
        await server.broker.publish("a", b"1", headers=headers)
        await server.broker.publish("a", b"2")
        assert (await subscriber.message()).payload in (b"1", b"2")
        assert server.connections == 1


def test_one_that_is_behind_gets_what_follows_and_the_others_too(spool: Path) -> None:
    run(_behind(spool))


async def _behind(spool: Path) -> None:
    async with serving(spool) as server:
        slow = await client(server, ReceiveMaximum=1)
        await slow.subscribe("a")
        other = await client(server)
        await server.broker.publish("a", b"1")
        first = await slow.message(ack=False)
        await server.broker.publish("a", b"2", headers=POISONS[0])
        await server.broker.publish("a", b"3")
        await other.nothing()
        slow.ack(PUBACK, first.packet_id)
        assert (await slow.message()).payload in (b"2", b"3")
        await other.nothing()
