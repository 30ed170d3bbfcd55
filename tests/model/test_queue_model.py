"""A queue against a plain list, through random histories of puts, gets, settles, spills, reopens and crashes.

Invariants I1-I8 and I13-I15 hold after every step: what comes out is what went in, in order, once unless returned or
unconfirmed; memory is within its bounds; ledger, runs, files, rows and blocks agree.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule

import inside
import qflow
from model.spool_machine import SpoolMachine
from qflow.delivery import Delivery
from qflow.memory import run_list
from qflow.memory.chunk import index_charge
from qflow.memory.group import GROUP_BYTES
from qflow.message import BATCH_BYTES, OVERHEAD_BYTES, SINGLE_BYTES
from qflow.queues.queue import parts_of
from qflow.storage.log import append, hollowing
from thorough import TORTURE

CAPACITIES = [0, 1, 200, 1_000, 5_000, 50_000]
LARGEST = 1_800
"""More than the tail block of a lane grows to here."""
MOST_PUT = 12
MOST_ABOVE = max(LARGEST + OVERHEAD_BYTES + GROUP_BYTES, index_charge(1))
"""What stays above the bounds: one message, or one whose place in a schedule's index would take more than it does."""
bodies = st.one_of(st.integers(0, 700), st.just(LARGEST)).map(lambda size: bytes([size % 251]) * size)


class Sent:
    """What the model knows of one message."""

    def __init__(self, body: bytes, durable: bool) -> None:
        self.body = body
        self.durable = durable
        self.returned = 0
        self.doubtful = False


class QueueMachine(SpoolMachine):
    """The model: messages by sequence, and which of them wait, are held, or may or may not come again."""

    def __init__(self) -> None:
        super().__init__()
        self.patch.setattr(append, "TAIL_BYTES", 1_500)  # small blocks, and many of them: a pass has work
        self.patch.setattr(hollowing, "LEAST_GIVEN_BACK", 1)
        self.sent: dict[int, Sent] = {}
        self.waiting: set[int] = set()
        self.held: dict[int, Delivery] = {}
        self.uncertain: set[int] = set()  # acked, and perhaps not confirmed when the crash came
        self.unconfirmed: set[int] = set()
        self.highest = -1

    @initialize(
        capacity=st.sampled_from(CAPACITIES),
        broker_capacity=st.sampled_from([500, 3_000, 100_000]),
        durable=st.booleans(),
        limit=st.sampled_from([None, None, 20]),
        spill=st.sampled_from(["files", "segments", "mapped segments"]),
        scatters=st.booleans(),
    )
    def begin(
        self, capacity: int, broker_capacity: int, durable: bool, limit: int | None, spill: str, scatters: bool
    ) -> None:
        if scatters:
            self.patch.setattr(run_list, "SMALL_RUNS", 2)  # what comes back singly goes to a schedule soon
        self.capacity, self.broker_capacity, self.durable, self.limit = capacity, broker_capacity, durable, limit
        self.spill = {"spill": spill.rsplit(maxsplit=1)[-1], "segment_bytes": "4KiB"}
        self.spill["max_mapped_segments"] = 2 if spill.startswith("mapped") else 0
        self.open()

    def open(self) -> None:
        self.still(qflow.open(self.path, capacity_bytes=self.broker_capacity, journal_bytes="8KiB", **self.spill))
        assert not list((self.path / "spill").iterdir())  # I8
        self.queue = self.broker.declare_queue(
            "q", durable=self.durable, capacity_bytes=self.capacity, limit_messages=self.limit
        )
        self.other = self.broker.declare_queue("other", durable=False)

    def room(self, count: int) -> bool:
        return self.limit is None or len(self.waiting) + len(self.held) + count <= self.limit

    def note(self, sequence: int, body: bytes, durable: bool) -> None:
        assert sequence > self.highest  # I13
        self.highest = sequence
        self.sent[sequence] = Sent(body, durable)
        self.waiting.add(sequence)

    # Steps -------------------------------------------------------------------------------------------------------

    @rule(body=bodies, logged=st.booleans())
    def put(self, body: bytes, logged: bool) -> None:
        durable = self.durable and logged
        if not self.room(1) and not self.uncertain:
            try:
                self.queue.put_nowait(body, durable=durable)
            except qflow.QueueFull:
                return
            raise AssertionError("the limit was passed")
        if self.room(1 + len(self.uncertain)):
            self.note(self.queue.put(body, durable=durable, timeout_s=0), body, durable)

    @rule(batch=st.lists(bodies, max_size=MOST_PUT), logged=st.booleans())
    def put_many(self, batch: list[bytes], logged: bool) -> None:
        durable = self.durable and logged
        if self.room(len(batch) + len(self.uncertain)):
            sequences = self.queue.put_many(batch, durable=durable, timeout_s=0)
            assert len(sequences) == len(batch)
            for sequence, body in zip(sequences, batch, strict=True):
                self.note(sequence, body, durable)

    @precondition(lambda self: self.durable)
    @rule(body=bodies)
    def submit(self, body: bytes) -> None:
        if self.room(1 + len(self.uncertain)):
            future = self.queue.submit(body, timeout_s=0)
            self.broker.engine.log.drain()
            self.note(future.result(), body, True)

    def received(self, delivery: Delivery) -> None:
        sequence = delivery.sequence
        if sequence in self.uncertain:
            self.waiting.add(sequence)
        self.uncertain = {other for other in self.uncertain if other > sequence}  # those passed over did not come again
        assert sequence == min(self.waiting), "out of order, or a message was passed over"  # I1, I5
        sent = self.sent[sequence]
        assert delivery.body == sent.body  # I4
        assert delivery.redelivered or not (sent.returned or sent.doubtful)
        if not sent.doubtful:
            assert delivery.delivery_count == sent.returned + 1
        self.waiting.discard(sequence)
        self.held[sequence] = delivery

    @rule()
    def get(self) -> None:
        if not self.waiting and not self.uncertain:
            try:
                self.queue.get_nowait()
            except qflow.QueueEmpty:
                return
            raise AssertionError("a message came from nowhere")
        try:
            delivery = self.queue.get(0)
        except qflow.QueueEmpty:
            # Held messages may fill memory; with none in flight a message must come.
            assert self.held or not self.waiting
            return
        self.received(delivery)

    @rule(count=st.integers(1, 30))
    def get_many(self, count: int) -> None:
        batch = self.queue.get_many(count, timeout_s=0)
        assert len(batch) <= count
        assert batch or self.held or not self.waiting
        assert list(batch.sequences) == [delivery.sequence for delivery in batch]
        assert batch.bodies == [delivery.body for delivery in batch]
        for delivery in batch:
            self.received(delivery)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), wait=st.booleans())
    def ack(self, data: st.DataObject, wait: bool) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        self.held.pop(sequence).ack(wait)
        if wait or not self.durable:
            self.unconfirmed.clear()
        else:
            self.unconfirmed.add(sequence)

    @precondition(lambda self: self.held)
    @rule(wait=st.booleans())
    def ack_all(self, wait: bool) -> None:
        self.queue.ack_many(list(self.held.values()), wait=wait)
        if not wait:
            self.unconfirmed |= set(self.held)
        else:
            self.unconfirmed.clear()
        self.held.clear()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held)))
        self.held.pop(sequence).nack()
        self.sent[sequence].returned += 1
        self.waiting.add(sequence)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """One that waits is gone for good; one that is held, or gone, is left alone."""
        sequence = data.draw(st.sampled_from([*sorted(self.waiting), *sorted(self.sent)[-3:], self.highest + 1]))
        deleted = self.queue.delete(sequence)
        assert deleted == (sequence in self.waiting) or (deleted and sequence in self.uncertain)
        self.waiting.discard(sequence)
        self.uncertain.discard(sequence)
        if deleted:
            self.unconfirmed.clear()  # what was acked before is in that commit, or in one before

    @rule()
    def purge(self) -> None:
        self.queue.purge()
        self.waiting.clear()
        for delivery in self.held.values():
            delivery.ack()  # late: a no-op
        self.held.clear()
        self.uncertain.clear()
        self.unconfirmed.clear()

    @rule(size=st.integers(0, 4_000))
    def crowd(self, size: int) -> None:
        """Another queue wants memory, and gives it back."""
        self.other.put(b"x" * size)
        self.other.get(0).ack()

    @rule(capacity=st.sampled_from(CAPACITIES))
    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.broker.declare_queue("q", durable=self.durable, capacity_bytes=capacity, limit_messages=self.limit)
        assert self.queue.stats().resident_bytes <= self.bound(capacity) + MOST_ABOVE

    @rule()
    def browse(self) -> None:
        entries = [entry for entry in self.queue.browse() if entry.state != "logged"]
        assert {entry.sequence for entry in entries} <= self.waiting | self.uncertain
        assert [entry.sequence for entry in entries] == sorted(entry.sequence for entry in entries)

    @rule(limit=st.integers(1, 100))
    def maintain(self, limit: int) -> None:
        """All that the maintenance thread would do, and a look at every block, by steps of any size."""
        self.patch.setattr(hollowing, "HOLLOWING_STEPS", limit)
        broker = self.broker
        for lane in parts_of(self.queue).logged_lanes:
            lane.passes.at = 0
        with inside.paused(broker):
            while (
                inside.upkeep(broker).sweep()
                or inside.upkeep(broker).remove_settled()
                or inside.upkeep(broker).hollow()
            ):
                pass

    @rule()
    def reopen(self) -> None:
        held = list(self.held)
        stale = list(self.held.values())
        self.broker.close()
        for delivery in stale:
            try:
                delivery.ack()
            except qflow.BrokerClosed:
                continue
            raise AssertionError("an ack after close was taken")
        self.after_restart(held)
        self.unconfirmed.clear()
        for sequence in held:
            self.sent[sequence].returned += 1
        self.open()
        assert self.broker.recovery.clean

    @precondition(lambda self: self.durable)
    @rule()
    def crash(self) -> None:
        """What a kill would leave: the log as it is at its last commit, and whatever else lies around."""
        held = list(self.held)
        self.crash_broker()
        self.after_restart(held)
        self.uncertain |= {sequence for sequence in self.unconfirmed if self.sent[sequence].durable}
        self.unconfirmed.clear()
        for sent in self.sent.values():
            sent.doubtful = True
        self.open()
        assert not self.broker.recovery.clean

    def after_restart(self, held: list[int]) -> None:
        self.waiting |= set(held)
        self.held.clear()
        self.waiting = {sequence for sequence in self.waiting if self.sent[sequence].durable}
        if not self.durable:
            self.highest = -1

    # After every step --------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "broker"):
            return
        self.check_now_and_then()
        stats = self.queue.stats()
        assert len(self.waiting) <= stats.messages - len(self.held) <= len(self.waiting) + len(self.uncertain)
        assert stats.acquired_messages == len(self.held)
        bound = self.bound(min(self.capacity, self.broker_capacity))
        assert stats.resident_bytes <= bound + MOST_PUT * (LARGEST + OVERHEAD_BYTES)

    def bound(self, capacity: int) -> int:
        """Return a capacity, or what cannot be spilled where that is more."""
        in_flight = sum(len(delivery.body) + OVERHEAD_BYTES + SINGLE_BYTES for delivery in self.held.values())
        in_flight += BATCH_BYTES * len({id(one.settler) for one in self.held.values()})
        # What a schedule keeps of messages it has spilled cannot be spilled in its turn.
        index = sum(schedule.overhead_bytes for schedule in parts_of(self.queue).lanes.schedules.values())
        return max(capacity, in_flight) + index


QueueMachine.TestCase.settings = settings(
    max_examples=300 if TORTURE else 100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestQueueModel = QueueMachine.TestCase
