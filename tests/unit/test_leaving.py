"""What leaves with commits that overlap, and what is done meanwhile to the batches it came in: by chance."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import inside
import qflow
from qflow import held_batch
from qflow.delivery import Delivery
from qflow.queues.exits import Leaving
from qflow.queues.queue import parts_of
from unit.clocks import Clock


class Commit:
    """A commit that is under way, and the messages that it takes, by number."""

    def __init__(self, leaving: Leaving, takes: list[int], apart: set[int]) -> None:
        self.leaving = leaving
        self.takes = takes
        self.apart = apart
        """Those that it takes by themselves, and not with what is left of their batch."""
        self.gone: set[int] = set()
        """Those whose holder has let go meanwhile."""


class Chance:
    """Two batches of a queue, and where each of their messages is to be."""

    def __init__(self, queue: qflow.Queue, seed: int) -> None:
        self.chance = random.Random(seed)
        self.queue = queue
        self.claims = parts_of(queue).claims
        queue.put_many([b"%d" % number for number in range(8)], durable=False)
        self.batches = [queue.get_many(5, 0), queue.get_many(3, 0)]
        self.members = [[0, 1, 2, 3, 4], [5, 6, 7]]
        self.deliveries: list[Delivery] = [one for batch in self.batches for one in batch]
        self.commits: list[Commit] = []
        self.held, self.acked, self.back = set(range(8)), set[int](), set[int]()

    def step(self) -> None:
        """Do something."""
        self.chance.choice([self.begin, self.begin, self.end, self.ack, self.nack, self.nack_all, self.abandon])()

    def begin(self) -> None:
        """A commit takes some of what is held: messages, or all that is left of a batch."""
        wanted: list[Any] = []
        takes, apart = [], set[int]()
        for batch, members in zip(self.batches, self.members, strict=True):
            there = [number for number in members if number in self.held]
            if self.chance.random() < 0.4 and there:
                wanted.append(batch.held)
                takes += there
            elif there:
                some = self.chance.sample(there, self.chance.randint(0, len(there)))
                wanted += [self.deliveries[number] for number in some]
                takes += some
                apart.update(some)
        if wanted:
            self.held.difference_update(takes)
            self.commits.append(Commit(self.claims.begin_leaving(wanted), takes, apart))

    def end(self) -> None:
        """A commit holds, or is refused."""
        if not self.commits:
            return
        commit = self.commits.pop(self.chance.randrange(len(self.commits)))
        if self.chance.random() < 0.4:
            commit.leaving.committed(None)
            self.acked.update(commit.takes)
        else:
            commit.leaving.refused(None)
            self.back.update(commit.gone)
            self.held.update(set(commit.takes) - commit.gone)

    def ack(self) -> None:
        number = self.chance.randrange(8)
        if self.is_done(self.deliveries[number].ack, number in self.held):
            self.held.remove(number)
            self.acked.add(number)

    def nack(self) -> None:
        number = self.chance.randrange(8)
        if self.is_done(self.deliveries[number].nack, number in self.held):
            self.held.remove(number)
            self.back.add(number)
        for commit in self.commits:
            commit.gone |= {number} & commit.apart

    def nack_all(self) -> None:
        which = self.chance.randrange(2)
        there = self.held.intersection(self.members[which])
        if not self.is_done(self.batches[which].nack, bool(there)):
            self.leave(which)
        self.held -= there
        self.back |= there

    def abandon(self) -> None:
        """Its holder has gone."""
        if self.chance.random() < 0.7:
            return
        which = self.chance.randrange(2)
        there = self.held.intersection(self.members[which])
        self.chance.choice([self.claims.abandon, self.claims.give_up])(self.batches[which].held)
        self.leave(which)
        self.held -= there
        self.back |= there

    def leave(self, which: int) -> None:
        """What is refused of a batch goes back to the queue."""
        for commit in self.commits:
            commit.gone.update(set(self.members[which]).intersection(commit.takes))

    def is_done(self, work: Callable[[], object], wanted: bool) -> bool:
        """Do something that is refused unless it is wanted."""
        if wanted:
            work()
        else:
            with pytest.raises(qflow.AlreadySettled):
                work()
        return wanted

    def check(self) -> None:
        """Everything is where it is to be, and charged for."""
        stats = self.queue.stats()
        leaving = sum(len(commit.takes) for commit in self.commits)
        assert (stats.acquired_messages, stats.acked_total) == (len(self.held) + leaving, len(self.acked))
        assert [entry.sequence for entry in self.queue.browse()] == sorted(self.back)
        for batch, members in zip(self.batches, self.members, strict=True):
            assert bool(batch.held.leaving) == any(set(members).intersection(commit.takes) for commit in self.commits)


@pytest.mark.parametrize("seed", range(60))
def test_every_message_is_held_or_leaves_or_is_back(
    open_spool: Callable[..., qflow.Broker], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, whatever overlaps; and batches let go of what is settled at once, or not."""
    monkeypatch.setattr(held_batch, "SPARSE", 1 + seed % 2)
    monkeypatch.setattr(held_batch, "FEW_PLACES", 4 * (seed % 3))
    broker = open_spool()
    chance = Chance(broker.declare_queue("q"), seed)
    for _ in range(25):
        chance.step()
        chance.check()
    while chance.commits:
        chance.end()
        chance.check()
    assert broker.check() == []
    for number in sorted(chance.held):
        chance.deliveries[number].ack()
    assert inside.left_behind(chance.queue) == {}
    assert [delivery.body for delivery in chance.queue.get_many(9, 0)] == [
        b"%d" % number for number in sorted(chance.back)
    ]


def test_what_is_leaving_with_a_lease_that_ended_goes_back_when_it_is_refused(
    open_at: Callable[..., qflow.Broker], clock: Clock
) -> None:
    """Nobody can settle it any more: its batch went back before."""
    queue = open_at().declare_queue("q", durable=False, ack_timeout_s=10)
    queue.put_many([b"0", b"1"])
    batch = queue.get_many(2, 0)
    claims = parts_of(queue).claims
    one = claims.begin_leaving([batch[0]])
    batch.extend(1000)
    rest = claims.begin_leaving([batch.held])
    one.refused(None)
    clock.advance(11)
    assert queue.get(0).body == b"0"
    rest.refused(None)
    assert queue.get(0).body == b"1"


def test_a_message_of_a_stream_that_is_given_back_comes_again_though_more_was_asked_for(
    open_spool: Callable[..., qflow.Broker],
) -> None:
    """Without a name, asking for more settles what came before: not what waits for a commit to end."""
    broker = open_spool()
    broker.declare_stream("s", topics=["a"])
    subscription = broker.subscribe("s")
    broker.publish_many([("a", b"0"), ("a", b"1"), ("a", b"2")])
    first, second = subscription.get_many(2, 0)
    leaving = inside.cursor(subscription).claims.begin_leaving([first])
    leaving.settles()
    second.nack()
    assert subscription.get_many(5, 0).bodies == [b"2"]
    leaving.committed(None)
    assert subscription.get_many(5, 0).bodies == [b"1"]


def test_a_commit_settles_nothing_of_a_stream_that_was_given_back_before_it_was_written(
    open_spool: Callable[..., qflow.Broker],
) -> None:
    """It waited for room meanwhile."""
    broker = open_spool()
    broker.declare_stream("s", topics=["a"])
    broker.publish_many([("a", b"0"), ("a", b"1")])
    subscription = broker.subscribe("s", name="n", start="earliest")
    batch = subscription.get_many(2, 0)
    leaving = inside.cursor(subscription).claims.begin_leaving([batch.held])
    batch[0].nack()
    assert [(settled.first, settled.end) for _, settles in leaving.settles() for settled in settles] == [(1, 2)]
    leaving.committed(None)
    assert subscription.get_many(5, 0).bodies == [b"0"]
