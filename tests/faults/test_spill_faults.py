"""Spilling on a disk that fails or is full, a spill directory that is removed, spill files that are not what was written."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

import inside
import qflow
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker, in_thread
from qflow.message import DELAYED
from qflow.queues import assembly, getting
from qflow.queues import spiller as spilling
from qflow.queues.puts import Puts
from qflow.queues.queue import parts_of
from qflow.queues.spiller import Spiller
from qflow.storage.spill.files import FilesArea
from unit.clocks import until

BODIES = [b"%03d" % number * 100 for number in range(60)]
CAPACITY = 4_000
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=["files", "segments", "mapped segments"])
def spill(request):
    """The settings of a spill store; a segment holds about twelve messages."""
    mapped = 2 if request.param.startswith("mapped") else 0
    return {"spill": request.param.split()[-1], "segment_bytes": "4KiB", "max_mapped_segments": mapped}


@pytest.fixture
def faults():
    return Faults()


def spill_files(spool: Path) -> list[Path]:
    return sorted(
        (path for path in (spool / "spill").rglob("*") if path.is_file()), key=lambda path: int(path.name, 16)
    )


def files_in_use(queue: qflow.Queue) -> list[Path]:
    """Return the spill files that hold a message, in the order of the messages."""
    slots = [slot for run in parts_of(queue).lanes.runs if run.slots is not None for slot in run.slots]
    if isinstance(parts_of(queue).spiller.area, FilesArea):
        return [Path(parts_of(queue).spiller.area._path(slot)) for slot in slots]
    return list(dict.fromkeys(Path(parts_of(queue).spiller.area._pool.index.find(slot)[0].path) for slot in slots))


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "EIO", "EROFS"])
@pytest.mark.parametrize("operation", ["open", "pwrite"])
def test_a_spill_that_fails_holds_producers_and_heals_by_itself(operation, name, durable, spool, faults, spill):
    """Edge 9: the messages stay in memory and in order, producers get DiskFull in time, and go on when it is over."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=durable)
        queue.put_many(BODIES[:10])
        faults.fail(operation, getattr(errno, name))
        put = 10
        with pytest.raises(qflow.DiskFull, match="spill"):
            while True:
                queue.put(BODIES[put], timeout_s=0)
                put += 1
        assert queue.stats().resident_bytes <= CAPACITY + 400
        assert broker.check() == []
        with queue.get(0) as delivery:  # gets and acks go on
            assert delivery.body == BODIES[0]
        faults.heal()
        for body in BODIES[put:]:
            queue.put(body, timeout_s=PATIENCE_S)
        assert queue.stats().spilled_messages > 0
        assert broker.check() == []
        assert drained(queue) == BODIES[1:]
        assert broker.check() == []
        assert queue.stats().lost_total == 0


def test_a_producer_waits_for_a_full_disk_until_a_consumer_makes_room(spool, faults, spill):
    """Edge 9: under BLOCK a put waits while nothing can be spilled, and passes when something was acked."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        faults.fail("open", errno.ENOSPC)
        done = threading.Event()

        def produce() -> None:
            for body in BODIES:
                queue.put(body)
            done.set()

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        came = []
        while len(came) < len(BODIES):
            with queue.get(timeout_s=PATIENCE_S) as delivery:
                came.append(delivery.body)
        assert done.wait(PATIENCE_S)
        assert came == BODIES
        assert broker.check() == []


def test_a_rejecting_queue_says_at_once_that_the_disk_is_full(spool, faults, spill):
    """Edge 9: under REJECT a put does not wait for a disk."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False, on_overflow=qflow.Overflow.REJECT)
        faults.fail("open", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            for body in BODIES:
                in_thread(lambda body=body: queue.put(body))
        assert broker.check() == []


def test_dead_letters_of_a_publish_wait_for_a_full_disk_for_a_while_only(spool, faults, spill, monkeypatch):
    """Who waits in the other queues of the publish would wait for the disk, too; nothing is done."""
    monkeypatch.setattr(assembly, "DEAD_LETTERS_S", 0.0)
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        dead = broker.declare_queue("dead", durable=False)
        full = broker.declare_queue(
            "full", durable=False, limit_messages=1, on_overflow="dead_letter", dead_letter="dead"
        )
        full.put(b"")
        broker.bind(full, "turned")
        faults.fail("open", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            for body in BODIES:
                dead.put(body, timeout_s=0)
        before = len(dead)
        with pytest.raises(qflow.DiskFull, match="'dead'"):
            in_thread(lambda: broker.publish("turned", BODIES[0]))
        assert (len(dead), len(full)) == (before, 1)
        faults.heal()
        assert broker.publish("turned", BODIES[0]).sequences == {"full": None}
        assert len(dead) == before + 1


def test_half_a_spilled_chunk_is_taken_back(spool, faults, spill):
    """Edge 9: a write that fails in the middle of a chunk leaves no file behind and every message in memory."""
    with faulty_broker(spool, faults, capacity_bytes=64_000, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        faults.fail("pwrite", errno.ENOSPC, after=2 if spill["spill"] == "files" else 0)
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(b"x" * 300, timeout_s=0)
        assert spill_files(spool) == []
        assert broker.check() == []


# Directories and files that are gone or wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["spill", "the queue's own"])
def test_a_spill_directory_removed_underneath_costs_a_durable_queue_nothing(whole, spool, open_spool, spill):
    """Edge 10: spilled messages are read from the log instead, in order; new ones are spilled again."""
    broker = open_spool(capacity_bytes=CAPACITY, **spill)
    queue = broker.declare_queue("q")
    queue.put_many(BODIES)
    for body in BODIES:
        queue.put(body)
    spilled = queue.stats().spilled_messages
    assert spilled > 50
    shutil.rmtree(spool / "spill" if whole else next((spool / "spill").iterdir()))
    came = []
    for _ in range(100):
        with queue.get(0) as delivery:
            came.append(delivery.body)
    for body in BODIES:
        queue.put(body)
    came += drained(queue)
    assert came == BODIES * 3
    stats = queue.stats()
    assert stats.lost_total == 0
    assert stats.spill_repaired_total == spilled
    assert "read from the log" in broker.recovery.problems[0]
    inside.problems(broker).clear()  # they were looked at; the rest must be clean
    assert broker.check() == []


def test_a_spill_directory_removed_underneath_loses_transient_messages_and_says_so(spool, open_spool, spill):
    """Edge 10, I9: those that were spilled are counted as lost and reported; the others are served; no loop."""
    broker = open_spool(capacity_bytes=CAPACITY, **spill)
    queue = broker.declare_queue("q", durable=False)
    for body in BODIES:
        queue.put(body)
    resident = {entry.sequence for entry in queue.browse() if not entry.spilled}
    shutil.rmtree(spool / "spill")
    came = {}
    while len(queue):
        with in_thread(lambda: queue.get(0)) as delivery:
            came[delivery.sequence] = delivery.body
    assert came == {sequence: BODIES[sequence] for sequence in sorted(resident)}
    assert queue.stats().lost_total == len(BODIES) - len(resident)
    assert sorted(named_in(broker.recovery.problems)) == sorted(set(range(len(BODIES))) - resident)
    assert queue.put(b"x") == len(BODIES)
    inside.problems(broker).clear()
    assert broker.check() == []


def named_in(problems: tuple[str, ...]) -> list[int]:
    """Return the sequences that problems tell of, each once: "spilled message 3: …", "spilled messages 4 to 9: …"."""
    sequences: list[int] = []
    for problem in problems:
        found = re.search(r"spilled messages? (\d+)(?: to (\d+))?: ", problem)
        assert found, problem
        sequences += range(int(found[1]), int(found[2] or found[1]) + 1)
    return sequences


def harm(kind: str, path: Path, other: Path) -> None:
    data = path.read_bytes()
    if kind == "flipped bit":
        path.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    elif kind == "truncated":
        path.write_bytes(data[:100])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "longer":
        path.write_bytes(data + b"!")
    elif kind == "swapped":
        path.write_bytes(other.read_bytes())
    elif kind == "removed":
        path.unlink()
    elif kind == "a directory":
        path.unlink()
        path.mkdir()
    elif kind == "a link":
        path.unlink()
        path.symlink_to(other)
    elif kind == "a FIFO":
        path.unlink()
        os.mkfifo(path)
    else:
        raise AssertionError(kind)


HARMLESS = {"longer"}
"""To a segment, whose blocks have their places."""
KINDS = ["flipped bit", "truncated", "empty", "longer", "swapped", "removed", "a directory", "a link", "a FIFO"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_spill_file_of_a_durable_message_is_read_from_the_log(kind, spool, open_spool, spill):
    """Edge 10, I9: whatever a spill file became, the message comes with its own bytes, in its place."""
    broker = open_spool(capacity_bytes=CAPACITY, **spill)
    queue = broker.declare_queue("q")
    for body in BODIES:
        queue.put(body)
    files = files_in_use(queue)
    harm(kind, files[1], files[2])
    harm(kind, files[-1], files[0])
    assert in_thread(lambda: drained(queue)) == BODIES
    stats = queue.stats()
    if spill["spill"] == "files":
        assert stats.spill_repaired_total == 2
    else:
        assert (stats.spill_repaired_total >= 2) == (kind not in HARMLESS)
    assert stats.lost_total == 0
    assert len(named_in(broker.recovery.problems)) == stats.spill_repaired_total
    inside.problems(broker).clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_spill_file_of_a_transient_message_is_counted_as_lost(kind, spool, open_spool, spill):
    """Edge 10, I9: the message is lost, counted and named; the next is served; wrong bytes never come."""
    broker = open_spool(capacity_bytes=CAPACITY, **spill)
    queue = broker.declare_queue("q", durable=False)
    for body in BODIES:
        queue.put(body)
    files = files_in_use(queue)
    sequences = [entry.sequence for entry in queue.browse() if entry.spilled]
    harm(kind, files[1], files[2])
    came = in_thread(lambda: drained(queue))
    lost = [sequence for sequence, body in enumerate(BODIES) if body not in came]
    assert came == [body for sequence, body in enumerate(BODIES) if sequence not in lost]
    assert queue.stats().lost_total == len(lost)
    assert named_in(broker.recovery.problems) == lost
    if spill["spill"] == "files":
        assert lost == [sequences[1]]
    elif kind in HARMLESS:
        assert lost == []
    else:
        assert lost == [sequence for sequence in sequences if lost[0] <= sequence <= lost[-1]] != sequences
    inside.problems(broker).clear()


def test_transient_messages_of_a_durable_queue_are_lost_with_their_file_and_the_others_are_not(
    spool, open_spool, spill
):
    """Edge 10: on one queue, what is in the log is repaired and what is not is lost, in order."""
    broker = open_spool(capacity_bytes=CAPACITY, **spill)
    queue = broker.declare_queue("q")
    for number, body in enumerate(BODIES):
        queue.put(body, durable=bool(number % 2))
    spilled = {entry.sequence for entry in queue.browse() if entry.spilled}
    shutil.rmtree(spool / "spill")
    expected = [body for number, body in enumerate(BODIES) if number % 2 or number not in spilled]
    assert in_thread(lambda: drained(queue)) == expected
    assert queue.stats().lost_total == len(BODIES) - len(expected)
    inside.problems(broker).clear()
    assert broker.check() == []


def test_an_unlink_that_fails_is_counted_and_harms_nothing(spool, faults, monkeypatch, spill):
    """Edge 10: files that cannot be removed stay, and the queue goes on."""
    monkeypatch.setattr("qflow.storage.spill.files.MAX_KEPT_BYTES", 0)
    monkeypatch.setattr("qflow.storage.spill.segments.MAX_KEPT_BYTES", 0)
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        faults.fail("unlink", errno.EIO)
        for _ in range(3):
            for body in BODIES:
                queue.put(body)
            assert drained(queue) == BODIES
        assert broker.check() == []


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_read_that_may_open_no_file_is_tried_again_and_loses_nothing(error, spool, faults, spill):
    """Edge 9: no descriptor, or no rights, while restoring is of the moment: the get says so, a later one has it."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        for body in BODIES:
            queue.put(body)
        came = []
        while next(iter(queue.browse())).state == "resident":
            with queue.get(0) as delivery:
                came.append(delivery.body)
        faults.fail("open", error)
        with pytest.raises(qflow.StorageError, match="open files|memory|look at|access"):
            in_thread(lambda: queue.get(0))
        faults.heal()
        assert came + drained(queue) == BODIES
        assert queue.stats().lost_total == 0
        assert broker.check() == []


@pytest.mark.parametrize("delay_s", [0, 0.001])
def test_what_the_log_has_is_served_while_the_spill_files_may_not_be_read(delay_s, spool, faults, spill):
    """Rights that were taken cost a durable queue nothing: its messages come from the log, each once and in order."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q")
        for body in BODIES:
            queue.put(body, delay_s=delay_s)
        put_s = time.time()
        until(lambda: time.time() > put_s + 0.01)  # all are due
        faults.fail("open", errno.EACCES)
        assert drained(queue) == BODIES
        assert queue.stats().lost_total == 0
        assert queue.stats().spill_repaired_total > 0


def test_settling_while_a_run_is_spilled_or_restored_leaves_no_orphan_and_no_double_credit(spool, faults, spill):
    """Edge 1: the head is taken, acked or purged in the middle of its spill; of its restore, purged or deleted."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        for durable in (True, False):
            for move, interfere in (("pwrite", "take"), ("pwrite", "purge"), ("read", "purge"), ("read", "delete")):
                queue = broker.declare_queue(f"{durable}-{move}-{interfere}", durable=durable)
                for body in BODIES[: 30 if move == "read" else 10]:
                    queue.put(body)
                while move == "read" and next(iter(queue.browse())).state == "resident":
                    queue.get(0).ack()
                inside, leave = threading.Event(), threading.Event()

                def pause(inside: threading.Event = inside, leave: threading.Event = leave) -> None:
                    if threading.current_thread().name == "mover":
                        inside.set()
                        assert leave.wait(PATIENCE_S)

                def work(queue: qflow.Queue = queue, move: str = move) -> None:
                    try:
                        queue.get(0).ack() if move == "read" else [queue.put(b"p" * 300) for _ in range(3)]
                    except (qflow.QueueDeleted, qflow.QueueEmpty):
                        pass

                faults.before[move] = pause
                mover = threading.Thread(target=work, name="mover", daemon=True)
                mover.start()
                assert inside.wait(PATIENCE_S)
                if interfere == "take":
                    for delivery in queue.get_many(100, timeout_s=0):
                        delivery.ack()
                elif interfere == "purge":
                    queue.purge()
                else:
                    broker.delete_queue(queue.name)
                leave.set()
                mover.join(PATIENCE_S)
                assert not mover.is_alive()
                faults.before.clear()
                if interfere != "delete":
                    drained(queue)
                    assert queue.stats().resident_bytes == 0
                assert broker.check() == []


def test_a_purge_takes_what_a_get_has_collected_before_it_reads_on(spool, faults, spill):
    """Edge 16: the get has nothing then; what was purged is not handed out, and not counted twice."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        for body in BODIES:
            queue.put(body)
        assert next(iter(queue.browse())).state == "resident"
        reads, leave = threading.Event(), threading.Event()
        batches = []

        def pause():
            if threading.current_thread().name == "reader":
                reads.set()
                assert leave.wait(PATIENCE_S)

        faults.before["read"] = pause
        reader = threading.Thread(target=lambda: batches.append(queue.get_many(100, timeout_s=0)), name="reader")
        reader.start()
        assert reads.wait(PATIENCE_S)
        assert queue.purge() == len(BODIES)
        leave.set()
        reader.join(PATIENCE_S)
        assert [len(batch) for batch in batches] == [0]
        assert (len(queue), queue.stats().acquired_messages, queue.stats().resident_bytes) == (0, 0, 0)
        assert broker.check() == []


def test_a_purge_while_a_get_looks_for_room_on_a_full_disk_loses_nothing_that_comes_after_it(spool, faults, spill):
    """Edge 16: what is put then is delivered, each message once, though the purge has ended the batch of the get."""
    with faulty_broker(spool, faults, capacity_bytes="1MiB", **spill) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False, capacity_bytes="64KiB")
        bodies = [b"%04d" % number * 236 for number in range(128)]  # 64 of them fill it

        def fill(bodies):
            for body in bodies:
                queue.put(body, timeout_s=0)
            held.append(queue.get(timeout_s=0))  # passes above the capacity, as the get that looks for room did

        held: list[qflow.Delivery] = []
        fill(bodies[:64])
        faults.fail("pwrite", errno.ENOSPC)
        once = iter([True])

        def purge_and_fill():
            if threading.current_thread().name == "getter" and next(once, False):
                assert in_thread(queue.purge) == 64
                in_thread(lambda: fill(bodies[64:]))

        faults.before["pwrite"] = purge_and_fill
        getter = threading.Thread(target=lambda: held.append(queue.get(timeout_s=0)), name="getter")
        getter.start()
        getter.join(PATIENCE_S)
        assert [delivery.body for delivery in held[1:]] == bodies[64:66]
        assert broker.check() == []
        for delivery in held[1:]:
            delivery.ack()
        assert drained(queue) == bodies[66:]
        assert len(queue) == 0


def test_what_comes_back_of_a_spill_that_failed_is_charged_as_a_group_of_its_own(spool, faults):
    """Of messages that were put together a part is being spilled, and the others leave meanwhile."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False)
        queue.put_many(BODIES[:9], delay_s=0.001)
        until(lambda: next(iter(queue.browse())).due_ms < time.time() * 1000)
        begun, leave = threading.Event(), threading.Event()

        def pause():
            if threading.current_thread().name == "spiller":
                begun.set()
                assert leave.wait(PATIENCE_S)

        faults.before["pwrite"] = pause
        spiller = threading.Thread(target=lambda: parts_of(queue).spiller.spill_tail(500), name="spiller")
        spiller.start()
        assert begun.wait(PATIENCE_S)
        (moving,) = parts_of(queue).lanes.schedules[DELAYED].claims.values()
        assert moving.cut
        queue.get_many(9 - moving.count, timeout_s=0).ack()
        faults.fail("pwrite", errno.ENOSPC)
        leave.set()
        spiller.join(PATIENCE_S)
        assert broker.check() == []
        assert len(drained(queue)) == moving.count
        assert queue.stats().resident_bytes == 0


def test_what_is_purged_and_overwritten_while_it_is_read_is_no_damage(spool, faults):
    """Its files hold other messages by then; nobody misses it."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False)
        for body in BODIES:
            queue.put(body)
        reads, leave = threading.Event(), threading.Event()

        def pause():
            if threading.current_thread().name == "reader":
                reads.set()
                assert leave.wait(PATIENCE_S)

        faults.before["open"] = pause
        reader = threading.Thread(target=lambda: queue.get_many(100, timeout_s=0).ack(), name="reader")
        reader.start()
        assert reads.wait(PATIENCE_S)
        queue.purge()
        while inside.upkeep(broker).sweep():
            pass
        for body in BODIES:
            queue.put(body[::-1])
        leave.set()
        reader.join(PATIENCE_S)
        drained(queue)
        assert broker.recovery.problems == ()
        assert queue.stats().lost_total == 0


@pytest.mark.parametrize("delayed", [False, True], ids=["in order", "delayed"])
def test_a_get_without_patience_waits_for_what_another_thread_reads(delayed, spool, faults, spill):
    """The queue is not empty: `while batch := queue.get_many(n, timeout_s=0)` must not end before it is.

    There is room for more than the one message that the other holds.
    """
    bodies = [body * 10 for body in BODIES]
    with faulty_broker(spool, faults, capacity_bytes=10 * CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        for body in bodies:
            queue.put(body, delay_s=0.001 if delayed else 0)
        put_s = time.time()
        until(lambda: time.time() > put_s + 0.01)  # all are due
        found, taken = [], []
        reads, leave = threading.Event(), threading.Event()

        def pause() -> None:
            if threading.current_thread().name == "reader":
                reads.set()
                assert leave.wait(PATIENCE_S)

        def take() -> None:
            batch = queue.get_many(1, timeout_s=0)
            found.extend(batch.bodies)
            taken.append(len(batch))
            batch.ack()

        def take_until_one_is_read() -> None:
            while not reads.is_set():
                take()

        faults.before["read"] = pause
        first = threading.Thread(target=take_until_one_is_read, name="reader", daemon=True)
        first.start()
        assert reads.wait(PATIENCE_S)
        second = threading.Thread(target=take, daemon=True)
        second.start()
        until(lambda: queue_is_waited_for(queue) or not second.is_alive())
        leave.set()
        for thread in (first, second):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        faults.before.clear()
        assert set(taken) == {1}
        assert sorted(found + drained(queue)) == bodies


def test_a_get_without_patience_waits_for_room_that_another_thread_makes(spool, faults, spill, monkeypatch):
    """Not for ever: where all is held, and others never end with making room, there is none."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=False)
        for body in BODIES:
            queue.put(body)
        held = []
        while batch := queue.get_many(100, timeout_s=0):
            held.append(batch)
        taken = sum(map(len, held))
        assert 0 < taken < len(BODIES)
        parts_of(queue).spiller.under_way.add("a write of another thread")
        found = []
        getter = threading.Thread(target=lambda: found.append(queue.get(0)), daemon=True)
        getter.start()
        until(lambda: queue_is_waited_for(queue) or not getter.is_alive())
        held.pop().ack()
        getter.join(PATIENCE_S)
        assert [delivery.body for delivery in found] == [BODIES[taken]]
        monkeypatch.setattr(getting, "LOOKS", 3)
        while batch := queue.get_many(100, timeout_s=0):
            held.append(batch)
        assert len(queue)
        parts_of(queue).spiller.under_way.clear()
        for one in [*found, *held]:
            one.ack()


def queue_is_waited_for(queue: qflow.Queue) -> bool:
    return parts_of(queue).gate.getters > 0


@pytest.mark.parametrize("most", [1, None], ids=["max_deliveries", "as often as it takes"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_get_that_fails_has_delivered_nothing(durable, most, spool, faults, spill):
    """What it had taken when the disk failed goes back uncounted: nobody has seen it, and none is one too many."""
    with faulty_broker(spool, faults, capacity_bytes=CAPACITY, **spill) as broker:
        queue = broker.declare_queue("q", durable=durable, max_deliveries=most)
        for body in BODIES:
            queue.put(body)
        assert queue.stats().resident_messages > 1
        faults.fail("open", errno.EMFILE)
        faults.fail("read", errno.EMFILE)
        for _ in range(3):
            with pytest.raises(qflow.StorageError):
                queue.get_many(len(BODIES))
        faults.heal()
        assert queue.stats().redelivered_total == 0
        found = []
        while len(queue):
            with queue.get(0) as delivery:
                found.append(delivery.body)
                assert (delivery.delivery_count, delivery.redelivered) == (1, False)
        assert found == BODIES


def test_damage_is_told_to_the_log_of_the_process_without_a_lock(spool, open_spool, spill):
    """Its handlers may use the broker: here, one that puts each line into another queue, and waits for that."""
    broker = open_spool(**spill)
    queue, lines = broker.declare_queue("q", capacity_bytes=CAPACITY), broker.declare_queue("lines")

    class IntoAQueue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.put(record.getMessage().encode())

    handler, logger = IntoAQueue(), logging.getLogger("qflow.damage")
    logger.addHandler(handler)
    try:
        queue.put_many(BODIES, delay_s=0.001)
        for path in spill_files(spool):
            path.write_bytes(b"\xff" * path.stat().st_size)
        put_s = time.time()
        until(lambda: time.time() > put_s + 0.01)  # all are due
        assert in_thread(lambda: drained(queue)) == BODIES
        assert b"does not match" in in_thread(lambda: lines.get(PATIENCE_S)).body
    finally:
        logger.removeHandler(handler)


def test_a_handler_of_the_log_that_needs_the_broker_does_not_keep_it_from_closing(open_spool):
    """What maintenance had no time to tell is told when the broker is closed: that handler is refused then."""
    broker = open_spool()
    lines = broker.declare_queue("lines")

    class IntoAQueue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.put(record.getMessage().encode())

    handler, logger = IntoAQueue(), logging.getLogger("qflow.damage")
    inside.still(broker)
    broker.engine.spool.report("a file is damaged", 0)
    logger.addHandler(handler)
    try:
        broker.close()
    finally:
        logger.removeHandler(handler)
    assert broker.closed


def test_a_step_of_spilling_is_a_small_one(spool, faults, spill, monkeypatch):
    """Others may wait for it: not for thousands of files, or for many megabytes."""
    with faulty_broker(spool, faults, capacity_bytes="64MiB", **spill) as broker:
        inside.still(broker)  # it would spill, too
        small, large = (broker.declare_queue(name, durable=False) for name in ("small", "large"))
        small.put_many([b"%d" % number for number in range(9_000)])
        large.put_many([bytes(2**20)] * 12)
        areas = [parts_of(queue).spiller.area for queue in (small, large)]
        steps = {area: [] for area in areas}
        write = type(areas[0]).write

        def noted(area, first, records):
            steps[area].append(len(records))
            return write(area, first, records)

        monkeypatch.setattr(type(areas[0]), "write", noted)
        for name in ("small", "large"):
            broker.alter_queue(name, capacity_bytes=0)
        assert [sum(counts) for counts in steps.values()] == [9_000, 12]
        assert max(steps[areas[0]]) <= areas[0].chunk_messages
        assert max(steps[areas[1]]) <= 4
        with small.get(0) as delivery:
            assert delivery.body == b"0"


def test_a_put_returns_when_all_is_spilled_whoever_spills_some_of_it(spool, faults, spill, monkeypatch):
    """Maintenance takes a step between two of the put's: that returned then, with most of it in memory."""
    with faulty_broker(spool, faults, capacity_bytes="64KiB", **spill) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False)
        spiller = parts_of(queue).spiller
        write, others, paused = type(spiller.area).write, [], threading.Event()

        def written(self, *arguments):
            if threading.current_thread() in others:
                assert paused.wait(PATIENCE_S)
            return write(self, *arguments)

        def some(self, *arguments):
            left = spill_some(self, *arguments)
            if not others:
                others.append(threading.Thread(target=self.spill_tail, args=(1,)))
                others[0].start()
                while not self.spilling:
                    pass
            return left

        def pause(_):
            paused.set()
            others[0].join()

        spill_some = Spiller._spill_some
        monkeypatch.setattr(type(spiller.area), "write", written)
        monkeypatch.setattr(Spiller, "_spill_some", some)
        monkeypatch.setattr(spilling, "sleep", pause)
        queue.put_many([bytes(1_000)] * 1_000)
        exceeds = spiller.exceeds_capacity
        pause(0)
        assert not exceeds
        assert broker.check() == []


def test_a_put_whose_step_another_one_came_before_goes_on(spool, faults, spill, monkeypatch):
    """That one began, and ended, when the put had looked and not begun: it has room to make all the same."""
    with faulty_broker(spool, faults, capacity_bytes="64KiB", **spill) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False)
        spiller = parts_of(queue).spiller
        spill_some, spill_tail, steps = Spiller._spill_some, Spiller.spill_tail, []

        def some(self, *arguments):
            steps.append(None)
            return spill_some(self, *arguments)

        def turned_away(self, wanted):
            if len(steps) > 1:
                return spill_tail(self, wanted)
            in_thread(lambda: spill_tail(self, 1))
            return False

        monkeypatch.setattr(Spiller, "_spill_some", some)
        monkeypatch.setattr(Spiller, "spill_tail", turned_away)
        queue.put_many([bytes(1_000)] * 1_000)
        assert not spiller.exceeds_capacity
        assert broker.check() == []


def test_what_passes_alone_leaves_others_a_share(spool, faults, spill, monkeypatch):
    """While it is committed, and at each step of its way to the disk: small puts of others need not spill for theirs."""
    moments, looked = [], []
    with faulty_broker(spool, faults, capacity_bytes="1MiB", max_transaction_bytes="32MiB", **spill) as broker:
        inside.still(broker)  # it would spill, too, and go on when the put has returned
        large, small = broker.declare_queue("large"), broker.declare_queue("small", durable=False)
        area = parts_of(large).spiller.area
        publish, write, find_room = Puts.publish, type(area).write, Spiller.find_room

        def put(moment):
            moments.append(moment)
            in_thread(lambda: small.put(bytes(100)))

        def published(queue, *arguments):
            put("committed")
            publish(queue, *arguments)

        def written(self, *arguments):
            put("spilled")
            return write(self, *arguments)

        def looks(spiller, missing):
            looked.append(spiller.area)
            return find_room(spiller, missing)

        with monkeypatch.context() as patch:
            patch.setattr(Puts, "publish", published)
            patch.setattr(type(area), "write", written)
            patch.setattr(Spiller, "find_room", looks)
            large.put_many([bytes(2**16)] * 256)
        assert moments[0] == "committed"
        assert moments.count("spilled") > 2
        assert parts_of(small).spiller.area not in looked
        assert small.stats().spilled_messages == 0
        assert len(small) == len(moments)


def test_what_passed_alone_does_not_ask_others_for_ever(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use what they are left, and have some of it to give each time; the put gets none of that.

    Nor does maintenance ask them for ever, though it takes one step at a time.
    """
    monkeypatch.setattr(spilling, "AT_ONCE_S", 0.0)
    with qflow.open(spool, capacity_bytes=8_000) as broker:
        inside.still(broker)
        queue, other = (broker.declare_queue(name, durable=False) for name in ("q", "other"))
        ledger, account = broker.engine.ledger, parts_of(other).gate.account
        asked: list[int] = []

        def give_way(wanted: int, spill: bool) -> bool:
            asked.append(wanted)
            assert len(asked) < 100
            ledger.note_spare(account)
            return True

        account.give_way = give_way
        ledger.note_spare(account)
        spiller = parts_of(queue).spiller
        real = spiller.spill_tail
        spiller.spill_tail = lambda _: False  # type: ignore[method-assign]
        queue.put(bytes(20_000))
        assert spiller.exceeds
        while spiller.spill_left_over():
            pass
        spiller.spill_tail = real  # type: ignore[method-assign]
        assert queue.get(0).body == bytes(20_000)
