"""Transactions: puts, publishes and acks of any queues, all of them or none."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
from faults.seams import Faults, FaultyFiles, bodies_of, faulty_broker, in_thread
from qflow import Overflow
from qflow.message import BATCH_BYTES, OVERHEAD_BYTES, SINGLE_BYTES
from qflow.queues.admission import Admission
from qflow.queues.queue import parts_of
from qflow.queues.together import Together
from qflow.queues.transaction import gathering_of
from unit.clocks import LONG_S, Clock, open_still, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


# All or nothing ------------------------------------------------------------------------------------------------------


def test_nothing_is_seen_before_the_end(open_spool: Open, durable: bool) -> None:
    """Isolation: puts are not there, acked messages are still held, until the block ends; one commit holds all."""
    broker = open_spool()
    one, two = (broker.declare_queue(name, durable=durable) for name in ("one", "two"))
    one.put_many([b"a", b"b"])
    delivery = one.get()
    before = broker.stats().commits_total
    with broker.transaction() as tx:
        tx.put("two", b"1")
        tx.put_many(two, [b"2", b"3"])
        tx.put(one, b"c", headers={"h": 1})
        tx.ack(delivery)
        assert (len(one), len(two)) == (2, 0)
        assert one.stats().acquired_messages == 1
        with pytest.raises(qflow.QueueEmpty):
            two.get(0)
    assert broker.stats().commits_total == before + (1 if durable else 0)
    assert bodies_of(one) == [b"b", b"c"]
    assert bodies_of(two) == [b"1", b"2", b"3"]
    with pytest.raises(qflow.AlreadySettled):
        delivery.ack()
    assert one.stats().acked_total == 3


@pytest.mark.owner_only
def test_an_exception_undoes_all_of_it(open_spool: Open, durable: bool) -> None:
    """The deliveries are held as before and can be settled in any way: single, batch, one of a batch."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"%d" % number for number in range(6)])
    single, batch, parts = queue.get(), queue.get_many(2), queue.get_many(3)
    with pytest.raises(RuntimeError), broker.transaction() as tx:
        tx.put(queue, b"never")
        tx.ack(single)
        tx.ack_many(batch)
        for delivery in parts:
            tx.ack(delivery)
        raise RuntimeError
    assert (len(queue), queue.stats().acquired_messages) == (6, 6)
    assert broker.stats().resident_bytes == 6 * (1 + OVERHEAD_BYTES) + SINGLE_BYTES + 2 * BATCH_BYTES
    assert broker.check() == []
    single.ack()
    batch.nack()
    parts[0].ack()
    parts.nack()
    assert bodies_of(queue) == [b"1", b"2", b"4", b"5"]


@pytest.mark.parametrize("wrong", [5, None, "text"])
def test_what_is_no_delivery_is_refused_in_words(open_spool: Open, wrong: Any) -> None:
    """By a queue and by a transaction, alone or in a list; nothing is settled."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"1")
    held, tx = queue.get(), broker.transaction()
    name = type(wrong).__name__
    several = [lambda: queue.ack_many([held, wrong])]
    alone = [lambda: tx.ack(wrong), lambda: tx.ack([held]), lambda: tx.ack_many([held, wrong])]
    if wrong != "text":  # which has items
        several += [lambda: queue.ack_many(wrong), lambda: tx.ack_many(wrong)]
    for call in several:
        with pytest.raises(qflow.InvalidArgument, match=f"^ack_many takes a batch or deliveries, not {name}$"):
            call()
    for call in alone:
        with pytest.raises(qflow.InvalidArgument, match=f"^ack takes a delivery, not ({name}|list)$"):
            call()
    tx.commit()
    held.ack()


def test_a_rollback_by_hand_and_what_comes_after(open_spool: Open, durable: bool) -> None:
    """A transaction that has ended says how; the next one does the same again."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put(b"1")
    delivery = queue.get()
    tx = broker.transaction()
    tx.put(queue, b"2")
    tx.ack(delivery)
    tx.rollback()
    for call in (
        lambda: tx.put(queue, b"x"),
        lambda: tx.put_many(queue, [b"x"]),
        lambda: tx.publish("a", b"x"),
        lambda: tx.ack(delivery),
        lambda: tx.ack_many([delivery]),
        tx.commit,
        tx.rollback,
        lambda: tx.__enter__(),
        lambda: tx.result,
    ):
        with pytest.raises(qflow.InvalidArgument, match="rolled back"):
            call()
    with broker.transaction() as again:
        again.put(queue, b"2")
        again.ack(delivery)
    with pytest.raises(qflow.InvalidArgument, match="committed"):
        again.ack(delivery)
    assert bodies_of(queue) == [b"2"]


def test_a_block_may_end_its_transaction_itself(open_spool: Open, durable: bool) -> None:
    """Committed early, or given up without an exception."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    with broker.transaction() as tx:
        tx.put(queue, b"1")
        assert tx.commit() == [0]
    with broker.transaction() as tx:
        tx.put(queue, b"2")
        tx.rollback()
    with broker.transaction():
        pass
    assert bodies_of(queue) == [b"1"]


def test_the_result_has_what_each_call_would_have_returned(open_spool: Open, durable: bool) -> None:
    """A sequence for a put, a range for a batch, where a publish went; by priority and by delay, too."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, priorities=2)
    other = broker.declare_queue("other", durable=durable)
    broker.bind(other, "t/#")
    queue.put(b"before")
    with broker.transaction() as tx:
        tx.put(queue, b"1")
        tx.put(queue, b"2")
        tx.put_many(queue, [b"3", b"4"])
        tx.put_many(queue, [])
        tx.publish("t/x", b"5")
        tx.publish("nobody", b"6")
        tx.put(queue, b"7", priority=1)
        tx.put(other, b"8")
        tx.put(queue, b"9")
        with pytest.raises(qflow.InvalidArgument, match="open"):
            _ = tx.result
    low, high = tx.result[0], tx.result[6]
    assert tx.result == [
        low,
        low + 1,
        range(low + 2, low + 4),
        range(0),
        ({}, {"other": 0}),
        ({}, {}),
        high,
        1,
        low + 4,
    ]
    assert low == 1
    assert bodies_of(queue) == [b"7", b"before", b"1", b"2", b"3", b"4", b"9"]
    assert bodies_of(other) == [b"5", b"8"]


@pytest.mark.owner_only
def test_policies_turn_away_parts_of_a_transaction(open_spool: Open, durable: bool) -> None:
    """DROP_NEWEST drops them, DEAD_LETTER buries them, REJECT refuses all of it."""
    broker = open_spool()
    options: dict[str, Any] = {"durable": durable, "limit_messages": 2}
    drops = broker.declare_queue("drops", on_overflow=Overflow.DROP_NEWEST, **options)
    buries = broker.declare_queue("buries", on_overflow=Overflow.DEAD_LETTER, dead_letter="dead", **options)
    refuses = broker.declare_queue("refuses", on_overflow=Overflow.REJECT, **options)
    for queue in (drops, buries, refuses):
        queue.put(b"1")
    with broker.transaction() as tx:
        tx.put_many(drops, [b"2", b"3"])
        tx.put(buries, b"2")
        tx.put(buries, b"3")
        tx.put(refuses, b"2")
    assert tx.result == [range(0), None, None, 1]
    assert [len(queue) for queue in (drops, buries, refuses, broker.queue("dead"))] == [1, 1, 2, 2]
    with pytest.raises(qflow.QueueFull), broker.transaction() as tx:
        tx.put(drops, b"4")
        tx.put(refuses, b"4")
    assert [len(queue) for queue in (drops, buries, refuses)] == [1, 1, 2]
    assert (drops.stats().dropped_total, buries.stats().dead_lettered_total) == (2, 2)
    assert broker.check() == []


@pytest.mark.owner_only
def test_a_commit_waits_for_room_as_long_as_it_may(open_spool: Open, durable: bool) -> None:
    """Then nothing was done, and the deliveries are held as before."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=1)
    source = broker.declare_queue("source", durable=durable)
    queue.put(b"1")
    source.put_many([b"a", b"b"])
    single, batch = source.get(), source.get_many(1)
    tx = broker.transaction(timeout_s=0)
    tx.put(queue, b"2")
    tx.ack(single)
    tx.ack(batch[0])
    with pytest.raises(qflow.QueueFull):
        tx.commit()
    assert source.stats().acquired_messages == 2
    assert broker.check() == []
    single.ack()
    batch.ack()
    done = threading.Event()

    def commit() -> None:
        with broker.transaction() as tx:
            tx.put(queue, b"3")
        done.set()

    waiter = threading.Thread(target=commit)
    waiter.start()
    until(lambda: parts_of(queue).admission.line)
    queue.get().ack()
    assert done.wait(LONG_S)
    waiter.join(LONG_S)
    assert bodies_of(queue) == [b"3"]


@pytest.mark.owner_only
@pytest.mark.parametrize("settings", [{"limit_messages": 2}, {"capacity_bytes": 0}, {"limit_bytes": 2}])
def test_one_transaction_does_not_wait_for_itself(open_at: Open, durable: bool, settings: dict[str, int]) -> None:
    """Puts for several priorities and times of one queue share its limit and its memory."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, priorities=3, resume_ratio=1, **settings)

    def commit() -> list[Any]:
        with broker.transaction() as tx:
            tx.put(queue, b"1")
            tx.put(queue, b"2", priority=2)
        return tx.result

    in_thread(commit)
    assert bodies_of(queue) == [b"2", b"1"]
    if "capacity_bytes" not in settings:
        tx = broker.transaction()
        for priority in range(3):
            tx.put(queue, b"x", priority=priority)
        with pytest.raises(qflow.InvalidArgument, match="never fit"):
            in_thread(lambda: _commit_of(tx))
    assert len(queue) == 0


def _commit_of(tx: Any) -> Any:
    gathering_of(tx).thread = threading.get_ident()
    return tx.commit()


def test_two_that_want_the_same_queues_never_wait_for_one_another(open_spool: Open, durable: bool) -> None:
    """Edge 25: in opposite order, with limits that hold one of them back."""
    broker = open_spool()
    queues = [
        broker.declare_queue(name, durable=durable, limit_messages=3, resume_ratio=1, priorities=2)
        for name in ("one", "two")
    ]

    def produce(order: int) -> None:
        for _ in range(30):
            with broker.transaction() as tx:
                for queue in queues[::order]:
                    tx.put(queue, b"x")
                    tx.put(queue, b"x", priority=1)

    producers = [threading.Thread(target=produce, args=(order,)) for order in (1, -1)]
    for producer in producers:
        producer.start()
    taken = 0
    while taken < 240:
        for queue in queues:
            batch = queue.get_many(10, timeout_s=0.01)
            taken += len(batch)
            if batch:
                batch.ack()
    for producer in producers:
        producer.join(LONG_S)
    assert broker.check() == []


# Deliveries ----------------------------------------------------------------------------------------------------------


def test_what_is_settled_already_cannot_be_acked(open_spool: Open, durable: bool) -> None:
    """Before, or twice in one transaction, in each form; the transaction stays as it was."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"%d" % number for number in range(6)])
    single, batch, done, part = queue.get(), queue.get_many(2), queue.get(), queue.get_many(2)
    done.ack()
    part[0].ack()
    with broker.transaction() as tx:
        tx.ack(single)
        tx.ack_many(batch)
        tx.ack(part[1])
        for again in (
            lambda: tx.ack(single),
            lambda: tx.ack_many(batch),
            lambda: tx.ack(part[1]),
            lambda: tx.ack(part[0]),
            lambda: tx.ack_many([single]),
        ):
            with pytest.raises(qflow.AlreadySettled):
                again()
    assert len(queue) == 0
    with pytest.raises(qflow.AlreadySettled), broker.transaction() as tx:
        tx.put(queue, b"never")
        tx.ack(done)
    assert len(queue) == 0


def test_what_is_settled_elsewhere_before_the_commit_stops_it(open_spool: Open, durable: bool) -> None:
    """Acked, or returned and taken by another consumer: nothing is committed, the others are held as before."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"%d" % number for number in range(4)])
    kept, stolen, batch = queue.get(), queue.get(), queue.get_many(2)
    tx = broker.transaction()
    tx.put(queue, b"never")
    tx.ack(kept)
    tx.ack(batch[0])
    tx.ack(stolen)
    stolen.nack()
    with pytest.raises(qflow.AlreadySettled):
        tx.commit()
    assert queue.get(0).sequence == stolen.sequence
    kept.ack()
    batch.ack()
    assert (len(queue), queue.stats().acked_total) == (1, 3)


def test_a_lease_that_ends_before_the_commit_stops_it(open_at: Open, clock: Clock, durable: bool) -> None:
    """Whoever has the message now keeps it: it is processed once."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable, ack_timeout_s=10)
    queue.put_many([b"1", b"2", b"3"])
    single, batch = queue.get(0), queue.get_many(2, timeout_s=0)
    transactions = [broker.transaction() for _ in range(3)]
    transactions[0].ack(single)
    transactions[1].ack_many(batch)
    transactions[2].ack(batch[1])
    clock.advance(11)
    again = queue.get_many(5, timeout_s=0)
    assert len(again) == 3
    for tx in transactions:
        tx.put(queue, b"never")
        with pytest.raises(qflow.AlreadySettled):
            tx.commit()
    again.ack()
    assert len(queue) == 0


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_acks_of_what_was_purged_or_deleted_do_nothing(open_spool: Open, durable: bool, how: str) -> None:
    """Edge 16: late, as outside of a transaction; the rest is committed."""
    broker = open_spool()
    source, queue = (broker.declare_queue(name, durable=durable) for name in ("source", "q"))
    source.put_many([b"%d" % number for number in range(5)])
    single, batch, parts = source.get(), source.get_many(2), source.get_many(2)
    with broker.transaction() as tx:
        tx.put(queue, b"1")
        tx.ack(single)
        tx.ack_many(batch)
        tx.ack(parts[0])
        source.purge() if how == "purge" else broker.delete_queue("source")
        tx.ack(parts[1])
    assert bodies_of(queue) == [b"1"]
    if how == "purge":
        assert (len(source), source.stats().acked_total, source.stats().purged_total) == (0, 0, 5)


@pytest.mark.parametrize("how", ["stream", "subscription"])
def test_an_ack_of_what_was_deleted_with_its_stream_says_so(open_spool: Open, how: str) -> None:
    """Or with its subscription: unlike one of a queue it fails, and nothing is done; the stream may be there again."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    broker.declare_stream("s", topics=["t"])
    broker.publish("t", b"1")
    delivery = broker.subscribe("s", name="n", start="earliest").get()
    with pytest.raises(qflow.AlreadySettled, match="stream or subscription"), broker.transaction() as tx:
        tx.put(queue, b"x")
        tx.ack(delivery)
        if how == "subscription":
            broker.delete_subscription("s", "n")
        else:
            broker.delete_stream("s")
            broker.declare_stream("s", topics=["t"])
    assert len(queue) == 0


@pytest.mark.owner_only
def test_a_transaction_publishes_to_what_the_topic_led_to(open_spool: Open) -> None:
    """Not to what was declared in its place: it fails, and nothing is done."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    broker.declare_stream("s", topics=["t"])
    with pytest.raises(qflow.StreamDeleted), broker.transaction() as tx:
        tx.put(queue, b"x")
        tx.publish("t", b"1")
        broker.delete_stream("s")
        broker.declare_stream("s", topics=["t"])
    assert (len(queue), broker.stream("s").stats().messages) == (0, 0)


@pytest.mark.owner_only
@pytest.mark.parametrize("how", ["purge", "delete"])
def test_a_purge_or_delete_meets_a_commit_on_its_way(open_spool: Open, durable: bool, how: str) -> None:
    """Edge 16: it comes after the messages were taken from their holders, and before the commit."""
    broker = open_spool()
    source, queue = (broker.declare_queue(name, durable=durable) for name in ("source", "q"))
    source.put_many([b"1", b"2", b"3"])
    held = source.get_many(2)
    real = broker.engine.together.begin

    def begin(*arguments: Any, **options: Any) -> None:
        in_thread(lambda: source.purge() if how == "purge" else broker.delete_queue("source"))
        real(*arguments, **options)

    broker.engine.together.begin = begin  # type: ignore[method-assign]
    with broker.transaction() as tx:
        tx.put(queue, b"x")
        tx.ack_many(held)
    broker.engine.together.begin = real  # type: ignore[method-assign]
    assert bodies_of(queue) == [b"x"]
    broker.engine.log.drain()
    assert broker.check() == []
    if how == "purge":
        assert len(source) == 0


@pytest.mark.owner_only
def test_a_put_into_a_deleted_queue_stops_the_commit(open_spool: Open, durable: bool) -> None:
    """Nothing of it is done."""
    broker = open_spool()
    source, gone, queue = (broker.declare_queue(name, durable=durable) for name in ("source", "gone", "q"))
    source.put(b"1")
    held = source.get()
    with pytest.raises(qflow.QueueDeleted), broker.transaction() as tx:
        tx.put(queue, b"x")
        tx.put(gone, b"x")
        tx.ack(held)
        broker.delete_queue("gone")
    assert len(queue) == 0
    held.nack()
    assert bodies_of(source) == [b"1"]
    with pytest.raises(qflow.NotFound):
        broker.transaction().put("gone", b"x")


@pytest.mark.owner_only
def test_what_is_of_another_broker_is_refused(open_spool: Open, tmp_path: Path, durable: bool) -> None:
    """Its queue numbers mean something else here."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    with qflow.open(tmp_path / "other") as other:
        foreign = other.declare_queue("q", durable=durable)
        foreign.put_many([b"1", b"2", b"3"])
        single, batch = foreign.get(), foreign.get_many(2)
        tx = broker.transaction()
        for call in (
            lambda: tx.put(foreign, b"x"),
            lambda: tx.put_many(foreign, [b"x"]),
            lambda: tx.ack(single),
            lambda: tx.ack(batch[0]),
            lambda: tx.ack_many(batch),
        ):
            with pytest.raises(qflow.InvalidArgument, match="another broker"):
                call()
        tx.put(queue, b"ours")
        tx.commit()
        single.ack()
        batch.ack()
        assert other.check() == []
    assert bodies_of(queue) == [b"ours"]


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
def test_a_transaction_belongs_to_its_thread(open_spool: Open, durable: bool) -> None:
    """Another one gets an error from every call, and changes nothing."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put(b"1")
    delivery = queue.get()
    tx = broker.transaction()
    tx.put(queue, b"2")
    for call in (
        lambda: tx.put(queue, b"x"),
        lambda: tx.put(queue, b"x", headers={"a": 1}),
        lambda: tx.put_many(queue, [b"x"]),
        lambda: tx.publish("a", b"x"),
        lambda: tx.ack(delivery),
        lambda: tx.ack_many([delivery]),
        tx.commit,
        tx.rollback,
    ):
        with pytest.raises(qflow.InvalidArgument, match="thread"):
            in_thread(call)
    assert tx.commit() == [1]
    delivery.nack()
    assert bodies_of(queue) == [b"1", b"2"]


@pytest.mark.owner_only
@pytest.mark.parametrize(
    "arguments",
    [("text", {}), (None, {}), (b"x", {"priority": 1}), (b"x", {"headers": {1: 2}}), (b"x", {"ttl_s": -1})],
    ids=repr,
)
def test_a_bad_put_leaves_the_transaction_as_it_was(open_spool: Open, durable: bool, arguments: Any) -> None:
    """It says what is wrong at once, and the rest can be committed; also in the midst of puts in a row."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    body, options = arguments
    tx = broker.transaction()
    tx.put(queue, b"1")
    tx.put(queue, b"2")
    with pytest.raises(qflow.InvalidArgument):
        tx.put(queue, body, **options)
    with pytest.raises(qflow.InvalidArgument):
        tx.put_many(queue, [b"x", body], **options)
    with pytest.raises(qflow.InvalidArgument):
        tx.publish("a/#", b"x")
    tx.put(queue, b"3")
    assert tx.commit() == [0, 1, 2]
    assert bodies_of(queue) == [b"1", b"2", b"3"]


def test_small_messages_of_a_transaction_count_with_what_each_takes(open_spool: Open, durable: bool) -> None:
    """Else any number of empty ones would be in memory at the commit; one alone may be as large as the bound."""
    broker = open_spool(max_transaction_bytes=8_000)
    queue = broker.declare_queue("q", durable=durable)
    for fill, most in (
        (lambda tx: tx.put(queue, b""), 101),
        (lambda tx: tx.put_many(queue, [b""] * 2), 100),
    ):
        tx = broker.transaction()
        with pytest.raises(qflow.TransactionTooLarge, match="80 of them for each message.*max_transaction_bytes=8000"):
            for _ in range(102):
                fill(tx)
        tx.commit()
        assert bodies_of(queue) == [b""] * most
    with broker.transaction() as tx:
        tx.put(queue, bytes(8_000))
    assert bodies_of(queue) == [bytes(8_000)]
    assert broker.check() == []


@pytest.mark.owner_only
def test_more_than_a_transaction_may_hold_is_refused(open_spool: Open, durable: bool) -> None:
    """What was in it before can be committed; single puts, a row of them, batches and publishes count together."""
    broker = open_spool(max_transaction_bytes=1_000)
    queue = broker.declare_queue("q", durable=durable)
    broker.bind(queue, "#")
    for fill in (
        lambda tx: [tx.put(queue, b"x" * 100) for _ in range(20)],
        lambda tx: [tx.put(queue, b"x" * 100, headers={"a": 1}) for _ in range(20)],
        lambda tx: [tx.put_many(queue, [b"x" * 100] * 3) for _ in range(20)],
        lambda tx: [tx.publish("a", b"x" * 100) for _ in range(20)],
    ):
        tx = broker.transaction()
        with pytest.raises(qflow.TransactionTooLarge, match="max_transaction_bytes=1000"):
            fill(tx)
        tx.commit()
        bodies = bodies_of(queue)
        assert 5 <= len(bodies) <= 10
        assert set(bodies) == {b"x" * 100}
    assert broker.check() == []


# Memory and disk -----------------------------------------------------------------------------------------------------


@pytest.mark.owner_only
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_bodies_that_wait_are_charged_and_spilled(open_spool: Open, durable: bool, spool: Path, end: str) -> None:
    """Edge 8: a transaction larger than the broker's memory; what it holds is bounded and given back."""
    capacity = 40_000
    broker = open_spool(capacity_bytes=capacity)
    queue = broker.declare_queue("q", durable=durable)
    bodies = [b"%04d" % number * 250 for number in range(120)]
    tx = broker.transaction()
    for body in bodies[:60]:
        tx.put(queue, body)
        assert broker.engine.ledger.borrowed <= capacity
    tx.put_many(queue, bodies[60:])
    assert broker.engine.desk.borrowed <= capacity
    assert broker.check() == []
    if end == "rollback":
        tx.rollback()
        assert len(queue) == 0
    else:
        assert len(tx.commit()) == 61
        assert bodies_of(queue) == bodies
    assert broker.engine.desk.borrowed == 0
    broker.engine.log.drain()
    assert broker.check() == []


@pytest.mark.owner_only
def test_other_queues_give_way_to_a_transaction(open_spool: Open, durable: bool) -> None:
    """And it to nobody: what does not fit is on disk."""
    broker = open_spool(capacity_bytes=100_000)
    heavy, queue = (broker.declare_queue(name, durable=durable) for name in ("heavy", "q"))
    heavy.put_many([b"h" * 1000] * 80)
    with broker.transaction() as tx:
        for _ in range(30):
            tx.put(queue, b"x" * 1000)
        assert broker.engine.ledger.borrowed <= 100_000
    assert len(bodies_of(queue)) == 30
    assert len(bodies_of(heavy)) == 80


def test_a_disk_that_takes_no_bodies_leaves_the_transaction_as_it_was(spool: Path, clock: Clock) -> None:
    """Memory is full and spilling fails: a publish into two queues is not half in it."""
    faults = Faults()
    broker = open_still(spool, clock, files=FaultyFiles(faults), capacity_bytes=5_000)
    one, two = (broker.declare_queue(name, durable=False) for name in ("one", "two"))
    for queue in (one, two):
        broker.bind(queue, "#")
    tx = broker.transaction()
    tx.put(one, b"first")
    faults.fail("pwrite", errno.ENOSPC)
    with pytest.raises(qflow.StorageError):
        tx.publish("a", b"x" * 3_000)
    with pytest.raises(qflow.StorageError):
        tx.put_many(one, [b"x" * 3_000] * 3)
    faults.heal()
    tx.put(one, b"last")
    assert tx.commit() == [0, 1]
    assert (bodies_of(one), bodies_of(two)) == ([b"first", b"last"], [])
    assert broker.engine.desk.borrowed == 0
    assert broker.check() == []
    broker.close()


def test_a_full_disk_refuses_a_transaction_that_puts(spool: Path) -> None:
    """I12: nothing is done, deliveries are held as before; one that only acks goes on."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        queue, loose = broker.declare_queue("q"), broker.declare_queue("loose", durable=False)
        queue.put_many([b"1", b"2", b"3", b"4"])
        single, batch = queue.get(), queue.get_many(2)

        def full(*_: Any, settles_only: bool) -> None:
            if not settles_only:
                raise qflow.DiskFull("no space left")

        real = broker.engine.log._env.make_room
        broker.engine.log._env.make_room = full  # type: ignore[method-assign]
        with pytest.raises(qflow.DiskFull), broker.transaction() as tx:
            tx.put(queue, b"x")
            tx.put(loose, b"x")
            tx.ack(single)
            tx.ack(batch[1])
        assert (len(queue), len(loose)) == (4, 0)
        assert broker.check() == []
        with broker.transaction() as tx:
            tx.put(loose, b"y")
            tx.ack(single)
            tx.ack_many(batch)
        broker.engine.log._env.make_room = real  # type: ignore[method-assign]
        assert (bodies_of(queue), bodies_of(loose)) == ([b"4"], [b"y"])
        assert broker.check() == []


@pytest.mark.parametrize("step", ["begin", "commit", "make_room"])
def test_an_error_at_each_step_is_all_or_nothing(spool: Path, step: str) -> None:
    """Whatever is raised in the writer, before the commit and in it: what is in memory is what is told."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        source, queue = broker.declare_queue("source"), broker.declare_queue("q")
        source.put_many([b"1", b"2"])
        held = source.get()
        faults.fail(step, KeyboardInterrupt, times=1)
        tx = broker.transaction()
        tx.put(queue, b"x")
        tx.ack(held)
        with pytest.raises(qflow.InDoubt if step == "commit" else KeyboardInterrupt):
            tx.commit()
        assert (len(queue), len(source)) == (0, 2)
        with pytest.raises(qflow.InvalidArgument, match="interrupted" if step == "commit" else "rolled back"):
            tx.commit()
        if step != "commit":
            held.ack(wait=True)
            assert broker.check() == []
    with qflow.open(spool) as broker:
        left = [b"1", b"2"] if step == "commit" else [b"2"]
        assert (len(broker.queue("q")), bodies_of(broker.queue("source"))) == (0, left)


@pytest.mark.parametrize(("step", "late"), [("join", False), ("join", True), ("wait", False), ("wait", True)])
def test_an_interrupt_at_each_step_is_all_or_nothing(spool: Path, step: str, late: bool) -> None:
    """Ctrl-C before and after the unit is handed over: memory agrees with the log, and so it is after reopening."""
    with qflow.open(spool) as broker:
        source, queue = broker.declare_queue("source"), broker.declare_queue("q")
        source.put_many([b"1", b"2"])
        held = source.get()
        real = getattr(broker.engine.log, step)

        def interrupted(*given: Any, **named: Any) -> Any:
            setattr(broker.engine.log, step, real)
            if late:
                real(*given, **named)
            raise KeyboardInterrupt

        tx = broker.transaction()
        tx.put(queue, b"x")
        tx.ack(held)
        setattr(broker.engine.log, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            tx.commit()
        broker.engine.log.drain()
        done = len(queue) == 1
        assert done is ((step, late) != ("join", False))
        assert len(source) == (1 if done else 2)
        with pytest.raises(qflow.InvalidArgument, match="interrupted"):
            tx.commit()
        if not done:
            held.ack()
        broker.engine.log.drain()
        assert broker.check() == []
    with qflow.open(spool) as broker:
        assert (len(broker.queue("q")), bodies_of(broker.queue("source"))) == (int(done), [b"2"])


@pytest.mark.owner_only
def test_an_interrupted_wait_learns_nothing_and_breaks_nothing(open_spool: Open) -> None:
    """The wait for the commit is interrupted, and that commit holds: its messages stay settled."""
    broker = open_spool()
    source, queue = broker.declare_queue("source"), broker.declare_queue("q")
    source.put_many([b"1", b"2"])
    held = source.get()
    real = broker.engine.log.wait

    def wait(_batch: Any) -> None:
        broker.engine.log.wait = real  # type: ignore[method-assign]
        raise KeyboardInterrupt

    tx = broker.transaction()
    tx.put(queue, b"x")
    tx.ack(held)
    broker.engine.log.wait = wait  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tx.commit()
    broker.engine.log.drain()
    with pytest.raises(qflow.AlreadySettled):
        held.nack()
    assert (bodies_of(source), bodies_of(queue)) == ([b"2"], [b"x"])
    broker.engine.log.drain()
    assert broker.check() == []


def test_the_broker_is_closed_under_a_transaction(open_spool: Open, durable: bool) -> None:
    """Its commit is refused, its rollback is not; deliveries went back."""
    broker = open_spool(capacity_bytes=10_000)
    queue = broker.declare_queue("q", durable=durable)
    queue.put(b"1")
    held = queue.get()
    open_ones = [broker.transaction() for _ in range(2)]
    for tx in open_ones:
        tx.put(queue, b"x" * 8_000)
        tx.ack(held)
    broker.close()
    with pytest.raises(qflow.BrokerClosed):
        open_ones[0].commit()
    open_ones[1].rollback()
    with pytest.raises(qflow.BrokerClosed):
        broker.transaction()
    if durable:
        assert bodies_of(open_spool().queue("q")) == [b"1"]


@pytest.mark.owner_only
def test_what_is_delayed_and_what_expires_in_a_transaction(open_at: Open, clock: Clock, durable: bool) -> None:
    """Options of puts hold; times are those of the put, not of the commit."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=durable)
    tx = broker.transaction()
    tx.put(queue, b"later", delay_s=10)
    tx.put(queue, b"short", ttl_s=5)
    tx.put_many(queue, [b"now", b"too"])
    clock.advance(6)
    tx.commit()
    assert bodies_of(queue) == [b"now", b"too"]
    clock.advance(4)
    assert bodies_of(queue) == [b"later"]


@pytest.mark.owner_only
@pytest.mark.parametrize("capacity", ["1MiB", "48KiB"], ids=["in memory", "spilled"])
def test_bodies_are_charged_while_a_commit_waits_for_room(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, capacity: str
) -> None:
    """At a limit that may be for long: they are in memory, whether they were spilled before or not."""
    broker = open_spool(capacity_bytes=capacity)
    queue = broker.declare_queue("q", durable=False, limit_messages=20)
    queue.put(b"")
    charged: list[int] = []
    join_line = Admission.join_line

    def joined(*arguments: Any) -> None:
        charged.append(broker.engine.desk._account.borrowed)
        join_line(*arguments)

    monkeypatch.setattr(Admission, "join_line", joined)
    other = broker.declare_queue("other", durable=False)
    with pytest.raises(qflow.QueueFull), broker.transaction(timeout_s=0.3) as tx:
        for _ in range(2):
            tx.put_many(queue, [bytes(2_000)] * 10)
        if capacity == "48KiB":
            tx.put_many(other, [bytes(8_000)])
            assert gathering_of(tx).ends_slowly
    assert charged
    assert min(charged) >= (40_000 if capacity == "1MiB" else 20_000)
    assert broker.stats().resident_bytes == OVERHEAD_BYTES
    assert broker.check() == []


def test_an_interrupt_behind_a_commit_that_is_not_logged_gives_no_room_back(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may raise in the main thread when another one has done all of it."""

    class Interrupt(Exception):
        pass

    enter = Together.enter

    def interrupted(together: Together, *arguments: Any, **named: Any) -> None:
        enter(together, *arguments, **named)
        raise Interrupt

    with qflow.open(spool) as broker:
        queue = broker.declare_queue("transient", durable=False)
        monkeypatch.setattr(Together, "enter", interrupted)
        with pytest.raises(Interrupt), broker.transaction() as tx:
            tx.put(queue, b"x")
        assert "interrupted" in repr(tx)
        assert (len(queue), broker.check()) == (1, [])
        queue.get(0).ack()
        assert (queue.stats().resident_bytes, broker.check()) == (0, [])
