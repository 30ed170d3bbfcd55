"""`qflow show` and `qflow redrive` where messages came by AMQP."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pamqp import body, commands, frame, header

import qflow
from amqp_loop import Basic, Queue, connected, serving
from doors.command_line import CommandLine
from doors.event_loop import run, until
from qflow.amqp.reading import reviving
from qflow.amqp.server.content import headers_of, read_properties
from qflow.cli.main import app
from qflow.message import Message, encode_headers

PROPERTIES = {
    "content_type": "text/plain",
    "delivery_mode": 2,
    "priority": 0,
    "message_id": "7",
    "timestamp": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "headers": {"n": 3, "price": Decimal("3.14"), "list": [bytearray(b"\xff"), "two"], "table": {"a": True}},
}


def publish(exchange: str, key: str, content: bytes, **properties: Any) -> bytes:
    """Return the frames of a message."""
    head = header.ContentHeader(0, len(content), Basic.Properties(**properties))
    values = Basic.Publish(0, exchange, key), head, body.ContentBody(content)
    return b"".join(frame.marshal(value, 1) for value in values)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A queue with a message, and another with a dead letter of a queue that is there, of one that is gone, and none."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client = await connected(server)
            await client.ask(commands.Exchange.Declare(0, "logs", "topic", durable=True), commands.Exchange.DeclareOk)
            to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            for name, arguments in (("q", {}), ("dead", {}), ("dies", to_dead), ("goes", to_dead)):
                await client.ask(Queue.Declare(0, name, durable=True, arguments=arguments), Queue.DeclareOk)
            await client.ask(Queue.Bind(0, "q", "logs", "a.#"), Queue.BindOk)
            await client.ask(Queue.Bind(0, "dies", "logs", "b.#"), Queue.BindOk)
            client.send(publish("logs", "a.b", b"shown", **PROPERTIES))
            client.send(publish("logs", "b.c", b"died", delivery_mode=2, message_id="8"))
            client.send(publish("", "goes", b"of a queue that is gone", delivery_mode=2))
            for name in ("dies", "goes"):
                await client.ask(Basic.Consume(0, name), Basic.ConsumeOk)
                tag = (await client.expect(Basic.Deliver)).delivery_tag
                client.send(Basic.Reject(tag, False))
                await until(lambda number=tag: len(server.broker.queue("dead")) == number)
            await client.ask(Queue.Delete(0, "goes"), Queue.DeleteOk)
            client.send(publish("", "dead", b"no dead letter", delivery_mode=2))
            await client.ask(Queue.Declare(0, "dead", True), Queue.DeclareOk)

    run(scenario())
    return tmp_path / "spool"


def test_properties_are_shown_in_words(spool: Path) -> None:
    """Exchange, routing key, each property and header; for programs too."""
    cli = CommandLine(spool.parent)
    done = cli.run("show", spool, "q", 0)
    assert done.stdout.decode().splitlines()[3:] == [
        "exchange  logs",
        "key       a.b",
        "property  content_type = 'text/plain'",
        "property  delivery_mode = 2",
        "property  priority = 0",
        "property  message_id = '7'",
        "property  timestamp = '2026-01-02T03:04:05+00:00'",
        "header    list = ['/w==', 'two']",
        "header    n = 3",
        "header    price = '3.14'",
        "header    table = {'a': True}",
        "body      5 bytes",
        "",
        "shown",
    ]
    found = cli.json("show", spool, "q", 0)
    assert set(found["headers"]) == {"amqp.exchange", "amqp.routing_key", "amqp.properties"}
    assert found["amqp"] == {
        "exchange": "logs",
        "routing_key": "a.b",
        "properties": {
            "content_type": "text/plain",
            "delivery_mode": 2,
            "priority": 0,
            "message_id": "7",
            "timestamp": "2026-01-02T03:04:05+00:00",
            "headers": {"n": 3, "price": "3.14", "list": ["/w==", "two"], "table": {"a": True}},
        },
    }


@pytest.mark.parametrize(
    ("queue_name", "condition", "count"),
    [
        ("q", "n=3", 1),
        ("q", "price=3.14", 1),
        ("q", "table={'a': True}", 1),
        ("dead", "x-first-death-queue=dies", 1),
        ("dead", "amqp.routing_key=dead", 3),
    ],
)
def test_messages_are_found_by_the_headers_that_are_shown(
    spool: Path, queue_name: str, condition: str, count: int
) -> None:
    """Those of their clients lie in the properties, where `show` finds them."""
    cli = CommandLine(spool.parent)
    _heading, *lines = cli.run("peek", spool, queue_name, "--where", condition).stdout.decode().splitlines()
    assert len(lines) == count
    assert "amqp.properties" not in lines[0]
    assert (" reason " in _heading, " rejected " in lines[0]) == (queue_name == "dead", queue_name == "dead")
    done = cli.run("grep", spool, "-F", "--count", condition, queue_name)
    assert done.stdout.decode() == f"{queue_name}: {count}\n"


def test_a_dead_letter_of_the_program_says_why_it_is_dead(spool: Path) -> None:
    """A message of AMQP has headers beside its properties then."""
    with qflow.open(spool) as broker:
        broker.alter_queue("q", dead_letter="set aside")
        broker.queue("q").get().nack(requeue=False, reason="no such street")
    lines = CommandLine(spool.parent).run("show", spool, "set aside", 0).stdout.decode().splitlines()
    assert "header    dead_letter_nack_reason = 'no such street'" in lines
    assert "header    n = 3" in lines
    assert not [line for line in lines if "amqp." in line]


def test_letters_of_a_dead_letter_exchange_are_dead_letters(spool: Path) -> None:
    """To the doctor, where nobody consumes them: no queue names theirs, and it told that its consumers are missing.

    What waits to expire into another queue has none either, and jobs that have come by it are no letters.
    """

    async def scenario() -> None:
        async with serving(spool) as server:
            client = await connected(server)
            later = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dies", "x-message-ttl": 600_000}
            await client.ask(Queue.Declare(0, "later", durable=True, arguments=later), Queue.DeclareOk)
            for name in ("later", "dead"):
                client.send(publish("", name, b"x", delivery_mode=2))
            await client.ask(Queue.Declare(0, "dead", True), Queue.DeclareOk)
            assert await asyncio.to_thread(told) == [
                "4 dead letters in queue 'dead'; 2 for the commonest reason: 'rejected'"
            ]
            await client.ask(Basic.Consume(0, "dead", no_ack=True), Basic.ConsumeOk)
            assert await asyncio.to_thread(told) == []

    def told() -> list[str]:
        found = json.loads(cli.run("doctor", spool, "--json").stdout)["findings"]
        return [one["sentence"] for one in found if one["kind"] != "disk-full"]

    cli = CommandLine(spool.parent)
    run(scenario())


def test_dead_letters_of_one_reason_go_back_alone(spool: Path) -> None:
    """By the headers that clients of RabbitMQ know."""
    cli = CommandLine(spool.parent)
    chosen = ("--where", "x-first-death-reason=rejected", "--where", "x-first-death-queue=dies")
    assert cli.json("redrive", spool, "dead", *chosen)["moved"] == {"dies": 1}
    assert cli.json("purge", spool, "dead", "--where", "x-death", "--yes")["purged"] == 1
    assert cli.json("peek", spool, "dead")["body"] == "no dead letter"


@pytest.mark.parametrize("encoded", ["no base64", "AAAA", "//8="])
def test_what_only_looks_like_amqp_is_shown_as_it_is(tmp_path: Path, encoded: str) -> None:
    """A program may put any header."""
    headers = {"amqp.exchange": "", "amqp.routing_key": "q", "amqp.properties": encoded}
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q").put(b"body", headers=headers)
    found = CommandLine(tmp_path).json("show", tmp_path / "spool", "q", 0)
    assert found["headers"] == headers
    assert "amqp" not in found


def test_dead_letters_go_back_to_where_they_died_first(spool: Path) -> None:
    """Under the exchange and the key they had, with their deaths; the others stay, and the remedy is named."""
    cli = CommandLine(spool.parent)
    assert cli.run("redrive", spool, "dead").stdout.decode().splitlines() == [
        "messages moved from dead: 1",
        "  1 to dies",
        "messages kept: 2",
        "  1: no dead letter: nothing says where it came from",
        "  1: queue 'goes', where it came from, is gone",
        "another queue gets them by --to QUEUE",
    ]
    found = cli.json("show", spool, "dies", 1)
    assert found["body"] == "died"
    assert (found["amqp"]["exchange"], found["amqp"]["routing_key"]) == ("logs", "b.c")
    properties = found["amqp"]["properties"]
    assert properties["message_id"] == "8"
    assert [death["queue"] for death in properties["headers"]["x-death"]] == ["dies"]
    assert cli.json("redrive", spool, "dead", "--to", "q") == {"queue": "dead", "moved": {"q": 2}, "kept": {}}
    assert cli.run("get", spool, "q").stdout == b"shown\nof a queue that is gone\nno dead letter\n"


def test_dead_letters_go_back_beside_an_owner_that_serves_no_amqp(spool: Path) -> None:
    """Whoever owns the spool can read where they died."""
    with qflow.open(spool) as broker:
        moved = CommandLine(spool.parent).json("redrive", spool, "dead")["moved"]
        assert moved == {"dies": 1}
        assert len(broker.queue("dead")) == 2


def test_a_dead_letter_of_a_virtual_host_goes_back_there() -> None:
    """It has names of its own; where nothing says the key, it is the name of the queue."""
    raw = Basic.Properties(headers={"x-first-death-queue": "q", "x-death": [{"queue": "q", "exchange": "e"}]}).marshal()
    dead = Message(b"body", encode_headers(headers_of(read_properties(raw), "", "dead")))
    name, alive = reviving("amqp:my%20host:dead")(dead)
    assert name == "amqp:my%20host:q"
    assert isinstance(alive, Message)
    assert alive == Message(b"body", encode_headers(headers_of(read_properties(raw), "e", "q")))


def test_without_pamqp_the_package_is_named(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a message came from cannot be read; where it goes can be said."""
    monkeypatch.delitem(sys.modules, "qflow.amqp.reading", raising=False)
    monkeypatch.delattr("qflow.amqp.reading", raising=False)
    monkeypatch.setitem(sys.modules, "pamqp", None)
    monkeypatch.setitem(sys.modules, "pamqp.commands", None)
    done = CliRunner().invoke(app, ["redrive", str(spool), "dead"])
    assert done.exit_code == 2
    assert "pip install pamqp, or name a queue by --to" in done.stderr
    assert "amqp.properties" in CliRunner().invoke(app, ["show", str(spool), "q", "0"]).stdout
    done = CliRunner().invoke(app, ["redrive", str(spool), "dead", "--to", "q"])
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "messages moved from dead: 3")
