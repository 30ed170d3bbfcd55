"""What ends while something else is under way: nothing is lost, nothing is kept, and the others go on."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from pamqp import body, commands, header

from amqp_client import message
from amqp_loop import Basic, Channels, Connections, Queue, Raw, connected, serving
from doors.event_loop import run, until
from qflow.amqp import Server
from qflow.amqp.errors import AmqpError
from qflow.amqp.server import publishing
from qflow.amqp.server.consuming import Consumer
from qflow.amqp.server.dead_letters import DeadLetters
from qflow.amqp.server.host import Host
from qflow.amqp.server.server import credentials
from qflow.amqp.server.session import Session
from qflow.amqp.server.stores import QueueStore
from qflow.errors import DiskFull, QueueFull

Tx, Confirm, Exchange = commands.Tx, commands.Confirm, commands.Exchange


def session_of(server: Server) -> Session:
    """The only session."""
    (session,) = server._sessions
    return session


def acquired(server: Server, name: str) -> int:
    return int(server.broker.queue(name).queue.stats().acquired_messages)


async def filled(server: Server, client: Raw, name: str = "q", number: int = 3, **options: Any) -> None:
    """Declare a queue with some messages."""
    await client.ask(Queue.Declare(0, name, durable=True, **options), Queue.DeclareOk)
    for index in range(number):
        await server.broker.queue(name).put(b"%d" % index)


async def consuming(server: Server, client: Raw, number: int = 3) -> None:
    """Consume a queue of three messages, and hold them."""
    await filled(server, client, number=number)
    client.send(Basic.Consume(0, "q", "tag"))
    for _ in range(number):
        await client.expect(Basic.Deliver)


def test_what_a_client_holds_goes_back_when_its_connection_fails(tmp_path: Path) -> None:
    """Also if it never answers; and its consumer does not keep the server from serving others."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await consuming(server, client)
            client.send(Basic.Consume(0, "q", "tag"))
            assert (await client.expect(Connections.Close)).reply_code == 530
            await server.broker.queue("q").put(b"one more")
            other = await connected(server)
            assert (await other.ask(Queue.Declare(0, "q", True), Queue.DeclareOk)).message_count == 4

    run(scenario())


def test_a_dead_client_is_noticed_while_its_publish_waits_for_room(tmp_path: Path) -> None:
    """What it holds comes back before there is room, for which somebody may wait who needs just that."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            full = await server.broker.declare_queue("full", limit_messages=1, on_overflow="block")
            await full.put(b"")
            client = await connected(server)
            await consuming(server, client)
            client.publish("full")
            await client.expect(Connections.Blocked)
            client.kill()
            await until(lambda: not acquired(server, "q"))
            await until(lambda: not server.connections)
            assert len(full) == 1

    run(scenario())


def test_a_channel_that_ends_while_it_is_blocked_ends_alone(tmp_path: Path) -> None:
    """Its message is not put when there is room again, and its connection goes on."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            full = await server.broker.declare_queue("full", limit_messages=1, on_overflow="block")
            await full.put(b"first")
            client = await connected(server, channels=2)
            client.publish("full", b"second")
            await client.expect(Connections.Blocked)
            session = session_of(server)
            session.fail_channel(session.channels[1], AmqpError(406, "for the test"))
            await client.expect(Channels.Close)
            client.send(Channels.CloseOk())
            await client.ask(Queue.Declare(0, "full", True), Queue.DeclareOk, 2)
            async with await full.get(0) as delivery:
                assert delivery.body == b"first"
            await client.ask(Queue.Declare(0, "full", True), Queue.DeclareOk, 2)
            assert len(full) == 0

    run(scenario())


def test_an_error_of_the_broker_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the server that ends a connection without a word."""

    async def fail(*_: object) -> Any:
        raise DiskFull("no room")

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client)
            monkeypatch.setattr(QueueStore, "get", fail)
            client.send(Basic.Get(0, "q"))
            assert (await client.expect(Connections.Close)).reply_code == 506

    run(scenario())


@pytest.mark.parametrize("no_ack", [True, False])
def test_a_message_that_is_got_for_a_channel_that_has_ended_goes_back(
    no_ack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was sent it."""
    get = QueueStore.get

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client)

            async def ended_meanwhile(store: QueueStore, may_wait: bool) -> Any:
                found = await get(store, may_wait)
                session_of(server).end(AmqpError(320, "for the test"))
                return found

            monkeypatch.setattr(QueueStore, "get", ended_meanwhile)
            client.send(Basic.Get(0, "q", no_ack))
            await client.expect(Connections.Close)
            client.send(Connections.CloseOk(), channel=0)
            await until(lambda: not server.connections)
            assert (len(server.broker.queue("q")), acquired(server, "q")) == (3, 0)

    run(scenario())


def test_a_consumer_of_a_channel_that_ends_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that it had for itself alone is free."""
    opened = Consumer.open

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client)

            async def ended_meanwhile(consumer: Consumer, *arguments: Any) -> None:
                await opened(consumer, *arguments)
                session = session_of(server)
                session.fail_channel(session.channels[1], AmqpError(406, "for the test"))
                await until(lambda: not session.channels)

            with monkeypatch.context() as patch:
                patch.setattr(Consumer, "open", ended_meanwhile)
                client.send(Basic.Consume(0, "q", "tag", exclusive=True))
                await client.expect(Channels.Close)
                client.send(Channels.CloseOk())
                await client.open_channel()
            await client.ask(Basic.Consume(0, "q", "tag", exclusive=True), Basic.ConsumeOk)

    run(scenario())


def test_all_goes_back_where_the_server_closes_while_a_connection_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program goes on with its broker."""
    stop = Consumer.stop
    begun = asyncio.Event()

    async def slowly(consumer: Consumer) -> None:
        begun.set()
        for _ in range(20):
            await asyncio.sleep(0)
        await stop(consumer)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server, channels=3)
            await filled(server, client, number=9)
            for number in (1, 2, 3):
                client.send(Basic.Qos(0, 3), Basic.Consume(0, "q", "tag"), channel=number)
            for _ in range(9):
                await client.expect(Basic.Deliver)
            monkeypatch.setattr(Consumer, "stop", slowly)
            client.send(Connections.Close(200, "", 0, 0), channel=0)
            await begun.wait()
            await server.close()
            assert acquired(server, "q") == 0

    run(scenario())


def test_what_was_published_is_confirmed_before_the_server_ends(tmp_path: Path) -> None:
    """A client that is asked to close has the confirms of all that was read."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, number=0)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            for _ in range(50):
                client.publish("q")
            await until(lambda: session_of(server).is_busy)
            draining = asyncio.create_task(server.drain(10))
            confirmed = 0
            while not isinstance((found := await client.next())[1], Connections.Close):
                assert isinstance(found[1], Basic.Ack)
                confirmed = found[1].delivery_tag
            assert 0 < confirmed == len(server.broker.queue("q"))
            client.send(Connections.CloseOk(), channel=0)
            await draining

    run(scenario())


def test_a_late_failure_ends_the_channel_it_was_of(tmp_path: Path) -> None:
    """Not the one that has its number now."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            session = session_of(server)
            old = session.channels[1]
            await client.ask(Channels.Close(200, "", 0, 0), Channels.CloseOk)
            await client.open_channel()
            await session._close_channel(old, AmqpError(406, "for the test"))
            await client.ask(Queue.Declare(0, "q"), Queue.DeclareOk)

    run(scenario())


def test_an_ack_of_what_was_got_makes_room_for_what_is_consumed(tmp_path: Path) -> None:
    """A limit of the channel counts both."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client)
            await client.ask(Basic.Qos(0, 1, True), Basic.QosOk)
            tag = (await client.ask(Basic.Get(0, "q"), Basic.GetOk)).delivery_tag
            await client.ask(Basic.Consume(0, "q", "tag"), Basic.ConsumeOk)
            client.send(Basic.Ack(tag))
            await client.expect(Basic.Deliver)

    run(scenario())


def test_a_transaction_is_bounded_with_the_properties_of_its_messages(tmp_path: Path) -> None:
    """Which are kept in several forms until it is committed, for as long as the client likes."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            server.max_unit_bytes = 2_000_000
            client = await connected(server)
            await client.ask(Tx.Select(), Tx.SelectOk)
            large = header.ContentHeader(0, 0, Basic.Properties(headers={"x": "x" * 100_000}))
            for _ in range(10):
                client.send(Basic.Publish(0, "", "nowhere"), large)
            client.send(Tx.Rollback())
            _, answer = await client.next()
            assert isinstance(answer, Connections.Close), answer
            assert answer.reply_code == 506

    run(scenario())


@pytest.mark.parametrize(("queue", "content"), [("q", b""), ("nowhere", b"x" * 1000)])
def test_a_transaction_of_nothing_but_names_is_bounded_too(queue: str, content: bytes, tmp_path: Path) -> None:
    """Messages without a body take memory, and those that are to be returned."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            server.max_unit_bytes = 100_000
            client = await connected(server)
            await filled(server, client)
            await client.ask(Tx.Select(), Tx.SelectOk)
            for _ in range(200):
                client.publish(queue, content, mandatory=True)
            assert (await client.expect(Connections.Close)).reply_code == 506

    run(scenario())


def test_what_connections_have_that_is_not_whole_or_not_committed_is_bounded_for_all_of_them(tmp_path: Path) -> None:
    """Whoever holds more than an equal share is ended; what it held is there for others then."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            server.budget.most_bytes = 3_000_000
            small, large = await connected(server), await connected(server)
            await filled(server, small)
            await small.ask(Tx.Select(), Tx.SelectOk)
            small.publish("q", bytes(100_000))
            parts = message(1, bytes(2_500_000))
            large.send(parts[:-100_000])
            await until(lambda: server.budget._total > 2_400_000)
            for _ in range(6):
                small.publish("q", bytes(100_000))
            await until(lambda: server.budget._total > 3_000_000)
            large.send(parts[-100_000:-1])
            assert (await large.expect(Connections.Close)).reply_code == 506
            await small.ask(Tx.Commit(), Tx.CommitOk)
            large.kill()
            await until(lambda: not server.budget._held)
            assert server.budget._total == 0

    run(scenario())


def test_answers_that_nobody_reads_are_not_made(tmp_path: Path) -> None:
    """One read may bring thousands of questions, each with a large answer."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client, other = await connected(server), await connected(server)
            await filled(server, client, number=0)
            for _ in range(40):
                await server.broker.queue("q").put(bytes(2**20))
            client.send(*[Basic.Get(0, "q")] * 40)
            await until(lambda: acquired(server, "q"))
            for _ in range(20):
                await other.ask(Queue.Declare(0, "q", True), Queue.DeclareOk)
            assert acquired(server, "q") < 30

    run(scenario())


def test_a_login_of_many_tables_is_refused() -> None:
    """Nobody has logged in yet who sends it."""
    table = b""
    for _ in range(560):
        table = b"\x01aF" + len(table).to_bytes(4) + table
    assert credentials("AMQPLAIN", table, None) is None


def test_a_socket_is_closed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if what the connection had cannot be given back."""

    async def fail(_: Host, __: int) -> None:
        raise DiskFull("no room")

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            with monkeypatch.context() as patch:
                patch.setattr(Host, "connection_ended", fail)
                client.writer.write_eof()
                with pytest.raises(EOFError):
                    await client.next()

    run(scenario())


# Dead letters, limits and what runs beside ---------------------------------------------------------------------------

LIMITED = {"x-max-length": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def test_a_full_queue_confirms_its_refusal_when_the_dead_letter_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a publisher makes no more of them than there is room for."""
    bury, may_go = DeadLetters.bury, asyncio.Event()

    async def when_it_may(*arguments: Any) -> None:
        await may_go.wait()
        await bury(*arguments)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, "dead", 0)
            await filled(server, client, arguments=LIMITED | {"x-overflow": "reject-publish-dlx"}, number=1)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            monkeypatch.setattr(DeadLetters, "bury", when_it_may)
            client.publish("q")
            await client.expect(Connections.Blocked)
            may_go.set()
            await client.expect(Basic.Nack)
            assert len(server.broker.queue("dead")) == 1

    run(scenario())


def test_what_a_limit_could_not_move_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in its queue, and is not delivered to nobody for ever."""
    failed = asyncio.Event()

    async def fail(*_: Any) -> None:
        failed.set()
        raise DiskFull("no room")

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, "dead", 0)
            await filled(server, client, arguments=LIMITED, number=3)
            monkeypatch.setattr(QueueStore, "put_in", fail)
            client.publish("q")
            await failed.wait()
            await until(lambda: not acquired(server, "q"))
            assert len(server.broker.queue("q")) == 4

    run(scenario())


def test_a_dead_letter_that_makes_no_sense_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits apart."""
    letter = DeadLetters.letter

    def fail(letters: DeadLetters, delivery: Any, *rest: Any) -> Any:
        if delivery.body == b"0":
            raise TypeError("for the test")
        return letter(letters, delivery, *rest)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, "dead", 0)
            monkeypatch.setattr(DeadLetters, "letter", fail)
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            await filled(server, client, arguments=arguments)
            for _ in range(3):
                tag = (await client.ask(Basic.Get(0, "q"), Basic.GetOk)).delivery_tag
                client.send(Basic.Reject(tag, False))
            await until(lambda: len(server.broker.queue("dead")) == 2)
            assert len(server.broker.queue("amqp:dead-letters")) == 1

    run(scenario())


def test_dead_letters_of_a_queue_that_goes_with_its_connection_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are on their way when the queue is deleted, which knows where they go."""
    put_in = QueueStore.put_in

    async def slowly(*arguments: Any) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        await put_in(*arguments)

    async def scenario() -> None:
        monkeypatch.setattr(QueueStore, "put_in", slowly)
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, "dead", 0)
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            await client.ask(Queue.Declare(0, "q", exclusive=True, arguments=arguments), Queue.DeclareOk)
            for _ in range(3):
                client.publish("q")
                tag = (await client.ask(Basic.Get(0, "q"), Basic.GetOk)).delivery_tag
                client.send(Basic.Reject(tag, False))
            client.send(Connections.Close(200, "", 0, 0), channel=0)
            await client.expect(Connections.CloseOk)
            assert len(server.broker.queue("dead")) == 3

    run(scenario())


def test_a_queue_of_many_that_is_deleted_meanwhile_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message to all of them is in those that are left."""
    put_into_all = publishing.put_into_all

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            for index in range(12):
                await filled(server, client, f"q{index}", 0)
                await client.ask(Queue.Bind(0, f"q{index}", "amq.fanout", ""), Queue.BindOk)

            async def deleted_meanwhile(broker: Any, *rest: Any) -> None:
                if "q3" in broker.queues():
                    await broker.delete_queue("q3")
                await put_into_all(broker, *rest)

            monkeypatch.setattr(publishing, "put_into_all", deleted_meanwhile)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            client.publish("", exchange="amq.fanout")
            await client.expect(Basic.Ack)
            assert {len(server.broker.queue(f"q{index}")) for index in range(12) if index != 3} == {1}

    run(scenario())


def test_heartbeats_go_on_where_unused_queues_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the queues go when they can."""
    tick, failed = Host.tick, []

    async def fail(host: Host, now: float) -> None:
        if not failed:
            failed.append(now)
            raise DiskFull("no room")
        await tick(host, now)

    async def scenario() -> None:
        monkeypatch.setattr(Host, "tick", fail)
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, arguments={"x-expires": 1}, number=0)
            await until(lambda: "q" not in server.broker.queues())
            assert failed

    run(scenario())


def test_a_nack_that_fails_leaves_the_rest_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go back when the connection ends by it."""

    give_back = QueueStore.give_back

    async def fail(store: QueueStore, held: Any, requeue: bool) -> None:
        if not requeue:
            raise QueueFull("for the test")
        await give_back(store, held, requeue)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await consuming(server, client)
            monkeypatch.setattr(QueueStore, "give_back", fail)
            client.send(Basic.Nack(0, True, False))
            assert (await client.expect(Connections.Close)).reply_code == 541
            await until(lambda: not acquired(server, "q"))
            assert len(server.broker.queue("q")) == 3

    run(scenario())


def test_a_delay_that_is_no_number_is_none(tmp_path: Path) -> None:
    """A double may be that; the message comes at once."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await filled(server, client, number=0)
            kind = {"x-delayed-type": "fanout"}
            await client.ask(Exchange.Declare(0, "later", "x-delayed-message", arguments=kind), Exchange.DeclareOk)
            await client.ask(Queue.Bind(0, "q", "later"), Queue.BindOk)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            properties = Basic.Properties(headers={"x-delay": math.nan})
            client.send(Basic.Publish(0, "later"), header.ContentHeader(0, 1, properties), body.ContentBody(b"x"))
            await client.expect(Basic.Ack)
            await client.ask(Basic.Get(0, "q"), Basic.GetOk)

    run(scenario())
