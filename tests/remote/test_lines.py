"""Whose requests go when a connection has as many under way as it may."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

import qflow
import qflow.aio
from doors import event_loop
from qflow import QueueFull
from qflow.remote.client.lines import ANY, Lined, Lines
from qflow.remote.server.operations import admin


class Asked:
    """Requests for places, in the order in which they got them."""

    def __init__(self, most: int = 16) -> None:
        self.most = most
        self.lines: Lines[Lined] = Lines(most, self._go)
        self.under_way: list[Lined] = []
        self.gone: list[Lined] = []

    def ask(self, line: str | None) -> Lined:
        one = Lined(line)
        if self.lines.ask(one):
            self._go(one)
        return one

    def ask_many(self, count: int, line: str | None) -> list[Lined]:
        return [self.ask(line) for _ in range(count)]

    def _go(self, one: Lined) -> None:
        assert one not in self.gone
        self.gone.append(one)
        self.under_way.append(one)

    def answer(self, one: Lined) -> list[Lined]:
        """Return what goes then."""
        before = len(self.gone)
        self.under_way.remove(one)
        self.lines.leave(one)
        return self.gone[before:]

    def shares(self) -> dict[str | None, int]:
        return dict(Counter(one.line for one in self.under_way))


def test_each_full_queue_takes_half_of_what_is_left_and_each_of_the_next_a_place() -> None:
    asked = Asked(most=1000)
    for line in "abcdefghij":
        asked.ask_many(1000, line)
    assert list(asked.shares().values())[:4] == [375, 188, 94, 47]
    assert sum(asked.shares().values()) <= 760
    for number in range(230):
        asked.ask_many(3, f"another {number}")
        assert asked.shares()[f"another {number}"] == 1


def test_a_queue_that_is_not_full_goes_on_beside_full_ones() -> None:
    """In the order in which its requests were made."""
    asked = Asked(most=40)
    for line in ("full", "too", "as well"):
        asked.ask_many(50, line)
    for one in asked.ask_many(200, "lively"):
        assert one in asked.under_way
        asked.answer(one)


def test_places_that_come_free_go_round() -> None:
    """What one line leaves the others have, too."""
    asked = Asked(most=64)
    for line in "abcd":
        asked.ask_many(200, line)
    chance = random.Random(1)
    for _ in range(400):
        asked.answer(chance.choice(asked.under_way))
    assert sum(asked.shares().values()) > 32
    assert max(asked.shares().values()) - min(asked.shares().values()) <= 24


def test_what_is_submitted_goes_in_its_order_and_nothing_later_before_it() -> None:
    """It takes what there is; whoever waits for an answer overtakes nothing that he has submitted."""
    asked = Asked(most=8)
    submitted = asked.ask_many(8, None)
    kept, later, last = asked.ask(None), asked.ask("free"), asked.ask(None)
    assert asked.under_way == submitted
    assert asked.answer(submitted[0]) == [kept]
    assert asked.answer(submitted[1]) == [later]
    assert asked.answer(submitted[2]) == [last]


def test_what_waited_behind_others_and_is_of_a_full_queue_lets_those_behind_it_go() -> None:
    asked = Asked(most=16)
    full = asked.ask_many(6, "full")
    submitted = asked.ask_many(10, None)
    kept, behind = asked.ask_many(3, "full"), asked.ask("free")
    assert asked.answer(submitted[0]) == [behind]
    for one in submitted[1:]:
        asked.answer(one)
    assert [one for one in kept if one in asked.gone] == []
    assert asked.answer(full[0]) == kept[:1]


def test_what_is_given_up_lets_those_behind_it_go_and_is_not_kept() -> None:
    asked = Asked(most=8)
    first = asked.ask_many(8, None)
    kept, publish = asked.ask(None), asked.ask(ANY)
    asked.lines.leave(kept)
    asked.lines.leave(kept)
    assert asked.lines.count == 8
    assert asked.answer(first[0]) == [publish]
    waits = asked.ask_many(100, "full")
    for one in waits:
        if one not in asked.gone:
            asked.lines.leave(one)
    assert not asked.lines._waiting
    assert not asked.lines._all


def test_who_has_waited_long_enough_goes_though_there_is_no_place() -> None:
    """But not before what may be its caller's own."""
    asked = Asked(most=8)
    asked.ask_many(3, "full")
    asked.ask_many(5, "free")
    kept, other = asked.ask("full"), asked.ask("full")
    assert asked.lines.hurry(kept)
    assert asked.lines.count == len(asked.under_way) + 1
    asked.lines.leave(kept)
    assert asked.lines.count == len(asked.under_way)
    assert other not in asked.gone
    asked.ask_many(8, None)
    behind = asked.ask("another")
    assert not asked.lines.hurry(behind)
    assert asked.lines.hurry(other)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_asked_for_gets_a_place(seed: int) -> None:
    """In the order of its line, as long as there are answers; with what is given up meanwhile."""
    chance = random.Random(seed)
    asked = Asked(most=chance.randint(1, 30))
    lines = [ANY, None, *map(str, range(chance.randint(1, 40)))]
    every: list[Lined] = []
    for _ in range(600):
        step = chance.random()
        if step < 0.6:
            every.append(asked.ask(chance.choice(lines)))
        elif step < 0.7:
            waiting = [one for one in every if one not in asked.gone]
            if waiting:
                asked.lines.leave(every.pop(every.index(chance.choice(waiting))))
        elif asked.under_way:
            asked.answer(chance.choice(asked.under_way))
        assert asked.lines.count == len(asked.under_way) <= asked.most
        assert asked.under_way or not asked.lines._waiting
        for one in every[-30:]:  # a line with nothing under way waits only where there is no place
            assert one in asked.gone or one.line in asked.shares() or len(asked.under_way) == asked.most
    while asked.under_way:
        asked.answer(chance.choice(asked.under_way))
    assert (asked.lines.count, asked.lines._counts) == (0, {})
    for line in lines:
        assert [one for one in asked.gone if one.line == line] == [one for one in every if one.line == line]


# Through the door ----------------------------------------------------------------------------------------------------

MOST = 16


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not many may be under way."""
    monkeypatch.setattr(admin, "MOST_REQUESTS", MOST)


@pytest.mark.usefixtures("few")
def test_tasks_that_wait_for_room_in_a_full_queue_hold_up_no_other_put(owner: qflow.Broker, spool: Path) -> None:
    """However many they are, and nor do they hold up a publish."""
    owner.declare_queue("full", limit_messages=1, durable=False).put(b"first")
    owner.declare_queue("free", durable=False)
    owner.bind("free", "t")

    async def scenario() -> None:
        async with await qflow.aio.connect(spool) as remote:
            full, free = await remote.queue("full"), await remote.queue("free")
            waiting = [asyncio.create_task(full.put(b"%d" % number)) for number in range(3 * MOST)]
            await event_loop.until(lambda: owner.queue("full").stats().blocked_putters == MOST * 3 // 8)
            assert await asyncio.gather(*(free.put(b"x") for _ in range(2 * MOST))) == list(range(2 * MOST))
            await remote.publish("t", b"y")
            for _ in waiting:
                async with await full.get():
                    pass
            await asyncio.gather(*waiting)

    event_loop.run(scenario())


@pytest.mark.usefixtures("few")
def test_a_put_with_a_time_out_is_told_in_time_also_where_it_was_kept(owner: qflow.Broker, spool: Path) -> None:
    """By the owner, who knows whether there is room."""
    owner.declare_queue("full", limit_messages=1, durable=False).put(b"first")

    async def scenario() -> None:
        async with await qflow.aio.connect(spool) as remote:
            full = await remote.queue("full")
            waiting = [asyncio.create_task(full.put(b"x")) for _ in range(2 * MOST)]
            await event_loop.until(lambda: owner.queue("full").stats().blocked_putters == MOST * 3 // 8)
            with pytest.raises(QueueFull):
                await full.put(b"y", timeout_s=0.02)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (await full.get()).body == b"first"

    event_loop.run(scenario())


@pytest.mark.usefixtures("few")
def test_a_publish_that_is_submitted_stays_behind_what_was_submitted_before(owner: qflow.Broker, spool: Path) -> None:
    """Where that is kept, for its queue is full."""
    owner.declare_queue("jobs", limit_messages=1, durable=False)
    owner.bind("jobs", "t")

    async def scenario() -> None:
        async with await qflow.aio.connect(spool) as remote:
            jobs = await remote.queue("jobs")
            futures = [jobs.submit(b"%d" % number) for number in range(MOST)]
            futures.append(remote.submit_publish("t", b"last"))
            bodies = []
            for _ in futures:
                async with await jobs.get() as delivery:
                    bodies.append(delivery.body)
            await asyncio.gather(*futures)
            assert bodies == [*(b"%d" % number for number in range(MOST)), b"last"]

    event_loop.run(scenario())
