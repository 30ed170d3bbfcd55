"""Messages of programs that MQTT has no place for: they hold nobody up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mqtt_loop import PUBACK, PUBCOMP, PUBREL, client, serving, slept
from qflow.mqtt.model import messages
from qflow.mqtt.server import hub as hub_module

run = asyncio.run
POISONS: list[dict[str, Any]] = [
    {"key": "a\0b"},
    {"key": "v" * 70_000},
    {"mqtt.content_type": "a\0b"},
    {"mqtt.user_properties": "[" * 100_000},
    {"mqtt.expires_ms": 253_402_300_799_000},
    {"mqtt.expires_ms": 10**300},
    {"mqtt.mark": "abcdefgh" + "1" * 5000},
]


@pytest.mark.parametrize("headers", POISONS, ids=["NUL", "long", "type", "deep", "year 9999", "never", "mark"])
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


def test_one_that_expires_far_away_says_the_longest_time(spool: Path) -> None:
    run(_far_away(spool))


async def _far_away(spool: Path) -> None:
    async with serving(spool) as server:
        subscriber = await client(server)
        await subscriber.subscribe("a")
        await server.broker.publish("a", b"1", headers={"mqtt.expires_ms": 253_402_300_799_000})
        assert (await subscriber.message()).properties["MessageExpiryInterval"] == 2**32 - 1


@pytest.mark.parametrize("qos", [0, 1])
def test_one_that_cannot_be_encoded_is_left_out(spool: Path, monkeypatch: pytest.MonkeyPatch, qos: int) -> None:
    """For who is there and who comes back to it, live, behind, in flight and retained; it is counted."""
    run(_unencoded(spool, monkeypatch, qos))


async def _unencoded(spool: Path, monkeypatch: pytest.MonkeyPatch, qos: int) -> None:
    encode = messages.encode_publish
    poison = b"none yet"

    def encode_publish(version: int, topic: str, payload: bytes, *rest: Any) -> Any:
        if payload == poison:
            raise ValueError("it has no bytes")
        return encode(version, topic, payload, *rest)

    monkeypatch.setattr(messages, "encode_publish", encode_publish)
    lasts: dict[str, Any] = {"clean": False, "SessionExpiryInterval": 1000}
    async with serving(spool) as server:
        sleeper, live, sender = [await client(server, name, **lasts) for name in ("sleeper", "live", "sender")]
        await sleeper.subscribe("a", qos=2)
        await live.subscribe("a", qos=2)
        await sender.released("a", b"in flight")
        in_flight = await sleeper.message(ack=False)
        assert (await live.message()).payload == b"in flight"
        await sleeper.disconnect()
        await slept(server, others=2)
        poison = b"in flight"
        sender.publish("a", poison, qos=qos, packet_id=2, retain=True)
        await sender.released("a", b"2", packet_id=3)
        assert (await live.message()).payload == b"2"
        sleeper = await client(server, "sleeper", **lasts)
        assert (await sleeper.expect(PUBREL)).packet_id == in_flight.packet_id
        sleeper.ack(PUBCOMP, in_flight.packet_id)
        assert (await sleeper.message()).payload == b"2"
        await sleeper.subscribe("a", qos=2)
        await sleeper.nothing()
        assert server._hub.counts.dropped >= 2


def test_one_at_which_the_server_fails_is_left_out(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on."""
    run(_fault(spool, monkeypatch))


async def _fault(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message_of = hub_module.message_of

    def failing(delivery: Any) -> Any:
        if delivery.body == b"1":
            raise RuntimeError("a fault")
        return message_of(delivery)

    monkeypatch.setattr(hub_module, "message_of", failing)
    async with serving(spool) as server:
        subscriber = await client(server)
        await subscriber.subscribe("a")
        await server.broker.publish("a", b"0")
        assert (await subscriber.message()).payload == b"0"  # from here on it is given what comes, and reads nothing
        await server.broker.publish("a", b"1")
        await server.broker.publish("a", b"2")
        assert (await subscriber.message()).payload == b"2"


def test_a_response_topic_of_a_program_is_no_filter(spool: Path) -> None:
    """One with a wildcard is a user property."""
    run(_response(spool))


async def _response(spool: Path) -> None:
    async with serving(spool) as server:
        subscriber = await client(server)
        await subscriber.subscribe("a")
        await server.broker.publish("a", b"1", headers={"mqtt.response_topic": "b/#"})
        properties = (await subscriber.message()).properties
        assert "ResponseTopic" not in properties
        assert properties["UserProperty"] == [("mqtt.response_topic", "b/#")]
        await server.broker.publish("a", b"1", headers={"mqtt.response_topic": "b"})
        assert (await subscriber.message()).properties["ResponseTopic"] == "b"
