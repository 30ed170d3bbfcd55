"""What a client holds, by tag: taken, held again, and looked at for what it has held for too long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doors.event_loop import run
from qflow.amqp.errors import AmqpError
from qflow.amqp.server.holding import SETTLED_AT_ONCE, Held, Holding
from qflow.errors import BrokerClosed


class Queue:
    """A queue, as far as the tags know it; it counts how often it was asked, and is its own store."""

    def __init__(self, timeout_s: float, room: int = 10**9) -> None:
        self._timeout_s = timeout_s
        self.asked = 0
        self.store = self
        self.settled: list[Any] = []
        self._room = room
        """How many messages it settles before its broker is closed."""

    def settle(self, deliveries: list[Any]) -> None:
        if len(self.settled) >= self._room:
            raise BrokerClosed("the broker is closed")
        self.settled += deliveries

    @property
    def consumer_timeout_s(self) -> float:
        self.asked += 1
        return self._timeout_s


def held(queue: Queue, since_s: float) -> Any:
    return Held(None, queue, None, since_s)  # type: ignore[arg-type]  # neither is used


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "no ack", "take", "multiple", "all", "restore", "pass"]), st.integers(0, 12))
)


@given(STEPS)
def test_the_tags_are_those_of_a_list(steps: list[tuple[str, int]]) -> None:
    """Whatever is taken and held again: what is held for too long is found, and nothing else is."""
    queues = [Queue(2.0), Queue(5.0), Queue(100.0)]
    holding, model, away, now = Holding(), dict[int, Held](), dict[int, Held](), 0.0
    for what, number in steps:
        if what == "add":
            one = held(queues[number % 3], now)
            holding.add(one)
            model[holding.last_tag] = one
        elif what == "no ack":
            holding.add(None)
        elif what == "pass":
            now += number / 4
        elif what == "restore":
            holding.restore(away)
            model = dict(sorted({**model, **away}.items()))
            away = {}
        else:
            tag, multiple = 0 if what == "all" else number, what != "take"
            expected = {
                one: found
                for one, found in model.items()
                if one == tag or (multiple and (not tag or (one < tag <= holding.last_tag)))
            }
            try:
                taken = holding.take(tag, multiple)
            except AmqpError:
                assert not expected
                taken = {}
            assert taken == expected
            away |= taken
            model = {one: found for one, found in model.items() if one not in taken}
        assert holding.held == model
        assert list(holding.held) == sorted(model)
        overdue = {
            (tag, one.hosted.consumer_timeout_s)
            for tag, one in model.items()
            if now - one.since_s >= one.hosted.consumer_timeout_s
        }
        found = holding.overdue(now)
        assert (found in overdue) if overdue else found is None


def test_of_a_queue_only_what_is_held_for_longest_is_looked_at() -> None:
    """A hundred thousand messages that a client holds cost no more than one."""
    queue, holding = Queue(60.0), Holding()
    for _ in range(100_000):
        holding.add(held(queue, 0.0))
    assert holding.overdue(30.0) is None
    assert queue.asked == 1
    assert holding.overdue(60.0) == (1, 60.0)


def holding_many(queue: Queue) -> tuple[Holding, dict[int, Held], list[Held]]:
    """Return a holding of more than is settled at once, all of it taken, and a list of those that have left."""
    holding = Holding()
    for number in range(3 * SETTLED_AT_ONCE):
        holding.add(Held(SimpleNamespace(delivery=number), queue, None, 0.0))  # type: ignore[arg-type]
    return holding, holding.take(0, True), []


def test_what_was_acked_is_settled_though_its_client_goes_meanwhile() -> None:
    """None of it comes again."""

    async def scenario() -> None:
        queue = Queue(1.0)
        holding, taken, left = holding_many(queue)
        settling = asyncio.create_task(holding.settle(taken, left.append))
        while not queue.settled:
            await asyncio.sleep(0)
        assert len(queue.settled) == SETTLED_AT_ONCE
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        assert queue.settled == list(range(3 * SETTLED_AT_ONCE))
        assert len(left) == 3 * SETTLED_AT_ONCE
        assert len(holding) == 0

    run(scenario())


def test_what_an_ack_fails_for_is_held_again() -> None:
    """So it goes back when the channel ends."""

    async def scenario() -> None:
        holding, taken, left = holding_many(Queue(1.0, room=SETTLED_AT_ONCE))
        with pytest.raises(BrokerClosed):
            await holding.settle(taken, left.append)
        assert len(left) == SETTLED_AT_ONCE
        assert list(holding.held) == list(range(SETTLED_AT_ONCE + 1, 3 * SETTLED_AT_ONCE + 1))

    run(scenario())
