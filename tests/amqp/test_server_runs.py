"""Publishes that follow each other into one queue are one put: nothing else of them changes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from pamqp import body, header
from pamqp.commands import Basic, Channel, Confirm, Queue, Tx

import qflow
from amqp_loop import Raw, connected, serving
from doors.event_loop import held_syncs, plain, run, until
from qflow.queues.puts import Puts
from qflow.queues.queue import parts_of

BULKY = 20_000


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The messages of each put."""
    seen: list[list[Any]] = []
    draft = Puts.draft

    def noted(self: Puts, records: list[Any], *args: Any, **kwargs: Any) -> Any:
        if records not in seen[-1:]:  # else it is tried again
            seen.append(records)
        return draft(self, records, *args, **kwargs)

    monkeypatch.setattr(Puts, "draft", noted)
    return seen


def publication(queue: str, content: bytes, **properties: Any) -> list[Any]:
    said = Basic.Properties(**{"delivery_mode": 2, **properties})
    return [Basic.Publish(0, "", queue), header.ContentHeader(0, len(content), said), body.ContentBody(content)]


async def told(client: Raw, number: int) -> tuple[set[int], set[int]]:
    """Read confirms until so many publishes have theirs: those that are kept, and those refused."""
    kept: set[int] = set()
    refused: set[int] = set()
    while len(kept) + len(refused) < number:
        _, one = await client.next()
        if isinstance(one, Basic.Ack | Basic.Nack):
            first = max(kept | refused, default=0) + 1 if one.multiple else one.delivery_tag
            (kept if isinstance(one, Basic.Ack) else refused).update(range(first, one.delivery_tag + 1))
    return kept, refused


async def bodies(client: Raw, queue: str) -> list[bytes]:
    """Get what is in a queue."""
    found = []
    while True:
        client.send(Basic.Get(0, queue, True))
        while not isinstance(one := (await client.next())[1], Basic.GetOk | Basic.GetEmpty | body.ContentBody):
            pass
        if isinstance(one, Basic.GetEmpty):
            return found
        found.append((one if isinstance(one, body.ContentBody) else await client.expect(body.ContentBody)).value)


async def declare(client: Raw, *queues: str, **arguments: Any) -> None:
    for queue in queues:
        await client.ask(Queue.Declare(0, queue, durable=True, arguments=arguments), Queue.DeclareOk)


def test_what_follows_each_other_is_one_put_in_the_order_it_came(tmp_path: Path, puts: list[list[Any]]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declare(client, "q", "r")
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            puts.clear()
            turns = ["q", "q", "q", "r", "q", "q", "r", "r"]
            client.send(*(one for at, queue in enumerate(turns) for one in publication(queue, b"%d" % at)))
            assert await told(client, 8) == (set(range(1, 9)), set())
            assert [len(records) for records in puts] == [3, 1, 2, 2]
            assert await bodies(client, "q") == [b"0", b"1", b"2", b"4", b"5"]
            assert await bodies(client, "r") == [b"3", b"6", b"7"]

    run(scenario())


@pytest.mark.parametrize(
    "other", [{"priority": 3}, {"headers": {"a": 1}}, {"delivery_mode": 1}, {"expiration": "60000"}], ids=str
)
def test_properties_that_differ_stay_with_their_message(other: dict[str, Any], tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declare(client, "q")
            sent = [publication("q", b"1"), publication("q", b"2", **other), publication("q", b"3")]
            client.send(*(one for each in sent for one in each))
            await client.ask(Basic.Consume(0, "q", no_ack=True), Basic.ConsumeOk)
            found = [(await client.expect(header.ContentHeader)).properties for _ in sent]
            wanted = [each[1].properties for each in sent]
            assert [dict(one) for one in found] == [dict(one) for one in wanted]

    run(scenario())


def test_a_message_that_is_too_large_ends_the_channel_and_those_before_it_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            await server.broker.declare_queue("q", max_message_bytes=1000)
            client = await connected(server)
            contents = [b"1", b"2", bytes(2000), b"4"]
            client.send(*(one for content in contents for one in publication("q", content)))
            closed = await client.expect(Channel.Close)
            assert (closed.reply_code, closed.class_id, closed.method_id) == (406, 60, 40)
            client.send(Channel.CloseOk())
            await client.open_channel()
            await until(lambda: len(server.broker.broker.queue("q")) == 2)
            assert await bodies(client, "q") == [b"1", b"2"]

    run(scenario())


def test_a_broker_that_takes_less_at_once_gets_them_one_by_one(tmp_path: Path, puts: list[list[Any]]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool", max_transaction_bytes=4 * 1024) as server:
            client = await connected(server)
            await declare(client, "q")
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            contents = [os.urandom(1000) for _ in range(20)]
            client.send(*(one for content in contents for one in publication("q", content)))
            assert await told(client, 20) == (set(range(1, 21)), set())
            assert await bodies(client, "q") == contents

    run(scenario())


def test_a_queue_with_a_limit_turns_away_one_by_one(tmp_path: Path) -> None:
    """Of AMQP, and one that a program declared."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            await server.broker.declare_queue("p", limit_messages=3, on_overflow="reject")
            client = await connected(server)
            await declare(client, "q", **{"x-max-length": 3, "x-overflow": "reject-publish"})
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            for queue in "pq":
                client.send(*(one for at in range(5) for one in publication(queue, b"%d" % at)))
            kept, refused = await told(client, 10)
            assert (kept, refused) == ({1, 2, 3, 6, 7, 8}, {4, 5, 9, 10})

    run(scenario())


def test_a_run_whose_queue_is_deleted_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declare(client, "q", "r")
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            draft = Puts.draft

            def gone(self: Puts, records: list[Any], *args: Any, **kwargs: Any) -> Any:
                if len(records) == 3:
                    raise qflow.QueueDeleted("queue 'q' was deleted")
                return draft(self, records, *args, **kwargs)

            monkeypatch.setattr(Puts, "draft", gone)
            sent = [("r", b"1"), ("q", b"2"), ("q", b"3"), ("q", b"4"), ("r", b"5"), ("r", b"6")]
            client.send(*(one for queue, content in sent for one in publication(queue, content)))
            assert await told(client, 6) == ({1, 2, 3, 4, 5, 6}, set())

    run(scenario())


def test_a_publisher_without_room_is_not_read_from_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes="1MiB") as server:
            client, reader = await connected(server), await connected(server)
            await server.broker.declare_queue("q", limit_bytes="512KiB", on_overflow="block")
            await declare(client, "r")
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            contents = [b"%5d" % at + bytes(BULKY // 2) for at in range(300)]
            sending = asyncio.ensure_future(told(client, 300))
            for content in contents:
                client.send(*publication("q", content))
            found: list[bytes] = []
            while len(found) < 300:
                found += await bodies(reader, "q")
            assert [one[:5] for one in found] == [one[:5] for one in contents]
            assert await sending == (set(range(1, 301)), set())

    run(scenario())


def test_a_transaction_has_what_was_published_before_it_and_after(tmp_path: Path) -> None:
    """What came before `tx.select` on another channel is put when that is answered."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server, channels=2)
            await declare(client, "q")
            client.send(*publication("q", b"1"), *publication("q", b"2"))
            client.send(Tx.Select(), *publication("q", b"3"), *publication("q", b"4"), channel=2)
            await client.expect(Tx.SelectOk)
            await until(lambda: len(server.broker.broker.queue("q")) == 2)
            await client.ask(Tx.Commit(), Tx.CommitOk, 2)
            assert await bodies(client, "q") == [b"1", b"2", b"3", b"4"]

    run(scenario())


def test_a_message_that_is_too_large_is_not_confirmed_with_those_before_it(tmp_path: Path) -> None:
    """Those are confirmed in the turn of the event loop in which its channel ends."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            await server.broker.declare_queue("q", max_message_bytes=1000)
            client = await connected(server)
            await client.ask(Confirm.Select(), Confirm.SelectOk)
            client.send(*publication("nobody takes it", b"1"), *publication("q", bytes(2000)))
            confirmed = 0
            while not isinstance(one := (await client.next())[1], Channel.Close):
                if isinstance(one, Basic.Ack):
                    confirmed = one.delivery_tag
            assert one.reply_code == 406
            assert confirmed <= 1

    run(scenario())


def test_a_publisher_waits_for_room_in_memory_and_not_for_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the disk makes room for what comes: a slow sync has many messages to hold, of several queues."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", capacity_bytes="1MiB") as server:
            earlier, client = await connected(server), await connected(server)
            await declare(client, "q", "r")
            for one in (earlier, client):
                await one.ask(Confirm.Select(), Confirm.SelectOk)
            for queue in "qr" * 40:
                earlier.send(*publication(queue, bytes(BULKY)))
            assert await told(earlier, 80) == (set(range(1, 81)), set())
            assert plain(server.broker, "q").stats().spilled_messages
            with held_syncs(monkeypatch):
                for queue in "qr" * 5:
                    client.send(*publication(queue, bytes(BULKY)))
                await until(lambda: pending(server.broker, "q") + pending(server.broker, "r") == 10)
            assert await told(client, 10) == (set(range(1, 11)), set())
            assert [len(await bodies(client, queue)) for queue in "qr"] == [45, 45]

    run(scenario())


def pending(broker: qflow.aio.AsyncBroker, queue: str) -> int:
    """Return how many messages of a queue are on their way through the log."""
    return parts_of(plain(broker, queue)).admission.pending_messages
