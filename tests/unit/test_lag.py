"""How far a subscription is behind: of all topics, and of those its filter wants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import qflow
import qflow.aio
from doors.event_loop import run, told
from drivers import opening_tasks
from qflow import inspect

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]

COUNT = 2000


def fill(broker: qflow.Broker, **settings: int) -> None:
    """Publish messages of which every second one is wanted."""
    broker.declare_stream("s", topics=["+"], **settings)
    broker.publish_many([("wanted" if number % 2 == 0 else "other", b"x" * 100) for number in range(COUNT)])


def matching(subscription: qflow.Subscription) -> int | None:
    return subscription.stats(matching=True).matching_messages


@pytest.mark.parametrize("name", [None, "d"])
def test_the_lag_is_what_lies_behind_the_last_message_that_was_delivered(open_spool: Open, name: str | None) -> None:
    """Of all topics, whatever was read ahead; with `matching`, of those the filter wants."""
    broker = open_spool()
    fill(broker)
    with broker.subscribe("s", "wanted", name=name, start="earliest", follow=False) as subscription:
        assert (subscription.lag, matching(subscription)) == (COUNT, COUNT // 2)
        for number in range(3):
            assert subscription.get().offset == 2 * number
            assert subscription.lag == subscription.stats().lag_messages == COUNT - 2 * number - 1
            assert matching(subscription) == COUNT // 2 - number - 1
        assert subscription.get_many(97).offsets[-1] == 198
        assert (subscription.lag, matching(subscription)) == (COUNT - 199, COUNT // 2 - 100)
        while subscription.get_many(1000):
            pass
        assert (subscription.lag, matching(subscription)) == (0, 0)


def test_the_lag_goes_down_by_what_an_iteration_shows(open_spool: Open) -> None:
    """What it has read ahead is behind until it is shown, also when the loop is left."""
    broker = open_spool()
    fill(broker)
    with broker.subscribe("s", "wanted", start="earliest", follow=False) as subscription:
        seen = []
        for number, _ in enumerate(subscription):
            seen.append((subscription.lag, matching(subscription)))
            if number == 300:
                break
        assert seen == [(COUNT - 2 * number - 1, COUNT // 2 - number - 1) for number in range(301)]
        assert subscription.get().offset == 602
        assert (subscription.lag, matching(subscription)) == (COUNT - 604, COUNT // 2 - 302)  # 603 is passed over


def test_what_is_given_back_is_behind_again(open_spool: Open) -> None:
    """At once, and later: as many as come again."""
    broker = open_spool()
    fill(broker)
    with broker.subscribe("s", "wanted", name="d", start="earliest") as subscription:
        first, second = subscription.get(), subscription.get()
        second.nack(delay_s=3600)
        assert (subscription.lag, matching(subscription)) == (COUNT - 2, COUNT // 2 - 1)
        first.nack()
        assert (subscription.lag, matching(subscription)) == (COUNT - 1, COUNT // 2)
        subscription.seek(COUNT - 10)
        assert (subscription.lag, matching(subscription)) == (10, 5)


def test_the_lag_of_a_live_subscription(open_spool: Open) -> None:
    """What nobody wants is passed over as it comes; what is wanted and not delivered is behind."""
    broker = open_spool()
    fill(broker)
    with broker.subscribe("s", "wanted", start="latest") as subscription:
        assert subscription.get_many(1, timeout_s=0).total == 0
        broker.publish_many([("other", b"x")] * 50)
        assert (subscription.lag, matching(subscription)) == (0, 0)
        broker.publish("wanted", b"x")
        broker.publish_many([("other", b"x")] * 7)
        assert (subscription.lag, matching(subscription)) == (8, 1)
        subscription.get().ack()
        assert (subscription.lag, matching(subscription)) == (0, 0)


@pytest.mark.owner_only
@pytest.mark.parametrize("filter", ["wanted", "#"])
def test_what_was_settled_out_of_order_or_is_gone_is_not_behind(open_spool: Open, spool: Path, filter: str) -> None:
    """A durable subscription that is opened again; retention that was faster; several partitions."""
    with qflow.open(spool) as broker:
        fill(broker, partitions=2)
        with broker.subscribe("s", filter, name="d", start="earliest") as subscription:
            batch = subscription.get_many(500)
            count = len(batch)
            for index in range(1, count, 2):
                batch[index].ack(wait=True) if index == count - 1 else batch[index].ack()
            acked = count // 2
        wanted = COUNT if filter == "#" else COUNT // 2
        assert matching(subscription) == wanted - acked
        lag = subscription.lag
    (facts,) = inspect.read_spool(spool).streams[0].subscriptions
    assert facts.lag_messages == lag
    broker = open_spool()
    with broker.subscribe("s", filter, name="d") as subscription:
        assert matching(subscription) == wanted - acked
        if filter == "#":
            assert subscription.lag == COUNT - acked
        assert subscription.get().offset == 0
        assert matching(subscription) == wanted - acked - 1
        broker.alter_stream("s", retention_messages=100)
        broker.stream("s").retain()
        left = broker.stream("s").stats().messages
        subscription.seek(broker.stream("s").stats().first_offsets[0], partition=0)
        subscription.seek(broker.stream("s").stats().first_offsets[1], partition=1)
        assert subscription.lag == left


def test_what_was_settled_out_of_order_is_never_behind_again(open_spool: Open) -> None:
    """Not when it has been read, nor where others come back from around it, alone or in a batch."""
    broker = open_spool()
    fill(broker)
    left = (0, 500, COUNT - 2)
    with broker.subscribe("s", "#", name="d", start="earliest") as subscription:
        while batch := subscription.get_many(COUNT, timeout_s=0):
            for index in [index for index, offset in enumerate(batch.offsets) if offset not in left]:
                batch[index].ack()
    with broker.subscribe("s", "#", name="d", follow=False) as subscription:

        def behind() -> tuple[int, int | None]:
            return subscription.lag, matching(subscription)

        assert behind() == (3, 3)
        first = subscription.get()
        assert (first.offset, *behind()) == (0, 2, 2)
        second = subscription.get()
        assert (second.offset, *behind()) == (500, 1, 1)
        first.nack()
        assert behind() == (2, 2)
        second.nack()
        assert behind() == (3, 3)
        batch = subscription.get_many(10)
        assert (batch.offsets, *behind()) == ([*left], 0, 0)
        batch.nack()
        assert behind() == (3, 3)
        for number, delivery in enumerate(subscription):
            assert (delivery.offset, *behind()) == (left[number], 2 - number, 2 - number)
        subscription.seek(0)
        assert subscription.lag == COUNT


def test_tasks_ask_for_it_too(spool: Path, access: str) -> None:
    """`lag` is at hand; what matches is counted without keeping the loop."""

    async def main() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            await broker.declare_stream("s", topics=["+"])
            await broker.publish_many([("wanted" if number % 2 == 0 else "other", b"x") for number in range(100)])
            async with broker.subscribe("s", "wanted", start="earliest") as subscription:
                await (await subscription.get()).ack()
                assert await told(subscription.lag) == 99
                assert (await subscription.stats()).matching_messages is None
                assert (await subscription.stats(matching=True)).matching_messages == 49

    run(main())
