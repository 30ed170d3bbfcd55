"""Other settings for a queue in use: each axis lowered, raised and taken away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import inside
import qflow
from qflow import Overflow
from qflow.memory.waiting import shelter
from qflow.message import BATCH_BYTES, OVERHEAD_BYTES
from qflow.queues import restorer, tending
from qflow.queues.fetching import Moved, read_spilled
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COST = 1000 + OVERHEAD_BYTES


def body(number: int) -> bytes:
    return b"%04d" % number * 250


def numbers_of(queue: qflow.Queue) -> list[int]:
    """Take and settle what waits; return the numbers of the bodies."""
    numbers: list[int] = []
    while batch := queue.get_many(1000, timeout_s=0):
        for text in batch.bodies:
            assert text == body(int(text[:4]))
            numbers.append(int(text[:4]))
        batch.ack()
    return numbers


@pytest.mark.owner_only
def test_a_lower_capacity_spills_from_the_tail_only(open_spool: Open, durable: bool) -> None:
    """Edge 5: the head stays in memory, acquired messages stay acquired, the order holds."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([body(number) for number in range(50)])
    held = queue.get_many(5)
    broker.alter_queue("q", capacity_bytes=20 * COST)
    states = [entry.state for entry in queue.browse()]
    assert states == sorted(states, key=("resident", "spilled").index)
    assert 0 < states.count("resident") <= 15
    assert queue.stats().resident_bytes <= 20 * COST
    assert broker.check() == []
    held.ack()
    assert numbers_of(queue) == list(range(5, 50))


@pytest.mark.owner_only
def test_a_capacity_of_nothing_and_back_again(open_spool: Open, durable: bool) -> None:
    """Edges 2 and 5: with 0 bytes all goes to disk, with more it comes back, from the head."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([body(number) for number in range(40)])
    broker.alter_queue("q", capacity_bytes=0)
    assert queue.stats().resident_messages == 0
    assert broker.check() == []
    queue.put(body(40))
    broker.alter_queue("q", capacity_bytes=60 * COST)
    while inside.fit(queue):
        pass
    states = [entry.state for entry in queue.browse()]
    assert states == sorted(states, key=("resident", "spilled").index)
    assert states.count("resident") > 20
    assert broker.check() == []
    broker.alter_queue("q", capacity_bytes=None)
    assert queue.stats().capacity_bytes == broker.settings.capacity_bytes
    assert numbers_of(queue) == list(range(41))


@pytest.mark.owner_only
def test_what_was_on_its_way_when_the_capacity_was_lowered_is_spilled(open_at: Open, durable: bool) -> None:
    """Its room was reserved before, so it is above the capacity as it becomes visible; maintenance sees to that."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=100_000, max_message_bytes=50_000)
    puts, log = parts_of(queue).puts, broker.engine.log
    put = puts.draft([bytes(40_000)], True, 0)
    assert shelter(lambda: puts.reserve_at_once(put))
    broker.alter_queue("q", capacity_bytes=20_000, max_message_bytes=10_000)
    if durable:
        log.wait(log.put(put))
    else:
        shelter(lambda: puts.publish_transient(put))
    parts_of(queue).spiller.spill_left_over()
    stats = queue.stats()
    assert (stats.resident_bytes, stats.spilled_messages) == (0, 1)
    assert queue.get(0).body == bytes(40_000)
    assert broker.check() == []


def test_a_lower_capacity_waits_for_what_is_held(open_spool: Open, durable: bool) -> None:
    """Edges 5 and 7: acquired messages are charged until they are settled, then the bound holds."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([body(number) for number in range(20)])
    held = queue.get_many(20)
    broker.alter_queue("q", capacity_bytes=5 * COST)
    assert queue.stats().resident_bytes == 20 * COST + BATCH_BYTES
    assert broker.check() == []
    held.nack()
    assert queue.stats().resident_bytes <= 5 * COST
    assert numbers_of(queue) == list(range(20))


def test_a_lower_limit_holds_puts_back_and_drops_nothing(open_spool: Open, durable: bool) -> None:
    """With BLOCK and REJECT what is there stays; puts wait until the depth is below the new limit."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=10, resume_ratio=1)
    queue.put_many([body(number) for number in range(10)])
    broker.alter_queue("q", limit_messages=3)
    assert len(queue) == 10
    for _ in range(7):
        queue.get(0).ack()
        with pytest.raises(qflow.QueueFull, match="limit_messages=3"):
            queue.put_nowait(body(99))
    queue.get(0).ack()
    queue.put_nowait(body(10))
    assert numbers_of(queue) == [8, 9, 10]


@pytest.mark.owner_only
@pytest.mark.parametrize("changes", [{"limit_messages": 12}, {"limit_messages": None}])
def test_a_higher_limit_lets_blocked_puts_pass(open_spool: Open, durable: bool, changes: dict[str, Any]) -> None:
    """Nobody has to settle anything for that."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=2)
    queue.put_many([body(0), body(1)])
    producers = [threading.Thread(target=queue.put, args=(body(number),)) for number in (2, 3)]
    for waiting, producer in enumerate(producers, 1):
        producer.start()
        until(lambda waiting=waiting: len(parts_of(queue).admission.line) == waiting)
    broker.alter_queue("q", **changes)
    for producer in producers:
        producer.join(LONG_S)
        assert not producer.is_alive()
    assert sorted(numbers_of(queue)) == [0, 1, 2, 3]


@pytest.mark.owner_only
@pytest.mark.parametrize("changes", [{"limit_messages": 4}, {"limit_bytes": 4000}])
def test_a_ring_drops_down_to_a_lower_limit(open_spool: Open, durable: bool, changes: dict[str, int]) -> None:
    """DROP_OLDEST: the oldest that wait go, on disk or not, and what is acquired stays."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, on_overflow=Overflow.DROP_OLDEST, capacity_bytes=12 * COST)
    queue.put_many([body(number) for number in range(20)])
    held = queue.get()
    broker.alter_queue("q", **changes)
    while inside.fit(queue):
        pass
    assert len(queue) == 4
    assert queue.stats().dropped_total == 16
    assert broker.check() == []
    held.nack()
    assert numbers_of(queue) == [0, 17, 18, 19]


@pytest.mark.owner_only
def test_a_ring_is_not_down_while_another_thread_reads_what_it_drops(
    open_at: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit` tells then that there is more to do: what the other reads is dropped by either."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, on_overflow=Overflow.DROP_OLDEST, capacity_bytes=0)
    queue.put_many([body(number) for number in range(6)])
    reads, goes_on = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any) -> Moved:
        reads.set()
        assert goes_on.wait(LONG_S)
        return read_spilled(*arguments)

    monkeypatch.setattr(restorer, "read_spilled", read_slowly)
    altering = threading.Thread(target=broker.alter_queue, args=("q",), kwargs={"limit_messages": 4})
    altering.start()
    assert reads.wait(LONG_S)
    assert inside.fit(queue)
    goes_on.set()
    altering.join(LONG_S)
    while inside.fit(queue):
        pass
    assert numbers_of(queue) == [2, 3, 4, 5]


@pytest.mark.owner_only
def test_a_ring_drops_what_is_on_disk_in_one_go(open_at: Open, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part after part is read and dropped, as for a put: none of them waits for another round of maintenance."""
    monkeypatch.setattr(tending, "AT_ONCE_S", 3600.0)
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, on_overflow=Overflow.DROP_OLDEST, capacity_bytes=2 * COST)
    queue.put_many([body(number) for number in range(40)])
    broker.alter_queue("q", limit_messages=4)
    assert len(queue) == 4
    assert queue.stats().dropped_total == 36
    assert numbers_of(queue) == [36, 37, 38, 39]


@pytest.mark.owner_only
def test_limits_in_bytes_count_what_was_there_before(open_spool: Open, durable: bool) -> None:
    """The bytes of a queue without a limit are found when it gets one: in memory, on disk and acquired."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=8 * COST, on_overflow=Overflow.REJECT)
    queue.put_many([body(number) for number in range(20)])
    queue.get_many(2).ack()
    held = queue.get_many(3)
    broker.alter_queue("q", limit_bytes=19_000)
    queue.put(body(20))
    with pytest.raises(qflow.QueueFull, match="limit_bytes=19000"):
        queue.put(body(21))
    held.ack()
    queue.put_many([body(number) for number in (21, 22, 23)])
    with pytest.raises(qflow.QueueFull):
        queue.put(b"x")
    broker.alter_queue("q", limit_bytes=None)
    queue.put(body(24))
    assert numbers_of(queue) == list(range(5, 25))


def test_limits_found_after_reopening_count_what_is_in_the_log(open_spool: Open) -> None:
    """Nothing was read from the log yet, and its depth and bytes are known."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([body(number) for number in range(10)])
    queue.get().ack()
    broker.alter_queue("q", limit_bytes=10_000, on_overflow=Overflow.REJECT)
    broker.close()
    broker = open_spool()
    queue = broker.queue("q")
    assert (queue.settings.limit_bytes, queue.settings.on_overflow) == (10_000, Overflow.REJECT)
    queue.put(body(10))
    with pytest.raises(qflow.QueueFull):
        queue.put(b"x")
    broker.alter_queue("q", limit_bytes=None, limit_messages=11)
    queue.put(body(11))
    with pytest.raises(qflow.QueueFull):
        queue.put(b"x")
    broker.close()
    queue = open_spool().queue("q")
    assert (queue.settings.limit_bytes, queue.settings.limit_messages) == (None, 11)
    assert numbers_of(queue) == list(range(1, 12))


@pytest.mark.owner_only
def test_a_ring_of_the_log_drops_down_to_a_lower_limit(open_spool: Open) -> None:
    """What is only in the log is as old as it is."""
    broker = open_spool()
    queue = broker.declare_queue("q", on_overflow=Overflow.DROP_OLDEST)
    queue.put_many([body(number) for number in range(20)])
    broker.close()
    broker = open_spool()
    queue = broker.alter_queue("q", limit_messages=5)
    while inside.fit(queue):
        pass
    assert len(queue) == 5
    assert broker.check() == []
    assert numbers_of(queue) == list(range(15, 20))


@pytest.mark.owner_only
@pytest.mark.parametrize(
    ("policy", "returned"),
    [
        (Overflow.REJECT, qflow.QueueFull),
        (Overflow.DROP_NEWEST, None),
        (Overflow.DROP_OLDEST, 2),
        (Overflow.DEAD_LETTER, None),
    ],
)
def test_who_waits_is_treated_by_the_new_policy(
    open_spool: Open, durable: bool, policy: Overflow, returned: object
) -> None:
    """A blocked put does not go on waiting where nobody waits any more."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=2)
    queue.put_many([body(0), body(1)])
    outcome: list[object] = []

    def put() -> None:
        try:
            outcome.append(queue.put(body(2)))
        except qflow.QueueFull as error:
            outcome.append(type(error))

    producer = threading.Thread(target=put)
    producer.start()
    until(lambda: parts_of(queue).admission.line)
    broker.alter_queue("q", on_overflow=policy, dead_letter="dead")
    producer.join(LONG_S)
    assert outcome == [returned]
    assert numbers_of(queue) == ([1, 2] if policy is Overflow.DROP_OLDEST else [0, 1])
    if policy is Overflow.DEAD_LETTER:
        assert broker.queue("dead").get(0).body == body(2)


@pytest.mark.owner_only
@pytest.mark.parametrize(
    "changes",
    [{"limit_messages": 4}, {"limit_bytes": 4000}, {"limit_messages": 4, "on_overflow": Overflow.DROP_OLDEST}],
)
def test_who_waits_and_can_never_fit_any_more_is_refused(
    open_spool: Open, durable: bool, changes: dict[str, Any]
) -> None:
    """At once, wherever in line it stands; nothing of it was put, and those behind it go on when there is room."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=10, limit_bytes=10_000)
    broker.bind(queue, "t")
    queue.put_many([body(number) for number in range(8)])
    many = [body(number) for number in range(6)]

    def transact() -> None:
        with broker.transaction() as transaction:
            transaction.put_many(queue, many)

    puts: list[Callable[[], object]] = [
        lambda: queue.put_many(many),
        lambda: queue.put(body(8)),
        transact,
        lambda: broker.publish_many([("t", one) for one in many]),
        lambda: queue.put(body(9)),
    ]
    outcome: dict[int, object] = {}

    def attempt(number: int) -> None:
        try:
            outcome[number] = puts[number]()
        except qflow.QflowError as error:
            outcome[number] = type(error)

    admission = parts_of(queue).admission
    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(len(puts))]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda number=number: len(admission.line) == number)
    broker.alter_queue("q", **changes)
    until(lambda: len(outcome) >= 3)
    taken = queue.get_many(10)
    taken.ack()
    for thread in threads:
        thread.join(LONG_S)
    assert [outcome[number] for number in (0, 2, 3)] == [qflow.InvalidArgument] * 3
    assert not inside.left_behind(queue)
    assert {*(int(text[:4]) for text in taken.bodies[-2:]), *numbers_of(queue)} >= {8, 9}
    assert queue.put(body(10), timeout_s=0) == 10


def test_the_largest_message_changes_for_later_puts(open_spool: Open, durable: bool) -> None:
    """Also where plain puts take the short way."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put(body(0))
    broker.alter_queue("q", max_message_bytes=999)
    with pytest.raises(qflow.MessageTooLarge, match="max_message_bytes=999"):
        queue.put(body(1))
    broker.alter_queue("q", max_message_bytes="1KiB")
    queue.put(body(1))
    assert numbers_of(queue) == [0, 1]


def test_a_new_ttl_holds_for_messages_put_from_now_on(open_at: Open, clock: Clock, durable: bool) -> None:
    """What was put without one stays; taken away again, what has one keeps it."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable)
    queue.put(body(0))
    broker.alter_queue("q", ttl_s=10)
    queue.put(body(1))
    broker.alter_queue("q", ttl_s=None)
    queue.put(body(2))
    clock.advance(11)
    assert numbers_of(queue) == [0, 2]
    assert queue.stats().expired_total == 1


def test_a_new_ack_timeout_holds_for_what_is_held_from_now_on(open_at: Open, clock: Clock, durable: bool) -> None:
    """What was taken before is held until it is settled."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([body(0), body(1), body(2)])
    before = queue.get()
    broker.alter_queue("q", ack_timeout_s=5)
    late = queue.get()
    clock.advance(6)
    assert queue.get(0).sequence == late.sequence
    with pytest.raises(qflow.AlreadySettled, match="ack_timeout_s=5"):
        late.ack()
    before.ack()
    broker.alter_queue("q", ack_timeout_s=None)
    clock.advance(60)
    assert queue.get(0).body == body(2)


def test_another_ack_timeout_holds_for_what_is_held_already(open_at: Open, clock: Clock, durable: bool) -> None:
    """What was taken while there was one."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, ack_timeout_s=5)
    queue.put(body(0))
    held = queue.get()
    broker.alter_queue("q", ack_timeout_s=10)
    clock.advance(6)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    clock.advance(5)
    assert queue.get(0).sequence == held.sequence


def test_a_lower_number_of_deliveries_counts_those_before(open_spool: Open, durable: bool) -> None:
    """A message that came back three times is a dead letter when two are the most."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put(body(0))
    queue.put(body(1))
    for _ in range(3):
        queue.get(0).nack()
    broker.alter_queue("q", max_deliveries=2, dead_letter="dead")
    assert numbers_of(queue) == [1]
    with broker.queue("dead").get(LONG_S) as delivery:
        assert delivery.body == body(0)
        assert delivery.headers["dead_letter_deliveries"] == 3
        assert delivery.headers["dead_letter_reason"] == "max_deliveries"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"durable": False}, "durable"),
        ({"priorities": 3}, "priorities"),
        ({"colour": "red"}, "colour"),
        ({"limit_messages": 0}, "limit_messages"),
        ({"limit_bytes": -1}, "limit_bytes"),
        ({"capacity_bytes": "much"}, "capacity_bytes"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ack_timeout_s": 0}, "ack_timeout_s"),
        ({"resume_ratio": 1.5}, "resume_ratio"),
        ({"on_overflow": "explode"}, "on_overflow"),
        ({"on_overflow": Overflow.DEAD_LETTER}, "dead_letter"),
        ({"max_message_bytes": None}, "max_message_bytes"),
        ({"dead_letter": "q"}, "cycle"),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(
    open_spool: Open, durable: bool, changes: dict[str, Any], named: str
) -> None:
    """Neither does what else was asked for in the same call; after reopening it is as it was."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=5)
    before = queue.settings
    with pytest.raises(qflow.InvalidArgument, match=named):
        broker.alter_queue("q", **({"limit_messages": 7, "max_deliveries": 3} | changes))
    assert queue.settings == before
    with pytest.raises(qflow.NotFound):
        broker.alter_queue("missing", limit_messages=7)
    if durable:
        broker.close()
        assert open_spool().queue("q").settings == before


@pytest.mark.parametrize("setting", [{"durable": False}, {"priorities": 3}])
def test_what_cannot_be_altered_is_not_said_to_be(open_spool: Open, setting: dict[str, Any]) -> None:
    """Of a queue that was declared otherwise."""
    broker = open_spool()
    broker.declare_queue("q")
    with pytest.raises(qflow.SettingsConflict, match="declare it as it is, or declare another queue and move over"):
        broker.declare_queue("q", **setting)


def test_a_queue_is_altered_while_it_is_used(open_spool: Open, durable: bool) -> None:
    """Producers and consumers go on while capacity and limits change; nothing is lost and the order holds."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=50, resume_ratio=1)
    received: list[int] = []

    def produce() -> None:
        for number in range(400):
            queue.put(body(number))

    def consume() -> None:
        while len(received) < 400:
            batch = queue.get_many(7)
            received.extend(int(text[:4]) for text in batch.bodies)
            batch.ack()

    threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
    for thread in threads:
        thread.start()
    changes = [
        {"capacity_bytes": 3 * COST},
        {"limit_messages": 5},
        {"capacity_bytes": None, "limit_messages": None},
        {"capacity_bytes": 0},
        {"limit_bytes": 20_000},
        {"capacity_bytes": 10 * COST, "limit_bytes": None},
    ]
    turn = 0
    while len(received) < 400 or turn < len(changes):
        broker.alter_queue("q", **changes[turn % len(changes)])
        turn += 1
    for thread in threads:
        thread.join(LONG_S)
    assert received == list(range(400))


def test_whoever_has_a_queue_is_told_that_it_was_deleted(open_spool: Open) -> None:
    """Wherever the queue itself is given; by its name there is none."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    broker.delete_queue(queue)
    assert broker.queues() == []

    def transact(one: Any) -> None:
        with broker.transaction() as tx:
            tx.put(one, b"x")

    calls: list[Callable[[Any], Any]] = [
        broker.alter_queue,
        broker.delete_queue,
        lambda one: broker.bind(one, "a"),
        lambda one: broker.unbind(one, "a"),
        lambda one: broker.schedule("s", one, b"x", every_s=60),
        transact,
    ]
    for call in (*calls, lambda one: one.put(b"x"), lambda one: one.get(0), lambda one: list(one.browse())):
        with pytest.raises(qflow.QueueDeleted):
            call(queue)
    for call in calls:
        with pytest.raises(qflow.NotFound):
            call("q")
