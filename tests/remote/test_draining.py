"""A broker that is about to end gives callers nothing more, and ends each when it holds nothing and is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import qflow
import qflow.aio
from door_raw import RawDoor, until
from qflow import BrokerClosed, QueueEmpty
from qflow.door import Door
from qflow.remote.client import lone
from qflow.remote.client.link import Link
from qflow.remote.server.connection import Connection

Connect = Callable[[], qflow.RemoteBroker]


def door_of(owner: qflow.Broker) -> Door:
    assert owner.engine.door is not None
    return owner.engine.door


def test_who_holds_something_is_told_in_time_that_there_is_nothing_more(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """A get with a time-out ends by it, and what is held can be acked then; who waits for a message gets none."""
    jobs = remote.declare_queue("jobs")
    owner.declare_stream("events", topics=["#"])
    reader = remote.subscribe("events", "#", start="earliest")
    jobs.put_many([b"held", b"left"])
    owner.publish("t", b"1")
    with ThreadPoolExecutor() as pool:
        held = jobs.get()
        door_of(owner).drain()
        without_end = pool.submit(jobs.get)
        with pytest.raises(QueueEmpty):
            jobs.get(timeout_s=0.01)
        assert len(jobs.get_many(10, 0)) == 0
        with pytest.raises(QueueEmpty):
            reader.get(timeout_s=0)
        held.ack(wait=True)
        with pytest.raises(BrokerClosed):
            without_end.result()
    assert [bytes(one.body) for one in owner.queue("jobs").get_many(10, 0)] == [b"left"]


def test_a_caller_told_that_the_broker_is_closed_sees_so_before_its_connection_ends(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller looks whether it is closed, and calls: that is refused from the answer on."""
    monkeypatch.setattr(Link, "end", lambda *_: None)  # it is on its way
    jobs = remote.declare_queue("jobs", limit_messages=1)
    jobs.put(b"in the way")

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            task = asyncio.ensure_future((await broker.queue("jobs")).put(b"waits for room"))
            while owner.queue("jobs").stats().blocked_putters < 2:
                await asyncio.sleep(0)
            await asyncio.to_thread(owner.close)
            with pytest.raises(BrokerClosed):
                await task
            assert broker.closed

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(jobs.put, b"waits for room")
        asyncio.run(scenario())
        with pytest.raises(BrokerClosed):
            waiting.result()
    assert remote.closed


def test_a_drain_before_the_first_caller_is_served_is_for_it(
    open_spool: Callable[..., qflow.Broker], spool: Path
) -> None:
    """It would be given messages until the end otherwise."""
    owner = open_spool()
    owner.declare_queue("jobs").put(b"left")
    door_of(owner).drain()
    first = RawDoor(spool)
    assert b'{"closing":' in first.read(2**16)
    first.socket.close()
    assert len(owner.queue("jobs")) == 1


def test_who_comes_in_the_turn_in_which_a_drain_looks_is_told(
    owner: qflow.Broker, remote: qflow.RemoteBroker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no transport then that could be ended."""
    begin = Connection.begin

    def begin_and_drain(connection: Connection, *args: object) -> None:
        begin(connection, *args)  # type: ignore[arg-type]
        connection.drain(ends=True)

    monkeypatch.setattr(Connection, "begin", begin_and_drain)
    with pytest.raises(qflow.NotFound, match="its owner ended"):
        qflow.connect(spool)
    assert remote.queues() == []


@pytest.mark.parametrize("ends", ["drained", "closed"])
@pytest.mark.parametrize("where", ["main", "others"])
def test_a_put_is_not_in_doubt_as_its_broker_ends(
    open_spool: Callable[..., qflow.Broker], connect: Connect, monkeypatch: pytest.MonkeyPatch, where: str, ends: str
) -> None:
    """It is confirmed and stored, or neither: all that came was answered before the connection ends."""
    monkeypatch.setattr(lone, "SOON", 1)
    owner = open_spool()
    jobs = connect().declare_queue("jobs")
    confirmed = 0
    begun = threading.Event()

    def put() -> None:
        nonlocal confirmed
        with pytest.raises(BrokerClosed):
            while True:
                jobs.put(b"x")
                confirmed += 1
                if confirmed == 100:
                    begun.set()

    def end() -> None:
        begun.wait()
        if ends == "drained":
            door_of(owner).drain()
        else:
            owner.close()

    with ThreadPoolExecutor() as pool:
        doing = pool.submit(put if where == "others" else end)
        (end if where == "others" else put)()
        doing.result()
    if ends == "closed":
        owner = open_spool()
    assert len(owner.queue("jobs")) == confirmed


def test_what_a_task_has_put_is_not_in_doubt_where_a_write_fails(owner: qflow.Broker, spool: Path) -> None:
    """What the owner had answered is taken; what it has never read was not begun."""
    owner.declare_queue("jobs")

    async def scenario() -> None:
        async with qflow.aio.connect(spool) as broker:
            jobs = await broker.queue("jobs")
            answered = asyncio.create_task(jobs.put(b"stored"))
            await asyncio.sleep(0)
            until(lambda: len(owner.queue("jobs")) == 1)
            owner.close()  # in the thread of the loop, which reads nothing meanwhile
            late = asyncio.create_task(jobs.put(b"never read"))
            assert await answered == 0
            with pytest.raises(BrokerClosed):
                await late

    asyncio.run(scenario())


def test_a_get_is_not_told_that_nothing_is_there_while_another_answer_is_read(owner: qflow.Broker, spool: Path) -> None:
    """A large one holds up what would be acquired, and no time-out ends that."""
    owner.declare_queue("large", capacity_bytes="64MiB").put_many([bytes(2**20)] * 8)
    owner.declare_queue("small").put(b"there")

    async def scenario() -> None:
        async with qflow.aio.connect(spool) as broker:
            large, small = await broker.queue("large"), await broker.queue("small")
            for _ in range(5):
                both = await asyncio.gather(large.get_many(8, 0), small.get_many(1, 0))
                assert list(map(len, both)) == [8, 1]
                for one in both:
                    await one.nack()

    asyncio.run(scenario())


def test_who_holds_nothing_and_waits_for_room_begins_nothing_more(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """Its put waits on, and is answered; other requests of its connection are told at once, and are not in doubt."""
    full = remote.declare_queue("full", limit_messages=1)
    other = remote.declare_queue("other")
    full.put(b"in the way")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(full.put, b"waits for room")
        until(lambda: owner.queue("full").stats().blocked_putters)
        door_of(owner).drain()
        with pytest.raises(BrokerClosed, match="is closed"):
            for _ in range(20_000):
                other.put(b"x")
        assert not waiting.done()
        owner.queue("full").get().ack()
        assert waiting.result() == 1
    assert owner.queue("full").get().body == b"waits for room"


def test_what_waits_for_room_is_cancelled_as_its_broker_ends(owner: qflow.Broker, spool: Path) -> None:
    """It was confirmed to nobody, so it is not stored once there is room."""
    owner.declare_queue("full", limit_messages=1).put(b"in the way")

    async def scenario() -> None:
        async with qflow.aio.connect(spool) as broker:
            full = await broker.queue("full")
            waiting = asyncio.create_task(full.put(b"waits for room"))
            while not owner.queue("full").stats().blocked_putters:
                await asyncio.sleep(0)
            door_of(owner).drain()
            with pytest.raises(BrokerClosed):
                while True:
                    await broker.queue("full")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(scenario())
    until(lambda: not owner.queue("full").stats().blocked_putters)
    owner.queue("full").get().ack()
    assert len(owner.queue("full")) == 0


def test_what_an_owner_refuses_as_it_closes_is_not_taken_for_settled(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """While an answer is still to come: each call says that the broker is closed, and the message is there again."""
    full = remote.declare_queue("full", limit_messages=1)
    full.put(b"in the way")
    jobs = remote.declare_queue("jobs")
    jobs.put(b"x")
    delivery = jobs.get(0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(full.put, b"waits for room")
        until(lambda: owner.queue("full").stats().blocked_putters)
        closing = pool.submit(owner.close)
        with pytest.raises(BrokerClosed):
            while True:
                remote.queues()
        for _ in range(2):
            with pytest.raises(BrokerClosed):
                delivery.ack(wait=True)
        assert delivery.settler.left_count == 1
        with pytest.raises(BrokerClosed):
            waiting.result()
        closing.result()


def test_so_it_is_for_tasks(owner: qflow.Broker, spool: Path) -> None:
    """At a connection of theirs."""
    owner.declare_queue("full", limit_messages=1).put(b"in the way")
    owner.declare_queue("jobs").put(b"x")

    async def scenario() -> None:
        async with qflow.aio.connect(spool) as broker:
            full, jobs = await broker.queue("full"), await broker.queue("jobs")
            delivery = await jobs.get(0)
            waiting = asyncio.create_task(full.put(b"waits for room"))
            while not owner.queue("full").stats().blocked_putters:
                await asyncio.sleep(0)
            closing = asyncio.create_task(asyncio.to_thread(owner.close))
            with pytest.raises(BrokerClosed):
                while True:
                    await broker.queues()
            for _ in range(2):
                with pytest.raises(BrokerClosed):
                    await delivery.ack(wait=True)
            with pytest.raises(BrokerClosed):
                await waiting
            await closing

    asyncio.run(scenario())
