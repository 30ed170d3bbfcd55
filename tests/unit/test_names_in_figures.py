"""Statistics by name: who holds what and since when, who is there to take, who waits to put, and how fast it goes."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from qflow import Overflow
from qflow.queues.queue import parts_of
from qflow.rates import Meter
from qflow.stats import ConsumerStats, HolderStats, Rates
from qflow.takers import here
from unit.clocks import LONG_S, Clock, until

Open = Callable[..., qflow.Broker]


def started(work: Callable[[], object], name: str) -> threading.Thread:
    """Have a thread of this name do some work."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def test_who_holds_what_and_since_when(open_at: Open, clock: Clock) -> None:
    """By the name that was given, else that of the thread; the oldest first; what is settled is not told."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x"] * 10)
    held: list[Any] = []
    started(lambda: held.append(queue.get(0)), "packer").join(LONG_S)
    clock.advance(5)
    inside.tick(queue)
    held.append(queue.get_many(3, 0, consumer="mailer-3"))
    held.append(queue.get(0, consumer="mailer-3"))
    held.append(queue.get(0))
    stats = queue.stats()
    assert [(one.consumer, one.pid, one.messages) for one in stats.holders] == [
        ("packer", os.getpid(), 1),
        *sorted([("MainThread", os.getpid(), 1), ("mailer-3", os.getpid(), 4)]),
    ]
    assert stats.holders[0].oldest_s == stats.oldest_unacked_s == 5
    held[1][0].ack()
    held[2].nack()
    held[3].ack()
    assert [(one.consumer, one.messages) for one in queue.stats().holders] == [("packer", 1), ("mailer-3", 2)]
    held[0].ack()
    held[1].ack()
    assert queue.stats().holders == ()


@pytest.mark.two_drivers
def test_a_holder_has_a_name_and_a_process(open_at: Open) -> None:
    """At the door, too: those of the caller."""
    queue = open_at().declare_queue("q", durable=False)
    queue.put_many([b"x"] * 9)
    held = [queue.get(0), queue.get_many(3, 0, consumer="mailer-3"), queue.get_nowait(consumer="mailer-3")]
    told = sorted((one.consumer, one.pid, one.messages) for one in queue.stats().holders)
    assert told == [("MainThread", os.getpid(), 1), ("mailer-3", os.getpid(), 4)]
    for one in held:
        one.ack()  # type: ignore[attr-defined]
    until(lambda: queue.stats().holders == ())


def test_a_holder_whose_thread_has_ended_keeps_its_name(open_at: Open) -> None:
    """Also when another thread has its number by now, and through a batch of which single ones were taken."""
    queue = open_at().declare_queue("q", durable=False)
    queue.put_many([b"x"] * 4)
    held: list[Any] = []
    for name in ("one", "two"):
        started(lambda: held.append(queue.get_many(2, 0)), name).join(LONG_S)
    held[0][1].extend(5)
    held[0][0].ack()
    assert [(one.consumer, one.messages) for one in queue.stats().holders] == [("one", 1), ("two", 2)]


def test_a_task_holds_under_its_name_whatever_loop_it_runs_in(open_at: Open) -> None:
    """One loop after the other in one thread; where no task runs, it is the name of the thread."""
    broker = open_at()
    broker.declare_queue("q", durable=False).put_many([b"x"] * 3)
    held: list[qflow.aio.AsyncDelivery] = []

    async def take() -> None:
        held.append(await qflow.aio.AsyncBroker(broker).queue("q").get(0))

    async def take_as(name: str) -> None:
        await asyncio.create_task(take(), name=name)
        assert here.loop is asyncio.get_running_loop()  # which the next one of this thread does not ask for

    def take_without_a_task() -> None:
        with pytest.raises(StopIteration):
            take().send(None)

    async def have_it_called() -> None:
        asyncio.get_running_loop().call_soon(take_without_a_task)
        await asyncio.sleep(0)

    for work in (take_as("one"), take_as("two"), have_it_called()):
        asyncio.run(work)
    assert {one.consumer for one in broker.queue("q").stats().holders} == {"one", "two", "MainThread"}


def test_a_hundred_holders_are_told(open_at: Open) -> None:
    """Of more, those who hold the oldest."""
    queue = open_at().declare_queue("q", durable=False)
    queue.put_many([b"x"] * 120)
    for number in range(120):
        queue.get(0, consumer=f"c{number:03}")
    holders = queue.stats().holders
    assert len(holders) == 100
    assert isinstance(holders[0], HolderStats)


@pytest.mark.two_drivers
@pytest.mark.parametrize("name", ["", "x" * 256, 7])
def test_names_that_make_no_sense_are_refused(open_at: Open, name: Any) -> None:
    """Before anything is taken."""
    queue = open_at().declare_queue("q", durable=False)
    queue.put(b"x")
    with pytest.raises(qflow.InvalidArgument, match="consumer must"):
        queue.get(0, consumer=name)
    with pytest.raises(qflow.InvalidArgument, match="consumer must"):
        queue.get_many(1, 0, consumer=name)
    with pytest.raises(qflow.InvalidArgument, match="name must"):
        queue.consume(print, name=name)
    assert queue.stats().acquired_messages == 0


@pytest.mark.two_drivers
def test_consumers_that_run_and_gets_that_wait_are_told(open_at: Open, clock: Clock) -> None:
    """By their names, and until they end; a consumer that waits is there once."""
    queue = open_at().declare_queue("q", durable=False)
    stop = threading.Event()
    with queue.consume(lambda delivery: stop.wait(LONG_S), name="mailer"):
        queue.put(b"x")
        until(lambda: queue.stats().acquired_messages)
        waiting = started(lambda: queue.get(consumer="picker"), "thread")
        until(lambda: queue.stats().consumers_total == 2)
        clock.advance(3)
        consumers = queue.stats().consumers
        assert consumers == (
            ConsumerStats(name="mailer", pid=os.getpid(), kind="consumer", since_s=3),
            ConsumerStats(name="picker", pid=os.getpid(), kind="get", since_s=3),
        )
        assert [(one.consumer, one.messages) for one in queue.stats().holders] == [("mailer", 1)]
        queue.put(b"y")
        waiting.join(LONG_S)
        until(lambda: queue.stats().consumers_total == 1)
        stop.set()
    until(lambda: queue.stats().consumers == ())


@pytest.mark.two_drivers
@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"limit_messages": 1}, "limit_messages"), ({"limit_bytes": 10, "max_message_bytes": 10}, "limit_bytes")],
)
def test_putters_that_are_blocked_are_told(open_at: Open, clock: Clock, settings: Any, limit: str) -> None:
    """Their number, what the first of them waits for and for how long; nothing any more when they have gone on."""
    queue = open_at().declare_queue("q", durable=False, **settings)
    queue.put(bytes(10))
    putters = [started(lambda: queue.put(bytes(10)), "putter")]
    until(lambda: queue.stats().blocked_putters == 1)
    clock.advance(12)
    putters.append(started(lambda: queue.put(bytes(10)), "putter"))
    until(lambda: queue.stats().blocked_putters == 2)
    stats = queue.stats()
    assert (stats.blocked_longest_s, stats.blocked_on) == (12, limit)
    for left in (1, 0):
        queue.get(0).ack()
        until(lambda left=left: queue.stats().blocked_putters == left)  # type: ignore[misc]
    for putter in putters:
        putter.join(LONG_S)
    stats = queue.stats()
    assert (stats.blocked_putters, stats.blocked_longest_s, stats.blocked_on) == (0, 0, "")


def test_a_putter_that_gives_up_is_not_blocked_any_more(open_spool: Open) -> None:
    """Its time was over."""
    queue = open_spool().declare_queue("q", durable=False, limit_messages=1)
    queue.put(b"x")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"y", timeout_s=0.001)
    assert queue.stats().blocked_putters == 0


@pytest.mark.parametrize("policy", [Overflow.REJECT, Overflow.DROP_NEWEST, Overflow.DROP_OLDEST])
def test_a_queue_that_turned_a_put_away_is_at_its_limit(open_at: Open, clock: Clock, policy: Overflow) -> None:
    """Until it has been emptied; to who looks again as well. One that is full, and was not asked for more, is not."""
    broker = open_at()
    queue = broker.declare_queue("q", limit_messages=2, on_overflow=policy)
    figures, steps = broker.engine.figures, inside.upkeep(broker)

    def told() -> bool:
        clock.advance(1)
        steps.tick()
        facts = figures.changes(0)[1]["q"]
        assert facts["at_limit"] is queue.stats().at_limit
        return facts["at_limit"]

    queue.put_many([b"x"] * 2)
    assert not told()
    with suppress(qflow.QueueFull):
        queue.put(b"y")
    assert told()
    queue.get_many(2).ack(wait=True)
    assert not told()


def test_what_is_in_no_log_is_told(open_at: Open) -> None:
    """Of a queue of the log, and of one that is in none, whatever becomes of what is logged."""
    broker = open_at()
    queue, fleeting = broker.declare_queue("q"), broker.declare_queue("fleeting", durable=False)
    fleeting.put_many([b"x"] * 3)
    queue.put_many([b"logged"] * 5)
    assert (queue.stats().transient_messages, queue.stats().transient_bytes) == (0, 0)
    sequence = queue.put(b"not logged", durable=False)
    queue.get_many(2).ack(wait=True)
    size = queue.stats().bytes - 3 * len(b"logged")
    assert (queue.stats().messages, queue.stats().transient_messages, queue.stats().transient_bytes) == (4, 1, size)
    assert isinstance(sequence, int)
    assert queue.delete(sequence)
    assert (queue.stats().messages, queue.stats().transient_messages, queue.stats().transient_bytes) == (3, 0, 0)
    assert (fleeting.stats().transient_messages, fleeting.stats().transient_bytes) == (3, 3)


def test_rates_over_a_second_ten_and_sixty(open_at: Open, clock: Clock) -> None:
    """They fall again when nothing happens, to nothing after a minute."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    steps = inside.upkeep(broker)

    def second() -> None:
        clock.advance(1)
        steps.tick()

    second()
    for _ in range(20):
        queue.put_many([b"x"] * 30)
        queue.get_many(20).ack()
        second()
    rates = queue.stats().rates
    assert (rates.put_1s, rates.put_10s, rates.put_60s) == (30, 30, 10)
    assert (rates.delivered_1s, rates.acked_1s, rates.acked_60s) == (20, 20, pytest.approx(20 * 20 / 60, abs=0.001))
    second()
    assert (queue.stats().rates.put_1s, queue.stats().rates.put_10s) == (0, 27)
    clock.advance(30)
    assert (queue.stats().rates.put_10s, queue.stats().rates.put_60s) == (0, 10)
    clock.advance(60)
    assert queue.stats().rates == Rates()


def test_what_dies_before_it_was_delivered_is_no_delivery(open_at: Open, clock: Clock) -> None:
    """Also while it is on its way out: a counter that falls again would be taken for one of a broker that began anew."""
    broker = open_at()
    broker.declare_queue("dead")
    queue = broker.declare_queue("q", dead_letter="dead")
    queue.put_many([b"x"] * 3, ttl_s=5)
    env = broker.engine.log._env
    commit, begun, may_end = env.commit, threading.Event(), threading.Event()

    def commit_later(txn: Any) -> None:
        begun.set()
        may_end.wait(LONG_S)
        commit(txn)

    env.commit = commit_later
    clock.advance(10)
    inside.upkeep(broker).tick()
    assert begun.wait(LONG_S)
    stats = queue.stats()
    may_end.set()
    assert (stats.messages, stats.delivered_total, stats.rates.delivered_60s) == (3, 0, 0)
    until(lambda: queue.stats().expired_total + queue.stats().dead_lettered_total)
    assert queue.stats().delivered_total == 0


def test_what_happens_after_a_pause_is_not_spread_over_it() -> None:
    """The meter knows when somebody looked last; and it keeps no more than a minute."""
    meter = Meter(0)
    for second in range(1, 200):
        meter.note(second, (second, second, second, second), second - 1)
    assert meter.rates(199, (199, 199, 199, 199)) == dict.fromkeys(_names(), 1.0)
    assert len(meter._moments) <= 62
    meter.note(400, (1199, 199, 199, 199), 399)
    assert meter.rates(400, (1199, 199, 199, 199))["put_1s"] == 1000
    assert meter.rates(401, (1199, 199, 199, 199))["put_1s"] == 0
    assert meter.rates(461, (1199, 199, 199, 199)) == dict.fromkeys(_names(), 0.0)


def test_what_happens_first_came_about_since_the_meter_began() -> None:
    """Not since the clock did, which may have been weeks ago, nor all at the first look."""
    meter = Meter(1_000)
    meter.note(1_001.5, (150, 0, 0, 0), 1_001)
    assert meter.rates(1_001.5, (150, 0, 0, 0))["put_1s"] == 100


def _names() -> list[str]:
    return [f"{what}_{window}s" for what in ("put", "delivered", "acked", "redelivered") for window in (1, 10, 60)]


def test_what_is_published_has_rates(open_at: Open, clock: Clock) -> None:
    """A hundred in one second, then none: what a window has seen, divided by its length."""
    broker = open_at()
    stream, steps = broker.declare_stream("flights", topics=["#"], partitions=2), inside.upkeep(broker)
    assert stream.stats().rates == Rates()
    for seconds in (1, 1, 4):
        clock.advance(seconds)
        steps.tick()
        if seconds == 1 and not stream.stats().published_total:
            broker.publish_many([(f"flights/{number}", b"x") for number in range(100)])
    found = stream.stats().rates
    assert (found.put_1s, found.put_10s, found.put_60s, found.delivered_60s) == (0, 10, 1.667, 0)
    clock.advance(60)
    assert stream.stats().rates == Rates()


def test_only_what_has_changed_is_told_to_who_looks_again(open_at: Open, clock: Clock) -> None:
    """All of it the first time; then what changed, is held or blocked; a queue that was deleted by its bare name."""
    broker = open_at()
    queues = {name: broker.declare_queue(name, durable=False) for name in ("idle", "held", "busy", "gone")}
    for queue in queues.values():
        queue.put(b"x")
    queues["held"].get(0, consumer="mailer")
    figures, steps = broker.engine.figures, inside.upkeep(broker)

    def look(since: int) -> tuple[int, dict[str, Any]]:
        clock.advance(1)
        steps.tick()
        return figures.changes(since)

    look(0)
    clock.advance(100)  # and no rate is left
    number, found = look(0)
    assert set(found) == set(queues)
    assert json.loads(json.dumps(found))["held"]["holders"][0]["consumer"] == "mailer"
    queues["busy"].put(b"y")
    broker.delete_queue("gone")
    for _ in range(2):
        later, found = look(number)
    assert {name: bool(facts) for name, facts in found.items()} == {"held": True, "busy": True, "gone": False}
    assert later > number
    assert found["held"]["oldest_unacked_s"] == found["held"]["holders"][0]["oldest_s"] == 104
    assert found["busy"]["messages"] == 2
    assert figures.changes(later) == (later, {})
    assert set(figures.changes(later + 10**12)[1]) == {"idle", "held", "busy"}


def test_who_looks_when_too_many_are_gone_begins_anew(open_at: Open, clock: Clock, monkeypatch: Any) -> None:
    """It would else show some that are gone for ever; the last names that are kept are of those that went last."""
    monkeypatch.setattr("qflow.figures.GONE_KEPT", 2)
    broker = open_at()
    broker.declare_queue("stays", durable=False)
    figures, steps = broker.engine.figures, inside.upkeep(broker)
    numbers = [figures.changes(0)[0]]
    for name in "abac":
        for change in (partial(broker.declare_queue, durable=False), broker.delete_queue):
            change(name)
            clock.advance(1)
            steps.tick()
            numbers.append(figures.changes(0)[0])
    gone = {look: figures.changes(look)[1].keys() - {"stays"} for look in numbers}
    assert [sorted(gone[look]) for look in numbers[4:]] == [["a", "c"], ["a", "c"], ["c"], ["c"], []]
    assert [figures.changes(look) for look in numbers[:4]] == [(0, {})] * 4


def test_a_rate_that_a_look_finds_after_its_minute_is_not_told_for_ever(open_at: Open, clock: Clock) -> None:
    """What happened was seen by a look before it was noted: a part of it is in the window for longer."""
    broker = open_at()
    queue, figures, steps = broker.declare_queue("q"), broker.engine.figures, inside.upkeep(broker)
    clock.advance(1)
    steps.tick()
    queue.put(b"x")
    figures.changes(0)
    clock.advance(0.9)
    steps.tick()
    for seconds in (59, 0.6, 1):
        clock.advance(seconds)
        _, found = figures.changes(0)
    assert found["q"]["rates"]["put_60s"] == 0


def test_who_wants_no_rates_leaves_them_to_those_who_do(open_at: Open, clock: Clock) -> None:
    """In the same moment, and for as long as there are any; that the last one has gone is told, too."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    figures, steps = broker.engine.figures, inside.upkeep(broker)
    figures.changes(0)
    queue.put_many([b"x"] * 60)
    clock.advance(1)
    steps.tick()
    number, found = figures.changes(0, with_rates=False)
    assert found["q"]["put_total"] == 60
    for passed_s in (0, 1, 30):
        clock.advance(passed_s)
        figures.changes(0, with_rates=False)
        number, found = figures.changes(number)
        assert found["q"]["rates"]["put_60s"] == 1
    clock.advance(60)
    figures.changes(0, with_rates=False)
    number, found = figures.changes(number)
    assert found["q"]["rates"] == dict.fromkeys(_names(), 0.0)
    clock.advance(1)
    assert figures.changes(number)[1] == {}


def test_what_is_written_for_others_has_names_too(open_at: Open, clock: Clock) -> None:
    """In `stats.json`, of ten holders at most."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x"] * 12)
    for number in range(12):
        queue.get(0, consumer=f"c{number:02}")
    inside.upkeep(broker).tick()
    for _ in range(2):
        broker.engine.figures.write()
        facts = json.loads((Path(broker.path) / "stats.json").read_text())["queues"]["q"]
        assert [one["consumer"] for one in facts["holders"]] == [f"c{number:02}" for number in range(10)]
        clock.advance(2)
    assert facts["holders"][0]["oldest_s"] == facts["oldest_unacked_s"] == 2
    assert facts["rates"]["put_60s"] == 0.2


def test_nobody_is_left_in_the_lists_of_who_waits(open_spool: Open) -> None:
    """Gets whose time is over, or whose queue was deleted."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False)
    parts = parts_of(queue)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0.001)
    assert len(queue.get_many(5, 0.001)) == 0
    errors: list[Exception] = []

    def wait() -> None:
        try:
            queue.get()
        except qflow.QueueDeleted as error:
            errors.append(error)

    thread = started(wait, "waits")
    until(lambda: parts.gets.waiting)
    broker.delete_queue("q")
    thread.join(LONG_S)
    assert (len(errors), parts.gets.waiting, parts.admission.blocked) == (1, {}, {})


@pytest.mark.two_drivers
def test_a_dead_letter_says_what_the_callback_raised(open_spool: Open) -> None:
    """Apart from a reason that somebody wrote; the event says why, too."""
    broker = open_spool()
    events: list[qflow.Event] = []
    broker.on_event(events.append)
    queue = broker.declare_queue("q", dead_letter="dead", max_deliveries=1)
    dead = broker.declare_queue("dead")
    queue.put_many([b"1", b"2"])

    def fail(delivery: qflow.Delivery) -> None:
        if delivery.body == b"2":
            delivery.nack(requeue=False, reason="not wanted")
        raise ValueError("no such street")

    with queue.consume(fail):
        until(lambda: len(dead) == 2)
    letters = [one.headers for one in dead.get_many(2, 0)]
    assert letters[0]["dead_letter_exception"] == letters[0]["dead_letter_nack_reason"] == "ValueError: no such street"
    assert letters[1]["dead_letter_nack_reason"] == "not wanted"
    assert "dead_letter_exception" not in letters[1]
    until(lambda: sum(event.kind is qflow.EventKind.DEAD_LETTERED for event in events) == 2)
    told = [(event.queue, event.detail) for event in events if event.kind is qflow.EventKind.DEAD_LETTERED]
    assert told == [
        ("q", "1 message: max_deliveries: ValueError: no such street"),
        ("q", "1 message: rejected: not wanted"),
    ]


def test_an_event_says_who_held_messages_for_too_long(open_at: Open, clock: Clock) -> None:
    """One for each of them, with how many and for how long."""
    broker = open_at()
    events: list[qflow.Event] = []
    broker.on_event(events.append)
    queue = broker.declare_queue("q", durable=False, ack_timeout_s=10)
    queue.put_many([b"x"] * 3)
    held = [queue.get_many(2, 0, consumer="mailer"), queue.get(0, consumer="packer")]
    clock.advance(12)
    inside.tick(queue)
    broker.engine.listeners.tell_all()
    assert sorted(event.detail for event in events if event.kind is qflow.EventKind.LEASE_EXPIRED) == [
        f"'mailer' of process {os.getpid()} held 2 messages for 12.0 s: ack_timeout_s=10.0",
        f"'packer' of process {os.getpid()} held 1 message for 12.0 s: ack_timeout_s=10.0",
    ]
    assert len(held) == 2


def test_changes_come_through_the_door_too(open_spool: Open) -> None:
    """For threads and for tasks."""
    broker = open_spool()
    broker.declare_queue("q", durable=False).put(b"x")
    with qflow.connect(broker.path) as remote:
        until(lambda: remote.figures()[1]["q"]["messages"] == 1)  # they are noted each second
        assert remote.figures()[0] > 0

    async def look() -> None:
        async with await qflow.aio.connect(broker.path) as tasks:
            assert (await tasks.figures(0))[1]["q"]["name"] == "q"

    asyncio.run(look())
