"""What a client holds, by tag: taken, held again, and looked at for what it has held for too long."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qflow.amqp.errors import AmqpError
from qflow.amqp.server.holding import Held, Holding


class Queue:
    """A queue, as far as the tags know it; it counts how often it was asked."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.asked = 0

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
