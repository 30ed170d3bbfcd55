"""A commit fails so that nobody knows whether it holds: clients are told neither that it does nor that it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic, Confirm, Connection, Queue, Tx

import qflow
from amqp_loop import Raw, connected, serving
from doors.event_loop import run
from doubt import Doubt


async def ended(client: Raw) -> tuple[Connection.Close, list[Any]]:
    """Return how the server ends a connection, and what it said on a channel before."""
    said: list[Any] = []
    while True:
        channel, one = await client.next()
        if isinstance(one, Connection.Close):
            return one, said
        assert channel, one
        said.append(one)


def bodies(spool: Path) -> list[bytes]:
    with qflow.open(spool) as broker:
        return broker.queue("q").get_many(9, timeout_s=0).bodies


@pytest.mark.parametrize("confirms", [True, False], ids=["confirms", "no confirms"])
@pytest.mark.parametrize("number", [1, 3])
def test_publishes_in_doubt_end_the_connection(
    confirms: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get neither ack nor nack; what was confirmed before is not taken back, and what comes later is refused."""
    doubt = Doubt(monkeypatch)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client, other = await connected(server), await connected(server)
            await client.ask(Queue.Declare(0, "q", durable=True), Queue.DeclareOk)
            if confirms:
                await client.ask(Confirm.Select(), Confirm.SelectOk)
            client.publish("q", b"before")
            if confirms:
                await client.expect(Basic.Ack)
            else:
                await client.ask(Queue.Declare(0, "q", passive=True), Queue.DeclareOk)
            doubt.armed = True
            for one in range(number):
                client.publish("q", b"%d" % one)
            close, said = await ended(client)
            assert (close.reply_code, said) == (541, [])
            assert "not known whether" in close.reply_text
            await other.ask(Confirm.Select(), Confirm.SelectOk)
            other.publish("q", b"later")
            await other.expect(Basic.Nack)

    run(scenario())
    assert bodies(tmp_path / "spool") == [b"before", *(b"%d" % one for one in range(number))]


def test_a_transaction_in_doubt_is_not_said_to_be_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doubt = Doubt(monkeypatch)

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            client, other = await connected(server), await connected(server)
            await client.ask(Queue.Declare(0, "q", durable=True), Queue.DeclareOk)
            await client.ask(Tx.Select(), Tx.SelectOk)
            await other.ask(Tx.Select(), Tx.SelectOk)
            doubt.armed = True
            client.publish("q")
            client.send(Tx.Commit())
            close, said = await ended(client)
            assert (close.reply_code, said) == (541, [])
            assert "not known whether" in close.reply_text
            assert "not committed" not in close.reply_text
            other.publish("q")
            other.send(Tx.Commit())
            close, _ = await ended(other)
            assert "not committed: the log failed earlier" in close.reply_text

    run(scenario())
    assert bodies(tmp_path / "spool") == [b"x"]
