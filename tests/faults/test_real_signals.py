"""Real signals at random microseconds, in the main thread, while other threads put, get and ack."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import qflow
from faults.seams import PATIENCE_S, in_thread

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
STRIKES = 150


class Alarm:
    """Raises KeyboardInterrupt in the main thread a random moment after it was armed, once."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.armed = False

    def ring(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def arm(self, most_s: float) -> None:
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-6, most_s))


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    print(f"seed {SEED} (set QFLOW_SEED)")
    made = Alarm(random.Random(SEED))
    before = signal.signal(signal.SIGALRM, made.ring)
    yield made
    made.armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Traffic:
    """Puts, gets and acks of one thread, and what it knows of them for certain."""

    def __init__(self, queue: qflow.Queue, name: str) -> None:
        self.queue = queue
        self.name = name
        self.number = 0
        self.tried: set[bytes] = set()
        self.confirmed: set[bytes] = set()
        self.received: list[bytes] = []
        self.acked: set[bytes] = set()
        self.chance = random.Random(f"{SEED} {name}")

    def step(self) -> None:
        kind = self.chance.random()
        queue = self.queue
        if kind < 0.35:
            body = self.fresh()
            queue.put(body)
            self.confirmed.add(body)
        elif kind < 0.5:
            bodies = [self.fresh() for _ in range(4)]
            queue.put_many(bodies)
            self.confirmed.update(bodies)
        elif kind < 0.6:
            body = self.fresh()
            queue.submit(body).result()
            self.confirmed.add(body)
        elif kind < 0.9:
            for delivery in queue.get_many(self.chance.randrange(1, 4), timeout_s=0):
                self.received.append(delivery.body)
                if self.chance.random() < 0.2:
                    delivery.nack()
                else:
                    delivery.ack(wait=self.chance.random() < 0.3)
                    self.acked.add(delivery.body)
        else:
            with queue.get(timeout_s=PATIENCE_S) as delivery:
                self.received.append(delivery.body)

    def fresh(self) -> bytes:
        self.number += 1
        body = f"{self.name}-{self.number}-".encode() * self.chance.randrange(1, 20)
        self.tried.add(body)
        return body


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
@pytest.mark.parametrize("capacity", [2_000, 200_000])
def test_ctrl_c_at_random_moments_loses_nothing_and_hangs_nobody(durable, capacity, spool, alarm):
    """Edge 26: 150 interrupts of the main thread in mid-work; afterwards the check is clean and all confirmed arrive."""
    broker = qflow.open(spool)
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=capacity)
    mine = Traffic(queue, "main")
    others = [Traffic(queue, f"other{number}") for number in range(2)]
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(traffic: Traffic) -> None:
        try:
            while not stop.is_set():
                traffic.step()
                if len(queue) > 300:
                    queue.get_many(100, timeout_s=0).nack()
                    for delivery in queue.get_many(100, timeout_s=0):
                        traffic.received.append(delivery.body)
                        delivery.ack()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(traffic,), daemon=True) for traffic in others]
    for thread in threads:
        thread.start()
    for _ in range(STRIKES):
        try:
            alarm.arm(0.003 if durable else 0.0005)
            while True:
                mine.step()
        except KeyboardInterrupt:
            pass
    stop.set()
    queue.put(b"wake")
    queue.put_many([b"wake"] * 3)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"
    assert failures == []
    assert [problem for problem in in_thread(broker.check) if "belong to no message" not in problem] == []
    came = {body for traffic in (mine, *others) for body in traffic.received} | {b"wake"}
    leaked = queue.stats().acquired_messages  # acquired by a call that was struck before it could return them
    in_thread(lambda: take_all(queue, came))
    must = set().union(*(traffic.confirmed for traffic in (mine, *others)))
    tried = set().union(*(traffic.tried for traffic in (mine, *others)))
    assert came <= tried | {b"wake"}
    assert len(must - came) <= leaked
    in_thread(broker.close)
    if durable:
        with qflow.open(spool) as broker:
            queue = broker.queue("q")
            take_all(queue, came)
            assert must <= came
            assert broker.check() == []


def take_all(queue: qflow.Queue, came: set[bytes]) -> None:
    while batch := queue.get_many(50, timeout_s=0):
        came.update(batch.bodies)
        batch.ack()
