"""The records of queues, streams and cursors: written to the log, and known in memory, both or neither.

The thread that writes a record may be interrupted after the commit. What is to follow the commit is therefore kept
until somebody knows what became of it: that thread, or the next that comes for a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qflow.errors import again
from qflow.named_tuples import NamedTuple
from qflow.storage.log import recovery
from qflow.storage.log.keys import queue_key
from qflow.storage.log.rows import Row, write_row
from qflow.storage.log.transaction_log import TransactionLog, Unit

ROW_BYTES = 128
"""About what a row takes in the log, key included."""


def _nothing() -> None: ...


class _Change:
    """A change of records on its way into the log. A party of the unit it is written in."""

    def __init__(self, at_once: Callable[[], None], then: Callable[[], None], undo: Callable[[], None]) -> None:
        self.at_once = at_once
        self.then = then
        self.undo = undo
        self.is_committed = False

    def committed(self, unit: Unit) -> None:
        self.at_once()
        self.is_committed = True

    def refused(self, unit: Unit) -> None: ...


class NewRecord(NamedTuple):
    """What is written of a new owner of lanes."""

    owner: int
    value: bytes
    rows: Mapping[int, Row]


class Records:
    """See the module. One thread at a time, but for `renew`.

    Each method takes what is to follow, any of which may run twice: `then` after the commit, by this thread or a later
    one; `undo` if there was none; `at_once` before anything is confirmed that was committed later, by whoever commits.

    Raises:
        DiskFull: there is no room for the records beside what acks need. Nothing was written.
    """

    def __init__(self, log: TransactionLog) -> None:
        self._log = log
        self.unsure: list[_Change] = []
        """Changes of which nobody has made sure."""

    def add(self, records: Iterable[NewRecord], then: Callable[[], None]) -> None:
        """Write the records of new owners of lanes, with their rows."""
        new = list(records)

        def write(txn: Any) -> None:
            for owner, value, rows in new:
                recovery.write_new(txn, owner, value)
                for number, row in rows.items():
                    write_row(txn, owner, number, row)

        values = sum(len(record.rows) for record in new)
        size = sum(len(record.value) for record in new) + ROW_BYTES * values
        self._change(Unit(writes=[write], size=size, values=values), then=then)

    def replace(
        self, owner: int, value: bytes, then: Callable[[], None] = _nothing, undo: Callable[[], None] = _nothing
    ) -> None:
        """Write another record in the place of one."""
        self._change(_renewal({owner: value}), then=then, undo=undo)

    def renew(self, values: Mapping[int, bytes]) -> None:
        """Write other records in the place of some, in one commit, after which nothing is to follow; by any thread."""
        unit = _renewal(values)
        self._log.wait(self._log.join(unit))
        if unit.error is not None:
            raise again(unit.error)

    def delete(
        self, owners: Iterable[int], then: Callable[[], None] = _nothing, at_once: Callable[[], None] = _nothing
    ) -> None:
        """Write that some owners were deleted, which needs no room: they are cleared away later."""
        gone = list(owners)

        def write(txn: Any) -> None:
            for owner in gone:
                value = txn.get(queue_key(owner))
                if value is not None:
                    record = recovery.fields_of(value, owner)
                    name, settings, kind = record["name"], record["settings"], record["kind"]
                    value = recovery.queue_value(name, 0, settings, deleted=True, kind=kind)
                    txn.put(queue_key(owner), value)

        self._change(Unit(writes=[write], values=len(gone)), then=then, at_once=at_once)

    def check(self, owner: int) -> None:
        """Raise CorruptionError if a record is damaged: a commit that changes it would fail, with all that share it."""
        with self._log.read() as txn:
            value = txn.get(queue_key(owner))
        if value is not None:
            recovery.fields_of(value, owner)

    def make_sure(self) -> None:
        """Have followed what is to follow, also where the thread that wrote was interrupted."""
        if not self.unsure:
            return
        self._log.drain()
        for change in list(self.unsure):
            try:
                (change.then if change.is_committed else change.undo)()
            except Exception:
                self.unsure.remove(change)
                raise
            self.unsure.remove(change)

    def _change(
        self,
        unit: Unit,
        *,
        then: Callable[[], None],
        at_once: Callable[[], None] = _nothing,
        undo: Callable[[], None] = _nothing,
    ) -> None:
        change = _Change(at_once, then, undo)
        unit.parties.append(change)
        self.unsure.append(change)  # before it can be committed: an interrupt may come at any moment from here on
        try:
            self._log.wait(self._log.join(unit))
        finally:
            self.make_sure()  # what has joined a batch is done, even if the caller is interrupted
        if unit.error is not None:
            raise again(unit.error)


def _renewal(values: Mapping[int, bytes]) -> Unit:
    def write(txn: Any) -> None:
        for owner, value in values.items():
            txn.put(queue_key(owner), value)

    return Unit(writes=[write], size=sum(map(len, values.values())), values=len(values) - 1)
