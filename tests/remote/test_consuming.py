"""Consumers whose leases end while they are at work, in the owner and at its door."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from door_raw import RawDoor
from doors import event_loop
from drivers import DOOR, OWNER, joining
from qflow.opening import with_door
from unit.clocks import LONG_S, Clock, open_still, until

MESSAGES = 10


@pytest.fixture
def clock() -> Clock:
    """Time that stands still."""
    return Clock()


@pytest.fixture
def owner(spool: Path, clock: Clock) -> Iterator[qflow.Broker]:
    """The owner of a queue with some messages, whose leases end after 10 s."""
    with open_still(spool, clock) as broker:
        with_door(broker)
        jobs = broker.declare_queue("jobs", ack_timeout_s=10, max_deliveries=3)
        jobs.put_many([b"%d" % number for number in range(MESSAGES)])
        yield broker
        assert broker.closed or broker.check() == []


class Work:
    """A callback, or what a loop does; the leases end while it works on each of the first two that it is given."""

    def __init__(self, owner: qflow.Broker, clock: Clock) -> None:
        self.queue = owner.queue("jobs")
        self.clock = clock
        self.calls: list[tuple[bytes, int]] = []

    def do(self, delivery: qflow.Delivery | qflow.aio.AsyncDelivery) -> None:
        self.calls.append((delivery.body, delivery.delivery_count))
        if len(self.calls) <= 2:
            self.clock.advance(11)
            inside.tick(self.queue)

    def check(self) -> None:
        """The first message was given again, counted, and no other."""
        again = [(b"0", count) for count in (1, 2, 3)]
        assert self.calls == again + [(b"%d" % number, 1) for number in range(1, MESSAGES)]
        assert self.queue.stats().redelivered_total == 2


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_consumer_calls_back_for_none_that_it_does_not_hold_any_more(
    owner: qflow.Broker, clock: Clock, access: str
) -> None:
    """All that it had acquired and not handed out went back, not counted as delivered, and comes again."""
    work = Work(owner, clock)
    opened = nullcontext(owner) if access == OWNER else qflow.connect(owner.path)
    with opened as broker, broker.queue("jobs").consume(work.do):
        until(lambda: not len(work.queue))
    work.check()


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_consumer_of_tasks_calls_back_for_none_that_it_does_not_hold_any_more(
    owner: qflow.Broker, clock: Clock, access: str
) -> None:
    """As one of threads."""
    work = Work(owner, clock)

    async def take(delivery: qflow.aio.AsyncDelivery) -> None:
        work.do(delivery)

    async def scenario() -> None:
        async with joining(access, qflow.aio.AsyncBroker(owner)) as broker, broker.queue("jobs").consume(take):
            await event_loop.until(lambda: not len(work.queue))

    event_loop.run(scenario())
    work.check()


def test_a_loop_hands_out_none_that_it_does_not_hold_any_more(owner: qflow.Broker, clock: Clock) -> None:
    """As a consumer."""
    work = Work(owner, clock)

    async def scenario() -> None:
        async for delivery in qflow.aio.AsyncBroker(owner).queue("jobs"):
            async with delivery:
                work.do(delivery)
            if not len(work.queue):
                return

    event_loop.run(scenario())
    work.check()


def test_a_caller_may_say_any_number_of_callbacks(owner: qflow.Broker, spool: Path, clock: Clock) -> None:
    """The lease of what it holds ends for all that."""
    queue = owner.declare_queue("q", ack_timeout_s=10)
    queue.put(b"x")
    with RawDoor(spool, timeout_s=60).greeted() as raw:
        said = raw.ask({"op": "consume", "queue": "q", "name": "c", "at_once": 2**70})
        raw.ask({"op": "get", "queue": "q", "most": 5, "consumer": said.head["result"]})
        clock.advance(11)
        inside.tick(queue)
        assert queue.get(0).body == b"x"


@pytest.mark.parametrize("closes", [False, True], ids=["lease", "close"])
@pytest.mark.parametrize(("most", "again"), [(None, [True] * 5), (3, [True, False, False, False, False])])
def test_what_another_process_may_have_been_handed_may_be_repeated(
    closes: bool, most: int | None, again: list[bool], owner: qflow.Broker, spool: Path, clock: Clock
) -> None:
    """Acks of it may be on their way as its lease ends, or the owner; but what leads to dead letters is not counted."""
    queue = owner.declare_queue("q", ack_timeout_s=10, max_deliveries=most)
    queue.put_many([b"x"] * 5)
    with RawDoor(spool, timeout_s=60).greeted() as raw:
        said = raw.ask({"op": "consume", "queue": "q", "name": "c", "at_once": 1})
        raw.ask({"op": "get", "queue": "q", "most": 5, "consumer": said.head["result"]})
        if closes:
            owner.close()
        else:
            clock.advance(11)
            inside.tick(queue)
            assert [one.redelivered for one in queue.get_many(5, 0)] == again
    if closes:
        with qflow.open(spool) as broker:
            assert [one.redelivered for one in broker.queue("q").get_many(5, 0)] == again


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_of_several_callbacks_at_once_what_they_have_is_counted(owner: qflow.Broker, clock: Clock, access: str) -> None:
    """And no other message, when the leases end while three of them run."""
    queue = owner.queue("jobs")
    calls: list[tuple[bytes, int]] = []

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def take(delivery: qflow.aio.AsyncDelivery) -> None:
            calls.append((delivery.body, delivery.delivery_count))
            await go_on.wait()

        async with (
            joining(access, qflow.aio.AsyncBroker(owner)) as broker,
            broker.queue("jobs").consume(take, concurrency=3),
        ):
            await event_loop.until(lambda: len(calls) == 3)
            delivered = queue.stats().delivered_total
            clock.advance(11)
            inside.tick(queue)
            assert queue.stats().delivered_total >= delivered
            go_on.set()
            await event_loop.until(lambda: not len(queue))

    event_loop.run(scenario())
    first, others = [(b"0", 1), (b"1", 1), (b"2", 1)], [(b"%d" % number, 1) for number in range(3, MESSAGES)]
    assert calls[:3] == first
    assert sorted(calls[3:]) == sorted([(body, 2) for body, _ in first] + others)


def test_a_batch_whose_lease_has_ended_is_settled(owner: qflow.Broker, clock: Clock) -> None:
    """Also what was not asked for; one that was settled twice, by its holder, leaves the others."""
    with qflow.connect(owner.path) as remote:
        queue: Any = remote.queue("jobs")
        batch = queue.get_many(5)
        batch[0].ack()
        with pytest.raises(qflow.AlreadySettled):
            batch[0].ack()
        batch[1].ack()
        clock.advance(11)
        inside.tick(owner.queue("jobs"))
        assert batch.held.left_count == 3
        with pytest.raises(qflow.AlreadySettled):
            batch[2].ack()
        assert batch.held.left_count == 0
        assert len(owner.queue("jobs")) == MESSAGES - 2


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_slow_consumer_is_closed(owner: qflow.Broker, clock: Clock, access: str) -> None:
    """It is given no more; all that it had is there for others, and what it has not seen is not counted."""
    queue = owner.queue("jobs")
    queue.on_slow_consumer(5, qflow.SlowConsumer.CLOSE)
    calls: list[bytes] = []

    def work(delivery: qflow.Delivery) -> None:
        calls.append(delivery.body)
        clock.advance(6)
        inside.tick(queue)

    opened = nullcontext(owner) if access == OWNER else qflow.connect(owner.path)
    with opened as broker:
        consumer = broker.queue("jobs").consume(work)
        until(lambda: not consumer.running)
        assert consumer.close(LONG_S)
        until(lambda: not queue.stats().consumers)
        assert [delivery.delivery_count for delivery in queue.get_many(MESSAGES)] == [2] + [1] * (MESSAGES - 1)
    assert calls == [b"0"]


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_slow_consumer_of_tasks_is_closed(owner: qflow.Broker, clock: Clock, access: str) -> None:
    """As one of threads; one of its tasks waits for a message meanwhile."""
    queue = owner.queue("jobs")
    queue.on_slow_consumer(5, qflow.SlowConsumer.CLOSE)
    queue.purge()
    calls: list[bytes] = []

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def work(delivery: qflow.aio.AsyncDelivery) -> None:
            calls.append(delivery.body)
            await go_on.wait()

        async with joining(access, qflow.aio.AsyncBroker(owner)) as broker:
            consumer = broker.queue("jobs").consume(work, concurrency=2)
            queue.put(b"slow")
            await event_loop.until(lambda: calls)
            clock.advance(6)
            inside.tick(queue)
            queue.put(b"new")
            await event_loop.until(lambda: not consumer.running)
            go_on.set()
            await consumer.close()
            await event_loop.until(lambda: not queue.stats().consumers)

    event_loop.run(scenario())
    assert calls == [b"slow"]
    assert [(one.body, one.delivery_count) for one in queue.get_many(MESSAGES)] == [(b"slow", 2), (b"new", 1)]
