"""Where two of a queue's features meet: purges and new lanes, expiry and delays, ends and callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.memory.line import WORK
from qflow.memory.waiting import shelter
from qflow.queues.lanes import Lanes
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock

Open = Callable[..., qflow.Broker]


def test_a_purge_takes_nothing_that_comes_with_its_commit(open_spool: Open) -> None:
    """A delayed lane that was opened after the purge had begun keeps its message, now and after a reopen."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"old")
    began, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        began.set()
        assert go_on.wait(LONG_S)

    held = broker.engine.log.write(hold)
    waiting = threading.Thread(target=broker.engine.log.wait, args=(held,))
    waiting.start()
    assert began.wait(LONG_S)
    purged = broker.engine.log.purge(parts_of(queue).logged_lanes)  # joins the next batch
    later = queue.submit(b"new", delay_s=1)
    go_on.set()
    broker.engine.log.wait(purged)
    waiting.join()
    later.result(LONG_S)
    assert len(queue) == 1
    assert broker.check() == []
    broker.close()
    assert len(open_spool().queue("q")) == 1


def test_a_purge_misses_no_lane_that_begins_as_it_is_handed_over(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of such a lane left memory, and came back from the log when the spool was opened again."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"old")
    log, lock = broker.engine.log, parts_of(queue).context.lock
    hand_over = log._hand_over

    def put() -> None:
        if lock.acquire(blocking=False):
            lock.release()
            queue.put(b"delayed", delay_s=1)

    def after_the_look(request: Any) -> Any:
        monkeypatch.undo()
        thread = threading.Thread(target=put)
        thread.start()
        thread.join()
        return hand_over(request)

    monkeypatch.setattr(log, "_hand_over", after_the_look)
    purged = queue.purge()
    assert broker.check() == []
    broker.close()
    assert (purged, len(open_spool().queue("q"))) == (1, 0)


def test_two_first_delayed_messages_open_one_lane(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds the lane missing looks again once he has the lock."""
    queue = open_spool().declare_queue("q")
    lanes: list[int] = []
    opened = Lanes.open_delayed

    def counted(own: Lanes, number: int) -> None:
        lanes.append(number)
        opened(own, number)

    class Racing(dict[int, Any]):
        """Says for once that a lane is missing, and lets the other put open it."""

        def __contains__(self, number: object) -> bool:
            if not lanes:
                counted(parts_of(queue).lanes, int(number))  # type: ignore[call-overload]
                return False
            return super().__contains__(number)

    monkeypatch.setattr(Lanes, "open_delayed", counted)
    parts_of(queue).lanes.schedules = Racing(parts_of(queue).lanes.schedules)  # for good: it is the queue's from now on
    queue.put(b"a", delay_s=5)
    assert len(lanes) == 1


def test_an_expired_message_does_not_hide_behind_one_that_has_not(spool: Path) -> None:
    """Delayed messages of one time, some of them with a short life, taken in one batch."""
    clock = Clock()
    with make_broker(spool, BrokerSettings(), clock=clock.wall, monotonic=clock.monotonic) as broker:
        queue = broker.declare_queue("q", durable=False)
        due_s = clock.wall_s + 5
        for _ in range(5):
            queue.put_many([b"long"] * 4, ttl_s=1_000, not_before=due_s)
            queue.put_many([b"short"] * 4, ttl_s=1, not_before=due_s)
        clock.wall_s += 10
        batch = queue.get_many(100, timeout_s=0)
        assert set(batch.bodies) == {b"long"}
        assert len(batch) == 20
        assert queue.stats().expired_total == 20


@pytest.mark.parametrize("durable", [True, False])
def test_a_priority_put_is_not_passed_by_what_a_get_met_on_its_way(open_spool: Open, durable: bool) -> None:
    """A get between the reservation and the commit leaves lower messages for later."""
    queue = open_spool().declare_queue("q", durable=durable, priorities=2)
    queue.put_many([b"low"] * 3)
    form = parts_of(queue).puts.envelope(None, None, 1, None, None, None)
    queue.get(0).ack()
    parts_of(queue).puts.put([form.record(b"high")], True, form.number, None)
    assert queue.get(0).body == b"high"


def test_after_a_reopen_the_highest_priority_comes_first(open_spool: Open) -> None:
    """Also when it lies in the log, and something lower in memory."""
    broker = open_spool()
    broker.declare_queue("q", priorities=2).put(b"high", priority=1)
    broker.close()
    queue = open_spool().queue("q")
    queue.put(b"low")
    assert [queue.get(0).body, queue.get(0).body] == [b"high", b"low"]


def test_who_waits_for_a_message_holds_none(spool: Path) -> None:
    """A getter that finds nothing is no slow consumer."""
    clock = Clock()
    with make_broker(spool, BrokerSettings(), clock=clock.wall, monotonic=clock.monotonic) as broker:
        queue = broker.declare_queue("q", durable=False)
        getter = threading.Thread(target=queue.get)
        getter.start()
        while not parts_of(queue).gate.getters:
            getter.join(0.001)
        inside.tick(queue)
        clock.monotonic_s += 60
        inside.tick(queue)
        assert queue.stats().oldest_unacked_s == 0
        queue.put(b"x")
        getter.join(LONG_S)
        assert not getter.is_alive()


def test_a_get_that_was_to_read_what_another_has_read_by_then_leaves_no_batch(open_spool: Open) -> None:
    """An empty one stayed among what is held, for good: of a task, whose first step may not touch the disk."""
    queue = open_spool().declare_queue("q", durable=False, capacity_bytes=40_000)
    parts = parts_of(queue)
    getter = parts.gets.begin(1, LONG_S, None, single=True)
    assert shelter(partial(getter.step, list, may_work=False)) is not None
    queue.put_many([b"%03d" % number * 300 for number in range(100)])
    queue.get_many(100).ack()
    assert shelter(partial(getter.step, list, may_work=False)) == WORK
    queue.get(0).ack()  # with it come those that follow
    assert shelter(partial(getter.step, list, may_work=True)) is None
    assert getter.delivery is not None
    getter.delivery.ack()
    assert not parts.held.batches


@pytest.mark.parametrize("what", ["close", "declare"])
def test_a_callback_of_an_event_may_close_the_broker_or_use_it_while_it_closes(spool: Path, what: str) -> None:
    """The maintenance thread tells events; closing waits for it, and it never for closing."""
    broker = qflow.open(spool)
    told = threading.Event()

    def act(event: qflow.Event) -> None:
        told.set()
        if what == "close":
            broker.close()
        else:
            broker.declare_queue("another")

    broker.on_event(act)
    queue = broker.declare_queue("q", durable=False, limit_messages=1, on_overflow=qflow.Overflow.DROP_NEWEST)
    queue.put(b"1")
    assert queue.put(b"2") is None
    assert told.wait(LONG_S)
    broker.close()
    inside.maintenance(broker).join(LONG_S)
    with qflow.open(spool) as again:  # the spool was let go of
        assert again.check() == []


def test_dead_letters_of_durable_and_transient_queues_may_share_a_queue(open_spool: Open) -> None:
    """It is declared durable, whoever needs it first."""
    broker = open_spool()
    transient = broker.declare_queue("t", durable=False, dead_letter="dead")
    broker.declare_queue("d", dead_letter="dead")
    transient.put(b"x")
    transient.get(0).nack(requeue=False)
    assert broker.queue("dead").settings.durable
    assert broker.queue("dead").get(LONG_S).body == b"x"
