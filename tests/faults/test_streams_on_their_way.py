"""Messages on their way into streams, when something comes between: an interrupt, a deletion, somebody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import qflow
from faults.seams import PATIENCE_S
from qflow.storage.block_log import BLOCKS
from qflow.streams import partition
from unit.clocks import until

Open = Callable[..., qflow.Broker]


@pytest.mark.parametrize("where", ["the charge", "the room"])
def test_a_leader_interrupted_while_it_publishes_leaks_no_room(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is told again, and what is on its way is given back once."""
    broker = open_spool(capacity_bytes="1MiB")
    broker.declare_stream("s", topics=["t"])
    room = broker._streams.room
    interrupts = [KeyboardInterrupt()]

    def interrupting(work: Callable[..., Any]) -> Callable[..., Any]:
        def do(*given: Any) -> Any:
            if interrupts and broker.log.busy:
                raise interrupts.pop()
            return work(*given)

        return do

    with monkeypatch.context() as patch:
        if where == "the charge":
            leader = partition.Partition.publish_topics
            inside = threading.local()

            def publish_topics(self: Any, *given: Any) -> None:
                inside.here = True
                leader(self, *given)
                inside.here = False

            charge = partition.charge_for

            def charge_for(*given: Any) -> int:
                if interrupts and getattr(inside, "here", False):
                    raise interrupts.pop()
                return charge(*given)

            patch.setattr(partition.Partition, "publish_topics", publish_topics)
            patch.setattr(partition, "charge_for", charge_for)
        else:
            patch.setattr(room, "_settle_slack", interrupting(room._settle_slack))
        with pytest.raises(KeyboardInterrupt):
            broker.publish("t", b"x")
    assert broker.publish("t", b"y").offsets == {"s": 1}
    assert not interrupts
    assert not room.busy
    large = broker.submit_publish("t", bytes(2**20))  # which passes alone
    assert large.result(PATIENCE_S).offsets == {"s": 2}


@pytest.mark.parametrize("way", ["publish", "transaction"])
def test_a_deletion_waits_for_who_is_about_to_join(open_spool: Open, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What goes to a queue, too, or is in a transaction, is not confirmed into a stream that is gone."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["t"])
    place = stream.partitions[0]
    broker.bind(broker.declare_queue("q"), "t")
    join = broker.log.join
    about, go = threading.Event(), threading.Event()

    def late(unit: Any) -> Any:
        if any(put.topics for put in unit.puts):
            about.set()
            assert go.wait(PATIENCE_S)
        return join(unit)

    def work() -> None:
        if way == "publish":
            broker.publish("t", b"late")
        else:
            with broker.transaction() as tx:
                tx.publish("t", b"late")

    drain, written = broker.log.drain, broker._streams._write_deleted
    there: list[int] = []

    def draining() -> None:
        if place.joining:
            go.set()
        drain()

    def write(owners: list[int]) -> None:
        there.append(place.published)
        go.set()
        written(owners)

    monkeypatch.setattr(broker.log, "join", late)
    monkeypatch.setattr(broker.log, "drain", draining)
    monkeypatch.setattr(broker._streams, "_write_deleted", write)
    with ThreadPoolExecutor() as threads:
        publishing = threads.submit(work)
        assert about.wait(PATIENCE_S)
        broker.delete_stream("s")
        publishing.result(PATIENCE_S)
    assert there == [1]
    assert not place.joining
    with broker._upkeep:
        while broker._remove_deleted():
            pass
    with broker.log.read() as txn:
        left = [key for key, _ in txn.cursor() if key[0] == BLOCKS and key[1:5] == stream.owner.to_bytes(4, "big")]
    assert left == []


def test_a_publish_waits_no_longer_for_another_with_its_number_than_it_says(open_spool: Open) -> None:
    """The rest of its time is for room in queues."""
    broker = open_spool()
    queue = broker.declare_queue("q", limit_messages=1)
    broker.bind(queue, "t")
    queue.put(b"full")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(broker.publish, "t", b"x", producer="p", number=1)
        until(lambda: broker._streams.producers._busy)
        with pytest.raises(qflow.ProducerBusy):
            broker.publish("t", b"x", producer="p", number=1, timeout_s=0.01)
        with pytest.raises(qflow.QueueFull):
            broker.publish("t", b"x", producer="p", number=2, timeout_s=0.01)
        queue.get(PATIENCE_S).ack()
        first.result(PATIENCE_S)
    assert broker.publish("t", b"x", producer="p", number=1, timeout_s=0).duplicate
