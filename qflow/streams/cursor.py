"""The cursor of a subscription: its position, and the messages it holds. The members of a group share one.

A cursor has a *part* for each partition. A part reads ahead into a buffer, from the live tail or the log; members take
messages from the buffer. Messages that they settle go to the log as ranges of sequences: a durable cursor has rows and
marks there, as a queue has. Messages that they do not settle go back to their places, to be delivered again.

A part is *live* when it has read everything there is. From then on the feed of its filter has the sequences of commits
that hold matching messages, and it reads nothing else. It becomes live under the partition's lock, so that none is
missed.

Three objects share the cursor's lock: `Held` owns what is held and what came back, `ReadAhead` what was read and not
taken, `Positions` where the cursor is. `Claims` is what deliveries call; the cursor itself owns its members' gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qflow.errors import ForkedProcess, GapError, InvalidArgument, QflowError, TooManyUnsettled
from qflow.importing import importing
from qflow.memory.line import WORK, Line, Wake, Watcher
from qflow.memory.waiting import StraightLock, attend, sheltered
from qflow.message import offset_of
from qflow.named_tuples import NamedTuple
from qflow.storage.log.transaction_log import Lane
from qflow.streams.batches import StreamBatch
from qflow.streams.claims import Claims
from qflow.streams.deliveries import root_of
from qflow.streams.feeds import Feed, Feeds
from qflow.streams.held import Held
from qflow.streams.history import History
from qflow.streams.interest import Interest
from qflow.streams.part import Part
from qflow.streams.positions import Positions
from qflow.streams.read_ahead import ReadAhead
from qflow.streams.room import HELD_BYTES
from qflow.streams.shared import Shared

if TYPE_CHECKING:
    from qflow.stats import SubscriptionStats

MOST_UNSETTLED = 65_536
"""Messages that the members of a cursor may hold; this bounds the ranges settled out of order."""
LOOK_S = 0.05
"""Seconds after which a get that waits for memory looks again; it is not woken for what others give back."""


class Kept(NamedTuple):
    """A durable cursor's identity in the log."""

    title: str
    owner: int
    group: bool
    lanes: list[Lane]


class Getting:
    """One call of get: `Cursor.try_get` is called with it until it is done. Only its cursor changes it."""

    __slots__ = (
        "ahead", "batch", "deadline", "follow", "gap", "given_up", "is_full", "is_over", "member", "most", "number",
        "reserved", "skip_gaps", "taker", "untold", "watcher",
    )  # fmt: skip

    def __init__(
        self,
        member: Any,
        most: int,
        deadline: float | None,
        taker: object,
        *,
        follow: bool,
        skip_gaps: bool,
        ahead: bool,
    ) -> None:
        self.batch: StreamBatch | None = None
        """The messages it got; None at the time-out, or at the end of the stream with `follow=False`."""
        self.gap: GapError | None = None
        """What it is to raise instead: messages that were next are gone. `untold`: where that goes if it does not."""
        self.untold: list[GapError] = []
        self.member = member
        self.most = most
        self.deadline = deadline
        self.taker = taker
        """The thread or task that gets."""
        self.follow = follow
        self.skip_gaps = skip_gaps
        self.given_up = False
        self.is_over = False
        """All of that was done: a handler that raises may come in its middle."""
        self.ahead = ahead
        """It is for an iteration, which returns one message after the other."""
        self.is_full = False
        """Nothing can be got before something is acked."""
        self.reserved = 0
        """Bytes that it has, and has nothing in yet."""
        self.number: int | None = None
        """Its place in the line of waiting gets."""
        self.watcher: Watcher | None = None


class Cursor:
    """See the module. Thread-safe."""

    def __init__(
        self, history: History, interest: Interest, shared: Shared, starts: list[int], kept: Kept | None = None
    ) -> None:
        """`starts`: the first sequence to deliver, by partition."""
        self.name = history.name
        self.interest = interest
        self.title = None if kept is None else kept.title
        self.owner = 0 if kept is None else kept.owner
        self.is_group = kept is not None and kept.group
        self.lanes = [] if kept is None else kept.lanes
        """The lanes of the log that record what is settled, by partition."""
        self._readers: Feeds = history.home.readers
        self._feed = Feed(len(history.partitions))
        self.parts = [
            Part(partition, start, self.lanes[partition.number] if self.lanes else None, hints)
            for partition, start, hints in zip(history.partitions, starts, self._feed.hints, strict=True)
        ]
        self._log = shared.log
        self._room = shared.room
        self._monotonic = shared.monotonic
        self._lock = StraightLock()
        """Taken before the locks of partitions, of the memory of streams, and of the log."""
        self._line = Line()
        self._waiting = 0
        """Gets that look for messages now: raised before they look, so that `wake` can ask without the lock."""
        self.held = Held(self.name, self.owner, self._lock, self._line, shared)
        self.claims = Claims(self.held, shared.log, self.lanes)
        self.place = Positions(history, interest.filter, self.parts, self.claims, shared)
        self._ahead = ReadAhead(history, interest, self.parts, shared.room, self._lock, self._line)

    @property
    def members(self) -> dict[Any, None]:
        """Subscriptions that have it open."""
        return self.held.members

    @property
    def ended(self) -> type[QflowError] | None:
        """The error that gets raise since the cursor ended; None = it has not."""
        return self.held.ended

    # Members -------------------------------------------------------------------------------------------------------

    @sheltered
    def join(self, member: Any) -> None:
        """Add a member."""
        with self._lock:
            held = self.held
            held.check_open()
            if not held.members:
                self._feed = self._readers.join(self.interest.filter, self, len(self.parts))
                for part, hints in zip(self.parts, self._feed.hints, strict=True):
                    part.follow(hints)
            held.members[member] = None

    @sheltered
    def leave(self, member: Any) -> bool:
        """Remove a member; what it holds goes back. Returns whether it was the last."""
        held = self.held
        if not self._log.failed:
            self.claims.call_log()
        with self._lock:
            if member not in held.members:
                return False
            held.put_back_all(member)
            del held.members[member]
            if held.members:
                self._line.notify_all()
                return False
            self._withdraw()
            self._line.notify_all()
            return True

    def _withdraw(self) -> None:
        """Forget what was read ahead, as there are no members any more."""
        self._readers.leave(self.interest.filter, self)
        floors = [part.position if part.lane is None else part.lane.row.floor for part in self.parts]
        self._room.let_go(self._ahead.restart(floors) + self.held.forget())

    @sheltered
    def end(self, error: type[QflowError]) -> None:
        """End the cursor; waiting gets raise the error."""
        held = self.held
        if not self._log.failed:
            self.claims.call_log()
        with self._lock:
            if held.ended is None:
                held.ended = error
                if held.members:
                    self._withdraw()
                held.members = {}
            self._line.notify_all()

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything. Takes no lock: another thread may have held it."""
        self.held.ended = ForkedProcess
        self._lock = self.held.lock = lock

    # Reading ----------------------------------------------------------------------------------------------------

    def deadline(self, timeout: float | None) -> float | None:
        """Return when a get that begins now times out, on the monotonic clock."""
        return None if timeout is None else self._monotonic() + timeout

    def get(self, getting: Getting) -> StreamBatch | None:
        """Return messages as soon as there are any; None at the time-out, or at the end with `follow=False`."""
        attend(lambda wake: self.try_get(getting, wake, may_work=True), lambda: self.give_up_get(getting))
        if getting.gap is not None:  # looked at here: where a function begins, a handler may raise
            raise getting.gap
        return getting.batch

    def try_get(self, getting: Getting, wake: Wake | None, may_work: bool) -> float | None:
        """A step of a get: set `getting.batch` or `getting.gap`, or register `wake` to be called.

        Returns:
            None: the get is done: whoever waits for it raises the gap, or returns the batch. Else see `line`; without
            `wake`, nothing is registered.

        Raises:
            As `Subscription.get`; call `give_up_get` then.
        """
        with self._lock:
            self._unwatch(getting)
            if getting.given_up or getting.batch is not None or getting.gap is not None:
                return None
            self._waiting += 1
            waiting = self._feed.waiting
            waiting[self] = None  # before it looks: what comes after that wakes it
            try:
                found = self._step(getting, may_work=may_work)
                if found == WORK:
                    return WORK
                if isinstance(found, float):
                    if getting.deadline is not None:
                        left = getting.deadline - self._monotonic()
                        if self._ahead.is_reading or self.place.moving:  # by another thread: as if it did so itself
                            left = max(left, LOOK_S)
                        found = min(found, left)
                    if found <= 0 and getting.is_full:
                        raise self._too_many()
                    if found > 0 and not getting.given_up:
                        if wake is not None:
                            getting.watcher = self._line.watch(wake, getting.number)
                            getting.number = getting.watcher.number
                        return found
                elif found is not None and getting.given_up:  # given up while this thread was reading
                    self.held.put_back(found, is_seen=False)
                else:
                    getting.batch = found
            finally:
                self._waiting -= 1
                if not (self._waiting or self._line.watching):
                    waiting.pop(self, None)
            if self._line.watching and (self.held.returned or self._ahead.is_worth_a_look):
                self._line.notify()
            return None

    @sheltered
    def give_up_get(self, getting: Getting) -> None:
        """End a get: what it has goes back uncounted, and a wake-up it had goes to the next one. Twice is fine."""
        with self._lock:
            if getting.is_over:
                return
            getting.given_up = True
            self._ahead.give_back(getting)
            self._unwatch(getting)
            if getting.batch is not None:
                self.held.put_back(getting.batch, is_seen=False)
            untold, gap = getting.untold, getting.gap
            if gap is not None:
                untold[:0] = (gap,)  # no call, so that a second time finds it there, and nothing here
                getting.gap = None
            self._line.notify()
            getting.is_over = True

    def _unwatch(self, getting: Getting) -> None:
        if getting.watcher is not None:
            self._line.unwatch(getting.watcher)
            getting.watcher = None

    def _step(self, getting: Getting, *, may_work: bool) -> StreamBatch | float | None:
        """Return a batch; None at the end; or the most seconds to wait. Under the lock, which a read lets go."""
        held, ahead = self.held, self._ahead
        returned = held.returned
        taker = root_of(getting.taker)
        held.put_back_unshown(taker)
        held.give_memory_back()
        while True:
            if getting.given_up:  # while this thread was reading: what `taker` has got is another's by now
                return None
            held.check_open()
            if getting.member not in held.members:
                raise InvalidArgument("the subscription is closed: subscribe again")
            if self.place.moving:
                return LOOK_S  # the thread that moves it notifies the line when done
            now = self._monotonic()
            held.expire(now)
            if not self.owner:
                held.settle_previous(taker)
            untold = ahead.untold(getting.skip_gaps)
            if untold:
                if not getting.given_up:  # while this thread was reading
                    getting.untold = untold
                    getting.gap = untold[0]  # no call, so that an interrupt finds it here, or there
                    del untold[0]
                return None
            room = MOST_UNSETTLED - held.unsettled
            ready = ahead.ready + returned.messages
            wanted = min(getting.most, room)
            reading = ahead.part_to_read() if ready < wanted and not ahead.is_full else None
            if reading is not None:
                amount = ahead.room_for(getting, wanted - ready, least=not (ready or held.batches))
                if amount and not may_work and not ahead.is_in_memory(reading):
                    ahead.give_back(getting)
                    return WORK
                if amount:
                    most = max(wanted - ready, 256 if getting.most == 1 else 1)
                    ahead.fetch(reading, getting, most, held.check_open)
                    continue
            if ready and room > 0 and self._room.hold(HELD_BYTES, least=not held.batches, getting=getting):
                return self._take(getting, wanted)
            if ahead.is_reading:
                return 1.0  # the reading thread notifies the line when done
            lacks_memory = reading is not None or (ready > 0 and room > 0)
            is_short = lacks_memory or room <= 0
            if not (is_short or getting.follow or returned.later or ahead.has_more):
                return None
            getting.is_full = bool(held.batches) and is_short
            if getting.is_full and not getting.follow:
                raise self._too_many()
            held.starved |= is_short
            return held.patience(now, LOOK_S if lacks_memory else None)

    def _take(self, getting: Getting, most: int) -> StreamBatch:
        """Return a batch of what is ready: first what came back, then what was read ahead. Under the lock."""
        held = self.held
        shares = held.returned.take(most) if held.returned.messages else []
        shares += self._ahead.take(most - sum([len(share.piece.records) for share in shares]))
        charged = sum([share.charged for share in shares]) + HELD_BYTES
        batch = StreamBatch(self.claims, shares, getting.member, charged, getting.taker)
        if getting.ahead:
            batch.shown, batch.lets_go_at = 0, 0
            held.ahead[batch] = held.returned.came
        getting.reserved = 0  # the batch has it
        held.give(batch)
        return batch

    def _too_many(self) -> TooManyUnsettled:
        return TooManyUnsettled(
            f"{self.held.unsettled} messages of stream {self.name!r} are held and not settled, as many as may be, or "
            "as find room in memory: ack some of them before you get more"
        )

    def wake(self) -> None:
        """Wake the first waiting get. Called by the writer, without a lock."""
        if self._waiting or self._line.watching:
            with self._lock:
                self._line.notify()

    # Upkeep ----------------------------------------------------------------------------------------------------------

    @sheltered
    def tick(self) -> None:
        """Once a second: end leases, and settle messages that were passed over."""
        held = self.held
        if not self._log.failed:
            self.claims.call_log()  # a thread that was interrupted may not have
        with self._lock:
            if held.ended is not None or not held.members:
                return
            held.give_memory_back()
            before = held.returned.messages
            held.expire(self._monotonic())
            if held.returned.messages > before:
                self._line.notify()
            settles = [] if held.batches or held.returned else self.place.pass_over()
        if settles:
            self._log.settle_all(settles)

    @sheltered
    def stats(self, *, matching: bool = False) -> SubscriptionStats:
        """Return a snapshot; see `Subscription.stats`."""
        with importing:
            from qflow.stats import SubscriptionStats

        held, place = self.held, self.place
        return SubscriptionStats(
            stream=self.name,
            name=self.title,
            filter=self.interest.filter,
            group=self.is_group,
            members=len(held.members),
            positions=place.positions(),
            committed=[offset_of(lane.row.floor) for lane in self.lanes] or None,
            lag_messages=place.lag(),
            matching_messages=place.matching() if matching else None,
            unsettled_messages=held.unsettled,
            delivered_total=held.delivered_total,
            acked_total=held.acked_total,
            redelivered_total=held.redelivered_total,
            gap_total=self._ahead.missed,
        )

    def __repr__(self) -> str:
        return f"<Cursor {self.title!r} of stream {self.name!r}>"
