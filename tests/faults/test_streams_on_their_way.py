"""Messages on their way into streams, when something comes between: an interrupt, a deletion, somebody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import inside
import qflow
from faults.seams import PATIENCE_S
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

    def late(unit: Any, soon: bool = True) -> Any:
        if any(put.topics for put in unit.puts):
            about.set()
            assert go.wait(PATIENCE_S)
        return join(unit, soon)

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


@pytest.mark.parametrize("seek", [False, True])
def test_a_gap_of_a_get_that_was_given_up_is_told_by_the_next_one(open_spool: Open, seek: bool) -> None:
    """Whoever has it; not where a seek came between."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["t"], retention_messages=5)
    broker.publish_many([("t", b"x")] * 10)
    stream.retain()
    subscription = broker.subscribe("s", start=0)
    cursor = inside.cursor(subscription)
    getting = member_of(subscription).begin_get(1, None, "somebody")
    assert cursor.try_get(getting, None, True) is None
    cursor.give_up_get(getting)
    if seek:
        subscription.seek(7)
    else:
        with pytest.raises(qflow.GapError, match="messages 0 to 4 are gone"):
            subscription.get(0)
    assert subscription.get(0).offset == (7 if seek else 5)
    assert subscription.stats().gap_total == 5
