"""Events: what a broker tells besides results, never under a lock, and what becomes of callbacks that fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import Faults, FaultyFiles
from qflow import Overflow
from qflow.config import SlowConsumer
from qflow.events import Event, EventKind
from qflow.message import OVERHEAD_BYTES
from qflow.queues.spiller import RECOVERED_S
from unit.clocks import LONG_S, Clock, open_still, until

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COST = 1000 + OVERHEAD_BYTES


def listen(broker: qflow.Broker) -> list[Event]:
    """Return a list that grows with each event, as they are told."""
    events: list[Event] = []
    broker.on_event(events.append)
    return events


def told(broker: qflow.Broker, events: list[Event]) -> list[str]:
    """Have what is new told, and return it."""
    broker.engine.listeners.tell_all()
    kinds = [event.kind.value for event in events]
    events.clear()
    return kinds


@pytest.mark.owner_only
def test_limits_that_are_reached_and_left(open_at: Open, clock: Clock) -> None:
    """Once each, however many puts were held back; left is at the mark."""
    broker = open_at()
    queue = broker.declare_queue("q", limit_messages=10, on_overflow=Overflow.REJECT, resume_ratio=0.5)
    queue.put_many([b"x"] * 10)
    events = listen(broker)
    for _ in range(3):
        with pytest.raises(qflow.QueueFull):
            queue.put(b"x")
    broker.engine.listeners.tell_all()
    assert [(event.kind, event.queue, event.time_s) for event in events] == [
        (EventKind.LIMIT_REACHED, "q", clock.wall_s)
    ]
    events.clear()
    queue.get_many(4).ack()
    inside.tick(queue)
    assert told(broker, events) == []
    queue.get_many(1).ack()
    inside.tick(queue)
    assert told(broker, events) == ["limit_left"]


@pytest.mark.owner_only
def test_spilling_that_starts_and_stops(open_at: Open) -> None:
    """The first message that leaves memory, and the last that comes back or goes."""
    broker = open_at()
    events = listen(broker)
    queue = broker.declare_queue("q", capacity_bytes=5 * COST)
    queue.put_many([b"x" * 1000] * 5)
    assert told(broker, events) == []
    for _ in range(10):
        queue.put(b"x" * 1000)
    assert told(broker, events) == ["spill_started"]
    inside.tick(queue)
    assert told(broker, events) == []
    queue.purge()
    inside.tick(queue)
    assert told(broker, events) == ["spill_stopped"]


def test_a_full_disk_and_its_recovery(spool: Path, clock: Clock) -> None:
    """Told when spilling fails, with why, and when it has not for a while: a disk that is nearly full does both by turns."""
    faults = Faults()
    broker = open_still(spool, clock, files=FaultyFiles(faults))
    events = listen(broker)
    queue = broker.declare_queue("q", durable=False, capacity_bytes=2 * COST)
    queue.put_many([b"x" * 1000] * 2)
    faults.fail("pwrite", errno.ENOSPC)
    with pytest.raises(qflow.DiskFull):
        queue.put(b"x" * 1000, timeout_s=0)
    broker.engine.listeners.tell_all()
    assert [event.kind for event in events] == [EventKind.DISK_FULL]
    assert events[0].detail
    events.clear()
    for _ in range(3):
        faults.heal()
        queue.put(b"x" * 1000)
        faults.fail("pwrite", errno.ENOSPC)
        with pytest.raises(qflow.DiskFull):
            queue.put(b"x" * 1000, timeout_s=0)
        clock.advance(RECOVERED_S - 1)
        inside.tick(queue)
    assert told(broker, events) == ["spill_started"]
    faults.heal()
    queue.purge()
    inside.upkeep(broker).sweep()  # finds that nothing waits for the disk
    clock.advance(2)
    inside.tick(queue)
    assert told(broker, events) == ["disk_recovered", "spill_stopped"]
    inside.tick(queue)
    assert told(broker, events) == []
    broker.close()


def test_maintenance_looks_at_a_queue_until_its_disk_has_recovered(spool: Path, clock: Clock) -> None:
    """Though nothing is left in it, and nobody uses it."""
    faults = Faults()
    broker = open_still(spool, clock, files=FaultyFiles(faults))
    events = listen(broker)
    queue = broker.declare_queue("q", durable=False, capacity_bytes=2 * COST)
    queue.put_many([b"x" * 1000] * 2)
    faults.fail("pwrite", errno.ENOSPC)
    with pytest.raises(qflow.DiskFull):
        queue.put(b"x" * 1000, timeout_s=0)
    faults.heal()
    queue.purge()
    for _ in range(int(RECOVERED_S) + 2):
        clock.advance(1)
        inside.upkeep(broker).sweep()
        inside.upkeep(broker).tick()
    assert told(broker, events) == ["disk_full", "disk_recovered"]
    assert inside.upkeep(broker)._awake() == []
    broker.close()


@pytest.mark.owner_only
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
@pytest.mark.parametrize("cause", ["expired", "rejected: why"])
def test_dead_letters_are_told_when_they_are_there(open_at: Open, clock: Clock, durable: bool, cause: str) -> None:
    """Not when a full disk refuses them, however often they are tried again."""
    broker = open_at()
    queue, dead = broker.declare_queue("q", durable=durable, dead_letter="dead"), broker.declare_queue("dead")
    queue.put_many([b"1", b"2"], ttl_s=1 if cause == "expired" else None)
    events, env = listen(broker), broker.engine.log._env
    make_room = env.make_room

    def full(*arguments: Any, settles_only: bool) -> None:
        if not settles_only:
            raise qflow.DiskFull("no space left")

    def bury() -> list[str]:
        clock.advance(2)
        if cause == "expired":
            inside.tick(queue)
        else:
            queue.get_many(2, timeout_s=0).nack(requeue=False, reason="why")
        broker.engine.log.drain()
        broker.engine.listeners.tell_all()
        return [event.detail for event in events if event.kind is EventKind.DEAD_LETTERED]

    env.make_room = full  # type: ignore[method-assign]
    assert [bury(), bury()] == [[], []]
    assert (len(queue), len(dead), queue.stats().dead_lettered_total) == (2, 0, 0)
    env.make_room = make_room  # type: ignore[method-assign]
    assert bury() == [f"2 messages: {cause}"]
    assert (len(queue), len(dead), queue.stats().dead_lettered_total) == (0, 2, 2)


@pytest.mark.owner_only
def test_lost_messages_are_told(open_at: Open, spool: Path) -> None:
    """A damaged spill file of what is in no log: the event names it, the next message is served."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False, capacity_bytes=0)
    events = listen(broker)
    queue.put(b"x" * 1000)
    queue.put(b"y" * 1000)
    told(broker, events)
    (first, *_) = sorted(path for path in (spool / "spill").rglob("*") if path.is_file())
    first.write_bytes(b"damaged")
    assert queue.get(0).body == b"y" * 1000
    broker.engine.listeners.tell_all()
    assert [event.kind for event in events if event.kind is EventKind.MESSAGES_LOST]
    assert queue.stats().lost_total == 1


@pytest.mark.owner_only
@pytest.mark.parametrize("policy", SlowConsumer)
def test_slow_consumers_are_told_and_treated(open_at: Open, clock: Clock, policy: SlowConsumer) -> None:
    """Only told; or their messages go back; or all of it and the consumer is closed."""
    broker = open_at()
    queue = broker.declare_queue("q")
    events = listen(broker)
    queue.on_slow_consumer(10, policy)
    queue.put_many([b"1", b"2"])
    held = queue.get(0)
    held.extend(1000)
    clock.advance(9)
    inside.tick(queue)
    assert told(broker, events) == []
    fresh = queue.get(0)
    clock.advance(2)
    inside.tick(queue)
    broker.engine.listeners.tell_all()
    assert events[0].kind is EventKind.SLOW_CONSUMER
    assert "11.0 s" in events[0].detail
    fresh.ack()
    if policy is SlowConsumer.NOTIFY:
        held.ack()
    else:
        with pytest.raises(qflow.AlreadySettled, match="on_slow_consumer"):
            held.ack()
        assert queue.get(0).delivery_count == 2
    queue.on_slow_consumer(None)
    events.clear()
    clock.advance(100)
    inside.tick(queue)
    assert told(broker, events) == []


@pytest.mark.parametrize("bad", ["close", None, 5])
def test_a_bad_policy_for_slow_consumers_is_refused(open_at: Open, bad: Any) -> None:
    """Its value does as well as itself."""
    queue = open_at().declare_queue("q")
    queue.on_slow_consumer(1, "release")  # type: ignore[arg-type]
    if bad != "close":
        with pytest.raises(qflow.InvalidArgument, match="SlowConsumer"):
            queue.on_slow_consumer(1, bad)


@pytest.mark.owner_only
def test_a_callback_that_fails_stops_nobody(open_at: Open, caplog: pytest.LogCaptureFixture) -> None:
    """It is written to the log of the process; the others are called, and later events come."""
    broker = open_at()
    broker.on_event(lambda event: 1 / 0)
    events = listen(broker)
    queue = broker.declare_queue("q", limit_messages=1, on_overflow=Overflow.REJECT)
    queue.put(b"1")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"2")
    assert told(broker, events) == ["limit_reached"]
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(qflow.InvalidArgument, match="callable"):
        broker.on_event("not callable")  # type: ignore[arg-type]


@pytest.mark.owner_only
@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_ends_its_thread_does_not_end_maintenance(
    open_spool: Open, caplog: pytest.LogCaptureFixture, end: type[BaseException]
) -> None:
    """`sys.exit()` in it is written to the log of the process; the others are called, and messages still expire."""
    broker = open_spool()

    def leave(_: Event) -> None:
        raise end("enough")

    broker.on_event(leave)
    events = listen(broker)
    queue = broker.declare_queue("q", limit_messages=1, on_overflow=Overflow.REJECT)
    queue.put(b"1")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"2")
    until(lambda: events)
    late = broker.declare_queue("late", durable=False)
    late.put(b"1", ttl_s=0.001)
    until(lambda: not len(late))
    assert "enough" in caplog.text


@pytest.mark.owner_only
def test_a_callback_that_closes_the_broker_ends_the_round_of_maintenance(
    open_spool: Open, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool is free then, and may be somebody else's: nothing more is done to it."""
    broker = open_spool()
    done: list[str] = []
    ended = threading.Event()

    def close(_: Event) -> None:
        broker.close()
        for name in ("tick", "sweep", "remove_settled", "remove_deleted", "hollow"):
            monkeypatch.setattr(inside.upkeep(broker), name, lambda *_, name=name: done.append(name))
        monkeypatch.setattr(broker.engine.figures, "write", lambda: done.append("write"))
        monkeypatch.setattr(broker.engine.adoption, "look", lambda: done.append("look"))
        qflow.open(spool).close()
        ended.set()

    broker.on_event(close)
    queue = broker.declare_queue("q", limit_messages=1, on_overflow=Overflow.REJECT)
    queue.put(b"1")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"2")
    assert ended.wait(LONG_S)
    inside.maintenance(broker).join(LONG_S)
    assert not inside.maintenance(broker).is_alive()
    assert done == []


def test_a_callback_may_use_the_broker(open_spool: Open) -> None:
    """On the maintenance thread, with no lock held: puts, gets, statistics, declaring and deleting."""
    broker = open_spool()
    queue = broker.declare_queue("q", limit_messages=1, on_overflow=Overflow.REJECT)
    done: list[Any] = []

    def react(event: Event) -> None:
        if event.kind is EventKind.LIMIT_REACHED:
            queue.get(0).ack()
            broker.declare_queue("other").put(b"1")
            broker.delete_queue("other")
            done.append((broker.stats().messages, broker.check()))

    broker.on_event(react)
    queue.put(b"1")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"2")
    until(lambda: done)
    assert done == [(0, [])]


@pytest.mark.owner_only
def test_what_is_told_last_is_told_at_close(open_at: Open) -> None:
    """Nothing that happened is kept back."""
    broker = open_at()
    events = listen(broker)
    queue = broker.declare_queue("q", limit_messages=1, on_overflow=Overflow.REJECT)
    queue.put(b"1")
    with pytest.raises(qflow.QueueFull):
        queue.put(b"2")
    broker.close()
    assert [event.kind.value for event in events] == ["limit_reached"]


@pytest.mark.owner_only
def test_the_age_of_the_oldest_is_in_the_statistics(open_at: Open, clock: Clock) -> None:
    """Exact where leases or slow consumers are watched, to the second elsewhere."""
    broker = open_at()
    queue = broker.declare_queue("q", ack_timeout_s=100)
    plain = broker.declare_queue("plain")
    for one in (queue, plain):
        one.put_many([b"1", b"2"])
        assert one.stats().oldest_unacked_s == 0
    held = [one.get(0) for one in (queue, plain)]
    inside.tick(plain)
    clock.advance(7)
    queue.get_many(1, timeout_s=0)
    assert (queue.stats().oldest_unacked_s, plain.stats().oldest_unacked_s) == (7, 7)
    held[0].ack()
    held[1].ack()
    assert (queue.stats().oldest_unacked_s, plain.stats().oldest_unacked_s) == (0, 0)
