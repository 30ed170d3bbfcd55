"""Messages on their way into streams, when something comes between: an interrupt, a deletion, somebody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

import inside
import qflow
from faults.seams import PATIENCE_S
from faults.strikes import Strike
from qflow.storage.log.keys import BLOCKS
from qflow.streams.room import Tail
from qflow.streams.subscription import member_of
from unit.clocks import until

Open = Callable[..., qflow.Broker]


@pytest.mark.parametrize(("step", "late"), [("put", False), ("put", True), ("wait", False), ("wait", True)])
def test_a_publish_that_is_interrupted_leaks_no_room(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, step: str, late: bool
) -> None:
    """Before it is handed over nothing is done; after that all is, whatever becomes of the caller."""
    broker = open_spool(capacity_bytes="1MiB")
    broker.declare_stream("s", topics=["t"])
    room = broker.engine.streams.room
    real = getattr(broker.engine.log, step)

    def interrupted(*given: Any) -> Any:
        if late:
            real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(broker.engine.log, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            broker.publish("t", b"x")
    until(lambda: not room.busy)
    done = 0 if (step, late) == ("put", False) else 1
    assert broker.publish("t", b"y").offsets == {"s": done}
    large = broker.submit_publish("t", bytes(2**20))  # which passes alone
    assert large.result(PATIENCE_S).offsets == {"s": done + 1}


@pytest.mark.parametrize("way", ["publish", "transaction"])
def test_a_deletion_waits_for_who_is_about_to_join(open_spool: Open, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What goes to a queue, too, or is in a transaction, is not confirmed into a stream that is gone."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["t"])
    place = stream.partitions[0]
    broker.bind(broker.declare_queue("q"), "t")
    join = broker.engine.log.join
    about, go = threading.Event(), threading.Event()

    def late(unit: Any, soon: bool = True, **options: Any) -> Any:
        if any(put.topics for put in unit.puts):
            about.set()
            assert go.wait(PATIENCE_S)
        return join(unit, soon, **options)

    def work() -> None:
        if way == "publish":
            broker.publish("t", b"late")
        else:
            with broker.transaction() as tx:
                tx.publish("t", b"late")

    drain, written = broker.engine.log.drain, broker.engine.spool.records.delete
    there: list[int] = []

    def draining() -> None:
        if place.joining:
            go.set()
        drain()

    def write(owners: list[int]) -> None:
        there.append(place.published)
        go.set()
        written(owners)

    monkeypatch.setattr(broker.engine.log, "join", late)
    monkeypatch.setattr(broker.engine.log, "drain", draining)
    monkeypatch.setattr(broker.engine.spool.records, "delete", write)
    with ThreadPoolExecutor() as threads:
        publishing = threads.submit(work)
        assert about.wait(PATIENCE_S)
        broker.delete_stream("s")
        publishing.result(PATIENCE_S)
    assert there == [1]
    assert not place.joining
    with inside.paused(broker):
        while inside.upkeep(broker).remove_deleted():
            pass
    with broker.engine.log.read() as txn:
        left = [key for key, _ in txn.cursor() if key[0] == BLOCKS and key[1:5] == stream.owner.to_bytes(4, "big")]
    assert left == []


@pytest.mark.parametrize("under_way", ["nothing", "publish", "read"])
def test_a_deleted_stream_leaves_nothing_in_memory(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, under_way: str
) -> None:
    """Its live tails go with it, also what a commit adds to them, or a get reads, when it has ended already."""
    broker = open_spool()
    other = broker.declare_stream("other", topics=["o"], partitions=2)
    stream = broker.declare_stream("s", topics=["t", "u"], partitions=2)
    readers = [broker.subscribe("other"), broker.subscribe("s", "u"), broker.subscribe("s", "t")]
    for topic in ["o", "t", "t", "u"]:
        broker.publish(topic, bytes(1000))
    ended = threading.Event()
    steps = []

    def outlasted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: Any, **named: Any) -> Any:
            steps.append(under_way)
            assert ended.wait(PATIENCE_S)
            return real(*given, **named)

        return step

    def end(error: Any) -> None:
        ending(error)
        ended.set()

    ending = stream.end
    monkeypatch.setattr(stream, "end", end)
    works: list[Callable[[], object]] = []
    if under_way == "publish":
        monkeypatch.setattr(broker.engine.streams.room, "keep", outlasted(broker.engine.streams.room.keep))
        works = [lambda: broker.publish("t", bytes(1000))]
    elif under_way == "read":
        broker.engine.streams.room.give_way(2**30)
        monkeypatch.setattr(stream.history, "read", outlasted(stream.history.read))
        works = [readers[2].get]
    with ThreadPoolExecutor() as threads:
        done = [threads.submit(work) for work in works]
        until(lambda: len(steps) == len(works))
        broker.delete_stream("s")
        if under_way == "read":
            with pytest.raises(qflow.StreamDeleted):
                done[0].result(PATIENCE_S)
        for one in done:
            one.exception(PATIENCE_S)
    kept = sum(slab.charged for partition in other.partitions for slab in partition.tail.slabs.values())
    assert broker.stats().resident_bytes == kept
    assert (kept > 0) == (under_way != "read")
    assert not any(partition.tail.slabs for partition in stream.partitions)
    assert broker.check() == []
    broker.delete_stream("other")
    assert broker.stats().resident_bytes == 0
    for reader in readers:
        reader.close()
    assert broker.stats().resident_bytes == 0


def test_a_check_names_what_is_kept_of_a_stream_that_is_gone(open_spool: Open) -> None:
    """It is charged, and nobody can get it."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["t"])
    reader = broker.subscribe("s")
    broker.publish("t", bytes(1000))
    assert broker.check() == []
    ((_, slab),) = stream.partitions[0].tail.slabs.items()
    tail = Tail()
    broker.engine.streams.room.keep(tail, slab)
    assert broker.check() == [f"live tails of streams that are gone hold {slab.charged} bytes"]
    broker.engine.streams.room.drop(tail)
    assert broker.check() == []
    reader.close()


def test_a_publish_waits_no_longer_for_another_with_its_number_than_it_says(open_spool: Open) -> None:
    """The rest of its time is for room in queues."""
    broker = open_spool()
    queue = broker.declare_queue("q", limit_messages=1)
    broker.bind(queue, "t")
    queue.put(b"full")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(broker.publish, "t", b"x", producer="p", number=1)
        until(lambda: broker.engine.streams.producers._busy)
        with pytest.raises(qflow.ProducerBusy):
            broker.publish("t", b"x", producer="p", number=1, timeout_s=0.01)
        with pytest.raises(qflow.QueueFull):
            broker.publish("t", b"x", producer="p", number=2, timeout_s=0.01)
        queue.get(PATIENCE_S).ack()
        first.result(PATIENCE_S)
    assert broker.publish("t", b"x", producer="p", number=1, timeout_s=0).duplicate


def behind(open_spool: Open) -> tuple[qflow.Broker, qflow.Subscription, Any]:
    """Return a subscription whose first five messages are gone, and a get of somebody who is to be told of that."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["t"], retention_messages=5)
    broker.publish_many([("t", b"x")] * 10)
    stream.retain()
    subscription = broker.subscribe("s", name="n", start=0)
    getting = member_of(subscription).begin_get(1, None, "somebody")
    assert inside.cursor(subscription).try_get(getting, None, True) is None
    return broker, subscription, getting


def told(subscription: qflow.Subscription) -> list[tuple[int, int]]:
    """Return the gaps that the next gets tell of, and where the messages begin behind them."""
    gaps: list[tuple[int, int]] = []
    while True:
        try:
            delivery = subscription.get(0)
        except qflow.GapError as gap:
            gaps.append((gap.first, gap.end))
        else:
            return [*gaps, (delivery.offset, delivery.offset + 1)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("between", ["nothing", "seek", "close"])
def test_a_gap_of_a_get_that_was_given_up_is_told_by_the_next_one(open_spool: Open, between: str, early: bool) -> None:
    """Once, whoever has that; a seek goes elsewhere, and whoever opens the subscription again finds it by himself."""
    broker, subscription, getting = behind(open_spool)
    cursor = inside.cursor(subscription)
    if early:
        cursor.give_up_get(getting)
    if between == "seek":
        subscription.seek(7)
    elif between == "close":
        subscription.close()
        subscription = broker.subscribe("s", name="n")
    if not early:
        cursor.give_up_get(getting)
    assert told(subscription) == ([(7, 8)] if between == "seek" else [(0, 5), (5, 6)])
    if between == "nothing":
        assert subscription.stats().gap_total == 5


def test_a_gap_is_told_once_though_its_get_was_struck_as_it_was_given_up(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up once more then, and somebody else may have been told meanwhile."""
    _, subscription, getting = behind(open_spool)
    cursor = inside.cursor(subscription)

    class Struck:
        def notify(self) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cursor, "_line", Struck())
        with pytest.raises(KeyboardInterrupt):
            cursor.give_up_get(getting)
    with pytest.raises(qflow.GapError):
        subscription.get(0)
    cursor.give_up_get(getting)
    assert told(subscription) == [(5, 6)]


def test_a_gap_is_told_once_wherever_a_handler_strikes_the_get(open_spool: Open) -> None:
    """It is told by that get, or by the next one."""
    _, subscription, _ = behind(open_spool)
    for at in count():
        subscription.seek(0)
        strike, gaps = Strike(at), []
        try:
            assert strike.run(lambda: subscription.get(0))
        except qflow.GapError as gap:
            gaps = [(gap.first, gap.end)]
        assert gaps + told(subscription) == [(0, 5), (5, 6)], strike.where
        if strike.where is None:
            break
    assert at > 10
