"""The ledger: who gives way to whom, when nothing is left to lend."""

from __future__ import annotations

from qflow.memory.ledger import Account, Ledger

CAPACITY = 1_000


class Holder:
    """Has borrowed something, and notes who was asked in which order."""

    def __init__(self, ledger: Ledger, asked: list[tuple[str, bool]], name: str, borrowed: int, spare: int) -> None:
        self.account = ledger.open(len(name), name, None)
        assert ledger.borrow_exactly(self.account, borrowed)
        self.account.give_way = self.give_way
        self.ledger, self.asked, self.spare = ledger, asked, spare

    def give_way(self, missing: int, spill: bool) -> bool:
        self.asked.append((self.account.name, spill))
        given = min(missing, self.account.borrowed) if spill else self.spare
        self.spare -= 0 if spill else given
        self.ledger.give_back(self.account, given)
        return given > 0


def lent(*holders: tuple[str, int, int]) -> tuple[Ledger, Account, list[tuple[str, bool]]]:
    """Return a ledger that has nothing left, one who asks for more, and who is asked: (name, borrowed, not used)."""
    ledger = Ledger(CAPACITY)
    asked: list[tuple[str, bool]] = []
    for name, borrowed, spare in holders:
        Holder(ledger, asked, name, borrowed, spare).account.is_cache = name == "cache"
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
    """From the heaviest on, until it is enough."""
    ledger, asker, asked = lent(("light", 200, 100), ("heavy", 500, 50), ("cache", 100, 0))
    assert ledger.relieve(asker, 150)
    assert asked == [("cache", False), ("heavy", False), ("light", False)]
    assert ledger.free() == 150


def test_the_heaviest_spills_and_nobody_who_has_less_than_the_asker_would() -> None:
    """Shares are fair; a cache has nothing to spill."""
    ledger, asker, asked = lent(("light", 150, 0), ("heavy", 300, 0), ("cache", 450, 0))
    assert ledger.relieve(asker, 100)
    assert asked[3:] == [("heavy", True)]
    ledger, asker, asked = lent(("light", 150, 0), ("cache", 450, 0))
    assert not ledger.relieve(asker, 100)
    assert asked == [("cache", False), ("light", False)]


def test_who_cannot_give_way_is_passed_over() -> None:
    """As open transactions are, and a queue that is being cleared away."""
    ledger, asker, asked = lent(("heavy", 600, 600), ("light", 100, 0))
    next(account for account in ledger.others(asker) if account.name == "heavy").give_way = None
    assert not ledger.relieve(asker, 50)
    assert asked == [("light", False)]
