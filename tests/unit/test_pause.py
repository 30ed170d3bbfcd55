"""A queue that is paused: it takes puts and delivers nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import qflow
from unit.clocks import LONG_S, until

pytestmark = pytest.mark.two_drivers
Open = Callable[..., qflow.Broker]


@pytest.mark.parametrize("durable", [True, False])
def test_a_paused_queue_takes_puts_and_delivers_nothing(open_spool: Open, durable: bool) -> None:
    """What is held may be settled; afterwards all of it comes, in order."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=2)
    queue.put(b"0")
    held = queue.get(0)
    queue.pause()
    queue.pause()
    queue.put(b"1")
    queue.put_many([b"2", b"3"])
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    assert len(queue.get_many(5, 0)) == 0
    held.nack()
    until(lambda: queue.stats().acquired_messages == 0)
    stats = queue.stats()
    assert (stats.paused, stats.messages) == (True, 4)
    queue.resume()
    queue.resume()
    assert queue.get_many(9, 0).bodies == [b"0", b"1", b"2", b"3"]
    assert not queue.stats().paused


def test_who_waits_at_a_paused_queue_goes_on_when_it_is_resumed(open_spool: Open) -> None:
    """A consumer that came meanwhile."""
    queue = open_spool().declare_queue("q", durable=False)
    queue.pause()
    queue.put_many([b"x"] * 2)
    got: list[bytes] = []
    done = threading.Event()

    def handle(delivery: qflow.Delivery) -> None:
        got.append(delivery.body)
        if len(got) == 2:
            done.set()

    with queue.consume(handle, prefetch=1):
        until(lambda: queue.stats().consumers_total)
        assert queue.stats().acquired_messages == 0
        queue.resume()
        assert done.wait(LONG_S)


@pytest.mark.owner_only
def test_a_pause_does_not_outlast_the_broker(open_spool: Open) -> None:
    """Whoever has forgotten it gets messages again after a restart; settings may be altered meanwhile."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"x")
    queue.pause()
    broker.alter_queue(queue, limit_messages=10)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    broker.close()
    assert open_spool().queue("q").get(0).body == b"x"
