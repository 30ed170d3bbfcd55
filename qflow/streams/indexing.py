"""The upkeep of a stream's index: which blocks hold which topics."""

from __future__ import annotations

import threading
from functools import partial

from qflow.errors import CorruptionError, DiskFull, again
from qflow.memory.waiting import sheltered
from qflow.message import LANE_SHIFT
from qflow.storage.log.rows import read_row
from qflow.storage.log.transaction_log import Unit
from qflow.storage.topics.index import TopicIndex
from qflow.storage.topics.records import delete_index
from qflow.streams.history import History
from qflow.streams.partition import Partition
from qflow.streams.shared import Shared


class Indexing:
    """See the module. Its lock comes before any other, and is held while the log commits."""

    def __init__(self, history: History, shared: Shared) -> None:
        self._home = history.home
        self._owner = history.owner
        self._partitions = history.partitions
        self._report = history.report_index
        self._log = shared.log
        self._lock = threading.Lock()
        self._index = TopicIndex(history.owner)
        self._is_checked = self._is_broken = False
        self._forgotten_to: dict[int, int] = {}

    @sheltered
    def index(self, least: int | None = None) -> bool:
        """Index closed blocks, a bounded part; return whether there is more to do at once.

        On a full disk it is done later: the index saves time, and holds no messages.

        Args:
            least: blocks that must wait to be indexed; None = a whole segment.
        """
        if self._home.ended is not None:
            return False
        with self._lock:
            return self._step(least)

    def _step(self, least: int | None) -> bool:
        if self._is_broken:
            return self._remove()
        try:
            if not self._is_checked:
                with self._log.read() as txn:
                    self._index.check(txn)
                self._is_checked = True
            return any([self._index_partition(partition, least) for partition in self._partitions])  # noqa: C419
        except CorruptionError as error:
            self._report(str(error))
            self._is_broken = True
            return True

    def _index_partition(self, partition: Partition, least: int | None) -> bool:
        number, index = partition.number, self._index
        with self._log.read() as txn:
            row = read_row(txn, self._owner, number)
            segment = index.plan(txn, number, row, *(() if least is None else (least,)))
        if segment is not None:
            for problem in segment.problems:
                self._report(problem)
            unit = Unit(writes=[partial(index.write, segment=segment)], size=segment.value_bytes, values=segment.values)
            self._log.wait(self._log.join(unit))
            if isinstance(unit.error, DiskFull):
                segment = None  # later: removing what is below the floor gives room back
            elif unit.error is not None:
                raise again(unit.error)
        if row.floor <= self._forgotten_to.get(number, number << LANE_SHIFT):
            return segment is not None
        removed: list[int] = []
        self._log.commit(self._log.write(lambda txn: removed.append(index.forget_below(txn, number, row.floor))))
        if not removed[-1]:
            self._forgotten_to[number] = row.floor
        return segment is not None or removed[-1] > 0

    def _remove(self) -> bool:
        """Remove a part of a damaged index; once all is removed, it is built anew."""
        left: list[bool] = []
        self._log.commit(self._log.write(lambda txn: left.append(delete_index(txn, self._owner))))
        if not left[-1]:
            self._is_broken = self._is_checked = False
        return True
