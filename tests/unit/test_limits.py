"""Limits, sizes and memory: who waits, who is refused, who shares."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import qflow
from qflow.config import QueueSettings, parse_size
from qflow.message import OVERHEAD_BYTES
from qflow.queues.overflow import Decision, Depth, decide
from qflow.queues.queue import parts_of
from unit.clocks import until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
LONG_S = 30.0


@pytest.mark.parametrize(
    ("limits", "policy", "depth", "arriving", "decision"),
    [
        ({}, "block", (10**9, 10**12), (1, 1), Decision.ADMIT),
        ({"limit_messages": 5}, "block", (4, 0), (1, 1), Decision.ADMIT),
        ({"limit_messages": 5}, "block", (5, 0), (1, 1), Decision.WAIT),
        ({"limit_messages": 5}, "block", (3, 0), (3, 1), Decision.WAIT),
        ({"limit_messages": 5}, "reject", (5, 0), (1, 1), Decision.REFUSE),
        ({"limit_bytes": 100}, "block", (1, 60), (1, 40), Decision.ADMIT),
        ({"limit_bytes": 100}, "reject", (1, 60), (1, 41), Decision.REFUSE),
        ({"limit_messages": 5, "limit_bytes": 100}, "block", (1, 99), (1, 2), Decision.WAIT),
    ],
)
def test_the_decision_at_a_limit(
    limits: dict[str, int], policy: str, depth: tuple[int, int], arriving: tuple[int, int], decision: Decision
) -> None:
    """The table of what a put does."""
    settings = QueueSettings(on_overflow=policy, **limits)  # type: ignore[arg-type]
    assert decide(settings, Depth(*depth), Depth(*arriving)) is decision


@pytest.mark.parametrize("text", ["12 parsecs", "", "MiB", "-1", "1e3", "0x10", "1.2.3 KB"])
def test_a_size_that_makes_no_sense_is_named(text: str) -> None:
    """The message says what was given and what would do."""
    with pytest.raises(qflow.InvalidArgument, match="64KiB"):
        parse_size(text, "capacity_bytes")


@pytest.mark.parametrize(("text", "size"), [("64MiB", 2**26), ("1.5 kb", 1500), ("0", 0), (7, 7), ("2 GiB", 2**31)])
def test_a_size_is_a_number_or_a_text_with_a_unit(text: int | str, size: int) -> None:
    """Binary and decimal units, any case."""
    assert parse_size(text, "capacity_bytes") == size


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": -1},
        {"capacity_bytes": "12 parsecs"},
        {"limit_messages": 0},
        {"limit_messages": -1},
        {"limit_bytes": "x"},
        {"max_message_bytes": 2**40},
        {"on_overflow": "explode"},
        {"durable": "yes"},
        {"capacity_bytes": True},
    ],
)
def test_bad_settings_are_refused_and_nothing_is_declared(open_spool: Open, settings: dict[str, object]) -> None:
    """Each is an InvalidArgument that names the setting."""
    broker = open_spool()
    with pytest.raises(qflow.InvalidArgument, match=next(iter(settings))):
        broker.declare_queue("q", **settings)  # type: ignore[arg-type]
    assert broker.queues() == []


def test_a_line_of_putters_at_a_limit_does_not_stall(open_spool: Open) -> None:
    """Who looks before its turn does not take the limit for reached again; resume_ratio=0 lets one in at a time."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=1, resume_ratio=0)
    threads = [threading.Thread(target=queue.put, args=(b"x",)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for _ in threads:
        queue.get(timeout_s=LONG_S).ack()
    for thread in threads:
        thread.join()


def test_64_producers_at_a_limit_of_100_make_100(open_spool: Open) -> None:
    """Edge 27: depth is reserved before a put waits for anything."""
    queue = open_spool().declare_queue("q", limit_messages=100, on_overflow=qflow.Overflow.REJECT)
    refused = []

    def produce() -> None:
        for _ in range(5):
            try:
                queue.put(b"x" * 50)
            except qflow.QueueFull:
                refused.append(1)

    producers = [threading.Thread(target=produce) for _ in range(64)]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join(LONG_S)
    assert (len(queue), len(refused)) == (100, 220)


def test_a_blocked_put_goes_on_when_a_message_is_settled(open_spool: Open) -> None:
    """I15: a waiting producer is woken by an ack."""
    queue = open_spool().declare_queue("q", limit_messages=1)
    queue.put(b"1")
    done = threading.Event()
    producer = threading.Thread(target=lambda: (queue.put(b"2"), done.set()))
    producer.start()
    queue.get().ack()
    assert done.wait(LONG_S)
    producer.join(LONG_S)
    assert queue.get().body == b"2"


@pytest.mark.owner_only
@pytest.mark.parametrize("end", ["close", "delete"])
@pytest.mark.parametrize("what", ["put", "get"])
def test_who_waits_is_told_when_the_queue_goes(open_spool: Open, end: str, what: str) -> None:
    """Edge 16: waiting consumers and blocked producers end with a clear error."""
    broker = open_spool()
    queue = broker.declare_queue("q", limit_messages=1)
    if what == "put":
        queue.put(b"1")
    errors: list[BaseException] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        try:
            queue.put(b"2") if what == "put" else queue.get()
        except qflow.QflowError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert started.wait(LONG_S)
    broker.close() if end == "close" else broker.delete_queue("q")
    waiter.join(LONG_S)
    assert [type(error) for error in errors] == [qflow.BrokerClosed if end == "close" else qflow.QueueDeleted]


def test_what_could_never_fit_is_refused_at_once(open_spool: Open) -> None:
    """No put waits for something that cannot come."""
    broker = open_spool(max_transaction_bytes=10_000)
    queue = broker.declare_queue("q", limit_messages=3, limit_bytes=100, max_message_bytes=80)
    with pytest.raises(qflow.InvalidArgument, match="limit_messages=3"):
        queue.put_many([b""] * 4)
    with pytest.raises(qflow.InvalidArgument, match="limit_bytes=100"):
        queue.put_many([b"x" * 60] * 2)
    with pytest.raises(qflow.MessageTooLarge, match="max_message_bytes=80"):
        queue.put(b"x" * 81)
    with pytest.raises(qflow.TransactionTooLarge, match="smaller batches"):
        broker.declare_queue("big").put_many([b"x" * 6_000] * 2)
    assert len(queue) == 0


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("capacity", [0, 100, 5_000])
def test_messages_larger_than_the_capacity_pass_through_the_disk(
    open_spool: Open, capacity: int, durable: bool
) -> None:
    """Edge 2: straight to disk, in order, never a loop, always progress."""
    queue = open_spool().declare_queue("q", capacity_bytes=capacity, durable=durable)
    bodies = [bytes([number]) * 10_000 for number in range(8)]
    for body in bodies:
        queue.put(body)
    assert queue.stats().resident_bytes <= capacity
    received = []
    for _ in bodies:
        with queue.get(LONG_S) as delivery:
            received.append(delivery.body)
    assert received == bodies


def test_who_holds_everything_can_still_put(open_spool: Open) -> None:
    """Edge 8: consume, transform, produce into the same queue, with memory full of what is held."""
    queue = open_spool().declare_queue("q", durable=False, capacity_bytes=10 * (1000 + OVERHEAD_BYTES))
    queue.put_many([b"x" * 1000] * 30)
    held = queue.get_many(30)
    assert 1 <= len(held) <= 11
    for _ in range(5):
        queue.put(b"y" * 1000)
    held.ack()
    assert len(queue) == 35 - len(held)


@pytest.mark.owner_only
def test_a_put_that_found_no_memory_blames_no_limit(open_spool: Open) -> None:
    """Deliveries fill the memory, one put is on its way beside that, and the limit is far away."""
    broker = open_spool(capacity_bytes=65_536)
    held, queue = broker.declare_queue("held", durable=False), broker.declare_queue("q", limit_messages=100)
    held.put_many([b"x" * 1000] * 100)
    batches = []
    while batch := held.get_many(100, timeout_s=0):
        batches.append(batch)
    begun, go_on = threading.Event(), threading.Event()
    first = threading.Thread(target=queue.put, args=(b"y" * 5000,))
    others = threading.Thread(target=broker.engine.log.alone, args=(lambda *_: (begun.set(), go_on.wait(LONG_S)),))
    others.start()
    assert begun.wait(LONG_S)
    first.start()
    until(lambda: parts_of(queue).gate.incoming)
    with pytest.raises(qflow.QueueFull, match="'q' found no memory in time"):
        queue.put(b"z" * 5000, timeout_s=0)
    go_on.set()
    for thread in (first, others):
        thread.join(LONG_S)
    assert len(queue) == 1


def test_queues_share_the_memory_of_the_broker_fairly(open_spool: Open) -> None:
    """Who asks takes from the one that has most; the sum stays within the capacity."""
    capacity = 300_000
    broker = open_spool(capacity_bytes=capacity)
    heavy = broker.declare_queue("heavy", durable=False)
    light = broker.declare_queue("light", durable=False)
    for _ in range(500):
        heavy.put(b"h" * 1000)
    assert heavy.stats().resident_bytes > 0.9 * capacity
    for _ in range(500):
        light.put(b"l" * 1000)
        assert broker.stats().resident_bytes <= capacity
    shares = [queue.stats().resident_bytes for queue in (heavy, light)]
    assert min(shares) > 0.4 * capacity
    for queue in (heavy, light):
        assert sum(len(batch) for batch in iter(lambda queue=queue: _take(queue), None)) == 500


def _take(queue: qflow.Queue) -> qflow.Deliveries | None:
    batch = queue.get_many(100, timeout_s=0)
    batch.ack() if batch else None
    return batch or None


def test_swinging_around_the_capacity_moves_few_files(open_spool: Open) -> None:
    """Edge 6: a queue that swings by a tenth around its capacity costs a fraction of a file operation a message."""
    cost = 1000 + OVERHEAD_BYTES
    queue = open_spool().declare_queue("q", durable=False, capacity_bytes=1_000 * cost)
    queue.put_many([b"x" * 1000] * 950)
    moved = 0
    for _ in range(20):
        for _ in range(150):
            queue.put(b"x" * 1000)
        for _ in range(150):
            queue.get().ack()
        moved += 300
    stats = queue.stats()
    operations = (
        stats.spill_files_created_total
        + stats.spill_files_overwritten_total
        + stats.spill_files_read_total
        + stats.spill_files_unlinked_total
    )
    assert 0 < operations < 0.4 * moved


@pytest.mark.owner_only
def test_a_lower_capacity_spills_and_a_conflicting_behaviour_is_refused(open_spool: Open) -> None:
    """Edges 5 and 13: performance settings apply when declared again, behaviour settings conflict."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([b"x" * 1000] * 50)
    assert broker.declare_queue("q", capacity_bytes=20_000) is queue
    assert queue.stats().resident_bytes <= 20_000
    with pytest.raises(qflow.SettingsConflict, match=r"limit_messages=None.*limit_messages=5"):
        broker.declare_queue("q", limit_messages=5)
    broker.close()
    assert open_spool().queue("q").stats().capacity_bytes == 20_000
