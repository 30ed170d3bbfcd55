"""Retention: raises the floors of a stream's partitions, by its settings and as far as readers allow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from qflow.errors import again
from qflow.memory.waiting import sheltered
from qflow.message import LANE_SHIFT
from qflow.storage.log.rows import Settled, read_row
from qflow.storage.log.transaction_log import Unit
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
        found = self._surpluses(by_age=True) if self._shares_what_age_leaves else []
        more = bool(found)
        found = found or self._surpluses(by_age=False)
        if found:
            settles = [
                (partition.lane, [Settled(partition.floor, one.floor, one.messages, one.bytes)])
                for partition, one in found
            ]
            unit = Unit(settles=settles)  # a failed unit is not tried again: the next call looks anew
            self._dropping = unit, sum(one.messages for _, one in found)
            self._log.wait(self._log.join(unit))
            self._count_dropped()
            if unit.error is not None:
                raise again(unit.error)
        return more or any(one.more for _, one in found)

    @property
    def _shares_what_age_leaves(self) -> bool:
        """Another limit is for all partitions together: what is too old goes first, and takes no share of it."""
        settings = self._home.settings
        is_limited = settings.retention_messages is not None or settings.retention_bytes is not None
        return len(self._partitions) > 1 and settings.retention_s is not None and is_limited

    def _surpluses(self, *, by_age: bool) -> list[tuple[Partition, retention.Retained]]:
        """Return what is to be dropped, and of which partitions; with `by_age`, what is too old and nothing else."""
        held = self._held(self._owner) if self._held is not None else {}
        found = [
            (partition, self._surplus(partition, held.get(partition.number), by_age)) for partition in self._partitions
        ]
        return [(partition, one) for partition, one in found if one is not None and one.floor > partition.floor]

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

    def _surplus(self, partition: Partition, held: int | None, by_age: bool) -> retention.Retained | None:
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
        if by_age:
            messages = size = None
        elif len(self._partitions) > 1:
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
