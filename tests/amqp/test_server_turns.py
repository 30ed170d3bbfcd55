"""Turns of consumers: many that have much to send let others in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pamqp import commands
from pamqp.commands import Basic, Tx

import qflow.aio
from amqp_loop import Queue, Raw, connected, serving, turns_noted
from doors.event_loop import run, until
from qflow.amqp.server import client as client_module
from qflow.amqp.server import server as server_module
from qflow.amqp.server.channel import Channel
from qflow.amqp.server.client import MOST_IN_A_TURN, what_is_full
from qflow.amqp.server.consuming import AT_ONCE, Consumer
from qflow.amqp.server.dead_letters import DeadLetters
from qflow.amqp.server.holding import SETTLED_AT_ONCE, Holding
from qflow.amqp.server.host import Hosts
from qflow.amqp.server.publishing import Publishing
from qflow.amqp.server.session import Session
from qflow.amqp.server.stores import QueueStore
from qflow.amqp.server.units import PUT_AT_ONCE
from qflow.queues.gathering import Gathering
from qflow.serving import tasks


@asynccontextmanager
async def filled(spool: Path, count: int) -> AsyncIterator[tuple[qflow.aio.AsyncQueue, Raw]]:
    """Serve a queue `q` with so many messages, to a client."""
    async with serving(spool) as server:
        queue = await server.broker.declare_queue("q")
        await queue.put_many(count * [b"x"])
        yield queue, await connected(server)


async def consumed(client: Raw, count: int) -> None:
    """Have a consumer `c` take so many messages."""
    await client.ask(Basic.Consume(0, "q", consumer_tag="c"), Basic.ConsumeOk)
    for _ in range(count):
        await client.expect(Basic.Deliver)


def one_each_turn(noted: list[int], count: int) -> None:
    """So many were done, each in a turn of its own."""
    assert len(noted) == count
    assert max(map(noted.count, set(noted))) == 1


def test_what_consumers_send_in_one_turn_of_the_loop_is_bounded(tmp_path: Path) -> None:
    """A login waited a second for the messages of 1,500 consumers, as each sent all that it had before its next step."""
    consumers, each = 4 * MOST_IN_A_TURN // AT_ONCE, 2 * AT_ONCE

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await client.ask(commands.Channel.Flow(False), commands.Channel.FlowOk)
            for index in range(consumers):
                queue = await server.broker.declare_queue(f"q{index}")
                await queue.put_many(each * [b"x"])
                await client.ask(Basic.Consume(0, queue.name), Basic.ConsumeOk)
            async with turns_noted(Channel, "deliver") as sent:
                client.send(commands.Channel.Flow(True))
                for _ in range(consumers * each):
                    await client.expect(Basic.Deliver)
            assert max(sent.count(turn) for turn in set(sent)) <= MOST_IN_A_TURN + AT_ONCE

    run(scenario())


@pytest.mark.parametrize("in_transaction", [False, True])
def test_what_one_ack_settles_in_one_turn_of_the_loop_is_bounded(tmp_path: Path, in_transaction: bool) -> None:
    """A client that acked 220,000 messages at once held up all others for half a second, by `tx.commit` for three."""
    count = 2 * SETTLED_AT_ONCE + 1

    async def scenario() -> None:
        async with filled(tmp_path / "spool", count) as (queue, client):
            if in_transaction:
                await client.ask(Tx.Select(), Tx.SelectOk)
            await consumed(client, count)
            async with turns_noted(Channel, "_left") as left, turns_noted(Gathering, "_checked") as gathered:
                client.send(Basic.Ack(0, True))
                if in_transaction:
                    await client.ask(Tx.Commit(), Tx.CommitOk)
                await client.ask(Basic.Qos(), Basic.QosOk)
            assert len(left) == count
            assert len(gathered) == (count if in_transaction else 0)
            for turns in (left, gathered):
                assert max(map(turns.count, set(turns)), default=0) <= SETTLED_AT_ONCE
            assert len(queue) == 0

    run(scenario())


def test_what_one_commit_puts_in_one_turn_of_the_loop_is_bounded(tmp_path: Path) -> None:
    """A `tx.commit` of thirty thousand publishes held up all other clients for a second."""
    count = 2 * PUT_AT_ONCE + 1

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            queue = await server.broker.declare_queue("q")
            client = await connected(server)
            await client.ask(Tx.Select(), Tx.SelectOk)
            for _ in range(count):
                client.publish("q")
            async with turns_noted(QueueStore, "put_in") as put:
                await client.ask(Tx.Commit(), Tx.CommitOk)
            assert len(put) == len(queue) == count
            assert max(map(put.count, set(put))) == PUT_AT_ONCE

    run(scenario())


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize("is_committed", [True, False])
def test_what_many_nacks_of_a_transaction_give_back_goes_together(
    tmp_path: Path, is_committed: bool, requeue: bool
) -> None:
    """A rollback sorted all that the client held for each of them: four thousand held up all others for six seconds."""
    count = 200

    async def scenario() -> None:
        async with filled(tmp_path / "spool", count) as (queue, client):
            await client.ask(Tx.Select(), Tx.SelectOk)
            for _ in range(count):
                await client.ask(Basic.Get(0, "q"), Basic.GetOk)
            for tag in range(1, count + 1):
                client.send(Basic.Nack(tag, False, requeue))
            async with turns_noted(Holding, "restore") as restored, turns_noted(QueueStore, "give_back") as returned:
                if is_committed:
                    await client.ask(Tx.Commit(), Tx.CommitOk)
                else:
                    await client.ask(Tx.Rollback(), Tx.RollbackOk)
            assert len(restored) + len(returned) <= 3
            waiting = count if is_committed and requeue else 0
            assert (await queue.stats()).lag_messages == waiting
            assert len(queue) == waiting + (0 if is_committed else count)

    run(scenario())


@pytest.mark.parametrize("settles", [Basic.Ack, Basic.Reject, Basic.Nack])
def test_what_many_methods_do_in_one_turn_of_the_loop_is_bounded(
    tmp_path: Path, settles: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read at once was done in one turn: thousands of messages that went back one by one took a second."""
    count = 10
    at_once(monkeypatch)

    async def scenario() -> None:
        async with filled(tmp_path / "spool", count) as (_, client):
            await consumed(client, count)
            await client.ask(Basic.Cancel("c"), Basic.CancelOk)
            async with turns_noted(Channel, "_left") as left:
                client.send(*(settles(tag) for tag in range(1, count + 1)))
                await client.ask(Basic.Qos(), Basic.QosOk)
            one_each_turn(left, count)

    run(scenario())


def test_what_many_publishes_do_in_one_turn_of_the_loop_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of small ones, which come at once, or a few with thousands of headers, held up all others for 0.7 s."""
    count = 10
    at_once(monkeypatch)

    async def scenario() -> None:
        async with filled(tmp_path / "spool", 0) as (queue, client):
            other = await client.ask(Queue.Declare(exclusive=True), Queue.DeclareOk)
            async with turns_noted(Publishing, "publish") as published:
                for _ in range(count):
                    client.publish("q")
                    client.publish(other.queue)
                await client.ask(Queue.Declare(0, "q", True), Queue.DeclareOk)
            assert len(queue) == count
            one_each_turn(published, 2 * count)

    run(scenario())


def test_what_one_consumer_is_sent_in_one_turn_of_the_loop_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred messages of thousands of headers, which say how often each was delivered, held up all others for 5 s."""
    count = 10
    at_once(monkeypatch)

    async def scenario() -> None:
        async with filled(tmp_path / "spool", count) as (_, client):
            async with turns_noted(Channel, "deliver") as sent:
                await consumed(client, count)
            one_each_turn(sent, count)

    run(scenario())


def test_how_many_dead_letters_are_read_in_one_turn_of_the_loop_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of thousands of headers held up all others for 0.5 s."""
    count = 10
    at_once(monkeypatch)

    async def scenario() -> None:
        async with filled(tmp_path / "spool", 0) as (queue, client):
            arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"}
            await client.ask(Queue.Declare(0, "dying", durable=True, arguments=arguments), Queue.DeclareOk)
            for _ in range(count):
                client.publish("dying")
            await client.ask(Queue.Declare(0, "dying", True), Queue.DeclareOk)
            for _ in range(count):
                await client.ask(Basic.Get(0, "dying"), Basic.GetOk)
            async with turns_noted(DeadLetters, "letter") as carried:
                client.send(Basic.Nack(0, True, False))
                await until(lambda: len(queue) == count)
            one_each_turn(carried, count)

    run(scenario())


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each turn be over as soon as it begins."""
    monkeypatch.setattr(tasks, "TURN_S", 0.0)


def test_a_consumer_that_ends_while_it_waits_for_its_turn_takes_none(tmp_path: Path) -> None:
    """Those behind it have theirs, in the order they came."""

    async def scenario() -> None:
        turns, had = tasks.Turns(MOST_IN_A_TURN), list[int]()

        async def send(number: int) -> None:
            await turns.begin(MOST_IN_A_TURN)
            had.append(number)

        sending = [asyncio.create_task(send(number)) for number in range(4)]
        await asyncio.sleep(0)
        sending[1].cancel()
        await asyncio.wait(sending)
        assert had == [0, 2, 3]

    run(scenario())


def test_publishers_that_are_blocked_together_are_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queues of the broker were looked at for each of them: 7 ms where there are ten thousand."""
    looked = 0

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool", door=False) as broker:
            hosts = await Hosts.of(broker)
            queues = broker.broker.engine.queues
            used = queues.used

            def counted() -> object:
                nonlocal looked
                looked += 1
                return used()

            monkeypatch.setattr(queues, "used", counted)
            monkeypatch.setattr(client_module, "BLOCKED_S", 3600.0)
            host = await hosts.find("/")
            told = {what_is_full(host) for _ in range(10)}
            assert told == {"a queue, or the memory of the broker, is full"}
            await hosts.leave()

    run(scenario())
    assert looked == 1


def test_connections_are_looked_at_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second, all of them, and heartbeats were sent: 60 ms for 1,500."""
    count = 5
    at_once(monkeypatch)
    monkeypatch.setattr(server_module, "TICK_S", 0.0)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            clients = [await connected(server) for _ in range(count)]
            async with turns_noted(Session, "tick") as looked:
                await until(lambda: len(looked) >= 2 * count)
            assert len(set(looked)) == len(looked)
            del clients

    run(scenario())


def test_consumers_of_two_priorities_do_not_each_look_at_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each of a thousand had as much as it may, each looked at those before it: 20 s, in which nobody was served."""
    count, looked = 60, 0
    has_more = Consumer.may_have_more.fget

    def counted(consumer: Consumer) -> bool:
        nonlocal looked
        looked += 1
        return bool(has_more(consumer))  # type: ignore[misc]

    async def scenario() -> None:
        async with filled(tmp_path / "spool", 0) as (queue, client):
            await client.ask(Basic.Qos(0, 1), Basic.QosOk)
            for number in range(count):
                arguments = {"x-priority": number % 2}
                await client.ask(Basic.Consume(0, "q", f"{number}", arguments=arguments), Basic.ConsumeOk)
            monkeypatch.setattr(Consumer, "may_have_more", property(counted))
            for number in range(count):
                await queue.put(b"x")
                tag = (await client.expect(Basic.Deliver)).consumer_tag
                assert int(tag) % 2 == (number < count // 2)
            assert 0 < looked < 4 * count**2

    run(scenario())


def test_an_ack_of_many_wakes_the_consumers_of_a_channel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, for each message of a prefetch that they share: a million times for a thousand of a thousand."""
    count, woken = 40, 0
    wake = Consumer.wake

    def counted(consumer: Consumer) -> None:
        nonlocal woken
        woken += 1
        wake(consumer)

    async def scenario() -> None:
        async with filled(tmp_path / "spool", 0) as (queue, client):
            await client.ask(Basic.Qos(0, count, True), Basic.QosOk)
            for number in range(count):
                await client.ask(Basic.Consume(0, "q", f"{number}"), Basic.ConsumeOk)
            await queue.put_many(2 * count * [b"x"])
            for _ in range(count):
                last = await client.expect(Basic.Deliver)
            monkeypatch.setattr(Consumer, "wake", counted)
            client.send(Basic.Ack(last.delivery_tag, True))
            for _ in range(count):
                await client.expect(Basic.Deliver)
            assert 0 < woken < 5 * count

    run(scenario())
