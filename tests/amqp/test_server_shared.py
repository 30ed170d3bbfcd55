"""A server in the process of its test: a program beside it uses the same queues, and what is hard to meet from outside."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aio_pika
import pytest

import qflow
import qflow.aio
import qflow.amqp
from amqp_client import Basic, Channels, Connections, method
from amqp_clients import PATIENCE_S
from amqp_raw import Queue, Raw
from doors.event_loop import until
from qflow.aio.broker import AsyncBroker
from qflow.aio.delivery import AsyncDelivery
from qflow.amqp.server import server as server_module
from qflow.amqp.server import session as session_module
from qflow.amqp.server.consuming import BUFFER_BYTES
from qflow.amqp.server.server import Server
from qflow.amqp.server.session import Session
from qflow.amqp.server.stores import QueueStore
from qflow.serving.sockets import on_its_way

T = TypeVar("T")


@asynccontextmanager
async def served(spool: Path) -> AsyncIterator[tuple[AsyncBroker, Server]]:
    async with qflow.aio.open(spool) as broker, await qflow.amqp.serve(broker, port=0) as server:
        yield broker, server


def run(test: Callable[[AsyncBroker, Server], Awaitable[None]], spool: Path) -> None:
    """Run a test with a broker and a server on it."""

    async def with_server() -> None:
        async with served(spool) as (broker, server):
            await asyncio.wait_for(test(broker, server), 3 * PATIENCE_S)

    asyncio.run(with_server())


async def elsewhere(work: Callable[..., T], *arguments: Any) -> T:
    """Do what blocks in a thread."""
    return await asyncio.to_thread(work, *arguments)


def test_a_program_and_clients_share_a_queue(spool: Path) -> None:
    """What one puts the other gets, with its headers; each of them sees a message once."""

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        queue = await broker.declare_queue("shared")
        connection = await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{server.port}/")
        async with connection:
            channel = await connection.channel()
            await channel.set_qos(20)
            client_queue = await channel.get_queue("shared")
            await queue.put(b"of the program", headers={"colour": "red", "number": 7})
            message = await client_queue.get()
            assert (message.body, message.headers, message.exchange) == (
                b"of the program",
                {"colour": "red", "number": 7},
                "",
            )
            assert message.routing_key == "shared"
            await message.ack()
            await channel.default_exchange.publish(aio_pika.Message(b"of a client"), "shared")
            delivery = await queue.get()
            assert delivery.body == b"of a client"
            await delivery.ack()
            await both_consume(queue, channel, client_queue)

    run(scenario, spool)


async def both_consume(queue: Any, channel: Any, client_queue: Any) -> None:
    """Have both put and get, with nacks in between."""
    number, seen = 300, dict.fromkeys(("program", "client"), 0)
    bodies: list[bytes] = []
    done = asyncio.Event()

    def took(who: str, body: bytes) -> None:
        seen[who] += 1
        bodies.append(body)
        if len(bodies) == 2 * number:
            done.set()

    async def by_client(message: Any) -> None:
        if not message.redelivered and message.body.endswith(b"5"):
            await message.nack()
        else:
            took("client", message.body)
            await message.ack()

    async def by_program() -> None:
        while True:
            delivery = await queue.get()
            if not delivery.redelivered and delivery.body.endswith(b"7"):
                await delivery.nack()
            else:
                took("program", delivery.body)
                await delivery.ack()
            await asyncio.sleep(0)

    await client_queue.consume(by_client)
    program = asyncio.create_task(by_program())
    for start in range(0, number, 50):
        for one in range(start, start + 50):
            await queue.put(b"p%d" % one)
        puts = (
            channel.default_exchange.publish(aio_pika.Message(b"c%d" % one), "shared")
            for one in range(start, start + 50)
        )
        await asyncio.gather(*puts)
    await done.wait()
    program.cancel()
    await asyncio.wait([program])
    assert sorted(bodies) == sorted([b"p%d" % one for one in range(number)] + [b"c%d" % one for one in range(number)])
    assert all(seen.values()), seen


def test_a_queue_that_a_program_deletes_ends_its_consumers(spool: Path) -> None:
    """The client is told by `basic.cancel`; what it holds needs no ack any more."""

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        queue = await broker.declare_queue("shared")
        await queue.put(b"one")
        with await elsewhere(Raw(server.port).open) as raw:
            await elsewhere(raw.consume, "shared")
            assert (await elsewhere(raw.delivered))[1] == b"one"
            await broker.delete_queue("shared")
            await elsewhere(raw.until, Basic.Cancel)
            raw.send(method(1, Basic.Ack(1)))
            assert await elsewhere(raw.ask, Queue.Declare(0, "shared"), Queue.DeclareOk)

    run(scenario, spool)


def test_a_queue_that_a_program_has_deleted_is_bound_to_nothing(spool: Path) -> None:
    """Messages to the exchange would vanish without a word."""

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        with await elsewhere(Raw(server.port).open) as raw:
            await elsewhere(raw.declare, "shared")
            await broker.delete_queue("shared")
            raw.send(method(1, Queue.Bind(0, "shared", "amq.fanout", "")))
            assert (await elsewhere(raw.until, Channels.Close)).reply_code == 404

    run(scenario, spool)


def test_a_blocking_broker_is_served_as_well(spool: Path) -> None:
    """A program of threads puts and gets while the loop of the server runs in another."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("shared")
        ports: list[int] = []
        started, stop = threading.Event(), threading.Event()

        async def serve() -> None:
            async with await qflow.amqp.serve(broker, port=0) as server:
                ports.append(server.port)
                started.set()
                await asyncio.to_thread(stop.wait)

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        try:
            assert started.wait(PATIENCE_S)
            with Raw(ports[0]).open() as raw:
                raw.consume("shared", prefetch=10)
                for number in range(50):
                    queue.put(b"%d" % number)
                for number in range(50):
                    deliver, body = raw.delivered()
                    assert body == b"%d" % number
                    raw.send(method(1, Basic.Ack(deliver.delivery_tag)))
            with Raw(ports[0]).open() as raw:
                raw.confirmed("shared", b"back")
                assert queue.get(PATIENCE_S).body == b"back"
        finally:
            stop.set()
            thread.join(PATIENCE_S)


def test_a_server_that_ends_confirms_what_waits_for_room(spool: Path) -> None:
    """The grace is also for publishers that have unconfirmed messages."""

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        queue = await broker.declare_queue("full", limit_messages=1, on_overflow="block")
        with await elsewhere(Raw(server.port).open) as raw:
            await elsewhere(raw.confirmed, "full", b"1")
            raw.publish("full", b"2")
            await elsewhere(raw.until, Connections.Blocked)
            draining = asyncio.create_task(server.drain(PATIENCE_S))
            while server.sockets:
                await asyncio.sleep(0)
            await (await queue.get()).ack()
            assert isinstance(await elsewhere(raw.until, Basic.Ack, Connections.Close), Basic.Ack)
            assert (await elsewhere(raw.until, Connections.Close)).reply_code == 320
            raw.send(method(0, Connections.CloseOk()))
            await draining
        assert (await queue.get()).body == b"2"

    run(scenario, spool)


def test_a_queue_that_cannot_be_deleted_holds_up_no_heartbeat(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody has used for long, on a disk that is full; it is deleted when there is space."""
    failures = 2
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    delete = AsyncBroker.delete_queue

    async def fails(self: AsyncBroker, name: str, *arguments: Any, **settings: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise qflow.DiskFull("no space")
        await delete(self, name, *arguments, **settings)

    monkeypatch.setattr(AsyncBroker, "delete_queue", fails)

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        with await elsewhere(Raw(server.port).open) as raw, Raw(server.port) as beating:
            await elsewhere(lambda: beating.open(heartbeat_s=1))
            await elsewhere(lambda: raw.declare("unused", x_expires=1))
            while failures or "unused" in broker.queues():
                assert await elsewhere(beating.socket.recv, 100), "heartbeats end"
                beating.send(b"\x08\x00\x00\x00\x00\x00\x00\xce")

    run(scenario, spool)


@pytest.mark.parametrize(("heartbeat_s", "silence_s"), [(2, 0.001), (10, 4.001), (60, 29.001)])
def test_a_heartbeat_is_not_late_by_a_tick(
    heartbeat_s: int, silence_s: float, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look would be after half of the interval; some clients give up after a whole one."""
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        with Raw(server.port) as client:
            await elsewhere(lambda: client.open(heartbeat_s=heartbeat_s))
            (session,) = server._sessions
            before = session.written_s
            session.tick(before + silence_s - 0.002)
            assert session.written_s == before, "it is early"
            session.tick(before + silence_s)
            assert await elsewhere(client.socket.recv, 100) == b"\x08\x00\x00\x00\x00\x00\x00\xce"

    run(scenario, spool)


def test_a_client_on_a_slow_network_is_not_silent(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats are not read while it is behind with what it has asked for; one that takes nothing is ended."""
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        await (await broker.declare_queue("large")).put(bytes(16 * 1024**2))
        with Raw(server.port, receive_bytes=4096) as slow:
            await elsewhere(lambda: slow.open(heartbeat_s=60))
            slow.send(method(1, Basic.Get(0, "large", True)))
            (session,) = server._sessions
            transport = session._writer.transport

            def unsent() -> int:
                return transport.get_write_buffer_size() + on_its_way(transport.get_extra_info("socket"))

            await until(lambda: unsent() > 4 * BUFFER_BYTES and not session.is_handling)
            now_s = session.read_s
            for _ in range(5):
                now_s += 100
                before = unsent()
                while unsent() >= before:
                    await elsewhere(slow.socket.recv, 65_536)
                session.tick(now_s)
                assert not transport.is_closing(), "it takes what it is sent"
            session.tick(now_s + 60)
            assert not transport.is_closing()
            session.tick(now_s + 121)
            assert transport.is_closing(), "nothing was taken in two heartbeats"

    run(scenario, spool)


def test_a_client_that_does_not_confirm_its_end_is_cut_off(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds, here at once; also without heartbeats."""
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    monkeypatch.setattr(session_module, "LINGER_S", 0.0)

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        with await elsewhere(Raw(server.port).open) as bad:
            bad.send(method(7, Basic.Qos(0, 1, False)))
            assert (await elsewhere(bad.until, Connections.Close)).reply_code == 504
            assert await elsewhere(bad.rest) == b""

    run(scenario, spool)


@pytest.mark.parametrize(
    "last",
    [
        method(1, Basic.Nack(0, True, True)),
        method(1, Basic.Recover(True)),
        method(1, Channels.Close(200, "", 0, 0)),
        method(1, Basic.Ack(99)),
        method(0, Connections.Close(200, "", 0, 0)),
        method(7, Basic.Ack(1)),
    ],
    ids=["nack", "recover", "close of the channel", "failure of the channel", "close", "failure"],
)
def test_what_goes_back_goes_back_to_the_last_one(last: bytes, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the connection is cut off in the middle of it."""
    begun, gate = asyncio.Event(), asyncio.Event()

    def slowed(call: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def slow(*arguments: Any) -> None:
            begun.set()
            await gate.wait()
            await call(*arguments)

        return slow

    monkeypatch.setattr(AsyncDelivery, "nack", slowed(AsyncDelivery.nack))
    monkeypatch.setattr(QueueStore, "give_back", slowed(QueueStore.give_back))

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        queue = await broker.declare_queue("shared")
        await queue.put_many([b"1", b"2", b"3"])
        with await elsewhere(Raw(server.port).open) as raw:
            await elsewhere(raw.consume, "shared")
            for _ in range(3):
                await elsewhere(raw.delivered)
            raw.send(last)
            await begun.wait()
            closing = asyncio.create_task(server.close())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gate.set()
            await closing
        assert (await queue.get_many(3, 0)).bodies == [b"1", b"2", b"3"]

    run(scenario, spool)


def test_a_write_buffer_that_is_just_full_is_waited_for_or_written_to(spool: Path) -> None:
    """Never both full and not waited for: a consumer would go round for ever, and the loop of all with it."""

    async def scenario(broker: AsyncBroker, server: Server) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            session = Session(server, 1, reader, writer)
            while not (size := writer.transport.get_write_buffer_size()):
                writer.write(bytes(BUFFER_BYTES // 4))
            writer.write(bytes(BUFFER_BYTES - size))
            assert writer.transport.get_write_buffer_size() == BUFFER_BYTES
            drains = asyncio.create_task(session.drain())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert drains.done() != session.is_full
            drains.cancel()
            await asyncio.wait([drains])
            writer.transport.abort()

    run(scenario, spool)
