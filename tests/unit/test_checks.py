"""`broker.check()`: it looks in steps, finds what is wrong, and is not misled by what goes on meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import qflow
from faults.seams import PATIENCE_S, in_thread
from qflow.config import SPILL_STORES
from qflow.memory.shelves import Shelf
from qflow.queues import checking
from qflow.queues.claims import Claims
from qflow.queues.queue import parts_of
from qflow.storage.spill.slots import Ranges
from qflow.streams.partition import Partition

Open = Callable[..., qflow.Broker]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages were counted in each part; a part has a hundred at most."""
    parts: list[int] = []
    charge = checking.charge
    monkeypatch.setattr(checking, "LOOKED_AT_ONCE", 100)
    monkeypatch.setattr(checking, "charge", lambda records: parts.append(len(records)) or charge(records))
    return parts


def between_steps(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something done where a check lets go of the lock."""
    monkeypatch.setattr(checking, "sleep", lambda _: act())


@pytest.mark.parametrize("durable", [True, False])
def test_messages_are_counted_in_steps_and_the_lock_is_free_between_them(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, counted: list[int], durable: bool
) -> None:
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 1_000)
    for number in range(250):
        queue.put(b"%d" % number, headers={"n": number}, durable=False)
    lock = parts_of(queue).context.lock
    looks: list[tuple[bool, int]] = []

    def look() -> None:
        free = in_thread(lambda: lock.acquire(blocking=False) and not lock.release())
        looks.append((bool(free), sum(counted)))

    between_steps(monkeypatch, look)
    assert broker.check() == []
    assert max(counted) <= 100
    assert sum(counted) == 1_250
    assert len(looks) >= 12
    assert all(free for free, _ in looks)
    assert [number for _, number in looks] == sorted({number for _, number in looks})


def test_delayed_messages_are_looked_at_in_steps(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    """A shelf at a time, each once."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=False)
    for number in range(3_000):
        queue.put(b"x", delay_s=1_000 + number * 7 % 1_000)
    seen: list[int] = []

    def look() -> None:
        shelves = parts_of(queue).lanes.schedules[16].shelves.all
        seen.append(sum(1 for shelf in shelves if shelf.seen is not None))

    between_steps(monkeypatch, look)
    assert broker.check() == []
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 5


@pytest.mark.parametrize("spill", SPILL_STORES)
@pytest.mark.parametrize("durable", [True, False])
def test_what_changes_while_it_is_checked_is_no_problem(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, counted: list[int], durable: bool, spill: str
) -> None:
    """Messages come, go, come back, are spilled and restored between any two steps."""
    chance = random.Random(f"{durable} {spill}")
    broker = open_spool(spill=spill)
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=60_000, priorities=2, limit_bytes=10**9)
    held: list[Any] = []

    def act() -> None:
        for _ in range(chance.randrange(4)):
            step = chance.randrange(7)
            if step == 0:
                queue.put_many([b"%d" % step * chance.randrange(100)] * 300, priority=chance.randrange(2))
            elif step == 1:
                queue.put(b"late", delay_s=chance.choice([0, 1000]), headers={"a": 1})
            elif step == 2:
                held.append(queue.get_many(chance.randrange(1, 200), timeout_s=0))
            elif step == 3 and len(queue):
                with_one = queue.get_many(1, timeout_s=0)
                held.extend(with_one)
            elif held:
                one = held.pop(chance.randrange(len(held)))
                one.nack() if step == 4 else one.ack()

    for _ in range(12):
        act()
        queue.put_many([b"x" * 50] * 250)
    between_steps(monkeypatch, act)
    for _ in range(10):
        assert broker.check() == []
    assert queue.stats().spilled_messages > 0


def too_much_charged(queue: qflow.Queue) -> None:
    parts_of(queue).gate.used += 7


def one_too_few(queue: qflow.Queue) -> None:
    parts_of(queue).lanes.gone += 1


def shelf_upside_down(queue: qflow.Queue) -> None:
    shelf: Shelf = parts_of(queue).lanes.schedules[16].shelves.all[0]
    shelf.in_order = True
    shelf.sort(reverse=True)


def slots_forgotten(queue: qflow.Queue) -> None:
    run = next(run for run in parts_of(queue).lanes.runs if run.slots)
    _, run.slots = run.slots.take(2)


def slots_used_twice(queue: qflow.Queue) -> None:
    run = next(run for run in parts_of(queue).lanes.runs if run.slots)
    parts_of(queue).spiller.trash.append(run.slots.take(2)[0])


@pytest.mark.parametrize("spill", SPILL_STORES)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (too_much_charged, "bytes are charged, a recount gives"),
        (one_too_few, "messages by the counters"),
        (shelf_upside_down, "is not in order"),
        (slots_forgotten, "no message"),
        (slots_used_twice, "in use more than once"),
    ],
)
def test_what_is_wrong_is_found_while_messages_come_and_go(
    open_at: Open,
    monkeypatch: pytest.MonkeyPatch,
    counted: list[int],
    spill: str,
    damage: Callable[[qflow.Queue], None],
    words: str,
) -> None:
    broker = open_at(spill=spill)
    queue = broker.declare_queue("q", durable=False, capacity_bytes=60_000)
    for due in (900, 700, 800):
        queue.put(b"late", delay_s=due)
    queue.put_many([b"x" * 100] * 1_000)
    assert broker.check() == []
    damage(queue)

    def act() -> None:
        queue.put(b"x")
        queue.get(0).ack()

    between_steps(monkeypatch, act)
    assert any(words in problem for problem in broker.check())
    broker.close()  # before the fixture checks it


def test_what_is_on_its_way_is_no_problem(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of what is just being spilled are in no list yet: a check waits for the end of that, and looks again."""
    broker = open_spool(spill="segments")
    queue = broker.declare_queue("q", durable=False)
    queue.put_many([b"x" * 100] * 10)
    spiller = parts_of(queue).spiller
    slots = spiller.area.write(0, [b"on its way"])
    spiller.under_way.add(slots_forgotten)

    def arrive() -> None:
        if slots_forgotten in spiller.under_way:
            spiller.trash.append(slots)
            spiller.under_way.discard(slots_forgotten)

    between_steps(monkeypatch, arrive)
    assert broker.check() == []
    assert slots_forgotten not in spiller.under_way


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("durable", [True, False])
def test_what_an_acking_thread_is_about_to_give_back_is_no_problem(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, durable: bool, batch: bool
) -> None:
    """Of a capacity that was lowered under what is held: the thread charges less, and gives back a moment later."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=100_000)
    queue.put_many([b"x" * 1_000] * 50)
    held = queue.get_many(25) if batch else queue.get()
    others = queue.get_many(25)
    broker.alter_queue(queue, capacity_bytes=1_000)
    acked, looked = threading.Event(), threading.Event()
    give_back = Claims._let_others_look

    def late(claims: Claims) -> None:
        acked.set()
        assert looked.wait(PATIENCE_S)
        give_back(claims)

    monkeypatch.setattr(Claims, "_let_others_look", late)
    between_steps(monkeypatch, looked.set)
    with ThreadPoolExecutor(1) as threads:
        acking = threads.submit(held.ack)
        assert acked.wait(PATIENCE_S)
        try:
            found = broker.check()
        finally:
            looked.set()
        acking.result()
    assert found == []
    others.ack()


def test_what_stays_borrowed_above_a_capacity_is_a_problem(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is charged is another number at each look."""
    broker = open_at()
    queue = broker.declare_queue("q", durable=False)
    queue.put(b"x")
    gate = parts_of(queue).gate
    used = gate.used
    gate.ledger.set_capacity(gate.account, used)
    step = checking._Counting.step

    def charged_meanwhile(counting: Any) -> Any:
        gate.used -= 1
        return step(counting)

    monkeypatch.setattr(checking._Counting, "step", charged_meanwhile)
    monkeypatch.setattr(checking, "GIVING_BACK_S", 0)
    assert sum("are borrowed of a capacity of" in problem for problem in broker.check()) == 1
    gate.used = used
    broker.close()  # before the fixture checks it


def test_a_stream_that_has_lost_more_than_its_row_says_is_a_problem(open_at: Open) -> None:
    """Also where the log begins later."""
    broker = open_at()
    stream = broker.declare_stream("s", topics=["t"], retention_messages=5)
    broker.publish_many([("t", b"x")] * 5)
    broker.publish_many([("t", b"x")] * 5)
    stream.retain()
    lane = broker.engine.streams.get("s").history.partitions[0].lane
    row = lane.row
    lane.row = row._replace(floor=row.floor - 3, messages=row.messages + 3)
    (problem,) = broker.check()
    assert "the log holds less" in problem
    lane.row = row


def test_what_retention_takes_while_a_broker_checks_itself_is_no_problem(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the row and its blocks."""
    broker = open_spool()
    stream = broker.declare_stream("s", topics=["s"])
    for _ in range(20):
        broker.publish("s", b"x")
    history = broker.engine.streams.get("s").history
    read = history.read

    def read_late(*given: Any) -> Any:
        broker.alter_stream("s", retention_messages=5)
        stream.retain()
        return read(*given)

    monkeypatch.setattr(history, "read", read_late)
    assert broker.check() == []
    assert stream.stats().messages == 5


def test_what_is_confirmed_and_not_visible_yet_is_no_problem(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row counts a commit before its messages may be read."""
    broker = open_spool()
    broker.declare_stream("s", topics=["s"])
    broker.publish("s", b"before")
    history = broker.engine.streams.get("s").history
    counted, looked = threading.Event(), threading.Event()
    read, show = history.read, Partition.publish_topics

    def read_and_tell(*given: Any) -> Any:
        looked.set()
        return read(*given)

    def show_late(*given: Any) -> None:
        counted.set()
        assert looked.wait(PATIENCE_S)
        show(*given)

    monkeypatch.setattr(history, "read", read_and_tell)
    monkeypatch.setattr(Partition, "publish_topics", show_late)
    with ThreadPoolExecutor(1) as threads:
        publishing = threads.submit(broker.publish_many, [("s", b"x")] * 3)
        assert counted.wait(PATIENCE_S)
        try:
            found = broker.check()
        finally:
            looked.set()
        publishing.result()
    assert found == []


def test_spilled_messages_are_compared_by_ranges(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and whatever was freed of them."""
    broker = open_spool(spill="segments")
    queue = broker.declare_queue("q", durable=False, capacity_bytes=20_000)
    queue.put_many([b"x" * 10] * 30_000)
    queue.get_many(500, timeout_s=0).ack()
    area = parts_of(queue).spiller.area
    given: list[Ranges] = []
    compare = area.problems
    monkeypatch.setattr(area, "problems", lambda used: given.append(used) or compare(used))
    assert broker.check() == []
    assert len(given) == 1
    assert len(given[0]) > 20_000
    assert len(given[0].ranges) < 50


# Ranges --------------------------------------------------------------------------------------------------------------


def some_ranges(chance: random.Random) -> Iterator[range]:
    for _ in range(chance.randrange(8)):
        start = chance.randrange(40)
        yield range(start, start + chance.randrange(1, 8))


def test_transient_messages_of_a_transaction_that_are_spilled_are_not_in_the_log(open_spool: Open) -> None:
    broker = open_spool(capacity_bytes=60_000)
    queue, other = broker.declare_queue("q"), broker.declare_queue("other")
    with broker.transaction() as tx:
        for _ in range(4):
            tx.put(queue, b"x" * 9_000, durable=False)
            tx.put(queue, b"y" * 9_000)
    other.put_many([b"z" * 9_000] * 6)
    assert queue.stats().spilled_messages > 1
    broker.engine.log.drain()
    assert broker.check() == []


@pytest.mark.parametrize("seed", range(200))
def test_ranges_are_sets_of_numbers(seed: int) -> None:
    chance = random.Random(seed)
    pieces, others = list(some_ranges(chance)), list(some_ranges(chance))
    numbers = [number for piece in pieces for number in piece]
    one, two = Ranges(pieces), Ranges(others)
    assert [number for piece in one.ranges for number in piece] == sorted(set(numbers))
    assert len(one) == len(set(numbers))
    assert all((number in one) == (number in numbers) for number in range(60))
    assert {number for piece in one.twice for number in piece} == {one for one in numbers if numbers.count(one) > 1}
    left = [number for piece in one.without(two) for number in piece]
    assert left == [number for piece in one.ranges for number in piece if number not in two]
    assert Ranges.of(numbers).ranges == one.ranges


def test_a_queue_that_is_deleted_while_it_is_checked_is_not_told_as_wrong(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    """What is left of it in the log is on its way out."""
    broker = open_spool()
    broker.declare_queue("q").put_many([b"x"] * 1_000)
    between_steps(monkeypatch, lambda: "q" in broker.queues() and in_thread(lambda: broker.delete_queue("q")))
    assert broker.check() == []
    assert "q" not in broker.queues()
