"""Loops over subscriptions: what is read ahead is nobody's until it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import qflow

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
