"""The ledger: who gives way to whom, when nothing is left to lend."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import qflow
from qflow.memory.ledger import ASKED_AGAIN, UNUSED_SHARE, Account, GiveWay, Ledger
from qflow.queues.queue import parts_of

CAPACITY = 1_000
_numbers = itertools.count(1)


class Holder:
    """Has borrowed something, and notes who was asked in which order."""

    def __init__(self, ledger: Ledger, asked: list[tuple[str, bool]], name: str, borrowed: int, spare: int) -> None:
        self.account = ledger.open(next(_numbers), name, None, is_cache=name == "cache")
        self.account.give_way = self.give_way
        self.ledger, self.asked, self.spare = ledger, asked, spare
        self.can_spill = True
        assert ledger.borrow_exactly(self.account, borrowed)
        if spare:
            ledger.note_spare(self.account)

    def give_way(self, missing: int, spill: bool) -> bool:
        self.asked.append((self.account.name, spill))
        if not spill:
            given, self.spare = self.spare, 0
            self.ledger.give_back_all(self.account, given)
            return given > 0
        given = min(missing, self.account.borrowed) if self.can_spill else 0
        self.ledger.give_back(self.account, given)
        return given > 0


def lent(*holders: tuple[str, int, int]) -> tuple[Ledger, Account, list[tuple[str, bool]]]:
    """Return a ledger that has nothing left, one who asks for more, and who is asked: (name, borrowed, not used)."""
    ledger = Ledger(CAPACITY)
    asked: list[tuple[str, bool]] = []
    for name, borrowed, spare in holders:
        Holder(ledger, asked, name, borrowed, spare)
    asker = ledger.open(0, "asker", None)
    assert ledger.borrow_exactly(asker, ledger.free())
    return ledger, asker, asked


def test_what_costs_nothing_to_give_back_goes_first() -> None:
    """A cache, though others have more; nobody else is asked when that is enough."""
    ledger, asker, asked = lent(("heavy", 600, 200), ("cache", 100, 100))
    assert ledger.relieve(asker, 100)
    assert asked == [("cache", False)]
    assert ledger.free() == 100


def test_what_is_not_used_goes_before_anything_is_spilled() -> None:
    """From the idlest on, until it is enough."""
    ledger, asker, asked = lent(("idle", 200, 100), ("busy", 500, 50), ("busier", 90, 10), ("cache", 100, 0))
    assert ledger.relieve(asker, 150)
    assert asked == [("cache", False), ("idle", False), ("busy", False)]
    assert ledger.free() == 150


def test_the_heaviest_spills_and_nobody_who_has_less_than_the_asker_would() -> None:
    """Shares are fair; a cache has nothing to spill."""
    ledger, asker, asked = lent(("light", 150, 0), ("heavy", 300, 0), ("cache", 450, 0))
    assert ledger.relieve(asker, 100)
    assert asked == [("cache", False), ("heavy", True)]
    ledger, asker, asked = lent(("light", 150, 0), ("cache", 450, 0))
    assert not ledger.relieve(asker, 100)
    assert asked == [("cache", False)]


def test_who_cannot_give_way_is_passed_over() -> None:
    """As a queue is that is being cleared away."""
    ledger, asker, asked = lent(("light", 150, 0), ("leaving", 500, 500), ("heavy", 300, 0))
    next(account for account in ledger._accounts.values() if account.name == "leaving").give_way = None
    assert ledger.relieve(asker, 50)
    assert asked == [("heavy", True)]
    assert ledger.problems() == []


def test_many_that_have_nothing_to_spill_are_not_asked_each_time() -> None:
    """All that they have is in flight, say: each is asked once, and then a few of them in turn."""
    ledger = Ledger(2_000_000)
    asked: list[tuple[str, bool]] = []
    holders = [Holder(ledger, asked, f"holder {n}", 900 + n, 0) for n in range(1_000)]
    asker = ledger.open(0, "asker", None)
    for holder in holders:
        holder.can_spill = False
    assert not ledger.relieve(asker, 10)
    assert len(asked) == 1_000
    asked.clear()
    for _ in range(10):
        assert not ledger.relieve(asker, 10)
    assert len(asked) == len(set(asked)) == 10 * ASKED_AGAIN
    assert ledger.problems() == []
    for holder in holders:
        holder.can_spill = True
    asked.clear()
    holders[500].give_way(1, True)  # what changes is ranked again
    assert ledger.relieve(asker, 10)
    assert len(asked) == 2
    assert ledger.problems() == []


def test_the_heaviest_of_many_gives_way_without_the_others_being_asked() -> None:
    """And shares become equal from above, one question for each relief."""
    ledger = Ledger(10_000_000)
    asked: list[tuple[str, bool]] = []
    holders = [Holder(ledger, asked, f"holder {n}", 100 + n, 0) for n in range(1_000)]
    asker = ledger.open(0, "asker", None)
    for n in range(500):
        asked.clear()
        heaviest = max(holder.account.borrowed for holder in holders)
        assert ledger.relieve(asker, 100)
        assert len(asked) == 1
        assert max(holder.account.borrowed for holder in holders) <= heaviest
        assert ledger.borrow_exactly(asker, 1)
        assert asker.borrowed == n + 1
    assert ledger.problems() == []


def test_chunks_shrink_as_more_accounts_borrow() -> None:
    """So that all of them find one, and have a bounded share of the capacity unused."""
    ledger = Ledger(1 << 24)
    lots = []
    for number in range(1_000):
        account = ledger.open(number, "queue", None)
        account.give_way = lambda missing, spill: False
        before = ledger.borrowed
        if ledger.borrow(account, 1):
            lots.append(ledger.borrowed - before)
    assert lots == sorted(lots, reverse=True)
    assert lots[0] == ledger.chunk
    assert lots[-1] <= ledger.capacity // (UNUSED_SHARE * (len(lots) - 1))


def look_at_questions(broker: qflow.Broker) -> list[str]:
    """Return a list to which the name of each queue is added that is asked to give way."""
    asked: list[str] = []
    for account in broker.engine.ledger._accounts.values():
        give_way = account.give_way
        if give_way is not None and not account.is_cache:

            def ask(missing: int, spill: bool, account: Account = account, give_way: GiveWay = give_way) -> bool:
                asked.append(account.name)
                return give_way(missing, spill)

            account.give_way = ask
    return asked


def test_puts_into_many_queues_ask_few_of_them(open_spool: Callable[..., qflow.Broker]) -> None:
    """Idle ones have what others need: each put that needs it asks about one of them."""
    broker = open_spool(capacity_bytes="1MiB")
    queues = [broker.declare_queue(f"q{n}", durable=False) for n in range(1_000)]
    asked = look_at_questions(broker)
    for _ in range(3):
        for queue in queues:
            queue.put(b"x" * 16)
    stats = broker.stats()
    assert stats.messages == 3_000
    assert stats.spilled_bytes == 0
    assert len(asked) < 2_000
    asked.clear()
    for _ in range(5):
        for queue in queues:
            queue.get().ack()
            queue.put(b"x" * 16)
    assert broker.stats().spilled_bytes == 0
    assert len(asked) < 10_000
    assert broker.engine.ledger.borrowed <= broker.settings.capacity_bytes


def test_what_is_settled_is_known_to_be_unused(open_spool: Callable[..., qflow.Broker]) -> None:
    """Also of a queue that had to give back all of it: who needs memory finds it, and spills nothing."""
    broker = open_spool(capacity_bytes="64KiB")
    idle, busy = (broker.declare_queue(name, durable=False) for name in ("idle", "busy"))
    for _ in range(2):
        for _ in range(100):
            idle.put(b"x" * 100)
        parts_of(idle).spiller.give_way(1, False)
        idle.get_many(100).ack()
    assert parts_of(idle).gate.account.borrowed > 0
    while not busy.stats().spilled_bytes:
        busy.put(b"x" * 100)
    assert parts_of(idle).gate.account.borrowed == 0


def test_the_heaviest_of_many_queues_spills(open_spool: Callable[..., qflow.Broker]) -> None:
    """What small ones hold stays in memory, however many they are; nothing is lost of any.

    They need 254 KiB; what is taken of `heavy`, and held, has room beside that.
    """
    broker = open_spool(capacity_bytes="320KiB")
    small = [broker.declare_queue(f"small {n}", durable=False) for n in range(200)]
    heavy = broker.declare_queue("heavy", durable=False)
    for n in range(2_000):
        heavy.put(b"%06d" % n * 20)
    for turn in range(4):
        for queue in small:
            queue.put(b"%d" % turn * 100)
    stats = broker.stats()
    assert stats.resident_bytes <= 320 * 1024
    assert [name for name, one in stats.queues.items() if one.spilled_messages] == ["heavy"]
    assert [heavy.get(0).body for _ in range(5)] == [b"%06d" % n * 20 for n in range(5)]
    for queue in small:
        assert [queue.get(60).body for _ in range(4)] == [b"%d" % turn * 100 for turn in range(4)]


def test_what_is_borrowed_ahead_is_known_to_be_unused(open_spool: Callable[..., qflow.Broker]) -> None:
    """Durable puts have the next one's memory borrowed: who needs memory finds it, and spills nothing before."""
    broker = open_spool(capacity_bytes="64KiB")
    idle, busy = broker.declare_queue("idle"), broker.declare_queue("busy", durable=False)
    for _ in range(3):
        idle.put(b"x" * 3_000)
        parts_of(idle).spiller.give_way(1, False)
    idle.put(b"x" * 3_000)
    while not broker.stats().spilled_bytes:
        busy.put(b"x" * 100)
    gate = parts_of(idle).gate
    assert gate.account.borrowed == gate.used
