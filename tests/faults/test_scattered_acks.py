"""Acks in any order that nobody waits for: what each of them costs, and how many others stand in the way of at most."""

from __future__ import annotations

import gc
import random
import sys
import threading
from typing import Any

import pytest

import qflow
from faults.bare_log import bare_log, declared
from faults.seams import PATIENCE_S, Faults, faulty_broker
from qflow.storage.log.batch_writing import BatchWriting
from qflow.storage.log.marks import settle_ranges
from qflow.storage.log.rows import Settled
from qflow.storage.log.settling import SettlingOne
from qflow.storage.log.transaction_log import MOST_STANDING

MOST_BEFORE_A_PUT = 2 * 2048
MANY = 1000


@pytest.fixture
def faults():
    return Faults()


def test_a_put_elsewhere_waits_for_few_acks(spool, faults, monkeypatch):
    """It comes behind those of a batch that is being written, and those that may stand while a thread acks on."""
    standing: list[int] = []
    written: list[int] = []

    def commit(self: Any, batch: Any) -> None:
        written.append(sum(map(len, batch.settled.values())))
        commit_now(self, batch)

    commit_now = BatchWriting.commit
    with faulty_broker(spool, faults) as broker:
        acked, other = broker.declare_queue("acked", durable=True), broker.declare_queue("other", durable=True)
        acked.put_many([b"x"] * 4 * MOST_BEFORE_A_PUT)
        held = [acked.get() for _ in range(len(acked))]
        random.Random(1).shuffle(held)
        at_commit, go = threading.Event(), threading.Event()
        faults.before["commit"] = lambda: (faults.before.clear(), at_commit.set(), go.wait(PATIENCE_S))
        held.pop().ack()
        assert at_commit.wait(PATIENCE_S)
        requests = broker.engine.spool.log.requests
        acking = threading.Thread(target=lambda: [delivery.ack() for delivery in held])
        acking.start()
        while len(requests) <= MOST_STANDING:  # until it waits
            assert acking.is_alive()
        standing.append(sum(isinstance(one, SettlingOne) for one in list(requests)))  # not that by which it waits
        monkeypatch.setattr(BatchWriting, "commit", commit)
        put = other.submit(b"y")
        go.set()
        put.result(PATIENCE_S)
        acking.join()
    assert standing[0] == MOST_STANDING + 1
    assert standing[0] + written[0] <= MOST_BEFORE_A_PUT + 1


def test_an_ack_that_is_not_written_is_one_object_to_collections(spool, faults):
    """Of five, a few thousand acks in flight begin a collection that walks all that the program holds."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q", durable=True)
        queue.put_many([b"x"] * 2 * MANY)
        held = [queue.get() for _ in range(MANY)]
        random.Random(1).shuffle(held)
        at_commit, go = threading.Event(), threading.Event()
        faults.before["commit"] = lambda: (faults.before.clear(), at_commit.set(), go.wait(PATIENCE_S))
        queue.get().ack()
        assert at_commit.wait(PATIENCE_S)
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for delivery in held:
                delivery.ack()
            after = len(gc.get_objects())
        finally:
            gc.enable()
        go.set()
    assert MANY / 2 < after - before < 1.2 * MANY


def test_a_range_is_settled_in_a_few_calls(spool, faults):
    """One that was not settled before is looked up once, in a window that is read once."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with bare_log(spool, faults) as log:
        line = declared(log, 1)
        log.wait(log.put(line.put(*[b"x"] * 20_000)))
        sequences = random.Random(1).sample(range(1, 20_000), 2_000)
        settled = [Settled(at, at + 1, 1, 1) for at in sequences]
        counts: list[int] = []

        def settle(txn: Any) -> None:
            nonlocal calls
            calls = 0
            sys.setprofile(count)
            try:
                row = settle_ranges(txn, 1, 0, line.lane.row, settled)
            finally:
                sys.setprofile(None)
            counts.append(calls)
            assert row.messages == 18_000

        log.wait(log.write(settle))
    assert counts[0] <= 5 * len(sequences)


def pages(broker: qflow.Broker) -> tuple[int, int]:
    """Return how many pages the log's file has, and how many of them hold something."""
    with broker.engine.spool.log.copying() as env:
        tree = env._env.stat()
        used = tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]
        return env.size_bytes() // tree["psize"], used


def test_acks_in_any_order_leave_the_file_small(spool):
    """Neither marks nor the room that is kept for them make it thrice as large as what it holds."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q", durable=True)
        for _ in range(20):
            queue.put_many([b"x" * 100] * 2_500)
        held = [queue.get() for _ in range(50_000)]
        _, used = pages(broker)
        random.Random(1).shuffle(held)
        for delivery in held[:-1]:
            delivery.ack()
        after, _ = pages(broker)
    assert after <= 3 * used
