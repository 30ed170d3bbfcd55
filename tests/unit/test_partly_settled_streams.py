"""Batches of streams of which some messages are settled by themselves: what is settled is kept by nobody but its user."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from unit.allocated import BATCHES, COUNT, LATE, MIB, bodies, kept

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


def one_by_one(broker: qflow.Broker, some: list[qflow.StreamDelivery]) -> None:
    for delivery in some:
        delivery.ack()


def in_a_transaction(broker: qflow.Broker, some: list[qflow.StreamDelivery]) -> None:
    with broker.transaction() as tx:
        tx.ack_many(some)


def in_transactions(broker: qflow.Broker, some: list[qflow.StreamDelivery]) -> None:
    for delivery in some:
        with broker.transaction() as tx:
            tx.ack(delivery)


@pytest.mark.parametrize("settle", [one_by_one, in_a_transaction, in_transactions])
def test_a_subscription_that_acks_most_of_what_it_gets_does_not_stall(open_spool: Open, settle: Any) -> None:
    """One of each batch is held on: what is settled gives its memory back."""
    broker = open_spool(capacity_bytes="4MiB")
    broker.declare_stream("s", topics=["s"])
    subscription = broker.subscribe("s", start="earliest", name="n", follow=False)
    for _ in range(BATCHES):
        broker.publish_many([("s", body) for body in bodies()])
    slow: list[qflow.Delivery] = []
    got = 0
    with kept() as found:
        while got < BATCHES * COUNT:
            batch = subscription.get_many(COUNT, timeout_s=0)
            got += len(batch)
            settle(broker, batch[1:])
            slow.append(batch[0])
            del batch
        subscription.stats()
    assert found.bytes < 8 * MIB  # some of it is what lies ready for others
    assert subscription.stats().unsettled_messages == len(slow)
    assert broker.check() == []
    for one in slow:
        one.ack()
    with pytest.raises(qflow.AlreadySettled):
        slow[0].ack()
    assert subscription.stats().unsettled_messages == 0


@pytest.mark.parametrize("order", ["first", "last", "shuffled"])
def test_who_keeps_a_batch_of_a_stream_has_all_bodies(open_spool: Open, order: str) -> None:
    """And what is left of it is found: acked, or given back, and then delivered again."""
    broker = open_spool()
    broker.declare_stream("s", topics=["s"], partitions=2)
    subscription = broker.subscribe("s", start="earliest", name="n")
    broker.publish_many([("s", b"%d" % number * 500) for number in range(1_000, 1_100)])
    batch = subscription.get_many(100)
    while len(batch) < 100:
        batch.nack()
        batch = subscription.get_many(100)
    everything = sorted(batch.bodies)
    listed = list(batch)
    if order == "last":
        listed.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(listed)
    kept_bodies, kept_offsets = batch.bodies, batch.offsets
    for number, delivery in enumerate(listed[:-3]):
        if number % 10:
            delivery.ack()
        else:
            delivery.nack(delay_s=3600)
        with pytest.raises(qflow.AlreadySettled):
            delivery.ack()
        assert (batch.bodies, batch.offsets) == (kept_bodies, kept_offsets)
        assert sorted(one.body for one in batch) == everything
    assert subscription.stats().unsettled_messages == 3
    assert broker.check() == []
    batch.nack()
    assert batch.bodies == kept_bodies
    again = subscription.get_many(100)
    assert sorted(again.bodies) == sorted(one.body for one in listed[-3:])
    again.ack()
    assert again.bodies
    assert subscription.stats().unsettled_messages == 0


@pytest.mark.owner_only
@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_of_a_batch_of_a_stream_is_charged(open_spool: Open, seed: int) -> None:
    """Each of its messages once, wherever it is: held, let go of, or given back."""
    broker = open_spool()
    broker.declare_stream("s", topics=["s"], partitions=1 + seed % 3)
    subscription = broker.subscribe("s", start="earliest", name="n")
    broker.publish_many([("s", b"x" * number * (seed % 4)) for number in range(200)])
    cursor, room = inside.cursor(subscription), broker.engine.streams.room
    chance = random.Random(seed)
    got: list[qflow.StreamDelivery] = []
    while len(got) < 200:
        got += subscription.get_many(90)
    chance.shuffle(got)
    for number, delivery in enumerate(got):
        if chance.random() < 0.1 * (seed % 3):
            delivery.nack(delay_s=3600)
        else:
            delivery.ack()
        if number % 7 == 0:
            assert room._held == inside.charged_to(cursor)
    assert not cursor.held.batches
    assert room._held == inside.charged_to(cursor)


def test_a_subscription_for_tasks_does_not_stall(spool: Any) -> None:
    """As for threads."""
    asyncio.run(_tasks_do_not_stall(spool))


async def _tasks_do_not_stall(spool: Any) -> None:
    async with await qflow.aio.open(spool, capacity_bytes="4MiB") as broker:
        await broker.declare_stream("s", topics=["s"])
        subscription = await broker.subscribe("s", start="earliest", name="n", follow=False)
        for _ in range(BATCHES):
            await broker.publish_many([("s", body) for body in bodies()])
        slow: list[qflow.aio.AsyncStreamDelivery] = []
        got = 0
        while got < BATCHES * COUNT:
            batch = await subscription.get_many(COUNT, timeout_s=0)
            got += len(batch)
            for delivery in batch[1:]:
                await delivery.ack()
            slow.append(batch[0])
            assert len(batch.bodies) == len(batch)
        for one in slow:
            await one.ack()


@pytest.mark.parametrize("whole", [True, False], ids=["batch", "rest"])
def test_a_transaction_settles_a_batch_of_a_stream(open_spool: Open, whole: bool) -> None:
    """All of it, or what is left."""
    broker = open_spool()
    broker.declare_stream("s", topics=["s"])
    subscription = broker.subscribe("s", start="earliest", name="n")
    broker.publish_many([("s", b"%d" % number) for number in range(5)])
    batch = subscription.get_many(5)
    if not whole:
        batch[1].ack()
    with broker.transaction() as tx:
        tx.ack_many(batch)
    with pytest.raises(qflow.AlreadySettled):
        batch.ack()
    with pytest.raises(qflow.AlreadySettled):
        batch[3].ack()
    assert subscription.stats().unsettled_messages == 0
    assert subscription.lag == 0


@pytest.mark.owner_only
@pytest.mark.parametrize("opens", [qflow.aio.open, qflow.aio.connect], ids=["owner", "door"])
def test_a_transaction_of_tasks_settles_a_batch_of_a_stream(spool: Any, opens: Any) -> None:
    """As of threads."""
    with nullcontext() if opens is qflow.aio.open else qflow.open(spool):
        asyncio.run(_tasks_settle_a_batch(opens(spool)))


async def _tasks_settle_a_batch(opening: Any) -> None:
    async with await opening as broker:
        await broker.declare_stream("s", topics=["s"])
        subscription = await broker.subscribe("s", start="earliest", name="n")
        await broker.publish_many([("s", b"%d" % number) for number in range(5)])
        batch = await subscription.get_many(5)
        async with broker.transaction() as tx:
            await tx.ack_many(batch)
        with pytest.raises(qflow.AlreadySettled):
            await batch.ack()
        assert (await subscription.stats()).unsettled_messages == 0


def test_what_is_given_back_one_by_one_is_let_go_of(open_spool: Open) -> None:
    """One of each batch is held on; the others are delivered again, and settled then."""
    broker = open_spool(capacity_bytes="4MiB")
    broker.declare_stream("s", topics=["s"])
    subscription = broker.subscribe("s", start="earliest", name="n")
    slow: list[qflow.Delivery] = []
    with kept() as found:
        for _ in range(BATCHES):
            broker.publish_many([("s", body) for body in bodies()])
            batch = subscription.get_many(COUNT)
            slow.append(batch[LATE])
            for index, delivery in enumerate(batch):
                if index != LATE:
                    delivery.nack()
            subscription.get_many(COUNT).ack()
            del batch, delivery
        assert subscription.stats().unsettled_messages == len(slow)
    assert found.bytes < 8 * MIB  # some of it is what lies ready for others
    assert broker.check() == []
    for one in slow:
        one.ack()
    assert subscription.stats().unsettled_messages == 0


@pytest.mark.parametrize("how", ["ack", "nack", "transaction", "list", "loop"])
def test_a_kept_delivery_keeps_no_others_once_its_batch_is_over(open_spool: Open, how: str) -> None:
    """However it ended; whoever had the batch has dropped it."""
    broker = open_spool(capacity_bytes="4MiB")
    broker.declare_stream("s", topics=["s"])
    subscription = broker.subscribe("s", start="earliest", name="n", follow=False)
    mine: list[qflow.Delivery] = []
    with kept() as found:
        for _ in range(BATCHES):
            broker.publish_many([("s", body) for body in bodies()])
            if how == "loop":
                mine.append([*subscription][LATE])
                continue
            batch = subscription.get_many(COUNT)
            mine.append(batch[LATE])
            if how in ("ack", "nack"):
                getattr(batch, how)()
            else:
                with broker.transaction() as tx:
                    tx.ack_many(batch if how == "transaction" else list(batch))
                del tx
            del batch
            if how == "nack":
                subscription.get_many(COUNT).ack()
        assert subscription.stats().unsettled_messages == 0
    assert found.bytes < 8 * MIB  # some of it is what lies ready for others
    for one in mine:
        with pytest.raises(qflow.AlreadySettled):
            one.ack()
