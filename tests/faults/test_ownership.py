"""Who may open a spool: second processes, forked children, foreign directories, files in the way."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

import qflow
from crash.seams import run_in_child
from faults.seams import drained, in_thread
from qflow import engine as engine_module
from qflow import inspect
from qflow.aio.broker import AsyncBroker
from qflow.storage.lock import lock_holders

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
OPEN_HERE = """
import sys, qflow
try:
    qflow.open(sys.argv[1])
except qflow.QflowError as error:
    print(type(error).__name__, error)
else:
    print("opened")
"""


def tree(path: Path) -> dict[str, int]:
    """Return every path below with its size."""
    return {str(entry): entry.lstat().st_size for entry in path.rglob("*")}


def open_elsewhere(path: Path) -> str:
    """Open a spool in another process; return what it says."""
    return subprocess.check_output([sys.executable, "-c", OPEN_HERE, str(path)], text=True, timeout=60)


def test_a_second_process_is_refused_before_anything_is_wiped(spool, open_spool):
    """Edge 12: SpoolInUse names the owner, and its spill files are still there."""
    broker = open_spool(capacity_bytes=1_000)
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x" * 100] * 30)
    queue.put(b"y")
    assert queue.stats().spilled_messages
    before = tree(spool / "spill")
    said = open_elsewhere(spool)
    assert said.startswith("SpoolInUse")
    assert f"in use by process {os.getpid()}, which has started this one:" in said
    assert tree(spool / "spill") == before
    assert drained(queue) == [b"x" * 100] * 30 + [b"y"]


def test_a_spool_is_free_after_a_close_and_after_a_failed_open(spool):
    """Edge 12: neither a close nor an open that failed keeps the lock."""
    qflow.open(spool).close()
    (spool / "spill").rmdir()
    (spool / "spill").write_bytes(b"")
    with pytest.raises(qflow.StorageError):
        qflow.open(spool)
    (spool / "spill").unlink()
    assert open_elsewhere(spool) == "opened\n"


def test_every_call_in_a_forked_child_says_so_and_the_parent_goes_on(spool, open_spool):
    """Edge 12: ForkedProcess from puts, gets, acks, looks and close; the parent's queue is as it was."""
    broker = open_spool()
    durable, transient = broker.declare_queue("q"), broker.declare_queue("t", durable=False)
    for queue in (durable, transient):
        queue.put_many([b"a", b"b", b"c", b"d"])
    delivery, batch = durable.get(), durable.get_many(2)
    held, task = transient.get(), asyncio.run(AsyncBroker(broker).queue("t").get())

    def child() -> None:
        calls: list[Callable[[], object]] = [
            broker.stats, broker.check, broker.queues, broker.close, lambda: broker.queue("q"),
            lambda: broker.declare_queue("new"), lambda: broker.delete_queue("q"), lambda: durable.submit(b"x"),
            delivery.ack, lambda: delivery.ack(wait=True), delivery.nack, batch.ack, lambda: batch[0].nack(),
            lambda: durable.ack_many([delivery]), lambda: broker.on_event(print),
            held.ack, held.nack, lambda: held.extend(1), lambda: asyncio.run(task.ack()),
        ]  # fmt: skip
        for queue in (durable, transient):
            calls += [
                partial(queue.put, b"x"), partial(queue.put_many, [b"x"]), partial(queue.get, 0),
                partial(queue.get_many, 3, timeout_s=0), lambda queue=queue: list(queue.browse()), partial(len, queue),
                queue.purge, queue.stats,
            ]  # fmt: skip
        for call in calls:
            with pytest.raises(qflow.ForkedProcess):
                call()
        assert delivery.body == b"a"
        with pytest.raises(qflow.SpoolInUse):
            qflow.open(spool)

    assert run_in_child(child) == 0
    delivery.ack(wait=True)
    batch.nack()
    assert drained(durable) == [b"b", b"c", b"d"]
    held.ack()
    asyncio.run(task.ack())
    assert drained(transient) == [b"c", b"d"]


BLOCKS: dict[str, Callable[[qflow.Broker], AbstractContextManager[object]]] = {
    "broker": lambda broker: broker,
    "consumer": lambda broker: broker.queue("empty").consume(lambda delivery: None),
    "subscription": lambda broker: broker.subscribe("s"),
    "transaction": lambda broker: broker.transaction(),
    "delivery": lambda broker: broker.queue("q").get(),
}


@pytest.mark.parametrize("far", [False, True], ids=["owner", "connection"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_forked_child_that_exits_within_a_block_leaves_it_to_the_parent(block, far, spool, open_spool):
    """It exits as it wanted to, and the parent goes on with what the block is of."""
    owner = open_spool()
    queue = owner.declare_queue("q")
    owner.declare_queue("empty")
    owner.declare_stream("s", topics=["t"])
    queue.put(b"a")
    broker = qflow.connect(spool) if far else owner

    def child() -> None:
        with pytest.raises(SystemExit), within:
            sys.exit(0)

    within = BLOCKS[block](broker)
    with within:
        assert run_in_child(child) == 0
        broker.queue("q").put(b"b")
    broker.close()
    with qflow.open(spool) if owner.closed else owner as again:
        assert drained(again.queue("q")) == ([b"b"] if block == "delivery" else [b"a", b"b"])


def test_a_forked_child_that_is_done_with_a_delivery_is_told_that_it_is_not_acked(open_spool):
    """It would take its work for acked."""
    queue = open_spool().declare_queue("q")
    queue.put(b"a")
    within = queue.get()

    def child() -> None:
        with pytest.raises(qflow.ForkedProcess), within:
            pass

    with within:
        assert run_in_child(child) == 0


def test_a_forked_child_that_goes_on_through_the_log_is_refused_and_the_parent_is_not(spool, open_spool):
    """As one that a signal's handler forks: it had the parent's place among the readers of the log."""
    made = open_spool()
    made.declare_queue("q").put_many([bytes(1_000)] * 3_000)
    made.declare_stream("s", topics=["t"])
    made.publish_many([("t", bytes(100_000))] * 50)
    made.close()
    broker = open_spool()
    entries, messages = broker.queue("q").browse(), broker.stream("s").query()
    next(entries), next(messages)

    def child() -> None:
        for through in (entries, messages):
            with pytest.raises(qflow.ForkedProcess):
                list(through)
        for read in (lambda: broker.stream("s").last(), lambda: broker.engine.log.facts("room")):
            with pytest.raises(qflow.ForkedProcess):
                read()

    assert run_in_child(child) == 0
    assert len(list(entries)) == 3_000 - 1
    assert len(list(messages)) == 50 - 1


def test_a_broker_that_nobody_remembers_is_refused_in_a_forked_child(spool):
    """Its threads are at work all the same, and its queues are there; the child must not keep its lock, either."""
    queue = qflow.open(spool).declare_queue("q")
    queue.put(b"a")
    gc.collect()

    def child() -> None:
        for call in (partial(queue.put, b"x"), partial(queue.get, 0)):
            with pytest.raises(qflow.ForkedProcess):
                call()

    try:
        assert run_in_child(child) == 0
        assert queue.get(0).body == b"a"
    finally:
        for engine in [one for one in engine_module._engines if one.spool.path == str(spool)]:
            engine.close()


def test_a_forked_child_cannot_own_what_was_open_at_the_fork_and_is_told_why(spool, open_spool):
    """Not after its parent has closed it, either: LMDB opens a log once in a process, and keeps that in a child."""
    broker = open_spool()
    broker.declare_queue("q").put(b"a")
    forked, closed = os.pipe(), os.pipe()

    def close() -> None:
        os.read(forked[0], 1)
        broker.close()
        os.write(closed[1], b"x")

    def child() -> None:
        os.write(forked[1], b"x")
        os.read(closed[0], 1)
        for call in (lambda: qflow.open(spool), lambda: inspect.read_spool(spool)):
            with pytest.raises(qflow.ForkedProcess, match=r"close it before forking, or start .* \(spawn, exec\)"):
                call()
        with pytest.raises(qflow.ForkedProcess, match=r"close it before forking, or start .* \(spawn, exec\)"):
            broker.stats()

    thread = threading.Thread(target=close)
    thread.start()
    assert run_in_child(child) == 0
    thread.join()
    for descriptor in (*forked, *closed):
        os.close(descriptor)
    with qflow.open(spool) as again:
        assert drained(again.queue("q")) == [b"a"]


def test_a_child_that_was_forked_behind_a_close_owns_the_spool(spool, open_spool):
    """And is told of a log that it has open itself."""
    broker = open_spool()
    broker.declare_queue("q").put(b"a")
    broker.close()

    def child() -> None:
        with qflow.open(spool) as mine:
            assert drained(mine.queue("q")) == [b"a"]
            with pytest.raises(qflow.StorageError, match="is open in this process"):
                inspect.read_spool(spool)

    assert run_in_child(child) == 0


def test_a_fork_while_other_threads_put_does_not_hang_the_child(spool, open_spool):
    """Edge 12: locks that other threads held at the moment of the fork are not waited for."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    stop = threading.Event()

    def produce() -> None:
        while not stop.is_set():
            queue.put(b"x")

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()

    def child() -> None:
        for call in (lambda: queue.put(b"y"), broker.close, lambda: queue.get(0)):
            with pytest.raises(qflow.ForkedProcess):
                call()

    codes = [run_in_child(child) for _ in range(10)]
    stop.set()
    for thread in threads:
        thread.join(60)
    assert codes == [0] * 10


def test_a_killed_parent_frees_the_spool_although_a_child_lives(tmp_path):
    """Edge 12: after SIGKILL of the owner its forked child does not keep others out."""
    script = """
import os, sys, qflow
broker = qflow.open(sys.argv[1])
broker.declare_queue("q").put(b"x")
if os.fork() == 0:
    os.write(1, b"child\\n")
    os.read(0, 1)
    os._exit(0)
os.wait()
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "spool")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"child\n"
        owner.kill()
        assert owner.wait(60) == -9
        with qflow.open(tmp_path / "spool") as broker:
            assert len(broker.queue("q")) == 1


def test_a_foreign_directory_is_refused_and_untouched(tmp_path):
    """Edge 12: a directory that holds something else is not made a spool."""
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(qflow.InvalidArgument, match=r"thesis\.tex"):
        qflow.open(tmp_path)
    assert tree(tmp_path) == {str(tmp_path / "thesis.tex"): 13}


def test_files_of_others_inside_a_spool_are_left_alone(spool):
    """I8: what somebody put into a spool, its spill directory included, is still there after wipes."""
    qflow.open(spool).close()
    strange = [spool / "notes.txt", spool / "spill" / "notes.txt", spool / "wiping" / "notes.txt"]
    for path in strange:
        path.write_text("mine")
    with qflow.open(spool) as broker:
        broker.engine.spool.wiper.step(1_000)
    assert all(path.read_text() == "mine" for path in strange)


@pytest.mark.parametrize("name", ["", "log", "spill", "wiping", "lock"])
@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "FIFO"])
def test_something_else_in_the_place_of_ours_is_a_clear_error(name, kind, spool, tmp_path):
    """Edges 10, 12: a file, link or FIFO where a directory (or the lock) should be: it stays."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = spool / name if name else spool
    if name:
        qflow.open(spool).close()
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    if (name, kind) in (("lock", "file"), ("", "link")):
        pytest.skip("a file is what the lock is, and a link to a directory may lead to a spool")
    if kind == "file":
        path.write_bytes(b"precious")
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(qflow.StorageError if name else qflow.InvalidArgument) as caught:
        in_thread(lambda: qflow.open(spool))
    assert str(path) in str(caught.value)
    status = path.lstat()
    assert {"file": stat.S_ISREG, "FIFO": stat.S_ISFIFO}.get(kind, stat.S_ISLNK)(status.st_mode)
    assert list(elsewhere.iterdir()) == []


def test_a_spool_is_private(spool, open_spool):
    """What is in a queue is for its owner's eyes: directories 0700, files 0600 or less."""
    broker = open_spool(capacity_bytes=300)
    broker.declare_queue("q", durable=False).put_many([b"x" * 100] * 9)
    for path in [spool, *spool.rglob("*")]:
        assert path.lstat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("has_holes", [False, True])
def test_an_opening_that_is_refused_leaves_a_reader_in_this_process_its_place(spool: Path, has_holes: bool) -> None:
    """Whoever closes a file gives up all locks of its process on it: the next owner freed the pages that it reads."""
    with qflow.open(spool) as broker:
        broker.declare_stream("s", topics=["#"])
    table = spool / "log" / "lock.mdb"
    if has_holes:  # as other tools copy it
        size = table.stat().st_size
        os.truncate(table, 0)
        os.truncate(table, size)
    with inspect.read_stream(spool, "s", on_gap=pytest.fail):
        assert lock_holders(str(table)) == [os.getpid()]
        with pytest.raises(qflow.StorageError, match="is open in this process"):
            qflow.open(spool)
        assert lock_holders(str(table)) == [os.getpid()]


def test_a_log_that_is_open_in_this_process_is_asked_of_its_broker(spool: Path) -> None:
    """It is not damaged, so nobody should try repairs."""
    with qflow.open(spool), pytest.raises(qflow.StorageError, match="ask the broker") as raised:
        inspect.check_spool(spool)
    assert "repairs" not in str(raised.value)


CLOSED = """
import ctypes, os, sys, qflow
os.closerange(0, 3)
broker = qflow.{opened}(sys.argv[1])
queue = broker.declare_queue("q")
queue.put(b"a")
{then}
ctypes.CDLL(None).perror(b"a C library")
for descriptor in 0, 1, 2:
    try:
        os.write(descriptor, b"what a program prints")
    except OSError:
        pass
queue.put(b"b")
broker.close()
"""


LOOKED_TOO_EARLY = """
from qflow.storage import environment
occupy = environment.occupy_standard
environment.occupy_standard = lambda: setattr(environment, "occupy_standard", occupy)
os.closerange(0, 3)
broker.compact()
"""
"""A file of another thread had them when it was looked whether they are free."""


@pytest.mark.parametrize("then", ["", "os.closerange(0, 3); broker.compact()", LOOKED_TOO_EARLY])
def test_what_a_program_prints_whose_standard_descriptors_are_closed_is_not_written_into_its_log(spool, then):
    """A daemon may have closed them, before it opens the spool or while it has it open."""
    program = [sys.executable, "-c", CLOSED.format(opened="open", then=then), str(spool)]
    assert subprocess.run(program, timeout=60).returncode == 0
    with qflow.open(spool) as broker:
        assert drained(broker.queue("q")) == [b"a", b"b"]


def test_what_a_client_prints_whose_standard_descriptors_are_closed_is_not_sent_to_the_owner(spool, open_spool):
    """Its socket would have the number of one of them."""
    broker = open_spool()
    program = [sys.executable, "-c", CLOSED.format(opened="connect", then=""), str(spool)]
    assert subprocess.run(program, timeout=60).returncode == 0
    assert drained(broker.queue("q")) == [b"a", b"b"]


def test_a_reader_whose_standard_descriptors_are_closed_looks_as_any_other(spool):
    """The child that reads the log for it answers through a pipe, which is no other's number."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"a")
    look = "import os, sys; os.closerange(1, 3); from qflow import inspect; sys.exit(len(inspect.check_spool(sys.argv[1])))"
    assert subprocess.run([sys.executable, "-c", look, str(spool)], timeout=60).returncode == 0


def test_no_file_of_a_spool_is_open_in_a_program_that_is_started(spool, open_spool):
    """It would keep the log on the disk when `compact` has replaced it."""
    broker = open_spool()
    broker.declare_queue("q").put(b"a")

    def inherited() -> list[str]:
        look = "import os\nfor fd in os.listdir('/proc/self/fd'):\n if os.path.exists(f'/proc/self/fd/{fd}'):\n  print(os.readlink(f'/proc/self/fd/{fd}'))"
        said = subprocess.check_output([sys.executable, "-c", look], close_fds=False, text=True, timeout=60)
        return [path for path in said.splitlines() if path.startswith(str(spool))]

    assert inherited() == []
    broker.compact()
    assert inherited() == []
