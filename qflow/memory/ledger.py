"""The ledger of memory: what each queue may use of the broker's capacity.

A queue *borrows* from the broker in chunks and charges its messages against what it has borrowed, so that admitting a
message is one comparison under the queue's own lock. The invariant is: borrowed by each ≤ its capacity, and the sum of
all borrowed ≤ the broker's capacity, at every instant. (A capacity that is lowered under messages in flight is reached
as they are settled.)

When nothing is left to borrow, shares are max-min fair: who asks for more takes from the one who has most, as long as
that one has more than the asker would. `relieve` has others give way, in that order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

GiveWay = Callable[[int, bool], bool]
"""Given how many bytes are missing, and whether to spill: give back what is borrowed; return whether any was."""


class Account:
    """What one queue has borrowed. Changed by the ledger only, under the lock of its queue."""

    __slots__ = ("borrowed", "capacity", "give_way", "is_cache", "name", "number")

    def __init__(self, number: int, name: str, capacity: int) -> None:
        self.number = number
        self.name = name
        self.capacity = capacity
        self.borrowed = 0
        self.give_way: GiveWay | None = None
        """Called without a lock when others are short of memory; None: nothing of it can be given back."""
        self.is_cache = False
        """What it can give back costs nothing: it gives way first, and has nothing to spill."""


class Ledger:
    """Lends out the broker's capacity. Thread-safe; borrowing takes about 1 µs."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunk = max(1, min(256 * 1024, capacity // 64))
        """What is borrowed at once, at least, where there is room for it."""
        self.borrowed = 0
        self._lock = threading.Lock()
        self._accounts: dict[Account, None] = {}  # ranked when memory is short, not at each change

    def open(self, number: int, name: str, capacity: int | None) -> Account:
        account = Account(number, name, self.capacity if capacity is None else min(capacity, self.capacity))
        with self._lock:
            self._accounts[account] = None
        return account

    def close(self, account: Account) -> None:
        with self._lock:
            del self._accounts[account]
            self._change(account, -account.borrowed)
            account.capacity = 0

    def borrow(self, account: Account, missing: int) -> bool:
        """Lend at least `missing` bytes more, a chunk where possible; nothing, and False, if there are not as many."""
        with self._lock:
            most = min(account.capacity - account.borrowed, self.capacity - self.borrowed)
            if missing > most:
                return False
            self._change(account, min(most, max(missing, self.chunk)))
            return True

    def borrow_exactly(self, account: Account, amount: int) -> bool:
        """Lend `amount` bytes more, or nothing."""
        with self._lock:
            if amount > min(account.capacity - account.borrowed, self.capacity - self.borrowed):
                return False
            self._change(account, amount)
            return True

    def borrow_most(self, account: Account, missing: int) -> None:
        """Lend what there is, up to `missing` bytes."""
        with self._lock:
            self._change(
                account, max(0, min(missing, account.capacity - account.borrowed, self.capacity - self.borrowed))
            )

    def give_back(self, account: Account, amount: int) -> None:
        with self._lock:
            self._change(account, -amount)

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
        for other in sorted(self.others(account), key=lambda other: not other.is_cache):
            if other.give_way is not None and other.give_way(missing, False):
                gave = True
                if self.free() >= missing:
                    return True
        for other in self.heavier(account, missing):
            if not other.is_cache and other.give_way is not None and other.give_way(missing, True):
                return True
        return gave

    def heavier(self, account: Account, missing: int) -> list[Account]:
        """Return who has more than `account` would have with `missing` more, heaviest first."""
        return [other for other in self.others(account) if other.borrowed > account.borrowed + missing]

    def others(self, account: Account) -> list[Account]:
        """Return every other account that has borrowed anything, heaviest first. Cost: O(queues log queues)."""
        with self._lock:
            accounts = [other for other in self._accounts if other.borrowed and other is not account]
        return sorted(accounts, key=lambda other: other.borrowed, reverse=True)

    def problems(self) -> list[str]:
        """Recount; return what is wrong, in words."""
        with self._lock:
            total = sum(account.borrowed for account in self._accounts)
            problems = [
                f"queue {account.name!r} has borrowed {account.borrowed} bytes"
                for account in self._accounts
                if account.borrowed < 0
            ]
            if total != self.borrowed or not 0 <= total <= self.capacity:
                problems.append(f"queues borrowed {total} bytes, the ledger says {self.borrowed} of {self.capacity}")
            return problems

    def _change(self, account: Account, amount: int) -> None:
        account.borrowed += amount
        self.borrowed += amount
