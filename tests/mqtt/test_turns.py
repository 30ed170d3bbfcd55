"""Turns of a server with thousands of clients: what happens to all of them at once lets others in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from amqp_loop import turns_noted
from mqtt_loop import PUBACK, client, serving, slept
from qflow.mqtt.server import hub
from qflow.mqtt.server.client import Client
from qflow.mqtt.server.inbound import Inbound
from qflow.mqtt.server.session import Session
from qflow.serving import tasks

CLIENTS = 8


def test_sessions_whose_clients_go_at_once_go_to_sleep_a_few_in_a_turn(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that was cut, with wills of 3,000 clients, held up the others for 0.8 s."""
    monkeypatch.setattr(hub, "MOST_LEAVING", 2)

    async def scenario() -> None:
        async with serving(spool) as server:
            watching = await client(server, "watching")
            await watching.subscribe("will/#")
            will = {"topic": "will/x", "payload": b"gone", "qos": 1}
            going = [await client(server, f"{number}", will=will) for number in range(CLIENTS)]
            async with turns_noted(Session, "_leave_all") as left:
                for one in going:
                    one.writer.transport.abort()
                assert await watching.messages(CLIENTS) == CLIENTS * [b"gone"]
                await slept(server, 1)
            assert len(left) == CLIENTS
            assert max(map(left.count, left)) <= 2

    asyncio.run(scenario())


def test_what_one_client_sends_lets_others_in_between(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand messages that are retained came in one read, and took 80 ms."""
    monkeypatch.setattr(tasks, "TURN_S", 0.0)

    async def scenario() -> None:
        async with serving(spool) as server:
            async with turns_noted(Inbound, "publish") as published:
                sender = await client(server)
                for number in range(CLIENTS):
                    sender.publish(f"a/{number}", b"x", qos=1, packet_id=number + 1, retain=True)
                for _ in range(CLIENTS):
                    await sender.expect(PUBACK)
            assert len(set(published)) == len(published) == CLIENTS

    asyncio.run(scenario())


def test_a_message_for_thousands_is_written_to_some_in_a_turn(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were written to at once, some 15 µs each."""
    monkeypatch.setattr(tasks, "TURN_S", 0.0)

    async def scenario() -> None:
        async with serving(spool) as server:
            subscribed = [await client(server) for _ in range(CLIENTS)]
            for one in subscribed:
                await one.subscribe("a", qos=0)
            sender = await client(server)
            async with turns_noted(Client, "flush") as flushed:
                sender.publish("a", b"x")
                for one in subscribed:
                    assert await one.messages(1) == [b"x"]
            assert len(flushed) >= CLIENTS
            assert len(set(flushed)) == len(flushed)

    asyncio.run(scenario())
