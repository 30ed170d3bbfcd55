"""What clients are told when a server ends, and when the broker beneath it is closed, or has failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pamqp import commands

from amqp_clients import unique
from amqp_loop import Channels, Connections, Raw, connected, serving
from doors.event_loop import run, until
from qflow.amqp import Server
from qflow.amqp.errors import AmqpError
from qflow.amqp.server import host
from qflow.amqp.server import server as server_module
from qflow.amqp.server.session import Session

Basic, Confirm, Queue = commands.Basic, commands.Confirm, commands.Queue


@pytest.mark.parametrize("mandatory", [False, True])
def test_nothing_is_confirmed_once_the_program_has_closed_the_broker(tmp_path: Path, mandatory: bool) -> None:
    """The queue is there, and nobody can put into it: 320, not an ack for a message that nobody has."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            name = unique()
            await client.ask(Queue.Declare(0, name, durable=True), Queue.DeclareOk)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            client.publish(name)
            await client.expect(Basic.Ack)
            await server.broker.close()
            client.publish(name, mandatory=mandatory)
            while True:
                _, value = await client.next()
                assert not isinstance(value, Basic.Ack)
                if isinstance(value, commands.Connection.Close):
                    assert value.reply_code == 320
                    return

    run(scenario())


def test_unused_queues_are_not_looked_for_in_a_closed_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was left open said each second that they could not be deleted."""
    monkeypatch.setattr(host, "LOOK_S", 0.01)

    def looks() -> bool:
        return any(task.get_coro().__qualname__ == "Hosts._tick" for task in asyncio.all_tasks())  # type: ignore[union-attr]

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            declared = Queue.Declare(0, unique(), arguments={"x-expires": 600_000})
            await client.ask(declared, Queue.DeclareOk)
            assert looks()
            await server.broker.close()
            await until(lambda: "unused queues" in caplog.text or not looks())

    run(scenario())
    assert "unused queues" not in caplog.text


def test_a_close_that_is_cancelled_has_closed_the_connections(tmp_path: Path) -> None:
    """However far it is: closing again does nothing, so nobody else would."""

    async def scenario() -> None:
        for turns in range(1, 6):
            async with serving(tmp_path / f"spool {turns}") as server:
                await connected(server)
                closing = asyncio.create_task(server.close())
                for _ in range(turns):
                    await asyncio.sleep(0)
                closing.cancel()
                await asyncio.wait([closing])
                await until(lambda: not server.connections)
                assert not server.sockets

    run(scenario())


async def draining_beside_a_holder(server: Server) -> tuple[Raw, Raw, int, asyncio.Task[None]]:
    """Have a server end while one of two clients holds a message, which has this tag, and another is left."""
    holder, idle = await connected(server), await connected(server)
    tag = (await got(holder)).delivery_tag
    await server.broker.queue("q").put(b"left")
    draining = asyncio.create_task(server.drain(600))
    await until(lambda: not server.sockets)
    return holder, idle, tag, draining


def test_clients_stay_while_one_of_them_holds_a_message(tmp_path: Path) -> None:
    """Those of a worker end together: one that is told would drop the others, and the task that they brought."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            holder, idle, tag, draining = await draining_beside_a_holder(server)
            await idle.ask(Confirm.Select(), Confirm.SelectOk)
            idle.publish("q")
            await idle.expect(Basic.Ack)
            holder.send(Basic.Ack(tag))
            for client in holder, idle:
                await closed(client)
            await draining
            assert len(server.broker.queue("q")) == 2

    run(scenario())


def test_clients_that_stay_are_sent_no_messages(tmp_path: Path) -> None:
    """Whatever they ask for: they would hold the end up."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            holder, idle, tag, draining = await draining_beside_a_holder(server)
            for number in 1, 2:
                if number == 2:
                    await idle.open_channel(number)
                await idle.ask(Channels.Flow(True), Channels.FlowOk, number)
                await idle.ask(Basic.Consume(0, "q", f"c{number}"), Basic.ConsumeOk, number)
                await idle.ask(Basic.Get(0, "q"), Basic.GetEmpty, number)
            holder.send(Basic.Ack(tag))
            found = (await idle.next())[1]
            assert isinstance(found, Connections.Close)
            idle.send(Connections.CloseOk(), channel=0)
            await closed(holder)
            await draining

    run(scenario())


def test_who_has_not_logged_in_is_no_client_of_a_server_that_ends(tmp_path: Path) -> None:
    """Nor can anybody log in any more, whoever is waited for."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            holder = await connected(server)
            tag = (await got(holder)).delivery_tag
            stranger = Raw(*await asyncio.open_connection("127.0.0.1", server.port))
            await until(lambda: server.connections == 2)
            draining = asyncio.create_task(server.drain(600))
            with pytest.raises(EOFError):
                await stranger.expect(Connections.Close)
            stranger.kill()
            holder.send(Basic.Ack(tag))
            await closed(holder)
            await draining

    run(scenario())


def test_clients_are_told_once_that_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes its time to answer is not told again and again."""
    told: list[Session] = []
    fail = Session.end

    def end(self: Session, error: AmqpError) -> None:
        told.append(self)
        fail(self, error)

    monkeypatch.setattr(Session, "end", end)
    monkeypatch.setattr(server_module, "DRAINING_S", 0)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            draining = asyncio.create_task(server.drain(600))
            await client.expect(Connections.Close)
            for _ in range(100):
                await asyncio.sleep(0)
            client.send(Connections.CloseOk(), channel=0)
            await draining
            assert len(told) == 1

    run(scenario())


async def got(client: Raw) -> Basic.GetOk:
    """Have a client hold the only message of a queue."""
    await client.ask(Queue.Declare(0, "q", durable=True), Queue.DeclareOk)
    client.publish("q")
    return await client.ask(Basic.Get(0, "q"), Basic.GetOk)


async def closed(client: Raw) -> None:
    """See that a client is told to close, and do so."""
    assert (await client.expect(Connections.Close)).reply_code == 320
    client.send(Connections.CloseOk(), channel=0)


@pytest.mark.parametrize("how", ["kill", "close", "nack", "recover"])
def test_what_goes_back_together_lets_others_have_their_turn(tmp_path: Path, how: str) -> None:
    """Much that a client held, of several queues: other clients wait for a part of it at most."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            queues = [await server.broker.declare_queue(f"q{number}", durable=False) for number in range(3)]
            client = await connected(server)
            for queue in queues:
                await client.ask(Basic.Consume(0, queue.name), Basic.ConsumeOk)
            for queue in queues:
                await queue.put_many([b"x"] * 2000)
            for _ in range(6000):
                await client.expect(Basic.Deliver)
            client.send(Basic.Qos(0, 1, True))  # what has gone back does not come again at once
            await client.expect(Basic.QosOk)
            end(client)
            found = {6000}
            while min(found) > 3:
                found.add(sum(queue.queue.stats().acquired_messages for queue in queues))
                await asyncio.sleep(0)
            assert len(found) > 6

    def end(client: Raw) -> None:
        if how == "kill":
            client.kill()
        else:
            client.send(
                {"close": Channels.Close(0, "", 0, 0), "nack": Basic.Nack(0, True), "recover": Basic.Recover(True)}[how]
            )

    run(scenario())
