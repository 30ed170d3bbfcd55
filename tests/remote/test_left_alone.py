"""Connections that nobody closes: they end when nobody has them any more, or anything that came of them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import qflow
from door_raw import until
from faults.seams import PATIENCE_S

USES: dict[str, Callable[[qflow.RemoteBroker], Any]] = {
    "queue": lambda broker: broker.queue("q"),
    "delivery": lambda broker: broker.queue("q").get(0),
    "batch": lambda broker: broker.queue("q").get_many(10, 0),
    "browsing": lambda broker: broker.queue("q").browse(),
    "consumer": lambda broker: broker.queue("empty").consume(print),
    "stream": lambda broker: broker.stream("s"),
    "subscription": lambda broker: broker.subscribe("s"),
    "loop": lambda broker: iter(broker.subscribe("s")),
    "transaction": lambda broker: broker.transaction(),
    "events": lambda broker: broker.on_event(print),
}


@pytest.fixture(autouse=True)
def filled(owner: qflow.Broker) -> None:
    """A queue with a message, an empty one, and a stream."""
    owner.declare_queue("q").put(b"1")
    owner.declare_queue("empty")
    owner.declare_stream("s", topics=["t"])


def let_go_of(spool: Path, use: Callable[[qflow.RemoteBroker], object]) -> threading.Thread:
    """Use a connection that nobody has when this returns; return its reader."""
    broker = qflow.connect(spool)
    use(broker)
    return broker._connection._channel._reader


def wait_for_end(reader: threading.Thread) -> None:
    """Return when a reader has ended."""
    gc.collect()
    reader.join(PATIENCE_S)
    assert not reader.is_alive()


def test_a_connection_that_nobody_has_ends_and_gives_back_what_it_held(owner: qflow.Broker, spool: Path) -> None:
    """Its reader kept it, and what it had taken was held until the process ended."""
    wait_for_end(let_go_of(spool, lambda broker: broker.queue("q").get(0)))
    assert owner.queue("q").get(PATIENCE_S).redelivered


def test_one_that_was_closed_is_let_go_of_once_more(spool: Path) -> None:
    """And nothing comes of that."""
    wait_for_end(let_go_of(spool, qflow.RemoteBroker.close))


def test_what_it_was_told_last_is_heard(owner: qflow.Broker, spool: Path) -> None:
    """Acks that nobody waited for, as where it is closed."""
    queue = owner.queue("q")
    queue.put_many([b"%d" % number for number in range(500)])

    def ack_each(broker: qflow.RemoteBroker) -> None:
        for delivery in broker.queue("q").get_many(1000, 0):
            delivery.ack()

    wait_for_end(let_go_of(spool, ack_each))
    until(lambda: not queue.stats().acquired_messages)
    assert len(queue) == 0


def test_what_is_submitted_is_answered_before_it_ends(owner: qflow.Broker, spool: Path) -> None:
    """The future alone is kept, and waits for room."""
    full = owner.declare_queue("full", limit_messages=1)
    full.put(b"1")
    futures: list[Future[int | None]] = []
    reader = let_go_of(spool, lambda broker: futures.append(broker.queue("full").submit(b"2")))
    gc.collect()
    full.get(0).ack()
    assert futures[0].result(PATIENCE_S) == 1
    wait_for_end(reader)


@pytest.mark.parametrize("use", USES)
def test_a_connection_stays_while_anything_that_came_of_it_is_used(use: str, spool: Path) -> None:
    """Whoever has that has no other way to it."""
    broker = qflow.connect(spool)
    connection = weakref.ref(broker._connection)
    kept = USES[use](broker)
    del broker
    gc.collect()
    found = connection()
    assert found is not None
    found.check_open()
    found.close()
    del kept
