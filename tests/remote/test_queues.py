"""A queue through the door: the same calls, results and errors as beside the owner."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import qflow
from door_raw import until
from qflow import AlreadySettled, InvalidArgument, NotFound, QueueDeleted, QueueEmpty, QueueFull, SettingsConflict


def test_what_is_put_is_there_for_both_sides(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """Sequences, bodies, headers and times are those of the owner."""
    queue = remote.declare_queue("jobs")
    assert queue.put(b"one") == 0
    assert queue.put_many([b"two", bytearray(b"three")]) == range(1, 3)
    assert queue.put(b"four", headers={"kind": "x", "n": 1, "none": None}, ttl_s=1000) == 3
    assert len(queue) == len(owner.queue("jobs")) == 4
    batch = queue.get_many(10)
    assert batch.bodies == [b"one", b"two", b"three", b"four"]
    assert list(batch.sequences) == [0, 1, 2, 3]
    assert batch[3].headers == {"kind": "x", "n": 1, "none": None}
    assert batch[3].expires_at_s is not None
    assert [one.delivery_count for one in batch] == [1] * 4
    batch.ack(wait=True)
    assert len(owner.queue("jobs")) == 0


def test_topics_of_published_messages_come_along(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """A bound queue has them."""
    queue = remote.declare_queue("jobs")
    remote.bind(queue, "plant/#")
    owner.publish("plant/1", b"x", headers={"a": True})
    with queue.get(60) as delivery:
        assert (delivery.topic, delivery.body, delivery.headers) == ("plant/1", b"x", {"a": True})
    remote.unbind("jobs", "plant/#")
    with pytest.raises(NotFound):
        remote.unbind("jobs", "plant/#")


def test_what_is_not_settled_goes_back_in_order_and_counted(
    owner: qflow.Broker, connect: Callable[[], qflow.RemoteBroker]
) -> None:
    """Deliveries belong to the connection."""
    queue = owner.declare_queue("jobs")
    queue.put_many([b"%d" % number for number in range(10)])
    first = connect()
    theirs = first.queue("jobs")
    held = [theirs.get_many(3), theirs.get(), theirs.get_many(2)]
    assert held[0][1].body == b"1"  # type: ignore[index]
    held[0][1].ack(wait=True)  # type: ignore[index]
    first.close()
    until(lambda: queue.stats().acquired_messages == 0)
    back = [queue.get(60) for _ in range(9)]
    assert [one.body for one in back] == [b"0", *(b"%d" % number for number in range(2, 10))]
    assert [one.delivery_count for one in back] == [2] * 5 + [1] * 4


def test_settling_twice_is_refused_as_beside_the_owner(remote: qflow.RemoteBroker) -> None:
    """The first one counts, of a delivery and of a batch."""
    queue = remote.declare_queue("jobs")
    queue.put_many([b"1", b"2", b"3"])
    batch = queue.get_many(10)
    batch[0].ack()
    with pytest.raises(AlreadySettled):
        batch[0].nack()
    batch.nack()
    with pytest.raises(AlreadySettled):
        batch.ack()
    again = queue.get_many(10)
    assert again.bodies == [b"2", b"3"]
    assert [one.delivery_count for one in again] == [2, 2]
    again.ack()
    with pytest.raises(QueueEmpty):
        queue.get(0)
    assert list(queue.get_many(10, timeout_s=0)) == []


def held_for_long(queue: Any) -> Any:
    """Return a delivery with a lease that is not over soon; None if it was over."""
    delivery = queue.get(60)
    try:
        delivery.extend(1000)
    except AlreadySettled:
        return None
    return delivery


def test_a_lease_that_has_ended_is_told(remote: qflow.RemoteBroker) -> None:
    """Acks wait for their answer where the owner may have taken messages back."""
    queue = remote.declare_queue("jobs", ack_timeout_s=0.01)
    queue.put(b"x")
    late = queue.get(60)
    while (again := held_for_long(queue)) is None:
        pass  # that lease was over, too, before it was extended
    with pytest.raises(AlreadySettled):
        late.ack()
    assert again.delivery_count > 1
    again.ack(wait=True)
    assert len(queue) == 0


def test_errors_are_those_of_the_owner(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """With their texts."""
    remote.declare_queue("jobs", limit_messages=1)
    with pytest.raises(SettingsConflict, match="limit_messages"):
        remote.declare_queue("jobs", limit_messages=2)
    with pytest.raises(InvalidArgument, match="limit_mesages"):
        remote.alter_queue("jobs", limit_mesages=3)  # type: ignore[call-arg]
    with pytest.raises(NotFound, match="nothing"):
        remote.queue("nothing")
    queue = remote.queue("jobs")
    queue.put(b"x")
    with pytest.raises(QueueFull):
        queue.put(b"y", timeout_s=0)
    with pytest.raises(InvalidArgument, match="header"):
        queue.put(b"y", headers={"a": []})  # type: ignore[dict-item]
    assert remote.alter_queue(queue, limit_messages=5).settings.limit_messages == 5
    assert remote.queues() == ["jobs"]
    remote.delete_queue("jobs")
    with pytest.raises(QueueDeleted):
        len(queue)


def test_a_get_that_waits_is_served_and_does_not_hold_up_others(remote: qflow.RemoteBroker) -> None:
    """Any number of calls at once on one connection."""
    queue = remote.declare_queue("jobs")
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(queue.get(60).body)) for _ in range(5)]
    for thread in threads:
        thread.start()
    queue.put_many([b"%d" % number for number in range(5)])
    for thread in threads:
        thread.join()
    assert sorted(got) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("kind", ["browse", "query"])
def test_pages_that_nobody_reads_are_ended(
    kind: str, owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a connection may have open, of which no item was taken; in a forked child the owner is not told."""
    queue, stream = remote.declare_queue("jobs"), remote.declare_stream("s", topics=["s"])
    queue.put_many([b"x"] * 1001)
    remote.publish_many([("s", b"x")] * 257)
    for _ in range(101):
        left = queue.browse() if kind == "browse" else stream.query()
    monkeypatch.setattr(os, "getpid", lambda: 0)
    left.close()  # type: ignore[attr-defined]


def test_what_is_true_for_a_nack_is_so_through_the_door(remote: qflow.RemoteBroker) -> None:
    """It was refused by the owner, and noted as settled here: nobody could settle it any more."""
    queue = remote.declare_queue("jobs")
    queue.put(b"x")
    queue.get(60).nack(requeue=1)  # type: ignore[arg-type]
    queue.get(60).nack(requeue=0)  # type: ignore[arg-type]
    assert len(queue) == 0


def test_what_a_message_has_is_refused_as_at_the_owner(remote: qflow.RemoteBroker) -> None:
    """A header's name that is no text was made one in a schedule; an error of a put asked for a number."""
    remote.declare_queue("jobs")
    headers: Any = {1: "x"}
    with pytest.raises(InvalidArgument, match="header name must be str"):
        remote.schedule("hourly", "jobs", b"x", every_s=3600, headers=headers)
    with pytest.raises(InvalidArgument, match="durable must be True, False or None"):
        remote.queue("jobs").put(b"x", durable="yes")  # type: ignore[arg-type]


def test_settings_are_the_last_known_ones_where_nobody_answers(remote: qflow.RemoteBroker) -> None:
    """Of a queue that was altered by this connection, or asked for them."""
    queue = remote.declare_queue("jobs", limit_messages=2)
    remote.close()
    assert queue.settings.limit_messages == 2


def test_reports_are_of_the_same_classes(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """Figures, settings, what was found at open."""
    queue = remote.declare_queue("jobs", priorities=3)
    queue.put(b"x", priority=2)
    queue.get(60)
    assert remote.settings == owner.settings
    assert (remote.uuid, remote.path, remote.recovery) == (owner.uuid, owner.path, owner.recovery)
    assert queue.settings == owner.queue("jobs").settings
    assert type(queue.stats()) is qflow.QueueStats
    assert type(remote.stats()) is qflow.BrokerStats
    assert remote.stats().queues["jobs"].acquired_messages == 1
    assert remote.check() == []
    assert queue.purge() == 1


def test_an_answer_holds_about_eight_mebibytes(remote: qflow.RemoteBroker) -> None:
    """The rest stays in the queue, not counted as delivered."""
    queue = remote.declare_queue("jobs")
    for _ in range(5):
        queue.put(bytes(3 * 2**20))
    first = queue.get_many(100)
    second = queue.get_many(100)
    third = queue.get_many(100)
    assert [len(first), len(second), len(third)] == [2, 2, 1]
    assert all(one.delivery_count == 1 for batch in (first, second, third) for one in batch)


def test_futures_and_options_of_puts(remote: qflow.RemoteBroker) -> None:
    """`submit` returns before the answer; delayed messages wait."""
    queue = remote.declare_queue("jobs")
    futures = [queue.submit(b"%d" % number) for number in range(100)]
    assert [future.result(60) for future in futures] == list(range(100))
    queue.put(b"later", delay_s=1000)
    assert queue.stats().delayed_messages == 1
    assert queue.put_nowait(b"x") == 100
    queue.ack_many(queue.get_many(50))
    queue.ack_many([queue.get(), queue.get()], wait=True)
    assert len(queue) == 50


def test_publishing_goes_where_it_goes_beside_the_owner(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """Results have offsets and sequences, as runs on the way."""
    owner.declare_stream("log", topics=["plant/#"])
    owner.declare_stream("parts", topics=["plant/keyed/#"], partitions=4)
    bound = remote.declare_queue("jobs")
    remote.bind(bound, "plant/+")
    assert remote.publish("plant/1", b"x") == ({"log": 0}, {"jobs": 0})
    assert remote.publish("elsewhere", b"x") == ({}, {})
    results = remote.publish_many([(f"plant/{number}", b"x") for number in range(5)])
    assert list(results) == [({"log": number + 1}, {"jobs": number + 1}) for number in range(5)]
    keyed = remote.publish("plant/keyed/1", b"x", key="k", headers={"a": 1})
    assert set(keyed.partitions) == {"parts"}
    assert remote.publish("plant/1", b"x", producer="p", number=1).duplicate is False
    assert remote.publish("plant/1", b"x", producer="p", number=1).duplicate is True
    assert remote.submit_publish("plant/2", b"x").result(60).offsets == {"log": 8}
    assert list(remote.publish_many([])) == []
    remote.alter_queue(bound, limit_messages=1)
    with pytest.raises(QueueFull):
        remote.publish("plant/1", b"x", timeout_s=0.01)
    with pytest.raises(InvalidArgument, match="topic"):
        remote.publish("plant/#", b"x")


def test_bodies_that_are_none_are_refused_as_in_the_owner(remote: qflow.RemoteBroker) -> None:
    """The same error with the same words, at a queue and in a transaction; nothing is put."""
    queue = remote.declare_queue("jobs")
    with remote.transaction() as transaction:
        for put_many in (queue.put_many, lambda bodies: transaction.put_many(queue, bodies)):
            with pytest.raises(InvalidArgument, match="bodies must be iterable, not int"):
                put_many(5)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="a message body must be bytes"):
                put_many([b"fine", "text"])
            for one in (b"one body", b"", "text", bytearray(b"x")):
                with pytest.raises(InvalidArgument, match=f"bodies must be several, not one {type(one).__name__}"):
                    put_many(one)  # type: ignore[arg-type]
    assert len(queue) == 0


def test_an_empty_batch_is_settled_as_often_as_anybody_likes(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """What the loop of a consumer does when its time-out is over."""
    remote.declare_queue("jobs")
    remote.declare_queue("others")
    for broker in (owner, remote):
        queue = broker.queue("jobs")
        batch = queue.get_many(5, timeout_s=0)
        assert len(batch) == 0
        batch.ack()
        batch.ack(wait=True)
        batch.extend(5)
        batch.nack()
        batch.nack(requeue=False)
        queue.ack_many(batch, wait=True)
        with broker.transaction() as transaction:
            transaction.ack_many(batch)
            transaction.put("others", b"x")
    assert len(owner.queue("others")) == 2


def test_what_the_owner_would_refuse_is_not_made_something_else_of(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """A moment where a time span is meant, and arguments that a call does not have."""
    moment: Any = datetime(2026, 1, 1, tzinfo=UTC)
    unknown: dict[str, Any] = {"nonsense": None}
    keyed: dict[str, Any] = {"dedupe_key": "k"}
    for broker in (owner, remote):
        queue = broker.declare_queue("jobs")
        broker.declare_stream("s", topics=["s"])
        for refused in (
            lambda broker=broker: broker.alter_queue("jobs", ttl_s=moment),
            lambda broker=broker: broker.alter_stream("s", retention_s=moment),
            lambda broker=broker: broker.schedule("daily", "jobs", b"", every_s=moment),
            lambda queue=queue: queue.on_slow_consumer(moment),
        ):
            with pytest.raises(InvalidArgument):
                refused()
        for wrong in (
            lambda broker=broker: broker.schedule("daily", "jobs", b"", every_s=60, **unknown),
            lambda queue=queue: queue.put(b"x", **unknown),
            lambda queue=queue: queue.submit(b"x", **keyed),
        ):
            with pytest.raises(TypeError):
                wrong()
    assert remote.schedules() == []
    assert owner.queue("jobs").settings.ttl_s is None
