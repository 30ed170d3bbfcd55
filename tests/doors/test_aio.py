"""qflow.aio: the surface of tasks, who waits for what, and what it costs in threads and wake-ups."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

import inside
import qflow
import qflow.aio
from doors.event_loop import (
    PATIENCE_S,
    close_spool,
    count_wake_ups,
    leave_nothing_behind,
    length,
    plain,
    run,
    told,
    turns,
    until,
)
from drivers import joining, opening_tasks, owner_of
from faults.seams import Faults, open_faulty
from qflow.aio.loops import THREADS, Worker
from qflow.aio.queue import nack_all
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.queues import spiller as spilling
from qflow.queues.queue import parts_of
from qflow.queues.returns import Returns
from qflow.queues.spiller import Spiller
from unit import clocks

pytestmark = pytest.mark.two_drivers
Scenario = Callable[[Any], Any]
On = Callable[..., Any]


@pytest.fixture
def on(spool: Path, access: str) -> On:
    """Run a scenario with a broker, which must pass its check at the end, and close it.

    `open_owner`: how it is opened, if it is not just that.
    """

    def run_it(scenario: Scenario, open_owner: Callable[[], qflow.Broker] | None = None, **settings: Any) -> Any:
        async def whole() -> Any:
            async with opening_tasks(access, open_owner or partial(qflow.open, spool, **settings)) as broker:
                return await scenario(broker)

        return run(whole())

    return run_it


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# The surface ---------------------------------------------------------------------------------------------------------


def test_a_message_goes_through_with_all_it_has(on: On) -> None:
    """Put, get and ack; a delivery shows what a thread's would."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("jobs", priorities=3)
        assert await queue.put(b"plain") == 0
        await queue.put(bytearray(b"rich"), headers={"n": 1}, priority=2, ttl_s=1000)
        async with await queue.get() as delivery:
            assert (delivery.body, delivery.headers, delivery.queue) == (b"rich", {"n": 1}, "jobs")
            assert delivery.expires_at_s is not None
            assert (delivery.delivery_count, delivery.redelivered, delivery.topic) == (1, False, "")
        delivery = await queue.get_nowait()
        assert delivery.sequence == 0
        assert "jobs" in repr(delivery)
        await delivery.ack(wait=True)
        with pytest.raises(qflow.AlreadySettled):
            await delivery.ack()
        with pytest.raises(qflow.QueueEmpty):
            await queue.get_nowait()
        assert await length(queue) == 0

    on(scenario)


def test_many_queues_are_declared_together(on: On) -> None:
    """Each is the queue of its name that tasks get from everywhere else."""

    async def scenario(broker: Any) -> None:
        jobs = await broker.declare_queue("jobs", limit_messages=5)
        first, second, third = await broker.declare_queues(iter(["a", "jobs", "b"]), limit_messages=5)
        assert [queue.name for queue in (first, second, third)] == ["a", "jobs", "b"]
        if broker is owner_of(broker):
            assert (first, second, third) == (broker.queue("a"), jobs, broker.queue("b"))
        with pytest.raises(qflow.SettingsConflict):
            await broker.declare_queues(["c", "jobs"])
        assert await told(broker.queues()) == ["a", "b", "jobs"]

    on(scenario)


@pytest.mark.owner_only(reason="it opens spools")
def test_it_is_opened_by_await_and_by_async_with(spool: Path) -> None:
    """Both ways work, closing twice is fine, and what was confirmed is there after each."""

    async def scenario() -> None:
        async with await qflow.aio.open(spool) as broker:
            await (await broker.declare_queue("q")).put(b"one")
            with pytest.raises(qflow.SpoolInUse):
                await qflow.aio.open(spool)
        await broker.close()
        assert broker.closed
        with pytest.raises(qflow.BrokerClosed):
            await broker.declare_queue("q")
        async with qflow.aio.open(spool) as broker:
            assert broker.recovery.clean
            assert (await broker.queue("q").get()).body == b"one"
            assert broker.queues() == ["q"]
            assert broker.path in repr(broker)

    run(scenario())


def test_a_broker_for_tasks_tells_of_itself_what_one_for_threads_does(on: On) -> None:
    """Beside the owner, and through the door: each property that a `Broker` has, of the same spool."""
    told = [name for name, member in vars(qflow.Broker).items() if isinstance(member, property)]

    async def scenario(broker: Any) -> None:
        async with qflow.aio.connect(broker.path) as other:
            assert {"uuid", "settings"} <= set(told)
            for name in told:
                assert getattr(broker, name) == getattr(other, name), name

    on(scenario)


@pytest.mark.owner_only(reason="it opens spools")
def test_an_opening_that_is_cancelled_leaves_the_spool_free(spool: Path) -> None:
    """Cancelled while a thread opens it, the broker is closed again by that thread."""

    async def scenario() -> None:
        others = threading.enumerate()  # of brokers of other tests, which may stay as long as those
        task = asyncio.ensure_future(qflow.aio.open(spool)._open())
        await turns(2)
        new = [thread for thread in threading.enumerate() if thread not in others]
        (opening,) = (thread for thread in new if thread.name.startswith("qflow-aio"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(opening.join, PATIENCE_S)
        qflow.open(spool).close()

    run(scenario())


@pytest.mark.owner_only(reason="it opens spools")
def test_tasks_that_get_no_thread_are_told_what_to_look_at(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on when there may be threads again."""

    def fail(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        with qflow.open(spool) as owner:
            broker = qflow.aio.AsyncBroker(owner)
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", fail)
                with pytest.raises(qflow.QflowError, match=r"starts no more threads.*ulimit -u"):
                    await broker.declare_queue("jobs")
            await broker.declare_queue("jobs")

    run(scenario())


@pytest.mark.owner_only(reason="for servers in the owner's process")
def test_deliveries_are_given_back_together(on: On) -> None:
    """Those of batches too; one that was settled before is told of when the others are back, or dead letters."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("jobs", dead_letter="dead")
        await queue.put_many([b"%d" % number for number in range(6)])
        batch = list(await queue.get_many(3))
        single = await queue.get()
        await batch[1].ack()
        with pytest.raises(qflow.AlreadySettled):
            await nack_all(queue, [*batch, single], True)
        again = list(await queue.get_many(6))
        assert [one.body for one in again] == [b"0", b"2", b"3", b"4", b"5"]
        assert [one.redelivered for one in again] == [True, True, True, False, False]
        await nack_all(queue, again[:4], False)
        assert (await (await broker.declare_queue("dead")).get_many(6)).bodies == [b"0", b"2", b"3", b"4"]
        await again[4].ack()

    on(scenario)


def test_batches_are_put_taken_and_settled_as_a_whole(on: On) -> None:
    """`put_many`, `get_many`, and all there is to do with a batch."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        assert await queue.put_many([b"a", b"b", b"c", b"d"]) == range(4)
        assert await queue.put_many([]) == range(0)
        batch = await queue.get_many(3)
        assert batch.bodies == [b"a", b"b", b"c"]
        assert list(batch.sequences) == [0, 1, 2]
        assert [one.body for one in batch] == batch.bodies
        assert batch[1].body == b"b"
        assert [one.body for one in batch[1:]] == [b"b", b"c"]
        assert "3 of" in repr(batch)
        await batch[0].nack()
        await batch.extend(10)
        await batch.ack(wait=True)
        batch = await queue.get_many(10)
        assert batch.bodies == [b"a", b"d"]
        assert batch[0].redelivered
        await batch.nack()
        await queue.ack_many(await queue.get_many(1))
        await queue.ack_many([await queue.get()], wait=True)
        assert not await queue.get_many(5, timeout_s=0)
        with pytest.raises(qflow.InvalidArgument, match="max_messages"):
            await queue.get_many(0)

    on(scenario)


def test_submit_gives_a_future(on: On) -> None:
    """Its result is the sequence; where there is no room at once, a task waits for it."""

    async def scenario(broker: Any) -> None:
        durable = await broker.declare_queue("durable")
        futures = [durable.submit(b"%d" % number) for number in range(10)]
        assert not any(future.done() for future in futures)
        assert await asyncio.gather(*futures) == list(range(10))
        passing = await broker.declare_queue("passing", durable=False, limit_messages=1)
        assert await passing.submit(b"a") == 0
        waiting = passing.submit(b"b")
        await turns()
        assert not waiting.done()
        await (await passing.get()).ack()
        assert await waiting == 1
        with pytest.raises(qflow.QueueFull):
            await passing.submit(b"c", timeout_s=0)
        await durable.submit(b"not logged", durable=False)

    on(scenario)


def test_what_a_task_may_not_do_raises_what_a_thread_gets(on: On) -> None:
    """Errors are those of the engine."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", max_message_bytes=10, limit_messages=1)
        with pytest.raises(qflow.InvalidArgument):
            await queue.put("text")  # type: ignore[arg-type]
        with pytest.raises(qflow.MessageTooLarge):
            await queue.put(bytes(11))
        with pytest.raises(qflow.SettingsConflict):
            await broker.declare_queue("q")
        with pytest.raises(qflow.NotFound):
            await told(broker.queue("r"))
        await queue.put(b"x")
        with pytest.raises(qflow.QueueFull):
            await queue.put_nowait(b"y")
        with pytest.raises(qflow.QueueFull):
            await queue.put(b"y", timeout_s=0.001)
        with pytest.raises(qflow.QueueEmpty):
            await (await broker.declare_queue("empty")).get(timeout_s=0.001)
        with pytest.raises(qflow.InvalidArgument):
            queue.consume(3)  # type: ignore[arg-type]

    on(scenario)


def test_topics_reach_queues(on: On) -> None:
    """Bind, publish alone, together and as a future, and unbind."""

    async def scenario(broker: Any) -> None:
        durable = await broker.declare_queue("durable")
        passing = await broker.declare_queue("passing", durable=False)
        await broker.bind(durable, "a/#")
        await broker.bind("passing", "+/b")
        assert (await broker.publish("a/b", b"one")).sequences == {"durable": 0, "passing": 0}
        assert (await broker.publish("nowhere", b"one")).sequences == {}
        results = await broker.publish_many([("a/b", b"two"), ("a/c", b"three")])
        assert [result.sequences for result in results] == [{"durable": 1, "passing": 1}, {"durable": 2}]
        assert (await broker.submit_publish("x/b", b"four")).sequences == {"passing": 2}
        assert (await passing.get()).topic == "a/b"
        await broker.unbind(durable, "a/#")
        assert (await broker.publish("a/b", b"five")).sequences == {"passing": 3}

    on(scenario)


def test_a_transaction_holds_whole_or_not_at_all(on: On) -> None:
    """Puts, publishes and acks of several queues; an exception undoes them."""

    async def scenario(broker: Any) -> None:
        source = await broker.declare_queue("source")
        target = await broker.declare_queue("target")
        await broker.bind(target, "t")
        await source.put_many([b"1", b"2", b"3"])
        with pytest.raises(RuntimeError):
            async with broker.transaction() as tx:
                await tx.put(target, b"never")
                delivery = await source.get()
                await tx.ack(delivery)
                raise RuntimeError
        assert await length(target) == 0
        async with broker.transaction() as tx:
            await tx.put(target, b"a")
            await tx.put_many("target", [b"b", b"c"])
            await tx.publish("t", b"d")
            await tx.ack(delivery)
            await tx.ack_many(await source.get_many(2))
        assert tx.result[:2] == [0, range(1, 3)]
        assert "committed" in repr(tx)
        assert (await length(source), await length(target)) == (0, 4)
        tx = broker.transaction()
        await tx.put(target, b"e")
        await tx.rollback()
        tx = broker.transaction(timeout_s=5)
        await tx.put(target, b"f")
        assert await tx.commit() == [4]

    on(scenario)


def test_a_callback_for_events_that_would_not_run_is_told(on: On) -> None:
    """One that is async is refused; of one that hides that, the loop tells: it has not run."""

    async def scenario(broker: Any) -> None:
        async def awaits(event: qflow.Event) -> None:
            """Nobody awaits it."""

        with pytest.raises(qflow.InvalidArgument, match="an event callback must not be async"):
            broker.on_event(awaits)
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        broker.on_event(lambda event: awaits(event))
        queue = await broker.declare_queue("q", limit_messages=1)
        await queue.put(b"a")
        with pytest.raises(qflow.QueueFull):
            await queue.put_nowait(b"b")
        await until(lambda: told)
        assert "has not run" in str(told[0])

    on(scenario)


def test_the_rest_of_the_surface(on: On) -> None:
    """Alter, purge, browse, stats, events, slow consumers, delete."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        if broker is owner_of(broker):
            assert queue is broker.queue("q")
        assert (queue.name, repr(queue)) == ("q", f"<{type(queue).__name__} 'q'>")
        seen: list[Any] = []
        broker.on_event(seen.append)
        assert (await broker.alter_queue("q", limit_messages=2)).settings.limit_messages == 2
        await queue.put_many([b"a", b"b"])
        with pytest.raises(qflow.QueueFull):
            await queue.put_nowait(b"c")
        await until(lambda: seen)
        assert seen[0].kind is qflow.EventKind.LIMIT_REACHED
        assert [entry.sequence async for entry in queue.browse()] == [0, 1]
        assert (await queue.stats()).messages == (await broker.stats()).messages == 2
        await queue.on_slow_consumer(100.0)
        assert await queue.delete(1)
        assert not await queue.delete(1)
        with pytest.raises(qflow.InvalidArgument):
            await queue.delete(-1)
        assert await queue.purge() == 1
        await broker.delete_queue("q")
        with pytest.raises(qflow.QueueDeleted):
            await queue.put(b"d")

    on(scenario)


@pytest.mark.parametrize("durable", [True, False])
def test_a_task_deletes_a_message_wherever_it_lies(durable: bool, on: On) -> None:
    """In memory, on the disk, delayed, in the log alone: many at once, and the loop goes on meanwhile."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=durable)
        sequences = list(await queue.put_many([bytes(500)] * 40))
        sequences += [await queue.put(bytes(500), delay_s=1000 + number * 7 % 10) for number in range(40)]
        assert (await queue.stats()).spilled_messages > 40
        gone = sequences[::3]
        assert await asyncio.gather(*map(queue.delete, gone)) == [True] * len(gone)
        assert await asyncio.gather(*map(queue.delete, gone)) == [False] * len(gone)
        assert sorted([entry.sequence async for entry in queue.browse()]) == sorted(set(sequences) - set(gone))
        assert (await queue.stats()).deleted_total == len(gone)

    async def once_more(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        assert (await queue.stats()).logged_messages > 0
        assert await asyncio.gather(*map(queue.delete, (1, 2, 3, 4))) == [True, True, False, True]

    on(scenario, capacity_bytes=10_000)
    if durable:
        on(once_more, capacity_bytes=10_000)


@pytest.mark.owner_only
def test_a_task_that_deletes_many_leaves_the_loop_to_others(on: On) -> None:
    """None of them waits for anything: they are in memory, and not durable. By a door it is the loop of the owner."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        sequences = list(await queue.put_many([b"x"] * 100))
        left: list[int] = []

        async def look() -> None:
            while await length(queue):
                left.append(await length(queue))
                await turns(1)

        beside = asyncio.create_task(look())
        assert await queue.delete_many(sequences) == sequences
        await beside
        assert len(set(left)) > 3

    on(scenario)


def test_overflow_policies_hold_for_tasks(on: On) -> None:
    """What a limit turns away is dropped, refused, or a dead letter, whoever puts."""

    async def scenario(broker: Any) -> None:
        for policy in (qflow.Overflow.DROP_NEWEST, qflow.Overflow.DROP_OLDEST, qflow.Overflow.DEAD_LETTER):
            name = policy.value
            queue = await broker.declare_queue(name, limit_messages=1, on_overflow=policy, dead_letter="dead")
            await broker.bind(queue, name)
            await queue.put(b"first")
            assert (await queue.put(b"second") is None) is (policy is not qflow.Overflow.DROP_OLDEST)
            await broker.publish(name, b"third")
            async with await queue.get() as delivery:
                assert delivery.body == (b"third" if policy is qflow.Overflow.DROP_OLDEST else b"first")
        dead = broker.queue("dead")
        assert (await dead.get_many(10)).bodies == [b"second", b"third"]

    on(scenario)


def test_importing_qflow_does_not_import_asyncio() -> None:
    """Who does not use it does not pay for it."""
    code = "import sys, qflow; assert not {'asyncio', 'qflow.aio'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_broker_imports_nothing_dear(spool: Path) -> None:
    """Neither opening it and passing a message on, nor the figures it writes, wait for attrs and what that imports."""
    code = f"""if True:
        import os, sys, qflow
        with qflow.open({str(spool)!r}) as broker:
            queue = broker.declare_queue("q")
            queue.put(b"x")
            queue.get().ack()
            while not os.path.exists(broker.path + "/stats.json"):
                pass
        assert not {{"attrs", "asyncio", "dataclasses", "dis", "inspect", "signal", "uuid", "platform", "click"}} & sys.modules.keys()"""
    subprocess.run([sys.executable, "-c", code], check=True)


# async for and consumers ---------------------------------------------------------------------------------------------


def test_async_for_gives_back_uncounted_what_it_fetched_and_did_not_hand_out(on: On) -> None:
    """Asking for the next acks nothing; after a break the rest is where it was."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        await queue.put_many([b"%d" % number for number in range(10)])
        taken = []
        async for delivery in queue:
            taken.append(delivery)
            if len(taken) == 3:
                break
        await turns()
        stats = await queue.stats()
        assert (stats.acquired_messages, stats.resident_messages) == (3, 7)
        for delivery in taken:
            await delivery.ack()
        rest = await queue.get_many(100)
        assert rest.bodies == [b"%d" % number for number in range(3, 10)]
        assert {one.delivery_count for one in rest} == {1}
        await rest.ack()

    on(scenario)


def test_async_for_ends_with_the_broker_or_the_queue(on: On) -> None:
    """A loop that waits is told why there is nothing more."""

    async def scenario(broker: Any) -> None:
        async def loop(name: str) -> None:
            async for delivery in broker.queue(name):
                await delivery.ack()

        for name in ("closed", "deleted"):
            await broker.declare_queue(name)
        loops = [asyncio.create_task(loop(name)) for name in ("closed", "deleted")]
        await turns()
        await broker.delete_queue("deleted")
        with pytest.raises(qflow.QueueDeleted):
            await loops[1]
        await close_spool(broker)
        with pytest.raises(qflow.BrokerClosed):
            await loops[0]

    on(scenario)


def test_a_consumer_runs_so_many_callbacks_at_once_and_no_more(on: On, caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks ack on return and give back on an exception; closing waits for those that run.

    What a callback raises is told as an event, and where it runs away from the owner by the log alone.
    """

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        await queue.put_many([b"%d" % number for number in range(20)])
        running = most = 0
        handled: list[bytes] = []

        async def callback(delivery: qflow.aio.AsyncDelivery) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await turns()
            running -= 1
            if delivery.body == b"7" and not delivery.redelivered:
                raise ValueError("once")
            handled.append(delivery.body)

        failures: list[Any] = []
        broker.on_event(failures.append)
        caplog.clear()
        async with queue.consume(callback, prefetch=5, concurrency=4) as consumer:
            assert consumer.running
            await until(lambda: len(handled) == 20)
        assert not consumer.running
        assert "closed" in repr(consumer)
        assert (most, running, await length(queue)) == (4, 0, 0)
        assert sorted(handled, key=int) == [b"%d" % number for number in range(20)]
        if broker is owner_of(broker):
            await until(lambda: failures)
            assert failures[0].kind is qflow.EventKind.CONSUMER_FAILED
        assert [record.message for record in caplog.records] == ["the consumer of queue 'q' failed with message 7"]

    on(scenario)


def test_a_consumer_that_is_closed_at_once_or_by_its_callback_leaves_nothing(on: On) -> None:
    """Whenever it is closed, what it fetched goes back uncounted; from its callback it does not wait for itself."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        await queue.put_many([b"1", b"2", b"3"])

        async def never(delivery: qflow.aio.AsyncDelivery) -> None:
            raise AssertionError(delivery)

        await queue.consume(never).close()
        consumer: qflow.aio.AsyncConsumer

        async def once(delivery: qflow.aio.AsyncDelivery) -> None:
            await consumer.close()

        consumer = queue.consume(once)
        await until(lambda: not consumer.running)
        await turns()
        found = await leave_nothing_behind(broker)
        assert [(body, count) for _, body, count in found] == [(b"2", 1), (b"3", 1)]

    on(scenario)


@pytest.mark.parametrize("retry", [None, qflow.Backoff()])
def test_a_plain_function_may_be_a_callback(on: On, retry: qflow.Backoff | None) -> None:
    """What it returns has not to be awaited, for it has run; a generator has not, and has failed."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", max_deliveries=1)
        await queue.put_many([b"1", b"2"])
        seen: list[bytes] = []
        async with queue.consume(lambda delivery: seen.append(delivery.body), retry=retry):
            while (await queue.stats()).messages:
                await turns()
        assert seen == [b"1", b"2"]
        await queue.put(b"3")
        async with queue.consume(lambda delivery: (_ for _ in seen), retry=retry):
            while (await queue.stats()).messages:
                await turns()
        assert (await queue.stats()).acked_total == 2

    on(scenario)


def test_a_consumer_whose_get_fails_tells_it_once_and_tries_again(
    on: On, spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the consumer of a thread does: told once, and it goes on when there are descriptors again."""
    monkeypatch.setattr("qflow.queues.consumer.AGAIN_S", 0.001)
    faults = Faults()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        plain(broker).put_many([b"1", b"2"])  # all of it is on disk when this returns
        events: list[Any] = []
        received: list[tuple[bytes, int]] = []
        broker.on_event(events.append)

        async def callback(delivery: qflow.aio.AsyncDelivery) -> None:
            received.append((delivery.body, delivery.delivery_count))

        faults.fail("open", errno.EMFILE)
        async with queue.consume(callback, concurrency=2) as consumer:
            await until(lambda: faults.calls.get("open", 0) > 20 and caplog.records)
            assert consumer.running
            assert not received
            faults.heal()
            await until(lambda: len(plain(broker)) == 0)
        assert sorted(received) == [(b"1", 1), (b"2", 1)]
        assert len([record for record in caplog.records if "tries again" in record.message]) == 1
        if broker is owner_of(broker):
            await until(lambda: [event.kind.value for event in events] == ["consumer_failed"])
        assert await leave_nothing_behind(broker) == []

    on(scenario, partial(open_faulty, spool, faults, capacity_bytes=0))


@pytest.mark.owner_only(reason="through the door it hears of the end when it asks for more")
def test_a_consumer_that_rests_ends_with_its_queue(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a get that failed, it does not look before an hour is over; it is closed, or the queue deleted, before."""
    monkeypatch.setattr("qflow.queues.consumer.AGAIN_S", 3600)

    async def scenario() -> None:
        faults = Faults()
        async with qflow.aio.AsyncBroker(open_faulty(spool, faults, capacity_bytes=0)) as broker:
            queue = await broker.declare_queue("q", durable=False)
            queue.queue.put_many([b"1", b"2"])  # all of it is on disk when this returns
            events: list[Any] = []
            broker.broker.on_event(events.append)

            async def callback(_: qflow.aio.AsyncDelivery) -> None: ...

            faults.fail("open", errno.EMFILE)
            first, second = queue.consume(callback), queue.consume(callback)
            inner: Any = queue.queue
            await until(lambda: len(events) == 2)
            await first.close()
            assert list(parts_of(inner).consumers.listed) == [second._tasks]
            faults.heal()
            await broker.delete_queue("q")
            await until(lambda: not parts_of(inner).consumers.listed)

    run(scenario())


@pytest.mark.parametrize("retry", [None, qflow.Backoff(0.0)])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, qflow.QueueDeleted, qflow.BrokerClosed])
def test_a_callback_that_would_end_its_task_has_failed(
    on: On, kind: type[BaseException], retry: qflow.Backoff | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As when it awaits what was cancelled, or puts where all is closed. The consumer goes on; a thread can stop it."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        counts: list[int] = []

        async def callback(delivery: qflow.aio.AsyncDelivery) -> None:
            counts.append(delivery.delivery_count)
            if len(counts) < 3:
                raise kind

        consumer = queue.consume(callback, concurrency=2, retry=retry)
        await queue.put(b"1")
        await until(lambda: len(counts) == 3 or not consumer.running)
        assert counts == [1, 2, 3]
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [kind, kind]
        await asyncio.to_thread(consumer.stop)
        await until(lambda: not consumer.running and not parts_of(plain(broker)).consumers.listed)

    on(scenario)


# Waiting -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> list[tuple[int, bytes]]:
    """Which getter got what."""
    return []


async def begin_getters(queue: Any, served: list[tuple[int, bytes]]) -> list[asyncio.Task[None]]:
    """Have four tasks wait, one after the other."""

    async def getter(number: int) -> None:
        async with await queue.get() as delivery:
            served.append((number, delivery.body))

    getters = []
    for number in range(4):
        getters.append(asyncio.create_task(getter(number)))
        await turns(1)
    return getters


def test_getters_are_served_in_the_order_they_came(on: On, served: list[tuple[int, bytes]]) -> None:
    """First come, first served."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        getters = await begin_getters(queue, served)
        await queue.put_many([b"a", b"b"])
        await queue.put(b"c")
        await queue.put(b"d")
        await asyncio.gather(*getters)
        assert served == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]

    on(scenario)


@pytest.mark.owner_only(reason="at the door, who is woken has its turn before another request is read")
def test_a_batch_that_waited_first_has_the_first_messages(on: On) -> None:
    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        batch = asyncio.create_task(queue.get_many(2))
        await turns()
        one = asyncio.create_task(queue.get())
        await turns()
        await queue.put_many([b"a", b"b", b"c"])
        assert (await batch).bodies == [b"a", b"b"]
        assert (await one).body == b"c"

    on(scenario)


@pytest.mark.owner_only(reason="the loop of the owner has no turn meanwhile")
@pytest.mark.parametrize("event", ["expires", "is purged", "is kept back", "is deleted", "is closed"])
def test_a_message_is_nobodys_until_the_task_that_waits_has_its_turn(on: On, event: str) -> None:
    """What becomes of it by then is what the task finds, and it was not delivered."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", max_deliveries=1, dead_letter="dead")
        found = {"is deleted": qflow.QueueDeleted, "is closed": qflow.BrokerClosed}.get(event, qflow.QueueEmpty)
        getter = asyncio.create_task(queue.get(0.1 if found is qflow.QueueEmpty else PATIENCE_S))
        await turns()
        owner = owner_of(broker).broker
        owner.queue("q").put(b"", ttl_s=0.001 if event == "expires" else None)
        put_s = time.time()
        if event == "is purged":
            owner.queue("q").purge()
        elif event == "is kept back":
            owner.queue("q").pause()
        elif event == "is deleted":
            owner.delete_queue("q")
        elif event == "is closed":
            owner.close()
        else:
            while time.time() < put_s + 0.002:
                pass
        with pytest.raises(found):
            await getter
        if event == "is kept back":
            owner.queue("q").resume()
            assert not (await queue.get()).redelivered

    on(scenario)
    if event == "is closed":
        on(once_more)


async def once_more(broker: Any) -> None:
    assert not plain(broker).get(0).redelivered


@pytest.mark.owner_only(reason="at the door, who is woken has its turn before another request is read")
def test_a_getter_that_was_woken_and_found_nothing_keeps_its_place(on: On, served: list[tuple[int, bytes]]) -> None:
    """Somebody else was faster."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        getters = await begin_getters(queue, served)
        await queue.put(b"snatched")
        await (await queue.get_nowait()).ack()  # before the first one, who is woken, has its turn
        await turns()
        await queue.put_many([b"a", b"b", b"c", b"d"])
        await asyncio.gather(*getters)
        assert served == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]

    on(scenario)


def test_a_wake_up_of_a_cancelled_getter_goes_to_the_next(on: On) -> None:
    """The message that woke it reaches another who waits."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
        await turns()
        await queue.put(b"x")
        first.cancel()
        delivery = await second
        assert (delivery.body, delivery.delivery_count) == (b"x", 1)
        assert first.cancelled()
        await queue.purge()

    on(scenario)


def test_putters_at_a_limit_pass_in_the_order_they_came_tasks_and_threads_alike(on: On) -> None:
    """One line for both."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False, limit_messages=1, resume_ratio=0)
        await queue.put(b"0")
        admission: Any = parts_of(plain(broker)).admission
        putters: list[Any] = []
        for number in range(1, 7):
            body = b"%d" % number
            putters.append(
                asyncio.create_task(queue.put(body))
                if number % 2
                else asyncio.get_running_loop().run_in_executor(None, plain(broker).put, body)
            )
            await until(lambda number=number: len(admission.line) == number)
        got = []
        for _ in range(7):
            async with await queue.get() as delivery:
                got.append(delivery.body)
        assert got == [b"%d" % number for number in range(7)]
        await asyncio.gather(*putters)

    on(scenario)


@pytest.mark.parametrize("durable", [True, False])
def test_tasks_that_wait_and_can_never_fit_any_more_are_refused(on: On, durable: bool) -> None:
    """When the limit is lowered; those behind them go on when there is room."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=durable, limit_bytes=10)
        await broker.bind(queue, "t")
        await queue.put_many([b"12345", b"6789"])
        admission: Any = parts_of(plain(broker)).admission

        async def transact() -> None:
            async with broker.transaction() as transaction:
                await transaction.put_many(queue, [b"abc", b"def"])

        puts = (
            lambda: queue.put(b"12345"),
            lambda: queue.put_many([b"123", b"45"]),
            lambda: queue.put(b"ab"),
            transact,
            lambda: broker.publish("t", b"1"),
            lambda: queue.put(b"cd"),
        )
        waiting = []
        for number, put in enumerate(puts, 1):
            waiting.append(asyncio.ensure_future(put()))
            await until(lambda number=number: len(admission.line) == number)
        await broker.alter_queue("q", limit_bytes=4)
        await until(lambda: sum(one.done() for one in waiting) == 4)
        await (await queue.get_many(2)).ack()
        outcome = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(one, qflow.InvalidArgument) for one in outcome] == [True, True, False, True, True, False]
        assert (await queue.get_many(10)).bodies == [b"ab", b"cd"]

    on(scenario)


def test_tasks_and_threads_at_a_limit_of_100_never_make_101(on: On) -> None:
    """Both reserve depth before they wait for anything."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", limit_messages=100, resume_ratio=0.9)
        deepest = 0

        async def produce() -> None:
            for _ in range(5):
                await queue.put(b"x")

        def produce_in_thread() -> None:
            for _ in range(50):
                plain(broker).put(b"y")

        async def drain() -> None:
            nonlocal deepest
            left = 1000
            while left:
                deepest = max(deepest, await length(queue))
                batch = await queue.get_many(7)
                left -= len(batch)
                await batch.ack()

        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(None, produce_in_thread) for _ in range(4)]
        await asyncio.gather(*(produce() for _ in range(160)), *threads, drain())
        assert 50 < deepest <= 100

    on(scenario)


def test_a_thousand_tasks_share_commits_and_wake_ups(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch, or a few where the loop's thread is interrupted; one wake-up of the loop for each, no thread per put."""
    counts: Counter[str] = Counter()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        await queue.put(b"first")
        log = owner_of(broker).broker.engine.log
        before, threads = log.commits, set(threading.enumerate())
        with monkeypatch.context() as patched:
            count_wake_ups(patched, counts, "wake-ups")
            sequences = await asyncio.gather(*(queue.put(b"%d" % number) for number in range(1000)))
        wake_ups = counts["wake-ups"]
        assert sequences == list(range(1, 1001))
        if broker is owner_of(broker):
            assert wake_ups <= log.commits - before <= 10  # none, where the writer was done before the tasks waited
        else:
            assert (wake_ups, log.commits - before < 100) == (0, True)
        assert set(threading.enumerate()) <= threads

    on(scenario)


@pytest.mark.owner_only(reason="at the door, an answer has to come")
def test_what_memory_serves_neither_suspends_nor_starts_a_thread(on: On) -> None:
    """Transient puts, gets, acks and publishes run to their end at the first step."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        await broker.bind(queue, "t")
        threads = set(threading.enumerate())

        async def everything() -> None:
            await queue.put(b"a")
            await queue.put_many([b"b"])
            await broker.publish("t", b"c")
            await (await queue.get()).ack()
            await (await queue.get_nowait()).nack()
            await (await queue.get_many(5)).ack(wait=True)
            async with broker.transaction() as tx:
                await tx.put(queue, b"d")
            async for delivery in queue:
                await delivery.ack()
                break

        with pytest.raises(StopIteration):
            everything().send(None)
        assert set(threading.enumerate()) <= threads

    on(scenario)


def test_what_comes_back_is_spilled_by_no_loop(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others have taken the memory meanwhile that there was when the loop looked."""
    in_loops: list[bool] = []
    spill = Spiller.spill_tail

    def spill_tail(spiller: Spiller, wanted: int) -> bool:
        in_loops.append(asyncio._get_running_loop() is not None)
        return spill(spiller, wanted)

    monkeypatch.setattr(Spiller, "spill_tail", spill_tail)
    monkeypatch.setattr(Returns, "takes_disk", lambda *_: False)

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        await queue.put_many([bytes(100)] * 400)
        for _ in range(400):
            await (await queue.get()).nack(delay_s=3600)
        gate = parts_of(owner_of(broker).queue("q").queue).gate
        await until(lambda: gate.used <= gate.account.capacity)

    on(scenario, capacity_bytes=100_000)
    assert in_loops
    assert not any(in_loops)


def test_a_thread_that_spills_for_a_task_does_other_jobs_meanwhile(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """It spills for a moment and stands at the end of the line again: a close waits for the moment alone."""
    jobs, steps = 0, 0
    begin, spill = Worker.spill, Spiller.spill_tail

    def begin_job(worker: Worker, *arguments: Any) -> None:
        nonlocal jobs
        jobs += 1
        begin(worker, *arguments)

    def spill_tail(spiller: Spiller, wanted: int) -> bool:
        nonlocal steps
        steps += 1
        return spill(spiller, wanted)

    monkeypatch.setattr(spilling, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(Worker, "spill", begin_job)
    monkeypatch.setattr(Spiller, "spill_tail", spill_tail)

    async def scenario(broker: Any) -> None:
        inside.still(owner_of(broker).broker)
        queue = await broker.declare_queue("q", capacity_bytes=100_000)
        await queue.put_many([bytes(100)] * 2_000)
        gate = parts_of(owner_of(broker).queue("q").queue).gate
        await until(lambda: gate.used <= gate.account.capacity)

    on(scenario, capacity_bytes=10_000_000)
    assert jobs >= steps > 1


def test_what_spills_goes_through_memory_and_back_without_blocking_the_loop(on: On) -> None:
    """Ten times the capacity, producers and a consumer in one loop; never more than two threads for the disk.

    Beside them is the one that has looked.
    """
    before = set(threading.enumerate())

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        bodies = [b"%04d" % number * 250 for number in range(1000)]
        for body in bodies:
            await queue.put(body)
        stats = await queue.stats()
        assert stats.spilled_messages > 500
        assert stats.resident_bytes <= 100_000
        got = []
        async for delivery in queue:
            got.append(delivery.body)
            await delivery.ack()
            if len(got) == len(bodies):
                break
        assert got == bodies
        threads = {thread for thread in threading.enumerate() if thread.name.startswith("qflow-aio")}
        assert len(threads - before) <= THREADS + 1

    on(scenario, capacity_bytes=100_000)


def test_a_full_disk_is_waited_for_or_told(on: On, spool: Path) -> None:
    """DiskFull at the time-out, and whoever waits goes on when there is room."""
    faults = Faults()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        await queue.put_many([bytes(1000)] * 6)
        faults.fail("pwrite", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            for _ in range(3):
                await queue.put(bytes(1000), timeout_s=0)
        waiting = asyncio.create_task(queue.put(bytes(3000)))
        await until(lambda: parts_of(plain(broker)).gate.room.watching)
        await (await queue.get_many(6)).ack()
        await waiting
        faults.heal()
        await leave_nothing_behind(broker)

    on(scenario, partial(open_faulty, spool, faults, capacity_bytes=8000))


def test_a_refused_commit_reaches_each_of_its_tasks(on: On, spool: Path) -> None:
    """Every put of the batch raises, none is there, and what follows works."""
    faults = Faults()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q")
        faults.fail("make_room", lambda: qflow.DiskFull("no space"))
        outcomes = await asyncio.gather(*(queue.put(b"x") for _ in range(5)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [qflow.DiskFull] * 5
        assert len({id(outcome) for outcome in outcomes}) == 5
        faults.heal()
        assert await length(queue) == 0
        await queue.put(b"y")
        assert len(await leave_nothing_behind(broker)) == 1

    on(scenario, partial(open_faulty, spool, faults))


def test_an_ack_timeout_reaches_a_task_that_waits(on: On, spool: Path) -> None:
    """A message that comes back by its lease wakes a getter, through its dead-letter queue or not."""
    clock = Clock()

    async def scenario(broker: Any) -> None:
        for dead_letter in (None, "dead"):
            name = f"q{dead_letter}"
            queue = await broker.declare_queue(name, durable=False, ack_timeout_s=10, dead_letter=dead_letter)
            inner = plain(broker, name)
            await queue.put(b"x")
            held = await queue.get()
            await held.extend(20)
            waiting = asyncio.create_task(queue.get())
            await until(lambda inner=inner: parts_of(inner).gate.getters)
            clock.now += 15
            inside.tick(inner)
            await turns()
            assert not waiting.done()
            clock.now += 15
            inside.tick(inner)
            again = await waiting
            assert again.delivery_count == 2
            with pytest.raises(qflow.AlreadySettled):
                await held.ack()
            await again.ack()
        await leave_nothing_behind(broker)

    on(scenario, partial(make_broker, spool, BrokerSettings(), clock=clock, monotonic=clock))


def test_an_expired_message_becomes_a_dead_letter_on_the_way_to_a_task(on: On, spool: Path) -> None:
    """A get that finds one has a thread carry it away, and goes on to the next message."""
    clock = Clock()

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", dead_letter="dead")
        await queue.put(b"late", ttl_s=5)
        await queue.put(b"good")
        clock.now += 6
        async with await queue.get() as delivery:
            assert delivery.body == b"good"
        found = await leave_nothing_behind(broker)
        assert [(name, body) for name, body, _ in found] == [("dead", b"late")]

    on(scenario, partial(make_broker, spool, BrokerSettings(), clock=clock, monotonic=clock))


def test_closing_wakes_who_waits_for_a_message_and_for_room(on: On) -> None:
    """BrokerClosed for both; a put on its way is confirmed first."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", limit_messages=1)
        empty = await broker.declare_queue("empty")
        await queue.put(b"x")
        getter, putter = asyncio.create_task(empty.get()), asyncio.create_task(queue.put(b"y"))
        on_its_way = asyncio.create_task(empty.put(b"z"))
        await turns(1)
        await told(broker.queues())  # the owner has it
        await close_spool(broker)
        assert await on_its_way == 0
        outcomes = await asyncio.gather(getter, putter, return_exceptions=True)
        assert isinstance(outcomes[1], qflow.BrokerClosed)
        assert isinstance(outcomes[0], qflow.BrokerClosed | qflow.aio.AsyncDelivery)  # it may have got the last one
        with pytest.raises(qflow.BrokerClosed):
            await empty.get()

    on(scenario)


def test_loops_in_several_threads_share_a_broker(spool: Path, access: str) -> None:
    """Each has its own wake-ups, or its own connection; a message put by one reaches a task of another."""
    with qflow.open(spool) as owner:
        shared = qflow.aio.AsyncBroker(owner)
        owner.declare_queue("there")
        owner.declare_queue("back")

        async def echo() -> None:
            async with joining(access, shared) as broker:
                async for delivery in broker.queue("there"):
                    await broker.queue("back").put(delivery.body)
                    await delivery.ack()
                    if delivery.body == b"last":
                        return

        async def ask() -> list[bytes]:
            answers = []
            async with joining(access, shared) as broker:
                there, back = broker.queue("there"), broker.queue("back")
                for body in [b"%d" % number for number in range(30)] + [b"last"]:
                    await there.put(body)
                    async with await back.get() as delivery:
                        answers.append(delivery.body)
            return answers

        thread = threading.Thread(target=run, args=(echo(),))
        thread.start()
        assert run(ask()) == [b"%d" % number for number in range(30)] + [b"last"]
        thread.join()
        owner.engine.log.drain()
        assert owner.check() == []


def test_a_loop_that_ended_with_tasks_in_the_middle_holds_nobody_up(spool: Path, access: str) -> None:
    """asyncio.run cancels what is left; the broker goes on with threads and with the next loop."""
    with qflow.open(spool) as owner:
        shared = qflow.aio.AsyncBroker(owner)
        queue = owner.declare_queue("q", limit_messages=3)

        async def leave() -> None:
            async with joining(access, shared) as broker:
                for _ in range(5):
                    asyncio.create_task(broker.queue("q").put(b"x"))  # noqa: RUF006
                broker.queue("q").submit(b"y")
                await turns(1)
                await until(lambda: parts_of(queue).admission.line)

        async def get() -> bytes:
            async with joining(access, shared) as broker:
                return bytes((await broker.queue("q").get()).body)

        run(leave())
        clocks.until(lambda: not parts_of(queue).admission.line)
        owner.engine.log.drain()
        assert len(queue) == 3
        queue.purge()
        assert queue.put(b"z", timeout_s=0) is not None
        assert run(get()) == b"z"
        queue.purge()
        assert owner.check() == []


def test_a_callback_that_never_waits_leaves_the_loop_to_others(on: On) -> None:
    """One that raises at once gets its message again and again; another task runs all the same."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", durable=False)
        await queue.put_many([b"x"] * 10)
        failures = 0

        async def fail(delivery: qflow.aio.AsyncDelivery) -> None:
            nonlocal failures
            failures += 1
            raise ValueError("no")

        async with queue.consume(fail, prefetch=3):
            await until(lambda: failures > 20)  # this task's turns
        assert await length(queue) == 10

    on(scenario)


def test_what_failed_a_task_is_the_reason_of_the_dead_letter(on: On) -> None:
    """A nack's reason, and the exception of a block; of a batch, too."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", dead_letter="dead", max_deliveries=1)
        await queue.put_many([b"1", b"2", b"3", b"4"])
        await (await queue.get()).nack(requeue=False, reason="single")
        with pytest.raises(ValueError, match="block"):
            async with await queue.get():
                raise ValueError("block")
        await (await queue.get_many(2)).nack(reason="batch")
        letters = [await broker.queue("dead").get(60) for _ in range(4)]
        said = [letter.headers["dead_letter_nack_reason"] for letter in letters]
        assert said == ["single", "ValueError: block", "batch", "batch"]

    on(scenario)


@pytest.mark.parametrize("way", ["publish", "publish_many", "submit_publish"])
def test_a_publish_waits_for_room_no_longer_than_it_says(on: On, way: str) -> None:
    """As one of threads; nothing was published."""

    async def scenario(broker: qflow.aio.AsyncBroker) -> None:
        queue = await broker.declare_queue("q", limit_messages=1)
        await broker.bind(queue, "t")

        def publish(timeout_s: Any) -> Any:
            if way == "publish_many":
                return broker.publish_many([("t", b"x")], timeout_s=timeout_s)
            return getattr(broker, way)("t", b"x", timeout_s=timeout_s)

        await publish(1000)
        with pytest.raises(qflow.QueueFull):
            await publish(0)
        with pytest.raises(qflow.InvalidArgument):
            await publish(-1)
        assert (await queue.stats()).messages == 1

    on(scenario)
