"""How a batch is confirmed: by a record of the journal and one sync, or by a commit of the log. Of the writer alone.

The transaction that writes stays open while batches are confirmed by the journal. It is committed, with all of them, if

    a batch is large, or must be in the log itself     the journal is full
    nothing was to be written for `SOON_S`             the first of them has waited for `LATE_S`
    somebody reads the log, or copies it               the log is closed

Whatever ends it otherwise loses nothing: the next one begins with what the journal holds. Room for it in the file was
made before the batch was confirmed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, perf_counter
from typing import Any

from qflow.errors import CorruptionError, StorageError
from qflow.storage.environment import Environment, LmdbError, MapFull
from qflow.storage.files import storage_error
from qflow.storage.log.changes import PAGE_BYTES, Changes, play
from qflow.storage.log.journal import STATE_KEY, Journal, JournalState, encode_state
from qflow.storage.log.timing import Timers

_logger = logging.getLogger("qflow")

SMALL_BYTES = 128 * 1024
"""A batch that changes more is committed: the journal would save it little."""
FEW_LANES = 100
"""And so is one that writes to more lanes."""
DIRTY_BYTES = 16 * 2**20
"""The open transaction is committed when it has changed about so much: LMDB holds that in memory."""
FIRST_BATCHES = 16
"""So many small batches are committed before there is a journal: many programs never write more."""
SOON_S = 0.02
LATE_S = 1.0


class Confirming:
    """See the module."""

    def __init__(
        self, env: Environment, create: Callable[[int], Journal] | None, journal: Journal | None, state: JournalState
    ) -> None:
        """
        Args:
            create: makes a journal, given the number of its first record; None: there is to be none.
            journal: the one there is; the log holds all its records.
            state: what the log says of it.
        """
        self._env = env
        self._create = create
        self._journal = journal
        self._state = state
        self._broken: BaseException | None = None
        """Why nothing more is written to the journal."""
        self._small_batches = 0
        """Batches that a journal would have taken."""
        self._txn: Any = None
        self._changes: Changes | None = None
        self.pending = 0
        """Records of the journal that the log does not hold."""
        self._since = 0.0
        self.timers = Timers()
        self.failed: Callable[[BaseException], object] = lambda error: None
        """Told of what leaves the log in a state that nobody knows."""
        self._rolled_back = 0, 0
        """See `written`: what was written and rolled back, of which the journal brings back a part."""

    @property
    def written(self) -> tuple[int, int]:
        """How many bytes and values were written since the last commit, as `Environment.make_room` takes them."""
        size, values = self._rolled_back
        if self._changes is None:
            return size, values
        more_size, more_values = self._changes.written
        return size + more_size, values + more_values

    def begin(self, small: bool) -> Any:
        """Return the transaction that a batch is to be written in.

        Args:
            small: it may be confirmed by the journal, unless it is larger than it seems.
        """
        if self._txn is None:
            self._txn = self._env.begin(write=True)
            if self.pending:
                self._play()
        if not small or self._env.confined:
            return self._txn
        if self._changes is None and (self._journal is not None or self._may_begin()):
            self._changes = Changes(self._txn)
        return self._txn if self._changes is None else self._changes

    def confirm(self, txn: Any) -> None:
        """Have on the disk what was written in what `begin` has returned."""
        if not isinstance(txn, Changes) or not self._takes(txn.size) or not self._append(txn.take()):
            self._commit()

    def apply(self) -> None:
        """Have everything in the log that was confirmed.

        Raises:
            MapFull: it can be done again in a larger map. Anything else is a failure of the log, and was told.
        """
        if not self.pending:
            return
        try:
            self.begin(small=False)
            self._commit()
        except BaseException as error:
            self.roll_back()
            if not isinstance(error, MapFull):
                _logger.exception("%s: what the journal holds was not committed; it stays there", self._env.path)
                self.failed(error)
            raise

    def roll_back(self) -> None:
        """Nothing that was written since `begin` is to be done, or nobody knows whether it was."""
        self._rolled_back = self.written if self.pending else (0, 0)
        txn, self._txn, self._changes = self._txn, None, None
        if txn is not None:
            with suppress(LmdbError):  # raised where it has ended
                txn.abort()

    def close(self, *, failed: bool) -> None:
        """End what is open; the journal holds what the log does not, and nothing else unless the log has failed."""
        self.roll_back()
        journal, self._journal, self._create = self._journal, None, None
        if journal is not None:
            with suppress(OSError):  # the log knows which records it holds
                try:
                    if not (failed or self.pending):
                        journal.clear()
                finally:
                    journal.close()

    def _play(self) -> None:
        """Have in a new transaction what the journal holds."""
        journal = self._journal
        assert journal is not None
        try:
            if any(play(self._txn, changes) for changes in journal.records(self._state.applied)):
                raise CorruptionError(f"{journal.path} does not fit the log: let nothing write inside a spool")
        except BaseException:
            self.roll_back()
            raise

    def _takes(self, size: int) -> bool:
        """Tell whether changes of so many bytes go into the journal, which may be made now."""
        if size > SMALL_BYTES or self._broken is not None:
            return False
        if self._journal is None:
            self._make()  # this batch is committed: so the log says that there is one
            return False
        written, values = self.written
        if written + values * PAGE_BYTES > DIRTY_BYTES or (self.pending and monotonic() - self._since > LATE_S):
            return False
        return self._journal.fits(size)

    def _may_begin(self) -> bool:
        if self._create is None:
            return False
        self._small_batches += 1
        return self._small_batches > FIRST_BATCHES

    def _make(self) -> None:
        """Make a journal, if there is to be one."""
        if self._create is None:
            return
        try:
            self._journal = self._create(self._state.applied + 1)
        except StorageError as error:
            self._create = None
            _logger.warning("%s: each batch is committed to the log by itself: %s", self._env.path, error)

    def _append(self, changes: bytes) -> bool:
        """Write a record and sync it; return False if the disk does not take it, and nothing was promised."""
        journal = self._journal
        assert journal is not None
        try:
            journal.write(changes)
        except OSError as error:
            self._broken = storage_error(error, "write the journal", journal.path)
            return False
        began_s = perf_counter()
        journal.sync()
        self.timers.syncs.note(perf_counter() - began_s)
        if not self.pending:
            self._since = monotonic()
        self.pending += 1
        return True

    def _commit(self) -> None:
        """Commit the open transaction, and with it all that the journal holds."""
        journal, broken = self._journal, self._broken
        # A part may be there of a record that could not be written.
        last = self._state.applied + self.pending + (broken is not None)
        state = JournalState.without(last)
        if journal is not None and broken is None:
            state = JournalState(last, journal.mark)
        if state.in_use or self._state.in_use:
            self._txn.put(STATE_KEY, encode_state(state))
        began_s = perf_counter()
        self._env.commit(self._txn)
        self.timers.syncs.note(perf_counter() - began_s)
        self._txn = self._changes = None
        self._rolled_back = 0, 0
        self._state, self.pending = state, 0
        if journal is None:
            return
        if broken is not None:
            _logger.warning("%s: each batch is committed to the log by itself from now on: %s", self._env.path, broken)
            self._create = None
        elif journal.in_place:
            journal.begin_anew()
            return
        else:  # nothing is lost: the log has all of it
            _logger.warning("%s was removed or replaced: let no cleaner work inside a spool", journal.path)
        self._journal = self._broken = None
        journal.close()
