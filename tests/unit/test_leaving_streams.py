"""Messages of a stream that leave with commits that overlap, and what is done meanwhile to their batches: by chance."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.storage.log.transaction_log import TransactionLog
from qflow.streams.claims import Leaving
from unit.clocks import Clock, until

LEASE_S = 10


class Batch:
    """A batch that a member got, and what is to be held of it."""

    def __init__(self, deliveries: Any, until: float) -> None:
        self.deliveries = deliveries
        self.held: set[int] = set(deliveries.offsets)
        self.until = until
        """When its lease ends, unless a commit has begun that settles some of it."""
        self.later: list[set[int]] = []
        """What goes back when no commit of it is written."""


class Commit:
    """A commit that has begun: the messages it takes, of which batches, and whether it is being written."""

    def __init__(self, leaving: Leaving, takes: list[tuple[Batch, set[int]]], whole: list[Batch]) -> None:
        self.leaving = leaving
        self.takes = takes
        self.whole = whole
        """Batches of which it takes whatever is left when it is written."""
        self.is_written = False


class Chance:
    """A group of two members, and where each message of its stream is to be."""

    def __init__(self, broker: qflow.Broker, clock: Clock, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = clock
        broker.declare_stream("s", topics=["t"])
        broker.publish_many([("t", b"%d" % number) for number in range(30)])
        self.members = [broker.subscribe("s", group="g", start="earliest", ack_timeout_s=LEASE_S) for _ in range(2)]
        self.claims = inside.cursor(self.members[0]).claims
        self.batches: list[Batch] = []
        self.commits: list[Commit] = []
        self.there, self.acked = set(range(30)), set[int]()

    def step(self) -> None:
        """Do something."""
        steps = [self.get, self.begin, self.begin, self.write, self.end, self.ack, self.ack_all, self.nack, self.wait]
        self.chance.choice(steps)()

    def bound(self, batch: Batch) -> set[int]:
        """Return what commits take of a batch."""
        return {
            offset for commit in self.commits for taken, offsets in commit.takes if taken is batch for offset in offsets
        }

    def is_written(self, batch: Batch) -> bool:
        return any(commit.is_written and taken is batch for commit in self.commits for taken, _ in commit.takes)

    def any_batch(self) -> Batch | None:
        return self.chance.choice(self.batches) if self.batches else None

    def get(self) -> None:
        most = self.chance.randint(1, 6)
        for batch in self.batches:
            if batch.until <= self.clock.monotonic_s and not self.bound(batch):
                self.back(batch, set(batch.held))
        got = self.chance.choice(self.members).get_many(most, 0)
        assert len(got) == min(most, len(self.there))
        assert self.there.issuperset(got.offsets)
        self.there.difference_update(got.offsets)
        if got:
            self.batches.append(Batch(got, self.clock.monotonic_s + LEASE_S))

    def wait(self) -> None:
        """Time goes on, and somebody looks."""
        self.clock.advance(6)
        self.get()

    def back(self, batch: Batch, offsets: set[int]) -> None:
        offsets &= batch.held
        batch.held -= offsets
        self.there |= offsets

    def begin(self) -> None:
        """A commit takes messages, or all that is left of a batch, perhaps of what another one takes."""
        batch = self.any_batch()
        if batch is None:
            return
        free = batch.held - self.bound(batch)
        if self.chance.random() < 0.4:
            wanted: list[Any] = [batch.deliveries.held]
            takes, may, whole = free, bool(free), [] if self.bound(batch) else [batch]
        else:
            wanted = self.chance.sample(list(batch.deliveries), self.chance.randint(1, len(batch.deliveries)))
            takes, whole = {one.offset for one in wanted}, []
            may = takes <= free
        if self.is_done(
            lambda: self.commits.append(Commit(self.claims.begin_leaving(wanted), [(batch, takes)], whole)), may
        ):
            assert takes

    def write(self) -> None:
        """A commit has the room it waited for."""
        waiting = [commit for commit in self.commits if not commit.is_written]
        if not waiting:
            return
        commit = self.chance.choice(waiting)
        for batch, takes in commit.takes:
            if batch in commit.whole:
                takes.intersection_update(batch.held)
        may = all(takes and takes <= batch.held for batch, takes in commit.takes)
        if self.is_done(commit.leaving.settles, may):
            commit.is_written = True
        else:
            self.over(commit, holds=False)

    def end(self) -> None:
        """A commit holds, or is refused."""
        if self.commits:
            commit = self.chance.choice(self.commits)
            self.over(commit, holds=commit.is_written and self.chance.random() < 0.6)

    def over(self, commit: Commit, *, holds: bool) -> None:
        (commit.leaving.committed if holds else commit.leaving.refused)(None)
        self.commits.remove(commit)
        for batch, takes in commit.takes:
            if holds:
                batch.held -= takes
                self.acked |= takes
            while batch.later and not self.is_written(batch):
                self.back(batch, batch.later.pop(0))
            batch.until = self.clock.monotonic_s + LEASE_S

    def ack(self) -> None:
        batch = self.any_batch()
        if batch is not None:
            one = self.chance.choice(list(batch.deliveries))
            if self.is_done(one.ack, one.offset in batch.held - self.bound(batch)):
                batch.held.remove(one.offset)
                self.acked.add(one.offset)

    def ack_all(self) -> None:
        batch = self.any_batch()
        if batch is not None:
            free = batch.held - self.bound(batch)
            if self.is_done(batch.deliveries.ack, bool(free)):
                batch.held -= free
                self.acked |= free

    def nack(self) -> None:
        """A message goes back, or all that is left of a batch: what a commit takes, too, unless it is being written."""
        batch = self.any_batch()
        if batch is None:
            return
        one = self.chance.choice([batch.deliveries, *batch.deliveries])
        offsets = set(batch.held) if one is batch.deliveries else {one.offset}
        if self.is_done(one.nack, bool(batch.held) and offsets <= batch.held):
            if self.is_written(batch):
                batch.later.append(set(batch.deliveries.offsets) if one is batch.deliveries else offsets)
            else:
                self.back(batch, offsets)

    def is_done(self, work: Callable[[], object], wanted: bool) -> bool:
        """Do something that is refused unless it is wanted."""
        if wanted:
            work()
        else:
            with pytest.raises(qflow.AlreadySettled):
                work()
        return wanted

    def check(self) -> None:
        """Everything is where it is to be."""
        held = sum(len(batch.held) for batch in self.batches)
        stats = self.members[0].stats()
        assert (stats.unsettled_messages, stats.acked_total) == (held, len(self.acked))
        assert len(self.there) + held + len(self.acked) == 30


@pytest.mark.parametrize("seed", range(60))
def test_every_message_is_held_or_acked_or_back(open_at: Callable[..., qflow.Broker], clock: Clock, seed: int) -> None:
    """Once, whatever overlaps."""
    broker = open_at()
    chance = Chance(broker, clock, seed)
    for _ in range(60):
        chance.step()
        chance.check()
    while chance.commits:
        chance.end()
        chance.check()
    for batch in chance.batches:
        if batch.held:
            batch.deliveries.ack()
    rest = chance.members[1].get_many(30, 0)
    assert set(rest.offsets) == chance.there
    rest.ack()
    assert chance.members[0].stats().unsettled_messages == 0
    assert broker.stats().resident_bytes == 0


def test_no_lease_runs_while_a_commit_waits_or_is_written(open_at: Callable[..., qflow.Broker], clock: Clock) -> None:
    """Nor does it when another commit of the same batch ends."""
    broker = open_at()
    broker.declare_stream("s", topics=["t"])
    broker.publish_many([("t", b"0"), ("t", b"1")])
    one, two = (broker.subscribe("s", group="g", start="earliest", ack_timeout_s=LEASE_S) for _ in range(2))
    batch = one.get_many(2, 0)
    claims = inside.cursor(one).claims
    first, second = claims.begin_leaving([batch[0]]), claims.begin_leaving([batch[1]])
    second.refused(None)
    first.settles()
    clock.advance(LEASE_S + 1)
    assert not two.get_many(2, 0)
    first.committed(None)
    clock.advance(LEASE_S)
    assert two.get_many(2, 0).bodies == [b"1"]


@pytest.mark.parametrize(("first_s", "second_s"), [(100, None), (None, 5), (5, 100)])
def test_each_member_of_a_group_has_the_lease_it_asked_for(
    open_at: Callable[..., qflow.Broker], clock: Clock, first_s: float | None, second_s: float | None
) -> None:
    """Not the one of whoever joined last; without a number, 60 s."""
    broker = open_at()
    broker.declare_stream("s", topics=["t"])
    broker.publish_many([("t", b"0"), ("t", b"1")])
    one = broker.subscribe("s", group="g", start="earliest", ack_timeout_s=first_s)
    two = broker.subscribe("s", group="g", start="earliest", ack_timeout_s=second_s)
    third = broker.subscribe("s", group="g", start="earliest", ack_timeout_s=1_000)
    ends = {}
    for member, lease_s in ((one, first_s), (two, second_s)):
        ends[member.get(0).offset] = lease_s or 60
    assert sorted(ends) == [0, 1]
    passed = 0
    for offset, lease_s in sorted(ends.items(), key=lambda end: end[1]):
        clock.advance(lease_s - 1 - passed)
        assert not third.get_many(2, 0)
        clock.advance(1)
        assert third.get_many(2, 0).offsets == [offset]
        passed = lease_s


def test_a_message_is_settled_by_one_transaction(open_at: Callable[..., qflow.Broker]) -> None:
    """Who tries again, while the commit of the first is under way, is refused; if that is refused, it is free again."""
    broker = open_at()
    broker.declare_stream("s", topics=["t"])
    broker.publish("t", b"0")
    queue = broker.declare_queue("q")
    delivery = broker.subscribe("s", name="n", start="earliest").get(0)
    under_way = delivery.settler.settler.begin_leaving([delivery])  # type: ignore[attr-defined]
    under_way.settles()
    for work in (delivery.ack, lambda: _answer(broker, delivery)):
        with pytest.raises(qflow.AlreadySettled, match=r"message 0 of stream 's' is settled by a transaction"):
            work()
    under_way.refused(None)
    _answer(broker, delivery)
    assert queue.get(0).body == b"0"


def _answer(broker: qflow.Broker, delivery: qflow.StreamDelivery) -> None:
    with broker.transaction() as tx:
        tx.put("q", delivery.body)
        tx.ack(delivery)


def test_a_seek_comes_before_a_commit_or_after_it(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not come between what a commit is to settle and the log: what is held anew would be settled with that."""
    with qflow.open(spool) as broker:
        broker.declare_stream("s", topics=["t"])
        broker.publish_many([("t", b"%d" % number) for number in range(10)])
        subscription = broker.subscribe("s", name="me", start="earliest")
        place, called = inside.cursor(subscription).place, threading.Event()
        seeking = threading.Thread(target=subscription.seek, args=(0,))
        join, drain = TransactionLog.join, TransactionLog.drain

        def join_late(log: TransactionLog, unit: Any, *arguments: Any, **named: Any) -> Any:
            if unit.settles:
                seeking.start()
                until(lambda: not seeking.is_alive() or (called.is_set() and not place.moving))
            return join(log, unit, *arguments, **named)

        def note(log: TransactionLog) -> None:
            if threading.current_thread() is seeking:
                called.set()
            drain(log)

        monkeypatch.setattr(TransactionLog, "join", join_late)
        monkeypatch.setattr(TransactionLog, "drain", note)
        with broker.transaction() as transaction:
            transaction.ack_many(subscription.get_many(10))
        seeking.join()
        assert subscription.get_many(10, 0).offsets == list(range(10))
    with qflow.open(spool) as broker:
        subscription = broker.subscribe("s", name="me", start="committed")
        assert subscription.get_many(10, 0).offsets == list(range(10))
