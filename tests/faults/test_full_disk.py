"""A disk that is really full: a tmpfs of some MiB."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from attrs import asdict

import inside
import qflow
from doors.command_line import CommandLine
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker, in_thread
from qflow.doctor.judging import judge
from qflow.doctor.look import Look
from qflow.inspect import check_spool
from qflow.queues import spiller
from qflow.queues.queue import parts_of
from qflow.queues.tending import has_something_to_do
from qflow.storage.lock import acquire_lock, owner_pid
from qflow.storage.log.parts import PAGES_A_PART, cut, joined
from qflow.storage.log.rows import Row, Settled, read_row
from unit.clocks import until


@contextmanager
def disk_of(size: str, disk: Path) -> Iterator[Path]:
    """A file system of this size, in a directory that is made for it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "qflow-test", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with disk_of("4m", tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def faults() -> Faults:
    return Faults()


def fill(disk: Path) -> Path:
    """Take all the space there is; return the file that holds it."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        size = 2**20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def test_a_full_disk_under_the_log_refuses_puts_and_nothing_else(small_disk):
    """I12, edge 9: DiskFull is clear, acks and gets go on, puts come back with the space, nothing confirmed is lost."""
    spool = small_disk / "spool"
    confirmed = []
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        with pytest.raises(qflow.DiskFull, match="free some space"):
            while True:
                body = b"%06d" % len(confirmed) * 1_000
                queue.put(body)
                confirmed.append(body)
        assert len(confirmed) > 50
        assert isinstance(queue.submit(b"x" * 6_000).exception(timeout=PATIENCE_S), qflow.DiskFull)
        with pytest.raises(qflow.DiskFull):
            queue.put_many([b"x" * 6_000] * 3)
        assert broker.check() == []
        for body in confirmed[:20]:  # with not a byte left
            delivery = queue.get(0)
            assert delivery.body == body
            delivery.ack(wait=True)
        assert broker.check() == []
        for _ in range(20):
            queue.get(0).nack()
        ballast = None
    assert ballast is None
    with qflow.open(spool) as broker:  # opening needs no more than acks do
        queue = broker.queue("q")
        assert [delivery.body for delivery in queue.get_many(1000)] == confirmed[20:]


def line_with(stream: IO[bytes], words: bytes) -> bytes:
    """Read until a line has these words: the log of the process may tell of the disk in between."""
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"no line says {words!r}")


LIMITED = """
import resource, sys
import qflow

resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 2**20, resource.RLIM_INFINITY))
with qflow.open(sys.argv[1], door=False, capacity_bytes="16MiB") as broker:
    queue = broker.declare_queue("q")
    put = 0
    try:
        while put < 1_000:
            queue.put(b"%06d" % put * 1_000)
            put += 1
    except qflow.DiskFull as error:
        print(error)
    acked = 0
    while acked < put - 10:
        queue.get(timeout_s=0).ack(wait=True)
        acked += 1
    queue.put(b"again")
with qflow.open(sys.argv[1], door=False) as broker:
    assert broker.recovery.clean
    assert broker.check() == []
    bodies = [delivery.body[:6] for delivery in broker.queue("q").get_many(20, timeout_s=0)]
    assert bodies == [*[b"%06d" % number for number in range(acked, put)], b"again"], bodies
"""


def test_a_limit_on_the_size_of_files_is_a_full_disk_with_another_remedy(tmp_path):
    """`ulimit -f`, LimitFSIZE: it is named, acks go on, puts work again when they have made room, and the end is clean."""
    child = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "spool"], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "`ulimit -f`" in child.stdout
    assert "`LimitFSIZE=`" in child.stdout
    assert child.stderr == ""


def test_a_pipe_tells_at_once_that_it_waits_for_room_on_the_disk(small_disk, tmp_path):
    """Once; and if it has to end without any, with the exit code of a disk that takes no more."""
    (tmp_path / "input").write_bytes((b"x" * 999 + b"\n") * 8000)
    os.mkfifo(tmp_path / "door")
    cli = CommandLine(tmp_path)
    try:
        with (tmp_path / "input").open("rb") as source:
            command = ("sh", "-c", "read go < door")
            process = cli.start_on(source, subprocess.DEVNULL, "pipe", small_disk / "spool", "q", "--", *command)
            assert b"free some space" in line_with(process.stderr, b"stdin waits for that")
            process.send_signal(signal.SIGTERM)
            line_with(process.stderr, b"waiting for sh")
            (tmp_path / "door").write_text("go\n")
            assert process.wait() == 4
            *_, last = process.stderr.read().splitlines()
            assert b"free some space" in last
    finally:
        cli.end()


def test_puts_work_again_by_themselves_when_space_returns(small_disk):
    """I12: the same broker goes on after somebody made room."""
    with qflow.open(small_disk / "spool") as broker:
        queue = broker.declare_queue("q")
        queue.put(b"first")
        ballast = fill(small_disk)
        with pytest.raises(qflow.DiskFull):
            for _ in range(1_000):
                queue.put(b"x" * 10_000)
        count = len(queue)
        ballast.unlink()
        in_thread(lambda: queue.put(b"x" * 10_000))
        assert len(queue) == count + 1
        assert broker.check() == []
        assert len(drained(queue)) == count + 1


def put_while_there_is_room(queue, times):
    """Fill memory, while the disk takes nothing, with bodies of so many times six bytes; return them."""
    bodies = []
    with pytest.raises(qflow.DiskFull, match="could not spill"):
        while True:
            body = b"%06d" % len(bodies) * times
            queue.put(body, timeout_s=0)
            bodies.append(body)
    return bodies


def test_a_full_disk_under_the_spill_store_holds_producers(small_disk):
    """I12, edge 9: what cannot be spilled stays in memory; DiskFull in time; gets, acks and later puts go on."""
    with qflow.open(small_disk / "spool", capacity_bytes=300_000) as broker:
        queue = broker.declare_queue("q", durable=False)
        fill(small_disk)
        bodies = put_while_there_is_room(queue, 1_000)
        assert queue.stats().resident_bytes <= 300_000 + 6_100
        assert broker.check() == []
        with queue.get(0) as delivery:
            assert delivery.body == bodies.pop(0)
        os.unlink(small_disk / "ballast")
        for _ in range(20):
            body = b"%06d" % len(bodies) * 1_000
            in_thread(lambda body=body: queue.put(body))
            bodies.append(body)
        assert queue.stats().spilled_messages > 0
        assert drained(queue) == bodies
        assert broker.check() == []


def test_a_quota_for_which_puts_wait_is_told_of_as_long_as_they_do(spool, faults, caplog):
    """The disk itself has room; the queue does not change meanwhile. One that does not wait is told by its error."""
    with faulty_broker(spool, faults, capacity_bytes=4_000) as broker, inside.paused(broker):
        queue = broker.declare_queue("q", durable=False)
        faults.fail("open", errno.EDQUOT)
        with pytest.raises(qflow.DiskFull, match="quota"):
            while True:
                queue.put(bytes(300), timeout_s=0)
        inside.upkeep(broker)._take_steps()
        assert broker.stats().troubles == {}
        waits = threading.Thread(target=lambda: queue.put(bytes(300)), daemon=True)
        waits.start()
        until(lambda: queue.stats().blocked_putters == 1)
        for _ in range(3):
            inside.is_due(broker)
            inside.upkeep(broker)._take_steps()
            (found,) = [
                one for one in judge(Look(path=broker.path, stats=asdict(broker.stats()))) if one.kind == "maintenance"
            ]
            assert "Disk quota exceeded; free some space or raise the disk quota of this user" in found.sentence
        assert [text for text in caplog.messages if "quota" in text] == caplog.messages[-1:]
        faults.heal()
        waits.join(PATIENCE_S)
        inside.upkeep(broker)._take_steps()
        assert broker.stats().troubles == {}


def test_a_disk_that_took_nothing_is_no_reason_any_more_once_the_queue_is_empty(spool, faults, monkeypatch):
    """Nobody has asked the disk again meanwhile; the queue rests when that was long enough ago."""
    monkeypatch.setattr(spiller, "RECOVERED_S", 0.0)
    with faulty_broker(spool, faults, capacity_bytes=4_000) as broker, inside.paused(broker):
        queue = broker.declare_queue("q", durable=False)
        faults.fail("open", errno.EDQUOT)
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(bytes(300), timeout_s=0)
        faults.heal()
        drained(queue)
        assert has_something_to_do(parts_of(queue))
        inside.upkeep(broker)._take_steps()
        assert parts_of(queue).spiller.error is None
        inside.tick(queue)
        assert not has_something_to_do(parts_of(queue))


def test_what_is_in_memory_comes_out_by_one_though_the_disk_takes_nothing(small_disk):
    """What is charged for each delivery passes on slack, and the tail cannot be spilled for it."""
    with qflow.open(small_disk / "spool", capacity_bytes=300_000) as broker:
        queue = broker.declare_queue("q", durable=False)
        fill(small_disk)
        bodies = put_while_there_is_room(queue, 1)
        held = [queue.get(0) for _ in range(100)]
        held += queue.get_many(5, 0)
        assert [delivery.body for delivery in held] == bodies[: len(held)]
        with pytest.raises(qflow.QueueEmpty):
            while True:
                held.append(queue.get(0))
        assert queue.stats().resident_bytes <= 300_000 * 17 / 16 + 144
        assert broker.check() == []
        queue.ack_many(held)
        assert drained(queue) == bodies[len(held) :]


def test_a_spool_cannot_be_made_on_a_full_disk_and_can_be_later(small_disk):
    """I11, I12: creation on a full disk is a clear error and leaves nothing that hinders the next."""
    ballast = fill(small_disk)
    with pytest.raises(qflow.StorageError):
        qflow.open(small_disk / "spool")
    ballast.unlink()
    with qflow.open(small_disk / "spool") as broker:
        assert broker.declare_queue("q").put(b"x") == 0


def test_a_spool_with_messages_opens_on_a_full_disk(small_disk):
    """I12: a full disk does not keep the owner from draining its queue."""
    with qflow.open(small_disk / "spool") as broker:
        broker.declare_queue("q").put_many([b"a", b"b"])
    fill(small_disk)
    with qflow.open(small_disk / "spool") as broker:
        assert drained(broker.queue("q")) == [b"a", b"b"]


def test_a_snapshot_on_a_disk_that_is_full_then_says_so_and_opens_later(small_disk, tmp_path):
    """It has no free pages."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q").put_many([b"x" * 50_000] * 10)
        broker.snapshot(small_disk / "copy")
    ballast = fill(small_disk)
    with pytest.raises(qflow.DiskFull, match="free some space, and open the spool again"):
        qflow.open(small_disk / "copy")
    ballast.unlink()
    with qflow.open(small_disk / "copy") as broker:
        assert len(broker.queue("q")) == 10


def test_a_log_that_cannot_be_read_for_the_disk_is_full_is_not_damaged(small_disk):
    """Who reads notes that in a file that is mapped: one that other tools did not copy, or on a Btrfs of before."""
    with qflow.open(small_disk / "spool") as broker:
        broker.declare_queue("q").put(b"x")
    (small_disk / "spool" / "log" / "lock.mdb").unlink()
    ballast = fill(small_disk)
    with pytest.raises(qflow.DiskFull, match="free some space"):
        check_spool(small_disk / "spool")
    ballast.unlink()
    assert check_spool(small_disk / "spool") == []


@pytest.mark.parametrize("of_another", [True, False])
@pytest.mark.parametrize("spill", ["files", "segments"])
def test_what_queues_keep_of_spill_files_makes_room_for_what_is_spilled(small_disk, spill, of_another):
    """Files that hold nothing any more are kept to be written again; puts waited for a disk that was full of them.

    Those of a queue itself as well, whose messages are larger now than a file that is kept.
    """
    options = {"segment_bytes": "64KiB"} if spill == "segments" else {}
    with qflow.open(small_disk / "spool", capacity_bytes="512KiB", journal="off", spill=spill, **options) as broker:
        free = os.statvfs(small_disk).f_bavail * 4096
        for name, size in (("one", 20_000), ("other", 20_000) if of_another else ("one", 100_000)):
            queue = broker.declare_queue(name, durable=False)
            count = int(0.8 * free) // size
            for number in range(count):
                queue.put(b"%08d" % number + bytes(size), timeout_s=PATIENCE_S)
            assert [int(body[:8]) for body in drained(queue)] == list(range(count))
        assert broker.check() == []


OPENS_WHERE_LITTLE_IS_FREE = """
import os, sys
import qflow

spool, disk, free_bytes, what = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
with qflow.open(spool) as broker:
    there = os.statvfs(disk)
    with open(f"{disk}/ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, there.f_bavail * there.f_frsize - free_bytes)
    try:
        match what:
            case "compact":
                broker.compact()
            case "snapshot":
                broker.snapshot(f"{disk}/copy")
            case "open":
                qflow.open(f"{disk}/other").close()
    except qflow.DiskFull as error:
        print(error)
"""


@pytest.mark.parametrize("what", ["compact", "snapshot", "open"])
def test_what_makes_a_log_where_little_is_free_ends_no_process(small_disk, what):
    """LMDB maps the table of its readers: a page of it that found no room killed the owner, by SIGBUS."""
    ends = {}
    for pages in range(1, 6):
        spool = small_disk / f"spool {pages}"
        with qflow.open(spool) as broker:
            broker.declare_queue("q").put(b"x")
        arguments = [sys.executable, "-c", OPENS_WHERE_LITTLE_IS_FREE, spool, small_disk, str(4096 * pages), what]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
        ends[pages] = ended.returncode
        assert what == "snapshot" or "free some space" in ended.stdout, (pages, ended)
        for path in small_disk.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
    assert set(ends.values()) == {0}, ends


def test_all_readers_of_a_log_have_their_place_on_the_disk(tmp_path):
    """Of one that is new, is a copy, was compacted, or whose table has holes, as other tools copy it."""
    paths = [tmp_path / "spool", tmp_path / "copy"]
    with qflow.open(paths[0]) as broker:
        broker.snapshot(paths[1])
        broker.compact()
    with open(paths[1] / "log" / "lock.mdb", "rb+") as table:
        size = os.fstat(table.fileno()).st_size
        table.truncate(0)
        table.truncate(size)
    for path in paths:
        with qflow.open(path):
            status = (path / "log" / "lock.mdb").stat()
            assert status.st_blocks * 512 >= status.st_size >= 64 * 4096


def test_a_spool_is_opened_on_a_full_disk_that_somebody_else_fills_on(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock file was emptied before it was written, and its room was taken meanwhile: it could not be locked."""
    spool = small_disk / "spool"
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"x")
    fill(small_disk)
    cut_off = os.ftruncate

    def fill_on() -> None:
        with open(small_disk / "more", "ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda fd, size: (cut_off(fd, size), fill_on()))
        acquire_lock(spool).release()
    assert int((spool / "lock").read_text().split()[0]) == os.getpid()
    (spool / "lock").write_bytes(b"")  # as an earlier version has left it
    fill_on()
    with qflow.open(spool) as broker:
        assert owner_pid(spool) == 0
        assert drained(broker.queue("q")) == [b"x"]


def filled(queue: qflow.Queue, size: int) -> int:
    """Put messages of this size until there is no room for one more; return how many there are."""
    count = 0
    for at_once in (50, 1):
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put_many([b"%08d" % number + bytes(size) for number in range(count, count + at_once)])
                count += at_once
    return count


def hold(queue: qflow.Queue) -> list[qflow.Delivery]:
    """Get all messages, one by one."""
    return [queue.get(0) for _ in range(len(queue))]


def comes_in(queue: qflow.Queue, bodies: list[bytes]) -> bool:
    """Put all of them, if there is room."""
    try:
        queue.put_many(bodies)
    except qflow.DiskFull:
        return False
    return True


@pytest.mark.parametrize(("disk_bytes", "size", "at_once"), [("8m", 1_000, 50), ("16m", 10_000, 1), ("4m", 200, 300)])
def test_scattered_acks_on_a_full_disk_hold_and_give_room_back(disk_bytes, size, at_once, tmp_path):
    """I12, edge 37: messages are acked out of order, many in one commit; all of that holds, and puts come back."""
    with disk_of(disk_bytes, tmp_path / "disk") as disk:
        with qflow.open(disk / "spool") as broker:
            queue = broker.declare_queue("q")
            count = filled(queue, size)
            held = hold(queue)
            random.Random(size).shuffle(held)
            for start in range(0, count // 2, at_once):
                for delivery in held[start : start + at_once - 1]:
                    delivery.ack()
                held[start + at_once - 1].ack(wait=True)
            acked = start + at_once
            assert broker.check() == []
        with qflow.open(disk / "spool") as broker:
            assert broker.recovery.problems == ()
            queue = broker.queue("q")
            assert {delivery.body for delivery in hold(queue)} == {delivery.body for delivery in held[acked:]}
        with qflow.open(disk / "spool") as broker:
            queue = broker.queue("q")
            for delivery in random.Random(1).sample(hold(queue), count - acked):
                delivery.ack()
            until(lambda: comes_in(queue, [bytes(size)] * 50))
            assert len(queue) == 50
            assert broker.check() == []


def test_many_queues_are_acked_in_one_commit_and_closed_on_a_full_disk(small_disk):
    """Edge 37: what one batch settles touches more pages than there are; it is settled in parts."""
    spool = small_disk / "spool"
    with qflow.open(spool) as broker:
        queues = [broker.declare_queue(f"q{number}") for number in range(300)]
        for queue in queues:
            queue.put_many([bytes(1_000)] * 2)
        filled(broker.declare_queue("all"), 1_000)
        held = [queue.get(0) for queue in queues]
        for delivery in held:
            delivery.ack()
        broker.queue("all").get(0).ack(wait=True)
        for queue in queues:
            queue.get(0).nack()
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert broker.recovery.problems == ()
        assert [len(broker.queue(f"q{number}")) for number in range(300)] == [1] * 300


def test_an_ack_that_found_no_room_is_tried_again_by_itself(spool, faults, monkeypatch):
    """Fault 2, edge 37: nobody calls, and it is in the log as soon as there is room for it."""
    with faulty_broker(spool, faults) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"0", b"1", b"2"])
        held = hold(queue)
        faults.fail("make_room", qflow.DiskFull("no room"))
        held[1].ack()
        broker.engine.log.drain()
        with pytest.raises(qflow.DiskFull):
            held[0].ack(wait=True)
        faults.heal()

        def row() -> Row:
            with broker.engine.log.read() as txn:
                return read_row(txn, parts_of(queue).context.owner, 0)

        until(lambda: row().messages == 1)
        assert row().floor == 2


def test_acks_that_share_a_batch_with_a_put_and_a_deletion_are_settled_in_parts_on_a_full_disk(spool, faults):
    """What was deleted waited so that the put would find room; where that found none, the acks were refused with it."""
    with faulty_broker(spool, faults) as broker:
        inside.still(broker)
        log, queue = broker.engine.log, broker.declare_queue("q")
        queue.put_many([b""] * 20_000)
        deleted, filled = broker.declare_queue("deleted"), broker.declare_queue("filled")
        deleted.put_many([b"x" * 3_000] * 300)
        faults.fail("allocate", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            while True:
                filled.put(b"y" * 20_000)
        broker.delete_queue("deleted")
        go_on = threading.Event()
        held = log._order(lambda batch: go_on.wait(PATIENCE_S))
        until(lambda: held.batch is not None)
        more = log.delete(deleted._lanes.logged[0].owner)
        put = filled.submit(b"z" * 20_000)
        acks = log.settle(queue._lanes.logged[0], [Settled(one, one + 1, 1, 0) for one in range(0, 20_000, 10)])
        go_on.set()
        in_thread(lambda: log.wait(acks))
        assert more.batch is acks.batch
        assert isinstance(put.exception(PATIENCE_S), qflow.DiskFull)
        assert acks.error is None
        assert queue._lanes.logged[0].row.messages == 18_000


@pytest.mark.parametrize("free", [0, 30, 200])
def test_parts_hold_all_of_a_batch_once_and_are_small(free):
    """Every range and count is in one part, in order; a part takes half of what is free, or is a single range."""
    chance = random.Random(free)
    settled = {
        lane: [[at, at + 1, 1, 5] for at in chance.sample(range(5_000), chance.choice([0, 1, 70]))]
        for lane in range(40)
    }
    attempts = {lane: [(at, at + 1, 3) for at in chance.sample(range(90), 9)] for lane in range(3)}
    found = cut(settled, attempts, free)
    whole = joined(found)
    assert whole.settled == {lane: sorted(ranges) for lane, ranges in settled.items()}
    assert whole.attempts == attempts
    for part in found:
        ranges = sum(map(len, part.settled.values())) + sum(map(len, part.attempts.values()))
        lanes = len(part.settled) + len(part.attempts)
        assert lanes <= 1 >= ranges or 4 * lanes < min(PAGES_A_PART, free // 2)
    assert sum(len(part.attempts) for part in found[:-1]) == 0 or not found[-1].settled


def test_what_the_last_commit_freed_takes_the_next_put(tmp_path):
    """Edge 37: with nobody committing in between, for LMDB uses pages again from the next commit but one on."""
    with disk_of("4m", tmp_path / "disk") as disk, qflow.open(disk / "spool") as broker:
        queue = broker.declare_queue("q")
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(bytes(300_000))
        filled(queue, 500)
        with inside.paused(broker):
            queue.purge()
            while inside.upkeep(broker).remove_settled():
                pass
            queue.put_many([bytes(1_000)] * 200)
        assert len(queue) == 200
