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
