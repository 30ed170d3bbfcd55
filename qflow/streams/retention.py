"""Retention: raises the floors of a stream's partitions, by its settings and as far as readers allow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from qflow.errors import again
from qflow.memory.waiting import sheltered
from qflow.message import LANE_SHIFT
from qflow.storage.log.rows import Settled, read_row
from qflow.storage.log.transaction_log import Lane, Unit
from qflow.storage.streams import retention
from qflow.streams.history import History
from qflow.streams.partition import Partition
from qflow.streams.shared import Shared


class Retention:
    """See the module. Its lock is taken after that of `Sessions`, before any other, and held while the log commits."""

    def __init__(self, history: History, shared: Shared, consumed: Callable[[int], list[int] | None]) -> None:
        """`consumed` returns the position of each durable cursor in a partition; None if one of them is not known."""
        self.dropped = 0
        """Messages dropped so far."""
        self._home = history.home
        self._owner = history.owner
        self._partitions = history.partitions
        self._log = shared.log
        self._clock = shared.clock
        self._held = shared.held
        self._consumed = consumed
        self._lock = threading.Lock()
        self._dropping: tuple[Unit, int] | None = None
        """The last unit handed to the log, and how many messages it drops."""

    @sheltered
    def retain(self) -> bool:
        """Raise floors as the settings say, by a bounded part; return whether there is more to do at once."""
        settings = self._home.settings
        if self._home.ended is not None or not (settings.has_limit or settings.retain_until_consumed):
            return False
        with self._lock:  # two threads dropping the same messages would count them twice
            return self._retain()

    def held_back(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is dropped: a new cursor reads the floor there, and is registered."""
        return self._lock

    def _retain(self) -> bool:
        self._count_dropped()  # of a call that was interrupted: its unit may not be done yet
        more = False
        settles: list[tuple[Lane, list[Settled]]] = []
        messages = 0
        held = self._held(self._owner) if self._held is not None else {}
        for partition in self._partitions:
            found = self._surplus(partition, held.get(partition.number))
            if found is not None and found.floor > partition.floor:
                part = Settled(partition.floor, found.floor, found.messages, found.bytes)
                settles.append((partition.lane, [part]))
                messages += found.messages
                more |= found.more
        if settles:
            unit = Unit(settles=settles)  # a failed unit is not tried again: the next call looks anew
            self._dropping = unit, messages
            self._log.wait(self._log.join(unit))
            self._count_dropped()
            if unit.error is not None:
                raise again(unit.error)
        return more

    def _count_dropped(self) -> None:
        """Count the messages of the last unit, if it is committed."""
        if self._dropping is None:
            return
        unit, messages = self._dropping
        if unit.joined and not unit.done:
            self._log.drain()
        self._dropping = None
        if unit.done and unit.error is None:
            self.dropped += messages

    def _surplus(self, partition: Partition, held: int | None) -> retention.Retained | None:
        """Return what is to be dropped of a partition, None if nothing; never from offset `held` on, if given."""
        settings = self._home.settings
        ceiling = partition.next
        if held is not None:
            ceiling = min(ceiling, (partition.number << LANE_SHIFT) + held)
        if settings.retain_until_consumed:
            consumed = self._consumed(partition.number)
            if consumed is None or not (consumed or settings.has_limit or held is not None):
                return None  # not known; or there is no durable cursor yet, and no other limit
            ceiling = min([ceiling, *consumed])
        messages, size = settings.retention_messages, settings.retention_bytes
        if len(self._partitions) > 1:
            messages = None if messages is None else self._share(partition, messages, "messages")
            size = None if size is None else self._share(partition, size, "bytes")
        before_ms = None
        if settings.retention_s is not None:
            before_ms = int((self._clock() - settings.retention_s) * 1000)
        with self._log.read() as txn:
            row = read_row(txn, self._owner, partition.number)
        if row.floor >= ceiling:
            return None
        limits = retention.Limits(
            ceiling, messages, size, before_ms, settings.retain_until_consumed and not settings.has_limit
        )
        with self._log.read(buffers=True) as txn:
            return retention.surplus(txn, self._owner, partition.number, row, limits)

    def _share(self, partition: Partition, most: int, what: str) -> int:
        """Return the share of a limit for all partitions that this one has: in proportion to what each holds."""
        total = sum(getattr(one.lane.row, what) for one in self._partitions)
        mine: int = getattr(partition.lane.row, what)
        return mine if total <= most else most * mine // total
