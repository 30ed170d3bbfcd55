"""What is declared as it is changes nothing, and waits for nobody's turn to change something."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run, turns
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.server.host import Host, Hosts

EARLIER, LATER = 1, 2
"""Connections."""


def declare(host: Host, name: str, connection: int = LATER, **said: Any) -> Coroutine[Any, Any, Any]:
    return host.declare_queue(
        connection, name, **{"durable": True, "exclusive": False, "auto_delete": False, "arguments": {}, **said}
    )


def declare_exchange(host: Host, *, auto_delete: bool = False) -> Coroutine[Any, Any, Any]:
    return host.change(
        lambda model: model.plan_declare_exchange(
            "jobs", "direct", durable=True, auto_delete=auto_delete, internal=False, arguments={}
        )
    )


async def is_done_beside_a_change(host: Host, work: Coroutine[Any, Any, Any]) -> bool:
    """Begin work while somebody else changes what is declared; tell whether it ended before that, and end it."""
    async with host._hosts.changes.alone():
        task = asyncio.create_task(work)
        await turns(10)
        was_done = task.done()
    await task
    return was_done


def with_host(path: Path, scenario: Any) -> None:
    async def all_of_it() -> None:
        async with qflow.aio.open(path) as broker:
            hosts = await Hosts.of(broker)
            try:
                await scenario(await hosts.find("/"), broker)
            finally:
                await hosts.leave()

    run(all_of_it())


def test_what_is_there_is_declared_and_bound_again_while_a_crowd_declares(tmp_path: Path) -> None:
    """Thousands of queues that are new take seconds, one after the other: a worker that comes again had to wait."""

    async def scenario(host: Host, _: object) -> None:
        await declare(host, "work", EARLIER)
        exchange = partial(declare_exchange, host)
        await exchange()
        bind = partial(host.bind_queue, "work", "jobs", "key", {}, LATER)
        await bind()
        for again in (partial(declare, host, "work"), exchange, bind):
            assert await is_done_beside_a_change(host, again())
        assert not await is_done_beside_a_change(host, declare(host, "new"))
        assert not await is_done_beside_a_change(host, host.bind_queue("work", "jobs", "other key", {}, LATER))

    with_host(tmp_path, scenario)


@pytest.mark.parametrize(
    "said", [{"exclusive": True, "durable": False}, {"auto_delete": True}, {"arguments": {"x-expires": 60_000}}]
)
def test_what_may_be_on_its_way_out_is_declared_in_turn(tmp_path: Path, said: dict[str, Any]) -> None:
    """It would be answered, and deleted then."""

    async def scenario(host: Host, _: object) -> None:
        await declare(host, "reply", **said)
        assert not await is_done_beside_a_change(host, declare(host, "reply", **said))

    with_host(tmp_path, scenario)


def test_an_exchange_that_may_be_on_its_way_out_is_declared_in_turn(tmp_path: Path) -> None:
    """It goes with its last binding."""

    async def scenario(host: Host, _: object) -> None:
        await declare_exchange(host, auto_delete=True)
        assert not await is_done_beside_a_change(host, declare_exchange(host, auto_delete=True))

    with_host(tmp_path, scenario)


def test_what_differs_or_is_gone_is_found_out_in_turn(tmp_path: Path) -> None:
    """What is being deleted may be declared otherwise after that."""

    async def scenario(host: Host, broker: qflow.aio.AsyncBroker) -> None:
        await declare(host, "work")
        with pytest.raises(AmqpError) as refused:
            await is_done_beside_a_change(host, declare(host, "work", durable=False))
        assert refused.value.code == ReplyCode.PRECONDITION_FAILED
        async with host._hosts.changes.alone():
            task = asyncio.create_task(declare(host, "work", durable=False))
            await turns(10)
            await host._delete("work", LATER, False, False)
        assert (await task).name == "work"
        await declare(host, "other")
        await broker.delete_queue("other")
        assert not await is_done_beside_a_change(host, declare(host, "other"))
        assert host.find("other") is not None

    with_host(tmp_path, scenario)
