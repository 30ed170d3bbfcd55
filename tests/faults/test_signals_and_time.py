"""Signals that come as the time of a wait is over: the wait ends all the same."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import qflow

Open = Callable[..., qflow.Broker]
WAIT_S = 0.002
ROUNDS = 60
PATIENCE_S = 30


class Late(BaseException):
    """A wait has no end."""


@pytest.fixture
def alarms() -> Iterator[list[float]]:
    """Moments at which a handler has run that takes longer than a wait; the one after a long time ends the test."""
    rung: list[float] = []
    last = time.monotonic() + PATIENCE_S

    def handle(*_: object) -> None:
        if time.monotonic() > last:
            raise Late
        rung.append(time.monotonic())
        while time.monotonic() < rung[-1] + WAIT_S:
            """It takes its time."""
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

    before = signal.signal(signal.SIGALRM, handle)
    yield rung
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first: a handler that runs just now sets the timer again
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["get", "put at a limit", "subscription"])
def test_a_wait_ends_when_a_signal_is_handled_as_its_time_is_over(
    open_spool: Open, alarms: list[float], what: str
) -> None:
    """CPython 3.11 computes what is left of some waits after a signal, and waits for good where that is negative."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False, limit_messages=1)
    full = broker.declare_queue("full", durable=False, limit_messages=1)
    full.put(b"x")
    broker.declare_stream("s", topics=["#"])
    subscription = broker.subscribe("s", name="d")
    wait = {
        "get": lambda: queue.get(timeout_s=WAIT_S),
        "put at a limit": lambda: full.put(b"x", timeout_s=WAIT_S),
        "subscription": lambda: subscription.get(timeout_s=WAIT_S),
    }[what]
    for number in range(ROUNDS):
        signal.setitimer(signal.ITIMER_REAL, WAIT_S * (1 + number / ROUNDS) / 2)
        with suppress(qflow.QueueEmpty, qflow.QueueFull):
            wait()
    assert alarms
