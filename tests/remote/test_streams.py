"""Streams through the door: what is looked into, what subscribers get, and what a lost connection leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import attrs
import pytest

import qflow
import qflow.aio
from qflow.remote.client.stream_holding import RemoteStreamBatch
from qflow.remote.server import session
from qflow.stats import Rates
from qflow.streams.batches import StreamBatch
from unit.clocks import until

Connect = Callable[[], qflow.RemoteBroker]
COUNT = 600


@pytest.fixture
def stream(owner: qflow.Broker) -> qflow.Stream:
    """A stream at its owner, with messages in two partitions, each second one with headers and a key."""
    stream = owner.declare_stream("s", topics=["a/#"], partitions=2)
    for number in range(COUNT):
        odd = number % 2
        owner.publish(
            f"a/{number % 7}",
            b"%d" % number,
            key=b"k%d" % (number % 5) if odd else None,
            headers={"n": number} if odd else None,
        )
    return stream


def facts(message: qflow.StreamMessage | qflow.StreamDelivery) -> tuple[object, ...]:
    """Return all that there is to know of a message."""
    where = message.stream, message.partition, message.offset, message.topic, message.time_ms
    return (*where, message.body, message.headers, message.key)


def test_a_query_gives_what_it_gives_at_the_owner(stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """Page by page, with headers, keys and times; bounds are offsets or moments."""
    there = remote.stream("s")
    assert list(map(facts, there.query())) == list(map(facts, stream.query()))
    assert list(map(facts, there.query("a/3", newest=2))) == list(map(facts, stream.query("a/3", newest=2)))
    assert {topic: facts(one) for topic, one in there.last().items()} == {
        topic: facts(one) for topic, one in stream.last().items()
    }
    assert [one.offset for one in there.query(partition=1, start=3, end=6)] == [3, 4, 5]
    assert list(there.query(start=datetime(2200, 1, 1, tzinfo=UTC))) == []
    here, over_there = (attrs.evolve(one.stats(), rates=Rates()) for one in (stream, there))
    assert over_there == here, "but for how many a second there were, at two moments"
    assert there.settings == stream.settings


def test_queries_that_do_not_come_to_their_end_are_ended(stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """One that is left says so, also before its first message; too many that are open at once are refused."""
    for number in range(2 * session.MOST_OPEN):
        left = remote.stream("s").query()
        if number % 2:
            assert next(left).offset == 0
        left.close()  # type: ignore[attr-defined]
    held = [remote.stream("s").query() for _ in range(session.MOST_OPEN)]
    with pytest.raises(qflow.InvalidArgument, match="end some of them"):
        remote.stream("s").query()
    assert len(list(held[0])) == COUNT
    assert len(list(remote.stream("s").query())) == COUNT


def test_streams_are_declared_altered_and_deleted(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """With the settings and the errors of the owner."""
    made = remote.declare_stream("s", topics=["a/#"])
    assert (made.name, made.settings) == ("s", owner.stream("s").settings)
    with pytest.raises(qflow.SettingsConflict):
        remote.declare_stream("s", topics=["b/#"])
    with pytest.raises(qflow.InvalidArgument, match="topicks"):
        remote.declare_stream("t", topicks=["b/#"])  # type: ignore[call-arg]
    assert remote.alter_stream(made, retention_messages=5).settings.retention_messages == 5
    assert remote.streams() == ["s"]
    remote.subscribe(made, name="n").close()
    remote.delete_subscription(made, "n")
    with pytest.raises(qflow.NotFound):
        remote.delete_subscription(made, "n")
    remote.delete_stream(made)
    with pytest.raises(qflow.NotFound, match="'s'"):
        remote.stream("s")


def test_a_subscriber_gets_what_it_gets_at_the_owner(stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """In batches, singly and in a loop; a position is kept under a name."""
    expected = sorted(map(facts, stream.query()))
    with remote.subscribe("s", start="earliest", name="n", follow=False) as subscription:
        first, batch = subscription.get(), subscription.get_many(100)
        subscription.ack(first, wait=True)
        batch.ack(wait=True)
        assert batch.topics == [one.topic for one in batch]
        found = [facts(first), *map(facts, batch)]
        assert sum(subscription.positions) == len(found)
        found += [facts(delivery) for delivery in subscription]
        assert sorted(found) == expected
        assert subscription.lag == 0
        assert subscription.stats().unsettled_messages == 0
        with pytest.raises(qflow.QueueEmpty):
            subscription.get()
    with remote.subscribe("s", name="n", follow=False) as subscription:
        assert list(subscription) == []


def test_a_gap_is_told_with_its_facts(owner: qflow.Broker, stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """And the next call goes on behind it."""
    remote.subscribe("s", start="earliest", name="n").close()
    owner.alter_stream("s", retention_messages=10)
    until(lambda: stream.stats().messages <= 10)
    with remote.subscribe("s", name="n", follow=False) as subscription:
        gaps: list[qflow.GapError] = []
        while len(gaps) < 2:
            with pytest.raises(qflow.GapError) as gap:
                subscription.get_many(1000, 0)
            gaps.append(gap.value)
        assert sorted(gap.partition for gap in gaps) == [0, 1]
        assert all((gap.first, gap.messages) == (0, gap.end) for gap in gaps)
        assert len(subscription.get_many(1000)) == stream.stats().messages


def test_what_a_lost_subscriber_held_comes_to_the_next(
    stream: qflow.Stream, connect: Connect, remote: qflow.RemoteBroker
) -> None:
    """At once, marked, to another member of its group."""
    other = connect()
    member = other.subscribe("s", group="g", start="earliest")
    held = member.get_many(5)
    assert next(iter(member)).body not in held.bodies
    mine = remote.subscribe("s", group="g")
    other.close()
    with pytest.raises(qflow.BrokerClosed):
        held.ack()
    until(lambda: mine.stats().members == 1)
    again = mine.get_many(6)
    assert [one.delivery_count for one in again] == [2] * 6
    assert set(held.bodies) < set(again.bodies)


def test_a_seek_takes_back_what_is_held(stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """Late acks do nothing, and the next message is where it went."""
    with remote.subscribe("s", start="earliest", name="n", follow=False) as subscription:
        held, loop = subscription.get_many(10), iter(subscription)
        next(loop)
        subscription.seek(7, partition=0)
        subscription.seek(datetime(2200, 1, 1, tzinfo=UTC), partition=1)
        held.ack()
        held[0].ack()
        assert next(loop).offset == 7
        with pytest.raises(qflow.InvalidArgument, match="partition="):
            subscription.seek(3)
        with pytest.raises(qflow.InvalidArgument, match="partitions"):
            _ = subscription.position


def test_leases_end_at_the_owner(stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """Whoever settles too late is told."""
    with remote.subscribe("s", start="earliest", name="n", ack_timeout_s=0.01) as subscription:
        held = subscription.get()
        until(lambda: subscription.stats().redelivered_total)
        with pytest.raises(qflow.AlreadySettled):
            held.ack()


def test_a_closed_subscription_says_so(stream: qflow.Stream, remote: qflow.RemoteBroker) -> None:
    """And its connection goes on."""
    subscription = remote.subscribe("s", start="earliest")
    loop = iter(subscription)
    next(loop)
    subscription.close()
    subscription.close()
    assert subscription.closed
    with pytest.raises(qflow.InvalidArgument, match="subscribe again"):
        subscription.get()
    with pytest.raises(qflow.InvalidArgument, match="subscribe again"):
        next(loop)
    assert remote.streams() == ["s"]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of batches that are held by this side of the door."""
    looked: list[str] = []

    def counted(name: str) -> property:
        slot: Any = getattr(StreamBatch, name)

        def look(batch: RemoteStreamBatch) -> Any:
            looked.append(name)
            return slot.__get__(batch)

        return property(look, slot.__set__)

    for name in ("taker", "shown"):
        monkeypatch.setattr(RemoteStreamBatch, name, counted(name), raising=False)
    return looked


def test_a_get_of_a_named_subscription_does_not_look_at_what_is_held(
    stream: qflow.Stream, remote: qflow.RemoteBroker, looked_at: list[str]
) -> None:
    """A consumer that acks late holds many."""
    reader = remote.subscribe("s", "#", name="r", start="earliest")
    held = [reader.get() for _ in range(COUNT // 2)]
    looked_at.clear()
    reader.get()
    assert len(looked_at) < 5
    held[0].ack(wait=True)


def test_a_get_of_a_task_does_not_look_at_what_others_hold(
    owner: qflow.Broker, stream: qflow.Stream, looked_at: list[str]
) -> None:
    """Tasks that share a subscription hold one each."""

    async def scenario() -> None:
        async with qflow.aio.connect(owner.path) as broker:
            reader = await broker.subscribe("s", "#", start="earliest")
            held = await asyncio.gather(*(reader.get() for _ in range(COUNT // 2)))
            looked_at.clear()
            await asyncio.create_task(reader.get())
            assert len(looked_at) < 5
            assert len(held) == COUNT // 2

    asyncio.run(scenario())
