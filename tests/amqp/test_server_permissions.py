"""What users may do who may not do everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pamqp import commands

import qflow.aio
from amqp_client import PROTOCOL_HEADER, method
from amqp_clients import serving
from amqp_loop import Basic, Channels, Connections, connected, ending_clients
from amqp_loop import Raw as Client
from amqp_raw import Queue, Raw
from doors.event_loop import until
from qflow.amqp import Server, serve
from qflow.amqp.server.consuming import Consumer
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Permission, User, Users


def test_a_queue_that_the_server_names_is_asked_for_as_amq_gen(tmp_path: Path) -> None:
    """Also where it has a dead-letter exchange, for which the queue has to be readable: 403 was for `amq.default`."""
    mine = "^(amq[.]gen-|mine$)"
    anna = Account(User("anna", frozenset(), {"/": Permission(mine, mine, mine)}), PasswordHash.of("secret", n=2))
    users = tmp_path / "users.json"
    users.write_text(Users(MappingProxyType({"anna": anna})).text())
    with (
        serving(tmp_path / "spool", "--users", str(users)) as (server, _),
        Raw(server.port).open(response="\0anna\0secret") as raw,
    ):
        arguments = {"x-dead-letter-exchange": "mine"}
        declare = Queue.Declare(exclusive=True, arguments=arguments)
        answer = raw.ask(declare, Queue.DeclareOk, commands.Channel.Close)
        assert isinstance(answer, Queue.DeclareOk), answer.reply_text
        assert answer.queue.startswith("amq.gen-")


@pytest.mark.parametrize("is_told", [True, False])
def test_consumers_end_of_queues_that_their_user_may_read_no_more(is_told: bool, tmp_path: Path) -> None:
    """When the rights are read again; the client is told if it wants to be, and others go on, also those beside it."""
    asyncio.run(_taken_away(is_told, tmp_path / "spool"))


async def _taken_away(is_told: bool, spool: Path) -> None:
    async with _serving(spool) as (broker, server):
        client = await connected(server, channels=2, consumer_cancel_notify=is_told)
        for channel, name in ((1, "mine"), (1, "secret"), (2, "secret too")):
            await client.ask(Queue.Declare(queue=name, durable=True), Queue.DeclareOk, channel)
            await client.ask(Basic.Consume(0, name, name), Basic.ConsumeOk, channel)
        client.publish("secret", b"before")
        held = (await client.expect(Basic.Deliver)).delivery_tag
        server.reload(users=guest("^mine"), ssl=None)
        host = await server.host("/")
        assert host is not None
        await until(lambda: not any(one.consumers for one in map(host.find, ("secret", "secret too")) if one))
        for name in ("secret", "secret too", "mine"):
            await broker.queue(name).put(b"after")
        got = []
        while not isinstance(frame := (await client.next())[1], Basic.Deliver):
            got += [frame.consumer_tag] if isinstance(frame, Basic.Cancel) else []
        assert (sorted(got), frame.consumer_tag) == (["secret", "secret too"] if is_told else [], "mine")
        client.send(Basic.Ack(held), Basic.Ack(frame.delivery_tag))
        await until(lambda: not broker.queue("secret").queue.stats().acquired_messages)
        assert (await client.ask(Basic.Get(0, "secret"), Channels.Close)).reply_code == 403


def test_a_consumer_that_begins_as_its_user_loses_the_right_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_lost_meanwhile(tmp_path / "spool", monkeypatch))


async def _lost_meanwhile(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _serving(spool) as (broker, server):
        client = await connected(server)
        await client.ask(Queue.Declare(queue="secret"), Queue.DeclareOk)
        begin = Consumer.open

        async def late(consumer: Consumer, *given: Any) -> None:
            await begin(consumer, *given)
            server.reload(users=guest("^mine"), ssl=None)

        monkeypatch.setattr(Consumer, "open", late)
        assert (await client.ask(Basic.Consume(0, "secret"), Channels.Close)).reply_code == 403
        host = await server.host("/")
        hosted = None if host is None else host.find("secret")
        assert hosted is not None
        assert not hosted.consumers
        assert not broker.queue("secret").queue.stats().consumers


@pytest.mark.parametrize("is_there", [True, False])
def test_who_has_logged_in_opens_a_virtual_host_with_the_rights_of_that_moment(is_there: bool, tmp_path: Path) -> None:
    """Rights that are read again between the two hold: a client has ten seconds there."""
    asyncio.run(_lost_before_it_opens(is_there, tmp_path / "spool"))


async def _lost_before_it_opens(is_there: bool, spool: Path) -> None:
    async with _serving(spool) as (_, server):
        client = Client(*await asyncio.open_connection("127.0.0.1", server.port))
        client.send(PROTOCOL_HEADER)
        await client.ask(Connections.StartOk({}, "PLAIN", "\0guest\0guest"), Connections.Tune, 0)
        server.reload(users=guest("^mine") if is_there else Users(), ssl=None)
        client.send(Connections.TuneOk(2047, 131_072, 0), Connections.Open("/"), channel=0)
        if is_there:
            await client.expect(Connections.OpenOk)
            await client.open_channel()
            await client.ask(Queue.Declare(queue="secret"), Queue.DeclareOk)
            client.send(Basic.Get(0, "secret"))
        _, answer = await client.next()
        client.kill()
        assert isinstance(answer, Channels.Close if is_there else Connections.Close), answer
        assert answer.reply_code == (403 if is_there else 530)


@asynccontextmanager
async def _serving(spool: Path) -> AsyncIterator[tuple[qflow.aio.AsyncBroker, Server]]:
    """A server whose user may read everything, at first."""
    async with qflow.aio.open(spool) as broker, await serve(broker, port=0, users=guest(".*")) as server:
        with ending_clients():
            yield broker, server


def guest(may_read: str) -> Users:
    """Return the users, of whom one may read what is called so."""
    user = User("guest", frozenset(), {"/": Permission(".*", ".*", may_read)})
    return Users(MappingProxyType({"guest": Account(user, PasswordHash.of("guest", n=2))}))


def test_line_ends_of_a_declared_name_are_taken_out_before_rights_are_looked_at(tmp_path: Path) -> None:
    """Of queues and exchanges, and with `passive`, too: nobody gets at what is not theirs by them."""
    rest = "^(?!secret)"
    anna = Account(User("anna", frozenset(), {"/": Permission(rest, rest, rest)}), PasswordHash.of("secret", n=2))
    users = tmp_path / "users.json"
    users.write_text(Users(MappingProxyType({"anna": anna})).text())
    declared = [
        (Queue.Declare(0, "Zsecret", durable=True), 403),
        (commands.Exchange.Declare(0, "secZret", durable=True), 403),
        (Queue.Declare(0, "aZb", durable=True), "ab"),
        (Queue.Declare(0, "Zab", passive=True), "ab"),
        (Queue.Declare(0, "Z", exclusive=True), "amq.gen-"),
    ]
    with serving(tmp_path / "spool", "--users", str(users)) as (server, _):
        for declare, outcome in declared:
            with Raw(server.port).open(response="\0anna\0secret") as raw:
                raw.send(method(1, declare).replace(b"Z", b"\n"))  # which no client library sends
                answer = raw.until(Queue.DeclareOk, commands.Channel.Close)
                told = answer.queue if isinstance(answer, Queue.DeclareOk) else answer.reply_code
                assert told == outcome or (outcome == "amq.gen-" and told.startswith(outcome))
