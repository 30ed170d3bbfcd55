"""The broker: owns a spool, its log, its spill store and its queues. Opening, recovery, fairness, closing.

What lies in a spool directory:

    lock         the owner's lock
    log/         the transaction log: the truth
    spill/       messages that do not fit in memory: a cache, renamed aside when the spool is opened
    wiping/      spill files of before, unlinked little by little
    stats.json   what the owner is doing, renewed each second

Opening, in order, each step repeatable after a crash: lock (before anything is touched), log (created whole or not at
all), rows read, `dirty` synced, spill set aside. Threads: callers lead their own commits, a flusher leads those nobody
waits for, a maintenance thread wipes, removes settled blocks and renews `stats.json`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, NoReturn
from uuid import uuid4

import attrs

from qflow.config import BrokerSettings, Overflow, QueueSettings, check_name
from qflow.errors import (
    BrokerClosed,
    CorruptionError,
    ForkedProcess,
    InvalidArgument,
    NotFound,
    QflowError,
    QueueDeleted,
    SettingsConflict,
    StorageError,
)
from qflow.memory.ledger import Account, Ledger
from qflow.queues.queue import Queue
from qflow.stats import BrokerStats, QueueStats, RecoveryReport
from qflow.storage import block_log, recovery
from qflow.storage.block_log import Row
from qflow.storage.environment import Environment, check_log_directory
from qflow.storage.files import Files, SpoolLock, acquire_lock, check_filesystem, storage_error
from qflow.storage.recovery import CLEAN, DIRTY, QueueRecord
from qflow.storage.spill import SPILL, WIPING, SpillStore, Wiper, wipe_spill
from qflow.storage.spill_files import SpillFiles
from qflow.storage.spill_segments import SpillSegments
from qflow.storage.transaction_log import Batch, TransactionLog

OURS = frozenset({"lock", "log", "log.new", SPILL, WIPING, "stats.json", "stats.json.new", "lost+found"})
MAINTENANCE_S = 1.0
REST = 4
"""Maintenance that has much to do rests so many times as long as it worked: a fifth of the time is its share."""
WIPED_AT_ONCE = 256
ALLOCATOR_HINT_BYTES = 4 * 2**20
"""Allocated and freed once: after that, glibc's malloc keeps up to twice as much of what is freed at hand.

Without it, each MiB of messages that is restored and acked goes back to the kernel and comes back page by page: a
message of 1 KiB costs 1.0 µs to read from a segment instead of 0.6, one of 16 KiB 12 µs instead of 7.
"""
HOLLOWED_AT_ONCE = 4
TRANSIENT_OWNERS = 2**31
"""Queues that are not durable have numbers from here on; the log never sees them."""

_logger = logging.getLogger("qflow")
_brokers: weakref.WeakSet[Broker] = weakref.WeakSet()


class _Dead:
    """Stands in for a lock in a forked child: whoever takes it is told."""

    def __enter__(self) -> NoReturn:
        raise ForkedProcess(
            f"this broker belongs to the parent of process {os.getpid()}: open a spool of your own after the fork"
        )

    def __exit__(self, *_: object) -> None: ...

    acquire = __enter__


class Broker:
    """A spool and its queues. Made by `qflow.open`; a context manager; every method is thread-safe."""

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
        started = time.perf_counter()
        self.path = os.path.abspath(os.fspath(path))
        self.settings = settings
        self._files = files or Files()
        self._clock = clock
        self._monotonic = monotonic
        self._problems: list[str] = []
        self._quarantined_blocks = 0
        self._closed = False
        self._declaring = threading.Lock()  # held while a queue is declared or deleted
        self._upkeep = threading.Lock()  # held by maintenance while it moves things, and by `check`
        self._lock = threading.Lock()  # guards the names below
        self._queues: dict[str, Queue] = {}
        self._incarnations: dict[int, int] = {}
        self._deleted: list[int] = []
        self._ledger = Ledger(settings.capacity_bytes)
        self._stop = threading.Event()
        self._spool_lock = self._own(settings.unsafe_filesystem)
        with ExitStack() as undo:
            undo.callback(self._spool_lock.release)
            self._open(open_environment, undo)
            self.recovery = RecoveryReport(
                clean=self._clean,
                queues=len(self._queues),
                messages=sum(len(queue) for queue in self._queues.values()),
                bytes=sum(row.bytes for record in self._found for row in (record.rows or {}).values()),
                quarantined_blocks=0,
                problems=tuple(self._problems),
                seconds=time.perf_counter() - started,
            )
            self._maintenance = threading.Thread(target=self._maintain, name="qflow-maintenance", daemon=True)
            self._maintenance.start()
            undo.pop_all()
        _brokers.add(self)

    @property
    def closed(self) -> bool:
        """It was closed, by anybody."""
        return self._closed

    # Opening -----------------------------------------------------------------------------------------------------

    def _own(self, unsafe_filesystem: bool) -> SpoolLock:
        """Make the directory if need be, and lock it, before anything in it is touched."""
        path = self.path
        check_filesystem(path, unsafe_filesystem)
        try:
            if not os.path.isdir(path):
                if os.path.lexists(path):
                    raise StorageError(f"{path} is not a directory: move it away, or open another path")
                self._make_directories(path)
            names = self._files.list(path)
            foreign = sorted(set(names) - OURS)
            if foreign and "log" not in names:
                raise StorageError(
                    f"{path} is not a spool and not empty (it holds {foreign[0]!r}): open an empty or a new directory"
                )
        except OSError as error:
            raise storage_error(error, "make the spool", path) from error
        return acquire_lock(path)

    def _make_directories(self, path: str) -> None:
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            self._make_directories(parent)
        try:
            self._files.make_directory(path)
        except FileExistsError:
            return
        self._files.sync_directory(parent)

    def _open(self, open_environment: Callable[[str, Files], Environment], undo: ExitStack) -> None:
        path = os.path.join(self.path, "log")
        try:
            if not check_log_directory(path):
                Environment.create(self.path, self._files, recovery.first_records(uuid4()))
        except OSError as error:
            raise storage_error(error, "create the log", path) from error
        env = open_environment(path, self._files)
        undo.callback(env.close)
        txn = env.begin()
        try:
            found = recovery.read(txn, path)
        finally:
            txn.abort()
        env.make_room(0, 4, settles_only=True)
        txn = env.begin(write=True)
        recovery.set_state(txn, DIRTY)
        env.commit(txn)
        wipe_spill(self._files, self.path)
        self.uuid = found.uuid
        self._clean = found.clean
        self._found = found.queues
        for problem in found.problems:
            _logger.error("%s: %s", self.path, problem)
        self._problems += found.problems
        self._next_owner = found.next_owner
        self._next_transient = TRANSIENT_OWNERS
        self._log = TransactionLog(env, self._clock)
        self._store = self._spill_store()
        bytearray(ALLOCATOR_HINT_BYTES)
        self._wiper = Wiper(self._files, self.path)
        self._broken = {record.name: record for record in found.queues if record.rows is None and not record.deleted}
        for record in found.queues:
            if record.deleted:
                self._deleted.append(record.owner)
            elif record.rows is not None:
                self._recover(record, record.rows[0])

    def _spill_store(self) -> SpillStore:
        settings = self.settings
        if settings.spill == "files":
            return SpillFiles(self._files, self.path)
        return SpillSegments(
            self._files, self.path, segment_bytes=settings.segment_bytes, max_mapped=settings.max_mapped_segments
        )

    def _recover(self, record: QueueRecord, row: Row) -> None:
        if not self._clean:
            row = row._replace(doubtful=row.next)
        try:
            settings = QueueSettings.from_dict(record.settings)
        except InvalidArgument as error:  # a setting of a later version
            self._broken[record.name] = record
            self._problems.append(f"queue {record.name!r} cannot be served: {error}")
            return
        self._queues[record.name] = self._make_queue(record.name, settings, record.owner, record.incarnation, row)

    def _make_queue(self, name: str, settings: QueueSettings, owner: int, incarnation: int, row: Row | None) -> Queue:
        self._incarnations[owner] = incarnation
        account = self._ledger.open(owner, name, settings.capacity_bytes)
        return Queue(
            name,
            settings,
            account=account,
            ledger=self._ledger,
            area=self._store.area(name, owner, incarnation),
            log=self._log if row is not None else None,
            row=row,
            owner=owner,
            relief=self._relieve,
            report=self._report,
            max_transaction_bytes=self.settings.max_transaction_bytes,
            monotonic=self._monotonic,
        )

    # Queues ------------------------------------------------------------------------------------------------------

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool = True,
        capacity_bytes: int | str | None = None,
        limit_messages: int | None = None,
        limit_bytes: int | str | None = None,
        max_message_bytes: int | str = "64MiB",
        on_overflow: Overflow = Overflow.BLOCK,
    ) -> Queue:
        """Return the queue of this name, making it if there is none.

        Args:
            name: any text of 1 to 1,024 bytes in UTF-8.
            durable: messages are synced in the log before a put returns; False = lost at restart, the queue too.
            capacity_bytes: memory it may use, an int or "64MiB"; None = as much as the broker has.
            limit_messages, limit_bytes: how deep it may get, memory and disk together; None = no limit.
            max_message_bytes: the largest message, body and headers.
            on_overflow: what a put does at a limit.

        Raises:
            InvalidArgument: a setting makes no sense.
            SettingsConflict: the queue exists and behaves differently. Another capacity is applied silently.
            CorruptionError: its record in the log is damaged.
        Cost: one commit for a new durable queue.
        """
        check_name(name)
        values: dict[str, Any] = {
            "durable": durable,
            "capacity_bytes": capacity_bytes,
            "limit_messages": limit_messages,
            "limit_bytes": limit_bytes,
            "max_message_bytes": max_message_bytes,
            "on_overflow": on_overflow,
        }
        settings = QueueSettings(**values)
        with self._declaring:
            self._check_open()
            queue = self._queues.get(name)
            if queue is not None:
                self._adapt(queue, settings)
                return queue
            if name in self._broken:
                raise self._broken_error(name)
            queue = self._declare_new(name, settings)
            with self._lock:
                self._queues[name] = queue
            return queue

    def _declare_new(self, name: str, settings: QueueSettings) -> Queue:
        incarnation = uuid4().int >> 64
        if not settings.durable:
            self._next_transient += 1
            return self._make_queue(name, settings, self._next_transient, incarnation, None)
        owner = self._next_owner
        value = recovery.queue_value(name, incarnation, settings.to_dict())

        def write(txn: Any) -> None:
            txn.put(block_log.queue_key(owner), value)
            block_log.write_row(txn, owner, 0, Row())

        self._commit(self._log.write(write))
        self._next_owner += 1
        return self._make_queue(name, settings, owner, incarnation, Row())

    def _adapt(self, queue: Queue, settings: QueueSettings) -> None:
        conflicts = queue.settings.conflicts(settings)
        if conflicts:
            name, mine, theirs = conflicts[0]
            raise SettingsConflict(
                f"queue {queue.name!r} has {name}={mine!r}, declared now with {name}={theirs!r}: declare it as it is, "
                "or change it with alter_queue"
            )
        if queue.settings.capacity_bytes != settings.capacity_bytes:
            lane = queue.lane
            if lane is not None:
                value = recovery.queue_value(queue.name, self._incarnations[lane.owner], settings.to_dict())
                self._commit(self._log.write(lambda txn: txn.put(block_log.queue_key(lane.owner), value)))
            queue.set_capacity(settings)

    def queue(self, name: str) -> Queue:
        """Return a queue that exists.

        Raises:
            NotFound: none of this name does.
            CorruptionError: its record in the log is damaged.
        """
        with self._lock:
            self._check_open()
            queue = self._queues.get(check_name(name))
        if queue is None and name in self._broken:
            raise self._broken_error(name)
        if queue is None:
            raise NotFound(f"there is no queue {name!r} in {self.path}: declare it first")
        return queue

    def _broken_error(self, name: str) -> CorruptionError:
        return CorruptionError(
            f"queue {name!r} is in the log, but its record is damaged: see `qflow check {self.path}`; delete_queue "
            "removes it with its messages"
        )

    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        with self._lock:
            self._check_open()
            return sorted(self._queues)

    def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages; waiters get `QueueDeleted`, late acks do nothing.

        A queue that cannot be served because its record is damaged can be deleted, too.

        Raises:
            NotFound: there is none of this name.
        Cost: one commit; disk is given back in the background.
        """
        with self._declaring:
            broken = self._broken.get(check_name(name))
            if broken is not None:
                self._check_open()
                self._write_deleted(name, broken.owner, broken.settings)
                del self._broken[name]
                self._deleted.append(broken.owner)
                return
            queue = self.queue(name)
            owner = queue.owner
            if queue.settings.durable:
                self._write_deleted(name, owner, queue.settings.to_dict())
            queue.refuse_calls(QueueDeleted)
            with self._lock:
                del self._queues[name]
            try:
                self._log.drain()
            finally:
                queue.let_go()
                queue.remove_spill()
                self._incarnations.pop(owner, None)
                if queue.settings.durable:
                    self._deleted.append(owner)

    def _write_deleted(self, name: str, owner: int, settings: dict[str, Any]) -> None:
        value = recovery.queue_value(name, 0, settings, deleted=True)
        self._commit(self._log.write(lambda txn: txn.put(block_log.queue_key(owner), value)))

    def _commit(self, batch: Batch) -> None:
        self._log.wait(batch)
        if batch.error is not None:
            raise batch.error

    # Looking -----------------------------------------------------------------------------------------------------

    def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue. Cost: see `Queue.stats`."""
        with self._lock:
            self._check_open()
            queues = dict(self._queues)
        return self._stats({name: queue.stats() for name, queue in queues.items()})

    def _stats(self, queues: dict[str, QueueStats]) -> BrokerStats:
        return BrokerStats(
            capacity_bytes=self.settings.capacity_bytes,
            resident_bytes=sum(stats.resident_bytes for stats in queues.values()),
            spilled_bytes=sum(stats.spilled_bytes for stats in queues.values()),
            messages=sum(stats.messages for stats in queues.values()),
            commits_total=self._log.commits,
            queues=queues,
        )

    def check(self) -> list[str]:
        """Compare ledger, runs, files, rows and blocks with each other; return what does not agree, in words.

        Cost: O(resident messages + spilled files + blocks). Meant for tests and trouble.
        """
        with self._lock:
            self._check_open()
            queues = list(self._queues.values())
        found = [f"queue {name!r} has a damaged record and is not served" for name in sorted(self._broken)]
        found += self._ledger.problems()
        with self._upkeep:
            for queue in queues:
                found += queue.problems()
            found += self._log.problems()
        return found

    def _report(self, problem: str, damaged_blocks: int) -> None:
        """Note what a queue found damaged: in the recovery report, and in the log of the process."""
        _logger.error("%s: %s", self.path, problem)
        self._problems.append(problem)
        self._quarantined_blocks += damaged_blocks
        self.recovery = attrs.evolve(
            self.recovery, problems=tuple(self._problems), quarantined_blocks=self._quarantined_blocks
        )

    # Sharing memory ----------------------------------------------------------------------------------------------

    def _relieve(self, account: Account, missing: int) -> bool:
        """Make other queues give memory back: what they do not use, else what the heaviest of them can spill."""
        with self._lock:
            queues = {queue.account.number: queue for queue in self._queues.values()}
        gave = False
        for other in self._ledger.others(account):
            queue = queues.get(other.number)
            if queue is not None and queue.give_way(missing, spill=False):
                gave = True
                if self._ledger.free() >= missing:
                    return True
        for other in self._ledger.heavier(account, missing):
            queue = queues.get(other.number)
            if queue is not None and queue.give_way(missing, spill=True):
                return True
        return gave

    # Maintenance -------------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        busy = True
        took = 0.0
        written = -math.inf
        while not self._stop.wait(min(max(0.01, REST * took), MAINTENANCE_S) if busy else MAINTENANCE_S):
            started = time.perf_counter()
            try:
                with self._upkeep:
                    busy = self._wiper.step(WIPED_AT_ONCE) | self._sweep()
                    busy |= self._remove_settled() | self._remove_deleted() | self._hollow()
                if self._monotonic() - written >= MAINTENANCE_S:
                    written = self._monotonic()
                    self._write_stats()
            except QflowError as error:
                busy = False
                if not self._stop.is_set():
                    _logger.warning("%s: maintenance failed and is tried again: %s", self.path, error)
            except Exception:
                busy = False
                _logger.exception("%s: maintenance failed and is tried again", self.path)
            took = time.perf_counter() - started

    def _sweep(self) -> bool:
        """Free spill files of purged messages, and spill what nobody else did."""
        with self._lock:
            queues = list(self._queues.values())
        more = False
        for queue in queues:
            more |= queue.sweep(WIPED_AT_ONCE)
            queue.spill_excess()
        return more

    def _remove_settled(self) -> bool:
        """Remove blocks below floors that one commit was not enough for."""
        with self._lock:
            lanes = [queue.lane for queue in self._queues.values() if queue.lane is not None and queue.lane.removing]
        if not lanes or self._log.failed:
            return False
        for lane in lanes:
            batch = self._log.settle(lane, [])
        self._commit(batch)
        return not batch.short

    def _hollow(self) -> bool:
        """Give back what is settled above floors, a bounded part at a time; False if there is nothing, or no room."""
        with self._lock:
            lanes = [queue.lane for queue in self._queues.values() if queue.lane is not None and queue.lane.hollow_due]
        if not lanes or self._log.failed:
            return False
        for lane in lanes[:HOLLOWED_AT_ONCE]:
            batch = self._log.hollow(lane)
        self._commit(batch)
        return bool(batch.hollowed)

    def _remove_deleted(self) -> bool:
        """Remove what deleted queues left in the log, a bounded number of records at a time."""
        if not self._deleted or self._log.failed:
            return False
        owner = self._deleted[0]
        batch = self._log.delete(owner)
        self._commit(batch)
        if owner in batch.deleted:
            self._deleted.remove(owner)
        return not batch.short

    def _write_stats(self) -> None:
        """Renew `stats.json` for those who look from outside."""
        with self._lock:
            queues = dict(self._queues)
        stats = self._stats({name: queue.stats() for name, queue in queues.items()})
        facts = {"pid": os.getpid(), "time_s": self._clock(), "uuid": str(self.uuid), **attrs.asdict(stats)}
        try:
            self._files.write_replacing(os.path.join(self.path, "stats.json"), json.dumps(facts).encode())
        except OSError as error:
            raise storage_error(error, "write the statistics", self.path) from error

    # Closing -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed(f"the broker of {self.path} is closed: open the spool again")

    def close(self) -> None:
        """Close the spool: confirm what is on its way, put unacked messages back, mark it clean. Twice is fine.

        Raises:
            StorageError: the log failed; the spool is released all the same, and is recovered at the next open.
        Cost: one commit.
        """
        with self._declaring:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                queues = list(self._queues.values())
            for queue in queues:
                queue.refuse_calls(BrokerClosed)
            self._stop.set()
            self._maintenance.join()
            with ExitStack() as ending:  # whatever fails, the spool is released
                ending.callback(_brokers.discard, self)
                ending.callback(self._spool_lock.release)
                ending.callback(self._store.close)
                ending.callback(self._log.close)
                for queue in queues:
                    ending.callback(queue.let_go)
                self._log.drain()
                if not self._log.failed:
                    self._commit(self._log.write(partial(_write_ending, queues)))

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Broker {self.path!r}{', closed' if self._closed else ''}>"

    def disown(self) -> None:
        """In a forked child: refuse everything, and let go of the lock's descriptors, never of the log's."""
        self._spool_lock.close_in_child()
        self._lock = self._declaring = _Dead()  # type: ignore[assignment]
        for queue in self._queues.values():
            queue.die(_Dead())


def _write_ending(queues: list[Queue], txn: Any) -> None:
    """Write what a clean end leaves: counts of deliveries, and the mark."""
    for queue in queues:
        lane = queue.lane
        if lane is not None:
            below, attempts = queue.attempts()
            block_log.write_attempts(txn, lane.owner, lane.lane, below, attempts)
            block_log.write_row(txn, lane.owner, lane.lane, lane.row)
    recovery.set_state(txn, CLEAN)


def _after_fork() -> None:
    for broker in list(_brokers):
        broker.disown()
    _brokers.clear()


os.register_at_fork(after_in_child=_after_fork)


def open_broker(
    path: str | os.PathLike[str],
    *,
    capacity_bytes: int | str = "64MiB",
    spill: str = "files",
    segment_bytes: int | str = "8MiB",
    max_mapped_segments: int = 0,
    max_transaction_bytes: int | str = "64MiB",
    unsafe_filesystem: bool = False,
) -> Broker:
    """Open a spool, creating it if there is none, and own it until the broker is closed.

    Args:
        path: a directory; made with mode 0700 if missing. It may be an existing spool or empty.
        capacity_bytes: memory for the messages of all queues together, an int or a text such as "64MiB".
        spill: how messages that do not fit lie on disk: `"files"`, one each, or `"segments"`, many in a file of
            fixed size, which costs a hundredth of the file operations.
        segment_bytes: size of a segment, "4KiB" to "256MiB"; a larger message has one of its own.
        max_mapped_segments: how many segments, of all queues, are mapped into memory for reading at once, each with a
            file descriptor; 0 maps none and reads with `pread`, which was found faster.
        max_transaction_bytes: the most one `put_many` may hold.
        unsafe_filesystem: accept a network file system.

    Raises:
        SpoolInUse: another process owns it; nothing was touched.
        StorageError: the directory or its file system cannot be used, or is not a spool.
        FormatTooNew: a newer qflow wrote it.
        CorruptionError: its first records are damaged; it was left as it is.
        InvalidArgument: a setting makes no sense.
    Cost: two commits for a new spool, one for an existing one, whatever waits in it.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path) or not os.fspath(path):
        raise InvalidArgument(f"the path of a spool must be a path without NUL, not {path!r}")
    values: dict[str, Any] = {
        "capacity_bytes": capacity_bytes,
        "spill": spill,
        "segment_bytes": segment_bytes,
        "max_mapped_segments": max_mapped_segments,
        "max_transaction_bytes": max_transaction_bytes,
        "unsafe_filesystem": unsafe_filesystem,
    }
    return Broker(path, BrokerSettings(**values))
