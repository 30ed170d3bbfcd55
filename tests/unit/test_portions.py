"""What a great many deliveries are settled by, or go back by, are steps: others come to the lock between two of them."""

from __future__ import annotations

import asyncio
import errno
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import calls
import inside
import qflow
import qflow.aio
from faults.seams import Faults, faulty_broker
from qflow.memory import schedule
from qflow.queues import dead_letter_router, getting, in_steps, portions, returns, tending
from qflow.queues.gathering import Gathering
from qflow.queues.lanes import Lanes
from qflow.queues.queue import parts_of
from qflow.storage.log.transaction_log import Request, TransactionLog
from unit.clocks import Clock, open_still

Open = Callable[..., qflow.Broker]
MESSAGES, PIECES = 1000, 50
MANY = 3 * MESSAGES


class Pauses:
    """What is done in each pause between two steps, by another thread, and how many messages were settled there."""

    def __init__(self) -> None:
        self.looks: list[Callable[[], object]] = []
        self.seen: list[Any] = []
        self.errors: list[BaseException] = []

    def __call__(self, _: float) -> None:
        thread = threading.Thread(target=self._look)
        thread.start()
        thread.join()

    def _look(self) -> None:
        try:
            self.seen += [look() for look in self.looks]
        except BaseException as error:
            self.errors.append(error)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()
    monkeypatch.setattr(portions, "MESSAGES", MESSAGES)
    monkeypatch.setattr(portions, "PIECES", PIECES)
    monkeypatch.setattr(in_steps, "SETTLED_AT_ONCE", MESSAGES // 2)
    monkeypatch.setattr(getting, "TAKEN_AT_ONCE", MESSAGES)
    monkeypatch.setattr(getting, "LOOKED_AT_ONCE", MESSAGES)
    for module in (getting, in_steps, returns):
        monkeypatch.setattr(module, "sleep", made)
    return made


def held(queue: qflow.Queue, how: str) -> qflow.Deliveries:
    """Return a long batch: whole, or one with a hole behind each message that is left."""
    queue.put_many([b"%d" % number for number in range(MANY)])
    batch = queue.get_many(MANY)
    if how == "holes":
        queue.ack_many(list(batch)[1::2])
    return batch


@pytest.mark.parametrize("how", ["whole", "holes"])
@pytest.mark.parametrize("delay_s", [0, 1000])
def test_a_long_batch_goes_back_a_portion_at_a_time(
    open_spool: Open, durable: bool, pauses: Pauses, how: str, delay_s: float
) -> None:
    """In order, counted as delivered once, and others put and get meanwhile."""
    queue = open_spool().declare_queue("q", durable=durable)
    batch = held(queue, how)
    left = batch.bodies[:: 2 if how == "holes" else 1]
    pauses.looks.append(lambda: queue.stats().lag_messages)
    pauses.seen.clear()
    batch.nack(delay_s=delay_s)
    assert pauses.errors == []
    most = MESSAGES if how == "whole" else PIECES
    steps = [later - before for before, later in zip([0, *pauses.seen], [*pauses.seen, len(left)], strict=True)]
    assert max(steps) <= most
    assert min(steps) > 0
    with pytest.raises(qflow.AlreadySettled):
        batch.ack()
    assert queue.stats().lag_messages == len(queue) == len(left)
    if not delay_s:
        again = queue.get_many(MANY)
        assert again.bodies == left
        assert {one.delivery_count for one in again} == {2}


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_left_of_a_long_batch_is_acked_a_portion_at_a_time(
    open_spool: Open, durable: bool, pauses: Pauses, wait: bool
) -> None:
    """One that has many pieces: a commit of all of them would hold up who puts into other queues."""
    queue = open_spool().declare_queue("q", durable=durable)
    batch = held(queue, "holes")
    pauses.looks.append(queue.__len__)
    pauses.seen.clear()
    batch.ack(wait)
    assert pauses.errors == []
    seen = [MANY // 2, *pauses.seen, len(queue)]
    assert seen[-1] == 0
    assert 0 < max(before - later for before, later in pairwise(seen)) <= PIECES


def test_a_batch_that_came_in_many_pieces_is_acked_a_portion_at_a_time(
    open_spool: Open, durable: bool, pauses: Pauses
) -> None:
    """Though nothing of it was settled before."""
    queue = open_spool().declare_queue("q", durable=durable)
    held(queue, "holes").nack()
    batch = queue.get_many(MANY, 0)
    assert len(batch) == MANY // 2
    pauses.seen.clear()
    pauses.looks.append(lambda: parts_of(queue).lanes.messages())
    batch.ack(wait=True)
    assert pauses.errors == []
    assert pauses.seen == list(range(MANY // 2 - PIECES, 0, -PIECES))
    assert len(queue) == 0


@pytest.mark.parametrize("settled", [0, PIECES - 1])
def test_a_batch_of_few_pieces_is_acked_at_once(open_spool: Open, durable: bool, pauses: Pauses, settled: int) -> None:
    """However long, and where some of it was acked before, by itself."""
    queue = open_spool().declare_queue("q", durable=durable)
    batch = held(queue, "whole")
    queue.ack_many(batch[: 2 * settled : 2])
    pauses.looks.append(lambda: pytest.fail("it paused"))
    batch.ack(wait=True)
    assert pauses.errors == []
    assert len(queue) == 0


def test_single_deliveries_are_acked_some_at_a_time(open_spool: Open, durable: bool, pauses: Pauses) -> None:
    """All of them, also where one was settled before, in whatever part."""
    queue = open_spool().declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 5 * in_steps.SETTLED_AT_ONCE)
    singles = [queue.get(0) for _ in range(5 * in_steps.SETTLED_AT_ONCE)]
    random.Random(1).shuffle(singles)
    singles[3].ack()
    pauses.looks.append(queue.__len__)
    with pytest.raises(qflow.AlreadySettled):
        queue.ack_many(singles, wait=True)
    assert pauses.errors == []
    assert pauses.seen == [part * in_steps.SETTLED_AT_ONCE for part in (4, 3, 2, 1)]
    assert len(queue) == 0


@pytest.mark.parametrize("end", ["commit", "settled before"])
def test_a_transaction_takes_many_deliveries_some_at_a_time(
    open_spool: Open, durable: bool, pauses: Pauses, end: str
) -> None:
    """All of them leave with its commit, or none: a queue at its limit has the room of all."""
    each, broker = in_steps.SETTLED_AT_ONCE, open_spool()
    queue = broker.declare_queue("q", durable=durable, limit_messages=5 * each, on_overflow="reject")
    queue.put_many([b"x"] * 5 * each)
    batch, halved = queue.get_many(each), queue.get_many(2 * each)
    singles = [*[queue.get(0) for _ in range(2 * each)], *list(halved)[::2]]
    pauses.looks.append(lambda: len(parts_of(queue).held.leaving))
    with broker.transaction() as tx:
        tx.ack_many(batch)
        tx.ack_many(singles)
        tx.put_many(queue, [b"y"] * 4 * each)
        if end == "settled before":
            singles[-1].ack()
            with pytest.raises(qflow.AlreadySettled):
                tx.commit()
    assert pauses.errors == []
    if end == "commit":
        assert pauses.seen == [1, 2, 3]
        assert queue.stats().acquired_messages == each
        halved.ack(wait=True)
        assert queue.get_many(5 * each).bodies == [b"y"] * 4 * each
    else:
        assert pauses.seen == [1, 2]
        assert queue.stats().acquired_messages == len(queue) == 5 * each - 1
        queue.ack_many([*singles[:-1], *batch], wait=True)
        halved.ack(wait=True)
        assert len(queue) == 0
    assert broker.check() == []


@pytest.mark.parametrize("end", ["commit", "settled before"])
def test_a_transaction_takes_a_batch_and_all_deliveries_of_it(
    open_spool: Open, durable: bool, pauses: Pauses, end: str
) -> None:
    """As it takes a few of them, and all or none: others find no moment in which some of the batch is left."""
    each, broker = in_steps.SETTLED_AT_ONCE, open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 4 * each)
    single, batch, other = queue.get(0), queue.get_many(2 * each), queue.get_many(each)
    pauses.looks.append(lambda: len(parts_of(queue).held.leaving))
    with broker.transaction() as tx:
        tx.ack_many(batch)
        tx.ack_many([*batch, single])
        tx.ack_many(other)
        if end == "settled before":
            other.ack(wait=True)
            with pytest.raises(qflow.AlreadySettled):
                tx.commit()
    assert pauses.errors == []
    assert pauses.seen == [1, 2]
    if end == "settled before":
        assert queue.stats().acquired_messages == 2 * each + 1
        queue.ack_many([*batch, single], wait=True)
    assert len(queue) == each - 1
    assert broker.check() == []


def test_a_signal_handler_does_nothing_to_a_transaction_that_takes_deliveries(
    open_spool: Open, durable: bool, pauses: Pauses
) -> None:
    """One that rolled it back had a part of it committed, and the rest held by nobody."""
    each, broker, struck = in_steps.SETTLED_AT_ONCE, open_spool(), threading.Event()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 3 * each)
    singles = [queue.get(0) for _ in range(3 * each)]

    def strike() -> None:
        struck.clear()
        while not struck.wait(0.01):  # one that comes just before the main thread waits does not wake it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

    def handle(*_: object) -> None:
        if struck.is_set():
            return
        try:
            with pytest.raises(qflow.InvalidArgument, match="is being committed"):
                tx.rollback()
        finally:
            struck.set()

    pauses.looks.append(strike)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with broker.transaction() as tx:
            tx.ack_many(singles)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pauses.errors == []
    assert struck.is_set()
    assert len(queue) == 0


def test_a_transaction_of_a_task_takes_many_deliveries_in_a_thread(
    tmp_path: Path, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they are acked, and at its end; a few in the loop."""
    threads: list[int] = []
    ack_many = Gathering.ack_many

    def noting(gathering: Gathering, deliveries: Any) -> None:
        threads.append(threading.get_ident())
        ack_many(gathering, deliveries)

    monkeypatch.setattr(Gathering, "ack_many", noting)

    async def work() -> int:
        async with await qflow.aio.open(tmp_path / "spool") as broker:
            queue = await broker.declare_queue("q")
            await queue.put_many([b"x"] * 3 * in_steps.SETTLED_AT_ONCE)
            held = [await queue.get(0) for _ in range(3 * in_steps.SETTLED_AT_ONCE)]
            pauses.looks.append(lambda: len(parts_of(queue.queue).held.leaving))
            async with broker.transaction() as tx:
                await tx.ack_many(held[:1])
                await tx.ack_many(held[1:])
            return len(queue)

    assert asyncio.run(work()) == 0
    assert [one == threading.get_ident() for one in threads] == [True, False]
    assert pauses.errors == []
    assert pauses.seen == [1, 2]


def test_a_task_acks_many_in_a_thread(tmp_path: Path, durable: bool, pauses: Pauses) -> None:
    """So that other tasks go on; a few it acks itself."""

    async def work() -> list[int]:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            queue = await broker.declare_queue("q", durable=durable)
            await queue.put_many([b"x"] * 3 * in_steps.SETTLED_AT_ONCE)
            held = [await queue.get(0) for _ in range(3 * in_steps.SETTLED_AT_ONCE)]
            pauses.looks.append(lambda: parts_of(queue.queue).lanes.messages())
            await queue.ack_many(held[: in_steps.SETTLED_AT_ONCE])
            assert pauses.seen == []
            await queue.ack_many(held[in_steps.SETTLED_AT_ONCE :], wait=True)
            return [*pauses.seen, len(queue)]

    assert asyncio.run(work()) == [in_steps.SETTLED_AT_ONCE, 0]
    assert pauses.errors == []


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_what_is_purged_meanwhile_does_not_come_back(open_spool: Open, durable: bool, pauses: Pauses, how: str) -> None:
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    batch = held(queue, "whole")
    pauses.looks.append(queue.purge if how == "purge" else lambda: broker.delete_queue("q"))
    batch.nack()
    assert pauses.errors == []
    assert len(pauses.seen) == 1
    if how == "purge":
        assert len(queue) == 0
        assert queue.stats().resident_bytes == 0
        assert broker.check() == []


@pytest.mark.parametrize("settles", [True, False])
def test_a_close_meanwhile_leaves_the_rest_unsettled(tmp_path: Path, pauses: Pauses, settles: bool) -> None:
    """It comes again, and counts as delivered."""
    broker = qflow.open(tmp_path / "spool")
    queue = broker.declare_queue("q")
    batch = held(queue, "holes")
    pauses.looks.append(broker.close)
    with pytest.raises(qflow.BrokerClosed):
        batch.ack() if settles else batch.nack()
    assert pauses.errors == []
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.queue("q")
        assert len(queue) == MANY // 2 - (PIECES if settles else 0)
        found = list(queue.get_many(MANY))
        assert {one.delivery_count for one in found} == {2}
        assert found[0].body == (b"%d" % (2 * PIECES) if settles else b"0")


def test_a_batch_that_went_back_holds_again_what_a_refused_commit_has_taken(open_spool: Open, pauses: Pauses) -> None:
    """Nobody else has that; and it goes back with another nack."""
    queue = open_spool().declare_queue("q", durable=False)
    batch = held(queue, "whole")
    taken = parts_of(queue).claims.begin_leaving([batch[5]])
    batch.nack()
    taken.give_up()
    assert pauses.errors == []
    assert queue.stats().acquired_messages == 1
    batch.nack()
    assert queue.get_many(MANY).bodies == batch.bodies


def test_who_stops_gives_up_a_long_batch_a_portion_at_a_time(open_spool: Open, durable: bool, pauses: Pauses) -> None:
    """It was fetched and not seen, so it does not count as delivered."""
    queue = open_spool().declare_queue("q", durable=durable)
    batch = held(queue, "whole")
    pauses.looks.append(lambda: queue.stats().lag_messages)
    parts_of(queue).claims.give_up(batch.held)
    assert pauses.errors == []
    assert pauses.seen == [MESSAGES, 2 * MESSAGES]
    assert queue.get().delivery_count == 1


@pytest.mark.parametrize("delay_s", [None, 0.001])
def test_a_get_of_very_many_lets_go_of_the_lock(
    open_spool: Open, durable: bool, pauses: Pauses, delay_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it has had it for long; what it has by then it keeps, as one piece where it is one."""
    broker = open_spool()
    queue, later = broker.declare_queue("q", durable=durable), broker.declare_queue("later", durable=False)
    monkeypatch.setattr(getting, "AT_ONCE_S", 0.0)
    wanted = 4 * MESSAGES
    queue.put_many([b"%d" % number for number in range(wanted)], delay_s=delay_s)
    queue.put(b"last", delay_s=delay_s)
    later.put(b"x", delay_s=delay_s)
    later.get()  # all of it is due
    pauses.looks.append(lambda: queue.stats().acquired_messages)
    pauses.seen.clear()
    batch = queue.get_many(wanted)
    assert pauses.errors == []
    assert len(batch) == wanted
    assert batch.bodies == [b"%d" % number for number in range(wanted)]
    assert len(batch.segments) == 1
    assert len(pauses.seen) >= 3
    batch.ack()


@pytest.mark.parametrize("how", ["whole", "holes"])
@pytest.mark.parametrize("altered", [False, True])
def test_a_long_batch_that_was_held_for_too_long_goes_back_a_portion_at_a_time(
    tmp_path: Path, durable: bool, how: str, altered: bool, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gets and by maintenance; also where there is no ack timeout any more."""
    clock = Clock()
    monkeypatch.setattr(tending, "sleep", pauses)
    with open_still(tmp_path / "spool", clock) as broker:
        queue = broker.declare_queue("q", durable=durable, ack_timeout_s=10)
        batch = held(queue, how)
        left = batch.bodies[:: 2 if how == "holes" else 1]
        clock.advance(11)
        first = queue.get(0)
        most = MESSAGES if how == "whole" else PIECES
        assert 0 < queue.stats().lag_messages < 2 * most
        if altered:
            broker.alter_queue(queue, ack_timeout_s=None)
        assert tending.has_something_to_do(parts_of(queue))
        pauses.looks.append(lambda: queue.stats().lag_messages)
        pauses.seen.clear()
        while inside.tick(queue):
            """There is more than it had time for."""
        assert pauses.errors == []
        seen = [0, *pauses.seen, queue.stats().lag_messages]
        assert max(later - before for before, later in pairwise(seen)) <= 2 * most
        with pytest.raises(qflow.AlreadySettled):
            batch.ack()
        assert [first.body, *queue.get_many(MANY).bodies] == left
        assert broker.check() == []


def test_a_purge_takes_what_was_to_come_back(tmp_path: Path, durable: bool, pauses: Pauses) -> None:
    clock = Clock()
    with open_still(tmp_path / "spool", clock) as broker:
        queue = broker.declare_queue("q", durable=durable, ack_timeout_s=10)
        batch = held(queue, "whole")
        clock.advance(11)
        queue.get(0)
        assert len(batch) == queue.purge()
        assert not inside.tick(queue)
        assert not parts_of(queue).leases.coming  # which would keep the messages in memory
        assert len(queue) == queue.stats().resident_bytes == 0
        assert broker.check() == []


@pytest.mark.parametrize("expired", [False, True])
def test_a_long_batch_becomes_dead_letters_a_portion_in_a_commit(
    tmp_path: Path, durable: bool, expired: bool, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is waited for: what is on its way takes memory beside the capacity. Also where an ack timeout ends."""
    clock = Clock()
    monkeypatch.setattr(portions, "DEAD_LETTERS", PIECES)
    monkeypatch.setattr(tending, "sleep", pauses)
    with open_still(tmp_path / "spool", clock) as broker:
        dead = broker.declare_queue("dead", durable=durable)
        queue = broker.declare_queue("q", durable=durable, dead_letter="dead", ack_timeout_s=10, max_deliveries=1)
        batch = held(queue, "whole")
        carried: list[int] = []
        made = dead_letter_router.dead_letters

        def note(*arguments: Any) -> list[Any]:
            letters = made(*arguments)
            carried.append(len(letters))
            return letters

        monkeypatch.setattr(dead_letter_router, "dead_letters", note)
        pauses.looks.append(dead.__len__)
        pauses.seen.clear()
        if expired:
            clock.advance(11)
            while inside.tick(queue):
                """There is more than it had time for."""
        else:
            batch.nack(requeue=False)
        assert pauses.errors == []
        if not expired:
            assert pauses.seen == [PIECES * (number + 1) for number in range(len(pauses.seen))]
        assert sum(carried) == MANY
        assert max(carried) == PIECES
        broker.engine.log.drain()
        assert dead.get_many(MANY).bodies == batch.bodies
        assert len(queue) == 0


def test_the_counts_of_what_is_spilled_are_logged_before_more_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is full of what was given back: else all its counts stand before the writer, and each put behind them."""
    handed_over: list[Request] = []
    standing: list[int] = []
    attempts = TransactionLog.attempts

    def note(log: TransactionLog, *arguments: Any) -> Request:
        standing.append(len([request for request in handed_over if not request.done]))
        handed_over.append(attempts(log, *arguments))
        return handed_over[-1]

    monkeypatch.setattr(schedule, "GROUPS_AT_ONCE", PIECES)
    monkeypatch.setattr(TransactionLog, "attempts", note)
    with open_still(tmp_path / "spool", Clock()) as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"%01000d" % number for number in range(MANY)])
        for delivery in [queue.get() for _ in range(MANY)][::2]:
            delivery.nack()
        broker.alter_queue("q", capacity_bytes=0)
    assert len(handed_over) > 4
    assert set(standing) == {0}


def test_a_commit_takes_so_many_counts_of_deliveries_as_settled_ranges(open_spool: Open) -> None:
    """Else one of a hundred thousand that were given back keeps all others waiting."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put_many([b"x"] * 10)
    lane = parts_of(queue).lanes.logged[0]
    request = broker.engine.log.attempts(lane, [(number, number + 1, 1) for number in range(0, 10, 2)])
    assert request.weight() == broker.engine.log.settle_all([(lane, [(0, 0, 0, 0)] * 5)]).weight() > 0


def test_what_scattered_messages_take_is_covered_once_for_all_that_come_back_together(
    open_spool: Open, durable: bool, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than to put one back in its place."""
    queue = open_spool().declare_queue("q", durable=durable)
    batch = held(queue, "holes")
    counts: Counter[str] = Counter()
    calls.count(monkeypatch, counts, Lanes, "cover", "cover")
    batch.nack()
    assert pauses.errors == []
    assert 0 < counts["cover"] <= 2 * MANY // 2 // PIECES


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("how", ["batch", "singles"])
def test_a_commit_that_fails_between_two_steps_leaves_nothing_behind(
    tmp_path: Path, pauses: Pauses, wait: bool, how: str
) -> None:
    """The log tries it again with what is settled next, so nothing is left that nobody holds."""
    faults = Faults()
    with faulty_broker(tmp_path / "spool", faults) as broker:
        queue = broker.declare_queue("q")
        batch = held(queue, "holes")
        broker.engine.log.drain()
        faults.fail("begin", errno.ENOSPC, times=1)
        if how == "batch":
            batch.ack(wait)
        else:
            queue.ack_many([one for one in batch if not one.sequence % 2], wait)
        assert faults.calls["begin"] > 1
        assert len(queue) == queue.stats().acquired_messages == 0
        assert broker.check() == []


def test_what_a_failed_log_does_not_settle_of_a_long_batch_goes_back(tmp_path: Path, pauses: Pauses) -> None:
    """Nobody would hold it."""
    faults = Faults()
    with faulty_broker(tmp_path / "spool", faults) as broker:
        queue = broker.declare_queue("q")
        batch = held(queue, "holes")
        broker.engine.log.drain()
        faults.fail("commit", errno.EIO, times=1)
        with pytest.raises(qflow.BrokerFailed):
            batch.ack()
        assert queue.stats().acquired_messages == 0
        assert queue.stats().lag_messages == len(queue) == MANY // 2 - PIECES


def test_a_task_acks_a_batch_of_many_pieces_in_a_thread(tmp_path: Path, pauses: Pauses) -> None:
    """By `ack_many`, too: its commits are waited for, and other tasks are to go on meanwhile."""

    async def work() -> int:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            queue = await broker.declare_queue("q")
            await queue.put_many([b"x"] * MANY)
            batch = await queue.get_many(MANY)
            await queue.ack_many(list(batch)[1::2])
            mine, acked_by = threading.get_ident(), set()

            def note(_: float) -> None:
                acked_by.add(threading.get_ident())

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(returns, "sleep", note)
                await queue.ack_many(batch, wait=True)
            assert acked_by
            assert mine not in acked_by
            return len(queue)

    assert asyncio.run(work()) == 0
