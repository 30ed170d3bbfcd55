"""Snapshots and compactions of a broker that is at work, and what they refuse."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import UUID

import pytest

import qflow
from qflow import Overflow, inspect
from qflow.storage.lock import acquire_lock

pytestmark = pytest.mark.two_drivers
BODY = b"x" * 10_000


def bodies(queue: qflow.Queue) -> list[bytes]:
    """Drain a queue."""
    drained = []
    while len(queue):
        with queue.get(timeout_s=0) as delivery:
            drained.append(delivery.body)
    return drained


@contextmanager
def at_work(jobs: list[Callable[[], None]]) -> Iterator[None]:
    """Repeat some jobs in threads meanwhile; none may fail."""
    enough = threading.Event()

    def repeat(job: Callable[[], None]) -> None:
        while not enough.is_set():
            job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        running = [threads.submit(repeat, job) for job in jobs]
        try:
            yield
        finally:
            enough.set()
        for future in running:
            future.result()


def test_a_snapshot_is_a_spool_of_its_own(open_spool, tmp_path):
    """It has queues, settings, bindings and messages, another uuid, and shares nothing with the original."""
    broker = open_spool()
    queue = broker.declare_queue("q", limit_messages=50, on_overflow=Overflow.REJECT, priorities=2)
    broker.declare_queue("gone").put(b"gone")
    broker.declare_queue("transient", durable=False).put(b"nowhere")
    broker.bind("q", "a/+")
    queue.put_many([b"0", b"1", b"2"])
    queue.get().ack()
    broker.delete_queue("gone")
    report = broker.snapshot(tmp_path / "deep" / "copy")
    queue.put(b"later")
    assert (report.queues, report.messages, report.bytes, report.clean) == (1, 2, 2, False)
    assert (UUID(report.origin), report.path) == (broker.uuid, str(tmp_path / "deep" / "copy"))
    assert report.log_bytes == (tmp_path / "deep" / "copy" / "log" / "data.mdb").stat().st_size
    assert not (tmp_path / "deep" / "copy" / "log.new").exists()
    facts = inspect.read_spool(report.path)
    assert (facts.uuid, facts.origin) == (report.uuid, report.origin)
    with qflow.open(report.path) as copy:
        assert copy.uuid == UUID(report.uuid) != broker.uuid
        assert copy.queues() == ["q"]
        assert copy.queue("q").settings == queue.settings
        assert copy.publish("a/b", b"3").sequences == {"q": 3}
        assert bodies(copy.queue("q")) == [b"1", b"2", b"3"]
        assert copy.check() == []
    assert bodies(queue) == [b"1", b"2", b"later"]


def test_messages_of_a_live_snapshot_may_have_been_delivered_and_those_of_a_closed_spool_were_not(spool, tmp_path):
    """A copy says `redelivered` where nobody knows; one of a spool that was closed counts exactly."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"0", b"1"])
        queue.get().nack()
        broker.snapshot(tmp_path / "live")
    assert inspect.copy_spool(spool, tmp_path / "closed").clean
    for name, expected in (("live", [True, True]), ("closed", [True, False])):
        with qflow.open(tmp_path / name) as copy:
            assert [delivery.redelivered for delivery in copy.queue("q").get_many(2)] == expected


def test_what_was_acked_before_a_snapshot_is_not_in_it(open_spool, tmp_path):
    """Also where nobody waited for the commit of the ack, or of the put."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([b"%d" % number for number in range(100)])
    for delivery in queue.get_many(50):
        delivery.ack()
    queue.submit(b"last")
    broker.snapshot(tmp_path / "copy")
    with qflow.open(tmp_path / "copy") as copy:
        assert bodies(copy.queue("q")) == [b"%d" % number for number in range(50, 100)] + [b"last"]


def test_snapshots_while_publishers_run_hold_a_prefix_of_whole_batches(open_spool, tmp_path):
    """Each batch is in both queues or in none, in the order of the puts, and all that were confirmed before are there."""
    broker = open_spool()
    for name in ("a", "b"):
        broker.bind(broker.declare_queue(name), "t")
    confirmed = [0, 0, 0]

    def publisher(thread: int) -> Callable[[], None]:
        def publish() -> None:
            broker.publish_many([("t", b"%d %d %d" % (thread, confirmed[thread], part)) for part in range(5)])
            confirmed[thread] += 1

        return publish

    taken = []
    with at_work([publisher(thread) for thread in range(3)]):
        for number in range(4):
            while min(confirmed) < 10 * number:
                pass
            before = list(confirmed)
            broker.snapshot(tmp_path / str(number))
            taken.append((before, list(confirmed)))
    for number, (before, after) in enumerate(taken):
        with qflow.open(tmp_path / str(number)) as copy:
            assert copy.check() == []
            there = bodies(copy.queue("a"))
            assert bodies(copy.queue("b")) == there
        for thread in range(3):
            mine = [body for body in there if body.startswith(b"%d " % thread)]
            count, rest = divmod(len(mine), 5)
            assert rest == 0
            assert mine == [b"%d %d %d" % (thread, batch, part) for batch in range(count) for part in range(5)]
            assert before[thread] <= count <= after[thread] + 1


@pytest.mark.owner_only(reason="it closes the spool, and opens it itself")
def test_compactions_while_four_threads_put_and_ack_lose_nothing(open_spool, spool):
    """Everything that was confirmed is there afterwards, and after another open; no put and no ack fails."""
    broker = open_spool(capacity_bytes="256KiB")
    queue = broker.declare_queue("q")
    put: list[set[bytes]] = [set() for _ in range(4)]
    acked: list[set[bytes]] = [set() for _ in range(4)]

    def worker(thread: int) -> Callable[[], None]:
        def work() -> None:
            new = [b"%d %d " % (thread, len(put[thread]) + part) + BODY for part in range(4)]
            queue.put_many(new)
            put[thread].update(new)
            for delivery in queue.get_many(3):
                delivery.ack(wait=True)
                acked[thread].add(delivery.body)

        return work

    with at_work([worker(thread) for thread in range(4)]):
        for _ in range(6):
            commits = broker.stats().commits_total
            report = broker.compact()
            assert report.bytes_after == pytest.approx((spool / "log" / "data.mdb").stat().st_size, abs=2**24)
            while broker.stats().commits_total < commits + 20:
                pass
    assert broker.check() == []
    left = set.union(*put) - set.union(*acked)
    assert len(queue) == len(left)
    broker.compact()
    broker.close()
    with qflow.open(spool) as again:
        assert again.check() == []
        came = bodies(again.queue("q"))
        assert len(came) == len(left)
        assert set(came) == left


def test_a_compaction_gives_back_what_was_settled(open_spool, spool):
    """All of a purged backlog, too; queues, bindings and messages stay, and the next open finds nothing left over."""
    broker = open_spool()
    queue = broker.declare_queue("q", max_deliveries=3)
    broker.bind("q", "a/#")
    for _ in range(30):
        queue.put_many([BODY * 4] * 50)
    queue.purge()
    queue.put(b"kept")
    report = broker.compact()
    assert report.bytes_before > 50 * 2**20
    assert report.bytes_after < 8 * 2**20
    assert (spool / "log" / "data.mdb").stat().st_size == report.bytes_after
    assert sorted(name for name in os.listdir(spool) if name.startswith("log")) == ["log"]
    assert broker.publish("a/b", b"new").sequences == {"q": 1501}
    assert broker.compact().bytes_after <= report.bytes_after
    broker.close()
    broker = open_spool()
    assert broker.recovery.clean
    assert broker.queue("q").settings.max_deliveries == 3
    assert bodies(broker.queue("q")) == [b"kept", b"new"]


@pytest.mark.owner_only(reason="it closes the spool, and opens it itself")
def test_streams_and_their_subscriptions_are_copied_and_survive_a_compaction(open_spool, tmp_path):
    """Offsets, topics and how far a durable subscription came; one that is under way goes on where it was."""
    broker = open_spool()
    broker.declare_stream("s", topics=["a/#"])
    broker.declare_queue("q")
    broker.publish_many([(f"a/{number % 10}", b"%d" % number) for number in range(1000)])
    subscription = broker.subscribe("s", "a/7", name="me", start="earliest")
    for _ in range(50):
        with subscription.get(timeout_s=0):
            pass
    report = broker.snapshot(tmp_path / "copy")
    assert (report.queues, report.streams, report.messages) == (1, 1, 1000)
    broker.compact()
    assert broker.publish("a/7", b"1000").offsets["s"]
    assert [subscription.get(timeout_s=0).body for _ in range(51)][-2:] == [b"997", b"1000"]
    broker.close()
    for path, last in ((tmp_path / "copy", b"997"), (broker.path, b"1000")):
        with qflow.open(path) as again:
            assert again.check() == []
            replayed = again.subscribe("s", "a/7", start="earliest", follow=False)
            assert [message.body for message in replayed][-1] == last
            mine = again.subscribe("s", "a/7", name="me")
            assert mine.get(timeout_s=0).body == b"507"


def test_a_bad_place_for_a_snapshot_is_refused_and_stays_as_it_is(open_spool, spool, tmp_path):
    """Inside the spool, a file, a directory that holds something, a spool, a link, no path at all."""
    broker = open_spool()
    broker.declare_queue("q").put(b"x")
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"precious")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "way in").symlink_to(spool)
    broker.snapshot(tmp_path / "taken")
    for path, error, match in (
        (spool, qflow.InvalidArgument, "inside the spool"),
        (spool / "log" / "copy", qflow.InvalidArgument, "inside the spool"),
        (tmp_path / "way in" / "copy", qflow.InvalidArgument, "inside the spool"),
        (tmp_path / "file", qflow.InvalidArgument, "not a directory"),
        (tmp_path / "file" / "below", qflow.StorageError, "a file stands"),
        (tmp_path / "full", qflow.InvalidArgument, "it holds 'file'"),
        (tmp_path / "taken", qflow.InvalidArgument, "is a spool already"),
        (tmp_path / "link", qflow.InvalidArgument, "not a directory"),
        ("", qflow.InvalidArgument, "without NUL"),
        ("a\0b", qflow.InvalidArgument, "without NUL"),
        ("a\ud800b", qflow.InvalidArgument, "half characters"),
        (7, qflow.InvalidArgument, "not 7"),
    ):
        with pytest.raises(error, match=match):
            broker.snapshot(path)
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert os.listdir(tmp_path / "full") == ["file"]
    assert os.listdir(tmp_path / "empty") == []
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full", "link", "spool", "taken", "way in"]
    assert broker.snapshot(tmp_path / "empty").messages == 1


def test_a_snapshot_does_not_touch_a_spool_that_is_open(open_spool, tmp_path):
    """Nor one that is being made, whose directory is locked."""
    broker = open_spool()
    with qflow.open(tmp_path / "other") as other, pytest.raises(qflow.InvalidArgument, match="is a spool already"):
        broker.snapshot(other.path)
    (tmp_path / "new").mkdir()
    lock = acquire_lock(tmp_path / "new")
    with pytest.raises(qflow.SpoolInUse):
        broker.snapshot(tmp_path / "new")
    lock.release()
    broker.snapshot(tmp_path / "new")


def test_a_closed_broker_makes_no_copies(open_spool, tmp_path):
    """BrokerClosed, and nothing is made."""
    broker = open_spool()
    broker.close()
    with pytest.raises(qflow.BrokerClosed):
        broker.snapshot(tmp_path / "copy")
    with pytest.raises(qflow.BrokerClosed):
        broker.compact()
    assert not (tmp_path / "copy").exists()


def test_modes_of_a_snapshot_let_nobody_else_read_it(open_spool, tmp_path):
    """Directories 0700, the data 0600, whatever the umask."""
    before = os.umask(0)
    try:
        open_spool().snapshot(tmp_path / "copy")
    finally:
        os.umask(before)
    for name, mode in ((".", 0o700), ("log", 0o700), ("log/data.mdb", 0o600)):
        assert (tmp_path / "copy" / name).stat().st_mode & 0o777 == mode
