"""Streams: what is published, kept and queried; who may call what, and what bad input is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import inside
import qflow
from crash.seams import run_in_child
from qflow.stats import StreamStats
from unit.clocks import LONG_S, Clock, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]

BAD_FILTERS = ["", "a/#/b", "#/a", "a+", "+a", "a/b#", "a/+b/c", "a\0b", "\ud800", "x" * 65_536, None, 7, b"a"]
BAD_TOPICS = ["", "a/#", "+", "a/+/b", "a\0b", "\ud800", "x" * 65_536, None, 7, b"a"]


def offsets(broker: qflow.Broker, *topics: str) -> list[int]:
    """Publish something to each topic; return the offsets in stream `s`."""
    return [broker.publish(topic, topic.encode()).offsets["s"] for topic in topics]


def topics_of(broker: qflow.Broker, topic_filter: str = "#") -> list[str]:
    """All topics of stream `s` that a filter matches, in order, as a new subscriber gets them."""
    with broker.subscribe("s", topic_filter, start="earliest", follow=False) as subscription:
        return [delivery.topic for delivery in subscription]


# Publishing ----------------------------------------------------------------------------------------------------------


def test_a_message_is_in_every_stream_and_queue_that_wants_it(open_spool: Open) -> None:
    """In one commit, with a dense offset in each stream."""
    broker = open_spool()
    broker.declare_stream("flights", topics=["flights/#"])
    broker.declare_stream("all", topics=["#"])
    queue = broker.declare_queue("work")
    broker.bind(queue, "flights/+/UA")
    before = broker.stats().commits_total
    result = broker.publish("flights/EWR/UA", b"1", headers={"late": 5}, key="N123")
    assert (result.offsets, result.sequences) == ({"flights": 0, "all": 0}, {"work": 0})
    assert broker.stats().commits_total == before + 1
    assert broker.publish("weather/EWR", b"2").offsets == {"all": 1}
    with broker.subscribe("all", start="earliest") as subscription:
        one, two = subscription.get(0), subscription.get(0)
    assert (one.topic, one.body, one.headers, one.key) == ("flights/EWR/UA", b"1", {"late": 5}, b"N123")
    assert (two.topic, two.body, two.headers, two.key) == ("weather/EWR", b"2", {}, None)
    assert (two.stream, two.partition, two.offset) == ("all", 0, 1)
    with queue.get(0) as delivery:
        assert (delivery.body, delivery.topic) == (b"1", "flights/EWR/UA")


def test_offsets_are_dense_and_never_given_twice(open_spool: Open) -> None:
    """Edge 29: 0, 1, 2, … in the order of the commits, also after a restart, in numeric order past 10."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    assert [result.offsets["s"] for result in broker.publish_many([("a", b"")] * 11)] == list(range(11))
    assert offsets(broker, "x", "y") == [11, 12]
    broker.close()
    broker = open_spool()
    assert offsets(broker, "z") == [13]
    with broker.subscribe("s", start="earliest", follow=False) as subscription:
        assert [delivery.offset for delivery in subscription] == list(range(14))


def test_a_key_stays_in_one_partition_in_order(open_spool: Open) -> None:
    """Without a key the topic decides; offsets are dense in each partition."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"], partitions=4)
    results = broker.publish_many([("t", b"%d" % number, b"k%d" % (number % 9)) for number in range(90)])
    results += [broker.publish(f"t/{number % 9}", b"%d" % number) for number in range(90)]  # type: ignore[operator]
    places: dict[int, list[int]] = {}
    for result in results:
        places.setdefault(result.partitions["s"], []).append(result.offsets["s"])
    assert len(places) == 4
    assert all(found == list(range(len(found))) for found in places.values())
    by_key: dict[tuple[bytes | None, str], list[tuple[int, int]]] = {}
    with broker.subscribe("s", start="earliest", follow=False) as subscription:
        for delivery in subscription:
            key = (delivery.key, "" if delivery.key else delivery.topic)
            by_key.setdefault(key, []).append((delivery.partition, int(delivery.body)))
    assert len(by_key) == 18
    for found in by_key.values():
        assert len({partition for partition, _ in found}) == 1
        assert [number for _, number in found] == sorted(number for _, number in found)


def test_one_commit_into_queues_and_partitions_keeps_each_where_it_belongs(open_spool: Open) -> None:
    """Messages of one call that go to several partitions, and to a queue, are found where the results say."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"], partitions=3)
    broker.bind(broker.declare_queue("q"), "#")
    results = broker.publish_many([("t", b"%d" % number, b"k%d" % number) for number in range(30)])
    told = {(result.partitions["s"], result.offsets["s"]): number for number, result in enumerate(results)}
    assert len({partition for partition, _ in told}) == 3
    found = {(message.partition, message.offset): int(message.body) for message in broker.stream("s").query()}
    assert found == told
    for (partition, _), number in told.items():
        with broker.transaction() as tx:
            tx.publish("t", b"x", key=b"k%d" % number)
            tx.publish("t", b"y", key=b"k%d" % ((number + 1) % 30))
        assert tx.result[0].partitions["s"] == partition


@pytest.mark.parametrize("capacity", [0, 1_000])
def test_a_publish_into_many_partitions_needs_no_more_room_than_there_is(open_spool: Open, capacity: int) -> None:
    """Parts of one commit do not wait for each other, however little memory there is."""
    broker = open_spool(capacity_bytes=capacity)
    for name in ("s", "other"):
        broker.declare_stream(name, topics=["#"], partitions=3)
    done = threading.Event()

    def publish() -> None:
        broker.publish_many([("t", b"x" * 900, b"k%d" % number) for number in range(20)])
        broker.bind(broker.declare_queue("q"), "#")
        broker.publish_many([("t", b"x" * 900, b"k%d" % number) for number in range(20)])
        done.set()

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    assert done.wait(LONG_S)
    thread.join()
    assert len(list(broker.stream("s").query())) == len(list(broker.stream("other").query())) == 40


def test_publish_many_is_all_or_nothing(open_spool: Open) -> None:
    """One that cannot be stored stops all."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"], max_message_bytes=100)
    for bad in [("a", b"x" * 101), ("a/#", b""), ("a", "text"), ("a", b"", b""), ("a",), "a"]:
        with pytest.raises(qflow.QflowError):
            broker.publish_many([("a", b"1"), bad, ("b", b"2")])
    assert offsets(broker, "a") == [0]
    assert broker.publish_many([]) == []


def test_a_submitted_publish_tells_its_offset(open_spool: Open) -> None:
    """The future has it once it is confirmed; nobody need wait."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    futures = [broker.submit_publish("a", b"%d" % number) for number in range(50)]
    assert [future.result(LONG_S).offsets["s"] for future in futures] == list(range(50))


@pytest.mark.parametrize("topic", BAD_TOPICS)
def test_a_bad_topic_is_refused(open_spool: Open, topic: str) -> None:
    """MQTT 4.7: a topic is 1 to 65,535 bytes of UTF-8 without wildcards and NUL; nothing is stored."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    for call in (
        lambda: broker.publish(topic, b""),
        lambda: broker.publish_many([("a", b""), (topic, b"")]),
        lambda: broker.submit_publish(topic, b""),
        lambda: broker.transaction().publish(topic, b""),
    ):
        with pytest.raises(qflow.InvalidArgument):
            call()
    assert offsets(broker, "a") == [0]


@pytest.mark.parametrize("topic_filter", BAD_FILTERS)
def test_a_bad_filter_is_refused(open_spool: Open, topic_filter: str) -> None:
    """MQTT 4.7: `#` is the last level and a level by itself, `+` is a level by itself."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    for call in (
        lambda: broker.subscribe("s", topic_filter),
        lambda: broker.declare_stream("other", topics=["ok", topic_filter]),
        lambda: broker.alter_stream("s", topics=[topic_filter]),
        lambda: broker.stream("s").query(topic_filter),
        lambda: broker.stream("s").last(topic_filter),
    ):
        with pytest.raises(qflow.InvalidArgument):
            call()
    assert broker.streams() == ["s"]
    assert broker.stats().streams["s"].subscriptions == []


@pytest.mark.owner_only
def test_a_body_that_is_too_large_is_refused_and_nothing_is_lost(open_spool: Open) -> None:
    """200 MB against `max_message_bytes`: what was there, and what comes, stays; memory is given back."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    offsets(broker, "a")
    body = bytes(200_000_000)
    for _ in range(3):
        with pytest.raises(qflow.MessageTooLarge, match="max_message_bytes"):
            broker.publish("a", body)
    with pytest.raises(qflow.TransactionTooLarge), broker.transaction() as tx:
        tx.publish("a", body[: 2**26])
    del body
    assert offsets(broker, "b") == [1]
    assert topics_of(broker) == ["a", "b"]
    assert broker.stats().resident_bytes < 2**20


def test_a_message_larger_than_all_memory_passes_alone(open_spool: Open) -> None:
    """It is delivered live and in a replay, and the ledger holds meanwhile."""
    broker = open_spool(capacity_bytes=10_000)
    broker.declare_stream("s", topics=["#"])
    live = broker.subscribe("s")
    broker.publish("a", b"x" * 1_000_000)
    replay = broker.subscribe("s", start="earliest")
    for subscription in (live, replay):
        assert len(subscription.get(0).body) == 1_000_000
        assert broker.check() == []
        subscription.close()
    assert broker.check() == []


# Streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
def test_declaring_again_returns_it_or_says_what_differs(open_spool: Open) -> None:
    """Settings are kept; `alter_stream` changes them, but for partitions."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["a/#"], retention_messages=5)
    assert broker.declare_stream("s", topics=["a/#"], retention_messages=5) is stream
    with pytest.raises(qflow.SettingsConflict, match="retention_messages=5"):
        broker.declare_stream("s", topics=["a/#"])
    with pytest.raises(qflow.InvalidArgument, match="order"):
        broker.alter_stream("s", partitions=2)
    with pytest.raises(qflow.InvalidArgument, match="no setting"):
        broker.alter_stream("s", colour="red")
    broker.alter_stream("s", topics=["b/#", "c"], retention_messages=None)
    assert broker.publish("a/x", b"").offsets == {}
    assert offsets(broker, "b/x", "c") == [0, 1]
    broker.close()
    broker = open_spool()
    broker.declare_stream("s", topics=["b/#", "c"])
    assert topics_of(broker) == ["b/x", "c"]


@pytest.mark.parametrize(
    "settings",
    [
        {"retention_s": 0},
        {"retention_bytes": 0},
        {"retention_messages": 0},
        {"retention_s": -1},
        {"retention_bytes": "many"},
        {"partitions": 0},
        {"partitions": 65},
        {"partitions": None},
        {"topics": []},
        {"topics": "a/#"},
        {"topics": None},
        {"max_message_bytes": None},
        {"max_message_bytes": "16GiB"},
        {"retain_until_consumed": "no"},
    ],
)
def test_settings_that_make_no_sense_are_refused(open_spool: Open, settings: dict[str, object]) -> None:
    """A stream that keeps nothing is none."""
    broker = open_spool()
    with pytest.raises((qflow.InvalidArgument, TypeError)):
        broker.declare_stream("s", **({"topics": ["#"]} | settings))  # type: ignore[arg-type]
    assert broker.streams() == []


def test_what_does_not_exist_is_named(open_spool: Open) -> None:
    """With what there is."""
    broker = open_spool()
    broker.declare_stream("here", topics=["#"])
    for call in (broker.subscribe, broker.stream, broker.delete_stream, broker.alter_stream):
        with pytest.raises(qflow.NotFound, match="'here'"):
            call("gone")
    with pytest.raises(qflow.NotFound):
        broker.delete_subscription("here", "nobody")
    with pytest.raises(qflow.InvalidArgument):
        broker.subscribe("")


@pytest.mark.owner_only
def test_a_stream_declared_again_after_its_end_is_another_one(open_spool: Open) -> None:
    """Edge 30: nothing of the old one is in it, its subscriptions are gone, late acks do nothing."""
    broker = open_spool()
    old = broker.declare_stream("s", topics=["#"])
    broker.publish_many([("a", b"%d" % number) for number in range(20)])
    durable = broker.subscribe("s", name="d", start="earliest")
    batch = durable.get_many(5, 0)
    passing = broker.subscribe("s", start="earliest")
    broker.delete_stream("s")
    for subscription in (durable, passing):
        with pytest.raises(qflow.StreamDeleted):
            subscription.get(0)
        with pytest.raises(qflow.StreamDeleted):
            subscription.seek(0)
        subscription.close()
    batch.ack(wait=True)
    batch[0].ack()
    with pytest.raises(qflow.StreamDeleted):
        old.query()
    with pytest.raises(qflow.StreamDeleted):
        broker.subscribe(old)
    assert broker.publish("a", b"").offsets == {}
    broker.declare_stream("s", topics=["#"])
    with pytest.raises(qflow.NotFound):
        broker.subscribe("s", name="d", start="committed")
    assert offsets(broker, "new") == [0]
    assert topics_of(broker) == ["new"]
    broker.close()
    broker = open_spool()
    assert topics_of(broker) == ["new"]


def test_publishers_find_their_way_while_filters_change(open_spool: Open) -> None:
    """A message that old and new filters take is stored, whenever the change comes."""
    broker = open_spool()
    broker.declare_stream("s", topics=["a/#"])
    stop = threading.Event()

    def alter() -> None:
        kept = 0
        while not stop.is_set():
            kept += 1
            broker.alter_stream("s", retention_messages=10**6 + kept, topics=["a/#", f"b/{kept}"])

    thread = threading.Thread(target=alter)
    thread.start()
    try:
        assert offsets(broker, *["a/x"] * 300) == list(range(300))
    finally:
        stop.set()
        thread.join()


def test_publishers_and_a_delete_at_once(open_spool: Open) -> None:
    """Each publish ends, in this stream or the next, or nowhere; what the last one holds is dense."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    stop = threading.Event()
    last: list[int] = [0, 0]

    def publish(index: int) -> None:
        while not stop.is_set():
            broker.publish_many([("t", b"")] * 3)
            last[index] += 1

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: min(last))
        for _ in range(15):
            broker.delete_stream("s")
            broker.declare_stream("s", topics=["#"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    found = [message.offset for message in broker.stream("s").query()]
    assert found == list(range(len(found)))


# Queries -------------------------------------------------------------------------------------------------------------


def test_queries_by_offset_time_number_and_topic(open_at: Open, clock: Clock) -> None:
    """Ranges, skip and limit, the newest, the last of each topic; without subscribing."""
    broker = open_at()
    stream = broker.declare_stream("s", topics=["#", "$sys/#"])
    start = clock.wall_s
    for number in range(10):
        broker.publish(f"a/{number % 3}", b"%d" % number)
        clock.advance(1.0)
    broker.publish("$sys/a", b"hidden")

    def bodies(*arguments: str, **bounds: object) -> list[int]:
        return [int(message.body) for message in stream.query(*arguments, **bounds)]  # type: ignore[arg-type]

    moment = datetime.fromtimestamp(start + 3.5, UTC)
    assert bodies() == list(range(10))
    assert bodies("a/1") == [1, 4, 7]
    assert bodies(start=2, end=5) == [2, 3, 4]
    assert bodies(start=moment) == list(range(4, 10))
    assert bodies(end=moment) == list(range(4))
    assert bodies(skip=2, limit=3) == [2, 3, 4]
    assert bodies(limit=0) == []
    assert bodies(newest=3) == [7, 8, 9]
    assert bodies("a/0", newest=2) == [6, 9]
    assert bodies(start=8, end=100) == [8, 9]
    assert bodies(start=100) == []
    assert {topic: message.body for topic, message in stream.last("a/+").items()} == {
        "a/0": b"9",
        "a/1": b"7",
        "a/2": b"8",
    }
    assert stream.last("a/1")["a/1"].offset == 7
    assert stream.last("nothing") == {}
    assert [message.body for message in stream.query("$sys/#")] == [b"hidden"]
    message = stream.last("a/1")["a/1"]
    assert message.time_ms == int((start + 7) * 1000)
    for bad in ({"skip": -1}, {"limit": -1}, {"newest": 0}, {"partition": 1}, {"start": -1}, {"start": datetime.now()}):
        with pytest.raises(qflow.InvalidArgument):
            stream.query("#", **bad)  # type: ignore[arg-type]


def test_times_never_fall(open_at: Open, clock: Clock) -> None:
    """The clock may go back, in a running broker and over a restart; a search by time needs that it does not."""
    broker = open_at()
    broker.declare_stream("s", topics=["#"])
    offsets(broker, "a")
    high = int(clock.wall_s * 1000)
    clock.wall_s -= 100
    offsets(broker, "b")
    broker.close()
    broker = open_at()
    offsets(broker, "c")
    assert [message.time_ms for message in broker.stream("s").query()] == [high] * 3


# Looking, closing, forking -------------------------------------------------------------------------------------------


def test_statistics_tell_what_is_there(open_spool: Open) -> None:
    """Of the stream, and of each subscription."""
    broker = open_spool()
    broker.declare_stream("s", topics=["#"])
    broker.publish_many([("a", b"12345")] * 6)
    subscription = broker.subscribe("s", name="d", start="earliest")
    batch = subscription.get_many(4, 0)
    batch[0].ack(wait=True)
    stats = broker.stats().streams["s"]
    assert isinstance(stats, StreamStats)
    assert (stats.messages, stats.bytes, stats.first_offsets, stats.next_offsets) == (6, 30, [0], [6])
    assert (stats.published_total, stats.dropped_total, stats.damaged_total) == (6, 0, 0)
    (one,) = stats.subscriptions
    assert (one.name, one.filter, one.group, one.members) == ("d", "#", False, 1)
    assert (one.positions, one.committed, one.lag_messages, one.unsettled_messages) == ([4], [1], 2, 3)
    assert (one.delivered_total, one.acked_total, one.redelivered_total, one.gap_total) == (4, 1, 0, 0)
    assert (subscription.position, subscription.lag) == (4, 2)
    subscription.close()
    (one,) = broker.stats().streams["s"].subscriptions
    assert (one.members, one.positions, one.lag_messages, one.unsettled_messages) == (0, [1], 5, 0)


@pytest.mark.owner_only
def test_nothing_works_in_a_forked_child_and_the_parent_goes_on(open_spool: Open) -> None:
    """Every call says so at once, also where another thread held a lock at the fork."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["#"])
    offsets(broker, "a")
    subscription = broker.subscribe("s", name="d", start="earliest")
    delivery = subscription.get(0)
    held = [inside.cursor(subscription)._lock, broker.engine.streams.room._lock, broker.engine.streams.producers._lock]
    held.append(broker.engine.spool.changing)

    def child() -> None:
        for call in (
            lambda: subscription.get(0),
            lambda: subscription.get_many(1, 0),
            lambda: subscription.seek(0),
            lambda: delivery.ack(),
            lambda: delivery.nack(),
            lambda: broker.publish("a", b""),
            lambda: broker.publish_many([("a", b""), ("b", b"")]),
            lambda: broker.submit_publish("a", b""),
            lambda: broker.publish("a", b"", producer="p", number=1),
            lambda: broker.subscribe("s"),
            lambda: broker.declare_stream("t", topics=["#"]),
            lambda: broker.delete_stream("s"),
            lambda: broker.engine.spool.used.begin("a door", "stream", "s"),
            lambda: stream.query(),
            lambda: stream.last("a"),
        ):
            with pytest.raises(qflow.ForkedProcess):
                call()

    for lock in held:
        lock.acquire()
    try:
        assert run_in_child(child) == 0
    finally:
        for lock in held:
            lock.release()
    delivery.ack(wait=True)
    assert offsets(broker, "b") == [1]
    assert subscription.get(0).offset == 1


class Busy:
    """Publishers and readers at full speed, each in a thread, until the broker closes."""

    def __init__(self, broker: qflow.Broker) -> None:
        self.broker = broker
        self.confirmed = [0, 0]
        self.wrong: list[BaseException] = []
        self.running = threading.Barrier(5)
        works = [(work, index) for work in (self.publish, self.read) for index in (0, 1)]
        self.threads = [threading.Thread(target=self.guarded, args=one) for one in works]
        for thread in self.threads:
            thread.start()
        self.running.wait()

    def guarded(self, work: Callable[[int], None], index: int) -> None:
        try:
            work(index)
        except qflow.BrokerClosed:
            return
        except BaseException as error:
            self.wrong.append(error)

    def publish(self, index: int) -> None:
        self.running.wait()
        while True:
            self.broker.publish_many([("t", b"x" * 50, b"k%d" % number) for number in range(10)])
            self.confirmed[index] += 10

    def read(self, index: int) -> None:
        with self.broker.subscribe("s", name=f"r{index}", start="earliest") as subscription:
            self.running.wait()
            while True:
                subscription.get_many(100).ack(wait=True)


def test_a_broker_closes_under_publishers_and_subscribers(spool: Path) -> None:
    """Whoever is at work gets `BrokerClosed`, nothing else; what was confirmed is there."""
    for round_number in range(8):
        with qflow.open(spool, capacity_bytes=100_000) as broker:
            broker.declare_stream("s", topics=["#"], partitions=2)
            before = sum(broker.stream("s").stats().next_offsets)
            busy = Busy(broker)
            until(lambda busy=busy, most=round_number: sum(busy.confirmed) >= 10 * most)  # type: ignore[misc]
        for thread in busy.threads:
            thread.join(LONG_S)
        assert busy.wrong == []
        with qflow.open(spool) as broker:
            assert sum(broker.stream("s").stats().next_offsets) - before >= sum(busy.confirmed)
            assert broker.check() == []
