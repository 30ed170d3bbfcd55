"""Pages of LMDB that are not what it wrote: they have no checksum, and it may say so, say nothing, or crash."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

import qflow
import qflow.aio
from doors.command_line import CommandLine, error_line
from qflow import inspect
from qflow.inspect import child
from qflow.inspect.child import in_child
from qflow.queues.queue import parts_of
from qflow.storage.log import batch_writing
from qflow.streams.subscription import member_of

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
PAGE = 4096
BRANCH, LEAF = 1, 2
QUEUES = [f"queue {number}" for number in range(10)]
BODIES = [b"%03d" % number * 40 for number in range(60)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool whose queues fill some pages each, with acked messages between others; and a stream."""
    spool = tmp_path_factory.mktemp("source") / "spool"
    with qflow.open(spool, journal="off") as broker:
        for name in QUEUES:
            broker.bind(broker.declare_queue(name), "all")
        for body in BODIES:  # into so many queues at once, in blocks that lie in pages of the tree
            broker.publish("all", body)
        for name in QUEUES:
            queue = broker.queue(name)
            batch = queue.get_many(len(BODIES))
            queue.ack_many([batch[index] for index in range(0, len(BODIES), 2)], wait=True)
            batch.nack()
        stream = broker.declare_stream("stream", topics=["t/#"])
        for number in range(40):
            broker.publish(f"t/{number % 3}", b"x" * 300)
        assert stream.stats().messages == 40
    env = lmdb.open(str(spool / "log"), readonly=True, lib_version=0)
    os.truncate(spool / "log" / "data.mdb", (env.info()["last_pgno"] + 1) * PAGE)  # without what is reserved
    env.close()
    return spool


def pages_in_use(spool: Path) -> Iterator[tuple[int, int]]:
    """Yield the numbers of tree pages the log uses, with their flags: those that LMDB comes by from the root."""
    data = (spool / "log" / "data.mdb").read_bytes()
    env = lmdb.open(str(spool / "log"), readonly=True, lib_version=0)
    newest = env.info()["last_txnid"] % 2
    env.close()
    (root,) = struct.unpack_from("<Q", data, newest * PAGE + 16 + 24 + 48 + 40)
    waiting = [root]
    while waiting:
        number = waiting.pop()
        flags, lower = struct.unpack_from("<HH", data, number * PAGE + 10)
        yield number, flags
        if flags & BRANCH:
            for index in range((lower - 16) // 2):
                (at,) = struct.unpack_from("<H", data, number * PAGE + 16 + 2 * index)
                low, high, top = struct.unpack_from("<HHH", data, number * PAGE + at)
                waiting.append(low | high << 16 | top << 32)


def damaged(source: Path, target: Path, page: int, change: Any) -> Path:
    """Return a copy of a spool with a page of its log changed."""
    shutil.copytree(source, target)
    data = bytearray((target / "log" / "data.mdb").read_bytes())
    part = bytearray(data[page * PAGE : (page + 1) * PAGE])
    change(part)
    data[page * PAGE : (page + 1) * PAGE] = part
    (target / "log" / "data.mdb").write_bytes(data)
    return target


def another_kind(page: bytearray) -> None:
    """Make a leaf a branch, or a branch a leaf."""
    page[10] ^= BRANCH | LEAF


def of_no_kind(page: bytearray) -> None:
    """Take from a page that it is a leaf, or a branch: LMDB asserts that it is one."""
    page[10] &= ~(BRANCH | LEAF)


def emptied(page: bytearray) -> None:
    """What a block device that loses a write, or a sector, leaves."""
    page[:] = bytes(PAGE)


def pointing_away(page: bytearray) -> None:
    """Set the children of a branch far behind the end of the file; leaves get nodes outside the page."""
    for at in range(16, 40, 2):
        page[at : at + 2] = b"\xf0\xff"


CHANGES = [another_kind, of_no_kind, emptied, pointing_away]


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_looks_gets_problems_or_an_error_of_ours_and_survives(change, source, tmp_path):
    """The check goes on with what it can read, for no part is named twice or stops the others."""
    named = 0
    pages = [page for page, _ in pages_in_use(source)][::3]
    for page in pages:
        spool = damaged(source, tmp_path / str(page), page, change)
        for look in (inspect.read_spool, inspect.check_spool, lambda path: inspect.read_message(path, QUEUES[3], 31)):
            try:
                found = look(spool)
            except (qflow.CorruptionError, qflow.NotFound):
                named += look is inspect.check_spool
            else:
                named += look is inspect.check_spool and bool(found)
    assert named == len(pages)


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_of_broken_pages_says_that_they_are(change, source, tmp_path):
    """It is no fault of the disk that takes the copy."""
    for page in [page for page, _ in pages_in_use(source)][::4]:
        spool = damaged(source, tmp_path / str(page), page, change)
        try:
            copied = inspect.copy_spool(spool, tmp_path / f"{page} copied")
            problems = copied.problems or inspect.check_spool(copied.path)
        except qflow.CorruptionError:
            continue
        assert problems, page


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EIO, errno.ENOSPC])
def test_a_copy_that_is_led_out_of_the_file_says_so(number, source, monkeypatch, tmp_path):
    """By the number of a page: the kernel finds no memory there. What the disk refuses is its own matter."""

    class Env:
        def copyfd(self, fd: int, compact: bool) -> None:
            raise lmdb.Error(f"mdb_env_copyfd3: {os.strerror(number)}")

        def __getattr__(self, name: str) -> object:
            return getattr(env, name)

    with qflow.open(shutil.copytree(source, tmp_path / "spool")) as broker:
        environment = broker.engine.log._env
        env = environment._env
        monkeypatch.setattr(environment, "_env", Env())
        with pytest.raises(qflow.CorruptionError if number == errno.EFAULT else qflow.StorageError) as failure:
            environment.copy_to(None)
        monkeypatch.undo()
    assert isinstance(failure.value, qflow.CorruptionError) == (number == errno.EFAULT)


def test_broken_pages_that_tell_what_is_free_are_found(source, tmp_path):
    """Nobody reads them but who writes: the spool could not be opened."""
    data = (source / "log" / "data.mdb").read_bytes()
    newest = max((0, 1), key=lambda place: data[place * PAGE + 144 : place * PAGE + 152][::-1])
    (free,) = struct.unpack_from("<Q", data, newest * PAGE + 16 + 24 + 40)
    spool = damaged(source, tmp_path / "spool", free, emptied)
    (problem,) = inspect.check_spool(spool)
    assert "are damaged, it could not be copied" in problem
    with pytest.raises(qflow.CorruptionError):
        qflow.open(spool)


def use(spool: Path) -> dict[str, bool]:
    """Use every queue of a spool; return which were served whole. Any error but `CorruptionError` is a failure."""
    served = {}
    broker = qflow.open(spool)
    for name in QUEUES:
        served[name] = False
        with suppress(qflow.CorruptionError):
            queue = broker.queue(name)
            batch = queue.get_many(len(BODIES), timeout_s=0)
            bodies = [message.body for message in batch]
            queue.ack_many([batch[index] for index in range(0, len(batch), 2)], wait=True)
            queue.ack_many([batch[index] for index in range(1, len(batch), 2)], wait=True)
            queue.put(b"new")
            with queue.get(timeout_s=0) as delivery:
                bodies.append(delivery.body)
            served[name] = bodies == [*BODIES[1::2], b"new"]
    with suppress(qflow.CorruptionError):
        broker.publish("t/1", b"y")
    with suppress(qflow.CorruptionError):
        broker.close()
    return served


def use_in_time(spool: Path) -> dict[str, bool]:
    """As above; the process is ended after a while, with SIGALRM."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(100)
    return use(spool)


@pytest.mark.parametrize("change", [emptied, pointing_away])
def test_a_broken_page_stops_the_queues_on_it_and_no_other(change, source, tmp_path):
    """Each call says so, and nothing raw is raised; where the registry is broken, the spool is left as it is.

    In a child, for LMDB may crash where it notices nothing; that is one error, too, but of none of these. Or it writes
    to memory that is not its own, about once in 5,000 uses of an empty page: locks of Python are held for ever.
    """
    costs = []
    for page, flags in list(pages_in_use(source)):
        spool = damaged(source, tmp_path / str(page), page, change)
        before = (spool / "log" / "data.mdb").read_bytes()
        try:
            served = in_child(str(spool), lambda spool=spool: use_in_time(spool))
        except qflow.CorruptionError as error:
            if "SIG" not in str(error):
                assert (spool / "log" / "data.mdb").read_bytes() == before
            continue
        except (qflow.InDoubt, qflow.BrokerFailed):  # a commit came by the page, perhaps one that nobody waited for
            continue
        except qflow.StorageError as error:
            if "SIGALRM" not in str(error):
                raise
            continue
        if flags & LEAF:
            costs.append(len(QUEUES) - sum(served.values()))
    assert costs
    assert costs.count(len(QUEUES)) <= 1  # one page of small records holds those of all
    assert sorted(costs)[len(costs) // 2] < 5  # one of blocks holds so many neighbours


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV])
def test_a_log_that_kills_who_reads_it_is_damaged(number):
    """The sentence says how the process ended."""
    with pytest.raises(qflow.CorruptionError, match=f"/here is damaged.*{number.name}"):
        in_child("/here", lambda: os.kill(os.getpid(), number))


def test_a_reader_killed_by_somebody_is_no_damage():
    """A lack of memory, or a person, ends processes, too."""
    with pytest.raises(qflow.StorageError, match="SIGKILL"):
        in_child("/here", lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_what_a_child_finds_or_raises_comes_back():
    """As if it had been done here; a child that cannot say anything is an error, too."""
    assert in_child("/here", lambda: [1, {"a": b"b"}]) == [1, {"a": b"b"}]
    with pytest.raises(qflow.NotFound, match="nothing"):
        in_child("/here", lambda: (_ for _ in ()).throw(qflow.NotFound("nothing")))
    gap = qflow.GapError("offsets 3 to 7 are gone", partition=1, first=3, end=8, messages=4)
    with pytest.raises(qflow.GapError, match="^offsets 3 to 7 are gone$") as caught:
        in_child("/here", lambda: (_ for _ in ()).throw(gap))
    assert vars(caught.value) == vars(gap)
    with pytest.raises(qflow.StorageError, match="exit code 3"):
        in_child("/here", lambda: os._exit(3))


READING = """
import os
from qflow.inspect import child
from qflow.inspect.child import in_child
def work():
    try:
        print(os.getpid(), flush=True)
        while True:  # not `pause`: the signal may come just before that
            pass
    finally:
        print("cleaned up", flush=True)
in_child("/here", work)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child is not told that its parent has ended")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number):
    """However that ended. The child cleans up, as at Ctrl-C: nobody waits for what it reads or copies."""
    parent = subprocess.Popen([sys.executable, "-c", READING], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(number)
    try:
        said, _ = parent.communicate(timeout=60)  # the child has that pipe, too
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert said == "cleaned up\n"


def test_a_child_that_no_interrupt_reaches_is_killed(monkeypatch):
    """As LMDB in a circle of damaged pages, which runs no handler."""
    monkeypatch.setattr(child, "PATIENCE_S", 0.1)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        while True:
            signal.pause()

    monkeypatch.setattr(child, "open", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        in_child("/here", work)  # which waits for the child's end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_child_that_is_struck_right_after_the_fork_ends_there(number, monkeypatch):
    """Whatever a handler of the program raises: the child would go on with the program, beside its parent."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    def fork() -> int:
        if not (pid := real()):
            signal.raise_signal(number)
        return pid

    here, real, before = os.getpid(), os.fork, signal.signal(number, struck)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    monkeypatch.setattr(os, "fork", fork)
    try:
        with pytest.raises(qflow.StorageError, match="exit code 1"):
            in_child("/here", lambda: None)
    finally:
        if os.getpid() != here:
            os._exit(77)
        signal.signal(number, before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


def test_garbage_of_the_parent_is_not_finalized_in_the_child():
    """A finalizer may talk to another process, by a connection that the parent uses, and wait for an answer."""
    here: list[int] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            here.append(os.getpid())

    def work() -> list[int]:
        assert len([[] for _ in range(100_000)]) == 100_000  # enough for the collector to run, several times
        return here

    Garbage()
    assert in_child("/here", work) == []
    assert gc.isenabled()
    gc.collect()
    assert here == [os.getpid()]


def test_the_command_line_says_it_in_a_sentence(source, tmp_path):
    """Exit code 1, for it is damage; no trace of Python, no core."""
    said = []
    for page, flags in pages_in_use(source):
        if flags & LEAF:
            spool = damaged(source, tmp_path / str(page), page, of_no_kind)
            try:
                inspect.check_spool(spool)
            except qflow.CorruptionError as error:
                if "SIG" in str(error):
                    said.append(CommandLine(tmp_path).run("check", spool))
                    break
    (result,) = said
    assert result.returncode == 1
    assert "SIGABRT" in error_line(result)


def test_a_copy_of_a_log_with_a_broken_page_says_that_the_log_is_damaged(source, tmp_path):
    """Not that the copy could not be written: exit code 1, and nothing is left of it."""
    page = [page for page, flags in pages_in_use(source) if flags & LEAF][-1]
    spool, copy = damaged(source, tmp_path / "spool", page, of_no_kind), tmp_path / "copy"
    result = CommandLine(tmp_path).run("snapshot", "create", spool, copy)
    assert (result.returncode, copy.exists()) == (1, False)
    assert "damaged" in error_line(result)


# Who waits for what is not written ------------------------------------------------------------------------------------


@pytest.fixture
def break_lanes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the pages of one owner's rows be damaged from now on, as a commit comes by them."""
    broken: set[int] = set()
    write_row = batch_writing.write_row

    def write(txn: Any, owner: int, lane: int, row: Any) -> None:
        if owner in broken:
            raise lmdb.CorruptedError("mdb_put: MDB_CORRUPTED")
        write_row(txn, owner, lane, row)

    monkeypatch.setattr(batch_writing, "write_row", write)
    return broken.add


@pytest.mark.parametrize(
    "settle",
    [
        lambda queue: queue.get(0).ack(wait=True),
        lambda queue: queue.ack_many([queue.get(0), queue.get(0)], wait=True),
        lambda queue: queue.get_many(2).ack(wait=True),
        lambda queue: queue.purge(),
        lambda queue: queue.delete(next(iter(queue.browse())).sequence),
    ],
    ids=["ack", "ack_many", "batch", "purge", "delete"],
)
def test_a_thread_is_told_that_what_it_settles_meets_broken_pages(settle, break_lanes, tmp_path):
    """A purge returned 0, as if nothing was there."""
    with qflow.open(tmp_path, journal="off") as broker:
        queue, other = broker.declare_queue("q"), broker.declare_queue("other")
        queue.put_many(BODIES)
        other.put(b"x")
        break_lanes(parts_of(queue).context.owner)
        with pytest.raises(qflow.CorruptionError, match="pages of the log"):
            settle(queue)
        other.get(0).ack(wait=True)


def test_a_subscriber_is_told_that_what_it_settles_meets_broken_pages(break_lanes, tmp_path):
    """Its acks were confirmed, and came back after the next opening."""
    with qflow.open(tmp_path, journal="off") as broker:
        broker.declare_stream("s", topics=["t"])
        broker.publish_many([("t", b"x")] * 5)
        with broker.subscribe("s", name="panel", start="earliest") as panel:
            break_lanes(member_of(panel).cursor.owner)
            with pytest.raises(qflow.CorruptionError, match="pages of the log"):
                panel.get(0).ack(wait=True)
            with pytest.raises(qflow.CorruptionError, match="pages of the log"):
                panel.get_many(2).ack(wait=True)


def test_a_task_is_told_that_what_it_settles_meets_broken_pages(break_lanes, tmp_path):
    """Its acks were confirmed, and came back after the next opening; so it was through the door."""

    async def settle() -> None:
        async with qflow.aio.open(tmp_path, journal="off") as broker:
            queue = await broker.declare_queue("q")
            await queue.put_many(BODIES)
            await broker.declare_stream("s", topics=["t"])
            await broker.publish_many([("t", b"x")] * 5)
            panel = await broker.subscribe("s", name="panel", start="earliest")
            break_lanes(parts_of(queue.queue).context.owner)
            break_lanes(member_of(panel.subscription).cursor.owner)
            for held in await queue.get(0), await queue.get_many(2), await panel.get(0), await panel.get_many(2):
                with pytest.raises(qflow.CorruptionError, match="pages of the log"):
                    await held.ack(wait=True)
            with pytest.raises(qflow.CorruptionError, match="pages of the log"):
                await queue.ack_many([await queue.get(0)], wait=True)
            with pytest.raises(qflow.CorruptionError, match="pages of the log"):
                await queue.purge()

    asyncio.run(settle())
