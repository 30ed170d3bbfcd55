"""Subscriptions: what comes, in which order, to whom; what is settled, returned, left behind, and found again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import inside
import qflow
from unit.clocks import LONG_S, Clock, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


@pytest.fixture
def broker(open_at: Open) -> qflow.Broker:
    """A broker in still time, with a stream `s` of ten messages: topics `a/0`, `b/1`, `a/2`, …"""
    broker = open_at()
    broker.declare_stream("s", topics=["#", "$sys/#"])
    publish(broker, 10)
    return broker


def publish(broker: qflow.Broker, count: int) -> None:
    broker.publish_many([(f"{'ab'[number % 2]}/{number}", b"%d" % number) for number in range(count)])


def taken(subscription: qflow.Subscription, most: int = 1000) -> list[int]:
    """Offsets of what is there, which is acked."""
    found: list[int] = []
    while batch := subscription.get_many(most, 0):
        found += batch.offsets
        batch.ack()
    return found


# What comes ----------------------------------------------------------------------------------------------------------


def test_a_subscription_begins_where_it_is_told(broker: qflow.Broker, clock: Clock) -> None:
    """At the beginning, at the end, at an offset, at a moment."""
    clock.advance(10)
    moment = datetime.fromtimestamp(clock.wall_s - 5, UTC)
    publish(broker, 2)
    for start, expected in (
        ("earliest", list(range(12))),
        ("latest", []),
        (7, [7, 8, 9, 10, 11]),
        (12, []),
        (moment, [10, 11]),
        (datetime.fromtimestamp(clock.wall_s + 5, UTC), []),
        (datetime(2000, 1, 1, tzinfo=UTC), list(range(12))),
    ):
        assert taken(broker.subscribe("s", start=start)) == expected
    assert taken(broker.subscribe("s")) == []  # latest
    with pytest.raises(qflow.InvalidArgument, match="the next message gets 12"):
        broker.subscribe("s", start=13)
    for bad in ("oldest", -1, 1.5, None, True, datetime.now(), "committed"):
        with pytest.raises(qflow.InvalidArgument):
            broker.subscribe("s", start=bad)  # type: ignore[arg-type]


def test_a_filter_chooses_topics_that_come_later_too(broker: qflow.Broker) -> None:
    """Edge 29: `+`, `#`, topics that did not exist; one copy however many of the stream's filters match."""
    one = broker.subscribe("s", "a/+", start="earliest")
    assert taken(one) == [0, 2, 4, 6, 8]
    broker.publish("a/new", b"")
    broker.publish("a/new/below", b"")
    broker.publish("b/new", b"")
    assert taken(one) == [10]
    assert taken(broker.subscribe("s", "a/#", start=9)) == [10, 11]
    assert taken(broker.subscribe("s", "+/new", start="earliest")) == [10, 12]
    assert taken(broker.subscribe("s", "a/new", start="earliest")) == [10]
    broker.alter_stream("s", topics=["#", "a/#", "a/+", "a/new", "$sys/#"])
    broker.publish("a/new", b"once")
    assert taken(one) == [13]


def test_wildcards_leave_out_topics_that_begin_with_a_dollar(broker: qflow.Broker) -> None:
    """As in MQTT: `#` and `+/…` do not match them, `$sys/#` does; live and in a replay."""
    live = {wanted: broker.subscribe("s", wanted) for wanted in ("#", "+/up", "$sys/#", "$sys/up")}
    broker.publish("$sys/up", b"")
    broker.publish("x/up", b"")
    expected = {"#": [11], "+/up": [11], "$sys/#": [10], "$sys/up": [10]}
    assert {wanted: taken(subscription) for wanted, subscription in live.items()} == expected
    assert {wanted: taken(broker.subscribe("s", wanted, start=10)) for wanted in expected} == expected


def test_an_iterator_acks_the_one_before(broker: qflow.Broker) -> None:
    """Asking for the next one acks; the last one that was shown comes again, as one that was delivered before."""
    with broker.subscribe("s", name="d", start="earliest", follow=False) as subscription:
        for delivery in subscription:
            if delivery.offset == 4:
                break
    with broker.subscribe("s", name="d", follow=False) as subscription:
        assert subscription.stats().committed == [4]
        found = list(subscription)
        assert [delivery.offset for delivery in found] == list(range(4, 10))
        assert found[0].redelivered
    with broker.subscribe("s", name="d", follow=False) as subscription:
        assert list(subscription) == []


def test_an_iterator_follows_a_seek_at_once(broker: qflow.Broker) -> None:
    """What it had read ahead is left behind."""
    found: list[int] = []
    with broker.subscribe("s", start="earliest", follow=False) as subscription:
        for delivery in subscription:
            found.append(delivery.offset)
            if found == [0, 1, 2]:
                subscription.seek(8)
    assert found == [0, 1, 2, 8, 9]


def test_an_iterator_shows_nothing_that_went_back(broker: qflow.Broker, clock: Clock) -> None:
    """Each message has its own lease: what one costs is not taken from the others."""
    found: list[tuple[int, bool]] = []
    with broker.subscribe("s", name="d", start="earliest", follow=False, ack_timeout_s=10) as subscription:
        for delivery in subscription:
            found.append((delivery.offset, delivery.redelivered))
            clock.advance(9)
    assert found == [(offset, False) for offset in range(10)]


def test_without_follow_it_ends_where_the_stream_does(broker: qflow.Broker) -> None:
    """And goes on if there is more by then."""
    subscription = broker.subscribe("s", "a/#", start="earliest", follow=False)
    assert [delivery.offset for delivery in subscription] == [0, 2, 4, 6, 8]
    assert not subscription.get_many(5)
    with pytest.raises(qflow.QueueEmpty):
        subscription.get()
    broker.publish("a/x", b"")
    assert subscription.get().offset == 10


@pytest.mark.owner_only
def test_get_waits_and_gives_up(open_spool: Open) -> None:
    """A time-out is QueueEmpty for one, an empty batch for many; a message that comes ends the wait."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    subscription = broker.subscribe("s", "a")
    with pytest.raises(qflow.QueueEmpty):
        subscription.get(0.01)
    with pytest.raises(qflow.QueueEmpty):
        subscription.get_nowait()
    empty = subscription.get_many(5, 0.01)
    assert len(empty) == 0
    empty.ack(wait=True)
    empty.nack()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(subscription.get(LONG_S).offset))
    thread.start()
    until(lambda: inside.cursor(subscription)._line.watching)
    broker.publish("b", b"")  # not wanted
    broker.publish("a", b"")
    thread.join(LONG_S)
    assert found == [1]
    for bad in (0, -1, 1.5, None, "1"):
        with pytest.raises(qflow.InvalidArgument):
            subscription.get_many(bad)  # type: ignore[arg-type]


# Settling ------------------------------------------------------------------------------------------------------------


def test_a_durable_subscription_goes_on_behind_what_is_settled(open_at: Open, broker: qflow.Broker) -> None:
    """Also out of order, one by one, and after a restart; confirmed acks never come again."""
    subscription = broker.subscribe("s", name="d", start="earliest")
    batch = subscription.get_many(6, 0)
    for offset in (0, 1, 3, 5):
        batch[offset].ack(wait=True)
    with pytest.raises(qflow.SettingsConflict, match="open already"):
        broker.subscribe("s", name="d")
    with pytest.raises(qflow.AlreadySettled):
        batch[3].ack()
    subscription.close()
    subscription.close()
    with pytest.raises(qflow.InvalidArgument, match="closed"):
        subscription.get(0)
    with pytest.raises(qflow.InvalidArgument, match="closed"):
        subscription.seek(0)
    with pytest.raises(qflow.AlreadySettled):
        batch[2].ack()
    with pytest.raises(qflow.SettingsConflict, match="filter"):
        broker.subscribe("s", "a/#", name="d")
    with pytest.raises(qflow.SettingsConflict, match="group"):
        broker.subscribe("s", group="d")
    with broker.subscribe("s", name="d", start="latest") as subscription:
        assert subscription.get_many(100, 0).offsets == [2, 4, 6, 7, 8, 9]
    broker.close()
    broker = open_at()
    with broker.subscribe("s", name="d", start="committed") as subscription:
        batch = subscription.get_many(100, 0)
        assert batch.offsets == [2, 4, 6, 7, 8, 9]
        assert all(delivery.redelivered for delivery in batch)
        batch.ack()
        assert subscription.stats().unsettled_messages == 0
    with broker.subscribe("s", name="d") as subscription:
        assert taken(subscription) == []
        assert subscription.stats().committed == [10]


def test_what_is_returned_comes_again_in_its_place(broker: qflow.Broker, clock: Clock) -> None:
    """At once, later, or never: nack, nack with a delay, nack of what nobody wants."""
    subscription = broker.subscribe("s", name="d", start="earliest")
    batch = subscription.get_many(5, 0)
    batch[1].nack()
    batch[3].nack(delay_s=10)
    batch[4].nack(requeue=False)
    again = subscription.get(0)
    assert (again.offset, again.delivery_count, again.redelivered) == (1, 2, True)
    assert subscription.get(0).offset == 5
    batch.nack()
    assert subscription.get_many(10, 0).offsets == [0, 2, 6, 7, 8, 9]
    clock.advance(10)
    assert subscription.get(0).offset == 3
    assert subscription.stats().redelivered_total == 4


@pytest.mark.owner_only
@pytest.mark.parametrize("name", [None, "kept"])
def test_what_acking_a_part_of_a_batch_looks_at_does_not_grow_with_its_shares(
    broker: qflow.Broker, name: str | None
) -> None:
    """Every second message came back, so that each of a batch is a share of its own."""
    publish(broker, 590)
    subscription = broker.subscribe("s", name=name, start="earliest")
    for number, delivery in enumerate(list(subscription.get_many(600))):
        if number % 2:
            delivery.ack()
        else:
            delivery.nack()
    batch = subscription.get_many(300)
    shares = inside.Counted(batch.held.shares)
    batch.held.kept = batch.held.kept._replace(shares=shares)
    assert len(shares) == len(batch) == 300
    for delivery in reversed(list(batch)):
        delivery.ack()
    looks = shares.looks
    assert looks <= 5 * 300
    assert taken(subscription) == []


def test_extending_never_shortens_a_lease(broker: qflow.Broker, clock: Clock) -> None:
    """Of a message, of a batch, and of what was extended before."""
    subscription = broker.subscribe("s", start="earliest", group="g", ack_timeout_s=60)
    subscription.get().extend(1)
    subscription.get_many(1).extend(1)
    longer = subscription.get_many(1)
    longer.extend(100)
    longer.extend(1)
    clock.advance(59)
    assert subscription.get_many(1, 0).offsets == [3]
    clock.advance(2)
    assert subscription.get_many(3, 0).offsets == [0, 1, 4]
    longer.ack()


def test_a_lease_ends(broker: qflow.Broker, clock: Clock) -> None:
    """Then it is somebody else's, and an ack too late says so; `extend` holds it longer."""
    subscription = broker.subscribe("s", name="d", start="earliest", ack_timeout_s=10)
    one, two = subscription.get(0), subscription.get(0)
    clock.advance(9)
    two.extend(10)
    clock.advance(1)
    again = subscription.get(0)
    assert (again.offset, again.delivery_count) == (0, 2)
    with pytest.raises(qflow.AlreadySettled):
        one.ack()
    two.ack()
    for bad in (0, -1, "x"):
        with pytest.raises(qflow.InvalidArgument):
            broker.subscribe("s", name="e", ack_timeout_s=bad)  # type: ignore[arg-type]


@pytest.mark.owner_only
def test_a_transaction_settles_and_publishes_together(broker: qflow.Broker, clock: Clock) -> None:
    """Rolled back, both are as before; committed, neither comes again, whatever the lease says meanwhile."""
    subscription = broker.subscribe("s", name="d", start="earliest", ack_timeout_s=10)
    batch = subscription.get_many(4, 0)
    tx = broker.transaction()
    tx.publish("a/out", b"")
    tx.ack(batch[0])
    tx.rollback()
    with broker.transaction() as tx:
        tx.publish("a/out", b"1")
        tx.ack(batch[0])
        tx.ack_many([batch[1], batch[2]])
        with pytest.raises(qflow.AlreadySettled):
            tx.ack(batch[1])
    assert tx.result[0].offsets == {"s": 10}
    with pytest.raises(qflow.AlreadySettled):
        batch[0].ack()
    leaving = inside.cursor(subscription).claims.begin_leaving(
        [batch.held]
    )  # as a commit does that waits for room then
    clock.advance(100)
    assert subscription.get_many(100, 0).offsets == [4, 5, 6, 7, 8, 9, 10]
    leaving.refused(None)
    clock.advance(9)
    assert not subscription.get_many(100, 0)
    clock.advance(1)
    assert subscription.get(0).offset == 3


@pytest.mark.owner_only
def test_what_a_commit_settled_goes_to_no_other_member(broker: qflow.Broker) -> None:
    """The member closes while its transaction is committed: the rest of what it held is for others, that is not."""
    one, two = (broker.subscribe("s", group="g", start="earliest") for _ in range(2))
    batch, other = one.get_many(4, 0), one.get_many(2, 0)
    leaving = inside.cursor(one).claims.begin_leaving([batch[1], other.held])
    leaving.settles()  # it joins a commit
    one.close()
    assert two.get(0).offset == 6
    leaving.committed(None)
    leaving.committed(None)
    assert two.get_many(100, 0).offsets == [0, 2, 3, 7, 8, 9]
    assert two.stats().unsettled_messages == 7
    two.close()


@pytest.mark.owner_only
def test_a_commit_that_came_too_late_settles_nothing(broker: qflow.Broker) -> None:
    """The member closes while its transaction waits for room: the message is another's, and the commit fails whole."""
    one, two = (broker.subscribe("s", group="g", start="earliest") for _ in range(2))
    held = one.get(0)
    tx = broker.transaction()
    tx.publish("a/out", b"")
    tx.ack(held)
    real = broker.engine.together.enter

    def close_first(*arguments: Any, **options: Any) -> Any:
        one.close()
        return real(*arguments, **options)

    broker.engine.together.enter = close_first  # type: ignore[method-assign]
    with pytest.raises(qflow.AlreadySettled):
        tx.commit()
    assert two.get(0).offset == held.offset
    assert broker.stream("s").stats().next_offsets == [10]
    two.close()


def test_seek_leaves_behind_what_is_held(open_at: Open, broker: qflow.Broker, clock: Clock) -> None:
    """Back and forth, by offset and moment, in the log too; acks of what was held do nothing."""
    subscription = broker.subscribe("s", name="d", start="earliest")
    batch = subscription.get_many(6, 0)
    batch[0].ack(wait=True)
    subscription.seek(2)
    batch.ack(wait=True)
    batch[1].ack()
    batch[2].nack()
    assert subscription.position == 2
    again = subscription.get_many(100, 0)
    assert again.offsets == list(range(2, 10))
    assert [delivery.redelivered for delivery in again] == [True] * 4 + [False] * 4
    again.ack()
    subscription.seek(8)
    assert taken(subscription) == [8, 9]
    subscription.seek(datetime(2000, 1, 1, tzinfo=UTC))
    assert subscription.get(0).offset == 0
    subscription.seek(10)
    assert not subscription.get_many(1, 0)
    for bad in (11, -1, "0", datetime.now(), None):
        with pytest.raises(qflow.InvalidArgument):
            subscription.seek(bad)  # type: ignore[arg-type]
    subscription.seek(3)
    broker.close()
    broker = open_at()
    assert taken(broker.subscribe("s", name="d")) == list(range(3, 10))


def test_seek_in_one_partition_leaves_the_others_alone(open_at: Open) -> None:
    """What is held of them is held, what is acked is acked: nothing is lost, nothing comes again."""
    broker = open_at()
    broker.declare_stream("s", topics=["#"], partitions=2)
    results = broker.publish_many([("t", b"", b"%d" % number) for number in range(20)])
    counts = [sum(result.partitions["s"] == number for result in results) for number in (0, 1)]
    assert min(counts) > 3
    subscription = broker.subscribe("s", name="d", start="earliest")
    batch = subscription.get_many(100, 0)
    others = [delivery for delivery in batch if delivery.partition == 1]
    others[1].ack(wait=True)
    with pytest.raises(qflow.InvalidArgument, match="partition="):
        subscription.seek(0)
    with pytest.raises(qflow.InvalidArgument):
        subscription.seek(0, partition=2)
    with pytest.raises(qflow.InvalidArgument, match="positions"):
        _ = subscription.position
    subscription.seek(counts[0] - 1, partition=0)
    assert subscription.positions == [counts[0] - 1, counts[1]]
    assert [(one.partition, one.offset) for one in subscription.get_many(100, 0)] == [(0, counts[0] - 1)]
    others[2].ack(wait=True)
    with pytest.raises(qflow.AlreadySettled):
        others[1].ack()
    next(one for one in batch if one.partition == 0).ack()
    broker.close()
    broker = open_at()
    left = [(one.partition, one.offset) for one in broker.subscribe("s", name="d").get_many(100, 0)]
    assert sorted(left) == [(0, counts[0] - 1), *((1, offset) for offset in range(counts[1]) if offset not in (1, 2))]


def test_a_message_that_was_perhaps_delivered_says_so_until_it_is_settled(open_at: Open, broker: qflow.Broker) -> None:
    """Over any number of restarts in which nobody looks at it."""
    broker.subscribe("s", name="d", start="earliest").get_many(4, 0)
    for _ in range(3):
        broker.close()
        broker = open_at()
    batch = broker.subscribe("s", name="d").get_many(100, 0)
    assert [delivery.redelivered for delivery in batch] == [True] * 4 + [False] * 6


# Groups --------------------------------------------------------------------------------------------------------------


def test_members_of_a_group_share_the_work(broker: qflow.Broker) -> None:
    """The first sets the start; each message goes to one; what a member held goes to the others when it closes."""
    one = broker.subscribe("s", "a/#", group="g", start="earliest")
    first = one.get_many(2, 0)
    two = broker.subscribe("s", "a/#", group="g", start="latest")  # joins in mid-replay
    second = two.get_many(2, 0)
    assert (first.offsets, second.offsets) == ([0, 2], [4, 6])
    assert one.stats().members == 2
    second.ack(wait=True)
    one.close()
    assert [(one.offset, one.delivery_count) for one in two.get_many(10, 0)] == [(0, 2), (2, 2), (8, 1)]
    with pytest.raises(qflow.AlreadySettled):
        first.ack()
    with pytest.raises(qflow.SettingsConflict):
        broker.subscribe("s", "#", group="g")
    two.close()
    three = broker.subscribe("s", "a/#", group="g")
    assert three.get_many(10, 0).offsets == [0, 2, 8]


@pytest.mark.owner_only
def test_what_a_silent_member_holds_goes_to_another(broker: qflow.Broker, clock: Clock) -> None:
    """After 60 seconds, if it says nothing else; also where the other waits already."""
    silent, other = (broker.subscribe("s", group="g", start="earliest") for _ in range(2))
    held = silent.get_many(10, 0)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(other.get_many(10, LONG_S).offsets))
    thread.start()
    until(lambda: inside.cursor(other)._line.watching)
    clock.advance(60)
    broker.engine.streams.tick()
    thread.join(LONG_S)
    assert found == [list(range(10))]
    with pytest.raises(qflow.AlreadySettled):
        held.ack()


def test_out_of_order_acks_of_a_group_survive(open_at: Open, broker: qflow.Broker) -> None:
    """Edge 32: a hole is kept open, what is settled above it does not come again."""
    publish(broker, 2000)
    one, two = (broker.subscribe("s", group="g", start="earliest") for _ in range(2))
    hole = one.get(0)
    assert hole.offset == 0
    rest = taken(two, 100)
    assert rest == list(range(1, 2010))
    assert one.stats().committed == [0]
    broker.close()
    broker = open_at()
    again = broker.subscribe("s", group="g")
    batch = again.get_many(5000, 0)
    assert batch.offsets == [0]
    batch.ack(wait=True)
    assert again.stats().committed == [2010]


# Sessions ------------------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
def test_a_session_that_stays_away_expires(open_at: Open, broker: qflow.Broker, clock: Clock) -> None:
    """Not while it is open, nor before its time, counted over restarts; the next one of that name is new."""
    subscription = broker.subscribe("s", name="d", start="earliest", session_expiry_s=100)
    subscription.get(0).ack(wait=True)
    clock.advance(1000)
    broker.engine.streams.tick()
    subscription.close()
    clock.advance(60)
    broker.engine.streams.tick()
    assert len(broker.stats().streams["s"].subscriptions) == 1
    broker.close()
    clock.advance(41)
    broker = open_at()
    broker.engine.streams.tick()
    assert broker.stats().streams["s"].subscriptions == []
    with pytest.raises(qflow.NotFound):
        broker.subscribe("s", name="d", start="committed")
    assert broker.subscribe("s", name="d", start="earliest").get(0).offset == 0
    with pytest.raises(qflow.InvalidArgument, match="name or a group"):
        broker.subscribe("s", session_expiry_s=5)


@pytest.mark.owner_only
def test_a_session_outlives_a_clock_that_is_set_after_the_start(
    open_at: Open, broker: qflow.Broker, clock: Clock
) -> None:
    """One that was left before that, with a clock that was years behind; it ends in time."""
    broker.subscribe("s", name="d", start="earliest", session_expiry_s=100).close()
    broker.close()
    clock.wall_s -= 1e8
    broker = open_at()
    broker.subscribe("s", name="e", session_expiry_s=100).close()
    clock.advance(10)
    clock.wall_s += 1e8
    broker.engine.streams.tick()
    assert len(broker.stats().streams["s"].subscriptions) == 2
    clock.advance(80)
    broker.close()
    broker = open_at()
    broker.engine.streams.tick()
    assert len(broker.stats().streams["s"].subscriptions) == 2
    clock.advance(20)
    broker.engine.streams.tick()
    assert broker.stats().streams["s"].subscriptions == []


@pytest.mark.owner_only
def test_deleting_a_subscription_ends_it(broker: qflow.Broker) -> None:
    """Who has it open is told, also while he waits; its name is free."""
    subscription = broker.subscribe("s", name="d")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            subscription.get()
        except qflow.StreamDeleted as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: inside.cursor(subscription)._line.watching)
    broker.delete_subscription("s", "d")
    thread.join(LONG_S)
    assert len(errors) == 1
    assert taken(broker.subscribe("s", name="d", start="earliest")) == list(range(10))


# Threads -------------------------------------------------------------------------------------------------------------


def test_two_threads_on_one_subscription_share_it(open_spool: Open) -> None:
    """Each message comes to one of them, in order to each."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    subscription = broker.subscribe("s", name="d")
    found: list[list[int]] = [[], []]

    def take(own: list[int]) -> None:
        while sum(map(len, found)) < 2000:
            with_some = subscription.get_many(7, 0.05)
            own += with_some.offsets
            with_some.ack()

    threads = [threading.Thread(target=take, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for _ in range(100):
        broker.publish_many([("t", b"")] * 20)
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(found[0] + found[1]) == list(range(2000))
    assert all(own == sorted(own) for own in found)


@pytest.mark.owner_only
@pytest.mark.parametrize("what", ["subscription", "broker", "stream"])
def test_who_waits_is_told_of_the_end(open_spool: Open, what: str) -> None:
    """A close, from another thread, of the subscription or the broker, and the end of the stream."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    subscription = broker.subscribe("s")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            subscription.get()
        except qflow.QflowError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: inside.cursor(subscription)._line.watching)
    {"subscription": subscription.close, "broker": broker.close, "stream": lambda: broker.delete_stream("s")}[what]()
    thread.join(LONG_S)
    expected = {"subscription": qflow.InvalidArgument, "broker": qflow.BrokerClosed, "stream": qflow.StreamDeleted}
    assert [type(error) for error in errors] == [expected[what]]
    if what == "broker":
        for call in (lambda: subscription.get(0), lambda: subscription.seek(0), lambda: broker.subscribe("s")):
            with pytest.raises(qflow.BrokerClosed):
                call()


@pytest.mark.owner_only
def test_a_read_that_fails_loses_nothing(broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, or an interrupt, while a live reader reads: the next call reads the same."""
    subscription = broker.subscribe("s")
    assert not subscription.get_many(1, 0)  # it is live
    publish(broker, 3)
    broker.engine.streams.room.give_way(2**30)  # not from memory
    history = subscription.stream.history
    read = history.read
    for error in (qflow.StorageError("the disk is gone"), KeyboardInterrupt()):
        monkeypatch.setattr(history, "read", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            subscription.get_many(10, 0)
        monkeypatch.setattr(history, "read", read)
    assert subscription.get_many(10, 0).offsets == [10, 11, 12]


def test_a_big_commit_reaches_who_cannot_hold_it_in_memory(open_at: Open) -> None:
    """A live reader gets all of it, in parts, though it is told of it once and none of it is kept."""
    broker = open_at(capacity_bytes=100_000)
    broker.declare_stream("s", topics=["#"])
    subscription = broker.subscribe("s")
    assert not subscription.get_many(1, 0)
    broker.publish_many([("t", bytes(1000)) for _ in range(1000)])
    assert taken(subscription, 50) == list(range(1000))


@pytest.mark.owner_only
def test_a_seek_while_another_thread_reads_loses_nothing(broker: qflow.Broker) -> None:
    """What that thread was about to read, and what comes then, reaches who asks next."""
    subscription = broker.subscribe("s")
    history, room = subscription.stream.history, broker.engine.streams.room
    assert not subscription.get_many(1, 0)
    publish(broker, 1)
    room.give_way(2**30)  # it is read from the log
    read, reading, go_on = history.read, threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        history.read = read  # type: ignore[method-assign]
        reading.set()
        go_on.wait(LONG_S)
        return read(*arguments)  # type: ignore[arg-type]

    history.read = slow  # type: ignore[method-assign, assignment]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(subscription.get_many(1, LONG_S).offsets))
    thread.start()
    assert reading.wait(LONG_S)
    subscription.seek(11)
    assert not subscription.get_many(1, 0)
    publish(broker, 1)
    assert subscription.get_many(5, 0).offsets == [11]
    go_on.set()
    publish(broker, 1)
    thread.join(LONG_S)
    assert found == [12]


@pytest.mark.owner_only
def test_a_seek_while_another_thread_is_at_one_comes_after_it(broker: qflow.Broker) -> None:
    """The last one holds; a get waits for both."""
    subscription = broker.subscribe("s", name="d", start="earliest")
    cursor = inside.cursor(subscription)
    lock, move = cursor.held.lock, cursor.place._move
    moving, go_on, waits = threading.Event(), threading.Event(), threading.Event()

    def slow(moved: Any) -> None:
        cursor.place._move = move  # type: ignore[method-assign]
        moving.set()
        go_on.wait(LONG_S)
        move(moved)

    class Watched:
        """The lock, which tells that somebody lets go of it to wait."""

        def release(self) -> None:
            lock.release()
            waits.set()

        def __getattr__(self, name: str) -> Any:
            return getattr(lock, name)

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    cursor.place._move = slow  # type: ignore[method-assign]
    threads = [threading.Thread(target=subscription.seek, args=(offset,)) for offset in (3, 7)]
    threads[0].start()
    assert moving.wait(LONG_S)
    cursor.held.lock = Watched()
    threads[1].start()
    assert waits.wait(LONG_S)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(LONG_S)
    cursor.held.lock = lock
    assert subscription.get(LONG_S).offset == 7


@pytest.mark.owner_only
def test_a_get_without_patience_waits_for_what_another_thread_reads(broker: qflow.Broker) -> None:
    """There is something: `while batch := subscription.get_many(n, timeout_s=0)` must not end before all is taken."""
    subscription = broker.subscribe("s", start="earliest")
    history, room = subscription.stream.history, broker.engine.streams.room
    room.give_way(2**30)  # it is read from the log
    read, reading, go_on = history.read, threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        history.read = read  # type: ignore[method-assign]
        reading.set()
        go_on.wait(LONG_S)
        return read(*arguments)  # type: ignore[arg-type]

    history.read = slow  # type: ignore[method-assign, assignment]
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(subscription.get_many(5, 0).offsets)) for _ in range(3)]
    threads[0].start()
    assert reading.wait(LONG_S)
    for thread in threads[1:]:
        thread.start()
    line = inside.cursor(subscription)._line
    until(lambda: line.watching == 2 or not all(thread.is_alive() for thread in threads))
    go_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(found) == [[], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
