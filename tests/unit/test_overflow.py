"""What happens at a limit: the decisions of each policy, and what a queue makes of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

import inside
import qflow
from faults.seams import bodies_of
from qflow import Overflow
from qflow.config import QueueSettings
from qflow.message import OVERHEAD_BYTES
from qflow.queues.admission import Admission
from qflow.queues.overflow import Decision, Depth, check_can_ever_fit, decide, excess, may_resume
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]

AT_LIMIT = {
    Overflow.BLOCK: Decision.WAIT,
    Overflow.REJECT: Decision.REFUSE,
    Overflow.DROP_OLDEST: Decision.MAKE_ROOM,
    Overflow.DROP_NEWEST: Decision.DROP,
    Overflow.DEAD_LETTER: Decision.DEAD_LETTER,
}


def settings_of(policy: Overflow, **limits: Any) -> QueueSettings:
    dead_letter = "dead" if policy is Overflow.DEAD_LETTER else None
    return QueueSettings(on_overflow=policy, dead_letter=dead_letter, **limits)


@pytest.mark.parametrize("policy", Overflow)
@pytest.mark.parametrize(
    ("limits", "depth", "arriving", "over"),
    [
        ({}, (10**9, 10**12), (10**6, 10**9), (0, 0)),
        ({"limit_messages": 5}, (4, 10**9), (1, 10**9), (0, 0)),
        ({"limit_messages": 5}, (5, 0), (1, 0), (1, 0)),
        ({"limit_messages": 5}, (3, 0), (4, 0), (2, 0)),
        ({"limit_messages": 5}, (9, 0), (1, 0), (5, 0)),
        ({"limit_bytes": 100}, (10**9, 60), (10**6, 40), (0, 0)),
        ({"limit_bytes": 100}, (1, 60), (1, 41), (0, 1)),
        ({"limit_bytes": 1}, (0, 1), (3, 0), (0, 0)),
        ({"limit_bytes": 1}, (0, 1), (1, 1), (0, 1)),
        ({"limit_messages": 5, "limit_bytes": 100}, (1, 99), (1, 2), (-3, 1)),
        ({"limit_messages": 5, "limit_bytes": 100}, (5, 10), (1, 10), (1, -80)),
        ({"limit_messages": 5, "limit_bytes": 100}, (4, 90), (1, 10), (0, 0)),
    ],
)
def test_each_policy_decides_by_what_would_be_too_much(
    policy: Overflow,
    limits: dict[str, int],
    depth: tuple[int, int],
    arriving: tuple[int, int],
    over: tuple[int, int],
) -> None:
    """The table of all policies: admitted while neither limit would be passed, else what the policy is named after."""
    settings = settings_of(policy, **limits)
    assert excess(settings, Depth(*depth), Depth(*arriving)) == over
    expected = AT_LIMIT[policy] if max(over) > 0 else Decision.ADMIT
    assert decide(settings, Depth(*depth), Depth(*arriving)) is expected


@pytest.mark.parametrize(
    ("limits", "ratio", "depth", "resumed"),
    [
        ({}, 0.8, (10**9, 10**9), True),
        ({"limit_messages": 100}, 0.8, (80, 10**9), True),
        ({"limit_messages": 100}, 0.8, (81, 0), False),
        ({"limit_messages": 100}, 1.0, (100, 0), True),
        ({"limit_messages": 100}, 0.0, (1, 0), False),
        ({"limit_messages": 100}, 0.0, (0, 0), True),
        ({"limit_messages": 1}, 0.8, (1, 0), False),
        ({"limit_bytes": 1000}, 0.5, (10**9, 500), True),
        ({"limit_bytes": 1000}, 0.5, (0, 501), False),
        ({"limit_messages": 10, "limit_bytes": 1000}, 0.5, (5, 501), False),
        ({"limit_messages": 10, "limit_bytes": 1000}, 0.5, (6, 500), False),
        ({"limit_messages": 10, "limit_bytes": 1000}, 0.5, (5, 500), True),
    ],
)
def test_puts_resume_when_both_axes_are_down_to_the_mark(
    limits: dict[str, int], ratio: float, depth: tuple[int, int], resumed: bool
) -> None:
    """The table of the resume mark."""
    assert may_resume(QueueSettings(resume_ratio=ratio, **limits), Depth(*depth)) is resumed


@pytest.mark.parametrize(
    ("limits", "arriving", "named"),
    [({"limit_messages": 5}, (6, 0), "limit_messages=5"), ({"limit_bytes": 5}, (1, 6), "limit_bytes=5")],
)
def test_what_an_empty_queue_would_not_admit_is_named(
    limits: dict[str, int], arriving: tuple[int, int], named: str
) -> None:
    """Nobody waits, and nothing is dropped, for what cannot be."""
    with pytest.raises(qflow.InvalidArgument, match=named):
        check_can_ever_fit("q", QueueSettings(**limits), *arriving)


@pytest.mark.owner_only
def test_reject_refuses_and_keeps_nothing(open_spool: Open, durable: bool) -> None:
    """A refused put, batch or submit leaves the queue as it was, however long it would wait."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=2, on_overflow=Overflow.REJECT)
    queue.put_many([b"1", b"2"])
    with pytest.raises(qflow.QueueFull, match=r"limit_messages=2.*or raise the limit"):
        queue.put(b"3", timeout_s=LONG_S)
    with pytest.raises(qflow.QueueFull):
        queue.put_many([b"3", b"4"])
    with pytest.raises(qflow.QueueFull):
        queue.submit(b"3")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"3", headers={"a": 1}, durable=False)
    queue.get().ack()
    assert queue.put(b"5") is not None
    assert bodies_of(queue) == [b"2", b"5"]
    assert queue.stats().dropped_total == 0


def test_drop_newest_drops_what_arrives_and_says_so(open_spool: Open, durable: bool) -> None:
    """A put returns None, a batch an empty range, a submit a future of None; each message is counted."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=2, on_overflow=Overflow.DROP_NEWEST)
    assert queue.put_many([b"1", b"2"]) == range(2)
    assert queue.put(b"3") is None
    assert queue.put_many([b"4", b"5"]) == range(0)
    assert queue.submit(b"6").result(LONG_S) is None
    assert queue.put(b"7", durable=False) is None
    assert queue.stats().dropped_total == 5
    assert queue.stats().put_total == 2
    assert bodies_of(queue) == [b"1", b"2"]


def test_drop_oldest_is_a_ring(open_spool: Open, durable: bool) -> None:
    """The oldest go, as many as arrive; sequences go on; what is dropped is counted and does not come back."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=3, on_overflow=Overflow.DROP_OLDEST)
    for number in range(10):
        assert queue.put(b"%d" % number) == number
    assert len(queue) == 3
    assert queue.put_many([b"a", b"b"]) == range(10, 12)
    assert queue.stats().dropped_total == 9
    if durable:
        assert broker.check() == []
        broker.close()
        queue = open_spool().queue("q")
    assert bodies_of(queue) == [b"9", b"a", b"b"]


def test_drop_oldest_frees_as_many_bytes_as_it_must(open_spool: Open, durable: bool) -> None:
    """A limit in bytes: one large message pushes several small ones out, and no more than that."""
    queue = open_spool().declare_queue("q", durable=durable, limit_bytes=100, on_overflow=Overflow.DROP_OLDEST)
    queue.put_many([b"%d" % number * 10 for number in range(10)])
    queue.put(b"x" * 25)
    assert queue.stats().dropped_total == 3
    assert queue.stats().bytes == 95
    assert bodies_of(queue) == [b"%d" % number * 10 for number in range(3, 10)] + [b"x" * 25]


def test_drop_oldest_skips_what_is_acquired(open_spool: Open, durable: bool) -> None:
    """Edge 15: a message somebody works on is not dropped; the oldest that waits is."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=3, on_overflow=Overflow.DROP_OLDEST)
    queue.put_many([b"1", b"2", b"3"])
    held = queue.get()
    queue.put(b"4")
    held.nack()
    assert len(queue) == 3
    assert bodies_of(queue) == [b"1", b"3", b"4"]


def test_a_ring_that_is_all_acquired_waits_for_room(open_spool: Open, durable: bool) -> None:
    """Edge 15: where nothing can be dropped a put waits as long as it may, and the ring never gets deeper."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=2, on_overflow=Overflow.DROP_OLDEST)
    queue.put_many([b"1", b"2"])
    held = queue.get_many(2)
    with pytest.raises(qflow.QueueFull):
        queue.put(b"3", timeout_s=0)
    producer = threading.Thread(target=queue.put, args=(b"4",))
    producer.start()
    held[0].ack()
    producer.join(LONG_S)
    assert not producer.is_alive()
    held.nack()
    assert bodies_of(queue) == [b"2", b"4"]


@pytest.mark.owner_only
def test_drop_oldest_reaches_a_spilled_head(open_spool: Open, durable: bool) -> None:
    """What lies on disk is as old as it was put, and goes first."""
    cost = 1000 + OVERHEAD_BYTES
    broker = open_spool()
    queue = broker.declare_queue(
        "q", durable=durable, limit_messages=20, on_overflow=Overflow.DROP_OLDEST, capacity_bytes=5 * cost
    )
    queue.put_many([b"%04d" % number * 250 for number in range(20)])
    next(iter(queue.browse())).spill()
    assert next(iter(queue.browse())).spilled
    for number in range(20, 45):
        queue.put(b"%04d" % number * 250)
        assert len(queue) == 20
        assert queue.stats().resident_bytes <= 5 * cost
    assert broker.check() == []
    assert bodies_of(queue) == [b"%04d" % number * 250 for number in range(25, 45)]
    assert queue.stats().dropped_total == 25


def test_drop_oldest_drops_from_disk_while_memory_is_full_of_what_is_held(open_spool: Open, durable: bool) -> None:
    """Edges 8 and 15: consumers hold all the memory, the head is on disk, and the ring still turns."""
    cost = 1000 + OVERHEAD_BYTES
    broker = open_spool()
    queue = broker.declare_queue(
        "q", durable=durable, limit_messages=20, on_overflow=Overflow.DROP_OLDEST, capacity_bytes=5 * cost
    )
    queue.put_many([b"%04d" % number * 250 for number in range(20)])
    held = queue.get_many(20)
    assert 0 < len(held) < 20
    first = len(held)
    for number in range(20, 23):
        queue.put(b"%04d" % number * 250, timeout_s=0)
    assert len(queue) == 20
    assert broker.check() == []
    held.ack()
    assert bodies_of(queue) == [b"%04d" % number * 250 for number in range(first + 3, 23)]


def test_drop_oldest_takes_from_the_lowest_priority(open_spool: Open, durable: bool) -> None:
    """The oldest of the lowest priority goes, and of a higher one only when nothing lower waits."""
    queue = open_spool().declare_queue(
        "q", durable=durable, limit_messages=4, on_overflow=Overflow.DROP_OLDEST, priorities=3
    )
    for body, priority in ((b"high", 2), (b"low1", 0), (b"low2", 0), (b"middle", 1)):
        queue.put(body, priority=priority)
    queue.put(b"high2", priority=2)
    queue.put(b"high3", priority=2)
    assert len(queue) == 4
    queue.put(b"high4", priority=2)
    assert bodies_of(queue) == [b"high", b"high2", b"high3", b"high4"]
    assert queue.stats().dropped_total == 3


def test_a_batch_dropped_for_reaches_over_priorities(open_spool: Open, durable: bool) -> None:
    """One batch may need more than a priority has."""
    queue = open_spool().declare_queue(
        "q", durable=durable, limit_messages=4, on_overflow=Overflow.DROP_OLDEST, priorities=2
    )
    queue.put(b"high", priority=1)
    queue.put_many([b"low1", b"low2"])
    queue.put_many([b"a", b"b", b"c", b"d"])
    assert bodies_of(queue) == [b"a", b"b", b"c", b"d"]


def test_what_arrives_at_a_limit_becomes_a_dead_letter(open_spool: Open, durable: bool) -> None:
    """The put returns as if it were dropped; the message waits in the other queue, with the reason."""
    broker = open_spool()
    queue = broker.declare_queue(
        "q", durable=durable, limit_messages=1, on_overflow=Overflow.DEAD_LETTER, dead_letter="dead"
    )
    assert queue.put(b"1") == 0
    assert queue.put(b"2", headers={"kept": True}) is None
    assert queue.put_many([b"3", b"4"][:1]) == range(0)
    assert queue.submit(b"5").result(LONG_S) is None
    dead = broker.queue("dead")
    assert dead.settings.durable is durable
    with dead.get(0) as delivery:
        headers = delivery.headers
        assert (delivery.body, headers["kept"]) == (b"2", True)
        assert headers["dead_letter_reason"] == "limit"
        assert headers["dead_letter_queue"] == "q"
        assert headers["dead_letter_sequence"] is None
        assert headers["dead_letter_deliveries"] == 0
    assert bodies_of(dead) == [b"3", b"5"]
    assert queue.stats().dead_lettered_total == 3
    assert bodies_of(queue) == [b"1"]


@pytest.mark.owner_only
@pytest.mark.parametrize("capacity", [None, 500])
def test_blocked_puts_are_admitted_first_come_first_served(
    open_spool: Open, durable: bool, capacity: int | None
) -> None:
    """FIFO of many threads, also where memory must be freed for each of them."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=4, capacity_bytes=capacity, resume_ratio=1)
    queue.put_many([b"%03d" % 0 * 100] * 4)
    producers = []
    for number in range(1, 31):
        producer = threading.Thread(target=queue.put, args=(b"%03d" % number * 100,))
        producer.start()
        producers.append(producer)
        until(lambda number=number: len(parts_of(queue).admission.line) == number)
    admission, lock = parts_of(queue).admission, parts_of(queue).context.lock
    everyone = list(admission.line)
    received = []
    for _ in range(34):
        with queue.get(LONG_S) as delivery:
            received.append(int(delivery.body[:3]))
        assert len(queue) <= 4
        with lock:
            left = list(admission.line)
        assert left == everyone[len(everyone) - len(left) :]
    for producer in producers:
        producer.join(LONG_S)
    assert received[:4] == [0] * 4
    if durable:  # who was admitted hands over when its thread comes to that
        received.sort()
    assert received[4:] == list(range(1, 31))


@pytest.mark.owner_only
def test_a_newcomer_does_not_pass_those_who_wait(open_spool: Open, durable: bool) -> None:
    """Not even if it waits for nothing, or is not logged."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=10)
    queue.put_many([b"x"] * 10)
    producer = threading.Thread(target=queue.put_many, args=([b"y"] * 5,))
    producer.start()
    until(lambda: parts_of(queue).admission.line)
    for _ in range(4):
        queue.get(0).ack()
    with pytest.raises(qflow.QueueFull):
        queue.put_nowait(b"z")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"z", timeout_s=0, durable=False)
    queue.get(0).ack()
    producer.join(LONG_S)
    assert bodies_of(queue) == [b"x"] * 5 + [b"y"] * 5


@pytest.mark.owner_only
def test_blocked_puts_go_on_at_the_resume_mark_and_not_before(open_spool: Open, durable: bool) -> None:
    """At 10 messages and a ratio of 0.5, five must be settled before the first blocked put passes."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=10, resume_ratio=0.5)
    queue.put_many([b"x"] * 10)
    done = threading.Event()
    producer = threading.Thread(target=lambda: (queue.put(b"y"), done.set()))
    producer.start()
    until(lambda: parts_of(queue).admission.line)
    for _ in range(4):
        queue.get(0).ack()
        assert parts_of(queue).admission.line
    assert not done.is_set()
    queue.get(0).ack()
    assert done.wait(LONG_S)
    producer.join(LONG_S)
    assert bodies_of(queue) == [b"x"] * 5 + [b"y"]


@pytest.mark.owner_only
def test_a_put_that_timed_out_leaves_the_line_to_those_behind(open_spool: Open, durable: bool) -> None:
    """I15: the first in line gives up, the second one goes on."""
    queue = open_spool().declare_queue("q", durable=durable, limit_messages=10, resume_ratio=1)
    queue.put_many([b"x"] * 9)
    refused: list[BaseException] = []

    def give_up() -> None:
        try:
            queue.put_many([b"y"] * 5, timeout_s=0.05)
        except qflow.QueueFull as error:
            refused.append(error)

    first = threading.Thread(target=give_up)
    first.start()
    until(lambda: parts_of(queue).admission.line or refused)
    second = threading.Thread(target=queue.put, args=(b"z",))
    second.start()
    first.join(LONG_S)
    second.join(LONG_S)
    assert len(refused) == 1
    assert not second.is_alive()
    assert len(queue) == 10
    assert not parts_of(queue).admission.line


@pytest.mark.parametrize("policy", Overflow)
def test_64_producers_never_make_101_at_a_limit_of_100(open_spool: Open, policy: Overflow, durable: bool) -> None:
    """Edge 27, for each policy: the depth is at most the limit whenever somebody looks."""
    broker = open_spool()
    queue = broker.declare_queue(
        "q",
        durable=durable,
        limit_messages=100,
        on_overflow=policy,
        dead_letter="dead",
        capacity_bytes=3_000,
        resume_ratio=1,
    )
    deepest = 0
    ended = threading.Event()
    refused = []

    def produce() -> None:
        for _ in range(8):
            try:
                queue.put(b"x" * 50, timeout_s=LONG_S)
            except qflow.QueueFull:
                refused.append(1)

    def watch() -> None:
        nonlocal deepest
        while not ended.is_set():
            deepest = max(deepest, len(queue))
            ended.wait(0.0005)

    producers = [threading.Thread(target=produce) for _ in range(64)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for producer in producers:
        producer.start()
    taken = 0
    if policy is Overflow.BLOCK:
        while taken < 412:
            batch = queue.get_many(min(20, 412 - taken), timeout_s=LONG_S)
            taken += len(batch)
            batch.ack()
    for producer in producers:
        producer.join(LONG_S)
    ended.set()
    watcher.join(LONG_S)
    stats = queue.stats()
    assert (stats.messages, max(deepest, 100)) == (100, 100)
    dead = len(broker.queue("dead")) if policy is Overflow.DEAD_LETTER else 0
    assert stats.dead_lettered_total == dead
    assert taken + 100 + len(refused) + stats.dropped_total + dead == 512


@pytest.mark.owner_only
def test_an_interrupted_wait_leaves_no_trace_in_the_line(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """I15: whoever is interrupted at a limit holds nothing back afterwards."""
    queue = open_spool().declare_queue("q", limit_messages=1)
    queue.put(b"1")
    real = Admission.join_line
    struck = threading.Event()

    def join(*arguments: Any) -> None:
        real(*arguments)
        struck.set()
        signal.raise_signal(signal.SIGINT)  # its handler runs in the main thread, which waits

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Admission, "join_line", join)
        queue.put(b"2")
    assert struck.is_set()
    assert not inside.left_behind(queue)
    queue.get().ack()
    assert queue.put(b"3", timeout_s=0) == 1


@pytest.mark.owner_only
@pytest.mark.parametrize("operation", ["purge", "delete", "close"])
@pytest.mark.parametrize("policy", [Overflow.BLOCK, Overflow.DROP_OLDEST])
def test_who_waits_at_a_limit_sees_purge_delete_and_close(
    open_spool: Open, policy: Overflow, operation: str, durable: bool
) -> None:
    """Edge 16: a purge lets blocked puts pass, a delete or close ends them."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=2, on_overflow=policy)
    queue.put_many([b"1", b"2"])
    held = queue.get_many(2)
    outcome: list[Any] = []

    def put() -> None:
        try:
            outcome.append(queue.put(b"3"))
        except qflow.QflowError as error:
            outcome.append(type(error))

    producer = threading.Thread(target=put)
    producer.start()
    until(lambda: parts_of(queue).admission.line)
    {"purge": queue.purge, "delete": lambda: broker.delete_queue("q"), "close": broker.close}[operation]()
    producer.join(LONG_S)
    assert outcome == [{"purge": 2, "delete": qflow.QueueDeleted, "close": qflow.BrokerClosed}[operation]]
    if operation == "purge":
        held.ack()
        assert bodies_of(queue) == [b"3"]
