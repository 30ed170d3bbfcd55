"""Dead letters on their way: many in one commit, in order, and none held up by one whose target blocks."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from pamqp import body, commands, header

import qflow.aio
from amqp_loop import Basic, Queue, Raw, connected, serving
from doors.event_loop import plain, run, turns, until
from qflow import upkeep
from qflow.aio import AsyncQueue
from qflow.amqp import Server, serve
from qflow.amqp.server import dead_letters
from qflow.amqp.server.host import _HOSTS
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.server.stores import QueueStore
from qflow.storage.log.confirming import Confirming

NUMBER = 100
QUEUES = 30
HELD_UP = "amqp:dead-letters/blocks"


async def declare(client: Raw, name: str, **arguments: Any) -> None:
    named = {"x-" + word.replace("_", "-"): value for word, value in arguments.items()}
    await client.ask(Queue.Declare(0, name, durable=True, arguments=named), Queue.DeclareOk)


async def held(client: Raw, name: str, number: int) -> None:
    """Publish to a queue, and hold what comes of it."""
    await client.ask(Basic.Consume(0, name, name), Basic.ConsumeOk)
    for index in range(number):
        client.publish(name, b"%d" % index)
    for _ in range(number):
        await client.expect(Basic.Deliver)


async def bodies(queue: AsyncQueue, number: int) -> list[bytes]:
    """Take and ack so many messages of a queue, waiting for them."""
    found: list[bytes] = []
    while len(found) < number:
        batch = await queue.get_many(number - len(found))
        found += batch.bodies
        await batch.ack()
    return found


def numbers(*indices: int) -> list[bytes]:
    return [b"%d" % index for index in indices]


async def commits(server: Server) -> int:
    return (await server.broker.stats()).commits_total


def test_what_goes_to_many_queues_is_bounded_in_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that went to a thousand queues each took hundreds of megabytes before they were committed."""
    puts: dict[int, int] = {}
    transactions: list[object] = []
    put_in = QueueStore.put_in

    async def noted(self: QueueStore, transaction: Any, parcel: Parcel) -> None:
        if transaction not in transactions:
            transactions.append(transaction)
        number = transactions.index(transaction)
        puts[number] = puts.get(number, 0) + 1
        await put_in(self, transaction, parcel)

    monkeypatch.setattr(dead_letters, "PUTS_AT_ONCE", 4 * QUEUES, raising=False)
    monkeypatch.setattr(QueueStore, "put_in", noted)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            for index in range(QUEUES):
                await declare(client, f"dead{index}")
                await client.ask(Queue.Bind(0, f"dead{index}", "amq.fanout"), Queue.BindOk)
            await declare(client, "q", dead_letter_exchange="amq.fanout")
            await held(client, "q", NUMBER)
            client.send(Basic.Nack(0, True, False))
            for index in range(QUEUES):
                assert await bodies(server.broker.queue(f"dead{index}"), NUMBER) == numbers(*range(NUMBER))
            assert sum(puts.values()) == NUMBER * QUEUES
            assert max(puts.values()) <= 4 * QUEUES

    run(scenario())


def test_what_is_rejected_together_goes_together(tmp_path: Path) -> None:
    """In order; in a commit that takes it out of its queue, and one that brings it where it goes, not in one each."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declare(client, "dead")
            await declare(client, "q", dead_letter_exchange="", dead_letter_routing_key="dead")
            await held(client, "q", NUMBER)
            before = await commits(server)
            client.send(Basic.Nack(0, True, False))
            assert await bodies(server.broker.queue("dead"), NUMBER) == numbers(*range(NUMBER))
            assert await commits(server) - before < NUMBER / 2
            assert len(server.broker.queue("q")) == 0

    run(scenario())


def test_a_target_that_is_full_counts_what_comes_with_a_message(tmp_path: Path) -> None:
    """It gets no more than it may have; what it refuses is dropped, as there is no other."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declare(client, "dead", max_length=3, overflow="reject-publish")
            await declare(client, "last")
            await declare(client, "q", dead_letter_exchange="", dead_letter_routing_key="dead")
            await declare(client, "other", dead_letter_exchange="", dead_letter_routing_key="last")
            await held(client, "q", 10)
            await held(client, "other", 1)
            client.send(Basic.Nack(0, True, False))
            assert await bodies(server.broker.queue("last"), 1) == [b"0"]
            assert await bodies(server.broker.queue("dead"), 3) == numbers(0, 1, 2)
            assert len(server.broker.queue("dead")) == len(server.broker.queue("amqp:dead-letters")) == 0

    run(scenario())


async def with_one_that_blocks(server: Server) -> Raw:
    """Have dead letters of a queue go to one that blocks and to another, and those of a second queue there alone."""
    await server.broker.declare_queue("blocks", limit_messages=1, on_overflow="block")
    client = await connected(server)
    await client.ask(commands.Exchange.Declare(0, "both", "fanout", durable=True), commands.Exchange.DeclareOk)
    await declare(client, "goes on")
    for name in ("blocks", "goes on"):
        await client.ask(Queue.Bind(0, name, "both", ""), Queue.BindOk)
    await declare(client, "q", dead_letter_exchange="both")
    await declare(client, "other", dead_letter_exchange="", dead_letter_routing_key="goes on")
    return client


def test_a_target_that_blocks_holds_up_no_other(tmp_path: Path) -> None:
    """Those for it wait apart, in order; also after a restart."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await with_one_that_blocks(server)
            await held(client, "q", 5)
            client.send(Basic.Nack(0, True, False))
            assert await bodies(server.broker.queue("goes on"), 5) == numbers(*range(5))
            await held(client, "other", 2)
            client.send(Basic.Nack(0, True, False))
            assert await bodies(server.broker.queue("goes on"), 2) == numbers(0, 1)
            assert await bodies(server.broker.queue("blocks"), 2) == numbers(0, 1)
            await until(lambda: len(server.broker.queue("blocks")) == 1)
        async with serving(tmp_path / "spool") as server:
            assert await bodies(server.broker.queue("blocks"), 3) == numbers(2, 3, 4)
            assert len(server.broker.queue("amqp:dead-letters")) == 0
            assert len(server.broker.queue("amqp:dead-letters/blocks")) == 0
        async with serving(tmp_path / "spool") as server:
            await until(lambda: "amqp:dead-letters/blocks" not in server.broker.queues())

    run(scenario())


def test_a_dead_letter_that_is_too_much_for_a_transaction_holds_up_no_other(tmp_path: Path) -> None:
    """It stays where it is, with the broker's limit on one commit; nothing is lost."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", max_transaction_bytes="64KiB") as server:
            client = await connected(server)
            await client.ask(commands.Exchange.Declare(0, "both", "fanout", durable=True), commands.Exchange.DeclareOk)
            for name in ("one", "two"):
                await declare(client, name)
                await client.ask(Queue.Bind(0, name, "both", ""), Queue.BindOk)
            await declare(client, "q", dead_letter_exchange="both")
            await client.ask(Basic.Consume(0, "q", "tag"), Basic.ConsumeOk)
            client.publish("q", bytes(40_000))
            client.publish("q", b"small")
            for _ in range(2):
                await client.expect(Basic.Deliver)
            client.send(Basic.Nack(0, True, False))
            assert await bodies(server.broker.queue("one"), 1) == [b"small"]
            assert len(server.broker.queue("amqp:dead-letters")) == 1

    run(scenario())


def test_those_that_wait_for_a_target_that_is_deleted_are_dropped(tmp_path: Path) -> None:
    """As in any queue that is not there; when it is made again, it gets those that follow."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await with_one_that_blocks(server)
            await held(client, "q", 3)
            client.send(Basic.Nack(0, True, False))
            await bodies(server.broker.queue("goes on"), 3)
            waiting = server.broker.queue("amqp:dead-letters/blocks")
            await server.broker.delete_queue("blocks")
            await until(lambda: len(waiting) == 0)
            await server.broker.declare_queue("blocks", limit_messages=1, on_overflow="block")
            await client.ask(Queue.Bind(0, "blocks", "both", ""), Queue.BindOk)
            client.publish("q", b"later")
            client.send(Basic.Nack((await client.expect(Basic.Deliver)).delivery_tag, False, False))
            assert await bodies(server.broker.queue("blocks"), 1) == [b"later"]

    run(scenario())


# What expires ----------------------------------------------------------------------------------------------------------

TTL_MS = 20


@pytest.fixture
def no_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would look once a second for what has expired does not in this test."""
    monkeypatch.setattr(upkeep, "MAINTENANCE_S", 3600.0)


def expiring(client: Raw, queue: str, content: bytes) -> None:
    """Publish a message with a time to live of its own."""
    client.send(
        Basic.Publish(0, "", queue),
        header.ContentHeader(0, len(content), Basic.Properties(delivery_mode=2, expiration=str(TTL_MS))),
        body.ContentBody(content),
    )


@pytest.mark.usefixtures("no_maintenance")
def test_what_expires_is_a_dead_letter_when_it_does(tmp_path: Path) -> None:
    """By the time of its queue, its own, in a transaction, and as a dead letter that is to come back by and by."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server, channels=2)
            dead = await server.broker.declare_queue("dead")
            to_dead = {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}
            await declare(client, "by the queue", message_ttl=TTL_MS, **to_dead)
            await declare(client, "by itself", **to_dead)
            await declare(client, "retried", dead_letter_exchange="", dead_letter_routing_key="by the queue")
            for index in range(3):
                client.publish("by the queue", b"%d" % index)
            assert await bodies(dead, 3) == numbers(0, 1, 2)
            expiring(client, "by itself", b"own")
            assert await bodies(dead, 1) == [b"own"]
            await client.ask(commands.Tx.Select(), commands.Tx.SelectOk, 2)
            client.publish("by the queue", b"committed", channel=2)
            await client.ask(commands.Tx.Commit(), commands.Tx.CommitOk, 2)
            assert await bodies(dead, 1) == [b"committed"]
            await held(client, "retried", 1)
            client.send(Basic.Nack(0, True, False))
            assert await bodies(dead, 1) == [b"0"]

    run(scenario())


@pytest.mark.usefixtures("no_maintenance")
def test_what_expired_meanwhile_is_a_dead_letter_when_it_can_be(tmp_path: Path) -> None:
    """While a client held it, and while no server ran; and those behind it when their time comes."""

    async def scenario() -> None:
        arguments = {"message_ttl": 10 * TTL_MS, "dead_letter_exchange": "", "dead_letter_routing_key": "dead"}
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            dead = await server.broker.declare_queue("dead")
            await declare(client, "q", **arguments)
            await held(client, "q", 2)
            await client.ask(Basic.Cancel("q"), Basic.CancelOk)
            client.publish("q", b"while they are held")
            assert await bodies(dead, 1) == [b"while they are held"]
            client.send(Basic.Nack(0, True, True))
            assert await bodies(dead, 2) == numbers(0, 1)
        async with qflow.aio.open(tmp_path / "spool") as broker:
            await broker.queue("q").put(b"by nobody")
        async with serving(tmp_path / "spool") as server:
            assert await bodies(server.broker.queue("dead"), 1) == [b"by nobody"]

    run(scenario())


def test_a_dead_letter_that_its_blocking_target_never_takes_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow.amqp.server.held_up.AGAIN_S", 0.01)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            blocks = await server.broker.declare_queue(
                "blocks", limit_messages=1, on_overflow="block", max_message_bytes=1000
            )
            client = await connected(server)
            await declare(client, "q", dead_letter_exchange="", dead_letter_routing_key="blocks")
            await client.ask(Basic.Consume(0, "q", "q"), Basic.ConsumeOk)
            for content in (b"first", bytes(2000), b"last"):
                client.publish("q", content)
                await client.expect(Basic.Deliver)
            client.send(Basic.Nack(0, True, False))
            async with asyncio.timeout(60):
                assert await bodies(blocks, 2) == [b"first", b"last"]

    run(scenario())


def test_a_server_ends_while_a_dead_letter_waits_for_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What carries it is cancelled in the commit, which is done all the same."""

    may_go, waits = threading.Event(), threading.Event()
    confirm = Confirming.confirm

    def wait(confirming: Confirming, txn: Any) -> None:
        waits.set()
        assert may_go.wait(60)
        confirm(confirming, txn)

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker, asyncio.timeout(60):
            server = await serve(broker, port=0)
            client = await with_one_that_blocks(server)
            await held(client, "q", 2)
            client.send(Basic.Nack(0, True, False))
            await until(lambda: HELD_UP in broker.queues() and len(broker.queue(HELD_UP)) == 1)
            monkeypatch.setattr(Confirming, "confirm", wait)
            try:
                batch = await broker.queue("blocks").get_many(1)
                broker.queue("blocks").queue.ack_many(batch.deliveries)
                await until(waits.is_set)
                await turns(20)
                ends = asyncio.ensure_future(_HOSTS[broker.broker].leave())
                await turns(20)
            finally:
                may_go.set()
            await ends
            client.kill()
            await server.close()

    run(scenario())


def test_a_queue_that_is_deleted_leaves_no_timer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            loop: Any = asyncio.get_running_loop()
            await declare(client, "q", dead_letter_exchange="", message_ttl=86_400_000)
            client.publish("q", b"lives for a day")
            await until(lambda: len(server.broker.queue("q")) == 1)
            await client.ask(Queue.Delete(0, "q"), Queue.DeleteOk)
            waiting = [one for one in loop._scheduled if not one.cancelled() and one.when() > loop.time() + 3600]
            assert waiting == []

    run(scenario())


def test_a_target_that_never_takes_a_dead_letter_leaves_it_to_the_others(tmp_path: Path) -> None:
    """Its body is not too large for that one, but is with its headers."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            await server.broker.declare_queue("small", max_message_bytes=1000)
            client = await connected(server)
            await client.ask(commands.Exchange.Declare(0, "all", "fanout", durable=True), commands.Exchange.DeclareOk)
            for name in ("a", "z"):
                await declare(client, name)
            for name in ("a", "small", "z"):
                await client.ask(Queue.Bind(0, name, "all", ""), Queue.BindOk)
            await declare(client, "q", dead_letter_exchange="all")
            await client.ask(Basic.Consume(0, "q", "q"), Basic.ConsumeOk)
            client.publish("q", bytes(990))
            await client.expect(Basic.Deliver)
            client.send(Basic.Nack(0, True, False))
            await until(lambda: len(server.broker.queue("q")) == len(server.broker.queue("amqp:dead-letters")) == 0)
            assert [len(server.broker.queue(name)) for name in ("a", "small", "z")] == [1, 0, 1]

    run(scenario())


def test_dead_letters_wait_anew_where_their_queue_was_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await with_one_that_blocks(server)
            await held(client, "q", 2)
            client.send(Basic.Nack(0, True, False))
            await until(lambda: plain(server.broker, "blocks").stats().blocked_putters == 1)  # it left its queue
            await server.broker.delete_queue(HELD_UP)
            client.publish("q", b"2")
            await client.expect(Basic.Deliver)
            client.send(Basic.Nack(0, True, False))
            await until(lambda: len(server.broker.queue("goes on")) == 3)  # in the same commit
            async with asyncio.timeout(60):
                assert await bodies(server.broker.queue("blocks"), 3) == numbers(0, 1, 2)

    run(scenario())
