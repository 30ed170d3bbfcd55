"""How a batch is confirmed: by a record of the journal and one sync, or by a commit of the log. Of the writer alone.

The transaction that writes stays open while batches are confirmed by the journal. It is committed, with all of them, if

    a batch is large, or must be in the log itself     the journal is full
    nothing was to be written for `SOON_S`             the first of them has waited for `LATE_S`
    somebody reads the log, or copies it               the log is closed

Whatever ends it otherwise loses nothing: the next one begins with what the journal holds. Room for it in the file was
made before the batch was confirmed.

Requests that stand alone are confirmed by notes in the journal, which touch no transaction: see `direct`. Whatever is
written next carries them out first.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from qflow.errors import CorruptionError, StorageError
from qflow.loggers import get_logger
from qflow.storage.environment import CannotGrow, Environment, LmdbError, MapFull
from qflow.storage.files import storage_error
from qflow.storage.log.append import TAIL_BYTES
from qflow.storage.log.changes import PAGE_BYTES, Changes, play
from qflow.storage.log.journal import STATE_KEY, Journal, JournalState, encode_state, path_of
from qflow.storage.log.lane import Lane
from qflow.storage.log.notes import NOTED_LANES, Note, carry_out, is_note
from qflow.storage.log.placing import check_in_place, check_not_removed
from qflow.storage.log.rows import Row
from qflow.storage.log.timing import Timers

_logger = get_logger("qflow")

SMALL_BYTES = 128 * 1024
"""A batch that changes more is committed: the journal would save it little."""
FEW_LANES = 100
"""And so is one that writes to more lanes."""
DIRTY_BYTES = 16 * 2**20
"""The open transaction is committed when it has changed about so much: LMDB holds that in memory."""
FIRST_BATCHES = 16
"""So many small batches are committed before there is a journal: many programs never write more."""
BATCHES_AGAIN = 3
"""So many are committed, that of the close among them, before an owner gives its mark to a journal that is there: that
costs as much as a commit."""
SOON_S = 0.02
LATE_S = 1.0
NOTED_BYTES = 2**20
"""So much may be noted between two batches: in the journal, and `OVERHEAD_BYTES` more for each message."""
UNTOLD = 16
"""Lines for the log of the process that wait; of more, the oldest are dropped."""


class Confirming:
    """See the module."""

    def __init__(
        self, env: Environment, create: Callable[..., Journal] | None, journal: Journal | None, state: JournalState
    ) -> None:
        """
        Args:
            create: makes a journal, given its path, `following`, the number of its first record, and `before`, the
                mark that the log has; None: there is to be none.
            journal: the one there is; the log holds all its records.
            state: what the log says of it.
        """
        self.env = env
        self._create = create
        self.journal = journal
        self._state = state
        self._broken: BaseException | None = None
        """Why nothing more is written to the journal."""
        self._small_batches = 0
        """Batches that a journal would have taken."""
        self._txn: Any = None
        self._changes: Changes | None = None
        self.pending = 0
        """Records of the journal that the log does not hold."""
        self.since = 0.0
        """When the first of them was written."""
        self.notes: list[Note] = []
        """What was noted in the journal, and is in no transaction."""
        self.noted_bytes = 0
        self._carried: dict[Lane, tuple[Row, int, bool]] = {}
        """How lanes were that notes were carried out for, in the open transaction."""
        self.is_noted = False
        """There is a copy of the last commit beside the log."""
        self.timers = Timers()
        self.failed: Callable[[BaseException], object] = lambda error: None
        """Told of what leaves the log in a state that nobody knows."""
        self._rolled_back = 0, 0
        """See `written`: what was written and rolled back, of which the journal brings back a part."""
        self._untold: deque[Callable[[], object]] = deque(maxlen=UNTOLD)

    @property
    def written(self) -> tuple[int, int]:
        """How many bytes and values were written since the last commit, as `Environment.make_room` takes them."""
        size, values = self._rolled_back
        if self.notes:
            size += 2 * self.noted_bytes + NOTED_LANES * TAIL_BYTES
            values += 4 * NOTED_LANES
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
            self._txn = self.env.begin(write=True)
            if self.pending:
                self._play()
        if (
            small
            and not self.env.confined
            and self._changes is None
            and (self.journal is not None or self._may_begin())
        ):
            self._changes = Changes(self._txn)
        txn = self._changes if small and not self.env.confined and self._changes is not None else self._txn
        if txn is self._txn or self.notes:
            self._catch_up(txn)
        return txn

    def _catch_up(self, txn: Any) -> None:
        """Have in the open transaction what was confirmed, `txn` being that, or what notes its changes."""
        try:
            if self._changes is not None:
                self._changes.catch_up()
            left = carry_out(txn, self.notes, self.env.join)
            for lane, (row, remove_at, removing) in left.items():
                self._carried[lane] = lane.row, lane.remove_at, lane.removing
                lane.row, lane.remove_at, lane.removing = row, remove_at, removing
                if removing:
                    lane.publisher.note_left()
        except BaseException:
            self.roll_back()
            raise

    def make_room_for_notes(self) -> bool:
        """Make room on the disk for what may be noted before the next batch; return whether there is any."""
        journal = self.journal
        if journal is None or not journal.is_renewed or journal.mark != self._state.mark or journal.inside:
            return False
        if self._broken is not None or self.env.confined:
            return False
        size, values = self.written
        size += 2 * NOTED_BYTES + NOTED_LANES * TAIL_BYTES
        try:
            check_not_removed(self.env)
            self.env.make_room(size, values + 4 * NOTED_LANES, settles_only=False)
        except (CannotGrow, StorageError):
            return False
        return True

    def note(self, notes: Iterable[Note], size: int) -> None:
        """Count notes that are one record of the journal; `size`: see `NOTED_BYTES`."""
        if not self.pending:
            self.since = monotonic()
        self.pending += 1
        self.notes += notes
        self.noted_bytes += size

    def is_due(self, pending: int) -> bool:
        """Tell whether to commit what the journal holds: nothing has come since it held so much, or it is late."""
        return self.pending == pending or self.is_late

    @property
    def is_late(self) -> bool:
        """The first of what the log does not hold has waited for long enough."""
        return self.pending > 0 and monotonic() - self.since > LATE_S

    def confirm(self, txn: Any) -> None:
        """Have on the disk what was written in what `begin` has returned."""
        if not isinstance(txn, Changes) or not self._takes(txn.size) or not self._append(txn.take()):
            self._commit(more=True)

    def apply(self) -> None:
        """Have everything in the log that was confirmed.

        Raises:
            MapFull: it can be done again in a larger map. Anything else is a failure of the log, and was told.
        """
        if not self.pending:
            return
        try:
            self.begin(small=False)
            self._commit(more=False)
        except BaseException as error:
            self.roll_back()
            if not isinstance(error, MapFull):
                _logger.exception("%s: what the journal holds was not committed; it stays there", self.env.path)
                self.failed(error)
            raise

    def note_last(self) -> None:
        """Have a copy of the last commit beside the log; see `last_commit`."""
        if not self.is_noted:
            self.is_noted = True
            self.env.keep_last()

    def roll_back(self) -> None:
        """Nothing that was written since `begin` is to be done, or nobody knows whether it was."""
        self._rolled_back = self.written if self.pending else (0, 0)
        txn, self._txn, self._changes = self._txn, None, None
        if txn is not None:
            with suppress(LmdbError):  # raised where it has ended
                txn.abort()
        for lane, (row, remove_at, removing) in self._carried.items():
            lane.row, lane.remove_at, lane.removing = row, remove_at, removing
        self._carried.clear()

    def _tell_later(self, text: str, *values: object) -> None:
        """Have another thread warn: the writer waits for no handler, which may use the broker."""
        self._untold.append(partial(_logger.warning, text, *values))

    def tell(self) -> None:
        """Write to the log of the process what was noted for that. By another thread."""
        while self._untold:
            self._untold.popleft()()

    def close(self, *, failed: bool) -> None:
        """End what is open; the journal holds what the log does not, and nothing else unless the log has failed."""
        self.roll_back()
        journal, self.journal, self._create = self.journal, None, None
        if journal is not None:
            with suppress(OSError):  # the log knows which records it holds
                try:
                    if not (failed or self.pending):
                        journal.clear()
                finally:
                    journal.close()

    def _play(self) -> None:
        """Have in a new transaction what the journal holds."""
        journal = self.journal
        assert journal is not None
        try:
            records = journal.records(self._state.applied)  # notes behind the last changes are carried out next
            if any(play(self._txn, changes) for changes in records if not is_note(changes)):
                raise CorruptionError(f"{journal.path} does not fit the log: let nothing write inside a spool")
        except BaseException:
            self.roll_back()
            raise

    def _takes(self, size: int) -> bool:
        """Tell whether changes of so many bytes go into the journal, which may be made now."""
        if size > SMALL_BYTES or self._broken is not None:
            return False
        if self.journal is None:
            self._make()  # this batch is committed: so the log says that there is one
            return False
        if not self.journal.is_renewed:
            self._renew(self.journal)
            return False
        if self.journal.mark != self._state.mark:
            return False  # the commit that was to have the log say so had to be begun again
        written, values = self.written
        if written + values * PAGE_BYTES > DIRTY_BYTES or self.is_late:
            return False
        return self.journal.fits(size)

    def _may_begin(self) -> bool:
        if self._create is None:
            return False
        self._small_batches += 1
        return self._small_batches > FIRST_BATCHES

    def _make(self) -> None:
        """Make a journal, if there is to be one."""
        if self._create is None:
            return
        place = self.env.place
        place.follow()
        path = path_of(self.env.path)
        try:
            check_in_place(self.env, or_nothing=False)
            self.journal = self._create(path, following=self._state.applied + 1, before=self._state.mark)
        except StorageError as error:
            if place.has_left(os.path.dirname(path)):
                return  # the next batch has it made there
            self._create = None
            self._tell_later("%s: each batch is committed to the log by itself: %s", self.env.path, error)

    def _renew(self, journal: Journal) -> None:
        """Give a mark of this owner to a journal that an earlier one has left, if it is to be used."""
        self._small_batches += 1
        if self._small_batches <= min(FIRST_BATCHES, BATCHES_AGAIN):
            return
        try:
            journal.renew(self._state.mark)
        except OSError as error:
            self.give_up_journal(error)

    def _append(self, changes: bytes) -> bool:
        """Write a record and sync it; return False if the disk does not take it, and nothing was promised."""
        journal = self.journal
        assert journal is not None
        try:
            journal.write(changes)
        except OSError as error:
            self.give_up_journal(error)
            return False
        with self.timers.sync():
            journal.sync()
        if not self.pending:
            self.since = monotonic()
        self.pending += 1
        self._forget_notes()
        return True

    def give_up_journal(self, error: OSError) -> None:
        """Write nothing more to the journal; a record may be there of which nothing was promised."""
        assert self.journal is not None
        self._broken = storage_error(error, "write the journal", self.journal.path)

    def _lack(self, journal: Journal) -> str:
        """Return why a journal is not what will be found beside the log when that is opened again; empty if it is."""
        self.env.place.follow()
        journal.path = path_of(self.env.path)
        return journal.lack()

    def _forget_notes(self) -> None:
        """What was carried out is in a transaction that was confirmed."""
        self.notes.clear()
        self.noted_bytes = 0
        self._carried.clear()

    def _commit(self, *, more: bool) -> None:
        """Commit the open transaction, and with it all that the journal holds.

        Args:
            more: it holds more than that, which takes a number as well.
        """
        journal, broken = self.journal, self._broken
        # A part may be there of a record that could not be written.
        last = self._state.applied + self.pending + (more or broken is not None)
        state, lack = JournalState.without(last), ""
        if journal is not None and broken is None:
            lack = self._lack(journal)
            if not lack:
                state = JournalState(last, journal.mark)
        if state.in_use or self._state.in_use:
            self._txn.put(STATE_KEY, encode_state(state))
        if self._changes is not None:
            self._changes.catch_up()
        with self.timers.sync():
            self.env.commit(self._txn)
        self._txn = self._changes = None
        self.is_noted = False
        self._rolled_back = 0, 0
        self._forget_notes()
        self._state, self.pending = state, 0
        if journal is None:
            return
        if state.in_use:
            journal.following = last + 1  # of a log that falls back behind this commit, the next record tells
            journal.begin_anew()
            return
        if broken is not None:
            self._tell_later("%s: each batch is committed to the log by itself from now on: %s", self.env.path, broken)
            self._create = None
        else:  # nothing is lost: the log has all of it
            self._tell_later(f"%s {lack}", journal.path)
        self.journal = self._broken = None
        with suppress(OSError):  # a disk that has failed may refuse that, too
            journal.close()
