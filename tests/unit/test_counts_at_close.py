"""What nobody has seen when a broker is closed is not counted as delivered: it might be once too often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import qflow
import qflow.aio
from qflow.memory.waiting import shelter
from qflow.queues import portions, returns
from qflow.queues.deleting import Deleting
from qflow.queues.queue import parts_of
from qflow.queues.redrive import redrive
from qflow.queues.tending import refuse_calls

Open = Callable[..., qflow.Broker]
MANY = 40


def _delivered_now(broker: qflow.Broker) -> list[int]:
    """Return how often messages of a queue were delivered, by one more get of all of them."""
    return [one.delivery_count for one in broker.queue("q").get_many(MANY, 0)]


def test_what_a_get_collects_is_not_counted(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has some from memory, and reads others, as the broker is closed."""
    broker = open_spool(capacity_bytes="1MB")
    queue = broker.declare_queue("q", max_deliveries=1)
    for _ in range(MANY):
        queue.put(bytes(60_000))
    parts = parts_of(queue)
    area = type(parts.spiller.area)
    read, acquired = area.read, []

    def read_late(*arguments: object) -> object:
        acquired.append(queue.stats().acquired_messages)
        refuse_calls(parts, qflow.BrokerClosed)
        return read(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(area, "read", read_late)
        with pytest.raises(qflow.BrokerClosed):
            queue.get_many(MANY, 0)
    assert acquired[0] > 0
    broker.close()
    assert _delivered_now(open_spool(capacity_bytes="100MB")) == [1] * MANY


@pytest.mark.parametrize("handed_out", [0, 1])
def test_what_was_fetched_ahead_is_not_counted(open_spool: Open, handed_out: int) -> None:
    """By an `async for` whose body closes the broker, or is behind its end."""

    async def run() -> None:
        async with qflow.aio.AsyncBroker(open_spool()) as broker:
            queue = await broker.declare_queue("q", max_deliveries=1)
            await queue.put_many([b"%d" % number for number in range(MANY)])
            deliveries = queue.iterate()
            first = await anext(deliveries)
            if not handed_out:
                await first.ack(wait=True)
            await broker.close()
            with pytest.raises(qflow.BrokerClosed):
                await anext(deliveries)

    asyncio.run(run())
    broker = open_spool()
    assert _delivered_now(broker) == [1] * (MANY - 1)
    assert broker.queue("q").stats().dropped_total == handed_out


def test_what_is_given_up_a_portion_at_a_time_is_not_counted(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What of it comes after the end, too."""
    broker = open_spool()
    queue = broker.declare_queue("q", max_deliveries=1)
    queue.put_many([b"%d" % number for number in range(MANY)])
    parts = parts_of(queue)
    monkeypatch.setattr(portions, "MESSAGES", MANY // 4)
    monkeypatch.setattr(returns, "sleep", lambda _: refuse_calls(parts, qflow.BrokerClosed))
    batch = queue.get_many(MANY, 0)
    parts.claims.give_up(batch.held)
    broker.close()
    assert _delivered_now(open_spool()) == [1] * MANY


def test_what_is_being_moved_is_not_counted(open_spool: Open) -> None:
    """It was taken out of its place, and waits for room elsewhere."""
    broker = open_spool()
    queue = broker.declare_queue("q", max_deliveries=1)
    queue.put(b"")
    moving = Deleting(parts_of(queue), 0, moves=True)
    shelter(lambda: moving.step(None, True))
    assert moving.leaving is not None
    broker.close()
    assert _delivered_now(open_spool()) == [1]


def test_what_a_redrive_looked_at_is_not_counted(open_spool: Open) -> None:
    """It holds what stays, and what is to go with its next commit."""
    broker = open_spool()
    broker.declare_queue("q", max_deliveries=1).put_many([b"%d" % number for number in range(MANY)])
    broker.declare_queue("other")

    def revive(record: Any) -> tuple[None, Any]:
        broker.close()
        return None, record

    with pytest.raises(qflow.BrokerClosed):
        redrive(broker, "q", "other", revive=revive)
    assert _delivered_now(open_spool()) == [1] * MANY


def test_what_is_held_goes_back_counted_a_portion_at_a_time(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody who has seen it: what of it comes after the end was delivered all the same."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([b"%d" % number for number in range(MANY)])
    monkeypatch.setattr(portions, "MESSAGES", MANY // 4)
    monkeypatch.setattr(returns, "sleep", lambda _: refuse_calls(parts_of(queue), qflow.BrokerClosed))
    with pytest.raises(qflow.BrokerClosed):
        queue.get_many(MANY, 0).nack()
    broker.close()
    assert _delivered_now(open_spool()) == [2] * MANY
