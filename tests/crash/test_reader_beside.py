"""An owner that is killed while another process has the log open for reading: nothing confirmed may be lost."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

import qflow
from crash.beside import reader_beside
from crash.seams import run_in_child, was_killed
from qflow.inspect import check_spool
from qflow.inspect.log_check import check_log
from qflow.inspect.logs import as_now, opened_log
from qflow.inspect.pages import unsettled
from qflow.message import body_of
from qflow.storage.files import Files
from qflow.storage.log import recovery
from qflow.storage.log.overlay import count_unapplied

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
NUMBER_AT = 48
"""Where the lock file of LMDB 0.9 on Linux says which transaction was the last: behind magic, format and a mutex."""

WRITE = """
import lmdb, sys
with lmdb.open(sys.argv[1], create=False, lib_version=0, map_size=2**30).begin(write=True) as txn:
    txn.put(b"not ours", b"")
"""

COMPACT = """
import os, qflow, signal, sys
broker = qflow.open(sys.argv[1])
queue = broker.queue("q")
for number in range(1, 20):
    queue.put(b"%d" % number)
broker.compact()
for number in range(20, 60):
    queue.put(b"%d" % number)
os.kill(os.getpid(), signal.SIGKILL)
"""


def die_in_a_commit(log: Path) -> None:
    """Leave what a kill leaves between a commit's last sync and its last step: the lock file is one behind."""
    env = lmdb.open(str(log), create=False, lib_version=0, map_size=2**30)
    last = env.info()["last_txnid"]
    holding = env.begin(write=True)  # the mutex of writers, when it dies
    fd = os.open(log / "lock.mdb", os.O_RDWR)
    assert os.pread(fd, 8, NUMBER_AT) == struct.pack("<Q", last)
    os.pwrite(fd, struct.pack("<Q", last - 1), NUMBER_AT)
    assert holding.id() == last + 1
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_commit(spool: Path, work: Callable[[qflow.Broker], None]) -> None:
    """Have an owner do some work, and die in its last commit."""

    def task() -> None:
        broker = qflow.open(spool)
        work(broker)
        os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(run_in_child(task))
    assert was_killed(run_in_child(lambda: die_in_a_commit(spool / "log")))


def test_the_last_commit_of_a_killed_owner_is_seen_beside_a_reader(spool: Path) -> None:
    """I18: recovery reads what is on the disk, not what the lock file says, and nothing is written over it."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"first")
        broker.declare_stream("s", topics=["#"])
    with reader_beside(spool):
        killed_in_a_commit(spool, lambda broker: broker.queue("q").put(b"second"))
        killed_in_a_commit(spool, lambda broker: broker.publish("t", b"published", producer="p", number=1))
        with qflow.open(spool) as broker:
            assert [delivery.body for delivery in broker.queue("q").get_many(9)] == [b"first", b"second"]
            assert broker.publish("t", b"published", producer="p", number=1).duplicate
            assert [message.body for message in broker.subscribe("s", start="earliest", follow=False)] == [b"published"]
            assert broker.check() == []


def test_a_log_that_somebody_else_writes_is_not_taken_over(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first transaction that writes follows the one that was read; else nothing is written at all."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"kept")
    read = recovery.read

    def write_beside(txn: object, path: str, broken: dict[int, str]) -> object:
        found = read(txn, path, broken)

        subprocess.run([sys.executable, "-c", WRITE, path], check=True)
        return found

    monkeypatch.setattr(recovery, "read", write_beside)
    with pytest.raises(qflow.StorageError, match="something else writes"):
        qflow.open(spool)
    monkeypatch.undo()
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == 1


def test_who_reads_while_the_log_is_compacted_sees_what_was_there_before(spool: Path) -> None:
    """The journal beside it is of the compacted log from then on, and says nothing of the file that is open."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put(b"0")
    with opened_log(str(spool)) as (env, found):
        ended = subprocess.run([sys.executable, "-c", COMPACT, spool], check=False)
        assert ended.returncode == -signal.SIGKILL
        with env.reading() as txn:
            record = as_now(txn, found.queues[0])
            assert [body_of(message) for _, message in unsettled(txn, record)] == [
                b"%d" % number for number in range(20)
            ]
        assert list(check_log(env, found, Counter())) == []
        assert count_unapplied(env, Files()) == 0
    assert check_spool(spool) == []
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == 60
