"""What a ring drops for what arrives: what waits, then what is delayed, and never what a consumer holds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import qflow
from qflow import Overflow
from qflow.memory import run_list
from qflow.message import OVERHEAD_BYTES
from qflow.queues import expiry
from qflow.queues import ring as rings
from qflow.queues.queue import parts_of
from unit.clocks import Clock

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COST = 1000 + OVERHEAD_BYTES


def body(number: int) -> bytes:
    return b"%04d" % number * 250


def ring(broker: qflow.Broker, durable: bool, limit: int, **settings: object) -> qflow.Queue:
    return broker.declare_queue(
        "q", durable=durable, limit_messages=limit, on_overflow=Overflow.DROP_OLDEST, **settings
    )


def numbers_of(queue: qflow.Queue) -> list[int]:
    """Take and settle what can be had now; return the numbers of the bodies."""
    numbers: list[int] = []
    while batch := queue.get_many(1000, timeout_s=0):
        numbers += [int(text[:4]) for text in batch.bodies]
        batch.ack()
    return numbers


def dropped_by_puts(queue: qflow.Queue, puts: int, **options: object) -> list[int]:
    """Return the sequences that go as so many more messages are put, one by one."""
    dropped: list[int] = []
    for number in range(puts):
        before = {entry.sequence for entry in queue.browse()}
        queue.put(body(1000 + number), timeout_s=0, **options)
        dropped += sorted(before - {entry.sequence for entry in queue.browse()})
    return dropped


def test_what_waits_goes_before_what_is_delayed(open_at: Open, clock: Clock, durable: bool) -> None:
    """Of any priority, and whatever is older; then what is due soonest, be it put so or given back so."""
    queue = ring(open_at(), durable, 5, priorities=2)
    delayed = [queue.put(body(number), delay_s=delay) for number, delay in enumerate((30, 10))]
    queue.put_many([body(2), body(3)])
    for delivery, delay in zip(list(queue.get_many(2)), (20, 5), strict=True):
        delivery.nack(delay_s=delay)
    high = queue.put(body(4), priority=1)
    expected = [high, 1, delayed[1], 0, delayed[0]]
    assert dropped_by_puts(queue, 5, priority=1, delay_s=100) == expected
    assert queue.stats().dropped_total == 5


def test_what_is_delayed_goes_from_the_lowest_priority(open_at: Open, clock: Clock, durable: bool) -> None:
    """Whatever is due sooner, or was put before; more at once than one time has, too."""
    queue = ring(open_at(), durable, 6, priorities=3)
    places = [(2, 50), (0, 90), (0, 10), (1, 5), (0, 50)]
    sequences = [queue.put(body(0), priority=priority, delay_s=delay) for priority, delay in places]
    queue.put(body(0))
    queue.get().nack(delay_s=60)
    assert dropped_by_puts(queue, 2, priority=2, delay_s=100) == [sequences[2], sequences[4]]
    queue.put_many([body(1)] * 3, priority=2, delay_s=100)
    left = {entry.sequence for entry in queue.browse()}
    assert sequences[0] in left
    assert not left & {0, sequences[1], sequences[3]}


def test_a_batch_takes_what_is_due_soonest_of_what_was_put_so_and_given_back_so(
    open_at: Open, clock: Clock, durable: bool
) -> None:
    """In one step; the two have clocks of their own."""
    queue = ring(open_at(), durable, 4)
    queue.put_many([body(0), body(1)])
    for delivery, delay in zip(list(queue.get_many(2)), (10, 40), strict=True):
        delivery.nack(delay_s=delay)
    queue.put(body(2), delay_s=20)
    queue.put(body(3), delay_s=50)
    queue.put_many([body(4), body(5)])
    clock.advance(60)
    assert sorted(numbers_of(queue)) == [1, 3, 4, 5]


def test_a_ring_of_what_came_due_keeps_what_is_put(open_at: Open, clock: Clock, durable: bool) -> None:
    """It takes the place of what is older, and the next one does not take its place."""
    queue = ring(open_at(), durable, 2)
    queue.put_many([body(0), body(1)], delay_s=5)
    clock.advance(10)
    queue.put(body(2))
    queue.put(body(3))
    assert numbers_of(queue) == [2, 3]


def test_what_is_due_or_has_expired_goes_in_its_place(open_at: Open, clock: Clock, durable: bool) -> None:
    """What is due waits; what has expired, and nobody has noticed, goes as what it was: dropped, and no dead letter."""
    broker = open_at()
    queue = ring(broker, durable, 5, dead_letter="dead", priorities=2)
    late = queue.put(body(0), delay_s=5, ttl_s=5)
    due = queue.put(body(1), delay_s=3)
    last = queue.put(body(2), delay_s=50)
    plain = queue.put(body(3), ttl_s=1)
    high = queue.put(body(4), delay_s=4, priority=1)
    clock.advance(20)
    assert dropped_by_puts(queue, 5, delay_s=100) == [due, late, plain, high, last]
    stats = queue.stats()
    assert (stats.dropped_total, stats.expired_total) == (5, 0)
    assert "dead" not in broker.queues()


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [False], ids=["transient"])
def test_what_a_get_has_passed_makes_room_first(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """It has expired, and is still counted: a ring refuses nothing for that, and drops nothing else."""
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 100)
    monkeypatch.setattr(rings, "DROPPED_AT_ONCE", 100)
    broker = open_at()
    queue = ring(broker, durable, 2000)
    queue.put_many([body(1)] * 1990, ttl_s=1)
    queue.put_many([body(2)] * 10)
    clock.advance(2)
    assert queue.get(timeout_s=0).body == body(2)
    left = len(queue)
    assert left > 1500
    queue.put_many([body(3)] * 1500, timeout_s=0)
    stats = queue.stats()
    assert stats.messages <= 2000
    assert (stats.put_total - stats.messages, stats.dropped_total) == (stats.expired_total, 0)
    assert numbers_of(queue) == [2] * 9 + [3] * 1500
    assert broker.check() == []


def test_a_ring_that_was_just_opened_drops_what_is_delayed(open_at: Open, clock: Clock) -> None:
    """It is in the log, and nobody knows yet what is due soonest."""
    broker = open_at()
    queue = ring(broker, True, 2)
    queue.put_many([body(0), body(1)], delay_s=100)
    broker.close()
    queue = open_at().queue("q")
    assert queue.put(body(2), timeout_s=0) == 0
    assert (len(queue), queue.stats().delayed_messages, queue.stats().dropped_total) == (2, 1, 1)


def test_what_is_delayed_is_dropped_from_disk_while_memory_is_full_of_what_is_held(
    open_at: Open, clock: Clock, durable: bool
) -> None:
    """Consumers hold all the memory, and the ring still turns."""
    broker = open_at()
    queue = ring(broker, durable, 20, capacity_bytes=5 * COST)
    queue.put_many([body(number) for number in range(4)])
    held = queue.get_many(4)
    assert len(held) == 4
    queue.put_many([body(number) for number in range(4, 20)], delay_s=100)
    for number in range(20, 23):
        queue.put(body(number), timeout_s=10, delay_s=100)
    assert len(queue) == 20
    held.ack()
    clock.advance(200)
    assert numbers_of(queue) == list(range(7, 23))


@pytest.mark.owner_only
@pytest.mark.parametrize("place", ["memory", "spill store", "log"])
def test_who_may_not_read_knows_whether_what_is_delayed_must_be_read(
    open_at: Open, clock: Clock, durable: bool, place: str
) -> None:
    """A task has another thread drop what is not in memory."""
    if place == "log" and not durable:
        pytest.skip("nothing of it is in the log")
    broker = open_at()
    queue = ring(broker, durable, 20)
    queue.put_many([body(number) for number in range(20)], delay_s=100)
    if place == "spill store":
        broker.alter_queue("q", capacity_bytes=0)
    elif place == "log":
        broker.close()
        queue = open_at().queue("q")
    assert parts_of(queue).ring.reads() is (place != "memory")


def test_scattered_messages_are_dropped_in_their_order(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Some of what came back is in the lane's list, and some is not."""
    monkeypatch.setattr(run_list, "SMALL_RUNS", 8)
    queue = ring(open_at(), durable, 100)
    queue.put_many([body(number) for number in range(100)])
    held = list(queue.get_many(80))
    random.Random(1).shuffle(held)
    for delivery in held[:30]:
        delivery.ack()
    for delivery in held[30:]:
        delivery.nack()
    left = [entry.sequence for entry in queue.browse()]
    assert len(left) == 70
    queue.put_many([body(100)] * 30)
    dropped = dropped_by_puts(queue, 10)
    queue.put_many([body(101)] * 15)
    assert dropped == left[:10]
    assert [entry.sequence for entry in queue.browse()][:45] == left[25:]
