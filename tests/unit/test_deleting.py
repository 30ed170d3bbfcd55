"""One waiting message is deleted by its sequence, wherever it lies; what else there is stays as it is."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.memory import run_list
from qflow.message import OVERHEAD_BYTES
from qflow.queues import deleting
from qflow.queues.queue import parts_of
from unit.clocks import Clock, open_still, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
BODY_BYTES = 500
ROOM = 20 * (BODY_BYTES + OVERHEAD_BYTES)
"""Memory for so many messages."""
MANY = 60
LATER_S = 1000


def body(number: int) -> bytes:
    return b"%04d" % number + bytes(BODY_BYTES - 4)


Put = tuple[list[int], list[int]]
"""The sequences of messages, by their numbers; and of those that wait, in the order in which they would come."""


def put_plain(queue: qflow.Queue) -> Put:
    sequences = list(queue.put_many([body(number) for number in range(12)]))
    return sequences, sequences


def put_urgent(queue: qflow.Queue) -> Put:
    sequences = [queue.put(body(number), priority=number % 3) for number in range(12)]
    return sequences, sequences[2::3] + sequences[1::3] + sequences[::3]


def put_spilled(queue: qflow.Queue) -> Put:
    sequences = [queue.put(body(number)) for number in range(MANY)]
    return sequences, sequences


def put_unlogged(queue: qflow.Queue) -> Put:
    sequences = [queue.put(body(number), durable=False) for number in range(MANY)]
    return sequences, sequences


def put_delayed(queue: qflow.Queue) -> Put:
    """Their due times are in no order, and there are more than memory holds."""
    sequences = [queue.put(body(number), delay_s=LATER_S + number * 37 % 101) for number in range(MANY)]
    return sequences, [sequences[number] for number in sorted(range(MANY), key=lambda number: number * 37 % 101)]


def put_and_given_back(queue: qflow.Queue) -> Put:
    """Every other one of the first: they lie scattered."""
    sequences, _ = put_spilled(queue)
    taken = [queue.get(0) for _ in range(10)]
    for delivery in taken[::2]:
        delivery.nack()
    for delivery in taken[1::2]:
        delivery.ack()
    return sequences, sequences[0:10:2] + sequences[10:]


def put_and_given_back_for_later(queue: qflow.Queue) -> Put:
    sequences, _ = put_plain(queue)
    for number in range(6):
        queue.get(0).nack(delay_s=LATER_S - number)
    return sequences, sequences[5::-1] + sequences[6:]


PUTS: dict[str, Callable[[qflow.Queue], Put]] = {
    "in memory": put_plain,
    "of a priority": put_urgent,
    "spilled": put_spilled,
    "not logged": put_unlogged,
    "delayed": put_delayed,
    "given back": put_and_given_back,
    "given back for later": put_and_given_back_for_later,
}


def sequences_of(queue: qflow.Queue) -> list[int]:
    return [entry.sequence for entry in queue.browse()]


def others_than(queue: qflow.Queue, sequences: list[int], gone: list[int], clock: Clock) -> list[int]:
    """Take all that comes, now that everything is due; it is all but what is gone, and as it was put."""
    clock.advance(2 * LATER_S)
    came: list[int] = []
    while batch := queue.get_many(7, timeout_s=0):
        assert batch.bodies == [body(sequences.index(sequence)) for sequence in batch.sequences]
        came += batch.sequences
        batch.ack()
    assert sorted(came) == sorted(set(sequences) - set(gone))
    return came


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
@pytest.mark.parametrize("puts", PUTS)
def test_a_waiting_message_is_gone_wherever_it_lies(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, puts: str, durable: bool
) -> None:
    """The first, the last, those in between, in any order; the others come as they would have; each counts once."""
    for steps in ("AT_ONCE", "SOUGHT_AT_ONCE"):
        monkeypatch.setattr(deleting, steps, 3)
    monkeypatch.setattr(run_list, "SMALL_RUNS", 2)
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=ROOM, priorities=3)
    sequences, order = PUTS[puts](queue)
    assert sorted(sequences_of(queue)) == sorted(order)
    chance = random.Random(puts)
    gone = [order[0], order[-1], *chance.sample(order[1:-1], len(order) // 2)]
    for count, sequence in enumerate(gone, 1):
        assert queue.delete(sequence) is True
        assert queue.delete(sequence) is False
        assert len(queue) == len(order) - count
        assert count % 5 or broker.check() == []
    stats = queue.stats()
    assert (stats.deleted_total, stats.messages, stats.acquired_messages) == (len(gone), len(order) - len(gone), 0)
    assert sorted(sequences_of(queue)) == sorted(set(order) - set(gone))
    came = others_than(queue, sequences, [*gone, *(set(sequences) - set(order))], clock)
    assert came == [sequence for sequence in order if sequence not in gone]
    assert queue.stats().resident_bytes == 0
    assert broker.check() == []


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
def test_only_what_waits_is_deleted(open_at: Open, clock: Clock, durable: bool) -> None:
    """Not what was never put, what is held, or was settled; what was given back waits again."""
    queue = open_at().declare_queue("q", durable=durable)
    sequences = queue.put_many([b"0", b"1", b"2", b"3"])
    later = queue.put(b"later", delay_s=5)
    held, batch = queue.get(0), queue.get_many(2, 0)
    for sequence in (*sequences[:3], 4, 10**30):
        assert queue.delete(sequence) is False
    assert queue.delete(sequences[3]) is True
    assert queue.delete(later) is True
    held.nack()
    assert queue.delete(sequences[0]) is True
    batch.ack()
    assert queue.delete(sequences[1]) is False
    clock.advance(10)
    assert len(queue.get_many(9, timeout_s=0)) == len(queue) == 0
    assert queue.put(b"next") == 4  # never a sequence again
    stats = queue.stats()
    assert (stats.deleted_total, stats.acked_total, stats.purged_total, stats.put_total) == (3, 2, 0, 6)


def test_what_is_no_sequence_is_refused(open_spool: Open) -> None:
    """In words that name it; a queue that is gone says so."""
    broker = open_spool()
    queue, other = broker.declare_queue("q"), broker.declare_queue("other")
    for wrong in (-1, True, "0", 0.0, None):
        with pytest.raises(qflow.InvalidArgument, match="sequence must be an int of at least 0"):
            queue.delete(wrong)  # type: ignore[arg-type]
    broker.delete_queue("q")
    with pytest.raises(qflow.QueueDeleted):
        queue.delete(0)
    broker.close()
    with pytest.raises(qflow.BrokerClosed):
        other.delete(0)


@pytest.mark.parametrize("settings", [{"limit_messages": 3}, {"limit_bytes": 3 * BODY_BYTES}])
def test_a_put_that_waits_at_a_limit_goes_on(open_at: Open, settings: dict[str, Any]) -> None:
    """The room of what is deleted is there at once."""
    queue = open_at().declare_queue("q", resume_ratio=1.0, **settings)
    sequences = queue.put_many([body(number) for number in range(3)])
    put: list[int | None] = []
    thread = threading.Thread(target=lambda: put.append(queue.put(body(3))))
    thread.start()
    until(lambda: queue.stats().blocked_putters == 1)
    assert queue.delete(sequences[1])
    thread.join()
    assert put == [3]


def test_a_deleted_message_becomes_no_dead_letter(open_at: Open, clock: Clock) -> None:
    """Nor is it counted as expired, though its time is over before anybody looks."""
    broker = open_at()
    dead = broker.declare_queue("dead")
    queue = broker.declare_queue("q", dead_letter="dead", max_deliveries=2)
    late, spent = queue.put(b"late", ttl_s=5), queue.put(b"spent")
    queue.get_many(2, 0).nack()
    clock.advance(10)
    assert queue.delete(spent)
    assert queue.delete(late)
    assert (len(queue), len(dead)) == (0, 0)
    stats = queue.stats()
    assert (stats.expired_total, stats.dead_lettered_total, stats.deleted_total) == (0, 0, 2)


@pytest.mark.owner_only
@pytest.mark.parametrize("dirty", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("delay_s", [0.0, LATER_S], ids=["plain", "delayed"])
def test_what_only_the_log_has_is_deleted_there(
    spool: Path, tmp_path: Path, clock: Clock, delay_s: float, dirty: bool
) -> None:
    """After a restart, of what nobody has read back; and at the next one it is gone."""
    at, gone = spool, []
    with open_still(at, clock) as broker:
        queue = broker.declare_queue("q")
        sequences = [queue.put(body(number), delay_s=delay_s) for number in range(30)]
    for number, picked in enumerate(([0, 1, 29, 14, 13, 15], [2, 28, 20], list(range(3, 13)))):
        broker = open_still(at, clock, capacity_bytes=ROOM)
        queue = broker.queue("q")
        assert 0 < queue.stats().logged_messages <= len(queue) == 30 - len(gone)
        for place in picked:
            assert queue.delete(sequences[place]) is True
            gone.append(sequences[place])
            assert [queue.delete(sequence) for sequence in gone] == [False] * len(gone)
            assert broker.check() == []
        assert 0 < queue.stats().logged_messages <= 30 - len(gone)
        if dirty:
            at = inside.copy_as_killed(broker, tmp_path / str(number))
        broker.close()
    with open_still(at, clock) as broker:
        while inside.upkeep(broker).sweep():
            pass
        assert others_than(broker.queue("q"), sequences, gone, clock) == sorted(set(sequences) - set(gone))
        assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("picked", [[1], [2], [2, 1], [1, 2, 3], [3, 2], [1, 3]])
def test_what_stands_before_deleted_messages_of_the_log_may_leave_later(spool: Path, picked: list[int]) -> None:
    """The log counts the deleted ones off with it; what waits behind them is not taken for purged."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q", capacity_bytes=0).put_many([body(number) for number in range(4)])
    with qflow.open(spool) as broker:
        queue = broker.queue("q")
        inside.still(broker)
        first = queue.get(timeout_s=0)
        assert [queue.delete(sequence) for sequence in picked] == [True] * len(picked)
        first.ack(wait=True)
        assert broker.check() == []
        left = [number for number in (1, 2, 3) if number not in picked]
        queue.put(body(4))
        for number in (*left, 4):
            delivery = queue.get(timeout_s=0)
            assert delivery.body == body(number)
            delivery.ack(wait=True)
        assert len(queue) == 0
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert (len(broker.queue("q")), broker.recovery.problems) == (0, ())


@pytest.mark.owner_only
def test_messages_of_the_log_leave_while_others_are_replayed(spool: Path) -> None:
    """A run that a delete has claimed is waited for by gets, and the other way round; nothing comes twice."""
    with qflow.open(spool) as broker:
        sequences = list(broker.declare_queue("q").put_many([body(number) for number in range(1_000)]))
    with qflow.open(spool, capacity_bytes=ROOM) as broker:
        queue = broker.queue("q")
        deleted: list[int] = []
        came: list[int] = []

        def delete(part: int) -> None:
            deleted.extend(sequence for sequence in sequences[part::16] if queue.delete(sequence))

        threads = [threading.Thread(target=delete, args=(part,)) for part in (3, 7, 11, 11)]
        for thread in threads:
            thread.start()
        while batch := queue.get_many(50, timeout_s=0):
            came += batch.sequences
            batch.ack()
        for thread in threads:
            thread.join()
        assert len(queue) == 0
        assert came == sorted(came)
        assert sorted(came + deleted) == sequences
        assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("delayed", [False, True], ids=["in order", "delayed"])
def test_holes_take_no_memory_of_their_own(open_at: Open, monkeypatch: pytest.MonkeyPatch, delayed: bool) -> None:
    """I7: every other one of many on the disk is deleted, and there are not as many runs, or chunks, as holes."""
    monkeypatch.setattr(run_list, "SMALL_RUNS", 16)
    broker = open_at()
    queue = broker.declare_queue("q", durable=False, capacity_bytes="256KiB")
    sequences = [queue.put(bytes(100), delay_s=LATER_S if delayed else 0) for _ in range(4_000)]
    lanes = parts_of(queue).lanes

    def pieces() -> int:
        chunks = sum(len(schedule.spilled) for schedule in lanes.schedules.values())
        return chunks + sum(1 for runs in lanes.lists.values() for _ in runs)

    before = pieces()
    for sequence in sequences[2_500:3_500:2]:
        assert queue.delete(sequence)
    assert pieces() < before + 50
    assert queue.stats().resident_bytes <= 256 * 1024
    assert sorted(sequences_of(queue)) == sequences[:2_500] + sequences[2_501:3_500:2] + sequences[3_500:]
    assert broker.check() == []


@pytest.mark.owner_only
def test_what_is_left_of_small_runs_lies_in_a_schedule(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: of each few that are put one is deleted; a run for what is left of them would take more than they do."""
    monkeypatch.setattr(run_list, "SMALL_RUNS", 16)
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    left: list[int] = []
    for number in range(300):
        sequences = list(queue.put_many([b"x"] * 5))
        assert queue.delete(sequences.pop(number % 5))
        left += sequences
    runs = [run for run in parts_of(queue).lanes.runs if run.waiting]
    assert len(runs) < 3 * 16
    assert broker.check() == []
    assert [sequence for _ in left for sequence in [queue.get(0).sequence]] == left


@pytest.mark.owner_only
@pytest.mark.parametrize("delayed", [False, True], ids=["logged", "delayed"])
def test_what_is_purged_while_it_is_looked_for_is_not_deleted(
    spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, delayed: bool
) -> None:
    """It was taken away by the purge, which counts it."""
    with open_still(spool, clock) as broker:
        sequence = broker.declare_queue("q").put_many([body(number) for number in range(MANY)])[-1]
    with open_still(spool, clock, capacity_bytes=ROOM) as broker:
        queue = broker.queue("q")
        if delayed:
            queue.purge()
            put_delayed(queue)
            sequence = next(entry.sequence for entry in queue.browse() if entry.spilled)
        where, name = (deleting, "find_spilled") if delayed else (deleting.InLog, "read")
        find, purged = getattr(where, name), []

        def purge_meanwhile(*given: Any) -> Any:
            found = find(*given)
            purged.append(queue.purge())
            return found

        monkeypatch.setattr(where, name, purge_meanwhile)
        assert queue.delete(sequence) is False
        assert (purged, queue.stats().deleted_total) == ([MANY], 0)
        assert broker.check() == []


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
def test_many_are_deleted_together(open_at: Open, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait, each once, more than are on their way together; the others are left out of the answer."""
    monkeypatch.setattr(deleting, "MOST_ON_THE_WAY", 4)
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable)
    sequences = queue.put_many([body(number) for number in range(12)])
    held = queue.get(0)
    wanted = [sequences[place] for place in (9, 0, 3, 3, 4, 5, 11, 1)]
    assert queue.delete_many(iter([*wanted, 10**30])) == [sequences[place] for place in (9, 3, 4, 5, 11, 1)]
    assert queue.delete_many(wanted) == queue.delete_many([]) == []
    held.ack()
    assert [delivery.sequence for delivery in queue.get_many(20, 0)] == [sequences[place] for place in (2, 6, 7, 8, 10)]
    for wrong in (3, "34", None, [sequences[2], -1], [True]):
        with pytest.raises(qflow.InvalidArgument, match="sequence"):
            queue.delete_many(wrong)  # type: ignore[arg-type]
    assert len(queue) == 5
    assert queue.stats().deleted_total == 6
