"""Retention: what a stream lets go, what holds it back, and what readers are told who come too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import inside
import qflow
from unit.clocks import Clock

Open = Callable[..., qflow.Broker]


def declare(broker: qflow.Broker, **settings: Any) -> qflow.Stream:
    return broker.declare_stream("s", topics=["#"], **settings)


def publish(broker: qflow.Broker, count: int, size: int = 10) -> None:
    broker.publish_many([("t", bytes(size)) for _ in range(count)])


def maintain(broker: qflow.Broker) -> None:
    """What the maintenance thread does, until nothing is left to do."""
    for _ in range(2):  # what subscribers have settled, and what goes by that
        while broker.engine.streams.tick() or inside.upkeep(broker).remove_settled():
            pass
        broker.engine.log.drain()


def kept(broker: qflow.Broker) -> list[int]:
    return [message.offset for message in broker.stream("s").query()]


def test_the_newest_messages_are_kept(open_at: Open) -> None:
    """By number, exactly; offsets go on."""
    broker = open_at()
    declare(broker, retention_messages=7)
    publish(broker, 30)
    assert len(kept(broker)) == 30  # not in a publish
    maintain(broker)
    assert kept(broker) == list(range(23, 30))
    stats = broker.stats().streams["s"]
    assert (stats.messages, stats.first_offsets, stats.next_offsets, stats.dropped_total) == (7, [23], [30], 23)
    publish(broker, 1)
    maintain(broker)
    assert kept(broker) == list(range(24, 31))
    broker.close()
    assert kept(open_at()) == list(range(24, 31))


def test_bytes_are_kept_within_bounds(open_at: Open) -> None:
    """Exactly as much as fits, of messages of any size; one that is larger than all of it goes."""
    broker = open_at()
    declare(broker, retention_bytes=1000)
    publish(broker, 5, 300)
    maintain(broker)
    assert kept(broker) == [2, 3, 4]
    publish(broker, 1, 901)
    maintain(broker)
    assert kept(broker) == [5]
    publish(broker, 1, 1001)
    maintain(broker)
    assert kept(broker) == []
    publish(broker, 1)
    assert kept(broker) == [7]
    assert broker.check() == []


def test_what_is_older_goes(open_at: Open, clock: Clock) -> None:
    """To the message, also within a block."""
    broker = open_at()
    declare(broker, retention_s=100)
    for _ in range(10):
        publish(broker, 2)
        clock.advance(10)
    maintain(broker)
    assert kept(broker) == list(range(20))
    clock.advance(35)
    maintain(broker)
    assert kept(broker) == list(range(8, 20))
    clock.advance(1000)
    maintain(broker)
    assert kept(broker) == []
    publish(broker, 1)
    assert kept(broker) == [20]


def test_all_partitions_share_a_limit(open_at: Open) -> None:
    """Each in proportion to what it holds."""
    broker = open_at()
    declare(broker, retention_messages=50, partitions=3)
    broker.publish_many([("t", b"", b"%d" % (number % 40)) for number in range(400)])
    maintain(broker)
    stats = broker.stats().streams["s"]
    assert 47 <= stats.messages <= 50
    assert all(first < following for first, following in zip(stats.first_offsets, stats.next_offsets, strict=True))


def test_a_limit_is_shared_by_what_age_has_left(open_at: Open, clock: Clock) -> None:
    """What is too old takes no share of the number that may stay: the young ones of another partition do."""
    broker = open_at()
    stream = declare(broker, retention_messages=10, retention_s=60.0, partitions=2)
    a, b = (
        next(str(n) for n in range(99) if broker.publish("t", b"", key=str(n)).partitions["s"] == p) for p in (0, 1)
    )
    broker.publish_many([("t", b"old", a)] * 50)
    clock.advance(50)
    broker.publish_many([("t", b"young", b)] * 8)
    clock.advance(20)
    maintain(broker)
    assert [message.body for message in stream.query()] == [b"young"] * 8


def test_a_lot_goes_in_parts(open_at: Open) -> None:
    """No step is long: blocks are removed a bounded number at a time, and all of them in the end."""
    broker = open_at()
    declare(broker)
    for _ in range(60):
        publish(broker, 100, 4000)
    broker.alter_stream("s", retention_messages=1)
    steps = 0
    while broker.engine.streams.tick() or inside.upkeep(broker).remove_settled():
        steps += 1
    assert steps
    assert kept(broker) == [5999]
    assert broker.check() == []


def test_retention_that_failed_is_tried_again_and_counts_once(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the floor is raised when there is room, by what it was to be raised by."""
    broker = open_at()
    declare(broker, retention_messages=5)
    publish(broker, 20)
    make_room = broker.engine.log._env.make_room

    def full(*_: object, **__: object) -> None:
        raise qflow.DiskFull("no room")

    monkeypatch.setattr(broker.engine.log._env, "make_room", full)
    for _ in range(3):
        with pytest.raises(qflow.DiskFull):
            broker.stream("s").retain()
    monkeypatch.setattr(broker.engine.log._env, "make_room", make_room)
    maintain(broker)
    assert kept(broker) == [15, 16, 17, 18, 19]
    stats = broker.stats().streams["s"]
    assert (stats.messages, stats.bytes, stats.dropped_total) == (5, 50, 15)
    assert broker.check() == []


# Held back by subscriptions ------------------------------------------------------------------------------------------


def test_what_a_durable_subscription_is_to_get_stays(open_at: Open, clock: Clock) -> None:
    """Edge 31: the slowest one holds it, out-of-order acks or not; when all have it, it goes."""
    broker = open_at()
    declare(broker, retain_until_consumed=True)
    publish(broker, 20)
    maintain(broker)
    assert len(kept(broker)) == 20  # nobody has had it
    fast = broker.subscribe("s", name="fast", start="earliest")
    slow = broker.subscribe("s", name="slow", start="earliest")
    fast.get_many(100, 0).ack(wait=True)
    batch = slow.get_many(10, 0)
    for index in (0, 1, 2, 5):
        batch[index].ack(wait=True)
    maintain(broker)
    assert kept(broker) == list(range(3, 20))
    slow.close()
    fast.close()
    maintain(broker)
    assert kept(broker) == list(range(3, 20))
    broker.close()
    broker = open_at()
    maintain(broker)
    assert kept(broker) == list(range(3, 20))
    with broker.subscribe("s", name="slow") as slow:
        assert slow.get_many(100, 0).offsets == [3, 4, *range(6, 20)]
        slow.seek(20)
    maintain(broker)
    assert kept(broker) == []


def test_messages_nobody_asked_for_hold_nothing_back(open_at: Open) -> None:
    """A subscriber with a filter that waits for more has had all there is, though it got little of it."""
    broker = open_at()
    declare(broker, retain_until_consumed=True)
    subscription = broker.subscribe("s", "other", name="d", start="earliest")
    publish(broker, 20)
    assert not subscription.get_many(1, 0)
    maintain(broker)
    assert kept(broker) == []
    broker.publish("other", b"")
    publish(broker, 5)
    maintain(broker)
    assert kept(broker)[0] == 20
    subscription.get(0).ack(wait=True)
    assert not subscription.get_many(1, 0)
    maintain(broker)
    assert kept(broker) == []


def test_settled_stretches_are_passed_over_when_it_is_opened_again(open_at: Open) -> None:
    """All wanted messages of a block were settled above the floor: that block is behind it when the hole is closed."""
    broker = open_at()
    declare(broker, retain_until_consumed=True)
    for number in range(6):
        broker.publish_many([("t" if one % 4 == 0 else "other", b"%d" % one * 2000) for one in range(9)])
        assert number >= 0
    subscription = broker.subscribe("s", "t", name="d", start="earliest")
    batch = subscription.get_many(100, 0)
    for delivery in list(batch)[1:]:
        delivery.ack(wait=True)
    subscription.close()
    subscription = broker.subscribe("s", "t", name="d")
    (left,) = subscription.get_many(100, 0)
    assert left.offset == 0
    left.ack(wait=True)
    assert not subscription.get_many(1, 0)
    maintain(broker)
    broker.engine.log.drain()
    assert subscription.stats().committed == [54]
    maintain(broker)
    assert kept(broker) == []


def test_a_session_that_expired_holds_nothing_back(open_at: Open, clock: Clock) -> None:
    """Edge 31: until then it does; then limits hold as if it had never been."""
    broker = open_at()
    declare(broker, retain_until_consumed=True, retention_messages=5)
    broker.subscribe("s", name="away", start="earliest", session_expiry_s=100).close()
    publish(broker, 20)
    maintain(broker)
    assert len(kept(broker)) == 20
    clock.advance(101)
    maintain(broker)
    assert kept(broker) == list(range(15, 20))


# Readers who come too late -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "d"])
def test_a_gap_is_told_with_its_size(open_at: Open, name: str | None) -> None:
    """Edge 30 and 34: between two batches, once, in its place; the next call goes on behind it."""
    broker = open_at(capacity_bytes=2_000)
    declare(broker)
    publish(broker, 400, 500)
    subscription = broker.subscribe("s", name=name, start="earliest")
    first = subscription.get_many(1, 0)
    first.ack()
    broker.alter_stream("s", retention_messages=10)
    maintain(broker)
    found = first.offsets
    gaps: list[qflow.GapError] = []
    for _ in range(100):
        try:
            batch = subscription.get_many(100, 0)
        except qflow.GapError as error:
            gaps.append(error)
            found += [-1, error.end - 1]
            continue
        found += batch.offsets
        batch.ack()
    (gap,) = gaps
    assert (gap.partition, gap.end, gap.messages) == (0, 390, 390 - gap.first)
    assert f"messages {gap.first} to 389 are gone" in str(gap)
    assert found == [*range(gap.first), -1, *range(389, 400)]
    assert subscription.stats().gap_total == gap.messages


def test_a_gap_may_be_skipped_and_is_counted(open_at: Open) -> None:
    """`on_gap="skip"`: the reader goes on where there is something, `gap_total` tells what it missed."""
    broker = open_at()
    declare(broker, retention_messages=10)
    subscription = broker.subscribe("s", start="earliest", on_gap="skip")
    publish(broker, 100)
    maintain(broker)
    broker.engine.streams.room.give_way(2**30)  # live tails do not help
    assert subscription.get_many(100, 0).offsets == list(range(90, 100))
    assert subscription.stats().gap_total == 90
    with pytest.raises(qflow.InvalidArgument, match="on_gap"):
        broker.subscribe("s", on_gap="ignore")


def test_a_start_that_is_gone_is_a_gap_too(open_at: Open) -> None:
    """An offset below what is retained; the cursor of one who was away for too long."""
    broker = open_at()
    declare(broker, retention_messages=10)
    broker.subscribe("s", name="away", start="earliest").close()
    publish(broker, 30)
    maintain(broker)
    for subscription in (broker.subscribe("s", start=3), broker.subscribe("s", name="away")):
        with pytest.raises(qflow.GapError) as caught:
            subscription.get(0)
        assert (caught.value.first, caught.value.end) == (3 if subscription.name is None else 0, 20)
        assert subscription.get(0).offset == 20
    late = broker.subscribe("s", start="earliest")
    late.seek(5)
    with pytest.raises(qflow.GapError):
        late.get_many(5, 0)
    assert late.get_many(100, 0).offsets == list(range(20, 30))


def test_what_was_read_ahead_is_still_delivered(open_at: Open) -> None:
    """Edge 34: retention takes from the log, not from the hands of a reader; it is told of what it has not got."""
    broker = open_at()
    declare(broker)
    publish(broker, 10)
    subscription = broker.subscribe("s", name="d", start="earliest")
    assert subscription.get(0).offset == 0  # and has read on
    publish(broker, 10)
    broker.alter_stream("s", retention_messages=1)
    maintain(broker)
    batch = subscription.get_many(9, 0)
    assert batch.offsets == list(range(1, 10))
    batch.ack(wait=True)
    assert broker.check() == []


def test_a_block_that_lost_a_part_before_stops_nothing(open_at: Open) -> None:
    """One call goes on behind the rest of it, and leaves just what may stay."""
    broker = open_at()
    stream = declare(broker, retention_messages=900)
    publish(broker, 1000, 256)
    assert not stream.retain()
    assert stream.stats().first_offsets == [100]  # in the middle of the first block
    broker.alter_stream("s", retention_messages=5)
    assert not stream.retain()
    assert (stream.stats().first_offsets, stream.stats().messages) == ([995], 5)
