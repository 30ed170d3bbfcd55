"""A confirm is a sync: `basic.ack` leaves after the commit that has the message in all its queues."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pamqp import body, header
from pamqp.commands import Basic, Confirm, Exchange, Queue

import inside
import qflow
from amqp_loop import Raw, connected, serving
from doors.event_loop import run, turns, until
from qflow.amqp.server.hosted import HostedQueue
from qflow.storage.log.confirming import Confirming

DELAYED = {"x-delayed-type": "fanout"}
WAYS: dict[str, list[dict[str, Any]]] = {
    "a queue": [{}],
    "two queues": [{}, {}],
    "many queues": [{}] * 12,
    "priorities": [{"x-max-priority": 5}],
    "a stream": [{"x-queue-type": "stream"}],
    "a stream and a queue": [{"x-queue-type": "stream"}, {}],
    "a quorum queue": [{"x-queue-type": "quorum"}],
    "a limit": [{"x-max-length": 5}],
    "a limit that refuses": [{"x-max-length": 5, "x-overflow": "reject-publish"}],
    "a time to live": [{"x-message-ttl": 60_000}, {}],
}


class Writer:
    """The thread that commits; while `stopped` it waits before the next commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        confirm = Confirming.confirm
        self.may_go, self.waits = threading.Event(), threading.Event()
        self.may_go.set()

        def wait(confirming: Confirming, txn: Any) -> None:
            if not self.may_go.is_set():
                self.waits.set()
            assert self.may_go.wait(60)
            confirm(confirming, txn)

        monkeypatch.setattr(Confirming, "confirm", wait)


async def declared(client: Raw, exchange: str, kind: str, queues: Sequence[dict[str, Any]]) -> None:
    arguments = DELAYED if kind == "x-delayed-message" else {}
    await client.ask(Exchange.Declare(0, exchange, kind, arguments=arguments, durable=True), Exchange.DeclareOk)
    for index, each in enumerate(queues):
        await client.ask(Queue.Declare(0, f"q{index}", durable=True, arguments=each), Queue.DeclareOk)
        await client.ask(Queue.Bind(0, f"q{index}", exchange, ""), Queue.BindOk)
    await client.ask(Confirm.Select(), Confirm.SelectOk)


def publish(client: Raw, exchange: str, properties: Basic.Properties) -> None:
    client.send(Basic.Publish(0, exchange, ""), header.ContentHeader(0, 1, properties), body.ContentBody(b"x"))


def in_a_copy(broker: Any, path: Path) -> list[int]:
    """How many messages each queue and stream has after a kill."""
    with qflow.open(inside.copy_as_killed(broker.broker, path)) as copy:
        queues = [len(copy.queue(name)) for name in copy.queues() if name.startswith("q")]
        return queues + [copy.stream(name).stats().messages for name in copy.streams()]


@pytest.mark.parametrize("kind", ["fanout", "x-delayed-message"])
@pytest.mark.parametrize("way", WAYS)
def test_an_ack_of_a_persistent_message_leaves_after_its_commit(
    way: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its queues are."""
    queues = WAYS[way]
    writer = Writer(monkeypatch)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client, other = await connected(server), await connected(server)
            await declared(client, "x", kind, queues)
            writer.may_go.clear()
            publish(client, "x", Basic.Properties(delivery_mode=2, priority=3, headers={"x-delay": 60_000}))
            try:
                await until(writer.waits.is_set)
                for _ in range(10):
                    await other.ask(Basic.Qos(), Basic.QosOk)
                await turns(50)
                assert not client.reader._buffer  # type: ignore[attr-defined]
            finally:
                writer.may_go.set()
            await client.expect(Basic.Ack)
            assert in_a_copy(server.broker, tmp_path / "copy") == [1] * len(queues)

    run(scenario())


def test_a_transient_message_in_a_durable_queue_is_confirmed_when_it_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit holds it."""
    writer = Writer(monkeypatch)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declared(client, "x", "fanout", [{}, {}])
            publish(client, "x", Basic.Properties(delivery_mode=1))  # numbers are reserved in the log, many at once
            await client.expect(Basic.Ack)
            writer.may_go.clear()
            try:
                publish(client, "x", Basic.Properties(delivery_mode=1))
                await client.expect(Basic.Ack)
            finally:
                writer.may_go.set()

    run(scenario())


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_queue_that_is_deleted_meanwhile_refuses_nothing(
    others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is in the queues that are there: its publisher must not send it again."""
    submit = HostedQueue.submit

    def deleted(hosted: HostedQueue, parcel: Any) -> Any:
        if hosted.name == "q0":
            raise qflow.QueueDeleted("queue 'q0' was deleted: declare it again")
        return submit(hosted, parcel)

    monkeypatch.setattr(HostedQueue, "submit", deleted)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await declared(client, "x", "fanout", [{"x-max-length": 5}] * (1 + others))
            publish(client, "x", Basic.Properties(delivery_mode=2))
            await client.expect(Basic.Ack)
            assert in_a_copy(server.broker, tmp_path / "copy") == [0] + [1] * others

    run(scenario())


def test_a_refusal_for_the_dead_letters_leaves_after_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that is refused knows that the dead letter is kept."""
    writer = Writer(monkeypatch)
    full = {"x-max-length": 1, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "dead"}

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await client.ask(Exchange.Declare(0, "dead", "fanout", durable=True), Exchange.DeclareOk)
            await client.ask(Queue.Declare(0, "q9", durable=True), Queue.DeclareOk)
            await client.ask(Queue.Bind(0, "q9", "dead", ""), Queue.BindOk)
            await declared(client, "x", "fanout", [full])
            publish(client, "x", Basic.Properties(delivery_mode=2))
            await client.expect(Basic.Ack)
            writer.may_go.clear()
            publish(client, "x", Basic.Properties(delivery_mode=2))
            try:
                await until(writer.waits.is_set)
                await turns(50)
                assert not client.reader._buffer  # type: ignore[attr-defined]
            finally:
                writer.may_go.set()
            await client.expect(Basic.Nack)
            assert in_a_copy(server.broker, tmp_path / "copy") == [1, 1]

    run(scenario())
