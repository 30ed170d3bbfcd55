"""What callbacks of a connection for threads do to it, of futures and of events: they exit, wait, and take their time."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

import qflow
from door_raw import until
from qflow import Event, EventKind, listeners
from qflow.remote.client import broker, lone
from remote.test_callers import ASK, Owner, by_hand  # noqa: F401  (a fixture)

PATIENCE_S = 30


def tell(owner: qflow.Broker, detail: str) -> None:
    """Have an event happen."""
    owner.engine.listeners.tell(EventKind.LIMIT_REACHED, "jobs", detail)


def test_a_callback_of_a_future_that_exits_leaves_the_next_ones_resolved(by_hand: Owner) -> None:  # noqa: F811
    """`SystemExit` is none of the errors that futures log themselves."""
    one, other = (by_hand.connection.submit(ASK) for _ in range(2))
    one.add_done_callback(lambda _: sys.exit())  # nothing is answered yet: it is called by who resolves the future
    while len(by_hand.numbers) < 2:
        by_hand.take()
    for number in by_hand.numbers:
        by_hand.answer(number)
    assert other.result(PATIENCE_S) == by_hand.numbers[1]


def test_a_callback_of_an_event_that_exits_is_told_the_next_ones(
    owner: qflow.Broker, remote: qflow.RemoteBroker
) -> None:
    """And its connection goes on."""
    seen: list[str] = []

    def leave(event: Event) -> None:
        seen.append(event.detail)
        sys.exit()

    remote.on_event(leave)
    for detail in ("one", "two"):
        tell(owner, detail)
    until(lambda: seen == ["one", "two"])
    assert remote.declare_queue("jobs").submit(b"x").result(PATIENCE_S) == 0


def test_a_callback_of_an_event_may_wait_for_a_future(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """As beside the owner; and futures of others do not wait for it."""
    queue = remote.declare_queue("jobs")
    got: list[Any] = []
    go_on = threading.Event()

    def put(event: Event) -> None:
        go_on.wait(PATIENCE_S)
        got.append(queue.submit(b"x").result(PATIENCE_S))

    remote.on_event(put)
    tell(owner, "one")
    assert queue.submit(b"y").result(PATIENCE_S) == 0
    go_on.set()
    until(lambda: got == [1])


def test_of_events_that_wait_for_their_callbacks_the_newest_are_kept(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the owner keeps."""
    monkeypatch.setattr(listeners, "EVENTS_KEPT", 10)
    remote._events = broker.Events(remote._connection)
    seen: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        seen.append(event.detail)
        begun.set()
        go_on.wait(PATIENCE_S)

    remote.on_event(wait)
    tell(owner, "first")
    assert begun.wait(PATIENCE_S)
    told: list[Any] = []
    remote._connection._link.notices.append(told.append)
    for number in range(100):
        tell(owner, str(number))
    until(lambda: len(told) == 100)
    go_on.set()
    until(lambda: len(seen) == 11)
    assert seen == ["first", *map(str, range(90, 100))]


@pytest.mark.parametrize("is_heard", [False, True])
def test_an_interrupted_on_event_leaves_later_ones_told(
    owner: qflow.Broker, remote: qflow.RemoteBroker, monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    """Before the owner has heard of it, or after; and its own callback is not called."""
    call = remote._connection.call
    seen: list[str] = []

    def strike(*arguments: Any) -> None:
        if is_heard:
            call(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote._connection, "call", strike)
        with pytest.raises(KeyboardInterrupt):
            remote.on_event(lambda event: seen.append("of an interrupted one"))
    remote.on_event(lambda event: seen.append(event.detail))
    tell(owner, "one")
    until(lambda: seen)
    remote.queues()
    assert seen == ["one"]


def test_events_that_came_before_the_end_are_told(owner: qflow.Broker, remote: qflow.RemoteBroker) -> None:
    """And the thread ends then."""
    seen: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def wait(event: Event) -> None:
        begun.set()
        go_on.wait(PATIENCE_S)
        seen.append(event.detail)

    remote.on_event(wait)
    told: list[Any] = []
    remote._connection._link.notices.append(told.append)
    for detail in ("one", "two"):
        tell(owner, detail)
    until(lambda: begun.is_set() and len(told) == 2)
    remote.close()
    go_on.set()
    until(lambda: not any(thread.name == "qflow-remote-events" for thread in threading.enumerate()))
    assert seen == ["one", "two"]
    with pytest.raises(qflow.BrokerClosed):
        remote.on_event(wait)


def test_futures_do_not_wait_while_a_connection_for_lone_puts_is_made(
    by_hand: Owner,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner may let that wait for long."""
    monkeypatch.setattr(lone, "SOON", 1)
    making, made = threading.Event(), threading.Event()

    def make() -> None:
        making.set()
        made.wait(PATIENCE_S)

    by_hand.connection.open_lone(make)
    putting = threading.Thread(target=by_hand.connection.put, args=[ASK.encoded()])
    putting.start()
    assert making.wait(PATIENCE_S)
    future: Future[Any] = by_hand.connection.submit(ASK)
    while len(by_hand.numbers) < 2:
        by_hand.take()
    for number in by_hand.numbers:
        by_hand.answer(number)
    try:
        assert future.result(PATIENCE_S / 2) in by_hand.numbers
    finally:
        made.set()
    putting.join()
