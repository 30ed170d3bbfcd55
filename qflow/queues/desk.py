"""Where bodies of open transactions wait for the end: in memory, charged to the broker, or spilled."""

from __future__ import annotations

import weakref

from qflow.errors import CorruptionError
from qflow.identity import new_number
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import StraightLock, shelter
from qflow.message import Record, charge
from qflow.queues.assembly import Insert
from qflow.storage.spill.store import Slots, SpillStore

TRANSACTIONS = 2**32 - 1
"""The number under which bodies of open transactions are charged and spilled."""


class Desk:
    """Where bodies of open transactions wait: memory borrowed like that of a queue, and a spill area. One a broker."""

    def __init__(self, ledger: Ledger, store: SpillStore) -> None:
        self.ledger = ledger
        self._account = ledger.open(TRANSACTIONS, "transactions", None)
        self._area = store.area("transactions", TRANSACTIONS, new_number())
        self._lock = StraightLock()
        self._position = 0
        self.tabs: dict[Tab, weakref.ref[object]] = {}
        """What transactions have that are not ended, and who has it."""

    def charge(self, amount: int) -> bool:
        """Borrow for bodies, making queues give way; False if there is no room."""
        self.collect()
        for _ in range(2):
            with self._lock:
                if self.ledger.borrow_exactly(self._account, amount):
                    return True
            if not self.ledger.relieve(self._account, amount):
                return False
        return False

    def has_room(self, amount: int) -> bool:
        """Tell whether nobody would have to give way."""
        return self.ledger.free() >= amount

    def discharge(self, amount: int) -> None:
        with self._lock:
            self.ledger.give_back(self._account, amount)

    def spill(self, records: list[Record]) -> tuple[int, Slots]:
        """Write bodies to disk; return where they are."""
        with self._lock:
            position = self._position
            self._position += len(records)
        return position, self._area.write(position, records)

    def read(self, position: int, slots: Slots, largest: int) -> list[Record]:
        """Read them back, all of them. Raises CorruptionError: one of them is damaged."""
        records: list[Record] = []
        left = slots
        while left:
            found, problems = self._area.read(position + len(records), left, 2**62, largest)
            if problems:
                raise CorruptionError(f"a message of an open transaction cannot be read back: {problems[0][1]}")
            records += found  # type: ignore[arg-type]
            left = left.take(len(found))[1]
        return records

    def free(self, slots: Slots) -> None:
        self._area.free(slots)

    @property
    def borrowed(self) -> int:
        shelter(self.collect)
        return self._account.borrowed

    def collect(self) -> None:
        """Take back what transactions had that are gone, and that nobody ended: an interrupt may prevent that."""
        for tab, transaction in list(self.tabs.items()):
            if transaction() is None and self.tabs.pop(tab, None) is not None:
                self.close(tab)

    def close(self, tab: Tab) -> None:
        """Take back what a transaction has; twice is fine."""
        self.tabs.pop(tab, None)
        charged, tab.charged = tab.charged, 0
        waiting, tab.waiting = tab.waiting, []
        self.discharge(charged)
        for one in waiting:
            if one.slots:
                self.free(one.slots)


class Tab:
    """What a transaction has taken: bodies that wait for its end, and what is charged for them."""

    __slots__ = ("charged", "waiting")

    def __init__(self) -> None:
        self.charged = 0
        self.waiting: list[SeatedInsert] = []


class SeatedInsert:
    """An insert whose bodies wait for the end, in memory or spilled."""

    __slots__ = ("charged", "largest", "number", "position", "queue", "records", "slots")

    def __init__(self, insert: Insert) -> None:
        self.queue, self.number, records = insert
        self.records: list[Record] | None = records
        self.charged = charge(records)
        self.largest = max(map(len, records))
        self.position = 0
        self.slots = Slots()
