"""A queue that is deleted while a commit has room in it, or takes messages from it, and waits for room elsewhere."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from doors import event_loop
from drivers import opening_tasks, owner_of
from qflow.queues import registry
from qflow.queues.admission import Admission
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, until

Open = Callable[..., qflow.Broker]


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the end of a queue fail that does not find it quiet at the first look; return how many looks there were."""
    real = registry.settle_down
    made: list[int] = []

    def settle_down(parts: Any, drain: Callable[[], None], _: float) -> None:
        before = len(made)

        def look() -> None:
            assert len(made) == before, "it waits for somebody"
            made.append(1)
            drain()

        real(parts, look, math.inf)

    monkeypatch.setattr(registry, "settle_down", settle_down)
    return made


def declare(broker: qflow.Broker, durable: bool) -> tuple[qflow.Queue, qflow.Queue]:
    """Return two queues that are bound to everything; the second is at its limit."""
    one, two = (broker.declare_queue(name, durable=durable) for name in ("one", "two"))
    broker.alter_queue(two, limit_messages=1)
    two.put(b"1")
    for queue in (one, two):
        broker.bind(queue, "#")
    return one, two


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin some work in a thread; return what waits for it and returns its result, or the error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except qflow.QflowError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(LONG_S)
        return outcome[0]

    return result


@pytest.mark.parametrize("publishes", [1, 2], ids=["fan-out", "batch"])
def test_the_end_of_a_queue_does_not_wait_for_a_publisher_at_the_limit_of_another(
    open_spool: Open, durable: bool, publishes: int, looks: list[int]
) -> None:
    """It gives up what it has, and publishes to the others; calls for any queue would wait with the end."""
    broker = open_spool()
    one, two = declare(broker, durable)
    broker.alter_queue(two, limit_messages=publishes)
    two.put_many([b"1"] * (publishes - 1))
    messages = [("a", b"2"), ("b", b"2")][:publishes]
    result = in_background(lambda: [found.sequences for found in broker.publish_many(messages)])
    until(lambda: parts_of(two).admission.line)
    assert inside.left_behind(one)
    broker.delete_queue("one")
    assert not inside.left_behind(one)
    assert looks == [1]
    for _ in range(publishes):
        two.get(0).ack()
    assert result() == [{"two": publishes + index} for index in range(publishes)]
    assert (inside.left_behind(two), len(two)) == ({}, publishes)


def test_a_transaction_that_waits_has_its_answer_at_once(open_spool: Open, durable: bool) -> None:
    """One of its queues was deleted: nothing of it is done."""
    broker = open_spool()
    _, two = declare(broker, durable)

    def commit() -> None:
        with broker.transaction() as tx:
            tx.put("one", b"2")
            tx.put("two", b"2")

    result = in_background(commit)
    until(lambda: parts_of(two).admission.line)
    broker.delete_queue("one")
    assert result() is qflow.QueueDeleted
    assert (inside.left_behind(two), len(two)) == ({}, 1)


def test_the_end_of_a_queue_does_not_wait_for_what_leaves_it_with_a_commit(
    open_spool: Open, durable: bool, looks: list[int]
) -> None:
    """Its message is gone with it; the put is done when there is room."""
    broker = open_spool()
    one, two = declare(broker, durable)
    one.put(b"0")
    held = one.get(0)

    def commit() -> None:
        with broker.transaction() as tx:
            tx.ack(held)
            tx.put("two", b"2")

    result = in_background(commit)
    until(lambda: parts_of(two).admission.line)
    broker.delete_queue("one")
    assert looks == [1]
    two.get(0).ack()
    assert result() is None
    assert two.get(0).body == b"2"
    inside.upkeep(broker).finish_removing()
    owner = parts_of(one).context.owner
    with broker.engine.log.read() as txn, txn.cursor() as cursor:
        assert not [key for key, _ in cursor if bytes(key)[1:5] == owner.to_bytes(4, "big")]


def test_a_signal_handler_may_delete_a_queue_that_the_call_beneath_it_has_room_in(
    open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call cannot give anything up before the handler is done."""
    broker = open_spool()
    _, two = declare(broker, durable)
    real = Admission.join_line
    handled: list[int] = []

    def handle(*_: object) -> None:
        broker.delete_queue("one")
        two.get(0).ack()
        handled.append(1)

    def join(*arguments: Any) -> None:
        real(*arguments)
        if not handled:
            signal.raise_signal(signal.SIGUSR1)  # its handler runs in the main thread, which waits

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Admission, "join_line", join)
            assert broker.publish("a", b"2").sequences == {"two": 1}
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [1]


@pytest.mark.two_drivers
def test_a_task_gives_up_also_while_its_loop_is_busy(spool: Path, durable: bool, access: str) -> None:
    """The end comes from the loop itself, or takes a turn of it: either way it waits for no task."""

    async def scenario() -> None:
        async with opening_tasks(access, partial(qflow.open, spool)) as broker:
            plain = owner_of(broker).broker
            one, two = declare(plain, durable)
            task = asyncio.create_task(broker.publish("a", b"2"))
            await event_loop.until(lambda: parts_of(two).admission.line)
            assert inside.left_behind(one)
            plain.delete_queue("one")
            assert not inside.left_behind(one)
            two.get(0).ack()
            assert (await task).sequences == {"two": 1}
            declare_again = await broker.declare_queue("one", durable=durable)
            await broker.bind(declare_again, "#")
            task = asyncio.create_task(broker.publish("a", b"3"))
            await event_loop.until(lambda: parts_of(two).admission.line)
            await broker.delete_queue("one")
            async with await broker.queue("two").get() as delivery:
                assert delivery.body == b"2"
            assert (await task).sequences == {"two": 2}
            assert await event_loop.leave_nothing_behind(broker) == [("two", b"3", 1)]

    event_loop.run(scenario())


def test_a_publisher_that_waits_for_the_memory_of_streams_gives_up_too(open_spool: Open, durable: bool) -> None:
    """It has room in a queue, and none in a stream yet."""
    broker = open_spool(capacity_bytes=2**20)
    queue = broker.declare_queue("q", durable=durable)
    queue.put(b"1")
    broker.declare_stream("s", topics=["#"])
    broker.bind(queue, "#")
    room = broker.engine.streams.room
    taken = broker.engine.ledger.free()
    room.reserve(taken)
    result = in_background(lambda: broker.publish("a", bytes(10_000)))
    until(lambda: room._line)
    broker.delete_queue("q")
    room.arrived(taken)
    assert result().sequences == {}
    assert broker.stream("s").stats().messages == 1
