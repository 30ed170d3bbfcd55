"""A spool: the directory that one broker owns. Opening and recovering it, its state, copies of its log, closing it.

What lies in it:

    lock         the owner's lock
    log/         the transaction log: the truth; `log.new/`, `log.old/`: see `snapshots`
    journal      small commits that are not in the log yet
    spill/       messages that do not fit in memory: a cache, renamed aside when the spool is opened
    wiping/      spill files of before, unlinked little by little
    cursors/     how far groups of readers outside have come; see `storage.streams.groups`
    inbox/       batches handed in from outside, which the owner adopts; see `storage.inbox.stages`
    stats.json   what the owner is doing, renewed each second
    door         the socket through which other processes come; see `door`
    amqp/        where a local server and its clients find each other; see `amqp.local`

Opening, in order, each step repeatable after a crash: lock (before anything is touched), log (created whole or not at
all), journal carried over, rows read, `dirty` synced, spill set aside.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from qflow.config import BrokerSettings, spool_path
from qflow.errors import BrokerClosed, DiskFull, ForkedProcess, QflowError, StorageError
from qflow.identity import new_uuid
from qflow.importing import imported
from qflow.loggers import get_logger
from qflow.memory.waiting import StraightLock
from qflow.problems import PROBLEMS_KEPT, Problems
from qflow.storage.environment import CannotGrow, Environment, MapFull, log_errors
from qflow.storage.files import Files, storage_error
from qflow.storage.lock import Place
from qflow.storage.log import recovery, snapshots
from qflow.storage.log.carrying import carry_over
from qflow.storage.log.directory import check_log_directory
from qflow.storage.log.ending import Piece, write_ending
from qflow.storage.log.placing import removed
from qflow.storage.log.records import Records
from qflow.storage.log.recovery import DIRTY, Recovery
from qflow.storage.log.transaction_log import TransactionLog
from qflow.storage.places import take_place
from qflow.storage.spill.store import SpillStore
from qflow.storage.spill.wiper import Wiper, wipe_spill
from qflow.used import Used

if TYPE_CHECKING:
    from qflow.stats import CompactionReport, RecoveryReport, SnapshotReport

ALLOCATOR_HINT_BYTES = 4 * 2**20
"""Allocated and freed once: after that, glibc's malloc keeps up to twice as much of what is freed at hand.

Without it, each MiB of messages that is restored and acked goes back to the kernel and comes back page by page, unless
something else in the process happened to allocate as much. `python -m bench read-told` says what that costs: messages
of 16 KiB came from segments 2.5 times as slowly, those of 1 KiB hardly so.
"""


@cache
def _hint_allocator() -> None:
    """Give the hint, once a process. Cost: 10 µs: none of those bytes is touched, as those of a `bytearray` are."""
    bytes(ALLOCATOR_HINT_BYTES)


def _files(files: Files, place: Place, _: BrokerSettings) -> SpillStore:
    from qflow.storage.spill.files import SpillFiles

    return SpillFiles(files, place)


def _segments(files: Files, place: Place, settings: BrokerSettings) -> SpillStore:
    from qflow.storage.spill.segments import SpillSegments

    return SpillSegments(files, place, segment_bytes=settings.segment_bytes, max_mapped=settings.max_mapped_segments)


SPILL_STORES: dict[str, Callable[[Files, Place, BrokerSettings], SpillStore]] = {"files": _files, "segments": _segments}
"""How each is made, by the setting `spill`; its module is imported then."""

_logger = get_logger("qflow")
_damage_logger = get_logger("qflow.damage")
"""For who tells of damage otherwise: a logger that can be silenced apart."""


class Forked:
    """Stands in for a lock in a forked child: whoever takes it is told."""

    def __enter__(self) -> NoReturn:
        raise ForkedProcess(
            f"this broker belongs to the parent of process {os.getpid()}, which was forked while the spool was open: "
            "use it from here with qflow.connect; to own it, close it before forking, or start a fresh process (spawn, "
            "exec)"
        )

    def __exit__(self, *_: object) -> None: ...

    acquire = __enter__


class Spool:
    """See the module. Made as a broker begins; `abandon` or `close` ends it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: BrokerSettings,
        *,
        files: Files | None = None,
        open_environment: Callable[[str, Files], Environment] = Environment,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the directory, open the log and read what it says; a failure leaves nothing open."""
        self._started = time.perf_counter()
        self.settings = settings
        self.files = files or Files()
        self.clock = clock
        self.monotonic = monotonic
        self.changing = StraightLock()
        """Held, before any other lock, while queues, streams or subscriptions come, change or go, and to begin the end.

        Who holds it asks `check_open` first.
        """
        self.used = Used(self.changing)
        self.closed = False
        """Calls are refused. Set under `changing`."""
        self.released = False
        """Nothing is confirmed any more; soon the directory may be somebody else's."""
        self._closer: threading.Thread | None = None
        self._numbering = threading.Lock()
        self._problems = Problems()
        self._untold: deque[str] = deque()  # problems that the log of the process does not have yet
        self.damage_noted: Callable[[], object] = lambda: None
        """Called when there is one; it is to have `tell_noted` called soon."""
        self._quarantined_blocks = 0
        self._lock = take_place(spool_path(path), self.files, unsafe_filesystem=settings.unsafe_filesystem)
        self.place = self._lock.place
        self._told_path = self.path
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            self._create_log()
            env = open_environment(self._log_path, self.files)
            env.place = self.place
            undo.callback(env.close)
            self.found = self._read(env, undo)
            self._set_aside()
            self.uuid = self.found.uuid
            self._next_owner = self.found.next_owner
            self.note(self.found.problems)
            self.log = TransactionLog(env, clock, self._confirming)
            undo.callback(self.log.close)
            self.records = Records(self.log)
            self.store = SPILL_STORES[self.settings.spill](self.files, self.place, self.settings)
            _hint_allocator()
            self.wiper = Wiper(self.files, self.place)
            undo.pop_all()

    @property
    def path(self) -> str:
        """Its directory; where it has been moved to, once somebody has found that."""
        return self.place.path

    def follow(self) -> None:
        """Look whether it was moved while it is open, and use it where it is now. Cost: 3 µs."""
        self.place.follow()
        if self._told_path != self.path:
            before, self._told_path = self._told_path, self.path
            moved = "%s was moved while it was open, and is used where it is now: %s"
            _logger.warning(moved, before, self.path, spool=self.path, event="moved")

    def check_there(self) -> None:
        """Raises StorageError: its directory was removed, or its log, as long as it is open. Cost: 2 µs."""
        if self.place.is_removed:
            raise StorageError(removed(f"the spool {self.path}"))
        self.log.check_there()

    # Opening -----------------------------------------------------------------------------------------------------

    @property
    def _log_path(self) -> str:
        return os.path.join(self.path, "log")

    def _create_log(self) -> None:
        try:
            snapshots.bring_back(self.path, self.files)
            if not check_log_directory(self._log_path):
                Environment.create(self.path, self.files, recovery.first_records(new_uuid()))
        except OSError as error:
            raise storage_error(error, "create the log", self._log_path) from error

    def _read(self, env: Environment, undo: ExitStack) -> Recovery:
        """Return what the log says, once it is marked as open."""
        env.catch_up()
        with env.reading() as txn:
            uuid, clean = recovery.read_identity(txn, env.path)
        journal_bytes = self.settings.journal_bytes if self.settings.journal == "auto" else 0
        carried = carry_over(env, self.files, uuid, clean=clean, journal_bytes=journal_bytes)
        self._confirming, self._carried = carried.confirming, carried
        undo.callback(self._confirming.close, failed=True)
        with env.reading() as txn:
            seen = txn.id()
        found = recovery.read_log(env)
        found.problems.extend(carried.problems)
        if not found.clean:
            found.problems.extend(recovery.check_last_commits(env, found))
        try:
            env.make_room(0, 4, settles_only=True)
        except CannotGrow:
            env.confine(0, 4, settles_only=True)
        self._mark_open(env, seen)
        env.messages = sum(row.messages for one in found.queues + found.streams for row in (one.rows or {}).values())
        return found

    def _mark_open(self, env: Environment, seen: int) -> None:
        """Write that the end was not clean, unless somebody has written since the transaction that was seen last."""
        with log_errors(self._log_path, "marked as open"):
            txn = env.begin(write=True)
            following = txn.id()
            if following != seen + 1:
                txn.abort()
                raise StorageError(
                    f"{self._log_path}: transaction {seen} was read, and {following} is next: something else writes "
                    "into the log. Nothing was changed; end that, and open the spool again"
                )
            try:
                recovery.set_format(txn)
                recovery.set_state(txn, DIRTY)
                env.commit(txn)
            except MapFull as error:
                raise DiskFull(
                    f"{self._log_path}: the disk has no room for the first commit of an opening: free some space, and "
                    "open the spool again. Nothing was changed"
                ) from error

    def _set_aside(self) -> None:
        """Remove what a compaction left, and have the spill files of before wiped."""
        try:
            snapshots.remove_leftovers(self.path, self.files, self.found.uuid)
        except QflowError as error:
            left = "%s: what a compaction left stays: %s"
            _logger.warning(left, self.path, error, spool=self.path, event="compaction_left")
        wipe_spill(self.files, self.path)

    def opened(self, queues: int, messages: int) -> None:
        """Everything that was found is taken over: report on the opening, and let go of it."""
        records = [record for record in self.found.queues if not record.deleted]
        self._recovery: dict[str, Any] = {
            "clean": self.found.clean,
            "queues": queues,
            "messages": messages,
            "bytes": sum(row.bytes for record in records for row in (record.rows or {}).values()),
            "journal_records": self._carried.records,
            "journal_problems": tuple(self._carried.problems),
            "seconds": time.perf_counter() - self._started,
        }
        del self.found

    def new_owner(self) -> int:
        """Return a number that nobody has, for a new owner of lanes in the log."""
        with self._numbering:
            owner = self._next_owner
            self._next_owner += 1
            return owner

    # Damage ------------------------------------------------------------------------------------------------------

    @property
    def recovery(self) -> RecoveryReport:
        """What opening the spool found, and what was found damaged since: as it is now, a plain value."""
        report: RecoveryReport = imported("qflow.stats").RecoveryReport(
            problems=self._problems.lines(), quarantined_blocks=self._quarantined_blocks, **self._recovery
        )
        return report

    def note(self, problems: Iterable[str]) -> None:
        """Note what is damaged: in the recovery report, and at once in the log of the process."""
        for problem in problems:
            self.report(problem, 0)
        self.tell_noted()

    def report(self, problem: str, damaged_blocks: int) -> None:
        """Note what is damaged, and how many blocks were set aside for it. Called anywhere, also under locks."""
        found = self._problems.add(problem)
        if found <= PROBLEMS_KEPT:
            self._untold.append(problem)
        elif found == PROBLEMS_KEPT + 1:
            self._untold.append("more is damaged, which is counted in the recovery report, and not told here")
        self._quarantined_blocks += damaged_blocks
        self.damage_noted()

    def tell_noted(self) -> None:
        """Write what was noted to the log of the process, whose handlers may use the broker. Called without a lock.

        That is what is damaged, and what the writer has to tell.
        """
        while self._untold:
            _damage_logger.error("%s: %s", self.path, self._untold.popleft(), spool=self.path, event="damage")
        self._confirming.tell()

    # Copies of the log -------------------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy what is in the log to a new spool; see `Broker.snapshot`."""
        self.check_open()
        self.follow()
        with self.log.copying() as env:
            return snapshots.make_snapshot(
                env, self.path, path, self.files, unsafe_filesystem=self.settings.unsafe_filesystem
            )

    def compact(self) -> CompactionReport:
        """Put a copy of the log without its free pages in its place; see `Broker.compact`."""
        reports: list[CompactionReport] = []
        self.follow()

        with ExitStack() as ending:

            def work(env: Environment, still: AbstractContextManager[object]) -> None:
                reports.append(snapshots.compact(env, self.path, self.files, self.uuid, still, ending))

            self.log.alone(work)
        return reports[0]

    # Closing -----------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises BrokerClosed; in a forked child ForkedProcess."""
        if self.closed:
            raise BrokerClosed(f"the broker of {self.path} is closed: open the spool again")

    def begin_closing(self) -> bool:
        """Refuse calls from now on; False if it is closed, or somebody is at it.

        (An event's callback may be the one whom that one waits for.)
        """
        with self.changing:
            if self.released or self._closer is not None:
                return False
            self.log.check_can_wait()
            self.closed = True
            self._closer = threading.current_thread()
            return True

    def end_closing(self) -> None:
        """Closing came to its end, or failed, and may be tried again."""
        self._closer = None

    def close(self, pieces: Callable[[], Iterable[Piece]], let_go: Iterable[Callable[[], None]]) -> None:
        """Confirm what is on its way and let go of the directory, whatever fails.

        Args:
            pieces: what a clean end leaves in the log.
            let_go: what is to be called then, while the log is still there; the last one first.
        """
        with ExitStack() as ending:
            ending.callback(self.abandon)
            for call in let_go:
                ending.callback(call)
            self.released = True
            self.log.drain()  # what has reserved room and is handed over later is refused, or written at the end
            if not self.log.failed:
                write_ending(self.log, pieces)

    def abandon(self) -> None:
        """Let go of the directory as it is, whatever fails."""
        with ExitStack() as ending:
            ending.callback(self._lock.release)
            ending.callback(self.store.close)
            ending.callback(self.log.close)

    def disown(self, stub: Forked) -> None:
        """In a forked child: refuse everything, and let go of the lock's descriptors, never of the log's."""
        self._lock.close()
        self.log.disown(stub)
        self.changing = stub  # type: ignore[assignment]
        self.used = Used(stub)
        self.check_open = stub.__enter__  # type: ignore[method-assign]
