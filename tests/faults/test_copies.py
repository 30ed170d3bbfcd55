"""Snapshots and compactions whose file operations fail, are interrupted, find no room, or meet each other."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import lmdb
import pytest

import inside
import qflow
from crash.seams import SteppedFiles, Steps
from faults.seams import PATIENCE_S, Faults, drained, faulty_broker, in_thread, open_faulty
from faults.test_full_disk import fill, small_disk  # noqa: F401  (a fixture)
from qflow.broker import Broker, make_broker
from qflow.config import BrokerSettings
from qflow.storage import environment
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.last_commit import LastCommit
from qflow.storage.log import snapshots
from qflow.storage.log.batch import Order
from unit.clocks import until

BODY = b"x" * 33_000
KEPT = [b"%d" % number for number in range(3)]


@pytest.fixture(autouse=True)
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer takes no step when callers have been told."""
    monkeypatch.setattr(LastCommit, "keep", lambda *_: None)


class Striking(Steps):
    """Steps of which one raises, once armed."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.error = error

    def arm(self, step: int) -> None:
        self.kill_at = len(self.taken) + step

    def take(self, name: str) -> None:
        self.taken.append(name)
        if len(self.taken) == self.kill_at + 1:
            raise self.error()


def make_spool(path: Path) -> None:
    """Make a spool with something to give back, and a little to keep."""
    with qflow.open(path) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([BODY] * 100)
        queue.purge()
        queue.put_many(KEPT)


def open_striking(path: Path, steps: Striking) -> Broker:
    """Open a spool whose file operations may fail, without maintenance beside."""
    broker = make_broker(path, BrokerSettings(), files=SteppedFiles(steps))
    inside.still(broker)
    return broker


ERRORS: list[Callable[[], BaseException]] = [lambda: OSError(errno.EIO, "Input/output error"), KeyboardInterrupt]


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
def test_a_compaction_that_fails_at_any_step_loses_nothing(error, spool):
    """It goes on with one log or the other, or takes nothing more; what was confirmed is there after the next open."""
    make_spool(spool)
    expected = list(KEPT)
    outcomes = set()
    for step in range(200):
        steps = Striking(error)
        broker = open_striking(spool, steps)
        queue = broker.queue("q")
        steps.arm(step)
        try:
            broker.compact()
            outcome = "compacted"
        except (qflow.StorageError, KeyboardInterrupt):
            outcome = "refused"
        struck = len(steps.taken) > steps.kill_at
        steps.arm(2**60)
        body = b"new %d" % step
        try:
            queue.put(body)
            expected.append(body)
        except qflow.BrokerFailed:
            assert outcome == "refused"
            outcome = "failed"
        assert (spool / "log").is_dir()
        broker.close()
        with qflow.open(spool) as again:
            assert sorted(name for name in os.listdir(spool) if name.startswith("log")) == ["log"]
            assert [entry.sequence for entry in again.queue("q").browse()] == list(range(100, 100 + len(expected)))
            assert again.check() == []
        outcomes.add(outcome)
        if not struck:
            break
    else:
        raise AssertionError("the compaction never ended")
    assert outcomes == {"compacted", "refused", "failed"}
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == expected


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
def test_a_snapshot_that_fails_at_any_step_leaves_no_spool(error, spool, tmp_path):
    """No copy stays, whole or in part; the broker goes on, and the next one can be made in the same place."""
    make_spool(spool)
    copy = tmp_path / "copy"
    for step in range(200):
        steps = Striking(error)
        broker = open_striking(spool, steps)
        steps.arm(step)
        try:
            broker.snapshot(copy)
        except (qflow.StorageError, KeyboardInterrupt):
            assert not copy.exists() or set(os.listdir(copy)) <= {"lock"}
        struck = len(steps.taken) > steps.kill_at
        steps.arm(2**60)
        if struck:
            broker.snapshot(copy)
        broker.close()
        with qflow.open(copy) as again:
            assert drained(again.queue("q")) == KEPT
        for found in (copy / "log", copy / "spill", copy / "wiping"):
            for name in os.listdir(found):
                os.unlink(found / name)
            found.rmdir()
        for name in os.listdir(copy):
            os.unlink(copy / name)
        copy.rmdir()
        if not struck:
            return
    raise AssertionError("the snapshot never ended")


def test_each_step_is_on_the_disk_before_the_next(spool, tmp_path):
    """A copy before it gets its name; its name before anything is committed to it."""
    make_spool(spool)
    steps = Striking(KeyboardInterrupt)
    broker = open_striking(spool, steps)

    def synced(work: Callable[[], object]) -> list[str]:
        before = len(steps.taken)
        work()
        return [name for name in steps.taken[before:] if name.startswith("sync") or name == "rename"]

    assert synced(broker.compact) == ["sync_file", "sync_directory", "rename", "rename", "sync_opened"]
    made = synced(lambda: broker.snapshot(tmp_path / "copy"))
    assert made == ["sync_directory", "sync_file", "sync_directory", "rename", "sync_directory"]
    broker.close()


def test_descriptors_that_run_out_when_a_compacted_log_has_its_place_cost_nothing(spool):
    """The broker goes on: what is to be synced then is open before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    class Scarce(Files):
        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            if os.path.basename(new) == "log":
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))

    make_spool(spool)
    with make_broker(spool, BrokerSettings(), files=Scarce()) as broker:
        inside.still(broker)
        try:
            broker.compact()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        broker.queue("q").put(b"new")
        assert drained(broker.queue("q")) == [*KEPT, b"new"]


@pytest.mark.parametrize(("number", "remedy"), [(errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "ulimit -v")])
def test_what_lmdb_is_short_of_is_named_with_what_to_do(number, remedy, spool, tmp_path):
    """It copies and verifies with a thread of its own; a transaction has in memory what it writes."""

    class Short:
        def copyfd(self, fd: int, *, compact: bool) -> None:
            raise lmdb.Error(f"mdb_env_copyfd3: {os.strerror(number)}")

    make_spool(spool)
    env = Environment(str(spool / "log"), Files())
    real, env._env = env._env, Short()
    try:
        with pytest.raises(qflow.StorageError, match=rf"spool/log could not be copied: .*{remedy}"):
            env.copy_to(None)
        with pytest.raises(qflow.StorageError, match=rf"new log at {tmp_path}.* could not be written: .*{remedy}"):
            env.copy_to(str(tmp_path))
    finally:
        env._env = real
        env.close()
    assert remedy in str(environment.log_error(lmdb.Error(f"mdb_put: {os.strerror(number)}"), str(spool), "written"))


def test_no_room_for_a_copy_is_a_full_disk_and_nothing_else(spool, tmp_path):
    """LMDB's own writes find no room: DiskFull, nothing left behind, and the log goes on."""

    class Full(Files):
        def __init__(self) -> None:
            self.open = self.open_full

        def open_full(self, path: str, flags: int, mode: int) -> int:
            return os.open("/dev/full" if path.endswith("log.new/data.mdb") else path, flags & ~os.O_EXCL, mode)

    make_spool(spool)
    with make_broker(spool, BrokerSettings(), files=Full()) as broker:
        with pytest.raises(qflow.DiskFull, match="free some space"):
            broker.snapshot(tmp_path / "copy")
        with pytest.raises(qflow.DiskFull, match="free some space"):
            broker.compact()
        assert not (tmp_path / "copy").exists()
        assert not (spool / "log.new").exists()
        broker.queue("q").put(b"new")
        assert drained(broker.queue("q")) == [*KEPT, b"new"]
        assert broker.check() == []


def test_no_room_for_the_reserve_of_a_compacted_log_is_told_as_such(spool):
    """An error that users know, which says what there is no room for; the log goes on."""
    faults = Faults()
    make_spool(spool)
    with faulty_broker(spool, faults) as broker:
        inside.still(broker)
        faults.fail("allocate", errno.ENOSPC, after=1)  # behind the table of readers
        with pytest.raises(qflow.DiskFull, match="no room for the compacted log.*free some space") as raised:
            broker.compact()
        assert type(raised.value) is qflow.DiskFull
        faults.heal()
        assert not (spool / "log.new").exists()
        assert drained(broker.queue("q")) == KEPT
        assert broker.check() == []


def test_a_disk_that_is_really_full_refuses_copies(small_disk):  # noqa: F811
    """A compaction, and a snapshot on the same disk: the log goes on with acks, and with puts once there is room."""
    with qflow.open(small_disk / "spool") as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"x" * 10_000] * 60)
        ballast = fill(small_disk)
        with pytest.raises(qflow.DiskFull):
            broker.snapshot(small_disk / "copy")
        with pytest.raises(qflow.DiskFull):
            broker.compact()
        assert sorted(os.listdir(small_disk)) == ["ballast", "spool"]
        assert not (small_disk / "spool" / "log.new").exists()
        queue.get().ack(wait=True)
        ballast.unlink()
        assert broker.snapshot(small_disk / "copy").messages == 59
        assert broker.check() == []


def test_acks_find_their_reserve_in_a_compacted_log(small_disk):  # noqa: F811
    """What the log of before had set aside for them, the new one has, too: the disk may be full at once."""
    with qflow.open(small_disk / "spool") as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"x" * 1_000] * 60)
        broker.compact()
        ballast = fill(small_disk)
        for _ in range(20):
            queue.get(0).ack(wait=True)
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(b"x" * 1_000)
        ballast.unlink()


def test_commits_wait_for_a_compaction_and_gets_do_not(spool):
    """While the copy is written: a put waits and is done afterwards; messages come out; `close` waits, too."""
    faults = Faults()
    copying, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        copying.set()
        assert go_on.wait(PATIENCE_S)

    faults.before["copy_to"] = pause
    make_spool(spool)
    broker = open_faulty(spool, faults)
    queue = broker.queue("q")
    compacting = threading.Thread(target=broker.compact)
    compacting.start()
    assert copying.wait(PATIENCE_S)
    confirmed = queue.submit(b"new")
    assert queue.get(0).body == b"0"
    assert broker.stats().messages == 3
    with broker.engine.log.read() as txn:
        assert txn.stat()["entries"]
    assert not confirmed.done()
    closing = threading.Thread(target=broker.close)
    closing.start()
    go_on.set()
    assert confirmed.result(PATIENCE_S) == 103
    compacting.join(PATIENCE_S)
    closing.join(PATIENCE_S)
    with qflow.open(spool) as again:
        assert again.recovery.clean
        assert drained(again.queue("q")) == [*KEPT, b"new"]


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "free again"])
def test_a_disk_that_was_full_keeps_no_commit_waiting_for_a_snapshot(is_full, spool, tmp_path):
    """The map ended with the file then, and could not be grown beside a copy, which pins what could be written over."""
    faults = Faults()
    copying, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        copying.set()
        assert go_on.wait(2 * PATIENCE_S)

    with faulty_broker(spool, faults, capacity_bytes="16MiB") as broker:
        queue = broker.declare_queue("q")
        faults.fail("allocate", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(BODY)
        acked = iter(queue.get_many(1000))
        for _ in range(10):
            next(acked).ack(wait=True)
        if not is_full:
            faults.heal()
        faults.before["copy_to"] = pause

        def take() -> None:
            with suppress(qflow.DiskFull):  # it needs room, too
                broker.snapshot(tmp_path / "copy")

        taking = threading.Thread(target=take)
        taking.start()
        try:
            assert copying.wait(PATIENCE_S)
            for _ in range(30):
                in_thread(lambda: next(acked).ack(wait=True) if is_full else queue.put(BODY))
        finally:
            go_on.set()
            taking.join(PATIENCE_S)
        in_thread(lambda: next(acked).ack(wait=True))
        if is_full:
            with pytest.raises(qflow.DiskFull):
                while True:
                    queue.put(BODY)
        assert broker.check() == []


def test_a_map_that_cannot_end_later_before_a_snapshot_ends_the_log(spool, tmp_path):
    """It may not be there at all any more, and who reads it would kill the process: as where a batch has it grown."""
    faults = Faults()
    with faulty_broker(spool, faults, capacity_bytes="16MiB") as broker:
        queue = broker.declare_queue("q")
        faults.fail("allocate", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            while True:
                queue.put(BODY)
        faults.heal()
        faults.fail("grow_map", lmdb.Error("Cannot allocate memory"))
        with pytest.raises(qflow.StorageError, match="Cannot allocate memory"):
            broker.snapshot(tmp_path / "copy")
        with pytest.raises(qflow.BrokerFailed):
            queue.put(b"late")


def test_nobody_waits_for_a_snapshot_but_who_must(spool, tmp_path):
    """Commits go on while it is written; a compaction begins after it, and keeps no commit waiting for that."""
    faults = Faults()
    copying, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        if not copying.is_set():
            copying.set()
            assert go_on.wait(PATIENCE_S)

    faults.before["copy_to"] = pause
    make_spool(spool)
    with faulty_broker(spool, faults) as broker:
        queue = broker.queue("q")
        taken: list[object] = []
        threads = [threading.Thread(target=lambda: taken.append(broker.snapshot(tmp_path / "copy")))]
        threads[0].start()
        assert copying.wait(PATIENCE_S)
        threads.append(threading.Thread(target=lambda: taken.append(broker.compact())))
        threads[1].start()
        for number in range(20):
            in_thread(lambda body=b"%d" % number: queue.put(body))
        in_thread(lambda: queue.get(0).ack(wait=True))
        late = Order(lambda batch: None, lambda env, still: taken.append("never"))
        broker.engine.log._handing.hand_over(late)  # as one that was about to be when the snapshot began
        broker.engine.log.wait(late)
        assert "try again" in str(late.error)
        assert taken == []
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [type(report).__name__ for report in taken] == ["SnapshotReport", "CompactionReport"]
        assert len(queue) == 22
        assert broker.check() == []


def test_the_log_is_exchanged_while_nobody_reads(spool):
    """The copy is written beside readers; what they have open is only closed when they are gone."""
    make_spool(spool)
    with qflow.open(spool) as broker:
        seen: list[list[str]] = []

        @contextmanager
        def still() -> Iterator[None]:
            seen.append(sorted(name for name in os.listdir(spool) if name.startswith("log")))
            yield
            seen.append(sorted(name for name in os.listdir(spool) if name.startswith("log")))

        def work(env: Environment, reading: object) -> None:
            assert reading is broker.engine.log._reading
            snapshots.compact(env, str(spool), Files(), broker.uuid, still(), ending)

        with ExitStack() as ending:
            broker.engine.log.alone(work)
        assert seen == [["log", "log.new"], ["log", "log.old"]]
        assert drained(broker.queue("q")) == KEPT


def test_the_file_of_before_is_given_back_when_commits_go_on(spool, monkeypatch):
    """That took two thirds of the time that a compaction held them: the last that is open of a removed file does it."""
    make_spool(spool)
    gone: list[tuple[bool, int, int]] = []
    close = Files.close

    def look(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not status.st_nlink:
            with Path("/proc/self/maps").open() as maps:
                mapped = sum(f" {status.st_ino} " in line for line in maps)
            gone.append((broker.engine.log._writer.is_me, status.st_ino, mapped))
        close(descriptor)

    with qflow.open(spool) as broker:
        before = os.stat(spool / "log" / "data.mdb").st_ino
        monkeypatch.setattr(Files, "close", staticmethod(look))
        broker.compact()
        assert (False, before, 0) in gone
        assert os.stat(spool / "log" / "data.mdb").st_ino != before
        assert drained(broker.queue("q")) == KEPT


def test_close_waits_for_a_snapshot(spool, tmp_path):
    """It is whole, and the log is closed after it; a later one is refused."""
    faults = Faults()
    copying = threading.Event()
    order: list[str] = []

    def pause() -> None:
        copying.set()
        until(lambda: broker.engine.log._handing.ended)

    faults.before["copy_to"] = pause
    make_spool(spool)
    broker = open_faulty(spool, faults)
    env = broker.engine.log._env
    copy_to, close = env.copy_to, env.close
    env.copy_to = lambda directory: (copy_to(directory), order.append("copied"))
    env.close = lambda: (order.append("closed"), close())
    taking = threading.Thread(target=broker.snapshot, args=[tmp_path / "copy"])
    taking.start()
    assert copying.wait(PATIENCE_S)
    in_thread(broker.close)
    taking.join(PATIENCE_S)
    assert order == ["copied", "closed"]
    with pytest.raises(qflow.BrokerClosed):
        broker.engine.log.alone(lambda env, still: None)
    with qflow.open(tmp_path / "copy") as copy:
        assert drained(copy.queue("q")) == KEPT


def test_a_failed_log_is_not_copied(spool, tmp_path):
    """What is in doubt must not become a spool: BrokerFailed, as for puts."""
    faults = Faults()
    make_spool(spool)
    broker = open_faulty(spool, faults)
    faults.fail("commit", environment.LmdbError("mdb_txn_commit: Input/output error"), times=1)
    with pytest.raises(qflow.InDoubt):
        broker.queue("q").put(b"doubtful")
    with pytest.raises(qflow.BrokerFailed):
        broker.snapshot(tmp_path / "copy")
    with pytest.raises(qflow.BrokerFailed):
        broker.compact()
    assert not (tmp_path / "copy").exists()
    broker.close()


def test_what_a_killed_reader_pinned_is_let_go_while_the_broker_runs(spool):
    """A `qflow snapshot` that is killed must not make the log grow until the next open."""
    make_spool(spool)
    reading = (
        "import sys; from qflow.storage.environment import Environment; from qflow.storage.files import Files\n"
        "env = Environment(sys.argv[1], Files(), read_only=True); txn = env.begin()\n"
        "print('reading', flush=True); sys.stdin.read()"
    )
    with qflow.open(spool) as broker:
        inside.still(broker)
        child = subprocess.Popen(
            [sys.executable, "-c", reading, str(spool / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"reading\n"
        env: Environment = broker.engine.log._env
        assert env.forget_dead_readers() == 0
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert env.forget_dead_readers() == 1
        broker.engine.log.forget_dead_readers()
        assert env.forget_dead_readers() == 0


def test_maintenance_forgets_dead_readers(spool, monkeypatch):
    """Each second, with the statistics."""
    asked = threading.Event()
    monkeypatch.setattr(Environment, "forget_dead_readers", lambda self: asked.set())
    with qflow.open(spool):
        assert asked.wait(PATIENCE_S)
