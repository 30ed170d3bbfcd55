"""Dead letters where the memory is full: what is rejected has room once those before it have left, and comes once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import inside
import qflow
from qflow.queues import dead_letters as module
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock

Open = Callable[..., qflow.Broker]
CAPACITY = 2**20
SIZE = 30_000
MESSAGES = 3 * CAPACITY // SIZE


def spilled(broker: qflow.Broker) -> Any:
    """Return a queue with dead letters that has three times what memory takes."""
    queue = broker.declare_queue("q", dead_letter="dead")
    for number in range(MESSAGES):
        queue.put(number.to_bytes(4) + bytes(SIZE))
    return queue


def taken(queue: Any, most: int) -> list[Any]:
    """Get as many messages as there is room for, or fewer."""
    held: list[Any] = []
    with suppress(qflow.QueueEmpty):
        while len(held) < most:
            held.append(queue.get(0))
    return held


@pytest.mark.two_drivers
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("most", [1, MESSAGES], ids=["one at a time", "all that fits"])
def test_what_is_rejected_comes_once_where_the_memory_is_full(open_spool: Open, threads: int, most: int) -> None:
    """One by one, each before the commit of the last one holds."""
    broker = open_spool(capacity_bytes=CAPACITY)
    queue = spilled(broker)
    seen: list[int] = []

    def reject() -> None:
        while queue.stats().messages:
            for delivery in taken(queue, most):
                seen.append(int.from_bytes(delivery.body[:4]))
                delivery.nack(requeue=False)

    rejecting = [threading.Thread(target=reject) for _ in range(threads)]
    for one in rejecting:
        one.start()
    for one in rejecting:
        one.join(LONG_S)
    assert sorted(seen) == list(range(MESSAGES))
    assert queue.stats().messages == 0
    dead = broker.queue("dead")
    for _ in range(MESSAGES):
        dead.get(LONG_S).ack()


def test_what_expired_without_room_does_not_have_others_delivered_again(open_at: Any, clock: Clock) -> None:
    """For a while nothing that expired is tried again; what is rejected is."""
    broker = open_at(capacity_bytes=CAPACITY)
    queue = broker.declare_queue("q", dead_letter="dead")
    for _ in range(3):
        queue.put(b"x")
    held = queue.get(0)
    parts_of(queue).exits._bury_again_at = clock.monotonic() + LONG_S
    held.nack(requeue=False)
    assert queue.stats().delayed_messages == 0
    assert broker.queue("dead").get(LONG_S).headers["dead_letter_reason"] == "rejected"


@pytest.mark.parametrize("how", ["tick", "get", "nack"])
def test_large_ones_leave_some_at_a_time(
    open_at: Open, clock: Clock, durable: bool, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They are copies: where all of a queue's memory left with one commit, they took as much again."""
    monkeypatch.setattr(module, "LARGE_BYTES", 1_000)
    broker = open_at()
    dead = broker.declare_queue("dead", durable=durable)
    queue: Any = broker.declare_queue("q", durable=durable, dead_letter="dead", ttl_s=None if how == "nack" else 1)
    sequences = queue.put_many([b"%d" % number * 300 for number in range(10)])
    exits = parts_of(queue).exits
    bury, carried = exits.bury, []

    def count(source: Any, segments: Any, *others: Any) -> bool:
        carried.append((sum(len(part.records) for part in segments), len(dead)))
        return bury(source, segments, *others)

    monkeypatch.setattr(exits, "bury", count)
    clock.advance(2)
    if how == "tick":
        inside.tick(queue)
    elif how == "get":
        assert not queue.get_many(10, timeout_s=0)
    else:
        queue.get_many(10).nack(requeue=False)
    broker.engine.log.drain()
    assert carried == [(4, 0), (4, 4), (2, 8)]
    assert [letter.headers["dead_letter_sequence"] for letter in dead.get_many(10)] == [*sequences]
    assert broker.check() == []


def test_of_large_ones_that_find_no_room_the_rest_waits_too(
    open_at: Open, clock: Clock, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would come in another order."""
    monkeypatch.setattr(module, "LARGE_BYTES", 1_000)
    broker = open_at()
    dead = broker.declare_queue("dead", durable=durable)
    queue: Any = broker.declare_queue("q", durable=durable, dead_letter="dead", ttl_s=1)
    sequences = queue.put_many([b"%d" % number * 300 for number in range(10)])
    exits = parts_of(queue).exits
    bury, tries = exits.bury, iter([True, False])
    monkeypatch.setattr(exits, "bury", lambda *letters: next(tries, True) and bury(*letters))
    clock.advance(2)
    inside.tick(queue)
    broker.engine.log.drain()
    assert (len(queue), len(dead)) == (6, 4)
    assert broker.check() == []
    clock.advance(1)
    inside.tick(queue)
    broker.engine.log.drain()
    assert [letter.headers["dead_letter_sequence"] for letter in dead.get_many(10)] == [*sequences]
