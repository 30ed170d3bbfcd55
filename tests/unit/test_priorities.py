"""Priorities: lanes of one queue, the highest first, each a plain FIFO."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

import inside
import qflow
from qflow.message import OVERHEAD_BYTES
from qflow.queues.gets import FEW_BEHIND
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COST = 1000 + OVERHEAD_BYTES


def bodies_of(queue: qflow.Queue) -> list[bytes]:
    """Take and settle what waits, one by one and in batches by turns."""
    bodies: list[bytes] = []
    while True:
        batch = queue.get_many(3, timeout_s=0)
        if not batch:
            return bodies
        bodies += batch.bodies
        batch.ack()
        try:
            with queue.get(0) as delivery:
                bodies.append(delivery.body)
        except qflow.QueueEmpty:
            return bodies


def in_order(sent: list[tuple[int, bytes]]) -> list[bytes]:
    """Return bodies as they are to come: the highest priority first, in the order they were put."""
    return [body for _, body in sorted(sent, key=lambda item: -item[0])]


@pytest.mark.parametrize("capacity", [None, 10 * COST, 0])
def test_the_highest_priority_comes_first(open_spool: Open, durable: bool, capacity: int | None) -> None:
    """In memory, spilled in part, and all on disk; FIFO within each priority."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, priorities=10, capacity_bytes=capacity)
    chance = random.Random(3)
    sent = []
    for number in range(100):
        sent.append((chance.randrange(10), b"%04d" % number * 250))
        queue.put(sent[-1][1], priority=sent[-1][0])
    assert broker.check() == []
    assert bodies_of(queue) == in_order(sent)


@pytest.mark.parametrize("capacity", [None, 10 * COST, 0])
def test_the_first_of_what_waits_comes_whatever_came_and_went_before(
    open_spool: Open, durable: bool, capacity: int | None
) -> None:
    """One by one: puts, gets, acks and returns in any order; spilled in part, and all on disk."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, priorities=4, capacity_bytes=capacity)
    chance = random.Random(7)
    waiting: list[tuple[int, int]] = []
    held: dict[tuple[int, int], Any] = {}
    for number in range(600):
        step = chance.random()
        if step < 0.4:
            priority = chance.randrange(4)
            queue.put(b"%04d" % number * 250, priority=priority)
            waiting.append((-priority, number))
        elif waiting and step < 0.8 and len(held) < (1 if capacity == 0 else 4):  # what is held takes room
            first = min(waiting)
            waiting.remove(first)
            held[first] = queue.get(0)
            assert held[first].body == b"%04d" % first[1] * 250
        elif held:
            one = chance.choice(list(held))
            if step < 0.9:
                held.pop(one).ack()
            else:
                held.pop(one).nack()
                waiting.append(one)
    for delivery in held.values():
        delivery.ack()
    assert bodies_of(queue) == [b"%04d" % number * 250 for _, number in sorted(waiting)]
    assert broker.check() == []


@pytest.mark.owner_only
def test_many_below_a_priority_that_was_emptied_are_looked_for_once(
    open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first goes the long way, the others come from where it was."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=3)
    for number in range(2 * FEW_BEHIND):
        queue.put(b"%03d" % number)
    queue.put(b"high", priority=2)
    gets = parts_of(queue).gets
    long_way, looks, went = gets.get_one, gets.take_behind, []
    monkeypatch.setattr(gets, "get_one", lambda *given: went.append("long") or long_way(*given))
    monkeypatch.setattr(gets, "take_behind", lambda delivery: went.append("look") or looks(delivery))
    bodies = [queue.get(0).body for _ in range(1 + 2 * FEW_BEHIND)]
    assert bodies == [b"high", *(b"%03d" % number for number in range(2 * FEW_BEHIND))]
    assert went == ["look", "long"]


@pytest.mark.owner_only
def test_what_another_thread_puts_one_after_the_other_meanwhile_comes_in_its_order(
    open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The higher one came first: a get that has looked when there was neither does not take the lower one."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=3)
    queue.put(b"2", priority=2)
    queue.get(0).ack()
    lanes = parts_of(queue).gets.lanes
    coming = [b"1", b"0"]

    def put_all() -> None:
        while coming:
            body = coming.pop(0)
            queue.put(body, priority=int(body))

    class Ranked(list[Any]):
        def __iter__(self) -> Any:
            yield from super().__iter__()
            thread = threading.Thread(target=put_all)
            thread.start()
            thread.join()

    monkeypatch.setattr(lanes, "ranked", Ranked(lanes.ranked))
    assert [queue.get(LONG_S).body for _ in range(2)] == [b"1", b"0"]


@pytest.mark.owner_only
def test_what_comes_as_a_lower_one_is_taken_is_the_next(open_spool: Open) -> None:
    """A get has looked, and takes the lower one: gets that follow do not go on there, past what has come above it."""
    queue = open_spool().declare_queue("q", durable=False, priorities=3)
    queue.put(b"2", priority=2)
    queue.get(0).ack()
    queue.put(b"0")
    queue.put(b"0 again")
    with inside.before_lock(queue, lambda: queue.put(b"1", priority=1)):
        assert queue.get(0).body == b"0"
    assert [queue.get(0).body for _ in range(2)] == [b"1", b"0 again"]


@pytest.mark.owner_only
def test_gets_go_on_in_the_lane_that_one_has_looked_for(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something comes above it: priorities one by one cost one look each at most."""
    queue = open_spool().declare_queue("q", durable=False, priorities=5)
    gets, looks = parts_of(queue).gets, list[str]()
    behind = gets.take_behind
    monkeypatch.setattr(gets, "take_behind", lambda delivery: looks.append("look") or behind(delivery))
    queue.put(b"4", priority=4)
    queue.get(0)
    for number in (1, 1, 1):
        queue.put(b"%d" % number, priority=number)
        queue.get(0)
    assert looks == ["look"]
    queue.put(b"3", priority=3)
    queue.put(b"0")
    queue.put(b"2", priority=2)
    assert [queue.get(0).body for _ in range(3)] == [b"3", b"2", b"0"]
    assert looks == ["look"] * 3


@pytest.mark.owner_only
def test_what_comes_below_a_priority_that_was_emptied_takes_no_work_of_another_thread(
    open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers mostly take one message after the other, of whatever priority it is."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=10)
    monkeypatch.setattr(parts_of(queue).gets, "get_one", None)
    for priority in (9, 3, 7, 0, 0, 8, 2, 1):
        queue.put(b"%d" % priority, priority=priority)
        with queue.get(0) as delivery:
            assert delivery.body == b"%d" % priority


def test_batches_have_one_priority(open_spool: Open, durable: bool) -> None:
    """`put_many` and `submit` take it, too; sequences are consecutive in a batch and grow in a priority."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=3)
    low = queue.put_many([b"1", b"2"])
    high = queue.put_many([b"3", b"4"], priority=2)
    highest = queue.submit(b"5", priority=2).result(LONG_S)
    assert low == range(low[0], low[0] + 2)
    assert high == range(high[0], high[0] + 2)
    assert highest == high[1] + 1
    batch = queue.get_many(10)
    assert batch.bodies[:3] == [b"3", b"4", b"5"]
    assert list(batch.sequences)[:3] == [*high, highest]


def test_a_returned_message_comes_back_in_its_place(open_spool: Open, durable: bool) -> None:
    """Of its own priority, whatever was put meanwhile."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=3)
    for body, priority in ((b"low", 0), (b"high1", 2), (b"high2", 2), (b"middle", 1)):
        queue.put(body, priority=priority)
    held = [queue.get() for _ in range(4)]
    assert [delivery.body for delivery in held] == [b"high1", b"high2", b"middle", b"low"]
    queue.put(b"high3", priority=2)
    for delivery in reversed(held):
        delivery.nack()
    assert bodies_of(queue) == [b"high1", b"high2", b"high3", b"middle", b"low"]


def test_a_batch_over_several_priorities_is_settled_as_a_whole(open_spool: Open, durable: bool) -> None:
    """And part by part; its acks are in the log by lane."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, priorities=3)
    for number in range(9):
        queue.put(b"%d" % number, priority=number % 3)
    batch = queue.get_many(9)
    assert batch.bodies == [b"2", b"5", b"8", b"1", b"4", b"7", b"0", b"3", b"6"]
    batch[0].nack()
    batch[4].ack()
    batch.ack(wait=True)
    assert broker.check() == []
    if durable:
        broker.close()
        queue = open_spool().queue("q")
    assert bodies_of(queue) == [b"2"]


def test_priorities_survive_reopening(open_spool: Open) -> None:
    """From the log, with what is put afterwards behind, and counts of deliveries as they were."""
    broker = open_spool()
    queue = broker.declare_queue("q", priorities=4)
    sent = [(number % 4, b"%02d" % number) for number in range(40)]
    for priority, body in sent:
        queue.put(body, priority=priority)
    queue.get().nack()
    broker.close()
    broker = open_spool()
    queue = broker.queue("q")
    for number in range(40, 44):
        sent.append((number % 4, b"%02d" % number))
        queue.put(sent[-1][1], priority=number % 4)
    delivery = queue.get()
    assert (delivery.body, delivery.delivery_count) == (b"03", 2)
    delivery.nack()
    assert broker.check() == []
    assert bodies_of(queue) == in_order(sent)


@pytest.mark.owner_only
def test_a_deleted_queue_leaves_nothing_of_any_priority_in_the_log(open_spool: Open) -> None:
    """Every lane is removed in the background."""
    broker = open_spool()
    queue = broker.declare_queue("q", priorities=3)
    owner = parts_of(queue).context.owner
    for number in range(9):
        queue.put(b"%d" % number, priority=number % 3)
    queue.put(b"later", delay_s=60)
    broker.delete_queue("q")
    inside.upkeep(broker).finish_removing()
    broker.engine.log.drain()
    with broker.engine.log.read() as txn, txn.cursor() as cursor:
        left = [bytes(key) for key, _ in cursor if bytes(key)[1:5] == owner.to_bytes(4, "big")]
    assert left == []


def test_a_message_not_logged_keeps_its_priority(open_spool: Open) -> None:
    """In line among those that are, until a restart."""
    broker = open_spool()
    queue = broker.declare_queue("q", priorities=2)
    for number in range(6):
        queue.put(b"%d" % number, priority=number % 2, durable=number < 4)
    held = queue.get_many(4)
    assert held.bodies == [b"1", b"3", b"5", b"0"]
    held.nack()
    broker.close()
    assert bodies_of(open_spool().queue("q")) == [b"1", b"3", b"0", b"2"]


def test_a_purge_takes_every_priority(open_spool: Open, durable: bool) -> None:
    """In one commit; sequences go on in each."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, priorities=3, capacity_bytes=3 * COST)
    before = {priority: queue.put_many([b"x" * 1000] * 5, priority=priority)[-1] for priority in range(3)}
    held = queue.get()
    commits = broker.stats().commits_total
    assert queue.purge() == 15
    assert broker.stats().commits_total <= commits + 1
    held.ack()
    for priority in range(3):
        assert queue.put(b"y", priority=priority) == before[priority] + 1
    assert bodies_of(queue) == [b"y"] * 3


@pytest.mark.owner_only
def test_spilling_takes_the_lowest_priority_first(open_spool: Open, durable: bool) -> None:
    """What is needed last goes to disk, what is needed first stays."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=2, capacity_bytes=10 * COST)
    queue.put_many([b"h" * 1000] * 5, priority=1)
    for _ in range(20):
        queue.put(b"l" * 1000)
    states = [entry.state for entry in queue.browse()]
    assert states[:5] == ["resident"] * 5
    assert "spilled" in states[5:]
    assert bodies_of(queue) == [b"h" * 1000] * 5 + [b"l" * 1000] * 20


@pytest.mark.owner_only
def test_what_comes_back_from_disk_begins_with_the_highest_priority(open_at: Open, durable: bool) -> None:
    """After the capacity was raised: lanes are read in the order in which they are delivered, each from its head."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, priorities=3, capacity_bytes=0)
    for priority in (0, 2, 1):
        queue.put_many([b"%d" % priority * 1000] * 4, priority=priority)
    broker.alter_queue("q", capacity_bytes=13 * COST)  # as much comes back as half of it holds
    while inside.fit(queue):
        pass
    states = [entry.state for entry in queue.browse()]
    back = states.count("resident")
    assert 4 < back < 12
    assert states == ["resident"] * back + ["spilled"] * (12 - back)
    assert bodies_of(queue) == [b"2" * 1000] * 4 + [b"1" * 1000] * 4 + [b"0" * 1000] * 4


@pytest.mark.owner_only
@pytest.mark.parametrize("priority", [-1, 3, 10, 2**40, 1.0, "1", True])
def test_a_bad_priority_is_refused_and_nothing_is_put(open_spool: Open, durable: bool, priority: Any) -> None:
    """Of every way in; the message says which there are."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, priorities=3)
    for put in (
        lambda: queue.put(b"x", priority=priority),
        lambda: queue.put(b"x", priority=priority, headers={"a": 1}),
        lambda: queue.put_many([b"x"], priority=priority),
        lambda: queue.submit(b"x", priority=priority),
        lambda: broker.transaction().put(queue, b"x", priority=priority),
    ):
        with pytest.raises(qflow.InvalidArgument, match="from 0 to 2"):
            put()
    assert len(queue) == 0


@pytest.mark.parametrize("priorities", [0, 11, -1, None, 2.0, "3", True])
def test_a_bad_number_of_priorities_is_refused(open_spool: Open, priorities: Any) -> None:
    """1 to 10, when it is declared."""
    broker = open_spool()
    with pytest.raises(qflow.InvalidArgument, match="priorities"):
        broker.declare_queue("q", priorities=priorities)
    assert broker.queues() == []


def test_producers_and_consumers_of_all_priorities_at_once(open_spool: Open, durable: bool) -> None:
    """Each message once, and each priority of a producer in its order for a single consumer."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=3, capacity_bytes=20 * COST)
    received: list[tuple[int, int, int]] = []

    def produce(producer: int) -> None:
        for number in range(100):
            priority = (number * 7 + producer) % 3
            queue.put(b"%d %d %d" % (producer, priority, number) + b" " * 900, priority=priority)

    producers = [threading.Thread(target=produce, args=(producer,)) for producer in range(3)]
    for thread in producers:
        thread.start()
    while len(received) < 300:
        for body in (batch := queue.get_many(5, timeout_s=LONG_S)).bodies:
            producer, priority, number = map(int, body.split())
            received.append((producer, priority, number))
        batch.ack()
    for thread in producers:
        thread.join(LONG_S)
    assert len(set(received)) == 300
    for producer in range(3):
        for priority in range(3):
            numbers = [number for *key, number in received if key == [producer, priority]]
            assert numbers == sorted(numbers)
