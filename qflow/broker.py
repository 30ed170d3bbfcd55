"""The broker: owns a spool, its log, its spill store and its queues. Opening, recovery, fairness, closing.

What lies in a spool directory:

    lock         the owner's lock
    log/         the transaction log: the truth; `log.new/`, `log.old/`: see `snapshots`
    spill/       messages that do not fit in memory: a cache, renamed aside when the spool is opened
    wiping/      spill files of before, unlinked little by little
    cursors/     how far groups of readers outside have come; see `storage.groups`
    inbox/       batches handed in from outside, which the owner adopts; see `storage.stages`
    stats.json   what the owner is doing, renewed each second

Opening, in order, each step repeatable after a crash: lock (before anything is touched), log (created whole or not at
all), rows read, `dirty` synced, spill set aside. Threads: `qflow-writer` writes what callers hand over, `qflow-futures`
resolves futures, `qflow-maintenance` wipes, removes settled blocks, adopts batches and renews `stats.json`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, NoReturn
from uuid import uuid4

import attrs

from qflow import config
from qflow.adoption import Adoption
from qflow.config import BrokerSettings, Overflow, QueueSettings, StreamSettings, check_name
from qflow.delivery import Segment
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
    StreamDeleted,
    again,
)
from qflow.events import Event, EventKind
from qflow.memory.ledger import Account, Ledger
from qflow.memory.waiting import shelter, sheltered
from qflow.message import Headers, check_key
from qflow.queues.dead_letters import check_no_cycle, dead_letters
from qflow.queues.ending import endings
from qflow.queues.holding import Leaving
from qflow.queues.queue import Queue
from qflow.queues.together import Place, Step, Together
from qflow.queues.transaction import Desk, Transaction
from qflow.routing import Claimed, Lots, PublishResult, Routing, result_of
from qflow.stats import BrokerStats, CompactionReport, Problems, QueueStats, RecoveryReport, SnapshotReport
from qflow.storage import recovery, snapshots
from qflow.storage.block_log import Row
from qflow.storage.ending import write_ending
from qflow.storage.environment import CannotGrow, Environment, check_log_directory, log_errors
from qflow.storage.files import Files, spool_path, storage_error
from qflow.storage.groups import Held
from qflow.storage.inbox import Inbox
from qflow.storage.places import take_place
from qflow.storage.records import Records
from qflow.storage.recovery import BINDINGS, DIRTY, QueueRecord
from qflow.storage.spill import SpillStore, Wiper, wipe_spill
from qflow.storage.spill_files import SpillFiles
from qflow.storage.spill_segments import SpillSegments
from qflow.storage.transaction_log import TransactionLog
from qflow.streams import publishing
from qflow.streams.producers import Claim
from qflow.streams.registry import Attempt, Streams, at_once
from qflow.streams.room import Room
from qflow.streams.stream import Stream
from qflow.streams.subscription import Subscription

MAINTENANCE_S = 1.0
REST = 4
"""Maintenance that has much to do rests so many times as long as it worked: a fifth of the time is its share."""
LONGEST_REST_S = 0.1
"""But not longer: what took long because others were at work would else rest five times for them."""
WIPED_AT_ONCE = 256
REMOVING_S = 0.05
"""How long settled blocks are removed at once, a bounded number each commit."""
ALLOCATOR_HINT_BYTES = 4 * 2**20
"""Allocated and freed once: after that, glibc's malloc keeps up to twice as much of what is freed at hand.

Without it, each MiB of messages that is restored and acked goes back to the kernel and comes back page by page, unless
something else in the process happened to allocate as much. `python -m bench read-told` says what that costs: messages
of 16 KiB came from segments 2.5 times as slowly, those of 1 KiB hardly so.
"""
HOLLOWED_AT_ONCE = 4
TRANSIENT_OWNERS = 2**31
"""Queues that are not durable have numbers from here on; the log never sees them."""
STREAMS = 2**32 - 2
"""The number under which streams borrow memory."""
TRANSACTIONS = 2**32 - 1
"""The number under which bodies of open transactions are spilled."""
EVENTS_KEPT = 10_000
"""Events that wait for their callbacks; of more, the oldest are dropped."""
QUIET_S = 10.0
"""How long an end waits for puts that have reserved room and not joined a batch yet."""

_logger = logging.getLogger("qflow")
_damage_logger = logging.getLogger("qflow.damage")
"""For who tells of damage otherwise: a logger that can be silenced apart."""
_brokers: weakref.WeakSet[Broker] = weakref.WeakSet()


class _Dead:
    """Stands in for a lock in a forked child: whoever takes it is told."""

    def __enter__(self) -> NoReturn:
        raise ForkedProcess(
            f"this broker belongs to the parent of process {os.getpid()}: open a spool of your own after the fork"
        )

    def __exit__(self, *_: object) -> None: ...

    acquire = __enter__


class _Stop:
    """Tells the maintenance thread to end, or only to look: `bell` wakes it."""

    def __init__(self) -> None:
        self.bell = threading.Event()
        self.rung = False
        """The last wait ended by the bell."""
        self._ended = False

    def set(self) -> None:
        self._ended = True
        self.bell.set()

    def is_set(self) -> bool:
        return self._ended

    def wait(self, timeout: float) -> bool:
        """Wait for either; return whether it is the end."""
        self.rung = self.bell.wait(timeout)
        if not self._ended:
            self.bell.clear()
        return self._ended


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
        self.path = spool_path(path)
        self.settings = settings
        self._files = files or Files()
        self._clock = clock
        self._monotonic = monotonic
        self._problems = Problems()
        self._quarantined_blocks = 0
        self._closed = self._released = False
        self._closer: threading.Thread | None = None
        self._declaring = threading.Lock()  # held while a queue is declared or deleted
        self._upkeep = threading.Lock()  # held by maintenance while it moves things, and by `check`
        self._lock = threading.Lock()  # guards the names below
        self._queues: dict[str, Queue] = {}
        self._incarnations: dict[int, int] = {}
        self._deleted: list[int] = []
        self._ledger = Ledger(settings.capacity_bytes)
        self._stop = _Stop()
        self._listeners: list[Callable[[Event], object]] = []
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._routing = Routing()
        self._numbering = threading.Lock()
        self._ticked = -math.inf
        self._troubles: dict[str, str] = {}
        """Errors of parts of maintenance that were reported."""
        self._spool_lock = take_place(self.path, self._files, unsafe_filesystem=settings.unsafe_filesystem)
        with ExitStack() as undo:
            undo.callback(self._spool_lock.release)
            self._open(open_environment, undo)
            self._recovery = RecoveryReport(
                clean=self._clean,
                queues=len(self._queues),
                messages=sum(len(queue) for queue in self._queues.values()),
                bytes=sum(
                    row.bytes for record in self._found if not record.deleted for row in (record.rows or {}).values()
                ),
                quarantined_blocks=0,
                problems=(),
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

    @property
    def recovery(self) -> RecoveryReport:
        """What opening the spool found, and what was found damaged since: as it is now, a plain value."""
        return attrs.evolve(
            self._recovery, problems=self._problems.lines(), quarantined_blocks=self._quarantined_blocks
        )

    @property
    def log(self) -> TransactionLog:
        """Where tasks wait for commits."""
        return self._log

    @property
    def together(self) -> Together:
        """What commits several queues in one."""
        return self._together

    @property
    def adoption(self) -> Adoption:
        """What adopts batches from the inbox."""
        return self._adoption

    # Opening -----------------------------------------------------------------------------------------------------

    def _open(self, open_environment: Callable[[str, Files], Environment], undo: ExitStack) -> None:
        path = os.path.join(self.path, "log")
        try:
            snapshots.bring_back(self.path, self._files)
            if not check_log_directory(path):
                Environment.create(self.path, self._files, recovery.first_records(uuid4()))
        except OSError as error:
            raise storage_error(error, "create the log", path) from error
        env = open_environment(path, self._files)
        undo.callback(env.close)
        env.catch_up()
        with env.reading() as txn:
            seen = txn.id()
        found = recovery.read_log(env)
        if not found.clean:
            found.problems.extend(recovery.check_last_commits(env, found))
        try:
            env.make_room(0, 4, settles_only=True)
        except CannotGrow:
            env.confine(0, 4, settles_only=True)
        with log_errors(path, "marked as open"):
            txn = env.begin(write=True)
            following = txn.id()
            if following != seen + 1:
                txn.abort()
                raise StorageError(
                    f"{path}: transaction {seen} was read, and {following} is next: something else writes into the "
                    "log. Nothing was changed; end that, and open the spool again"
                )
            recovery.set_state(txn, DIRTY)
            env.commit(txn)
        try:
            snapshots.remove_leftovers(self.path, self._files, found.uuid)
        except QflowError as error:
            _logger.warning("%s: what a compaction left stays: %s", self.path, error)
        wipe_spill(self._files, self.path)
        self.uuid = found.uuid
        self._clean = found.clean
        self._found = found.queues
        for problem in found.problems:
            _damage_logger.error("%s: %s", self.path, problem)
        self._problems += found.problems
        self._next_owner = found.next_owner
        self._next_transient = TRANSIENT_OWNERS
        env.messages = sum(row.messages for one in found.queues + found.streams for row in (one.rows or {}).values())
        self._log = TransactionLog(env, self._clock)
        undo.callback(self._log.close)
        self._store = self._spill_store()
        bytearray(ALLOCATOR_HINT_BYTES)
        self._wiper = Wiper(self._files, self.path)
        self._together = Together(self._log, self._dead_letter_queue, self._clock, self._monotonic)
        self._desk = Desk(
            self._ledger.open(TRANSACTIONS, "transactions", None),
            self._ledger,
            self._relieve,
            self._store.area("transactions", TRANSACTIONS, uuid4().int >> 64),
        )
        room = Room(self._ledger.open(STREAMS, "streams", None), self._ledger, self._relieve)
        self._records = Records(self._log)
        self._streams = Streams(
            self._log,
            self._records,
            room,
            max_transaction_bytes=self.settings.max_transaction_bytes,
            new_owner=self._new_owner,
            report=self._report,
            reroute=self._routing.forget,
            clock=self._clock,
            monotonic=self._monotonic,
            held=Held(self.path, str(self.uuid), self._clock),
        )
        self._routing.streams = self._streams.routes
        self._broken = {record.name: record for record in found.queues if record.rows is None and not record.deleted}
        for record in found.queues:
            if record.deleted:
                self._deleted.append(record.owner)
            elif record.rows is not None:
                self._recover(record, record.rows)
        problems = self._streams.recover(found.streams, found.cursors, found.unread, clean=self._clean)
        for problem in problems:
            _damage_logger.error("%s: %s", self.path, problem)
        self._problems += problems
        self._routing.forget()
        self._adoption = Adoption(
            Inbox(self._files, self.path),
            log=self._log,
            routing=self._routing,
            together=self._together,
            room=room,
            uuid=str(self.uuid),
            max_transaction_bytes=self.settings.max_transaction_bytes,
            report=self._report,
            wake=self._stop.bell.set,
            clock=self._clock,
        )

    def _new_owner(self) -> int:
        """Return a number that nobody has."""
        with self._numbering:
            owner = self._next_owner
            self._next_owner += 1
            return owner

    def _spill_store(self) -> SpillStore:
        settings = self.settings
        if settings.spill == "files":
            return SpillFiles(self._files, self.path)
        return SpillSegments(
            self._files, self.path, segment_bytes=settings.segment_bytes, max_mapped=settings.max_mapped_segments
        )

    def _recover(self, record: QueueRecord, rows: dict[int, Row]) -> None:
        if not self._clean:
            rows = {number: row._replace(doubtful=row.next) for number, row in rows.items()}
        try:
            settings = QueueSettings.from_dict(record.settings)
        except InvalidArgument as error:  # a setting of a later version
            self._broken[record.name] = record
            self._problems.append(f"queue {record.name!r} cannot be served: {error}")
            return
        queue = self._make_queue(record.name, settings, record.owner, record.incarnation, rows)
        self._queues[record.name] = queue
        for topic_filter in record.settings.get(BINDINGS, ()):
            self._routing.bind(queue, topic_filter)

    def _make_queue(
        self, name: str, settings: QueueSettings, owner: int, incarnation: int, rows: dict[int, Row] | None
    ) -> Queue:
        self._incarnations[owner] = incarnation
        account = self._ledger.open(owner, name, settings.capacity_bytes)
        return Queue(
            name,
            settings,
            account=account,
            ledger=self._ledger,
            area=self._store.area(name, owner, incarnation),
            log=self._log if rows is not None else None,
            rows=rows,
            owner=owner,
            relief=self._relieve,
            report=self._report,
            tell=self._tell,
            undertaker=self._bury,
            max_transaction_bytes=self.settings.max_transaction_bytes,
            clock=self._clock,
            monotonic=self._monotonic,
        )

    # Queues ------------------------------------------------------------------------------------------------------

    @sheltered
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
        ttl_s: float | None = None,
        max_deliveries: int | None = None,
        dead_letter: str | None = None,
        ack_timeout_s: float | None = None,
        priorities: int = 1,
        resume_ratio: float = 0.8,
    ) -> Queue:
        """Return the queue of this name, making it if there is none.

        Args:
            name: any text of 1 to 1,024 bytes in UTF-8.
            durable: messages are synced in the log before a put returns; False = lost at restart, the queue too.
            capacity_bytes: memory it may use, an int or "64MiB"; None = as much as the broker has.
            limit_messages, limit_bytes: how deep it may get, memory and disk together; None = no limit.
            max_message_bytes: the largest message, body and headers.
            on_overflow: what a put does at a limit.
            ttl_s: messages expire so many seconds after they could first be delivered; None = never.
            max_deliveries: after so many deliveries a message that comes back is a dead letter, or dropped.
            dead_letter: name of the queue for expired, rejected and too often delivered messages; None = they are
                dropped. It need not exist yet: it is declared when it is first needed, durable if a queue that names
                it is.
            ack_timeout_s: a message held for longer goes back to the queue; None = it is held until it is settled.
            priorities: how many there are, 1 to 10; 1 is a plain FIFO.
            resume_ratio: puts that were held back by a limit go on when the depth is down to this share of it.

        Raises:
            InvalidArgument: a setting makes no sense, or dead letters would go round in a cycle.
            SettingsConflict: the queue exists and behaves differently. Other performance settings are applied silently.
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
            "ttl_s": ttl_s,
            "max_deliveries": max_deliveries,
            "dead_letter": dead_letter,
            "ack_timeout_s": ack_timeout_s,
            "priorities": priorities,
            "resume_ratio": resume_ratio,
        }
        settings = QueueSettings(**values)
        with self._declaring:
            return self._declare(name, settings)

    def _declare(self, name: str, settings: QueueSettings) -> Queue:
        """Return a queue of these settings. Holding `_declaring`."""
        self._check_open()
        self._records.make_sure()
        queue = self._queues.get(name)
        if queue is not None and queue.was_deleted:
            self._clear_away(queue)  # that was begun, and interrupted
            queue = None
        if queue is not None:
            conflicts = queue.settings.conflicts(settings)
            if conflicts:
                setting, mine, theirs = conflicts[0]
                raise SettingsConflict(
                    f"queue {name!r} has {setting}={mine!r}, declared now with {setting}={theirs!r}: declare it as "
                    "it is, or change it with alter_queue"
                )
            if queue.settings != settings:
                self._alter(queue, settings)
            return queue
        if name in self._broken:
            raise self._broken_error(name)
        self._check_dead_letters(name, settings)
        incarnation = uuid4().int >> 64
        if settings.durable:
            owner, rows = self._new_owner(), {0: Row()}
            value = recovery.queue_value(name, incarnation, settings.to_dict())
            self._records.add(owner, value, rows, partial(self._register, name, settings, owner, incarnation, rows))
        else:
            self._next_transient += 1
            self._register(name, settings, self._next_transient, incarnation, None)
        return self._queues[name]

    def _register(
        self, name: str, settings: QueueSettings, owner: int, incarnation: int, rows: dict[int, Row] | None
    ) -> None:
        """Have a new queue known; twice is fine. Holding `_declaring`."""
        if name not in self._queues:
            queue = self._make_queue(name, settings, owner, incarnation, rows)
            with self._lock:
                self._queues[name] = queue

    def _check_dead_letters(self, name: str, settings: QueueSettings) -> None:
        """Refuse cycles, and a durable queue whose dead letters a restart would lose. Holding `_declaring`."""
        targets = {other: queue.settings.dead_letter for other, queue in self._queues.items()}
        check_no_cycle(name, settings.dead_letter, targets)
        target = self._queues.get(settings.dead_letter) if settings.dead_letter is not None else None
        pairs = [(name, settings, settings.dead_letter, target.settings)] if target is not None else []
        pairs += [
            (other, queue.settings, name, settings)
            for other, queue in self._queues.items()
            if queue.settings.dead_letter == name
        ]
        for source, of_source, dead, of_dead in pairs:
            if of_source.durable and not of_dead.durable:
                raise InvalidArgument(
                    f"queue {source!r} is durable and its dead-letter queue {dead!r} is not: dead letters would be "
                    "lost at a restart; declare both durable, or neither"
                )

    @sheltered
    def alter_queue(self, name: Queue | str, **changes: Any) -> Queue:
        """Change settings of a queue that exists, behaviour and performance alike, while it is used.

        A lower capacity spills from the tail, a higher one lets the head come back as it is read. A lower limit holds
        puts back until the depth is below it; a queue with DROP_OLDEST drops down to it. A new `ttl_s` holds for
        messages put from now on.

        Args:
            changes: any of the arguments of `declare_queue` but `durable` and `priorities`, which stay as they are.

        Raises:
            NotFound: there is no such queue.
            InvalidArgument: a setting is unknown, cannot be changed, or makes no sense; nothing was changed.
        Cost: one commit for a durable queue.
        """
        fixed = {"durable", "priorities"} & changes.keys()
        if fixed:
            raise InvalidArgument(f"{fixed.pop()} of a queue cannot be changed: declare another queue and move over")
        config.check_changes(QueueSettings, changes, "queue")
        with self._declaring:
            self._check_open()
            self._records.make_sure()
            queue = self.own(name)
            settings = attrs.evolve(queue.settings, **changes)
            self._check_dead_letters(queue.name, settings)
            self._alter(queue, settings)
            return queue

    def _alter(self, queue: Queue, settings: QueueSettings) -> None:
        """Write and apply other settings. Holding `_declaring`."""
        if settings.durable:
            value = self._record_of(queue, settings)
            self._records.replace(queue.owner, value, partial(queue.alter, settings))
        else:
            queue.alter(settings)

    def _record_of(self, queue: Queue, settings: QueueSettings) -> bytes:
        filters = self._routing.filters_of(queue)
        values = settings.to_dict() | ({BINDINGS: filters} if filters else {})
        return recovery.queue_value(queue.name, self._incarnations[queue.owner], values)

    # Topics ------------------------------------------------------------------------------------------------------

    @sheltered
    def bind(self, queue: Queue | str, topic_filter: str) -> None:
        """Send what is published to matching topics to a queue, too; a durable queue's bindings survive.

        Args:
            topic_filter: as in MQTT: levels between `/`, `+` for any one of them, `#` at the end for all that follow.

        Raises:
            NotFound: there is no such queue. InvalidArgument: the filter is not valid.
        Cost: one commit for a durable queue.
        """
        self._rebind(queue, topic_filter, self._routing.bind)

    @sheltered
    def unbind(self, queue: Queue | str, topic_filter: str) -> None:
        """Undo `bind`.

        Raises:
            NotFound: there is no such queue, or it is not bound with that filter.
        """
        self._rebind(queue, topic_filter, self._routing.unbind)

    def _rebind(self, queue: Queue | str, topic_filter: str, change: Callable[[Queue, str], bool]) -> None:
        with self._declaring:
            self._check_open()
            self._records.make_sure()
            found = self.own(queue)
            before = self._routing.filters_of(found)
            if change(found, topic_filter) and found.settings.durable:
                undo = partial(self._routing.replace, found, before)
                self._records.replace(found.owner, self._record_of(found, found.settings), undo=undo)

    def publish(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        producer: str | None = None,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> PublishResult:
        """Put a message into every stream that takes its topic and every queue bound to it, in one commit.

        Returns once it is synced. Each queue's own settings hold: one that drops at its limit does so, one that blocks
        holds all of it back, one that refuses refuses all of it. A body of 4 KiB or more is logged once.

        Args:
            key: messages of one key are in one partition of a stream, in order; without one, those of a topic are.
            producer, number: whoever publishes, and his number for this message: one he published before is not
                stored again. See `docs/howto/streams.md`.
            timeout_s: seconds to wait for room in queues that are at their limit, and for what becomes of the same
                number where somebody else is publishing it; None = without end.

        Returns:
            The offset in each stream, and the sequence in each queue; None where its policy dropped it. Nothing where
            nobody wants it, which is counted in `stats().unrouted_total`.

        Raises:
            InvalidArgument: the topic is not valid, or has wildcards. All that `Queue.put` raises.
            ProducerBusy: what became of the number was not known in time.
        Cost: transient 0.3 µs for each queue; durable a share of one commit.
        """
        if headers is None and key is None and producer is None:
            quick = self._routing.publish_quickly(topic, body)
            if quick is not None:
                return quick
        return self._publish([(topic, body, key)], headers, producer, number, timeout_s)[0]

    def publish_many(
        self,
        messages: Iterable[tuple[Any, ...]],
        *,
        headers: Headers | None = None,
        producer: str | None = None,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[PublishResult]:
        """Publish (topic, body) pairs, or (topic, body, key), in one commit: all of them or none; see `publish`.

        Cost: a commit, and 0.4 µs a message that goes to one stream; 2 µs where there are partitions or queues.
        """
        try:
            given = list(messages)
        except TypeError as error:
            raise InvalidArgument(f"publish_many takes pairs of (topic, body), not {messages!r}") from error
        return self._publish(given, headers, producer, number, timeout_s)

    def submit_publish(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        producer: str | None = None,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> Future[PublishResult]:
        """`publish` that waits for room but not for the sync: the future has the result once it is confirmed."""
        result: Future[PublishResult] = Future()
        result.set_running_or_notify_cancel()
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()
        found: list[Callable[[], Sequence[PublishResult]]] = []
        resolved: list[Future[Any]] = []

        def finish() -> None:
            """Tell the result: by whoever comes last, of the thread that publishes and the one that resolves `done`."""
            if found and resolved:
                with suppress(IndexError):  # the other one tells it
                    error = resolved.pop().exception()
                    if error is not None:
                        result.set_exception(error)
                    else:
                        result.set_result(found[0]()[0])

        def note(finished: Future[Any]) -> None:
            resolved.append(finished)
            finish()

        # This thread has nothing to do with `done` any more, once others have it: an interrupt might leave it locked.
        done.add_done_callback(note)
        found.append(self._begin_publish([(topic, body, key)], headers, producer, number, timeout_s, done))
        finish()
        return result

    def _publish(
        self,
        messages: list[Any],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: float | None,
    ) -> Sequence[PublishResult]:
        return self._begin_publish(messages, headers, producer, number, timeout_s, None)()

    def _begin_publish(
        self,
        messages: list[Any],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: float | None,
        done: Future[Any] | None,
    ) -> Callable[[], Sequence[PublishResult]]:
        """Publish, or leave that to the writer, and `done`; return what gives the results when it is done."""
        timeout = config.parse_timeout(timeout_s)
        claim = self.claim_of(producer, number)
        if claim is None:
            return self._begin_claimed(messages, headers, None, timeout, done)
        deadline = None if timeout is None else self._monotonic() + timeout
        try:
            if not claim.take(timeout):
                if done is not None:
                    done.set_result(None)
                return lambda: [PublishResult.of_duplicate() for _ in messages]
            left = None if deadline is None else max(0.0, deadline - self._monotonic())
            return self._begin_claimed(messages, headers, claim, left, done)
        except BaseException:
            claim.give_up()
            raise

    def _begin_claimed(
        self,
        messages: list[Any],
        headers: Headers | None,
        claim: Claim | None,
        timeout: float | None,
        done: Future[Any] | None,
    ) -> Callable[[], Sequence[PublishResult]]:
        """`_begin_publish`, with a claim that has its number."""
        while (lots := self._routing.lots(messages, headers)) is not None:
            try:
                sent = publishing.send(self._log, lots.lots, claim=claim, future=done)
            except StreamDeleted:
                self._routing.forget()
                continue  # it was deleted since, and is not reached any more
            if sent is not None and done is None:
                self._log.wait(sent.request)
                if sent.error is not None:
                    raise again(sent.error)
            elif sent is None and done is not None:
                done.set_result(None)
            return partial(lots.results, sent)
        while True:
            groups = [self.steps_of(topic, body, headers, *key) for topic, body, *key in messages]
            steps = [step for group in groups for step in group]
            leavings: list[Any] = [] if claim is None else [Claimed(claim)]
            try:
                places = iter(self._together.commit(steps, leavings, timeout=timeout, wait=done is None, future=done))
            except (QueueDeleted, StreamDeleted):
                self._routing.forget()
                continue
            found = [[next(places) for _ in group] for group in groups]
            return lambda: [result_of(group) for group in found]

    def claim_of(self, producer: str | None, number: int | None) -> Claim | None:
        """Return the claim of a publish, which has not taken its number yet; None without a producer."""
        self._check_open()
        if producer is None:
            if number is not None:
                raise InvalidArgument("number= is that of a producer: say which with producer=")
            return None
        return self._streams.producers.claim(producer, number)

    def lots_of(self, messages: list[Any], headers: Headers | None) -> Lots | None:
        """Return what is published to streams alone; None if some of it goes to queues, which takes `steps_of`."""
        self._check_open()
        return self._routing.lots(messages, headers)

    def steps_of(self, topic: str, body: Any, headers: Headers | None, key: bytes | str | None = None) -> list[Step]:
        """Return what a publish puts where."""
        self._check_open()
        return self._routing.steps(topic, body, headers, check_key(key))

    def result_of(self, places: list[Place]) -> PublishResult:
        """Return what a publish returns."""
        return result_of(places)

    # Streams -----------------------------------------------------------------------------------------------------

    @sheltered
    def declare_stream(
        self,
        name: str,
        *,
        topics: Iterable[str],
        partitions: int = 1,
        retention_s: float | None = None,
        retention_bytes: int | str | None = None,
        retention_messages: int | None = None,
        retain_until_consumed: bool = False,
        max_message_bytes: int | str = "64MiB",
    ) -> Stream:
        """Return the stream of this name, making it if there is none: a log of all that is published to some topics.

        Args:
            name: any text of 1 to 1,024 bytes in UTF-8.
            topics: filters as in MQTT; a message is in the stream if one of them matches its topic.
            partitions: how many lines there are, 1 to 64; each is in order, all together are not.
            retention_s: messages are dropped when they are older; None = never for that. Age is by the time a message
                has in its partition, which never falls: after a clock that was ahead and was set back, messages keep
                the later time until the clock is there again, and stay so much longer.
            retention_bytes, retention_messages: how much is kept of the newest, of all partitions together. A message
                that is larger than `retention_bytes` goes itself, with all before it: set it above
                `max_message_bytes`.
            retain_until_consumed: no message is dropped that a durable subscription is still to get. With no other
                limit, a message is dropped when all of them have it; as long as there is none, everything is kept.
            max_message_bytes: the largest message, headers and key included.

        Retention works once a second. Bytes are those of messages, not of the disk.

        Raises:
            InvalidArgument: a setting or a filter makes no sense.
            SettingsConflict: the stream exists with other settings. CorruptionError: its record is damaged.
        Cost: one commit for a new stream.
        """
        if not isinstance(topics, str):
            try:
                topics = list(topics)
            except TypeError as error:
                raise InvalidArgument(f"topics must be a list of topic filters, not {topics!r}") from error
        values: dict[str, Any] = {
            "topics": topics,
            "partitions": partitions,
            "retention_s": retention_s,
            "retention_bytes": retention_bytes,
            "retention_messages": retention_messages,
            "retain_until_consumed": retain_until_consumed,
            "max_message_bytes": max_message_bytes,
        }
        settings = StreamSettings(**values)
        with self._declaring:
            self._check_open()
            stream = self._streams.declare(name, settings)
            self._routing.forget()
            return stream

    @sheltered
    def alter_stream(self, stream: Stream | str, /, **changes: Any) -> Stream:
        """Change settings of a stream: any of the arguments of `declare_stream` but `partitions`. Cost: one commit.

        Raises:
            NotFound: there is no such stream. InvalidArgument: a setting cannot be changed, or makes no sense.
        """
        with self._declaring:
            self._check_open()
            altered = self._streams.alter(stream, **changes)
            self._routing.forget()
            self._ticked = -math.inf
            self._stop.bell.set()
            return altered

    def stream(self, name: Stream | str) -> Stream:
        """Return a stream that exists, by name; one of this broker is returned as it is.

        Raises:
            NotFound: none of this name does. CorruptionError: its record in the log is damaged.
        """
        self._check_open()
        return self._streams.own(name)

    @sheltered
    def streams(self) -> list[str]:
        """Return the names of all streams, sorted."""
        self._check_open()
        return self._streams.names()

    @sheltered
    def delete_stream(self, name: Stream | str) -> None:
        """Delete a stream with its messages and subscriptions; who waits gets `StreamDeleted`.

        If it fails, repeat it: the stream takes nothing more, but is in the log until it is deleted.

        Raises:
            NotFound: there is none of this name.
        Cost: one commit; disk is given back in the background.
        """
        with self._declaring:
            self._check_open()
            self._streams.delete(name)
            self._routing.forget()

    def subscribe(
        self,
        stream: Stream | str,
        filter: str = "#",
        *,
        name: str | None = None,
        start: str | int | datetime = "latest",
        group: str | None = None,
        session_expiry_s: float | None = None,
        follow: bool = True,
        ack_timeout_s: float | None = None,
        on_gap: str = "raise",
    ) -> Subscription:
        """Return messages of a stream that a filter matches, each once and in order: replayed, then as they come.

        With a name it is *durable*: where it is, and what it has settled, is in the log, and it goes on there when it
        is opened again, whatever `start` says. Without one there is nothing to ack: asking for more settles what the
        same thread got before. Members of a *group* share one such place: each message goes to one.

        Args:
            filter: as in MQTT: `flights/+/UA`, `plant/#`; `#` is all but topics that begin with `$`.
            name: of a durable subscription; nobody else may have it open at the same time.
            start: where a new one begins: `"latest"` = with what is published from now on, `"earliest"` = with what is
                retained; an offset, or a datetime with a time zone = the first message not earlier. `"committed"` =
                where the name or group is, which must be known.
            group: share the work; the first to join sets filter and start.
            session_expiry_s: a durable one that nobody has open for so long is deleted; None = as it was told before,
                of a new one never.
            follow: False = end where the stream ends, instead of waiting for more.
            ack_timeout_s: a message held for longer goes to somebody else; None = 60 s in a group, else without end.
            on_gap: when messages that were to come are gone: `"raise"` a `GapError`, or `"skip"` and count them.

        Raises:
            NotFound: there is no such stream, or no such subscription where `start="committed"`.
            InvalidArgument: the filter is not valid, an offset is past the end, or arguments do not go together.
            SettingsConflict: the name is open already, or has another filter.
            CorruptionError: where it was is damaged: `delete_subscription` removes it. DiskFull: it is a new one.
        Cost: a new durable one, one commit.
        """
        made: list[Subscription] = []

        def subscribe() -> None:
            with self._declaring:
                self._check_open()
                made.append(
                    self._streams.subscribe(
                        stream,
                        filter,
                        name=name,
                        start=start,
                        group=group,
                        session_expiry_s=session_expiry_s,
                        follow=follow,
                        ack_timeout_s=ack_timeout_s,
                        on_gap=on_gap,
                    )
                )

        try:
            shelter(subscribe)
            return made[0]
        except BaseException:
            for subscription in made:  # nobody will close it
                subscription.close()
            raise

    @sheltered
    def delete_subscription(self, stream: Stream | str, name: str) -> None:
        """Delete a durable subscription, or a group: it pins nothing any more. Who has it open gets `StreamDeleted`.

        Raises:
            NotFound: there is none. Cost: one commit.
        """
        with self._declaring:
            self._check_open()
            self._streams.delete_subscription(stream, name)

    # Transactions and dead letters -------------------------------------------------------------------------------

    def transaction(self, timeout_s: float | None = None) -> Transaction:
        """Return a transaction over any of the queues; see `Transaction`.

        Args:
            timeout_s: how long its commit waits for room at limits; None = without end.
        """
        self._check_open()
        return Transaction(
            self,
            self._together,
            self._desk,
            self.settings.max_transaction_bytes,
            config.parse_timeout(timeout_s),
        )

    @sheltered
    def _dead_letter_queue(self, source: Queue) -> Queue:
        """Return where a queue's dead letters go, declaring it if it is missing."""
        name = source.settings.dead_letter
        if name is None:
            raise NotFound(f"queue {source.name!r} has no dead-letter queue any more")
        queue = self._queues.get(name)
        if queue is not None:
            return queue
        if not self._declaring.acquire(timeout=1):  # the broker may be closing, and wait for who calls this
            raise StorageError(f"the dead-letter queue {name!r} could not be declared now")
        try:
            queue = self._queues.get(name)
            if queue is not None:
                return queue
            sources = [queue.settings for queue in self._queues.values() if queue.settings.dead_letter == name]
            return self._declare(name, QueueSettings(durable=any(settings.durable for settings in sources)))
        finally:
            self._declaring.release()

    def _bury(self, source: Queue, segments: list[Segment], reason: str, leaving: Leaving | None) -> bool:
        """Carry messages to their dead-letter queue in one commit with what settles them; False if that failed.

        Without `leaving` they come from a put, which waits for it and gets the error.
        """
        try:
            target = self._dead_letter_queue(source)
            records = dead_letters(source.name, segments, reason, self._clock())
            step = Step(target, 0, records)
            self._together.commit(
                [step], [] if leaving is None else [leaving], timeout=0, wait=leaving is None, dead=True
            )
        except QflowError as error:
            if leaving is None:
                raise
            _logger.warning("%s: dead letters of queue %r stay where they are: %s", self.path, source.name, error)
            return False
        return True

    # Events ------------------------------------------------------------------------------------------------------

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Have `callback(event)` called for each event from now on, one after the other, by the maintenance thread.

        It may use the broker, but while it runs no other event is told and no maintenance is done. What it raises is
        written to the log of the process.
        """
        if not callable(callback):
            raise InvalidArgument(f"an event callback must be callable, not {type(callback).__name__}")
        self._listeners.append(callback)

    def _tell(self, kind: EventKind, queue: str, detail: str = "") -> None:
        """Note an event, to be told soon. Called anywhere, also under locks."""
        if self._listeners:
            self._events.append(Event(kind, queue, detail, self._clock()))
            self._stop.bell.set()

    def _tell_all(self, harmless: type[BaseException] = Exception) -> None:
        """Hand events to callbacks; what these raise is written to the log of the process where it is `harmless`."""
        while self._events:
            event = self._events.popleft()
            for listener in self._listeners:
                try:
                    listener(event)
                except harmless:
                    _logger.exception("%s: the callback for %s failed", self.path, event)

    def own(self, queue: Queue | str) -> Queue:
        """Return a queue of this broker, given itself or by name.

        Raises:
            NotFound, CorruptionError: as `queue`. QueueDeleted: it was deleted.
            InvalidArgument: it is not a queue, or one of another broker.
        """
        if not isinstance(queue, Queue):
            return self.queue(queue)
        found = self._queues.get(queue.name)
        if found is queue:
            return queue
        queue.check_open()
        raise InvalidArgument(f"{queue!r} is a queue of another broker: use the one it came from")

    def queue(self, name: str) -> Queue:
        """Return a queue that exists.

        Raises:
            NotFound: none of this name does.
            CorruptionError: its record in the log is damaged.
        """
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

    @sheltered
    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        self._check_open()
        return sorted(self._queues)

    @sheltered
    def delete_queue(self, name: str) -> None:
        """Delete a queue with all its messages; waiters get `QueueDeleted`, late acks do nothing.

        A queue that cannot be served because its record is damaged can be deleted, too.

        Raises:
            NotFound: there is none of this name.
        Cost: one commit; disk is given back in the background.
        """
        with self._declaring:
            self._check_open()
            self._records.make_sure()
            broken = self._broken.get(check_name(name))
            if broken is not None:
                self._records.delete([broken.owner], partial(self._forget_broken, name, broken.owner))
                return
            queue = self.queue(name)
            if queue.settings.durable:
                self._records.delete(
                    [queue.owner], partial(self._clear_away, queue), at_once=partial(self._end_queue, queue)
                )
            else:
                self._end_queue(queue)
                self._clear_away(queue)

    def _forget_broken(self, name: str, owner: int) -> None:
        if self._broken.pop(name, None) is not None:
            self._deleted.append(owner)

    def _end_queue(self, queue: Queue) -> None:
        """Let nobody use a queue that is deleted; twice is fine. By whoever commits, or holding `_declaring`."""
        self._routing.replace(queue, [])  # first, so that who is refused finds it no more
        queue.refuse_calls(QueueDeleted)

    def _clear_away(self, queue: Queue) -> None:
        """Let go of a queue that has ended. Holding `_declaring`."""
        with self._lock:
            if self._queues.pop(queue.name, None) is None:
                return  # the second time
        try:
            queue.settle_down(self._log.drain, QUIET_S)
        finally:
            queue.let_go()
            queue.remove_spill()
            self._incarnations.pop(queue.owner, None)
            if queue.settings.durable:
                self._log.forget(queue.lanes)
                self._deleted.append(queue.owner)

    # Looking -----------------------------------------------------------------------------------------------------

    @sheltered
    def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue. Cost: see `Queue.stats`."""
        with self._lock:
            self._check_open()
            queues = dict(self._queues)
        return self._stats({name: queue.stats() for name, queue in queues.items()})

    def _stats(self, queues: dict[str, QueueStats]) -> BrokerStats:
        return BrokerStats(
            capacity_bytes=self.settings.capacity_bytes,
            resident_bytes=sum(stats.resident_bytes for stats in queues.values())
            + self._desk.borrowed
            + self._streams.room.used,
            spilled_bytes=sum(stats.spilled_bytes for stats in queues.values()),
            messages=sum(stats.messages for stats in queues.values()),
            commits_total=self._log.commits,
            unrouted_total=self._routing.unrouted,
            queues=queues,
            streams={stream.name: stream.stats() for stream in self._streams.all()},
            duplicates_total=self._streams.producers.duplicates_total,
            inbox=self._adoption.stats(),
        )

    @sheltered
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
            found += self._streams.problems()
            found += self._log.problems()
        return found

    def _report(self, problem: str, damaged_blocks: int) -> None:
        """Note what a queue found damaged: in the recovery report, and in the log of the process."""
        _damage_logger.error("%s: %s", self.path, problem)
        self._problems.append(problem)
        self._quarantined_blocks += damaged_blocks

    # Copies of the log -------------------------------------------------------------------------------------------

    @sheltered
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy what is in the log to a new spool, while everything goes on: one moment, each commit whole or not there.

        All that was confirmed, acked or given up when this was called is in it, with queues, streams, settings,
        bindings, and how far durable subscriptions came. It is a spool with a uuid of its own, and opens as this one
        would after a crash now: messages of queues say `redelivered`.
        What is not logged is not in it: transient queues and messages, and who holds what.

        Args:
            path: a directory that does not exist, or is empty; outside of the spool.

        Raises:
            InvalidArgument: it is no path, inside the spool, or not empty.
            DiskFull, StorageError: it could not be written; what was begun there was removed.
            SpoolInUse: another snapshot is made there.
        Cost: reads and writes what the log holds; nobody waits for it but other snapshots, `compact` and `close`. Pages
            that were in use when it began are not used again before it ends, so the log may grow by what is written
            meanwhile.
        """
        with self._lock:
            self._check_open()
        with self._log.copying() as env:
            return snapshots.make_snapshot(
                env, self.path, path, self._files, unsafe_filesystem=self.settings.unsafe_filesystem
            )

    @sheltered
    def finish_wiping(self, most_s: float = math.inf) -> None:
        """Unlink spill files of before until none is left, or for about so long; maintenance does the rest.

        Cost: 10 µs a file; where there is none, the listing of one directory.
        """
        with self._lock:
            self._check_open()
        ends = time.perf_counter() + most_s
        for _ in range(2):  # a round that was under way has not seen what was set aside since
            more = True
            while more:
                with self._upkeep:
                    more = self._wiper.step(WIPED_AT_ONCE)
                if more and time.perf_counter() >= ends:
                    return

    @sheltered
    def compact(self) -> CompactionReport:
        """Give disk back: unlink spill files of before, and put a copy of the log without its free pages in its place.

        Without it the file never shrinks; what was settled is written over, so that pays after a backlog that will not
        come again. Interrupted, it is done in the background, or not at all.

        Raises:
            DiskFull, StorageError: there was no room for the copy beside the log; nothing has changed.
            InDoubt: the directory could not be synced; nothing is lost, but the spool must be opened again.
        Cost: reads and writes what the log holds, and 10 µs for each of those files. Meanwhile puts and acks wait for
            their commits, and none fails; gets go on.
        """
        with self._lock:
            self._check_open()
        self.finish_wiping()  # first: what it frees may be the room for the copy
        while True:
            with self._upkeep:
                if not (self._remove_settled() | self._remove_deleted()):
                    break
        reports: list[CompactionReport] = []

        def work(env: Environment, still: AbstractContextManager[object]) -> None:
            reports.append(snapshots.compact(env, self.path, self._files, self.uuid, still))

        self._log.alone(work)
        return reports[0]

    # Sharing memory ----------------------------------------------------------------------------------------------

    def _relieve(self, account: Account, missing: int) -> bool:
        """Make other queues give memory back: what they do not use, else what the heaviest of them can spill."""
        gave = account.number != STREAMS and self._streams.room.give_way(missing)
        if gave and self._ledger.free() >= missing:
            return True
        with self._lock:
            queues = {queue.account.number: queue for queue in self._queues.values()}
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
        written = due = -math.inf
        attempt = self._attempt
        while not self._stop.wait(self._rest_s(busy, took)):
            started = time.perf_counter()
            self._tell_all(BaseException)  # maintenance goes on, also after `sys.exit()` in a callback
            if self._released:
                return  # a callback has closed the broker: the spool may be somebody else's by now
            attempt("the inbox", self._adoption.look)
            if not busy and not self._stop.rung and started < due:
                continue  # it was for the inbox alone
            due = started + MAINTENANCE_S
            with self._upkeep:
                busy = attempt("what time does", lambda: self._tick(attempt))
                busy |= attempt("wiping", lambda: self._wiper.step(WIPED_AT_ONCE))
                busy |= attempt("spilling", self._sweep)
                busy |= attempt("removing what is settled", self._remove_settled)
                busy |= attempt("removing what was deleted", self._remove_deleted)
                busy |= attempt("giving back what is settled", self._hollow)
            if self._monotonic() - written >= MAINTENANCE_S:
                written = self._monotonic()
                attempt("what was handed over", self._log.look_after)
                attempt("readers that were killed", self._log.forget_dead_readers)
                attempt("statistics", self._write_stats)
            took = time.perf_counter() - started

    def _rest_s(self, busy: bool, took: float) -> float:
        """Return how long maintenance may rest."""
        if busy:
            return min(max(0.01, REST * took), LONGEST_REST_S)
        soon = self._adoption.rest_s
        return MAINTENANCE_S if soon is None else soon

    def _attempt(self, what: str, job: Callable[[], object]) -> bool:
        """Do a part of maintenance; one that fails is reported, tried again, and stops no other.

        The same error of the same part is reported once, until it is another or the part succeeds.

        Returns:
            whether there is more to do at once.
        """
        try:
            more = bool(job())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            expected = isinstance(error, QflowError)
            if self._troubles.get(what) != text and not (expected and self._stop.is_set()):
                self._troubles[what] = text
                words = "%s: maintenance (%s) failed and is tried again: %s"
                _logger.warning(words, self.path, what, error, exc_info=not expected)
            return False
        self._troubles.pop(what, None)
        return more

    def _tick(self, attempt: Attempt = at_once) -> bool:
        """What time does to queues, at most each half second; return whether there is more to do at once."""
        now = self._monotonic()
        if now - self._ticked < MAINTENANCE_S / 2:
            return False
        with self._lock:
            queues = list(self._queues.values())
        more = [attempt(f"queue {queue.name!r}", queue.tick) for queue in queues]
        more.append(self._streams.tick(attempt))
        self._ticked = -math.inf if any(more) else now
        return any(more)

    def _sweep(self) -> bool:
        """Free spill files of purged messages, and spill what nobody else did."""
        with self._lock:
            queues = list(self._queues.values())
        more = False
        for queue in queues:
            more |= queue.sweep(WIPED_AT_ONCE) | queue.fit() | queue.spill_left_over()
        return more

    def _remove_settled(self) -> bool:
        """Remove blocks below floors that one commit was not enough for."""
        with self._lock:
            lanes = [lane for queue in self._queues.values() for lane in queue.lanes if lane.removing]
        lanes += [lane for lane in self._streams.lanes if lane.removing]
        lanes = [lane for lane in lanes if lane.broken is None]
        if self._log.failed:
            return False
        ends = time.perf_counter() + REMOVING_S
        batch = None
        while lanes and time.perf_counter() < ends:
            for lane in lanes:
                batch = self._log.settle(lane, [])
            assert batch is not None
            self._log.commit(batch)
            lanes = [] if batch.short else [lane for lane in lanes if lane.removing and lane.broken is None]
        return batch is not None and not batch.short

    def _hollow(self) -> bool:
        """Give back what is settled above floors, a bounded part at a time; False if there is nothing, or no room."""
        with self._lock:
            lanes = [lane for queue in self._queues.values() for lane in queue.lanes if lane.hollow_due]
        if not lanes or self._log.failed:
            return False
        for lane in lanes[:HOLLOWED_AT_ONCE]:
            batch = self._log.hollow(lane)
        self._log.commit(batch)
        return batch.hollowed

    def _remove_deleted(self) -> bool:
        """Remove what deleted queues left in the log, a bounded number of records at a time."""
        while self._streams.deleted:
            self._deleted.append(self._streams.deleted.pop())
        if not self._deleted or self._log.failed:
            return False
        owner = self._deleted[0]
        batch = self._log.delete(owner)
        self._log.commit(batch)
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
            Reentered: a finalizer calls this in the middle of a call of the broker.
        Cost: one commit. What is interrupted goes on: it is raised when the spool is closed.
        """
        self._close()
        self._tell_all()

    @sheltered
    def _close(self) -> None:
        with self._declaring, self._lock:
            if self._released or self._closer is not None:
                return  # it is closed, or somebody is at it: an event's callback may be the one he waits for
            self._log.check_can_wait()
            self._closed = True
            self._closer = threading.current_thread()
            queues = list(self._queues.values())
        try:
            for queue in queues:
                queue.refuse_calls(BrokerClosed)
            self._streams.end(BrokerClosed)
            self._stop.set()
            if self._closer is not self._maintenance:
                self._maintenance.join()
            self._adoption.close()
            self._release(queues)
        finally:
            self._closer = None

    def _release(self, queues: list[Queue]) -> None:
        """Confirm what is on its way and let go of the spool, whatever fails."""
        with ExitStack() as ending:
            ending.callback(_brokers.discard, self)
            ending.callback(self._spool_lock.release)
            ending.callback(self._store.close)
            ending.callback(self._log.close)
            for queue in queues:
                ending.callback(queue.let_go)
            self._released = True
            self._log.drain()  # what has reserved room and is handed over later is refused, or written at the end
            if not self._log.failed:
                write_ending(self._log, lambda: [*endings(queues), *self._streams.endings()])

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
        self._check_open = _Dead().__enter__  # type: ignore[method-assign]
        for queue in self._queues.values():
            queue.die(_Dead())
        self._streams.die(_Dead())


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
            file descriptor; 0 maps none and reads with `pread`, which was found as fast.
        max_transaction_bytes: the most one `put_many` or transaction may hold. A commit has all of it in memory.
        unsafe_filesystem: accept a network file system.

    Raises:
        SpoolInUse: another process owns it; nothing was touched.
        StorageError: the directory or its file system cannot be used.
        FormatTooNew: a newer qflow wrote it.
        CorruptionError: its log or its first records are damaged, or it has no log any more; it was left as it is.
        InvalidArgument: a setting makes no sense, or the path is a URL, or holds something that is no spool.
        QflowError: a free-threaded build of CPython runs without its lock (GIL); nothing was touched.
    Cost: two commits for a new spool, one for an existing one, whatever waits in it.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise QflowError(
            "this process runs without the lock of the interpreter (GIL), on which qflow and its binding of LMDB rely: "
            "start it without PYTHON_GIL=0 and -X gil=0, or with a build of CPython that is not free-threaded"
        )
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
    settings = BrokerSettings(**values)
    opened: list[Broker] = []
    try:
        shelter(lambda: opened.append(Broker(path, settings)))
        return opened[0]
    except BaseException:
        for broker in opened:  # nobody will close it
            broker.close()
        raise
