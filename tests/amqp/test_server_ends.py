"""What clients are told when the broker beneath a server is closed, or has failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pamqp import commands

from amqp_clients import unique
from amqp_loop import connected, serving
from doors.event_loop import run

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
