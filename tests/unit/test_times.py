"""Time: messages that expire, messages that wait for theirs, and leases, under clocks that the test moves."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from drivers import beside
from faults.seams import in_thread
from qflow.delivery import Delivery
from qflow.held_batch import HeldBatch
from qflow.memory import run_list
from qflow.memory.run import Place
from qflow.message import DELAYED, OVERHEAD_BYTES, lane_of
from qflow.queues import expiry, tending
from qflow.queues.context import Unlocked
from qflow.queues.gets import Gets
from qflow.queues.getting import TURNS
from qflow.queues.held import Held
from qflow.queues.queue import parts_of
from qflow.queues.restorer import Restorer
from qflow.storage.streams.producers import PRODUCER_EXPIRY_S
from unit.clocks import LONG_S, Clock, open_still, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COST = 1000 + OVERHEAD_BYTES


def body(number: int) -> bytes:
    return b"%04d" % number * 250


def numbers_of(queue: qflow.Queue) -> list[int]:
    """Take and settle what can be had now; return the numbers of the bodies."""
    numbers: list[int] = []
    while batch := queue.get_many(1000, timeout_s=0):
        numbers += [int(text[:4]) for text in batch.bodies]
        batch.ack()
    return numbers


# Expiry --------------------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
@pytest.mark.parametrize("capacity", [None, 100 * COST])
def test_a_get_passes_many_expired_messages_at_once(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool, capacity: int | None
) -> None:
    queue = open_at().declare_queue("q", durable=durable, capacity_bytes=capacity)
    queue.put(b"head")
    queue.put_many([b"x" * 1000] * 1000, ttl_s=1)
    queue.put(b"tail")
    exits, steps = parts_of(queue).exits, []
    let_go_of = exits.let_go_of
    monkeypatch.setattr(exits, "let_go_of", lambda *given: steps.append(given) or let_go_of(*given))
    clock.advance(2)
    assert queue.get(0).body == b"head"
    assert queue.get(0).body == b"tail"
    assert len(steps) <= 30  # what is read from disk comes a part at a time
    assert queue.stats().expired_total == 1000


@pytest.mark.owner_only
@pytest.mark.parametrize("batch", [2_000, 500, 1], ids="batches of {}".format)
def test_a_get_passes_what_is_known_to_have_expired_without_a_look(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """However much it is: it goes when maintenance looks, a bounded number in each step, and is counted until then."""
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 100)
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    for number in range(2_000 // batch):
        queue.put_many([b"late"] * batch, ttl_s=1 + number / 10_000)
    total = len(queue)
    size = queue.stats().bytes // total
    queue.put(b"tail")
    clock.advance(2)
    first = queue.get(timeout_s=0)
    assert first.body == b"tail"
    stats = queue.stats()
    assert 0 < stats.expired_total <= 200
    assert stats.expired_total + stats.resident_messages == total
    assert stats.bytes == size * (stats.messages - 1) + 4
    assert (stats.acquired_messages, stats.put_total) == (1, total + 1)
    assert broker.check() == []
    first.nack()
    assert queue.get(timeout_s=0).body == b"tail"
    while inside.tick(queue):
        """There is more than it had time for."""
    assert queue.stats().expired_total == total
    assert len(queue) == 1
    assert broker.check() == []


@pytest.mark.owner_only
def test_what_does_not_expire_is_not_taken_for_what_has(open_at: Open, clock: Clock) -> None:
    """Whatever lies between messages that have, and whatever way they were taken and came back."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    sent: list[bytes] = []

    def put(body: bytes, count: int, ttl_s: float | None) -> None:
        queue.put_many([body] * count, ttl_s=ttl_s) if count > 1 else queue.put(body, ttl_s=ttl_s)
        if ttl_s is None or ttl_s > 5:
            sent.extend([body] * count)

    lots = "300:1 1: 300:1 2:9 1:1 1:1 1: 1:1 300: 1:1 1: 1:1 400:9 300:1 1:9 1:1"
    for round_ in range(2):
        for number, lot in enumerate(lots.split()):
            count, _, ttl_s = lot.partition(":")
            put(b"%d %d" % (round_, number), int(count), float(ttl_s) if ttl_s else None)
    taken = [queue.get() for _ in range(400)]
    for one in reversed(taken[:399]):
        one.nack()
    clock.advance(2)
    assert taken[399].body == b"0 2"
    taken[399].nack()
    found = []
    while len(found) < len(sent):
        one = queue.get(timeout_s=0)
        found.append(one.body)
        one.ack()
    assert found == sent
    with pytest.raises(qflow.QueueEmpty):
        queue.get(timeout_s=0)
    assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("spilled", [False, True], ids=["in memory", "spilled"])
def test_what_expires_behind_others_is_looked_for_in_some_runs_at_a_time(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, spilled: bool
) -> None:
    """However many there are: a look goes on where the one before has ended, and a put waits for one look at most."""
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 20)
    monkeypatch.setattr(expiry, "DROPPED", 5)
    monkeypatch.setattr(run_list, "OWN_RUN", 10)
    broker = open_at(spill="segments")
    queue = broker.declare_queue("q", durable=False, capacity_bytes=200 * COST if spilled else None)
    for _ in range(50):
        queue.put_many([b"x" * 1000] * 10)
        queue.put_many([b"x" * 1000] * 10, ttl_s=1)
    queue.put(b"tail")
    clock.advance(2)
    looked = [0]
    may_expire = expiry.Expiry._may_expire

    def look(self: expiry.Expiry, *arguments: Any) -> bool:
        looked[-1] += 1
        return may_expire(self, *arguments)

    monkeypatch.setattr(expiry.Expiry, "_may_expire", look)
    parts = parts_of(queue)
    with parts.context.lock:
        while parts.expiry.expire_behind():
            looked.append(0)
    assert len(looked) > 3
    assert max(looked) <= 20
    expired = queue.stats().expired_total
    assert expired == 500 or spilled
    assert expired > 50
    assert broker.check() == []


@pytest.mark.owner_only
def test_what_was_set_aside_is_spilled_where_memory_is_short(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put finds room as it would if nobody had passed what has expired."""
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 10)
    broker = open_at()
    queue = broker.declare_queue("q", durable=False, capacity_bytes=600 * COST)
    queue.put_many([b"x" * 1000] * 500, ttl_s=1)
    queue.put(b"tail")
    clock.advance(2)
    queue.get(timeout_s=0).ack()
    assert len(queue) > 400
    queue.put_many([b"y" * 1000] * 400, timeout_s=0)
    assert broker.check() == []
    assert queue.get(timeout_s=LONG_S).body == b"y" * 1000
    inside.tick(queue)
    assert broker.check() == []
    assert queue.stats().expired_total == 500
    queue.purge()
    assert len(queue) == 0
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_purge_takes_what_was_set_aside(open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 10)
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"late"] * 500, ttl_s=1)
    queue.put(b"tail")
    clock.advance(2)
    queue.get(timeout_s=0).ack()
    assert queue.purge() == len(queue) + queue.stats().purged_total > 400
    assert queue.stats().resident_bytes == 0
    assert broker.check() == []


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [True], ids=["durable"])
def test_a_get_lets_others_have_the_lock_while_it_passes_expired_messages(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """It lets go of a bounded number in each step; one that does not wait takes a few, and finds nothing."""
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 100)
    queue = open_at().declare_queue("q", durable=durable)
    queue.put_many([b"late"] * 2_000, ttl_s=1)
    queue.put(b"tail")
    clock.advance(2)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(timeout_s=0)
    expired = queue.stats().expired_total
    assert 0 < expired <= (TURNS + 1) * 101
    getting = parts_of(queue).gets.begin(1, LONG_S, "getter", single=True)
    while getting.step(None, may_work=True) is not None:
        before, expired = expired, queue.stats().expired_total
        assert before < expired <= before + 101
    assert getting.delivery is not None
    assert getting.delivery.body == b"tail"
    assert queue.stats().expired_total == 2_000


def first_for_a_task(broker: qflow.Broker, timeout_s: float) -> bytes:
    """Return the body of the first message that a task gets."""

    async def scenario() -> bytes:
        async with beside(broker) as tasks:
            return bytes((await tasks.queue("q").get(timeout_s)).body)

    return asyncio.run(scenario())


def test_a_task_that_waits_passes_more_expired_messages_than_go_at_once(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 100)
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"late"] * 1_000, ttl_s=1)
    queue.put(b"tail")
    clock.advance(2)
    assert first_for_a_task(broker, LONG_S) == b"tail"


def full_beside_a_transaction(open_at: Open) -> tuple[qflow.Broker, threading.Thread]:
    """Fill the memory of a queue with deliveries, its head in the log; one of them leaves with what waits at a limit."""
    broker = open_at()
    queue = broker.declare_queue("q", capacity_bytes=20 * COST + 300, priorities=2, dead_letter="dead")
    queue.put_many([b"small"] * 5)
    queue.put_many([body(0)] * 60)
    broker.close()
    broker = open_at()
    queue, held = broker.queue("q"), []
    while batch := queue.get_many(100, timeout_s=0):
        held.append(batch)
    assert parts_of(queue).lanes.runs.settle_head().place is Place.LOGGED
    broker.declare_queue("full", limit_messages=1).put(b"1")

    def transact() -> None:
        with broker.transaction() as tx:
            tx.put("full", b"2")
            tx.ack(held[0][0])

    waiting = threading.Thread(target=transact, daemon=True)
    waiting.start()
    until(lambda: parts_of(queue).held.leaving and parts_of(broker.queue("full")).admission.line)
    for index in (1, 2):
        held[0][index].ack()
    queue.put(b"late", priority=1, ttl_s=1)
    assert parts_of(queue).lanes.runs.settle_head().place is Place.LOGGED
    return broker, waiting


@pytest.mark.owner_only
@pytest.mark.parametrize("caller", ["maintenance", "thread", "task"])
def test_what_expires_waits_for_no_transaction_that_waits_for_room(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, caller: str
) -> None:
    """That may be for ever: of what leaves, only what the log has makes room for the head."""
    broker, waiting = full_beside_a_transaction(open_at)
    queue, log, drains = broker.queue("q"), broker.engine.log, []
    drain = log.drain

    def drain_twice() -> None:
        drains.append(caller)
        assert len(drains) <= 2, "it waits for what the log does not have"
        drain()

    monkeypatch.setattr(log, "drain", drain_twice)
    clock.advance(2)
    if caller == "maintenance":
        inside.tick(queue)
    else:
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0) if caller == "thread" else first_for_a_task(broker, 0)
    monkeypatch.undo()
    log.drain()
    assert (len(broker.queue("dead")), len(parts_of(queue).held.leaving)) == (1, 1)
    broker.queue("full").get(0).ack()
    waiting.join(LONG_S)
    assert not waiting.is_alive()
    assert broker.queue("full").get(0).body == b"2"


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [True, False])
def test_the_length_is_right_as_the_first_delayed_message_comes(open_at: Open, durable: bool) -> None:
    """Its lane is another one, whose sequences begin far up: they are not taken off those of the first lane."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put(b"0")
    with inside.before_lock(queue, lambda: queue.put(b"later", delay_s=LONG_S), straight=True):
        assert len(queue) == 2


@pytest.mark.owner_only
def test_what_another_thread_brings_into_memory_is_to_be_looked_at_again(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who has what expires go at its moment: nobody else tells when that is."""
    monkeypatch.setattr(Restorer, "refill", lambda self: False)
    broker = open_at()
    broker.declare_queue("q").put(b"x", ttl_s=1)
    broker.close()
    queue = parts_of(open_at().queue("q"))
    head = queue.lanes.ranked[0].settle_head()
    assert head.place is Place.LOGGED
    head.claim = object()
    assert tending.expire(queue) == 0
    head.claim = None
    assert tending.expire(queue) == pytest.approx((clock.wall() + 1) * 1000, abs=1)
    clock.advance(2)
    assert tending.expire(queue) is None
    assert queue.lanes.messages() == 0


@pytest.mark.owner_only
@pytest.mark.parametrize("head", [True, False])
def test_maintenance_lets_expired_messages_go_in_steps(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool, head: bool
) -> None:
    """As many as it has time for, a bounded number each time it has the lock."""
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 100)
    monkeypatch.setattr(tending, "perf_counter", lambda: 0.0)
    queue = open_at().declare_queue("q", durable=durable)
    if head:
        queue.put(b"head")
    queue.put_many([b"late"] * 1_000, ttl_s=1)
    clock.advance(2)
    totals: list[int] = []
    monkeypatch.setattr(tending, "sleep", lambda _: totals.append(queue.stats().expired_total))
    inside.tick(queue)
    totals.append(queue.stats().expired_total)
    assert totals[-1] == 1_000
    assert all(after - before <= 100 for before, after in itertools.pairwise([0, *totals]))
    assert len(queue) == head


@pytest.mark.owner_only
@pytest.mark.parametrize("stretch", [1, 10, 300])
def test_what_expired_behind_other_messages_goes_without_a_getter(
    open_at: Open, clock: Clock, durable: bool, stretch: int
) -> None:
    """Those stay in order, and what is left of the list takes little memory."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put(b"head")
    kept = [b"head"]
    for number in range(3000 // stretch):
        queue.put_many([b"late"] * stretch, ttl_s=1)
        queue.put(b"%d" % number, ttl_s=60 if number % 3 else None)
        kept.append(b"%d" % number)
    while inside.tick(queue):
        pass
    assert queue.stats().expired_total == 0
    clock.advance(2)
    while inside.tick(queue):
        pass
    assert queue.stats().expired_total == 3000 // stretch * stretch
    assert len(queue) == len(kept)
    assert len(list(parts_of(queue).lanes.runs)) <= 400
    queue.put(b"tail", ttl_s=5)
    clock.advance(6)
    inside.tick(queue)
    assert [queue.get(0).body for _ in kept] == kept
    assert len(queue) == len(kept)


@pytest.mark.owner_only
def test_a_task_passes_many_expired_messages_at_once(open_at: Open, clock: Clock) -> None:
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x"] * 1000, ttl_s=1)
    queue.put(b"tail")
    clock.advance(2)
    assert first_for_a_task(broker, 0) == b"tail"


def test_what_expired_is_not_delivered(open_at: Open, clock: Clock, durable: bool) -> None:
    """The message's own time-to-live, and those without one stay."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put(b"short", ttl_s=1)
    queue.put(b"long", ttl_s=100)
    queue.put(b"ever")
    delivery = queue.get(0)
    assert (delivery.body, delivery.expires_at_s) == (b"short", clock.wall_s + 1)
    delivery.nack()
    clock.advance(1)
    delivery = queue.get(0)
    assert delivery.body == b"long"
    assert queue.get(0).expires_at_s is None
    assert queue.stats().expired_total == 1
    assert queue.stats().dropped_total == 0


def test_the_shorter_of_two_times_to_live_holds(open_at: Open, clock: Clock, durable: bool) -> None:
    """The queue's and the message's own; 0 is at once."""
    queue = open_at().declare_queue("q", durable=durable, ttl_s=10)
    queue.put_many([body(0), body(1)])
    queue.put(body(2), ttl_s=5)
    queue.put(body(3), ttl_s=50)
    queue.put(body(4), ttl_s=0)
    clock.advance(5)
    batch = queue.get_many(10, timeout_s=0)
    assert [int(text[:4]) for text in batch.bodies] == [0, 1, 3]
    batch.nack()
    clock.advance(5)
    assert numbers_of(queue) == []
    assert (len(queue), queue.stats().expired_total) == (0, 5)


@pytest.mark.owner_only
def test_maintenance_lets_expired_messages_go(open_at: Open, clock: Clock, durable: bool) -> None:
    """Nobody has to ask: they give their room and their depth back, and blocked puts go on."""
    queue = open_at().declare_queue("q", durable=durable, limit_messages=3, ttl_s=1)
    queue.put_many([body(0), body(1), body(2)])
    producer = threading.Thread(target=queue.put, args=(body(3),))
    producer.start()
    until(lambda: parts_of(queue).admission.line)
    clock.advance(1)
    inside.tick(queue)
    producer.join(LONG_S)
    assert not producer.is_alive()
    assert (len(queue), queue.stats().expired_total) == (1, 3)


@pytest.mark.owner_only
def test_expired_spilled_runs_go_without_their_bodies_being_read(open_at: Open, clock: Clock, durable: bool) -> None:
    """Edge 14: a stub knows when all of it has expired."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=5 * COST, ttl_s=10)
    queue.put_many([body(number) for number in range(100)])
    spilled = queue.stats().spilled_messages
    assert spilled > 90
    before = queue.stats().spill_files_read_total
    clock.advance(10)
    inside.tick(queue)
    stats = queue.stats()
    assert (stats.messages, stats.expired_total, stats.spilled_messages) == (0, 100, 0)
    assert stats.spill_files_read_total == before
    assert stats.resident_bytes == 0
    broker.engine.log.drain()
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_get_reads_nothing_that_has_expired(open_at: Open, clock: Clock, durable: bool) -> None:
    """What is first on disk goes unread, and what is behind it comes."""
    queue = open_at().declare_queue("q", durable=durable, capacity_bytes=5 * COST)
    queue.put_many([body(number) for number in range(100)], ttl_s=10)
    queue.get_many(queue.stats().resident_messages).ack()
    before = queue.stats()
    assert before.spilled_messages > 90
    clock.advance(10)
    queue.put(b"stays")
    delivery = queue.get(0)
    assert delivery.body == b"stays"
    delivery.ack()
    stats = queue.stats()
    assert (stats.messages, stats.expired_total) == (0, before.messages)
    assert stats.spill_files_read_total == before.spill_files_read_total


@pytest.mark.owner_only
def test_part_of_a_spilled_run_is_read_and_the_rest_expires(open_at: Open, clock: Clock, durable: bool) -> None:
    """What was taken of a run before is not counted again, in memory or in the log."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=8 * COST, ttl_s=10)
    queue.put_many([body(number) for number in range(100)])
    for number in range(30):
        with queue.get(0) as delivery:
            assert delivery.body == body(number)
    clock.advance(10)
    inside.tick(queue)
    stats = queue.stats()
    assert (stats.messages, stats.expired_total, stats.acked_total) == (0, 70, 30)
    broker.engine.log.drain()
    assert broker.check() == []


@pytest.mark.owner_only
def test_what_is_not_logged_expires_on_disk_with_the_rest(open_at: Open, clock: Clock) -> None:
    """A run of logged and other messages is settled by what the log holds of it."""
    broker = open_at()
    queue = broker.declare_queue("q", capacity_bytes=0, ttl_s=10)
    for number in range(10):
        queue.put(body(number), durable=number % 3 == 0)
    clock.advance(10)
    inside.tick(queue)
    broker.engine.log.drain()
    assert queue.stats().expired_total == 10
    assert [lane.row.messages for lane in parts_of(queue).logged_lanes] == [0]
    assert [lane.row.bytes for lane in parts_of(queue).logged_lanes] == [0]


@pytest.mark.owner_only
def test_expiry_of_what_is_acquired_waits_for_its_return(open_at: Open, clock: Clock, durable: bool) -> None:
    """Edge 14: who works on a message may ack it late; returned, it has expired."""
    queue = open_at().declare_queue("q", durable=durable, ttl_s=10)
    queue.put_many([body(0), body(1), body(2)])
    first, second = queue.get(0), queue.get(0)
    batch = queue.get_many(5, timeout_s=0)
    clock.advance(60)
    inside.tick(queue)
    assert queue.stats().expired_total == 0
    first.ack()
    second.nack()
    batch.nack()
    inside.tick(queue)
    assert (len(queue), queue.stats().expired_total, queue.stats().acked_total) == (0, 2, 1)


@pytest.mark.owner_only
@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_the_wall_clock_jumps(open_at: Open, clock: Clock, durable: bool, jump_s: float) -> None:
    """Edge 14: expiry follows the wall clock, leases and time-outs do not care."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put(body(0), ttl_s=100)
    queue.put(body(1))
    queue.put(body(2), delay_s=3_600)
    held = queue.get(0)
    clock.wall_s += jump_s
    other = queue.get_many(5, timeout_s=0)
    assert [int(text[:4]) for text in other.bodies] == ([1] if jump_s < 0 else [2, 1])
    clock.monotonic_s += 9
    held.ack()
    clock.monotonic_s += 2
    inside.tick(queue)
    with pytest.raises(qflow.AlreadySettled):
        other.ack()
    clock.wall_s -= jump_s
    assert numbers_of(queue) == ([1] if jump_s < 0 else [2, 1]), "what was delivered comes back at once"
    clock.advance(3_600)
    assert numbers_of(queue) == ([2] if jump_s < 0 else [])


@pytest.mark.parametrize("before", [0, 1])
def test_a_clock_before_1970_holds_up_no_put(open_at: Open, clock: Clock, before: int) -> None:
    """Nothing on the disk has such a time: messages have that of 1970, and none that is to wait or expire is taken."""
    broker = open_at()
    queue = broker.declare_queue("q", dedupe_window_s=60)
    stream = broker.declare_stream("s", topics=["#"])
    queue.put_many([body(n) for n in range(before)])
    right_s, clock.wall_s = clock.wall_s, -1_000.0
    queue.put(body(1))
    queue.put(body(2), dedupe_key="2")
    queue.put_many([body(3), body(4), b"0005" * 2**20])
    queue.submit(body(6)).result()
    with broker.transaction() as transaction:
        transaction.put("q", body(7))
    broker.publish("t", b"x", producer="p", number=1)
    for times in ({"delay_s": 1}, {"ttl_s": 10}, {"not_before": right_s}):
        with pytest.raises(qflow.QflowError, match="the clock of this machine is before 1970"):
            queue.put(body(8), **times)
    for _ in range(before):
        queue.get(0).ack(wait=True)
    assert broker.check() == []
    assert [message.time_ms for message in stream.query()] == [0]
    broker.close()
    broker = open_at()
    assert broker.publish("t", b"x", producer="p", number=1).duplicate
    broker.close()
    clock.wall_s = right_s
    broker = open_at()
    assert numbers_of(broker.queue("q")) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.owner_only
def test_a_producer_outlives_a_clock_that_is_set_after_the_start(open_at: Open, clock: Clock) -> None:
    """What it published before that, with a clock that was years behind, is not stored again; it is forgotten in time."""
    clock.wall_s -= 1e8
    broker = open_at()
    broker.declare_stream("s", topics=["#"])
    broker.publish("t", b"x", producer="p", number=1)
    clock.advance(10)
    clock.wall_s += 1e8
    broker.engine.streams.tick()
    broker.close()
    broker = open_at()
    broker.engine.streams.tick()
    assert broker.publish("t", b"x", producer="p", number=1).duplicate
    broker.close()
    clock.advance(PRODUCER_EXPIRY_S)
    broker = open_at()
    broker.engine.streams.tick()
    assert not broker.publish("t", b"x", producer="p", number=1).duplicate
    assert broker.stream("s").stats().messages == 2


def test_expiry_survives_reopening(open_at: Open, clock: Clock) -> None:
    """What expired meanwhile is not delivered, what did not is, with its time."""
    broker = open_at()
    queue = broker.declare_queue("q")
    queue.put_many([body(0), body(1)], ttl_s=10)
    queue.put(body(2), ttl_s=100)
    queue.put(body(3))
    broker.close()
    clock.advance(50)
    queue = open_at().queue("q")
    delivery = queue.get(0)
    assert delivery.body == body(2)
    assert delivery.expires_at_s == pytest.approx(clock.wall_s + 50)
    delivery.nack()
    clock.advance(50)
    assert numbers_of(queue) == [3]
    assert queue.stats().expired_total == 3


@pytest.mark.owner_only
def test_expired_messages_become_dead_letters(open_at: Open, clock: Clock, durable: bool) -> None:
    """At a get, by maintenance, and from disk, which needs their bodies; each counted as both."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=5 * COST, ttl_s=10, dead_letter="dead")
    queue.put_many([body(number) for number in range(20)])
    clock.advance(10)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    for _ in range(20):
        inside.tick(queue)
        broker.engine.log.drain()
    assert (len(queue), queue.stats().expired_total, queue.stats().dead_lettered_total) == (0, 20, 20)
    dead = broker.queue("dead")
    batch = dead.get_many(100, timeout_s=0)
    assert [int(text[:4]) for text in batch.bodies] == list(range(20))[: len(batch)]
    assert {delivery.headers["dead_letter_reason"] for delivery in batch} == {"expired"}
    assert all(delivery.expires_at_s is None for delivery in batch)
    assert [delivery.headers["dead_letter_sequence"] for delivery in batch] == list(range(len(batch)))


@pytest.mark.owner_only
def test_a_purge_while_dead_letters_are_carried_away_leaves_nothing(open_at: Open, clock: Clock) -> None:
    """Edge 16: what expired, what came too often, and what is good are one batch, and all of it is purged meanwhile."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False, max_deliveries=1, dead_letter="dead")
    broker.declare_queue("dead", durable=False)
    queue.put(body(0), ttl_s=10)
    for number in (1, 2):
        queue.put(body(number))
    broker.alter_queue("q", max_deliveries=None)
    queue.get_many(3, timeout_s=0).nack()
    broker.alter_queue("q", max_deliveries=1)
    queue.put(body(3))
    clock.advance(10)
    real = parts_of(queue).exits.bury
    purged = []

    def purge_first(*arguments: Any) -> bool:
        if not purged:
            purged.append(in_thread(queue.purge))
        return real(*arguments)

    parts_of(queue).exits.bury = purge_first
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    assert purged == [4]
    assert len(queue) == 0
    assert broker.check() == []


# Leases --------------------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
def test_what_is_held_for_too_long_goes_back(open_at: Open, clock: Clock, durable: bool) -> None:
    """In its place, counted, and late settles are answered clearly; extending is possible until then."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put_many([body(number) for number in range(4)])
    single, batch = queue.get(0), queue.get_many(2, timeout_s=0)
    part = batch[1]
    clock.advance(10.5)
    again = queue.get_many(10, timeout_s=0)
    assert [int(text[:4]) for text in again.bodies] == [0, 1, 2, 3]
    assert [delivery.delivery_count for delivery in again] == [2, 2, 2, 1]
    for late in (single.ack, single.nack, batch.ack, batch.nack, part.ack, lambda: single.extend(5)):
        with pytest.raises(qflow.AlreadySettled, match="held for longer than ack_timeout_s=10"):
            late()
    again.ack()
    assert queue.stats().redelivered_total == 3


@pytest.mark.owner_only
def test_a_lease_is_extended(open_at: Open, clock: Clock, durable: bool) -> None:
    """From now on, of a delivery, of a batch and of one of it; never to an earlier end."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put_many([body(number) for number in range(6)])
    kept, lost, batch = queue.get(0), queue.get(0), queue.get_many(3, timeout_s=0)
    clock.advance(8)
    kept.extend(30)
    kept.extend(5)
    batch[0].extend(30)
    lost.extend(0)
    clock.advance(5)
    inside.tick(queue)
    assert [int(text[:4]) for text in queue.get_many(10, timeout_s=0).bodies] == [1, 5]
    with pytest.raises(qflow.AlreadySettled):
        lost.ack()
    clock.advance(20)
    kept.ack()
    batch.ack()
    inside.tick(queue)
    clock.advance(30)
    inside.tick(queue)
    assert numbers_of(queue) == [1, 5]


@pytest.mark.owner_only
def test_settled_leases_leave_nothing_to_look_after(open_at: Open, clock: Clock, durable: bool) -> None:
    """Ends that were extended go with what they were for; a getter does not wake for them again and again."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put_many([body(number) for number in range(5)])
    single, batch, parts = queue.get(0), queue.get_many(2, timeout_s=0), queue.get_many(2, timeout_s=0)
    for held in (single, batch, parts):
        held.extend(60)
    single.ack()
    batch.ack()
    for part in parts:
        part.ack()
    clock.advance(100)
    with parts_of(queue).context.lock:
        assert parts_of(queue).gets.next_moment_s() is None
    assert not parts_of(queue).held.apart


@pytest.mark.owner_only
def test_a_getter_sleeps_until_the_end_of_an_extended_lease(open_at: Open, clock: Clock) -> None:
    """The time-out it would have had without the extension does not wake anybody."""
    queue = open_at().declare_queue("q", durable=False, ack_timeout_s=0.2)
    queue.put_many([body(0), body(1)])
    first = queue.get(0)
    first.extend(0.7)
    clock.advance(0.3)
    with parts_of(queue).context.lock:
        assert parts_of(queue).gets.next_moment_s() == pytest.approx(0.4)
    second = queue.get(0)
    with parts_of(queue).context.lock:
        assert parts_of(queue).gets.next_moment_s() == pytest.approx(0.2)
    second.ack()
    first.ack()


@pytest.mark.owner_only
def test_a_get_looks_at_extended_leases_no_more_than_once_until_one_of_them_ends(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_at().declare_queue("q", durable=False, ack_timeout_s=10)
    queue.put_many([body(number) for number in range(300)])
    for _ in range(100):
        queue.get(0).extend(60)
    clock.advance(11)
    held, looks = parts_of(queue).held, []
    late = held.late
    monkeypatch.setattr(held, "late", lambda *given: looks.append(1) or late(*given))
    for _ in range(100):
        queue.get(0)
    assert len(looks) <= 1
    clock.advance(11)  # the leases of the last hundred have ended, those that were extended have not
    assert len(queue.get_many(300, timeout_s=0)) == 200
    clock.advance(40)
    assert len(queue.get_many(300, timeout_s=0)) == 300


@pytest.mark.owner_only
@pytest.mark.parametrize("settings", [{"ack_timeout_s": 10}, {"ttl_s": 10}, {"max_deliveries": 3}], ids=str)
def test_a_get_that_a_look_at_the_first_message_is_enough_for_looks_at_nothing_else(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool, settings: dict[str, Any]
) -> None:
    """By a thread and by a task; what has expired, came back or may have to come back is looked at more closely."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, priorities=2, **settings)
    queue.put_many([b"%d" % number for number in range(5)])
    queue.put(b"first", priority=1)
    first = queue.get(0)  # from here on it is known when the first lease ends
    assert [first.body, queue.get(0).body] == [b"first", b"0"]  # and that nothing of a higher priority is left
    long_ways: list[object] = []
    begin = Gets.begin
    monkeypatch.setattr(Gets, "begin", lambda *given, **named: long_ways.append(given) or begin(*given, **named))
    queue.put(b"second", priority=1)
    assert queue.get(0).body == b"second"
    assert len(long_ways) == 0
    assert queue.get(0).body == b"1"
    assert first_for_a_task(broker, 0) == b"2"
    assert len(long_ways) == 1
    first.nack()
    clock.advance(11)
    if "ttl_s" in settings:
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)
    else:
        again = queue.get(0)
        assert (again.body, again.delivery_count) == (b"first", 2)
    if "ack_timeout_s" in settings:
        assert sorted(queue.get_many(9, timeout_s=0).bodies) == [b"0", b"1", b"2", b"3", b"4", b"second"]


@pytest.mark.owner_only
def test_all_that_is_held_for_too_long_goes_back_without_a_getter(open_at: Open, clock: Clock, durable: bool) -> None:
    """Some at once, the rest after a moment; what lies side by side goes back as one run."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put_many([b"x"] * 5000)
    for _ in range(5000):
        queue.get(0)
    clock.advance(11)
    while inside.tick(queue):
        assert queue.stats().acquired_messages < 5000
    assert queue.stats().acquired_messages == 0
    assert len(list(parts_of(queue).lanes.runs)) <= 6  # a thousand at once, and the open one


@pytest.mark.owner_only
def test_leases_end_in_the_order_they_began_whoever_holds_them(open_at: Open, clock: Clock, durable: bool) -> None:
    """A delivery that left its batch late, or came back from a transaction, keeps the time it was taken at."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, ack_timeout_s=10)
    full = broker.declare_queue("full", durable=durable, limit_messages=1)
    full.put(b"x")
    queue.put_many([body(number) for number in range(4)])
    batch = queue.get_many(2, timeout_s=0)
    early = queue.get(0)
    clock.advance(5)
    later = queue.get(0)
    parts_of(queue).claims.leave_batch(batch.held, 0)  # as a consumer does before it hands a message out
    tx = broker.transaction(timeout_s=0)
    tx.ack(early)
    tx.put(full, b"x")
    with pytest.raises(qflow.QueueFull):
        tx.commit()
    clock.advance(6)
    assert sorted(int(text[:4]) for text in queue.get_many(10, timeout_s=0).bodies) == [0, 1, 2]
    later.ack()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an item for each look at one delivery in a table of them."""
    found: list[int] = []
    monkeypatch.setattr(qflow.Delivery, "__hash__", lambda one: found.append(1) or object.__hash__(one))
    return found


@pytest.mark.owner_only
def test_maintenance_looks_at_no_more_leases_however_many_were_extended(
    open_at: Open, clock: Clock, durable: bool, looks: list[int]
) -> None:
    """Nor does a get, or what leaves them as they are; those that have ended are found all the same."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put_many([b"x"] * 3000)
    held = [queue.get(0) for _ in range(2000)]
    for number, delivery in enumerate(held):
        delivery.extend(60 + number % 7)
    for _ in range(20):
        clock.advance(1)
        looks.clear()
        assert not inside.tick(queue)
        queue.get(0)
        assert len(looks) < 30
    clock.advance(41)
    while inside.tick(queue):
        pass
    assert queue.stats().redelivered_total == 20 + len(held[::7]) + len(held[1::7])
    for delivery in held[2::7]:
        delivery.ack()
    with pytest.raises(qflow.AlreadySettled, match="ack_timeout_s=10"):
        held[0].ack()
    assert queue.stats().acquired_messages == len(held) - len(held[::7]) - len(held[1::7]) - len(held[2::7])


@pytest.mark.owner_only
def test_an_ack_timeout_begins_without_a_look_at_what_is_held(
    open_at: Open, clock: Clock, durable: bool, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is looked at some at a time, when it would have ended; it has no end, and what was taken since has one."""
    monkeypatch.setattr("qflow.queues.apart.SOME", 100)
    monkeypatch.setattr("qflow.queues.held.SOME", 100)
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 3000)
    held = [queue.get(0) for _ in range(2000)]
    looks.clear()
    for timeout_s in (10, None, 10, 20):
        broker.alter_queue("q", ack_timeout_s=timeout_s)
        queue.on_slow_consumer(1000)
    assert len(looks) < 10
    late = [queue.get(0) for _ in range(3)]
    clock.advance(21)
    with parts_of(queue).context.lock:
        for _ in range(30):
            looks.clear()
            parts_of(queue).leases.release_late()
            assert len(looks) < 1500
    assert not inside.tick(queue)
    with pytest.raises(qflow.AlreadySettled, match="ack_timeout_s=20"):
        late[0].ack()
    held[0].extend(1)
    clock.advance(100)
    looks.clear()
    assert not inside.tick(queue)
    assert len(looks) < 10
    assert queue.stats().acquired_messages == 2000
    for delivery in held:
        delivery.ack()
    assert queue.stats().acquired_messages == 0


@pytest.mark.owner_only
@pytest.mark.parametrize("settle", ["ack", "ack_many", "nack", "transaction", "rollback", "part", "purge"])
def test_what_was_extended_is_settled_as_all_else(open_at: Open, clock: Clock, durable: bool, settle: str) -> None:
    """One by one, together, in a batch, by a transaction or by a purge; each once."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, ack_timeout_s=10)
    full = broker.declare_queue("full", durable=durable, limit_messages=1)
    full.put(b"x")
    queue.put_many([body(number) for number in range(6)])
    single, batch, other = queue.get(0), queue.get_many(2, timeout_s=0), queue.get_many(2, timeout_s=0)
    for held in (single, batch, other):
        held.extend(60)
    clock.advance(20)
    inside.tick(queue)
    stats = queue.stats()
    assert (stats.acquired_messages, stats.acquired_bytes, stats.oldest_unacked_s) == (5, 5 * 1000, 20)
    assert broker.check() == []
    if settle == "ack":
        single.ack(wait=True)
        batch.ack(wait=True)
        other.ack()
    elif settle == "ack_many":
        queue.ack_many([single, *batch, *other])
    elif settle == "nack":
        single.nack()
        batch.nack()
        other[1].nack()
        other[0].nack()
    elif settle == "purge":
        queue.purge()
    elif settle == "part":
        single.ack()
        for part in (*batch, *other):
            part.ack()
    else:
        with broker.transaction(timeout_s=0) as tx:
            for held in (single, batch, other[1], other[0]):
                tx.ack(held) if isinstance(held, qflow.Delivery) else tx.ack_many(held)
            if settle == "rollback":
                tx.put(full, b"x")
                with pytest.raises(qflow.QueueFull):
                    tx.commit()
    assert broker.check() == []
    if settle == "rollback":
        inside.tick(queue)
        clock.advance(35)
        inside.tick(queue)
        assert queue.stats().acquired_messages == 5  # until the end that they were extended to
        single.ack()
        batch.ack()
        other.ack()
    elif settle != "purge":
        with pytest.raises(qflow.AlreadySettled):
            single.ack()
    assert not parts_of(queue).held.apart
    assert queue.stats().acquired_messages == 0
    assert numbers_of(queue) == {"nack": [0, 1, 2, 3, 4, 5], "purge": []}.get(settle, [5])
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_lease_that_ends_during_close_or_delete_is_no_trouble(open_at: Open, clock: Clock, durable: bool) -> None:
    """Late settles of a deleted queue do nothing, those of a closed broker say so."""
    broker = open_at()
    queue, other = (broker.declare_queue(name, durable=durable, ack_timeout_s=10) for name in "qr")
    queue.put(body(0))
    other.put(body(1))
    held, late = queue.get(0), other.get(0)
    broker.delete_queue("q")
    clock.advance(60)
    held.ack()
    held.extend(1)
    broker.close()
    with pytest.raises(qflow.BrokerClosed):
        late.ack()
    with pytest.raises(qflow.BrokerClosed):
        late.extend(1)


# Delayed delivery ----------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
@pytest.mark.parametrize("capacity", [None, 20 * COST, 3 * COST, 0])
def test_delayed_messages_come_in_the_order_of_their_times(
    open_at: Open, clock: Clock, durable: bool, capacity: int | None
) -> None:
    """By due time, equal ones as they were put, in memory and spilled; none before its time."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=capacity)
    chance = random.Random(7)
    delays = [chance.randrange(1, 40) for _ in range(120)]
    for number, delay in enumerate(delays):
        queue.put(body(number), delay_s=delay)
    assert broker.check() == []
    assert queue.stats().delayed_messages == 120
    expected = [number for _, number in sorted(zip(delays, itertools.count()))]
    received = []
    for second in range(41):
        now = numbers_of(queue)
        assert all(delays[number] == second for number in now)
        received += now
        clock.advance(1)
    assert received == expected
    assert broker.check() == []
    assert queue.stats().delayed_messages == 0


@pytest.mark.parametrize("capacity", [None, 6 * COST])
def test_delayed_messages_survive_reopening(open_at: Open, clock: Clock, capacity: int | None) -> None:
    """In order of their times, with what was put after the restart between them."""
    broker = open_at()
    queue = broker.declare_queue("q", capacity_bytes=capacity)
    for number, delay in enumerate([30, 10, 20, 40, 10]):
        queue.put(body(number), delay_s=delay)
    queue.put(body(5))
    broker.close()
    broker = open_at()
    queue = broker.queue("q")
    assert len(queue) == 6
    assert numbers_of(queue) == [5]
    queue.put(body(6), delay_s=15)
    assert numbers_of(queue) == []
    assert broker.check() == []
    clock.advance(10)
    assert numbers_of(queue) == [1, 4]
    clock.advance(10)
    assert numbers_of(queue) == [6, 2]
    broker.close()
    queue = open_at().queue("q")
    clock.advance(100)
    assert numbers_of(queue) == [0, 3]


@pytest.fixture
def reopened(open_at: Open, clock: Clock) -> qflow.Broker:
    """A queue `q` that was just opened again: messages of two priorities, with one that became due meanwhile in each."""
    broker = open_at()
    queue = broker.declare_queue("q", priorities=2)
    queue.put(b"high", priority=1)
    queue.put_many([b"low", b"low"])
    queue.put(b"due low", delay_s=10)
    queue.put(b"due high", delay_s=10, priority=1)
    queue.put(b"later", delay_s=1000, priority=1)
    broker.close()
    clock.advance(20)
    return open_at()


IN_ORDER = [b"due high", b"high", b"due low", b"low", b"low"]


def test_what_is_due_comes_in_its_place_right_after_a_restart(reopened: qflow.Broker) -> None:
    """The log does not know which delayed message is due: it is read before anything that may come after it."""
    found = []
    while batch := reopened.queue("q").get_many(1, timeout_s=0):
        found += batch.bodies
        batch.ack()
    assert found == IN_ORDER


def test_what_is_due_comes_in_its_place_for_tasks_too(reopened: qflow.Broker) -> None:
    """The same steps; what takes the disk is done by a thread."""

    async def scenario() -> list[bytes]:
        async with beside(reopened) as tasks:
            return [(await tasks.queue("q").get(timeout_s=0)).body for _ in range(5)]

    assert asyncio.run(scenario()) == IN_ORDER


@pytest.mark.owner_only
def test_a_get_waits_for_maintenance_that_reads_what_may_be_due(
    reopened: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the delayed messages right after opening, too; a get meanwhile does not take what comes after them."""
    queue = reopened.queue("q")
    entered, go_on = threading.Event(), threading.Event()
    read_head = parts_of(queue).restorer._read_head

    def slowly(run: Any, *arguments: Any) -> Any:
        if threading.current_thread() is maintenance and lane_of(run.first) == DELAYED + 1:
            entered.set()
            assert go_on.wait(LONG_S)
        return read_head(run, *arguments)

    def maintain() -> None:
        while inside.fit(queue):
            pass

    monkeypatch.setattr(parts_of(queue).restorer, "_read_head", slowly)
    maintenance = threading.Thread(target=maintain)
    maintenance.start()
    assert entered.wait(LONG_S)
    found: list[bytes] = []
    getter = threading.Thread(target=lambda: found.append(queue.get(LONG_S).body))
    getter.start()
    until(lambda: parts_of(queue).gate.starved)
    go_on.set()
    getter.join(LONG_S)
    maintenance.join(LONG_S)
    assert found == [b"due high"]


def test_delayed_messages_that_memory_does_not_hold_keep_nobody_waiting(open_at: Open, clock: Clock) -> None:
    """What would take more than half of the capacity is read by maintenance: a get does not wait for all of it."""
    broker = open_at()
    queue = broker.declare_queue("q")
    for number in range(100):
        queue.put(body(number), delay_s=1000)
    queue.put(b"now")
    broker.alter_queue("q", capacity_bytes=30 * COST)
    broker.close()
    queue = open_at().queue("q")
    assert queue.get(0).body == b"now"
    stats = queue.stats()
    assert 0 < stats.delayed_messages < 30
    assert stats.spilled_messages == 0


@pytest.mark.owner_only
def test_after_reopening_a_get_waits_for_unread_delayed_messages_for_a_moment_only(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read a part at a time; what is there meanwhile is delivered, and time-outs are kept."""
    broker = open_at()
    queue = broker.declare_queue("q")
    queue.put_many([b"x" * 1000] * 6000, delay_s=1000)
    queue.put(b"now")
    broker.close()
    queue = open_at().queue("q")
    restorer = parts_of(queue).restorer
    restore_head, reads = restorer.restore_head, []

    def slowly(runs: Any) -> bool:
        reads.append(runs)
        clock.advance(0.02)
        return restore_head(runs)

    monkeypatch.setattr(restorer, "restore_head", slowly)
    assert queue.get(0).body == b"now"
    assert len(reads) == 2 + 1  # the last one is for the message itself
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    assert len(reads) == 3
    while inside.fit(queue):
        pass
    assert queue.stats().logged_messages == 0


@pytest.mark.owner_only
def test_many_delayed_messages_are_replayed_and_spilled(open_at: Open, clock: Clock) -> None:
    """More than memory holds, with random times, from the log: in order, and memory stays bounded."""
    broker = open_at()
    queue = broker.declare_queue("q")
    chance = random.Random(11)
    delays = [chance.randrange(1, 1000) for _ in range(300)]
    for number, delay in enumerate(delays):
        queue.put(body(number), delay_s=delay)
    broker.close()
    broker = open_at()
    queue = broker.alter_queue("q", capacity_bytes=30 * COST)
    received = []
    for _ in range(10):
        clock.advance(100)
        while batch := queue.get_many(5, timeout_s=0):
            received += [int(text[:4]) for text in batch.bodies]
            batch.ack()
            known = sum(
                schedule.overhead_bytes for schedule in parts_of(queue).lanes.schedules.values()
            )  # of what lies on disk
            assert queue.stats().resident_bytes - known <= 31 * COST
    assert received == [number for _, number in sorted(zip(delays, itertools.count()))]
    assert broker.check() == []


def test_a_message_that_is_due_comes_before_what_waits(open_at: Open, clock: Clock, durable: bool) -> None:
    """Within its priority; a higher priority still goes first."""
    queue = open_at().declare_queue("q", durable=durable, priorities=2)
    queue.put(body(0))
    queue.put(body(1), delay_s=5)
    queue.put(body(2), priority=1, delay_s=50)
    queue.put(body(3), priority=1)
    clock.advance(5)
    assert [int(queue.get(0).body[:4]) for _ in range(3)] == [3, 1, 0]
    clock.advance(45)
    assert numbers_of(queue) == [2]


@pytest.mark.owner_only
def test_a_time_to_live_counts_from_when_it_is_due(open_at: Open, clock: Clock, durable: bool) -> None:
    """A message cannot expire before it could be delivered."""
    queue = open_at().declare_queue("q", durable=durable, ttl_s=10)
    queue.put(body(0), delay_s=60)
    queue.put(body(1), delay_s=60, ttl_s=5)
    clock.advance(64)
    batch = queue.get_many(5, timeout_s=0)
    assert len(batch) == 2
    batch.nack()
    clock.advance(2)
    inside.tick(queue)
    assert numbers_of(queue) == [0]
    assert queue.stats().expired_total == 1


@pytest.mark.owner_only
def test_expired_delayed_messages_go_without_being_asked_for(open_at: Open, clock: Clock, durable: bool) -> None:
    """Maintenance looks into what was delayed, too."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put_many([body(0), body(1)], delay_s=10, ttl_s=5)
    clock.advance(20)
    inside.tick(queue)
    assert (len(queue), queue.stats().expired_total) == (0, 2)


@pytest.mark.owner_only
@pytest.mark.parametrize("dead_letter", [None, "dead"])
@pytest.mark.parametrize("stretch", [1, 40])
def test_what_was_delayed_and_expired_behind_what_stays_goes_without_a_getter(
    open_at: Open, clock: Clock, durable: bool, dead_letter: str | None, stretch: int
) -> None:
    """A put at the limit goes on for that; what stays comes in its order."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, dead_letter=dead_letter, limit_messages=400, resume_ratio=1)
    for number in range(0, 400, 2 * stretch):
        queue.put_many([body(one) for one in range(number, number + stretch)], delay_s=10)
        queue.put_many([body(9)] * stretch, delay_s=10, ttl_s=5)
    clock.advance(14)
    while inside.tick(queue):
        pass
    assert queue.stats().expired_total == 0
    clock.advance(2)
    while inside.tick(queue):
        pass
    broker.engine.log.drain()
    assert (len(queue), queue.stats().expired_total) == (200, 200)
    queue.put(body(400), timeout_s=0)
    if dead_letter is not None:
        assert numbers_of(broker.queue(dead_letter)) == [9] * 200
    stays = [number for number in range(400) if number // stretch % 2 == 0]
    assert numbers_of(queue) == [*stays, 400]
    assert inside.left_behind(queue) == {}


@pytest.mark.owner_only
@pytest.mark.parametrize("dead_letter", [None, "dead"])
def test_what_expires_while_it_was_given_back_with_a_delay_goes_behind_what_is_due_later(
    open_at: Open, clock: Clock, durable: bool, dead_letter: str | None
) -> None:
    """Its time counts from when it could first be delivered: a delay of a nack gives it no more of that."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, dead_letter=dead_letter)
    queue.put(body(0), delay_s=10)
    queue.put(body(1), delay_s=10, ttl_s=20)
    queue.put(body(2), delay_s=500, ttl_s=20)  # its time has not begun
    clock.advance(10)
    for delivery, delay_s in zip(queue.get_many(2, 0), (60, 61), strict=True):
        delivery.nack(delay_s=delay_s)
    clock.advance(21)
    inside.tick(queue)
    broker.engine.log.drain()
    assert (len(queue), queue.stats().expired_total) == (2, 1)
    if dead_letter is not None:
        assert numbers_of(broker.queue(dead_letter)) == [1]
    clock.advance(40)
    assert numbers_of(queue) == [0]
    clock.advance(430)
    assert numbers_of(queue) == [2]


@pytest.mark.owner_only
@pytest.mark.parametrize("stretch", [1, 40])
def test_maintenance_lets_what_was_delayed_and_has_expired_go_in_steps(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, durable: bool, stretch: int
) -> None:
    monkeypatch.setattr(expiry, "EXPIRED_AT_ONCE", 100)
    monkeypatch.setattr(expiry, "DUE_AT_ONCE", 100)
    monkeypatch.setattr(tending, "perf_counter", lambda: 0.0)
    queue = open_at().declare_queue("q", durable=durable)
    queue.put(b"head", delay_s=1)
    for _ in range(2_000 // stretch):
        queue.put_many([b"late"] * stretch, delay_s=1, ttl_s=1)
    clock.advance(3)
    totals: list[int] = []
    monkeypatch.setattr(tending, "sleep", lambda _: totals.append(queue.stats().expired_total))
    inside.tick(queue)
    totals.append(queue.stats().expired_total)
    assert totals[-1] == 2_000
    most = 2 * 100 + stretch  # what is due first, then some of what lies behind it
    assert all(after - before < most for before, after in itertools.pairwise([0, *totals]))
    assert len(queue) == 1


def open_lane(queue: qflow.Queue, priority: int) -> None:
    """Have another thread put the first delayed message of a priority."""
    in_thread(lambda: queue.put(body(priority), priority=priority, delay_s=100))


@pytest.mark.owner_only
@pytest.mark.parametrize("caller", ["maintenance", "thread", "task"])
def test_delayed_messages_of_another_priority_come_while_dead_letters_are_carried_away(
    open_at: Open, clock: Clock, durable: bool, caller: str
) -> None:
    """Whoever lets what has expired go does not mind."""
    broker = open_at()
    broker.declare_queue("dead", durable=durable)
    queue = broker.declare_queue("q", durable=durable, priorities=10, dead_letter="dead")
    queue.put(body(0), ttl_s=5)
    for priority in (0, 1):
        queue.put(body(0), priority=priority, delay_s=5, ttl_s=5)
    parts, opened = parts_of(queue), []
    real = parts.exits.bury

    def open_first(*arguments: Any) -> bool:
        opened.append(2 + len(opened))
        open_lane(queue, opened[-1])
        return real(*arguments)

    parts.exits.bury = open_first
    clock.advance(20)
    if caller == "maintenance":
        inside.tick(queue)
    else:
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0) if caller == "thread" else first_for_a_task(broker, 0)
    inside.tick(queue)
    broker.engine.log.drain()
    assert (len(broker.queue("dead")), len(queue)) == (3, len(opened))


@pytest.mark.owner_only
@pytest.mark.parametrize("place", ["spilled", "logged"])
def test_delayed_messages_of_another_priority_come_while_others_are_brought_into_memory(
    open_at: Open, clock: Clock, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """To be dropped from a ring, or after an opening; another thread purges them meanwhile, so that none is there."""
    broker = open_at()
    ring = {"on_overflow": qflow.Overflow.DROP_OLDEST} if place == "spilled" else {}
    queue = broker.declare_queue("q", priorities=2, capacity_bytes=5 * COST, **ring)
    queue.put_many([body(number) for number in range(20)], delay_s=100)
    if place == "logged":
        broker.close()
        broker = open_at()
        queue = broker.queue("q")
    parts = parts_of(queue)
    bring = "restore_delayed" if place == "spilled" else "restore_head"
    opened: list[int] = []

    def purge_first(*_: Any, **__: Any) -> bool:
        with Unlocked(parts.context):
            in_thread(queue.purge)
            open_lane(queue, 1)
        opened.append(1)
        return False

    monkeypatch.setattr(parts.restorer, bring, purge_first)
    if place == "spilled":
        broker.alter_queue("q", limit_messages=1)
    while inside.fit(queue) and not opened:
        pass
    assert opened
    assert len(queue) == 1


def test_a_moment_is_a_number_or_a_datetime_with_a_zone(open_at: Open, clock: Clock, durable: bool) -> None:
    """`not_before` in every form; one that has passed is now."""
    queue = open_at().declare_queue("q", durable=durable)
    now = datetime.fromtimestamp(clock.wall_s, UTC)
    queue.put(body(0), not_before=clock.wall_s + 30)
    queue.put(body(1), not_before=now + timedelta(seconds=20))
    queue.put(body(2), not_before=(now + timedelta(seconds=10)).astimezone(timezone(timedelta(hours=9))))
    queue.put(body(3), not_before=0)
    queue.put(body(4), not_before=now - timedelta(days=400))
    queue.put(body(5), delay_s=0)
    assert numbers_of(queue) == [3, 4, 5]
    for expected in (2, 1, 0):
        clock.advance(10)
        assert numbers_of(queue) == [expected]


@pytest.mark.owner_only
def test_what_came_due_keeps_its_place_while_others_may_expire(open_at: Open, clock: Clock, durable: bool) -> None:
    """Maintenance looks whether it has expired, and leaves it where it is: before what was not delayed."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put_many([body(number) for number in range(4)], ttl_s=100)
    queue.put(body(4), delay_s=6)
    first, *others, last = list(queue.get_many(4))
    for delivery, delay in zip(others, (5, 3), strict=True):
        delivery.nack(delay_s=delay)
    first.nack()
    last.nack()
    clock.advance(10)
    inside.tick(queue)
    assert numbers_of(queue) == [2, 1, 4, 0, 3]


def test_a_nack_with_a_delay_brings_the_message_back_later(open_at: Open, clock: Clock, durable: bool) -> None:
    """Counted as a delivery, before what waits; single, in a batch, and one of a batch."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put_many([body(number) for number in range(6)])
    queue.get(0).nack(delay_s=10)
    batch = queue.get_many(3, timeout_s=0)
    batch[1].nack(delay_s=20)
    batch.nack(delay_s=5)
    assert numbers_of(queue) == [4, 5]
    queue.put(body(6))
    clock.advance(10)
    batch = queue.get_many(10, timeout_s=0)
    assert [(int(d.body[:4]), d.delivery_count) for d in batch] == [(1, 2), (3, 2), (0, 2), (6, 1)]
    batch.ack()
    clock.advance(10)
    assert numbers_of(queue) == [2]


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0])
@pytest.mark.parametrize("capacity", [None, 10 * COST])
def test_the_delay_of_a_nack_is_as_long_whatever_the_wall_clock_says(
    open_at: Open, clock: Clock, durable: bool, capacity: int | None, jump_s: float
) -> None:
    """In memory and spilled, of plain messages and of those that were put with a delay; `browse` tells when they come."""
    queue = open_at().declare_queue("q", durable=durable, capacity_bytes=capacity)
    for number in range(40):
        queue.put(body(number), delay_s=number % 2)
    clock.advance(1)
    for _ in range(40):
        delivery = queue.get(0)
        delivery.nack(delay_s=10 + int(delivery.body[:4]) % 5)
    clock.wall_s += jump_s
    assert queue.stats().delayed_messages == 40
    assert {entry.due_ms for entry in queue.browse() if entry.due_ms is not None} <= {
        int((clock.wall_s + 10 + number) * 1000) for number in range(5)
    }
    assert numbers_of(queue) == []
    clock.advance(9)
    for late in range(5):
        clock.advance(1)
        assert sorted(numbers_of(queue)) == list(range(late, 40, 5))


@pytest.mark.owner_only
@pytest.mark.parametrize("how", ["nack", "lease", "expiry"])
def test_what_was_due_once_is_due_whatever_the_wall_clock_says(
    open_at: Open, clock: Clock, durable: bool, how: str
) -> None:
    """Put with a delay, delivered, and given back at once, by the end of a lease, or with a delay and looked through."""
    queue = open_at().declare_queue("q", durable=durable, ack_timeout_s=60)
    queue.put(body(0), delay_s=1, ttl_s=100_000)
    clock.advance(1)
    delivery = queue.get(0)
    if how != "lease":
        delivery.nack(delay_s=10 if how == "expiry" else 0)
    clock.wall_s -= 3_600
    clock.advance(61)
    inside.tick(queue)
    assert numbers_of(queue) == [0]


def test_what_is_due_longest_comes_first(open_at: Open, clock: Clock, durable: bool) -> None:
    """Of what was put with a delay and what was given back with one, whatever the wall clock says."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put_many([body(0), body(2)])
    for delay_s in (5, 15):
        queue.get(0).nack(delay_s=delay_s)
    clock.wall_s -= 3_600
    queue.put(body(1), delay_s=10)
    queue.put(body(3), delay_s=20)
    queue.put(body(4))
    clock.advance(20)
    for number in range(5):
        delivery = queue.get(0)
        assert int(delivery.body[:4]) == number
        delivery.ack()


def test_what_is_given_back_with_a_delay_can_be_deleted(open_at: Open, clock: Clock, durable: bool) -> None:
    """Also what was put with one."""
    queue = open_at().declare_queue("q", durable=durable)
    queue.put(body(0))
    queue.put(body(1), delay_s=1)
    clock.advance(1)
    held = [queue.get(0), queue.get(0)]
    for delivery in held:
        delivery.nack(delay_s=10)
    assert [queue.delete(delivery.sequence) for delivery in held] == [True, True]
    clock.advance(10)
    assert numbers_of(queue) == []


def test_a_restart_ends_the_delay_of_a_nack(open_at: Open, clock: Clock) -> None:
    """The message is back in its place, and its count is known."""
    broker = open_at()
    queue = broker.declare_queue("q")
    queue.put_many([body(0), body(1)])
    queue.get(0).nack(delay_s=500)
    assert numbers_of(queue) == [1]
    broker.close()
    queue = open_at().queue("q")
    delivery = queue.get(0)
    assert (delivery.body, delivery.delivery_count) == (body(0), 2)


@pytest.mark.owner_only
def test_a_purge_takes_what_is_delayed(open_at: Open, clock: Clock, durable: bool) -> None:
    """In memory, spilled, and held by somebody; nothing of it comes when its time does."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=10 * COST)
    for number in range(40):
        queue.put(body(number), delay_s=1 + number % 7)
    queue.put(body(40))
    held = queue.get(0)
    assert queue.purge() == 41
    held.ack()
    assert (len(queue), queue.stats().purged_total) == (0, 41)
    assert broker.check() == []
    queue.put(body(41), delay_s=3)
    clock.advance(10)
    assert numbers_of(queue) == [41]
    while parts_of(queue).spiller.sweep(1000):
        pass
    assert broker.check() == []


def test_delayed_messages_count_at_a_limit(open_at: Open, clock: Clock, durable: bool) -> None:
    """They are there, and a put waits for them as for others."""
    queue = open_at().declare_queue("q", durable=durable, limit_messages=2, resume_ratio=1)
    queue.put(body(0), delay_s=60)
    queue.put(body(1))
    with pytest.raises(qflow.QueueFull):
        queue.put(body(2), timeout_s=0)
    with pytest.raises(qflow.QueueFull):
        queue.put(body(2), timeout_s=0, delay_s=5)
    queue.get(0).ack()
    queue.put(body(2), timeout_s=0)
    clock.advance(60)
    assert numbers_of(queue) == [0, 2]


def test_delayed_messages_that_are_not_logged_are_lost_at_a_restart_only(open_at: Open, clock: Clock) -> None:
    """They keep their place among the others until then."""
    broker = open_at()
    queue = broker.declare_queue("q")
    for number in range(6):
        queue.put(body(number), delay_s=10, durable=number % 2 == 0)
    clock.advance(10)
    batch = queue.get_many(2, timeout_s=0)
    assert [int(text[:4]) for text in batch.bodies] == [0, 1]
    batch.ack(wait=True)
    broker.close()
    queue = open_at().queue("q")
    assert numbers_of(queue) == [2, 4]


def test_a_waiting_getter_wakes_for_what_is_due(open_spool: Open, durable: bool) -> None:
    """On the real clock: the message comes by itself, and not before."""
    queue = open_spool().declare_queue("q", durable=durable)
    queue.put(b"later", delay_s=0.05)
    assert queue.get(LONG_S).body == b"later"
    queue.purge()
    with pytest.raises(qflow.QueueEmpty):
        queue.put(b"much later", delay_s=30)
        queue.get(0.01)


def test_a_waiting_getter_wakes_for_a_lease_that_ends(open_spool: Open, durable: bool) -> None:
    """On the real clock: what another consumer forgot comes to this one."""
    queue = open_spool().declare_queue("q", durable=durable, ack_timeout_s=0.05)
    queue.put(b"1")
    forgotten = queue.get(LONG_S)
    assert queue.get(LONG_S).delivery_count == 2
    with pytest.raises(qflow.AlreadySettled):
        forgotten.ack()


# Bad input -----------------------------------------------------------------------------------------------------------

SPANS = [-1, -0.001, math.nan, math.inf, -math.inf, True, "five", 10**12, timedelta(seconds=-5)]
MOMENTS = [-1, math.nan, math.inf, True, "tomorrow", datetime(2030, 1, 1), datetime(1960, 1, 1, tzinfo=UTC), 10**18]


@pytest.mark.owner_only
@pytest.mark.parametrize("name", ["ttl_s", "delay_s"])
@pytest.mark.parametrize("value", SPANS, ids=repr)
def test_a_bad_time_span_is_refused_and_nothing_is_put(open_spool: Open, durable: bool, name: str, value: Any) -> None:
    """A clear error that names it, of every way in."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    for put in (
        lambda **options: queue.put(b"x", **options),
        lambda **options: queue.put_many([b"x", b"y"], **options),
        lambda **options: queue.submit(b"x", **options),
        lambda **options: broker.transaction().put(queue, b"x", **options),
    ):
        with pytest.raises(qflow.InvalidArgument, match=name):
            put(**{name: value})
    assert len(queue) == 0


@pytest.mark.parametrize("value", MOMENTS, ids=repr)
def test_a_bad_moment_is_refused(open_spool: Open, durable: bool, value: Any) -> None:
    """Naive datetimes among them: nobody knows when that is."""
    queue = open_spool().declare_queue("q", durable=durable)
    with pytest.raises(qflow.InvalidArgument, match="not_before"):
        queue.put(b"x", not_before=value)
    with pytest.raises(qflow.InvalidArgument, match="not both"):
        queue.put(b"x", not_before=0, delay_s=1)
    assert len(queue) == 0


@pytest.mark.parametrize("value", SPANS, ids=repr)
def test_bad_times_of_settles_and_settings_are_refused(open_spool: Open, durable: bool, value: Any) -> None:
    """The delivery is held as before."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x", b"y"])
    single, batch = queue.get(), queue.get_many(1)
    for call in (
        lambda: single.nack(delay_s=value),
        lambda: batch.nack(delay_s=value),
        lambda: batch[0].nack(delay_s=value),
        lambda: single.extend(value),
        lambda: batch.extend(value),
        lambda: queue.on_slow_consumer(value),
        lambda: broker.declare_queue("bad", ttl_s=value),
        lambda: broker.declare_queue("bad", ack_timeout_s=value),
        lambda: broker.alter_queue("q", ttl_s=value),
    ):
        with pytest.raises(qflow.InvalidArgument):
            call()
    single.ack()
    batch.ack()
    assert broker.queues() == ["q"]


@pytest.mark.parametrize("value", [-1, math.nan, True, "five"], ids=repr)
def test_a_bad_time_out_is_refused(open_spool: Open, durable: bool, value: Any) -> None:
    """Of puts, gets and transactions."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=1)
    for call in (
        lambda: queue.put(b"x", timeout_s=value),
        lambda: queue.submit(b"x", timeout_s=value),
        lambda: queue.get(value),
        lambda: queue.get_many(1, value),
        lambda: broker.transaction(value),
    ):
        with pytest.raises(qflow.InvalidArgument):
            call()
    assert len(queue) == 0


@pytest.mark.owner_only
def test_nothing_of_time_lies_in_the_spool_of_who_does_not_use_it(open_spool: Open, spool: Path) -> None:
    """A queue without times has one lane in the log."""
    queue = open_spool().declare_queue("q")
    queue.put_many([b"x"] * 3)
    assert len(parts_of(queue).logged_lanes) == 1


@pytest.mark.owner_only
def test_maintenance_spills_only_what_nobody_spilled_for_a_round(open_at: Open) -> None:
    """Who puts returns when the excess is on disk; did maintenance come first, that would still be on its way."""
    broker = open_at()
    queue = broker.declare_queue("q", capacity_bytes=0)
    queue.submit(b"body").result(LONG_S)
    assert inside.upkeep(broker).sweep()
    assert queue.stats().spilled_messages == 0
    assert not inside.upkeep(broker).sweep()
    assert queue.stats().spilled_messages == 1


def test_batches_are_held_in_the_order_in_which_they_were_complete() -> None:
    """One that others overtook while it was collected hides no end of theirs."""
    held = Held(SimpleNamespace(used=0, note_change=lambda: None))  # type: ignore[arg-type]
    slow, fast = (HeldBatch(None, []) for _ in range(2))  # type: ignore[arg-type]
    held.timeout_s = 5
    held.batches[slow] = None
    held.add_batch(fast, 1.0)
    held.add_batch(slow, 9.0)
    assert held.first_end() == 6.0
    assert list(held.late(7.0)) == [fast]


@pytest.mark.parametrize(("since", "is_apart"), [(1.5, False), (3.0, True)])
def test_what_consumers_take_by_turns_is_not_held_apart(since: float, is_apart: bool) -> None:
    """A little out of order is no matter: an ack of what is apart costs more."""
    held = Held(SimpleNamespace(used=0, note_change=lambda: None))  # type: ignore[arg-type]
    held.timeout_s, held.is_watched = 64, True
    batch, newer, older = HeldBatch(None, []), Delivery(), Delivery()  # type: ignore[arg-type]
    held.add_batch(batch, 1.0)
    held.add_single(newer, since)
    held.leave_batch(older, batch, True)
    assert (older in held.apart) == is_apart


class Running(Clock):
    """One that goes on each time it is looked at."""

    def wall(self) -> float:
        self.wall_s += 0.001
        return self.wall_s

    def monotonic(self) -> float:
        self.monotonic_s += 0.001
        return self.monotonic_s


@pytest.mark.parametrize("is_put", [True, False])
def test_a_queue_is_not_empty_where_a_message_becomes_due_as_a_get_looks(spool: Path, is_put: bool) -> None:
    """It was taken for one on the disk, which there was no room for; behind it, hundreds wait."""
    with open_still(spool, Running()) as broker:
        queue = broker.declare_queue("q", durable=False)
        delays = [0.02 + 0.013 * number for number in range(50)]
        if is_put:
            for delay_s in delays:
                queue.put(b"", delay_s=delay_s)
        else:
            queue.put_many([b""] * 50)
            for delivery, delay_s in zip([queue.get(0) for _ in delays], delays, strict=True):
                delivery.nack(delay_s=delay_s)
        queue.put_many([b""] * 300)
        for _ in range(300):
            queue.get(0).ack()
