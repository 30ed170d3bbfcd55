"""A message is deleted while another thread moves it, where the log does not take it, and where it is damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

import inside
import qflow
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker, in_thread, open_faulty
from faults.test_damage import block_keys, flip, written
from qflow.config import SPILL_STORES
from qflow.message import DELAYED
from qflow.queues.queue import parts_of
from qflow.storage.log.batch import Batch
from qflow.storage.log.batch_writing import BatchWriting
from qflow.storage.log.removal import REMOVED_AT_ONCE
from unit.clocks import until

__all__ = ["written"]
BODIES = [b"%03d" % number * 100 for number in range(60)]
CAPACITY = 8_000
LATER_S = 1000


@pytest.fixture
def faults() -> Faults:
    return Faults()


@contextmanager
def held_up(faults: Faults, operation: str, work: Callable[[], object]) -> Iterator[None]:
    """Have another thread do some work, and wait before an operation while the body goes on."""
    begun, goes_on = threading.Event(), threading.Event()

    def pause() -> None:
        if threading.current_thread().name == "mover":
            begun.set()
            assert goes_on.wait(PATIENCE_S)

    faults.before[operation] = pause
    mover = threading.Thread(target=work, name="mover", daemon=True)
    mover.start()
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        goes_on.set()
        mover.join(PATIENCE_S)
        assert not mover.is_alive()
        faults.before.clear()


@pytest.mark.parametrize("spill", SPILL_STORES)
@pytest.mark.parametrize("delay_s", [0.0, LATER_S], ids=["in order", "delayed"])
def test_what_is_being_spilled_is_deleted_at_once(spool: Path, faults: Faults, delay_s: float, spill: str) -> None:
    """It is still in memory; what was written of it is for nothing, and no file is left of that."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, spill=spill, segment_bytes="8KiB") as broker:
        queue = broker.declare_queue("q", durable=False)
        sequences: list[int] = []

        def put() -> None:
            sequences.append(queue.put(BODIES[len(sequences)], delay_s=delay_s))

        def put_more() -> None:
            while len(sequences) < len(BODIES):
                put()

        while not queue.stats().spilled_messages:
            put()
        with held_up(faults, "pwrite", put_more):
            gone = moved(queue)[0]
            assert queue.delete(gone) is True
        assert sorted(entry.sequence for entry in queue.browse()) == [one for one in sequences if one != gone]
        assert queue.stats().deleted_total == 1
        assert broker.check() == []


def test_what_is_taken_back_from_its_spill_is_charged_as_it_lies(spool: Path, faults: Faults) -> None:
    """Of messages that were put together a part is being spilled, and the others have left: it is a group of its own."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False)
        sequences = queue.put_many(BODIES[:9], delay_s=0.001)
        until(lambda: inside.due_resident(parts_of(queue).lanes.schedules[DELAYED], parts_of(queue).context.now_ms()))
        with held_up(faults, "pwrite", lambda: parts_of(queue).spiller.spill_tail(500)):
            (moving,) = parts_of(queue).lanes.schedules[DELAYED].claims.values()
            assert moving.cut
            left = moving.count
            queue.get_many(9 - left, timeout_s=0).ack()
            assert queue.delete(sequences[-2]) is True
        assert broker.check() == []
        assert len(drained(queue)) == left - 1
        assert queue.stats().resident_bytes == 0


@pytest.mark.parametrize("spill", SPILL_STORES)
@pytest.mark.parametrize("delay_s", [0.0, 0.001], ids=["in order", "delayed"])
def test_what_is_being_restored_is_waited_for(spool: Path, faults: Faults, delay_s: float, spill: str) -> None:
    """Nobody looks now and then: who has moved it wakes all that wait."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, spill=spill, segment_bytes="8KiB") as broker:
        queue = broker.declare_queue("q", durable=False)
        sequences = [queue.put(body, delay_s=delay_s) for body in BODIES]
        deleted: list[int] = []
        taken: list[int] = []

        def take_until_one_is_read() -> None:
            reads = faults.calls.get("read", 0)
            while faults.calls.get("read", 0) == reads:
                with queue.get(PATIENCE_S) as delivery:
                    taken.append(delivery.sequence)

        def delete(sequence: int) -> None:
            if queue.delete(sequence):
                deleted.append(sequence)

        with held_up(faults, "read", take_until_one_is_read):
            restorer = parts_of(queue).restorer
            gone = moved(queue)[-2:]
            threads = [threading.Thread(target=delete, args=(one,)) for one in gone]
            for thread in threads:
                thread.start()
            until(lambda: len(restorer.waiting) == 2)
            assert not deleted
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(deleted) == sorted(gone)
        assert len(drained(queue)) == len(sequences) - len(taken) - 2
        assert queue.stats().resident_bytes == 0
        assert broker.check() == []


def moved(queue: qflow.Queue) -> list[int]:
    """Return the sequences of what is being spilled or restored."""
    lanes = parts_of(queue).lanes
    runs = [range(run.first, run.stop) for run in lanes.runs if run.claim is not None]
    chunks = [chunk for one in lanes.schedules.values() for chunk in one.claims.values()]
    return [one for part in [*runs, *(chunk.sequences or [chunk.bound[1]] for chunk in chunks)] for one in part]


@pytest.mark.parametrize("where", ["memory", "spill store", "schedule", "log"])
def test_where_the_log_does_not_take_it_the_message_stays(spool: Path, faults: Faults, where: str) -> None:
    """I3: nothing was done; it is there, in its place, and can be deleted then."""
    with open_faulty(spool, faults, capacity_bytes=CAPACITY) as broker:
        queue = broker.declare_queue("q")
        delay_s = LATER_S if where == "schedule" else 0
        sequences = [queue.put(body, delay_s=delay_s) for body in (BODIES[:5] if where == "memory" else BODIES)]
    with open_faulty(spool, faults, capacity_bytes=CAPACITY if where == "spill store" else "1MiB") as broker:
        inside.still(broker)
        queue = broker.queue("q")
        if where != "log":
            queue.get_many(1, timeout_s=0).nack()
        if where == "schedule":
            inside.fit(queue)
        before = [entry.sequence for entry in queue.browse()]
        faults.fail("begin", lmdb.Error("no"), times=1)
        with pytest.raises(qflow.StorageError, match="no"):
            in_thread(lambda: queue.delete(sequences[2]))
        assert [entry.sequence for entry in queue.browse()] == before
        assert (queue.stats().deleted_total, inside.left_behind(queue)) == (0, {})
        assert broker.check() == []
        assert queue.delete(sequences[2])
        assert not queue.delete(sequences[2])
        assert broker.check() == []


def test_deletes_of_the_log_share_a_commit_and_a_message_leaves_once(spool: Path, faults: Faults) -> None:
    """While one is committed others are handed over; the second of one message waits, and finds nothing."""
    with open_faulty(spool, faults) as broker:
        broker.declare_queue("q").put_many(BODIES)
    with faulty_broker(spool, faults) as broker:
        queue = broker.queue("q")
        begun, goes_on = threading.Event(), threading.Event()

        def pause() -> None:
            begun.set()
            assert goes_on.wait(PATIENCE_S)

        outcomes: dict[str, bool] = {}

        def delete(name: str, sequence: int) -> threading.Thread:
            def work() -> None:
                outcomes[name] = queue.delete(sequence)

            thread = threading.Thread(target=work)
            thread.start()
            return thread

        faults.before["commit"] = pause
        threads = [delete("first", 3)]
        assert begun.wait(PATIENCE_S)
        threads.append(delete("again", 3))
        until(lambda: len(parts_of(queue).restorer.waiting) == 1)
        threads += [delete(f"other {sequence}", sequence) for sequence in (5, 7, len(BODIES) - 1)]
        until(lambda: len(parts_of(queue).held.leaving) == 4)
        commits = broker.stats().commits_total
        goes_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert broker.stats().commits_total - commits <= 3
        assert [name for name, deleted in outcomes.items() if not deleted] == ["again"]
        assert len(outcomes) == 5
        assert (queue.stats().deleted_total, len(queue)) == (4, len(BODIES) - 4)
        assert inside.left_behind(queue) == {}
        assert len(drained(queue)) == len(BODIES) - 4
        assert broker.check() == []


def test_a_delete_whose_commit_fails_is_in_doubt(spool: Path, faults: Faults) -> None:
    """Edge 21: whether it holds is known at the next opening; later ones are refused."""
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q")
    queue.put_many(BODIES)
    faults.fail("commit", lmdb.Error("mdb_txn_commit: Input/output error"), times=1)
    with pytest.raises(qflow.InDoubt):
        in_thread(lambda: queue.delete(3))
    for sequence in (3, 4):
        with pytest.raises(qflow.BrokerFailed):
            in_thread(lambda sequence=sequence: queue.delete(sequence))  # type: ignore[misc]
    assert len(queue) == len(BODIES)
    in_thread(broker.close)
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == BODIES


def test_a_message_in_a_damaged_block_is_not_deleted(written: Path) -> None:
    """It is named, and set aside when its turn comes; others are deleted."""
    keys = block_keys(written)
    flip(written, keys[4], -1)
    first = int.from_bytes(keys[4][-8:], "big")
    with qflow.open(written) as broker:
        queue = broker.queue("q")
        with pytest.raises(qflow.CorruptionError, match=f"message {first + 1} of queue 'q' cannot be read"):
            queue.delete(first + 1)
        assert queue.delete(first + 3)
        assert len(drained(queue)) == 30 - 3 - 1
        assert queue.stats().quarantined_total == 3
        inside.problems(broker).clear()


@pytest.mark.parametrize("delay_s", [0.0, LATER_S], ids=["in order", "delayed"])
def test_a_spilled_message_that_is_lost_is_not_deleted(spool: Path, faults: Faults, delay_s: float) -> None:
    """It is counted as lost, by who would read it back."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY) as broker:
        queue = broker.declare_queue("q", durable=False)
        sequences = [queue.put(body, delay_s=delay_s) for body in BODIES]
        spilled = [entry.sequence for entry in queue.browse() if entry.spilled]
        for path in (spool / "spill").rglob("*"):
            if path.is_file():
                path.write_bytes(b"nonsense")
        assert queue.delete(spilled[3]) is False
        assert (queue.stats().lost_total, queue.stats().deleted_total) == (1, 0)
        assert len(queue) == len(sequences) - 1
        inside.problems(broker).clear()
        assert broker.check() == []


def test_what_was_deleted_waits_where_a_commit_with_puts_finds_no_room(
    spool: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing it takes pages of its own at first: a put is not refused for that."""
    with faulty_broker(spool, faults, journal="off") as broker:
        inside.still(broker)
        keep = broker.declare_queue("keep")
        broker.declare_queues([f"gone {number}" for number in range(20)])
        for number in range(20):
            broker.queue(f"gone {number}").put(b"x")
            broker.delete_queue(f"gone {number}")
        begun, goes_on = threading.Event(), threading.Event()

        def pause() -> None:
            begun.set()
            assert goes_on.wait(PATIENCE_S)

        written: list[int] = []
        commit = BatchWriting.commit

        def find_no_room(writing: BatchWriting, batch: Batch) -> None:
            if batch.deletes and batch.is_writing:
                written.append(batch.removes)
                if batch.removes > 1:
                    raise qflow.DiskFull("the disk is full")
            commit(writing, batch)

        monkeypatch.setattr(BatchWriting, "commit", find_no_room)
        faults.before["commit"] = pause
        threads = [threading.Thread(target=keep.put, args=(b"first",))]
        threads[0].start()
        assert begun.wait(PATIENCE_S)
        threads.append(threading.Thread(target=inside.upkeep(broker).remove_deleted))
        threads.append(threading.Thread(target=keep.put, args=(b"second",)))
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(broker.engine.log._handing.requests) == 2)
        goes_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert written == [REMOVED_AT_ONCE, 1]
        assert keep.get_many(10).bodies == [b"first", b"second"]
