"""Turns of consumers: many that have much to send let others in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pamqp import commands
from pamqp.commands import Basic

from amqp_loop import connected, serving, turns_noted
from doors.event_loop import run
from qflow.amqp.server.channel import Channel
from qflow.amqp.server.client import MOST_IN_A_TURN, Turns
from qflow.amqp.server.consuming import AT_ONCE


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


def test_a_consumer_that_ends_while_it_waits_for_its_turn_takes_none(tmp_path: Path) -> None:
    """Those behind it have theirs, in the order they came."""

    async def scenario() -> None:
        turns, had = Turns(), list[int]()

        async def send(number: int) -> None:
            await turns.begin(MOST_IN_A_TURN)
            had.append(number)

        tasks = [asyncio.create_task(send(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert had == [0, 2, 3]

    run(scenario())
