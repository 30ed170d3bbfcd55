"""A request that stands alone: its own thread confirms it, by a note in the journal, while the writer rests.

A put that nothing else is written with would wait for the writer twice: until that wakes, and until it is woken.
So the thread takes the *turn*, writes a note of what it does (`notes`), syncs it, and makes it visible. The writer
takes no batch meanwhile, and while it has one nobody gets the turn: what comes in between waits for the next batch.

    has the turn    taken under the lock of the queue, with the room for a message: `request`
    noted           the bytes of its record, and where in the journal they go, are settled: `_noted`
    synced          it is confirmed, whatever becomes of its thread: `_synced`
    visible         in its queue, under that one's lock
    counted         rows, the journal, and the turn given back: one straight line, see `waiting`

A signal handler may strike between any two of those, and may never return. Then the writer goes on from there: at once
if the thread says that it was interrupted, else when it needs the turn and has waited for `PATIENCE_S`. It writes the
same bytes to the same place, so it does not matter how far the thread came. Because that may be in the middle of a call
of the system still, the journal is not begun anew before it is out of it: `Journal.inside`.

A unit, as a transaction is, takes more than straight lines. Its thread confirms it where no handler strikes, publishes
it as the writer would, and keeps the turn until it has. What little was handed over, as the put of a task, or a put and
the acks before it that nobody waits for, the writer confirms by a note of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, perf_counter
from typing import Any

from qflow.handlers import is_of_handler
from qflow.message import OVERHEAD_BYTES
from qflow.named_tuples import NamedTuple
from qflow.storage.log.batch import Batch, Put, Request, Unit
from qflow.storage.log.batch_writing import messages_of
from qflow.storage.log.confirming import NOTED_BYTES, Confirming
from qflow.storage.log.journal import Journal, Record
from qflow.storage.log.lane import Lane, Step
from qflow.storage.log.notes import MOST_BYTES, NOTED_LANES, Note, Noting, joint_note, put_note, settle_note
from qflow.storage.log.placing import is_removed

PATIENCE_S = 0.25
"""Most syncs take less; one that takes longer, while others wait for the log, is done twice."""


class Beside:
    """The requests of a batch that one note confirms. What it is asked is as of a request."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def note(self, now_ms: int) -> Noting | None:
        """Return what the batch does as one note; None if that is more than to put and to settle, or not little."""
        batch = self._batch
        stored_once = batch.spreads, batch.shared, batch.references
        others = batch.writes, batch.attempts, batch.purges, batch.damaged, batch.hollows, batch.deletes
        if batch.applies or any(stored_once) or any(others):
            return None
        settled, puts = batch.all_settled(), batch.puts
        if len(settled) + len(puts) > NOTED_LANES:
            return None
        if any(unit.writes or unit.notes or unit.size for unit in batch.units):
            return None
        settles = [settle_note(lane, ranges) for lane, ranges in settled.items()]
        return joint_note([*settles, *[_put_note(lane, puts[lane], now_ms) for lane in puts]])

    def starts(self, lane: Lane, first: int) -> int:
        """Note where what is put begins in a lane; return of how many puts that is."""
        puts = self._batch.puts[lane]
        for put in puts:
            put.starts(lane, first)
            first += len(put.records)
        return len(puts)


def _put_note(lane: Lane, puts: list[Put], now_ms: int) -> Noting | None:
    """Return a note of what some puts have for a lane, one behind the other."""
    messages = messages_of(puts)
    if messages.topics is not None:
        return None
    return put_note(lane, messages.records, messages.plain, sum(messages.sizes), now_ms)


class Noted(NamedTuple):
    """A request on its way by this one."""

    request: Request | Beside
    notes: tuple[Note, ...]
    """What it does; one note where its own thread confirms it."""
    record: Record
    size: int
    """See `NOTED_BYTES`."""
    journal: Journal
    """A handler may close the log meanwhile, and open another."""


class Direct:
    """See the module. One a log. Changed by who has the turn: nothing is called between a look and what follows."""

    def __init__(self, confirming: Confirming, clock: Callable[[], float], wake: Callable[[], object]) -> None:
        """`wake` wakes the writer; it raises RuntimeError where that is awake."""
        self._confirming = confirming
        self._clock = clock
        self._wake = wake
        self.open = False
        """The turn may be taken: the writer rests, and there is a journal."""
        self.request: Request | None = None
        """What has it."""
        self.thread = 0
        """Whose request it is, once that has begun."""
        self.abandoned = False
        """Its thread was interrupted: the writer is to go on."""
        self.confirmed = 0
        """How many records were written, by a thread or for one, and by notes of the writer."""
        self._noted: Noted | None = None
        self._synced: Request | None = None
        self._stood: Request | None = None
        self._wanted = False
        """The writer waits for the turn."""
        self._concluding = threading.Lock()
        """Held by a thread that publishes a unit, and to take the turn from it."""
        self.concludes = 0
        """That thread."""
        self._lanes: set[Lane] = set()
        """Of the notes that are in no transaction, and perhaps some more."""
        self._has_room = False
        """There is room for a note of the writer's own: it has just rested, and written nothing since."""

    # The thread of a request ----------------------------------------------------------------------------------------

    def confirm(self, request: Request) -> None:
        """Confirm what has the turn. Called by its thread. It is done when this returns, or the writer will do it."""
        confirming = self._confirming
        self.thread = threading.get_ident()
        noted = self._note(request)
        began_s = perf_counter()
        if noted is None or not self._write(noted, began_s):
            self.leave(request)
            return
        now_s = perf_counter()
        if self.request is not request:
            return
        self._synced = request
        confirming.timers.began_s = 0.0  # before any call: the writer may have begun the next one after that
        is_first = not confirming.pending
        confirming.timers.note_alone(now_s - began_s)
        if not request.show(self, noted.notes[0].first):
            self.leave(request)
            return
        self.count(noted, monotonic())
        if is_first or self._wanted:  # from now on there is something to be applied; or it waits for the turn
            with suppress(RuntimeError):
                self._wake()

    def confirm_whole(self, unit: Unit, conclude: Callable[[Batch], object]) -> None:
        """`confirm` of a unit that has the turn: nothing strikes its thread here, so it does what the writer would.

        `conclude` publishes a batch, and tells what became of it.
        """
        self.thread = threading.get_ident()
        try:
            noted = self._note(unit)
            began_s = perf_counter()
            is_synced = noted is not None and self._write(noted, began_s)
        except BaseException:
            self.leave(unit)
            raise
        if noted is None or not is_synced:
            self.leave(unit)
            return
        confirming = self._confirming
        with self._concluding:
            if self.request is not unit:
                return
            is_first = not confirming.pending
            self.concludes = self.thread
            try:
                confirming.timers.began_s = 0.0
                confirming.timers.note_alone(perf_counter() - began_s)
                batch = Batch()
                batch.requests.append(unit)
                self._count_in(batch, noted)
                conclude(batch)
            except BaseException as error:
                confirming.failed(error)
                raise
            finally:
                self.concludes, self.request, self.abandoned = 0, None, False
        if is_first or self._wanted:
            with suppress(RuntimeError):
                self._wake()

    def count(self, noted: Noted, now_s: float) -> None:
        """Count what is confirmed and visible, and give the turn back, unless the writer has it.

        An interrupt comes before it or after.
        """
        confirming: Any = self._confirming
        request, notes, record, size, journal = noted
        note = notes[0]
        env, lane = confirming.env, note.lane
        if self.request is request:
            lane.row = row = note.after
            if note.records is not None:  # else a message that is not logged may have taken the next one meanwhile
                lane.next = row.next
            env.messages += row.messages - note.before.messages
            journal.position = record.end
            journal.following = record.number + 1
            if not confirming.pending:
                confirming.since = now_s
            confirming.pending += 1
            confirming.notes += notes
            confirming.noted_bytes += size
            self.confirmed += 1
            self.abandoned = False
            self.request = self._noted = self._synced = None
            request.done = True

    def leave(self, request: Request) -> None:
        """Have the writer go on with a request of the calling thread, if it has the turn. Twice is fine."""
        if self.request is request:
            self.abandoned = True
            with suppress(RuntimeError):
                self._wake()

    def leave_mine(self) -> None:
        """Have the writer go on with what the calling thread has begun: a handler struck there, and waits now."""
        request = self.request
        if request is not None and self.thread == threading.get_ident():
            self.leave(request)

    def _note(self, request: Request | Beside) -> Noted | None:
        """Settle what is written for a request, and where; None if it is not to be noted."""
        confirming = self._confirming
        made, journal = request.note(int(self._clock() * 1000)), confirming.journal
        if made is None or journal is None:
            return None
        if is_removed(confirming.env):
            return None
        notes, changes = made
        # Records stand in memory until they are carried out, also where they were acked by then, and are not charged.
        lanes, size = self._lanes, len(changes) + OVERHEAD_BYTES * sum([len(note.records or ()) for note in notes])
        if confirming.noted_bytes + size > NOTED_BYTES or not journal.fits(len(changes)):
            return None
        for note in notes:
            if note.lane not in lanes:
                if len(lanes) >= NOTED_LANES:
                    return None
                lanes.add(note.lane)
        return Noted(request, notes, journal.record(changes), size, journal)

    def _write(self, noted: Noted, now_s: float) -> bool:
        """Have a record on the disk; False if the disk has failed, or the turn was taken meanwhile.

        The writer counts the time from here on, too, where it goes on with what a slow sync holds up.
        """
        journal = noted.journal
        if self.request is not noted.request:
            return False
        self._noted = noted
        journal.inside = True
        self._confirming.timers.began_s = now_s
        try:
            journal.write_alone(noted.record)
            journal.sync_alone()
        except OSError as error:
            if is_of_handler(error):
                raise
            return False  # the writer tries it again, and fails as it does
        finally:
            journal.inside = False
        return True

    def disown(self) -> None:
        """In a forked child: what it is about to write goes nowhere."""
        journal = self._confirming.journal
        if journal is not None:
            journal.divert()

    # The writer -----------------------------------------------------------------------------------------------------

    def give(self) -> None:
        """Have the turn taken by whoever comes, if that is as safe as a batch."""
        if self._makes_room():
            self.open = True

    def _makes_room(self) -> bool:
        """Make room for what may be noted from here on; return whether there is any."""
        if not self._confirming.make_room_for_notes():
            return False
        if not self._confirming.notes:
            self._lanes.clear()
        return True

    def take(self, wait: Callable[..., object]) -> Request | None:
        """Have the turn; return the request that is to be gone on with, if its thread does not.

        Args:
            wait: returns when the writer is woken, given a `timeout`.
        """
        self._has_room, self.open = self.open, False
        if self.request is not None:
            until_s = monotonic() + PATIENCE_S
            self._wanted = True
            while self.request is not None and not self.abandoned and (left_s := until_s - monotonic()) > 0:
                wait(timeout=left_s)
            self._wanted = False
        with self._concluding:
            request, self.request = self.request, None  # from here on its thread waits
            self.abandoned = False
        return request

    def go_on(self, batch: Batch, request: Request | Beside) -> bool:
        """Confirm in a batch of its own what a thread has left; False where the request is to be done as any other.

        What raises with `batch.committing` leaves it in doubt.
        """
        noted, confirming = self._noted, self._confirming
        if noted is None or noted.request is not request:
            return False
        record, journal, timers = noted.record, noted.journal, confirming.timers
        if self._synced is not request:
            try:
                with timers.sync() as began_s:
                    journal.write_record(record)
                    batch.committing = True
                    journal.sync()
            except OSError as error:
                if batch.committing:
                    raise
                confirming.give_up_journal(error)
                self._has_room = False
                return False
            timers.commits.note(perf_counter() - began_s)
        batch.committing = True  # it is on the disk, whatever is raised from here on
        self._count_in(batch, noted)
        return True

    def _count_in(self, batch: Batch, noted: Noted) -> None:
        """Count what is confirmed, and have a batch publish it."""
        request, notes, record, size, journal = noted
        journal.position, journal.following = record.end, record.number + 1
        self._confirming.note(notes, size)
        batch.plan = [_step(note, request) for note in notes]
        if isinstance(request, Unit):
            batch.units = [request]
        batch.committed = True
        self.confirmed += 1
        self._noted = self._synced = None  # which hold bodies

    def confirm_alone(self, batch: Batch) -> bool:
        """Confirm a batch by a note, if it is little: a request that stands alone, or a few; False where it is not.

        What raises with `batch.committing` leaves it in doubt.
        """
        confirming, requests = self._confirming, batch.requests
        if batch.size > MOST_BYTES or confirming.is_late:
            return False
        if not (self._has_room or self._makes_room()):
            return False
        stands_alone = len(requests) == 1 and not batch.is_settling  # else that may be of a batch that failed
        self._noted = noted = self._note(requests[0] if stands_alone else Beside(batch))
        if noted is None or not self.go_on(batch, noted.request):
            self._noted = None  # which holds bodies
            return False
        return True

    def look_after(self) -> None:
        """Have the writer go on with what has had the turn since the last call: its thread was interrupted."""
        request = self.request
        if request is not None and self._stood is request:
            self.leave(request)
        self._stood = request


def _step(note: Note, request: Request | Beside) -> Step:
    """Return what a note of a request that is confirmed means for its lane."""
    lane, before, after, first, put, time_ms = note
    records, puts = list(put or ()), 0
    if put is not None:
        puts = request.starts(lane, first) or 1
        if isinstance(request, Put) and request.visible:
            lane.next, puts = after.next, 0
    size, removing = after.bytes - before.bytes, lane.removing
    return Step(lane, after, after.next, first, records, size, puts, None, lane.remove_at, removing, None, time_ms)
