"""Signals that come as the time of a wait is over, which ends all the same; or amid steps, which go no further."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import inside
import qflow
from faults.strikes import Struck
from qflow.queues.queue import parts_of
from qflow.queues.spiller import Spiller

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


def put_much(broker: qflow.Broker) -> Callable[[], object]:
    return lambda: broker.queue("q").put_many([bytes(100)] * 4_000)


def alter(broker: qflow.Broker) -> Callable[[], object]:
    return lambda: broker.alter_queue("q", capacity_bytes=20_000)


def declare(broker: qflow.Broker) -> Callable[[], object]:
    return lambda: broker.declare_queue("q", capacity_bytes=20_000)


def put_back(broker: qflow.Broker) -> Callable[[], object]:
    held = broker.queue("q").get_many(10_000)
    broker.alter_queue("q", capacity_bytes=20_000)
    return held.nack


@pytest.mark.parametrize("prepare", [put_much, alter, declare, put_back])
def test_a_handler_of_the_main_thread_waits_for_one_step_of_spilling(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[qflow.Broker], Callable[[], object]]
) -> None:
    """Not for all of it, which takes a minute with a file for each of 200,000 messages: maintenance does the rest."""
    broker = open_spool(capacity_bytes=2**20, spill="files")
    inside.still(broker)
    queue = broker.declare_queue("q", capacity_bytes=200_000)
    queue.put_many([bytes(100)] * 600)
    call = prepare(broker)
    strikes, steps = iter([signal.SIGUSR1]), 0
    spill = Spiller.spill_tail
    main = threading.main_thread().ident
    assert main is not None

    def spill_tail(spiller: Spiller, wanted: int) -> bool:
        nonlocal steps
        steps += 1
        for strike in strikes:
            signal.pthread_kill(main, strike)
        return spill(spiller, wanted)

    def strike(*_: object) -> None:
        raise Struck

    monkeypatch.setattr(Spiller, "spill_tail", spill_tail)
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(Struck):
            call()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps == 1
    stats = queue.stats()
    while parts_of(queue).spiller.spill_left_over():
        pass
    assert queue.stats().resident_bytes <= stats.capacity_bytes < stats.resident_bytes
    found = 0
    while batch := queue.get_many(10_000, timeout_s=0):
        found += len(batch)
        batch.ack()
    assert found == stats.messages
    assert broker.check() == []
