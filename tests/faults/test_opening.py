"""Opening a spool where the system says no, readers crowd, or something was planted: one sentence, nothing lost."""

from __future__ import annotations

import gc
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lmdb
import pytest

import inside
import qflow
import scratch
from crash.seams import run_in_child, was_killed
from faults.seams import Faults, in_thread, open_faulty
from qflow import inspect
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.inspect.live import read_live
from qflow.storage import environment
from qflow.storage.environment import Environment
from qflow.storage.files import Files, filesystem_type
from qflow.storage.log.directory import check_log_directory

READERS = """
import os, signal, sys
from qflow.storage import environment
from qflow.storage.files import Files
environment.READERS = int(sys.argv[3])
env = environment.Environment(sys.argv[1], Files(), read_only=True)
reading = [env.begin() for _ in range(int(sys.argv[2]))]
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def written(spool: Path) -> Path:
    """A spool that is closed, with one message."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"kept")
    return spool


def descriptors() -> dict[str, str]:
    """Return what this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def whole(spool: Path) -> None:
    """Check that a spool opens, and holds its message."""
    with qflow.open(spool) as broker:
        delivery = broker.queue("q").get(timeout_s=0)
        assert delivery.body == b"kept"
        delivery.nack()
        assert broker.check() == []


# Readers ---------------------------------------------------------------------------------------------------------------


@contextmanager
def readers(spool: Path, count: int, slots: int = environment.READERS) -> Iterator[subprocess.Popen[str]]:
    """Have another process read the log of a spool, in so many transactions at once."""
    arguments = [sys.executable, "-c", READERS, str(spool / "log"), str(count), str(slots)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        yield process
        process.stdin.close()


def test_a_thousand_readers_do_not_keep_the_owner_out(written):
    """Each executor of Spark, and each who follows a stream, may read at the same moment."""
    with readers(written, 1_000):
        whole(written)
        assert inspect.check_spool(written) == []


def test_where_readers_fill_all_slots_they_are_named(written, monkeypatch):
    """The spool is as good as it was, and whoever reads it can be found; once they end, it opens."""
    monkeypatch.setattr(environment, "READERS", 3)
    (written / "log" / "lock.mdb").unlink()
    with readers(written, 3, 3) as process:
        for look in (qflow.open, inspect.read_spool):
            with pytest.raises(qflow.StorageError, match=rf"3 reads are under way in process(es)? .*\b{process.pid}\b"):
                look(written)
    whole(written)


def test_an_idle_reader_takes_no_slot(written):
    """Whoever looks now and then leaves room for the others in between."""
    env = Environment(str(written / "log"), Files(), read_only=True)
    with env.reading(), env.reading():
        pass
    assert str(env._env.readers()).strip() == "(no active readers)"
    env.close()


def test_readers_that_were_killed_leave_their_slots_to_the_next_who_opens(written):
    """Also where somebody who reads keeps the file of locks in use, and no owner lives."""
    with readers(written, 0):
        for _ in range(2):
            with readers(written, 2) as process:
                process.kill()
        env = Environment(str(written / "log"), Files(), read_only=True)
        assert str(env._env.readers()).strip() == "(no active readers)"
        env.close()


# What the disk and the system refuse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        lmdb.Error("mdb_txn_commit: Input/output error"),
        lmdb.DiskError("mdb_txn_commit: Input/output error"),
        lmdb.Error("mdb_txn_commit: Read-only file system"),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[16:]}",
)
@pytest.mark.parametrize("operation", ["begin", "commit"])
def test_a_first_commit_that_fails_is_one_sentence_and_leaves_nothing_open(operation, error, written):
    """The next to open goes on as if nothing had been."""
    faults = Faults()
    faults.fail(operation, error, times=1)
    gc.collect()  # what tests before have left to it
    before = descriptors()
    with pytest.raises(qflow.StorageError, match=r"dmesg"):
        open_faulty(written, faults)
    assert descriptors() == before
    whole(written)


def test_a_new_log_whose_first_commit_fails_is_one_sentence(spool, monkeypatch):
    """No log is there then, and the next open makes one."""

    class Refusing:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.real = real(*arguments, **named)

        def begin(self, **_: Any) -> Any:
            raise lmdb.DiskError("mdb_txn_begin: Input/output error")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    real = lmdb.open
    monkeypatch.setattr(lmdb, "open", Refusing)
    with pytest.raises(qflow.StorageError, match="new log"):
        qflow.open(spool)
    monkeypatch.undo()
    assert not (spool / "log").exists()
    qflow.open(spool).close()


@pytest.mark.parametrize("new", [False, True])
def test_with_too_few_descriptors_opening_is_one_sentence_and_leaves_none_open(new, spool):
    """Whatever step of it comes first to want one more than there are."""
    if not new:
        with qflow.open(spool) as broker:
            broker.declare_queue("q").put(b"kept")
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    refusals = []
    for limit in range(4, 4096):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            qflow.open(spool).close()
        except qflow.StorageError as error:
            refusals.append(str(error))
        else:
            break
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
    assert len(refusals) > 3
    assert all("ulimit" in refusal for refusal in refusals)
    assert descriptors() == before
    if not new:
        whole(spool)


# What a write that failed left in memory -----------------------------------------------------------------------------------


def test_the_owner_reads_the_log_from_the_disk_anew(written, monkeypatch):
    """What the disk refused to write lies in memory as if it were written; it is let go of before the file is mapped."""
    steps: list[str] = []

    class Telling(Files):
        def forget_cached(self, fd: int) -> None:
            steps.append("forgotten " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            super().forget_cached(fd)

    def told(*arguments: Any, **named: Any) -> Any:
        steps.append("mapped")
        return real(*arguments, **named)

    real = lmdb.open
    monkeypatch.setattr(lmdb, "open", told)
    Environment(str(written / "log"), Telling()).close()
    assert steps == ["forgotten data.mdb", "mapped"]


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in memory, as `fincore` says."""
    return int(subprocess.check_output(["fincore", "--bytes", "--noheadings", "--output=RES", path], text=True))


def test_a_spool_of_many_queues_asks_for_little_room_when_it_opens_after_a_kill(spool):
    """What it writes of each lies side by side in the log: the disk is asked for those pages, not for one each."""

    def owner() -> None:
        broker = qflow.open(spool)
        for number in range(200):
            broker.declare_queue(f"q{number}")
        os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(run_in_child(owner))
    with qflow.open(spool) as broker:
        assert len(broker.queues()) == 200
        broker.queue("q7").put(b"x")
    assert os.stat(spool / "log" / "data.mdb").st_blocks * 512 < 8 * 2**20


def test_what_is_let_go_of_is_not_in_memory():
    """The page of a block that was written and synced is read again by whoever opens the file next."""
    with scratch.directory(None, "cached") as directory:
        path = directory / "file"
        path.write_bytes(bytes(2**20))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            before = cached_bytes(path)
            Files().forget_cached(file.fileno())
        if filesystem_type(path) in ("tmpfs", "ramfs"):
            pytest.skip("this file system lies in memory")
        assert cached_bytes(path) < before


# What a power cut may leave ------------------------------------------------------------------------------------------------


def test_the_log_is_synced_at_each_commit_data_and_the_page_that_names_it(open_spool):
    """No kill shows whether it is, only a power cut; a log that took the place of another has it, too."""
    broker = open_spool()
    for _ in range(2):
        flags = broker.engine.log._env._env.flags()
        assert {name: flags[name] for name in ("sync", "metasync", "writemap", "map_async")} == {
            "sync": True,
            "metasync": True,
            "writemap": False,
            "map_async": False,
        }
        broker.compact()


def test_a_new_log_is_on_the_disk_before_it_is_in_its_place(spool):
    """Its file, its directory, then its name; and the spool's own name before all."""
    steps: list[tuple[str, str]] = []

    class Watched(Files):
        def rename(self, old: str, new: str) -> None:
            steps.append(("rename", os.path.basename(old)))
            super().rename(old, new)

        def sync_file(self, path: str) -> None:
            steps.append(("sync", os.path.basename(path)))
            super().sync_file(path)

        def sync_directory(self, path: str) -> None:
            steps.append(("sync", os.path.basename(path)))
            super().sync_directory(path)

    make_broker(spool, BrokerSettings(), files=Watched()).close()
    assert steps[:5] == [
        ("sync", spool.parent.name),
        ("sync", "data.mdb"),
        ("sync", "log.new"),
        ("rename", "log.new"),
        ("sync", "spool"),
    ]


# Planted files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "directory"])
def test_something_else_in_the_place_of_a_file_of_the_log_is_not_followed(name, kind, written, tmp_path):
    """It is named, left where it is, and nothing is written through it."""
    path, elsewhere = written / "log" / name, tmp_path / "elsewhere"
    os.rename(path, elsewhere)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    content = elsewhere.read_bytes()
    for look in (qflow.open, inspect.read_spool):
        with pytest.raises(qflow.StorageError, match=name):
            in_thread(lambda look=look: look(written))
    assert elsewhere.read_bytes() == content
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_data_file_is_left_empty(written):
    """I10: the log is gone; nothing is made in its place."""
    data = written / "log" / "data.mdb"
    data.write_bytes(b"")
    for look in (qflow.open, inspect.check_spool):
        with pytest.raises(qflow.CorruptionError, match="empty"):
            look(written)
    assert data.stat().st_size == 0


def test_a_log_that_may_not_be_looked_at_is_not_taken_for_gone() -> None:
    """Another user is told so, and not to move it away."""
    with TemporaryDirectory() as place:
        log = Path(place, "log")
        log.mkdir()
        (log / "data.mdb").write_bytes(b"x")
        log.chmod(0)
        os.chmod(place, 0o755)
        user = os.geteuid()
        if not user:
            os.seteuid(65534)
        try:
            with pytest.raises(qflow.StorageError, match="cannot look at the log .*data.mdb.*: Permission denied"):
                check_log_directory(str(log))
        finally:
            os.seteuid(user)
            log.chmod(0o700)


def test_what_an_owner_tells_that_cannot_be_read_names_what_to_do() -> None:
    """Not the bare words of the system; a door that may not be used is not said to be another user's."""
    with TemporaryDirectory() as place:
        os.chmod(place, 0o711)
        spool = os.path.join(place, "spool")
        user = os.geteuid()
        if not user:
            os.chown(place, 65534, 65534)
            os.seteuid(65534)
        try:
            told = Path(place, "stats.json")
            told.touch(mode=0)
            with pytest.raises(qflow.PermissionDenied, match="stats.json.*: Permission denied; give this user"):
                read_live(place)
            with qflow.open(spool):
                os.chmod(spool, 0)
                with pytest.raises(qflow.PermissionDenied, match="may not use .*give it back if it was taken"):
                    qflow.connect(spool)
                os.chmod(spool, 0o700)
        finally:
            os.seteuid(user)


def plant_fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def plant_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("plant", [plant_fifo, plant_link])
def test_what_is_planted_beside_the_statistics_is_replaced(plant: Callable[[Path, Path], None], spool, tmp_path):
    """A FIFO would hang whoever opens it, and a link lead elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    with qflow.open(spool) as broker:
        inside.still(broker)
        for name in ("stats.json", "stats.json.new"):
            (spool / name).unlink(missing_ok=True)
            plant(spool / name, elsewhere)
        in_thread(broker.engine.figures.write)
        assert stat.S_ISREG((spool / "stats.json").lstat().st_mode)
        assert not os.path.lexists(spool / "stats.json.new")
    assert elsewhere.read_bytes() == b"precious"
    (spool / "stats.json").unlink()
    plant(spool / "stats.json", elsewhere)
    assert in_thread(lambda: inspect.read_spool(spool)).live is None


def test_a_relative_path_in_a_directory_that_is_gone_is_one_sentence(tmp_path, monkeypatch):
    """A deployment has replaced it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(qflow.InvalidArgument, match="the spool 'rel' is in the current directory, which is no more"):
        qflow.open("rel")


def test_nothing_is_opened_where_the_interpreter_runs_without_its_lock(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a free-threaded build says of itself that is told to stay so; what it may do with the GIL stays open to it."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        with pytest.raises(qflow.QflowError, match="PYTHON_GIL"):
            qflow.open(written)
        patch.setattr(sys, "_is_gil_enabled", lambda: True)
        whole(written)


def test_a_path_that_the_locale_has_no_bytes_for_is_told_of_as_that() -> None:
    """Not as one with half a character; the remedy is named."""
    program = (
        "import qflow\ntry: qflow.open('sp\\xf6ol')\nexcept qflow.InvalidArgument as error: print(ascii(str(error)))"
    )
    legacy = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.run([sys.executable, "-c", program], env=legacy, capture_output=True, text=True, timeout=60)
    assert "PYTHONUTF8=1" in said.stdout, said
    assert "(ascii)" in said.stdout
    assert "half" not in said.stdout
