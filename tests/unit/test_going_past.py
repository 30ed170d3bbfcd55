"""Dead letters that find no room stay in their place, and gets go past them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest

import inside
import qflow
from faults.seams import bodies_of
from qflow.deliveries import deliveries_of
from qflow.memory.waiting import shelter
from qflow.queues import getting
from qflow.queues.queue import parts_of
from qflow.queues.together import Together
from unit.clocks import LONG_S, Clock

Open = Callable[..., qflow.Broker]


@pytest.fixture(params=["at once", "by its queue", "by the commit"])
def refusal(request: pytest.FixtureRequest) -> str:
    """When a dead letter finds no room: before it is looked for, where it is reserved, or when the log was handed it."""
    return str(request.param)


@contextmanager
def no_room(broker: Any, queue: qflow.Queue, refusal: str = "at once") -> Iterator[list[int]]:
    """Have no room for dead letters of a queue; provide how many messages there was none for, in each try."""
    tries: list[int] = []
    parts, env = parts_of(queue), broker.engine.log._env
    bury, make_room = parts.exits.bury, env.make_room

    def refuse(source: Any, segments: Any, *others: Any) -> bool:
        tries.append(sum(len(part.records) for part in segments))
        return refusal != "at once" and bury(source, segments, *others)

    def full(*arguments: Any, settles_only: bool) -> None:
        if not settles_only:
            raise qflow.DiskFull("no space left")

    def prepare(together: Together, receipts: Any, timeout: float | None, assembly: Any) -> Any:
        if assembly.dead or receipts[0].is_dead:
            raise qflow.DiskFull("no space left")
        return prepares(together, receipts, timeout, assembly)

    prepares = Together.preparing
    parts.exits.bury = refuse  # type: ignore[assignment]
    if refusal == "by the commit":
        env.make_room = full
    elif refusal == "by its queue":
        Together.preparing = prepare  # type: ignore[method-assign]
    try:
        yield tries
    finally:
        broker.engine.log.drain()
        parts.exits.bury, env.make_room = bury, make_room
        Together.preparing = prepares  # type: ignore[method-assign]


def declared(broker: qflow.Broker, **settings: Any) -> tuple[qflow.Queue, qflow.Queue]:
    """Return a queue, and that of its dead letters, which is durable: so the log refuses it."""
    dead = broker.declare_queue("dead")
    return broker.declare_queue("q", dead_letter="dead", **settings), dead


def spend(broker: Any, queue: qflow.Queue, count: int = 1) -> None:
    """Have so many messages of a queue with `max_deliveries=1` delivered as often as they may be."""
    queue.get_many(count, timeout_s=0).nack()
    broker.engine.log.drain()


@pytest.mark.parametrize("most", [1, 7])
def test_the_next_ones_come_at_once_and_in_order(open_at: Open, durable: bool, refusal: str, most: int) -> None:
    broker = open_at()
    queue, dead = declared(broker, durable=durable, max_deliveries=1)
    queue.put_many([b"%d" % number for number in range(40)])
    with no_room(broker, queue, refusal) as tries:
        spend(broker, queue, 2)
        found: list[bytes] = []
        while len(queue) > 2:
            batch = queue.get_many(most, timeout_s=LONG_S)
            found += batch.bodies
            batch.ack()
            broker.engine.log.drain()
        assert found == [b"%d" % number for number in range(2, 40)]
        assert (len(dead), tries) == (0, [2])
        assert broker.check() == []


def test_it_goes_when_there_is_room_and_somebody_gets(open_at: Open, clock: Clock, refusal: str) -> None:
    broker = open_at()
    queue, dead = declared(broker, max_deliveries=1)
    queue.put_many([b"1", b"2"])
    with no_room(broker, queue, refusal):
        spend(broker, queue)
        with pytest.raises(qflow.QueueEmpty):
            queue.get_many(1, timeout_s=0).ack()
            queue.get(0)
        clock.advance(1)
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)
        broker.engine.log.drain()
    clock.advance(1)
    with pytest.raises(qflow.QueueEmpty):
        queue.get(0)
    broker.engine.log.drain()
    letter = dead.get(0)
    assert (letter.body, letter.headers["dead_letter_reason"], len(queue)) == (b"1", "max_deliveries", 0)


def test_what_was_rejected_comes_again_a_second_later(open_at: Open, clock: Clock, durable: bool, refusal: str) -> None:
    """Else a consumer that rejects it again would get nothing else."""
    broker = open_at()
    queue, dead = declared(broker, durable=durable)
    queue.put_many([b"1", b"2", b"3"])
    with no_room(broker, queue, refusal):
        for body in (b"1", b"2"):
            delivery = queue.get(0)
            assert delivery.body == body
            delivery.nack(requeue=False, reason="no room")
            broker.engine.log.drain()
        queue.get(0).ack()
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)
        assert broker.check() == []
        clock.advance(1.1)
        queue.get(0).nack(requeue=False)
        broker.engine.log.drain()
        assert queue.get(0).body == b"2"
        clock.advance(1.1)
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)
        clock.advance(1)
    queue.get(0).nack(requeue=False, reason="room")
    broker.engine.log.drain()
    letter = dead.get(0)
    assert (letter.body, letter.headers["dead_letter_nack_reason"]) == (b"1", "room")


def test_no_more_than_some_are_gone_past(
    open_at: Open, clock: Clock, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each get looks at all of them: more hold it up until it is time to try again."""
    monkeypatch.setattr(getting, "MOST_PASSED", 3)
    broker = open_at()
    queue, dead = declared(broker, max_deliveries=1)
    queue.put_many([b"1", b"2", b"3", b"4", b"5", b"6"])
    with no_room(broker, queue, refusal):
        spend(broker, queue, 3)
        assert queue.get(0).body == b"4"
        spend(broker, queue)
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)
        assert broker.check() == []
    clock.advance(1)
    assert queue.get(0).body == b"6"
    broker.engine.log.drain()
    assert [delivery.body for delivery in dead.get_many(9, timeout_s=0)] == [b"1", b"2", b"3", b"5"]


def test_it_is_in_its_place_for_all_else(open_at: Open, durable: bool) -> None:
    """Shown, deleted, dropped as the oldest of a ring, purged, and spilled where the capacity is less."""
    broker = open_at()
    queue, _ = declared(broker, durable=durable, max_deliveries=1, limit_messages=4, on_overflow="drop_oldest")
    queue.put_many([b"1", b"2", b"3", b"4"])
    with no_room(broker, queue):
        spend(broker, queue, 3)
        held = queue.get(0)
        assert [(entry.sequence, entry.state) for entry in queue.browse()] == [
            (0, "resident"), (1, "resident"), (2, "resident")
        ]  # fmt: skip
        assert queue.delete(1)
        queue.put_many([b"5", b"6"])
        assert [entry.sequence for entry in queue.browse()] == [2, 4, 5]
        broker.alter_queue("q", capacity_bytes=0)
        assert [entry.state for entry in queue.browse()] == ["spilled"] * 3
        held.ack(wait=True)
        assert broker.check() == []
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)  # what it goes past is in memory, which has no room for more
        broker.alter_queue("q", capacity_bytes=10_000)
        assert queue.get(LONG_S).body == b"5"
        assert queue.purge() == 3
        assert broker.check() == []


def test_a_purge_while_a_get_reads_from_the_disk_takes_what_it_went_past(open_at: Open, durable: bool) -> None:
    broker = open_at(capacity_bytes=2_000)
    queue, _ = declared(broker, durable=durable, max_deliveries=1)
    queue.put_many([b"%03d" % number * 100 for number in range(30)])
    restorer = parts_of(queue).restorer
    bring, brought = restorer.bring, []

    def purge(behind: Any) -> bool:
        if not brought:
            brought.append(behind)
            lock = parts_of(queue).context.lock
            lock.release()
            try:
                queue.purge()
            finally:
                lock.acquire()
        return bool(bring(behind))

    with no_room(broker, queue):
        spend(broker, queue)
        with pytest.raises(qflow.QueueEmpty):
            queue.get(0)  # it is refused: from now on gets go past it
            queue.get_many(30, timeout_s=0).ack()
            restorer.bring = purge  # type: ignore[method-assign]
            queue.get(0)
    assert broker.check() == []
    assert len(queue) == 0


def test_a_get_takes_no_more_than_it_wants_where_all_may_be_delivered_meanwhile(open_at: Open, durable: bool) -> None:
    """Of several that it took, a get of one handed the first out, and nobody had the others."""
    broker = open_at(capacity_bytes=8_000)
    queue, _ = declared(broker, durable=durable, max_deliveries=1)
    queue.put_many([b"%03d" % number for number in range(200)])
    restorer = parts_of(queue).restorer
    bring = restorer.bring

    def alter(behind: Any) -> bool:
        lock = parts_of(queue).context.lock
        lock.release()
        try:
            broker.alter_queue("q", max_deliveries=None)
        finally:
            lock.acquire()
        return bool(bring(behind))

    with no_room(broker, queue):
        spend(broker, queue, 3)
        queue.get_many(200, timeout_s=0).ack()  # they are refused: from now on gets go past them, and read what follows
        restorer.bring = alter  # type: ignore[method-assign]
        queue.get(0).ack()
    assert broker.check() == []


@pytest.mark.parametrize("what", ["purge", "give up"])
def test_a_get_that_is_overtaken_while_a_late_lease_ends_takes_nothing(
    open_at: Open, clock: Clock, durable: bool, what: str
) -> None:
    """It lets go of the lock to have a message buried that its holder had for too long."""
    broker = open_at()
    queue, _ = declared(broker, durable=durable, max_deliveries=1, ack_timeout_s=5)
    queue.put_many([b"1", b"2", b"3"])
    held = queue.get(0)
    clock.advance(6)
    parts = parts_of(queue)
    getter = parts.gets.begin(1, 0, None)
    bury = parts.exits.bury

    def overtake(*arguments: Any) -> bool:
        parts.exits.bury = bury
        if what == "purge":
            queue.purge()
            queue.put_many([b"2", b"3"])
        else:
            shelter(getter.give_up)
        return bury(*arguments)

    parts.exits.bury = overtake  # type: ignore[assignment]
    shelter(partial(getter.step, None, may_work=True))
    found = [] if getter.collected is None or what == "give up" else deliveries_of(getter.collected).bodies
    assert [*found, *queue.get_many(9, timeout_s=0).bodies] == [b"2", b"3"]
    broker.engine.log.drain()
    assert broker.check() == []
    assert held.body == b"1"


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
        rooms.enter_context(no_room(broker, queue, draw.choice(["at once", "by its queue", "by the commit"])))

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
        broker.engine.log.drain()
    assert len(queue) == 0
    assert sorted(bodies_of(dead)) == sorted(wanted)
