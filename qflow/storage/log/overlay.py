"""A log as it will be when its journal is carried over, for whoever only reads: nothing is written.

What the journal holds lies over what the log holds. An owner may write meanwhile. Both were read at one moment where
the log was not committed to between; else they are read again. Where a compacted log has taken the place of the file
that is open, the journal is of that one, and the last commit of this file holds all that the journal held before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from sortedcontainers import SortedDict

from qflow.errors import CorruptionError
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import journal, journal_reading
from qflow.storage.log.changes import UNFIT, played
from qflow.storage.log.directory import DATA, LOG
from qflow.storage.log.journal import read_state
from qflow.storage.log.journal_reading import Found, Look
from qflow.storage.log.notes import is_note, open_notes, replay
from qflow.storage.log.recovery import read_identity

TRIES = 1000
"""A commit takes less long. A transaction that is behind for good is read as it is: see `Environment.catch_up`."""


class Overlay:
    """What the journal of a log says beyond it. One for each environment that is open to read."""

    def __init__(self, env: Environment, files: Files) -> None:
        self._env = env
        self._files = files
        self._path = journal.path_of(env.path)
        self._data = os.path.join(os.path.dirname(env.path), LOG, DATA)
        self._look: Look | None = None
        self._changed: SortedDict[bytes, bytes | None] = SortedDict()
        """What that look has found; None: the key is no more."""
        self._tries = 0

    def over(self, txn: Any) -> Any:
        """Return what reads `txn` and the journal together; None if they are of two moments.

        Raises:
            CorruptionError: the journal is another log's, or of another format. StorageError: it cannot be read.
        Cost: 10 µs where there is no journal, 30 where it holds nothing more, else reading it once.
        """
        before = self._look
        found = self._find(txn)
        if found is None or not (found.records or found.problems or found.refusal):
            return txn
        is_replaced = self._is_replaced
        if self._env.last_transaction() != txn.id():
            self._look = before
            self._tries += 1
            return None if self._tries < TRIES else txn
        self._tries = 0
        if is_replaced:
            return txn
        if found.refusal is not None:
            raise CorruptionError(found.refusal)
        if self._look is not before:
            self._env.problems += [problem for problem in found.problems if problem not in self._env.problems]
            self._changed = SortedDict()
            over = _Over(txn, self._changed)
            for changes in found.records:
                for key, value in () if is_note(changes) else played(over.get, changes):  # one may change what one put
                    if value is not UNFIT:
                        self._changed[key] = value
            replay(over, found.records[len(found.records) - open_notes(found.records) :])
        return _Over(txn, self._changed) if self._changed else txn

    def unapplied(self) -> Found | None:
        """Return what the journal holds beyond the last commit; of two moments, if there is one meanwhile."""
        txn = self._env.begin()
        try:
            found = self._find(txn)
            return None if self._is_replaced else found
        finally:
            txn.abort()

    @property
    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._data), self._env.file)
        except FileNotFoundError:  # between two renames, unless the spool was moved
            return os.path.exists(os.path.dirname(self._env.path))

    def _find(self, txn: Any) -> Found | None:
        """Return what the journal holds beyond a transaction. What is wrong with it is so twice in a row.

        An owner may write two records while it is read: then the later one may be seen without the other.
        """
        uuid, clean = read_identity(txn, self._env.path)
        state = read_state(txn, self._env.path)
        readable = -1
        try:
            while look := journal_reading.look(self._path, self._files, uuid, state, clean, self._look):
                whole = not look.found.problems or look is self._look or len(look.found.records) == readable
                if whole or self._env.last_transaction() != txn.id():
                    self._look = look
                    return look.found
                readable = len(look.found.records)
        except CorruptionError as error:
            if not self._is_replaced:
                raise
            return Found(state.applied, [], state.applied, [str(error)])
        return None


def count_unapplied(env: Environment, files: Files) -> int:
    """Return how many records of its journal a log does not hold. Cost: reads the journal, if there are any."""
    found = Overlay(env, files).unapplied()
    return 0 if found is None else len(found.records)


class _Over:
    """A transaction that reads changed pairs over those of another; None: the key is no more."""

    def __init__(self, txn: Any, changed: SortedDict[bytes, bytes | None]) -> None:
        self._txn = txn
        self._changed = changed
        self.id, self.abort = txn.id, txn.abort

    def get(self, key: bytes, default: Any = None) -> Any:
        if key in self._changed:
            value = self._changed[key]
            return default if value is None else value
        return self._txn.get(key, default)

    def put(self, key: bytes, value: bytes) -> None:
        self._changed[key] = value

    def cursor(self) -> _Cursor:
        return _Cursor(self, self._txn.cursor(), self._changed)


class _Cursor:
    """A cursor of such a transaction, as one of LMDB as far as readers use that."""

    def __init__(self, txn: _Over, cursor: Any, changed: SortedDict[bytes, bytes | None]) -> None:
        self._txn = txn
        self._cursor = cursor
        self._changed = changed
        self._at: bytes | None = None

    def key(self) -> bytes:
        return self._at or b""

    def value(self) -> Any:
        return b"" if self._at is None else self._txn.get(self._at)

    def item(self) -> tuple[bytes, Any]:
        return self.key(), self.value()

    def set_key(self, key: bytes) -> bool:
        self._at = bytes(key) if self._txn.get(bytes(key)) is not None else None
        return self._at is not None

    def set_range(self, key: bytes) -> bool:
        """Go to the first key that is not below one."""
        found = self._cursor.set_range(key) if key else self._cursor.first()
        while found and self._is_gone(bytes(self._cursor.key())):
            found = self._cursor.next()
        behind = bytes(self._cursor.key()) if found else None
        keys = [] if behind is None else [behind]
        keys += self._first(self._changed.irange(minimum=bytes(key), maximum=behind))
        self._at = min(keys, default=None)
        return self._at is not None

    def first(self) -> bool:
        return self.set_range(b"")

    def next(self) -> bool:
        return self._at is not None and self.set_range(self._at + b"\0")

    def last(self) -> bool:
        return self._go_before(None)

    def prev(self) -> bool:
        return self._at is not None and self._go_before(self._at)

    def _go_before(self, key: bytes | None) -> bool:
        """Go to the last key below one, or to the last of all."""
        cursor = self._cursor
        found = cursor.prev() if key is not None and cursor.set_range(key) else cursor.last()
        while found and self._is_gone(bytes(cursor.key())):
            found = cursor.prev()
        before = bytes(cursor.key()) if found else None
        keys = [] if before is None else [before]
        keys += self._first(self._changed.irange(before, key, inclusive=(True, False), reverse=True))
        self._at = max(keys, default=None)
        return self._at is not None

    def _is_gone(self, key: bytes) -> bool:
        """Tell whether a key of the transaction is no more; those whose values were changed are found in both."""
        return self._changed.get(key, key) is None

    def _first(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the first key that is still there, if there is one."""
        return next(([key] for key in keys if self._changed[key] is not None), [])

    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[Any]:
        found = self._at is not None or self.first()
        while found:
            yield self.item() if keys and values else self.key() if keys else self.value()
            found = self.next()

    def getmulti(self, keys: Iterable[bytes]) -> list[tuple[bytes, Any]]:
        return [(key, value) for key in keys if (value := self._txn.get(key)) is not None]

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._cursor.close()
