"""A queue through the door against a plain list: random histories of two connections, which also end and come again.

What comes out is what went in, in order and once, unless it was given back, or whoever held it has left; then it is in
its place at once, and counted. An owner that closes gives everything back.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import qflow
import scratch
from unit.clocks import until

bodies = st.integers(0, 700).map(lambda size: bytes([size % 251]) * size)
sides = st.sampled_from([0, 1])


class RemoteMachine(RuleBasedStateMachine):
    """The model: bodies by sequence, how often each was delivered, what waits, and who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="qflow-model-", dir=scratch.in_memory()))
        self.bodies: dict[int, bytes] = {}
        self.delivered: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.held: list[dict[int, Any]] = [{}, {}]
        self.batches: list[list[tuple[list[int], Any]]] = [[], []]

    @initialize(durable=st.booleans())
    def begin(self, durable: bool) -> None:
        self.durable = durable
        self.open()

    def open(self) -> None:
        self.owner = qflow.open(self.directory / "spool")
        self.connections: list[Any] = [None, None]
        self.queues: list[Any] = [None, None]
        for side in (0, 1):
            self.connect(side)

    def connect(self, side: int) -> None:
        self.connections[side] = qflow.connect(self.owner.path)
        self.queues[side] = self.connections[side].declare_queue("q", durable=self.durable)

    def note(self, first: int, batch: list[bytes]) -> None:
        for sequence, body in enumerate(batch, first):
            assert sequence not in self.bodies
            self.bodies[sequence] = body
            self.delivered[sequence] = 0
            self.waiting.add(sequence)

    def take(self, batch: list[Any], most: int) -> list[int]:
        """Note what came: the first ones that wait, each as it was put."""
        sequences = [one.sequence for one in batch]
        assert sequences == sorted(self.waiting)[: len(batch)]
        assert len(batch) == min(most, len(self.waiting))
        for one in batch:
            self.delivered[one.sequence] += 1
            assert (one.body, one.delivery_count) == (self.bodies[one.sequence], self.delivered[one.sequence])
            assert one.redelivered == (one.delivery_count > 1)
        self.waiting -= set(sequences)
        return sequences

    # Steps -------------------------------------------------------------------------------------------------------

    @rule(side=sides, body=bodies)
    def put(self, side: int, body: bytes) -> None:
        self.note(self.queues[side].put(body), [body])

    @rule(side=sides, batch=st.lists(bodies, min_size=1, max_size=12))
    def put_many(self, side: int, batch: list[bytes]) -> None:
        sequences = self.queues[side].put_many(batch)
        assert len(sequences) == len(batch)
        self.note(sequences[0], batch)

    @rule(side=sides, batch=st.lists(bodies, min_size=1, max_size=5))
    def submit(self, side: int, batch: list[bytes]) -> None:
        futures = [self.queues[side].submit(body) for body in batch]
        self.note(futures[0].result(), batch)
        assert [future.result() for future in futures] == list(
            range(futures[0].result(), futures[0].result() + len(batch))
        )

    @rule(side=sides)
    def get(self, side: int) -> None:
        try:
            delivery = self.queues[side].get(timeout_s=0)
        except qflow.QueueEmpty:
            assert not self.waiting
            return
        self.take([delivery], 1)
        self.held[side][delivery.sequence] = delivery

    @rule(side=sides, most=st.integers(1, 10))
    def get_many(self, side: int, most: int) -> None:
        batch = self.queues[side].get_many(most, timeout_s=0)
        sequences = self.take(list(batch), most)
        assert batch.bodies == [self.bodies[sequence] for sequence in sequences] == [one.body for one in batch]
        assert list(batch.sequences) == sequences
        if sequences:
            self.batches[side].append((sequences, batch))

    @rule(side=sides, wait=st.booleans(), gives_back=st.booleans(), data=st.data())
    def settle_one(self, side: int, wait: bool, gives_back: bool, data: st.DataObject) -> None:
        if not self.held[side]:
            return
        sequence = data.draw(st.sampled_from(sorted(self.held[side])))
        delivery = self.held[side].pop(sequence)
        if gives_back:
            delivery.nack()
            self.waiting.add(sequence)
        else:
            delivery.ack(wait=wait)
        for again in (delivery.ack, delivery.nack):
            try:
                again()
            except qflow.AlreadySettled:
                continue
            raise AssertionError("it was settled twice")

    @rule(side=sides, wait=st.booleans(), gives_back=st.booleans(), data=st.data())
    def settle_batch(self, side: int, wait: bool, gives_back: bool, data: st.DataObject) -> None:
        """Some of a batch one by one, and the rest of it together."""
        if not self.batches[side]:
            return
        sequences, batch = self.batches[side].pop(data.draw(st.integers(0, len(self.batches[side]) - 1)))
        apart = data.draw(st.sets(st.sampled_from(range(len(sequences))), max_size=len(sequences) - 1))
        for place in apart:
            batch[place].ack()
        if gives_back:
            batch.nack()
            self.waiting |= {sequence for place, sequence in enumerate(sequences) if place not in apart}
        else:
            batch.ack(wait=wait)

    @rule(side=sides, data=st.data())
    def move(self, side: int, data: st.DataObject) -> None:
        """A transaction that acks one and puts another, or is given up."""
        if not self.held[side]:
            return
        sequence = data.draw(st.sampled_from(sorted(self.held[side])))
        commits = data.draw(st.booleans())
        with self.connections[side].transaction() as tx:
            tx.ack(self.held[side][sequence])
            tx.put("q", b"moved")
            if not commits:
                tx.rollback()
        if commits:
            del self.held[side][sequence]
            self.note(tx.result[0], [b"moved"])

    @rule(side=sides, data=st.data())
    def delete(self, side: int, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.bodies, 10**6]))
        assert self.queues[side].delete(sequence) == (sequence in self.waiting)
        self.waiting.discard(sequence)

    @rule(side=sides)
    def purge(self, side: int) -> None:
        held = sum(map(len, self.held)) + sum(self.left(batches) for batches in self.batches)
        assert self.queues[side].purge() == len(self.waiting) + held
        self.waiting.clear()
        self.held, self.batches = [{}, {}], [[], []]

    @rule(side=sides)
    def leave(self, side: int) -> None:
        """A connection ends: what it held is back, and another begins."""
        self.connections[side].close()
        self.give_back(side)
        held = sum(map(len, self.held)) + sum(self.left(batches) for batches in self.batches)
        until(lambda: self.owner.queue("q").stats().acquired_messages == held)
        self.connect(side)

    @rule()
    def reopen(self) -> None:
        """The owner closes, and opens the spool again."""
        if not self.durable:
            return
        self.owner.close()
        for side in (0, 1):
            try:
                self.queues[side].put(b"")
            except (qflow.BrokerClosed, qflow.InDoubt):
                self.connections[side].close()
                self.give_back(side)
                continue
            raise AssertionError("the owner is closed")
        self.open()

    def give_back(self, side: int) -> None:
        self.waiting |= self.held[side].keys()
        self.waiting |= {sequence for sequences, _ in self.batches[side] for sequence in sequences}
        self.held[side], self.batches[side] = {}, []

    @staticmethod
    def left(batches: list[tuple[list[int], Any]]) -> int:
        return sum(len(sequences) for sequences, _ in batches)

    @invariant()
    def the_length_is_what_is_not_settled(self) -> None:
        """As each connection knows it, once what it sent before is there."""
        if not hasattr(self, "owner"):
            return
        held = sum(map(len, self.held)) + sum(self.left(batches) for batches in self.batches)
        mine = [len(queue) for queue in self.queues]
        assert len(self.queues[0]) == len(self.waiting) + held == mine[1]

    def teardown(self) -> None:
        if hasattr(self, "owner"):
            for connection in self.connections:
                connection.close()
            if not self.owner.closed:
                assert self.owner.check() == []
            self.owner.close()
        shutil.rmtree(self.directory)


TestRemote = RemoteMachine.TestCase
TestRemote.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
