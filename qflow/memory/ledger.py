"""The ledger of memory: what each queue may use of the broker's capacity.

A queue *borrows* from the broker in chunks and charges its messages against what it has borrowed, so that admitting a
message is one comparison under the queue's own lock. The invariant is: borrowed by each ≤ its capacity, and the sum of
all borrowed ≤ the broker's capacity, at every instant. (A capacity that is lowered under messages in flight is reached
as they are settled.)

When nothing is left to borrow, shares are max-min fair: who asks for more takes from the one who has most, as long as
that one has more than the asker would. `relieve` has others give way, in that order.

No cost grows with the number of accounts but logarithmically. Chunks shrink as more accounts borrow. Those that may
have something unused are in a line, and all that borrow are ranked by how much; an account that is asked leaves the
line, or the ranking, until something of it changes. So each question is paid for by a change, but for `ASKED_AGAIN`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from sortedcontainers import SortedList

from qflow.memory.waiting import StraightLock

CHUNK_BYTES = 256 * 1024
SPARED_CHUNKS = 32
"""What a queue keeps of what it has borrowed and does not use, until others need it: its next batch borrows nothing."""
UNUSED_SHARE = 2
"""One part in so many of the capacity, divided by the number of those that borrow, is what each may keep unused."""
GROWTH = 4
"""An account that has much borrows one part in so many of that at once, however many accounts there are."""
MOST_CHUNKS = 8
"""But no more chunks than that."""
LEFT_SHARE = 8
"""One part in so many of the capacity is left to others by what passes alone, until it is spilled."""
ASKED_AGAIN = 16
"""How many accounts that had nothing to spill are asked again each time: they may have something by now."""
NUMBER_BITS = 32
"""Of an account's number, which makes its rank unique."""

GiveWay = Callable[[int, bool], bool]
"""Given how many bytes are missing, and whether to spill: give back what is borrowed; return whether any was."""


class Account:
    """What one queue has borrowed. Changed by the ledger only, under the lock of its queue."""

    __slots__ = ("borrowed", "capacity", "give_way", "is_cache", "may_have_spare", "name", "number", "rank")

    def __init__(self, number: int, name: str, capacity: int, *, is_cache: bool) -> None:
        self.number = number
        self.name = name
        self.capacity = capacity
        self.borrowed = 0
        self.give_way: GiveWay | None = None
        """Called without a lock when others are short of memory; None: nothing of it can be given back."""
        self.is_cache = is_cache
        """What it can give back costs nothing: it gives way first, and has nothing to spill."""
        self.may_have_spare = False
        """The ledger knows that it may have something unused, and asks it for that when others are short of memory."""
        self.rank = 0
        """Its place in the ranking: what it has borrowed, then its number; 0 where it is not ranked."""


class Ledger:
    """Lends out the broker's capacity. Thread-safe; borrowing takes about 4 µs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunk = max(1, min(CHUNK_BYTES, capacity // 64))
        """What is borrowed at once, at least, where there is room for it and few borrow."""
        self.borrowed = 0
        self._lock = StraightLock()
        self._accounts: dict[int, Account] = {}
        self._caches: list[Account] = []
        self._spare: OrderedDict[Account, None] = OrderedDict()  # that may have something unused, the idlest first
        self._ranks: SortedList[int] = SortedList()
        self._is_ranking = False
        """Ranks are being changed; where that was before, too, a handler that raises came in the middle, in a loop."""
        self._barren: OrderedDict[Account, None] = OrderedDict()  # that had nothing to spill when asked

    def open(self, number: int, name: str, capacity: int | None, *, is_cache: bool = False) -> Account:
        """Return a new account; numbers are unique."""
        account = self.draft(number, name, capacity, is_cache=is_cache)
        with self._lock:
            self._accounts[number] = account
            if is_cache:
                self._caches.append(account)
        return account

    def draft(self, number: int, name: str, capacity: int | None, *, is_cache: bool = False) -> Account:
        """Return an account that is not open: nothing may be borrowed."""
        most = self.capacity if capacity is None else min(capacity, self.capacity)
        return Account(number, name, most, is_cache=is_cache)

    def close(self, account: Account) -> None:
        with self._lock:
            self._change(account, -account.borrowed)
            account.give_way = None
            account.capacity = 0
            self._spare.pop(account, None)
            del self._accounts[account.number]

    def borrow(self, account: Account, missing: int) -> bool:
        """Lend at least `missing` bytes more, a chunk where possible; nothing, and False, if there are not as many."""
        with self._lock:
            most = min(account.capacity - account.borrowed, self.capacity - self.borrowed)
            if missing > most:
                return False
            growth = min(account.borrowed // GROWTH, MOST_CHUNKS * self.chunk)
            self._change(account, min(most, max(missing, growth, min(self.chunk, self._share()))))
            self._note_spare(account)
            return True

    def borrow_exactly(self, account: Account, amount: int) -> bool:
        """Lend `amount` bytes more, or nothing."""
        with self._lock:
            if amount > min(account.capacity - account.borrowed, self.capacity - self.borrowed):
                return False
            self._change(account, amount)
            return True

    def borrow_most(self, account: Account, missing: int, *, alone: bool = False) -> None:
        """Lend what there is, up to `missing` bytes; for what passes alone, all but a share that is left to others."""
        with self._lock:
            free = self.capacity - self.borrowed - (self.capacity // LEFT_SHARE if alone else 0)
            self._change(account, max(0, min(missing, account.capacity - account.borrowed, free)))

    def give_back(self, account: Account, amount: int) -> None:
        with self._lock:
            self._change(account, -amount)

    def give_back_all(self, account: Account, unused: int) -> None:
        """Take back all that an account does not use: it is not asked for that again until `note_spare`."""
        with self._lock:
            self._change(account, -unused)
            self._spare.pop(account, None)
            account.may_have_spare = False

    def note_spare(self, account: Account) -> None:
        """Have an account asked for what it does not use, when others are short of memory."""
        with self._lock:
            self._note_spare(account)

    def spared(self, account: Account) -> int:
        """Return how much of what it has borrowed an account may keep and not use, until others need it."""
        return min(SPARED_CHUNKS * self.chunk, max(self._share(), account.borrowed // 2))

    def set_capacity(self, account: Account, capacity: int | None) -> None:
        """Set what the account may borrow at most from now on; its queue gives back what is above."""
        account.capacity = self.capacity if capacity is None else min(capacity, self.capacity)

    def free(self) -> int:
        return self.capacity - self.borrowed

    def relieve(self, account: Account, missing: int) -> bool:
        """Have others give memory back: caches, then what is not used, else what the heaviest of them can spill.

        Returns:
            whether any was given back: try to borrow again. Called without a lock.
        """
        gave = False
        for other in self._with_spare(account):
            if other.give_way is not None and other.give_way(missing, False):
                gave = True
                if self.free() >= missing:
                    return True
        for other in self._heavier(account, missing):
            if other.give_way is not None and other.give_way(missing, True):
                return True
            self._pass_over(other)
        return gave

    def _with_spare(self, account: Account) -> Iterator[Account]:
        """Yield caches, then who else may have something unused, the idlest first; each leaves the line."""
        yield from (cache for cache in self._caches if cache is not account)
        for _ in range(len(self._spare)):
            with self._lock:
                if not self._spare:
                    return
                other, _ = self._spare.popitem(last=False)
                if other is account:
                    self._spare[account] = None
                    continue
            yield other

    def _heavier(self, account: Account, missing: int) -> Iterator[Account]:
        """Yield who has more than `account` would have with `missing` more, the heaviest each time."""
        with self._lock:
            self._begin_ranking()
            for _ in range(min(ASKED_AGAIN, len(self._barren))):
                self._rank(next(iter(self._barren)))
            self._is_ranking = False
        for _ in range(len(self._ranks)):
            with self._lock:
                if not self._ranks:
                    return
                other = self._accounts[self._ranks[-1] & ((1 << NUMBER_BITS) - 1)]
                if other.borrowed <= account.borrowed + missing:  # as it is where `account` itself has most
                    return
            yield other

    def _pass_over(self, account: Account) -> None:
        """An account had nothing to spill: do not ask it the next time, unless something of it changes."""
        with self._lock:
            if account.rank:
                self._begin_ranking()
                self._ranks.remove(account.rank)
                account.rank = 0
                self._barren[account] = None
                self._is_ranking = False

    def problems(self) -> list[str]:
        """Recount; return what is wrong, in words."""
        with self._lock:
            self._begin_ranking()
            self._is_ranking = False
            accounts = self._accounts.values()
            total = sum(account.borrowed for account in accounts)
            problems = [
                f"queue {account.name!r} has borrowed {account.borrowed} bytes"
                for account in accounts
                if account.borrowed < 0
            ]
            if total != self.borrowed or not 0 <= total <= self.capacity:
                problems.append(f"queues borrowed {total} bytes, the ledger says {self.borrowed} of {self.capacity}")
            ranks = sorted(_rank_of(account) for account in accounts if account.rank)
            unranked = [account for account in accounts if _is_ranked(account) and not account.rank]
            if ranks != list(self._ranks) or any(account not in self._barren for account in unranked):
                problems.append("the ledger ranks its accounts by what they do not have")
            return problems

    # Under the lock ----------------------------------------------------------------------------------------------

    def _share(self) -> int:
        """Return what each of those that borrow may keep unused. Needs no lock."""
        return self.capacity // (UNUSED_SHARE * max(1, len(self._ranks) + len(self._barren)))

    def _change(self, account: Account, amount: int) -> None:
        if amount:
            self._begin_ranking()
            account.borrowed += amount
            self.borrowed += amount
            self._rank(account)

    def _rank(self, account: Account) -> None:
        """Rank an account by what it has; after `_begin_ranking`."""
        if account.rank:
            self._ranks.remove(account.rank)
        else:
            self._barren.pop(account, None)
        account.rank = _rank_of(account) if _is_ranked(account) else 0
        if account.rank:
            self._ranks.add(account.rank)
        self._is_ranking = False

    def _begin_ranking(self) -> None:
        """Note that ranks are being changed; rank all accounts anew where an earlier change was interrupted."""
        if self._is_ranking:
            for account in self._accounts.values():
                account.rank = _rank_of(account) if _is_ranked(account) and account not in self._barren else 0
            self._ranks = SortedList(account.rank for account in self._accounts.values() if account.rank)
        self._is_ranking = True

    def _note_spare(self, account: Account) -> None:
        if account.give_way is not None and not account.is_cache:
            self._spare[account] = None
            self._spare.move_to_end(account)
            account.may_have_spare = True


def _is_ranked(account: Account) -> bool:
    """Tell whether an account has something that it might spill."""
    return account.borrowed > 0 and account.give_way is not None and not account.is_cache


def _rank_of(account: Account) -> int:
    return account.borrowed << NUMBER_BITS | account.number
