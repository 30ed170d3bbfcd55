"""A disk that is full most of the time: acks are always possible, room comes back, and every reopening finds all."""

from __future__ import annotations

import random
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import inside
import qflow
from faults.test_full_disk import disk_of, hold

NAMES = ("a", "b", "c")
SIZES = st.sampled_from([300, 1_000, 3_000, 9_000, 40_000])


class FullDisk(RuleBasedStateMachine):
    """Queues on a tmpfs of 16 MiB, most of which is ballast; what was confirmed and not acked is known by its body."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.broker: qflow.Broker | None = None
        self.waiting: dict[str, set[bytes]] = {}
        self.held: dict[str, list[qflow.Delivery]] = {}
        self.number = 0

    @initialize(free=st.integers(0, 4))
    def begin(self, free: int) -> None:
        directory = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        disk = self.stack.enter_context(disk_of("16m", directory / "disk"))
        self.spool = disk / "spool"
        self.broker = qflow.open(self.spool)
        self.declare("a")
        subprocess.run(["fallocate", "-l", f"{11 - free}M", disk / "ballast"], check=True)

    def attempt(self, work: Callable[[], object]) -> bool:
        """Do what may be refused for lack of room; return whether it was done."""
        try:
            work()
        except qflow.DiskFull:
            return False
        return True

    def body(self, size: int) -> bytes:
        self.number += 1
        return b"%08d" % self.number + bytes(size)

    @rule(name=st.sampled_from(NAMES))
    def declare(self, name: str) -> None:
        if self.attempt(lambda: self.broker.declare_queue(name)):
            self.waiting.setdefault(name, set())
            self.held.setdefault(name, [])
        assert sorted(self.waiting) == self.broker.queues()

    @rule(name=st.sampled_from(NAMES))
    def bind(self, name: str) -> None:
        if name in self.waiting:
            self.attempt(lambda: self.broker.bind(name, f"t/{self.number % 50}"))

    @rule(name=st.sampled_from(NAMES), size=SIZES, count=st.integers(1, 60))
    def put(self, name: str, size: int, count: int) -> None:
        if name in self.waiting:
            bodies = [self.body(size) for _ in range(count)]
            if self.attempt(lambda: self.broker.queue(name).put_many(bodies)):
                self.waiting[name].update(bodies)

    @rule(name=st.sampled_from(NAMES), size=SIZES)
    def fill(self, name: str, size: int) -> None:
        """Put until there is no room for one more."""
        if name in self.waiting:
            queue = self.broker.queue(name)
            while True:
                bodies = [self.body(size) for _ in range(40)]
                if not self.attempt(lambda: queue.put_many(bodies)):  # noqa: B023
                    break
                self.waiting[name].update(bodies)

    @rule(size=SIZES, topic=st.integers(0, 49))
    def publish(self, size: int, topic: int) -> None:
        body = self.body(size)
        found: list[qflow.PublishResult] = []
        if self.attempt(lambda: found.append(self.broker.publish(f"t/{topic}", body))):
            for name in found[0].sequences:
                self.waiting[name].add(body)

    @rule(name=st.sampled_from(NAMES))
    def get(self, name: str) -> None:
        if name in self.waiting:
            queue = self.broker.queue(name)
            self.held[name] += [queue.get(0) for _ in range(len(queue) - queue.stats().acquired_messages)]

    @rule(
        name=st.sampled_from(NAMES),
        chance=st.randoms(use_true_random=False),
        share=st.floats(0.05, 1),
        last=st.booleans(),
    )
    def ack(self, name: str, chance: random.Random, share: float, last: bool) -> None:
        """Ack scattered messages in one commit, or each in its own; all of that is confirmed, whatever the disk."""
        held = self.held.get(name, [])
        chance.shuffle(held)
        for _ in range(int(share * len(held))):
            delivery = held.pop()
            delivery.ack(wait=not last and len(held) % 50 == 0)
            self.waiting[name].discard(delivery.body)
        if last and held:
            delivery = held.pop()
            delivery.ack(wait=True)
            self.waiting[name].discard(delivery.body)

    @rule(name=st.sampled_from(NAMES), share=st.floats(0, 1))
    def nack(self, name: str, share: float) -> None:
        held = self.held.get(name, [])
        for _ in range(int(share * len(held))):
            held.pop().nack()

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        if name in self.waiting and self.attempt(lambda: self.broker.delete_queue(name)):
            del self.waiting[name], self.held[name]

    @rule()
    def reopen(self) -> None:
        self.broker.close()
        self.broker = qflow.open(self.spool)
        self.held = {name: [] for name in self.waiting}
        assert self.broker.recovery.problems == ()
        assert self.broker.queues() == sorted(self.waiting)
        for name, bodies in self.waiting.items():
            assert len(self.broker.queue(name)) == len(bodies)

    @invariant()
    def holds(self) -> None:
        if self.broker is not None:
            assert self.broker.check() == []

    def teardown(self) -> None:
        try:
            if self.broker is not None:
                self.finish()
        finally:
            if self.broker is not None:
                self.broker.close()
            self.stack.close()

    def finish(self) -> None:
        """Everything confirmed is there, can be acked out of order, and then there is room again."""
        self.reopen()
        for name, bodies in self.waiting.items():
            held = hold(self.broker.queue(name))
            assert {delivery.body for delivery in held} == bodies
            random.Random(1).shuffle(held)
            for delivery in held[1:]:
                delivery.ack()
            for delivery in held[:1]:
                delivery.ack(wait=True)
        self.broker.engine.log.drain()
        with inside.paused(self.broker):
            while (
                inside.upkeep(self.broker).remove_settled()
                | inside.upkeep(self.broker).remove_deleted()
                | inside.upkeep(self.broker).hollow()
            ):
                pass
        queue = self.broker.declare_queue("a")
        queue.put_many([bytes(1_000)] * 100)  # the first that comes, with no commit in between


FullDisk = seed(7)(FullDisk)
TestFullDisk = FullDisk.TestCase
TestFullDisk.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
