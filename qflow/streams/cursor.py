"""How far a subscription came, and who holds what of it: shared by the members of a group, or of one subscriber alone.

A cursor has a *part* for each partition. A part reads ahead a little into a buffer, from the live tail or the log; its
members take messages from there. What they settle is a range of sequences, given by value to the log, where a durable
cursor has a row and marks as a queue has; what they do not settle comes back, in its place.

A part is *live* when it has read everything there is. From then on publishers tell it where something came that its
filter wants, so that it looks at nothing else. It becomes live under the partition's lock, so nothing falls between.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable
from itertools import compress
from typing import TYPE_CHECKING, Any

from qflow.delivery import ONE_ATTEMPT
from qflow.errors import (
    AlreadySettled,
    BrokerClosed,
    BrokerFailed,
    ForkedProcess,
    GapError,
    InvalidArgument,
    QflowError,
    StreamDeleted,
    TooManyUnsettled,
    in_doubt,
)
from qflow.memory.ledger import Ledger
from qflow.memory.line import WORK, Line, Wake
from qflow.memory.waiting import attend, collecting, shelter, sheltered, straight
from qflow.stats import SubscriptionStats
from qflow.storage.log.rows import Row, Settled, clear_marks
from qflow.storage.log.transaction_log import Lane, Request, TransactionLog
from qflow.storage.streams.partitions import Found, Piece
from qflow.streams.counting import count_matching
from qflow.streams.deliveries import Share, StreamDeliveries
from qflow.streams.holds import Getting, Leaving, settles_of
from qflow.streams.interest import Interest
from qflow.streams.part import Part
from qflow.streams.partition import offset_of
from qflow.streams.room import Room, Slab, charge_for

if TYPE_CHECKING:
    from qflow.streams.stream import Stream

MOST_UNSETTLED = 65_536
"""Messages that the members of a cursor may hold: it bounds what is settled out of order."""
READ_BYTES = 256 * 1024
LEAST_READ_BYTES = 64 * 1024
BATCH_BYTES = 2**20
"""A batch of many is filled up to so many bytes."""
LOOK_S = 0.05
"""How often who waits for memory looks again: nobody tells him what others give back."""


class Cursor:
    """See the module. Thread-safe."""

    def __init__(
        self,
        stream: Stream,
        name: str | None,
        interest: Interest,
        positions: list[int],
        lanes: list[Lane] | None,
        *,
        log: TransactionLog,
        room: Room,
        owner: int = 0,
        group: bool = False,
        ack_timeout_s: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream
        self.name = stream.name
        """What deliveries call their queue."""
        self.title = name
        self.interest = interest
        self.owner = owner
        self.is_group = group
        self.ack_timeout_s = ack_timeout_s
        self.parts = [
            Part(self, partition, position, None if lanes is None else lanes[partition.number])
            for partition, position in zip(stream.partitions, positions, strict=True)
        ]
        self.members: dict[Any, None] = {}
        self.ended: type[QflowError] | None = None
        self._log = log
        self._room = room
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._line = Line(self._lock)
        self._waiting = 0
        """Who waits, or looks whether he must: raised before he looks, so that publishers need no lock to ask."""
        self._starved = False
        """Somebody found no room for what he was to get."""
        self._arrivals = 0
        self._moving = False
        """It is being moved in the log; nothing is delivered meanwhile."""
        self._held: dict[StreamDeliveries, float | None] = {}
        self._ahead: dict[StreamDeliveries, None] = {}
        """Those that an iteration shows one by one."""
        self._unsettled = 0
        self._again: list[tuple[int, int, Share]] = []  # (sequence, number, what came back)
        self._later: list[tuple[float, int, Share]] = []  # the same, until a moment
        self._again_count = 0
        """Messages in `_again`."""
        self._lease_at = math.inf
        """No lease ends before."""
        self._number = 0
        self._turn = 0
        self._delivered = self._acked = self._redelivered = self._missed = 0
        self._done: list[tuple[Lane, Settled]] = []
        """Settled, and not known to the log: what straight lines under the lock leave for it."""
        self._called = False
        """The log will come for that."""

    # Members -------------------------------------------------------------------------------------------------------

    @sheltered
    def join(self, member: Any) -> None:
        """Have one member more."""
        with self._lock:
            self.check_open()
            if not self.members:
                self.stream.readers.add(self.interest.filter, self)
            self.members[member] = None

    @sheltered
    def leave(self, member: Any) -> bool:
        """Have one member less; what he holds goes back. Returns whether he was the last."""
        if not self._log.failed:
            self._call_log()
        with self._line:
            if member not in self.members:
                return False
            for batch in [batch for batch in self._held if batch.member is member and not batch.leaving]:
                self._return(batch, 0.0, repeated=True)
            del self.members[member]
            if self.members:
                self._line.notify_all()
                return False
            self._withdraw()
            self._line.notify_all()
            return True

    def _withdraw(self) -> None:
        """Nobody reads any more: forget what was read ahead."""
        self.stream.readers.remove(self.interest.filter, self)
        self._forget([part.position if part.lane is None else part.lane.row.floor for part in self.parts])

    def _forget(self, positions: Iterable[int]) -> None:
        """Forget everything in memory, and read on from here. Under the lock."""
        freed = sum(part.charged for part in self.parts)
        freed += sum(batch.charged for batch in self._held)
        freed += sum(share.charged for _, _, share in (*self._again, *self._later))
        for batch in self._held:
            batch.settled = None
        self._held, self._ahead, self._again, self._later, self._unsettled = {}, {}, [], [], 0
        self._again_count = 0
        for part, position in zip(self.parts, positions, strict=True):
            part.restart(position)
        self._room.let_go(freed)

    @sheltered
    def end(self, error: type[QflowError]) -> None:
        """Serve nobody any more; wake who waits."""
        if not self._log.failed:
            self._call_log()
        with self._line:
            if self.ended is None:
                self.ended = error
                if self.members:
                    self._withdraw()
                self.members = {}
            self._line.notify_all()

    def check_open(self) -> None:
        if self.ended is BrokerClosed:
            raise BrokerClosed(f"the broker of stream {self.name!r} is closed: open the spool again")
        if self.ended is not None:
            raise StreamDeleted(f"stream {self.name!r}, or this subscription of it, was deleted: declare it again")

    @sheltered
    def stand_still(self) -> None:
        """Return when nobody moves it any more."""
        with self._line:
            self._wait_until_moved()

    @sheltered
    def recall(self, skips: list[list[tuple[int, int]]]) -> None:
        """Begin where what is settled ends, given what was settled above that, by partition. Nobody has it open."""
        with self._line:
            for part, ranges in zip(self.parts, skips, strict=True):
                assert part.lane is not None
                part.skips = ranges
                part.doubtful = max(part.doubtful, part.seen)
                part.restart(part.lane.row.floor)

    # Reading ----------------------------------------------------------------------------------------------------

    def get(
        self,
        member: Any,
        most: int,
        timeout: float | None,
        *,
        follow: bool,
        skip_gaps: bool,
        taker: object = None,
        ahead: bool = False,
    ) -> StreamDeliveries | None:
        """Return a batch as soon as there is something; None at the time-out, or at the end of what must not grow."""
        taker = threading.get_ident() if taker is None else taker
        getting = self.begin_get(member, most, timeout, taker, follow=follow, skip_gaps=skip_gaps)
        getting.ahead = ahead
        attend(lambda wake: self.try_get(getting, wake, may_work=True), lambda: self.give_up_get(getting))
        return getting.batch

    def begin_get(
        self, member: Any, most: int, timeout: float | None, taker: object, *, follow: bool, skip_gaps: bool
    ) -> Getting:
        """Begin a get by a caller who has no thread to wait with: `try_get` until it is done. `taker` is who he is."""
        deadline = None if timeout is None else self._monotonic() + timeout
        return Getting(member, most, deadline, taker, follow=follow, skip_gaps=skip_gaps)

    def try_get(self, getting: Getting, wake: Wake | None, *, may_work: bool) -> float | None:
        """A step of a get: set `getting.batch`, or see to be woken.

        Returns:
            None: the batch is what it gets, or it is None. Else see `line`; without `wake`, no watcher is left.

        Raises:
            As `Subscription.get`; `give_up_get` it then.
        """
        with self._line:
            self._unwatch(getting)
            if getting.given_up or getting.batch is not None:
                return None
            self._waiting += 1
            try:
                found = self._step(getting, may_work=may_work)
                if found == WORK:
                    return WORK
                if isinstance(found, float):
                    if getting.deadline is not None:
                        found = min(found, getting.deadline - self._monotonic())
                    if found <= 0 and getting.is_full:
                        raise self._too_many()
                    if found > 0 and not getting.given_up:
                        if wake is not None:
                            if getting.number < 0:
                                getting.number = self._arrivals = self._arrivals + 1
                            getting.watcher = self._line.watch(wake, getting.number)
                        return found
                elif found is not None and getting.given_up:  # while it was read by another thread
                    self._return(found, 0.0, repeated=False)
                else:
                    getting.batch = found
            finally:
                self._waiting -= 1
            if self._line.watchers and self._is_worth_a_look():
                self._line.notify_first()
            return None

    @sheltered
    def give_up_get(self, getting: Getting) -> None:
        """Get no more: what it has goes back uncounted, a wake-up it had goes to another; twice is fine."""
        with self._line:
            if getting.given_up:
                return
            getting.given_up = True
            self._unwatch(getting)
            if getting.batch is not None and getting.batch in self._held:
                self._return(getting.batch, 0.0, repeated=False)
            self._line.notify_first()

    def _unwatch(self, getting: Getting) -> None:
        if getting.watcher is not None:
            self._line.unwatch(getting.watcher)
            getting.watcher = None

    def _is_worth_a_look(self) -> bool:
        """Tell whether the next one who waits may find something, or has a moment to wait for. Under the lock."""
        if self._again or self._later:
            return True
        return any(part.buffer or part.behind is not None or part.has_more() for part in self.parts)

    def _step(self, getting: Getting, *, may_work: bool) -> StreamDeliveries | float | None:
        """Return a batch; None at the end; or how long to wait, at most. With the lock held; it may let go of it."""
        self._give_back_unshown(_root(getting.taker))
        while True:
            self.check_open()
            if getting.member not in self.members:
                raise InvalidArgument("the subscription is closed: subscribe again")
            if self._moving:
                return LOOK_S  # who moves it tells when he is done
            now = self._monotonic()
            self._expire(now)
            if not self.owner:
                self._settle_previous(_root(getting.taker))
            self._tell_gap(getting.skip_gaps)
            room = MOST_UNSETTLED - self._unsettled
            ready = sum([part.ready for part in self.parts])
            ready += self._again_count
            size = sum([part.charged for part in self.parts])
            wanted = min(getting.most, room)
            reading = self._part_to_read() if ready < wanted and size < BATCH_BYTES else None
            amount = self._room_for(wanted - ready, ready) if reading is not None else 0
            if reading is not None and amount:
                if not may_work and not self._is_in_memory(reading):
                    self._room.let_go(amount)
                    return WORK
                self._fetch(reading, max(wanted - ready, 256 if getting.most == 1 else 1), amount)
                continue
            if ready and room > 0:
                return self._take(getting, wanted, now)
            if any(one.fetching is not None for one in self.parts):
                return 1.0  # whoever does that tells when he is done
            if (
                reading is None
                and not getting.follow
                and room > 0
                and not self._later
                and not any(map(Part.has_more, self.parts))
            ):
                return None
            getting.is_full = bool(self._held) and (reading is not None or room <= 0)
            if getting.is_full and not getting.follow:
                raise self._too_many()
            self._starved |= reading is not None or room <= 0
            return self._patience(now, LOOK_S if reading is not None else None)

    def _too_many(self) -> TooManyUnsettled:
        return TooManyUnsettled(
            f"{self._unsettled} messages of stream {self.name!r} are held and not settled, as many as may be, or as "
            "find room in memory: ack some of them before you get more"
        )

    def _give_back_unshown(self, taker: object) -> None:
        """Put back what an iteration of the same thread or task has read ahead, for somebody asks in between."""
        for batch in [batch for batch in self._ahead if _root(batch.taker) == taker]:
            assert batch.shown is not None
            shares = batch.left_shares(batch.shown)
            if shares:
                self._put_back(batch, shares, 0.0, repeated=False)
                batch.note_settled(range(batch.shown, batch.total))
                if not batch.unsettled:
                    self._drop(batch, 0)

    def _settle_previous(self, taker: object) -> None:
        """Without a name nothing is logged, and who asks for more has done with what he got before. Under the lock."""
        for batch in [batch for batch in self._held if _root(batch.taker) == taker]:
            self._drop(batch, len(batch) - len(batch.settled or ()))

    @sheltered
    def abandon(self, taker: object) -> None:
        """Another iteration begins: put back what one before it in the same thread has left."""
        with self._line:
            self._give_back_unshown(taker)
            for batch in [batch for batch in self._ahead if _root(batch.taker) == taker]:
                if self.owner and not batch.leaving:
                    self._return(batch, 0.0, repeated=True)

    def _part_to_read(self) -> Part | None:
        """Return a part with something to read that nobody reads yet, in turn."""
        count = len(self.parts)
        for index in range(count):
            part = self.parts[(self._turn + index) % count]
            if part.fetching is None and part.behind is None and part.has_more():
                self._turn = (self._turn + index + 1) % count
                return part
        return None

    def _room_for(self, wanted: int, ready: int) -> int:
        """Take memory for what is about to be read; 0 if there is none now."""
        for amount in (READ_BYTES if wanted <= 256 else BATCH_BYTES, LEAST_READ_BYTES):
            if self._room.hold(amount, least=False):
                return amount
        if ready or self._held:
            return 0
        self._room.hold(LEAST_READ_BYTES, least=True)
        return LEAST_READ_BYTES

    def _is_in_memory(self, part: Part) -> bool:
        """Tell whether the next thing to read is in the live tail."""
        with part.partition.lock:
            first = part.hints[0] if part.live and part.hints else max(part.position, part.clear_to)
        return first in part.partition.tail.slabs

    def _fetch(self, part: Part, most: int, amount: int) -> None:
        """Read on in a part, without the lock, and keep what came unless somebody went elsewhere meanwhile."""
        claim = object()
        most = min(most, amount // charge_for(1, 0))  # small ones are charged more than they weigh
        found: Found | None = None
        charged = 0
        try:
            part.fetching = claim
            position, end = part.next_to_read()
            floor = part.partition.floor
            stop = min(end, part.doubtful) if floor <= position < part.doubtful else end
            slab = part.partition.tail.slabs.get(position)
            self._lock.release()
            try:
                if slab is None or slab.end > stop or position < floor:  # what retention took is gone
                    found = self.stream.read(part.partition.number, position, stop, amount, self.interest, most)
                    told = False
                else:  # where the next commit is that is wanted, a hint tells
                    found, told = self._found_in(slab), True
            except QflowError:
                self.check_open()  # it was closed meanwhile, which is the reason
                raise
            finally:
                self._lock.acquire()
            if part.fetching is claim:
                charged = part.install(found)
                part.read_to(found.position, end, told=told)
        finally:
            if part.fetching is claim:
                part.fetching = None
            if charged > amount:  # a block, or a message, is larger than what was taken for it
                self._room.hold(charged - amount, least=True)
            else:
                self._room.let_go(amount - charged)
            self._line.notify_first()

    def _found_in(self, slab: Slab) -> Found:
        """Return what is wanted of a commit in the live tail."""
        records, topics = slab.records, list(slab.topics)
        times = [slab.time_ms] * len(records)
        sequences: Any = range(slab.first, slab.end)
        names = list(dict.fromkeys(topics))
        chosen = self.interest.choose(names)
        if chosen is not None:
            known = dict(zip(names, chosen, strict=True))
            picked = [known[topic] for topic in topics]
            records, topics, times, sequences = (
                list(compress(column, picked)) for column in (records, topics, times, sequences)
            )
        pieces = [Piece(slab.first, slab.end, sequences, records, topics, times)] if records else []
        return Found(pieces, None, slab.end, 0)

    def _tell_gap(self, skip: bool) -> None:
        """Tell of messages that are gone, once what comes before them is delivered."""
        for part in self.parts:
            hole = part.behind
            if hole is None or part.buffer:
                continue
            part.behind = None
            first, end = offset_of(hole.start), offset_of(hole.end)
            gone = end - first - part.settled_in(hole.start, hole.end)
            self._missed += gone
            if gone and not skip:
                raise GapError(
                    f"stream {self.name!r}, partition {part.partition.number}: messages {first} to {end - 1} are gone "
                    f"({hole.problem}); the next call goes on at {end}",
                    partition=part.partition.number,
                    first=first,
                    end=end,
                    messages=gone,
                )

    def _take(self, getting: Getting, most: int, now: float) -> StreamDeliveries:
        """Return a batch from what is ready: first what came back, then what was read ahead. Under the lock."""
        shares: list[Share] = []
        count = charged = 0
        while self._again and count < most:
            _, _, share = self._again.pop(0)
            self._again_count -= len(share.piece.records)
            taken, rest = _cut(share, most - count)
            if rest is not None:
                self._add_again(rest)
            shares.append(taken)
            count += len(taken.piece.records)
            charged += taken.charged
        for index in range(len(self.parts)):
            part = self.parts[(self._turn + index) % len(self.parts)]
            while part.buffer and count < most:
                taken = part.take(most - count)
                shares.append(taken)
                count += len(taken.piece.records)
                charged += taken.charged
        batch = StreamDeliveries(self, shares, getting.member, charged, getting.taker)
        self._lease(batch, None if self.ack_timeout_s is None else now + self.ack_timeout_s)
        if getting.ahead:
            batch.shown = 0
            self._ahead[batch] = None
        self._unsettled += count
        self._delivered += count
        return batch

    def _lease(self, batch: StreamDeliveries, until: float | None) -> None:
        self._held[batch] = until
        if until is not None:
            self._lease_at = min(self._lease_at, until)

    def _patience(self, now: float, most: float | None) -> float:
        """Return how long nothing can happen that wakes nobody."""
        wait = min(self._lease_at, self._later[0][0] if self._later else math.inf) - now
        return max(0.001, wait if most is None else min(wait, most))

    def wake(self) -> None:
        """Have those look who wait. Called by publishers, without a lock."""
        if self._waiting or self._line.watchers:
            with self._line:
                self._line.notify_first()

    # Settling: what a delivery calls ------------------------------------------------------------

    def settle_batch(self, batch: Any, wait: bool) -> None:
        """Settle what is left of a batch."""
        logged = shelter(lambda: self._settle_batch(batch))
        if wait and logged is not None:
            self._log.commit(logged)

    def _settle_batch(self, batch: Any) -> Request | None:
        with self._line:
            if not self._check_held(batch):
                return None
            settles = settles_of(batch.left_shares())
            logged = self._log.settle_all(settles) if settles else None  # under the lock: a seek comes before, or after
            self._drop(batch, len(batch) - len(batch.settled or ()))
        return logged

    @straight
    def settle_part(self, batch: Any, index: int, wait: bool) -> None:
        """Settle one message of a batch. Cost: 1 µs, as long as others of it are left."""
        if not wait and index not in batch.taken and "a" not in collecting:
            done: tuple[tuple[Lane, Settled], ...] = ()
            if self.owner:  # without a name nothing is logged
                part, start, end = batch.span_at(index)
                done = ((part.lane, Settled(start, end, 0, 0)),)
                self._log.check_usable()
            one = {index}
            try:
                with self._lock:  # straight lines; see `waiting`
                    settled = batch.settled
                    passes = batch.unsettled > 1 and settled is not None and index not in settled and not self._starved
                    if passes:
                        settled |= one
                        batch.unsettled -= 1
                        self._unsettled -= 1
                        self._acked += 1
                        self._done += done
                if passes:
                    if done and not self._called:
                        self._call_log()
                    return
            except BaseException:
                shelter(self._call_log)
                raise
        logged = shelter(lambda: self._settle_part(batch, index))
        if wait and logged is not None:
            self._log.commit(logged)

    def _settle_part(self, batch: Any, index: int) -> Request | None:
        with self._line:
            if index in batch.taken or not self._check_held(batch, whole=False):
                return None
            batch.check_unsettled(index)
            logged = None
            if self.owner:
                part, start, end = batch.span_at(index)
                logged = self._log.settle(part.lane, [Settled(start, end, 0, 0)])
            self._settle_index(batch, index)
        return logged

    def _call_log(self) -> None:
        """Have the log come for what is settled, within milliseconds. Without the lock."""
        if self._done:
            self._called = True  # before: it may come at once
            try:
                self._log.collect(self._bring_done)
            except BaseException:
                self._called = False
                raise

    def _bring_done(self) -> list[tuple[Lane, Settled]]:
        """Return what is settled. Called by the writer, as part of a batch."""
        with self._lock:
            done, self._done, self._called = self._done, [], False
        return done

    def settle_one(self, delivery: Any, wait: bool) -> None:
        """Every delivery of a stream is of a batch."""
        raise NotImplementedError

    return_one = extend_one = settle_one

    def join_settles(self) -> Request | None:
        """Return what to wait for until every settle so far is synced; None where nothing is logged."""
        lanes = [part.lane for part in self.parts if part.lane is not None]
        try:
            return self._log.collect(self._bring_done) if lanes else None
        except BrokerFailed as error:
            raise in_doubt(error) from error

    def return_batch(self, batch: Any, requeue: bool, delay_s: float) -> None:
        """Have what is left of a batch again, in its place; with `requeue=False` settle it, for nobody wants it."""
        if requeue:
            shelter(lambda: self._return_batch(batch, delay_s))
        else:
            self.settle_batch(batch, False)

    def _return_batch(self, batch: Any, delay_s: float) -> None:
        with self._line:
            if self._check_held(batch):
                self._return(batch, delay_s, repeated=True)

    def return_part(self, batch: Any, index: int, requeue: bool, delay_s: float) -> None:
        """Have one message of a batch again."""
        if requeue:
            shelter(lambda: self._return_part(batch, index, delay_s))
        else:
            self.settle_part(batch, index, False)

    def _return_part(self, batch: Any, index: int, delay_s: float) -> None:
        with self._line:
            if index in batch.taken or not self._check_held(batch, whole=False):
                return
            batch.check_unsettled(index)
            self._put_back(batch, [batch.share_at(index)], delay_s, repeated=True)
            batch.note_settled([index])
            if not batch.unsettled:
                self._drop(batch, 0)
            self._give_back_unshown(_root(batch.taker))  # what comes back comes before what is new
            self._line.notify_first()

    @sheltered
    def extend_batch(self, batch: Any, seconds: float) -> None:
        """Let a batch be held longer, never shorter."""
        with self._line:
            until = self._held[batch] if self._check_held(batch) else None
            if until is not None:
                self._lease(batch, max(until, self._monotonic() + seconds))

    @sheltered
    def release(self, batch: StreamDeliveries) -> None:
        """Put back what was never shown to anybody, as it was."""
        with self._line:
            if batch in self._held:
                self._return(batch, 0.0, repeated=False)

    @sheltered
    def begin_leaving(self, held: list[Any]) -> Leaving:
        """Take deliveries, or batches, that are settled in one commit with something else."""
        leaving: list[tuple[StreamDeliveries, list[int] | None]] = []
        with self._line:
            for one in held:
                batch: StreamDeliveries = one if isinstance(one, StreamDeliveries) else one._settler
                position = None if batch is one else batch._position(one.sequence)
                if not self._check_held(batch):
                    raise AlreadySettled(f"{one!r} was taken back before: the subscription went elsewhere")
                if position is not None:
                    batch.check_unsettled(position)
                leaving.append((batch, None if position is None else [position]))
            for batch, _ in leaving:
                self._held[batch] = None  # its lease does not run out while the commit waits for room
            return Leaving(self, leaving)

    @sheltered
    def check_leaving(self, held: list[tuple[StreamDeliveries, list[int] | None]]) -> None:
        """Refuse what went back while its commit waited for room; from here on nobody else gets it."""
        with self._line:
            for batch, positions in held:
                if not self._check_held(batch):
                    raise AlreadySettled(f"deliveries of stream {self.name!r} went back before their commit")
                for position in positions or ():
                    batch.check_unsettled(position)
            for batch, _ in held:
                batch.leaving += 1

    @sheltered
    def left(self, held: list[tuple[StreamDeliveries, list[int] | None]], checked: bool) -> None:
        """Forget what was settled in a commit."""
        with self._line:
            for batch, positions in held:
                if batch not in self._held:
                    continue
                if positions is None:
                    self._drop(batch, len(batch) - len(batch.settled or ()))
                for position in positions or ():
                    if batch.settled is not None and position not in batch.settled:
                        self._settle_index(batch, position)
        self.stays(held, checked)

    @sheltered
    def stays(self, held: list[tuple[StreamDeliveries, list[int] | None]], checked: bool) -> None:
        """Whoever held these holds them still, as long as from now on; nobody, if he has gone meanwhile."""
        with self._line:
            for batch, _ in held:
                batch.leaving -= checked
                if batch not in self._held or batch.leaving:
                    continue
                if batch.member in self.members:
                    self._lease(batch, None if self.ack_timeout_s is None else self._monotonic() + self.ack_timeout_s)
                else:
                    self._return(batch, 0.0, repeated=True)
            self._line.notify_all()

    def shares(self, ledger: Ledger) -> bool:
        """Tell whether it is of the broker that has this ledger."""
        return self._room.ledger is ledger

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything. Takes no lock: another thread may have held it."""
        self.ended = ForkedProcess
        self._lock = lock
        self._line = lock

    def _check_held(self, batch: StreamDeliveries, *, whole: bool = True) -> bool:
        """Tell whether a batch can be settled; False if that means nothing any more.

        Raises:
            AlreadySettled: it was settled, or taken back. BrokerClosed, StreamDeleted.
        """
        if batch in self._held:
            return True
        if not batch.total or (whole and batch.taken):
            return False
        if self.ended is StreamDeleted:
            return False
        if self.ended is not None:
            self.check_open()
        raise AlreadySettled(f"this batch of stream {self.name!r} was settled, or went back, before")

    def _settle_index(self, batch: StreamDeliveries, index: int) -> None:
        batch.note_settled([index])
        self._unsettled -= 1
        self._acked += 1
        if not batch.unsettled:
            self._drop(batch, 0)
        else:
            self._feed()

    def _drop(self, batch: StreamDeliveries, acked: int) -> None:
        """Let a batch go of which nothing is left. Under the lock."""
        del self._held[batch]
        self._ahead.pop(batch, None)
        batch.settled = None
        self._unsettled -= acked
        self._acked += acked
        self._room.let_go(batch.charged)
        self._feed()

    def _feed(self) -> None:
        """There is more room than before: have those look who found none. Under the lock."""
        if self._starved:
            self._starved = False
            self._line.notify_all()

    def _return(self, batch: StreamDeliveries, delay_s: float, *, repeated: bool) -> None:
        """Put what is left of a batch back in its place. Under the lock."""
        shown = batch.left_shares(0, batch.shown) if repeated or batch.shown is not None else []
        ahead = batch.left_shares(batch.shown or 0) if not repeated or batch.shown is not None else []
        self._put_back(batch, shown, delay_s, repeated=True)
        self._put_back(batch, ahead, 0.0, repeated=False)
        self._drop(batch, 0)
        self._line.notify_first()

    def _put_back(self, batch: StreamDeliveries, shares: list[Share], delay_s: float, *, repeated: bool) -> None:
        """Put a part of a batch back in its place; with `repeated`, somebody has seen it. Under the lock."""
        for part, piece, marks in shares:
            share = Share(part, piece, marks + ONE_ATTEMPT if repeated else marks)
            count = len(piece.records)
            self._unsettled -= count
            batch.charged -= share.charged
            if repeated:
                self._redelivered += count
            else:
                self._delivered -= count
            if delay_s:
                insort(self._later, (self._monotonic() + delay_s, self._next_number(), share))
            else:
                self._add_again(share)

    def _add_again(self, share: Share) -> None:
        insort(self._again, (share.piece.start, self._next_number(), share))
        self._again_count += len(share.piece.records)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _expire(self, now: float) -> None:
        """Take back what is due: leases that ran out, and what was to come again later. Under the lock."""
        while self._later and self._later[0][0] <= now:
            self._add_again(self._later.pop(0)[2])
        if now >= self._lease_at:
            for batch in [batch for batch, until in self._held.items() if until is not None and until <= now]:
                self._return(batch, 0.0, repeated=True)
            self._lease_at = min((until for until in self._held.values() if until is not None), default=math.inf)

    # Where it is -----------------------------------------------------------------------------------------------------

    @sheltered
    def tick(self) -> None:
        """What time does, also where nobody gets: leases run out, and what nobody wants is settled."""
        if not self._log.failed:
            self._call_log()  # who was interrupted has perhaps not
        with self._line:
            if self.ended is not None or not self.members:
                return
            before = len(self._again)
            self._expire(self._monotonic())
            if len(self._again) > before:
                self._line.notify_first()
            idle = not self._held and not self._again and not self._later
            settles: list[tuple[Lane, list[Settled]]] = []
            for part in self.parts if idle else ():
                place = part.clear()
                if part.lane is not None and place is not None and place > part.covered:
                    settles.append((part.lane, [Settled(part.covered, place, 0, 0)]))
                    part.covered = place
        if settles:
            self._log.settle_all(settles)

    @sheltered
    def positions(self) -> list[int]:
        """Return the next offset of each partition that is to be delivered."""
        with self._line:
            return [offset_of(self._position(part)) for part in self.parts]

    def _position(self, part: Part) -> int:
        if not self.members and part.lane is not None:
            return part.lane.row.floor
        waiting = [share.piece.sequences[0] for _, _, share in (*self._again, *self._later) if share.part is part]
        ready = part.first_ready()
        if ready is not None:
            waiting.append(ready)
        for batch in self._ahead:
            waiting += [share.piece.sequences[0] for share in batch.left_shares(batch.shown or 0) if share.part is part]
        return min(waiting, default=part.unread())

    @sheltered
    def lag(self) -> int:
        """Return how many messages it is behind, of all topics; see `Subscription.lag`."""
        with self._line:
            came_back = sum(share.piece.end - share.piece.sequences[0] for _, _, share in (*self._again, *self._later))
            unshown = sum(share.piece.end - share.piece.start for share in self._unshown())
            return came_back + unshown + sum(map(Part.lag, self.parts))

    def _unshown(self) -> list[Share]:
        """Return what iterations have read ahead and not shown. Under the lock."""
        return [share for batch in self._ahead for share in batch.left_shares(batch.shown or 0)]

    @sheltered
    def matching(self) -> int:
        """Return how many messages it is behind of those its filter wants; see `Subscription.stats`."""
        with self._line:
            known = sum(len(share.piece.records) for _, _, share in (*self._again, *self._later))
            known += sum(len(share.piece.records) for share in self._unshown())
            known += sum(part.ready for part in self.parts)
            spans = [(part.unread(), part.partition.next) for part in self.parts]
        return known + count_matching(self._log, self.stream, self.owner, spans, self.interest.filter)

    @sheltered
    def stats(self, *, matching: bool = False) -> SubscriptionStats:
        """Return a snapshot; see `Subscription.stats`."""
        lanes = [part.lane for part in self.parts]
        return SubscriptionStats(
            stream=self.name,
            name=self.title,
            filter=self.interest.filter,
            group=self.is_group,
            members=len(self.members),
            positions=self.positions(),
            committed=[offset_of(lane.row.floor) for lane in lanes if lane is not None] or None,
            lag_messages=self.lag(),
            matching_messages=self.matching() if matching else None,
            unsettled_messages=self._unsettled,
            delivered_total=self._delivered,
            acked_total=self._acked,
            redelivered_total=self._redelivered,
            gap_total=self._missed,
        )

    @sheltered
    def seek(self, member: Any, positions: dict[int, int]) -> None:
        """Go on at these sequences, by partition; what is held of those is not settled any more.

        Cost: durable, a commit.
        """
        moving = False
        try:
            with self._line:
                self._wait_until_moved()
                self.check_open()
                if member not in self.members:
                    raise InvalidArgument("the subscription is closed: subscribe again")
                moved = [(self.parts[number], place) for number, place in positions.items()]
                for part, place in moved:
                    self._leave_place(part, place)
                moving = self._moving = True
            self._call_log()
            lanes = [(part.lane, place) for part, place in moved if part.lane is not None]
            if lanes:
                self._move(lanes)
        finally:
            if moving:
                with self._line:
                    self._moving = False
                    self._line.notify_all()

    def _wait_until_moved(self) -> None:
        while self._moving:
            self._line.wait(LOOK_S)

    def _leave_place(self, part: Part, place: int) -> None:
        """Take back what is held of one partition, and read on there from somewhere else. Under the lock."""
        waiting = [share for _, _, share in (*self._again, *self._later) if share.part is part]
        freed = part.charged + sum(share.charged for share in waiting)
        self._again = [entry for entry in self._again if entry[2].part is not part]
        self._again_count = sum(len(share.piece.records) for _, _, share in self._again)
        self._later = [entry for entry in self._later if entry[2].part is not part]
        for batch in list(self._held):
            taken = batch.take_part(part)
            self._unsettled -= len(taken)
            if batch.settled is not None and not batch.unsettled:
                self._drop(batch, 0)
        part.restart(place)
        part.skips, part.doubtful = [], max(part.doubtful, part.seen)
        self._room.let_go(freed)

    def _move(self, moved: list[tuple[Lane, int]]) -> None:
        """Write where a durable cursor is now, after what was settled before."""
        self._log.drain()
        before = [lane.row for lane, _ in moved]

        def write(txn: Any) -> None:
            for lane, place in moved:
                lane.row = Row(next=max(lane.row.next, place), floor=place)
                clear_marks(txn, lane.owner, lane.lane)

        try:
            self._log.commit(self._log.write(write, [lane for lane, _ in moved]))
        except BaseException:
            for (lane, _), row in zip(moved, before, strict=True):
                lane.row = row
            raise

    def __repr__(self) -> str:
        return f"<Cursor {self.title!r} of stream {self.name!r}>"


def _root(taker: object) -> object:
    """Return the thread or task behind a taker: an iteration has a name of its own in it."""
    return taker[0] if isinstance(taker, tuple) else taker


def _cut(share: Share, most: int) -> tuple[Share, Share | None]:
    """Return at most so many messages of a share, and the rest."""
    count = len(share.piece.records)
    if count <= most:
        return share, None
    return share._replace(piece=share.piece.part(0, most)), share._replace(piece=share.piece.part(most, count))
