"""Loops over subscriptions: what is read ahead is nobody's until it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import qflow
from doors.event_loop import run, told
from drivers import opening, opening_tasks
from faults.seams import in_thread
from unit.clocks import Clock, open_still

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COUNT = 600


@pytest.fixture
def broker(open_spool: Open) -> qflow.Broker:
    broker = open_spool()
    broker.declare_stream("s", topics=["a/#"])
    broker.publish_many([("a/1", b"%d" % number) for number in range(COUNT)])
    return broker


@pytest.fixture(params=[None, "name"])
def subscription(broker: qflow.Broker, request: pytest.FixtureRequest) -> Iterator[qflow.Subscription]:
    with broker.subscribe("s", name=request.param, start="earliest", follow=False) as subscription:
        yield subscription


def test_a_get_inside_a_loop_gets_the_next_message(subscription: qflow.Subscription) -> None:
    """I16: each message once and in order, however it is asked for."""
    seen: list[int] = []
    for delivery in subscription:
        seen.append(delivery.offset)
        if delivery.offset in (0, 300):
            with subscription.get() as second:
                seen.append(second.offset)
        assert subscription.position == seen[-1] + 1
    assert seen == list(range(COUNT))


def test_two_loops_at_once_share_the_messages(subscription: qflow.Subscription) -> None:
    """Nothing is lost, nothing comes twice."""
    pairs = list(zip(subscription, subscription, strict=True))
    assert [one.offset for pair in pairs for one in pair] == list(range(COUNT))


def test_what_is_returned_in_a_loop_comes_before_what_is_new(subscription: qflow.Subscription) -> None:
    """Not after all that was read ahead."""
    seen: list[int] = []
    for delivery in subscription:
        seen.append(delivery.offset)
        if delivery.offset == 4 and delivery.delivery_count == 1:
            delivery.nack()
    assert seen == [0, 1, 2, 3, 4, *range(4, COUNT)]


@pytest.mark.parametrize("name", [None, "n"])
def test_what_comes_back_after_a_delay_in_a_loop_comes_before_what_is_new(
    spool: Path, access: str, name: str | None
) -> None:
    """With the next message after the delay, whether it was read ahead or not; for threads and for tasks."""
    clock = Clock()
    bodies = [("a/1", b"%d" % number) for number in range(COUNT)]
    expected = [*range(7), 4, *range(7, COUNT)]
    seen: list[int] = []
    with opening(access, lambda: open_still(spool, clock)) as open_it:
        broker = open_it()
        broker.declare_stream("s", topics=["a/#"])
        broker.publish_many(bodies)
        with broker.subscribe("s", name=name, start="earliest", follow=False) as subscription:
            for delivery in subscription:
                seen.append(delivery.offset)
                if seen == [*range(5)]:
                    delivery.nack(delay_s=10)
                if seen == [*range(7)]:
                    assert subscription.lag == COUNT - 6  # asked for: the owner has what was given back
                    clock.advance(10)
        assert seen == expected
        broker.close()

    async def main() -> None:
        seen.clear()
        async with (
            opening_tasks(access, partial(open_still, spool, clock)) as broker,
            broker.subscribe("s", name=name and "t", start="earliest", follow=False) as subscription,
        ):
            async for delivery in subscription:
                seen.append(delivery.offset)
                if seen == [*range(5)]:
                    await delivery.nack(delay_s=10)
                if seen == [*range(7)]:
                    assert await told(subscription.lag) == COUNT - 6
                    clock.advance(10)

    run(main())
    assert seen == expected


@pytest.mark.parametrize("delay_s", [0, 10])
def test_a_batch_that_is_returned_in_a_loop_comes_before_what_is_new(spool: Path, access: str, delay_s: int) -> None:
    """As each of its messages would."""
    clock = Clock()
    seen: list[int] = []
    with opening(access, lambda: open_still(spool, clock)) as open_it:
        broker: Any = open_it()
        broker.declare_stream("s", topics=["a/#"])
        broker.publish_many([("a/1", b"%d" % number) for number in range(COUNT)])
        with broker.subscribe("s", name="n", start="earliest", follow=False) as subscription:
            held = subscription.get_many(3)
            for delivery in subscription:
                seen.append(delivery.offset)
                if seen == [3, 4]:
                    held.nack(delay_s=delay_s)
                    assert subscription.lag == COUNT - 2  # asked for: the owner has what was given back
                    clock.advance(delay_s)
        assert seen == [3, 4, 0, 1, 2, *range(5, COUNT)]


@pytest.mark.owner_only
def test_what_another_thread_returns_comes_before_what_a_loop_has_ahead(broker: qflow.Broker) -> None:
    """The loop goes on with it, as it would after a return of its own."""
    seen: list[int] = []
    with broker.subscribe("s", name="n", start="earliest", follow=False) as subscription:
        held = in_thread(subscription.get)
        for delivery in subscription:
            seen.append(delivery.offset)
            if seen == [1, 2]:
                in_thread(held.nack)
    assert seen == [1, 2, 0, *range(3, COUNT)]


def test_a_loop_that_is_left_holds_the_last_message(broker: qflow.Broker) -> None:
    """It can still be acked; else it comes again, marked, with the next loop."""
    with broker.subscribe("s", name="n", start="earliest", follow=False) as subscription:
        for delivery in subscription:
            if delivery.offset == 2:
                break
        assert subscription.get().offset == 3
        delivery.ack(wait=True)
        again = iter(subscription)
        assert next(again).offset == 4
    with broker.subscribe("s", name="n", follow=False) as subscription:
        first, second = (delivery for delivery, _ in zip(subscription, range(2), strict=False))
        assert (first.offset, first.redelivered) == (3, True)
        assert (second.offset, second.redelivered) == (4, True)


def test_a_second_loop_brings_back_what_the_first_one_left(broker: qflow.Broker) -> None:
    """As after an exception in its body."""
    with broker.subscribe("s", name="n", start="earliest", follow=False) as subscription:
        assert next(iter(subscription)).offset == 0
        delivery = next(iter(subscription))
        assert (delivery.offset, delivery.delivery_count) == (0, 2)


@pytest.mark.owner_only
def test_a_loop_goes_on_behind_a_gap(broker: qflow.Broker) -> None:
    """The same loop, where the error is caught; and the gap is told once, without what was settled."""
    with broker.subscribe("s", name="n", start="earliest") as subscription:
        subscription.get_many(3)[1].ack(wait=True)
    broker.alter_stream("s", retention_messages=5)
    stream = broker.stream("s")
    while stream.retain():
        pass
    with broker.subscribe("s", name="n", follow=False) as subscription:
        loop = iter(subscription)
        with pytest.raises(qflow.GapError) as gap:
            next(loop)
        assert (gap.value.first, gap.value.end, gap.value.messages) == (0, COUNT - 5, COUNT - 6)
        assert [delivery.offset for delivery in loop] == list(range(COUNT - 5, COUNT))
        assert subscription.stats().gap_total == COUNT - 6


@pytest.mark.owner_only
def test_who_holds_too_much_is_told(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the stream has ended; and goes on when some of it is settled."""
    monkeypatch.setattr("qflow.streams.cursor.MOST_UNSETTLED", 100)
    with broker.subscribe("s", name="n", start="earliest", follow=False) as subscription:
        held = subscription.get_many(1000)
        assert len(held) == 100
        with pytest.raises(qflow.TooManyUnsettled, match="100 messages"):
            subscription.get_many(1000)
        held[0].ack()
        assert subscription.get().offset == 100
    with broker.subscribe("s", name="n") as subscription:
        assert len(subscription.get_many(1000)) == 100
        with pytest.raises(qflow.TooManyUnsettled):
            subscription.get(timeout_s=0.01)


def test_a_closed_subscription_says_where_it_is(broker: qflow.Broker) -> None:
    """In the log, that is."""
    with broker.subscribe("s", name="n", start="earliest") as subscription:
        for _ in range(4):
            subscription.get().ack(wait=True)
        subscription.get_many(7)
    (stats,) = broker.stream("s").stats().subscriptions
    assert (stats.positions, stats.committed, stats.lag_messages) == ([4], [4], COUNT - 4)
