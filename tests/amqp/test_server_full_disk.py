"""The disk under the spool is full: publishers are told, nothing that was confirmed is lost, and the rest goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pamqp import commands

import amqp_loop
import qflow
from amqp_client import Basic, Connections, method
from amqp_clients import serving
from amqp_raw import Queue, Raw
from doors.event_loop import run
from faults.test_full_disk import disk_of, fill
from qflow.amqp.model.records import ROOM
from qflow.amqp.model.topology import Topology

MOST_LINES = 12
AT_ONCE = 500
MOST_ROUNDS = 100
"""Until the disk takes no more: how much is left in a page differs."""


class Counting:
    """A publisher that knows which of its messages were confirmed."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.confirmed: list[bytes] = []
        self._next = 1
        raw.ask(commands.Confirm.Select(), commands.Confirm.SelectOk)

    def publish(self, size: int) -> int:
        """Publish messages of a size; return how many were refused."""
        bodies = {self._next + one: (b"%d " % (self._next + one)).ljust(size, b"x") for one in range(AT_ONCE)}
        self._next += AT_ONCE
        self.raw.publish("q", *bodies.values())
        refused = 0
        while bodies:
            answer = self.raw.until(Basic.Ack, Basic.Nack)
            done = [
                tag for tag in bodies if tag == answer.delivery_tag or (answer.multiple and tag < answer.delivery_tag)
            ]
            found = [bodies.pop(tag) for tag in done]
            if isinstance(answer, Basic.Ack):
                self.confirmed += found
            else:
                refused += len(found)
        return refused


def test_a_full_disk_refuses_publishes_and_nothing_else(tmp_path: Path) -> None:
    """They get a nack; consumers get and settle; when there is space, publishes are confirmed by themselves."""
    said = tmp_path / "said"
    with disk_of("8m", tmp_path / "disk") as disk:
        with (
            open(said, "w") as stderr,
            serving(disk / "spool", said=stderr) as (server, _),
            Raw(server.port).open() as raw,
            Raw(server.port).open() as other,
        ):
            raw.declare("q")
            other.declare("dead")
            other.declare("letters", x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
            other.confirmed("letters", b"rejected", b"behind")
            publisher = Counting(raw)
            ballast = fill(disk)
            for size in (20_000, 2000, 500):
                publisher.publish(size)
            refused = [publisher.publish(50)]
            while refused[-1] <= AT_ONCE / 2:
                assert len(refused) < MOST_ROUNDS, refused
                refused.append(publisher.publish(50))
            assert len(publisher.confirmed) > 50
            check_others_go_on(other)
            taken = take(server.port, 20)
            ballast.unlink()
            while publisher.publish(50):
                pass
            deliver, body = get(other, "dead")
            assert (body, deliver.redelivered) == (b"rejected", False)
        assert len(said.read_text().splitlines()) <= MOST_LINES
        assert "Traceback" not in said.read_text()
        with serving(disk / "spool") as (server, _):
            left = take(server.port, len(publisher.confirmed) - 20)
            assert taken + left == publisher.confirmed
            with Raw(server.port).open() as raw:
                assert raw.ready("q") == 0


def test_a_transaction_without_room_ends_with_506(tmp_path: Path) -> None:
    """Nothing of it is done."""

    async def scenario() -> None:
        with disk_of("16m", tmp_path / "disk") as disk:
            async with amqp_loop.serving(disk / "spool") as server:
                client, other = await amqp_loop.connected(server), await amqp_loop.connected(server)
                await client.ask(Queue.Declare(0, "q", durable=True), Queue.DeclareOk)
                await client.ask(commands.Tx.Select(), commands.Tx.SelectOk)
                fill(disk)
                for _ in range(100):
                    client.publish("q", bytes(100_000))
                client.send(commands.Tx.Commit())
                close = await client.expect(Connections.Close)
                assert (close.reply_code, "not committed" in close.reply_text) == (506, True)
                assert (await other.ask(Queue.Declare(0, "q", passive=True), Queue.DeclareOk)).message_count == 0

    run(scenario())


def test_who_waits_as_the_disk_is_full_is_told_so(tmp_path: Path) -> None:
    """Memory is full, too, and nothing can be spilled."""

    async def scenario() -> None:
        with disk_of("8m", tmp_path / "disk") as disk:
            async with amqp_loop.serving(disk / "spool", capacity_bytes=100_000) as server:
                client = await amqp_loop.connected(server)
                await client.ask(Queue.Declare(0, "q"), Queue.DeclareOk)
                fill(disk)
                for _ in range(100):
                    client.publish("q", bytes(10_000))
                assert "the disk takes nothing more: " in (await client.expect(Connections.Blocked)).reason

    run(scenario())


def check_others_go_on(client: Raw) -> None:
    """Reject a message, and declare a queue: there is space in reserve for what is little."""
    deliver, _ = get(client, "letters")
    client.send(method(1, Basic.Reject(deliver.delivery_tag, False)))
    client.ask(Queue.Declare(0, "new", durable=True), Queue.DeclareOk)


def get(client: Raw, queue: str) -> tuple[Any, bytes]:
    """Get a message that is there, or is to come."""
    while True:
        client.send(method(1, Basic.Get(0, queue)))
        if isinstance(client.peek(), Basic.GetOk):
            return client.delivered()
        client.next()


def take(port: int, number: int) -> list[bytes]:
    """Consume and ack the next messages of the queue."""
    found = []
    with Raw(port).open() as raw:
        raw.consume("q", prefetch=100)
        for _ in range(number):
            deliver, body = raw.delivered()
            found.append(body)
            raw.send(method(1, Basic.Ack(deliver.delivery_tag)))
        raw.ask(Connections.Close(200, "", 0, 0), Connections.CloseOk, channel=0)
    return found


def test_a_server_begins_on_a_full_disk_where_many_queues_were_deleted(tmp_path: Path) -> None:
    """Records of queues that a program deleted are dropped at its start, a few at a time, which needs no room."""
    with disk_of("24m", tmp_path / "disk") as disk, qflow.open(disk / "spool") as broker:
        log = broker.engine.log
        host = Topology(log, lambda _name, _is_stream: None).vhost("/")
        facts: dict[str, bytes | None] = {}
        for number in range(500):
            name = f"queue number {number}"
            declared = host.plan_declare_queue(name, 1, durable=True, exclusive=False, auto_delete=False, arguments={})
            declared.apply()
            facts |= declared.facts | host.plan_bind_queue(name, "amq.topic", f"k.{number}", {}, 1).facts
        log.keep_facts(ROOM, facts)
        queue = broker.declare_queue("q", durable=True)
        ballast = fill(disk)
        for size in (5000, 1):
            with pytest.raises(qflow.DiskFull):
                while True:
                    queue.put(bytes(size))
        Topology(log, lambda _name, _is_stream: None)
        assert log.facts(ROOM) == {}
        ballast.unlink()
