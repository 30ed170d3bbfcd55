"""A message that goes to many queues: what waits for room is bounded, and others have their turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pamqp import body, header
from pamqp.commands import Basic, Channel, Confirm, Connection, Queue

from amqp_loop import Raw, connected, serving, turns_noted
from doors.event_loop import run
from qflow.aio.queue import AsyncQueue
from qflow.amqp import Server
from qflow.amqp.errors import AmqpError
from qflow.amqp.server import publishing
from qflow.amqp.server.hosted import HostedQueue

MANY = 10 * publishing.FEW


async def full_queues(server: Server, client: Raw, *others: str) -> list[AsyncQueue[int]]:
    """Declare many queues that have as much as they may, and bind them to an exchange, and others behind them."""
    queues = []
    for index in range(MANY):
        queues.append(await server.broker.declare_queue(f"full {index}", limit_messages=1, on_overflow="block"))
        await queues[-1].put(b"first")
    for name in [*[queue.name for queue in queues], *others]:
        await client.ask(Queue.Bind(0, name, "amq.fanout"), Queue.BindOk)
    return queues


def publish(client: Raw, content: bytes) -> None:
    """Publish a message that queues do not share, as it is not to be kept."""
    said = header.ContentHeader(0, len(content), Basic.Properties(delivery_mode=1))
    client.send(Basic.Publish(0, "amq.fanout", ""), said, body.ContentBody(content))


async def one_left(queue: AsyncQueue[int]) -> bytes:
    async with await queue.get() as delivery:
        return delivery.body


def test_few_puts_of_a_message_wait_for_room(tmp_path: Path) -> None:
    """A task for each of thousands of queues, and each of a hundred publishers, took hundreds of megabytes."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            free = await server.broker.declare_queue("free")
            queues = await full_queues(server, client, "free")
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            before = len(asyncio.all_tasks())
            publish(client, b"second")
            await client.expect(Connection.Blocked)
            assert len(asyncio.all_tasks()) <= before + publishing.FEW + 1
            assert await one_left(free) == b"second"  # it does not wait for those that are full
            for expected in (b"first", b"second"):
                assert [await one_left(queue) for queue in queues] == MANY * [expected]
            assert (await client.expect(Basic.Ack)).delivery_tag == 1

    run(scenario())


def test_a_channel_that_ends_meanwhile_puts_nothing_more(tmp_path: Path) -> None:
    """Neither what waits for room, nor what is to follow it."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server, channels=2)
            queues = await full_queues(server, client)
            publish(client, b"second")
            await client.expect(Connection.Blocked)
            (session,) = server._sessions
            session.fail_channel(session.channels[1], AmqpError(406, "for the test"))
            await client.expect(Channel.Close)
            client.send(Channel.CloseOk())
            await client.ask(Queue.Declare(0, "full 0", True), Queue.DeclareOk, 2)
            assert [await one_left(queue) for queue in queues] == MANY * [b"first"]
            await client.ask(Queue.Declare(0, "full 0", True), Queue.DeclareOk, 2)
            assert [len(queue) for queue in queues] == MANY * [0]

    run(scenario())


def test_a_queue_behind_full_ones_that_never_takes_it_ends_the_channel(tmp_path: Path) -> None:
    """As one does that is found before any put waits."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await server.broker.declare_queue("small", limit_messages=9, on_overflow="block", max_message_bytes=1000)
            queues = await full_queues(server, client, "small")
            publish(client, bytes(2000))
            await client.expect(Connection.Blocked)
            assert [await one_left(queue) for queue in queues] == MANY * [b"first"]
            closed = await client.expect(Channel.Close)
            assert (closed.reply_code, closed.class_id, closed.method_id) == (406, *publishing.PUBLISH)

    run(scenario())


def test_others_have_their_turn_while_a_message_goes_to_many_queues(tmp_path: Path) -> None:
    """A login waited seconds while a hundred messages, that were read at once, went to a thousand queues each."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            for index in range(3 * publishing.TURN):
                await client.ask(Queue.Declare(0, f"q{index}"), Queue.DeclareOk)
                await client.ask(Queue.Bind(0, f"q{index}", "amq.fanout"), Queue.BindOk)
            async with turns_noted(HostedQueue, "submit") as puts:
                for _ in range(3):
                    publish(client, b"x")
                found = await client.ask(Queue.Declare(0, "q0", True), Queue.DeclareOk)
            assert found.message_count == 3
            assert len(puts) == 9 * publishing.TURN
            assert max(puts.count(turn) for turn in set(puts)) == publishing.TURN

    run(scenario())
