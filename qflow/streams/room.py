"""The memory of all streams of a broker: messages on their way in, live tails, what subscribers hold.

One account of the broker's ledger. What is on its way in, and what subscribers hold, is charged before it is there; a
live tail is a cache: it takes what is free, and gives it back to whoever asks, oldest first, for all of it is in the
log. Where even that is not enough, publishes wait in line until others have ended: who ends has the first ones have
their room. Only one may pass without any: then it passes alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from qflow.errors import BrokerClosed
from qflow.memory.ledger import Account, Ledger
from qflow.memory.line import FOREVER, WORK, Wake
from qflow.memory.waiting import attend, collecting, shelter, sheltered, straight
from qflow.message import OVERHEAD_BYTES, Record
from qflow.storage.log.transaction_log import Put

TAIL_SHARE = 4
"""Live tails take at most this part of the broker's capacity."""
SLAB_BYTES = 600
"""Charged for what is kept of one commit in a live tail, beside its messages."""
TOPIC_BYTES = 80
"""Charged for a topic of a message that is kept, beside its characters; and for the message's number and time."""
LOOK_S = 1.0
"""How often the first in line looks again: nobody tells him what queues give back."""

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


class Asking:
    """Who reserves room, and may have to wait for it. Nobody but the room changes it."""

    __slots__ = ("amount", "given_up", "granted", "in_line", "is_first", "wake")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.granted = False
        self.given_up = False
        self.in_line = False
        self.is_first = False
        """It knows that it is the first in line: it looks for room, the others need not."""
        self.wake: Wake | None = None


class Room:
    """See the module. Thread-safe; to reserve takes 0.5 µs where there is room."""

    def __init__(self, account: Account, ledger: Ledger, relief: Relief) -> None:
        self._account = account
        self.ledger = ledger
        self._relief = relief
        self._lock = threading.Lock()
        self._line: deque[Asking] = deque()
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
        """Take room for messages on their way in, waiting for it; what is interrupted has none.

        Raises:
            BrokerClosed: the broker was closed meanwhile.
        """
        if not self.reserve_at_once(amount):
            asking = Asking(amount)
            attend(lambda wake: self.try_reserve(asking, wake, may_work=True), lambda: self.give_up(asking))

    @straight
    def reserve_at_once(self, amount: int) -> bool:
        """`reserve`, if nobody waits for that and it need not either. Cost: 1 µs."""
        asking = Asking(amount)
        try:
            with self._lock:  # straight lines; see `waiting`
                used = self._incoming + self._held + self._kept_bytes - self._slack
                if not self._line and used + amount <= self._account.borrowed and "a" not in collecting:
                    self._incoming += amount
                    asking.granted = True
            return asking.granted or shelter(lambda: self._borrow_at_once(asking))
        except BaseException:
            try:
                shelter(partial(self.give_up, asking))
            finally:  # see `attend`
                shelter(partial(self.give_up, asking))
            raise

    def _borrow_at_once(self, asking: Asking) -> bool:
        with self._lock:
            if not self._line and self._take(asking.amount, evict=True):
                self._incoming += asking.amount
                asking.granted = True
            return asking.granted

    def try_reserve(self, asking: Asking, wake: Wake | None, *, may_work: bool) -> float | None:
        """A step of `reserve` by a caller who has no thread to wait with; see `line`. Raises as `reserve`."""
        with self._lock:
            return self._try(asking, wake, may_work=may_work)

    @sheltered
    def give_up(self, asking: Asking) -> None:
        """Reserve no more, and give back what was; twice is fine."""
        with self._lock:
            if asking.given_up:
                return
            asking.given_up = True
            if asking.granted:
                self._incoming -= asking.amount
                self._settle_slack()
            elif asking.in_line:
                self._line.remove(asking)
            self._serve()

    def arrived(self, amount: int) -> None:
        """Give back what `reserve` took: the messages are in the log."""
        with self._lock:
            self._incoming -= amount
            self._settle_slack()
            self._serve()

    @sheltered
    def refused(self, put: Put, amount: int) -> None:
        """Give back what `reserve` took for a put that was not confirmed. Who is interrupted in it may do it again."""
        with self._lock:
            if not put.refused:  # no call from here on, so that an interrupt finds both done, or nothing
                put.refused = True
                self._incoming -= amount
            self._settle_slack()
            self._serve()

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
            self._serve()

    def keep(self, tail: Tail, slab: Slab) -> None:
        """Keep what was just committed in memory, if there is room for that without taking any from others."""
        with self._lock:
            while self._kept and self._kept_bytes + slab.charged > self._most_kept:
                self._evict()
            if slab.charged <= self._most_kept and self._take(slab.charged, evict=True):
                self._kept_bytes += slab.charged
                tail.slabs[slab.first] = slab
                self._kept.append((tail, slab.first))

    @sheltered
    def give_way(self, missing: int) -> bool:
        """Give memory to others: what is not used, then live tails; whether any was."""
        with self._lock:
            before = self._account.borrowed
            self._give_back(0)
            while self._kept and before - self._account.borrowed < missing:
                self._evict()
                self._give_back(0)
            return self._account.borrowed < before

    @property
    def busy(self) -> bool:
        """Something that has its room is not in the log yet."""
        return self._incoming > 0

    @sheltered
    def close(self) -> None:
        """Wake who waits."""
        with self._lock:
            self._closed = True
            while self._kept:
                self._evict()
            self._give_back(0)
            for asking in self._line:
                _wake(asking)

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything."""
        self._lock = lock

    @sheltered
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

    def _try(self, asking: Asking, wake: Wake | None, *, may_work: bool) -> float | None:
        """See `try_reserve`. It may let go of the lock, to have queues give way."""
        relieved = False
        while True:
            if asking.granted or asking.given_up:
                return None
            if self._closed:
                raise BrokerClosed("the broker was closed while a publish waited for memory: open the spool again")
            if not asking.in_line:
                self._line.append(asking)
                asking.in_line = True
            if self._line[0] is not asking:
                asking.wake = wake
                return FOREVER
            asking.is_first, asking.wake = True, None
            self._serve(without_room=relieved)
            if asking.granted:
                return None
            asking.wake = wake
            if relieved:
                return LOOK_S
            if not may_work:
                return WORK
            self._lock.release()
            try:
                self._relief(self._account, asking.amount)
            finally:
                self._lock.acquire()
            relieved = True

    def _serve(self, *, without_room: bool = False) -> None:
        """Give room to those who wait, in their order, as far as there is any.

        The first whom that leaves is woken, to have queues give way; if nothing is on its way, to pass without room.
        """
        line = self._line
        while line:
            asking = line[0]
            if not self._take(asking.amount, evict=True):
                if self._incoming or not without_room:
                    if not (self._incoming and asking.is_first):
                        _wake(asking)
                    return
                self._slack += asking.amount
                without_room = False
            self._incoming += asking.amount
            line.popleft()
            asking.granted = True
            _wake(asking)

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


def _wake(asking: Asking) -> None:
    """Have it look again, once: it says anew what wakes it."""
    wake, asking.wake = asking.wake, None
    if wake is not None:
        wake()


def charge_for(messages: int, weight: int) -> int:
    """Return what messages on their way, or held, are charged, in bytes.

    Each has a topic of its own, though those of one block may share theirs: who keeps one message keeps its topic.

    Args:
        weight: their bytes and those of their topics.
    """
    return weight + (OVERHEAD_BYTES + TOPIC_BYTES) * messages
