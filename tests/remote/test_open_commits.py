"""What a client holds while a commit that settles some of it is under way, and is refused at last."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import inside
import qflow
import qflow.aio
from door_raw import until
from doors import event_loop
from doors.event_loop import run
from qflow.remote.server import grants

REST = ["acked", "given back", "held longer"]
"""What is done meanwhile: to the rest of its batch, or to all that is left of it, which is nothing."""


@pytest.fixture
def holding(owner: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> qflow.Broker:
    """The owner of two messages, of others, and of a queue that takes none; it soon looks for grants to forget."""
    monkeypatch.setattr(grants, "SWEPT_AT", 2)
    owner.declare_queue("jobs", ack_timeout_s=600).put_many([b"a", b"b"])
    owner.declare_queue("others").put_many([b""] * 5)
    owner.declare_queue("full", limit_messages=1).put(b"in the way")
    return owner


def is_waiting(owner: qflow.Broker) -> bool:
    return owner.queue("full").stats().blocked_putters > 0


def is_free_again(owner: qflow.Broker) -> None:
    """The first message is held by nobody, and counted as delivered."""
    queue = owner.queue("jobs")
    until(lambda: not queue.stats().acquired_messages)
    assert inside.left_behind(queue) == {}
    first = queue.get(0)
    assert (first.body, first.delivery_count) == (b"a", 2)


@pytest.mark.parametrize("rest", REST)
def test_what_a_transaction_did_not_settle_is_held_as_before(
    holding: qflow.Broker, remote: qflow.RemoteBroker, rest: str
) -> None:
    """Whatever became of the rest of its batch meanwhile."""
    batch = remote.queue("jobs").get_many(1 if rest == "held longer" else 2, 0)

    def commit() -> None:
        with remote.transaction() as tx:
            tx.put("full", b"x")
            tx.ack(batch[0])

    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit)
        until(lambda: is_waiting(holding))
        if rest == "acked":
            batch[1].ack(wait=True)
        elif rest == "given back":
            batch[1].nack()
        else:
            with pytest.raises(qflow.AlreadySettled):
                batch.extend(900)
        held = [remote.queue("others").get(0) for _ in range(5)]
        holding.delete_queue("full")
        with pytest.raises(qflow.QueueDeleted):
            committing.result()
    batch[0].nack()
    is_free_again(holding)
    for one in held:
        one.ack(wait=True)


@pytest.mark.parametrize("rest", REST)
def test_so_it_is_for_tasks(holding: qflow.Broker, spool: Path, rest: str) -> None:
    """At a connection of theirs."""

    async def scenario() -> None:
        async with qflow.aio.connect(spool) as remote:
            queue, others = await remote.queue("jobs"), await remote.queue("others")
            batch = await queue.get_many(1 if rest == "held longer" else 2, 0)

            async def commit() -> None:
                async with remote.transaction() as tx:
                    await tx.put("full", b"x")
                    await tx.ack(batch[0])

            committing = asyncio.ensure_future(commit())
            await event_loop.until(lambda: is_waiting(holding))
            if rest == "acked":
                await batch[1].ack(wait=True)
            elif rest == "given back":
                await batch[1].nack()
            else:
                with pytest.raises(qflow.AlreadySettled):
                    await batch.extend(900)
            held = [await others.get(0) for _ in range(5)]
            await asyncio.to_thread(holding.delete_queue, "full")
            with pytest.raises(qflow.QueueDeleted):
                await committing
            await batch[0].nack()
            is_free_again(holding)
            for one in held:
                await one.ack(wait=True)

    run(scenario())


def test_what_is_purged_while_a_transaction_waits_is_forgotten(
    holding: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """It is leaving with nothing any more: acks do nothing, and no grant of it is kept."""
    batch = remote.queue("jobs").get_many(2, 0)

    def commit() -> None:
        with remote.transaction() as tx:
            tx.put("full", b"x")
            tx.ack(batch[0])

    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit)
        until(lambda: is_waiting(holding))
        batch[1].ack(wait=True)
        holding.queue("jobs").purge()
        holding.queue("full").get(0).ack()
        committing.result()
    assert holding.queue("full").get(0).body == b"x"
    assert len(holding.queue("jobs")) == 0


def test_who_dies_while_its_transaction_waits_for_room_holds_nothing(
    holding: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """Though the rest of the batch was acked meanwhile."""
    batch = remote.queue("jobs").get_many(2, 0)

    def commit() -> None:
        with remote.transaction() as tx:
            tx.put("full", b"x")
            tx.ack(batch[0])

    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit)
        until(lambda: is_waiting(holding))
        batch[1].ack(wait=True)
        remote.close()
        with pytest.raises(qflow.InDoubt):
            committing.result()
    is_free_again(holding)
