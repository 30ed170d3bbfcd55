"""What a client holds while a commit that settles some of it is under way, and is refused at last."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from door_raw import until
from doors import event_loop
from doors.event_loop import run
from faults.seams import PATIENCE_S, Faults, faulty_broker
from qflow.opening import with_door
from qflow.remote.client.tasks import TaskConnection
from qflow.remote.client.threads import Connection
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


def commit(broker: Any, queue: str, delivery: Any) -> None:
    """Settle a delivery in one commit with a put."""
    with broker.transaction() as tx:
        tx.put(queue, b"x")
        tx.ack(delivery)


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

    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit, remote, "full", batch[0])
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

    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit, remote, "full", batch[0])
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

    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit, remote, "full", batch[0])
        until(lambda: is_waiting(holding))
        batch[1].ack(wait=True)
        remote.close()
        with pytest.raises(qflow.InDoubt):
            committing.result()
    is_free_again(holding)


class Owner:
    """A broker whose log stands still before it has room for a commit, and refuses it then."""

    def __init__(self, broker: qflow.Broker, faults: Faults) -> None:
        self.broker = broker
        self._faults = faults
        self.is_there, self._go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        def wait_there() -> None:
            self.is_there.set()
            self._go_on.wait(PATIENCE_S)

        self._faults.before["make_room"] = wait_there
        self._faults.fail("make_room", qflow.DiskFull("no room"))

    def refuse(self, refuses: bool = True) -> None:
        if not refuses:
            self._faults.heal()
        self._go_on.set()
        with suppress(qflow.DiskFull):
            self.broker.queue("out").put(b"y")
        self._faults.heal()
        self._faults.before.clear()


@pytest.fixture
def refusing(spool: Path) -> Iterator[Owner]:
    """An owner of messages in a queue, and in a stream."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        with_door(broker)
        broker.declare_queue("jobs").put_many([b"a", b"b"])
        broker.declare_queue("mortal", max_deliveries=1, dead_letter="dead").put(b"a")
        broker.declare_queue("out")
        broker.declare_stream("s", topics=["s"])
        broker.publish_many([("s", b"a"), ("s", b"b")])
        yield Owner(broker, faults)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@pytest.mark.parametrize("source", ["jobs", "mortal", "s"])
def test_who_dies_while_its_commit_is_written_holds_nothing_when_that_is_refused(
    refusing: Owner, spool: Path, source: str, whole: bool
) -> None:
    """What comes back then is there for others, and counted as delivered; a dead letter, if that was once too often."""
    broker = refusing.broker
    beside = broker.subscribe("s", group="g", start="earliest")
    with qflow.connect(spool) as remote:
        one = remote.subscribe("s", group="g") if source == "s" else remote.queue(source)
        batch = one.get_many(2, 0)

        def commit() -> None:
            with remote.transaction() as tx:
                tx.put("out", b"x")
                tx.ack_many(batch if whole else list(batch))

        refusing.stop()
        with ThreadPoolExecutor() as pool:
            committing = pool.submit(commit)
            assert refusing.is_there.wait(PATIENCE_S)
            remote.close()
            with pytest.raises(qflow.InDoubt):
                committing.result()
    until(lambda: broker.engine.door is not None and not broker.engine.door.sockets)
    queue: Any = beside if source == "s" else broker.queue(source)
    assert queue.get_many(2, 0).bodies == []
    refusing.refuse()
    if source == "s":
        assert [(found.body, found.delivery_count) for found in queue.get_many(2, 0)] == [(b"a", 2), (b"b", 2)]
        return
    assert inside.left_behind(queue) == {}
    assert queue.stats().acquired_messages == 0
    if source == "mortal":
        assert queue.get_many(2, 0).bodies == []
        assert broker.queue("dead").get(PATIENCE_S).headers["dead_letter_reason"] == "max_deliveries"
    else:
        assert [(found.body, found.delivery_count) for found in queue.get_many(2, 0)] == [(b"a", 2), (b"b", 2)]
    assert queue.stats().redelivered_total == len(batch)
    assert broker.check() == []


def test_what_is_given_back_while_its_commit_is_written_is_there_again_when_that_is_refused(refusing: Owner) -> None:
    """Beside the owner: it was settled, as far as anybody knew, and nobody holds it any more."""
    queue = refusing.broker.queue("jobs")
    delivery = queue.get(0)

    refusing.stop()
    with ThreadPoolExecutor() as pool:
        committing = pool.submit(commit, refusing.broker, "out", delivery)
        assert refusing.is_there.wait(PATIENCE_S)
        with pytest.raises(qflow.AlreadySettled):
            delivery.nack()
        refusing.refuse()
        with pytest.raises(qflow.DiskFull):
            committing.result()
    is_free_again(refusing.broker)


@pytest.mark.parametrize("held", ["one", "one of a batch", "a batch", "each of a batch"])
def test_so_it_is_with_a_task_that_is_cancelled_meanwhile(refusing: Owner, held: str) -> None:
    """The end of its block gives the message back."""

    async def scenario() -> None:
        broker = qflow.aio.AsyncBroker(refusing.broker)
        queue = broker.queue("jobs")

        async def commit(wanted: Any) -> None:
            async with broker.transaction() as tx:
                await tx.put("out", b"x")
                await tx.ack_many(wanted)

        async def work() -> None:
            if held == "one":
                async with await queue.get(0) as delivery:
                    await commit([delivery])
            elif held == "one of a batch":
                async with (await queue.get_many(1, 0))[0] as delivery:
                    await commit([delivery])
            else:
                batch = await queue.get_many(1, 0)
                try:
                    await commit(batch if held == "a batch" else list(batch))
                finally:
                    with pytest.raises(qflow.AlreadySettled):
                        await batch.nack()

        refusing.stop()
        working = asyncio.ensure_future(work())
        await event_loop.until(refusing.is_there.is_set)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    run(scenario())
    refusing.refuse()
    is_free_again(refusing.broker)


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "held"])
def test_a_message_of_a_stream_goes_back_when_the_commit_is_refused_and_not_before(
    refusing: Owner, refused: bool
) -> None:
    """That a task gave back which was cancelled while it was written."""
    broker = refusing.broker
    beside = broker.subscribe("s", group="g", start="earliest")

    async def scenario() -> None:
        tasks = qflow.aio.AsyncBroker(broker)
        subscription = await tasks.subscribe("s", group="g")

        async def work() -> None:
            async with await subscription.get(0) as delivery, tasks.transaction() as tx:
                await tx.put("out", b"x")
                await tx.ack(delivery)

        refusing.stop()
        working = asyncio.ensure_future(work())
        await event_loop.until(refusing.is_there.is_set)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert [found.body for found in beside.get_many(5, 0)] == [b"b"]
        refusing.refuse(refused)
        await subscription.close()

    run(scenario())
    assert [(found.body, found.delivery_count) for found in beside.get_many(5, 0)] == ([(b"a", 2)] if refused else [])
    assert len(broker.queue("out")) == (0 if refused else 2)


class Late(Exception):
    """What a signal handler raises: no time is left."""


def test_a_commit_that_a_handler_ends_is_in_doubt(holding: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was done, and the answer had come: what it held is settled, and whoever settles it is told so."""
    call = Connection.call

    def struck(connection: Connection, *request: Any) -> Any:
        call(connection, *request)
        raise Late

    with qflow.connect(holding.path) as broker:
        delivery = broker.queue("others").get(60)
        transaction = broker.transaction()
        transaction.put("jobs", b"x")
        transaction.ack(delivery)
        monkeypatch.setattr(Connection, "call", struck)
        with pytest.raises(Late):
            transaction.commit()
        monkeypatch.undo()
        assert "interrupted" in repr(transaction)
        with pytest.raises(qflow.AlreadySettled):
            delivery.ack()
    assert (len(holding.queue("jobs")), len(holding.queue("others"))) == (3, 4)


def test_a_commit_of_a_task_that_a_handler_ends_is_in_doubt(
    holding: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of a thread."""
    call = TaskConnection.call

    async def struck(connection: TaskConnection, *request: Any) -> Any:
        await call(connection, *request)
        raise Late

    async def scenario() -> None:
        async with qflow.aio.connect(holding.path) as broker:
            delivery = await broker.queue("others").get(60)
            transaction = broker.transaction()
            await transaction.put("jobs", b"x")
            await transaction.ack(delivery)
            monkeypatch.setattr(TaskConnection, "call", struck)
            with pytest.raises(Late):
                await transaction.commit()
            monkeypatch.undo()
            assert "interrupted" in repr(transaction)
            with pytest.raises(qflow.AlreadySettled):
                await delivery.ack()

    run(scenario())
