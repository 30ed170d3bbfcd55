"""Acks that nobody waits for, while the log stands still: how many are held, on both sides of the door, and beside it."""

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
from qflow.opening import with_door
from qflow.remote.client import tasks, threads
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
    monkeypatch.setattr(threads, "MOST_UNSENT_BYTES", MOST_UNSENT_BYTES)


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


def test_threads_at_the_door_wait_when_the_owner_reads_no_more(owner: Owner, source: str, spool: Path) -> None:
    """Each side holds a bounded number of bytes, and of requests; then all of it is settled."""
    with qflow.connect(spool) as remote:
        one = open_source(remote, source)
        deliveries = list(held(one))
        owner.stop()
        acking = threading.Thread(target=lambda: [delivery.ack() for delivery in deliveries])
        acking.start()
        link: Any = remote._connection
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
    link: Any = remote._connection
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
    monkeypatch.setattr(threads, "CLOSE_S", PATIENCE_S)
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
    link: Any = remote._connection
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
