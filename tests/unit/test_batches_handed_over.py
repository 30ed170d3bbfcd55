"""A finished stage on its way into a spool that nobody owns: what the one who commits it is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.inspect import check_spool
from qflow.spark import spools
from qflow.spark.places.local import Handover
from qflow.storage.inbox import stages
from unit.handing import hand, staged

ROWS = [(f"plant/{number % 3}", b"%d" % number) for number in range(20)]
SOON_S = 0.05
LATE_S = 30.0


@pytest.fixture
def uuid(spool: Path) -> str:
    """Of a spool with a stream, and a queue that is full."""
    with qflow.open(spool) as broker:
        broker.declare_stream("plants", topics=["plant/#", "job"])
        jobs = broker.declare_queue("jobs", limit_messages=1)
        jobs.put(b"in the way")
        broker.bind(jobs, "job")
        return str(broker.uuid)


def stored(spool: Path) -> list[bytes]:
    """Return what the stream holds; the spool is sound, and nobody has it open."""
    spools.let_go(str(spool))
    assert check_spool(spool) == []
    with qflow.open(spool) as broker:
        return [message.body for message in broker.stream("plants").query()]


def inbox(spool: Path) -> list[str]:
    """Return the files in the inbox."""
    return [str(path) for path in (spool / "inbox").rglob("*") if path.is_file()]


def test_what_nobody_owns_is_adopted_here(spool, uuid):
    """And what an earlier attempt at other batches left is swept."""
    staged(spool, uuid, ROWS, number=0)
    Handover(str(spool), staged(spool, uuid, ROWS, number=1), LATE_S).run()
    assert inbox(spool) == []
    assert stored(spool) == [body for _, body in ROWS]


def test_a_batch_that_is_there_is_not_handed_in(spool, uuid):
    """Its stage is removed, and that is all."""
    for _ in range(2):
        Handover(str(spool), staged(spool, uuid, ROWS), LATE_S).run()
        assert inbox(spool) == []
        spools.let_go(str(spool))
    assert stored(spool) == [body for _, body in ROWS]


def test_a_batch_that_waits_already_is_waited_for(spool, uuid):
    """The attempt before was killed after it had handed in; its rows count."""
    hand(spool, uuid, ROWS)
    Handover(str(spool), staged(spool, uuid, ROWS[:3]), LATE_S).run()
    assert stored(spool) == [body for _, body in ROWS]


def test_what_cannot_be_swept_fails_no_batch(spool, uuid, monkeypatch):
    """It is handed in, and then it is adopted: who is told that it failed would write it again."""

    def fail(files, spool, query, *, up_to):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), spool)

    manifest = staged(spool, uuid, ROWS, once=True)
    monkeypatch.setattr(stages, "remove_staged", fail)
    Handover(str(spool), manifest, LATE_S).run()
    assert stored(spool) == [body for _, body in ROWS]


def test_a_refusal_is_told_with_its_reason(spool, uuid):
    """And where the stage lies."""
    with pytest.raises(qflow.StorageError, match="no stream takes topic 'nowhere'.*set aside in .*refused/q-0"):
        Handover(str(spool), staged(spool, uuid, [("nowhere", b"x")]), LATE_S).run()


def test_a_batch_of_a_query_with_more_to_come_waits(spool, uuid):
    """It is adopted when that can be done, so it stays."""
    with pytest.raises(qflow.StorageError, match="nobody could adopt it within .*'jobs'.*may be started again"):
        Handover(str(spool), staged(spool, uuid, [("job", b"x")]), SOON_S).run()
    assert (spool / "inbox" / "q-0").exists()


def test_the_only_batch_of_a_query_is_taken_back(spool, uuid):
    """Whoever is told that it failed may write it again."""
    with pytest.raises(qflow.StorageError, match="taken back, and nothing of it is stored"):
        Handover(str(spool), staged(spool, uuid, [("job", b"x")], once=True), SOON_S).run()
    assert inbox(spool) == []
    assert stored(spool) == []


def test_a_spool_that_cannot_be_opened_has_the_batch_taken_back(spool, uuid, monkeypatch):
    """Whatever prevents it, the error names it."""
    from qflow.spark.places import local

    def full(path: str, **options: Any) -> Any:
        raise qflow.DiskFull("the disk is full")

    monkeypatch.setattr(local, "open_broker", full)
    with pytest.raises(qflow.StorageError, match="the disk is full.*taken back"):
        Handover(str(spool), staged(spool, uuid, ROWS, once=True), SOON_S).run()
    assert inbox(spool) == []


def test_one_of_which_a_part_is_stored_is_not_taken_back(spool, uuid, monkeypatch):
    """And whoever writes it is told not to write it again."""
    from qflow.spark.places import local

    def small(path: str, **options: Any) -> Any:
        assert options == {"door": False}  # nobody is let in by who owns it for a moment
        return qflow.open(path, max_transaction_bytes=20, **options)

    monkeypatch.setattr(local, "open_broker", small)
    manifest = staged(spool, uuid, [*ROWS, ("job", b"x")], once=True)
    with pytest.raises(qflow.StorageError, match="do not write it again"):
        Handover(str(spool), manifest, SOON_S).run()
    assert stored_part(spool) > 0
    assert os.path.exists(spool / "inbox" / "q-0~")


def stored_part(spool: Path) -> int:
    """Return how many messages the log holds of the stream, without adopting more."""
    from qflow.inspect import read_spool

    spools.let_go(str(spool))
    (stream,) = read_spool(spool).streams
    return sum(partition.messages for partition in stream.partitions)
