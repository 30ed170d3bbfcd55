"""SIGKILL at every step of a compaction and of a snapshot, and what a power cut may leave of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import inside
import qflow
from crash.seams import Steps, open_before_steps, open_stepped
from crash.test_kill_steps import bodies_of, kills
from qflow import inspect

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
BODY = b"x" * 33_000
KEPT = [b"%d" % number for number in range(3)]


def make_spool(path: Path) -> None:
    """Make a spool with much to give back and a little to keep."""
    with qflow.open(path) as broker:
        queue = broker.declare_queue("q", max_deliveries=9)
        broker.bind("q", "a")
        queue.put_many([BODY] * 300)
        queue.purge()
        queue.put_many(KEPT)


def compact_in(path: Path, steps: Steps, opened: Callable[..., qflow.Broker] = open_stepped) -> qflow.Broker:
    """Open a spool and compact it, with no maintenance beside."""
    broker = opened(path, steps)
    inside.still(broker)
    broker.compact()
    return broker


def logs_in(path: Path) -> list[str]:
    """Return which logs, and halves of logs, lie in a spool."""
    return sorted(name for name in os.listdir(path) if name.startswith("log"))


def test_a_compaction_can_be_killed_anywhere(tmp_path):
    """Whatever the step: every confirmed message is there, before the next open and after it, and nothing is left over."""
    start, spool, confirmed = tmp_path / "start", tmp_path / "spool", tmp_path / "confirmed"
    make_spool(start)

    def task(steps: Steps, path: Path) -> None:
        broker = compact_in(path, steps, open_before_steps)
        broker.queue("q").put(b"new")
        confirmed.touch()
        broker.close()

    left = set()
    for _ in kills(task, spool, start):
        left.add(tuple(logs_in(spool)))
        (seen,) = inspect.read_spool(spool).queues
        assert seen.messages in ((4,) if confirmed.exists() else (3, 4))
        assert inspect.check_spool(spool) == []
        with qflow.open(spool) as broker:
            assert logs_in(spool) == ["log"]
            queue = broker.queue("q")
            assert queue.settings.max_deliveries == 9
            assert broker.publish("a", b"newest").sequences["q"] >= 303
            came = bodies_of(queue)
            assert came == [*KEPT, b"new", b"newest"] or (not confirmed.exists() and came == [*KEPT, b"newest"])
            assert broker.check() == []
        confirmed.unlink(missing_ok=True)
    assert left == {("log",), ("log", "log.new"), ("log.new", "log.old"), ("log", "log.old")}


def test_compactions_killed_one_after_the_other_end_well(tmp_path):
    """Each goes on with what the last one left; in the end the log is small, and holds everything."""
    spool = tmp_path / "spool"
    make_spool(spool)

    def task(steps: Steps, path: Path) -> None:
        compact_in(path, steps).close()

    assert sum(1 for _ in kills(task, spool)) > 30
    assert logs_in(spool) == ["log"]
    assert (spool / "log" / "data.mdb").stat().st_size < 6 * 2**20
    with qflow.open(spool) as broker:
        assert bodies_of(broker.queue("q")) == KEPT
        assert broker.check() == []


def test_a_snapshot_can_be_killed_anywhere(tmp_path):
    """Whatever the step: there is no spool, and another snapshot can be made there; or there is, and it is whole."""
    start, spool, copy = tmp_path / "start", tmp_path / "spool", tmp_path / "below" / "copy"
    make_spool(start)

    def task(steps: Steps, path: Path) -> None:
        broker = open_before_steps(path, steps)
        inside.still(broker)
        steps.take("open")
        broker.snapshot(copy)
        os._exit(0)

    whole = 0
    for _ in kills(task, spool, start):
        try:
            facts = inspect.read_spool(copy)
        except qflow.NotFound:
            inspect.copy_spool(spool, copy)
            facts = inspect.read_spool(copy)
        else:
            whole += 1
        assert facts.origin == inspect.read_spool(spool).uuid != facts.uuid
        assert inspect.check_spool(copy) == []
        with qflow.open(copy) as broker:
            assert logs_in(copy) == ["log"]
            assert bodies_of(broker.queue("q")) == KEPT
            assert broker.check() == []
        shutil.rmtree(copy.parent)
    assert whole


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("log.old", "log.new"), "whole"),
        (("log.old",), "whole"),
        (("log.old", "log"), "whole"),
        (("log", "log.new"), "half"),
    ],
)
def test_what_a_power_cut_may_leave_of_a_compaction(names, found, tmp_path):
    """Renames that were not synced are there or not, in order; a copy that was not synced may be anything."""
    spool = tmp_path / "spool"
    make_spool(spool)
    os.rename(spool / "log", tmp_path / "log")
    for name in names:
        shutil.copytree(tmp_path / "log", spool / name)
    if found == "half":
        (spool / "log.new" / "data.mdb").write_bytes(bytes(5000))
    assert inspect.read_spool(spool).queues[0].messages == 3
    with qflow.open(spool) as broker:
        assert logs_in(spool) == ["log"]
        assert bodies_of(broker.queue("q")) == KEPT


def test_a_log_that_cannot_be_opened_is_not_deleted_nor_is_what_lies_beside_it(tmp_path):
    """Neither a damaged log, nor the one of before, nor somebody's own copy of another log."""
    spool = tmp_path / "spool"
    make_spool(spool)
    whole = (spool / "log" / "data.mdb").read_bytes()
    shutil.copytree(spool / "log", spool / "log.old")
    (spool / "log" / "data.mdb").write_bytes(bytes(5000))
    with pytest.raises(qflow.QflowError):
        qflow.open(spool)
    assert (spool / "log" / "data.mdb").read_bytes() == bytes(5000)
    assert (spool / "log.old" / "data.mdb").read_bytes() == whole
    shutil.rmtree(spool / "log")
    with qflow.open(tmp_path / "other") as broker:
        broker.declare_queue("other")
    for theirs in ((tmp_path / "other" / "log" / "data.mdb").read_bytes(), b"not a log at all"):
        with qflow.open(spool) as broker:  # brings `log.old` back, the first time
            (spool / "log.old").mkdir()
            (spool / "log.old" / "data.mdb").write_bytes(theirs)
            with pytest.raises((qflow.StorageError, qflow.CorruptionError), match=r"log\.old"):
                broker.compact()
            broker.queue("q").put(b"on it goes")
        with qflow.open(spool) as broker:
            assert len(broker.queue("q")) >= 4
        assert (spool / "log.old" / "data.mdb").read_bytes() == theirs
        shutil.rmtree(spool / "log.old")
