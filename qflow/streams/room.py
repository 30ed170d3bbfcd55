"""The memory of all streams of a broker: messages on their way in, live tails, what subscribers hold.

One account of the broker's ledger. What is on its way in, and what subscribers hold, is charged before it is there; a
live tail is a cache: it takes what is free, and gives it back to whoever asks, oldest first, for all of it is in the
log. Where even that is not enough, a publish waits until another has ended, and only one may pass without room: then it
passes alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qflow.errors import BrokerClosed
from qflow.memory.ledger import Account, Ledger
from qflow.message import OVERHEAD_BYTES, Record

TAIL_SHARE = 4
"""Live tails take at most this part of the broker's capacity."""
SLAB_BYTES = 600
"""Charged for what is kept of one commit in a live tail, beside its messages."""
TOPIC_BYTES = 80
"""Charged for a topic of a message that is kept."""

Relief = Callable[[Account, int], bool]


class Slab(NamedTuple):
    """What one commit appended to a partition."""

    first: int
    records: list[Record]
    topics: Sequence[str]
    time_ms: int
    charged: int

    @property
    def end(self) -> int:
        return self.first + len(self.records)


class Tail:
    """The newest messages of one partition, as far as they are in memory; by the first sequence of each commit."""

    def __init__(self) -> None:
        self.slabs: dict[int, Slab] = {}


class Room:
    """See the module. Thread-safe; to reserve takes 0.5 µs where there is room."""

    def __init__(self, account: Account, ledger: Ledger, relief: Relief) -> None:
        self._account = account
        self.ledger = ledger
        self._relief = relief
        self._lock = threading.Condition(threading.Lock())
        self._kept: deque[tuple[Tail, int]] = deque()
        self._kept_bytes = 0
        self._most_kept = ledger.capacity // TAIL_SHARE
        self._incoming = 0
        self._held = 0
        self._slack = 0
        """Of what is incoming or held, how much found no room."""
        self._closed = False

    @property
    def used(self) -> int:
        """What is charged now, in bytes."""
        return self._incoming + self._held + self._kept_bytes - self._slack

    def reserve(self, amount: int) -> None:
        """Take room for messages on their way in, waiting for it.

        Raises:
            BrokerClosed: the broker was closed meanwhile.
        """
        with self._lock:
            while not self._take(amount, evict=True):
                self._lock.release()
                try:
                    relieved = self._relief(self._account, amount)
                finally:
                    self._lock.acquire()
                if self._take(amount, evict=True):
                    break
                if not self._incoming:
                    self._slack += amount
                    break
                if not relieved:
                    self._lock.wait(1.0)
                if self._closed:
                    raise BrokerClosed("the broker was closed while a publish waited for memory")
            self._incoming += amount

    def try_reserve(self, amount: int) -> bool:
        """`reserve`, if that need not wait."""
        with self._lock:
            if not self._take(amount, evict=True):
                if self._incoming:
                    return False
                self._slack += amount
            self._incoming += amount
            return True

    def arrived(self, amount: int) -> None:
        """Give back what `reserve` took: the messages are in the log, or were refused."""
        with self._lock:
            self._incoming -= amount
            self._settle_slack()
            self._lock.notify_all()

    def hold(self, amount: int, *, least: bool) -> bool:
        """Take room for what a subscriber is given; with `least` also where there is none."""
        with self._lock:
            if not self._take(amount, evict=True):
                if not least:
                    return False
                self._slack += amount
            self._held += amount
            return True

    def let_go(self, amount: int) -> None:
        """Give back what `hold` took."""
        with self._lock:
            self._held -= amount
            self._settle_slack()
            self._lock.notify_all()

    def keep(self, tail: Tail, slab: Slab) -> None:
        """Keep what was just committed in memory, if there is room for that without taking any from others."""
        with self._lock:
            if slab.first in tail.slabs:
                return  # its leader was interrupted, and is here again
            while self._kept and self._kept_bytes + slab.charged > self._most_kept:
                self._evict()
            if slab.charged <= self._most_kept and self._take(slab.charged, evict=True):
                self._kept_bytes += slab.charged
                tail.slabs[slab.first] = slab
                self._kept.append((tail, slab.first))

    def give_way(self, missing: int) -> bool:
        """Give memory to others: what is not used, then live tails; whether any was."""
        with self._lock:
            before = self._account.borrowed
            self._give_back(0)
            while self._kept and before - self._account.borrowed < missing:
                self._evict()
                self._give_back(0)
            return self._account.borrowed < before

    def close(self) -> None:
        """Wake who waits."""
        with self._lock:
            self._closed = True
            while self._kept:
                self._evict()
            self._give_back(0)
            self._lock.notify_all()

    def problems(self) -> list[str]:
        """Recount; return what is wrong, in words."""
        with self._lock:
            kept = sum(tail.slabs[first].charged for tail, first in self._kept if first in tail.slabs)
            problems = []
            if kept != self._kept_bytes:
                problems.append(f"live tails of streams hold {kept} bytes, {self._kept_bytes} are charged")
            if min(self._incoming, self._held, self._slack) < 0 or self.used > self._account.borrowed:
                problems.append(
                    f"streams use {self._incoming} + {self._held} + {self._kept_bytes} bytes, {self._slack} of them "
                    f"without room, and have borrowed {self._account.borrowed}"
                )
            return problems

    # Under the lock ----------------------------------------------------------------------------------------------

    def _take(self, amount: int, *, evict: bool) -> bool:
        """See that so much more is borrowed than used."""
        missing = self.used + amount - self._account.borrowed
        if missing <= 0 or self.ledger.borrow(self._account, missing):
            return True
        while evict and self._kept:
            self._evict()
            missing = self.used + amount - self._account.borrowed
            if missing <= 0 or self.ledger.borrow(self._account, missing):
                return True
        return False

    def _evict(self) -> None:
        tail, first = self._kept.popleft()
        slab = tail.slabs.pop(first, None)
        if slab is not None:
            self._kept_bytes -= slab.charged

    def _settle_slack(self) -> None:
        """What has ended without room, or finds some now, is no slack any more; give back what is not used."""
        if self._slack:
            spare = self._account.borrowed - self.used
            self._slack = max(0, self._slack - max(0, spare))
            if not self._incoming and not self._held:
                self._slack = 0
        self._give_back(2 * self.ledger.chunk)

    def _give_back(self, keep: int) -> None:
        spare = self._account.borrowed - self.used - keep
        if spare > 0:
            self.ledger.give_back(self._account, spare)


def charge_for(messages: int, size: int) -> int:
    """Return what messages on their way, or held, are charged, in bytes."""
    return size + (OVERHEAD_BYTES + TOPIC_BYTES) * messages
