"""Uses of the public surface, right and wrong, for type checkers; nothing runs it.

Each wrong use says which error is expected. A type checker that reports unused `ignore`s, as `mypy --strict` does, and
pyright with `reportUnnecessaryTypeIgnoreComment`, fails where one is no error any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Unpack, assert_type

import qflow
import qflow.aio
import qflow.workers


def settings(broker: qflow.Broker) -> None:
    """Settings are known by name and type, wherever they are given."""
    jobs = broker.declare_queue("jobs", capacity_bytes="1MiB", limit_messages=10, on_overflow=qflow.Overflow.REJECT)
    assert_type(jobs, qflow.Queue[int])
    assert_type(broker.alter_queue(jobs, limit_messages=None, ttl_s=1.5), qflow.Queue)
    assert_type(jobs.put(b"x", dedupe_key="order 7", timeout_s="5s"), int)
    jobs.consume(print, concurrency=4, retry=qflow.Backoff("1s", most_s=60))
    jobs.consume(print, concurency=4)  # type: ignore[call-arg]
    jobs.put_many([b"x"], dedupe_key="order 7")  # type: ignore[call-arg]
    broker.declare_queue("jobs", limit_mesages=10)  # type: ignore[call-overload]
    broker.declare_queue("jobs", on_overflow="reject")  # type: ignore[call-overload]
    broker.alter_queue("jobs", limit_mesages=3)  # type: ignore[call-arg]
    broker.alter_queue("jobs", durable=False)  # type: ignore[call-arg]
    broker.alter_queue("jobs", ttl_s="1h30m", ack_timeout_s=timedelta(minutes=5))
    broker.alter_queue("jobs", ttl_s=b"1h")  # type: ignore[arg-type]

    stream = broker.declare_stream("plant", topics=["plant/#"], partitions=4, retention_bytes="1GiB")
    assert_type(stream, qflow.Stream)
    assert_type(broker.alter_stream(stream, topics=["plant/+/power"]), qflow.Stream)
    broker.declare_stream("plant")  # type: ignore[call-arg]
    broker.declare_stream("plant", topics=["#"], retention=60)  # type: ignore[call-arg]
    broker.alter_stream("plant", partitions=2)  # type: ignore[call-arg]

    qflow.open("spool", capacity_bytes=2**20, spill="segments").close()
    qflow.open("spool", spill="disk")  # type: ignore[arg-type]
    qflow.open("spool", capacity="64MiB")  # type: ignore[call-arg]


def work(delivery: qflow.Delivery) -> None:
    """What workers call."""
    delivery.nack(requeue=False, reason=5)  # type: ignore[arg-type]


async def work_async(delivery: qflow.aio.AsyncDelivery) -> None:
    """What workers await."""
    await delivery.nack(reason="no such street")


def processes() -> None:
    assert_type(qflow.workers.run("spool", "jobs", work, processes=2, capacity_bytes="1MiB"), int)
    qflow.workers.run("spool", "jobs", work_async, lease_s=5)
    qflow.workers.run("spool", "jobs", "module:function", lease=5)  # type: ignore[call-arg]
    qflow.workers.run("spool", "jobs", 5)  # type: ignore[arg-type]


def declare_durable(broker: qflow.Broker, name: str, **options: Unpack[qflow.QueueOptions]) -> qflow.Queue:
    """Settings can be passed on."""
    return broker.declare_queue(name, **options)


def placed(broker: qflow.Broker, policy: qflow.Overflow) -> None:
    """A put returns None only where the overflow policy may drop the arriving message."""
    always = broker.declare_queue("always", durable=False, on_overflow=qflow.Overflow.DROP_OLDEST)
    assert_type(always, qflow.Queue[int])
    assert_type(always.put(b"a"), int)
    assert_type(always.put_nowait(b"a"), int)
    assert_type(always.submit(b"a"), Future[int])
    drops = broker.declare_queue("drops", on_overflow=qflow.Overflow.DROP_NEWEST)
    assert_type(drops, qflow.Queue)
    assert_type(drops.put(b"a"), int | None)
    assert_type(drops.submit(b"a"), Future[int | None])
    assert_type(broker.declare_queue("any", on_overflow=policy), qflow.Queue)
    assert_type(broker.declare_queues(["a", "b"], limit_messages=3), list[qflow.Queue[int]])
    assert_type(broker.declare_queues(["a", "b"], on_overflow=policy), list[qflow.Queue])
    broker.declare_queues(["a"], limit_mesages=3)  # type: ignore[call-overload]
    assert_type(broker.queue("known").put(b"a"), int | None)
    wider: qflow.Queue = always
    narrower: qflow.Queue[int] = drops  # type: ignore[assignment]
    queues(wider, broker.transaction())
    queues(narrower, broker.transaction())


def queues(queue: qflow.Queue, transaction: qflow.Transaction) -> None:
    """What is put, and what is got."""
    queue.put(b"a", headers={"tries": 1}, delay_s=2, not_before=datetime.now(UTC))
    queue.put("text")  # type: ignore[arg-type]
    queue.put(b"a", delay=2)  # type: ignore[call-arg]
    queue.put_nowait(b"a", priority=1)
    queue.put_nowait(b"a", delay=2)  # type: ignore[call-arg]
    assert_type(queue.put_many([b"a", bytearray(b"b")]), range)
    queue.consume(lambda delivery: assert_type(delivery, qflow.Delivery))
    queue.consume(lambda one, other: None)  # type: ignore[misc, arg-type]
    with queue.get(timeout_s=1) as delivery:
        assert_type(delivery, qflow.Delivery)
        assert_type(delivery.body, bytes)
        assert_type(delivery.headers, dict[str, str | int | float | bool | None])
    batch = queue.get_many(10)
    assert_type(batch[0], qflow.Delivery)
    assert_type(batch[1:], Sequence[qflow.Delivery])
    assert_type(queue.browse(), Iterator[qflow.Entry])
    assert_type(queue.delete(0), bool)
    assert_type(queue.stats(), qflow.QueueStats)
    transaction.put(queue, b"a")


def publishing(broker: qflow.Broker) -> None:
    """What is published."""
    assert_type(broker.publish("plant/1/power", b"7", key="plant 1"), qflow.PublishResult)
    assert_type(broker.publish_many([("a", b"1"), ("b", b"2", b"key")]), Sequence[qflow.PublishResult])
    assert_type(broker.submit_publish("a", b"1"), Future[qflow.PublishResult])
    broker.publish_many([("a", "1")])  # type: ignore[list-item]
    broker.publish("a", b"1", partition=2)  # type: ignore[call-arg]


def subscriptions(broker: qflow.Broker) -> None:
    """What a subscriber gets, and where it starts."""
    subscription = broker.subscribe("plant", "plant/+/power", start="earliest", on_gap="skip", follow=False)
    for delivery in subscription:
        assert_type(delivery, qflow.StreamDelivery)
        assert_type(delivery.offset, int)
    batch = subscription.get_many(10)
    assert_type(batch, qflow.StreamDeliveries)
    assert_type(batch[0], qflow.StreamDelivery)
    with subscription.get() as got:
        assert_type(got, qflow.StreamDelivery)
    broker.subscribe("plant", start=7, name="panel")
    broker.subscribe("plant", start=datetime.now(UTC))
    broker.subscribe("plant", start="earlyest")  # type: ignore[arg-type]
    broker.subscribe("plant", on_gap="ignore")  # type: ignore[arg-type]
    broker.subscribe("plant", since=7)  # type: ignore[call-arg]
    for message in subscription.stream.query("plant/#", newest=3):
        assert_type(message, qflow.StreamMessage)


async def tasks() -> None:
    """The same, awaited."""
    async with qflow.aio.open("spool", spill="files") as broker:
        jobs = await broker.declare_queue("jobs", limit_bytes="1GiB")
        assert_type(jobs, qflow.aio.AsyncQueue[int])
        assert_type(await jobs.put(b"a"), int)
        assert_type(await jobs.put_nowait(b"a"), int)
        assert_type(jobs.submit(b"a"), asyncio.Future[int])
        drops = await broker.declare_queue("drops", on_overflow=qflow.Overflow.DEAD_LETTER, dead_letter="dead")
        assert_type(drops, qflow.aio.AsyncQueue)
        assert_type(await drops.put(b"a"), int | None)
        assert_type(await broker.declare_queues(["a", "b"]), list[qflow.aio.AsyncQueue[int]])
        await broker.declare_queue("jobs", limit_mesages=10)  # type: ignore[call-overload]
        await broker.alter_queue(jobs, limit_mesages=3)  # type: ignore[call-arg]
        await jobs.put("text")  # type: ignore[arg-type]
        await jobs.put_nowait(b"a", delay=2)  # type: ignore[call-arg]
        async for delivery in jobs:
            assert_type(delivery, qflow.aio.AsyncDelivery)
        subscription = await broker.subscribe("plant", start="latest")
        async for message in subscription:
            assert_type(message, qflow.aio.AsyncStreamDelivery)
        assert_type((await subscription.get_many(3))[0], qflow.aio.AsyncStreamDelivery)
        async with await subscription.get() as got:
            assert_type(got, qflow.aio.AsyncStreamDelivery)
        broker.subscribe("plant", start="earlyest")  # type: ignore[arg-type]
        await broker.publish_many([("a", "1")])  # type: ignore[list-item]
    qflow.aio.open("spool", spil="files")  # type: ignore[call-arg]


def through_the_door() -> None:
    """Of a process beside the owner."""
    with qflow.connect("spool") as broker:
        jobs = broker.declare_queue("jobs", limit_bytes="1GiB")
        assert_type(jobs, qflow.RemoteQueue)
        assert_type(jobs.put(b"a"), int | None)
        assert_type(jobs.get(), qflow.Delivery)
        assert_type(jobs.get_many(3), qflow.Deliveries)
        jobs.put("text")  # type: ignore[arg-type]
        jobs.put(b"a", delay=2)  # type: ignore[call-arg]
        with broker.transaction() as tx, broker.subscribe("plant", start="earliest") as subscription:
            tx.put(jobs, b"a")
            for delivery in subscription:
                assert_type(delivery, qflow.StreamDelivery)
        broker.subscribe("plant", start="earlyest")  # type: ignore[arg-type]


async def through_the_door_in_tasks() -> None:
    """The same, awaited."""
    async with qflow.aio.connect("spool") as broker:
        jobs = await broker.declare_queue("jobs", limit_bytes="1GiB")
        assert_type(jobs, qflow.aio.AsyncRemoteQueue)
        assert_type(await broker.queue("jobs"), qflow.aio.AsyncRemoteQueue)
        assert_type(await jobs.put(b"a"), int | None)
        assert_type(jobs.submit(b"a"), asyncio.Future[int | None])
        async for delivery in jobs:
            assert_type(delivery, qflow.aio.AsyncDelivery)
        async with broker.subscribe("plant") as subscription:
            assert_type(await subscription.position, int)
            assert_type(await subscription.get(), qflow.aio.AsyncStreamDelivery)
