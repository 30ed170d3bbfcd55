"""Group commit: many callers, one transaction, one sync.

A *batch* collects what callers want written: puts, settled ranges by value, counts of deliveries, purges, registry
writes. It has one leader: the first caller that waits for it, or the flusher. The leader waits for the batch before it,
closes its own, assigns sequences, writes, commits once, publishes to the queues in that order, and wakes the rest.
Nobody else reads or writes committed state.

A *unit* is what one caller wants committed together or not at all: it joins a batch whole. Where the disk is full, a
batch is written without its puts, and without the units that hold some, what those settle included; all else goes on.

Leadership is a claim that is given up in `finally`. Every step of a batch can be repeated, so whoever finds a batch
without a leader takes it over where it stands:

    state        the leader was interrupted            what the next leader does
    open         before the transaction committed      all of it, the transaction was aborted
    committed    after                                 publishes; publishing twice does nothing
    done         -                                     nothing

What happened to an interrupted commit is told by the number of the environment's last transaction. A commit that raised
an error of LMDB is *in doubt*: it may be on the disk after a power cut; the log then refuses all work until reopened.

Followers wait at a gate, one lock a batch: who passes opens it for the next (64 threads with a lock each: 1,500 puts a
second; with a gate 38,000). They wake now and then to see whether the leader's thread is still alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol, cast

from qflow.errors import BrokerClosed, BrokerFailed, DiskFull, InDoubt, StorageError
from qflow.message import LANE_SHIFT, Record, is_logged
from qflow.storage import block_log, bodies
from qflow.storage.block_log import HOLLOWING_BYTES, RESERVED_SEQUENCES, TAIL_BYTES, Hollowed, Row, Settled
from qflow.storage.bodies import RELEASED_AT_ONCE, RELEASING_BYTES, SHARED_BYTES, Releases, Sharing
from qflow.storage.environment import Environment, LmdbError, MapFull
from qflow.storage.topic_records import delete_index

_logger = logging.getLogger("qflow")

BATCH_BYTES = 8 * 2**20
"""A batch admits no more from different callers."""
FLUSH_S = 0.003
"""A batch nobody waits for is led by the flusher when it is this old."""
HOLLOW_BYTES = 256 * 1024
"""So much is settled above the floor before blocks are looked at to give it back; a message counts 16 bytes more."""
NOWHERE = 2**64
Work = Callable[[Environment, AbstractContextManager[object]], None]
"""What is done in place of a batch, given a context in which nobody reads."""
LOOK_S = 0.25
"""How often a follower looks whether somebody still leads."""


class Publisher(Protocol):
    """The queue behind a lane."""

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        """Make confirmed messages of `size` bytes together visible; a second time is a no-op."""

    def publish_transient(self, put: Put) -> None:
        """Assign sequences to a unit's put that is not logged (`put.first`), make it visible; twice is a no-op."""

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything below these ends, by the number of the lane; a second time is a no-op."""

    def refused(self, put: Put) -> None:
        """Give back the room of a put that was not confirmed; a second time is a no-op."""


class TopicPublisher(Publisher, Protocol):
    """The partition of a stream behind a lane."""

    def publish_topics(self, first: int, records: list[Record], topics: Sequence[str], size: int, time_ms: int) -> None:
        """`publish` of a stream's messages, with their topics and the time they have in the log."""


class Party(Protocol):
    """Who is told what became of a unit, beside those who wait for it: by the leader, in the order of the commits."""

    def committed(self, unit: Unit) -> None:
        """All of the unit is committed, and its puts are visible; a second time is a no-op."""

    def refused(self, unit: Unit) -> None:
        """Nothing of it was confirmed, `unit.error` says why; a second time is a no-op."""


class _BeingCopied(StorageError):
    """A snapshot is being made: what needs the log for itself is tried again after it."""


class Lane:
    """A queue's lane as the log knows it. Changed by leaders only, except `next`; see `Queue` for who else.

    One without a row belongs to a queue that is not logged: it is there for the puts of units.
    """

    __slots__ = (
        "border", "hollow_at", "hollow_from", "hollow_steps", "is_logged", "lane", "leaves_gaps", "next", "owner",
        "publisher", "remove_at", "removing", "row", "settled_bytes", "settled_messages", "time_ms",
    )  # fmt: skip

    def __init__(self, owner: int, lane: int, row: Row | None, publisher: Publisher) -> None:
        self.is_logged = row is not None
        row = row or Row()
        self.owner = owner
        self.lane = lane
        self.row = row
        self.next = row.next
        """The next sequence to be assigned."""
        self.publisher = publisher
        self.leaves_gaps = False
        """Messages that are not logged pass through it, so `row.next` must run ahead."""
        self.time_ms = 0
        """Of a stream's last message: the time of the next is not earlier, whatever the clock says."""
        self.border = -1
        """Where the last purge ended: settled ranges on its two sides are counted apart."""
        self.remove_at = 0
        """The floor at which settled blocks can be removed."""
        self.removing = row.floor > lane << LANE_SHIFT  # a crash may have left some
        """More settled blocks wait to be removed than one commit may."""
        self.settled_messages = self.settled_bytes = 0
        """What was settled above the floor since the last pass over its blocks began."""
        self.hollow_from = NOWHERE
        """The lowest of those sequences: the next pass begins there."""
        self.hollow_at = row.floor if row.marks else NOWHERE
        """How far the pass that is on its way has come. (One begins at open: nobody knows what was left.)"""
        self.hollow_steps = 0
        """What that one, or the last one, has cost; the next begins when that is spread over what was settled."""

    @property
    def hollow_due(self) -> bool:
        """Blocks above the floor should be looked at. Passes cost a step, 1.5 µs, for each message or 4 KiB settled."""
        messages, size = self.settled_messages, self.settled_bytes
        enough = size + 16 * messages >= HOLLOW_BYTES and messages + size // 4096 >= self.hollow_steps
        return enough or self.hollow_at != NOWHERE

    def count_settled(self, ranges: Iterable[list[int]], floor: int) -> None:
        """Count what was settled above the floor. By the leader; a commit that fails and is repeated counts twice."""
        for first, end, messages, size in ranges:
            if end > floor:
                self.settled_messages += messages
                self.settled_bytes += size
                if first < self.hollow_from:
                    self.hollow_from = first


class Put:
    """Messages of one caller on their way to the log. `first` is their first sequence once confirmed."""

    __slots__ = (
        "charged", "error", "first", "future", "joined", "lane", "plain", "records", "refused", "size", "sizes",
        "topics",
    )  # fmt: skip

    def __init__(
        self,
        lane: Lane,
        records: list[Record],
        sizes: list[int],
        plain: bool,
        size: int,
        charged: int,
        topics: Sequence[str] | None = None,
    ) -> None:
        self.lane = lane
        self.records = records
        self.sizes = sizes
        """`len` of each record; with `plain`, that all are bytes, found once: asking again costs 0.01 µs a message."""
        self.plain = plain
        self.size = size
        self.charged = charged
        self.topics = topics
        """Of each record, where the lane is a stream's."""
        self.first = -1
        self.joined = False
        self.error: BaseException | None = None
        self.future: Future[Any] | None = None
        self.refused = False


class Unit:
    """Puts and settles of one caller that are committed together or not at all.

    A put whose lane is not logged is published with the rest, after the commit. A record of 4 KiB or more that several
    puts hold, the same object, is stored once.
    """

    __slots__ = (
        "done", "error", "future", "joined", "parties", "puts", "result", "settles", "size", "values", "writes",
    )  # fmt: skip

    def __init__(
        self,
        puts: Iterable[Put] = (),
        settles: Iterable[tuple[Lane, list[Settled]]] = (),
        parties: Iterable[Party] = (),
        writes: Iterable[Callable[[Any], Any]] = (),
        size: int = 0,
        values: int = 0,
    ) -> None:
        self.size = size
        """About how many bytes `writes` write, if that is much: they are refused where the disk has no room for it."""
        self.values = values
        """About how many records those are, if that is more than a few: each may take a page of its own."""
        self.writes = list(writes)
        """Functions that are run inside its transaction, perhaps twice; see `TransactionLog.write`."""
        self.puts = list(puts)
        self.settles = list(settles)
        self.parties = list(parties)
        self.joined = False
        self.done = False
        """Every party has been told."""
        self.error: BaseException | None = None
        self.future: Future[Any] | None = None
        self.result: Any = None
        """What the future gives; for a party to set."""

    @property
    def is_logging(self) -> bool:
        """It writes messages, and so is refused where the disk has no room for any."""
        return self.size > 0 or any(put.lane.is_logged for put in self.puts)


class Step(NamedTuple):
    """What a committed batch means for one lane."""

    lane: Lane
    row: Row
    next: int
    first: int
    records: list[Record]
    size: int
    puts: int
    purged_to: int | None
    remove_at: int
    removing: bool
    topics: Sequence[str] | None
    time_ms: int


class Batch:
    """What one transaction will hold; see the module."""

    __slots__ = (
        "alone", "attempts", "committed", "committing", "damaged", "deleted", "deletes", "done", "error", "gate",
        "hollowed", "hollows", "joining", "leader", "plan", "previous", "published", "purges", "puts", "refusal",
        "resolving", "saved", "settled", "shared", "short", "size", "transaction", "units", "unresolved", "urgent",
        "wanted", "writes",
    )  # fmt: skip

    def __init__(self, previous: Batch | None) -> None:
        self.previous = previous
        self.puts: dict[Lane, list[Put]] = {}
        self.resolving = False
        self.unresolved: deque[Put | Unit] = deque()
        """Those with a future that waits to be told."""
        # What most batches hold none of is None until it is needed: a container less costs 0.04 µs less.
        self.units: list[Unit] | None = None
        self.joining: Unit | None = None
        """One whose puts are in part among the others: it is about to join, or was interrupted there."""
        self.shared: dict[int, Record] | None = None
        """Records that are stored once for several puts, by identity; and how many bytes less that is."""
        self.saved = 0
        self.settled: dict[Lane, list[list[int]]] = {}
        """[first, end, messages, bytes] of each settled range."""
        self.attempts: dict[Lane, list[tuple[int, int, int]]] | None = None
        """(first, end, number of earlier deliveries), later ones over earlier ones."""
        self.purges: set[Lane] = set()
        self.damaged: list[bytes] = []
        self.hollows: list[Lane] = []
        self.hollowed: dict[Lane, Hollowed] = {}
        """How far those came; empty if there was no room for that."""
        self.deletes: tuple[int, ...] = ()
        self.deleted: tuple[int, ...] = ()
        """Deleted queues, by number, and those of which nothing is left."""
        self.short = False
        """There was no room to count references to shared bodies down: blocks that hold some were not removed."""
        self.writes: list[Callable[[Any], None]] = []
        self.alone: Work | None = None
        """What is done instead of a transaction; nobody joins such a batch."""
        self.size = 0
        self.leader: threading.Thread | None = None
        self.wanted = False
        """The flusher has been told."""
        self.urgent = False
        """Somebody waits for it who cannot lead it himself."""
        self.plan: list[Step] = []
        self.transaction = 0
        self.committing = False
        self.committed = False
        self.published = 0
        self.refusal: BaseException | None = None
        """Why its puts were given up, if so."""
        self.error: BaseException | None = None
        """Why nothing of it was written, if so."""
        self.done = False
        self.gate = threading.Lock()
        self.gate.acquire()


class TransactionLog:
    """The log of one spool. Thread-safe."""

    def __init__(self, env: Environment, clock: Callable[[], float] = time.time) -> None:
        self._env = env
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held by readers, and to grow the map, which needs no reader
        self._copying = threading.Lock()  # held while the environment is copied, replaced or closed
        self._open: Batch | None = None
        self._last: Batch | None = None
        self._failure: BaseException | None = None
        self._flusher: threading.Thread | None = None
        self._flush_event = threading.Event()
        self._unled: list[Batch] = []
        self._closing = False
        self.commits = 0
        with self.read() as txn:
            self._shares = bodies.any_stored(txn)
        """There may be shared bodies."""
        self._releases = Releases()
        """For whoever leads."""

    # Joining a batch ---------------------------------------------------------------------------------------------

    def put(self, put: Put) -> Batch:
        """Add messages to the open batch; wait for it, or leave it to the flusher with `flush`."""
        with self._lock:
            batch = self._batch(put.charged)
            puts = batch.puts.setdefault(put.lane, [])
            batch.size += put.charged
            puts += (put,)
            if put.future is not None:
                batch.unresolved += (put,)
            put.joined = True
            return batch

    def join(self, unit: Unit) -> Batch:
        """Add a unit to the open batch, all of it to the same. Look at its `error` when the batch is done."""
        size = unit.size + sum(put.charged for put in unit.puts)
        shared, saved = _shared_records(unit.puts) if len(unit.puts) > 1 else ({}, 0)
        with self._lock:
            batch = self._batch(size)
            if batch.joining is not None:
                _leave_half_joined(batch, batch.joining)
            batch.joining = unit
            for put in unit.puts:
                if put.lane.is_logged:
                    batch.puts.setdefault(put.lane, []).append(put)
            # No call from here on, so that an interrupt finds all of it done or nothing.
            batch.joining = None
            batch.size += size
            if shared:
                batch.saved += saved
                batch.shared = shared if batch.shared is None else batch.shared | shared
            if batch.units is None:
                batch.units = [unit]
            else:
                batch.units += (unit,)
            if unit.future is not None:
                batch.unresolved += (unit,)
            unit.joined = True
            return batch

    def settle(self, lane: Lane, ranges: list[Settled]) -> Batch:
        """Add settled ranges to the open batch."""
        with self._lock:
            batch = self._batch(0)
            _add_settled(batch, lane, ranges)
            return batch

    def settle_all(self, parts: list[tuple[Lane, list[Settled]]]) -> Batch:
        """Add settled ranges of several lanes to the open batch, all to the same."""
        with self._lock:
            batch = self._batch(0)
            for lane, ranges in parts:
                _add_settled(batch, lane, ranges)
            return batch

    def attempts(self, lane: Lane, ranges: list[tuple[int, int, int]]) -> Batch:
        """Note how often messages were delivered before: (first, end, number), in place of what was known of them.

        What is settled by then is left out. It is a matter of the reserve, as settling is.
        """
        with self._lock:
            batch = self._batch(0)
            if batch.attempts is None:
                batch.attempts = {}
            known = batch.attempts.setdefault(lane, [])
            known += ranges
            return batch

    def purge(self, lanes: Iterable[Lane]) -> Batch:
        """Settle everything of some lanes that is committed when the batch is."""
        wanted = set(lanes)
        with self._lock:
            batch = self._batch(0)
            batch.purges |= wanted
            return batch

    def write(self, write: Callable[[Any], Any], lanes: Iterable[Lane] = ()) -> Batch:
        """Run a function inside the open batch's transaction; it may run twice, if the first one fails.

        The rows of `lanes` are written after it, as the function left them. It writes a few small records: for more,
        see `Unit.size`.
        """
        with self._lock:
            batch = self._batch(0)
            batch.writes.append(write)
            for lane in lanes:
                batch.settled.setdefault(lane, [])
            return batch

    def quarantine(self, keys: list[bytes]) -> Batch:
        """Keep damaged blocks apart, as they are."""
        with self._lock:
            batch = self._batch(0)
            batch.damaged += keys
            return batch

    def hollow(self, lane: Lane) -> Batch:
        """Give back a bounded part of what is settled above a lane's floor, if the disk has room for that."""
        with self._lock:
            batch = self._batch(0)
            batch.hollows.append(lane)
            return batch

    def delete(self, owner: int) -> Batch:
        """Remove a bounded part of what a deleted queue left; see the batch's `deleted`."""
        with self._lock:
            batch = self._batch(0)
            batch.deletes += (owner,)
            return batch

    def alone(self, work: Work) -> None:
        """Do something between two batches, when all before are done; those after it wait.

        What is begun is done, even if its caller is interrupted.
        """
        while True:
            with self._copying:
                pass  # commits must not wait for whoever copies
            with self._lock:
                self._check_usable()
                last = self._last
                batch = Batch(None if last is None or last.done else last)
                batch.alone = work
                self._open, self._last = None, batch
            self.wait(batch)
            if batch.error is None:
                return
            if not isinstance(batch.error, _BeingCopied):
                raise batch.error

    def flush(self, batch: Batch) -> None:
        """Leave a batch to the flusher, if nobody leads it. Cost: nothing if it was told before."""
        if batch.wanted or batch.leader is not None:
            return
        with self._lock:
            if batch.wanted or batch.done:
                return
            batch.wanted = True
        self._hand_over(batch)

    def lead_now(self, batch: Batch) -> None:
        """Have the flusher lead a batch at once, if nobody does, for those who wait for it and cannot lead it."""
        if not (batch.done or batch.urgent or batch.leader is not None):
            batch.urgent = True
            self.flush(batch)
            self._flush_event.set()

    def tell(self, batch: Batch, future: Any) -> None:
        """Give a future the result None when a batch is done, whatever became of it; at once, if it is."""
        told = Unit()
        told.future = future
        with self._lock:
            if not batch.done:
                batch.unresolved += (told,)
                return
        future.set_result(None)

    def _hand_over(self, batch: Batch) -> None:
        """Give a batch to the flusher, to be led or to have its futures resolved."""
        with self._lock:
            if self._flusher is None or not self._flusher.is_alive():
                self._flusher = threading.Thread(target=self._flush_forever, name="qflow-flusher", daemon=True)
                self._flusher.start()
            self._unled.append(batch)
        self._flush_event.set()

    def wait(self, batch: Batch) -> None:
        """Return when the batch is done, leading it if nobody does. Look at `error` of the put or the batch then."""
        me = threading.current_thread()
        while not batch.done:
            leader = batch.leader
            if leader is None or leader is me or not leader.is_alive():
                try:
                    with self._lock:
                        if batch.leader is leader:
                            batch.leader = me
                    if batch.leader is me:
                        self._lead(batch)
                finally:
                    if batch.leader is me and not batch.done:
                        batch.leader = None
                        self._hand_over(batch)  # nobody may be waiting for it any more
                    elif batch.done and batch.unresolved and not batch.resolving:
                        self._hand_over(batch)
            elif batch.gate.acquire(timeout=LOOK_S):
                batch.gate.release()

    def commit(self, batch: Batch) -> None:
        """Wait for a batch that is the caller's own work, and raise what became of it."""
        self.wait(batch)
        if batch.error is not None:
            raise batch.error

    def drain(self) -> None:
        """Return when every batch so far is done."""
        batch = self._last
        if batch is not None:
            self.wait(batch)

    def _batch(self, size: int) -> Batch:
        if self._failure is not None:
            raise BrokerFailed(f"the log failed earlier ({self._failure}); close the broker and open the spool again")
        batch = self._open
        if batch is None or (batch.size and batch.size + size > BATCH_BYTES):
            last = self._last
            batch = Batch(None if last is None or last.done else last)
            self._open = self._last = batch
        return batch

    # Leading -----------------------------------------------------------------------------------------------------

    def _lead(self, batch: Batch) -> None:
        previous = batch.previous
        if previous is not None:
            self.wait(previous)
            batch.previous = None
        with self._lock:
            if self._open is batch:
                self._open = None
            if batch.joining is not None:
                _leave_half_joined(batch, batch.joining)
        try:
            if not batch.committed and batch.error is None:
                if batch.alone is None:
                    self._commit(batch)
                else:
                    self._work_alone(batch, batch.alone)
        finally:
            if batch.committed or batch.error is not None:
                self._publish(batch)

    def _commit(self, batch: Batch) -> None:
        while True:
            try:
                if batch.refusal is not None:
                    _refuse_puts(batch, batch.refusal)
                self._transact(batch)
                return
            except MapFull:
                with self._reading:
                    self._env.grow_map()
                batch.committing = False
            except DiskFull as error:
                if not _is_writing(batch):
                    batch.error = error
                    self._settle_later(batch)
                    return
                batch.refusal = error
            except LmdbError as error:
                if batch.committing:
                    self._failure = error
                    batch.error = InDoubt(
                        f"a commit failed ({error}): whether it holds is known when {self._env.path} is opened again"
                    )
                else:
                    batch.error = StorageError(f"the log {self._env.path} could not be written: {error}")
                    self._settle_later(batch)
                return
            except Exception as error:
                if not self._was_committed(batch):
                    batch.error = error
                    self._settle_later(batch)
                    return
                batch.committed = True
                raise
            except BaseException:
                batch.committed = self._was_committed(batch)
                raise

    def _work_alone(self, batch: Batch, work: Work) -> None:
        if self._copying.locked():
            batch.error = _BeingCopied(f"the log {self._env.path} is being copied: try again after that")
            return
        try:
            with self._copying:
                self._check_usable()
                work(self._env, self._reading)
        except BaseException as error:
            if not self._env.in_place:
                self._failure = error
            batch.error = error if isinstance(error, Exception) else StorageError("it was interrupted: try again")
            if batch.error is not error:
                raise
        else:
            batch.committed = True

    def _check_usable(self) -> None:
        if self._closing:
            raise BrokerClosed(f"the log {self._env.path} is closed: open the spool again")
        if self._failure is not None:
            raise BrokerFailed(f"the log failed earlier ({self._failure}); close the broker and open the spool again")

    def _was_committed(self, batch: Batch) -> bool:
        return batch.committing and self._env.last_transaction() >= batch.transaction

    def _transact(self, batch: Batch) -> None:
        env = self._env
        if self._failure is not None:
            raise BrokerFailed(f"the log failed earlier ({self._failure}); close the broker and open the spool again")
        lanes = len(batch.puts) + len(batch.settled)
        marks = sum(map(len, batch.settled.values())) if batch.settled else 0
        if batch.units:
            parts = [ranges for unit in batch.units for _, ranges in unit.settles]
            lanes += len(parts)
            marks += sum(map(len, parts))
            marks += 4 * len(batch.shared or ()) + sum(4 * len(unit.writes) + unit.values for unit in batch.units)
        if batch.attempts:
            marks += 2 * sum(map(len, batch.attempts.values()))
        size = batch.size - batch.saved
        value_bytes = size * 2 + lanes * TAIL_BYTES
        values = lanes * 4 + marks + size // 32768 + 4 * len(batch.writes) + 20 * len(batch.damaged)
        hollows = batch.hollows
        releases = self._releases
        releases.left = RELEASED_AT_ONCE
        if hollows or self._shares:
            more = HOLLOWING_BYTES * len(hollows) + (RELEASING_BYTES if self._shares else 0)
            batch.short = False
            try:
                env.make_room(value_bytes + more, values + 4 * len(batch.deletes), settles_only=False)
            except StorageError:  # the reserve is for others; it is tried again later
                hollows = []
                if self._shares:
                    releases.left, batch.short = 0, True
        env.make_room(value_bytes, values + 4 * len(batch.deletes), settles_only=not _is_writing(batch))
        batch.committing = False
        txn = env.begin(write=True)
        try:
            batch.transaction = txn.id()
            batch.hollowed = {lane: _hollow(txn, lane, releases) for lane in hollows}
            batch.plan = self._write(txn, batch, releases)
            batch.committing = True
            env.commit(txn)
        except BaseException:
            with suppress(LmdbError):  # raised when it has ended; an interrupt may have come at any point
                txn.abort()
            raise
        batch.committed = True

    def _write(self, txn: Any, batch: Batch, releases: Releases) -> list[Step]:
        for write in batch.writes:
            write(txn)
        for unit in batch.units or ():
            for write in unit.writes:
                write(txn)
        for key in batch.damaged:
            value = txn.get(key)
            if value is not None:
                txn.put(bytes((block_log.DAMAGED,)) + key[1:], value)
        now_ms = int(self._clock() * 1000)
        settled = _all_settled(batch, batch.units) if batch.units else batch.settled
        sharing = None
        if batch.shared:
            self._shares = True
            sharing = Sharing(txn, batch.shared, now_ms)
        lanes: dict[Lane, Any] = {**settled, **batch.puts}
        if batch.purges:
            lanes |= dict.fromkeys(batch.purges)
        plan = [self._write_lane(txn, batch, lane, settled.get(lane), sharing, releases, now_ms) for lane in lanes]
        if sharing is not None:
            sharing.finish()
        if batch.attempts:
            _write_attempts(txn, batch.attempts, {step.lane: step.row for step in plan})
        if batch.deletes:
            batch.deleted = _write_deletes(txn, batch.deletes, releases)
        return plan

    def _write_lane(
        self,
        txn: Any,
        batch: Batch,
        lane: Lane,
        settled: list[list[int]] | None,
        sharing: Sharing | None,
        releases: Releases,
        now_ms: int,
    ) -> Step:
        owner, number, row = lane.owner, lane.lane, lane.row
        if settled:
            row = block_log.settle(txn, owner, number, row, [Settled(*part) for part in settled])
            if row.marks:
                lane.count_settled(settled, row.floor)
        first = following = lane.next
        purged_to = None
        if lane in batch.purges:
            purged_to = first
            row = block_log.purge(row, first)
        puts = batch.puts.get(lane, [])
        records: list[Record] = []
        topics: Sequence[str] | None = None
        size = 0
        if puts:
            records, sizes, plain, topics = puts[0].records, puts[0].sizes, puts[0].plain, puts[0].topics
            if topics is not None:
                now_ms = max(now_ms, lane.time_ms)
            if len(puts) > 1:
                if topics is not None:
                    topics = [topic for put in puts for topic in put.topics or ()]
                records = [record for put in puts for record in put.records]
                sizes = [size for put in puts for size in put.sizes]
                plain = all(put.plain for put in puts)
            for put in puts:
                put.first = following
                following += len(put.records)
                size += put.size
            if sharing is None:
                lanes = len(batch.puts)
                row = block_log.append(txn, owner, number, row, first, records, sizes, plain, now_ms, lanes, topics)
            else:
                stand_ins = sharing.stand_ins(records)
                row = block_log.append_stand_ins(txn, owner, number, row, first, stand_ins, now_ms, topics)
        ahead = RESERVED_SEQUENCES if lane.leaves_gaps else 0
        row = tuple.__new__(Row, (max(row.next, following + ahead), *row[1:]))  # as in `append`
        remove_at, removing = lane.remove_at, False
        if row.floor >= remove_at:
            remove_at, removing = block_log.remove_settled(txn, owner, number, row, releases=releases)
        block_log.write_row(txn, owner, number, row)
        return Step(
            lane, row, following, first, records, size, len(puts), purged_to, remove_at, removing, topics, now_ms
        )

    def _publish(self, batch: Batch) -> None:
        if batch.committed:
            plan = batch.plan
            if not batch.published:  # before anything that came later is visible
                _tell_purged(plan)
            while batch.published < len(plan):
                lane, row, following, first, records, size, puts, _, remove_at, removing, topics, time_ms = plan[
                    batch.published
                ]
                lane.row, lane.remove_at, lane.removing = row, remove_at, removing
                if puts:
                    lane.next = following
                    if topics is None:
                        lane.publisher.publish(first, records, size, puts)
                    else:
                        lane.time_ms = time_ms
                        cast(TopicPublisher, lane.publisher).publish_topics(first, records, topics, size, time_ms)
                batch.published += 1
            for lane, hollowed in batch.hollowed.items():
                _note_hollowed(lane, hollowed)
            for unit in batch.units or ():
                _publish_unit(unit)
            self.commits += 1
        else:
            error = batch.error or StorageError("the batch was not written")
            _refuse_puts(batch, error)
            for unit in batch.units or ():
                _refuse_unit(unit, error)
        batch.done = True
        batch.gate.release()
        batch.puts, batch.plan, batch.settled, batch.writes = {}, [], {}, []  # whoever keeps the batch keeps no bodies
        if batch.units:
            batch.units = batch.shared = None
        self._resolve(batch)

    def _settle_later(self, batch: Batch) -> None:
        """Take what was settled, and counts, into the next batch: who did not wait for them must not lose them."""
        if self._failure is not None:
            return
        for lane, parts in batch.settled.items():
            self.settle(lane, [Settled(*part) for part in parts])
        for lane, ranges in (batch.attempts or {}).items():
            newer = self.attempts(lane, []).attempts
            assert newer is not None
            newer[lane][:0] = ranges  # what is newer stays above

    def _resolve(self, batch: Batch) -> None:
        """Resolve the futures of a batch that is done; their callbacks may wait for anything but each other."""
        unresolved = batch.unresolved
        mine = False
        try:
            with self._lock:
                if not batch.resolving:
                    batch.resolving = mine = True
            while mine and unresolved:
                told = unresolved[0]
                future = told.future
                if future is not None and not future.done():
                    if told.error is None:
                        future.set_result(told.first if isinstance(told, Put) else told.result)
                    else:
                        future.set_exception(told.error)
                del unresolved[0]
        finally:
            if mine:
                batch.resolving = False
                if unresolved:
                    self._hand_over(batch)

    def _flush_forever(self) -> None:
        while not self._closing:
            self._flush_event.wait()
            self._flush_event.clear()
            while self._unled:
                batch = self._unled[0]
                self._flush_event.clear()
                if not (batch.done or batch.urgent):
                    self._flush_event.wait(FLUSH_S)  # ends earlier when the next batch is there: this one is closed
                try:
                    self.wait(batch)
                    self._resolve(batch)
                except Exception as error:
                    _logger.exception("a commit of %s could not be finished", self._env.path)
                    self._failure = self._failure or error
                except BaseException:
                    continue  # struck from outside: the same batch once more
                with self._lock:
                    del self._unled[0]

    # Reading -----------------------------------------------------------------------------------------------------

    @contextmanager
    def read(self, *, buffers: bool = False) -> Iterator[Any]:
        """A short read transaction; with `buffers`, its values are views of the map that end with it."""
        with self._reading:
            try:
                txn = self._env.begin(buffers=True) if buffers else self._env.begin()
                try:
                    yield txn
                finally:
                    txn.abort()
            except LmdbError as error:
                raise StorageError(f"the log {self._env.path} could not be read: {error}") from error

    @contextmanager
    def copying(self) -> Iterator[Environment]:
        """The environment, to copy it while commits and reads go on: all that joined a batch by now is committed."""
        self.drain()
        with self._copying:
            self._check_usable()
            yield self._env

    def forget_dead_readers(self) -> None:
        """Let go of what other processes were reading when they were killed; their pages could not be used again."""
        with self._reading:
            if not self._closing:
                self._env.forget_dead_readers()

    def problems(self) -> list[str]:
        """Compare shared bodies with the references to them, in blocks of all queues; return what differs, in words."""
        with self.read() as txn:
            counted, _ = block_log.count_references(txn, b"", NOWHERE)
            return list(bodies.problems(txn, counted))

    # Ending ------------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def busy(self) -> bool:
        """Some batch is open or being written."""
        batch = self._last
        return batch is not None and not batch.done

    def close(self) -> None:
        """Stop the flusher and close the environment; every batch must be done."""
        self._closing = True
        self._flush_event.set()
        if self._flusher is not None and self._flusher is not threading.current_thread():
            self._flusher.join()
        with self._copying, self._reading:
            self._env.close()


# Parts of a batch; what a leader does can be repeated after an interrupt ---------------------------------------------


def _add_settled(batch: Batch, lane: Lane, ranges: Iterable[Settled]) -> None:
    """Add settled ranges to a batch, joined with those before where they touch. Under the log's lock."""
    parts = batch.settled.setdefault(lane, [])
    for first, end, messages, size in ranges:
        if parts and parts[-1][1] == first != lane.border:
            last = parts[-1]
            last[1] = end
            last[2] += messages
            last[3] += size
        else:
            parts.append([first, end, messages, size])


def _is_writing(batch: Batch) -> bool:
    """Tell whether a batch holds what may be refused for lack of room on the disk."""
    return bool(batch.puts) or any(unit.size for unit in batch.units or ())


def _leave_half_joined(batch: Batch, unit: Unit) -> None:
    """Take out the puts of a unit that was interrupted on its way in. Under the log's lock."""
    theirs = set(map(id, unit.puts))
    left = {lane: [put for put in puts if id(put) not in theirs] for lane, puts in batch.puts.items()}
    batch.puts = {lane: puts for lane, puts in left.items() if puts}
    batch.joining = None


def _shared_records(puts: list[Put]) -> tuple[dict[int, Record], int]:
    """Return the large records that several of these puts hold, by identity, and how many bytes too many that is."""
    seen: set[int] = set()
    shared: dict[int, Record] = {}
    saved = 0
    for put in puts:
        if put.lane.is_logged and put.size >= SHARED_BYTES:
            for record, size in zip(put.records, put.sizes, strict=True):
                if size >= SHARED_BYTES and is_logged(record):
                    if id(record) in seen:
                        shared[id(record)] = record
                        saved += size
                    seen.add(id(record))
    return shared, saved


def _all_settled(batch: Batch, units: list[Unit]) -> dict[Lane, list[list[int]]]:
    """Return what the batch settles, units included. A copy: what others settled outlives a unit that is refused."""
    settled = {lane: list(parts) for lane, parts in batch.settled.items()}
    for unit in units:
        for lane, ranges in unit.settles:
            settled.setdefault(lane, []).extend(map(list, ranges))
    return settled


def _write_attempts(txn: Any, attempts: dict[Lane, list[tuple[int, int, int]]], rows: dict[Lane, Row]) -> None:
    """Write the counts of deliveries of what is not settled; `rows` are those this batch has changed."""
    for lane, ranges in attempts.items():
        floor = rows.get(lane, lane.row).floor
        for first, end, number in ranges:
            block_log.raise_attempts(txn, lane.owner, lane.lane, max(first, floor), end, number)


def _tell_purged(plan: list[Step]) -> None:
    """Have the queues drop what is purged, each all its lanes at once."""
    ends: dict[Publisher, dict[int, int]] = {}
    for step in plan:
        if step.purged_to is not None:
            step.lane.border = step.purged_to
            ends.setdefault(step.lane.publisher, {})[step.lane.lane] = step.purged_to
    for publisher, below in ends.items():
        publisher.purged(below)


def _write_deletes(txn: Any, owners: Iterable[int], releases: Releases) -> tuple[int, ...]:
    """Remove a part of what deleted queues left; return those of which nothing is left, their names included."""
    gone = tuple(
        owner
        for owner in owners
        if not block_log.delete_lanes(txn, owner, releases=releases) and not delete_index(txn, owner)
    )
    for owner in gone:
        txn.delete(block_log.queue_key(owner))
    return gone


def _publish_unit(unit: Unit) -> None:
    """Make the puts of a committed unit visible that are not logged, and tell its parties."""
    if unit.done:
        return
    for put in unit.puts:
        if not put.lane.is_logged:
            put.lane.publisher.publish_transient(put)
    for party in unit.parties:
        party.committed(unit)
    unit.done = True


def _refuse_puts(batch: Batch, error: BaseException) -> None:
    """Refuse the messages of a batch, and the units that hold some, whole."""
    for puts in batch.puts.values():
        for put in puts:
            put.error = error
            put.lane.publisher.refused(put)
    for unit in batch.units or ():
        if unit.is_logging:
            _refuse_unit(unit, error)
    batch.puts, batch.shared = {}, None
    batch.size = batch.saved = 0
    batch.units = [unit for unit in batch.units or () if not unit.done]


def _refuse_unit(unit: Unit, error: BaseException) -> None:
    if unit.done:
        return
    unit.error = error
    for put in unit.puts:
        put.error = error
        put.lane.publisher.refused(put)
    for party in unit.parties:
        party.refused(unit)
    unit.done = True


def _hollow(txn: Any, lane: Lane, releases: Releases) -> Hollowed:
    """Begin a pass over a lane's blocks, or go on with it. By the leader."""
    if lane.hollow_at == NOWHERE:
        lane.hollow_at, lane.hollow_from = lane.hollow_from, NOWHERE
        lane.settled_messages = lane.settled_bytes = lane.hollow_steps = 0
    return block_log.hollow(txn, lane.owner, lane.lane, lane.row, lane.hollow_at, block_log.HOLLOWING_STEPS, releases)


def _note_hollowed(lane: Lane, hollowed: Hollowed) -> None:
    """Remember how far a pass came. By the leader, after the commit."""
    lane.hollow_steps += hollowed.steps
    if hollowed.more:
        lane.hollow_at = hollowed.position
    else:
        lane.hollow_at = NOWHERE
        lane.hollow_from = min(lane.hollow_from, lane.row.tail)  # the tail block was not looked at
