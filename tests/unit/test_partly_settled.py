"""Batches of queues of which some messages are settled by themselves: what is settled is kept by nobody but its user."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import qflow
import qflow.aio
from qflow import held_batch
from qflow.deliveries import deliveries_of
from qflow.delivery import Segment
from qflow.held_batch import HeldBatch
from unit.allocated import BATCHES, COUNT, LATE, MIB, bodies, kept

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]


def one_by_one(queue: Any, some: Iterable[qflow.Delivery]) -> None:
    for delivery in some:
        delivery.ack()


def together(queue: Any, some: Iterable[qflow.Delivery]) -> None:
    queue.ack_many(list(some))


def rejected(queue: Any, some: Iterable[qflow.Delivery]) -> None:
    for delivery in some:
        delivery.nack(requeue=False)


SETTLES = [one_by_one, together, rejected]


@pytest.mark.parametrize("settle", SETTLES)
def test_what_is_settled_of_a_batch_is_let_go_of(open_spool: Open, settle: Any) -> None:
    """One of each batch is held on, by a delivery that knows its batch."""
    broker = open_spool(capacity_bytes="4MiB")
    queue = broker.declare_queue("q", durable=False)
    slow: list[qflow.Delivery] = []
    with kept() as found:
        for _ in range(BATCHES):
            queue.put_many(bodies())
            batch = queue.get_many(COUNT)
            settle(queue, [one for index, one in enumerate(batch) if index != LATE])
            slow.append(batch[LATE])
            del batch
        len(queue)  # what was sent before has arrived
    assert [one.body for one in slow] == [bodies()[LATE]] * BATCHES
    assert found.bytes < 2 * MIB
    stats = queue.stats()
    assert (stats.acquired_messages, stats.messages) == (BATCHES, BATCHES)
    for one in slow:
        one.ack()
    with pytest.raises(qflow.AlreadySettled):
        slow[0].ack()
    assert len(queue) == 0
    assert queue.stats().resident_bytes == 0


@pytest.mark.parametrize("how", ["ack", "nack"])
def test_a_delivery_that_is_kept_keeps_no_others_once_its_batch_is_over(open_spool: Open, how: str) -> None:
    """Whoever had the batch has dropped it; it was settled as a whole."""
    queue = open_spool().declare_queue("q", durable=False)
    mine: list[qflow.Delivery] = []
    with kept() as found:
        for _ in range(BATCHES):
            queue.put_many(bodies())
            batch = queue.get_many(COUNT)
            mine.append(batch[7])
            getattr(batch, how)(*[False][: how == "nack"])
            del batch
        len(queue)
    assert found.bytes < 2 * MIB
    with pytest.raises(qflow.AlreadySettled):
        mine[0].ack()


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
@pytest.mark.parametrize("count", [20, 100])
def test_who_keeps_a_batch_has_all_bodies_whatever_became_of_them(open_spool: Open, durable: bool, count: int) -> None:
    """After a part of it was settled, after all was, after the rest went back, and after that was taken by others."""
    queue = open_spool().declare_queue("q", durable=durable)
    all_bodies = [b"%d" % number for number in range(count)]

    def check() -> None:
        assert batch.bodies == [one.body for one in batch] == all_bodies
        assert [batch[index].body for index in (0, -1)] == [all_bodies[0], all_bodies[-1]]
        assert [one.sequence for one in batch[2:5]] == list(batch.sequences[2:5])
        assert len(batch) == len(batch.sequences) == count

    queue.put_many(all_bodies)
    batch = queue.get_many(count)
    for delivery in batch[:-2]:
        delivery.ack()
        check()
    with pytest.raises(qflow.AlreadySettled, match="settled before"):
        batch[3].ack()
    batch[-2].nack()
    check()
    batch.nack()
    check()
    with pytest.raises(qflow.AlreadySettled):
        batch.ack()
    again = queue.get_many(count)
    assert again.bodies == all_bodies[-2:]
    again.ack()
    assert again.bodies == all_bodies[-2:]
    check()
    assert len(queue) == 0


@pytest.mark.parametrize("gone", ["ack", "ack_many"])
def test_what_is_settled_is_let_go_of_for_tasks(spool: Any, gone: str) -> None:
    """As for threads."""
    asyncio.run(_tasks_let_go(spool, gone))


async def _tasks_let_go(spool: Any, gone: str) -> None:
    async with await qflow.aio.open(spool, capacity_bytes="4MiB") as broker:
        queue = await broker.declare_queue("q", durable=False)
        slow: list[qflow.aio.AsyncDelivery] = []
        with kept() as found:
            for _ in range(BATCHES):
                await queue.put_many(bodies())
                batch = await queue.get_many(COUNT)
                others = [one for index, one in enumerate(batch) if index != LATE]
                if gone == "ack":
                    for one in others:
                        await one.ack()
                else:
                    await queue.ack_many(others)
                slow.append(batch[LATE])
                assert batch.bodies == bodies()
                others.clear()
                del batch
        assert found.bytes < 2 * MIB
        for one in slow:
            await one.ack()


def test_what_a_transaction_settles_of_batches_is_let_go_of(open_spool: Open) -> None:
    """Not before it is committed: one that is rolled back has all of it again."""
    broker = open_spool(capacity_bytes="4MiB")
    queue = broker.declare_queue("q", durable=False)
    full = broker.declare_queue("full", durable=False, limit_messages=1)
    full.put(b"x")
    slow: list[qflow.Delivery] = []
    with kept() as found:
        for _ in range(BATCHES):
            queue.put_many(bodies())
            batch = queue.get_many(COUNT)
            some = [one for index, one in enumerate(batch) if index != LATE]
            with pytest.raises(qflow.QueueFull), broker.transaction(timeout_s=0) as tx:
                tx.put(full, b"x")
                tx.ack_many(some)
            with broker.transaction() as tx:
                tx.ack_many(some)
            slow.append(batch[LATE])
            del batch, some, tx
        len(queue)
    assert found.bytes < 2 * MIB
    for one in slow:
        one.ack()
    assert len(queue) == 0


@pytest.mark.owner_only
@pytest.mark.parametrize(("size", "left"), [(1_000, 1), (1_000, 500), (100, 1), (100, 30)])
def test_what_is_left_of_batches_takes_what_it_is_charged(open_spool: Open, size: int, left: int) -> None:
    """Of small messages, too: spread over the batch, or a single one."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False)
    with kept() as found:
        for _ in range(20):
            queue.put_many([b"%d" % number + b"x" * 20 for number in range(10_000, 10_000 + size)])
            for index, delivery in enumerate(queue.get_many(size)):
                if index % (size // left):
                    delivery.ack()
            del delivery
    charged = queue.stats().resident_bytes
    assert found.bytes < 1.15 * charged + 2**16  # what maintenance and the collector have meanwhile


class Model:
    """Which messages of a batch are left, and which a commit has that may be refused."""

    def __init__(self, batch: HeldBatch) -> None:
        self.batch = batch
        self.messages = [
            (part.first + index, record, part.marks)
            for part in batch.segments
            for index, record in enumerate(part.records)
        ]
        self.left = set(range(batch.total))
        self.leaving: set[int] = set()

    def check(self) -> None:
        batch, left = self.batch, sorted(self.left)
        there = [(part.first + at, one, part.marks) for part in batch.left() for at, one in enumerate(part.records)]
        assert there == [self.messages[at] for at in left]
        assert batch.unsettled() == left
        assert batch.left_records() == [(at, self.messages[at][1]) for at in left]
        assert batch.left_size() == (len(left), sum(len(self.messages[at][1]) for at in left))
        assert [at for at in range(batch.total) if not batch.is_settled(at)] == left
        for at in left:
            assert batch.position(self.messages[at][0]) == at
            one = batch.delivery_at(at)
            assert (one.sequence, one.record, one.marks) == self.messages[at]
        for at in set(range(batch.total)) - self.left:
            with pytest.raises(qflow.AlreadySettled):
                batch.delivery_at(at)


class Nobody:
    """A queue."""

    name = "q"


@pytest.mark.owner_only
@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_is_found_whatever_was_settled_in_whatever_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of segments whose sequences do not rise; and by commits that are refused."""
    monkeypatch.setattr(held_batch, "FEW_PLACES", seed % 3)
    monkeypatch.setattr(held_batch, "SPARSE", 1 + seed % 4)
    chance = random.Random(seed)
    firsts = [100 * number for number in range(chance.randint(1, 6))]
    chance.shuffle(firsts)
    segments = [
        Segment(first, [b"x" * chance.randint(0, 5) for _ in range(chance.randint(1, 9))], 2 * chance.randint(0, 1))
        for first in firsts
    ]
    batch = HeldBatch(Nobody(), segments)  # type: ignore[arg-type]
    model, shown = Model(batch), deliveries_of(batch)
    everything = shown.bodies
    while model.left or model.leaving:
        model.check()
        some = set(chance.sample(sorted(model.left), chance.randint(0, min(4, len(model.left)))))
        if model.leaving and chance.random() < 0.5:
            if chance.random() < 0.5:
                batch.take_back([(at, model.messages[at][1]) for at in model.leaving])
                model.left |= model.leaving
            model.leaving = set()
            batch.leaving -= 1
            batch.tidy()
        elif some:
            if not model.leaving and chance.random() < 0.5:
                batch.leaving += 1
                model.leaving = some
            for at in some:
                batch.note_settled(at)
            model.left -= some
            if not model.left:
                batch.end()
    model.check()
    assert (batch.segments, batch.kept) == ([], None)
    assert shown.bodies == everything
    assert shown[0].body == everything[0]
