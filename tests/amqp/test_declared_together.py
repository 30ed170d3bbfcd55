"""Changes of what is declared that wait at the same time share commits, and each is as if it had been alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run, turns
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.plans import Plan
from qflow.amqp.model.records import ROOM
from qflow.amqp.model.vhost import VirtualHost
from qflow.amqp.server.changes import Change
from qflow.amqp.server.host import Host, Hosts
from qflow.errors import InvalidArgument
from qflow.storage.log.facts import MAX_VALUE_BYTES

MANY = 40
MORE = 250
"""More than share commits."""
CONNECTION = 1
Scenario = Callable[[Hosts, qflow.aio.AsyncBroker], Awaitable[None]]


def declare(host: Host, name: str, **said: Any) -> Coroutine[Any, Any, Any]:
    return host.declare_queue(
        CONNECTION, name, **{"durable": True, "exclusive": False, "auto_delete": False, "arguments": {}, **said}
    )


def bind(host: Host, name: str, key: str = "key") -> Coroutine[Any, Any, None]:
    return host.bind_queue(name, "amq.topic", key, {}, CONNECTION)


def serve(path: Path, scenario: Scenario) -> None:
    async def all_of_it() -> None:
        async with qflow.aio.open(path) as broker:
            hosts = await Hosts.of(broker)
            try:
                await scenario(hosts, broker)
            finally:
                await hosts.leave()

    run(all_of_it())


@contextmanager
def counted(broker: qflow.aio.AsyncBroker) -> Iterator[list[object]]:
    """Give what the log is asked to commit meanwhile."""
    log, asked = broker.broker.engine.log, list[object]()
    join = log.join

    def joining(unit: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(unit)
        return join(unit, *arguments, **options)

    log.join = joining  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        log.join = join  # type: ignore[method-assign]


def routed(host: Host) -> list[str]:
    return list(host._model.route("amq.topic", "key"))


def test_queues_that_are_declared_and_bound_at_the_same_time_share_commits(tmp_path: Path) -> None:
    """A thousand clients that came back after a restart stood in one line, at two commits for each queue."""
    names = [f"q-{one:03}" for one in range(MANY)]

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("/")
        with counted(broker) as asked:
            made = await asyncio.gather(*(declare(host, name) for name in names))
        assert [hosted.name for hosted in made] == names
        assert len(asked) <= 5, "records and queues of the first, of all others, and the queue of dead letters"
        with counted(broker) as asked:
            await asyncio.gather(*(bind(host, name) for name in names))
        assert len(asked) <= 2
        assert routed(host) == names

    async def again(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("/")
        assert routed(host) == names, "in the order in which they were bound"
        assert all(host.find(name) is not None for name in names)

    serve(tmp_path, scenario)
    serve(tmp_path, again)


def test_queues_of_several_kinds_and_of_two_virtual_hosts_are_declared_together(tmp_path: Path) -> None:
    """Each has its own settings; names are those of its virtual host."""
    kinds: list[dict[str, Any]] = [
        {},
        {"durable": False},
        {"exclusive": True},
        {"auto_delete": True},
        {"arguments": {"x-expires": 60_000}},
        {"arguments": {"x-message-ttl": 1000}},
        {"arguments": {"x-queue-type": "stream"}},
        {"arguments": {"x-queue-type": "quorum"}},
    ]

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        here, there = await hosts.find("/"), await hosts.find("other")
        asked = [(host, f"q-{number}", said) for number, said in enumerate(kinds) for host in (here, there)]
        made = await asyncio.gather(*(declare(host, name, **said) for host, name, said in asked))
        for (host, name, said), hosted in zip(asked, made, strict=True):
            assert host.find(name) is hosted
            assert hosted.model.settled.is_stream == ("stream" in said.get("arguments", {}).values())
        assert broker.queue("q-5").settings.ttl_s == broker.queue("amqp:other:q-5").settings.ttl_s == 1
        assert broker.queue("q-0").settings.ttl_s is None
        assert here._expiring == there._expiring == {"q-4"}
        await here.connection_ended(CONNECTION)
        assert here.find("q-2") is None
        assert here.find("q-3") is not None

    serve(tmp_path, scenario)


def test_an_error_of_one_fails_no_other(tmp_path: Path) -> None:
    """Refused by the model, by the log, by the broker: who asked for it is told, and nothing is left of it."""

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("other")
        await broker.declare_queue("amqp:other:taken", durable=True, priorities=3)
        results = await asyncio.gather(
            declare(host, "first"),
            declare(host, "amq.mine"),
            declare(host, "large", arguments={"mine": "x" * MAX_VALUE_BYTES}),
            declare(host, "taken"),
            bind(host, "nobody's"),
            declare(host, "last"),
            return_exceptions=True,
        )
        assert [getattr(one, "name", type(one)) for one in results] == [
            "first",
            AmqpError,
            InvalidArgument,
            AmqpError,
            AmqpError,
            "last",
        ]
        codes = [one.code for one in results if isinstance(one, AmqpError)]
        assert codes == [ReplyCode.ACCESS_REFUSED, ReplyCode.PRECONDITION_FAILED, ReplyCode.NOT_FOUND]
        kept = broker.broker.engine.log.facts(ROOM)
        assert sorted(kept) == ['["q","other","first"]', '["q","other","last"]']
        assert sorted(host._model.queues) == ["first", "last"]

    serve(tmp_path, scenario)


@pytest.mark.parametrize("is_held_up", [False, True])
def test_changes_that_wait_together_are_made_in_their_order(tmp_path: Path, is_held_up: bool) -> None:
    """What one has declared another may bind, or is refused where it differs; a deletion has its place between them."""

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("/")
        asked = (
            declare(host, "work"),
            bind(host, "work"),
            declare(host, "other"),
            declare(host, "work"),
            declare(host, "work", durable=False),
            bind(host, "work"),
            bind(host, "work"),
            host.change(lambda model: model.plan_unbind_queue("work", "amq.topic", "key", {}, CONNECTION)),
            bind(host, "other"),
            host.delete_queue("work", CONNECTION),
            bind(host, "work"),
            declare(host, "work", durable=False),
        )
        async with hosts.changes.alone():
            tasks = [asyncio.create_task(one) for one in asked]
            await turns(10 if is_held_up else 0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        first, bound, _, second, differs, *middle, late, new = results
        assert bound is None
        assert first is second
        assert isinstance(differs, AmqpError)
        assert differs.code == ReplyCode.PRECONDITION_FAILED
        assert middle == [None, None, None, None, 0]
        assert isinstance(late, AmqpError)
        assert late.code == ReplyCode.NOT_FOUND
        assert host.find("work") is new is not first
        assert routed(host) == ["other"]

    serve(tmp_path, scenario)


def test_more_than_share_commits_are_declared(tmp_path: Path) -> None:
    """A lot is bounded: the next one follows it."""

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("/")
        made = await asyncio.gather(*(declare(host, f"q-{one}", durable=False) for one in range(MORE)))
        assert len(set(made)) == MORE

    serve(tmp_path, scenario)


@pytest.mark.parametrize("number", [0, 1])
def test_one_that_is_cancelled_in_line_is_whole_and_holds_up_no_other(tmp_path: Path, number: int) -> None:
    """A connection ends while it declares: what it has asked for is done, as ever, be it the first of those in line."""

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("/")
        async with hosts.changes.alone():
            tasks = [asyncio.create_task(declare(host, f"q-{one}", exclusive=True)) for one in range(3)]
            await turns(10)
            tasks[number].cancel()
            await turns(10)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in results] == [one == number for one in range(3)]
        assert sorted(host._model.queues) == ["q-0", "q-1", "q-2"]
        await host.connection_ended(CONNECTION)
        assert not host._model.queues
        assert broker.broker.queues() == ["amqp:dead-letters"]

    serve(tmp_path, scenario)


def test_changes_are_made_whose_leader_is_cancelled(tmp_path: Path) -> None:
    """The first of those that wait together makes them all, in its own task; another one does in its place."""

    def decide(name: str, model: VirtualHost) -> Plan:
        return model.plan_declare_exchange(
            name, "fanout", durable=True, auto_delete=False, internal=False, arguments={}
        )

    async def scenario(hosts: Hosts, broker: qflow.aio.AsyncBroker) -> None:
        model = (await hosts.find("/"))._model
        async with hosts.changes.alone():
            changes = [Change[None](model, partial(decide, name)) for name in ("first", "second", "third")]
            tasks = [asyncio.create_task(hosts.changes.make(one)) for one in changes]
            await turns(10)
            tasks[0].cancel()
            await turns(10)
        await asyncio.gather(*tasks[1:])
        assert not {"second", "third"} - set(model.exchanges)
        assert tasks[0].cancelled()

    serve(tmp_path, scenario)


def test_a_name_that_several_declare_at_the_same_time_is_declared_once(tmp_path: Path) -> None:
    """Who declares it as the first did has the same queue; who declares another one is refused."""

    async def scenario(hosts: Hosts, _broker: qflow.aio.AsyncBroker) -> None:
        host = await hosts.find("/")
        other = declare(host, "q", arguments={"x-message-ttl": 1000})
        _, first, second, refused = await asyncio.gather(
            declare(host, "before"), declare(host, "q"), declare(host, "q"), other, return_exceptions=True
        )
        assert first is second is host.find("q")
        assert isinstance(refused, AmqpError)
        assert refused.code == ReplyCode.PRECONDITION_FAILED
        assert first.model is host._model.queues["q"]

    serve(tmp_path, scenario)
