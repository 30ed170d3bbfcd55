"""The memory of all streams of a broker: publishes not yet confirmed, live tails, messages that subscribers hold.

It is one account of the broker's ledger. Publishes, and messages that subscribers hold, are charged before they take
memory. A live tail is a cache of the log: it takes free memory, and gives it back on demand, oldest messages first; all
of it when its stream ends.
If that is not enough, publishes wait in line: one that ends gives its memory to the first in line. If no other publish
is under way and queues have no memory to give, the first in line passes without any, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qflow.errors import BrokerClosed
from qflow.memory.ledger import Account, Ledger
from qflow.memory.line import FOREVER, WORK, Wake
from qflow.memory.waiting import StraightLock, attend, collecting, shelter, sheltered, straight
from qflow.message import OVERHEAD_BYTES, Record
from qflow.named_tuples import NamedTuple
from qflow.storage.log.transaction_log import Put

TAIL_SHARE = 4
"""Live tails take at most one part in so many of the broker's capacity."""
SLAB_BYTES = 600
"""Bytes charged for each commit in a live tail, beside its messages."""
TOPIC_BYTES = 80
"""Bytes charged for each message that is kept, beside its body: topic, number and time."""
HELD_BYTES = 1_000
"""Bytes charged for each batch that is held, beside its messages: its lists, a `StreamDelivery` if it has but one."""
QUIET_S = 10.0
"""Seconds an end waits for publishes that have reserved memory and not joined a batch yet, and a seek for commits."""
LOOK_S = 1.0
"""Seconds after which the first in line looks again: it is not woken for what queues give back."""

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
    """The newest messages of one partition that are in memory, by the first sequence of each commit."""

    def __init__(self) -> None:
        self.slabs: dict[int, Slab] = {}
        self.ended = False
        """Its stream has ended: nothing is kept any more."""

    @property
    def charged(self) -> int:
        """Bytes charged for it. Cost: O(commits)."""
        return sum([slab.charged for slab in list(self.slabs.values())])


class Asking:
    """One call that reserves memory, and may have to wait for it. Only `Room` changes it."""

    __slots__ = ("amount", "given_up", "granted", "in_line", "is_first", "is_over", "wake")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.granted = False
        self.given_up = False
        self.is_over = False
        """All that giving up takes was done: a handler that raises may come in its middle."""
        self.in_line = False
        self.is_first = False
        """It was the first in line when it last looked: it looks for memory, the others need not."""
        self.wake: Wake | None = None


class Room:
    """See the module. Thread-safe. Cost of a reservation: 0.5 µs if there is memory."""

    def __init__(self, account: Account, ledger: Ledger, relief: Relief) -> None:
        self._account = account
        self.ledger = ledger
        self._relief = relief
        self._lock = StraightLock()
        self._line: deque[Asking] = deque()
        self._kept: deque[tuple[Tail, int]] = deque()
        self._kept_bytes = 0
        self._most_kept = ledger.capacity // TAIL_SHARE
        self._incoming = 0
        self._held = 0
        self._slack = 0
        """Bytes of what is incoming or held that the ledger had no memory for."""
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes charged now."""
        return self._incoming + self._held + self._kept_bytes - self._slack

    def reserve(self, amount: int) -> None:
        """Reserve memory for a publish, waiting for it; an interrupted call has none.

        Raises:
            BrokerClosed: the broker was closed meanwhile.
        """
        if not self.reserve_at_once(amount):
            asking = Asking(amount)
            attend(lambda wake: self.try_reserve(asking, wake, may_work=True), lambda: self.give_up(asking))

    @straight
    def reserve_at_once(self, amount: int) -> bool:
        """Reserve memory if there is some and no call waits; return whether it did. Cost: 1 µs."""
        asking = Asking(amount)
        try:
            with self._lock:  # straight lines; see `waiting`
                used = self._incoming + self._held + self._kept_bytes - self._slack
                if not self._line and used + amount <= self._account.borrowed and not collecting:
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
            if not self._line and self._take(asking.amount):
                self._incoming += asking.amount
                asking.granted = True
            return asking.granted

    def try_reserve(self, asking: Asking, wake: Wake | None, may_work: bool) -> float | None:
        """A step of `reserve`, for tasks; see `line`. Raises as `reserve`."""
        with self._lock:
            return self._try(asking, wake, may_work=may_work)

    @sheltered
    def give_up(self, asking: Asking) -> None:
        """End a reservation, and give back what it has; twice is fine."""
        with self._lock:
            if asking.is_over:
                return
            if asking.in_line and not asking.granted:
                asking.in_line = False
                self._line.remove(asking)
            if asking.granted and not asking.given_up:
                self._incoming -= asking.amount
            asking.given_up = True
            self._settle_slack()
            self._serve()
            asking.is_over = True

    def arrived(self, amount: int) -> None:
        """Give back what `reserve` took: the messages are in the log."""
        with self._lock:
            self._incoming -= amount
            self._settle_slack()
            self._serve()

    @sheltered
    def refused(self, put: Put, amount: int) -> None:
        """Give back what `reserve` took for a put that was not confirmed. Interrupted, it may be called again."""
        with self._lock:
            if not put.refused:  # no calls from here on: an interrupt finds both done, or none
                put.refused = True
                self._incoming -= amount
            self._settle_slack()
            self._serve()

    def hold(self, amount: int, *, least: bool, getting: Any = None) -> bool:
        """Reserve memory for messages of a subscriber, if there is some; with `least` even if there is none.

        `getting` has it as `reserved` then: where a handler that raises comes next, it knows what it has.
        """
        with self._lock:
            if not self._take(amount):
                if not least:
                    return False
                self._slack += amount
            self._held += amount
            if getting is not None:
                getting.reserved += amount
            return True

    def let_go(self, amount: int) -> None:
        """Give back what `hold` took."""
        with self._lock:
            self._held -= amount
            self._settle_slack()
            self._serve()

    def settle(self, holder: Any) -> None:
        """Give back what a holder has `freed`, or charge it where that is below 0, and have it freed nothing more."""
        with self._lock:
            freed: int = holder.freed
            if freed < 0 and not self._take(-freed):
                self._slack -= freed
            self._held -= freed  # no call since: a handler that raises finds all of it done, or nothing
            holder.freed = 0
            self._settle_slack()
            self._serve()

    def keep(self, tail: Tail, slab: Slab) -> None:
        """Keep a commit in memory, if there is free memory, and the stream has not ended."""
        with self._lock:
            if tail.ended:
                return
            while self._kept and self._kept_bytes + slab.charged > self._most_kept:
                self._evict()
            if slab.charged <= self._most_kept and self._take(slab.charged):
                self._kept_bytes += slab.charged
                tail.slabs[slab.first] = slab
                self._kept.append((tail, slab.first))

    @sheltered
    def drop(self, tail: Tail) -> None:
        """Keep nothing of a partition whose stream has ended; twice is fine. Cost: O(commits kept of all streams)."""
        with self._lock:
            tail.ended = True
            if tail.slabs:
                self._kept = deque([kept for kept in self._kept if kept[0] is not tail])
                self._kept_bytes -= tail.charged
                tail.slabs.clear()
                self._settle_slack()
                self._serve()

    @property
    def tails(self) -> list[Tail]:
        """The live tails that hold something."""
        with self._lock:
            return list(dict.fromkeys(tail for tail, _ in self._kept))

    @sheltered
    def give_way(self, missing: int) -> bool:
        """Give back memory that is not used, then live tails; return whether there was any."""
        with self._lock:
            before = self._account.borrowed
            self._give_back(0)
            while self._kept and before - self._account.borrowed < missing:
                self._evict()
                self._give_back(0)
            return self._account.borrowed < before

    @property
    def busy(self) -> bool:
        """A publish that has its memory is not confirmed yet."""
        return self._incoming > 0

    @sheltered
    def close(self) -> None:
        """Refuse reservations from now on, and wake those that wait."""
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
        """Recount; return one text for each disagreement."""
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

    def _try(self, asking: Asking, wake: Wake | None, may_work: bool) -> float | None:
        """See `try_reserve`. It may release the lock meanwhile, to have queues give back memory."""
        relieved = False
        while True:
            if asking.granted or asking.given_up:
                return None
            if self._closed:
                raise BrokerClosed("the broker was closed while a publish waited for memory: open the spool again")
            if not asking.in_line:
                asking.in_line = True
                self._line.append(asking)
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
        """Give memory to waiting reservations, in their order, as far as there is any.

        The first one left is woken, to have queues give back memory, or to pass without if nothing else is incoming.
        """
        line = self._line
        while line:
            asking = line[0]
            if not asking.granted:  # a handler that raises may come before it is woken, or has left the line
                if not self._take(asking.amount):
                    if self._incoming or not without_room:
                        if not (self._incoming and asking.is_first):
                            _wake(asking)
                        return
                    self._slack += asking.amount
                    without_room = False
                self._incoming += asking.amount
                asking.granted = True
            _wake(asking)
            line.popleft()

    def _take(self, amount: int) -> bool:
        """Borrow from the ledger until so many bytes are free; return whether they are."""
        missing = self.used + amount - self._account.borrowed
        if missing <= 0 or self.ledger.borrow(self._account, missing):
            return True
        while self._kept:
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
        """Reduce the slack by what has ended or can be borrowed now; give back what is not used."""
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
    """Wake a reservation once: it looks again, and registers anew."""
    if asking.wake is not None:
        asking.wake()
        asking.wake = None


def charge_for(messages: int, weight: int) -> int:
    """Return the bytes charged for messages that are being published, or are held.

    Each is charged for its topic, though messages of one block may share one: keeping a message keeps its topic.

    Args:
        weight: bytes of the messages and of their topics.
    """
    return weight + (OVERHEAD_BYTES + TOPIC_BYTES) * messages
