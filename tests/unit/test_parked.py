"""Dead letters that cannot be stored: they wait out of the way of gets, counted, until maintenance has let them go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

import inside
import qflow
from qflow.message import OVERHEAD_BYTES
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock

Open = Callable[..., qflow.Broker]


@pytest.fixture(params=[True, False], ids=["durable", "transient"])
def durable(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["at once", "by the commit"])
def refusal(request: pytest.FixtureRequest) -> str:
    """When a dead letter finds no room: where it is reserved, or when the log has been handed it."""
    return str(request.param)


@contextmanager
def no_room(broker: Any, queue: qflow.Queue, refusal: str = "at once") -> Iterator[list[int]]:
    """Have no room for dead letters of a queue; provide how many messages there was none for, in each try."""
    tries: list[int] = []
    parts, env = parts_of(queue), broker.engine.log._env
    bury, make_room = parts.exits.bury, env.make_room

    def refuse(source: Any, segments: Any, *others: Any) -> bool:
        tries.append(sum(len(part.records) for part in segments))
        return refusal == "by the commit" and bury(source, segments, *others)

    def full(*arguments: Any, settles_only: bool) -> None:
        if not settles_only:
            raise qflow.DiskFull("no space left")

    parts.exits.bury = refuse  # type: ignore[assignment]
    if refusal == "by the commit":
        env.make_room = full
    try:
        yield tries
    finally:
        broker.engine.log.drain()
        parts.exits.bury, env.make_room = bury, make_room


def declared(broker: qflow.Broker, **settings: Any) -> tuple[qflow.Queue, qflow.Queue]:
    """Return a queue, and that of its dead letters, which is durable: so the log refuses it."""
    dead = broker.declare_queue("dead")
    return broker.declare_queue("q", dead_letter="dead", **settings), dead


def reject(broker: Any, queue: qflow.Queue, reason: str | None = "bad") -> int:
    """Reject the next message, and wait for what becomes of it; return its sequence."""
    delivery = queue.get(0)
    delivery.nack(requeue=False, reason=reason)
    broker.engine.log.drain()
    return delivery.sequence


def drained(queue: qflow.Queue) -> list[bytes]:
    """Settle what can be got at once; return it."""
    found: list[bytes] = []
    while batch := queue.get_many(100, timeout_s=0):
        found += batch.bodies
        batch.ack()
    return found


def test_one_that_cannot_go_holds_up_no_get(open_at: Open, durable: bool, refusal: str) -> None:
    """The next ones come at once, one by one or together, after one try; it is not delivered again."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable, max_deliveries=2)
    queue.put_many([b"%d" % number for number in range(40)])
    with no_room(broker, queue, refusal) as tries:
        for _ in range(2):
            queue.get(0).nack()
            broker.engine.log.drain()
        for number in range(1, 20):
            with queue.get(0) as delivery:
                assert delivery.body == b"%d" % number
        assert drained(queue) == [b"%d" % number for number in range(20, 40)]
        assert (len(queue), len(dead), tries) == (1, 0, [1])
        assert broker.check() == []


def test_maintenance_lets_it_go_as_soon_as_there_is_room(
    open_at: Open, clock: Clock, durable: bool, refusal: str
) -> None:
    """With nobody getting: once a second, for the reason it had, and in the order in which they could not."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable)
    queue.put_many([b"1", b"2", b"3", b"late"])
    queue.put(b"late", ttl_s=1)
    with no_room(broker, queue, refusal) as tries:
        for number in range(3):
            reject(broker, queue, f"reason {number}")
        clock.advance(2)
        for _ in range(3):
            inside.tick(queue)
            assert (len(queue), len(dead)) == (5, 0)
        assert len(tries) < 3 + 2 * 3
    assert inside.upkeep(broker).tick() is False
    broker.engine.log.drain()
    found = [dead.get(0) for _ in range(4)]
    assert [(one.body, one.headers.get("dead_letter_nack_reason")) for one in found[:3]] == [
        (b"1", "reason 0"), (b"2", "reason 1"), (b"3", "reason 2")
    ]  # fmt: skip
    assert found[3].headers["dead_letter_reason"] == "expired"
    stats = queue.stats()
    assert (stats.messages, stats.dead_lettered_total, stats.expired_total, stats.dropped_total) == (1, 4, 1, 0)


def test_thousands_go_in_a_few_commits_once_there_is_room(open_at: Open, durable: bool) -> None:
    """And while there is none, one of them is tried each time."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable)
    queue.put_many([b"%d" % number for number in range(1_000)])
    with no_room(broker, queue, "by the commit") as tries:
        for _ in range(1_000):
            queue.get(0).nack(requeue=False)
        broker.engine.log.drain()
        before = len(tries)
        inside.tick(queue)
        assert len(tries) - before <= 1
    before = broker.engine.log.commits
    while inside.tick(queue):
        pass
    broker.engine.log.drain()
    assert (len(queue), len(dead)) == (0, 1_000)
    assert broker.engine.log.commits - before < 500


def test_it_is_counted_and_shown_as_a_message_that_waits_in_memory(open_at: Open, durable: bool, refusal: str) -> None:
    """In statistics, at a limit, in what `browse` yields, and in what is charged."""
    broker = open_at()
    queue, _ = declared(broker, durable=durable, limit_messages=5, limit_bytes=1000, on_overflow="reject")
    queue.put_many([b"%d" % number for number in range(5)])
    with no_room(broker, queue, refusal):
        reject(broker, queue)
        held = queue.get(0)
        assert held.body == b"1"
        stats = queue.stats()
        assert (stats.messages, stats.resident_messages, stats.acquired_messages, stats.lag_messages) == (5, 4, 1, 4)
        assert (stats.bytes, stats.acquired_bytes, stats.dead_lettered_total) == (5, 1, 0)
        assert (stats.delivered_total, stats.redelivered_total) == (2, 1)
        assert stats.resident_bytes >= 5 * OVERHEAD_BYTES
        with pytest.raises(qflow.QueueFull):
            queue.put(b"more")
        entries = list(queue.browse())
        assert [(entry.sequence, entry.size_bytes, entry.state) for entry in entries] == [
            (number, 1, "resident") for number in (0, 2, 3, 4)
        ]
        entries[0].spill()
        entries[0].restore()
        assert entries[0].state == "resident"
        assert broker.check() == []
        held.ack()
    inside.tick(queue)
    broker.engine.log.drain()
    assert (len(queue), queue.stats().dead_lettered_total) == (3, 1)


@pytest.mark.parametrize("end", ["purge", "delete", "delete one", "no dead letters"])
def test_it_may_go_otherwise_meanwhile(open_at: Open, durable: bool, refusal: str, end: str) -> None:
    """Purged, deleted with its queue or alone, or dropped, as a rejected one is that has nowhere to go."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable)
    queue.put_many([b"1", b"2", b"3", b"4"])
    with no_room(broker, queue, refusal):
        reject(broker, queue)
        batch = queue.get_many(2, timeout_s=0)
        batch.nack(requeue=False)
        broker.engine.log.drain()
        if end == "purge":
            assert queue.purge() == 4
        elif end == "delete":
            broker.delete_queue("q")
        elif end == "delete one":
            assert [queue.delete(number) for number in (1, 1, 7)] == [True, False, False]
            assert [entry.sequence for entry in queue.browse()] == [0, 2, 3]
        assert broker.check() == []
    if end == "no dead letters":
        broker.alter_queue("q", dead_letter=None)
    while inside.tick(queue):
        pass
    broker.engine.log.drain()
    assert broker.check() == []
    left, letters, counted = {
        "purge": (0, 0, ("purged_total", 4)),
        "delete": (0, 0, None),
        "delete one": (1, 2, ("deleted_total", 1)),
        "no dead letters": (1, 0, ("dropped_total", 3)),
    }[end]
    assert len(dead) == letters
    if counted is not None:
        assert (len(queue), getattr(queue.stats(), counted[0])) == (left, counted[1])


@pytest.mark.parametrize("settings", [{}, {"max_deliveries": 2}], ids=["rejected", "counted"])
def test_after_a_restart_it_is_in_its_place_and_known_as_delivered(
    open_at: Open, refusal: str, settings: dict[str, int]
) -> None:
    """A rejected one is delivered again, for nobody knows that any more; one that was delivered too often is not."""
    broker = open_at()
    queue, _ = declared(broker, **settings)
    queue.put_many([b"1", b"2"])
    with no_room(broker, queue, refusal):
        if settings:
            queue.get(0).nack()
            queue.get(0).nack()
        else:
            reject(broker, queue)
        broker.engine.log.drain()
        broker.close()
    broker = open_at()
    queue, dead = broker.queue("q"), broker.queue("dead")
    assert len(queue) == 2
    with queue.get(0) as delivery:
        assert delivery.body == (b"2" if settings else b"1")
        assert delivery.redelivered or settings
    broker.engine.log.drain()
    assert len(dead) == bool(settings)


def test_no_more_than_half_of_the_memory_is_taken(open_at: Open, clock: Clock, durable: bool, refusal: str) -> None:
    """What is more stays in its place: gets wait for that, and it goes when they find it. Nothing is lost."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable, max_deliveries=1, capacity_bytes=20_000)
    bodies = [b"%03d" % number * 300 for number in range(30)]
    queue.put_many(bodies)
    parts = parts_of(queue)
    with no_room(broker, queue, refusal):
        while True:
            try:
                queue.get(0).nack()
            except qflow.QueueEmpty:
                break
            broker.engine.log.drain()
            assert broker.check() == []
        assert 5_000 < parts.held.parked.charged <= 10_000
        assert parts.gate.used <= 20_000 + 1_000 + OVERHEAD_BYTES
        assert (len(queue), len(dead)) == (30, 0)
        assert broker.check() == []
    while len(queue):
        clock.advance(1)
        while inside.tick(queue):
            pass
        with suppress(qflow.QueueEmpty):
            queue.get(0).nack()
        broker.engine.log.drain()
    assert parts.held.parked.charged == 0
    assert sorted(drained(dead)) == bodies


def test_a_queue_with_nothing_else_is_looked_at_until_it_has_gone(open_at: Open, clock: Clock, durable: bool) -> None:
    """Maintenance forgets queues in which nothing happens."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable)
    queue.put(b"1")
    with no_room(broker, queue) as tries:
        reject(broker, queue)
        for _ in range(5):
            clock.advance(1)
            inside.upkeep(broker)._take_steps()
        assert len(tries) == 1 + 5
    clock.advance(1)
    inside.upkeep(broker)._take_steps()
    broker.engine.log.drain()
    assert (len(queue), len(dead)) == (0, 1)


def test_who_gets_waits_for_what_can_be_got(open_at: Open, clock: Clock, durable: bool) -> None:
    """A queue with nothing but dead letters that cannot go is empty to a get; what is put then comes at once."""
    broker = open_at()
    queue, _ = declared(broker, durable=durable)
    queue.put(b"1")
    with no_room(broker, queue):
        reject(broker, queue)
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)
        queue.put(b"2")
        with queue.get(LONG_S) as delivery:
            assert delivery.body == b"2"


def test_the_same_trouble_is_reported_once(open_at: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Not each second, for as long as the disk is full; when it is full again, it is reported again."""
    broker = open_at()
    queue, _ = declared(broker)
    queue.put_many([b"1", b"2"])
    for _ in range(2):
        with no_room(broker, queue, "by the commit"):
            reject(broker, queue)
            for _ in range(3):
                inside.tick(queue)
        inside.tick(queue)
        broker.engine.log.drain()
    assert [record.event for record in caplog.records] == ["dead_letters_stay"] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("capacity_bytes", [6_000, 2**20])
def test_nothing_is_lost_or_doubled_whatever_comes_between(
    open_at: Open, clock: Clock, durable: bool, capacity_bytes: int
) -> None:
    """Random histories, in which there is room for dead letters or not: all books agree after each step."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    broker = open_at()
    queue, dead = declared(broker, durable=durable, max_deliveries=2, capacity_bytes=capacity_bytes)
    numbers = itertools.count()
    wanted: set[bytes] = set()
    held: list[qflow.Delivery] = []
    rooms = ExitStack()

    def put() -> None:
        bodies = [b"%d " % next(numbers) * draw.randrange(1, 100) for _ in range(draw.randrange(1, 9))]
        with suppress(qflow.QueueFull, qflow.DiskFull):
            queue.put_many(bodies, ttl_s=draw.choice([None, 5]), timeout_s=0)
            wanted.update(bodies)

    def get() -> None:
        with suppress(qflow.QueueEmpty):
            held.append(queue.get(0))

    def give_back() -> None:
        if held:
            held.pop(draw.randrange(len(held))).nack(requeue=draw.random() < 0.6)

    def settle() -> None:
        if held:
            delivery = held.pop()
            delivery.ack()
            wanted.discard(delivery.body)

    def fill() -> None:
        rooms.enter_context(no_room(broker, queue, draw.choice(["at once", "by the commit"])))

    def wait() -> None:
        clock.advance(draw.choice([0.1, 1, 10]))
        inside.tick(queue)

    for _ in range(300):
        step = draw.choice([put, get, get, give_back, give_back, settle, wait, fill, rooms.close])
        if step is fill:
            rooms.close()
        step()
        if draw.random() < 0.2:
            broker.engine.log.drain()
            assert broker.check() == []
    rooms.close()
    for delivery in held:
        delivery.nack()
    for _ in range(100):
        clock.advance(1)
        while inside.tick(queue):
            pass
        for delivery in queue.get_many(100, timeout_s=0):
            delivery.ack()
            wanted.discard(delivery.body)
    assert len(queue) == 0
    broker.engine.log.drain()
    assert sorted(drained(dead)) == sorted(wanted)
