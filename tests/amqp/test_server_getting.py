"""`basic.get` of a queue whose messages are there, and have no room in memory: it is not told that there are none."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from amqp_loop import Basic, Channels, Queue, Raw, connected, serving
from doors.event_loop import run, until
from qflow.aio import AsyncDelivery, AsyncQueue
from qflow.amqp import Server
from qflow.amqp.server import stores
from qflow.errors import QueueEmpty
from qflow.queues.queue import parts_of

CAPACITY = 2**20
SIZE = 30_000
MESSAGES = 2 * CAPACITY // SIZE


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ROOM_S", 0.001)


async def filled(server: Server, client: Raw, name: str, **arguments: Any) -> None:
    """Have a queue with twice the messages that memory takes."""
    await client.ask(Queue.Declare(queue=name, durable=True, arguments=arguments), Queue.DeclareOk)
    await server.broker.queue(name).put_many([bytes(SIZE)] * MESSAGES)


async def all_that_fits(queue: AsyncQueue) -> list[AsyncDelivery]:
    """Return as many messages as there is room for."""
    held: list[AsyncDelivery] = []
    with suppress(QueueEmpty):
        while True:
            held.append(await queue.get(0))
    return held


async def got_until_refused(client: Raw, queue: str) -> tuple[list[int], Any]:
    """Get messages; return their tags, and the first other answer."""
    tags: list[int] = []
    while True:
        client.send(Basic.Get(0, queue))
        while not isinstance(answer := (await client.next())[1], Basic.GetOk | Basic.GetEmpty | Channels.Close):
            pass
        if not isinstance(answer, Basic.GetOk):
            return tags, answer
        tags.append(answer.delivery_tag)


def test_a_client_that_holds_all_there_is_room_for_is_told_so(tmp_path: Path) -> None:
    """What it holds goes back with its channel; so all comes that there is."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes=CAPACITY) as server:
            client = await connected(server, channels=2)
            await filled(server, client, "q")
            tags, refused = await got_until_refused(client, "q")
            assert len(tags) * SIZE > CAPACITY // 2
            assert (refused.reply_code, refused.method_id) == (506, 70)
            assert "ack, or raise --capacity" in refused.reply_text
            client.send(Channels.CloseOk())
            for _ in range(MESSAGES):
                tag = (await client.ask(Basic.Get(0, "q"), Basic.GetOk, 2)).delivery_tag
                client.send(Basic.Ack(tag), channel=2)
            await client.ask(Basic.Get(0, "q"), Basic.GetEmpty, 2)

    run(scenario())


def test_a_get_has_the_room_that_others_leave_by_their_acks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ROOM_S", 60.0)

    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes=CAPACITY) as server:
            holder, client = await connected(server), await connected(server)
            await filled(server, holder, "q")
            queue = server.broker.queue("q")
            held = await all_that_fits(queue)
            asked = asyncio.ensure_future(client.ask(Basic.Get(0, "q"), Basic.GetOk))
            await until(lambda: parts_of(queue.queue).gate.getters > 0)
            await held[0].ack()
            await asked

    run(scenario())


@pytest.mark.parametrize("kind", ["delayed", "expired", "held"])
def test_a_queue_without_a_message_for_now_is_empty_all_the_same(kind: str, tmp_path: Path) -> None:
    """Also while the memory is full."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes=CAPACITY) as server:
            holder, client = await connected(server), await connected(server)
            await filled(server, holder, "q")
            await client.ask(Queue.Declare(queue="other", durable=True), Queue.DeclareOk)
            other = server.broker.queue("other")
            options: dict[str, Any] = {"delayed": {"delay_s": 1000}, "expired": {"ttl_s": 0.001}}.get(kind, {})
            for _ in range(3):
                await other.put(b"x", **options)
            if kind == "held":
                assert len(await other.get_many(10, 0)) == 3
            elif kind == "expired":
                await until(lambda: not other.queue.stats().lag_messages)
            held = await all_that_fits(server.broker.queue("q"))
            assert len(held) < MESSAGES
            _, refused = await got_until_refused(client, "q")
            assert refused.reply_code == 506
            await holder.ask(Basic.Get(0, "other"), Basic.GetEmpty)

    run(scenario())


@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 5}, {"x-queue-type": "quorum"}], ids=str)
def test_a_queue_whose_last_message_was_handed_out_above_the_capacity_is_empty(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    """Another queue has all the memory."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes=CAPACITY) as server:
            client = await connected(server)
            await client.ask(Queue.Declare(queue="other", durable=True, arguments=arguments), Queue.DeclareOk)
            await filled(server, client, "q")
            assert await all_that_fits(server.broker.queue("q"))
            other = server.broker.queue("other")
            await other.put(bytes(2 * SIZE))
            await client.ask(Basic.Get(0, "other"), Basic.GetOk)
            assert parts_of(other.queue).gate.slack
            await client.ask(Basic.Get(0, "other"), Basic.GetEmpty)

    run(scenario())


def test_a_client_that_has_to_ack_itself_is_not_kept_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its acks lie behind the get."""
    monkeypatch.setattr(stores, "ROOM_S", 3600.0)

    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes=CAPACITY) as server:
            client = await connected(server)
            await filled(server, client, "q")
            _, refused = await got_until_refused(client, "q")
            assert refused.reply_code == 506

    run(scenario())
