"""Streams in qflow.aio: the surface of tasks, the seam between replay and live, who is woken, and what ends a wait."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from doors.event_loop import close_spool, leave_no_reader_behind, plain, run, told, turns, until
from drivers import joining, opening_tasks, owner_of
from qflow.aio.loops import THREADS
from qflow.errors import MessageTooLarge
from qflow.memory.line import FOREVER
from qflow.queues.queue import parts_of

pytestmark = pytest.mark.two_drivers
On = Callable[..., None]


@pytest.fixture(autouse=True)
def nobody_looks_again_by_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for room is woken, or hangs."""
    monkeypatch.setattr("qflow.streams.room.LOOK_S", FOREVER)


@pytest.fixture
def on(spool: Path, access: str) -> On:
    """Run a scenario with a broker that has a stream; unless it is closed then, nothing may be left behind."""

    def run_it(scenario: Callable[[Any], Any], **settings: Any) -> None:
        async def whole() -> None:
            async with opening_tasks(access, partial(qflow.open, spool, **settings)) as broker:
                await broker.declare_stream("s", topics=["t/#"])
                await scenario(broker)
                if not broker.closed:
                    await leave_no_reader_behind(broker)

        run(whole())

    return run_it


def begin(work: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def waiting(broker: Any, number: int = 1) -> None:
    """Return when so many tasks wait at the stream."""
    stream = owner_of(broker).broker.engine.streams.get("s")
    await until(lambda: sum(cursor._line.watching for cursor in stream.open_cursors()) == number)


# The surface ---------------------------------------------------------------------------------------------------------


def test_a_message_comes_with_all_it_has(on: On) -> None:
    """What is published alone, together and as a future is delivered, one by one, in batches and by a loop."""

    async def scenario(broker: Any) -> None:
        assert (await broker.publish("t/1", b"one", key="k", headers={"n": 1})).offsets == {"s": 0}
        results = await broker.publish_many([("t/2", b"two"), ("t/3", b"three", "key"), ("nowhere", b"")])
        assert [result.offsets for result in results] == [{"s": 1}, {"s": 2}, {}]
        assert (await broker.submit_publish("t/4", b"four")).offsets == {"s": 3}
        assert (await broker.submit_publish("nowhere", b"")).offsets == {}
        assert (await broker.publish("nowhere", b"")).offsets == {}
        assert (await broker.stats()).unrouted_total == 3
        async with broker.subscribe("s", "t/+", start="earliest") as reader:
            delivery = await reader.get()
            assert (delivery.body, delivery.topic, delivery.key, delivery.headers) == (b"one", "t/1", b"k", {"n": 1})
            assert (delivery.stream, delivery.partition, delivery.offset) == ("s", 0, 0)
            assert (delivery.time_ms > 0, delivery.delivery_count, delivery.redelivered) == (True, 1, False)
            batch = await reader.get_many(2)
            assert (batch.topics, batch.offsets, batch.bodies) == (["t/2", "t/3"], [1, 2], [b"two", b"three"])
            assert [one.key for one in batch] == [None, b"key"]
            assert (batch[1].offset, [one.offset for one in batch[:1]]) == (2, [1])
            assert (await told(reader.position), await told(reader.positions), await told(reader.lag)) == (3, [3], 1)
            assert (reader.name, reader.stream, reader.filter, reader.closed) == (None, "s", "t/+", False)
            assert "'s'" in repr(reader)
            assert "t/3" in repr(batch[1])
        assert reader.closed
        await reader.close()

    on(scenario)


def test_what_is_submitted_keeps_its_order_where_some_of_it_goes_to_queues_too(on: On) -> None:
    """Of streams, durable queues and others: where there is room, each is handed over when `submit_publish` returns."""

    async def scenario(broker: Any) -> None:
        await broker.declare_queue("logged")
        await broker.declare_queue("unlogged", durable=False)
        await broker.bind("logged", "t/1/#")
        await broker.bind("unlogged", "t/+/2")
        topics = ["t/0/0", "t/1/0", "t/0/2", "t/1/2"]
        submitted = [broker.submit_publish(topics[number % 4], b"%d" % number) for number in range(200)]
        last = await broker.publish("t/0/0", b"200")
        results = [*[await each for each in submitted], last]
        assert [result.offsets["s"] for result in results] == list(range(201))
        assert [result.sequences.get("logged") for result in results[:8]] == [None, 0, None, 1, None, 2, None, 3]
        assert [result.sequences.get("unlogged") for result in results[:8]] == [None, None, 0, 1, None, None, 2, 3]

    on(scenario)


def test_what_a_queue_refuses_the_future_tells(on: On) -> None:
    """And not `submit_publish`: who gathers many futures is told of one of them."""

    async def scenario(broker: Any) -> None:
        await broker.declare_queue("small", max_message_bytes=1000)
        await broker.bind("small", "t/1")
        submitted = [broker.submit_publish("t/1", bytes(size)) for size in (10, 1001)]
        kept, refused = await asyncio.gather(*submitted, return_exceptions=True)
        assert kept.sequences == {"small": 0}
        assert isinstance(refused, MessageTooLarge)

    on(scenario)


def test_a_stream_is_declared_altered_asked_and_deleted(on: On) -> None:
    """The twin of what threads do with a stream."""

    async def scenario(broker: Any) -> None:
        stream = await broker.declare_stream("other", topics=["o/#"], partitions=2)
        if broker is owner_of(broker):
            assert broker.stream("other") is stream
        assert (stream.name, await told(broker.streams())) == ("other", ["other", "s"])
        assert (await told(broker.stream("other"))).settings.partitions == 2
        assert (await broker.alter_stream(stream, retention_messages=1000)).settings.retention_messages == 1000
        await broker.publish_many([(f"o/{number}", b"%d" % number, f"key {number}") for number in range(600)])
        assert len([message async for message in stream.query("o/+")]) == 600
        assert (await stream.last("o/7"))["o/7"].body == b"7"
        assert (await stream.stats()).messages == 600
        with pytest.raises(qflow.InvalidArgument):
            async for _ in stream.query("a/#/b"):
                pass
        with pytest.raises(qflow.SettingsConflict):
            await broker.declare_stream("other", topics=["p/#"])
        reader = await broker.subscribe(stream, name="r", start="earliest")
        assert await told(reader.positions) == [0, 0]
        with pytest.raises(qflow.InvalidArgument):
            await reader.seek(3)
        await reader.seek(3, partition=1)
        assert await told(reader.positions) == [0, 3]
        await reader.close()
        await broker.delete_subscription(stream, "r")
        with pytest.raises(qflow.NotFound):
            await broker.subscribe(stream, name="r", start="committed")
        await broker.delete_stream("other")
        with pytest.raises(qflow.NotFound):
            await told(broker.stream("other"))
        assert "other" in repr(stream)

    on(scenario)


def test_a_durable_subscription_goes_on_where_it_was(on: On) -> None:
    """What was acked is not seen again, the rest is; `ack(wait=True)` waits for a commit."""

    async def scenario(broker: Any) -> None:
        await broker.publish_many([("t/1", b"%d" % number) for number in range(5)])
        async with broker.subscribe("s", name="r", start="earliest") as reader:
            first, second, third = [await reader.get() for _ in range(3)]
            await first.ack()
            await reader.ack(third, wait=True)
            await second.nack()
            assert (await reader.stats()).acked_total == 2
            with pytest.raises(qflow.SettingsConflict):
                await broker.subscribe("s", name="r")
        async with broker.subscribe("s", name="r") as reader:
            batch = await reader.get_many(10)
            assert (batch.offsets, batch[0].redelivered, batch[2].redelivered) == ([1, 3, 4], True, False)
            await batch.ack(wait=True)
            await (await reader.get_many(10, timeout_s=0)).ack()
            await reader.seek(4)
            assert await told(reader.position) == 4

    on(scenario)


def test_a_loop_acks_what_came_before_and_ends_where_the_stream_does(on: On) -> None:
    """`async for`: with `follow=False` to the end; what it did not hand out goes back uncounted."""

    async def scenario(broker: Any) -> None:
        await broker.publish_many([("t/1", b"%d" % number) for number in range(1000)])
        async with broker.subscribe("s", name="r", start="earliest", follow=False) as reader:
            async with aclosing(reader.iterate()) as deliveries:
                async for delivery in deliveries:
                    if delivery.offset == 10:
                        break
            assert (await told(reader.position), (await reader.stats()).acked_total) == (10, 10)
            assert [delivery.offset async for delivery in reader] == list(range(10, 1000))
            with pytest.raises(qflow.QueueEmpty):
                await reader.get()

    on(scenario)


@pytest.mark.parametrize("lease", [{"name": "r", "ack_timeout_s": 60}, {"group": "g"}], ids=["named", "group"])
def test_a_loop_leases_one_message_at_a_time(on: On, lease: dict[str, Any]) -> None:
    """A message that is read ahead would be held by the lease of the one before; the loop of a thread does the same."""

    async def scenario(broker: Any) -> None:
        await broker.publish_many([("t/1", b"%d" % number) for number in range(300)])
        reader = await broker.subscribe("s", start="earliest", **lease)
        async with reader, aclosing(reader.iterate()) as deliveries:
            first = await anext(deliveries)
            assert (first.offset, (await reader.stats()).unsettled_messages) == (0, 1)
            await first.ack()
        with owner_of(broker).broker.subscribe("s", start="earliest", **lease) as beside:
            second = next(iter(beside))
            assert (second.offset, beside.stats().unsettled_messages) == (1, 1)
            second.ack()

    on(scenario)


def test_a_transaction_publishes_and_acks(on: On) -> None:
    """Deliveries of streams and what follows from them are one commit; an exception undoes both."""

    async def scenario(broker: Any) -> None:
        await broker.publish("t/1", b"one")
        async with broker.subscribe("s", "t/1", name="r", start="earliest") as reader:
            delivery = await reader.get()
            with pytest.raises(ZeroDivisionError):
                async with broker.transaction() as tx:
                    await tx.publish("t/2", b"never")
                    await tx.ack(delivery)
                    raise ZeroDivisionError
            async with broker.transaction() as tx:
                await tx.publish("t/2", b"two", key="k")
                await tx.ack(delivery)
            assert tx.result[0].offsets == {"s": 1}
            with pytest.raises(qflow.AlreadySettled):
                await delivery.ack()
            assert (await reader.stats()).committed == [1]

    on(scenario)


def test_a_transaction_puts_each_message_into_the_partition_of_its_key(on: On) -> None:
    """A task's, and a thread's."""

    async def scenario(broker: Any) -> None:
        stream = await broker.declare_stream("parts", topics=["p"], partitions=4)
        keys = [b"%d" % number for number in range(20)]
        async with broker.transaction() as tx:
            for key in keys:
                await tx.publish("p", key, key=key)
        with owner_of(broker).broker.transaction() as beside:
            for key in keys:
                beside.publish("p", key, key=key)
        home = {key: owner_of(broker).stream("parts").stream.partition_for("p", key).number for key in keys}
        assert len(set(home.values())) == 4
        assert [result.partitions["parts"] for result in tx.result + beside.result] == [*home.values()] * 2
        stored = [message async for message in stream.query()]
        assert len(stored) == 40
        assert all(message.partition == home[message.body] for message in stored)

    on(scenario)


def test_a_number_is_stored_once(on: On) -> None:
    """Many tasks that send the same number: one stores it, the others are told so; also when it must be read."""

    async def scenario(broker: Any) -> None:
        results = await asyncio.gather(*(broker.publish("t/1", b"x", producer="p", number=1) for _ in range(50)))
        assert sum(not result.duplicate for result in results) == 1
        assert (await broker.submit_publish("t/1", b"x", producer="p", number=1)).duplicate
        assert (await broker.publish_many([("t/1", b"x")] * 3, producer="p", number=1))[2].duplicate
        with pytest.raises(qflow.InvalidArgument):
            await broker.publish("t/1", b"x", number=1)
        assert (await broker.stream("s").stats()).messages == 1

    on(scenario)
    on(scenario_of_a_known_number)


async def scenario_of_a_known_number(broker: qflow.aio.AsyncBroker) -> None:
    assert (await broker.publish("t/1", b"x", producer="p", number=1)).duplicate


# Waiting -------------------------------------------------------------------------------------------------------------


def test_each_message_comes_once_and_in_order_across_the_seam(on: On) -> None:
    """I16: subscribers begin at any moment while others publish; each sees all there is, once, in order."""

    async def scenario(broker: Any) -> None:
        async def publish() -> None:
            for number in range(60):
                await asyncio.gather(*(broker.publish("t/1", b"%d" % number) for _ in range(5)))

        async def read(after: int) -> list[int]:
            await turns(after)
            seen: list[int] = []
            async with broker.subscribe("s", start="earliest") as reader, aclosing(reader.iterate()) as deliveries:
                async for delivery in deliveries:
                    seen.append(delivery.offset)
                    if len(seen) == 300:
                        return seen
            return seen

        *readers, _ = await asyncio.gather(*(read(7 * number) for number in range(20)), publish())
        assert all(seen == list(range(300)) for seen in readers)

    on(scenario)


def test_thousands_wait_without_a_thread(on: On) -> None:
    """Tasks with subscriptions of their own, and as many of one group: a commit wakes them, no thread does."""

    async def scenario(broker: Any) -> None:
        alone = [await broker.subscribe("s", "t/alone") for _ in range(500)]
        shared = [await broker.subscribe("s", "t/1", group="g") for _ in range(3)]
        tasks = [begin(reader.get()) for reader in alone]
        members = [begin(shared[number % 3].get()) for number in range(1500)]
        await waiting(broker, 2000)
        threads = threading.active_count()
        await broker.publish_many([("t/1", b"%d" % number) for number in range(1500)])
        assert [(await task).offset for task in members] == list(range(1500)), "first come, first served"
        await broker.publish("t/alone", b"x")
        assert {(await task).offset for task in tasks} == {1500}
        assert threading.active_count() <= threads + THREADS
        for reader in (*alone, *shared):
            await reader.close()

    on(scenario)


def test_a_commit_that_memory_does_not_hold_is_read_to_its_end(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: a live reader that is told of a large commit reads it from the log, in parts, and misses none of them."""

    async def scenario(broker: Any) -> None:
        room: Any = owner_of(broker).broker.engine.streams.room
        monkeypatch.setattr(room, "keep", lambda *_: None)
        async with broker.subscribe("s", "t/1", ack_timeout_s=100) as reader:
            first = begin(reader.get())
            await waiting(broker)
            offsets = []
            for rounds in (1, 2):
                await broker.publish_many([("t/1", bytes(1000)) for _ in range(1500)])
                await broker.publish_many([("t/2", bytes(1000)) for _ in range(100)])
                offsets += [] if offsets else [(await first).offset]
                while len(offsets) < 1500 * rounds:
                    batch = await reader.get_many(400, timeout_s=60)
                    offsets += batch.offsets
            assert offsets == [*range(1500), *range(1600, 3100)]

    on(scenario)


def test_a_wake_up_of_a_cancelled_task_goes_to_the_next(on: On) -> None:
    """It was woken and cancelled in the same turn; nobody is left at the line."""

    async def scenario(broker: Any) -> None:
        async with broker.subscribe("s", group="g") as reader:
            first, second, third = (begin(reader.get()) for _ in range(3))
            await waiting(broker, 3)
            third.cancel()
            await asyncio.wait([third])
            await waiting(broker, 2)
            owner_of(broker).broker.publish("t/1", b"x")  # within this turn
            first.cancel()
            assert (await second).delivery_count == 1
            assert first.cancelled()

    on(scenario)


def test_what_a_thread_reads_for_a_cancelled_task_goes_back(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread finds that nobody wants it: it was not delivered, and the next one gets it."""

    async def scenario(broker: Any) -> None:
        await broker.publish("t/1", b"x")
        history: Any = owner_of(broker).stream("s").stream.history
        entered, go_on, read = threading.Event(), threading.Event(), history.read

        def slowly(*given: Any) -> Any:
            entered.set()
            go_on.wait(60)
            return read(*given)

        monkeypatch.setattr(history, "read", slowly)
        async with broker.subscribe("s", name="r", start="earliest") as reader:
            task = begin(reader.get())
            await until(entered.is_set)
            task.cancel()
            await asyncio.wait([task])
            go_on.set()
            await broker.check()
            assert (await reader.stats()).delivered_total == 0
            delivery = await reader.get()
            assert (delivery.offset, delivery.delivery_count) == (0, 1)

    on(scenario)


def test_tasks_of_one_thread_do_not_settle_for_each_other(on: On) -> None:
    """Without a name, asking for more settles what the same task got before, and nothing else."""

    async def scenario(broker: Any) -> None:
        await broker.publish_many([("t/1", b"one"), ("t/1", b"two"), ("t/1", b"three")])
        async with broker.subscribe("s", start="earliest") as reader:
            mine = await reader.get()
            theirs = await begin(reader.get())
            await mine.nack()
            again = await reader.get()
            assert (again.offset, again.redelivered) == (0, True)
            assert (await reader.get()).offset == 2
            await theirs.ack()
            with pytest.raises(qflow.AlreadySettled):
                await again.ack()

    on(scenario)


def test_a_task_settles_for_those_that_have_ended(on: On) -> None:
    """Where each get has a task of its own, they are as one: else what they got would fill memory, and the next wait."""

    async def scenario(broker: Any) -> None:
        await broker.publish_many([("t/1", bytes(9_000))] * 40)
        async with broker.subscribe("s", start="earliest") as reader:
            for _ in range(20):
                await asyncio.create_task(reader.get())
            for _ in range(10):
                first, second = await asyncio.gather(reader.get(), reader.get())
            await first.ack()
            await second.ack()

    on(scenario, capacity_bytes=100_000)


def test_who_waits_because_too_much_is_held_goes_on_when_some_is_settled(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a batch, or a batch, that is acked makes room for a task that waits."""
    monkeypatch.setattr("qflow.streams.cursor.MOST_UNSETTLED", 2)

    async def scenario(broker: Any) -> None:
        await broker.publish_many([("t/1", b"%d" % number) for number in range(4)])
        async with broker.subscribe("s", name="r", start="earliest") as reader:
            batch = await reader.get_many(10)
            assert batch.offsets == [0, 1]
            for offset in (2, 3):
                task = begin(reader.get())
                await waiting(broker)
                await (batch[0] if offset == 2 else batch).ack()
                assert (await task).offset == offset

    on(scenario)


@pytest.mark.owner_only(reason="the owner's looks are its own; the next test is about what follows")
def test_publishers_see_who_only_looks_whether_he_must_wait(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """I15: what is published between a look and the wait that follows must wake him."""

    async def scenario(broker: Any) -> None:
        async with broker.subscribe("s") as reader:
            cursor: Any = inside.cursor(reader.subscription)
            seen, patience = [], cursor.held.patience

            def look(*given: Any) -> float:
                seen.append(cursor._waiting)
                return float(patience(*given))

            monkeypatch.setattr(cursor.held, "patience", look)
            task = begin(reader.get())
            await waiting(broker)
            assert seen
            assert min(seen) > 0
            await broker.publish("t/1", b"x")
            await task
            del seen[:]
            with pytest.raises(qflow.QueueEmpty):
                reader.subscription.get(timeout_s=0.001)
            assert min(seen) > 0

    on(scenario)


def test_nothing_in_time(on: On) -> None:
    """Time-outs end a wait, with nothing left behind."""

    async def scenario(broker: Any) -> None:
        async with broker.subscribe("s") as reader:
            with pytest.raises(qflow.QueueEmpty):
                await reader.get_nowait()
            with pytest.raises(qflow.QueueEmpty):
                await reader.get(timeout_s=0.001)
            assert len(await reader.get_many(5, timeout_s=0.001)) == 0
            await waiting(broker, 0)

    on(scenario)


def test_a_gap_is_told_and_the_next_call_goes_on(on: On) -> None:
    """Retention took what was to come."""

    async def scenario(broker: Any) -> None:
        for number in range(5):
            await broker.publish("t/1", b"%d" % number)
        async with broker.subscribe("s", start="earliest") as reader:
            await broker.alter_stream("s", retention_messages=2)
            owner_of(broker).stream("s").stream.retain()
            with pytest.raises(qflow.GapError) as told:
                await reader.get()
            assert told.value.end == (await reader.get()).offset

    on(scenario)


# Room ----------------------------------------------------------------------------------------------------------------


def test_publishes_wait_in_line_for_room(on: On) -> None:
    """The first in line is served first, also if a later one would fit; whoever is cancelled has the next one served.

    Room that was given to a task in the turn it is cancelled in goes back.
    """

    async def scenario(broker: Any) -> None:
        room: Any = owner_of(broker).broker.engine.streams.room
        held = 0
        while room.reserve_at_once(50_000):
            held += 50_000
        large = begin(broker.publish("t/1", bytes(120_000)))
        await until(lambda: len(room._line) == 1)
        small = [begin(broker.publish("t/1", b"%d" % number)) for number in range(10)]
        await turns(1)
        submitted = broker.submit_publish("t/1", b"submitted")
        await until(lambda: len(room._line) == 12)
        room.arrived(50_000)
        await turns()
        assert not any(task.done() for task in small)
        large.cancel()
        assert [(await task).offsets["s"] for task in small] == list(range(10))
        assert (await submitted).offsets == {"s": 10}
        while room.reserve_at_once(50_000):
            held += 50_000
        again = begin(broker.publish("t/1", bytes(40_000)))
        await until(lambda: len(room._line) == 1)
        await broker.check()  # the thread has looked
        room.arrived(50_000)
        again.cancel()
        await asyncio.wait([again])
        assert again.cancelled()
        room.arrived(held - 100_000)

    on(scenario, capacity_bytes=400_000)


def test_more_than_there_is_room_for_passes_alone(on: On) -> None:
    """Hundreds of tasks publish what memory can hold a few of; and what it cannot hold at all."""

    async def scenario(broker: Any) -> None:
        await broker.publish("t/1", bytes(600_000))
        await asyncio.gather(*(broker.publish("t/1", bytes(90_000)) for _ in range(200)))
        assert (await broker.stream("s").stats()).messages == 201

    on(scenario, capacity_bytes=300_000)


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "delete_stream", "delete_subscription", "subscription"])
def test_who_waits_is_told_of_the_end(end: str, on: On) -> None:
    """Tasks that get, and loops, end with an error that says what happened."""
    errors = {"close": qflow.BrokerClosed, "subscription": qflow.InvalidArgument}

    async def scenario(broker: Any) -> None:
        reader = await broker.subscribe("s", name="r")

        async def loop() -> None:
            async for _ in reader:
                raise AssertionError

        tasks = [begin(work) for work in (reader.get(), reader.get_many(5), loop())]
        await waiting(broker, 3)
        if end == "close":
            await close_spool(broker)
        elif end == "delete_stream":
            await broker.delete_stream("s")
        elif end == "delete_subscription":
            await broker.delete_subscription("s", "r")
        else:
            await reader.close()
        for task in tasks:
            with pytest.raises(errors.get(end, qflow.StreamDeleted)):
                await task
        with pytest.raises(errors.get(end, qflow.StreamDeleted)):
            await reader.get()
        await reader.close()
        assert reader.closed
        if end == "close":
            for work in (broker.publish("t/1", b"x"), broker.subscribe("s")._open(), broker.delete_stream("s")):
                with pytest.raises(qflow.BrokerClosed):
                    await work
            with pytest.raises(qflow.BrokerClosed):
                broker.submit_publish("t/1", b"x")

    on(scenario)


def test_a_stream_that_is_being_deleted_is_not_reached(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who publishes meanwhile does not wait for the end of it; who waited for room has it given back."""

    async def scenario(broker: Any) -> None:
        inner: Any = owner_of(broker).broker
        await broker.publish("t/1", b"x")
        room, log = inner.engine.streams.room, inner.engine.streams._log
        held = 0
        while room.reserve_at_once(50_000):
            held += 50_000
        late = begin(broker.publish("t/1", bytes(40_000)))
        await until(lambda: len(room._line) == 1)
        go_on, drain = threading.Event(), log.drain
        monkeypatch.setattr(log, "drain", lambda: (go_on.wait(60), drain()))
        deleting = begin(broker.delete_stream("s"))
        await until(lambda: owner_of(broker).broker.stream("s").ended is not None)
        assert (await broker.publish("t/1", b"y")).offsets == {}
        room.arrived(held)
        assert (await late).offsets == {}
        go_on.set()
        await deleting

    on(scenario, capacity_bytes=400_000)


def test_a_number_is_stored_once_though_a_queue_is_deleted_meanwhile(on: On) -> None:
    """Who is turned away by the deleted queue tries again, and keeps the number all the time."""

    async def scenario(broker: Any) -> None:
        queue = await broker.declare_queue("q", limit_messages=1)
        await broker.bind(queue, "t/#")
        await queue.put(b"full")
        tasks = [begin(broker.publish("t/1", b"x", producer="p", number=1)) for _ in range(5)]
        await until(lambda: len(parts_of(plain(broker)).admission.line) == 1)
        await broker.delete_queue("q")
        results = await asyncio.gather(*tasks)
        assert sorted(result.duplicate for result in results) == [False, True, True, True, True]
        assert (await broker.stream("s").stats()).messages == 1

    on(scenario)


def test_every_call_in_a_forked_child_says_so(spool: Path, access: str) -> None:
    """Edge 12: a loop in the child of a fork is told that the streams are not its own; the parent goes on."""

    async def refused(broker: Any, reader: Any) -> None:
        for call in (
            reader.get(),
            broker.publish("t/1", b"y"),
            broker.publish_many([("t/1", b"y")] * 2),
            broker.publish("t/1", b"y", producer="p", number=1),
            broker.subscribe("s")._open(),
            broker.declare_stream("new", topics=["n"]),
            reader.seek(0),
        ):
            with pytest.raises(qflow.ForkedProcess):
                await asyncio.wait_for(call, 20)

    async def begun(ends: AsyncExitStack) -> tuple[Any, Any]:
        owner = await ends.enter_async_context(qflow.aio.open(spool))
        broker = await ends.enter_async_context(joining(access, owner))
        await broker.declare_stream("s", topics=["t/#"])
        await broker.publish("t/1", b"x", producer="p", number=0)
        return broker, await broker.subscribe("s", start="earliest")

    async def ended(reader: Any, ends: AsyncExitStack) -> None:
        assert (await reader.get()).body == b"x"
        await ends.aclose()

    with asyncio.Runner() as runner:
        ends = AsyncExitStack()
        broker, reader = runner.run(begun(ends))
        inner: Any = owner_of(broker).broker
        lock = inner.engine.streams.room._lock
        lock.acquire()  # as if another thread had it
        child = os.fork()
        if child:
            lock.release()
        else:
            status = 1
            try:
                signal.alarm(200)
                asyncio.run(refused(broker, reader))
                with pytest.raises(qflow.ForkedProcess):
                    inner.stream("s").query()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        runner.run(ended(reader, ends))
