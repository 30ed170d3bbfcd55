"""SIGKILL at every step: between any two operations that change files or log, of creating, recovering, putting, …

A child process takes the steps; the `n`-th one kills it; for every `n` up to the end of the task. After each kill
the spool is opened and must hold what was promised.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

import inside
import qflow
from crash.beside import reader_beside
from crash.seams import Steps, ended_by_a_kill, open_before_steps, open_stepped, run_in_child, was_killed
from qflow.broker import Broker
from qflow.config import SPILL_STORES
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import confirming
from qflow.storage.log.keys import BLOCKS

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
BODY = b"x" * 33_000  # a block of its own
MANY = 600


def kills(task: Callable[[Steps, Path], None], spool: Path, start: Path | None = None) -> Iterator[int]:
    """Run a task again and again, killed one step later each time; yield after each kill, and not at the end.

    Another process reads beside it at every other pair of steps.

    Args:
        start: what the spool is each time; None goes on with what the last kill left.
    """
    for step in range(2_000):
        if start is not None:
            shutil.rmtree(spool, ignore_errors=True)
            shutil.copytree(start, spool, ignore=shutil.ignore_patterns("door", "stats.json*"))
        with reader_beside(spool, step // 2 % 2 == 0):
            if not ended_by_a_kill(task, spool, step):
                return
            yield step
    raise AssertionError("the task never ended")


def bodies(queue: qflow.Queue) -> list[bytes]:
    """Drain a queue."""
    drained = []
    while len(queue):
        with queue.get(timeout_s=0) as delivery:
            assert delivery.redelivered
            drained.append(delivery.body)
    return drained


def dirty_spool(path: Path, spill: str, work: Callable[[Broker], None]) -> None:
    """Make a spool whose owner was killed after some work."""

    def task() -> None:
        broker = qflow.open(path, capacity_bytes=1_000, spill=spill, segment_bytes="4KiB")
        work(broker)
        os.kill(os.getpid(), 9)

    assert was_killed(run_in_child(task))


def remove_everything(broker: Broker) -> None:
    """Do what the maintenance thread would do in time, in its place."""
    inside.still(broker)
    while inside.upkeep(broker).remove_settled() or inside.upkeep(broker).remove_deleted():
        pass


def blocks_in_log(spool: Path) -> int:
    """Count the blocks in a log that nobody has open."""
    env = Environment(str(spool / "log"), Files(), read_only=True)
    txn = env.begin()
    with txn.cursor() as cursor:
        count = sum(key[0] == BLOCKS and key[-8:] != bytes([255]) * 8 for key in cursor.iternext(values=False))
    txn.abort()
    env.close()
    return count


def test_creating_a_spool_can_be_killed_anywhere_and_goes_on(spool):
    """Edge 20: a creation that is killed at one step after the other ends well, and is never half a log."""

    def create(steps: Steps, path: Path) -> None:
        open_stepped(path, steps).close()

    killed = 0
    for _ in kills(create, spool):
        killed += 1
        assert not (spool / "log").exists() or (spool / "log" / "data.mdb").stat().st_size
    assert killed > 15
    with qflow.open(spool) as broker:
        assert broker.declare_queue("q").put(b"x") == 0
        assert broker.check() == []


def test_each_creation_from_nothing_can_be_killed_once(tmp_path):
    """Edge 20: one kill at any step of a creation from nothing leaves what the next open makes a good spool of."""

    def create(steps: Steps, path: Path) -> None:
        open_stepped(path, steps).close()

    (tmp_path / "nothing").mkdir()
    killed = 0
    for _ in kills(create, tmp_path / "spool", tmp_path / "nothing"):
        killed += 1
        with qflow.open(tmp_path / "spool") as broker:
            assert broker.check() == []
            assert not (tmp_path / "spool" / "log.new").exists()
    assert killed > 20


@pytest.mark.parametrize("spill", SPILL_STORES)
def test_recovery_and_wipe_can_be_killed_anywhere(spill, tmp_path):
    """Edge 20, I11: killed at any step of recovering or wiping, the next open has every message and no old spill file."""
    start, spool = tmp_path / "start", tmp_path / "spool"

    def work(broker: Broker) -> None:
        for name in ("a", "b", "../c"):
            broker.declare_queue(name).put_many([b"%d" % number * 50 for number in range(12)])

    dirty_spool(start, spill, work)
    assert len(list((start / "spill").iterdir())) > 1

    def recover(steps: Steps, path: Path) -> None:
        broker = open_stepped(path, steps, capacity_bytes=1_000)
        inside.still(broker)  # the wiper is for one thread
        while broker.engine.spool.wiper.step(1000):
            pass
        steps.take("open")
        os.kill(os.getpid(), 9) if steps.kill_at == 2**60 else os._exit(0)

    killed = 0
    for step in kills(recover, spool, start):
        killed += 1
        with qflow.open(spool, capacity_bytes=1_000) as broker:
            assert not broker.recovery.clean
            assert os.listdir(spool / "spill") == []
            assert broker.queues() == ["../c", "a", "b"]
            for name in broker.queues() if step % 10 == 0 else ["a"]:
                assert bodies(broker.queue(name)) == [b"%d" % number * 50 for number in range(12)]
            assert broker.check() == []
        assert not any(names for _, _, names in os.walk(spool / "spill"))
    assert killed > 50 if spill == "files" else killed > 25


@pytest.mark.parametrize(
    ("kind", "spill"),
    [*product(["put", "put_many", "submit", "ack", "ack_many"], SPILL_STORES), ("delete", "segments")],
)
def test_an_operation_killed_at_any_step_is_done_or_not(kind, spill, tmp_path, monkeypatch):
    """Edge 20, I3: a put, ack or delete in flight at a kill is either-or, a batch all or none, whatever the step.

    By a commit of the log, or by the journal.
    """
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)
    journal = {"journal": "auto" if spill == "segments" else "off", "journal_bytes": "8KiB"}
    start, spool = tmp_path / "start", tmp_path / "spool"
    with qflow.open(start, **journal) as broker:
        broker.declare_queue("q").put_many([b"0", b"1", b"2"])
    confirmed = tmp_path / "confirmed"

    opened = open_stepped if kind == "put" else open_before_steps

    def task(steps: Steps, path: Path) -> None:
        broker = opened(path, steps, capacity_bytes=400, spill=spill, segment_bytes="4KiB", **journal)
        queue = broker.queue("q")
        if kind == "put":
            queue.put(b"new")
        elif kind == "submit":
            queue.submit(b"new").result()
        elif kind == "put_many":
            queue.put_many([b"new"] * 5)
        elif kind == "ack":
            queue.get().ack(wait=True)
        elif kind == "delete":
            assert queue.delete(1)
        else:
            queue.ack_many([queue.get(), queue.get()], wait=True)
        confirmed.touch()
        broker.close()

    outcomes = set()
    old = [b"0", b"1", b"2"]
    done = {"put_many": old + [b"new"] * 5, "ack": old[1:], "ack_many": old[2:], "delete": [b"0", b"2"]}.get(
        kind, [*old, b"new"]
    )
    for _ in kills(task, spool, start):
        with qflow.open(spool) as broker:
            assert broker.check() == []
            queue = broker.queue("q")
            came = []
            while len(queue):
                with queue.get(0) as delivery:
                    came.append(delivery.body)
            assert broker.check() == []
        assert came == done if confirmed.exists() else came in (old, done)
        outcomes.add(len(came))
        confirmed.unlink(missing_ok=True)
    assert outcomes == {len(old), len(done)}


@pytest.mark.parametrize("kind", ["purge", "delete"])
def test_removing_many_blocks_can_be_killed_anywhere_and_resumes(kind, tmp_path):
    """Edges 16, 20, I14: what a purge or delete leaves to remove is bounded work, and goes on at the next open."""
    start, spool = tmp_path / "start", tmp_path / "spool"
    with qflow.open(start) as broker:
        broker.declare_queue("q").put_many([BODY] * MANY)
        broker.declare_queue("other").put(b"other")
    confirmed = tmp_path / "confirmed"
    assert blocks_in_log(start) > MANY

    def task(steps: Steps, path: Path) -> None:
        broker = open_before_steps(path, steps)
        queue = broker.queue("q")
        if kind == "purge":
            assert queue.purge() == MANY
        else:
            broker.delete_queue("q")
        confirmed.touch()
        remove_everything(broker)
        broker.close()

    gone = set()
    for _ in kills(task, spool, start):
        with qflow.open(spool) as broker:
            there = "q" in broker.queues()
            left = len(broker.queue("q")) if there else 0
            assert left in (0, MANY)
            if confirmed.exists():
                assert not left
                assert there is (kind == "purge")
            gone.add(left == 0)
            if there:
                queue = broker.queue("q")
                assert queue.put(b"new") == MANY  # never a sequence again
                if not left:
                    assert bodies_of(queue) == [b"new"]
            assert bodies_of(broker.queue("other")) == [b"other"]
            assert broker.check() == []
            if not left:
                remove_everything(broker)
        assert blocks_in_log(spool) < (5 if not left else MANY + 5)
        confirmed.unlink(missing_ok=True)
    assert gone == {True, False}


def bodies_of(queue: qflow.Queue) -> list[bytes]:
    """Drain a queue, whatever its messages say of earlier deliveries."""
    drained = []
    while len(queue):
        with queue.get(timeout_s=0) as delivery:
            drained.append(delivery.body)
    return drained


def test_blocks_left_by_a_purge_are_removed_after_a_reopen_without_any_new_message(tmp_path):
    """I14: blocks below the floor that a crash left behind go in the background, without anybody touching the queue."""
    spool = tmp_path / "spool"
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put_many([BODY] * MANY)

    def task() -> None:
        broker = open_stepped(spool, Steps())
        inside.still(broker)  # no maintenance: the kill comes before it gets there
        broker.queue("q").purge()
        os.kill(os.getpid(), 9)

    assert was_killed(run_in_child(task))
    with qflow.open(spool) as broker:
        remove_everything(broker)
    assert blocks_in_log(spool) < 5
