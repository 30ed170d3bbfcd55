"""The door for tasks: the surface of `qflow.aio`, cancelled calls, and connections that end."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from doors.event_loop import run, turns, until
from qflow.queues.queue import parts_of
from unit import clocks

Scenario = Callable[[qflow.aio.AsyncRemoteBroker], Any]


def through(owner: qflow.Broker, scenario: Scenario) -> Any:
    """Run a scenario with a connection for tasks."""

    async def whole() -> Any:
        async with qflow.aio.connect(owner.path) as broker:
            return await scenario(broker)

    return run(whole())


def test_messages_go_through_with_all_they_have(owner: qflow.Broker) -> None:
    """Put, get and settle, singly, in batches and by futures."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs", priorities=3)
        assert await asyncio.gather(*(queue.put(b"%d" % number) for number in range(5))) == list(range(5))
        assert await queue.submit(b"5") == 5
        assert await queue.put_many([b"6", b"7"]) == range(6, 8)
        await queue.put(bytearray(b"rich"), headers={"n": 1}, priority=2, ttl_s=1000)
        async with await queue.get() as delivery:
            assert (delivery.body, delivery.headers, delivery.queue) == (b"rich", {"n": 1}, "jobs")
            assert delivery.expires_at_s is not None
        with pytest.raises(qflow.AlreadySettled):
            await delivery.ack()
        batch = await queue.get_many(4)
        await batch[0].nack()
        await batch.ack(wait=True)
        again = await queue.get_nowait()
        assert (again.body, again.delivery_count) == (b"0", 2)
        await queue.ack_many([again], wait=True)
        assert await queue.length() == 4
        assert (await broker.queue("jobs")).settings.priorities == 3
        with pytest.raises(qflow.NotFound):
            await broker.queue("nope")
        assert await broker.queues() == ["jobs"]
        assert [entry.sequence async for entry in queue.browse()] == [4, 5, 6, 7]
        assert (await queue.stats()).acked_total == 5
        assert await queue.purge() == 4

    through(owner, scenario)


@pytest.mark.parametrize("name", [["jobs"], 5, "", "\ud800"])
def test_what_is_no_name_of_a_queue_is_refused_at_once(name: Any, owner: qflow.Broker) -> None:
    """As beside the owner, with the error that says so; not by what fails to encode it, at the first call."""

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            with pytest.raises(qflow.InvalidArgument, match="queue name"):
                broker.queue(name)

    run(scenario())


def test_an_empty_batch_is_settled_as_often_as_anybody_likes(owner: qflow.Broker) -> None:
    """What the loop of a consumer does when its time-out is over."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        batch = await queue.get_many(5, timeout_s=0)
        assert len(batch) == 0
        await batch.ack()
        await batch.ack(wait=True)
        await batch.extend(5)
        await batch.nack()
        assert await broker.queues() == ["jobs"]

    through(owner, scenario)


def test_an_answer_that_meets_a_task_just_cancelled_goes_back(owner: qflow.Broker) -> None:
    """Its future is cancelled, and it has not heard of that yet."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        getting = asyncio.create_task(queue.get())
        await until(lambda: parts_of(owner.queue("jobs")).gate.getters)
        connection: Any = queue._connection
        receive = connection.data_received

        def struck(data: bytes) -> None:
            getting.cancel()
            receive(data)

        connection.data_received = struck
        owner.queue("jobs").put(b"x")
        with pytest.raises(asyncio.CancelledError):
            await getting
        connection.data_received = receive
        delivery = await queue.get(60)
        assert (delivery.body, delivery.delivery_count) == (b"x", 1)

    through(owner, scenario)


@pytest.mark.parametrize("returned", [False, True])
def test_what_is_settled_is_settled_though_its_task_is_cancelled(owner: qflow.Broker, returned: bool) -> None:
    """As beside the owner: the cancelled task waited for the answer alone."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        for _ in range(30):
            await queue.put(b"x")
            delivery = await queue.get()
            settling = asyncio.create_task(delivery.nack() if returned else delivery.ack(wait=True))
            await turns(1)
            settling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await settling
            await until(lambda: not owner.queue("jobs").stats().acquired_messages)

    through(owner, scenario)


def test_a_task_that_is_cancelled_takes_nothing(owner: qflow.Broker) -> None:
    """Whenever it is cancelled: what it may have acquired goes back uncounted, and the connection goes on."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        for number in range(60):
            getting = asyncio.create_task(queue.get())
            await turns(number % 6)
            putting = queue.put(b"%d" % number)
            if number % 3:
                await putting
            getting.cancel()
            if not number % 3:
                await putting
            try:
                delivery = await getting
            except asyncio.CancelledError:
                delivery = await queue.get()
            assert (delivery.body, delivery.delivery_count) == (b"%d" % number, 1)
            await delivery.ack()
        assert await queue.length() == 0

    through(owner, scenario)


def test_loops_and_consumers_give_back_what_they_did_not_show(owner: qflow.Broker) -> None:
    """A loop that is left, and a consumer that is closed."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        await queue.put_many([b"%d" % number for number in range(10)])
        loop = queue.iterate()
        assert [(await anext(loop)).body for _ in range(3)] == [b"0", b"1", b"2"]
        await loop.aclose()
        seen: list[bytes] = []
        enough = asyncio.Event()

        async def work(delivery: qflow.aio.AsyncDelivery) -> None:
            seen.append(delivery.body)
            assert delivery.delivery_count == 1
            if len(seen) == 4:
                consumers[0].stop()
                enough.set()

        consumers = [queue.consume(work)]
        await enough.wait()
        await consumers[0].close()
        assert seen == [b"3", b"4", b"5", b"6"]
        assert await queue.length() == 6

    through(owner, scenario)
    clocks.until(lambda: not owner.queue("jobs").stats().acquired_messages)  # the owner hears of the end
    assert [(one.body, one.delivery_count) for one in owner.queue("jobs").get_many(10)] == [
        *((b"%d" % number, 2) for number in (0, 1, 2)),
        *((b"%d" % number, 1) for number in (7, 8, 9)),
    ]


def test_streams_are_read_in_loops_and_batches(owner: qflow.Broker) -> None:
    """Published, queried, subscribed to, sought in."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        stream = await broker.declare_stream("s", topics=["a/#"])
        results = await broker.publish_many([("a/1", b"%d" % number) for number in range(600)])
        assert results[599].offsets == {"s": 599}
        assert (await broker.submit_publish("a/2", b"600")).offsets == {"s": 600}
        assert [one.offset async for one in stream.query(newest=2)] == [599, 600]
        assert (await stream.last("a/2"))["a/2"].body == b"600"
        async with broker.subscribe("s", name="n", start="earliest", follow=False) as subscription:
            assert [one.offset async for one in subscription] == list(range(601))
            assert (await subscription.position, await subscription.lag) == (601, 0)
            await subscription.seek(598)
            batch = await subscription.get_many(2)
            assert batch.offsets == [598, 599]
            await batch.ack(wait=True)
        async with broker.subscribe("s", name="n", follow=False) as subscription:
            assert (await subscription.get()).offset == 600
            with pytest.raises(qflow.QueueEmpty):
                await subscription.get(0)

    through(owner, scenario)


def test_a_transaction_is_whole(owner: qflow.Broker) -> None:
    """Committed, or undone by an exception."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue, out = await broker.declare_queues(["jobs", "out"])
        await queue.put_many([b"1", b"2"])
        first, second = await queue.get(), await queue.get()
        async with broker.transaction() as tx:
            await tx.put(out, first.body)
            await tx.put_many("out", [])
            await tx.ack(first)
        assert tx.result == [0, range(0)]
        with pytest.raises(ZeroDivisionError):
            async with broker.transaction() as tx:
                await tx.put(out, second.body)
                await tx.ack(second)
                raise ZeroDivisionError
        await second.nack()
        assert (await queue.length(), await out.length()) == (1, 1)

    through(owner, scenario)


def test_the_end_of_the_owner_ends_what_waits(spool: Path, open_spool: Callable[..., qflow.Broker]) -> None:
    """With the errors of the owner; what was held is back."""
    owner = open_spool()

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        await queue.put(b"x")
        held = await queue.get()
        waiting = asyncio.create_task(queue.get())
        await turns()
        await asyncio.to_thread(owner.close)
        with pytest.raises(qflow.BrokerClosed, match="connect again when it is open"):
            await waiting
        await until(lambda: broker.closed)
        with pytest.raises(qflow.BrokerClosed):
            await held.ack()
        with pytest.raises(qflow.BrokerClosed):
            await queue.put(b"y")
        with pytest.raises(qflow.NotFound, match="nobody owns"):
            await qflow.aio.connect(spool)

    through(owner, scenario)
    assert open_spool().queue("jobs").get().delivery_count == 2


def test_a_forked_child_does_not_keep_a_connection(owner: qflow.Broker) -> None:
    """Its copy is closed: what the parent held is back when the parent has ended it, however long the child lives."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        await queue.put(b"x")
        await queue.get()
        waits, go_on = os.pipe()
        child = os.fork()
        if not child:
            os.close(go_on)
            os.read(waits, 1)
            os._exit(0)
        try:
            await broker.close()
            await until(lambda: not owner.queue("jobs").stats().acquired_messages)
        finally:
            os.close(waits)
            os.close(go_on)
            os.waitpid(child, 0)

    through(owner, scenario)


def test_events_are_told_in_the_loop(owner: qflow.Broker) -> None:
    """Those of any caller."""

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        told: list[qflow.Event] = []
        broker.on_event(told.append)
        await broker.declare_queue("jobs", limit_messages=1)
        owner.queue("jobs").put(b"1")
        with pytest.raises(qflow.QueueFull):
            owner.queue("jobs").put(b"2", timeout_s=0)
        await until(lambda: told)
        assert (told[0].kind, told[0].queue) == (qflow.EventKind.LIMIT_REACHED, "jobs")

    through(owner, scenario)


CALLS: dict[str, Callable[[qflow.aio.AsyncRemoteBroker, qflow.aio.AsyncRemoteQueue], Any]] = {
    "put": lambda broker, queue: queue.put(b"x"),
    "put within a time": lambda broker, queue: queue.put(b"x", timeout_s=5),
    "submit": lambda broker, queue: queue.submit(b"x"),
    "get": lambda broker, queue: queue.get(0),
    "publish": lambda broker, queue: broker.publish("t", b"x"),
    "transaction": lambda broker, queue: broker.transaction(),
    "stats": lambda broker, queue: broker.stats(),
    "event": lambda broker, queue: broker.on_event(lambda event: None),
    "close": lambda broker, queue: broker.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_another_loop_is_refused_and_does_nothing(call: str, owner: qflow.Broker) -> None:
    """Its answer would come in a loop that does not wait for it, when the work is done."""

    async def elsewhere(broker: qflow.aio.AsyncRemoteBroker, queue: qflow.aio.AsyncRemoteQueue) -> None:
        with pytest.raises(qflow.InvalidArgument, match="another event loop: connect in this one"):
            made = CALLS[call](broker, queue)
            if hasattr(made, "__await__"):
                await made

    async def scenario(broker: qflow.aio.AsyncRemoteBroker) -> None:
        queue = await broker.declare_queue("jobs")
        await queue.put(b"first")
        held = await queue.get()
        await asyncio.to_thread(lambda: asyncio.run(elsewhere(broker, queue)))
        await held.nack()
        assert [bytes(body) for body in (await queue.get_many(9)).bodies] == [b"first"]

    through(owner, scenario)


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")  # asyncio's: its loop cannot close it any more
def test_a_connection_whose_loop_has_ended_is_refused_and_closed_quietly(owner: qflow.Broker) -> None:
    """The owner hears of its end: what it held comes back."""

    async def first() -> tuple[qflow.aio.AsyncRemoteBroker, qflow.aio.AsyncRemoteQueue]:
        broker = await qflow.aio.connect(owner.path)
        queue = await broker.declare_queue("jobs")
        await queue.put(b"x")
        await queue.get()
        return broker, queue

    async def second(broker: qflow.aio.AsyncRemoteBroker, queue: qflow.aio.AsyncRemoteQueue) -> None:
        with pytest.raises(qflow.InvalidArgument, match="another event loop: connect in this one"):
            await queue.put(b"y")
        await broker.close()
        await broker.close()
        assert broker.closed
        await until(lambda: not owner.queue("jobs").stats().acquired_messages)

    asyncio.run(second(*asyncio.run(first())))
    assert len(owner.queue("jobs")) == 1
    gc.collect()
