"""Acks that nobody waits for, while the log stands still: how many are held, on both sides of the door, and beside it.

So are nacks that it notes.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from door_raw import until
from doors import event_loop
from doors.event_loop import run, told, turns
from drivers import DOOR, OWNER, joining
from faults.seams import PATIENCE_S, Faults, faulty_broker
from qflow.delivery import Return
from qflow.opening import with_door
from qflow.queues.queue import parts_of
from qflow.remote.client import channel, tasks
from qflow.remote.server import budget, connection
from qflow.storage.log import transaction_log
from qflow.storage.log.transaction_log import TransactionLog
from qflow.streams import claims

MESSAGES = 3_000
MOST_STANDING = 200
"""Before the log."""
MOST_REQUESTS = 100
"""Under way in the owner when it reads no more, and as many as it has read at once."""
READ_BYTES = 2**14
FRAME_BYTES = 50
"""Less than an ack takes on its way."""
MOST_READ = MOST_REQUESTS + READ_BYTES // FRAME_BYTES
MOST_UNSENT_BYTES = 2**14


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a few messages reach."""
    monkeypatch.setattr(transaction_log, "MOST_STANDING", MOST_STANDING)
    monkeypatch.setattr(claims, "MOST_STANDING", MOST_STANDING)
    monkeypatch.setattr(connection, "MOST_REQUESTS", MOST_REQUESTS)
    monkeypatch.setattr(budget, "READ_BYTES", READ_BYTES)
    monkeypatch.setattr(channel, "MOST_UNSENT_BYTES", MOST_UNSENT_BYTES)


class Owner:
    """A broker whose log stands still at a commit."""

    def __init__(self, broker: qflow.Broker, faults: Faults) -> None:
        self.broker = broker
        self._faults = faults
        self._at_commit, self._go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Have the log stand still, with something to be written."""

        def wait_there() -> None:
            self._at_commit.set()
            self._go_on.wait(PATIENCE_S)

        self._faults.before["commit"] = wait_there
        self.broker.queue("other").submit(b"x")
        assert self._at_commit.wait(PATIENCE_S)

    def go_on(self) -> None:
        """Have it write again."""
        self._faults.before.clear()
        self._go_on.set()


@pytest.fixture
def owner(spool: Path) -> Iterator[Owner]:
    """The owner of a queue, and of a stream, with many messages."""
    faults = Faults()
    with faulty_broker(spool, faults) as broker:
        with_door(broker)
        queue, _ = broker.declare_queues(["jobs", "other"])
        broker.declare_queue("counted", max_deliveries=9).put_many([b""] * MESSAGES)
        broker.declare_stream("s", topics=["s"])
        queue.put_many([b""] * MESSAGES)
        broker.publish_many([("s", b"")] * MESSAGES)
        made = Owner(broker, faults)
        yield made
        made.go_on()


@pytest.fixture(params=["queue", "subscription"])
def source(request: pytest.FixtureRequest) -> str:
    """What is got from."""
    return str(request.param)


def open_source(broker: Any, source: str) -> Any:
    return broker.queue("jobs") if source == "queue" else broker.subscribe("s", name="n", start="earliest")


def held(source: Any) -> Iterator[Any]:
    """Get all messages; yield each delivery."""
    batches = [source.get_many(1000, 0) for _ in range(-(-MESSAGES // 1000))]
    yield from (delivery for batch in batches for delivery in batch)


def left_of(owner: Owner, source: str) -> int:
    """Return how many messages are not settled."""
    if source == "queue":
        return len(owner.broker.queue("jobs"))
    return MESSAGES - owner.broker.stream("s").stats().subscriptions[0].acked_total


def waits_for_the_log(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not TransactionLog.wait.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("single", [True, False], ids=["single", "of batches"])
def test_threads_beside_the_owner_wait_for_the_log(owner: Owner, source: str, single: bool) -> None:
    """As many acks stand before it as may."""
    one = open_source(owner.broker, source)
    deliveries = [one.get(0) for _ in range(2 * MOST_STANDING)] if single else list(held(one))
    owner.stop()
    acking = threading.Thread(target=lambda: [delivery.ack() for delivery in deliveries])
    acking.start()
    until(lambda: waits_for_the_log(acking) or not acking.is_alive())
    assert acking.is_alive()
    assert MESSAGES - left_of(owner, source) <= MOST_STANDING + 10
    owner.go_on()
    acking.join(PATIENCE_S)
    assert left_of(owner, source) == MESSAGES - len(deliveries)


def test_acks_of_what_was_extended_wait_for_the_log_too(owner: Owner) -> None:
    """It is held apart from what was not."""
    owner.broker.alter_queue("jobs", ack_timeout_s=600)
    queue = owner.broker.queue("jobs")
    deliveries = [queue.get(0) for _ in range(2 * MOST_STANDING)]
    for delivery in deliveries:
        delivery.extend(900)
    owner.stop()
    acking = threading.Thread(target=lambda: [delivery.ack() for delivery in deliveries])
    acking.start()
    until(lambda: waits_for_the_log(acking) or not acking.is_alive())
    assert acking.is_alive()
    assert len(owner.broker.engine.log.requests) <= MOST_STANDING + 2
    owner.go_on()
    acking.join(PATIENCE_S)
    assert not acking.is_alive()


NOTED: dict[str, tuple[str, dict[str, Any]]] = {
    "delayed": ("jobs", {"delay_s": 60}),
    "counted": ("counted", {}),
    "rejected": ("jobs", {"requeue": False}),
}
"""What the log is told of a nack: how often a message was delivered, or that it is gone."""


@pytest.mark.parametrize("noted", NOTED)
@pytest.mark.parametrize("kind", ["single", "part", "batch"])
def test_nacks_wait_for_the_log_as_acks_do(owner: Owner, noted: str, kind: str) -> None:
    """Of threads: of one message, of one in a batch, of what is left of a batch."""
    name, how = NOTED[noted]
    queue = owner.broker.queue(name)
    requests = owner.broker.engine.log.requests
    many = 2 * MOST_STANDING
    ones: list[Any] = [queue.get(0) for _ in range(many)] if kind == "single" else []
    if kind == "part":
        ones += queue.get_many(many, 0)
    if kind == "batch":
        ones += [queue.get_many(1, 0) for _ in range(many)]
    owner.stop()
    nacking = threading.Thread(target=lambda: [one.nack(**how) for one in ones])
    nacking.start()
    until(lambda: waits_for_the_log(nacking) or not nacking.is_alive())
    assert nacking.is_alive()
    assert len(requests) <= MOST_STANDING + 2
    owner.go_on()
    nacking.join(PATIENCE_S)
    assert not nacking.is_alive()


@pytest.mark.parametrize("noted", NOTED)
def test_nacks_of_tasks_wait_for_the_log_too(owner: Owner, noted: str) -> None:
    """Beside the owner."""
    name, how = NOTED[noted]
    requests = owner.broker.engine.log.requests

    async def scenario() -> None:
        queue = qflow.aio.AsyncBroker(owner.broker).queue(name)
        held = await queue.get_many(2 * MOST_STANDING, 0)
        owner.stop()

        async def nack_all() -> None:
            for delivery in held:
                await delivery.nack(**how)

        nacking = asyncio.ensure_future(nack_all())
        await turns(MOST_STANDING)
        assert not nacking.done()
        assert len(requests) <= MOST_STANDING + 2
        owner.go_on()
        await nacking

    run(scenario())


def test_a_nack_that_the_log_is_not_told_of_waits_for_nothing(owner: Owner) -> None:
    """However much stands before it; and nacks of many messages together are one request."""
    jobs, counted = owner.broker.queue("jobs"), owner.broker.queue("counted")
    delivery = jobs.get(0)
    batch = counted.get_many(MOST_STANDING, 0)
    others = [batch[number] for number in range(0, len(batch), 2)]
    owner.stop()
    requests = owner.broker.engine.log.requests
    before = len(requests)
    parts_of(counted).claims.return_all(others, Return())
    assert len(requests) == before + 1
    for _ in range(MOST_STANDING):
        parts_of(jobs).claims.join_settles()
    assert owner.broker.engine.log.crowded
    delivery.nack()
    assert len(requests) == before + 1 + MOST_STANDING
    owner.go_on()


def test_threads_at_the_door_wait_when_the_owner_reads_no_more(owner: Owner, source: str, spool: Path) -> None:
    """Each side holds a bounded number of bytes, and of requests; then all of it is settled."""
    with qflow.connect(spool) as remote:
        one = open_source(remote, source)
        deliveries = list(held(one))
        owner.stop()
        acking = threading.Thread(target=lambda: [delivery.ack() for delivery in deliveries])
        acking.start()
        link: Any = remote._connection._channel
        until(lambda: link._waking or not acking.is_alive())
        assert acking.is_alive()
        assert sum(map(len, link._out)) <= MOST_UNSENT_BYTES + 200
        assert MESSAGES - left_of(owner, source) <= MOST_STANDING + MOST_READ
        owner.go_on()
        acking.join(PATIENCE_S)
        remote.queues()
        assert left_of(owner, source) == 0


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_tasks_wait_for_the_log_too(owner: Owner, source: str, access: str) -> None:
    """Beside the owner, and at the door."""

    async def scenario() -> None:
        async with joining(access, qflow.aio.AsyncBroker(owner.broker)) as broker:
            one = await told(open_source(broker, source))
            batches = [await one.get_many(1000, 0) for _ in range(-(-MESSAGES // 1000))]
            owner.stop()

            async def ack_all() -> None:
                for batch in batches:
                    for delivery in batch:
                        await delivery.ack()

            acking = asyncio.ensure_future(ack_all())
            if access == DOOR:
                link: Any = broker._connection
                await event_loop.until(lambda: acking.done() or not link._writable.is_set())
                assert link._transport.get_write_buffer_size() <= 2**16 + 200
                assert MESSAGES - left_of(owner, source) <= MOST_STANDING + MOST_READ
            else:
                await turns(MOST_STANDING)
                assert MESSAGES - left_of(owner, source) <= MOST_STANDING + 10
            assert not acking.done()
            owner.go_on()
            await acking
            await told(broker.queues())
            assert left_of(owner, source) == 0

    run(scenario())


def test_an_ack_that_waits_to_be_sent_is_told_of_the_end(owner: Owner, spool: Path) -> None:
    """Of the connection: nothing was settled by it."""
    outcome: list[Any] = []
    remote = qflow.connect(spool)
    deliveries = list(held(remote.queue("jobs")))
    owner.stop()

    def ack_all() -> None:
        try:
            for delivery in deliveries:
                outcome[:] = [delivery]
                delivery.ack()
        except qflow.BrokerClosed as error:
            outcome.append(error)

    acking = threading.Thread(target=ack_all)
    acking.start()
    link: Any = remote._connection._channel
    until(lambda: link._waking)
    remote.close()
    acking.join(PATIENCE_S)
    assert isinstance(outcome[1], qflow.BrokerClosed)
    owner.go_on()
    queue = owner.broker.queue("jobs")
    until(lambda: not queue.stats().acquired_messages)
    assert next(iter(queue.get_many(1))).sequence <= outcome[0].sequence


def test_acks_are_heard_that_were_made_before_the_connection_is_closed(
    owner: Owner, source: str, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were not sent yet, for the owner reads no more for now."""
    monkeypatch.setattr(channel, "CLOSE_S", PATIENCE_S)
    remote = qflow.connect(spool)
    deliveries = list(held(open_source(remote, source)))
    owner.stop()
    made: list[Any] = []

    def ack_all() -> None:
        with suppress(qflow.BrokerClosed):
            for delivery in deliveries:
                delivery.ack()
                made.append(delivery)

    acking = threading.Thread(target=ack_all)
    acking.start()
    link: Any = remote._connection._channel
    until(lambda: link._waking)
    closing = threading.Thread(target=remote.close)
    closing.start()
    acking.join(PATIENCE_S)
    owner.go_on()
    closing.join(PATIENCE_S)
    assert left_of(owner, source) == MESSAGES - len(made)


def test_acks_of_tasks_are_heard_that_were_made_before_the_connection_is_closed(
    owner: Owner, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of threads; where one that waits to be sent is told of the end."""
    monkeypatch.setattr(tasks, "CLOSE_S", PATIENCE_S)

    async def scenario() -> None:
        async with joining(DOOR, qflow.aio.AsyncBroker(owner.broker)) as broker:
            one = await told(open_source(broker, source))
            batches = [await one.get_many(1000, 0) for _ in range(-(-MESSAGES // 1000))]
            owner.stop()
            made: list[Any] = []

            async def ack_all() -> None:
                with suppress(qflow.BrokerClosed):
                    for batch in batches:
                        for delivery in batch:
                            await delivery.ack()
                            made.append(delivery)

            acking = asyncio.ensure_future(ack_all())
            link: Any = broker._connection
            await event_loop.until(lambda: acking.done() or not link._writable.is_set())
            closing = asyncio.ensure_future(broker.close())
            await acking
            owner.go_on()
            await closing
            assert left_of(owner, source) == MESSAGES - len(made)

    run(scenario())
