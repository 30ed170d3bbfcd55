"""Entries by hand: look at what waits, move it to disk and back, one by one."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import pytest

import qflow
from faults.seams import Faults, FaultyFiles, bodies_of
from qflow.delivery import Entry
from qflow.memory import shelves
from qflow.memory.seeking import Seeking
from qflow.message import OVERHEAD_BYTES
from qflow.queues import browsing
from qflow.queues import entries as module
from qflow.queues.queue import parts_of
from unit.clocks import LONG_S, Clock, open_still

pytestmark = pytest.mark.two_drivers

Open = Callable[..., qflow.Broker]
COST = 1000 + OVERHEAD_BYTES
MESSAGES = 520
"""More than a shelf of a schedule has."""


def entries_of(queue: qflow.Queue) -> list[Entry]:
    return list(queue.browse())


def test_looking_moves_and_acquires_nothing(open_at: Open, durable: bool) -> None:
    """Each entry in order, with its size where memory knows it; the statistics are as they were."""
    queue = open_at().declare_queue("q", durable=durable, capacity_bytes=5 * COST)
    for number in range(12):
        queue.put(b"%04d" % number * 250)
    held = queue.get()
    before = attrs.evolve(queue.stats(), holders=(), oldest_unacked_s=0.0)
    entries = entries_of(queue)
    assert [entry.sequence for entry in entries] == list(range(1, 12))
    assert {entry.size_bytes for entry in entries if not entry.spilled} == {1000}
    assert {entry.state for entry in entries} == {"resident", "spilled"}
    assert attrs.evolve(queue.stats(), holders=(), oldest_unacked_s=0.0) == before  # these two grow
    held.ack()


def test_an_entry_goes_to_disk_and_comes_back(open_spool: Open, durable: bool) -> None:
    """The first, one in the middle, the last; accounts follow, the order holds; twice is once."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"%d" % number * 100 for number in range(9)])
    entries = entries_of(queue)
    for place in (0, 4, 8):
        entries[place].spill()
        entries[place].spill()
        assert entries[place].spilled
    assert queue.stats().spilled_messages == 3
    assert queue.stats().resident_bytes == 6 * (100 + OVERHEAD_BYTES)
    assert broker.check() == []
    entries[4].restore()
    entries[4].restore()
    assert not entries[4].spilled
    assert queue.stats().spilled_messages == 2
    assert [entry.state for entry in queue.browse()] == ["spilled", *["resident"] * 7, "spilled"]
    assert broker.check() == []
    assert bodies_of(queue) == [b"%d" % number * 100 for number in range(9)]


def test_any_order_of_moves_keeps_the_messages(open_spool: Open, durable: bool) -> None:
    """Sizes of all kinds, in random order, with gets in between: nothing lost, order kept, accounts right."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=20 * COST)
    chance = random.Random(5)
    bodies = [b"%02d" % number + b"x" * chance.choice([0, 10, 500, 3_000]) for number in range(40)]
    for body in bodies:
        queue.put(body)
    received = []
    while len(queue):
        for entry in chance.sample(entries := entries_of(queue), min(8, len(entries))):
            try:
                entry.restore() if chance.random() < 0.5 else entry.spill()
            except qflow.QueueFull:
                assert queue.stats().acquired_messages
        assert broker.check() == []
        for _ in range(chance.randrange(3)):
            with queue.get(0) as delivery:
                received.append(delivery.body)
            if not len(queue):
                break
    assert received == bodies


@pytest.mark.owner_only  # through the door, a spill may be under way when an entry is restored
def test_small_entries_restored_beside_large_ones(open_spool: Open, durable: bool) -> None:
    """Nobody knows how the bytes of a spilled run are spread: its parts are read all the same, in little memory."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=5 * COST)
    bodies = [b"L" * 1000] * 6 + [b"s"] * 12
    queue.put_many(bodies)
    broker.alter_queue("q", capacity_bytes=0)
    broker.alter_queue("q", capacity_bytes=4 * COST)
    for entry in entries_of(queue)[6:9]:
        entry.restore()
        assert broker.check() == []
    received = []
    for _ in bodies:
        with queue.get(0) as delivery:
            received.append(delivery.body)
        assert broker.check() == []
    assert received == bodies
    assert queue.stats().bytes == 0


def test_restoring_pushes_others_out(open_spool: Open, durable: bool) -> None:
    """Memory stays bounded: what is needed last leaves for it."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=4 * COST)
    for number in range(10):
        queue.put(b"%04d" % number * 250)
    last = next(entry for entry in queue.browse() if entry.spilled)
    last.restore()
    assert not last.spilled
    assert queue.stats().resident_bytes <= 4 * COST
    assert broker.check() == []
    assert bodies_of(queue) == [b"%04d" % number * 250 for number in range(10)]


def test_no_room_for_a_restore_says_so(open_spool: Open, durable: bool) -> None:
    """What is acquired takes all of it: the entry stays where it is."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable, capacity_bytes=4 * COST)
    for number in range(10):
        queue.put(b"%04d" % number * 250)
    held = queue.get_many(10, timeout_s=0)
    entry = next(entry for entry in queue.browse() if entry.spilled)
    with pytest.raises(qflow.QueueFull, match="memory"):
        entry.restore()
    assert entry.spilled
    assert broker.check() == []
    held.nack()
    assert bodies_of(queue) == [b"%04d" % number * 250 for number in range(10)]


@pytest.mark.owner_only
@pytest.mark.parametrize("how", ["get", "purge", "delete", "close"])
def test_an_entry_that_waits_no_more_says_so(open_spool: Open, durable: bool, how: str) -> None:
    """Delivered, purged, or gone with its queue; nothing is moved."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"1", b"2"])
    entry = entries_of(queue)[0]
    if how == "get":
        queue.get()
    elif how == "purge":
        queue.purge()
    elif how == "delete":
        broker.delete_queue("q")
    else:
        broker.close()
    expected = {"delete": qflow.QueueDeleted, "close": qflow.BrokerClosed}.get(how, qflow.NotFound)
    for move in (entry.spill, entry.restore):
        with pytest.raises(expected):
            move()
    if how in ("delete", "close"):
        with pytest.raises(expected):
            next(queue.browse())


def test_a_disk_that_takes_nothing_leaves_the_entry_where_it_is(spool: Path, clock: Clock) -> None:
    """Edge 9: the half-written file is gone, the message stays in memory and is delivered."""
    faults = Faults()
    broker = open_still(spool, clock, files=FaultyFiles(faults))
    queue = broker.declare_queue("q")
    queue.put_many([b"1", b"2", b"3"])
    faults.fail("pwrite", errno.ENOSPC)
    entry = entries_of(queue)[1]
    with pytest.raises(qflow.StorageError):
        entry.spill()
    assert entry.state == "resident"
    faults.heal()
    assert broker.check() == []
    entry.spill()
    assert bodies_of(queue) == [b"1", b"2", b"3"]
    assert broker.check() == []
    broker.close()


def test_entries_of_the_log_and_delayed_ones_stay_where_they_are(open_at: Open, clock: Clock) -> None:
    """They are shown, in order of priority, and come by themselves."""
    broker = open_at()
    queue = broker.declare_queue("q", priorities=2)
    queue.put_many([b"1", b"2"])
    queue.put(b"3", priority=1)
    broker.close()
    broker = open_at()
    queue = broker.queue("q")
    queue.put(b"4", delay_s=10)
    entries = entries_of(queue)
    assert [entry.state for entry in entries[:3]] == ["logged"] * 3
    assert entries[3].due_ms == int((clock.wall_s + 10) * 1000)
    for entry in entries:
        before = entry.state
        entry.spill()
        entry.restore()
        assert entry.state in (before, "delayed")
    assert bodies_of(queue) == [b"3", b"1", b"2"]
    clock.advance(10)
    assert bodies_of(queue) == [b"4"]


@pytest.mark.owner_only
def test_a_message_taken_while_it_is_written_is_not_spilled(open_spool: Open, durable: bool) -> None:
    """Edge 1: the getter wins; its file is freed."""
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"1", b"2"])
    entry = entries_of(queue)[0]
    real = parts_of(queue).spiller.area.write
    held = []

    def write(*arguments: object) -> object:
        parts_of(queue).spiller.area.write = real  # type: ignore[method-assign]
        held.append(queue.get(0))
        return real(*arguments)  # type: ignore[arg-type]

    parts_of(queue).spiller.area.write = write  # type: ignore[assignment, method-assign]
    with pytest.raises(qflow.NotFound):
        entry.spill()
    assert held[0].body == b"1"
    held[0].ack()
    assert broker.check() == []
    assert bodies_of(queue) == [b"2"]


def test_a_queue_changes_while_it_is_browsed(open_spool: Open, durable: bool) -> None:
    """What was looked at is yielded, whatever happens meanwhile, and nothing that came later."""
    queue = open_spool().declare_queue("q", durable=durable)
    queue.put_many([b"%d" % number for number in range(5)])
    entries = queue.browse()
    first = next(entries)
    queue.get_many(3).ack()
    queue.put(b"5")
    assert [first.sequence, *(entry.sequence for entry in entries)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_stays_in_its_place_is_shown_once(
    open_spool: Open, durable: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are looked at at a time; others are taken, come back, are moved and put in between."""
    for where, name, few in (
        (browsing, "AT_ONCE", 3),
        (browsing, "LOOKED_AT_ONCE", 5),
        (browsing, "GROUPS_AT_ONCE", 1),
    ):
        monkeypatch.setattr(where, name, few)
    monkeypatch.setattr(shelves, "SHELF", 3)
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    chance = random.Random(seed)
    there = {*queue.put_many([b"x" * chance.randrange(2000) for _ in range(300)])}
    there.update(queue.put(b"later", delay_s=chance.randrange(500, 1500)) for _ in range(40))
    held = list(queue.get_many(100))
    for delivery in held[::3]:
        delivery.nack()
    del held[::3]
    for entry in chance.sample([*queue.browse()], 60):
        entry.spill()
    staying = {entry.sequence for entry in queue.browse()}
    assert staying == there - {delivery.sequence for delivery in held}
    shown = []
    for entry in queue.browse():
        shown.append(entry)
        match chance.randrange(5):
            case 0:
                staying.difference_update(queue.get_many(2).sequences)
            case 1 if held:
                held.pop(chance.randrange(len(held))).nack()
            case 2:
                queue.put(b"new", delay_s=chance.choice([None, chance.randrange(500, 1500)]))
            case 3 if entry.due_ms is None and entry.sequence in staying:
                entry.restore() if entry.spilled else entry.spill()
    sequences = [entry.sequence for entry in shown]
    assert len({*sequences}) == len(sequences)
    assert staying <= {*sequences} <= there
    waiting = [entry.sequence for entry in shown if entry.due_ms is None]
    assert waiting == sorted(waiting)
    due = [entry.due_ms for entry in shown if entry.due_ms is not None]
    assert due == sorted(due)
    assert len(due) == 40
    assert broker.check() == []


def test_a_look_at_the_first_looks_at_no_more(open_spool: Open, monkeypatch: pytest.MonkeyPatch, durable: bool) -> None:
    """As `qflow top` and the page do; a browse to the end looks at a part at a time."""
    looked: list[int] = []
    look, look_at_shelves = browsing.Browsing._look, browsing.Browsing._look_at_shelves

    def counted(here: browsing.Browsing, *given: Any) -> Any:
        parts = look(here, *given)
        looked.append(sum(part.stop - part.first for part in parts))
        return parts

    def counted_on_shelves(here: browsing.Browsing, *given: Any) -> Any:
        groups, key = look_at_shelves(here, *given)
        looked.append(len(groups))
        return groups, key

    monkeypatch.setattr(browsing.Browsing, "_look", counted)
    monkeypatch.setattr(browsing.Browsing, "_look_at_shelves", counted_on_shelves)
    broker = open_spool()
    queue = broker.declare_queue("q", durable=durable)
    queue.put_many([b"x"] * 50_000)
    for future in [queue.submit(b"x", delay_s=1000 + number) for number in range(1_200)]:
        future.result(LONG_S)
    assert len([*islice(queue.browse(), 50)]) == 50
    assert looked == [browsing.AT_ONCE]
    looked.clear()
    assert len({entry.sequence for entry in queue.browse()}) == 51_200
    assert max(looked) <= browsing.LOOKED_AT_ONCE
    assert sum(looked) >= 50_000
    assert broker.check() == []


@pytest.mark.parametrize("how", ["put", "given back"])
def test_a_delayed_one_is_looked_for_in_steps_and_told_as_such(
    open_spool: Open, durable: bool, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """All of a schedule was gone through under the lock: with 200,000 in it, a put stood behind that for a second."""
    monkeypatch.setattr(module, "SOUGHT_AT_ONCE", 100)
    steps: list[int] = []
    seekings: set[Seeking] = set()
    look = Seeking.look

    def count(seeking: Seeking, most: int) -> Any:
        steps.append(most)
        seekings.add(seeking)
        return look(seeking, most)

    monkeypatch.setattr(Seeking, "look", count)
    queue = open_spool().declare_queue("q", durable=durable)
    if how == "put":
        for future in [queue.submit(b"x", delay_s=LONG_S + number) for number in range(MESSAGES)]:
            future.result(LONG_S)
    else:
        queue.put_many([b"x"] * MESSAGES)
        for number, delivery in enumerate(queue.get_many(MESSAGES)):
            delivery.nack(delay_s=LONG_S + number)
    entry = list(queue.browse())[-1]
    entry.spill()
    assert (entry.state, len(steps) > 1, {*steps}) == ("delayed", True, {100})
    entry.restore()
    assert entry.state == "delayed"
    queue.purge()
    with pytest.raises(qflow.NotFound):
        entry.spill()
    assert not any(seeking.schedule.shelves.sought for seeking in seekings)
