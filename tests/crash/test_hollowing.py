"""Edge 24: one unacked message does not pin what lies behind it; and giving that back loses and changes nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
from crash.seams import Steps, open_before_steps
from crash.test_kill_steps import kills
from faults.seams import PATIENCE_S, Faults, in_thread, open_faulty
from qflow import inspect
from qflow.broker import Broker
from qflow.inspect import log_check
from qflow.queues.queue import parts_of
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.log import append, batch_writing, hollowing, writer
from qflow.storage.log.keys import BLOCKS, key_of, scan
from qflow.storage.log.recovery import QueueRecord
from qflow.storage.log.rows import Row

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
OWNER = 1


def body(number: int) -> bytes:
    return b"%08d" % number * 12


def settle_down(broker: Broker, *, whole: bool = False) -> None:
    """Do what the maintenance thread would do in time; with `whole`, look at every block, whatever was settled."""
    if whole:
        for name in broker.queues():
            parts_of(broker.queue(name)).logged_lanes[0].passes.at = 0
    with inside.paused(broker):
        while inside.upkeep(broker).hollow() or inside.upkeep(broker).remove_settled():
            pass


def blocks_of(broker: Broker) -> dict[int, int]:
    """Return the size of each block of the first queue, by its first sequence."""
    with broker.engine.log.read() as txn:
        found = scan(txn, OWNER, 0, 0, NO_PREVIOUS)
        return {int.from_bytes(key[-8:], "big"): len(value) for key, value in found}


def copy(broker: Broker, path: Path) -> Path:
    """Make a spool of the log as it is now: what a kill would leave."""
    return inside.copy_as_killed(broker, path)


def drain(queue: qflow.Queue) -> dict[int, bytes]:
    came: dict[int, bytes] = {}
    while batch := in_thread(lambda: queue.get_many(1_000, timeout_s=0)):
        assert not came.keys() & set(batch.sequences)
        came.update(zip(batch.sequences, batch.bodies, strict=True))
        batch.ack(wait=True)
    assert list(came) == sorted(came)
    return came


def test_one_unacked_message_pins_only_its_own_block(tmp_path, open_spool):
    """Edge 24: 100,000 acked messages behind one that is not leave no more than its block, the tail, and one mark."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([body(number) for number in range(100_001)])
    before = blocks_of(broker)
    held = queue.get()
    queue.get_many(100_000).ack(wait=True)
    settle_down(broker)
    after = blocks_of(broker)
    assert len(before) > 100
    assert sorted(after) == [0, max(before)]
    assert after[0] < 300
    assert inspect.check_spool(copy(broker, tmp_path / "copy")) == []
    held.nack()
    assert drain(queue) == {0: body(0)}
    settle_down(broker)
    assert blocks_of(broker) == {}


def test_a_message_held_while_others_pass_one_by_one_pins_nothing(open_spool):
    """Edge 24: the same where messages come and go behind it: the log does not grow with what passed."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"held")
    held = queue.get()
    most = 0
    for _ in range(12):
        queue.put_many([b"x" * 1_000] * 500)
        queue.get_many(500).ack(wait=True)
        settle_down(broker)
        most = max(most, len(blocks_of(broker)))
    assert most <= 3
    held.ack()


@pytest.mark.parametrize("how", ["clean", "crash"])
def test_every_fiftieth_message_is_there_after_a_reopen(how, tmp_path, spool, open_spool):
    """Edge 24, I4, I5: where 2 % are unacked, the log keeps few bytes, and gives exactly those back, in order."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    headers = [{"number": number} if number % 100 == 0 else None for number in range(10_000)]
    for start in range(0, 10_000, 2_000):
        queue.put_many([body(number) for number in range(start, start + 1_999)])
        queue.put(body(start + 1_999), headers=headers[start])
    expected = {number: body(number) for number in range(10_000) if number % 50 == 49}
    before = blocks_of(broker)
    inside.still(broker)  # no pass begins before everything is acked
    batch = queue.get_many(10_000)
    for index in range(10_000):
        if index % 50 != 49:
            batch[index].ack()
    queue.ack_many([], wait=True)
    settle_down(broker)
    after = blocks_of(broker)
    assert sum(after.values()) < 0.1 * sum(before.values())
    settle_down(broker, whole=True)
    assert blocks_of(broker) == after, "a block was hollowed twice"
    if how == "crash":
        spool = copy(broker, tmp_path / "copy")
        assert inspect.check_spool(spool) == []
    broker.close()
    assert inspect.check_spool(spool) == []
    assert inspect.read_message(spool, "q", 1_999).headers == headers[0]
    with pytest.raises(qflow.NotFound, match="settled"):
        inspect.read_message(spool, "q", 51)
    with qflow.open(spool, capacity_bytes=20_000) as broker:
        queue = broker.queue("q")
        assert len(queue) == len(expected)
        first = in_thread(lambda: queue.get(0))
        assert (first.body, first.redelivered) == (body(49), True)
        assert how == "crash" or first.delivery_count == 2
        first.nack()
        assert drain(queue) == expected
        assert broker.recovery.problems == ()
        assert broker.check() == []


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of many commits over small blocks, begun for next to nothing."""
    monkeypatch.setattr(hollowing, "HOLLOWING_STEPS", 10)
    monkeypatch.setattr(append, "TAIL_BYTES", 1_000)
    monkeypatch.setattr(hollowing, "LEAST_GIVEN_BACK", 1)
    monkeypatch.setattr(hollowing, "HOLLOW_BYTES", 1)


def test_a_pass_can_be_killed_at_any_step_and_resumes(tmp_path, monkeypatch):
    """Edges 20, 24: killed at any step of a pass, nothing that waits is lost, and the next open finishes the pass."""
    small_steps(monkeypatch)
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)  # the acks are one commit, however slow they come
    start, spool = tmp_path / "start", tmp_path / "spool"
    with qflow.open(start) as broker:
        queue = broker.declare_queue("q")
        for number in range(60):
            queue.put(body(number) * 3)
    stay = {0, 7, 20, 21, 58, 59}
    confirmed = tmp_path / "confirmed"

    def task(steps: Steps, path: Path) -> None:
        broker = open_before_steps(path, steps)
        inside.still(broker)
        batch = broker.queue("q").get_many(60)
        broker.queue("q").ack_many([one for one in batch if one.sequence not in stay], wait=True)
        confirmed.touch()
        settle_down(broker)
        broker.close()

    sizes = set()
    for _ in kills(task, spool, start):
        with qflow.open(spool) as broker:
            queue = broker.queue("q")
            settle_down(broker)
            sizes.add(len(blocks_of(broker)))
            came = drain(queue)
            assert list(came) == sorted(stay) or (len(came) == 60 and not confirmed.exists())
            assert all(came[number] == body(number) * 3 for number in came)
            assert broker.recovery.problems == ()
            assert broker.check() == []
            confirmed.unlink(missing_ok=True)
    assert len(sizes) == 2, "a kill left the pass undone"


def test_a_replay_goes_on_while_its_blocks_are_hollowed(open_spool, monkeypatch):
    """Edge 23: a LOGGED run is read by pieces; what is settled and hollowed in between changes nothing of the rest."""
    small_steps(monkeypatch)
    broker = open_spool()
    queue = broker.declare_queue("q")
    for number in range(300):
        queue.put(body(number))
    broker.close()
    broker = open_spool(capacity_bytes=3_000)
    queue = broker.queue("q")
    came: dict[int, bytes] = {}
    held = []
    while len(came) < 300:
        delivery = in_thread(lambda: queue.get(0))
        came[delivery.sequence] = delivery.body
        if delivery.sequence % 40 == 3:
            held.append(delivery)
        else:
            delivery.ack(wait=True)
        settle_down(broker, whole=delivery.sequence % 10 == 0)
        if delivery.sequence % 50 == 0:
            assert [entry.sequence for entry in queue.browse()] == list(range(delivery.sequence + 1, 300))
            assert broker.check() == []
    assert came == {number: body(number) for number in range(300)}
    assert list(came) == sorted(came)
    settle_down(broker, whole=True)
    assert len(blocks_of(broker)) <= len(held) + 1
    for delivery in held:
        delivery.nack()
    assert list(drain(queue)) == [delivery.sequence for delivery in held]


def test_a_damaged_spill_file_is_repaired_from_a_hollowed_block(spool, open_spool, monkeypatch):
    """I9: what is left of a block is what the log gives for a message whose spill file is damaged."""
    small_steps(monkeypatch)
    broker = open_spool(capacity_bytes=3_000)
    queue = broker.declare_queue("q")
    queue.put_many([body(number) for number in range(40)])
    batch = [in_thread(lambda: queue.get(0)) for _ in range(8)]
    for delivery in batch[1:]:
        delivery.ack(wait=True)
    settle_down(broker, whole=True)
    for path in (spool / "spill").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    batch[0].nack()
    assert drain(queue) == {number: body(number) for number in [0, *range(8, 40)]}
    assert queue.stats().spill_repaired_total


def edit(spool: Path, change: Callable[[Any], None]) -> None:
    """Change a closed log with plain LMDB."""
    env = lmdb.open(str(spool / "log"), map_size=2**30, lib_version=0)
    with env.begin(write=True) as txn:
        change(txn)
    env.close()


def test_a_block_that_vanished_beside_removed_ones_is_reported(spool, monkeypatch):
    """Edge 28: removed blocks are missed by nobody; one that holds a message and is gone is named."""
    small_steps(monkeypatch)
    with qflow.open(spool, journal="off") as broker:  # blocks as small as of puts that are written one by one
        queue = broker.declare_queue("q")
        for number in range(100):
            queue.put(body(number) * 3)
        queue.ack_many([one for one in queue.get_many(100) if one.sequence not in (0, 50, 99)], wait=True)
        settle_down(broker, whole=True)
        firsts = sorted(blocks_of(broker))
        assert len(firsts) == 3
    assert inspect.check_spool(spool) == []
    edit(spool, lambda txn: txn.delete(key_of(BLOCKS, OWNER, 0, firsts[1])))
    assert any("vanished" in problem or "found" in problem for problem in inspect.check_spool(spool))
    with qflow.open(spool) as broker:
        assert drain(broker.queue("q")) == {0: body(0) * 3, 99: body(99) * 3}
        assert any("'q'" in problem for problem in broker.recovery.problems)
        assert broker.queue("q").stats().quarantined_total == 1


def test_a_full_disk_puts_a_pass_off(spool, monkeypatch):
    """Edge 22, I12: without room nothing is hollowed and acks go on; with room it goes on by itself."""
    small_steps(monkeypatch)
    faults = Faults()
    broker = open_faulty(spool, faults)
    queue = broker.declare_queue("q")
    for number in range(60):
        queue.put(body(number) * 3)
    before = blocks_of(broker)
    monkeypatch.setattr(batch_writing, "HOLLOWING_BYTES", 2**30)
    faults.fail("allocate", errno.ENOSPC)
    first, *rest = queue.get_many(60)
    queue.ack_many(rest, wait=True)
    assert parts_of(queue).logged_lanes[0].hollow_due
    assert not inside.upkeep(broker).hollow()
    assert blocks_of(broker) == before
    faults.heal()
    monkeypatch.setattr(batch_writing, "HOLLOWING_BYTES", 2**20)
    settle_down(broker)
    assert len(blocks_of(broker)) == 2
    first.ack(wait=True)
    in_thread(broker.close)


def test_passes_cost_no_more_than_what_was_settled(open_spool, monkeypatch):
    """I14: with any number of marks that never join, all passes together take about a step for each ack."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([b"x" * 50] * 40_000)
    deliveries = list(queue.get_many(40_000))
    taken = []
    real = hollowing.hollow_lane

    def counted(*arguments: Any) -> Any:
        done = real(*arguments)
        taken.append(done.steps)
        return done

    monkeypatch.setattr(hollowing, "hollow_lane", counted)
    for start in range(1, 40_000, 2_000):
        queue.ack_many(deliveries[start : start + 2_000 : 2], wait=True)
        settle_down(broker)
    assert len(taken) > 5, "no pass ran"
    assert max(taken) < 2 * hollowing.HOLLOWING_STEPS + 1_024
    assert sum(taken) < 2.5 * 20_000
    queue.ack_many(deliveries[0::2], wait=True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [lmdb.Error("Input/output error"), lmdb.MapFullError("full"), KeyboardInterrupt()])
def test_a_pass_whose_commit_fails_changes_nothing_for_anybody(error, late, spool, monkeypatch):
    """Edges 21, 22, 26: a failure before or after the commit of a step leaves what waits as it was."""
    small_steps(monkeypatch)
    faults = Faults()
    broker = open_faulty(spool, faults)
    inside.still(broker)
    queue = broker.declare_queue("q")
    for number in range(60):
        queue.put(body(number))
    batch = queue.get_many(60)
    queue.ack_many([batch[index] for index in range(60) if index not in (0, 31)], wait=True)
    before = blocks_of(broker)
    faults.fail("commit", error, after=1, times=1, late=late)
    try:
        settle_down(broker)
    except (qflow.StorageError, KeyboardInterrupt):
        faults.heal()
    if not broker.engine.log.failed:
        settle_down(broker)
        assert len(blocks_of(broker)) < len(before)
        assert broker.check() == []
    with suppress(qflow.StorageError):
        in_thread(broker.close)
    assert inspect.check_spool(spool) == []
    with qflow.open(spool) as broker:
        settle_down(broker)
        assert drain(broker.queue("q")) == {0: body(0), 31: body(31)}
        assert broker.recovery.problems == ()
        assert broker.check() == []


def test_who_inspects_a_log_meanwhile_sees_nothing_wrong(spool, open_spool, monkeypatch):
    """I10: each transaction of a check in another process may find the blocks one step further."""
    small_steps(monkeypatch)
    monkeypatch.setattr(log_check, "READ_AT_ONCE", 1)
    broker = open_spool()
    inside.still(broker)
    queue = broker.declare_queue("q")
    for number in range(400):
        queue.put(body(number), durable=number % 7 != 5)
    batch = queue.get_many(400)
    queue.ack_many([batch[index] for index in range(400) if index % 20], wait=True)
    before = blocks_of(broker)

    class Meanwhile:
        def reading(self) -> Any:
            assert inside.upkeep(broker).hollow() or not parts_of(queue).logged_lanes[0].hollow_due
            return broker.engine.log._env.reading()

    record = QueueRecord(OWNER, "q", 0, {}, {0: Row()}, False)
    assert list(log_check.check_lane(Meanwhile(), record, 0, Row())) == []  # type: ignore[arg-type]
    assert len(blocks_of(broker)) < 0.8 * len(before)
    batch.nack()
