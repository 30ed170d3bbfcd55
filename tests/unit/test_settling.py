"""Deliveries and batches: who settles first counts, what comes late is told or ignored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import inside
import qflow

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


@pytest.fixture(params=[True, False], ids=["durable", "transient"])
def queue(open_spool: Open, request: pytest.FixtureRequest) -> qflow.Queue:
    """A queue with ten messages."""
    queue = open_spool().declare_queue("q", durable=request.param)
    queue.put_many([b"%d" % number for number in range(10)])
    return queue


def test_a_second_ack_is_refused(queue: qflow.Queue) -> None:
    """Edge 17: the first settling counts, the second one says so."""
    delivery = queue.get()
    delivery.ack()
    with pytest.raises(qflow.AlreadySettled, match="settled"):
        delivery.ack()
    with pytest.raises(qflow.AlreadySettled):
        delivery.nack()
    assert len(queue) == 9


def test_an_ack_after_a_nack_cannot_take_the_message_from_who_has_it_now(queue: qflow.Queue) -> None:
    """Edge 17: a stale delivery settles nothing."""
    stale = queue.get()
    stale.nack()
    again = queue.get()
    assert (again.sequence, again.delivery_count, again.redelivered) == (stale.sequence, 2, True)
    with pytest.raises(qflow.AlreadySettled):
        stale.ack()
    again.ack()
    assert len(queue) == 9


def test_a_returned_message_comes_back_in_its_place(queue: qflow.Queue) -> None:
    """Edge 3: the order of sequences holds for what was returned."""
    held = [queue.get() for _ in range(5)]
    for index in (3, 0, 4):
        held[index].nack()
    assert [queue.get().body for _ in range(4)] == [b"0", b"3", b"4", b"5"]


def test_one_delivery_of_a_batch_is_settled_apart(queue: qflow.Queue) -> None:
    """A batch settles what is left of it, and says when nothing is."""
    batch = queue.get_many(6)
    batch[2].ack()
    batch[4].nack()
    with pytest.raises(qflow.AlreadySettled):
        batch[2].ack()
    batch.ack(wait=True)
    with pytest.raises(qflow.AlreadySettled):
        batch.ack()
    with pytest.raises(qflow.AlreadySettled):
        batch[0].ack()
    assert [delivery.body for delivery in queue.get_many(10)] == [b"4", b"6", b"7", b"8", b"9"]


def test_a_batch_can_be_read_in_every_way(queue: qflow.Queue) -> None:
    """Bodies, sequences, indices, slices and iteration agree, also across segments."""
    queue.get().nack()  # an entry of its own before the others
    batch = queue.get_many(100)
    assert len(batch) == 10
    assert batch.bodies == [delivery.body for delivery in batch] == [b"%d" % number for number in range(10)]
    assert list(batch.sequences) == [delivery.sequence for delivery in batch]
    assert batch[-1].body == b"9"
    assert [delivery.body for delivery in batch[2:4]] == [b"2", b"3"]
    with pytest.raises(IndexError):
        batch[10]


@pytest.mark.parametrize("settle", [lambda one: one.ack(), lambda one: one.nack()], ids=["ack", "nack"])
def test_what_settling_a_part_of_a_batch_looks_at_does_not_grow_with_its_segments(
    queue: qflow.Queue, settle: Callable[[qflow.Delivery], None]
) -> None:
    """Every second message came back, so that each of a batch is a segment of its own."""
    queue.put_many([b"%d" % number for number in range(10, 600)])
    for number, delivery in enumerate(list(queue.get_many(600))):
        if number % 2:
            delivery.ack()
        else:
            delivery.nack()
    batch = queue.get_many(600)
    batch.held.segments = segments = inside.Counted(batch.held.segments)
    assert len(segments) == len(batch) == 300
    for delivery in reversed(list(batch)):
        settle(delivery)
    looks = segments.looks
    assert looks <= 10 * 300  # a few for each, and those of maintenance


def test_a_batch_knows_where_each_message_is_whatever_order_they_came_in(open_spool: Open) -> None:
    """Of several priorities, and returned: sequences do not rise."""
    queue = open_spool().declare_queue("q", durable=False, priorities=3)
    for number in range(60):
        queue.put(b"%d" % number, priority=number % 3)
    for delivery in list(queue.get_many(60))[::4]:
        delivery.nack()
    for delivery in list(queue.get_many(60)):
        delivery.nack()
    batch = queue.get_many(60)
    assert list(batch.sequences) != sorted(batch.sequences)
    assert [batch.held.position(sequence) for sequence in batch.sequences] == list(range(len(batch)))
    assert [batch[index].body for index in range(len(batch))] == batch.bodies
    for missing in (max(batch.sequences) + 1, 2**63):
        with pytest.raises(IndexError):
            batch.held.position(missing)
    with pytest.raises(IndexError):
        batch[-len(batch) - 1]


def test_changing_the_list_of_bodies_changes_nothing_else(queue: qflow.Queue) -> None:
    """The list is the caller's own."""
    batch = queue.get_many(3)
    batch.bodies.reverse()
    batch.nack()
    assert queue.get().body == b"0"


def test_an_ack_after_a_purge_does_nothing(queue: qflow.Queue) -> None:
    """Edge 16: late acks of purged messages are no-ops."""
    single, batch = queue.get(), queue.get_many(3)
    assert queue.purge() == 10
    single.ack()
    batch[0].ack()
    batch.ack()
    assert len(queue) == 0
    assert queue.put(b"next") == 10


def test_an_ack_after_a_delete_does_nothing(open_spool: Open) -> None:
    """Edge 16: neither does one of a queue that is gone, while puts and gets say that it is."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"1")
    delivery = queue.get()
    broker.delete_queue("q")
    delivery.ack()
    with pytest.raises(qflow.QueueDeleted, match="declare"):
        queue.put(b"2")
    with pytest.raises(qflow.QueueDeleted):
        queue.get(0)
    assert len(broker.declare_queue("q")) == 0


@pytest.mark.owner_only
def test_an_ack_after_close_is_refused_and_the_message_comes_back(spool: object, open_spool: Open) -> None:
    """Edge 17: the broker gave it back when it was closed."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"1")
    delivery, batch = queue.get(), queue.get_many(1, timeout_s=0)
    assert len(batch) == 0
    broker.close()
    with pytest.raises(qflow.BrokerClosed, match="open the spool again"):
        delivery.ack()
    again = open_spool().queue("q").get(0)
    assert (again.body, again.delivery_count) == (b"1", 2)


def test_a_delivery_as_a_context_acks_or_gives_back(queue: qflow.Queue) -> None:
    """Success acks, an exception returns the message, and settling inside the block is fine."""
    with queue.get() as delivery:
        delivery.ack()
    with pytest.raises(ZeroDivisionError), queue.get():
        raise ZeroDivisionError
    again = queue.get()
    assert (again.body, again.redelivered) == (b"1", True)


def test_ack_many_settles_all_others_before_it_complains(queue: qflow.Queue) -> None:
    """One stale delivery does not keep the others from being settled."""
    held = [queue.get() for _ in range(4)]
    held[1].ack()
    with pytest.raises(qflow.AlreadySettled):
        queue.ack_many(held, wait=True)
    assert len(queue) == 6


def test_ack_many_of_another_queue(open_spool: Open) -> None:
    """Deliveries know where they are from."""
    broker = open_spool()
    one, other = broker.declare_queue("one"), broker.declare_queue("other", durable=False)
    one.put(b"1")
    other.put(b"2")
    one.ack_many([one.get(), other.get()], wait=True)
    assert (len(one), len(other)) == (0, 0)


def test_ack_many_takes_deliveries_of_any_kind(queue: qflow.Queue) -> None:
    """Single ones, some of a batch, one that is there twice: each is settled once."""
    single, batch = queue.get(), queue.get_many(5)
    first, third = batch[0], batch[2]
    with pytest.raises(qflow.AlreadySettled):
        queue.ack_many([single, first, third, third, batch[2]], wait=True)
    assert len(queue) == 7
    batch.ack()
    assert len(queue) == 4
    queue.ack_many([], wait=True)
    assert queue.stats().acked_total == 6
    with pytest.raises(qflow.InvalidArgument, match="str"):
        queue.ack_many([queue.get(), "no"])  # type: ignore[list-item]
    assert len(queue) == 4  # none of them was


@pytest.mark.owner_only
def test_counts_of_deliveries_are_exact_of_what_was_delayed_and_spilled(open_spool: Open) -> None:
    """In memory nobody knows them any more when the spool is closed."""
    broker = open_spool(capacity_bytes=30_000)
    queue, other = broker.declare_queue("q"), broker.declare_queue("other")
    for number in range(3):
        queue.put(b"x" * 9_000, delay_s=0.001 if number else None)
    for _ in range(2):
        for delivery in [queue.get(60) for _ in range(3)]:
            delivery.nack()
    for _ in range(6):
        other.put(b"y" * 9_000)
    assert queue.stats().spilled_messages == 2
    broker.close()
    queue = open_spool().queue("q")
    assert [queue.get(60).delivery_count for _ in range(3)] == [3, 3, 3]


def test_counts_of_deliveries_are_exact_after_a_clean_stop(open_spool: Open) -> None:
    """Edge 18: what was held at close has been delivered once more than what was not."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([b"a", b"b", b"c"])
    queue.get().nack()
    held = queue.get_many(2)
    assert [delivery.delivery_count for delivery in held] == [2, 1]
    broker.close()
    counts = [(delivery.body, delivery.delivery_count) for delivery in open_spool().queue("q").get_many(3)]
    assert counts == [(b"a", 3), (b"b", 2), (b"c", 1)]
