"""Consumers whose leases end while they are at work, in the owner and at its door."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from doors import event_loop
from drivers import DOOR, OWNER, joining
from qflow.opening import with_door
from unit.clocks import Clock, open_still, until

MESSAGES = 10


@pytest.fixture
def clock() -> Clock:
    """Time that stands still."""
    return Clock()


@pytest.fixture
def owner(spool: Path, clock: Clock) -> Iterator[qflow.Broker]:
    """The owner of a queue with some messages, whose leases end after 10 s."""
    with open_still(spool, clock) as broker:
        with_door(broker)
        broker.declare_queue("jobs", ack_timeout_s=10).put_many([b"%d" % number for number in range(MESSAGES)])
        yield broker
        assert broker.check() == []


class Work:
    """A callback; the leases end while it works on the first message that it is given."""

    def __init__(self, owner: qflow.Broker, clock: Clock) -> None:
        self.queue = owner.queue("jobs")
        self.clock = clock
        self.calls: list[bytes] = []

    def do(self, body: bytes) -> None:
        self.calls.append(body)
        if len(self.calls) == 1:
            self.clock.advance(11)
            inside.tick(self.queue)

    def check(self) -> None:
        """The first message was given again, and no other."""
        assert sorted(self.calls) == sorted([b"0", *(b"%d" % number for number in range(MESSAGES))])


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_consumer_calls_back_for_none_that_it_does_not_hold_any_more(
    owner: qflow.Broker, clock: Clock, access: str
) -> None:
    """All that it had acquired and not handed out went back, and comes again."""
    work = Work(owner, clock)
    opened = nullcontext(owner) if access == OWNER else qflow.connect(owner.path)
    with opened as broker, broker.queue("jobs").consume(lambda delivery: work.do(delivery.body)):
        until(lambda: not len(work.queue))
    work.check()


@pytest.mark.parametrize("access", [OWNER, DOOR])
def test_a_consumer_of_tasks_calls_back_for_none_that_it_does_not_hold_any_more(
    owner: qflow.Broker, clock: Clock, access: str
) -> None:
    """As one of threads."""
    work = Work(owner, clock)

    async def take(delivery: qflow.aio.AsyncDelivery) -> None:
        work.do(delivery.body)

    async def scenario() -> None:
        async with joining(access, qflow.aio.AsyncBroker(owner)) as broker, broker.queue("jobs").consume(take):
            await event_loop.until(lambda: not len(work.queue))

    event_loop.run(scenario())
    work.check()


def test_a_batch_whose_lease_has_ended_is_settled(owner: qflow.Broker, clock: Clock) -> None:
    """Also what was not asked for; one that was settled twice, by its holder, leaves the others."""
    with qflow.connect(owner.path) as remote:
        queue: Any = remote.queue("jobs")
        batch = queue.get_many(5)
        batch[0].ack()
        with pytest.raises(qflow.AlreadySettled):
            batch[0].ack()
        batch[1].ack()
        clock.advance(11)
        inside.tick(owner.queue("jobs"))
        assert batch.left_count == 3
        with pytest.raises(qflow.AlreadySettled):
            batch[2].ack()
        assert batch.left_count == 0
        assert len(owner.queue("jobs")) == MESSAGES - 2
